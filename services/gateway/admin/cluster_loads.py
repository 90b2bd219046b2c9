"""How loaded instances and queues are, for operators who look: the registry's entries, and what was reported.

Instances report up to 50 times a second each. Reading all of that in every gateway would cost a large cluster more than it
is worth, so reports are subscribed to only while somebody asks. All instances are asked to report then, so that what is
shown of them is of one moment. The scheduler's statistics are one message a second.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from services.gateway.models.catalog import Catalog
from shared.bus.interface import Bus, BusError, Subscription
from shared.messages.admin import InstanceLoad, InstanceModel, InstanceState
from shared.messages.catalogue import LOAD_REPORTS, REPORT_LOAD, SCHEDULER_STATISTICS
from shared.messages.cluster import InstanceInfo, LoadReport, ModelLoad, ReportLoad, StatisticsReport, TenantStatistics
from shared.runtime.tasks import set_within

logger = logging.getLogger(__name__)

FRESH_S = 0.5
"""Nobody is heard again for a question that comes so soon after another."""
LISTEN_S = 0.3
"""Time that instances have to report; for one that does not, what it said lately will do."""
SPREAD_S, MOST_SPREAD_S = 0.0002, 0.2
"""Time over which reports are spread, for each instance and at most."""
LONG_LISTEN_S = 1.2
"""Time to listen where instances were not heard lately: longer than the second between reports of one that idles."""
LATELY_S = 3.0
KEPT_S = 10.0
MAX_TRIES = 3
"""Times that one which says nothing is listened for so long; then it may be stuck."""
QUEUES_LAST_S = 3.0
"""After that the scheduler is gone."""


@dataclass(frozen=True)
class HeardLoad:
    report: LoadReport
    heard_s: float
    """On the bus's clock."""


class ClusterLoads:
    def __init__(self, bus: Bus, catalog: Catalog) -> None:
        self._bus = bus
        self._catalog = catalog
        self._loads: dict[str, HeardLoad] = {}
        self._num_tries: dict[tuple[str, str], int] = {}
        """In vain, by id and incarnation."""
        self._listened_s = float("-inf")
        self._listening: asyncio.Task[None] | None = None
        self._statistics: tuple[StatisticsReport, float] | None = None
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(SCHEDULER_STATISTICS, self._on_statistics)

    async def stop(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        if self._subscription is not None:
            await self._subscription.stop()

    async def states(self) -> list[InstanceState]:
        """States of the live instances, with the load that they reported. Takes up to `LONG_LISTEN_S`."""
        if self._bus.now() - self._listened_s >= FRESH_S or self._is_any_awaited():
            if self._listening is None or self._listening.done():
                self._listening = asyncio.create_task(self._listen(), name="load reports")
            await asyncio.shield(self._listening)
        return self._states(self._loads)

    def states_lately(self) -> list[InstanceState]:
        """The states that `states` last returned, if that is recent; does not subscribe to reports."""
        return self._states({i: heard for i, heard in self._loads.items() if self._bus.now() - heard.heard_s < KEPT_S})

    def _states(self, loads: Mapping[str, HeardLoad]) -> list[InstanceState]:
        alive, now = sorted(self._catalog.alive.items()), self._bus.now()
        return [_instance(info, loads.get(instance_id), now) for instance_id, info in alive]

    def num_queued(self) -> Mapping[str, int] | None:
        """Requests in the scheduler's queue, by model (none for a model without traffic); None: no scheduler says so."""
        if self._statistics is None or self._bus.now() - self._statistics[1] > QUEUES_LAST_S:
            return None
        return {model.model: model.num_queued for model in self._statistics[0].models}

    def queued_age_s(self) -> float | None:
        """Age of what `num_queued` says; None: no scheduler says so."""
        if self.num_queued() is None or self._statistics is None:
            return None
        return self._bus.now() - self._statistics[1]

    def queue_lengths(self) -> Mapping[str, tuple[int, int]] | None:
        """Lengths of the schedulers' queues: online and offline requests by model."""
        if self.num_queued() is None or self._statistics is None:
            return None
        return {
            model.model: (model.num_queued - model.num_offline_queued, model.num_offline_queued)
            for model in self._statistics[0].models
        }

    def tenants(self) -> Mapping[str, TenantStatistics] | None:
        """Who has requests, or had some in the last minute; None: no scheduler says so."""
        if self.num_queued() is None or self._statistics is None:
            return None
        return {one.tenant: one for one in self._statistics[0].tenants}

    def _present(self) -> set[tuple[str, str]]:
        """Ids and incarnations."""
        return {(instance_id, info.incarnation) for instance_id, info in self._catalog.alive.items()}

    def _is_any_awaited(self) -> bool:
        since_s = self._bus.now() - LATELY_S
        lately = {(i, heard.report.incarnation) for i, heard in self._loads.items() if heard.heard_s >= since_s}
        return any(self._num_tries.get(key, 0) < MAX_TRIES for key in self._present() - lately)

    async def _listen(self) -> None:
        present = self._present()
        waiting = set(present)
        all_heard = asyncio.Event()

        def on_report(report: LoadReport) -> None:
            key = (report.instance_id, report.incarnation)
            if key in waiting:
                self._loads[report.instance_id] = HeardLoad(report, self._bus.now())
                waiting.discard(key)
                if not waiting:
                    all_heard.set()

        if waiting:
            is_long = self._is_any_awaited()
            try:
                subscription = await self._bus.subscribe(LOAD_REPORTS, on_report)
            except BusError as error:
                logger.info("load reports cannot be heard: %s", error)
                return
            try:
                self._bus.publish(REPORT_LOAD, ReportLoad(min(MOST_SPREAD_S, SPREAD_S * len(present))))
                # Those that say nothing are known from before, or not at all.
                await set_within(all_heard, LONG_LISTEN_S if is_long else LISTEN_S)
            finally:
                await subscription.stop()
            self._num_tries = {key: self._num_tries.get(key, 0) + is_long for key in waiting}
        self._loads = {
            instance_id: heard
            for instance_id, heard in self._loads.items()
            if (instance_id, heard.report.incarnation) in present and self._bus.now() - heard.heard_s < KEPT_S
        }
        self._listened_s = self._bus.now()

    def _on_statistics(self, report: StatisticsReport) -> None:
        self._statistics = (report, self._bus.now())


def _instance(info: InstanceInfo, heard: HeardLoad | None, now: float) -> InstanceState:
    return InstanceState(
        instance_id=info.instance_id,
        incarnation=info.incarnation,
        node_id=info.node_id,
        state=info.state,
        device=info.device,
        devices=list(info.group.devices),
        num_stages=info.group.num_stages,
        pid=info.pid,
        models=_models(info, heard),
        num_merged=info.num_merged,
        merged_bytes=info.merged_bytes,
        metrics_port=info.metrics_port,
        kv_address=info.kv_address,
        migration=bool(info.kv_address),
        load=None if heard is None else _load(info, heard, now),
        engine=info.engine,
        engine_version=info.engine_version,
        lacks=list(info.lacks),
        role=info.role,
        is_role_fixed=info.is_role_fixed,
    )


def _models(info: InstanceInfo, heard: HeardLoad | None) -> list[InstanceModel]:
    """Counts are those of the last report, else of the registry."""
    reported: dict[str, ModelLoad] = {} if heard is None else {load.model: load for load in heard.report.models}
    return [
        InstanceModel(
            name=loaded.name,
            state=loaded.state,
            max_model_len=loaded.max_model_len,
            block_size=loaded.block_size,
            blocks_per_merged=loaded.blocks_per_merged,
            num_running=counts.num_running,
            num_waiting=counts.num_waiting,
            error=loaded.error,
            cost_model=loaded.cost_model,
            fingerprint=loaded.fingerprint,
            adapters=list(loaded.adapters),
        )
        for loaded in info.models
        for counts in [reported.get(loaded.name, loaded)]
    ]


def _load(info: InstanceInfo, heard: HeardLoad, now: float) -> InstanceLoad:
    report = heard.report
    used = 1.0 - report.free_merged / info.num_merged if info.num_merged else None
    return InstanceLoad(
        age_s=now - heard.heard_s,
        pool_use=None if used is None else min(1.0, max(0.0, used)),
        num_running=report.num_running,
        num_waiting=sum(load.num_waiting for load in report.models),
        num_offline=sum(load.num_offline for load in report.models),
        num_high=report.num_high,
        dispatch_freeness=report.dispatch_freeness if math.isfinite(report.dispatch_freeness) else None,
        migration_freeness=report.migration_freeness if math.isfinite(report.migration_freeness) else None,
        num_migrating_out=report.num_migrating_out,
        num_migrating_in=report.num_migrating_in,
        num_migrated_out=report.num_migrated_out,
        num_migrated_in=report.num_migrated_in,
        kv_copies=report.kv_copies,
        drafts=list(report.drafts),
    )
