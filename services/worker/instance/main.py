"""The process of one instance: `python -m services.worker.instance.main`, started by the node agent.

Makes engine and executor as the settings say, and runs the service until it is told to stop (it gives its requests away
first; a second signal ends it at once), is drained, or its engine fails.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from services.worker.engines.main import foreign_model, serve
from services.worker.instance.building import (
    build_engine,
    host_pool_merged,
    make_executor,
    max_step_tokens,
    open_disk,
    pool_merged,
)
from services.worker.ranks.starting import start_ranks
from shared.messages.cluster import InstancePlan
from shared.migration.limits import DRAIN_CONCURRENCY
from shared.runtime.garbage import freeze_heap
from shared.runtime.service import load_or_exit, run_service, unless_stopped
from shared.runtime.settings import InstanceSettings
from shared.runtime.telemetry import start_telemetry

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from services.worker.instance.engine_loop import EngineLoop
    from services.worker.instance.models import OnReady
    from services.worker.kv_transport.transport import KvTransport

log = logging.getLogger(__name__)


async def main(stop: asyncio.Event, settings: InstanceSettings) -> None:
    if (hosted := foreign_model(settings)) is not None:
        await serve(
            stop, settings, hosted, lambda registry: open_transport(settings, registry, on_door_closed=stop.set)
        )
        return
    plan = msgspec.json.decode(settings.plan, type=InstancePlan)
    other_ranks = start_ranks(plan.group)
    import torch

    from services.worker.instance.cost_models import CostModels, CostModelStore
    from services.worker.instance.disk_tier import DiskTier
    from services.worker.instance.service import InstanceService
    from shared.bus.nats_bus import NatsBus

    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if settings.num_threads and device == "cpu":
        torch.set_num_threads(settings.num_threads)
    settings = msgspec.structs.replace(settings, device=device)
    num_host_merged = host_pool_merged(settings, plan, device)
    log.info(
        "host memory for checkpoints: %d merged blocks of the %d of the KV pool", num_host_merged, pool_merged(plan)
    )
    engine = build_engine(settings, pool_merged(plan), device, num_host_merged, plan.group.num_stages)
    store = await asyncio.to_thread(open_disk, settings)
    executor = await asyncio.to_thread(make_executor, settings, plan, num_host_merged, other_ranks)
    telemetry = start_telemetry("worker", settings.instance_id, settings)
    bus = await unless_stopped(NatsBus.connect(settings, "instance", settings.instance_id, telemetry.registry), stop)
    if bus is None:
        await asyncio.to_thread(executor.close)
        return

    def provide_cost_models(loop: EngineLoop) -> OnReady:
        folder = Path(settings.cost_models_dir) if settings.cost_models_dir else None
        store = CostModelStore(bus, folder)
        return CostModels(loop, executor, store, max_step_tokens(settings), group=plan.group).provide

    wants_cost_models = settings.profile == "auto"
    service = InstanceService(
        bus,
        settings,
        telemetry,
        engine,
        executor,
        provide_cost_models if wants_cost_models else None,
        lambda: open_transport(settings, telemetry.registry, on_door_closed=stop.set),
        None
        if store is None or engine.memory.host.disk is None
        else DiskTier(store, executor, telemetry.registry, settings.instance_id, is_polite=device == "cpu"),
    )
    await unless_stopped(service.start(), stop)
    freeze_heap()
    await first_of(stop.wait(), service.drained.wait(), service.failed.wait())
    if stop.is_set():
        await first_of(service.drain_before_exit(), service.failed.wait())
    await service.stop()
    await bus.close()
    await asyncio.to_thread(executor.close)
    telemetry.close()
    if service.failed.is_set():
        # Not a stack trace: it is in the log already. The node agent starts the instance again.
        os._exit(1)


async def open_transport(
    settings: InstanceSettings, registry: CollectorRegistry, *, on_door_closed: Callable[[], None]
) -> KvTransport:
    """Raises whatever keeps UCX from being used here. `on_door_closed`: called when peers cannot reach it any more."""
    from services.worker.kv_transport.doors import PortRange
    from services.worker.kv_transport.telemetry import TransferMetrics
    from services.worker.kv_transport.transport import KvTransport, TransportLimits
    from services.worker.kv_transport.ucx import UcxNetwork

    host = settings.kv_host or local_address(settings.nats_url)
    # A migration may have two transfers open: of what was announced, and of what was filled beyond that.
    max_transfers = 2 * max(DRAIN_CONCURRENCY, settings.max_migrations)
    limits = TransportLimits(rate_fraction=settings.copy_rate_share, max_transfers=max_transfers)
    network = UcxNetwork(host, PortRange.parse(settings.kv_ports), on_door_closed=on_door_closed)
    transport = KvTransport(network, limits, metrics=TransferMetrics(registry))
    await transport.open()
    return transport


def local_address(nats_url: str) -> str:
    """This machine's address on the network in which the NATS server is: there its peers are too. Raises `OSError`."""
    url = nats_url.split(",")[0].strip()
    server = urlsplit(url if "//" in url else f"//{url}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((server.hostname or "127.0.0.1", server.port or 4222))  # sends nothing
        return str(probe.getsockname()[0])


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Ends with the first of them, with its exception if it has one; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    # Read by OpenMP when torch is imported: compute threads that wait for each other spin for a moment before they sleep, so
    # that the hundreds of parallel regions of a step do not pay a wake-up each, and an idle instance still uses no core.
    os.environ.setdefault("OMP_WAIT_POLICY", "active")
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    sys.setswitchinterval(0.001)
    instance_settings = load_or_exit(InstanceSettings)
    run_service(lambda stop: main(stop, instance_settings), instance_settings)
