"""All that a plan follows from, at one moment."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from services.placement.fleet import Fleet
from services.placement.footprint import ConfiguredModel
from services.placement.planning import plan
from shared.messages.cluster import NodeInfo, PlacementPlan


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

    async def plan(self) -> PlacementPlan:
        planned = partial(plan, held_nodes=self.held_nodes, fleet=self.fleet, ready=self.ready)
        return await asyncio.to_thread(planned, self.models, self.nodes, self.incumbent)
