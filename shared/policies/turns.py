"""Whose turn is next, when turns are in proportion to weights: smooth weighted round robin.

    before each turn  credit of each += its share of the weights        share: at least LEAST_SHARE of the largest
    turn              the largest credit; it falls by 1

Credits stay between -1 and 1. Changed weights, and turns given for other reasons, thus count for at most one turn: no
taker is in debt for turns at other weights, or has many turns in a row for missed ones.
"""

from __future__ import annotations

from collections.abc import Mapping

LEAST_SHARE = 0.05
"""Least weight that counts for each, as a share of the largest."""


class Turns:
    """Takers are identified by name."""

    def __init__(self) -> None:
        self._credits: dict[str, float] = {}

    def next(self, weights: Mapping[str, float]) -> str:
        """The taker of the next turn, among those with a weight (at least one, none negative); the first of equals.
        Changes nothing."""
        credits = self._after(weights)
        return max(credits, key=credits.__getitem__)

    def take(self, taker: str, weights: Mapping[str, float]) -> None:
        """`taker` had a turn while those in `weights` wanted one. Others keep their credit: they may take turns among
        themselves in between."""
        credits = self._after(weights)
        credits[taker] -= 1.0
        self._credits |= {other: min(1.0, max(-1.0, credit)) for other, credit in credits.items()}

    def _after(self, weights: Mapping[str, float]) -> dict[str, float]:
        least = LEAST_SHARE * max(weights.values())
        counted = {taker: max(weight, least) for taker, weight in weights.items()}
        total = sum(counted.values()) or 1.0
        return {taker: self._credits.get(taker, 0.0) + weight / total for taker, weight in counted.items()}
