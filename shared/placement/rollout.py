"""How one plan replaces another: what may begin, what goes on, and what is stored at each moment. Pure. Hosts are the
placement service (services/placement/replacing.py) and virtual time (shared/simulation/replacement.py).

    plan = begin(cluster, reason, target, now_s, ready)
    while change_of(plan) is not None:
        plan = go_on(cluster, planned, view, now_s, settings)

The stages of a change are in carry_out.py, and when to look for another plan in replacement.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

from shared.messages.admin import PlanProposal
from shared.messages.cluster import InstancePlan, PlacementPlan, PlanChange, instance_devices
from shared.placement import carry_out
from shared.placement.carry_out import CarryOutSettings, View, advance
from shared.placement.demand import kv_bytes
from shared.placement.plan import Plan, Prediction, Proposal, group_of, plan_of
from shared.placement.planner import DoesNotFit, Planner, for_instance
from shared.placement.problem import Problem, ProblemError
from shared.placement.replacement import Replacement, Verdict, losers


class Cluster(NamedTuple):
    """What is known at one moment."""

    plan: PlacementPlan
    """The stored one."""
    planner: Planner
    """It has all models and nodes, and the plan's instances as those that run."""
    held_nodes: Collection[str] = ()
    """Nodes that are away, but may be back in a moment."""

    @property
    def resident(self) -> set[str]:
        """Models that are not put away."""
        return {name for name, model in self.planner.models.items() if not model.is_asleep}


class Found(NamedTuple):
    """What a search found, as it would be carried out."""

    verdict: Verdict
    target: list[InstancePlan]
    kv_bytes: dict[str, int]
    """By instance id: KV that requests hold there at once, by which a pool is kept or made anew."""


def change_of(plan: PlacementPlan) -> PlanChange | None:
    """The change that is under way."""
    return None if plan.change is None or plan.change.is_over else plan.change


# ---------------------------------------------------------------------------------------------------- proposals


def assess(
    cluster: Cluster, problem: Problem, found: Proposal, replacement: Replacement, measured: Prediction | None
) -> Found:
    """Whether a proposal is worth its change. `measured`: of the plan that runs, under the problem's traffic. Raises
    `DoesNotFit`."""
    verdict = replacement.judge(found, problem, measured)
    held_bytes = kv_bytes(problem, found.plan, verdict.starved)
    target = cluster.planner.chosen(found.plan.groups, held_bytes=held_bytes)
    if verdict.cause == "larger_pools" and (reason := why_no_larger_pools(cluster.plan, target)):
        verdict = Verdict(is_worth=False, cause="same_plan", reason=reason)
    return Found(verdict, target, held_bytes)


def why_no_larger_pools(plan: PlacementPlan, target: Sequence[InstancePlan]) -> str:
    """Empty: `target` has larger ones than the plan, and is not what was rolled back last."""
    if by_id(target) == by_id(plan.instances):
        return "the plan that runs has the pools that it can have"
    last = plan.change
    if last is not None and last.stage == "rolled_back" and by_id(last.target) == by_id(target):
        return f"larger KV pools were rolled back: {last.failure}"
    return ""


def confirmed(cluster: Cluster, proposal: PlanProposal) -> bool:
    """Whether the proposal is to be carried out; False: it is what runs. Raises `ProblemError`, or `DoesNotFit`, where the
    plan is another than it was made for, or leaves models out."""
    is_same = cluster.plan.version == proposal.version
    if is_same and not proposal.is_change:
        return False
    if fewer := losers(proposal.before, proposal.plan, cluster.resident):
        raise ProblemError(f"{', '.join(fewer)} would be on no group", "places_fewer")
    # What is drained shows in the version alone, what an adapter takes in the choice alone.
    if not is_same or proposal.target != cluster.planner.chosen(proposal.plan.groups, held_bytes=proposal.kv_bytes):
        raise ProblemError(
            "models, nodes or drained instances changed while a better plan was searched for", "plan_changed"
        )
    return True


# ------------------------------------------------------------------------------------------------------ targets


def target_of(cluster: Cluster, wanted: Plan) -> list[InstancePlan]:
    """Instances of a plan; groups that stay as they are keep their KV pools. Raises `DoesNotFit`."""
    there = set(map(group_of, cluster.plan.instances))
    kept = {group.instance_id: 0 for group in wanted.groups if group in there}
    return cluster.planner.chosen(wanted.groups, held_bytes=kept)


def back_home(cluster: Cluster) -> tuple[str, list[InstancePlan]] | None:
    """Reason and target of the change to a chosen plan of which instances had been drained, as soon as any is not any more.
    Models that went elsewhere meanwhile leave again when theirs serve; those that were added since stay where they are.
    Raises `DoesNotFit`."""
    plan = cluster.plan
    if not plan.home or cluster.held_nodes:
        return None
    there = {place.instance_id for place in plan.instances}
    home = [place for place in plan.home if place.instance_id not in plan.draining]
    back = ", ".join(
        place.instance_id for place in home if place.instance_id not in there and place.node_id in cluster.planner.nodes
    )
    if not back:
        return None
    wanted = plan_of(map(group_of, [*as_before(cluster, home), *_added_beside(plan, home)]))
    try:
        if fewer := losers(plan_of(map(group_of, plan.instances)), wanted, cluster.resident):
            raise DoesNotFit(f"{', '.join(fewer)} would be on no group")
        return f"{back} came back", target_of(cluster, wanted)
    except DoesNotFit as error:
        raise DoesNotFit(f"{back} cannot have the models of before again: {error}") from None


def as_before(cluster: Cluster, before: Sequence[InstancePlan]) -> list[InstancePlan]:
    """These instances with their models, as they are configured now; models that were added since stay where they are, as
    far as their instances are to be there."""
    had, models, resident = _names(before), cluster.planner.models, cluster.resident
    now = {place.instance_id: place for place in cluster.plan.instances}
    places = []
    for place in before:
        there = now[place.instance_id].models if place.instance_id in now else []
        # A model may have been removed and added as another one.
        known = [for_instance(models[spec.name].spec) for spec in place.models if spec.name in resident]
        specs = known + [spec for spec in there if spec.name not in had]
        if specs:
            places.append(msgspec.structs.replace(place, models=sorted(specs, key=lambda spec: spec.name)))
    return places


def _added_beside(plan: PlacementPlan, before: Sequence[InstancePlan]) -> list[InstancePlan]:
    """Instances on other devices, with the models that were added since."""
    had, taken = _names(before), {device for place in before for device in _devices_of(place)}
    return [
        msgspec.structs.replace(place, models=[spec for spec in place.models if spec.name not in had])
        for place in plan.instances
        if not taken & _devices_of(place)
    ]


# ------------------------------------------------------------------------------------------------------- changes


def begin(
    cluster: Cluster,
    reason: str,
    target: Sequence[InstancePlan],
    now_s: float,
    ready: Collection[tuple[str, str]],
    *,
    is_chosen: bool = True,
    home: Sequence[InstancePlan] = (),
    undoes: int = 0,
) -> PlacementPlan:
    """The plan with a change to `target`. `ready`: (model, instance id) pairs that serve now. `home`: to which it leads,
    where it leads there. `undoes`: number of the change that it rolls back."""
    plan = cluster.plan
    number = 1 if plan.change is None else plan.change.number + 1
    planned = {(spec.name, place.instance_id) for place in plan.instances for spec in place.models}
    change = carry_out.begin(number, reason, plan.instances, target, now_s, planned.difference(ready))
    change = msgspec.structs.replace(
        change, is_chosen=is_chosen, was_chosen=plan.is_chosen, undoes=undoes, follows_drain=bool(home)
    )
    return _with_change(plan, change, home=home)


def roll_back(cluster: Cluster, now_s: float, ready: Collection[tuple[str, str]]) -> PlacementPlan:
    """The plan on its way back, as an operator asks for it: from the change that is under way, or from the last one. Raises
    `ProblemError`."""
    plan = cluster.plan
    if change_of(plan) is not None:
        return abandoned(plan, "operator", "the operator asked for it", now_s)
    if plan.change is None or plan.change.stage != "carried_out":
        raise ProblemError("no replacement was carried out that could be rolled back")
    if plan.change.follows_drain:
        # Whoever wants to undo the plan before it would lose an instance by it.
        raise ProblemError(
            f"the last replacement ({plan.change.reason}) followed an undone drain: drain the instance again, or set a plan"
        )
    target = as_before(cluster, plan.change.before)
    # It had room, but models and adapters may have been added since.
    if (place := _without_room(cluster, target)) is not None:
        names = ", ".join(spec.name for spec in place.models)
        raise ProblemError(f"{place.instance_id} has no room for {names} at once, as far as is known now")
    reason = f"the operator rolls replacement {plan.change.number} back"
    return begin(cluster, reason, target, now_s, ready, is_chosen=plan.change.was_chosen, undoes=plan.change.number)


def abandoned(plan: PlacementPlan, cause: str, why: str, now_s: float) -> PlacementPlan:
    """The plan without the change that is under way, or on its way back."""
    change = change_of(plan)
    return plan if change is None else _with_change(plan, carry_out.abandon(change, cause, why, now_s))


def stays_right(cluster: Cluster, planned: Iterable[InstancePlan]) -> bool:
    """Whether weights are fetched for a change to which it makes no difference what is known now: it begins with the plan
    that follows from that (`planned`), and what it goes to has room."""
    change = change_of(cluster.plan)
    if change is None or change.stage != "fetch" or by_id(planned) != by_id(cluster.plan.instances):
        return False
    return not _is_certain(cluster, change) or _without_room(cluster, change.target) is None


def go_on(
    cluster: Cluster,
    planned: Callable[[], Iterable[InstancePlan]],
    view: View,
    now_s: float,
    settings: CarryOutSettings,
) -> PlacementPlan:
    """The plan with the next state of its change; the same while nothing is to be done. `planned`: what would run if there
    were no change. `view`: without what follows from `cluster`."""
    plan, change = cluster.plan, change_of(cluster.plan)
    assert change is not None
    if change.stage == "fetch" and not stays_right(cluster, planned()):
        return abandoned(plan, "superseded", "models, nodes or drained instances changed", now_s)
    known, running = change, plan.instances
    if removed := _names([*change.before, *change.target, *plan.instances]) - cluster.resident:
        known, running = carry_out.forget(change, running, removed)
    nodes = {place.node_id for place in (*known.before, *known.target)}
    view = view._replace(
        gone_nodes=nodes - cluster.planner.nodes.keys() - set(cluster.held_nodes),
        is_certain=_is_certain(cluster, known),
    )
    after, instances = advance(known, running, view, now_s, cluster.planner.fits, settings)
    if after == change and by_id(instances) == by_id(plan.instances):
        return plan
    return _with_change(plan, after, instances)


def _with_change(
    plan: PlacementPlan,
    change: PlanChange,
    instances: Sequence[InstancePlan] | None = None,
    home: Sequence[InstancePlan] | None = None,
) -> PlacementPlan:
    home = plan.home if home is None else home
    if change.is_over and change.cause != "superseded":
        out = [place for place in home if place.instance_id in plan.draining]
        home = home if out and change.stage == "carried_out" else out
    # A plan between the two stays as it is.
    ends = {"fetch": change.was_chosen, "rolled_back": change.was_chosen, "carried_out": change.is_chosen}
    return msgspec.structs.replace(
        plan, version=plan.version + 1, instances=plan.instances if instances is None else list(instances),
        is_chosen=ends.get(change.stage, True), change=change,
        fetch={} if change.is_over else carry_out.to_fetch(change), home=list(home),
    )  # fmt: skip


def _without_room(cluster: Cluster, target: Iterable[InstancePlan]) -> InstancePlan | None:
    """One of these that has none for its models, as far as is known now."""
    return next((place for place in target if not cluster.planner.fits(place, place.models)), None)


def _is_certain(cluster: Cluster, change: PlanChange) -> bool:
    """Whether it is known of all models and nodes of a change what fits."""
    places, models = (*change.before, *change.target), cluster.planner.models
    is_known = all(models[name].is_known for name in _names(places) & models.keys())
    return is_known and not {place.node_id for place in places}.intersection(cluster.held_nodes)


def by_id(places: Iterable[InstancePlan]) -> list[InstancePlan]:
    return sorted(places, key=lambda place: place.instance_id)


def _names(places: Iterable[InstancePlan]) -> set[str]:
    return {spec.name for place in places for spec in place.models}


def _devices_of(place: InstancePlan) -> set[tuple[str, int]]:
    return instance_devices(place.instance_id, place.group.num_ranks)
