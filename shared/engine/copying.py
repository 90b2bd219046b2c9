"""Copies of KV blocks to host memory and back: asks the policy before each step, and begins the copies.

How long a block takes is `CopyTimes`; that of the model whose blocks take longest counts. Where nothing is known of it, few
blocks are begun beside a step. What is left of the time is for blocks of ended requests (memory/tiers.py).
"""

from __future__ import annotations

from shared.engine.memory.allocator import Allocator
from shared.engine.plan import CopyKind
from shared.engine.sequence import PriorityClass, Sequence
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

COPY_SHARE = 0.5
"""Share of a step's time that copies in both directions may take beside it, but for those back of online sequences, whose
clients wait: these may take all of it."""

FIRST_BLOCKS = 8
"""Whose copies begin beside a step in a direction in which nobody knows how long a block takes."""


class Copying:
    def __init__(self, memory: Allocator, policy: CheckpointPolicy) -> None:
        self._memory = memory
        self._policy = policy
        self._growth = SmoothedRate()
        self._seen_s: float | None = None
        self._seen_used = 0.0

    def on_time(self, now: float) -> None:
        """Follows the memory consumption, where there is host memory to copy to."""
        if self._memory.host.pool is None:
            return
        self._memory.host.pool.on_time(now)
        used = self._memory.pool.used_merged()
        if self._seen_s is not None and now > self._seen_s:
            self._growth.add(used - self._seen_used, now - self._seen_s)
        self._seen_s, self._seen_used = now, used

    def start(self, step_s: float | None, now: float) -> None:
        """Begins the copies that run beside a step of so many predicted seconds (0: unknown; None: no step runs)."""
        host = self._memory.host
        if host.pool is None:
            return
        step_s = step_s or IDLE_STEP_S
        times = self._memory.copy_times
        save_s, restore_s = times.slowest(CopyKind.CHECKPOINT), times.slowest(CopyKind.RESTORE)
        # What is under way takes its part of this step's time too.
        under_way_s = host.num_checkpointing_blocks * (save_s or 0.0) + host.num_restoring_blocks * (restore_s or 0.0)
        budget_s = COPY_SHARE * step_s - under_way_s
        budget_s -= self._restore(step_s - under_way_s, budget_s, restore_s) * (restore_s or 0.0)
        num_before = host.num_checkpointing_blocks
        self._checkpoint(step_s, budget_s, save_s)
        budget_s -= (host.num_checkpointing_blocks - num_before) * (save_s or 0.0)
        self._memory.tiers.start(budget_s, now)

    def _restore(self, online_s: float, offline_s: float, block_s: float | None) -> int:
        """Seconds of copies for online sequences, and of those for offline ones. Returns the number of blocks."""
        host = self._memory.host
        restoring = [
            sequence
            for queue in self._memory.queues.values()
            for sequence in queue.restoring.values()
            if sequence.restore[1]
        ]
        restoring.sort(key=restore_key)
        budget_s = online_s if restoring and restoring[0].is_online else offline_s
        if not restoring or (budget_s <= 0 and host.num_restoring_blocks):
            return 0
        num_missing = sum(len(sequence.restore[1]) for sequence in restoring)
        if block_s is None:
            count = min(FIRST_BLOCKS, num_missing)
        else:
            count = blocks_to_restore(budget_s, block_s, num_missing)
        host.copy_back(restoring, count)
        return count

    def _checkpoint(self, step_s: float, budget_s: float, block_s: float | None) -> None:
        memory, host = self._memory, self._memory.host
        assert host.pool is not None
        running: list[Sequence] = [
            sequence for queue in memory.queues.values() for of_class in queue.running for sequence in of_class.values()
        ]
        used_share = memory.pool.used_share
        has_offline = any(queue.running[PriorityClass.OFFLINE] for queue in memory.queues.values())
        if not running or used_share < self._policy.starts_at(has_offline=has_offline):
            return
        saved = [0, 0]
        unsaved = [0, 0]
        for sequence in running:
            saved[sequence.is_online] += sequence.num_checkpointed_blocks
            unsaved[sequence.is_online] += sequence.num_uncheckpointed
        if not any(unsaved):
            return
        per_merged = max(queue.shape.blocks_per_merged for queue in memory.queues.values())
        view = PoolView(
            used_share=used_share,
            free_blocks=int((memory.pool.num_merged - memory.pool.used_merged()) * per_merged),
            growth_blocks_per_s=self._growth.per_s * per_merged,
            saved_blocks=saved[0],
            unsaved_blocks=unsaved[0],
            step_s=step_s,
            saved_online_blocks=saved[1],
            unsaved_online_blocks=unsaved[1],
        )
        blocks = self._policy.blocks_now(view)
        if block_s is None:
            blocks = min(blocks, FIRST_BLOCKS)
        elif block_s > 0:
            blocks = min(blocks, int(budget_s / block_s))
        if blocks <= 0:
            return
        running.sort(key=lambda sequence: victim_key(sequence, sequence.block_size))
        tokens_refused: dict[str, int] = {}
        """Tokens of the longest sequence of each model for which host memory, full of such that are worth as much, has no
        room."""
        for sequence in running:
            if not sequence.num_uncheckpointed or sequence.num_tokens <= tokens_refused.get(sequence.model, 0):
                continue
            blocks -= host.checkpoint(sequence, blocks)
            if blocks <= 0:
                return
            if sequence.num_uncheckpointed:
                tokens_refused[sequence.model] = sequence.num_tokens
