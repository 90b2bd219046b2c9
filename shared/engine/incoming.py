"""Requests that come from other instances, with the blocks that were reserved for them (reservations.py); the other end:
outgoing.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import ceil

from shared.engine.handover import HASH_BYTES
from shared.engine.late_prompts import first_token_s
from shared.engine.memory.allocator import Allocator
from shared.engine.model_queue import ModelQueue
from shared.engine.requests import RequestTable
from shared.engine.reservations import Reservations, Reserved
from shared.engine.sequence import Sequence, State
from shared.messages.migration import Commit, SequenceProgress
from shared.messages.requests import ErrorCode, ErrorInfo
from shared.messages.timeline import EventKind
from shared.policies.rebalancing import LEAST_SOONER_S


class Incoming:
    def __init__(
        self,
        requests: RequestTable,
        memory: Allocator,
        reservations: Reservations,
        steps_s: Callable[[float], float],
    ) -> None:
        """`steps_s`: of `Steps.online_wait_s`."""
        self._requests = requests
        self._memory = memory
        self._reservations = reservations
        self._steps_s = steps_s

    def adopt(self, commit: Commit, now: float) -> ErrorInfo | None:
        """The request is this instance's: with its KV it runs in the next step, without it waits. After a refusal the
        reservation is as before: OVERLOADED (no room for the rest of its prompt, or to begin soon), CONFLICT (held here in
        that epoch or a later one: whoever offers it lost it without knowing), GONE, TOO_LONG, BAD_REQUEST."""
        request = commit.request
        held = self._requests.held(request.request_id)
        if held is not None and held.request.epoch >= request.epoch:
            return ErrorInfo(ErrorCode.CONFLICT, f"held here in epoch {held.request.epoch}")
        queue = self._memory.queues.get(request.model)
        if queue is None:
            return ErrorInfo(ErrorCode.GONE, f"model {request.model!r} is not loaded on this instance", "model")
        if refused := self._requests.misfit(request, queue):
            return refused
        sequence = self._requests.new_sequence(request, queue, now)
        reserved = self._reservations.of(commit.migration_id)
        if refused := self._refused_reserved(commit, sequence, reserved, queue):
            return refused
        if not commit.num_blocks:
            if refused := self._no_queue_for(sequence) or self._not_sooner(commit, sequence, now):
                return refused
            self._reservations.release(commit.migration_id)
        elif commit.on_host:
            assert reserved is not None
            self._take_checkpoint(sequence, reserved, commit.num_blocks, queue)
            self._reservations.take(commit.migration_id)
        else:
            assert reserved is not None
            if refused := self._take_blocks(sequence, reserved, commit.progress.num_computed, queue, now):
                return refused
            self._reservations.take(commit.migration_id)
        if held is not None:
            self._requests.drop(held, now)
        self._continue(sequence, commit.progress, queue, now)
        numbers = (float(commit.progress.num_computed),)
        self._memory.events.add(sequence, EventKind.MOVED, now, numbers=numbers, place=commit.source_id)
        return None

    def _refused_reserved(
        self, commit: Commit, sequence: Sequence, reserved: Reserved | None, queue: ModelQueue
    ) -> ErrorInfo | None:
        """Whether what was reserved is what the request needs."""
        page, num_computed, num_blocks = sequence.block_size, commit.progress.num_computed, commit.num_blocks
        wanted = sequence.num_prompt + commit.request.sampling.max_tokens
        if wanted > queue.shape.max_model_len:
            message = f"{wanted} tokens at most; here {queue.name!r} takes {queue.shape.max_model_len}"
            return ErrorInfo(ErrorCode.TOO_LONG, message, "max_tokens")
        if sequence.num_tokens >= sequence.max_total:
            return ErrorInfo(ErrorCode.BAD_REQUEST, "nothing is left to generate", "prior")
        if num_blocks and reserved is None:
            return ErrorInfo(ErrorCode.GONE, "what was reserved for this migration is not here any more")
        if commit.on_host or not num_blocks:
            is_right = num_computed == 0 and num_blocks * page <= sequence.num_tokens
        else:
            is_right = 0 < num_computed < sequence.num_tokens and num_computed <= num_blocks * page
        if num_blocks and reserved is not None:
            same = (reserved.model, reserved.on_host, reserved.priority_class) == (
                queue.name,
                commit.on_host,
                sequence.priority_class,
            )
            num_hashes = min(len(reserved.hashes) // HASH_BYTES, sequence.num_tokens // page)
            hashes = b"".join(sequence.extend_hashes(num_hashes, page, queue.root))
            is_right = is_right and same and num_blocks <= len(reserved.blocks) and hashes == reserved.hashes
        return None if is_right else ErrorInfo(ErrorCode.BAD_REQUEST, "not the sequence that was announced")

    def _no_queue_for(self, sequence: Sequence) -> ErrorInfo | None:
        """An online request that waits moves only to where there is room for it, after those that wait there already."""
        if refused := self._requests.queue_full(sequence.is_online):
            return refused
        memory, shape = self._memory, self._memory.queues[sequence.model].shape
        before = [
            s
            for queue in memory.queues.values()
            for of_class in queue.waiting[: sequence.priority_class + 1]
            for s in of_class
        ]
        wanted = Counter[str]()
        for other in before:
            wanted[other.model] += memory.num_wanted_blocks(other)
        merged = sum(
            ceil(num_blocks / memory.queues[name].shape.blocks_per_merged)
            for name, num_blocks in wanted.items()
            if name != sequence.model
        )
        needed = memory.num_wanted_blocks(sequence) + wanted[sequence.model] + merged * shape.blocks_per_merged
        has_row = memory.num_free_rows + memory.num_offline_rows() > len(before)
        if not sequence.is_online or (has_row and memory.could_have(sequence.model, needed)):
            return None
        return ErrorInfo(ErrorCode.OVERLOADED, "it would wait here too")

    def _not_sooner(self, commit: Commit, sequence: Sequence, now: float) -> ErrorInfo | None:
        """One that moves because its prompt waits stays where it has its first token as soon: since this instance was
        chosen, others may have come here, and blocks may have left the prefix cache."""
        if commit.starts_s < 0:
            return None
        here_s = self._steps_s(now) + sum(queue.prompts_s() for queue in self._memory.queues.values())
        there_s, first_s = commit.starts_s, first_token_s(self._memory, sequence, here_s)
        if commit.first_token_s >= 0 and first_s is not None:
            here_s, there_s = first_s, commit.first_token_s
        if here_s + LEAST_SOONER_S <= there_s:
            return None
        return ErrorInfo(ErrorCode.OVERLOADED, "its first token would come no sooner here")

    def _take_checkpoint(self, sequence: Sequence, reserved: Reserved, num_blocks: int, queue: ModelQueue) -> None:
        pool, blocks = self._memory.pool_of(True), reserved.blocks[:num_blocks]
        pool.release(queue.name, reserved.blocks[num_blocks:])
        pool.register(queue.name, blocks, sequence.extend_hashes(num_blocks, sequence.block_size, queue.root))
        sequence.host_blocks = blocks

    def _take_blocks(
        self, sequence: Sequence, reserved: Reserved, num_computed: int, queue: ModelQueue, now: float
    ) -> ErrorInfo | None:
        page, pool = sequence.block_size, self._memory.pool
        missing = -(-sequence.total // page) - len(reserved.blocks)
        if missing > 0:
            has_room = pool.num_available(queue.name) >= missing
            if not has_room and (
                not sequence.is_online or not self._memory.make_room_for_incoming(queue.name, missing, now)
            ):
                return ErrorInfo(ErrorCode.OVERLOADED, "no room for the rest of its prompt")
            blocks = pool.allocate(queue.name, missing)
            assert blocks is not None
            reserved.blocks += blocks
        sequence.blocks = reserved.blocks
        sequence.capacity = len(reserved.blocks) * page
        sequence.row = reserved.row
        sequence.num_computed = num_computed
        num_full = num_computed // page
        sequence.next_register = (num_full + 1) * page
        pool.register(queue.name, sequence.blocks[:num_full], sequence.extend_hashes(num_full, page, queue.root))
        return None

    def _continue(self, sequence: Sequence, progress: SequenceProgress, queue: ModelQueue, now: float) -> None:
        """Its life continues as if nothing had happened."""
        if progress.first_token_age_s >= 0:
            sequence.first_token_s = now - progress.first_token_age_s
            sequence.first_total = progress.first_total
        if progress.first_planned_age_s >= 0:
            sequence.first_planned_s = now - progress.first_planned_age_s
        if progress.last_token_age_s >= 0:
            sequence.last_token_s = now - progress.last_token_age_s
        sequence.max_itl_s = progress.max_itl_s
        sequence.submitted_s = now - progress.submitted_age_s
        sequence.last_ran_s = now - progress.last_ran_age_s
        sequence.device_s = progress.device_s
        sequence.service_s = progress.service_s
        sequence.num_cached_tokens = progress.num_cached_tokens
        sequence.num_preemptions = progress.num_preemptions
        sequence.num_recomputed = progress.num_recomputed
        sequence.num_restored_blocks = progress.num_restored_blocks
        sequence.num_suspensions = progress.num_suspensions
        sequence.num_migrations = progress.num_migrations
        sequence.peak_computed = progress.peak_computed
        sequence.moved_s = now
        self._requests.hold(sequence, now)
        self._memory.ordering.import_state(sequence, progress.order_state, now)
        if sequence.row >= 0:
            sequence.state = State.RESTORING
            queue.restored[sequence.number] = sequence
            return
        if sequence.host_blocks:
            blocks, sequence.host_blocks = sequence.host_blocks, []
            self._memory.host.hold(sequence, blocks)
        self._memory.enqueue(sequence, now)
