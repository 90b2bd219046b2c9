"""The placement service on a real NATS server; nodes, scheduler and the gateway's admin API are scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.placement import fleet
from services.placement import monitor as monitor_module
from services.placement import registry as registry_module
from services.placement.backends.interface import ScalingBackend
from services.placement.checkpoints import read_shape
from services.placement.replacing import Search
from services.placement.searching import search_elsewhere
from services.placement.service import PlacementService
from shared.bus import nats_key_value
from shared.bus.interface import Bus, KeyValue, ServiceError
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_key_value import NatsKeyValue
from shared.bus.nats_streams import silent
from shared.messages.admin import (
    AddModel,
    Done,
    GetPlan,
    RemoveModel,
    ScaleNode,
)
from shared.messages.catalogue import (
    INSTANCES,
    MODELS,
    NODE_SCALE,
    NODES,
    PLACEMENT_ADD_MODEL,
    PLACEMENT_PLAN,
    PLACEMENT_REMOVE_MODEL,
    PLACEMENT_REQUESTS,
    PLACEMENT_TRAFFIC,
    PLANS,
    REQUEST_LOG,
    SCHEDULER_DEMAND,
    SCHEDULER_STATISTICS,
    STATISTICS,
)
from shared.messages.cluster import (
    DemandReport,
    InstanceInfo,
    LoadedModel,
    ModelDemand,
    ModelSpec,
    ModelStatistics,
    NodeInfo,
    PlacementPlan,
    StatisticsReport,
)
from shared.messages.requests import ErrorCode
from shared.messages.traffic import (
    GetTraffic,
    MeanStd,
    ModelSummary,
    Outcome,
    RequestRow,
    RequestRows,
    request_number,
)
from shared.models.checkpoint import CheckpointShape
from shared.runtime.settings import BusSettings, PlacementSettings, SettingsError
from shared.runtime.telemetry import Telemetry, start_telemetry
from tests.conftest import NatsServer
from tests.placement.checkpoints import write_checkpoint

GIB = 1 << 30


async def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """The first truthy result; polls."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)
    return result


class Cluster:
    """Scripted peers on one connection: nodes that register each second, an operator, an onlooker of the plan."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.plans: list[PlacementPlan] = []
        self._nodes: dict[str, asyncio.Task[None]] = {}
        self._node_bucket: KeyValue[NodeInfo]

    async def start(self) -> None:
        self._node_bucket = await self.bus.key_value(NODES)
        await (await self.bus.key_value(PLANS)).watch(lambda _, plan: self.plans.append(plan) if plan else None)
        self.models = await (await self.bus.key_value(MODELS)).watch()
        self.statistics = await (await self.bus.key_value(STATISTICS)).watch()

    async def stop(self) -> None:
        for task in self._nodes.values():
            task.cancel()
        await asyncio.gather(*self._nodes.values(), return_exceptions=True)

    def start_node(
        self, node_id: str, *, num_instances: int = 2, memory_bytes: int = 4 * GIB, max_instances: int = 0
    ) -> None:
        """One with `max_instances` can be made larger."""
        info = NodeInfo(
            node_id=node_id,
            hostname="host",
            num_instances=num_instances,
            memory_bytes=memory_bytes,
            max_instances=max_instances,
        )

        async def register() -> None:
            nonlocal info
            changed = asyncio.Event()

            async def scale(query: ScaleNode) -> Done:
                nonlocal info
                info = msgspec.structs.replace(info, num_instances=query.num_instances)
                changed.set()
                return Done()

            subscription = await self.bus.serve(NODE_SCALE.at(node_id=node_id), scale)
            try:
                while True:
                    changed.clear()
                    await self._node_bucket.put(node_id, info)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1.0):
                            await changed.wait()
            finally:
                await subscription.stop()

        self._nodes[node_id] = asyncio.create_task(register())

    async def stop_node(self, node_id: str) -> None:
        self._nodes.pop(node_id).cancel()
        await self._node_bucket.delete(node_id)

    async def add(self, spec: ModelSpec, timeout_s: float = 60.0) -> PlacementPlan:
        return await self.bus.request(PLACEMENT_ADD_MODEL, AddModel(spec), timeout_s=timeout_s)

    async def remove(self, name: str) -> PlacementPlan:
        return await self.bus.request(PLACEMENT_REMOVE_MODEL, RemoveModel(name), timeout_s=60.0)

    async def refusal(self, spec: ModelSpec) -> tuple[ErrorCode, str, str]:
        with pytest.raises(ServiceError) as caught:
            await self.add(spec)
        info = caught.value.info
        return info.code, info.param, info.message

    async def placed(self, models: str, instances: str) -> PlacementPlan:
        """Waits for a plan with exactly these models on each of exactly these instances (ids apart by blanks)."""
        wanted = {instance_id: set(models.split()) for instance_id in instances.split()}
        await until(lambda: self.plans and where(self.plans[-1]) == wanted)
        return self.plans[-1]


def where(plan: PlacementPlan) -> dict[str, set[str]]:
    return {i.instance_id: {s.name for s in i.models} for i in plan.instances}


@pytest.fixture
async def cluster(nats_settings: BusSettings) -> AsyncIterator[Cluster]:
    bus = await NatsBus.connect(nats_settings, service="test", service_id="cluster")
    cluster = Cluster(bus)
    await cluster.start()
    yield cluster
    await cluster.stop()
    await bus.close()


@asynccontextmanager
async def placement(
    nats: BusSettings,
    models: dict[str, str] | None = None,
    *,
    name: str = "placement-1",
    telemetry: Telemetry | None = None,
    read: Callable[[str], CheckpointShape] = read_shape,
    backend: ScalingBackend | None = None,
    models_file: str = "",
    search: Search = search_elsewhere,
    **more: Any,
) -> AsyncIterator[PlacementService]:
    """`more`: settings."""
    pairs = ",".join(f"{model}={source}" for model, source in (models or {}).items())
    settings = PlacementSettings(
        nats_url=nats.nats_url, placement_id=name, models=pairs, interval_s=0.5, models_file=models_file, **more
    )
    bus = await NatsBus.connect(settings, service="placement", service_id=name)
    telemetry = telemetry or start_telemetry("placement", name, settings)
    service = PlacementService(bus, settings, telemetry, read, backend, search)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()
        await bus.close()
        telemetry.close()


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, str]:
    return {name: write_checkpoint(tmp_path / name) for name in ("a", "b", "c")}


async def test_seeds_are_placed_on_every_instance(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str]
) -> None:
    async with placement(nats_settings, {"a": sources["a"], "b": sources["b"]}) as service:
        await until(lambda: set(cluster.models.entries) == {"a", "b"})
        cluster.start_node("n")
        plan = await cluster.placed("a b", "n-0 n-1")
        assert service.is_active
        assert await cluster.bus.request(PLACEMENT_PLAN, GetPlan(), timeout_s=60.0) == plan
        cluster.start_node("m", num_instances=1)
        grown = await cluster.placed("a b", "m-0 n-0 n-1")
        assert [i for i in grown.instances if i.node_id == "n"] == plan.instances


async def test_models_are_added_and_removed_without_moving_others(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str]
) -> None:
    async with placement(nats_settings, {"a": sources["a"]}):
        cluster.start_node("n")
        first = await cluster.placed("a", "n-0 n-1")
        added = await cluster.add(ModelSpec("b", sources["b"], replicas=1))
        assert await until(lambda: cluster.plans[-1].version == added.version and cluster.plans[-1]) == added
        assert sorted(where(added).values(), key=len) == [{"a"}, {"a", "b"}]
        pools = [(i.instance_id, i.pool_bytes, i.merged_bytes) for i in first.instances]
        assert [(i.instance_id, i.pool_bytes, i.merged_bytes) for i in added.instances] == pools
        assert await until(lambda: cluster.models.entries.get("b")) == ModelSpec("b", sources["b"], replicas=1)
        assert await cluster.add(ModelSpec("b", sources["b"], replicas=1)) == added, "again: no effect"

        removed = await cluster.remove("b")
        assert where(removed) == where(first)
        assert removed.version > added.version
        await until(lambda: set(cluster.models.entries) == {"a"})
        assert where(await cluster.remove("a")) == {}


@contextmanager
def without_answers(method: str) -> Iterator[None]:
    """Writes of models take effect, and nobody says so."""
    write = getattr(NatsKeyValue, method)

    async def unanswered(self: NatsKeyValue[Any], key: str, *value: Any) -> int:
        revision = await write(self, key, *value)
        if self._bucket is MODELS:
            raise silent(f"{method} {key}: JetStream did not answer in time")
        return int(revision or 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NatsKeyValue, method, unanswered)
        yield


async def test_a_write_that_nobody_confirmed_counts_as_it_is_stored(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str]
) -> None:
    async with placement(nats_settings, {"a": sources["a"]}):
        cluster.start_node("n", num_instances=1)
        await cluster.placed("a", "n-0")
        with without_answers("put"), pytest.raises(ServiceError) as refused:
            await cluster.add(ModelSpec("b", sources["b"]))
        assert refused.value.code is ErrorCode.UNAVAILABLE
        await cluster.placed("a b", "n-0")
        with without_answers("delete"), pytest.raises(ServiceError):
            await cluster.remove("b")
        await cluster.placed("a", "n-0")
        with without_answers("put"), pytest.raises(ServiceError):
            await cluster.add(ModelSpec("c", sources["c"]))
        assert where(await cluster.remove("c")) == {"n-0": {"a"}}, "at once"


class Instance:
    """n-0, which does what the plan says at once, and a scheduler, for models on demand."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.demands: list[ModelDemand] = []
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        bucket, had, number = await self._cluster.bus.key_value(INSTANCES), set[str](), 0
        while True:
            planned = where(self._cluster.plans[-1]).get("n-0", set()) if self._cluster.plans else set()
            had |= planned
            models = [LoadedModel(name=n, state="ready" if n in planned else "host") for n in sorted(had)]
            info = InstanceInfo(
                instance_id="n-0",
                incarnation="1",
                node_id="n",
                state="ready",
                models=models,
                pid=(number := number + 1),
            )
            await bucket.put("n-0", info)
            self._cluster.bus.publish(SCHEDULER_DEMAND, DemandReport("scheduler", self.demands))
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_models_on_demand_are_placed_for_their_requests_and_put_away(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str]
) -> None:
    telemetry = start_telemetry("placement", "p", PlacementSettings(nats_url=nats_settings.nats_url))
    async with placement(nats_settings, {"a": sources["a"]}, telemetry=telemetry):
        cluster.start_node("n", num_instances=1)
        await cluster.placed("a", "n-0")
        instance = Instance(cluster)
        try:
            plan = await cluster.add(ModelSpec("b", sources["b"], on_demand=True, idle_s=0.5))
            assert where(plan) == {"n-0": {"a"}} and plan.asleep == {"b": "idle"} and not plan.unplaced
            instance.demands = [ModelDemand(model="b", num_online=1, waited_s=0.1)]
            await cluster.placed("a b", "n-0")
            instance.demands = [ModelDemand(model="b", num_held_online=1)]
            await asyncio.sleep(3.0)
            assert where(cluster.plans[-1]) == {"n-0": {"a", "b"}}, "never one with requests"
            instance.demands = []
            put_away = await cluster.placed("a", "n-0")
            assert put_away.asleep == {"b": "idle"}
            instance.demands = [ModelDemand(model="b", num_offline=1)]
            await cluster.placed("a b", "n-0")
            sample = telemetry.registry.get_sample_value
            assert sample("tideway_model_wakes_total", {"model": "b", "tier": "disk"}) == 1
            assert sample("tideway_model_wakes_total", {"model": "b", "tier": "host"}) == 1
            assert sample("tideway_model_put_aways_total", {"model": "b", "cause": "idle"}) == 1
            await until(lambda: sample("tideway_model_wake_seconds_count", {"tier": "host"}) == 1)
            assert (await cluster.remove("b")).asleep == {}
        finally:
            await instance.stop()


async def test_no_model_takes_the_last_room_of_one_that_is_put_away(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str]
) -> None:
    async with placement(nats_settings) as service:
        await until(lambda: service.is_active)
        cluster.start_node("n", num_instances=1, memory_bytes=40 << 20)
        await until(lambda: service._active is not None and service._active._registered())
        await cluster.add(ModelSpec("b", sources["b"], on_demand=True))
        code, param, message = await cluster.refusal(ModelSpec("c", sources["c"]))
        assert (code, param) == (ErrorCode.BAD_REQUEST, "source")
        assert message == "it would take the last room of 'b', which is loaded on demand"
        assert (await cluster.add(ModelSpec("c", sources["c"], on_demand=True))).asleep == {"b": "idle", "c": "idle"}


async def test_the_next_leader_puts_nothing_away_that_is_in_use(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str]
) -> None:
    spec, demand = ModelSpec("b", sources["b"], on_demand=True, idle_s=0.0), ModelDemand(model="b", num_held_online=1)
    async with placement(nats_settings, {"a": sources["a"]}, name="first"):
        cluster.start_node("n", num_instances=1)
        await cluster.placed("a", "n-0")
        await cluster.add(spec)
        instance = Instance(cluster)
        instance.demands = [ModelDemand(model="b", num_online=1)]
        await cluster.placed("a b", "n-0")
        instance.demands = [demand]
    try:
        async with placement(nats_settings, {"a": sources["a"]}, name="second") as second:
            await until(lambda: second.is_active)
            await asyncio.sleep(3.0)
            assert where(cluster.plans[-1]) == {"n-0": {"a", "b"}}
    finally:
        await instance.stop()


async def test_what_a_model_on_demand_may_be(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str]
) -> None:
    async with placement(nats_settings) as service:
        await until(lambda: service.is_active)
        code, param, message = await cluster.refusal(ModelSpec("b", sources["b"], on_demand=True, idle_s=1e9))
        assert (code, param) == (ErrorCode.BAD_REQUEST, "idle_s") and "0 to 2.592e+06 seconds" in message
        assert (await cluster.refusal(ModelSpec("b", sources["b"], idle_s=1.0)))[1] == "idle_s"
        cluster.start_node("n", num_instances=1, memory_bytes=1 << 20)
        await until(lambda: service._active is not None and service._active._registered())
        code, param, message = await cluster.refusal(ModelSpec("b", sources["b"], on_demand=True))
        assert (code, param) == (ErrorCode.BAD_REQUEST, "source") and "does not fit" in message


async def test_a_plan_that_cannot_be_read_is_told_and_made_anew(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with placement(nats_settings, {"a": sources["a"]}):
        cluster.start_node("n")
        await cluster.placed("a", "n-0 n-1")
    await (await cluster.bus.key_value(replace(PLANS, type=int))).put("current", 7)  # type: ignore[type-var]
    cluster.plans.clear()
    async with placement(nats_settings, {"a": sources["a"]}):
        await cluster.placed("a", "n-0 n-1")
    assert "tideway_plans/current cannot be read" in caplog.text


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_models_that_were_added_outlast_the_store_and_damage_to_it(
    nats_settings: BusSettings,
    cluster: Cluster,
    nats_server: NatsServer,
    sources: dict[str, str],
    tmp_path: Path,
    is_damaged: bool,
) -> None:
    file, added = str(tmp_path / "models.json"), ModelSpec("b", sources["b"], replicas=1)
    async with placement(nats_settings, {"a": sources["a"]}, models_file=file):
        cluster.start_node("n")
        await cluster.placed("a", "n-0 n-1")
        await cluster.add(added)
        await cluster.add(ModelSpec("c", sources["b"]))
        await cluster.remove("c")
    if is_damaged:
        nats_server.damage(f"KV_{MODELS.name}", sources["a"].encode(), sources["b"].encode())
    else:
        nats_server.delete_streams()
    async with placement(nats_settings, {"a": sources["a"]}, models_file=file):
        models = await (await cluster.bus.key_value(MODELS)).watch()
        await until(lambda: models.entries.keys() == {"a", "b"})
        assert models.entries["b"] == added


async def test_a_standby_remembers_what_the_leader_was_told(
    nats_settings: BusSettings, cluster: Cluster, nats_server: NatsServer, sources: dict[str, str], tmp_path: Path
) -> None:
    files, added = {name: str(tmp_path / name) for name in ("leader", "standby")}, ModelSpec("b", sources["b"])

    def remembered() -> set[str]:
        return {spec["name"] for spec in json.loads(Path(files["standby"]).read_text())}

    async with placement(nats_settings, {"a": sources["a"]}, name="leader", models_file=files["leader"]) as leader:
        await until(lambda: leader.is_active)
        async with placement(nats_settings, name="standby", models_file=files["standby"]):
            await cluster.add(added)
            await until(lambda: Path(files["standby"]).exists() and remembered() == {"a", "b"})
            await cluster.remove("a")
            await until(lambda: remembered() == {"b"})
            await cluster.remove("b")
            await until(lambda: remembered() == set())
            await cluster.add(added)
            await until(lambda: remembered() == {"b"})
    nats_server.delete_streams()
    async with placement(nats_settings, name="standby", models_file=files["standby"]):
        models = await (await cluster.bus.key_value(MODELS)).watch()
        await until(lambda: models.entries == {"b": added})


async def test_a_store_that_is_empty_is_told_where_nothing_is_remembered(
    nats_settings: BusSettings, caplog: pytest.LogCaptureFixture
) -> None:
    async with placement(nats_settings) as service:
        await until(lambda: service.is_active)
    assert "no models are remembered" in caplog.text


async def test_refusals_name_the_field_and_the_numbers(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str], tmp_path: Path
) -> None:
    async with placement(nats_settings, {"a": sources["a"]}):
        cluster.start_node("n")
        first = await cluster.placed("a", "n-0 n-1")
        code, param, message = await cluster.refusal(ModelSpec("a", sources["b"]))
        assert (code, param) == (ErrorCode.CONFLICT, "name")
        code, param, message = await cluster.refusal(ModelSpec("x", "/no/such/folder"))
        assert (code, param, message) == (ErrorCode.BAD_REQUEST, "source", "'/no/such/folder' does not exist.")
        code, param, _ = await cluster.refusal(ModelSpec("x y", sources["b"]))
        assert (code, param) == (ErrorCode.BAD_REQUEST, "name")
        code, param, message = await cluster.refusal(ModelSpec("x", sources["b"], max_model_len=2000))
        assert (code, param) == (ErrorCode.BAD_REQUEST, "max_model_len")
        assert "allows 1024 tokens" in message
        pictures = write_checkpoint(tmp_path / "pictures")
        config = json.loads((tmp_path / "pictures" / "config.json").read_text())
        config |= {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}
        (tmp_path / "pictures" / "config.json").write_text(json.dumps(config))
        code, param, message = await cluster.refusal(ModelSpec("x", pictures))
        assert (code, param) == (ErrorCode.BAD_REQUEST, "engine")
        assert "LlavaForConditionalGeneration takes images" in message and "vllm" in message
        served = ModelSpec("x", pictures, engine="endpoint", engine_url="http://127.0.0.1:1")
        assert "none is empty" in (await cluster.refusal(served))[2], "it would fit otherwise"
        huge = write_checkpoint(tmp_path / "huge", weight_mib=9000)
        code, param, message = await cluster.refusal(ModelSpec("x", huge))
        assert (code, param) == (ErrorCode.BAD_REQUEST, "source")
        assert "9,180 MiB weights" in message
        assert "of 2,048 MiB" in message
        with pytest.raises(ServiceError) as caught:
            await cluster.remove("x")
        assert caught.value.code == ErrorCode.UNKNOWN_MODEL
        assert set(cluster.models.entries) == {"a"}
        assert cluster.plans[-1] == first


async def test_a_slow_download_is_said_to_be_one_and_goes_on(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "ADD_READ_S", 0.2)
    may_finish, reads = threading.Event(), []

    def read(source: str) -> CheckpointShape:
        if source == "org/slow":
            reads.append(source)
            may_finish.wait(20.0)
            return read_shape(sources["b"])
        return read_shape(source)

    async with placement(nats_settings, {"a": sources["a"]}, read=read):
        cluster.start_node("n")
        await cluster.placed("a", "n-0 n-1")
        for _ in range(2):
            code, param, message = await cluster.refusal(ModelSpec("b", "org/slow"))
            assert (code, param) == (ErrorCode.UNAVAILABLE, "source")
            assert "is being fetched" in message
        assert len(reads) == 1
        may_finish.set()
        monkeypatch.setattr(registry_module, "ADD_READ_S", 8.0)
        await cluster.add(ModelSpec("b", "org/slow"))
        await cluster.placed("a b", "n-0 n-1")


async def test_an_unreadable_seed_is_explained_and_tried_again(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str], tmp_path: Path
) -> None:
    late = tmp_path / "late"
    async with placement(nats_settings, {"a": sources["a"], "late": str(late)}):
        cluster.start_node("n")
        plan = await cluster.placed("a", "n-0 n-1")
        assert plan.unplaced == {"late": f"{str(late)!r} does not exist."}
        write_checkpoint(late)
        assert (await cluster.placed("a late", "n-0 n-1")).unplaced == {}


async def test_a_restart_changes_nothing_and_removed_seeds_stay_removed(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str]
) -> None:
    seeds = {"a": sources["a"], "b": sources["b"]}
    cluster.start_node("n")
    async with placement(nats_settings, seeds):
        await cluster.placed("a b", "n-0 n-1")
        await cluster.add(ModelSpec("c", sources["c"]))
        await cluster.remove("b")
        before = await cluster.placed("a c", "n-0 n-1")
    async with placement(nats_settings, seeds, name="placement-2") as service:
        await until(lambda: service.is_active)
        assert await cluster.bus.request(PLACEMENT_PLAN, GetPlan(), timeout_s=60.0) == before
        assert set(cluster.models.entries) == {"a", "c"}
        await cluster.add(ModelSpec("b", sources["b"]))
        await cluster.placed("a b c", "n-0 n-1")
    new = {**seeds, "d": sources["c"]}
    async with placement(nats_settings, new, name="placement-3"):
        await cluster.placed("a b c d", "n-0 n-1")
    assert all(
        earlier.version < later.version for earlier, later in zip(cluster.plans, cluster.plans[1:], strict=False)
    )


async def test_a_node_that_is_away_for_a_moment_keeps_its_plan_and_a_dead_one_does_not(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "GRACE_S", 2.0)
    async with placement(nats_settings, {"a": sources["a"]}):
        cluster.start_node("m", num_instances=1)
        cluster.start_node("n", num_instances=1)
        plan = await cluster.placed("a", "m-0 n-0")
        await cluster.stop_node("n")
        await asyncio.sleep(1.0)
        cluster.start_node("n", num_instances=1)
        await asyncio.sleep(2.0)
        assert cluster.plans[-1] == plan
        await cluster.stop_node("n")
        await cluster.placed("a", "m-0")


async def test_a_standby_takes_over_with_the_same_plan(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str]
) -> None:
    cluster.start_node("n")
    async with placement(nats_settings, {"a": sources["a"]}, name="standby") as standby:
        await until(lambda: standby.is_active)
        async with placement(nats_settings, {"a": sources["a"]}, name="second") as second:
            before = await cluster.placed("a", "n-0 n-1")
            assert not second.is_active
            await standby.stop()
            await until(lambda: second.is_active)
            added = await cluster.add(ModelSpec("b", sources["b"]))
            assert added.version == before.version + 1
            assert where(added) == {"n-0": {"a", "b"}, "n-1": {"a", "b"}}


async def test_statistics_are_kept_over_a_restart(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str]
) -> None:
    traffic = ModelStatistics(
        model="a",
        interval_s=1.0,
        num_arrived=5,
        num_finished=4,
        prompt_tokens=400,
        output_tokens=40,
        queued_s=0.4,
        execution_s=8.0,
        num_queued=2,
    )
    report = StatisticsReport("scheduler-1", [traffic, msgspec.structs.replace(traffic, model="unknown")])
    telemetry = start_telemetry("placement", "placement-1", nats_settings)
    async with placement(nats_settings, {"a": sources["a"]}, telemetry=telemetry) as service:
        await until(lambda: service.is_active and "a" in cluster.statistics.entries)
        cluster.bus.publish(SCHEDULER_STATISTICS, report)
        cluster.bus.publish(SCHEDULER_STATISTICS, report)
        await until(lambda: cluster.statistics.entries["a"].num_arrived == 10)
        value = telemetry.registry.get_sample_value
        await until(lambda: (value("tideway_placement_model_num_queued", {"model": "a"}) or 0) == 2)
        assert value("tideway_placement_is_leader") == 1
        assert value("tideway_placement_models", {"state": "unplaced"}) == 1
        cluster.bus.publish(SCHEDULER_STATISTICS, report)
        await cluster.bus.round_trip_s()
        await until(lambda: service._active._statistics.totals("a").num_arrived == 15)  # type: ignore[union-attr]
    assert cluster.statistics.entries["a"].num_arrived == 15, "the last ones are stored at the stop"
    async with placement(nats_settings, {"a": sources["a"]}, name="placement-2") as service:
        await until(lambda: service.is_active)
        cluster.bus.publish(SCHEDULER_STATISTICS, report)
        await until(lambda: cluster.statistics.entries["a"].num_arrived == 20)
        assert "unknown" not in cluster.statistics.entries


def rows(*ended: tuple[str, float], pending: Sequence[str] = (), age_s: float = 20.0) -> RequestRows:
    """Requests for "a": those that ended with their latency, and those that wait. All arrived `age_s` ago."""
    told = [RequestRow(request_number(name), 0, True, age_s, 100) for name in pending]
    for name, latency_s in ended:
        told.append(
            RequestRow(
                request_number(name),
                0,
                True,
                age_s,
                100,
                Outcome.FINISHED,
                11,
                latency_s,
                latency_s / 2,
                1.0,
                True,
                False,
            )
        )
    return RequestRows("scheduler-1", ["a"], told)


async def test_requests_are_kept_over_a_restart_and_a_change_of_leader(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_module, "SHOW_INTERVAL_S", 0.0)

    async def tell(told: RequestRows) -> None:
        await cluster.bus.request(PLACEMENT_REQUESTS, told, timeout_s=60.0)

    async def online() -> ModelSummary:
        reply = await cluster.bus.request(PLACEMENT_TRAFFIC, GetTraffic(60.0), timeout_s=60.0)
        (traffic,) = reply.models
        assert traffic.model == "a" and traffic.offline.num_arrived == 0
        return traffic.online

    telemetry = start_telemetry("placement", "placement-1", nats_settings)
    value = telemetry.registry.get_sample_value
    async with placement(nats_settings, {"a": sources["a"]}, telemetry=telemetry) as first:
        await until(lambda: first.is_active)
        await tell(rows(pending=["waits", "r0", "r1"]))
        await tell(rows(("r0", 2.0), ("r1", 10.0), ("r2", 4.0), age_s=20.5))
        await tell(rows(("r0", 2.0)))  # a second time
        summary = await online()
        assert (summary.num_arrived, summary.num_finished) == (4, 3)
        assert summary.prompt_tokens == MeanStd(100.0, 0.0) and summary.output_tokens.mean == 11.0
        assert (summary.execution_s.mean, summary.slo_s) == (1.0, 5.0)
        assert summary.attainment == 0.5, "one was late, one waits for longer than its SLO"
        assert (summary.ttft_attainment, summary.tpot_attainment) == (1.0, 0.0)
        labels = {"model": "a", "class": "online"}
        await until(lambda: value("tideway_placement_model_slo_attainment", labels) == 0.5)
        assert value("tideway_placement_model_p99_latency_seconds", labels) == pytest.approx(10.0)
        assert value("tideway_placement_model_arrivals_per_second", {"model": "a", "class": "offline"}) == 0.0
        assert value("tideway_placement_request_log_requests") == 4
        with pytest.raises(ServiceError) as refused:
            await cluster.bus.request(PLACEMENT_TRAFFIC, GetTraffic(1e9), timeout_s=60.0)
        assert refused.value.info.param == "interval_s"
        async with placement(nats_settings, {"a": sources["a"]}, name="standby") as standby:
            await first.stop()
            await until(lambda: standby.is_active)
            assert (await online()).num_finished == 3
            # It ends under another leader than it came under, and is that request.
            await tell(rows(("waits", 12.0)))
            assert ((await online()).num_arrived, (await online()).num_finished) == (4, 4)
            stored = await (await cluster.bus.key_value(REQUEST_LOG)).entries()
            assert sum(len(entry.value.ended) for entry in stored.values()) == 4, "stored before it was acknowledged"
    async with placement(nats_settings, {"a": sources["a"]}, name="placement-3") as third:
        await until(lambda: third.is_active)
        summary = await online()
        assert (summary.num_arrived, summary.num_finished, summary.attainment) == (4, 4, 0.5)
        monitor = third._active.monitor  # type: ignore[union-attr]
        traffic = monitor.traffic(60.0)
        assert sorted(traffic.output_tokens) == [11] * 4 and traffic.models == ("a",)
        assert monitor.execution_s() == {"a": 1.0}


async def test_a_full_store_costs_the_oldest_requests(
    fresh_nats: NatsServer, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_key_value, "DURABLE_BUCKET_BYTES", 64 * 1024)
    settings = BusSettings(nats_url=fresh_nats.url)
    bus = await NatsBus.connect(settings, service="test", service_id="scheduler")
    async with placement(settings, {"a": sources["a"]}) as first:
        await until(lambda: first.is_active)
        for age_s in range(300, 0, -10):
            told = rows(pending=[f"{age_s}-{number}" for number in range(100)], age_s=float(age_s))
            await bus.request(PLACEMENT_REQUESTS, told, timeout_s=60.0)
        log = first._active.monitor._log  # type: ignore[union-attr]
        await until(lambda: not any(slot.is_changed for slot in log._slots.values()))
        assert 500 < log.num_requests < 3000 and log.num_expired == 3000 - log.num_requests
        stored = await (await bus.key_value(REQUEST_LOG)).entries()
        assert {int(key.partition(".")[0]) for key in stored} == log._slots.keys(), "what is forgotten is purged"
    async with placement(settings, {"a": sources["a"]}, name="second") as second:
        await until(lambda: second.is_active)
        kept = second._active.monitor._log  # type: ignore[union-attr]
        assert kept.num_requests == log.num_requests
        assert {r.row.number for r in kept.arrived(0.0, time.time())} >= {
            request_number(f"10-{number}") for number in range(100)
        }, "the newest"
    await bus.close()


async def test_losing_nats_moves_nothing(fresh_nats: NatsServer, sources: dict[str, str]) -> None:
    settings = BusSettings(nats_url=fresh_nats.url)
    bus = await NatsBus.connect(settings, service="test", service_id="cluster")
    cluster = Cluster(bus)
    await cluster.start()
    cluster.start_node("n")
    async with placement(settings, {"a": sources["a"]}) as service:
        before = await cluster.placed("a", "n-0 n-1")
        await cluster.stop()
        fresh_nats.kill()
        await until(lambda: not bus.is_connected)
        fresh_nats.restart()
        await until(lambda: bus.is_connected)
        cluster.start_node("n")
        await until(lambda: service.is_active)
        added = await cluster.add(ModelSpec("b", sources["b"]))
        assert added.version == before.version + 1
        assert where(added) == {"n-0": {"a", "b"}, "n-1": {"a", "b"}}
    await cluster.stop()
    await bus.close()


async def test_settings_that_cannot_be_used_are_said_so(nats_settings: BusSettings) -> None:
    bus = await NatsBus.connect(nats_settings, service="placement", service_id="p")
    telemetry = start_telemetry("placement", "p", nats_settings)
    with pytest.raises(SettingsError, match="TIDEWAY_MODELS: 'a b' is no model name"):
        PlacementService(bus, PlacementSettings(models="a b=/m"), telemetry)
    with pytest.raises(SettingsError, match="TIDEWAY_INTERVAL_S=0"):
        PlacementService(bus, PlacementSettings(interval_s=0.0), telemetry)
    await bus.close()
