"""How many offline tokens each batch may submit (ConServe's harvest, across a cluster).

Room is divided per model: first to batches that would miss their deadline, earliest deadline first; what is left by weighted
max-min fairness over the tenants, and within a tenant over its batches (what one does not want goes to the others).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from shared.messages import OfflineDemand, OfflineGrant

MIN_WEIGHT = 1e-3
"""A tenant's least: weights must be positive."""


def allocate(
    demands: Sequence[OfflineDemand],
    room_tokens: Mapping[str, int],
    tokens_per_s: Mapping[str, float],
    *,
    pressure_share: float = 0.5,
) -> list[OfflineGrant]:
    """One grant for each demand, in their order, 0 included; per model min(room, wanted) tokens together.

    `room_tokens`: what the instances could hold beyond what they hold, per model. `tokens_per_s`: recent offline throughput.
    """
    granted = dict.fromkeys(range(len(demands)), 0)
    for model in {demand.model: None for demand in demands}:
        own = {index: demand for index, demand in enumerate(demands) if demand.model == model}
        room = max(0, room_tokens.get(model, 0))
        rate = tokens_per_s.get(model, 0.0)
        urgent = [index for index in own if is_under_pressure(own[index], rate, pressure_share)]
        for index in sorted(urgent, key=lambda index: (own[index].slack_s, own[index].batch_id)):
            granted[index] = min(room, _wanted(own.pop(index)))
            room -= granted[index]
        granted.update(_fair(own, room))
    return [OfflineGrant(demand.batch_id, granted[index], demand.model) for index, demand in enumerate(demands)]


def _fair(demands: Mapping[int, OfflineDemand], room: int) -> dict[int, int]:
    """Over tenants by weight, then over a tenant's batches."""
    tenants: dict[str, dict[int, OfflineDemand]] = {}
    for index, demand in demands.items():
        tenants.setdefault(demand.tenant, {})[index] = demand
    wanted = [sum(_wanted(demand) for demand in own.values()) for own in tenants.values()]
    weights = [max(MIN_WEIGHT, *(demand.weight for demand in own.values())) for own in tenants.values()]
    granted: dict[int, int] = {}
    for own, share in zip(tenants.values(), max_min(room, wanted, weights), strict=True):
        shares = max_min(share, [_wanted(demand) for demand in own.values()], [1.0] * len(own))
        granted.update(zip(own, shares, strict=True))
    return granted


def _wanted(demand: OfflineDemand) -> int:
    return max(0, demand.wanted_tokens)


def is_under_pressure(demand: OfflineDemand, tokens_per_s: float, pressure_share: float = 0.5) -> bool:
    """Whether the batch, were it alone, would need more than that share of the time it has left. Without a known throughput
    nothing is: time alone says little."""
    return tokens_per_s > 0 and demand.unfinished_tokens / tokens_per_s > pressure_share * demand.slack_s


def max_min(room: int, wanted: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Weighted max-min fair division of whole tokens: nobody gets more than wanted, and whoever gets less has, to within
    rounding, as much for its weight as anyone. Together min(room, sum(wanted)). O(n log n)."""
    shares = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda index: wanted[index] / weights[index])
    weight_left = list(accumulate(weights[index] for index in reversed(order)))
    for index in order:
        share = int(room * (weights[index] / weight_left.pop()) + 1e-6)
        shares[index] = min(wanted[index], share)
        room -= shares[index]
    return shares


def predicted_finish_s(now_s: float, unfinished_tokens: int, tokens_per_s: float) -> float | None:
    """When a batch would be finished at this throughput (its own, or its model's if it is alone); None: not known."""
    if unfinished_tokens <= 0:
        return now_s
    return now_s + unfinished_tokens / tokens_per_s if tokens_per_s > 0 else None
