"""How many offline tokens each batch may submit (ConServe's harvest, across a cluster).

Room is divided per model: at most half of it first to batches that would miss their deadline and still can make it,
earliest deadline first; what is left by max-min fairness over the tenants, and within a tenant over its batches
(what one does not want goes to the others).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec

from shared.messages.batches import OfflineDemand, OfflineGrant

MAX_PRESSED_SHARE = 0.5
"""Share of the room that batches under pressure have to themselves: whoever sets a short window does not stop all others."""
HOPELESS = 2.0
"""A batch that needs so many times the time it has left, with the whole throughput, gains nothing from going first. (Not 1:
the throughput may grow.)"""
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
        pressed = room - int(room * (1.0 - MAX_PRESSED_SHARE))
        for index in sorted(urgent, key=lambda index: (own[index].slack_s, own[index].batch_id)):
            granted[index] = min(pressed, _wanted(own[index]))
            own[index] = msgspec.structs.replace(own[index], wanted_tokens=_wanted(own[index]) - granted[index])
            pressed -= granted[index]
            room -= granted[index]
        for index, tokens in _fair(own, room).items():
            granted[index] += tokens
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
    """Whether the batch, were it alone, would need more than that share of the time it has left, but not hopelessly more.
    Without a known throughput nothing is: time alone says little."""
    if tokens_per_s <= 0 or demand.slack_s <= 0:
        return False
    return pressure_share < demand.unfinished_tokens / tokens_per_s / demand.slack_s <= HOPELESS


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
