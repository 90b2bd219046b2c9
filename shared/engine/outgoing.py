"""Requests on their way to other instances: what the source of a migration calls.

    candidates
    pin .. unpin                 each stage, while the request goes on
    detach -> effect Detached    then pin_rest, freeze
    release | reattach           at the end; end_migration where it was never detached

A sequence that was detached is LEAVING: nobody plans it or takes its blocks, but a cancel or its deadline ends it, until
`freeze`. Names of requests that are not held, or that were replaced by a later placement meanwhile, change nothing.
"""

from __future__ import annotations

from math import inf

import msgspec

from shared.costs.model import prompt_s
from shared.engine.handover import HASH_BYTES, BackupCandidate, Detached, MigrationCandidate, PinnedBlocks
from shared.engine.late_prompts import first_token_s, late_prompts
from shared.engine.memory.allocator import Allocator
from shared.engine.model_queue import ONLINE_CLASSES
from shared.engine.requests import RequestTable
from shared.engine.sequence import Handover, PriorityClass, Sequence, State
from shared.messages.migration import SequenceProgress
from shared.messages.requests import FinishReason, HeldRequest
from shared.messages.timeline import EventKind
from shared.migration.source import may_migrate
from shared.policies.kv_backup import BackupSettings


class Outgoing:
    def __init__(self, requests: RequestTable, memory: Allocator, migration_cooldown_s: float) -> None:
        self._requests = requests
        self._memory = memory
        self._migration_cooldown_s = migration_cooldown_s
        self.pinned: list[PinnedBlocks] = []
        self._awaited: list[Sequence] = []
        """Taken out, but a step in flight computes them."""
        self._taken: list[tuple[Sequence, Detached]] = []

    def has_model(self, model: str) -> bool:
        """Whether blocks of the model are pinned, or one of its sequences is perhaps another instance's."""
        if any(pinned.model == model for pinned in self.pinned):
            return True
        return any(sequence.handover == Handover.FROZEN for sequence in self._memory.queues[model].leaving.values())

    def candidates(self, now: float, include_offline: bool = False) -> list[MigrationCandidate]:
        """Requests that could leave now, in the order in which they should: online ones that wait, if the first has no room,
        then those that run: lower priority first, then fewer blocks. `include_offline` (to drain): all that
        wait as well, and offline ones after the online ones, those of a suspended step last (`detach` gives it up)."""
        found: list[tuple[tuple[int, ...], Sequence]] = []
        gives_waiting = include_offline or self._memory.stuck_online is not None
        queues = self._memory.queues.values()
        # Normal ones leave for the sake of those of high priority, which do not follow while the last of them cool down.
        keeps_high = not include_offline and any(queue.running[PriorityClass.ONLINE_NORMAL] for queue in queues)
        for queue in queues:
            for priority_class in ONLINE_CLASSES:
                if priority_class != PriorityClass.ONLINE_HIGH or not keeps_high:
                    found += [
                        ((1, -priority_class), s)
                        for s in queue.running[priority_class].values()
                        if s.total < s.max_total
                    ]
                if gives_waiting:
                    found += [((0, priority_class), s) for s in queue.waiting[priority_class]]
            if include_offline:
                found += [((2,), s) for of_class in queue.waiting[len(ONLINE_CLASSES) :] for s in of_class]
                found += [((3,), s) for of_class in queue.running[len(ONLINE_CLASSES) :] for s in of_class.values()]
                found += [((4,), s) for s in queue.suspended.values()]
        candidates = [
            ((*order, candidate.num_blocks, sequence.number), candidate)
            for order, sequence in found
            if self._may_migrate(sequence, now, is_drain=include_offline)
            for candidate in (self._candidate(sequence),)
        ]
        candidates.sort(key=lambda pair: pair[0])
        return [candidate for _, candidate in candidates]

    def late_candidates(self, now: float, steps_s: float) -> list[MigrationCandidate]:
        """Requests of `late_prompts` that could leave now, in that order."""
        return [
            self._candidate(late.sequence, late.starts_s, first_token_s(self._memory, late.sequence, late.starts_s))
            for late in late_prompts(self._memory.queues.values(), steps_s, now)
            if self._may_migrate(late.sequence, now, is_drain=False)
        ]

    def handoff_candidate(self, request_id: str) -> MigrationCandidate | None:
        """A request whose prompt is being computed, or was, and that is to be handed over. It may leave however lately it
        came. None: it does not run, leaves already, or what is to be known of it does not travel."""
        sequence = self._requests.held(request_id)
        if sequence is None or sequence.number not in self._memory.queues[sequence.model].handing_over:
            return None
        is_free = sequence.handover == Handover.NONE and may_migrate(sequence.request.epoch)
        if sequence.state != State.RUNNING or not is_free or sequence.is_spoilt or self._is_scoring(sequence):
            return None
        return self._candidate(sequence)

    def last_chunks(self, request_id: str) -> int | None:
        """Steps in flight that compute the rest of a request's prompt; None: a part of it is in no step yet. A last token
        alone is no part: it is computed as those of the output are."""
        sequence = self._requests.held(request_id)
        if sequence is None:
            return 0
        return sequence.in_flight if sequence.is_in_decode else None

    def rest_of_prompt_s(self, request_id: str) -> float:
        """Predicted time of what is in no step yet of a request's prompt; 0: not known."""
        sequence = self._requests.held(request_id)
        if sequence is None or (cost_model := self._memory.queues[sequence.model].cost_model) is None:
            return 0.0
        start = sequence.num_computed
        return prompt_s(cost_model.prompt_cost, sequence.total - start, start)

    def _may_migrate(self, sequence: Sequence, now: float, *, is_drain: bool) -> bool:
        """A request of unknown length goes on for about as long as it has: with a cooldown that doubles it moves no more
        often than that pays for, whatever the load does. Who drains asks for less."""
        cooldown_s = self._migration_cooldown_s * (1 if is_drain else 2**sequence.num_migrations)
        return (
            sequence.handover == Handover.NONE
            and now - sequence.moved_s >= cooldown_s
            and not sequence.is_spoilt
            and may_migrate(sequence.request.epoch)
            and not self._is_scoring(sequence)
        )

    @staticmethod
    def _is_scoring(sequence: Sequence) -> bool:
        """Whether log-probabilities of its prompt lie here that do not travel; one that waits has them computed again."""
        return sequence.prompt_logprobs is not None and sequence.state != State.WAITING

    @staticmethod
    def _candidate(sequence: Sequence, starts_s: float = -1.0, first_s: float | None = None) -> MigrationCandidate:
        request, is_running = sequence.request, sequence.state == State.RUNNING
        held = HeldRequest(
            request_id=request.request_id,
            gateway_id=request.gateway_id,
            epoch=request.epoch,
            model=request.model,
            num_tokens=sequence.num_tokens,
            running=is_running,
            is_online=sequence.is_online,
        )
        tokens_left = sequence.max_total - sequence.num_tokens
        return MigrationCandidate(
            held,
            request.request_class,
            request.priority,
            is_running,
            sequence.num_moving_blocks,
            tokens_left,
            sequence.num_migrations,
            starts_s,
            -1.0 if first_s is None else first_s,
        )

    def pin(self, request_id: str, first_block: int) -> PinnedBlocks | None:
        """The filled blocks of a running sequence from `first_block` on, perhaps none, and up to one that is being moved
        within the pool; the first call (with 0) marks it as moving. None: it does not run, or was preempted since the first
        call."""
        sequence = self._requests.held(request_id)
        if sequence is None or self._has_lost(sequence) or self._is_scoring(sequence):
            return None
        if (
            sequence.state not in (State.RUNNING, State.LEAVING)
            or sequence.is_spoilt
            or sequence.handover == Handover.FROZEN
        ):
            return None
        if first_block and sequence.handover != Handover.PINNED:
            return None
        sequence.handover = Handover.PINNED
        num_settled = self._memory.compaction.num_settled(sequence, sequence.num_filled)
        return self._pin(sequence, sequence.blocks, first_block, num_settled, False)

    def backup_candidates(self, settings: BackupSettings) -> list[BackupCandidate]:
        """Running requests of which another instance should have copies."""
        return [
            BackupCandidate(
                sequence.request.request_id,
                sequence.request.epoch,
                sequence.model,
                sequence.num_tokens,
                self._memory.compaction.num_settled(sequence, sequence.num_filled),
                sequence.is_online,
            )
            for queue in self._memory.queues.values()
            for of_class in queue.running
            for sequence in of_class.values()
            if not sequence.is_spoilt and settings.is_worth(sequence.num_tokens, is_online=sequence.is_online)
        ]

    def pin_filled(self, request_id: str, first_block: int, max_blocks: int) -> PinnedBlocks | None:
        """Pins like `pin`, of full blocks alone and without marking the sequence as moving; None: it does not run."""
        sequence = self._requests.held(request_id)
        if sequence is None or sequence.state != State.RUNNING or sequence.is_spoilt:
            return None
        num_settled = self._memory.compaction.num_settled(sequence, sequence.num_filled)
        return self._pin(sequence, sequence.blocks, first_block, min(num_settled, first_block + max_blocks), False)

    def _found(self, model: str, hashes: bytes) -> tuple[list[int], bool]:
        """The longest run of the first of these blocks that is found on the device, or in host memory, and whether there."""
        wanted = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
        host, memory = self._memory.host.pool, self._memory
        on_device = [] if model not in memory.queues else memory.pool.find(model, wanted)
        on_host = [] if model not in memory.queues or host is None else host.find(model, wanted)
        return (on_host, True) if len(on_host) > len(on_device) else (on_device, False)

    def num_found(self, model: str, hashes: bytes) -> int:
        """How many of the first of these blocks a prompt would find here, in whatever tier."""
        if model not in self._memory.queues:
            return 0
        wanted = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
        return self._memory.tiers.num_found(model, wanted)

    def pin_found(self, model: str, hashes: bytes) -> PinnedBlocks | None:
        """The first of these blocks, as many as are here; None: there are none, or they are being moved in the pool."""
        blocks, on_host = self._found(model, hashes)
        if not blocks or (not on_host and self._memory.compaction.are_moving(model, blocks)):
            return None
        self._memory.pool_of(on_host).retain(model, blocks)
        pinned = PinnedBlocks(model, on_host, 0, blocks, hashes[: len(blocks) * HASH_BYTES])
        self.pinned.append(pinned)
        return pinned

    @staticmethod
    def _has_lost(sequence: Sequence) -> bool:
        """Tells once that a sequence was preempted while it was moving."""
        if sequence.handover != Handover.LOST:
            return False
        sequence.handover = Handover.NONE
        return True

    def _pin(self, sequence: Sequence, blocks: list[int], first: int, end: int, on_host: bool) -> PinnedBlocks:
        root = self._memory.queues[sequence.model].root
        num_full = min(end, sequence.num_tokens // sequence.block_size)
        hashes = sequence.extend_hashes(num_full, sequence.block_size, root, first)
        pinned = PinnedBlocks(sequence.model, on_host, first, blocks[first:end], b"".join(hashes))
        if pinned.blocks:
            self._memory.pool_of(on_host).retain(sequence.model, pinned.blocks)
            self.pinned.append(pinned)
        return pinned

    def unpin(self, pinned: PinnedBlocks) -> None:
        if pinned in self.pinned:
            self.pinned.remove(pinned)
            self._memory.pool_of(pinned.on_host).release(pinned.model, pinned.blocks)

    def detach(self, request_id: str, now: float) -> bool:
        """Out of the batch (or the queue) when the steps in flight that compute it have returned: the effect `Detached`
        says so, unless it ends in them. False: it is not here any more, was preempted since it was pinned, or is coming
        back from host memory."""
        sequence = self._requests.held(request_id)
        if sequence is None or self._has_lost(sequence) or sequence.is_spoilt or self._is_scoring(sequence):
            return False
        if sequence.state not in (State.RUNNING, State.WAITING):
            return False
        self._memory.leave(sequence, now)
        self._awaited.append(sequence)
        self.finish_leaving(now)
        return True

    def finish_leaving(self, now: float) -> None:
        """Effects for those that no step in flight computes any more."""
        awaited, self._awaited = self._awaited, []
        for sequence in awaited:
            if sequence.state != State.LEAVING:
                continue
            num_blocks = len(sequence.blocks)
            if sequence.in_flight or self._memory.compaction.num_settled(sequence, num_blocks) < num_blocks:
                self._awaited.append(sequence)
            else:
                self._taken.append((sequence, self._detached(sequence, now)))
                self._memory.events.add(sequence, EventKind.DETACHED, now)

    def _detached(self, sequence: Sequence, now: float) -> Detached:
        request, sampling = sequence.request, sequence.request.sampling
        queue = self._memory.queues[sequence.model]
        # Where the model takes fewer tokens here than there, it ends as it would have here.
        max_tokens = sequence.max_total - sequence.num_prompt
        if max_tokens != sampling.max_tokens:
            sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens)
        travelling = msgspec.structs.replace(
            request,
            sampling=sampling,
            decoder="",
            prior=sequence.packed_output,
            timeout_s=sequence.deadline_s - now,
            waited_s=now - sequence.arrived_s,
            ttft_objective_s=sequence.ttft_due_s - sequence.arrived_s,
            tpot_objective_s=sequence.tpot_objective_s if sequence.tpot_objective_s < inf else 0.0,
        )
        first_token_s, first_planned_s = sequence.first_token_s, sequence.first_planned_s
        progress = SequenceProgress(
            num_computed=sequence.num_computed,
            first_token_age_s=-1.0 if first_token_s is None else now - first_token_s,
            first_total=sequence.first_total,
            first_planned_age_s=-1.0 if first_planned_s is None else now - first_planned_s,
            submitted_age_s=now - sequence.submitted_s,
            device_s=sequence.device_s,
            num_cached_tokens=sequence.num_cached_tokens,
            num_preemptions=sequence.num_preemptions,
            num_recomputed=sequence.num_recomputed,
            num_restored_blocks=sequence.num_restored_blocks,
            num_suspensions=sequence.num_suspensions,
            order_state=self._memory.ordering.export_state(sequence),
            # A handoff is no move that others would have to pay for.
            num_migrations=sequence.num_migrations + (sequence.number not in queue.handing_over),
            last_ran_age_s=now - sequence.last_ran_s,
            peak_computed=sequence.peak_computed,
            last_token_age_s=-1.0 if sequence.last_token_s is None else now - sequence.last_token_s,
            max_itl_s=sequence.max_itl_s,
            service_s=sequence.service_s,
        )
        return Detached(request.request_id, travelling, progress, now, sequence.here_since_s)

    def take_effects(self) -> list[Detached]:
        """Since the last call."""
        taken, self._taken = self._taken, []
        return [effect for sequence, effect in taken if sequence.state == State.LEAVING]

    def _left(self, request_id: str) -> Sequence | None:
        """The sequence, if it has left the batch."""
        sequence = self._requests.held(request_id)
        if sequence is None or sequence.state != State.LEAVING or sequence.in_flight:
            return None
        return sequence

    def pin_rest(self, request_id: str, first_block: int) -> PinnedBlocks | None:
        """After `Detached`: all blocks from `first_block` on that hold computed tokens, the last one perhaps partly filled;
        of one that waits those in host memory, if there are. None: it has ended, or lost its KV since it was pinned."""
        sequence = self._left(request_id)
        if (
            sequence is None
            or sequence.handover == Handover.LOST
            or (first_block and sequence.handover != Handover.PINNED)
        ):
            return None
        if sequence.row < 0 and sequence.host_blocks:
            return self._pin(sequence, sequence.host_blocks, first_block, len(sequence.host_blocks), True)
        num_blocks = -(-sequence.num_computed // sequence.block_size)
        return self._pin(sequence, sequence.blocks, first_block, num_blocks, False)

    def freeze(self, request_id: str) -> bool:
        """After `Detached`: neither cancel nor deadline end it any more. False: it has ended."""
        sequence = self._left(request_id)
        if sequence is None:
            return False
        sequence.handover = Handover.FROZEN
        return True

    def reattach(self, request_id: str, now: float, epoch: int | None = None) -> None:
        """It goes on here, where it was, in `epoch` if given; what was to end it while it was frozen does so now."""
        sequence = self._requests.held(request_id)
        if sequence is not None and sequence.state == State.LEAVING:
            self._reattach(sequence, now, epoch)

    def _reattach(self, sequence: Sequence, now: float, epoch: int | None = None) -> None:
        if epoch is not None:
            sequence.request = msgspec.structs.replace(sequence.request, epoch=epoch)
        sequence.handover = Handover.NONE
        sequence.moved_s = now
        self._stay(sequence)
        self._awaited = [other for other in self._awaited if other is not sequence]
        self._taken = [(other, taken) for other, taken in self._taken if other is not sequence]
        self._memory.come_back(sequence, now)
        if sequence.is_cancelled:
            self._requests.end(sequence, FinishReason.CANCELLED, now)
        elif sequence.deadline_s <= now:
            self._requests.end_late(sequence, now)

    def release(self, request_id: str, now: float) -> bool:
        """Another instance's now: forgets it without an entry or an effect. True: a cancel came while it was frozen."""
        sequence = self._left(request_id)
        if sequence is None:
            return False
        self._requests.drop(sequence, now)
        return sequence.is_cancelled

    def end_migration(self, request_id: str, now: float) -> None:
        """The move is off: it may move again after the cooldown. One that was detached, but not frozen, is reattached."""
        sequence = self._requests.held(request_id)
        if sequence is None or sequence.handover == Handover.FROZEN:
            return
        if sequence.state == State.LEAVING:
            self._reattach(sequence, now)
        sequence.handover = Handover.NONE
        sequence.moved_s = now
        self._stay(sequence)

    def _stay(self, sequence: Sequence) -> None:
        """It decodes here, whoever was to do that."""
        self._memory.queues[sequence.model].handing_over.pop(sequence.number, None)
