"""`python -m services.worker`: the node agent of this machine, configured by environment (see `WorkerSettings`)."""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial

import msgspec

from services.worker.instance.building import max_step_tokens
from services.worker.migration.faults import FaultPoints
from services.worker.node.agent import NodeAgent
from services.worker.node.machine import survey
from shared.bus.nats_bus import NatsBus
from shared.runtime.service import load_or_exit, run_service, unless_stopped
from shared.runtime.settings import InstanceSettings, WorkerSettings, default_id, load
from shared.runtime.telemetry import start_telemetry

logger = logging.getLogger(__name__)


async def serve(settings: WorkerSettings, stop: asyncio.Event) -> None:
    # Instances have their settings from the same environment.
    of_instances = load(InstanceSettings)
    FaultPoints(of_instances.fault_points)  # which they would first look at when they are about to move requests
    machine = await asyncio.to_thread(survey, settings)
    step_tokens = max_step_tokens(msgspec.structs.replace(of_instances, device=machine.device))
    telemetry = start_telemetry("node", settings.node_id, settings)
    port = telemetry.serve_metrics()
    logger.info("%s: metrics on http://%s:%d/metrics", settings.node_id, settings.metrics_host, port)
    bus = await unless_stopped(NatsBus.connect(settings, "node", settings.node_id, telemetry.registry), stop)
    if bus is None:
        return
    agent = NodeAgent(
        bus, settings, telemetry, machine, drain_grace_s=of_instances.drain_grace_s, step_tokens=step_tokens
    )
    telemetry.ask(agent.problems, agent.unready)
    await unless_stopped(agent.start(), stop)
    await stop.wait()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, agent.hurry)
    await agent.stop()
    await bus.close()
    telemetry.close()


def main() -> None:
    settings = load_or_exit(WorkerSettings)
    named = msgspec.structs.replace(settings, node_id=settings.node_id or default_id("node"))
    run_service(partial(serve, named), named)


if __name__ == "__main__":
    main()
