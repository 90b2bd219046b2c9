"""Public names for models, over HTTP: splits, stickiness, mirrors, fallbacks, and who may change them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from services.gateway.http.errors import ApiError
from services.gateway.openai.parsing import options_of
from services.gateway.openai.schemas import CompletionRequest
from services.gateway.requests.answering import prompts_in_time
from shared.messages.cluster import ModelSpec
from shared.messages.requests import RequestClass
from shared.messages.routes import Arm, Mirror, Route
from shared.runtime.settings import BusSettings
from tests.e2e.otlp_collector import OtlpCollector
from tests.gateway.batching import ended, jsonl, reach
from tests.gateway.conftest import Stack, running_stack
from tests.gateway.peer import until

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def two(nats_settings: BusSettings, checkpoint: Path) -> AsyncIterator[Stack]:
    specs = [ModelSpec("old", str(checkpoint)), ModelSpec("new", str(checkpoint))]
    async with running_stack(nats_settings, specs, api_keys="one,two", admin_api_key="admin") as stack:
        stack.say("Hello world")
        stack.client.headers["Authorization"] = "Bearer one"
        yield stack


async def set_route(stack: Stack, name: str = "public", **fields: object) -> None:
    headers = {"Authorization": "Bearer admin"}
    answer = await stack.client.post("/admin/routes", json={"name": name, **fields}, headers=headers)
    assert answer.status_code == 200, answer.text


async def ask(stack: Stack, model: str = "public", **fields: object) -> str:
    """Which model answered."""
    answer = await stack.client.post("/v1/chat/completions", json={"model": model, "messages": HI, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    answered = stack.peer.submitted[-1].model
    assert answer.headers.get("x-tideway-model", model) == answered
    return answered


async def test_a_route_splits_by_weight_and_a_user_stays(two: Stack) -> None:
    await set_route(two, arms={"old": 1, "new": 1})
    assert {await ask(two) for _ in range(24)} == {"old", "new"}
    await set_route(two, arms={"old": 1, "new": 1}, sticky="user")
    for user in ("ada", "grace", "edsger"):
        assert len({await ask(two, user=user) for _ in range(5)}) == 1
    listed = (await two.client.get("/v1/models")).json()["data"]
    assert {card["id"]: card["root"] for card in listed}["public"] == "old, new"
    assert (await two.client.get("/v1/models/public")).json()["id"] == "public"
    counted = await two.post("/tokenize", model="public", prompt="one two")
    assert counted.json()["count"] > 0
    await two.until_metrics('tideway_gateway_route_requests_total{model="new",outcome="ok",role="arm",route="public"}')


async def test_a_models_own_name_may_be_routed_and_given_back(two: Stack) -> None:
    await set_route(two, "old", arms={"new": 1})
    assert await ask(two, "old") == "new"
    assert [card["id"] for card in (await two.client.get("/v1/models")).json()["data"]].count("old") == 1
    headers = {"Authorization": "Bearer admin"}
    assert (await two.client.delete("/admin/routes/old", headers=headers)).status_code == 200
    assert await ask(two, "old") == "old"
    assert (await two.client.delete("/admin/routes/old", headers=headers)).status_code == 404
    audit = (await two.client.get("/admin/audit", headers=headers)).json()["actions"]
    assert "DELETE /admin/routes/old" in [action["action"] for action in audit]


async def test_a_request_without_a_model_takes_the_route_of_the_only_one(
    nats_settings: BusSettings, checkpoint: Path
) -> None:
    async with running_stack(nats_settings, [ModelSpec("old", str(checkpoint))], admin_api_key="admin") as stack:
        stack.say("Hello world")
        await set_route(stack, "old", arms={"old": 1})
        for path, body in (
            ("/v1/chat/completions", {"messages": HI}),
            ("/v1/responses", {"input": "Hi"}),
            ("/v1/messages", {"messages": HI, "max_tokens": 9}),
        ):
            for named in ({}, {"model": None}):
                answer = await stack.client.post(path, json=body | named)
                assert answer.status_code == 200, answer.text
                assert (answer.json()["model"], answer.headers["x-tideway-model"]) == ("old", "old")


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    with closing(OtlpCollector()) as collector:
        yield collector


async def test_a_mirror_is_asked_uncharged_and_unseen(
    nats_settings: BusSettings, checkpoint: Path, collector: OtlpCollector
) -> None:
    """Its spans are the mirror's own, in the trace of the request."""
    specs = [ModelSpec("old", str(checkpoint)), ModelSpec("new", str(checkpoint))]
    settings = {"api_keys": "one::1000", "otlp_endpoint": collector.endpoint}
    async with running_stack(nats_settings, specs, **settings) as stack:
        stack.say("Hello world")
        stack.client.headers["Authorization"] = "Bearer one"
        routes = stack.gateway.context.routes
        await routes.put(Route(name="public", arms=(Arm(model="old"),), mirrors=(Mirror(model="new", share=1.0),)))
        answer = await stack.client.post(
            "/v1/completions",
            json={"model": "public", "prompt": [5] * 40, "stream": True, "seed": 3, "ttft_ms": 300, "tpot_ms": 50},
        )
        assert answer.text.count("data: ") > 1
        await stack.until_metrics(
            'tideway_gateway_route_requests_total{model="new",outcome="ok",role="mirror",route="public"} 1.0',
            'tideway_gateway_requests_total{class="mirror",model="new",outcome="ok"} 1.0',
        )
        own, mirrored = sorted(stack.peer.submitted, key=lambda request: request.is_mirror)
        assert (own.model, mirrored.model, mirrored.is_mirror) == ("old", "new", True)
        assert mirrored.request_class is RequestClass.OFFLINE and own.request_class is RequestClass.ONLINE
        assert mirrored.prompt == own.prompt and mirrored.sampling == own.sampling
        trace_id = own.traceparent.split("-")[1]
        assert mirrored.traceparent.split("-")[1] == trace_id and mirrored.traceparent != own.traceparent
        assert (own.ttft_objective_s, own.tpot_objective_s) == (0.3, 0.05)
        assert (mirrored.ttft_objective_s, mirrored.tpot_objective_s) == (0.0, 0.0)
        (key,) = stack.gateway.context.admission._keys.values()
        assert key.window.total(stack.gateway.context.bus.now()) == 40 + len(stack.ids("Hello world")) + 1


async def test_what_no_client_waits_for_has_its_time_all_the_same(two: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mirrored requests, lines of batches: a tokenizer that never comes."""
    context = two.gateway.context
    monkeypatch.setattr(context.tokenizers, "get", lambda spec: asyncio.Event().wait())
    message = CompletionRequest(model="old", prompt="x")
    options = options_of(message, {}, 0.01)
    with pytest.raises(ApiError) as late:
        await prompts_in_time(context, context.catalog.spec("old"), message, options)
    assert late.value.status == 408


async def test_who_is_down_is_passed_over(two: Stack) -> None:
    await set_route(two, arms={"old": 1}, fallbacks=["new"])
    assert await ask(two) == "old"
    await two.peer.add_instance("a", "new")
    catalog = two.gateway.context.catalog
    await until(lambda: not catalog.is_served("old"), "the model to be down")
    assert await ask(two) == "new"
    headers = {"Authorization": "Bearer admin"}
    (state,) = (await two.client.get("/admin/routes", headers=headers)).json()["routes"]
    assert state["down"] == ["old"] and state["fallbacks"] == ["new"]
    await two.until_metrics('role="fallback",route="public"} 1.0')


async def test_a_batch_may_name_a_route(two: Stack) -> None:
    await set_route(two, arms={"new": 1})
    body = {"model": "public", "prompt": "x", "max_tokens": 3}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    async with two.openai("one") as client:
        file = await client.files.create(file=("lines.jsonl", jsonl([line])), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        batch = await reach(client, batch.id, ended)
    assert batch.status == "completed" and [request.model for request in two.peer.submitted] == ["new"]


async def test_what_is_wrong_with_a_route_is_told(two: Stack) -> None:
    admin = {"Authorization": "Bearer admin"}
    for body, param in (
        ({"name": "public", "arms": {}}, "arms"),
        ({"name": "public", "arms": {"old": 0}}, "arms"),
        ({"name": "public", "arms": {"old": -1}}, "arms[...]"),
        ({"name": "a b", "arms": {"old": 1}}, "name"),
        ({"name": "a\n", "arms": {"old": 1}}, "name"),
        ({"name": "a/../old", "arms": {"old": 1}}, "name"),
        ({"name": "a/", "arms": {"old": 1}}, "name"),
        ({"name": "public", "arms": {"nobody": 1}}, "arms"),
        ({"name": "public", "arms": {"old": 1}, "mirrors": {"nobody": 0.5}}, "mirrors"),
        ({"name": "public", "arms": {"old": 1}, "fallbacks": ["nobody"]}, "fallbacks"),
        ({"name": "public", "arms": {"old": 1}, "mirrors": {"new": 2}}, "mirrors[...]"),
        ({"name": "public", "arms": {"old": 1}, "sticky": "hair"}, "sticky"),
    ):
        answer = await two.client.post("/admin/routes", json=body, headers=admin)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert (await two.client.post("/admin/routes", json={"name": "p", "arms": {"old": 1}})).status_code == 401
    assert (await two.client.get("/admin/routes", headers=admin)).json() == {"routes": []}


async def test_one_of_several_models_has_to_be_named(two: Stack) -> None:
    answer = await two.client.post(
        "/v1/chat/completions", json={"messages": HI}, headers={"authorization": "Bearer one"}
    )
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == ("model", "missing_field")
