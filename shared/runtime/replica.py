"""The process of a service of which several replicas may run: telemetry, a connection to NATS, the service on it, and all of
it closed again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from shared.bus.interface import Bus
from shared.bus.nats_bus import NatsBus
from shared.runtime.garbage import freeze_heap
from shared.runtime.service import load_or_exit, run_service, unless_stopped
from shared.runtime.settings import BusSettings, default_id
from shared.runtime.telemetry import Telemetry, start_telemetry

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=BusSettings)


class Service(Protocol):
    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Also after a `start` that failed."""


Make = Callable[[Bus, S, Telemetry], Service]


async def serve(name: str, make: Make[S], settings: S, stop: asyncio.Event) -> None:
    """Until `stop` is set. The replica's id is the field NAME_id of its settings."""
    replica_id = getattr(settings, f"{name}_id")
    telemetry = start_telemetry(name, replica_id, settings)
    port = telemetry.serve_metrics()
    logger.info("%s: metrics on http://%s:%d/metrics", replica_id, settings.metrics_host, port)
    bus = await unless_stopped(NatsBus.connect(settings, name, replica_id, telemetry.registry), stop)
    if bus is None:
        return
    service = make(bus, settings, telemetry)
    try:
        # One that stands by is healthy, too.
        telemetry.ask(lambda: [] if bus.is_connected else ["not connected to NATS"])
        await unless_stopped(service.start(), stop)
        # Modules and what was put together stays for good: no collection is to stand still over it.
        freeze_heap()
        await stop.wait()
    finally:
        await service.stop()
        await bus.close()
        telemetry.close()


def run(name: str, kind: type[S], make: Make[S]) -> None:
    """The process's main function: settings from the environment, with an id of its own where they name none."""
    settings = load_or_exit(kind)
    field = f"{name}_id"
    named = msgspec.structs.replace(settings, **{field: getattr(settings, field) or default_id(name)})
    run_service(partial(serve, name, make, named), named)
