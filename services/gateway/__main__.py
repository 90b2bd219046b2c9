"""`python -m services.gateway`: the gateway as a process, configured by `GatewaySettings`."""

from __future__ import annotations

import asyncio

import msgspec

from services.gateway.service import GatewayService
from shared.bus.nats_bus import NatsBus
from shared.service import load_or_exit, run_service, unless_stopped
from shared.settings import GatewaySettings, default_id
from shared.telemetry import start_telemetry


def main() -> None:
    settings = load_or_exit(GatewaySettings)
    if not settings.gateway_id:
        settings = msgspec.structs.replace(settings, gateway_id=default_id("gateway"))

    async def serve(stop: asyncio.Event) -> None:
        telemetry = start_telemetry("gateway", settings.gateway_id, settings)
        telemetry.serve_metrics()
        bus = await unless_stopped(NatsBus.connect(settings, "gateway", settings.gateway_id, telemetry.registry), stop)
        if bus is None:
            return
        gateway = GatewayService(bus, settings, telemetry)
        try:
            await gateway.start()
            telemetry.ask(lambda: [] if bus.is_connected else ["no connection to NATS"])
            await stop.wait()
        finally:
            await gateway.stop()
            await bus.close()
            telemetry.close()

    run_service(serve, settings)


if __name__ == "__main__":
    main()
