"""The instances of a problem's plans, with their KV pools, and where a new model goes at once. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from shared.messages.cluster import InstancePlan, ModelSpec
from shared.placement.demand import STARVED_HEADROOM, kv_bytes
from shared.placement.memory import planner_of
from shared.placement.plan import Plan
from shared.placement.planner import KEPT_POOL
from shared.placement.problem import Problem


def places(
    problem: Problem, plan: Plan, before: Sequence[InstancePlan] = (), only: Collection[str] = ()
) -> list[InstancePlan]:
    """The plan's instances. A group that runs keeps its KV pool where its models fit beside it, unless it could have a much
    larger one and its requests may need that; `only`: as in `kv_bytes`."""
    held_bytes = kv_bytes(problem, plan, only) if before else {}
    return planner_of(problem, before or None).chosen(plan.groups, held_bytes=held_bytes)


def pools(instances: Iterable[InstancePlan]) -> dict[str, tuple[int, int]]:
    """`Problem.pools` of these."""
    return {place.instance_id: (place.pool_bytes, place.merged_bytes) for place in instances}


def incumbent_places(problem: Problem) -> list[InstancePlan]:
    """The incumbent's, with the pools that they have."""
    assert problem.incumbent is not None
    return [
        place
        if (has := problem.pools.get(place.instance_id)) is None
        else msgspec.structs.replace(place, pool_bytes=has[0], merged_bytes=has[1])
        for place in places(problem, problem.incumbent)
    ]


def starved(problem: Problem, late: Collection[str]) -> list[str]:
    """Instances of the incumbent with one of these models that their requests would fill, and that would have a larger pool
    if made anew."""
    if problem.incumbent is None or not late:
        return []
    with_late = {group.instance_id for group in problem.incumbent.groups if not set(late).isdisjoint(group.models)}
    held_bytes = kv_bytes(problem, problem.incumbent)
    return [
        place.instance_id
        for place in places(problem, problem.incumbent)
        if place.instance_id in with_late
        and (has := problem.pools.get(place.instance_id)) is not None
        and STARVED_HEADROOM * held_bytes[place.instance_id] > has[0]
        and place.pool_bytes > KEPT_POOL * has[0]
    ]


def fits(problem: Problem) -> Callable[[InstancePlan, Sequence[ModelSpec]], bool]:
    """Whether models fit beside the KV pool that an instance has."""
    return planner_of(problem).fits


def with_new_models(problem: Problem, running: Sequence[InstancePlan]) -> list[InstancePlan]:
    """What runs, with those of the problem's models that it lacks (`Planner.extended`)."""
    assignment = planner_of(problem, running).extended()
    return [budget.plan() for budget in assignment.budgets if budget.specs]
