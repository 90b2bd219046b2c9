"""Requests on their way from other instances: what the destination of a migration calls (the source: departures.py).

reserve     slots for a stage's blocks, which the transport fills
adopt       they and the request are this instance's
release     all is off, or nothing was needed
"""

from __future__ import annotations

from collections import Counter
from math import ceil, inf

import msgspec

from shared.engine.arrivals import HASH_BYTES, Arrival, Arrivals
from shared.engine.departures import Departures
from shared.engine.model_queue import ModelQueue
from shared.engine.moving import Reservation, TakenOut
from shared.engine.planner import Planner
from shared.engine.sequence import Sequence, State
from shared.messages.migration import Commit, PreAllocate, SequenceProgress
from shared.messages.requests import ErrorCode, ErrorInfo, GenerationRequest


def rebased(taken: TakenOut, now: float) -> tuple[GenerationRequest, SequenceProgress]:
    """Request and progress with their durations up to `now`: what a Commit that is sent now holds."""
    request, progress, passed_s = taken.request, taken.progress, now - taken.taken_s

    def age(seconds: float) -> float:
        return seconds + passed_s if seconds >= 0 else seconds

    return (
        msgspec.structs.replace(request, timeout_s=request.timeout_s - passed_s, waited_s=request.waited_s + passed_s),
        msgspec.structs.replace(
            progress,
            first_token_age_s=age(progress.first_token_age_s),
            first_planned_age_s=age(progress.first_planned_age_s),
            submitted_age_s=progress.submitted_age_s + passed_s,
            last_ran_age_s=progress.last_ran_age_s + passed_s,
            last_token_age_s=age(progress.last_token_age_s),
        ),
    )


class Moves(Departures):
    """The middle of the engine, between requests and steps (engine.py)."""

    def __init__(self, planner: Planner, max_waiting: int, move_cooldown_s: float) -> None:
        super().__init__(planner, max_waiting, move_cooldown_s)
        self._arrivals = Arrivals(planner)

    def _has_moves(self, model: str) -> bool:
        """Whether migrations, out or in, still use slots of the model."""
        return self._arrivals.has_model(model) or self._has_departures(model)

    def reserve(self, query: PreAllocate, now: float) -> Reservation | ErrorInfo:
        """Slots for the blocks of a stage, those after the leading ones that are in the prefix cache; with the first stage
        also a row, unless the blocks stay in host memory. The same stage again is answered alike. Offline sequences are
        preempted for online ones; those of a step in flight only when it has returned: the refusal then names a time
        after which to ask again (OVERLOADED with `retry_after_s`). Others: OVERLOADED, TOO_LONG (the model takes fewer
        tokens here), GONE (model or earlier stages), BAD_REQUEST (page size, or not the next block)."""
        return self._arrivals.reserve(query, now)

    def next_wakeup(self) -> float | None:
        wakeup, demand = super().next_wakeup(), self.planner.demand
        return wakeup if demand is None else min(inf if wakeup is None else wakeup, demand.until_s)

    def on_time(self, now: float) -> None:
        super().on_time(now)
        self.planner.serve_demand(now)

    def release(self, migration_id: str) -> None:
        """Frees what is reserved; nobody may write there any more."""
        self._arrivals.release(migration_id)

    def adopt(self, commit: Commit, now: float) -> ErrorInfo | None:
        """The request is this instance's: with its KV it runs in the next step, without it waits. After a refusal the
        reservation is as before: OVERLOADED (no room for the rest of its prompt, or to begin soon), CONFLICT (held here in
        that epoch or a later one: whoever offers it lost it without knowing), GONE, TOO_LONG, BAD_REQUEST."""
        request = commit.request
        held = self._sequences.get(request.request_id)
        if held is not None and held.request.epoch >= request.epoch:
            return ErrorInfo(ErrorCode.CONFLICT, f"held here in epoch {held.request.epoch}")
        queue = self.planner.queues.get(request.model)
        if queue is None:
            return ErrorInfo(ErrorCode.GONE, f"model {request.model!r} is not loaded on this instance", "model")
        if refused := self._misfit(request, queue):
            return refused
        sequence = self._new_sequence(request, queue, now)
        arrival = self._arrivals.of(commit.migration_id)
        if refused := self._refused_arrival(commit, sequence, arrival, queue):
            return refused
        if not commit.num_blocks:
            if refused := self._no_queue_for(sequence):
                return refused
            self._arrivals.release(commit.migration_id)
        elif commit.on_host:
            assert arrival is not None
            self._take_checkpoint(sequence, arrival, commit.num_blocks, queue)
            self._arrivals.take(commit.migration_id)
        else:
            assert arrival is not None
            if refused := self._take_blocks(sequence, arrival, commit.progress.num_computed, queue, now):
                return refused
            self._arrivals.take(commit.migration_id)
        if held is not None:
            self._drop(held)
        self._continue(sequence, commit.progress, queue, now)
        return None

    def _refused_arrival(
        self, commit: Commit, sequence: Sequence, arrival: Arrival | None, queue: ModelQueue
    ) -> ErrorInfo | None:
        """Whether what was reserved is what the request needs."""
        page, num_computed, num_blocks = sequence.page_tokens, commit.progress.num_computed, commit.num_blocks
        wanted = sequence.num_prompt + commit.request.sampling.max_tokens
        if wanted > queue.shape.max_model_len:
            message = f"{wanted} tokens at most; here {queue.name!r} takes {queue.shape.max_model_len}"
            return ErrorInfo(ErrorCode.TOO_LONG, message, "max_tokens")
        if sequence.num_tokens >= sequence.max_total:
            return ErrorInfo(ErrorCode.BAD_REQUEST, "nothing is left to generate", "prior")
        if num_blocks and arrival is None:
            return ErrorInfo(ErrorCode.GONE, "what was reserved for this migration is not here any more")
        if commit.on_host or not num_blocks:
            is_right = num_computed == 0 and num_blocks * page <= sequence.num_tokens
        else:
            is_right = 0 < num_computed < sequence.num_tokens and num_computed <= num_blocks * page
        if num_blocks and arrival is not None:
            same = (arrival.model, arrival.on_host, arrival.rank) == (queue.name, commit.on_host, sequence.rank)
            num_hashes = min(len(arrival.hashes) // HASH_BYTES, sequence.num_tokens // page)
            hashes = b"".join(sequence.extend_hashes(num_hashes, page, queue.root))
            is_right = is_right and same and num_blocks <= len(arrival.slots) and hashes == arrival.hashes
        return None if is_right else ErrorInfo(ErrorCode.BAD_REQUEST, "not the sequence that was announced")

    def _no_queue_for(self, sequence: Sequence) -> ErrorInfo | None:
        """An online request that waits moves only to where there is room for it, after those that wait there already."""
        if refused := self._queue_full(sequence.is_online):
            return refused
        planner, shape = self.planner, self.planner.queues[sequence.model].shape
        before = [
            s for queue in planner.queues.values() for of_rank in queue.waiting[: sequence.rank + 1] for s in of_rank
        ]
        wanted = Counter[str]()
        for other in before:
            wanted[other.model] += planner.num_wanted_slots(other)
        merged = sum(
            ceil(num_slots / planner.queues[name].shape.slots_per_merged)
            for name, num_slots in wanted.items()
            if name != sequence.model
        )
        needed = planner.num_wanted_slots(sequence) + wanted[sequence.model] + merged * shape.slots_per_merged
        has_row = planner.num_free_rows + planner.num_offline_rows() > len(before)
        if not sequence.is_online or (has_row and planner.could_have(sequence.model, needed)):
            return None
        return ErrorInfo(ErrorCode.OVERLOADED, "it would wait here too")

    def _take_checkpoint(self, sequence: Sequence, arrival: Arrival, num_blocks: int, queue: ModelQueue) -> None:
        pool, slots = self.planner.pool_of(True), arrival.slots[:num_blocks]
        pool.release(queue.name, arrival.slots[num_blocks:])
        hashes = sequence.extend_hashes(num_blocks, sequence.page_tokens, queue.root)
        for slot, block_hash in zip(slots, hashes, strict=True):
            pool.register(queue.name, slot, block_hash)
        sequence.host_blocks = slots

    def _take_blocks(
        self, sequence: Sequence, arrival: Arrival, num_computed: int, queue: ModelQueue, now: float
    ) -> ErrorInfo | None:
        page, pool = sequence.page_tokens, self.planner.pool
        missing = -(-sequence.total // page) - len(arrival.slots)
        if missing > 0:
            has_room = pool.num_available(queue.name) >= missing
            if not has_room and (
                not sequence.is_online or not self.planner.make_room_for_arrival(queue.name, missing, now)
            ):
                return ErrorInfo(ErrorCode.OVERLOADED, "no room for the rest of its prompt")
            slots = pool.allocate(queue.name, missing)
            assert slots is not None
            arrival.slots += slots
        sequence.blocks = arrival.slots
        sequence.capacity = len(arrival.slots) * page
        sequence.row = arrival.row
        sequence.num_computed = num_computed
        num_full = num_computed // page
        sequence.next_register = (num_full + 1) * page
        for slot, block_hash in zip(sequence.blocks, sequence.extend_hashes(num_full, page, queue.root), strict=False):
            pool.register(queue.name, slot, block_hash)
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
        sequence.num_cached_tokens = progress.num_cached_tokens
        sequence.num_preemptions = progress.num_preemptions
        sequence.num_recomputed = progress.num_recomputed
        sequence.num_restored_blocks = progress.num_restored_blocks
        sequence.num_suspensions = progress.num_suspensions
        sequence.num_moves = progress.num_moves
        sequence.peak_computed = progress.peak_computed
        sequence.moved_s = now
        self._hold(sequence, now)
        self.planner.ordering.import_state(sequence, progress.order_state, now)
        if sequence.row >= 0:
            sequence.state = State.RESTORING
            queue.restored[sequence.number] = sequence
            return
        if sequence.host_blocks:
            slots, sequence.host_blocks = sequence.host_blocks, []
            self.planner.host.hold(sequence, slots)
        self.planner.enqueue(sequence, now)
