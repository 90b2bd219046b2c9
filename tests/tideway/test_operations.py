"""`tideway drain`, `scale` and `top` against a real gateway, with a scripted placement and scripted instances behind it."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from shared.messages.admin import (
    InstanceLoad,
    InstanceModel,
    InstanceState,
    InstanceStates,
    ModelState,
    ModelStates,
    ScaleInstances,
    ScaleModel,
)
from shared.messages.catalogue import MODELS, PLACEMENT_TRAFFIC
from shared.messages.channels import bucket_key
from shared.messages.cluster import (
    DraftUse,
    InstanceInfo,
    InstancePlan,
    KvCopies,
    LoadedModel,
    ModelLoad,
    ModelSpec,
    PlacementPlan,
)
from shared.messages.traffic import GetTraffic, MeanStd, ModelSummary, ModelTraffic, Spread, TrafficReply
from shared.runtime.settings import BusSettings
from tests.gateway.checkpoints import byte_level_tokenizer, write_checkpoint
from tests.gateway.conftest import MODEL, Stack, running_stack
from tests.gateway.peer import until
from tideway import command, operations, status, top
from tideway.data_folder import DataFolder, OperatorError, ProcessState, State
from tideway.models import show_models
from tideway.operations import AdminClient, UnavailableError
from tideway.requests import list_requests
from tideway.top import Snapshot, moves_per_s, show_top


@pytest.fixture
async def stack(nats_settings: BusSettings, tmp_path: Path) -> AsyncIterator[Stack]:
    """Gateway with the admin key "root"; instances a and b."""
    source = str(write_checkpoint(tmp_path / "model", byte_level_tokenizer()))
    specs = [ModelSpec(MODEL, source)]
    async with running_stack(nats_settings, specs, api_keys="user", admin_api_key="root") as stack:
        stack.peer.loads = {"a": {}}
        await stack.peer.add_instance("b", MODEL, kv_address="here")
        stack.peer.loads["b"] = {
            "free_merged": 25.0,
            "num_running": 7,
            "models": [ModelLoad(model=MODEL, num_running=7, num_waiting=2)],
            "migration_freeness": 1234.5,
            "num_migrating_out": 1,
            "num_migrated_in": 5,
        }
        await until(lambda: len(stack.gateway.context.catalog.instances) == 2, "instances")
        yield stack


async def on_a_thread(stack: Stack, work: Callable[..., None], *arguments: Any, **options: Any) -> list[str]:
    """What an operation says, one line each."""
    said: list[str] = []
    with AdminClient(stack.url, "root") as client:
        await asyncio.to_thread(work, client, *arguments, say=said.append, **options)
    return said


async def test_draining_and_waiting_for_it(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "POLL_INTERVAL_S", 0.02)
    said: list[str] = []
    with AdminClient(stack.url, "root") as client:
        work = asyncio.to_thread(operations.drain, client, "b", is_undone=False, wait_s=20, say=said.append)
        draining = asyncio.create_task(work)
        await until(lambda: "  9 requests left" in said, "requests left")
        assert stack.peer.plan.draining == ["b"]
        await stack.peer.remove_instance("b")
        await draining
    assert said == ["b is left out of the plan and drains.", "  9 requests left", "  gone"]

    plan_both_models_on_b(stack)
    said = []
    with AdminClient(stack.url, "root") as client:
        work = asyncio.to_thread(operations.drain, client, "b", is_undone=True, wait_s=20, say=said.append)
        returning = asyncio.create_task(work)
        await until(lambda: "  not there yet" in said, "absence")
        await stack.peer.add_instance("b", MODEL, incarnation="2", state="ready")
        await until(lambda: "  loading ebb" in said, "the model that is not there yet")
        await stack.peer.add_instance("b", MODEL, "ebb", incarnation="2", state="ready")
        await returning
    assert stack.peer.plan.draining == []
    assert (said[0], said[-1]) == ("b is to come back.", "  ready")
    said = await on_a_thread(stack, operations.drain, "b", is_undone=True, wait_s=20)
    assert said == ["b was not drained; nothing changed.", "  ready"]


async def test_waiting_outlasts_a_gateway_that_does_not_answer_for_a_while(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "POLL_INTERVAL_S", 0.02)
    away = [UnavailableError("No placement answers."), UnavailableError("No placement answers.")]
    instances = AdminClient.instances

    def sometimes(client: AdminClient) -> InstanceStates:
        if away:
            raise away.pop()
        return instances(client)

    monkeypatch.setattr(AdminClient, "instances", sometimes)
    plan_both_models_on_b(stack)
    await stack.peer.add_instance("b", MODEL, "ebb", incarnation="2", state="ready")
    said = await on_a_thread(stack, operations.drain, "b", is_undone=True, wait_s=20)
    assert said == ["b was not drained; nothing changed.", "  No placement answers", "  ready"]
    away.extend([UnavailableError("No placement answers.")] * 100)
    with pytest.raises(OperatorError, match=r"^b: No placement answers after 0\.1 s"):
        await on_a_thread(stack, operations.drain, "b", is_undone=True, wait_s=0.1)


async def test_waiting_outlasts_a_replacement_during_which_nothing_can_be_drained(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "POLL_INTERVAL_S", 0.02)
    refused = [UnavailableError("A replacement is under way.")] * 2
    drain = AdminClient.drain

    def after_a_while(client: AdminClient, instance_id: str, **options: bool) -> PlacementPlan:
        if refused:
            raise refused.pop()
        return drain(client, instance_id, **options)

    monkeypatch.setattr(AdminClient, "drain", after_a_while)
    with AdminClient(stack.url, "root") as client, pytest.raises(UnavailableError, match="under way"):
        await asyncio.to_thread(operations.drain, client, "b", is_undone=False, wait_s=None, say=lambda _: None)
    refused.append(UnavailableError("A replacement is under way."))
    said: list[str] = []
    with AdminClient(stack.url, "root") as client:
        work = asyncio.to_thread(operations.drain, client, "b", is_undone=False, wait_s=20, say=said.append)
        draining = asyncio.create_task(work)
        await until(lambda: "b is left out of the plan and drains." in said, "the drain")
        await stack.peer.remove_instance("b")
        await draining
    assert said[:2] == ["  A replacement is under way.", "b is left out of the plan and drains."] and not refused


async def test_an_instance_comes_back_when_there_is_a_model(stack: Stack) -> None:
    await stack.peer.remove_instance("b")
    stack.peer.plan = PlacementPlan(1, [], draining=["b"])
    with AdminClient(stack.url, "root") as client:
        await asyncio.to_thread(client.remove_model, MODEL)
        await until(lambda: not stack.gateway.context.catalog.models, "no model")
    said = await on_a_thread(stack, operations.drain, "b", is_undone=True, wait_s=20)
    assert said[0] == "b is to come back." and "There is no model" in said[-1]


async def test_an_instance_whose_worker_is_away_is_said_to_be_in_no_plan(stack: Stack) -> None:
    await stack.peer.remove_instance("b")
    stack.peer.plan = PlacementPlan(1, [], draining=["b"])
    with pytest.raises(
        OperatorError, match=r"^b: not there, and nothing is planned for it yet; does its worker run.* after"
    ):
        await on_a_thread(stack, operations.drain, "b", is_undone=True, wait_s=0.1)


async def test_an_instance_that_was_not_drained_and_has_no_plan_is_not_waited_for(stack: Stack) -> None:
    stack.peer.plan = PlacementPlan(1, [])
    said = await on_a_thread(stack, operations.drain, "b", is_undone=True, wait_s=20)
    assert said == [
        "b was not drained; nothing changed.",
        "  Nothing is planned for it, so there is nothing to wait for.",
    ]
    said = await on_a_thread(stack, operations.drain, "b", is_undone=True, wait_s=None)
    assert said == ["b was not drained; nothing changed."]


def plan_both_models_on_b(stack: Stack) -> None:
    specs = [ModelSpec(MODEL, "source"), ModelSpec("ebb", "source")]
    stack.peer.plan = msgspec.structs.replace(stack.peer.plan, instances=[InstancePlan("b", "node", specs, 0, 0)])


async def restart_with(stack: Stack, instance_id: str, models: list[LoadedModel]) -> None:
    info = InstanceInfo(
        instance_id=instance_id,
        incarnation="2",
        node_id="node",
        state="ready",
        models=models,
        num_merged=100,
        merged_bytes=2**20,
    )
    await stack.peer.put_instance(info)
    await until(lambda: stack.gateway.context.catalog.instances[instance_id].incarnation == "2", "the registry")


async def test_an_instance_that_cannot_load_a_model_is_not_back(stack: Stack) -> None:
    plan_both_models_on_b(stack)
    models = [LoadedModel(name=MODEL, state="ready"), LoadedModel(name="ebb", state="failed", error="no such weights")]
    await restart_with(stack, "b", models)
    with pytest.raises(OperatorError, match=r"^b is there, but could not load ebb: no such weights.$"):
        await on_a_thread(stack, operations.drain, "b", is_undone=True, wait_s=20)


async def test_draining_that_takes_too_long(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "POLL_INTERVAL_S", 0.02)
    stack.peer.plan = PlacementPlan(1, [], unplaced={MODEL: "no instance is left"})
    with pytest.raises(OperatorError, match=r"^b: 9 requests left after 0.1 s. It goes on by itself.$"):
        await on_a_thread(stack, operations.drain, "b", is_undone=False, wait_s=0.1)
    said = await on_a_thread(stack, operations.drain, "b", is_undone=False, wait_s=None)
    assert said[1:] == [f"  {MODEL} is on no instance: no instance is left"]
    for name in ("nobody", "", "a/b", ".."):
        with pytest.raises(OperatorError, match=f"(?i)there is no instance '{name}'"):
            await on_a_thread(stack, operations.drain, name, is_undone=False, wait_s=None)


async def test_the_last_instance_is_drained_by_force_alone(stack: Stack) -> None:
    await stack.peer.remove_instance("a")
    with pytest.raises(OperatorError, match=r"^'b' is the last instance. --force drains it all the same.$"):
        await on_a_thread(stack, operations.drain, "b", is_undone=False, wait_s=None)
    assert stack.peer.plan.draining == []
    await on_a_thread(stack, operations.drain, "b", is_undone=False, is_forced=True, wait_s=None)
    assert stack.peer.plan.draining == ["b"]


async def test_scaling(stack: Stack) -> None:
    spec = ModelSpec(MODEL, "source")
    stack.peer.plan = PlacementPlan(1, [InstancePlan(name, "node", [spec], 0, 0) for name in "ab"])
    assert await on_a_thread(stack, operations.scale_model, MODEL, 3, wait_s=None) == [
        f"{MODEL} is to be on 3 instances; planned: a, b.",
        "  2 of 3 can be had now: there are 2 instances (tideway scale --instances N for more).",
        "  Placement adds the others as soon as it can.",
    ]
    on_one = [InstancePlan("a", "node", [spec], 0, 0), InstancePlan("b", "node", [ModelSpec("ebb", "source")], 0, 0)]
    both = stack.peer.plan
    stack.peer.plan = msgspec.structs.replace(both, instances=on_one, draining=["c", "d"], released=["d"])
    said = await on_a_thread(stack, operations.scale_model, MODEL, 3, wait_s=None)
    assert said[1] == "  1 of 3 can be had now: b is not planned to have it, and c is drained."
    stack.peer.plan = both
    [line] = await on_a_thread(stack, operations.scale_model, MODEL, None, wait_s=None)
    assert "all instances where it fits" in line
    said = await on_a_thread(stack, operations.scale_instances, 4, wait_s=None)
    assert said == ["There are to be 4 instances; planned now: 2."]
    stack.peer.plan = msgspec.structs.replace(stack.peer.plan, is_chosen=True)
    said = await on_a_thread(stack, operations.scale_instances, 5, wait_s=None)
    assert said[0].endswith("planned now: 2.") and said[1] == f"  3 more wait: {operations.CHOSEN}."
    with pytest.raises(OperatorError, match=re.escape(f"3 more wait: {operations.CHOSEN}.")):
        await on_a_thread(stack, operations.scale_instances, 5, wait_s=20)
    said = await on_a_thread(stack, operations.scale_model, MODEL, 3, wait_s=None)
    assert said[1:] == [f"  2 of 3 can be had now: there are 2 instances; {operations.CHOSEN}."]
    assert stack.peer.scaled == [
        ScaleModel(MODEL, 3), ScaleModel(MODEL, 3), ScaleModel(MODEL, None), ScaleInstances(4), ScaleInstances(5),
        ScaleInstances(5), ScaleModel(MODEL, 3),
    ]  # fmt: skip
    with pytest.raises(OperatorError, match="'ocean' does not exist"):
        await on_a_thread(stack, operations.scale_model, "ocean", 1, wait_s=None)


def plan_for(stack: Stack, **models: list[str]) -> None:
    """By instance."""
    plans = [
        InstancePlan(name, "node", [ModelSpec(model, "source") for model in there], 0, 0)
        for name, there in models.items()
    ]
    stack.peer.plan = PlacementPlan(1, plans)


async def test_waiting_until_a_model_is_where_it_is_planned(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "POLL_INTERVAL_S", 0.02)
    plan_for(stack, a=[MODEL], c=[MODEL, "ebb"])
    said: list[str] = []
    with AdminClient(stack.url, "root") as client:
        work = asyncio.to_thread(operations.scale_model, client, MODEL, 2, wait_s=20, say=said.append)
        scaling = asyncio.create_task(work)
        await until(lambda: "  c: not there yet; b: 9 requests left" in said, "both that are missing")
        await stack.peer.add_instance("c", MODEL, "ebb", state="loading")
        await until(lambda: "  c: loading; b: 9 requests left" in said, "the instance that starts")
        await stack.peer.add_instance("c", MODEL, state="ready")
        await until(lambda: "  b: 9 requests left" in said, "the model that matters, and no other")
        stack.peer.loads["b"] = {}
        await until(lambda: said[-1] == "  b: nothing left, not gone yet", "no requests")
        assert not scaling.done()
        await stack.peer.add_instance("b", "ebb")
        await scaling
    assert said[0] == f"{MODEL} is to be on 2 instances; planned: a, c."
    assert said[-1] == "  ready"


async def test_waiting_for_a_number_of_instances(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "POLL_INTERVAL_S", 0.02)
    plan_for(stack, a=[MODEL], b=[MODEL])
    said: list[str] = []
    with AdminClient(stack.url, "root") as client:
        work = asyncio.to_thread(operations.scale_instances, client, 3, wait_s=20, say=said.append)
        growing = asyncio.create_task(work)
        await until(lambda: "  2 of 3 instances planned" in said, "the plan of before")
        plan_for(stack, a=[MODEL], b=[MODEL], c=[MODEL])
        await until(lambda: "  c: not there yet" in said, "the plan of now")
        await stack.peer.add_instance("c", MODEL)
        await growing
        assert said[-1] == "  ready"
        plan_for(stack, a=[MODEL], c=[MODEL])
        work = asyncio.to_thread(operations.scale_instances, client, 2, wait_s=20, say=said.append)
        shrinking = asyncio.create_task(work)
        await until(lambda: said[-1] == "  b: 9 requests left", "requests")
        await stack.peer.remove_instance("b")
        await shrinking
    assert said[-1] == "  ready"


async def test_instances_that_no_model_is_for_are_not_waited_for(stack: Stack) -> None:
    spec = stack.gateway.context.catalog.spec(MODEL)
    models = await stack.peer.bus.key_value(MODELS)
    await models.put(bucket_key(MODEL), msgspec.structs.replace(spec, replicas=2))
    await until(lambda: stack.gateway.context.catalog.spec(MODEL).replicas, "a number of replicas")
    plan_for(stack, a=[MODEL], b=[MODEL])
    said = await on_a_thread(stack, operations.scale_instances, 3, wait_s=20)
    assert said == ["There are to be 3 instances; planned now: 2.", "  ready"]
    await models.put(bucket_key("vast"), msgspec.structs.replace(spec, name="vast"))
    await until(lambda: len(stack.gateway.context.catalog.models) == 2, "another model")
    stack.peer.plan = msgspec.structs.replace(stack.peer.plan, unplaced={"vast": "it fits nowhere"})
    said = await on_a_thread(stack, operations.scale_instances, 3, wait_s=20)
    assert said[1:] == ["  vast is on no instance: it fits nowhere", "  ready"]


async def test_scaling_that_takes_too_long_or_cannot_be(stack: Stack) -> None:
    with pytest.raises(OperatorError, match=f"^{MODEL} is planned nowhere after 0.1 s. It goes on by itself.$"):
        await on_a_thread(stack, operations.scale_model, MODEL, 1, wait_s=0.1)
    plan_for(stack, a=[MODEL])
    with pytest.raises(OperatorError, match=r"^b: 9 requests left after 0.1 s. It goes on by itself.$"):
        await on_a_thread(stack, operations.scale_model, MODEL, 1, wait_s=0.1)
    failed = [LoadedModel(name=MODEL, state="failed", error="no such weights")]
    await restart_with(stack, "a", failed)
    with pytest.raises(OperatorError, match=rf"^a is there, but could not load {MODEL}: no such weights.$"):
        await on_a_thread(stack, operations.scale_model, MODEL, 1, wait_s=20)


async def test_what_an_operator_must_change_is_one_sentence(stack: Stack, tmp_path: Path) -> None:
    for key in ("", "user"):
        with AdminClient(stack.url, key) as client, pytest.raises(OperatorError, match="--api-key"):
            await asyncio.to_thread(client.instances)
    for url in ("http://127.0.0.1:1", "nonsense", "http://[::"):
        with pytest.raises(OperatorError, match=r"does not answer|no address"):
            AdminClient(url).models()


async def test_a_name_with_dots_is_not_another_name(stack: Stack) -> None:
    with AdminClient(stack.url, "root") as client:
        asked = (
            client.remove_model,
            client.delete_route,
            lambda name: client.scale_model(name, 1),
            client.request_timelines,
        )
        for ask in asked:
            for name in (f"x/../{MODEL}", "..", ""):
                with pytest.raises(
                    OperatorError, match=r"^There is no (model|route) '|Nothing is known of the request '"
                ):
                    await asyncio.to_thread(ask, name)
        assert [model.name for model in (await asyncio.to_thread(client.models)).models] == [MODEL]


async def test_a_model_that_is_put_away_is_loaded_when_it_is_asked_for(stack: Stack) -> None:
    stack.peer.plan = msgspec.structs.replace(stack.peer.plan, asleep={MODEL: "idle"}, instances=[])
    said = await on_a_thread(stack, operations.scale_model, MODEL, 1, wait_s=None)
    assert said[1:] == ["  It is put away, and loaded there when a request for it comes."]


async def test_the_gateway_of_the_data_folder(stack: Stack, tmp_path: Path) -> None:
    data = DataFolder(tmp_path / "data")
    data.prepare()
    with pytest.raises(OperatorError, match=f"Nothing runs on {data.path}; give --url"):
        AdminClient.of(data, "", "")
    with AdminClient.of(data, "", "", may_guess=True) as client:
        assert client.url == operations.DEFAULT_URL
        client._http.base_url = httpx.URL("http://127.0.0.1:1")
        with pytest.raises(OperatorError, match=f"^Nothing runs on {data.path}. The gateway at .* does not answer"):
            await asyncio.to_thread(client.models)
    data.acquire()
    data.write_state(State(pid=1, phase="ready", address=stack.url, nats_url="", started_unix_s=0.0, processes=[]))
    with AdminClient.of(data, "", "root") as client:
        assert len((await asyncio.to_thread(client.instances)).instances) == 2
    with AdminClient.of(data, "", "") as client:
        assert client._http.headers["authorization"] == f"Bearer {data.credentials().admin_api_key}"
    with AdminClient.of(data, "http://elsewhere", "") as client:
        assert "authorization" not in client._http.headers, "the folder's key is for its own gateway"
    data.release()


async def test_one_view_of_top(stack: Stack) -> None:
    stack.peer.tell_statistics(MODEL, num_queued=17)
    await until(lambda: stack.gateway.context.loads.num_queued(), "statistics")
    with AdminClient(stack.url, "root") as client:
        await asyncio.to_thread(client.drain, "a", is_undone=False)
        await stack.peer.remove_instance("a")
        await until(lambda: len(stack.gateway.context.catalog.instances) == 1, "removal")
        output = io.StringIO()
        await asyncio.to_thread(show_top, client, Console(file=output, width=160), once=True)
    text = output.getvalue()
    url, counts, ages, *rows = [line for line in text.splitlines() if line.strip()]
    assert url == stack.url
    assert "1 instance  7 running  2 waiting  17 queued  1 moving" in counts, "as in both tables"
    assert re.fullmatch(r"running, waiting, moving: \d\.\d s ago  queued: \d\.\d s ago", ages)
    [row] = [line for line in rows if line.split()[0] == "b"]
    assert row.split() == ["b", "ready", "native", "both", "████░", "75%", "7+2", "0", "0", "1234", "1/0", "0/5", "1/1"]
    assert any(MODEL in line and " 17 " in line for line in rows)
    assert "Drained and gone: a" in text
    assert "Copies of KV" not in text and "drafts" not in text, "there are none"


async def test_top_shows_copies_of_kv_and_draft_models(stack: Stack) -> None:
    copies = KvCopies(
        num_backed_up=3, num_missing_blocks=5, backed_up_bytes=3 << 19, num_kept=2, num_rescued_tokens=900,
        num_recomputed_tokens=17, num_fetches=4, num_fetched_blocks=31,
    )  # fmt: skip
    uses = [DraftUse(model=MODEL, state=state, gain=1.0, num_drafted=50, num_kept=20) for state in ("on", "off")]
    stack.peer.loads["b"] |= {"kv_copies": copies, "drafts": (uses[0],)}
    stack.peer.loads["a"] |= {"drafts": (uses[1],)}
    output = io.StringIO()
    with AdminClient(stack.url, "root") as client:
        await asyncio.to_thread(show_top, client, Console(file=output, width=160), once=True)
    rows = output.getvalue().splitlines()
    (at,) = [number for number, line in enumerate(rows) if "Copies of KV" in line]
    told = [line.split() for line in rows[at:]]
    assert ["b", "3", "5", "1.5", "MiB", "2", "900", "17", "4", "31"] in told
    assert not any(line[:1] == ["a"] for line in told), "it has neither made nor kept any"
    (of_model,) = [line for line in rows if line.startswith(f"{MODEL} ")]
    assert "1 off, 1 on, 40% kept" in of_model


async def test_ids_of_requests_are_whole_on_80_columns(stack: Stack) -> None:
    stack.say("Hello")
    for _ in range(2):
        body = {"model": MODEL, "prompt": "Hi"}
        answer = await stack.client.post("/v1/completions", json=body, headers={"authorization": "Bearer user"})
        assert answer.status_code == 200
    with AdminClient(stack.url, "root") as client:
        console = Console(file=(output := io.StringIO()), width=80)
        wanted = {"limit": 5, "model": "", "missed": False, "running": False, "as_json": False}
        await asyncio.to_thread(list_requests, client, console, **wanted)
    lines = output.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines) and len(lines) == 5
    assert any(line.startswith(f"{answer.json()['id']}-0  ") for line in lines)
    assert lines[-1].startswith("Too narrow for: ") and "instance" in lines[-1]


async def test_requests_that_there_are_not_are_named(stack: Stack) -> None:
    async def told(**wanted: Any) -> str:
        with AdminClient(stack.url, "root") as client:
            console = Console(file=(output := io.StringIO()), width=200)
            asked = {"limit": 5, "model": "", "missed": False, "running": False, "as_json": False, **wanted}
            await asyncio.to_thread(list_requests, client, console, **asked)
        return output.getvalue().strip()

    assert await told() == "No request runs, and none ended lately."
    assert await told(model=MODEL) == f"No request of {MODEL} runs, and none ended lately."
    assert await told(running=True) == "No request runs."
    assert await told(missed=True) == "No request of the last minutes missed an objective."
    unknown = "No request of nope runs, and none ended lately; no model of this name is served (tideway models)."
    assert await told(model="nope") == unknown


async def test_models_and_their_traffic(stack: Stack) -> None:
    online = ModelSummary(
        interval_s=60.0,
        num_arrived=90,
        num_finished=80,
        num_refused=3,
        arrivals_per_s=1.5,
        prompt_tokens=MeanStd(120.0, 30.0),
        output_tokens=MeanStd(64.0, 8.0),
        execution_s=MeanStd(0.25, 0.1),
        latency_s=Spread(0.5, 0.2, 0.4, 2.5),
        max_itl_s=Spread(0.1, 0.2, 0.04, 0.9),
        slo_s=1.25,
        attainment=0.875,
    )

    async def shown(as_json: bool = False) -> str:
        output = io.StringIO()
        with AdminClient(stack.url, "root") as client:
            console = Console(file=output, width=200)
            await asyncio.to_thread(show_models, client, console, interval_s=60, as_json=as_json)
        return output.getvalue()

    assert "not known" in await shown()
    replies = [ModelTraffic(model=MODEL, online=online, offline=ModelSummary(interval_s=60.0))]

    async def answer(_: GetTraffic) -> TrafficReply:
        return TrafficReply(replies)

    await stack.peer.bus.serve(PLACEMENT_TRAFFIC, answer)
    [row] = [line for line in (await shown()).splitlines() if line.startswith(MODEL)]
    expected = "online 1.5 3 120±30 64±8 250 ms 500 ms 400 ms 2.5 s 0 ms 0 ms 40 ms 900 ms 1.25 s 87.5% 2"
    assert row.split() == [MODEL, *expected.split()]
    assert not [line for line in (await shown()).splitlines() if "offline" in line]
    replies[0] = msgspec.structs.replace(replies[0], offline=online)
    [row] = [line for line in (await shown()).splitlines() if "offline" in line]
    assert row.split()[:3] == ["offline", "1.5", "3"]
    [state] = msgspec.json.decode(await shown(as_json=True), type=ModelStates).models
    assert state.traffic == replies[0]


def test_top_where_the_terminal_has_ascii_alone() -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    shown = snapshot(1.0, instance("a", "1", 0))
    console = Console(file=output, width=160)
    console.print(top.render(shown, 0.5, "http://gateway", console, "a problem"))
    output.seek(0)
    text = output.read()
    assert "##...  50%" in text and "idle" in text and "a problem" in text


def shown_at(width: int, shown: Snapshot) -> list[str]:
    console = Console(file=(output := io.StringIO()), width=width)
    console.print(top.render(shown, 0.5, "http://127.0.0.1:8000", console))
    lines = output.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("num_characters", [9, 20, 40, 68])
def test_names_of_instances_are_whole_where_a_line_has_room_for_them(num_characters: int) -> None:
    name = "n" * (num_characters - 2) + "-0"
    lines = shown_at(80, snapshot(1.0, instance(name, "1", 0)))
    assert any(line.split()[0:2] == [name, "ready"] for line in lines if line)
    assert lines[1] == "1 instance  0 running  0 waiting  0 queued  0 moving  0.5 moves/s"
    assert ("50%" in "".join(lines)) == (num_characters < 60), "other columns give way"


def test_longer_ones_are_folded_and_not_cut() -> None:
    name = "node-" + "x" * 100 + "-7"
    lines = shown_at(80, snapshot(1.0, instance(name, "1", 0)))
    assert name in "".join(line.split()[0] for line in lines if line).replace("ready", "")


def test_why_a_model_is_not_loaded_is_said() -> None:
    broken = [on_instance("tide", "failed", error="no such weights")]
    instances = [msgspec.structs.replace(instance(name, "1", 0), models=broken) for name in "ab"]
    model = model_state("tide", {"a": "failed", "b": "failed"})
    lines = shown_at(120, Snapshot(InstanceStates(instances, []), ModelStates([model]), 1.0))
    assert any("not served on a, b: no such weights" in line for line in lines)


def test_where_step_times_are_from_is_counted() -> None:
    sources = {"a": "live", "b": "stored", "c": "live", "d": ""}
    instances = [
        msgspec.structs.replace(instance(name, "1", 0), models=[on_instance("tide", "ready", cost_model=source)])
        for name, source in sources.items()
    ]
    model = model_state("tide", dict.fromkeys(sources, "ready"))
    lines = shown_at(120, Snapshot(InstanceStates(instances, []), ModelStates([model]), 1.0))
    assert any(line.startswith("tide") and "live on 2, stored on 1" in line for line in lines)


def on_instance(name: str, state: str, error: str = "", cost_model: str = "") -> InstanceModel:
    return InstanceModel(
        name=name,
        state=state,
        max_model_len=512,
        block_size=16,
        blocks_per_merged=1,
        num_running=0,
        num_waiting=0,
        error=error,
        cost_model=cost_model,
    )


def model_state(name: str, instances: dict[str, str]) -> ModelState:
    return ModelState(
        name=name,
        source=f"/models/{name}",
        dtype="auto",
        max_model_len=None,
        replicas=None,
        ttft_ms=0.0,
        tpot_ms=0.0,
        instances=instances,
        unplaced=None,
        failure=None,
        num_running=0,
        num_waiting=0,
        num_queued=0,
    )


def instance(name: str, incarnation: str, num_migrated_in: int) -> InstanceState:
    load = InstanceLoad(
        age_s=0.1,
        pool_use=0.5,
        num_running=0,
        num_waiting=0,
        num_offline=0,
        num_high=0,
        dispatch_freeness=None,
        migration_freeness=None,
        num_migrating_out=0,
        num_migrating_in=0,
        num_migrated_out=0,
        num_migrated_in=num_migrated_in,
    )
    return InstanceState(
        instance_id=name,
        incarnation=incarnation,
        node_id="node",
        state="ready",
        device="cpu",
        devices=["cpu"],
        pid=1,
        models=[],
        num_merged=10,
        merged_bytes=1,
        metrics_port=0,
        kv_address="",
        migration=True,
        load=load,
    )


def snapshot(taken_s: float, *instances: InstanceState) -> Snapshot:
    return Snapshot(InstanceStates(list(instances), []), ModelStates([]), taken_s)


def test_moves_per_second() -> None:
    first = snapshot(10.0, instance("a", "1", 5), instance("b", "1", 7))
    assert moves_per_s(None, first) is None
    second = snapshot(12.0, instance("a", "1", 9), instance("b", "2", 100), instance("c", "1", 50))
    assert moves_per_s(first, second) == 2.0, "those that are new tell of an earlier time"
    assert moves_per_s(first, first) is None


def test_the_live_view_outlasts_a_gateway_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "INTERVAL_S", 0.0)
    answers: list[InstanceStates | BaseException] = [
        InstanceStates([instance("a", "1", 5)], []),
        OperatorError("The gateway does not answer."),
        InstanceStates([instance("a", "1", 8)], None),
        KeyboardInterrupt(),
    ]

    class Client(AdminClient):
        def instances(self) -> InstanceStates:
            answer = answers.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        def models(self) -> ModelStates:
            return ModelStates([])

    times = iter(range(100))
    output = io.StringIO()
    console = Console(file=output, width=120, height=40, force_terminal=True, color_system=None)
    with Client("http://gateway") as client:
        show_top(client, console, once=False, clock=lambda: float(next(times)))
    text = output.getvalue()
    assert not answers
    assert text.count("http://gateway") == 3
    assert text.count("The gateway does not answer.") == 1
    assert "3.0 moves/s" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["scale"], "Give MODEL and N"),
        (["scale", "tide"], "Give MODEL and N"),
        (["scale", "tide", "some"], "1 or more, or all"),
        (["scale", "tide", "0"], "1 or more, or all"),
        (["scale", "tide", "1", "--instances", "2"], "exclude each other"),
    ],
)
def test_scale_wants_one_thing(arguments: list[str], expected: str) -> None:
    result = CliRunner().invoke(command.app, arguments)
    assert isinstance(result.exception, OperatorError)
    assert "--instances N" in str(result.exception) and expected in str(result.exception)


async def test_who_removes_a_model_hears_of_the_routes_that_name_it(stack: Stack) -> None:
    common = ["--url", stack.url, "--api-key", "root"]
    for arguments in (["route", "set", "chat", MODEL], ["model", "remove", MODEL]):
        result = await asyncio.to_thread(CliRunner().invoke, command.app, [*arguments, *common])
        assert result.exit_code == 0, result.output
    assert f"Model {MODEL} is removed.\nRoutes that still name it: chat." in result.output


def test_commands_reach_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(operations, "drain", lambda client, name, **options: asked.append((client.url, name, options)))
    monkeypatch.setattr(operations, "scale_model", lambda client, *what, **options: asked.append((*what, options)))
    monkeypatch.setattr(operations, "scale_instances", lambda client, *what, **options: asked.append((*what, options)))
    common = ["--url", "http://gateway/v1", "--data-dir", str(tmp_path)]
    for arguments in (
        ["drain", "a", "--undo", "--wait", "--timeout", "9"],
        ["scale", "tide", "3", "--wait"],
        ["scale", "tide", "all"],
        ["scale", "--instances", "4", "--wait", "--timeout", "9"],
    ):
        result = CliRunner().invoke(command.app, [*arguments, *common])
        assert result.exit_code == 0, result.output
    options = {"is_undone": True, "is_forced": False, "wait_s": 9.0, "say": print}
    assert asked == [
        ("http://gateway", "a", options),
        ("tide", 3, {"wait_s": 600.0, "say": print}),
        ("tide", None, {"wait_s": None, "say": print}),
        (4, {"wait_s": 9.0, "say": print}),
    ]


@pytest.mark.parametrize("answering, phase", [({"gateway"}, "ready"), (set[str](), "not ready")])
def test_the_status_is_not_ready_while_a_process_is_silent(answering: set[str], phase: str) -> None:
    gateway = ProcessState(name="gateway", pid=2, num_starts=1, metrics_port=9100)
    state = State(pid=1, phase="ready", address="a", nats_url="n", started_unix_s=0.0, processes=[gateway])
    assert status.as_seen(state, answering).phase == phase
