"""Who has the next turn where each is to have turns in proportion to a weight: smooth weighted round robin.

    before each turn  credit of each += its share of the weights        share: at least LEAST_SHARE of the largest
    turn              the largest credit; it falls by 1

Credits are kept between -1 and 1, so weights that change, and turns that were given for other reasons, count for one turn at
most: nobody is in debt for what was taken at other weights, or has many turns in a row for what was missed.
"""

from __future__ import annotations

from collections.abc import Mapping

LEAST_SHARE = 0.05
"""Share of the largest weight that counts at least for each."""


class Turns:
    """Takers go by name."""

    def __init__(self) -> None:
        self._credits: dict[str, float] = {}

    def next(self, weights: Mapping[str, float]) -> str:
        """Who is to have the next turn, among those with a weight (at least one, none negative); the first of equals.
        Changes nothing."""
        credits = self._after(weights)
        return max(credits, key=credits.__getitem__)

    def take(self, taker: str, weights: Mapping[str, float]) -> None:
        """It had a turn while those with a weight wanted one. Who is not among them is forgotten."""
        credits = self._after(weights)
        credits[taker] -= 1.0
        self._credits = {other: min(1.0, max(-1.0, credit)) for other, credit in credits.items()}

    def _after(self, weights: Mapping[str, float]) -> dict[str, float]:
        least = LEAST_SHARE * max(weights.values())
        counted = {taker: max(weight, least) for taker, weight in weights.items()}
        total = sum(counted.values()) or 1.0
        return {taker: self._credits.get(taker, 0.0) + weight / total for taker, weight in counted.items()}
