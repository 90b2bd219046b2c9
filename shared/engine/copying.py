"""When KV blocks are copied to host memory and back: asks the policy before each step, and begins the copies."""

from __future__ import annotations

from shared.engine.room import Room
from shared.engine.sequence import Sequence
from shared.policies.checkpointing import (
    CheckpointPolicy,
    PoolView,
    SmoothedRate,
    blocks_to_restore,
    restore_key,
    victim_key,
)

IDLE_STEP_S = 1.0
"""What counts as the step beside which copies run where none runs."""

RESTORE_SHARE = 0.5
"""Of a step's time that copies back to the device may take beside it."""


class Copying:
    def __init__(self, room: Room, policy: CheckpointPolicy) -> None:
        self._room = room
        self._policy = policy
        self._growth = SmoothedRate()
        self._seen_s: float | None = None
        self._seen_used = 0.0

    def on_time(self, now: float) -> None:
        """Follows the memory consumption."""
        used = self._room.pool.used_merged()
        if self._seen_s is not None and now > self._seen_s:
            self._growth.add(used - self._seen_used, now - self._seen_s)
        self._seen_s, self._seen_used = now, used

    def start(self, step_s: float | None) -> None:
        """Begins the copies that run beside a step of so many predicted seconds (0: unknown; None: no step runs)."""
        if self._room.host.pool is None:
            return
        self._restore(step_s or IDLE_STEP_S)
        self._checkpoint(step_s or IDLE_STEP_S)

    def _restore(self, step_s: float) -> None:
        host = self._room.host
        restoring = [
            sequence
            for queue in self._room.queues.values()
            for sequence in queue.restoring.values()
            if sequence.restore[1]
        ]
        if not restoring:
            return
        restoring.sort(key=restore_key)
        models = [queue.cost_model for queue in self._room.queues.values() if queue.cost_model is not None]
        block_s = max((model.restore_slot_s for model in models), default=0.0)
        missing = sum(len(sequence.restore[1]) for sequence in restoring)
        allowed = blocks_to_restore(RESTORE_SHARE * step_s, block_s, missing, missing) - host.num_restoring_blocks
        if allowed > 0:
            host.copy_back(restoring, allowed)

    def _checkpoint(self, step_s: float) -> None:
        room, host = self._room, self._room.host
        assert host.pool is not None
        running: list[Sequence] = [
            sequence for queue in room.queues.values() for of_rank in queue.running for sequence in of_rank.values()
        ]
        if not running:
            return
        saved = [0, 0]
        unsaved = [0, 0]
        for sequence in running:
            saved[sequence.is_online] += len(sequence.host_blocks) + sequence.num_checkpointing
            unsaved[sequence.is_online] += sequence.num_uncheckpointed
        if not any(unsaved):
            return
        used_share = room.pool.used_merged() / room.pool.num_merged
        models = [queue.cost_model for queue in room.queues.values() if queue.cost_model is not None]
        per_merged = max(queue.shape.slots_per_merged for queue in room.queues.values())
        view = PoolView(
            used_share,
            int((room.pool.num_merged - room.pool.used_merged()) * per_merged),
            self._growth.per_s * per_merged,
            saved[0],
            unsaved[0],
            sum(unsaved),
            max((model.checkpoint_slot_s for model in models), default=0.0),
            step_s,
            saved[1],
            unsaved[1],
        )
        blocks = self._policy.blocks_now(view)
        if blocks <= 0:
            return
        running.sort(key=lambda sequence: victim_key(sequence, sequence.page_tokens))
        for sequence in running:
            if sequence.num_uncheckpointed:
                blocks -= host.checkpoint(sequence, blocks)
                if blocks <= 0:
                    return
