"""Instances with a real model whose requests move, KV and all: what the client reads is what it reads without the move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.worker.executor.executor import Executor
from services.worker.instance import service as instance_module
from services.worker.kv_transport import KvTransport
from shared.bus.nats_bus import NatsBus
from shared.engine.engine import Engine
from shared.messages.admin import UnloadModel
from shared.messages.catalogue import INSTANCE_CANCEL, INSTANCE_UNLOAD_MODEL
from shared.messages.migration import MigrationReason
from shared.messages.requests import Cancel, FinishReason, GenerationRequest, RequestClass
from shared.runtime.settings import BusSettings
from tests.paced import PacedLoop
from tests.worker.instance_stage import Stage, instance_on
from tests.worker.kv_transport.local import LocalHub, LocalNetwork
from tests.worker.neighbours import (
    MERGED_BYTES,
    NUM_MERGED,
    SAMPLING,
    Neighbours,
    generation,
    plan_of,
    write_long_checkpoint,
)

NUM_ROWS = 16
STEP_S = 0.003


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_long_checkpoint(tmp_path_factory.mktemp("checkpoints"))


class Pair(Neighbours):
    """Steps take STEP_S at least, so that requests outlast what happens to them."""

    source: Stage
    destination: Stage

    async def undisturbed(self, instance_id: str, *requests: GenerationRequest) -> dict[str, list[int]]:
        PacedLoop.step_s = 0.0
        try:
            return await super().undisturbed(instance_id, *requests)
        finally:
            PacedLoop.step_s = STEP_S

    def check_nothing_is_left(self) -> None:
        for stage in (self.source, self.destination):
            with stage.service._loop.locked() as engine:
                engine.check()
                assert not engine.all_held() and engine.pool.used_merged() == 0


@pytest.fixture
async def pair(nats_settings: BusSettings, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    """Two instances over an in-process network."""
    monkeypatch.setattr(instance_module, "EngineLoop", PacedLoop)
    monkeypatch.setattr(PacedLoop, "step_s", STEP_S)
    hub = LocalHub()

    async def open_transport() -> KvTransport:
        transport = KvTransport(LocalNetwork(hub))
        await transport.open()
        return transport

    def started(instance_id: str) -> Any:
        return instance_on(
            nats_settings,
            executor=Executor("cpu", NUM_MERGED, MERGED_BYTES, NUM_ROWS),
            open_transport=open_transport,
            num_merged=NUM_MERGED,
            instance_id=instance_id,
            plan=plan_of(instance_id, checkpoint),
            max_running=NUM_ROWS,
            max_migrations=4,
            migration_cooldown_s=0.05,
        )

    bus = await NatsBus.connect(nats_settings, service="test", service_id="neighbours")
    neighbours = Pair(bus)
    await neighbours.start()
    async with started("node-0") as neighbours.source, started("node-1") as neighbours.destination:
        both = ("node-0", "node-1")

        def see_each_other() -> bool:
            views = [stage.service._migrations.peers() for stage in (neighbours.source, neighbours.destination)]
            return all(view[name].kv_address for view in views for name in both if name in view) and all(
                len(view) == 2 for view in views
            )

        await neighbours.until(see_each_other)
        yield neighbours
    await bus.close()


async def test_streams_of_requests_that_move_are_those_of_requests_that_stay(pair: Pair) -> None:
    requests = [
        generation(f"r{index}-{sampling}", length, 250, sampling)
        for index, length in enumerate((20, 300))
        for sampling in SAMPLING
    ]
    expected = await pair.undisturbed("node-0", *requests)
    await pair.submit("node-0", *requests)
    await pair.until(lambda: all(pair.progress(request.request_id) > 40 for request in requests))
    pair.rebalance("node-0", "node-1")
    await pair.ended(*requests)
    assert {request_id: pair.gateway.tokens[request_id] for request_id in expected} == expected
    moved = [request for request in requests if pair.owner(request.request_id) == "node-1"]
    assert moved
    for request in moved:
        assert await pair.replayed("node-1", request.request_id) == expected[request.request_id]
    await pair.until(lambda: {move.request_id for r in pair.reports for move in r.migrations if move.is_migrated})
    ids = {request.request_id for request in moved}
    assert {move.request_id for report in pair.reports for move in report.migrations if move.is_migrated} == ids
    assert {held.request_id for report in pair.reports for held in report.migrated_in} == ids
    ended = {report.instance_id: set(report.ended) for report in pair.reports if report.ended}
    assert not any(request_id in ended.get("node-0", ()) for request_id in ids)
    made = sum(
        stage.telemetry.registry.get_sample_value(
            "vllm:generation_tokens_total", {"model_name": "m", "engine": stage.info.instance_id}
        )
        for stage in (pair.source, pair.destination)
    )
    assert made == 2 * sum(len(output) for output in expected.values()), "each token is counted where it was made"
    pair.check_nothing_is_left()


@pytest.mark.long
async def test_a_request_that_moves_back_and_forth_keeps_its_stream(pair: Pair) -> None:
    request = generation("r", 100, 700, "sampled")
    expected = await pair.undisturbed("node-1", request)
    await pair.submit("node-0", request)
    here, there = "node-0", "node-1"
    for number in range(1, 5):
        before = pair.progress("r")
        await pair.until(lambda: pair.progress("r") > before + 30)  # noqa: B023
        await asyncio.sleep(0.06)
        pair.rebalance(here, there)
        await pair.until(lambda: pair.gateway.owners["r"] == (number, there))  # noqa: B023
        pair.rebalance(here)
        here, there = there, here
    await pair.ended(request)
    assert pair.gateway.tokens["r"] == expected["r"]
    assert await pair.replayed(here, "r") == expected["r"]
    await pair.until(lambda: not pair.source.service._migrations.has_work)
    pair.check_nothing_is_left()


async def test_a_cancel_at_the_source_ends_a_request_that_has_moved(pair: Pair) -> None:
    request = generation("r", 100, 1500)
    await pair.submit("node-0", request)
    await pair.until(lambda: pair.progress("r") > 30)
    pair.rebalance("node-0", "node-1")
    await pair.until(lambda: pair.owner("r") == "node-1")
    pair.bus.publish(INSTANCE_CANCEL.at(instance_id="node-0"), Cancel("r"))
    await pair.until(lambda: "r" in pair.gateway.ends)
    assert pair.gateway.ends["r"].finish_reason == FinishReason.CANCELLED
    await pair.until(lambda: not pair.source.service._migrations.has_work)
    pair.check_nothing_is_left()


@pytest.mark.long
async def test_an_instance_that_ends_gives_all_its_requests_away(pair: Pair) -> None:
    offline = {"request_class": RequestClass.OFFLINE}
    requests = [generation(f"r{n}", 50 + 100 * n, 500, **(offline if n % 2 else {})) for n in range(3)]
    expected = await pair.undisturbed("node-1", *requests)
    await pair.submit("node-0", *requests)
    await pair.until(lambda: all(pair.progress(request.request_id) > 10 for request in requests))
    draining = asyncio.create_task(pair.source.service.drain_before_exit())
    while not draining.done():
        if pair.instances.entries["node-0"].state == "draining":
            pair.rebalance("node-0", "node-1", reason=MigrationReason.DRAIN)
        await asyncio.sleep(0.05)
    assert pair.source.service._loop.ask(Engine.num_held) == 0
    await pair.ended(*requests)
    assert {request_id: pair.gateway.tokens[request_id] for request_id in expected} == expected
    assert {pair.owner(request.request_id) for request in requests} == {"node-1"}
    pair.check_nothing_is_left()


async def test_a_model_that_is_unloaded_gives_what_runs_away(pair: Pair) -> None:
    requests = [generation(f"r{n}", 100 + 50 * n, 500) for n in range(2)]
    expected = await pair.undisturbed("node-1", *requests)
    await pair.submit("node-0", *requests)
    await pair.until(lambda: all(pair.progress(request.request_id) > 10 for request in requests))
    await pair.bus.request(INSTANCE_UNLOAD_MODEL.at(instance_id="node-0"), UnloadModel("m", grace_s=20), timeout_s=5)
    await pair.until(lambda: not pair.source.info.models)
    assert pair.source.service._migrations._transport.block_bytes("device/m") is None  # type: ignore[union-attr]
    await pair.ended(*requests)
    assert {request_id: pair.gateway.tokens[request_id] for request_id in expected} == expected
    assert {pair.owner(request.request_id) for request in requests} == {"node-1"}
