"""`python -m services.worker`: the node agent of this machine."""

from __future__ import annotations

import asyncio

from services.worker.machine import survey
from services.worker.node import NodeAgent
from shared.bus.nats_bus import NatsBus
from shared.service import load_or_exit, run_service
from shared.settings import WorkerSettings, default_id
from shared.telemetry import start_telemetry


async def serve(stop: asyncio.Event, settings: WorkerSettings) -> None:
    machine = await asyncio.to_thread(survey, settings)
    service_id = settings.node_id or default_id("node")
    telemetry = start_telemetry("node", service_id, settings)
    bus = await NatsBus.connect(settings, service="node", service_id=service_id, registry=telemetry.registry)
    agent = NodeAgent(bus, settings, telemetry, machine)
    await agent.start()
    await stop.wait()
    await agent.stop()
    await bus.close()
    telemetry.close()


def main() -> None:
    settings = load_or_exit(WorkerSettings)
    run_service(lambda stop: serve(stop, settings), settings)


if __name__ == "__main__":
    main()
