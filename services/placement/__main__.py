"""`python -m services.placement`: one placement replica, configured by environment (see `PlacementSettings`)."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import msgspec

from services.placement.service import PlacementService
from shared.bus.nats_bus import NatsBus
from shared.service import load_or_exit, run_service, unless_stopped
from shared.settings import PlacementSettings, default_id
from shared.telemetry import start_telemetry

logger = logging.getLogger(__name__)


async def serve(settings: PlacementSettings, stop: asyncio.Event) -> None:
    telemetry = start_telemetry("placement", settings.placement_id, settings)
    port = telemetry.serve_metrics()
    logger.info("%s: metrics on http://%s:%d/metrics", settings.placement_id, settings.metrics_host, port)
    bus = await unless_stopped(NatsBus.connect(settings, "placement", settings.placement_id, telemetry.registry), stop)
    if bus is None:
        return
    service = PlacementService(bus, settings, telemetry)
    try:
        telemetry.ask(service.problems)
        await service.start()
        await stop.wait()
    finally:
        await service.stop()
        await bus.close()
        telemetry.close()


def main() -> None:
    settings = load_or_exit(PlacementSettings)
    named = msgspec.structs.replace(settings, placement_id=settings.placement_id or default_id("placement"))
    run_service(partial(serve, named), named)


if __name__ == "__main__":
    main()
