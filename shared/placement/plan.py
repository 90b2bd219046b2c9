"""Plans and what is predicted of them, for whoever only shows them: without numpy. See problem.py."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from shared.messages.cluster import InstancePlan, instance_devices

ATTAINMENT_GRAIN = 1e-3
"""Attainments that differ by less are as good."""
FLOOR_SHARE = 0.8
"""A service is left behind where its attainment is less than this share of that of all requests (delta of SeaLLM's
equation 5, relative, as no plan may reach an absolute one under overload)."""
MOST_FLOOR_COST = 0.02
"""Share of the attainment of all requests that is given up at most so that no service is left behind."""
FLOOR_WEIGHT = 0.06
"""Share of the attainment of all requests that leaving services behind counts for at most. More than `MOST_FLOOR_COST`, so
that one service at nothing is worth all that may be given up, and one just below the floor most of it."""
DEFAULT_SLO_SCALE = 5.0
"""A request is to take this many times its model's mean execution time at most (SeaLLM, section 6.1)."""


class Group(msgspec.Struct, frozen=True, order=True):
    """An instance of the plan."""

    node_id: str
    devices: tuple[int, ...]
    """Indices on the node, ascending."""
    models: tuple[str, ...]
    """Ascending."""

    @property
    def num_ranks(self) -> int:
        return len(self.devices)

    @property
    def instance_id(self) -> str:
        return f"{self.node_id}-{self.devices[0]}"


class Plan(msgspec.Struct, frozen=True):
    groups: tuple[Group, ...]
    """Ascending; no device twice, none without a model."""

    @property
    def models(self) -> set[str]:
        return {name for group in self.groups for name in group.models}


def group_of(place: InstancePlan) -> Group:
    devices = instance_devices(place.instance_id, place.group.num_ranks)
    return Group(place.node_id, tuple(sorted(k for _, k in devices)), tuple(sorted(s.name for s in place.models)))


def plan_of(groups: Iterable[Group]) -> Plan:
    """Without the groups that have no model."""
    return Plan(tuple(sorted(group for group in groups if group.models)))


def is_affordable(attainment: float, most: float) -> bool:
    """Whether a plan may be chosen that attains so much where another attains `most`: so that no service is left behind,
    `MOST_FLOOR_COST` of it is given up and no more."""
    return attainment >= (1.0 - MOST_FLOOR_COST) * most - 1e-9


def unfairness(attainment: float, of_services: Iterable[float]) -> float:
    """Attainment that leaving services behind counts for, from 0 to `FLOOR_WEIGHT` of `attainment` (SeaLLM, equation 5, as a
    penalty). `of_services`: attainments of those with requests.

    The root makes the last step up to the floor worth nearly half as much as all of the way; the exponential leaves
    something to gain by helping one service where others are left behind as well. What is given up for it is bounded by
    `is_affordable`."""
    floor = FLOOR_SHARE * attainment
    # Sums of weights may come out a rounding error above the number of requests.
    short = sum(math.sqrt(1.0 - one / floor) for one in (max(0.0, one) for one in of_services) if one < floor)
    return FLOOR_WEIGHT * attainment * -math.expm1(-short)


class ModelPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction for one model's online requests. Without any: attainment 1, the rest 0."""

    num_requests: int
    attainment: float
    """Share of requests that end within their SLO; one that finds no group misses it."""
    normalised_latency: float
    """Mean latency over the model's mean execution time (SeaLLM, equation 1)."""
    mean_latency_s: float
    p99_latency_s: float
    mean_ttft_s: float = 0.0
    p99_ttft_s: float = 0.0
    mean_tpot_s: float = 0.0


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction for a plan under some traffic."""

    attainment: float
    """Over all online requests; likewise the next."""
    normalised_latency: float
    models: dict[str, ModelPrediction]
    offline_tokens_s: float = 0.0
    use: dict[str, float] = {}
    """Instance id -> share of the time in which it computes."""

    @property
    def num_requests(self) -> int:
        """Online ones."""
        return sum(model.num_requests for model in self.models.values())

    @property
    def unfairness(self) -> float:
        """See `unfairness`, of the models with requests."""
        return unfairness(self.attainment, (one.attainment for one in self.models.values() if one.num_requests))

    @property
    def worst(self) -> str:
        """The model, of those with requests, with the lowest attainment; empty without any."""
        there = (name for name in sorted(self.models) if self.models[name].num_requests)
        return min(there, key=lambda name: self.models[name].attainment, default="")

    @property
    def left_behind(self) -> list[str]:
        """Models with requests whose attainment is below `FLOOR_SHARE` of that of all requests."""
        floor = FLOOR_SHARE * self.attainment
        return sorted(name for name, one in self.models.items() if one.num_requests and one.attainment < floor)


def told_left_behind(prediction: Prediction) -> str:
    """The models that are left behind, worst first, with their attainment; empty without any."""
    names = sorted(prediction.left_behind, key=lambda name: prediction.models[name].attainment)
    return ", ".join(f"{name} ({prediction.models[name].attainment:.1%} within its SLO)" for name in names)


class Horizon(msgspec.Struct, frozen=True, kw_only=True):
    """The last `seconds` of traffic, estimated three times for the same requests: on the plan that runs (`stay`), with a
    change to another that begins at their beginning (`change`), and on that other from the beginning (`free`)."""

    seconds: float
    num_requests: int
    """Online ones."""
    stay_attainment: float
    change_attainment: float
    free_attainment: float
    attainment_error: float
    """Standard error of what the change gains, as it varies in time; likewise of latency."""
    stay_latency: float
    """Normalised latency, likewise the next."""
    change_latency: float
    free_latency: float
    latency_error: float
    stay_unfairness: float = 0.0
    """Attainment that services left behind count for (`unfairness`); likewise the next."""
    change_unfairness: float = 0.0
    free_unfairness: float = 0.0


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the plan, tried on the traffic of late."""

    change_s: float
    """Until it would be over."""
    lost_device_s: float
    """Devices times seconds that would serve nobody."""
    moved_bytes: int
    """KV of the requests that would have to leave their instances."""
    interrupted: list[str]
    """Models that nobody would serve for a time."""
    horizons: list[Horizon]
    """Ascending; the first is the interval of searches. Without those that are shorter than the change takes."""
    busier_gain: float = 0.0
    """Attainment that the other plan gains without the change, with a quarter more requests of each model."""


class Rejected(msgspec.Struct, frozen=True):
    """A plan that was looked at and not taken."""

    plan: Plan
    prediction: Prediction | None
    """None: it was not worth a prediction."""
    reason: str


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """What a search answers."""

    plan: Plan
    prediction: Prediction
    incumbent: Prediction | None
    """Prediction for the running plan, under the same traffic."""
    rejected: tuple[Rejected, ...]
    """Best first."""
    search_s: float = 0.0
    unplaced: dict[str, str] = {}
    """Models that fit nowhere, and why."""
    trial: Trial | None = None
    """None: nothing runs that would have to change, or nobody tried it."""
    floor_cost: float = 0.0
    """Attainment of all requests that is given up so that no service is left behind: by which the plan that serves most in
    total serves more."""


def is_cpu(kind: str) -> bool:
    """Kinds of devices that are CPUs are named "cpu", or "cpu-" and more."""
    return kind.split("-")[0] == "cpu"
