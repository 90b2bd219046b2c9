"""The console's view of the cluster, assembled at most twice a second, however many people watch."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from services.gateway.admin.cluster_loads import ClusterLoads
from services.gateway.batch.records import Batches
from services.gateway.models.catalog import Catalog
from services.gateway.streams.timelines import Timelines
from shared.bus.interface import Bus, BusError
from shared.messages.admin import InstanceState
from shared.messages.catalogue import INSTANCE_POOL, PLANS
from shared.messages.console import BatchProgress, ConsoleState, PoolView, QueueLength, ShowPool

logger = logging.getLogger(__name__)

FRESH_S = 0.5
POOL_TIMEOUT_S = 0.5
MAX_POOLS = 32
"""Instances of which pools are asked for: the first by name."""
MAX_BATCHES = 20


class Console:
    def __init__(
        self, bus: Bus, gateway_id: str, catalog: Catalog, loads: ClusterLoads, timelines: Timelines, batches: Batches
    ) -> None:
        self._bus = bus
        self._gateway_id = gateway_id
        self._catalog = catalog
        self._loads = loads
        self._timelines = timelines
        self._batches = batches
        self._looking: asyncio.Task[ConsoleState] | None = None
        self._looked_at = float("-inf")

    async def state(self) -> ConsoleState:
        now = self._bus.now()
        if self._looking is None or (self._looking.done() and now - self._looked_at >= FRESH_S):
            self._looked_at = now
            self._looking = asyncio.create_task(self._look(), name="console")
        return await asyncio.shield(self._looking)

    async def _look(self) -> ConsoleState:
        instances = sorted(await self._loads.states(), key=lambda instance: instance.instance_id)
        pools, draining = await asyncio.gather(self._pools(instances[:MAX_POOLS]), self._draining())
        return ConsoleState(
            now_s=time.time(),
            gateway_id=self._gateway_id,
            instances=instances,
            draining=draining,
            pools=pools,
            queues=self._queues(),
            moves=self._timelines.moves(),
            batches=self._progress(),
        )

    async def _pools(self, instances: list[InstanceState]) -> dict[str, PoolView]:
        async def pool(instance_id: str) -> PoolView | None:
            endpoint = INSTANCE_POOL.at(instance_id=instance_id)
            try:
                return await self._bus.request(endpoint, ShowPool(), timeout_s=POOL_TIMEOUT_S)
            except BusError as error:
                logger.debug("%s does not show its pool: %s", instance_id, error)
                return None

        names = [instance.instance_id for instance in instances]
        views = await asyncio.gather(*(pool(name) for name in names))
        return {name: view for name, view in zip(names, views, strict=True) if view is not None}

    async def _draining(self) -> list[str]:
        try:
            entry = await (await self._bus.key_value(PLANS)).get("current")
        except BusError:
            return []
        return [] if entry is None else entry.value.draining

    def _queues(self) -> list[QueueLength] | None:
        lengths = self._loads.queue_lengths()
        if lengths is None:
            return None
        names = [spec.name for spec in self._catalog.models]
        return [QueueLength(name, *lengths.get(name, (0, 0))) for name in names]

    def _progress(self) -> list[BatchProgress]:
        records = self._batches.progress(MAX_BATCHES)
        return msgspec.convert(records, list[BatchProgress], from_attributes=True)
