"""Draining instances, and having more or fewer of them: what is asked for becomes a change of the fleet, which is stored
with the plan, and calls of the back end. One request at a time.

    DrainInstance    -> out of the plan (or back); for scaling the back end says which instance it has to be
    ScaleInstances   -> more: first those that scaling took out come back, then the back end makes room for others
                        fewer: the back end says which are drained
    tend()           -> what ran the drained ones may go, and what does not exist any more is forgotten
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple

from services.placement.backends.interface import ScalingBackend
from services.placement.fleet import Fleet, instance_ids, node_of
from shared.bus.interface import BusError, KeyValue
from shared.messages.admin import DrainInstance, ScaleInstances
from shared.messages.cluster import InstanceInfo, NodeInfo, PlacementPlan
from shared.messages.requests import ErrorCode
from shared.models.spec import refuse

logger = logging.getLogger(__name__)

TEND_INTERVAL_S = 1.0


class Cluster(NamedTuple):
    """The nodes of this moment."""

    nodes: list[NodeInfo]
    held: frozenset[str]
    """Those that are away, but may be back in a moment."""
    plan: PlacementPlan | None

    @property
    def fleet(self) -> Fleet:
        return Fleet.of(self.plan)

    @property
    def names(self) -> set[str]:
        """Names of all instances, the drained ones too."""
        planned = {i.instance_id for i in self.plan.instances} if self.plan is not None else set()
        return planned | set(instance_ids(self.nodes)) | set(self.fleet.draining)

    def is_last(self, instance_id: str) -> bool:
        """Whether the plan has models on this instance and on no other."""
        return self.plan is not None and [one.instance_id for one in self.plan.instances if one.models] == [instance_id]


class FleetKeeper:
    def __init__(
        self,
        backend: ScalingBackend,
        cluster: Callable[[], Cluster],
        store: Callable[[Fleet], Awaitable[PlacementPlan]],
        registry: KeyValue[InstanceInfo],
    ) -> None:
        """`store`: publishes a plan for the fleet, or raises."""
        self._backend = backend
        self._cluster = cluster
        self._store = store
        self._registry = registry
        self._alone = asyncio.Lock()

    async def drain(self, query: DrainInstance) -> PlacementPlan:
        async with self._alone:
            cluster, instance_id = self._cluster(), query.instance_id
            if instance_id not in cluster.names:
                known = ", ".join(sorted(cluster.names)) or "none"
                message = f"there is no instance {instance_id!r}; there are: {known}"
                raise refuse(message, "instance_id", ErrorCode.GONE)
            changed = fleet = cluster.fleet
            if query.is_undone:
                # Scaling does not undo what an operator did.
                if not query.is_for_scaling or instance_id in fleet.released:
                    changed = fleet.undo([instance_id])
            elif not query.is_for_scaling:
                if not query.is_forced and cluster.is_last(instance_id):
                    message = f"{instance_id!r} is the last instance: requests would wait until their deadlines"
                    raise refuse(message, "instance_id", ErrorCode.CONFLICT)
                changed = fleet.drain([instance_id])
            elif instance_id not in fleet.draining:
                chosen = self._backend.to_drain(1, cluster.nodes, fleet.draining, instance_id)
                if not chosen:
                    raise refuse(
                        f"nothing can be drained in place of {instance_id!r}", "instance_id", ErrorCode.CONFLICT
                    )
                changed = fleet.drain(chosen, is_for_scaling=True)
            return await self._change(fleet, changed)

    async def scale(self, query: ScaleInstances) -> PlacementPlan:
        if query.num_instances < 1:
            raise refuse(f"num_instances is {query.num_instances}: expected 1 or more", "num_instances")
        async with self._alone:
            cluster = self._cluster()
            nodes, fleet = cluster.nodes, cluster.fleet
            existing = instance_ids(nodes)
            num_active = len([i for i in existing if i not in fleet.draining])
            num_more = query.num_instances - num_active
            if num_more < 0 and query.is_for_scaling:
                return await self._change(fleet, fleet)
            if num_more < 0:
                chosen = self._backend.to_drain(-num_more, nodes, fleet.draining)
                if len(chosen) < -num_more:
                    raise refuse(f"only {len(chosen)} of {num_active} instances can be detached", "num_instances",
                                 ErrorCode.CONFLICT)  # fmt: skip
                return await self._change(fleet, fleet.drain(chosen, is_for_scaling=True))
            revived: list[str] = []
            if num_more:
                released = [i for i in fleet.released if i in existing]
                revived = (await self._backend.revivable(released, nodes))[-num_more:]
            if num_more > len(revived):
                by_hand = [i for i in existing if i in fleet.draining and i not in fleet.released]
                await self._backend.grow(num_more - len(revived), nodes, by_hand)
            return await self._change(fleet, fleet.undo(revived))

    async def tend_for_ever(self, is_leader: Callable[[], bool]) -> None:
        while True:
            await asyncio.sleep(TEND_INTERVAL_S)
            try:
                if is_leader():
                    await self.tend()
            except BusError as error:
                logger.warning("scaling could not go on, trying again: %s", error)
            except Exception:
                logger.exception("scaling failed, trying again")

    async def tend(self) -> None:
        async with self._alone:
            cluster = self._cluster()
            fleet = cluster.fleet
            if self._backend.removes_nodes and fleet.released:
                ended = [i for i in fleet.released if await self._registry.get(i) is None]
                if ended:
                    await self._backend.release(ended, cluster.nodes)
            if gone := self._vanished(cluster):
                await self._change(fleet, fleet.undo(gone))

    def _vanished(self, cluster: Cluster) -> Collection[str]:
        """Released instances for which no node has room any more. (While no node is there at all, nothing is known.)"""
        if not cluster.nodes:
            return []
        existing = set(instance_ids(cluster.nodes))
        return [i for i in cluster.fleet.released if i not in existing and node_of(i)[0] not in cluster.held]

    async def _change(self, before: Fleet, fleet: Fleet) -> PlacementPlan:
        new = await self._store(fleet)
        if fleet != before:
            logger.info("draining: %s; of these for scaling: %s", ", ".join(fleet.draining) or "none",
                        ", ".join(fleet.released) or "none")  # fmt: skip
        return new
