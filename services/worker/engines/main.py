"""The process of an instance whose engine is another's; `services/worker/instance/main.py` hands over to it."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from services.worker.engines.instance import EngineInstance
from services.worker.engines.interface import ForeignEngine
from services.worker.engines.vllm.spec import HostedSpec
from services.worker.engines.vllm.starting import hosted_vllm
from shared.bus.nats_bus import NatsBus
from shared.messages.cluster import InstancePlan, ModelSpec
from shared.models import checkpoint
from shared.models.pooling import Pooling
from shared.runtime.engine_environments import EngineEnvironmentError
from shared.runtime.service import unless_stopped
from shared.runtime.settings import InstanceSettings, SettingsError
from shared.runtime.telemetry import start_telemetry

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from services.worker.kv_transport.transport import KvTransport

API_KEY = "TIDEWAY_ENGINE_API_KEY"
"""Environment variable: the key that servers behind `engine_url` want."""


def foreign_model(settings: InstanceSettings) -> ModelSpec | None:
    """The model of an instance whose engine is another's; None: it is a native one."""
    plan = msgspec.json.decode(settings.plan, type=InstancePlan)
    return next((spec for spec in plan.models if not spec.is_native), None)


def make_engine(spec: ModelSpec, settings: InstanceSettings) -> ForeignEngine:
    """Raises `SettingsError` for what the operator must change."""
    arguments = shlex.split(spec.engine_args)
    if spec.is_endpoint:
        # Its HTTP client takes as long to import as all else beside torch, and no other instance needs it.
        from services.worker.engines.endpoint import EndpointEngine, EndpointOptions

        try:
            options = EndpointOptions.parse(arguments)
        except ValueError as error:
            raise SettingsError(f"model {spec.name}: {error}") from None
        return EndpointEngine(spec.engine_url, options, spec.max_model_len or 0, os.environ.get(API_KEY, ""))
    plan = msgspec.json.decode(settings.plan, type=InstancePlan)
    hosted = HostedSpec(
        source=spec.source,
        dtype=spec.dtype,
        max_model_len=spec.max_model_len,
        quantization=spec.quantization,
        pool_bytes=plan.pool_bytes,
        engine_args=tuple(arguments),
        ttft_s=(spec.ttft_ms or settings.ttft_ms) / 1000,
        tpot_s=(spec.tpot_ms or settings.tpot_ms) / 1000,
        moves=settings.migration != "off",
        interrupts=settings.interruption != "off",
        pooling=pooling_of(spec.source),
    )
    try:
        return hosted_vllm(hosted, settings.device)
    except EngineEnvironmentError as error:
        raise SettingsError(str(error)) from None


def pooling_of(source: str) -> Pooling | None:
    """Blocking. None: it generates text, or its engine says what is wrong with it."""
    try:
        return checkpoint.describe(checkpoint.resolve(source)).pooling
    except checkpoint.CheckpointError:
        return None


async def serve(
    stop: asyncio.Event,
    settings: InstanceSettings,
    spec: ModelSpec,
    open_transport: Callable[[CollectorRegistry], Awaitable[KvTransport]],
) -> None:
    """Until `stop` is set, the instance is drained, or its engine fails."""
    engine = make_engine(spec, settings)
    telemetry = start_telemetry("worker", settings.instance_id, settings)
    bus = await unless_stopped(NatsBus.connect(settings, "instance", settings.instance_id, telemetry.registry), stop)
    if bus is None:
        return
    instance = EngineInstance(bus, settings, telemetry, engine, lambda: open_transport(telemetry.registry))
    await unless_stopped(instance.start(), stop)
    waits = [asyncio.ensure_future(event.wait()) for event in (stop, instance.drained, instance.failed)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if stop.is_set():
        await instance.drain_before_exit()
    await instance.stop()
    await bus.close()
    telemetry.close()
    if instance.failed.is_set():
        os._exit(1)
