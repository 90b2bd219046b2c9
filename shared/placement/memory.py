"""What groups hold of the models of a problem, by the planner that plans the live cluster (planner.py). Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import NamedTuple

from shared.messages.cluster import DeviceGroup, InstancePlan, ModelSpec
from shared.placement.plan import is_cpu
from shared.placement.planner import InstanceBudget, PlannedModel, PlannedNode, Planner, mib
from shared.placement.problem import ModelFacts, NodeFacts, Problem


class Pool(NamedTuple):
    """KV pool of a whole group."""

    merged_bytes: int
    """Bytes of a merged block; a p-th on each rank."""
    num_merged: int


def planner_of(problem: Problem, running: Iterable[InstancePlan] | None = None) -> Planner:
    """`running`: instances whose merged blocks are to stay; None: those of the incumbent."""
    models = [_planned_model(model) for model in problem.models]
    models += [_planned_model(model)._replace(is_asleep=True) for model in problem.asleep]
    if running is None:
        groups = () if problem.incumbent is None else problem.incumbent.groups
        running = [
            InstancePlan(group.instance_id, group.node_id, [], *has, _devices(group.devices[0], group.num_ranks))
            for group in groups
            if (has := problem.pools.get(group.instance_id)) is not None
        ]
    return Planner(models, map(_planned_node, problem.nodes), running)


def _planned_model(model: ModelFacts) -> PlannedModel:
    spec = ModelSpec(model.name, model.weights, replicas=model.replicas, on_demand=model.on_demand)
    return PlannedModel(spec, model.weights, model.footprint)


def _planned_node(node: NodeFacts) -> PlannedNode:
    device = "cpu" if is_cpu(node.kind) else "cuda"
    return PlannedNode(
        node.node_id, device, node.num_devices, node.memory_bytes, partial(_kind, node.kind), _devices
    )  # fmt: skip


def _kind(kind: str, num_ranks: int) -> tuple[str, int]:
    return kind, num_ranks


def _devices(first: int, num_ranks: int) -> DeviceGroup:
    return DeviceGroup(("",) * num_ranks)


class Memory:
    """Groups of a problem's nodes as they would be if they were made now."""

    def __init__(self, problem: Problem) -> None:
        self._planner = planner_of(problem)
        self._models = {model.name: model for model in problem.models}

    def why_not(self, names: Collection[str], node: NodeFacts, num_ranks: int) -> str:
        """Why these models cannot share a group of so many devices of the node; empty: they can."""
        if num_ranks > node.num_devices:
            return f"num_ranks: {node.node_id} has {node.num_devices} devices, not {num_ranks}"
        for name in names:
            if (node.kind, num_ranks) not in self._models[name].costs:
                return f"costs: {name!r} is not known to run on {num_ranks} devices of kind {node.kind!r}"
            if (num_heads := self._models[name].num_kv_heads) % num_ranks:
                return f"num_kv_heads: the {num_heads} of {name!r} cannot be cut over {num_ranks} devices"
        budget = self._filled(names, node, num_ranks)
        if budget.free_bytes() >= 0:
            return ""
        where = "one device" if num_ranks == 1 else f"each of {num_ranks} devices"
        needed = budget.used_bytes + budget.merged_bytes
        return (
            f"memory_bytes: {', '.join(sorted(names))} {'needs' if len(names) == 1 else 'need'} "
            f"{mib(needed)} on {where} ({mib(budget.weight_bytes)} weights, {mib(budget.activation_bytes)} activations, "
            f"{mib(needed - budget.weight_bytes - budget.activation_bytes)} least KV pool and scratch); there are "
            f"{mib(node.memory_bytes)}"
        )

    def pool(self, names: Collection[str], node: NodeFacts, num_ranks: int) -> Pool:
        """Pool of a group that `why_not` has nothing against."""
        pool_bytes, merged_bytes = self._filled(names, node, num_ranks).best_pool()
        return Pool(merged_bytes, pool_bytes // merged_bytes)

    def _filled(self, names: Collection[str], node: NodeFacts, num_ranks: int) -> InstanceBudget:
        budget = self._planner.budget(_planned_node(node), 0, num_ranks)
        for name in names:
            size = self._planner.size(name, budget.kind)
            assert size is not None
            budget.add(self._planner.models[name], size)
        return budget
