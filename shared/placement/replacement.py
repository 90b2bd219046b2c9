"""Decides when to search for another placement, and whether what is found is worth a change (SeaLLM, section 4.3). Pure:
time (seconds of any clock) is an argument. The placement service and virtual time host the same core:

    replacement = Replacement(settings, now_s)
    replacement.notice(models, nodes)
    if reason := replacement.look(now_s, measured_in):
        replacement.begin(now_s, measured)            # of the time since `replacement.since_s`
        ...                                           # a search under the traffic of `replacement.window(now_s)`
        verdict = replacement.judge(proposal, problem, measured_in_the_window)
        replacement.settled(now_s, prediction)        # of the plan that serves from now on

An interval begins when a plan serves, with what is predicted of it, and ends `interval_s` later. What was measured since
then makes the next interval shorter or longer (equation 8). A tenth less would be of no use to those who wait while a plan
fails: so each `least_s` attainment is looked at, and where less is attained than was predicted, by as much as a change has
to gain and by more than chance, the interval is over and the next one as short as may be. From then on the plan that runs is
not protected by the error of what is gained, until it serves again as was predicted of it, or another does. A model that is
added, and a node that is gone, ask for a search at once; that ends no interval, so nothing is compared.

How often is looked does not shorten what a change is judged by: the evidence reaches as far back as for the first interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec

from shared.placement.places import starved
from shared.placement.plan import ATTAINMENT_GRAIN, Horizon, ModelPrediction, Plan, Prediction, Proposal, Trial
from shared.placement.problem import Problem
from shared.placement.rehearsal import change_s
from shared.placement.stretches import evidence_s


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
    """A loss of more attainment than that ends an interval."""
    least_latency_gain: float = 0.05
    """Share by which normalised latency falls at least where attainment stays; both with the cost of the change."""
    errors: float = 2.0
    """Standard errors that a gain is beyond at least, and a loss that ends an interval."""
    window_changes: float = 2.0
    """Times that a change takes, of whose traffic a plan is searched with at least."""


class IntervalState(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of the core."""

    interval_s: float
    since_s: float
    """Time at which this interval began."""
    predicted: Prediction | None = None
    """Prediction for the plan that serves; None: none yet, or of a search that failed."""
    deviation: float | None = None
    """Deviation in the last interval that was compared."""
    change_s: float = 0.0
    """Seconds that the last change that was tried takes."""


Cause = Literal[
    "none_runs", "limit_broken", "places_more", "pays", "larger_pools",
    "same_plan", "places_fewer", "takes_too_long", "small_gain", "cost", "serves_better", "fragile", "chance",
]  # fmt: skip
"""Why a change is worth it (those of the first line), or is not."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    is_worth: bool
    cause: Cause
    reason: str
    starved: Sequence[str] = ()
    """Instances that are to have larger pools, where that is the cause."""


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


def _other_share(prediction: Prediction, names: Collection[str]) -> float:
    total = prediction.num_requests
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
    if max(predicted.num_requests, measured.num_requests) < settings.least_requests:
        return interval_s
    factor = -settings.beta if deviation(predicted, measured) > settings.beta else settings.beta
    return min(max(interval_s * (1.0 + factor), settings.least_s), settings.most_s)


def loss(predicted: Prediction, measured: Prediction, settings: ReplacementSettings) -> str:
    """What to tell of an attainment that is below what was predicted: by more than a change has to gain, and than `errors`
    standard errors. Empty where it is not, and where there are too few requests to tell."""
    both = [name for name in sorted(predicted.models) if _num(predicted, name) and _num(measured, name)]
    num = sum(_num(measured, name) for name in both)
    if not both or num < settings.least_requests:
        return ""
    expected, real = _totals(predicted, both).attainment, _totals(measured, both).attainment
    # Where all were expected in time, what was measured tells how much chance there is.
    error = math.sqrt(max(expected * (1.0 - expected), real * (1.0 - real)) / num)
    if expected - real <= max(settings.least_attainment_gain, settings.errors * error):
        return ""
    return f"attainment fell to {real:.1%}, {expected:.1%} was predicted"


def _at_most(predicted: Prediction, measured: Prediction, settings: ReplacementSettings) -> Prediction:
    """With no more attainment of a model than was measured, where that was of enough requests."""
    models = {
        name: one
        if _num(measured, name) < settings.least_requests
        else msgspec.structs.replace(one, attainment=min(one.attainment, measured.models[name].attainment))
        for name, one in predicted.models.items()
    }
    total = max(1, predicted.num_requests)
    attainment = sum(one.attainment * one.num_requests for one in models.values()) / total
    return msgspec.structs.replace(predicted, models=models, attainment=attainment)


def losers(before: Plan, after: Plan, known: Collection[str]) -> list[str]:
    """Models, of those that are known still, that are on no group any more."""
    return sorted((before.models - after.models).intersection(known))


def judge(
    proposal: Proposal,
    problem: Problem,
    interval_s: float,
    settings: ReplacementSettings,
    measured: Prediction | None = None,
    *,
    has_failed: bool = False,
) -> Verdict:
    """Whether the proposal is worth a change. It is if on the mean of its trial's horizons more is gained than the change
    costs, by more than `errors` standard errors, unless the plan that runs `has_failed` what was predicted of it. One that
    was not tried is to pay until the next search. `measured`: of the plan that runs, under the problem's traffic. By how
    much that is better than what is predicted of it, by so much is the gain taken to be an error of the prediction."""
    if has_failed:
        settings = msgspec.structs.replace(settings, errors=0.0)
    if problem.incumbent is not None and proposal.plan == problem.incumbent:
        if full := starved(problem, _late(measured, settings)):
            reason = f"requests would fill the KV pools of {', '.join(full)}, which may be larger"
            return Verdict(is_worth=True, cause="larger_pools", reason=reason, starved=full)
        return Verdict(is_worth=False, cause="same_plan", reason="the best plan found is the one that runs")
    if problem.incumbent is None or not problem.incumbent.groups:
        return Verdict(is_worth=True, cause="none_runs", reason="no plan runs yet")
    if fewer := losers(problem.incumbent, proposal.plan, {model.name for model in problem.models}):
        return Verdict(is_worth=False, cause="places_fewer", reason=f"{', '.join(fewer)} would be on no group")
    if proposal.incumbent is None:
        told = "the plan that runs breaks a limit of models or devices of a group"
        return Verdict(is_worth=True, cause="limit_broken", reason=told)
    if more := sorted(proposal.plan.models - problem.incumbent.models):
        return Verdict(is_worth=True, cause="places_more", reason=f"{', '.join(more)} would be placed")
    trial = proposal.trial or _untried(proposal, problem, interval_s)
    if not trial.horizons:
        told = f"the change takes {trial.change_s:.0f} s, and not so much of the traffic is known"
        return Verdict(is_worth=False, cause="takes_too_long", reason=told)
    better = _better(proposal.incumbent, measured, settings)
    verdict = _verdict(trial, _mean(trial.horizons), better, settings)
    if verdict.is_worth and has_failed:
        reason = f"the plan that runs serves worse than was predicted of it: {verdict.reason}"
        verdict = msgspec.structs.replace(verdict, reason=reason)
    if verdict.is_worth and proposal.trial is not None and len(trial.horizons) == 1:
        reason = f"nothing is known but the traffic that it was searched with: {verdict.reason}"
        return msgspec.structs.replace(verdict, is_worth=False, cause="chance", reason=reason)
    return verdict


def _late(measured: Prediction | None, settings: ReplacementSettings) -> set[str]:
    """Models of which enough requests were measured, and too many of them late."""
    if measured is None:
        return set()
    return {
        name
        for name, model in measured.models.items()
        if model.num_requests >= settings.least_requests and model.attainment < 1.0 - settings.least_attainment_gain
    }


def _mean(horizons: Sequence[Horizon]) -> Horizon:
    """Each is as likely. Their errors are not independent of each other."""
    fields = {
        name: fmean(getattr(one, name) for one in horizons)
        for name in Horizon.__struct_fields__
        if name not in ("seconds", "num_requests")
    }
    longest = horizons[-1]
    return Horizon(seconds=longest.seconds, num_requests=longest.num_requests, **fields)


class _Better(NamedTuple):
    """What was measured, than what was predicted of the same plan and traffic."""

    attainment: float = 0.0
    latency: float = 0.0
    """Share of the predicted normalised latency."""


def _better(predicted: Prediction, measured: Prediction | None, settings: ReplacementSettings) -> _Better:
    if measured is None or measured.num_requests < settings.least_requests:
        return _Better()
    latency = 0.0
    if predicted.normalised_latency > 0:
        latency = max(0.0, 1.0 - measured.normalised_latency / predicted.normalised_latency)
    return _Better(max(0.0, measured.attainment - predicted.attainment), latency)


def _untried(proposal: Proposal, problem: Problem, interval_s: float) -> Trial:
    """By what is predicted of both plans, and the share of the fleet's time until the next search that the change takes."""
    before, after = proposal.incumbent, proposal.prediction
    assert before is not None
    seconds = change_s(problem.incumbent, proposal.plan, problem)
    share = min(1.0, seconds / (sum(node.num_devices for node in problem.nodes) * interval_s))
    num = max(1, after.num_requests)
    horizon = Horizon(
        seconds=interval_s, num_requests=num, stay_attainment=before.attainment, free_attainment=after.attainment,
        change_attainment=after.attainment - share,
        stay_unfairness=before.unfairness, change_unfairness=after.unfairness, free_unfairness=after.unfairness,
        attainment_error=math.sqrt(before.attainment * (1.0 - before.attainment) / num),
        stay_latency=before.normalised_latency, free_latency=after.normalised_latency,
        change_latency=after.normalised_latency + share * before.normalised_latency,
        # Latencies are taken to vary as much as their mean is.
        latency_error=before.normalised_latency / math.sqrt(num),
    )  # fmt: skip
    return Trial(
        change_s=0.0, lost_device_s=seconds, moved_bytes=0, interrupted=[], horizons=[horizon],
        busier_gain=after.attainment - before.attainment,
    )  # fmt: skip


def _verdict(trial: Trial, on: Horizon, better: _Better, settings: ReplacementSettings) -> Verdict:
    error = settings.errors * on.attainment_error
    gain = on.change_attainment - on.stay_attainment + on.stay_unfairness - on.change_unfairness
    slower = max(on.stay_latency, 1e-9)
    latency_gain, latency_error = 1.0 - on.change_latency / slower, settings.errors * on.latency_error / slower

    def is_enough(gain: float, latency_gain: float, *, margin: float = 0.0) -> bool:
        more_attained = gain > max(settings.least_attainment_gain, margin * error)
        is_faster = latency_gain > max(settings.least_latency_gain, margin * latency_error)
        return more_attained or (gain >= -ATTAINMENT_GRAIN and is_faster)

    free = (
        on.free_attainment - on.stay_attainment + on.stay_unfairness - on.free_unfairness,
        1.0 - on.free_latency / slower,
    )
    # That there will be more requests is taken to be as likely as that there will not. Room alone is no reason to change.
    robust = min(gain, 0.5 * (gain + trial.busier_gain)), latency_gain
    real = gain - better.attainment, latency_gain - better.latency
    cause: Cause
    if not is_enough(*free):
        cause, why = "small_gain", "too little is gained"
    elif not is_enough(gain, latency_gain):
        cause, why = "cost", "the change costs more than it gains"
    elif not is_enough(*robust):
        cause, why = "fragile", f"with more requests attainment would change by {trial.busier_gain:+.1%}"
    elif not is_enough(*real):
        cause, why = "serves_better", "the plan that runs serves better than is predicted of it"
    elif not is_enough(*real, margin=1.0):
        cause, why = "chance", "the gain may be chance"
    else:
        cause, why = "pays", ""
    told = (
        f"in times like the last {on.seconds:.0f} s attainment {on.stay_attainment:.1%} -> {on.change_attainment:.1%} "
    )
    told += f"({on.free_attainment:.1%} without the change's {trial.change_s:.0f} s), normalised latency "
    told += f"{on.stay_latency:.3g} -> {on.change_latency:.3g} ({on.free_latency:.3g})"
    return Verdict(is_worth=cause == "pays", cause=cause, reason=f"{why}: {told}" if why else told)


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
        self._looked_s = now_s
        self._broken: Prediction | None = None
        """What was predicted of the plan that runs, and did not come."""
        self._seen: tuple[frozenset[str], frozenset[str]] | None = None

    @property
    def interval_s(self) -> float:
        """Bounded anew, as the settings may be others than when it was stored."""
        return min(max(self.state.interval_s, self.settings.least_s), self.settings.most_s)

    @property
    def since_s(self) -> float:
        return self.state.since_s

    @property
    def next_s(self) -> float:
        """Time at which the interval is over."""
        return self.state.since_s + self.interval_s

    @property
    def look_s(self) -> float:
        """Time of the next `watch`; infinite where that could end the interval no earlier."""
        look_s = max(self._looked_s, self.state.since_s) + self.settings.least_s
        return look_s if look_s < self.next_s else math.inf

    def watch(self, now_s: float, measured: Prediction) -> None:
        """`measured`: in the last `least_s`, in which the plan may have begun to fail. What it fails under is not older, so
        the next search goes by no more than that."""
        self._looked_s = now_s
        predicted = self.state.predicted
        if predicted is not None and (told := loss(predicted, measured, self.settings)):
            self._broken = self._broken or predicted
            self.state = msgspec.structs.replace(self.state, interval_s=self.settings.least_s)
            self.ask(told)

    def look(self, now_s: float, measured_in: Callable[[float], Prediction]) -> str:
        """Why a search is due; empty: none is. Call it each second while none is under way. `measured_in`: what was measured
        in the last time of a length."""
        if now_s >= self.look_s:
            self.watch(now_s, measured_in(self.settings.least_s))
        return self.due(now_s)

    def notice(self, models: Collection[str], nodes: Collection[str]) -> None:
        """The models that are always loaded, and the nodes: a search is due at once where there are others than before."""
        seen = frozenset(models), frozenset(nodes)
        if self._seen is not None:
            for names, what in (
                (seen[0] - self._seen[0], "model {} was added"),
                (self._seen[1] - seen[1], "node {} is gone"),
                (seen[1] - self._seen[1], "node {} came"),
            ):
                if names:
                    self.ask(what.format(", ".join(sorted(names))))
        self._seen = seen

    def ask(self, reason: str) -> None:
        """A search is due at once: a model was added, a node is gone, or somebody asks for it. The first reason stays."""
        self._asked = self._asked or reason

    def due(self, now_s: float) -> str:
        """Why a search is due; empty: none is."""
        return self._asked or ("the interval is over" if now_s >= self.next_s else "")

    @property
    def window_s(self) -> float:
        """Length of the traffic to search with: the last interval's, also where a search was asked for early; but longer
        where a change takes long, as a plan that fits the traffic of less time is over before it serves."""
        return max(self.interval_s, self.settings.window_changes * self.state.change_s)

    def window(self, now_s: float) -> tuple[float, float]:
        return (now_s - self.window_s, now_s)

    def evidence(self, now_s: float) -> tuple[float, float]:
        """The traffic that a change is tried on: no less than for the first interval, however short this one is."""
        return (now_s - evidence_s(max(self.window_s, self.settings.initial_s)), now_s)

    def begin(self, now_s: float, measured: Prediction | None) -> None:
        """A search begins. `measured`: since `since_s`; None: that is not known. If the interval is over, the next one's
        length follows from it."""
        state, is_over = self.state, now_s >= self.next_s
        self._asked = ""
        if measured is not None and self.settings.least_s < self.settings.most_s:
            self._compare(state.predicted, measured)
        if is_over and measured is not None and state.predicted is not None:
            interval_s = next_interval_s(self.interval_s, state.predicted, measured, self.settings)
            found = deviation(state.predicted, measured)
            state = msgspec.structs.replace(state, interval_s=interval_s, deviation=found)
        # Another search is not due before this one ends, and an interval later at the latest if it never does.
        self.state = msgspec.structs.replace(state, since_s=now_s, predicted=None)

    def _compare(self, predicted: Prediction | None, measured: Prediction) -> None:
        if self._broken is not None:
            if measured.num_requests >= self.settings.least_requests and not loss(
                self._broken, measured, self.settings
            ):
                self._broken = None
        elif predicted is not None and loss(predicted, measured, self.settings):
            self._broken = predicted

    @property
    def has_failed(self) -> bool:
        """Whether the plan that runs serves worse than was predicted of it."""
        return self._broken is not None

    def judge(self, proposal: Proposal, problem: Problem, measured: Prediction | None = None) -> Verdict:
        """`measured`: of the plan that runs, in the window that was searched with."""
        self.tried(proposal)
        return judge(proposal, problem, self.interval_s, self.settings, measured, has_failed=self.has_failed)

    def tried(self, proposal: Proposal) -> None:
        """Remembers how long a change takes, by which the next window is chosen."""
        if proposal.trial is not None:
            self.state = msgspec.structs.replace(self.state, change_s=proposal.trial.change_s)

    def settled(self, now_s: float, predicted: Prediction | None) -> None:
        """A plan serves, of which that is predicted: an interval begins."""
        self._broken = None
        self.state = msgspec.structs.replace(self.state, since_s=now_s, predicted=predicted)

    def kept(self, now_s: float, predicted: Prediction | None, measured: Prediction | None = None) -> None:
        """The plan that runs stays, of which that is predicted under the traffic of the search: an interval begins.
        `measured`: under that traffic; what it served worse than is predicted it is expected to serve worse again, so that
        one failure does not end one interval after the other."""
        if predicted is not None and measured is not None:
            predicted = _at_most(predicted, measured, self.settings)
        self.state = msgspec.structs.replace(self.state, since_s=now_s, predicted=predicted)
