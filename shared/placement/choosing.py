"""The choice among the plans that a search found: by traffic as it may go on, by the faithful simulation where there is one,
and by what the change to each costs. Why the others were not taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import msgspec

from shared.placement.estimator import Estimator
from shared.placement.plan import ATTAINMENT_GRAIN, MOST_FLOOR_COST, Trial, is_affordable, plan_of
from shared.placement.problem import Plan, Prediction, Problem, Proposal, Rejected
from shared.placement.space import Found, Score, Scored, Space, served_by
from shared.placement.trial import try_change

LATENCY_GRAIN = 0.02
"""Relative: plans are equally good if their latencies differ by less, and their attainments by less than their grain."""
NUM_EVALUATED = 4
NUM_REJECTED = 8

Evaluate = Callable[[Problem, Plan], Prediction]


def propose(
    space: Space,
    estimator: Estimator,
    scored: Callable[[Sequence[Plan], Plan], list[Score]],
    found: Sequence[Found],
    evaluate: Evaluate | None,
    evaluated: Callable[[Evaluate, Sequence[Plan]], list[Prediction]],
) -> Proposal:
    """`estimator`: of the traffic of the search. `scored`: scores of plans; the incumbent is one of them, if there is any.
    `found`: best first. `evaluated`: runs `evaluate` for each plan."""
    problem, incumbent = space.problem, plan_of(space.incumbent)
    plans = list(dict.fromkeys(plan_of(space.aligned(each.slots)) for each in found)) or [incumbent]
    has_incumbent = bool(incumbent.groups)
    if has_incumbent and incumbent not in plans:
        plans.append(incumbent)
    scores: dict[Plan, Scored] = dict(zip(plans, scored(plans, incumbent), strict=True))
    plans.sort(key=_ranks(space, plans, scores).__getitem__, reverse=True)
    asked = plans[:NUM_EVALUATED]
    if has_incumbent and incumbent not in asked:
        asked.append(incumbent)
    if (neglects := _best_in_total(space, plans, scores, asked[0])) is not None and neglects not in asked:
        asked.append(neglects)  # so that the cost of the floor, and whom it helps, can be reported
    predict = estimator.predict
    predictions = [predict(plan) for plan in asked] if evaluate is None else evaluated(evaluate, asked)
    known = dict(zip(asked, predictions, strict=True))
    if evaluate is not None:
        scores = _corrected(estimator, scores, known)
    elif problem.evidence is None:
        scores |= known
    ranks = _ranks(space, asked, scores)
    best = max(asked, key=ranks.__getitem__)
    equals = [plan for plan in asked if ranks[plan][:2] == ranks[best][:2] and _is_as_good(scores[plan], scores[best])]
    if problem.incumbent is not None:
        best = min(equals, key=lambda plan: (space.change_s(plan), plan != incumbent, asked.index(plan)))
    trial = None
    if has_incumbent and best != incumbent:
        best, trial = _tried(space, incumbent, best, _cheaper(space, plans, scores, best, incumbent))
        if best not in known:
            (known[best],) = [predict(best)] if evaluate is None else evaluated(evaluate, [best])
    others = sorted((plan for plan in asked if plan != best), key=ranks.__getitem__, reverse=True)
    others += [plan for plan in plans if plan not in known][: NUM_REJECTED - len(others)]
    return Proposal(
        plan=best,
        prediction=known[best],
        incumbent=known.get(incumbent) if has_incumbent else None,
        rejected=tuple(
            Rejected(plan, known.get(plan), _reason(space, plan, known.get(plan), best, known[best])) for plan in others
        ),
        unplaced=space.unplaced(best),
        trial=trial,
        floor_cost=_floor_cost(space, plans, scores, best),
    )


def _ranks(
    space: Space, plans: Sequence[Plan], scores: Mapping[Plan, Scored]
) -> dict[Plan, tuple[float, bool, float, float]]:
    """What plans are compared by, larger is better: groups that models lack, whether the plan is affordable beside the one
    that attains most, attainment less the term for models left behind, and normalised latency."""
    lacking = {plan: space.num_lacking(plan.groups) for plan in plans}
    least = min(lacking.values())
    most = max(scores[plan].attainment for plan in plans if lacking[plan] == least)
    found = {}
    for plan in plans:
        lacks, served, latency = space.key(plan.groups, scores[plan])
        found[plan] = (lacks, is_affordable(scores[plan].attainment, most), served, latency)
    return found


def _corrected(
    estimator: Estimator, scores: Mapping[Plan, Scored], simulated: Mapping[Plan, Prediction]
) -> dict[Plan, Scored]:
    """Scores corrected by the difference between simulation and estimate of the last window. If traffic as it may go on was
    estimated, plans are still compared by that. Plans that were not simulated are corrected by the mean difference of the
    others, so that all are on one scale."""
    errors = {}
    for plan, told in simulated.items():
        (estimated,) = estimator.outcomes([plan.groups])
        errors[plan] = Score(
            told.attainment - estimated.attainment,
            told.normalised_latency / max(estimated.normalised_latency, 1e-9),
            told.unfairness - estimated.unfairness,
        )
    mean = Score(*(fmean(column) for column in zip(*errors.values(), strict=True)))
    found: dict[Plan, Scored] = {}
    for plan, score in scores.items():
        error = errors.get(plan, mean)
        found[plan] = Score(
            score.attainment + error.attainment,
            score.normalised_latency * error.normalised_latency,
            max(0.0, score.unfairness + error.unfairness),
        )
    return found


def _best_in_total(space: Space, plans: Sequence[Plan], scores: Mapping[Plan, Scored], best: Plan) -> Plan | None:
    """The plan that serves most in total, if it serves more than the best one by leaving more models behind."""
    lacking, now = space.num_lacking(best.groups), scores[best]
    more = [
        plan
        for plan in plans
        if scores[plan].unfairness > now.unfairness
        and scores[plan].attainment > now.attainment
        and space.num_lacking(plan.groups) <= lacking
    ]
    return max(more, key=lambda plan: scores[plan].attainment, default=None)


def _floor_cost(space: Space, plans: Sequence[Plan], scores: Mapping[Plan, Scored], best: Plan) -> float:
    more = _best_in_total(space, plans, scores, best)
    return 0.0 if more is None else scores[more].attainment - scores[best].attainment


def _cheaper(space: Space, plans: Sequence[Plan], scores: Mapping[Plan, Scored], best: Plan, incumbent: Plan) -> Plan:
    """The cheapest plan to change to, among those with at least half of the best one's gain."""
    now, most = scores[incumbent], scores[best]
    ranks = _ranks(space, plans, scores)
    plans = [plan for plan in plans if ranks[plan][1]]
    lacking = space.num_lacking(best.groups)
    gain = served_by(most) - served_by(now)
    if gain > ATTAINMENT_GRAIN:
        enough = [plan for plan in plans if served_by(scores[plan]) - served_by(now) >= gain / 2]
    else:
        latency = (most.normalised_latency + now.normalised_latency) / 2
        enough = [
            plan
            for plan in plans
            if served_by(scores[plan]) >= served_by(most) - ATTAINMENT_GRAIN
            and scores[plan].normalised_latency <= latency
        ]
    enough = [plan for plan in enough if plan != incumbent and space.num_lacking(plan.groups) <= lacking]
    return min([best, *enough], key=space.change_s)


def _tried(space: Space, incumbent: Plan, best: Plan, cheaper: Plan) -> tuple[Plan, Trial]:
    """The one of both plans that would have served better including its change."""
    problem = msgspec.structs.replace(space.problem, incumbent=incumbent)
    trials = [(plan, try_change(problem, plan)) for plan in dict.fromkeys((best, cheaper))]

    def key(tried: tuple[Plan, Trial]) -> tuple[float, float]:
        horizons = tried[1].horizons
        if not horizons:
            return (-1.0, 0.0)
        attainment = fmean(one.change_attainment - one.change_unfairness for one in horizons)
        return (round(attainment / ATTAINMENT_GRAIN), -fmean(one.change_latency for one in horizons))

    return max(trials, key=key)


def _is_as_good(one: Scored, best: Scored) -> bool:
    return served_by(one) >= served_by(
        best
    ) - ATTAINMENT_GRAIN and one.normalised_latency <= best.normalised_latency * (1 + LATENCY_GRAIN)


def _reason(space: Space, plan: Plan, prediction: Prediction | None, best: Plan, taken: Prediction) -> str:
    if prediction is None:
        return "less by the estimate than those that were simulated"
    if space.num_lacking(plan.groups) > space.num_lacking(best.groups):
        return "not every model has its groups"
    if served_by(prediction) > served_by(taken) + ATTAINMENT_GRAIN and prediction.attainment < taken.attainment:
        return f"attainment {prediction.attainment:.1%}: more than {MOST_FLOOR_COST:.0%} would be given up of the most"
    if _is_as_good(prediction, taken) and space.problem.incumbent is not None:
        cost_s, least_s = space.change_s(plan), space.change_s(best)
        cost, least = f"{cost_s:.3g} s", f"{least_s:.3g} s"
        return (
            f"as good, but {cost} of devices to change to, not {least}"
            if cost != least
            else "as good, and as much to change"
        )
    if round(served_by(prediction) / ATTAINMENT_GRAIN) < round(served_by(taken) / ATTAINMENT_GRAIN):
        if prediction.unfairness > taken.unfairness:
            name, now = prediction.worst, taken.models[prediction.worst].attainment
            had = prediction.models[name].attainment
            told = f"attainment {prediction.attainment:.1%}, not {taken.attainment:.1%}"
            return f"{told}, and {name} would have {had:.1%}, not {now:.1%}"
        return f"attainment {prediction.attainment:.1%}, not {taken.attainment:.1%}"
    return f"normalised latency {prediction.normalised_latency:.3g}, not {taken.normalised_latency:.3g}"
