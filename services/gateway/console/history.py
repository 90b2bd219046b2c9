"""The last hour of the cluster, for the console: a sample every ten seconds, in a bucket that all gateways share.

All gateways watch, and the first that writes a slot of time has written it for all (`create`), so that a gateway that
dies leaves no gap. Samples end by the bucket's TTL.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

from services.gateway.admin.cluster_loads import ClusterLoads
from services.gateway.models.catalog import Catalog
from shared.bus.interface import Bus, BusError, KeyValue, RevisionConflict, Subscription
from shared.messages.catalogue import HISTORY, SCHEDULER_STATISTICS
from shared.messages.cluster import StatisticsReport
from shared.messages.console import HistorySample

logger = logging.getLogger(__name__)

SLOT_S = 10.0
LATE_S = 0.1
MAX_HEARD_INSTANCES = 64
"""Most instances of which pools are recorded: hearing the load reports of more would cost more than it is worth."""
MAX_BYTES = 16 << 20


class History:
    def __init__(self, bus: Bus, catalog: Catalog, loads: ClusterLoads) -> None:
        self._bus = bus
        self._catalog = catalog
        self._loads = loads
        self._tokens, self._finished = Counter[str](), Counter[str]()
        """By model, since the last slot; offline requests too."""
        self._samples: KeyValue[HistorySample]
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._samples = await self._bus.key_value(HISTORY, max_bytes=MAX_BYTES)
        self._subscription = await self._bus.subscribe(SCHEDULER_STATISTICS, self._on_statistics)

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.stop()

    async def record_forever(self) -> None:
        while True:
            # A moment after the slot's end: a timer that is early would find itself in the slot before.
            await asyncio.sleep(SLOT_S - time.time() % SLOT_S + LATE_S)
            await self.record(time.time())

    async def record(self, now_s: float) -> None:
        """Writes the slot that ended at `now_s` (Unix time), unless another gateway did. Returns without it where NATS does
        not take it."""
        key = str(int(now_s // SLOT_S))
        tokens, finished = self._tokens, self._finished
        self._tokens, self._finished = Counter(), Counter()
        try:
            await self._samples.create(key, await self._sample(now_s, tokens, finished))
        except RevisionConflict:
            pass
        except BusError as error:
            logger.warning("a sample of the console's history is lost: %s", error)

    async def samples(self, since_s: float) -> list[HistorySample]:
        """Samples since a Unix time, the oldest first. Raises `BusError`."""
        entries = (await self._samples.entries()).values()
        return sorted((e.value for e in entries if e.value.at_s >= since_s), key=lambda sample: sample.at_s)

    async def _sample(self, now_s: float, tokens: Counter[str], finished: Counter[str]) -> HistorySample:
        alive = self._catalog.alive
        models = [model for info in alive.values() for model in info.models]
        queued = self._loads.num_queued()
        pools: dict[str, float] = {}
        if len(alive) <= MAX_HEARD_INSTANCES:
            for instance in await self._loads.states():
                if instance.load is not None and instance.load.pool_use is not None:
                    pools[instance.instance_id] = round(instance.load.pool_use, 4)
        return HistorySample(
            at_s=now_s,
            num_instances=len(alive),
            num_running=sum(model.num_running for model in models),
            num_waiting=sum(model.num_waiting for model in models),
            num_queued=None if queued is None else sum(queued.values()),
            output_tokens_s={model: round(number / SLOT_S, 2) for model, number in tokens.items()},
            finished_s={model: round(number / SLOT_S, 3) for model, number in finished.items()},
            pools=pools,
        )

    def _on_statistics(self, report: StatisticsReport) -> None:
        for model in report.models:
            self._tokens[model.model] += model.output_tokens
            self._finished[model.model] += model.num_finished
