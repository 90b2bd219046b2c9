"""Draining and scaling through the placement service, on a real NATS server; node agents and the API server are scripted."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from services.placement import fleet as fleet_module
from services.placement.backends.api_server import ApiServer
from services.placement.backends.kubernetes import KubernetesBackend
from services.placement.checkpoints import read_shape
from services.placement.fleet import Fleet, node_of
from services.placement.service import PlacementService
from shared.bus.interface import ServiceError
from shared.bus.nats_bus import NatsBus
from shared.messages.admin import DrainInstance, ScaleInstances, ScaleModel
from shared.messages.catalogue import (
    INSTANCES,
    PLACEMENT_DRAIN_INSTANCE,
    PLACEMENT_SCALE_INSTANCES,
    PLACEMENT_SCALE_MODEL,
)
from shared.messages.cluster import (
    InstanceInfo,
    LoadedModel,
    ModelSpec,
    PlacementPlan,
)
from shared.messages.requests import ErrorCode
from shared.models.checkpoint import CheckpointShape
from shared.runtime.settings import BusSettings, PlacementSettings, SettingsError
from shared.runtime.telemetry import start_telemetry
from tests.placement.api_server import ScriptedApiServer
from tests.placement.test_service import Cluster, cluster, placement, sources, until, where

__all__ = ["cluster", "sources"]


async def drain(
    cluster: Cluster, instance_id: str, *, undo: bool = False, scaling: bool = False, force: bool = False
) -> PlacementPlan:
    query = DrainInstance(instance_id, undo, scaling, force)
    return await cluster.bus.request(PLACEMENT_DRAIN_INSTANCE, query, timeout_s=15.0)


async def scale(cluster: Cluster, num_instances: int) -> PlacementPlan:
    return await cluster.bus.request(PLACEMENT_SCALE_INSTANCES, ScaleInstances(num_instances), timeout_s=15.0)


async def test_a_drain_lasts_over_a_restart_until_it_is_undone(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str]
) -> None:
    cluster.start_node("n")
    async with placement(nats_settings, {"a": sources["a"]}):
        before = await cluster.placed("a", "n-0 n-1")
        drained = await drain(cluster, "n-0")
        assert where(drained) == {"n-1": {"a"}}
        assert (drained.draining, drained.released) == (["n-0"], [])
        assert await drain(cluster, "n-0") == drained, "again: no effect"
    async with placement(nats_settings, {"a": sources["a"]}, name="placement-2") as service:
        await until(lambda: service.is_active)
        await cluster.add(ModelSpec("b", sources["b"]))
        assert (await cluster.placed("a b", "n-1")).draining == ["n-0"]
        back = await drain(cluster, "n-0", undo=True)
        assert where(back) == {"n-0": {"a", "b"}, "n-1": {"a", "b"}}
        assert back.draining == []
        assert back.instances[1].pool_bytes == before.instances[1].pool_bytes
        assert await drain(cluster, "n-0", undo=True) == back


async def test_the_last_one_is_drained_by_force_alone_and_an_unknown_one_is_refused(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str]
) -> None:
    cluster.start_node("n", num_instances=1)
    async with placement(nats_settings, {"a": sources["a"]}):
        await cluster.placed("a", "n-0")
        with pytest.raises(ServiceError, match=r"there is no instance 'n-7'; there are: n-0$") as caught:
            await drain(cluster, "n-7")
        assert (caught.value.code, caught.value.info.param) == (ErrorCode.GONE, "instance_id")
        with pytest.raises(ServiceError):
            await drain(cluster, "n-7", undo=True)
        with pytest.raises(ServiceError, match="'n-0' is the last instance") as caught:
            await drain(cluster, "n-0")
        assert (caught.value.code, caught.value.info.param) == (ErrorCode.CONFLICT, "instance_id")
        none = await drain(cluster, "n-0", force=True)
        assert none.instances == []
        assert await drain(cluster, "n-0") == none, "again: no effect"
        assert none.unplaced == {"a": "no instance is there to hold it; n-0 drained"}


async def test_replicas_of_a_model_are_stored_and_change_nothing_else(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str]
) -> None:
    async def replicas(name: str, number: int | None) -> PlacementPlan:
        return await cluster.bus.request(PLACEMENT_SCALE_MODEL, ScaleModel(name, number), timeout_s=10.0)

    cluster.start_node("n")
    async with placement(nats_settings, {"a": sources["a"], "b": sources["b"]}):
        before = await cluster.placed("a b", "n-0 n-1")
        one = await replicas("a", 1)
        assert where(one) == {"n-0": {"a", "b"}, "n-1": {"b"}}
        assert one.instances[0] == before.instances[0]
        await until(lambda: cluster.models.entries["a"].replicas == 1)
        assert await replicas("a", 1) == one
        for name, number, code, param in (
            ("x", 1, ErrorCode.UNKNOWN_MODEL, "name"),
            ("a", 0, ErrorCode.BAD_REQUEST, "replicas"),
        ):
            with pytest.raises(ServiceError) as caught:
                await replicas(name, number)
            assert (caught.value.code, caught.value.info.param) == (code, param)
    async with placement(nats_settings, {"a": sources["a"], "b": sources["b"]}, name="placement-2") as service:
        await until(lambda: service.is_active)
        assert where(await replicas("b", 2)) == where(one)
        all_of_them = await replicas("a", None)
        assert where(all_of_them) == where(before)
        assert all_of_them.instances[0] == before.instances[0]


@pytest.mark.parametrize("change", ["scale", "add"])
async def test_a_change_asked_of_a_new_leader_waits_until_it_has_read_the_checkpoints(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str], change: str
) -> None:
    may_read = threading.Event()

    def read(source: str) -> CheckpointShape:
        assert source != sources["a"] or may_read.wait(30.0)
        return read_shape(source)

    cluster.start_node("n")
    async with placement(nats_settings, {"a": sources["a"]}):
        await cluster.placed("a", "n-0 n-1")
        if change == "scale":
            await cluster.bus.request(PLACEMENT_SCALE_MODEL, ScaleModel("a", 1), timeout_s=10.0)
    async with placement(nats_settings, {"a": sources["a"]}, name="placement-2", read=read) as service:
        await until(lambda: service.is_active)
        asyncio.get_running_loop().call_later(0.5, may_read.set)
        if change == "scale":
            plan = await cluster.bus.request(PLACEMENT_SCALE_MODEL, ScaleModel("a", None), timeout_s=20.0)
            assert where(plan) == {"n-0": {"a"}, "n-1": {"a"}}
        else:
            assert where(await cluster.add(ModelSpec("b", sources["b"]))) == {"n-0": {"a", "b"}, "n-1": {"a", "b"}}


async def test_more_and_fewer_instances_on_nodes_with_room(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str]
) -> None:
    cluster.start_node("m", num_instances=1, max_instances=2)
    cluster.start_node("n", num_instances=1, max_instances=3)
    async with placement(nats_settings, {"a": sources["a"]}):
        await cluster.placed("a", "m-0 n-0")
        await scale(cluster, 4)
        await cluster.placed("a", "m-0 m-1 n-0 n-1")
        with pytest.raises(ServiceError, match="run at most 5 instances") as caught:
            await scale(cluster, 6)
        assert caught.value.code == ErrorCode.CONFLICT
        assert "by hand" not in caught.value.info.message
        with pytest.raises(ServiceError, match="expected 1 or more"):
            await scale(cluster, 0)

        fewer = await scale(cluster, 2)
        assert where(fewer).keys() == {"m-0", "n-0"}
        assert sorted(fewer.released) == sorted(fewer.draining) == ["m-1", "n-1"]
        await drain(cluster, "m-0")
        last = await scale(cluster, 2)
        assert where(last).keys() == {"n-0", fewer.released[1]}, "the last to go is the first to come back"
        assert sorted(last.draining) == sorted(["m-0", fewer.released[0]]), "an operator's drain is left alone"
        await scale(cluster, 4)
        plan = await cluster.placed("a", "m-1 n-0 n-1 n-2")
        assert (plan.draining, plan.released) == (["m-0"], [])
        with pytest.raises(ServiceError, match="m-0, drained by hand"):
            await scale(cluster, 5)


async def test_what_scaling_drains_is_apart_from_what_an_operator_drains(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str]
) -> None:
    cluster.start_node("n", num_instances=3)
    async with placement(nats_settings, {"a": sources["a"]}):
        await cluster.placed("a", "n-0 n-1 n-2")
        plan = await drain(cluster, "n-1", scaling=True)
        assert (plan.draining, plan.released) == (["n-1"], ["n-1"]), "the one that scaling asked for"
        assert await drain(cluster, "n-1", scaling=True) == plan
        await drain(cluster, "n-2")
        plan = await drain(cluster, "n-2", undo=True, scaling=True)
        assert plan.draining == ["n-1", "n-2"]
        plan = await drain(cluster, "n-1", undo=True, scaling=True)
        assert (plan.draining, plan.released) == (["n-2"], [])
        await drain(cluster, "n-1", scaling=True)
        plan = await drain(cluster, "n-1")
        assert (plan.draining, plan.released) == (["n-2", "n-1"], []), "now it is the operator's"
        await drain(cluster, "n-0", force=True)
        with pytest.raises(ServiceError) as caught:
            await drain(cluster, "n-0", scaling=True)
            await drain(cluster, "n-9", scaling=True)
        assert caught.value.code == ErrorCode.GONE


async def test_what_scaling_took_from_a_node_that_left_is_forgotten(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "GRACE_S", 1.0)
    cluster.start_node("m", num_instances=1)
    cluster.start_node("n", num_instances=2)
    async with placement(nats_settings, {"a": sources["a"]}):
        await cluster.placed("a", "m-0 n-0 n-1")
        await drain(cluster, "n-1", scaling=True)
        await drain(cluster, "n-0")
        await cluster.stop_node("n")
        await until(lambda: cluster.plans[-1].draining == ["n-0"])
        assert cluster.plans[-1].released == []


async def test_pods_are_drained_before_there_are_fewer_of_them(
    nats_settings: BusSettings,
    cluster: Cluster,
    sources: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "GRACE_S", 1.0)
    (tmp_path / "token").write_text("t0")
    instances = await cluster.bus.key_value(INSTANCES)

    async def show(instance_id: str) -> None:
        await instances.put(
            instance_id,
            InstanceInfo(
                instance_id=instance_id, incarnation="1", node_id=node_of(instance_id)[0], state="draining", models=[]
            ),
        )

    api = ScriptedApiServer(replicas=2)
    for pod in api.alive:
        cluster.start_node(pod, num_instances=1)
    with api.serving() as url:
        kubernetes = KubernetesBackend(ApiServer(url, "tide", tmp_path / "token"), "statefulset/worker")
        async with placement(nats_settings, {"a": sources["a"]}, backend=kubernetes):
            await cluster.placed("a", "worker-0-0 worker-1-0")
            await scale(cluster, 3)
            assert api.replicas == 3
            api.reconcile()
            cluster.start_node("worker-2", num_instances=1)
            await cluster.placed("a", "worker-0-0 worker-1-0 worker-2-0")

            await show("worker-2-0")
            plan = await drain(cluster, "worker-0-0", scaling=True)
            assert plan.released == ["worker-2-0"], "Kubernetes takes the last pod"
            showing = asyncio.create_task(_keep(show, "worker-2-0"))
            await asyncio.sleep(2.5)
            assert api.replicas == 3, "it still has requests"
            showing.cancel()
            await instances.delete("worker-2-0")
            await until(lambda: api.replicas == 2)
            api.reconcile()
            assert (await scale(cluster, 2)).released == ["worker-2-0"], "its pod ends"
            await cluster.stop_node("worker-2")
            await until(lambda: cluster.plans[-1].draining == [])

            api.faults = [403]
            with pytest.raises(ServiceError, match="Role"):
                await scale(cluster, 3)
            await scale(cluster, 3)
            api.reconcile()
            cluster.start_node("worker-2", num_instances=1)
            await cluster.placed("a", "worker-0-0 worker-1-0 worker-2-0")


async def _keep(show, instance_id: str) -> None:  # type: ignore[no-untyped-def]
    while True:
        await show(instance_id)
        await asyncio.sleep(0.5)


async def test_a_back_end_that_cannot_be_used_is_said_at_the_start(nats_settings: BusSettings) -> None:
    bus = await NatsBus.connect(nats_settings, service="placement", service_id="p")
    telemetry = start_telemetry("placement", "p", nats_settings)
    for name, text in (("slurm", "expected local or kubernetes"), ("kubernetes", "service account")):
        with pytest.raises(SettingsError, match=text):
            PlacementService(bus, PlacementSettings(scaling_backend=name), telemetry)
        telemetry = start_telemetry("placement", "p", nats_settings)
    await bus.close()


def test_the_fleet() -> None:
    fleet = Fleet().drain(["a-0"]).drain(["a-0", "b-0"], is_for_scaling=True)
    assert fleet == (("a-0", "b-0"), ("b-0",))
    assert fleet.drain(["b-0"]) == (("a-0", "b-0"), ())
    assert fleet.undo(["b-0", "x"]) == (("a-0",), ())
    assert node_of("worker-3-12") == ("worker-3", 12)
    assert node_of("worker") == ("", -1)
    assert node_of("worker-x") == ("worker", -1)


async def test_a_model_on_fewer_instances_stays_where_it_serves(
    nats_settings: BusSettings, cluster: Cluster, sources: dict[str, str]
) -> None:
    cluster.start_node("n")
    async with placement(nats_settings, {"a": sources["a"]}):
        await cluster.placed("a", "n-0 n-1")
        registry = await cluster.bus.key_value(INSTANCES)
        for name, state in (("n-0", "loading"), ("n-1", "ready")):
            await registry.put(
                name,
                InstanceInfo(
                    instance_id=name,
                    incarnation="1",
                    node_id="n",
                    state="ready",
                    models=[LoadedModel(name="a", state=state)],
                ),
            )
        one = await cluster.bus.request(PLACEMENT_SCALE_MODEL, ScaleModel("a", 1), timeout_s=10.0)
        assert where(one) == {"n-1": {"a"}}
