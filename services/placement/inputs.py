"""All that a plan follows from, at one moment."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, replace

from services.placement.fleet import Fleet
from services.placement.footprint import ConfiguredModel
from services.placement.planning import plan, planner_of
from shared.messages.cluster import NodeInfo, PlacementPlan, WhyAsleep
from shared.placement.rollout import Cluster


@dataclass(frozen=True)
class Inputs:
    models: list[ConfiguredModel]
    nodes: list[NodeInfo]
    held_nodes: frozenset[str]
    """Nodes that are away, but may be back in a moment."""
    incumbent: PlacementPlan | None
    fleet: Fleet
    ready: frozenset[tuple[str, str]]
    """(model, instance) pairs that serve."""
    in_host_memory: frozenset[tuple[str, str]] = frozenset()
    """Pairs of which the instance has the model's weights in host memory."""

    @property
    def resident(self) -> list[ConfiguredModel]:
        """Without the models that are put away."""
        return [model for model in self.models if not model.asleep]

    def cluster(self) -> Cluster:
        """The plan with its models and nodes, by which changes of the plan are decided."""
        plan = self.incumbent or PlacementPlan(0, [])
        return Cluster(plan, planner_of(self.models, self.nodes, plan.instances), self.held_nodes)

    def plan_now(self) -> PlacementPlan:
        """Blocking, milliseconds to a second."""
        return plan(
            self.models, self.nodes, self.incumbent, held_nodes=self.held_nodes, fleet=self.fleet, ready=self.ready,
            in_host_memory=self.in_host_memory,
        )  # fmt: skip

    async def plan(self) -> PlacementPlan:
        return await asyncio.to_thread(self.plan_now)

    def awake(self, names: Collection[str]) -> Inputs:
        """The same inputs with these of the models on demand, and no others."""
        models = [
            replace(model, asleep="" if not model.spec.on_demand or model.spec.name in names else WhyAsleep.IDLE)
            for model in self.models
        ]
        return replace(self, models=models)

    def fit(self, names: frozenset[str]) -> bool:
        """Whether these models on demand have places beside all that is always loaded. Blocking, as `plan_now`."""
        placed = {spec.name for place in self.awake(names).plan_now().instances for spec in place.models}
        return names <= placed
