"""LoRA adapters as placement keeps them: checked against the base model, counted in plans, there again after a restart."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.placement import registry
from services.placement.adapters import read_adapter, with_adapters
from services.placement.footprint import DeviceFacts, footprint
from shared.bus.interface import ServiceError
from shared.messages.admin import AddAdapter, RemoveAdapter
from shared.messages.catalogue import ADAPTERS, PLACEMENT_ADD_ADAPTER, PLACEMENT_REMOVE_ADAPTER
from shared.messages.cluster import AdapterSpec, AttentionFacts, ModelSpec
from shared.messages.requests import ErrorCode
from shared.models.adapters import AdapterFiles
from shared.models.checkpoint import describe
from shared.runtime.settings import BusSettings
from tests.conftest import NatsServer
from tests.placement.test_service import Cluster, cluster, placement, until  # noqa: F401
from tests.worker.adapters import write_adapter
from tests.worker.checkpoints import write_checkpoint


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = write_checkpoint(tmp_path, "llama")
    (path / "tokenizer.json").write_text("{}")
    return path


async def refused(cluster: Cluster, spec: AdapterSpec) -> tuple[ErrorCode, str, str]:  # noqa: F811
    with pytest.raises(ServiceError) as caught:
        await cluster.bus.request(PLACEMENT_ADD_ADAPTER, AddAdapter(spec), timeout_s=60)
    info = caught.value.info
    return info.code, info.param, info.message


@pytest.fixture
async def adapters(cluster: Cluster) -> AsyncIterator[dict[str, AdapterSpec]]:  # noqa: F811
    watch = await (await cluster.bus.key_value(ADAPTERS)).watch()
    yield watch.entries
    await watch.stop()


async def test_adapters_come_and_go_and_stay_over_a_restart(
    nats_settings: BusSettings,
    nats_server: NatsServer,
    cluster: Cluster,  # noqa: F811
    adapters: dict[str, AdapterSpec],
    base: Path,
    tmp_path: Path,
) -> None:
    adapter = write_adapter(tmp_path / "poet", base, rank=4)
    plain = write_adapter(tmp_path / "plain", base, ("q_proj",), rank=4)
    wide = write_adapter(tmp_path / "wide", base, ("q_proj",), rank=40)
    async with placement(nats_settings, {"m": str(base)}, max_adapter_rank=32):
        cluster.start_node("n")
        await cluster.placed("m", "n-0 n-1")
        pools = {place.instance_id: place.pool_bytes for place in cluster.plans[-1].instances}
        asked = AdapterSpec("poet", "m", adapter.source, ttft_ms=300)
        added = await cluster.bus.request(PLACEMENT_ADD_ADAPTER, AddAdapter(asked), timeout_s=60)
        assert (added.rank, added.ttft_ms, added.num_values > 1000, len(added.version)) == (4, 300, True, 32)
        again = await cluster.bus.request(PLACEMENT_ADD_ADAPTER, AddAdapter(asked), timeout_s=60)
        assert again == added, "the same definition changes nothing"
        assert {place.instance_id: place.pool_bytes for place in cluster.plans[-1].instances} == pools
        cases = [
            (AdapterSpec("poet", "m", wide.source), ErrorCode.CONFLICT, "name", "different definition"),
            (AdapterSpec("m", "m", adapter.source), ErrorCode.CONFLICT, "name", "a model's name"),
            (AdapterSpec("x", "nobody", adapter.source), ErrorCode.UNKNOWN_MODEL, "base", "no model 'nobody'"),
            (AdapterSpec("x", "m", str(tmp_path / "none")), ErrorCode.NOT_FOUND, "source", "does not exist"),
            (AdapterSpec("x", "m", str(base)), ErrorCode.BAD_REQUEST, "source", "adapter_config.json is missing"),
            (AdapterSpec("wide", "m", wide.source), ErrorCode.BAD_REQUEST, "source", "is 40; the limit is 32"),
            (AdapterSpec("x y", "m", adapter.source), ErrorCode.BAD_REQUEST, "name", "no model name"),
        ]
        for spec, code, param, message in cases:
            found = await refused(cluster, spec)
            assert found[:2] == (code, param) and message in found[2], found
        other = AddAdapter(AdapterSpec("poet", "m", plain.source), replaces=True)
        replaced = await cluster.bus.request(PLACEMENT_ADD_ADAPTER, other, timeout_s=60)
        assert replaced.version != added.version and replaced.num_values < added.num_values
        added = replaced
        assert (await cluster.refusal(ModelSpec("poet", str(base))))[:2] == (ErrorCode.CONFLICT, "name")
        with pytest.raises(ServiceError, match="adapters of 'm'"):
            await cluster.remove("m")
    assert [spec.version for spec in adapters.values()] == [added.version]
    seeds = f"poet=m={adapter.source},other=m={adapter.source}"
    async with placement(nats_settings, {"m": str(base)}, name="placement-2", adapters=seeds):
        await until(lambda: len(adapters) == 2)
        assert added in adapters.values(), "it is there as it was"
        await cluster.bus.request(PLACEMENT_REMOVE_ADAPTER, RemoveAdapter("poet"), timeout_s=60)
        await until(lambda: [spec.name for spec in adapters.values()] == ["other"])
    file = str(tmp_path / "models.json")
    async with placement(nats_settings, {"m": str(base)}, name="placement-3", models_file=file) as last:
        await until(lambda: last.is_active)
    nats_server.delete_streams()
    async with placement(nats_settings, {"m": str(base)}, name="placement-4", models_file=file):
        bucket = await cluster.bus.key_value(ADAPTERS)
        kept: set[str] = set()
        while not kept:
            kept = {entry.value.name for entry in (await bucket.entries()).values()}
        assert kept == {"other"}, "as it was, from the file"
    async with placement(nats_settings, {"m": str(base)}, name="placement-5") as last:
        await until(lambda: last.is_active)
        await cluster.bus.request(PLACEMENT_REMOVE_ADAPTER, RemoveAdapter("other"), timeout_s=60)
        assert not await bucket.entries()


async def test_an_adapter_whose_base_goes_while_its_files_are_read_is_refused(
    nats_settings: BusSettings,
    cluster: Cluster,  # noqa: F811
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = write_adapter(tmp_path / "poet", base)
    begun, may_end = threading.Event(), threading.Event()

    def read(*args: Any) -> AdapterFiles:
        begun.set()
        may_end.wait(60)
        return read_adapter(*args)

    monkeypatch.setattr(registry, "read_adapter", read)
    monkeypatch.setattr(registry, "ADD_READ_S", 60.0)
    async with placement(nats_settings, {"m": str(base)}):
        cluster.start_node("n")
        await cluster.placed("m", "n-0 n-1")
        adding = asyncio.create_task(refused(cluster, AdapterSpec("poet", "m", adapter.source)))
        await until(begun.is_set)
        await cluster.remove("m")
        may_end.set()
        assert (await adding)[:2] == (ErrorCode.UNKNOWN_MODEL, "base")
        assert not await (await cluster.bus.key_value(ADAPTERS)).entries()


def test_memory_of_adapters_is_planned_up_to_what_instances_hold(base: Path) -> None:
    shape, spec = describe(base), ModelSpec("m", str(base))
    facts = DeviceFacts("cpu", (AttentionFacts(),), 512)
    of = [AdapterSpec("a", "m", "", num_values=1000), AdapterSpec("b", "m", "", num_values=500)]
    others = [AdapterSpec("c", "other", "", num_values=9000)]
    plain = footprint(spec, shape, facts).weight_bytes
    for max_bytes, extra in ((1 << 20, 6000), (5000, 5000)):
        counted = with_adapters(shape, spec, of + others, max_bytes)
        assert footprint(spec, counted, facts).weight_bytes - plain == extra
    assert with_adapters(shape, spec, others, 1 << 20) == shape
