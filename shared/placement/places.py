"""The instances of a plan: KV pools, what fits beside them, and where a new model goes at once. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from shared.engine.memory.slab import blocks_per_merged
from shared.messages.cluster import DeviceGroup, InstancePlan, ModelSpec
from shared.placement.demand import STARVED_HEADROOM, is_kept, kv_bytes
from shared.placement.memory import KEPT_POOL, pool, why_not
from shared.placement.plan import Group, Plan, group_of
from shared.placement.problem import ModelFacts, NodeFacts, Problem


def blocks(place: InstancePlan, model: ModelFacts) -> int:
    p = place.group.num_ranks
    return blocks_per_merged(place.merged_bytes // p, -(-model.block_bytes // p))


def places(
    problem: Problem, plan: Plan, before: Sequence[InstancePlan] = (), only: Collection[str] = ()
) -> list[InstancePlan]:
    """The plan's instances. A group that runs keeps its KV pool where its models fit beside it, unless it could have a much
    larger one and its requests may need that; `only`: as in `kv_bytes`."""
    nodes, models = {node.node_id: node for node in problem.nodes}, {model.name: model for model in problem.models}
    keeps, found, held_bytes = fits(problem), [], kv_bytes(problem, plan, only) if before else {}
    had = {(place.node_id, group_of(place).devices): place for place in before}
    for group in plan.groups:
        facts = [models[name] for name in group.models]
        merged_bytes, num_merged = pool(facts, nodes[group.node_id], group.num_ranks)
        specs = [ModelSpec(model.name, model.weights) for model in facts]
        place = InstancePlan(
            group.instance_id, group.node_id, specs, num_merged * merged_bytes, merged_bytes,
            DeviceGroup(("",) * group.num_ranks),
        )  # fmt: skip
        old = had.get((group.node_id, group.devices))
        if (
            old is not None
            and keeps(old, specs)
            and is_kept(old.pool_bytes, place.pool_bytes, held_bytes[group.instance_id])
        ):
            place = msgspec.structs.replace(old, models=specs)
        found.append(place)
    return found


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
    """Whether models fit beside the KV pool that an instance has: on each rank weights, activations and the pool with a
    merged block of scratch, which must hold the least number of blocks of each."""
    nodes, models = {node.node_id: node for node in problem.nodes}, {model.name: model for model in problem.models}
    return partial(_fit, nodes, models)


def _fit(
    nodes: Mapping[str, NodeFacts], models: Mapping[str, ModelFacts], place: InstancePlan, specs: Sequence[ModelSpec]
) -> bool:
    facts: list[ModelFacts] = [models[name] for name in sorted({spec.name for spec in specs})]
    node, p = nodes[place.node_id], place.group.num_ranks
    if any((node.kind, p) not in model.costs or not blocks(place, model) for model in facts):
        return False
    weights = {model.weights: model.weight_bytes for model in facts}
    least = sum(-(-model.least_blocks // blocks(place, model)) for model in facts) * place.merged_bytes
    activations = max(model.activation_bytes for model in facts)
    used = (sum(weights.values()) + place.pool_bytes + place.merged_bytes) / p + activations
    return least <= place.pool_bytes and used <= node.memory_bytes


def with_new_models(problem: Problem, plan: Plan, running: Sequence[InstancePlan]) -> Plan:
    """The plan with those of the problem's models that it lacks, each on the smallest group that holds it: of free devices,
    else one that has room beside its KV pool, the one with the fewest models. Others stay where they are. `running`: the
    plan's instances."""
    placed = {name for group in plan.groups for name in group.models}
    for model in problem.models:
        if model.name not in placed:
            group = _free_group(problem, plan, model) or _shared_group(problem, plan, running, model)
            if group is not None:
                others = [other for other in plan.groups if other.instance_id != group.instance_id]
                plan = Plan(tuple(sorted([*others, group])))
    return plan


def _free_group(problem: Problem, plan: Plan, model: ModelFacts) -> Group | None:
    for p in sorted({p for _, p in model.costs}):
        for node in problem.nodes:
            taken = {device for group in plan.groups if group.node_id == node.node_id for device in group.devices}
            runs = [tuple(range(first, first + p)) for first in range(0, node.num_devices - p + 1, p)]
            free = [devices for devices in runs if not taken.intersection(devices)]
            if free and not why_not([model], node, p):
                return Group(node.node_id, free[0], (model.name,))
    return None


def _shared_group(problem: Problem, plan: Plan, running: Sequence[InstancePlan], model: ModelFacts) -> Group | None:
    keeps, spec = fits(problem), ModelSpec(model.name, model.weights)
    groups = {group.instance_id: group for group in plan.groups}
    room = [groups[place.instance_id] for place in running if keeps(place, [*place.models, spec])]
    if not room:
        return None
    best = min(room, key=lambda group: (group.num_ranks, len(group.models), group.instance_id))
    return msgspec.structs.replace(best, models=tuple(sorted([*best.models, model.name])))
