"""`python -m services.scheduler`: one scheduler replica, configured by environment (see `SchedulerSettings`)."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import msgspec

from services.scheduler.garbage import collect_rarely
from services.scheduler.service import SchedulerService
from shared.bus.nats_bus import NatsBus
from shared.service import load_or_exit, run_service, unless_stopped
from shared.settings import SchedulerSettings, default_id
from shared.telemetry import start_telemetry

logger = logging.getLogger(__name__)


async def serve(settings: SchedulerSettings, stop: asyncio.Event) -> None:
    telemetry = start_telemetry("scheduler", settings.scheduler_id, settings)
    port = telemetry.serve_metrics()
    logger.info("%s: metrics on http://%s:%d/metrics", settings.scheduler_id, settings.metrics_host, port)
    bus = await unless_stopped(NatsBus.connect(settings, "scheduler", settings.scheduler_id, telemetry.registry), stop)
    if bus is None:
        return
    service = SchedulerService(bus, settings, telemetry)
    try:
        telemetry.ask(service.problems)
        await service.start()
        await stop.wait()
    finally:
        await service.stop()
        await bus.close()
        telemetry.close()


def main() -> None:
    settings = load_or_exit(SchedulerSettings)
    named = msgspec.structs.replace(settings, scheduler_id=settings.scheduler_id or default_id("scheduler"))
    collect_rarely()
    run_service(partial(serve, named), named)


if __name__ == "__main__":
    main()
