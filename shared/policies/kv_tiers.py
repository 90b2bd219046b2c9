"""Which KV blocks of ended requests go from the device to host memory, and from there to disk, which give way there, and
which come back rather than be computed again.

    worth of a copy down       rate * (compute - BESIDE * back) > BESIDE * out
    worth of a run's way back  wait + back < compute * patience
    gives way                  what was not used for so long that a newer block is likelier to be wanted, for its time there

`rate` is the share of such blocks that a later prompt asked for when the device had them no more: measured, per kind. The
seconds of a copy are measured on copies, those of computing are the cost model's. Copies run beside the steps and take a
part of their own time from them (`BESIDE`); what is computed takes all of it.

Where more comes down than a tier holds, the least recently used blocks are the wrong ones to go if they are those that come
back soonest, as with conversations that take turns: each would leave just before it is wanted. So it is measured after how
long blocks come back, and a newcomer takes the place of an older block only if it earns more hits there in the same time
(`ReuseTimes.gives_way_s`; the hit density of LHD, NSDI'18). What just left then stays out, and what is there stays there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from math import log2
from typing import NamedTuple, Protocol, TypeVar

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

LEAST_AGE_S = 0.25
AGES_PER_OCTAVE = 4
NUM_AGES = 18 * AGES_PER_OCTAVE
"""Ages are told apart up to 18 hours, by a fifth each."""
AGE_EDGES_S = [0.0] + [LEAST_AGE_S * 2 ** (number / AGES_PER_OCTAVE) for number in range(NUM_AGES)]
"""Ages at which each begins, and the last one ends."""
MARGIN = 1.5
"""Times as many hits as of a newcomer that an older block is to promise, to be kept in its stead."""
LEAST_HITS = 64
"""Hits from which on their ages say something."""
NEVER_S = 1e9
POOR_SHARE = 0.25
"""Share of the hits of all newcomers that one promises for which nothing gives way."""
LEARNT_BLOCKS = 256
"""Fates after which ages are judged anew."""

FILL_SHARE = 0.9
"""Share of its limit to which a full disk is emptied: it is not looked through for each block."""
DEPTH_S = 0.05
"""By so much each block counts as not used for longer than the one before it: without that one it is of no use."""


class BlockKind(NamedTuple):
    """Blocks that are found again about as often."""

    is_online: bool
    is_reused: bool
    """It was found again before."""
    octave: int = 0
    """Octave of the number of blocks in its chain: long documents come back otherwise than short questions."""


class _Fates:
    """What became of blocks of a kind, by their age then."""

    __slots__ = ("hits", "unseen")

    def __init__(self) -> None:
        self.hits = [0] * NUM_AGES
        """Those that were asked for."""
        self.unseen = [0] * NUM_AGES
        """Those that were given up waiting for."""

    @property
    def num_known(self) -> int:
        return sum(self.hits) + sum(self.unseen)

    def add(self, age_s: float, *, is_hit: bool) -> None:
        (self.hits if is_hit else self.unseen)[_number_of(age_s)] += 1

    def halve(self) -> None:
        """Old ones are forgotten."""
        self.hits = [num // 2 for num in self.hits]
        self.unseen = [num // 2 for num in self.unseen]


def _number_of(age_s: float) -> int:
    if age_s < LEAST_AGE_S:
        return 0
    return min(NUM_AGES - 1, 1 + int(AGES_PER_OCTAVE * log2(age_s / LEAST_AGE_S)))


def hit_densities(hits: Sequence[int], unseen: Sequence[int]) -> list[float]:
    """By age: most hits per second and block that one of this age promises, if it is given up at the best time. By age too:
    `hits`, and blocks of which more than that age is not known."""
    num_left = list(accumulate((h + u for h, u in zip(reversed(hits), reversed(unseen), strict=True))))[::-1]
    last = max((age for age, num in enumerate(hits) if num), default=-1)
    densities = [0.0] * NUM_AGES
    for first in range(last + 1):
        best, promised, taken_s, share = 0.0, 0.0, 0.0, 1.0
        for age in range(first, last + 1):
            is_hit = share * hits[age] / num_left[age]
            promised += is_hit
            taken_s += (share - is_hit / 2) * (AGE_EDGES_S[age + 1] - AGE_EDGES_S[age])
            share -= is_hit
            best = max(best, promised / taken_s)
        densities[first] = best
    return densities


class ReuseTimes:
    """How often, and after how long, blocks that the device was about to lose were asked for again, by kind."""

    def __init__(self, horizon: int) -> None:
        """`horizon`: one that so many others followed counts as not asked for."""
        self._horizon = max(1, horizon)
        self._leaving: OrderedDict[bytes, tuple[BlockKind, float]] = OrderedDict()
        """By hash, those whose fate is open, and when they were used last."""
        self._open: Counter[tuple[BlockKind, float]] = Counter()
        """How many these are."""
        self._fates: dict[BlockKind, _Fates] = {}
        self._gives_way_s: dict[BlockKind, float] = {}
        """Ages as of the last look at all that is known."""
        self._num_unjudged = 0
        self._now = 0.0

    def leaves(self, block_hash: bytes, kind: BlockKind, used_s: float, now: float) -> None:
        """The device is about to lose it, whether or not it is kept elsewhere."""
        self._now = now
        self._forget(block_hash)
        self._leaving[block_hash] = kind, used_s
        self._open[kind, used_s] += 1
        if len(self._leaving) > self._horizon:
            self._settle(next(iter(self._leaving)), is_hit=False)

    def stays(self, block_hash: bytes) -> None:
        """The device had it still when it was asked for."""
        self._forget(block_hash)

    def is_wanted(self, block_hash: bytes, now: float) -> None:
        """It was asked for, and the device had it no more."""
        self._now = now
        if block_hash in self._leaving:
            self._settle(block_hash, is_hit=True)

    def _forget(self, block_hash: bytes) -> tuple[BlockKind, float] | None:
        if (left := self._leaving.pop(block_hash, None)) is not None:
            self._open[left] -= 1
            if not self._open[left]:
                del self._open[left]
        return left

    def _settle(self, block_hash: bytes, *, is_hit: bool) -> None:
        left = self._forget(block_hash)
        assert left is not None
        kind, used_s = left
        fates = self._fates.setdefault(kind, _Fates())
        fates.add(max(0.0, self._now - used_s), is_hit=is_hit)
        if fates.num_known >= MOST_BLOCKS:
            fates.halve()
        self._num_unjudged += 1
        if self._num_unjudged >= LEARNT_BLOCKS:
            self._num_unjudged = 0
            self._gives_way_s.clear()

    def rate(self, kind: BlockKind) -> float:
        """Share that is asked for, 0 to 1."""
        fates = self._fates.get(kind, _Fates())
        return (sum(fates.hits) + PRIOR_RATE * PRIOR_BLOCKS) / (fates.num_known + PRIOR_BLOCKS)

    def gives_way_s(self, kind: BlockKind) -> float:
        """What was not used for so many seconds gives way to a block of this kind that was used just now. 0: all that is
        there, the least recently used first; `NEVER_S`: nothing."""
        known = self._gives_way_s.get(kind)
        if known is None:
            known = self._gives_way_s[kind] = self._judge(kind)
        return known

    def _judge(self, kind: BlockKind) -> float:
        all_hits, all_unseen = self._known(set(self._fates) | {kind for kind, _ in self._open})
        if sum(all_hits) < LEAST_HITS:
            return 0.0
        of_all = hit_densities(all_hits, all_unseen)
        hits, unseen = self._known({kind})
        # What is there is mostly of kinds that come back, as this one does, or else nothing gives way to it.
        of_kind = of_all if sum(hits) + sum(unseen) < LEAST_HITS else hit_densities(hits, unseen)
        if of_kind[0] < POOR_SHARE * of_all[0]:
            return NEVER_S
        likelier = [age for age, density in enumerate(of_kind) if density > MARGIN * of_kind[0]]
        return AGE_EDGES_S[likelier[-1] + 1] if likelier else 0.0

    def _known(self, kinds: Collection[BlockKind]) -> tuple[list[int], list[int]]:
        """Hits and blocks without, by age."""
        hits, unseen = [0] * NUM_AGES, [0] * NUM_AGES
        for kind in kinds:
            if (fates := self._fates.get(kind)) is not None:
                hits = [a + b for a, b in zip(hits, fates.hits, strict=True)]
                unseen = [a + b for a, b in zip(unseen, fates.unseen, strict=True)]
        for (kind, used_s), num in self._open.items():
            if kind in kinds:
                unseen[_number_of(max(0.0, self._now - used_s))] += num
        return hits, unseen


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


class Stored(Protocol):
    """A block on disk."""

    @property
    def at_s(self) -> float: ...

    @property
    def num_bytes(self) -> int: ...


S = TypeVar("S", bound=Stored)


def used_at_s(now_s: float, depth: int) -> float:
    """Time at which a block on disk that is written or read now counts as used. `depth`: blocks of its chain before it."""
    return now_s - DEPTH_S * depth


def giving_way(stored: Iterable[S], num_bytes: int, max_bytes: int, before_s: float) -> list[S] | None:
    """Those that go from a disk of `max_bytes` where so many more do not fit: the longest not used first, none that was used
    since `before_s`. None: with these alone there is no room."""
    order = sorted(stored, key=lambda one: one.at_s)
    total = sum(one.num_bytes for one in order) + num_bytes
    going: list[S] = []
    for one in order:
        if total <= FILL_SHARE * max_bytes or one.at_s > before_s:
            break
        going.append(one)
        total -= one.num_bytes
    return going if total <= max_bytes else None
