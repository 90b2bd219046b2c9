"""Inter-token latencies: the times between one token of a stream and the next, each counted, in bounded memory.

TPOT is a request's mean and does not see that its stream stood still; ConServe's objective (footnote 2) is for each token.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

import msgspec
import numpy as np

LEAST_S, MOST_S = 1e-5, 1e5
"""What lies outside of these counts as the nearer one, but for mean and maximum, which are exact."""
GROWTH = 1.01
"""Ratio of a bin to the one below it, so that a percentile is right within half of a percent."""
NUM_BINS = math.ceil(math.log(MOST_S / LEAST_S) / math.log(GROWTH))
NUM_PENDING = 1 << 14
"""Counted together."""


class Itl(msgspec.Struct, frozen=True):
    """Percentiles of all gaps of the streams that are meant, in seconds; 0 without any."""

    num: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class ItlHistogram:
    """Counts gaps in bins that grow in proportion. Tokens that come in one step are one event of the stream, as they are
    one piece to `vllm bench serve`."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets all gaps."""
        self._counts = np.zeros(NUM_BINS, np.int64)
        self._sum_s = 0.0
        self._max_s = 0.0
        self._pending = array("d")

    @classmethod
    def of(cls, gaps_s: Iterable[float]) -> ItlHistogram:
        made = cls()
        for gap_s in gaps_s:
            made.add(gap_s)
        return made

    @classmethod
    def merged(cls, histograms: Iterable[ItlHistogram]) -> ItlHistogram:
        """A new one, of the gaps of all of them."""
        made = cls()
        for one in histograms:
            one._count()
            made._counts += one._counts
            made._sum_s += one._sum_s
            made._max_s = max(made._max_s, one._max_s)
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ItlHistogram) and self.summary() == other.summary()

    __hash__ = None  # type: ignore[assignment]  # it changes

    def add(self, gap_s: float) -> None:
        self._pending.append(gap_s)
        if len(self._pending) == NUM_PENDING:
            self._count()

    def _count(self) -> None:
        if not self._pending:
            return
        gaps_s = np.frombuffer(self._pending)
        self._sum_s += float(gaps_s.sum())
        self._max_s = max(self._max_s, float(gaps_s.max()))
        bins = np.log(np.maximum(gaps_s, LEAST_S) / LEAST_S) / math.log(GROWTH)
        self._counts += np.bincount(np.minimum(bins.astype(np.int64), NUM_BINS - 1), minlength=NUM_BINS)
        self._pending = array("d")

    def summary(self) -> Itl:
        self._count()
        num = int(self._counts.sum())
        if not num:
            return Itl()
        return Itl(num, self._sum_s / num, self._percentile_s(0.5), self._percentile_s(0.99), self._max_s)

    def _percentile_s(self, share: float) -> float:
        """The middle of the bin that it lies in."""
        ends = np.cumsum(self._counts)
        number = int(np.searchsorted(ends, share * (ends[-1] - 1), side="right"))
        middle_s = LEAST_S * math.exp((number + 0.5) * math.log(GROWTH))
        return min(self._max_s, middle_s)
