"""An instance on a real NATS whose scheduler, gateway, node agent and peers the test plays; its executor is a fake without
tensors whose tokens are hashes of their prefix (tests/shared/engine/fake_executor.py)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import torch

from services.worker.instance.building import build_engine
from services.worker.instance.service import InstanceService
from shared.bus.nats_bus import NatsBus
from shared.engine.plan import NO_TOKEN, CopyKind, KvCopy, ModelShape, StepPlan, StepResult
from shared.messages.catalogue import (
    GATEWAY_FRAMES,
    INSTANCE_SUBMIT,
    INSTANCES,
    LOAD_REPORTS,
)
from shared.messages.cluster import (
    InstanceInfo,
    InstancePlan,
    LoadReport,
    ModelSpec,
)
from shared.messages.requests import (
    Accepted,
    GenerationRequest,
    TokenEntry,
    TokenFrame,
    unpack_tokens,
)
from shared.runtime.settings import BusSettings, InstanceSettings
from shared.runtime.telemetry import start_telemetry
from tests.shared.engine.fake_executor import FakeExecutor, next_token

SHAPES = {"a": ModelShape("a", 4, 3, 600), "b": ModelShape("b", 2, 2, 60)}
IDS = {"instance_id": "node-0"}
NUM_MERGED = 64
LAME = 5000
"""A token that no model has numbers for."""
EMPTY = -2
"""In a KV cell: no token."""


class SteppedExecutor(FakeExecutor):
    """Runs freely, or holds steps back while `gate` is closed."""

    def __init__(self) -> None:
        super().__init__(list(SHAPES.values()), lambda prefix: NO_TOKEN if LAME in prefix else next_token(prefix))
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Event()
        self.removed: list[str] = []
        self.held: set[str] = set()
        """Models whose weights are to be kept."""
        self.kept: set[str] = set()
        """In host memory."""
        self.has_host_room = True
        self.is_broken = False
        self._results: deque[StepResult] = deque()
        self._copied: list[tuple[int, bool]] = []

    def prepare_model(self, spec: ModelSpec) -> ModelSpec:
        if spec.name not in SHAPES:
            raise FileNotFoundError(f"{spec.source}: no such checkpoint")
        return spec

    def add_model(self, prepared: ModelSpec) -> ModelShape:
        return SHAPES[prepared.name]

    def is_sound(self, name: str) -> bool:
        return not self.is_broken

    def remove_model(self, name: str) -> None:
        self.removed.append(name)

    def hold_weights(self, name: str) -> None:
        assert name not in self.removed
        self.held.add(name)

    def keep_weights(self, name: str) -> bool:
        assert name in self.removed and name in self.held
        self.held.discard(name)
        if self.has_host_room:
            self.kept.add(name)
        return self.has_host_room

    def drop_weights(self, name: str) -> None:
        self.kept.discard(name)

    def has_weights(self, name: str) -> bool:
        return name in self.kept

    def launch(self, plan: StepPlan) -> None:
        self.at_gate.set()
        self.gate.wait(20)
        time.sleep(0.001)
        self._results.append(self.execute(plan))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def interrupt(self, step_id: int) -> None:
        """Too late: steps here are over at once."""

    def start_copy(self, copy: KvCopy) -> None:
        assert copy.kind == CopyKind.MOVE, "there is no host memory"
        self._copied += [(done.copy_id, True) for done in self.start([copy])]

    def finished_copies(self) -> list[tuple[int, bool]]:
        copied, self._copied = self._copied, []
        return copied

    def claim_blocks(self, model: str, blocks: list[int]) -> None:
        raise AssertionError("there is no transport")

    def on_copy_finished(self, callback: Callable[[], None]) -> None:
        """A move is over before the loop looks."""


class SlabExecutor(SteppedExecutor):
    """Its KV cells are bytes that a transport can read and write: a block that was not claimed first loses what came."""

    def __init__(self) -> None:
        super().__init__()
        self._rows = {
            shape.name: np.full((NUM_MERGED * shape.blocks_per_merged, shape.block_size), EMPTY, np.int32)
            for shape in SHAPES.values()
        }

    def claim_blocks(self, model: str, blocks: list[int]) -> None:
        for block in blocks:
            self._block(model, block)

    def block_rows(self, model: str, on_host: bool) -> torch.Tensor:
        rows = torch.from_numpy(self._rows[model]).view(torch.uint8)
        return rows[:0] if on_host else rows

    def _block(self, model: str, block: int) -> Any:
        merged, num_blocks = block // SHAPES[model].blocks_per_merged, SHAPES[model].blocks_per_merged
        if self._merged_owner.get(merged) != model:
            self._merged_owner[merged] = model
            self._rows[model][merged * num_blocks : (merged + 1) * num_blocks] = EMPTY
        return self._rows[model][block]


class Stage:
    """The instance under test and the scripted peers' view of it."""

    service: InstanceService
    executor: Any
    bus: NatsBus
    telemetry: Any

    def __init__(self, sender: str = "node-0") -> None:
        self._sender = sender
        self.entries: list[TokenEntry] = []
        self.reports: list[LoadReport] = []
        self.news = asyncio.Event()
        self.instances: Any = None

    @property
    def info(self) -> InstanceInfo:
        """The instance's registry entry."""
        info: InstanceInfo = self.instances.entries[self._sender]
        return info

    def on_frame(self, frame: TokenFrame) -> None:
        assert frame.sender == self._sender
        self.entries.extend(frame.entries)
        self.news.set()

    def on_report(self, report: LoadReport) -> None:
        if report.instance_id == self._sender:
            self.reports.append(report)
            self.news.set()

    def output(self, request_id: str, offset: int = 0) -> list[int]:
        """Output of the entries that this instance sent, which begin at `offset`."""
        tokens: list[int] = []
        for entry in self.entries:
            if entry.request_id == request_id:
                assert entry.offset == offset + len(tokens)
                tokens.extend(unpack_tokens(entry.tokens))
        return tokens

    def end(self, request_id: str) -> TokenEntry | None:
        return next((e for e in self.entries if e.request_id == request_id and e.finish_reason), None)

    async def submit(self, sent: GenerationRequest) -> None:
        reply = await self.bus.request(INSTANCE_SUBMIT.at(instance_id=self._sender), sent, timeout_s=5)
        assert reply == Accepted(sent.request_id)

    async def submit_and_hold(self, sent: GenerationRequest) -> None:
        """It is in the step that the gate, now closed, holds back: whatever comes next waits behind it."""
        self.executor.gate.clear()
        self.executor.at_gate.clear()
        await self.submit(sent)
        await self.until(self.executor.at_gate.is_set)

    async def until(self, condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.news.clear()
                try:
                    async with asyncio.timeout(0.02):
                        await self.news.wait()
                except TimeoutError:
                    continue


def settings_of(nats_settings: BusSettings, **fields: Any) -> InstanceSettings:
    plan = InstancePlan(
        "node-0", "node", [ModelSpec("a", "/models/a")], pool_bytes=NUM_MERGED * 4096, merged_bytes=4096
    )
    fields = {"instance_id": "node-0", "plan": msgspec.json.encode(plan).decode(), **fields}
    return InstanceSettings(nats_url=nats_settings.nats_url, node_id="node", device="cpu", **fields)


@asynccontextmanager
async def instance_on(
    nats_settings: BusSettings,
    *,
    executor: Any = None,
    open_transport: Any = None,
    num_merged: int = NUM_MERGED,
    num_stages: int = 1,
    **fields: Any,
) -> AsyncIterator[Stage]:
    """A running instance, ready, whose requests can move; `fields`: of its settings."""
    settings = settings_of(nats_settings, **fields)
    stage = Stage(settings.instance_id)
    telemetry = start_telemetry("worker", settings.instance_id, settings)
    stage.executor = executor or SteppedExecutor()
    stage.bus = await NatsBus.connect(nats_settings, service="test", service_id="peer")
    bus = await NatsBus.connect(
        settings, service="instance", service_id=settings.instance_id, registry=telemetry.registry
    )
    engine = build_engine(settings, num_merged, "cpu", num_stages=num_stages)
    stage.service = InstanceService(bus, settings, telemetry, engine, stage.executor, open_transport=open_transport)
    await stage.bus.subscribe(GATEWAY_FRAMES.at(gateway_id="gateway"), _only_from(settings.instance_id, stage.on_frame))
    await stage.bus.subscribe(LOAD_REPORTS, stage.on_report)
    await stage.service.start()
    stage.instances = await (await stage.bus.key_value(INSTANCES)).watch()
    stage.telemetry = telemetry

    def is_ready() -> bool:
        info = stage.instances.entries.get(settings.instance_id)
        return info is not None and info.state == "ready"

    await stage.until(is_ready)
    await stage.until(lambda: stage.service._migrations._service)
    try:
        yield stage
    finally:
        if isinstance(stage.executor, SteppedExecutor):
            stage.executor.gate.set()
        await stage.service.stop()
        await bus.close()
        await stage.bus.close()
        telemetry.close()


def _only_from(sender: str, handler: Callable[[TokenFrame], None]) -> Callable[[TokenFrame], None]:
    return lambda frame: handler(frame) if frame.sender == sender else None
