"""Which KV blocks of ended requests go from the device to host memory, and from there to disk, and which come back rather
than be computed again.

    worth of a copy down       rate * (compute - BESIDE * back) > BESIDE * out
    worth of a run's way back  wait + back < compute * patience

`rate` is the share of such blocks that a later prompt asked for when the device had them no more: measured, per kind. The
seconds of a copy are measured on copies, those of computing are the cost model's. Copies run beside the steps and take a
part of their own time from them (`BESIDE`); what is computed takes all of it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

BESIDE = 0.1
"""What a second of copying takes from the steps beside it, in seconds."""
PRIOR_RATE = 0.5
PRIOR_BLOCKS = 16.0
"""Blocks whose fates the first guess counts for."""
MOST_BLOCKS = 1 << 14
"""Blocks of a kind whose fates are counted; then all count half, so that old ones are forgotten."""
IDLE_PATIENCE = 1.0
BUSY_PATIENCE = 2.0
"""Times as long as computing that the way back may take beside others' work, which goes on meanwhile."""
MIN_BLOCKS = 2
"""Fewer are computed sooner than copies of them are begun and ended."""


class BlockKind(NamedTuple):
    """Blocks that are found again about as often."""

    is_online: bool
    is_reused: bool
    """It was found again before."""


class HitRates:
    """How often blocks that the device was about to lose were asked for again, by kind."""

    def __init__(self, horizon: int) -> None:
        """`horizon`: blocks that the tiers below hold; one that so many others followed counts as not asked for."""
        self._horizon = max(1, horizon)
        self._leaving: OrderedDict[bytes, BlockKind] = OrderedDict()
        """By hash, those whose fate is open."""
        self._hits: Counter[BlockKind] = Counter()
        self._known: Counter[BlockKind] = Counter()

    def leaves(self, block_hash: bytes, kind: BlockKind) -> None:
        """The device is about to lose it, whether or not it is kept elsewhere."""
        self._leaving[block_hash] = kind
        self._leaving.move_to_end(block_hash)
        if len(self._leaving) > self._horizon:
            self._settle(self._leaving.popitem(last=False)[1], is_hit=False)

    def stays(self, block_hash: bytes) -> None:
        """The device had it still when it was asked for."""
        self._leaving.pop(block_hash, None)

    def is_wanted(self, block_hash: bytes) -> None:
        """It was asked for, and the device had it no more."""
        if (kind := self._leaving.pop(block_hash, None)) is not None:
            self._settle(kind, is_hit=True)

    def _settle(self, kind: BlockKind, *, is_hit: bool) -> None:
        self._known[kind] += 1
        self._hits[kind] += is_hit
        if self._known[kind] >= MOST_BLOCKS:
            self._known[kind] //= 2
            self._hits[kind] //= 2

    def rate(self, kind: BlockKind) -> float:
        """0 to 1."""
        return (self._hits[kind] + PRIOR_RATE * PRIOR_BLOCKS) / (self._known[kind] + PRIOR_BLOCKS)


def is_worth_keeping(rate: float, compute_s: float, back_s: float, out_s: float) -> bool:
    """Whether a block is copied to the next tier. `compute_s`: to compute it again, 0: not known; `back_s`: to copy it from
    there to the device; `out_s`: to copy it there. Seconds."""
    return compute_s <= 0 or rate * (compute_s - BESIDE * back_s) > BESIDE * out_s


def is_worth_reading(num_blocks: int, compute_s: float, back_s: float, wait_s: float, *, is_busy: bool) -> bool:
    """Whether a run of blocks comes back from a lower tier. `compute_s`: to compute them, 0: not known; `back_s`: for all
    the copies to the device; `wait_s`: until those before them have ended. `is_busy`: others run here, for whom the device
    is free meanwhile."""
    if num_blocks < MIN_BLOCKS:
        return False
    return compute_s <= 0 or wait_s + back_s < compute_s * (BUSY_PATIENCE if is_busy else IDLE_PATIENCE)
