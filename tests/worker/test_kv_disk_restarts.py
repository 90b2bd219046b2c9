"""Instances that end and begin again on a folder of KV blocks: real models in float32, engine, loop, copies and files."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from services.worker.executor.executor import Executor
from services.worker.instance.building import build_engine, open_disk
from services.worker.instance.disk_tier import DiskTier
from services.worker.instance.engine_loop import EngineLoop
from shared.engine.calls import AddModel, Submit
from shared.engine.requests import Ended
from shared.messages.cluster import ModelSpec
from shared.messages.requests import GenerationRequest, SamplingParams, pack_tokens, unpack_tokens
from shared.runtime.settings import InstanceSettings, SettingsError
from tests.worker.checkpoints import prompt_of, reference_outputs, write_checkpoint

MERGED_BYTES = 1 << 20
NUM_TOKENS = 6
PROMPTS = [prompt_of(length) for length in (150, 190, 230)]


class Instance:
    def __init__(self, path: Path, folder: Path, **fields) -> None:
        settings = InstanceSettings(
            max_running=4, token_budget=256, profile="off", kv_offload="disk", kv_disk_folder=str(folder), **fields
        )
        self.executor = Executor("cpu", 24, MERGED_BYTES, 4, num_host_merged=24)
        self.engine = build_engine(settings, 24, "cpu", 24)
        self.registry = CollectorRegistry()
        store = open_disk(settings)
        assert store is not None
        self.disk = DiskTier(store, self.executor, self.registry, "one", is_polite=False)
        self.loop = EngineLoop(self.engine, self.executor, time.monotonic, self._on_effects, disk=self.disk.copies)
        self.disk.loop = self.loop
        prepared = self.executor.prepare_model(ModelSpec("m", str(path), dtype="float32"))
        self.engine.apply(AddModel(self.executor.add_model(prepared)), 0.0)
        self.output: dict[str, list[int]] = {}
        self.ended: dict[str, Ended] = {}
        self.news = threading.Event()

    def _on_effects(self, effects, stats) -> None:
        for effect in effects:
            if isinstance(effect, Ended):
                self.ended[effect.request.request_id] = effect
            else:
                for entry in effect.entries:
                    self.output.setdefault(entry.request_id, []).extend(unpack_tokens(entry.tokens))
        self.news.set()

    async def until(self, condition) -> None:
        async with asyncio.timeout(120):
            while not condition():
                assert not self.loop.failure, self.loop.failure
                await asyncio.sleep(0.01)

    def num_known(self) -> int:
        return self.loop.ask(lambda engine: engine.memory.host.disk.num_known("m"))

    async def answer(self, prompts: list[list[int]], tenant: str = "") -> list[Ended]:
        names = [f"{tenant}-{len(self.ended) + number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            request = GenerationRequest(
                request_id=name, gateway_id="gateway", model="m", prompt=pack_tokens(prompt),
                sampling=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0), tenant=tenant, prefix_salt=tenant,
            )  # fmt: skip
            assert self.loop.apply(Submit(request)) is None
        await self.until(lambda: self.ended.keys() >= set(names))
        return [self.ended[name] for name in names]

    def texts(self, ended: list[Ended]) -> list[list[int]]:
        return [self.output[one.request.request_id] for one in ended]


@asynccontextmanager
async def instance(path: Path, folder: Path, *, flushes: bool = True, **fields) -> AsyncIterator[Instance]:
    one = Instance(path, folder, **fields)
    one.loop.start()
    one.disk.add_model("m")
    try:
        yield one
        if flushes:
            await one.disk.flush()
    finally:
        one.loop.stop(10)
        await one.disk.close()
        one.executor.close()
    with one.loop.locked() as engine:
        engine.check()


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), "llama3")


async def test_an_instance_that_began_anew_answers_from_disk_with_the_same_tokens(path: Path, tmp_path: Path) -> None:
    expected = reference_outputs(path, PROMPTS, NUM_TOKENS)
    async with instance(path, tmp_path) as first:
        ended = await first.answer(PROMPTS, "tenant")
        assert first.texts(ended) == expected and not any(one.num_cached_tokens for one in ended)
    async with instance(path, tmp_path) as second:
        await second.until(second.num_known)
        ended = await second.answer(PROMPTS, "tenant")
        assert second.texts(ended) == expected
        for one, prompt in zip(ended, PROMPTS, strict=True):
            page = second.engine.memory.queues["m"].shape.block_size
            assert one.num_disk_tokens == (len(prompt) - 1) // page * page
        others = await second.answer(PROMPTS, "other")
        assert second.texts(others) == expected and not any(one.num_cached_tokens for one in others)


async def test_damaged_and_vanished_files_are_computed_again(path: Path, tmp_path: Path) -> None:
    expected = reference_outputs(path, PROMPTS, NUM_TOKENS)
    async with instance(path, tmp_path) as first:
        await first.answer(PROMPTS)
    async with instance(path, tmp_path) as second:
        await second.until(second.num_known)
        files = files_in(tmp_path)
        for number, file in enumerate(files):
            if number % 3 == 0:
                with file.open("r+b") as damaged:
                    damaged.seek(5000)
                    damaged.write(b"damage")
            elif number % 3 == 1:
                file.unlink()
        ended = await second.answer(PROMPTS)
        assert second.texts(ended) == expected
        assert second.engine.counters.unreadable_blocks["m"] > 0


async def test_two_instances_share_a_folder_and_other_weights_find_nothing(
    path: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other_path = write_checkpoint(tmp_path_factory.mktemp("other"), "llama3")
    async with (
        instance(path, tmp_path, kv_offload_start=0.0) as first,
        instance(path, tmp_path) as second,
        instance(other_path, tmp_path) as other,
    ):
        expected = first.texts(await first.answer(PROMPTS))
        await first.until(lambda: first.num_known() >= sum(len(prompt) // 64 for prompt in PROMPTS))
        second.disk.copies._writes.put(second.disk.copies._look)
        other.disk.copies._writes.put(other.disk.copies._look)
        await second.until(second.num_known)
        ended = await second.answer(PROMPTS)
        assert second.texts(ended) == expected and any(one.num_disk_tokens for one in ended)
        assert not any(one.num_cached_tokens for one in await other.answer(PROMPTS)) and not other.num_known()


async def test_blocks_of_another_attention_back_end_are_not_taken_for_its_own(path: Path, tmp_path: Path) -> None:
    async with instance(path, tmp_path) as one:
        loaded = one.executor._models["m"]
        key, facts = one.executor.kv_key("m"), loaded.backend.facts
        other = SimpleNamespace(facts=msgspec.structs.replace(facts, name="of others"))
        one.executor._models["m"] = replace(loaded, backend=other)
        assert one.executor.kv_key("m") != key
        one.executor._models["m"] = loaded
        assert one.executor.kv_key("m") == key


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_offload": "disk"}, "TIDEWAY_KV_DISK_FOLDER"),
        ({"kv_disk_folder": "/tmp/x"}, "TIDEWAY_KV_OFFLOAD=disk, not off"),
        ({"kv_offload": "host", "kv_disk_folder": "/tmp/x"}, "TIDEWAY_KV_OFFLOAD=disk, not host"),
        ({"kv_offload": "host", "host_memory_bytes": 0}, "TIDEWAY_HOST_MEMORY_BYTES=0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(fields: dict, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        build_engine(InstanceSettings(**fields), 4, "cpu", 4)


def test_a_folder_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = InstanceSettings(kv_offload="disk", kv_disk_folder=str(tmp_path / "file"))
    with pytest.raises(SettingsError, match=r"TIDEWAY_KV_DISK_FOLDER=.*file"):
        open_disk(settings)
