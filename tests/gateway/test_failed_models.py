"""A model that cannot be loaded: its requests are refused at once with the reason."""

from __future__ import annotations

import msgspec
import pytest

from shared.messages.catalogue import MODELS, PLANS
from shared.messages.channels import bucket_key
from shared.messages.cluster import InstanceInfo, LoadedModel
from tests.gateway.conftest import MODEL, Stack
from tests.gateway.peer import until

REASON = "/models/tide is quantised"


async def set_state(stack: Stack, *models: LoadedModel) -> None:
    info: InstanceInfo = stack.gateway.context.catalog.instances["a"]
    await stack.peer.put_instance(msgspec.structs.replace(info, models=list(models)))
    await until(lambda: stack.gateway.context.catalog.instances["a"].models == list(models), "the registry")


def failed(*, is_final: bool) -> LoadedModel:
    return LoadedModel(name=MODEL, state="failed", error=REASON, is_final=is_final)


@pytest.mark.parametrize("is_final", [True, False])
async def test_requests_are_refused_with_the_reason(stack: Stack, is_final: bool) -> None:
    await set_state(stack, failed(is_final=is_final))
    answers = [
        await stack.post("/v1/completions", prompt="x"),
        await stack.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}]),
    ]
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (503, "model")
        assert REASON in error["message"]
        assert error["code"] == ("model_failed" if is_final else "unavailable")
        assert (answer.headers.get("x-should-retry"), "retry-after" in answer.headers) == (
            ("false", False) if is_final else (None, True)
        )
    assert stack.peer.submitted == []
    assert (await stack.client.get("/v1/models")).json()["data"] == []
    assert (await stack.client.get(f"/v1/models/{MODEL}")).status_code == 503
    [shown] = (await stack.client.get("/admin/models")).json()["models"]
    assert REASON in shown["failure"] and shown["instances"] == {"a": "failed"}
    await set_state(stack, LoadedModel(name=MODEL, state="loading"))
    assert [model["id"] for model in (await stack.client.get("/v1/models")).json()["data"]] == [MODEL]


async def test_requests_that_wait_for_it_end_when_it_fails(stack: Stack) -> None:
    stack.peer.automatic = False
    await set_state(stack, LoadedModel(name=MODEL, state="loading"))
    waiting = stack.read()
    await stack.next_request()
    await set_state(stack, failed(is_final=True))
    await waiting.end()
    assert waiting.status == 503 and REASON.encode() in waiting.failed_body


async def test_a_checkpoint_that_placement_cannot_use(stack: Stack) -> None:
    await set_state(stack)
    plan = msgspec.structs.replace(stack.peer.plan, unplaced={MODEL: REASON}, unusable={MODEL: REASON})
    await (await stack.peer.bus.key_value(PLANS)).put("current", plan)
    await until(lambda: stack.gateway.context.catalog.failure(MODEL), "the plan")
    answer = await stack.post("/v1/completions", prompt="x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_failed")


async def test_a_model_on_demand_is_listed_with_its_state_and_its_failure_is_told_to_those_that_wait(
    stack: Stack,
) -> None:
    catalog = stack.gateway.context.catalog
    spec = msgspec.structs.replace(catalog.spec(MODEL), on_demand=True)
    await (await stack.peer.bus.key_value(MODELS)).put(bucket_key(MODEL), spec)
    await until(lambda: catalog.is_on_demand(MODEL), "the model")

    async def listed() -> list[str]:
        return [model["state"] for model in (await stack.client.get("/v1/models")).json()["data"]]

    for states, shown in ((("ready",), "ready"), (("host",), "host"), ((), "disk"), (("loading",), "loading")):
        await set_state(stack, *(LoadedModel(name=MODEL, state=state) for state in states))
        assert await listed() == [shown]
        assert (await stack.client.get("/ready")).status_code == 200
    stack.peer.automatic = False
    waiting = stack.read()
    await stack.next_request()
    await set_state(stack, failed(is_final=False))
    await waiting.end()
    assert waiting.status == 503 and REASON.encode() in waiting.failed_body
    assert await listed() == ["failed"]
    await set_state(stack)
    plan = msgspec.structs.replace(stack.peer.plan, asleep={MODEL: "no_room"})
    await (await stack.peer.bus.key_value(PLANS)).put("current", plan)
    await until(lambda: catalog.failure(MODEL), "the plan")
    answer = await stack.post("/v1/completions", prompt="x")
    assert (
        answer.status_code == 503 and "no instance has memory for it" in answer.text and "retry-after" in answer.headers
    )
    assert (await stack.client.get("/ready")).status_code == 503
