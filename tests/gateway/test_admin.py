"""The operator's API: what is shown of instances and their load, draining, scaling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from services.gateway.admin import cluster_loads
from shared.bus.interface import ServiceError
from shared.messages.admin import ScaleInstances, ScaleModel
from shared.messages.catalogue import INSTANCE_EXITED, LOAD_REPORTS, PLACEMENT_TRAFFIC, REPORT_LOAD
from shared.messages.channels import Topic
from shared.messages.cluster import (
    DraftUse,
    InstanceExited,
    KvCopies,
    ModelLoad,
    ModelSpec,
    Role,
    SetRole,
)
from shared.messages.requests import ErrorCode
from shared.messages.traffic import GetTraffic, ModelSummary, ModelTraffic, TrafficReply
from shared.runtime.settings import BusSettings
from tests.gateway.conftest import MODEL, Stack, running_gateway, running_stack
from tests.gateway.peer import until
from tests.stalls import Stopwatch

BUSY: dict[str, object] = {
    "dispatch_freeness": -3.5,
    "migration_freeness": 40.0,
    "free_merged": 25.0,
    "num_running": 7,
    "models": [ModelLoad(model=MODEL, num_running=7, num_waiting=2, num_offline=3)],
    "num_high": 1,
    "num_migrating_out": 1,
    "num_migrated_out": 12,
    "num_migrated_in": 4,
    "kv_copies": KvCopies(num_backed_up=3, backed_up_bytes=2**21, num_rescued_tokens=900, num_recomputed_tokens=17),
    "drafts": (DraftUse(model=MODEL, state="on", gain=1.25, num_drafted=80, num_kept=60),),
}


async def instances_of(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    answer = await client.get("/admin/instances")
    assert answer.status_code == 200, answer.text
    return {instance["instance_id"]: instance for instance in answer.json()["instances"]}


@pytest.fixture
async def pair(stack: Stack) -> AsyncIterator[Stack]:
    await stack.peer.add_instance("b", MODEL, state="draining", kv_address="10.0.0.7:4711")
    await until(lambda: len(stack.gateway.context.catalog.instances) == 2, "instances")
    yield stack


async def test_instances_and_their_load(pair: Stack) -> None:
    pair.peer.loads = {"a": {}, "b": BUSY}
    shown = await instances_of(pair.client)
    assert list(shown) == ["a", "b"]
    load = shown["b"]["load"]
    assert load.pop("age_s") < 5
    assert load == {
        "pool_use": 0.75,
        "num_running": 7,
        "num_waiting": 2,
        "num_offline": 3,
        "num_high": 1,
        "dispatch_freeness": -3.5,
        "migration_freeness": 40.0,
        "num_migrating_out": 1,
        "num_migrating_in": 0,
        "num_migrated_out": 12,
        "num_migrated_in": 4,
        "kv_copies": {
            "num_backed_up": 3,
            "num_missing_blocks": 0,
            "backed_up_bytes": 2**21,
            "num_kept": 0,
            "num_rescued_tokens": 900,
            "num_recomputed_tokens": 17,
            "num_fetches": 0,
            "num_fetched_blocks": 0,
        },
        "drafts": [{"model": MODEL, "state": "on", "gain": 1.25, "num_drafted": 80, "num_kept": 60}],
    }
    assert (shown["a"]["load"]["kv_copies"], shown["a"]["load"]["drafts"]) == (None, [])
    [model] = shown["b"]["models"]
    assert (model["name"], model["num_running"], model["num_waiting"]) == (MODEL, 7, 2), "the report is the newer"
    assert (shown["b"]["state"], shown["b"]["migration"], shown["b"]["kv_address"]) == (
        "draining",
        True,
        "10.0.0.7:4711",
    )
    assert (shown["a"]["load"]["pool_use"], shown["a"]["load"]["dispatch_freeness"]) == (0, None)
    assert (shown["a"]["migration"], shown["a"]["num_merged"]) == (False, 100)


async def test_an_instance_that_says_nothing_is_not_waited_for_for_ever(
    pair: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_loads, "FRESH_S", 0.0)
    monkeypatch.setattr(cluster_loads, "MAX_TRIES", 1)
    pair.peer.loads = {"a": {"free_merged": 30.0}, "b": {"incarnation": "of an earlier process"}}
    shown = await instances_of(pair.client)
    assert shown["a"]["load"]["pool_use"] == pytest.approx(0.7)
    assert shown["b"]["load"] is None
    with Stopwatch() as watch:
        shown = await instances_of(pair.client)
    assert watch.seconds < 0.8, "it is known to say nothing"
    assert shown["a"]["load"] is not None, "what it said lately will do"
    monkeypatch.setattr(cluster_loads, "LATELY_S", 0.0)
    monkeypatch.setattr(cluster_loads, "MAX_TRIES", 2)
    pair.peer.loads["a"] = {"free_merged": 20.0}
    shown = await instances_of(pair.client)
    assert shown["a"]["load"]["pool_use"] == pytest.approx(0.8), "what it said long ago will not"


async def test_reports_are_heard_only_while_somebody_asks(pair: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    bus, subscribed = pair.gateway.context.bus, 0
    subscribe = bus.subscribe

    async def counting(topic: Topic[Any], handler: Callable[[Any], None]) -> Any:
        nonlocal subscribed
        assert topic is LOAD_REPORTS
        subscribed += 1
        subscription = await subscribe(topic, handler)
        stop = subscription.stop

        async def stopped() -> None:
            nonlocal subscribed
            subscribed -= 1
            await stop()

        subscription.stop = stopped  # type: ignore[method-assign]
        return subscription

    monkeypatch.setattr(bus, "subscribe", counting)
    asking = [asyncio.create_task(instances_of(pair.client)) for _ in range(3)]
    await until(lambda: subscribed, "listening")
    assert subscribed == 1, "once for all who ask"
    pair.peer.loads = {"a": {}, "b": BUSY}
    with Stopwatch() as watch:
        pair.peer.report("a")
        pair.peer.report("b")
        shown = await asyncio.gather(*asking)
    assert watch.seconds < 0.8, "until all were heard"
    assert subscribed == 0
    assert all(each["b"]["load"]["num_running"] == 7 for each in shown)
    pair.peer.loads["b"] = {**BUSY, "num_running": 8}
    pair.peer.report("b")
    assert (await instances_of(pair.client))["b"]["load"]["num_running"] == 7, "asked again too soon"


async def test_instances_are_asked_to_report_so_that_their_loads_are_of_one_moment(
    pair: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_loads, "FRESH_S", 0.0)
    pair.peer.loads = {"a": {}, "b": {}}
    await instances_of(pair.client)
    loads: dict[str, dict[str, object]] = {"a": {}, "b": BUSY}

    def report_all(_: object) -> None:
        pair.peer.loads = loads
        for instance_id in loads:
            pair.peer.report(instance_id)
        pair.peer.loads = {}  # they say nothing unless they are asked

    pair.peer.loads = {}
    await pair.peer.bus.subscribe(REPORT_LOAD, report_all)
    shown = await instances_of(pair.client)
    assert shown["b"]["load"]["num_running"] == 7, "what it said a moment ago will not do"
    assert all(each["load"]["age_s"] < 0.3 for each in shown.values())
    loads["b"] = {**BUSY, "models": [ModelLoad(model=MODEL, num_running=9, num_waiting=4)]}
    [model] = (await pair.client.get("/admin/models")).json()["models"]
    assert (model["num_running"], model["num_waiting"]) == (9, 4), "of the same source as the instances"


async def test_models_with_their_queues(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    await stack.peer.add_instance("b", MODEL, num_running=5)
    await until(lambda: len(stack.gateway.context.catalog.instances) == 2, "instances")

    async def only_model() -> dict[str, Any]:
        [model] = (await stack.client.get("/admin/models")).json()["models"]
        return model

    assert (await only_model())["num_queued"] is None, "no scheduler has said anything"
    stack.peer.tell_statistics(MODEL, num_queued=17)
    await until(lambda: stack.gateway.context.loads.num_queued(), "statistics")
    model = await only_model()
    assert (model["num_queued"], model["num_running"], model["num_waiting"]) == (17, 5, 0)
    assert 0 <= (await stack.client.get("/admin/models")).json()["queued_age_s"] < 5
    monkeypatch.setattr(cluster_loads, "QUEUES_LAST_S", 0.0)
    assert (await only_model())["num_queued"] is None, "the scheduler is gone"
    assert (await stack.client.get("/admin/models")).json()["queued_age_s"] is None


async def test_models_with_their_traffic(stack: Stack) -> None:
    asked: list[float] = []
    online = ModelSummary(interval_s=60.0, num_arrived=90, arrivals_per_s=1.5, slo_s=4.0, attainment=0.75)

    async def answer(query: GetTraffic) -> TrafficReply:
        asked.append(query.interval_s)
        return TrafficReply([ModelTraffic(model=MODEL, online=online, offline=ModelSummary(interval_s=60.0))])

    async def only_model(query: str = "") -> dict[str, Any]:
        [model] = (await stack.client.get(f"/admin/models{query}")).json()["models"]
        return model

    assert (await only_model())["traffic"] is None, "no placement answers"
    await stack.peer.bus.serve(PLACEMENT_TRAFFIC, answer)
    model = await only_model("?interval_s=60")
    assert msgspec.convert(model["traffic"], ModelTraffic).online == online
    assert model["traffic"]["offline"]["attainment"] is None and model["slo_scale"] == 0.0
    await only_model()
    assert asked == [60.0, 600.0]
    for wrong in ("0", "9", "21601", "x", "-60", "6e1"):
        answered = await stack.client.get(f"/admin/models?interval_s={wrong}")
        assert (answered.status_code, answered.json()["error"]["param"]) == (400, "interval_s")


async def test_an_instance_that_crashed_is_in_no_sum(stack: Stack) -> None:
    catalog = stack.gateway.context.catalog
    stack.peer.loads = {"a": {}, "b": BUSY}
    await stack.peer.add_instance("b", MODEL, num_running=5)
    await until(lambda: len(catalog.instances) == 2, "instances")
    assert (await instances_of(stack.client))["b"]["load"]["num_running"] == 7
    await stack.peer.remove_instance("b", is_clean=False)
    for incarnation, alive in (("of an earlier process", ["a", "b"]), ("1", ["a"])):
        stack.peer.bus.publish(INSTANCE_EXITED, InstanceExited("b", incarnation, "node", -9))
        await stack.peer.bus.round_trip_s()
        await stack.gateway.context.bus.round_trip_s()
        assert list(catalog.alive) == alive
    assert "b" in catalog.instances, "the registry has it for a while"
    assert list(await instances_of(stack.client)) == ["a"]
    [model] = (await stack.client.get("/admin/models")).json()["models"]
    assert (model["instances"], model["num_running"]) == ({"a": "ready"}, 0)
    await stack.peer.add_instance("b", MODEL, incarnation="2")
    await until(lambda: list(catalog.alive) == ["a", "b"], "its successor")


async def test_an_instance_is_told_its_role(pair: Stack) -> None:
    for role in ("prefill", "auto"):
        answer = await pair.client.post("/admin/instances/b/role", json={"role": role})
        assert (answer.status_code, answer.json()) == (200, {"role": role})
    assert pair.peer.roles == [("b", SetRole(Role.PREFILL, is_operators=True)), ("b", SetRole(None, is_operators=True))]


async def test_instances_of_other_engines_take_no_role(pair: Stack) -> None:
    await pair.peer.add_instance("v", MODEL, engine="vllm", kv_address="tcp://node:1")
    await until(lambda: "v" in pair.gateway.context.catalog.alive)
    for instance_id, status, code in (("v", 400, "unsupported_value"), ("nobody", 404, "instance_not_found")):
        answer = await pair.client.post(f"/admin/instances/{instance_id}/role", json={"role": "prefill"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, "instance_id")


async def test_draining(pair: Stack) -> None:
    answer = await pair.client.post("/admin/instances/b/drain")
    assert (answer.status_code, answer.json()["draining"]) == (200, ["b"])
    assert (await pair.client.get("/admin/instances")).json()["draining"] == ["b"]
    await pair.peer.remove_instance("b")
    answer = await pair.client.post("/admin/instances/b/undrain")
    assert (answer.status_code, answer.json()["draining"]) == (200, [])
    assert (await pair.client.get("/admin/instances")).json()["draining"] == []
    for how in ("drain", "undrain"):
        answer = await pair.client.post(f"/admin/instances/nobody/{how}")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "instance_not_found", "instance_id")
        assert "nobody" in error["message"]
        assert (await pair.client.get(f"/admin/instances/b/{how}")).status_code == 405
    answer = await pair.client.post("/admin/instances/a/drain")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    for value, status in (("maybe", 400), ("false", 409), ("true", 200)):
        answer = await pair.client.post(f"/admin/instances/a/drain?force={value}")
        assert answer.status_code == status
    assert answer.json()["draining"] == ["a"]


async def test_scaling(nats_settings: BusSettings, checkpoint: Path) -> None:
    name = "org/tide"
    async with running_stack(nats_settings, [ModelSpec(name, str(checkpoint))]) as stack:
        for replicas in (3, None):
            answer = await stack.client.post(f"/admin/models/{name}/scale", json={"replicas": replicas})
            assert (answer.status_code, answer.json()["version"]) == (200, 1)
        assert (await stack.client.post("/admin/scale", json={"instances": 5})).status_code == 200
        assert stack.peer.scaled == [ScaleModel(name, 3), ScaleModel(name, None), ScaleInstances(5)]
        for path, body, param in [
            (f"/admin/models/{name}/scale", {}, "replicas"),
            (f"/admin/models/{name}/scale", {"replicas": 0}, "replicas"),
            (f"/admin/models/{name}/scale", {"replicas": "all"}, "replicas"),
            ("/admin/scale", {"instances": 0}, "instances"),
            ("/admin/scale", {}, "instances"),
        ]:
            answer = await stack.client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        answer = await stack.client.post("/admin/models/ocean/scale", json={"replicas": 1})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert len(stack.peer.scaled) == 3

        stack.peer.scaling_refusal = ServiceError.of(ErrorCode.CONFLICT, "at most 2", "num_instances")
        answer = await stack.client.post("/admin/scale", json={"instances": 3})
        assert (answer.status_code, answer.json()["error"]["param"]) == (409, "instances")

        # Placement that died at it is no deadline of the client's.
        stack.peer.scaling_refusal = ServiceError.of(ErrorCode.DEADLINE, "no reply within 10 s")
        answer = await stack.client.post("/admin/scale", json={"instances": 3})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert "may have been done" in answer.json()["error"]["message"] and int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/admin/models", {"name": "x", "source": "y", "replics": 1}, "replics", "did you mean 'replicas'?"),
        ("/admin/models", {"x9": "blue"}, "x9", "known: name, source, dtype, "),
        ("/admin/models", {"name": "x", "z" * 5000: 1}, "z" * 100, "known: name, "),
        (f"/admin/models/{MODEL}/scale", {"replicas": 1, "replica": 2}, "replica", "did you mean 'replicas'?"),
        ("/admin/scale", {"instances": 1, "nodes": 2}, "nodes", "known: instances"),
        ("/admin/plan", {"action": "search", "acton": ""}, "acton", "did you mean 'action'?"),
        ("/admin/plan", {"action": "set", "groups": [{"node": "n", "devices": [0], "models": ["m"]}]}, "groups[0].node",
         "did you mean 'node_id'?"),
        ("/admin/routes", {"name": "x", "arms": {MODEL: 1}, "fallback": []}, "fallback", "did you mean 'fallbacks'?"),
    ],
)  # fmt: skip
async def test_fields_that_nobody_knows_are_refused(
    stack: Stack, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    answer = await stack.client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unknown_parameter", param)
    assert error["message"].startswith(f"Unknown parameter: '{param}'; {words}")


CHANGES = [
    ("/admin/instances/a/drain", None),
    ("/admin/instances/a/undrain", None),
    ("/admin/models/tide/scale", {"replicas": 1}),
    ("/admin/scale", {"instances": 1}),
]


async def test_changes_need_the_admin_key_and_a_placement(nats_settings: BusSettings) -> None:
    async with (
        running_gateway(nats_settings, api_keys="user", admin_api_key="root") as gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}") as client,
    ):
        for path, body in CHANGES:
            answer = await client.post(path, json=body, headers={"authorization": "Bearer user"})
            assert answer.status_code == 401
            answer = await client.post(path, json=body, headers={"authorization": "Bearer root"})
            if "models" in path:
                assert answer.status_code == 404, "there is no model at all"
            else:
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        answer = await client.get("/admin/instances", headers={"authorization": "Bearer root"})
        assert answer.json() == {"instances": [], "draining": []}
