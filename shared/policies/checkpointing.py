"""How many KV blocks are copied to host memory and back beside each step, and in which order: ConServe sections 4.4, 4.5.

Only full, computed KV blocks are copied: the tokens of a partly filled last block are recomputed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import ceil, exp, inf
from typing import NamedTuple, Protocol


class PoolView(NamedTuple):
    """The device's KV pool before a step is planned."""

    used_share: float
    """Used share of the pool; blocks that are only cached do not count."""
    free_blocks: int
    """Blocks that could be allocated now."""
    growth_blocks_per_s: float
    """Blocks newly in use, net of those freed; moving average (`SmoothedRate`)."""
    saved_blocks: int
    """Full blocks of running offline sequences that have a copy in host memory or are being copied."""
    unsaved_blocks: int
    """Those that have none."""
    step_s: float
    """Predicted time of the step beside which the copies run."""
    saved_online_blocks: int = 0
    unsaved_online_blocks: int = 0


class CheckpointPolicy(ABC):
    @abstractmethod
    def blocks_now(self, view: PoolView) -> int:
        """How many blocks to start copying beside the next step, in the order of `victim_key`."""

    def starts_at(self, *, has_offline: bool) -> float:
        """Used share of the pool below which the answer is 0. `has_offline`: offline sequences run."""
        return 0.0


class AdaptiveCheckpoint(CheckpointPolicy):
    """Checkpoints as the pool fills. With u = used share of the pool, and s = `start_share` for offline sequences,
    `online_start_share` for online ones:

        u < s      nothing
        level      (u - s) / (1 - s) of their blocks are to be saved: few at first, all when the pool is full
        speed      at least (unsaved + free) * step / (time until the pool is full): what is unsaved and what is still to be
                   filled, spread evenly over the time left, so that copying keeps up with consumption

    How much of that hides behind the step, and what host memory takes, is not the policy's matter.
    """

    def __init__(self, start_share: float = 0.5, *, online_start_share: float = 0.9) -> None:
        self._start_share = start_share
        self._online_start_share = max(start_share, online_start_share)

    def starts_at(self, *, has_offline: bool) -> float:
        return self._start_share if has_offline else self._online_start_share

    def blocks_now(self, view: PoolView) -> int:
        wanted = _wanted(view, self._start_share, view.saved_blocks, view.unsaved_blocks)
        return wanted + _wanted(view, self._online_start_share, view.saved_online_blocks, view.unsaved_online_blocks)


def _wanted(view: PoolView, start_share: float, saved: int, unsaved: int) -> int:
    if view.used_share < start_share or not unsaved:
        return 0
    level = 1.0 if start_share >= 1 else min(1.0, (view.used_share - start_share) / (1 - start_share))
    by_level = ceil(level * (saved + unsaved)) - saved
    full_in_s = view.free_blocks / view.growth_blocks_per_s if view.growth_blocks_per_s > 0 else inf
    by_speed = unsaved if full_in_s <= view.step_s else ceil((unsaved + view.free_blocks) * view.step_s / full_in_s)
    return max(0, min(unsaved, max(by_level, by_speed)))


def blocks_to_restore(budget_s: float, block_s: float, num_missing: int) -> int:
    """How many of `num_missing` blocks come back beside the next step. `budget_s`: copy time that hides behind the step. At
    least one, so that a long sequence comes back under any budget."""
    affordable = int(budget_s / block_s) if block_s > 0 else num_missing
    return max(0, min(num_missing, max(1, affordable)))


class HeldSequence(Protocol):
    """What the orders below read of a sequence."""

    @property
    def number(self) -> int:
        """Arrival number on this instance."""

    @property
    def priority_class(self) -> int:
        """Its class: 0 runs first, the highest is offline."""

    @property
    def num_computed(self) -> int:
        """Tokens in the KV cache."""

    @property
    def num_checkpointed_blocks(self) -> int:
        """How many of its first blocks are in host memory without a gap."""

    @property
    def deadline_s(self) -> float: ...

    @property
    def last_ran_s(self) -> float: ...


def unsaved_blocks(sequence: HeldSequence, block_size: int) -> int:
    """Full blocks that preemption would lose."""
    return max(0, sequence.num_computed // block_size - sequence.num_checkpointed_blocks)


def victim_key(sequence: HeldSequence, block_size: int, enough_blocks: float = 0.0) -> tuple[float, ...]:
    """Smallest is preempted first: offline, then what loses the fewest blocks (none if checkpointed), the latest deadline,
    the last arrival. Also the order in which blocks are checkpointed: likeliest victims first, and those nearly saved are
    saved whole before others are begun.

    Those that hold `enough_blocks` alone come before smaller ones, and of these the largest first: many small victims, one
    after another, would each see a pause for a need that one can meet."""
    num_blocks = -(-sequence.num_computed // block_size)
    if num_blocks < enough_blocks:
        return (-sequence.priority_class, True, -num_blocks, -sequence.deadline_s, -sequence.number)
    return (
        -sequence.priority_class,
        False,
        unsaved_blocks(sequence, block_size),
        -sequence.deadline_s,
        -sequence.number,
    )


def restore_key(sequence: HeldSequence) -> tuple[float, ...]:
    """Smallest comes back first: higher classes, then the nearest deadline, then the longest waiting."""
    return (sequence.priority_class, sequence.deadline_s, sequence.last_ran_s, sequence.number)


class SmoothedRate:
    """Events per second, exponentially weighted over about `window_s`."""

    def __init__(self, window_s: float = 2.0) -> None:
        self._window_s = window_s
        self.per_s = 0.0

    def add(self, amount: float, interval_s: float) -> None:
        """`amount` happened during the last `interval_s`; may be negative."""
        if interval_s > 0:
            weight = exp(-interval_s / self._window_s)
            self.per_s = weight * self.per_s + (1 - weight) * amount / interval_s
