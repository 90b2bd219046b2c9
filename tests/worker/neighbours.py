"""Scheduler and gateway of real instances with a real model, as tests play them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from shared.bus.interface import Watch
from shared.bus.nats_bus import NatsBus
from shared.messages.catalogue import (
    GATEWAY_FRAMES,
    INSTANCE_REBALANCE,
    INSTANCE_REPLAY,
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
from shared.messages.migration import MigrationReason, Rebalance
from shared.messages.requests import (
    FinishReason,
    GenerationRequest,
    ReplayQuery,
    SamplingParams,
    StreamPosition,
    TokenFrame,
    pack_tokens,
    unpack_tokens,
)
from shared.runtime.settings import BusSettings
from tests.worker.checkpoints import prompt_of, write_checkpoint
from tests.worker.migration.parties import Gateway, until

NUM_MERGED, MERGED_BYTES = 48, 1 << 18
MAX_LENGTH = 2048
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 7, "top_p": 0.95},
    "penalised": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.3},
}


def write_long_checkpoint(folder: Path, **changes: Any) -> Path:
    """Writes a checkpoint of a small model that takes long requests."""
    path = write_checkpoint(folder, "llama", **changes)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_LENGTH}))
    return path


def generation(
    request_id: str, length: int, max_tokens: int, sampling: str = "greedy", **fields: Any
) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens, **SAMPLING[sampling])
    return GenerationRequest(
        request_id=request_id,
        gateway_id="gateway",
        model="m",
        prompt=pack_tokens(prompt_of(length)),
        sampling=params,
        **fields,
    )


class Neighbours:
    """Scheduler and gateway of the instances under test."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus
        self.gateway = Gateway()
        self.reports: list[LoadReport] = []
        self.instances: Watch[InstanceInfo]

    async def start(self) -> None:
        await self.bus.subscribe(GATEWAY_FRAMES.at(gateway_id="gateway"), self._on_frame)
        await self.bus.subscribe(LOAD_REPORTS, self.reports.append)
        self.instances = await (await self.bus.key_value(INSTANCES)).watch()

    def _on_frame(self, frame: TokenFrame) -> None:
        for entry in frame.entries:
            self.gateway.on_entry(frame.sender, entry)

    async def until(self, condition: Callable[[], object], timeout_s: float = 20.0) -> None:
        await until(condition, self.gateway.news, timeout_s)

    async def submit(self, instance_id: str, *requests: GenerationRequest) -> None:
        for request in requests:
            await self.bus.request(INSTANCE_SUBMIT.at(instance_id=instance_id), request, timeout_s=5)

    def rebalance(self, source: str, *destinations: str, reason: MigrationReason = MigrationReason.BALANCE) -> None:
        message = Rebalance([*destinations], reason, 0.5, max_concurrent=4)
        self.bus.publish(INSTANCE_REBALANCE.at(instance_id=source), message)

    def progress(self, request_id: str) -> int:
        return len(self.gateway.tokens.get(request_id, ()))

    def owner(self, request_id: str) -> str:
        return self.gateway.owners[request_id][1]

    async def ended(self, *requests: GenerationRequest) -> None:
        await self.until(lambda: all(request.request_id in self.gateway.ends for request in requests))
        assert all(self.gateway.ends[request.request_id].finish_reason == FinishReason.LENGTH for request in requests)

    async def undisturbed(self, instance_id: str, *requests: GenerationRequest) -> dict[str, list[int]]:
        """What each request gives alone and at rest."""
        outputs = {}
        for request in requests:
            alone = msgspec.structs.replace(request, request_id=f"{request.request_id}-alone")
            await self.submit(instance_id, alone)
            await self.ended(alone)
            outputs[request.request_id] = self.gateway.tokens[alone.request_id]
        return outputs

    async def replayed(self, instance_id: str, request_id: str) -> list[int]:
        position = StreamPosition(request_id, self.gateway.owners[request_id][0], 0)
        reply = await self.bus.request(
            INSTANCE_REPLAY.at(instance_id=instance_id), ReplayQuery([position]), timeout_s=5
        )
        return unpack_tokens(reply.entries[0].tokens)


@asynccontextmanager
async def neighbours_on(nats_settings: BusSettings) -> AsyncIterator[Neighbours]:
    bus = await NatsBus.connect(nats_settings, service="test", service_id="neighbours")
    neighbours = Neighbours(bus)
    await neighbours.start()
    yield neighbours
    await bus.close()


def plan_of(instance_id: str, checkpoint: Path) -> str:
    """The setting of an instance that serves the checkpoint as "m"."""
    spec = ModelSpec("m", str(checkpoint))
    plan = InstancePlan(instance_id, "node", [spec], NUM_MERGED * MERGED_BYTES, MERGED_BYTES)
    return msgspec.json.encode(plan).decode()
