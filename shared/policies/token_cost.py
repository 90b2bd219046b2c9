"""What a token of one more request costs on an instance that several models share, its own request and the others.

Models that share an instance take turns; so the fewer places a model's requests are in, the larger are its batches and the
fewer the turns. Dispatch and rebalancing choose by it among instances that are as good otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MARGIN = 0.1
"""Costs that are higher by so much are as good as equal."""

HIGH_WEIGHT = 32.0
"""A request of high priority counts for so many normal ones where a normal one may be sent: of 8, 16 and 32 in simulation
(bench/rebalance, priorities) the one with which requests of high priority gained most while normal ones took at most 10 %
longer at each point."""

Resident = tuple[str, int, tuple[float, float]]
"""A model on an instance: its name, requests of it there, and `ModelLoad.decode_cost`."""


def is_as_cheap(token_s: float, least_s: float) -> bool:
    """Whether tokens that cost so much cost hardly more than others, as of `token_cost_s`; 0: not known."""
    return token_s <= (1.0 + MARGIN) * least_s or least_s == 0.0


def first_cheap(costs_s: Sequence[float]) -> int:
    """Which is the first of those that cost hardly more than the least; not known (0) may be."""
    least_s = min((cost_s for cost_s in costs_s if cost_s > 0), default=0.0)
    return next(number for number, cost_s in enumerate(costs_s) if is_as_cheap(cost_s, least_s))


def token_cost_s(model: str, residents: Iterable[Resident], num_high: int = 0) -> float:
    """Seconds that each token of one more request of `model` costs on an instance, of its own and of the others' there: the
    sum of `own_and_turns_s`. 0: not known. `num_high`: requests there that count `HIGH_WEIGHT` times in what it costs others
    by making steps longer; as load reports do not say of which model they are, all count as of its own."""
    residents = list(residents)
    cost_s = sum(own_and_turns_s(model, residents))
    more_s = next((more_s for name, _, (_, more_s) in residents if name == model), 0.0)
    return cost_s + HIGH_WEIGHT * num_high * more_s if cost_s else 0.0


def own_and_turns_s(model: str, residents: Iterable[Resident]) -> tuple[float, float]:
    """What each token of one more request costs by its own model's steps, and by turns.

    With f, d and k a model's decode cost and requests, and N those of all other models than its own:

        f + k d                                 its own step
        k d                                     by which that is longer for the others of its model

        N (f + k d) / (k + 1)                   for those of other models: a step more, or a longer one
        sum of (f' + (k' - 1) d') k' / (k' + 1) over the other models: the steps of these, for which it waits

    It waits for other models' steps for as long as these have requests; and their requests wait for its model's whole step,
    which they would not without it, for as long as it is the last of its model there. Where all requests last equally long
    on average, and end at random, it is the last of k + 1 for a (k + 1)th of its time, and one of k' others is still there
    for k' / (k' + 1) of it. With a pipeline, whose stages compute steps of several models at once, all but its own step is
    less than this. Zeros: what its model's steps take is not known.
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
