"""The scheduler as a process: contends for the lease, keeps the instance registry warm, and serves while it leads."""

from __future__ import annotations

import asyncio
import logging

from services.scheduler.active import ActiveScheduler
from services.scheduler.garbage import collect_few
from services.scheduler.observer import Observer
from shared.bus.interface import Bus, Subscription, Watch
from shared.messages.catalogue import EXECUTION_STATISTICS, INSTANCES, MODELS
from shared.messages.cluster import (
    ExecutionStatistics,
    ExecutionStatisticsReport,
    InstanceInfo,
    LeaseHolder,
    ModelSpec,
)
from shared.policies.catalogue import DISPATCH_POLICIES, ORDERING_POLICIES, REBALANCE_POLICIES, SCALING_POLICIES
from shared.runtime.lease import Lease
from shared.runtime.settings import SchedulerSettings, SettingsError, check_part, default_id
from shared.runtime.telemetry import Telemetry
from shared.scheduling.scaling import check_settings

logger = logging.getLogger(__name__)

HANDOVER_WAIT_S = 0.5
"""How long a lease that is given up waits for submit calls under way, so that the next leader finds their requests where
they are."""
LAST_CALLS_WAIT_S = 3.0
"""And how long the process then waits for those that take longer."""


class SchedulerService:
    """One replica. Any number may run; one of them is active."""

    def __init__(self, bus: Bus, settings: SchedulerSettings, telemetry: Telemetry) -> None:
        for variable, name, known in (
            ("TIDEWAY_DISPATCH_POLICY", settings.dispatch_policy, DISPATCH_POLICIES),
            ("TIDEWAY_ORDER_POLICY", settings.order_policy, ORDERING_POLICIES),
            ("TIDEWAY_REBALANCE_POLICY", settings.rebalance_policy, REBALANCE_POLICIES),
            ("TIDEWAY_SCALING_POLICY", settings.scaling_policy, SCALING_POLICIES),
        ):
            check_part(variable, name, known)
        check_settings(settings)
        if settings.migration not in ("auto", "off"):
            raise SettingsError(f"TIDEWAY_MIGRATION={settings.migration!r}: expected auto or off")
        if settings.rebalance_low >= settings.rebalance_high:
            raise SettingsError(
                f"TIDEWAY_REBALANCE_LOW={settings.rebalance_low:g}: expected less than TIDEWAY_REBALANCE_HIGH"
            )
        self.scheduler_id = settings.scheduler_id or default_id("scheduler")
        self._bus = bus
        self._settings = settings
        self._observer = Observer(telemetry)
        self._lease = Lease(bus, "scheduler", self.scheduler_id, self._on_gain, self._on_lose)
        self._registry: Watch[InstanceInfo] | None = None
        self._models: Watch[ModelSpec] | None = None
        self._model_names: dict[str, str] = {}
        """By their key in the bucket: a deletion names the key alone."""
        self._removed_models: set[str] = set()
        self._statistics_heard: Subscription | None = None
        self._statistics: dict[str, ExecutionStatistics] = {}
        """Statistics as last published by whoever leads: a standby must not begin with nothing."""
        self._active: ActiveScheduler | None = None
        self._former: ActiveScheduler | None = None
        self._collecting: asyncio.Task[None] | None = None

    @property
    def is_active(self) -> bool:
        return self._active is not None and self._active.is_serving and self._lease.is_held

    async def start(self) -> None:
        instances = await self._bus.key_value(INSTANCES)
        self._registry = await instances.watch(self._on_registry)
        self._models = await (await self._bus.key_value(MODELS)).watch(self._on_model)
        self._statistics_heard = await self._bus.subscribe(EXECUTION_STATISTICS, self._on_statistics)
        self._bus.on_reconnect(self._on_reconnect)
        self._collecting = asyncio.create_task(collect_few())
        await self._lease.start()

    async def stop(self) -> None:
        """Hands over to a standby at once, if there is one. May be called twice."""
        if self._collecting is not None:
            self._collecting.cancel()
        await self._lease.stop()
        for subscription in (self._registry, self._models, self._statistics_heard):
            if subscription is not None:
                await subscription.stop()
        if self._former is not None:
            await self._former.close(LAST_CALLS_WAIT_S)

    async def _on_gain(self, term: int) -> None:
        assert self._registry is not None and self._models is not None
        info = LeaseHolder(self.scheduler_id, term)
        self._active = ActiveScheduler(
            self._bus,
            self._settings,
            info,
            self._observer,
            lambda: self._lease.is_held,
            self._statistics,
            self._models.entries,
            None if self._former is None else self._former.recorder,
        )
        for model in self._removed_models:
            self._active.on_model(model, False)
        await self._active.open(dict(self._registry.entries))
        self._observer.is_leader.set(1)

    async def _on_lose(self) -> None:
        self._observer.is_leader.set(0)
        if self._active is not None:
            self._former, self._active = self._active, None
            await self._former.close(HANDOVER_WAIT_S)
        if self._active is None:
            self._observer.stand_by()

    def _on_registry(self, instance_id: str, info: InstanceInfo | None) -> None:
        if self._active is not None:
            self._active.on_registry(instance_id, info)

    def _on_model(self, key: str, spec: ModelSpec | None) -> None:
        name = self._model_names.pop(key, "") if spec is None else spec.name
        if spec is not None:
            self._model_names[key] = name
            self._removed_models.discard(name)
        elif name:
            self._removed_models.add(name)
            self._statistics.pop(name, None)
        if self._active is not None and name:
            self._active.on_model(name, spec is not None)

    def _on_statistics(self, report: ExecutionStatisticsReport) -> None:
        self._statistics.update({statistics.model: statistics for statistics in report.models})

    def _on_reconnect(self) -> None:
        if self._active is not None:
            self._active.on_reconnect()
