"""Instances reduced to what migration needs of them: a real engine in a real loop with an executor of hashes, a real bus and
transport, and a gateway that keeps the rules of streams."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
import torch
from opentelemetry.trace import Tracer

from services.worker.instance.building import build_engine, open_disk
from services.worker.instance.engine_loop import EngineLoop
from services.worker.kv_disk.copies import DiskCopies
from services.worker.kv_disk.store import Changes
from services.worker.kv_transport import KvTransport, Network, TransportLimits
from services.worker.kv_transport.staging import KvPool
from services.worker.migration.service import MigrationService
from shared.bus.interface import Bus
from shared.bus.nats_bus import NatsBus
from shared.engine import calls
from shared.engine.calls import AddModel, Submit
from shared.engine.driver import StepStats
from shared.engine.handover import Detached
from shared.engine.plan import CopyKind, KvCopy, ModelShape, StepPlan, StepResult
from shared.engine.requests import Ended, Output
from shared.messages.catalogue import INSTANCE_CANCEL, INSTANCE_REBALANCE
from shared.messages.cluster import InstanceInfo, LoadedModel, MigrationOutcome
from shared.messages.migration import Commit, MigrationReason, Rebalance
from shared.messages.requests import (
    Cancel,
    GenerationRequest,
    TokenEntry,
    unpack_tokens,
)
from shared.migration.incoming import Intake
from shared.migration.limits import pool_of
from shared.policies.kv_backup import BackupSettings
from shared.runtime.settings import InstanceSettings
from shared.runtime.telemetry import Telemetry, start_telemetry
from tests.shared.engine.fake_executor import FakeExecutor

SHAPE = ModelShape("a", 4, 3, 600)
NUM_MERGED = 200
EMPTY, GARBAGE = -2, -1


class SlabExecutor(FakeExecutor):
    """Its cells lie in arrays that a transport can read and write: `[num_blocks, block_size]` int32."""

    def __init__(self, num_merged: int = NUM_MERGED, step_s: float = 0.002) -> None:
        super().__init__([SHAPE])
        self.step_s = step_s
        self.gate = threading.Event()
        self.gate.set()
        self.num_steps = 0
        num_blocks = num_merged * SHAPE.blocks_per_merged
        self.device = np.full((num_blocks, SHAPE.block_size), EMPTY, np.int32)
        self.host_cells = np.full((num_blocks, SHAPE.block_size), EMPTY, np.int32)
        self._results: deque[StepResult] = deque()
        self._copied: deque[tuple[int, bool]] = deque()
        self._on_copied: Callable[[], None] = lambda: None

    def rows(self, on_host: bool) -> torch.Tensor:
        return torch.from_numpy((self.host_cells if on_host else self.device).view(np.uint8))

    def claim_blocks(self, model: str, blocks: list[int]) -> None:
        for block in blocks:
            self._block(model, block)

    def _block(self, model: str, block: int):
        merged = block // SHAPE.blocks_per_merged
        if self._merged_owner.get(merged) != model:
            first = merged * SHAPE.blocks_per_merged
            self.device[first : first + SHAPE.blocks_per_merged] = EMPTY
            self._merged_owner[merged] = model
        return self.device[block]

    def _read(self, model: str, row: int, position: int) -> int:
        return int(super()._read(model, row, position))

    def launch(self, plan: StepPlan) -> None:
        time.sleep(self.step_s)
        self.gate.wait(20)
        self.num_steps += 1
        self._results.append(self.execute(plan))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def interrupt(self, step_id: int) -> None:
        """Too late: steps here are over at once."""

    def start_copy(self, copy: KvCopy) -> None:
        if copy.kind == CopyKind.MOVE:
            self.start([copy])
            copy = msgspec.structs.replace(copy, device_blocks=[])
        for device, host in zip(copy.device_blocks, copy.host_blocks, strict=True):
            if copy.kind == CopyKind.CHECKPOINT:
                assert EMPTY not in self._block(copy.model, device)
                self.host_cells[host] = self._block(copy.model, device)
            else:
                self._block(copy.model, device)[:] = self.host_cells[host]
        self._copied.append((copy.copy_id, True))
        self._on_copied()

    def finished_copies(self) -> list[tuple[int, bool]]:
        done = list(self._copied)
        self._copied.clear()
        return done

    def on_copy_finished(self, callback: Callable[[], None]) -> None:
        self._on_copied = callback


class Gateway:
    """Its streams, by the rules: an epoch belongs to whoever spoke first in it, a lower one is stale, and tokens come at the
    offset that is expected."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, TokenEntry] = {}
        self.owners: dict[str, tuple[int, str]] = {}
        self.arrivals: dict[str, list[tuple[float, str]]] = {}
        self.wrongs: list[str] = []
        self.news = asyncio.Event()

    def on_entry(self, sender: str, entry: TokenEntry) -> None:
        try:
            self._take(sender, entry)
        except AssertionError as error:
            self.wrongs.append(f"{error}: {entry}")
        self.news.set()

    def _take(self, sender: str, entry: TokenEntry) -> None:
        request_id = entry.request_id
        epoch, owner = self.owners.get(request_id, (-1, ""))
        if entry.epoch < epoch or (entry.epoch == epoch and sender != owner):
            return
        if entry.epoch > epoch:
            self.owners[request_id] = (entry.epoch, sender)
        known = self.tokens.setdefault(request_id, [])
        assert request_id not in self.ends, f"{sender} says more of {request_id} after its end"
        new = unpack_tokens(entry.tokens)
        assert entry.offset <= len(known), f"{sender} left tokens out of {request_id}"
        overlap = len(known) - entry.offset
        assert new[:overlap] == known[entry.offset : entry.offset + len(new)], f"{sender} said other tokens"
        known.extend(new[overlap:])
        if new:
            self.arrivals.setdefault(request_id, []).append((time.monotonic(), sender))
        if entry.finish_reason is not None:
            self.ends[request_id] = entry


class Party:
    """One instance."""

    def __init__(
        self,
        *,
        name: str,
        bus: Bus,
        gateway: Gateway,
        registry: dict[str, InstanceInfo],
        transport: KvTransport | None,
        settings: InstanceSettings,
        telemetry: Telemetry,
        executor: SlabExecutor,
        num_merged: int = NUM_MERGED,
    ) -> None:
        self.name = name
        self.bus = bus
        self.gateway = gateway
        self.registry = registry
        self.transport = transport
        self.telemetry = telemetry
        self.executor = executor
        self.intake = Intake(name)
        self.intake.models.add("a")
        self.is_dead = False
        self.adopted: list[tuple[Commit, int]] = []
        self.outcomes: list[MigrationOutcome] = []
        self.ended: list[Ended] = []
        self.cancels: list[Cancel] = []
        self.backed_up: dict[str, str] = {}
        """By request: who has copies of its KV."""
        self.engine = build_engine(settings, num_merged, "cpu", num_merged if settings.host_memory_bytes else 0)
        store = open_disk(settings)
        self.disk = None if store is None else DiskCopies(store, self._on_disk_change, look_s=0.1)
        self.loop = EngineLoop(self.engine, executor, bus.now, self._in_thread, disk=self.disk)
        self.service = MigrationService(
            bus=bus,
            settings=settings,
            loop=self.loop,
            transport=transport,
            intake=self.intake,
            peers=lambda: self.registry,
            handovers=self,
            telemetry=telemetry,
            backup=BackupSettings(settings.kv_backup, settings.kv_backup_tokens),
            fetches=settings.prefix_fetch == "auto",
        )

    async def start(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        with self.loop.locked() as engine:
            engine.apply(AddModel(SHAPE), 0.0)
        if self.transport is not None:
            self.transport.register(pool_of("a", False), self.executor.rows(False))
            self.transport.register(pool_of("a", True), self.executor.rows(True))
        if self.disk is not None:
            self.disk.add_model("a", "key", KvPool(self.executor.rows(True)))
        self.loop.start()
        await self.service.start()
        await self.bus.subscribe(INSTANCE_CANCEL.at(instance_id=self.name), self._on_cancel)
        self.register()

    def info(self, **changes) -> InstanceInfo:
        loaded = [
            LoadedModel(
                name="a",
                state="ready",
                max_model_len=600,
                block_size=SHAPE.block_size,
                blocks_per_merged=SHAPE.blocks_per_merged,
            )
        ]
        address = self.transport.address if self.transport is not None else ""
        info = InstanceInfo(
            instance_id=self.name,
            incarnation=f"{self.name}.1",
            node_id="node",
            state="ready",
            models=loaded,
            num_merged=NUM_MERGED,
            merged_bytes=4096,
            kv_address=address,
        )
        return msgspec.structs.replace(info, **changes)

    def register(self, **changes) -> None:
        self.registry[self.name] = self.info(**changes)

    async def stop(self) -> None:
        self.executor.gate.set()
        await self.service.stop()
        await asyncio.to_thread(self.loop.stop, 5.0)
        if self.disk is not None:
            await asyncio.to_thread(self.disk.close, 5.0)
        if self.transport is not None:
            await self.transport.close()
        await self.bus.close()
        self.telemetry.close()

    # handovers
    def on_adopted(self, commit: Commit, num_output: int) -> None:
        self.adopted.append((commit, num_output))
        request = commit.request
        self.gateway.on_entry(
            self.name, TokenEntry(request_id=request.request_id, epoch=request.epoch, offset=num_output, tokens=b"")
        )

    def on_migration_begun(self, request: GenerationRequest, destination_id: str, reason: MigrationReason) -> None:
        assert request.gateway_id == "gateway" and destination_id != self.name and reason in MigrationReason

    def on_migration_ended(self, outcome: MigrationOutcome, request: GenerationRequest, taken: Detached | None) -> None:
        assert request.gateway_id == "gateway" and request.request_id == outcome.request_id
        self.outcomes.append(outcome)
        self.gateway.news.set()

    def on_backed_up(self, request: GenerationRequest, holder_id: str) -> None:
        self.backed_up[request.request_id] = holder_id

    def on_blocks_found(self) -> None:
        self.gateway.news.set()

    # engine
    def _in_thread(self, effects: list[Output | Ended | Detached], stats: StepStats | None) -> None:
        self._event_loop.call_soon_threadsafe(self._on_effects, effects, stats)

    def _on_effects(self, effects: list[Output | Ended | Detached], stats: StepStats | None) -> None:
        if self.is_dead:
            return
        for effect in effects:
            if isinstance(effect, Output):
                for entry in effect.entries:
                    self.gateway.on_entry(self.name, entry)
            elif isinstance(effect, Ended):
                self.ended.append(effect)
        self.service.on_effects(effects)
        if stats is not None:
            self.service.on_step(stats)

    def _on_disk_change(self, model: str, changes: Changes) -> None:
        self.loop.apply(calls.FoundOnDisk(model, changes.found))
        self.loop.apply(calls.LostOnDisk(model, changes.lost))

    def _on_cancel(self, cancel: Cancel) -> None:
        self.cancels.append(cancel)
        held_epoch = self.loop.held_epoch(cancel.request_id)
        if held_epoch is None:
            if cancel.epoch is None:
                self.service.forward_cancel(cancel.request_id)
        elif cancel.epoch is None or held_epoch <= cancel.epoch:
            self.loop.apply(calls.Cancel(cancel.request_id))

    # what tests do
    def submit(self, request: GenerationRequest) -> None:
        assert self.loop.apply(Submit(request)) is None

    def rebalance(
        self,
        *destinations: str,
        reason: MigrationReason = MigrationReason.BALANCE,
        lease_s: float = 0.3,
        at_once: int = 1,
    ) -> None:
        topic = INSTANCE_REBALANCE.at(instance_id=self.name)
        self.bus.publish(topic, Rebalance([*destinations], reason, lease_s, at_once))

    def is_idle(self) -> bool:
        """Nothing is held or under way, copies to host memory included."""
        with self.loop.locked() as engine:
            is_empty = not engine.all_held() and engine.pool.used_merged() == 0
            if self.disk is not None and engine.memory.host.pool is not None:
                # Of ended requests blocks are still written.
                is_empty = is_empty and engine.memory.host.pool.used_merged() == 0
        return is_empty and not self.service.has_work

    def check_idle(self) -> None:
        """Nothing is held, and every block is free."""
        with self.loop.locked() as engine:
            engine.check()
            assert not engine.all_held()
            assert engine.pool.used_merged() == 0, (
                f"{self.name} leaks blocks: {engine.outgoing.pinned}, {[*engine.reservations]}"
            )
            host = engine.memory.host.pool
            assert host is None or host.used_merged() == 0, f"{self.name} leaks host blocks: {engine.outgoing.pinned}"


async def make_party(
    name: str,
    nats_url: str,
    gateway: Gateway,
    registry: dict[str, InstanceInfo],
    network: Network | None,
    *,
    step_s: float = 0.002,
    num_merged: int = NUM_MERGED,
    bus: Bus | None = None,
    tracer: Tracer | None = None,
    **fields,
) -> Party:
    # By its estimates the source copies 100 KB/s, so that a few blocks are worth a stage.
    fields = {
        "migration_cooldown_s": 0.05,
        "host_memory_bytes": 0,
        "migration_rate_share": 1e-4,
        "kv_backup": "off",
        **fields,
    }
    settings = InstanceSettings(nats_url=nats_url, instance_id=name, device="cpu", profile="off", **fields)
    telemetry = start_telemetry("worker", name, settings)
    telemetry.tracer = tracer or telemetry.tracer
    bus = bus or await NatsBus.connect(settings, service="instance", service_id=name, registry=telemetry.registry)
    transport = None
    if network is not None:
        transport = KvTransport(network, TransportLimits(chunk_bytes=256, drain_s=0.3, rate_fraction=None))
        await transport.open()
        transport.bandwidth_bytes_s = lambda address: None  # type: ignore[method-assign]
    executor = SlabExecutor(num_merged, step_s)
    party = Party(
        name=name,
        bus=bus,
        gateway=gateway,
        registry=registry,
        transport=transport,
        settings=settings,
        telemetry=telemetry,
        executor=executor,
        num_merged=num_merged,
    )
    await party.start()
    return party


async def until(condition: Callable[[], object], news: asyncio.Event, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            news.clear()
            try:
                async with asyncio.timeout(0.02):
                    await news.wait()
            except TimeoutError:
                continue
