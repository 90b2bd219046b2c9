"""Instances of every engine on a real NATS, whose scheduler and gateway the test plays."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from services.worker.engines.endpoint import EndpointEngine, EndpointOptions
from services.worker.engines.hosted import HostedEngine
from services.worker.engines.instance import EngineInstance
from services.worker.engines.interface import ForeignEngine
from services.worker.instance.migrations import OpenTransport
from shared.bus.nats_bus import NatsBus
from shared.messages.catalogue import GATEWAY_FRAMES, INSTANCES, LOAD_REPORTS
from shared.messages.cluster import InstancePlan, ModelSpec
from shared.runtime.settings import BusSettings, InstanceSettings
from shared.runtime.telemetry import start_telemetry
from tests.worker.engines.completions_server import completions_server
from tests.worker.instance_stage import Stage, instance_on

KINDS = ("native", "hosted", "endpoint")


def scripted_engine(script: str = "", **variables: object) -> HostedEngine:
    """`variables`: of the adapter's environment."""
    told = {name: str(value) for name, value in variables.items()}
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "SCRIPT": script, **told}
    return HostedEngine([sys.executable, "-m", "tests.worker.engines.scripted_adapter"], environment)


@asynccontextmanager
async def engine_instance_on(
    nats_settings: BusSettings,
    engine: ForeignEngine,
    name: str = "vllm",
    *,
    until_ready: bool = True,
    instance_id: str = "node-0",
    open_transport: OpenTransport | None = None,
    start_timeout_s: float = 60.0,
    **fields: Any,
) -> AsyncIterator[Stage]:
    """`fields`: of its settings."""
    plan = InstancePlan(instance_id, "node", [ModelSpec("a", "/models/a", engine=name)], pool_bytes=0, merged_bytes=1)
    settings = InstanceSettings(
        nats_url=nats_settings.nats_url, node_id="node", device="cpu", instance_id=instance_id,
        plan=msgspec.json.encode(plan).decode(), **fields,
    )  # fmt: skip
    stage = Stage(instance_id)
    telemetry = start_telemetry("worker", instance_id, settings)
    stage.bus = await NatsBus.connect(nats_settings, service="test", service_id="peer")
    bus = await NatsBus.connect(settings, service="instance", service_id=instance_id, registry=telemetry.registry)
    service = EngineInstance(bus, settings, telemetry, engine, open_transport)
    stage.service = service  # type: ignore[assignment]
    stage.telemetry = telemetry
    await stage.bus.subscribe(
        GATEWAY_FRAMES.at(gateway_id="gateway"),
        lambda frame: stage.on_frame(frame) if frame.sender == instance_id else None,
    )
    await stage.bus.subscribe(LOAD_REPORTS, stage.on_report)
    stage.instances = await (await stage.bus.key_value(INSTANCES)).watch()
    await service.start()

    def is_ready() -> bool:
        info = stage.instances.entries.get(instance_id)
        return info is not None and info.incarnation == service.incarnation and info.state == "ready"

    try:
        if until_ready:
            await stage.until(is_ready, start_timeout_s)
        yield stage
    finally:
        await service.stop()
        await bus.close()
        await stage.bus.close()
        telemetry.close()


@asynccontextmanager
async def instance_of(kind: str, nats_settings: BusSettings) -> AsyncIterator[Stage]:
    """A running instance of one of KINDS that serves model `a`, of 600 tokens at most."""
    if kind == "native":
        async with instance_on(nats_settings) as stage:
            yield stage
    elif kind == "hosted":
        async with engine_instance_on(nats_settings, scripted_engine()) as stage:
            yield stage
    else:
        async with completions_server() as server:
            engine = EndpointEngine(server.url, EndpointOptions())
            async with engine_instance_on(nats_settings, engine, "endpoint") as stage:
                yield stage
