"""What a token of one more request costs on an instance that several models share: for the request itself and for others.

Models that share an instance take turns. The fewer places a model's requests are in, the larger are its batches and the
fewer the turns. Dispatch and rebalancing use this cost among otherwise equal instances.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MARGIN = 0.1
"""Costs within this relative margin count as equal."""

HIGH_WEIGHT = 64.0
"""Number of normal requests as which a high-priority one counts when a normal one is dispatched. Chosen among 8 to 256 in
simulation (bench/rebalance, priorities): requests of high priority gained most with this one, while normal ones took at most
10 % longer at each point."""

Resident = tuple[str, int, tuple[float, float]]
"""A model on an instance: its name, requests of it there, and `ModelLoad.decode_cost`."""


def is_as_cheap(token_s: float, least_s: float) -> bool:
    """Whether tokens at `token_s` cost hardly more than at `least_s`, both from `token_cost_s`; 0: not known."""
    return token_s <= (1.0 + MARGIN) * least_s or least_s == 0.0


def cheap(costs_s: Sequence[float]) -> list[int]:
    """Indices of those that cost hardly more than the least; an unknown cost (0) qualifies."""
    least_s = min((cost_s for cost_s in costs_s if cost_s > 0), default=0.0)
    return [number for number, cost_s in enumerate(costs_s) if is_as_cheap(cost_s, least_s)]


def first_cheap(costs_s: Sequence[float]) -> int:
    """The first of `cheap`; there must be a cost."""
    return cheap(costs_s)[0]


def token_cost_s(model: str, residents: Iterable[Resident], num_high: int = 0) -> float:
    """Seconds that each token of one more request of `model` costs on an instance, for itself and the others there: the
    sum of `own_and_turns_s`. 0: not known. `num_high`: high-priority requests there. Each counts `HIGH_WEIGHT` times in
    the cost of longer steps. Load reports do not name their model, so all count as of `model`."""
    residents = list(residents)
    cost_s = sum(own_and_turns_s(model, residents))
    more_s = next((more_s for name, _, (_, more_s) in residents if name == model), 0.0)
    return cost_s + HIGH_WEIGHT * num_high * more_s if cost_s else 0.0


def own_and_turns_s(model: str, residents: Iterable[Resident]) -> tuple[float, float]:
    """Cost of each token of one more request: by its own model's steps, and by turns.

    With f, d and k a model's decode cost and requests, and N those of all other models than its own:

        f + k d                                 its own step
        k d                                     the others of its model: their step is longer

        N (f + k d) / (k + 1)                   those of other models: one step more, or a longer one
        sum of (f' + (k' - 1) d') k' / (k' + 1) over the other models: their steps, for which it waits

    It waits for other models' steps while these have requests. While it is the last of its model there, other models'
    requests wait for its model's whole step only because of it. If all requests last equally long on average and end at
    random, it is the last of k + 1 for a (k + 1)th of its time, and one of k' others is still there for k' / (k' + 1) of
    it. In a pipeline, whose stages compute steps of several models at once, all but its own step costs less than this.
    Zeros: the step times of its model are not known.
    """
    first_s = next_s = others_s = 0.0
    num_own = num_others = 0
    for name, num, (one_s, more_s) in residents:
        if name == model:
            num_own, first_s, next_s = num, one_s, more_s
        elif num:
            num_others += num
            others_s += (one_s + (num - 1) * more_s) * num / (num + 1)
    if first_s == 0.0:
        return 0.0, 0.0
    own_s = first_s + num_own * next_s
    return own_s + num_own * next_s, own_s * num_others / (num_own + 1) + others_s
