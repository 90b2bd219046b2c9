"""The plan of the live cluster: nodes as they report themselves and models as they are configured, given to the planner
(shared/placement/planner.py), which decides. Pure: the same arguments give the same plan.

Every configured model goes on every instance (or on `replicas` of them) as memory allows. Stability comes before balance:
what the incumbent plan placed stays where it is while it fits, with its KV pool (a pool cannot change under a running
instance). New models take what is left; nothing is moved or evicted for them.

An instance whose contents cannot be judged is *frozen*: it keeps the models that are still configured and takes no others.
That holds for instances of nodes that are away for a moment, and for those with a model whose checkpoint cannot be read
just now.

An instance that is draining takes nothing: what was there goes where there is room, if it is not there already.

A plan whose assignment was *chosen* (by a search or an operator) keeps it: models stay on their groups and go on
no others. What is new, or was lost with a node, is put on the smallest group that holds it, of free devices where there are
any.

Which models on demand are to be woken or put away is decided elsewhere (`shared.placement.on_demand`). One that says nothing
of `replicas` is on one instance.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from services.placement.fleet import Fleet, instance_ids, num_ranks, num_stages
from services.placement.footprint import ConfiguredModel, DeviceFacts, device_bytes, footprint
from shared.engine.memory import slab
from shared.messages.cluster import DeviceGroup, InstancePlan, NodeInfo, PlacementPlan
from shared.placement.planner import (
    MAX_CPU_POOL_BYTES,
    Assignment,
    InstanceBudget,
    Layout,
    PlannedModel,
    PlannedNode,
    Planner,
    for_instance,
    free,
)

NOBODY_OUT = Fleet()


def planner_of(
    models: Iterable[ConfiguredModel], nodes: Iterable[NodeInfo], running: Iterable[InstancePlan] = ()
) -> Planner:
    return Planner(map(_planned_model, models), map(_planned_node, nodes), running)


def _planned_model(model: ConfiguredModel) -> PlannedModel:
    return PlannedModel(
        model.spec, model.weights, model.footprint, is_known=model.shape is not None, is_asleep=bool(model.asleep)
    )


def _planned_node(node: NodeInfo) -> PlannedNode:
    """The node with the devices that it offers now."""
    facts, num = DeviceFacts.of(node), node.num_instances * num_ranks(node)
    known = node.devices or tuple(device for group in node.groups for device in group.devices)
    devices = (known + ("",) * num)[:num]

    def kind(size: int) -> DeviceFacts:
        return facts._replace(num_ranks=size, num_stages=num_stages(node, size))

    def group(first: int, size: int) -> DeviceGroup:
        return DeviceGroup(devices[first : first + size], num_stages(node, size))

    return PlannedNode(node.node_id, facts.kind, num, device_bytes(node), kind, group)


def plan(
    models: Sequence[ConfiguredModel],
    nodes: Sequence[NodeInfo],
    incumbent: PlacementPlan | None,
    *,
    held_nodes: Collection[str] = (),
    fleet: Fleet = NOBODY_OUT,
    ready: Collection[tuple[str, str]] = (),
    in_host_memory: Collection[tuple[str, str]] = (),
    max_cpu_pool_bytes: int = MAX_CPU_POOL_BYTES,
) -> PlacementPlan:
    """The next plan; the incumbent itself if nothing changes.

    `held_nodes`: nodes that are not in `nodes` but may be back in a moment; the incumbent's instances there stay.
    `fleet`: the instances that are to be left out. `ready`: (model, instance) pairs that serve now: a model that is to be on
    fewer instances stays there. `in_host_memory`: pairs of which the instance has the model's weights in host memory.
    """
    configured = {model.spec.name: model for model in sorted(models, key=lambda m: m.spec.name)}
    draining = frozenset(fleet.draining)
    running = [] if incumbent is None else [i for i in incumbent.instances if i.instance_id not in draining]
    planner = planner_of(models, nodes, running)
    budgets = partial(_budgets, planner, held_nodes, draining)
    is_chosen = incumbent is not None and incumbent.is_chosen
    if is_chosen:
        placement = planner.extended(budgets, ready=ready, in_host_memory=in_host_memory)
    else:
        placement = Assignment(planner, budgets(_offered(nodes)), in_host_memory)
        placement.keep_incumbents(ready)
        placement.fill(everywhere=True)

    instances = [budget.plan(max_cpu_pool_bytes) for budget in placement.budgets if budget.is_needed(is_chosen)]
    out = sorted(draining.intersection(instance_ids(nodes)))
    unplaced = {
        name: f"{reason}; {', '.join(out)} drained" if out and configured[name].shape is not None else reason
        for name, model in configured.items()
        if not (model.asleep and model.shape is not None)
        and not placement.num_replicas[name]
        and (reason := _why_unplaced(placement, planner, configured, name))
    }
    version = 1 if incumbent is None else incumbent.version + 1
    unusable = {name: configured[name].problem for name in unplaced if configured[name].shape is None}
    asleep = {name: model.asleep for name, model in configured.items() if model.asleep}
    new = PlacementPlan(
        version, instances, unplaced, list(fleet.draining), list(fleet.released), unusable, is_chosen, asleep=asleep
    )
    if incumbent is not None:
        home = _home(incumbent, instances, draining) if is_chosen else []
        new = msgspec.structs.replace(new, change=incumbent.change, home=home)
    if incumbent is not None and msgspec.structs.replace(new, version=incumbent.version) == incumbent:
        return incumbent
    return new


def wasted(
    new: PlacementPlan, models: Sequence[ConfiguredModel], nodes: Sequence[NodeInfo]
) -> dict[tuple[str, int], dict[str, float]]:
    """By size of merged blocks on a kind of device: the share that each model leaves unused."""
    shapes = {model.spec.name: model.shape for model in models}
    kinds = {node.node_id: DeviceFacts.of(node) for node in nodes}
    found: dict[tuple[str, int], dict[str, float]] = {}
    for instance in new.instances:
        device = kinds.get(instance.node_id)
        for spec in instance.models:
            if device is not None and (shape := shapes.get(spec.name)) is not None:
                device = device._replace(num_ranks=instance.group.num_ranks, num_stages=instance.group.num_stages)
                merged_bytes = instance.merged_bytes // device.num_ranks
                share = slab.waste(merged_bytes, footprint(spec, shape, device).block_bytes)
                found.setdefault((device.kind, instance.merged_bytes), {})[spec.name] = share
    return found


def displaced(before: PlacementPlan | None, after: PlacementPlan) -> list[tuple[str, str]]:
    """(model, instance) pairs of `before` that `after` lacks."""
    kept = {(spec.name, i.instance_id) for i in after.instances for spec in i.models}
    had = [(spec.name, i.instance_id) for i in before.instances for spec in i.models] if before is not None else []
    return [pair for pair in had if pair not in kept]


def _offered(nodes: Iterable[NodeInfo]) -> Layout:
    """The groups that nodes make of themselves."""
    return {node.node_id: [(k * num_ranks(node), num_ranks(node)) for k in range(node.num_instances)] for node in nodes}


def _home(incumbent: PlacementPlan, instances: Iterable[InstancePlan], draining: Collection[str]) -> list[InstancePlan]:
    """The home of these instances in the next plan; empty: it is at home."""
    out = [place for place in incumbent.instances if place.instance_id in draining]
    home = incumbent.home or (incumbent.instances if out else [])
    known, there = {place.instance_id for place in home}, {place.instance_id for place in instances}
    if known <= there:
        return []
    return [*home, *(place for place in out if place.instance_id not in known)]


def _budgets(
    planner: Planner, held_nodes: Collection[str], draining: Collection[str], layout: Layout
) -> list[InstanceBudget]:
    """Instances of a layout without those that drain, and with those of nodes that are away for a moment."""
    budgets = [budget for budget in planner.budgets(layout) if budget.instance_id not in draining]
    for place in planner.running.values():
        if place.node_id in held_nodes and place.node_id not in planner.nodes:
            budgets.append(
                InstanceBudget(
                    instance_id=place.instance_id, node_id=place.node_id, device="cpu", kind=None, capacity_bytes=0,
                    group=place.group, incumbent=place, is_frozen=True,
                )
            )  # fmt: skip
    for budget in budgets:
        for spec in budget.incumbent.models if budget.incumbent is not None else ():
            model = planner.models.get(spec.name)
            if model is not None and not model.is_known and not model.is_asleep:
                budget.is_frozen = budget.is_frozen or for_instance(model.spec) == for_instance(spec)
    return budgets


def _why_unplaced(placement: Assignment, planner: Planner, configured: Mapping[str, ConfiguredModel], name: str) -> str:
    """Empty for a model whose checkpoint is still being read."""
    model = configured[name]
    if model.shape is None:
        return model.problem
    budgets = [budget for budget in placement.budgets if not budget.is_frozen]
    if not budgets:
        unread = next((other for other in configured.values() if other.shape is None and other.problem), None)
        if unread is not None:
            name = unread.spec.name
            return f"all instances wait for the checkpoint of {name!r}, which cannot be read: {unread.problem}"
        return "no instance is there to hold it" if planner.nodes else "no worker node is registered"
    budget = max(budgets, key=lambda one: (one.capacity_bytes - one.used_bytes, one.instance_id))
    if not model.spec.is_native and all(other.specs for other in budgets):
        return f"the engine {model.spec.engine} of {name!r} takes an instance for itself, and none is empty: add one"
    if all(placement.is_taken(name, other) for other in budgets):
        return f"all instances are those of models on engines that take one for themselves: {name!r} needs one more"
    return f"{placement.needs(name, budget)}; the instance with the most room, {budget.instance_id}, has {free(budget)}"
