"""Any order of what operators and scaling ask for, on nodes that change their size at once."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.backends.local import LocalBackend
from services.placement.fleet import Fleet, instance_ids
from services.placement.scaling import Cluster, FleetKeeper
from shared.bus.interface import ServiceError
from shared.messages.admin import (
    Done,
    DrainInstance,
    ScaleInstances,
    ScaleNode,
)
from shared.messages.channels import Endpoint
from shared.messages.cluster import NodeInfo, PlacementPlan
from shared.messages.requests import ErrorCode


class Site:
    """Nodes, as their agents register them, and what placement stores; in place of the bus."""

    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        self.nodes = {
            f"n{k}": NodeInfo(node_id=f"n{k}", hostname="h", num_instances=size, memory_bytes=1, max_instances=most)
            for k, (size, most) in enumerate(sizes)
        }
        self.plan = PlacementPlan(0, [])
        self.keeper = FleetKeeper(LocalBackend(self), self.cluster, self.store, None)  # type: ignore[arg-type]

    def cluster(self) -> Cluster:
        return Cluster(list(self.nodes.values()), frozenset(), self.plan)

    async def store(self, fleet: Fleet) -> PlacementPlan:
        self.plan = PlacementPlan(1, [], {}, list(fleet.draining), list(fleet.released))
        return self.plan

    @property
    def stored(self) -> Fleet:
        return Fleet.of(self.plan)

    async def request(self, endpoint: Endpoint[ScaleNode, Done], query: ScaleNode, *, timeout_s: float) -> Done:
        match = re.search(r"node\.(\w+)\.scale", endpoint.subject)
        assert match is not None
        node = self.nodes[match[1]]
        assert node.num_instances <= query.num_instances <= node.max_instances
        self.nodes[match[1]] = msgspec.structs.replace(node, num_instances=query.num_instances)
        return Done()

    @property
    def active(self) -> list[str]:
        return [i for i in instance_ids(self.nodes.values()) if i not in self.stored.draining]


steps = st.one_of(
    st.tuples(st.sampled_from(["scale", "grow"]), st.integers(1, 9)),
    st.tuples(st.sampled_from(["drain", "undo", "shrink", "keep"]), st.tuples(st.integers(0, 2), st.integers(0, 3))),
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 2), st.integers(1, 4)).filter(lambda t: t[0] <= t[1]), min_size=1, max_size=3),
    st.lists(steps, max_size=25),
)
def test_scaling_never_touches_what_operators_drained(
    sizes: list[tuple[int, int]], asked: list[tuple[str, Any]]
) -> None:
    asyncio.run(_run(Site(sizes), asked))


async def _run(site: Site, asked: list[tuple[str, Any]]) -> None:
    by_hand: set[str] = set()
    for kind, argument in asked:
        before, number = site.stored, len(site.active)
        try:
            if kind in ("scale", "grow"):
                await site.keeper.scale(ScaleInstances(argument, is_for_scaling=kind == "grow"))
                assert len(site.active) == (argument if kind == "scale" else max(argument, number))
                if argument > number:
                    assert set(site.stored.draining) <= set(before.draining), "more: nothing is drained for it"
            else:
                instance_id = f"n{argument[0]}-{argument[1]}"
                query = DrainInstance(instance_id, kind in ("undo", "keep"), kind in ("shrink", "keep"))
                plan = await site.keeper.drain(query)
                assert plan.draining == list(site.stored.draining)
                assert (kind, instance_id in site.stored.draining) not in (("drain", False), ("undo", True))
                by_hand = by_hand | {instance_id} if kind == "drain" else by_hand
                by_hand = by_hand - {instance_id} if kind == "undo" else by_hand
                if kind == "shrink":
                    assert len(site.active) == number - (instance_id not in before.draining)
        except ServiceError as error:
            assert error.code in (ErrorCode.OVERLOADED, ErrorCode.GONE, ErrorCode.CONFLICT)
            assert site.stored == before
        await site.keeper.tend()
        assert set(site.stored.draining) - set(site.stored.released) == by_hand
        assert set(site.stored.released) <= set(site.stored.draining)
        assert len(set(site.stored.draining)) == len(site.stored.draining)
