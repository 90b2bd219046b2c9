"""When to search for another placement, and whether what is found is worth a change (SeaLLM, section 4.3). Pure: time
(seconds of any clock) is an argument. The placement service and virtual time host the same core:

    replacement = Replacement(settings, now_s)
    if reason := replacement.due(now_s):
        replacement.begin(now_s, measured)            # of the time since `replacement.since_s`
        ...                                           # a search under the traffic of `replacement.window(now_s)`
        verdict = replacement.judge(proposal, problem)
        replacement.settled(now_s, prediction)        # of the plan that serves from now on

An interval begins when a plan serves, with what is predicted of it, and ends `interval_s` later. What was measured since
then makes the next interval shorter or longer (equation 8). A model that is added, and a node that is gone, ask for a search
at once; that ends no interval, so nothing is compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from shared.placement.plan import ModelPrediction, Plan, Prediction, Proposal
from shared.placement.problem import ModelFacts, NodeFacts, Problem


class ReplacementSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A fixed interval has equal bounds; one that never ends is infinite."""

    initial_s: float = 600.0
    least_s: float = 60.0
    most_s: float = 6 * 3600.0
    beta: float = 0.1
    """Relative difference above which the interval shrinks by this share, and below which it grows by it."""
    least_requests: int = 20
    """Online requests of an interval, predicted or measured, below which nothing is concluded from it."""
    least_attainment_gain: float = 0.01
    least_latency_gain: float = 0.05
    """Share by which normalised latency falls at least where attainment stays."""
    restart_s: float = 15.0
    """In which a group that is made anew serves nobody, without the time that its weights take."""


class IntervalState(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of the core."""

    interval_s: float
    since_s: float
    """When this interval began."""
    predicted: Prediction | None = None
    """Of the plan that serves; None: none yet, or of a search that failed."""
    deviation: float | None = None
    """Of the last interval that was compared."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    is_worth: bool
    reason: str
    attainment_gain: float = 0.0
    latency_gain: float = 0.0
    """Share by which the mean normalised latency falls."""
    cost: float = 0.0
    """Share of the fleet's time in the next interval that the change takes."""


class _Totals(msgspec.Struct, frozen=True):
    attainment: float
    normalised_latency: float


def deviation(predicted: Prediction, measured: Prediction) -> float:
    """Relative difference of attainment or of mean normalised latency, whichever is larger, over the models with requests in
    both. A model with requests in only one of them has nothing to compare, but its traffic is another than was expected:
    its share of the requests counts as a difference as well."""
    both = [name for name in sorted(predicted.models) if _num(predicted, name) and _num(measured, name)]
    found = max(_other_share(predicted, both), _other_share(measured, both))
    if both:
        expected, real = _totals(predicted, both), _totals(measured, both)
        found = max(
            found,
            _relative(real.attainment, expected.attainment),
            _relative(real.normalised_latency, expected.normalised_latency),
        )
    return found


def _num(prediction: Prediction, name: str) -> int:
    model = prediction.models.get(name)
    return 0 if model is None else model.num_requests


def num_requests(prediction: Prediction) -> int:
    return sum(model.num_requests for model in prediction.models.values())


def _other_share(prediction: Prediction, names: Collection[str]) -> float:
    total = num_requests(prediction)
    return 1.0 - sum(_num(prediction, name) for name in names) / total if total else 0.0


def _totals(prediction: Prediction, names: Collection[str]) -> _Totals:
    models: list[ModelPrediction] = [prediction.models[name] for name in names]
    total = sum(model.num_requests for model in models)
    return _Totals(
        sum(model.attainment * model.num_requests for model in models) / total,
        sum(model.normalised_latency * model.num_requests for model in models) / total,
    )


def _relative(real: float, expected: float) -> float:
    if expected == real:
        return 0.0
    return abs(real - expected) / expected if expected > 0 else math.inf


def next_interval_s(
    interval_s: float, predicted: Prediction, measured: Prediction, settings: ReplacementSettings
) -> float:
    """Equation 8, within the bounds. It stays where both had too few requests to tell."""
    if max(num_requests(predicted), num_requests(measured)) < settings.least_requests:
        return interval_s
    factor = -settings.beta if deviation(predicted, measured) > settings.beta else settings.beta
    return min(max(interval_s * (1.0 + factor), settings.least_s), settings.most_s)


def change_s(before: Plan | None, after: Plan, problem: Problem, restart_s: float) -> float:
    """Seconds of a device that going from one plan to another takes: groups that are made anew restart and load all their
    models, others load what they lack."""
    nodes: dict[str, NodeFacts] = {node.node_id: node for node in problem.nodes}
    models: dict[str, ModelFacts] = {model.name: model for model in problem.models}
    held = {} if before is None else {(group.node_id, group.devices): group.models for group in before.groups}
    total = 0.0
    for group in after.groups:
        has = held.get((group.node_id, group.devices))
        there = {models[name].weights for name in has or () if name in models}
        weights = {models[name].weights: models[name].weight_bytes for name in group.models}
        load_s = sum(num for name, num in weights.items() if name not in there) / nodes[group.node_id].load_bytes_s
        # Each rank reads a p-th of the bytes, and all of them wait for that.
        total += load_s + (group.num_ranks * restart_s if has is None else 0.0)
    return total


def judge(proposal: Proposal, problem: Problem, interval_s: float, settings: ReplacementSettings) -> Verdict:
    """Whether the proposal is worth a change, if it has to pay within the next interval. A gain that is no larger than its
    standard error over so many requests is none: other requests will come."""
    if problem.incumbent is not None and proposal.plan == problem.incumbent:
        return Verdict(is_worth=False, reason="the best plan found is the one that runs")
    before, after = proposal.incumbent, proposal.prediction
    if problem.incumbent is None or not problem.incumbent.groups:
        return Verdict(is_worth=True, reason="no plan runs yet")
    if before is None:
        return Verdict(is_worth=True, reason="the plan that runs breaks a limit of models or devices of a group")
    placed = {name for group in problem.incumbent.groups for name in group.models}
    now_placed = {name for group in proposal.plan.groups for name in group.models}
    if more := sorted(now_placed - placed):
        return Verdict(is_worth=True, reason=f"{', '.join(more)} would be placed")
    if fewer := sorted((placed - now_placed) & {model.name for model in problem.models}):
        return Verdict(is_worth=False, reason=f"{', '.join(fewer)} would be on no group")
    num_devices = sum(node.num_devices for node in problem.nodes)
    cost = change_s(problem.incumbent, proposal.plan, problem, settings.restart_s) / (num_devices * interval_s)
    gain = after.attainment - before.attainment
    latency_gain = 0.0
    if before.normalised_latency > 0:
        latency_gain = 1.0 - after.normalised_latency / before.normalised_latency
    told = f"attainment {before.attainment:.1%} -> {after.attainment:.1%}, normalised latency "
    told += f"{before.normalised_latency:.3g} -> {after.normalised_latency:.3g}, "
    told += f"for {cost:.2%} of the fleet's time until the next search"
    num = max(1, num_requests(after))
    attainment_error = math.sqrt(before.attainment * (1.0 - before.attainment) / num)
    more_attained = gain > max(settings.least_attainment_gain, cost, attainment_error)
    # Latencies are taken to vary as much as their mean is.
    faster = gain >= 0 and latency_gain > max(settings.least_latency_gain, cost, 1.0 / math.sqrt(num))
    return Verdict(
        is_worth=more_attained or faster, reason=told if more_attained or faster else f"too little is gained: {told}",
        attainment_gain=gain, latency_gain=latency_gain, cost=cost,
    )  # fmt: skip


class Replacement:
    """The core: when a search is due, and the interval."""

    def __init__(
        self,
        settings: ReplacementSettings,
        now_s: float,
        state: IntervalState | None = None,
    ) -> None:
        """`state`: as stored by who led before; None: the first interval begins."""
        self.settings = settings
        self.state = state or IntervalState(interval_s=settings.initial_s, since_s=now_s)
        self._asked = ""
        """Why a search is due at once."""

    @property
    def interval_s(self) -> float:
        """Bounded anew, as the settings may be others than when it was stored."""
        return min(max(self.state.interval_s, self.settings.least_s), self.settings.most_s)

    @property
    def since_s(self) -> float:
        return self.state.since_s

    @property
    def next_s(self) -> float:
        """When the interval is over."""
        return self.state.since_s + self.interval_s

    def ask(self, reason: str) -> None:
        """A search is due at once: a model was added, a node is gone, or somebody asks for it. The first reason stays."""
        self._asked = self._asked or reason

    def due(self, now_s: float) -> str:
        """Why a search is due; empty: none is."""
        return self._asked or ("the interval is over" if now_s >= self.next_s else "")

    def window(self, now_s: float) -> tuple[float, float]:
        """Of the traffic to search with: the last interval's length, also where a search was asked for early."""
        return (now_s - self.interval_s, now_s)

    def begin(self, now_s: float, measured: Prediction | None) -> None:
        """A search begins. `measured`: since `since_s`; None: that is not known. If the interval is over, the next one's
        length follows from it."""
        state, is_over = self.state, now_s >= self.next_s
        self._asked = ""
        if is_over and measured is not None and state.predicted is not None:
            interval_s = next_interval_s(self.interval_s, state.predicted, measured, self.settings)
            found = deviation(state.predicted, measured)
            state = msgspec.structs.replace(state, interval_s=interval_s, deviation=found)
        # Another search is not due before this one ends, and an interval later at the latest if it never does.
        self.state = msgspec.structs.replace(state, since_s=now_s, predicted=None)

    def judge(self, proposal: Proposal, problem: Problem) -> Verdict:
        return judge(proposal, problem, self.interval_s, self.settings)

    def settled(self, now_s: float, predicted: Prediction | None) -> None:
        """A plan serves, of which that is predicted: an interval begins."""
        self.state = msgspec.structs.replace(self.state, since_s=now_s, predicted=predicted)
