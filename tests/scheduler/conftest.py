"""Buses for scenarios: a real NATS server, or on the memory bus in virtual time."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

import msgspec
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.scheduler.service import SchedulerService
from shared.bus.interface import Bus
from shared.bus.nats_bus import NatsBus
from shared.runtime.settings import BusSettings, SchedulerSettings
from shared.runtime.telemetry import Telemetry
from tests.conftest import NatsServer
from tests.memory_bus import MemoryBus, MemoryHub
from tests.scheduler.peers import ScriptedGateway, ScriptedInstance, eventually


class Stage(ABC):
    """A bus and everyone on it. All that is made here is closed with it."""

    def __init__(self) -> None:
        self.spans = InMemorySpanExporter()
        self.schedulers: list[SchedulerService] = []
        self.telemetry: dict[str, Telemetry] = {}
        self._buses: list[Bus] = []

    @abstractmethod
    async def open_bus(self, name: str) -> Bus: ...

    @abstractmethod
    async def restart_server(self, outage_s: float) -> None:
        """kill -9 of the server, so long without, and a new one with the durable state."""

    async def bus(self, name: str) -> Bus:
        bus = await self.open_bus(name)
        self._buses.append(bus)
        return bus

    async def scheduler(self, scheduler_id: str = "scheduler-1", **changes: object) -> SchedulerService:
        """Started; active unless there is another one."""
        settings = SchedulerSettings(scheduler_id=scheduler_id, lost_after_s=1.0)
        settings = msgspec.structs.replace(settings, **changes)
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.telemetry[scheduler_id] = Telemetry("scheduler", settings, provider)
        service = SchedulerService(await self.bus(scheduler_id), settings, self.telemetry[scheduler_id])
        self.schedulers.append(service)
        await service.start()
        if len(self.schedulers) == 1:
            await eventually(lambda: service.is_active)
        return service

    async def gateway(self, gateway_id: str = "g0") -> ScriptedGateway:
        gateway = ScriptedGateway(await self.bus(gateway_id), gateway_id)
        await gateway.start()
        return gateway

    async def instance(self, instance_id: str, *models: str, **options: object) -> ScriptedInstance:
        bus = await self.bus(f"{instance_id}-{options.get('incarnation', '1')}")
        instance = ScriptedInstance(bus, instance_id, *models, **options)  # type: ignore[arg-type]
        await instance.start()
        return instance

    def metric(self, name: str, scheduler_id: str = "scheduler-1", **labels: str) -> float:
        return self.telemetry[scheduler_id].registry.get_sample_value("tideway_scheduler_" + name, labels) or 0.0

    async def close(self) -> None:
        for service in self.schedulers:
            await service.stop()
        for bus in self._buses:
            await bus.close()


class NatsStage(Stage):
    def __init__(self, settings: BusSettings, server: NatsServer | None = None) -> None:
        super().__init__()
        self._settings = settings
        self._server = server

    async def open_bus(self, name: str) -> Bus:
        return await NatsBus.connect(self._settings, "test", name)

    async def restart_server(self, outage_s: float) -> None:
        assert self._server is not None, "the shared server is not to be killed"
        self._server.kill()
        await asyncio.sleep(outage_s)
        await asyncio.to_thread(self._server.start)


class VirtualStage(Stage):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.hub = MemoryHub(seed=seed)

    async def open_bus(self, name: str) -> MemoryBus:
        return self.hub.connect(name)

    async def restart_server(self, outage_s: float) -> None:
        self.hub.kill()
        await asyncio.sleep(outage_s)
        self.hub.start()
