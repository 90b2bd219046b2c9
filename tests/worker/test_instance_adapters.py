"""The adapters of an instance on a real NATS: loaded beside the steps, dropped when there are too many, refused with a
reason. The executor is a fake that notes what it is told (instance_stage.py)."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from services.worker.instance import adapters as instance_adapters
from shared.bus.interface import BusError
from shared.messages.admin import UnloadModel
from shared.messages.catalogue import ADAPTERS, INSTANCE_COMMIT, INSTANCE_SUBMIT, INSTANCE_UNLOAD_MODEL
from shared.messages.channels import bucket_key
from shared.messages.cluster import AdapterSpec
from shared.messages.migration import Commit, Committed, SequenceProgress
from shared.messages.requests import Adapter, ErrorCode, FinishReason
from shared.models.checkpoint import CheckpointError, CheckpointMissing
from shared.runtime.settings import BusSettings
from tests.shared.engine.fake_executor import request
from tests.worker.instance_stage import IDS, Stage, SteppedExecutor, instance_on

BYTES = 100


class Adapting(SteppedExecutor):
    def __init__(self) -> None:
        super().__init__()
        self.held: list[str] = []
        self.loads: list[str] = []
        self.dropped: list[str] = []
        self.max_adapters = 16
        self.may_load = threading.Event()
        self.may_load.set()

    def adapter_bytes(self, model: str, adapter: Adapter) -> int:
        if adapter.source == "bad":
            raise CheckpointError("bad/adapter_config.json is missing.")
        if adapter.source == "late":
            raise CheckpointMissing("'late' does not exist.")
        return BYTES * len(adapter.source)

    def load_adapter(self, model: str, adapter: Adapter) -> None:
        assert len(self.held) < self.max_adapters, "room is made before it is read"
        self.loads.append(adapter.version)
        self.may_load.wait(60)
        self.held.append(adapter.version)

    def drop_adapter(self, version: str) -> None:
        if version in self.held:
            self.held.remove(version)
            self.dropped.append(version)

    def execute(self, plan: Any) -> Any:
        assert {new.adapter for new in plan.new_sequences} <= {"", *self.held}
        return super().execute(plan)


def adapter(name: str, source: str = "f") -> Adapter:
    return Adapter(name, f"v-{name}", source)


def instance(nats_settings: BusSettings, **settings: Any) -> Any:
    return instance_on(nats_settings, executor=Adapting(), **settings)


async def complete(stage: Stage, name: str, of: Adapter | None, num_tokens: int = 5) -> None:
    await stage.submit(request(name, [1, 2, 3, 4, 5, 6], num_tokens, adapter=of))
    await stage.until(lambda: stage.end(name))
    assert stage.end(name).finish_reason == FinishReason.LENGTH


async def refusal(stage: Stage, sent: Any) -> tuple[ErrorCode, str]:
    with pytest.raises(BusError) as refused:
        await stage.bus.request(INSTANCE_SUBMIT.at(**IDS), sent, timeout_s=60)
    return refused.value.code, refused.value.info.message


async def test_the_least_recently_used_goes_but_not_while_a_request_needs_it(nats_settings: BusSettings) -> None:
    async with instance(nats_settings, max_adapters=2) as stage:
        executor = stage.executor
        executor.max_adapters = 2
        for name in "abac":
            await complete(stage, f"r{executor.loads}{name}", adapter(name))
        assert executor.loads == ["v-a", "v-b", "v-c"] and sorted(executor.held) == ["v-a", "v-c"]
        await stage.submit(request("long-a", [1, 2], 400, adapter=adapter("a")))
        await complete(stage, "b", adapter("b"))
        assert sorted(executor.held) == ["v-a", "v-b"], "c went, which nobody needed, though a was used before it"
        await stage.until(lambda: stage.info.models[0].adapters == ("a", "b"))
        await stage.until(lambda: stage.end("long-a"))
        finished = {f.public_model: f.model for report in stage.reports for f in report.finished}
        assert finished == dict.fromkeys("abc", "a"), "each counts under its own name, and all are of one model"


async def test_requests_wait_for_an_adapter_that_is_loading_and_for_room(
    nats_settings: BusSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_adapters, "SUBMIT_WAIT_S", 0.1)
    async with instance(nats_settings, max_adapters=1, adapter_memory_bytes=3 * BYTES) as stage:
        executor = stage.executor
        executor.max_adapters = 1
        executor.may_load.clear()
        sent = request("r1", [1, 2], 5, adapter=adapter("a"))
        assert (await refusal(stage, sent))[0] == ErrorCode.LOADING
        await complete(stage, "plain", None)
        executor.may_load.set()
        await complete(stage, "r1", adapter("a"))
        assert executor.loads == ["v-a"], "it was loaded once"

        await stage.submit_and_hold(request("running", [3], 50, adapter=adapter("a")))
        assert (await refusal(stage, request("r2", [1], 5, adapter=adapter("b"))))[0] == ErrorCode.LOADING
        assert stage.service.intake.refusal("a", adapter("b")).code == ErrorCode.LOADING, "nor by a migration"
        executor.gate.set()
        await stage.until(lambda: stage.end("running"))
        await stage.until(lambda: stage.service.intake.refusal("a", adapter("b")) is None)
        assert executor.held == ["v-b"]
        code, message = await refusal(stage, request("r3", [1], 5, adapter=adapter("wide", "four")))
        assert code == ErrorCode.MODEL_FAILED and "takes 400 bytes, and TIDEWAY_ADAPTER_MEMORY_BYTES" in message
        assert executor.held == ["v-b"] and "v-wide" not in executor.loads, "what is too large is not read"
        code, message = await refusal(stage, request("r4", [1], 5, adapter=adapter("x", "bad")))
        assert code == ErrorCode.MODEL_FAILED and "adapter_config.json is missing" in message
        assert (await refusal(stage, request("r5", [1], 5, adapter=adapter("x", "bad"))))[0] == code
        code, message = await refusal(stage, request("r6", [1], 5, adapter=adapter("y", "late")))
        assert code == ErrorCode.INTERNAL and "'late' does not exist" in message, "another instance may have it"


async def test_those_of_the_catalogue_are_loaded_ahead_and_dropped_when_their_requests_have_ended(
    nats_settings: BusSettings,
) -> None:
    async with instance(nats_settings) as stage:
        executor, bucket = stage.executor, await stage.bus.key_value(ADAPTERS)
        spec = AdapterSpec("poet", "a", "f", version="v-poet")
        await bucket.put(bucket_key("poet"), spec)
        await bucket.put(bucket_key("other"), AdapterSpec("other", "b", "f", version="v-other"))
        await stage.until(lambda: executor.held == ["v-poet"])
        await stage.submit_and_hold(request("r1", [1, 2], 30, adapter=spec.adapter))
        await bucket.delete(bucket_key("poet"))
        await asyncio.sleep(0.05)
        assert executor.held == ["v-poet"]
        executor.gate.set()
        await stage.until(lambda: stage.end("r1"))
        assert stage.end("r1").finish_reason == FinishReason.LENGTH
        await stage.until(lambda: not executor.held)

        executor.may_load.clear()
        await bucket.put(bucket_key("brief"), AdapterSpec("brief", "a", "f", version="v-brief"))
        await stage.until(lambda: "v-brief" in executor.loads)
        await bucket.delete(bucket_key("brief"))
        executor.may_load.set()
        await stage.until(lambda: "v-brief" in executor.dropped)

        await bucket.put(bucket_key("poet"), spec)
        await stage.until(lambda: executor.held == ["v-poet"])
        await stage.bus.request(INSTANCE_UNLOAD_MODEL.at(**IDS), UnloadModel("a"), timeout_s=60)
        await stage.until(lambda: not stage.info.models)
        assert (await refusal(stage, request("r2", [1], 5, adapter=spec.adapter)))[0] == ErrorCode.GONE


async def test_what_is_read_too_late_does_not_stay(nats_settings: BusSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_adapters, "SUBMIT_WAIT_S", 0.1)
    async with instance(nats_settings) as stage:
        executor = stage.executor
        executor.may_load.clear()
        monkeypatch.setattr(instance_adapters, "LOAD_TIMEOUT_S", 0.05)
        sent = request("r1", [1, 2], 5, adapter=adapter("a"))
        monkeypatch.setattr(instance_adapters, "FAILURE_S", 3600.0)
        refused = None
        while refused != ErrorCode.INTERNAL:
            refused, message = await refusal(stage, sent)
        assert "not loaded within 0.05 s" in message
        executor.may_load.set()
        await stage.until(lambda: executor.dropped == ["v-a"])

        monkeypatch.setattr(instance_adapters, "LOAD_TIMEOUT_S", 120.0)
        executor.may_load.clear()
        assert (await refusal(stage, request("r2", [1], 5, adapter=adapter("b"))))[0] == ErrorCode.LOADING
        monkeypatch.setattr(instance_adapters, "SUBMIT_WAIT_S", 60.0)
        waiting = asyncio.create_task(refusal(stage, request("r3", [1], 5, adapter=adapter("b"))))
        await stage.bus.request(INSTANCE_UNLOAD_MODEL.at(**IDS), UnloadModel("a"), timeout_s=60)
        await stage.until(lambda: not stage.info.models)
        executor.may_load.set()
        await stage.until(lambda: executor.dropped == ["v-a", "v-b"])
        assert not executor.held
        assert (await waiting)[0] == ErrorCode.GONE, "it is placed elsewhere"


async def test_keys_and_values_are_shared_within_an_adapter_alone(nats_settings: BusSettings) -> None:
    async with instance(nats_settings) as stage:
        prompt = list(range(1, 30))
        cached = []
        for name, of in [("a1", "a"), ("a2", "a"), ("b1", "b"), ("plain1", ""), ("plain2", ""), ("b2", "b")]:
            await stage.submit(request(name, prompt, 3, adapter=adapter(of) if of else None))
            await stage.until(lambda name=name: stage.end(name))
            cached.append(stage.end(name).num_cached_tokens)
        assert cached == [0, 28, 0, 0, 28, 28]


async def test_a_request_that_moves_here_is_taken_when_its_adapter_is_loaded(nats_settings: BusSettings) -> None:
    async with instance(nats_settings) as stage:
        stage.executor.may_load.clear()
        moved = request("r1", [1, 2, 3], 9, epoch=1, adapter=adapter("a"))

        async def commit(number: int) -> Committed:
            sent = Commit(f"m{number}", "node-1", moved, SequenceProgress())
            return await stage.bus.request(INSTANCE_COMMIT.at(**IDS), sent, timeout_s=60)

        with pytest.raises(BusError) as refused:
            await commit(1)
        assert refused.value.code == ErrorCode.LOADING
        stage.executor.may_load.set()
        await stage.until(lambda: stage.executor.held)
        await stage.until(lambda: stage.info.models[0].adapters == ("a",))
        assert await commit(2) == Committed("r1", 1)
        await stage.until(lambda: stage.end("r1"))
        assert stage.end("r1").finish_reason == FinishReason.LENGTH
