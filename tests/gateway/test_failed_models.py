"""A model that cannot be loaded: its requests are refused at once with the reason."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest

from services.gateway.streams import recovery
from shared.messages.catalogue import MODELS, NODES, PLANS
from shared.messages.channels import bucket_key
from shared.messages.cluster import InstanceCrash, InstanceInfo, InstancePlan, LoadedModel, NodeInfo
from tests.gateway.checkpoints import byte_level_tokenizer, write_checkpoint
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


def waiting_for_a_server() -> LoadedModel:
    return LoadedModel(name=MODEL, state="loading", error=REASON)


async def test_requests_for_a_model_whose_server_is_down_are_refused_with_the_reason(stack: Stack) -> None:
    await set_state(stack, waiting_for_a_server())
    answer = await stack.post("/v1/completions", prompt="x")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (503, "unavailable", "model")
    assert REASON in error["message"] and "retry-after" in answer.headers
    [shown] = (await stack.client.get("/admin/models")).json()["models"]
    assert shown["state"] == "failed" and REASON in shown["failure"]


async def put_crash(stack: Stack, num_in_a_row: int) -> None:
    """The node of instance "a" tells how often it ended; 0: it is ready."""
    crashes = {"a": InstanceCrash("exited with code 1", num_in_a_row, num_in_a_row)} if num_in_a_row else {}
    node = NodeInfo(node_id="node", hostname="h", num_instances=1, memory_bytes=1, crashes=crashes)
    await (await stack.peer.bus.key_value(NODES)).put("node", node)
    await until(lambda: stack.gateway.context.catalog.crashes == crashes, "the node")


@pytest.mark.parametrize("is_alive", [False, True])
async def test_requests_for_a_model_whose_instance_crashes_again_and_again_are_refused_with_its_end(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    monkeypatch.setattr(recovery, "PATIENCE_S", 1.0)
    stack.peer.automatic = False
    instance = InstancePlan("a", "node", [stack.gateway.context.catalog.spec(MODEL)], pool_bytes=0, merged_bytes=1)
    plan = msgspec.structs.replace(stack.peer.plan, instances=[instance])
    await (await stack.peer.bus.key_value(PLANS)).put("current", plan)
    await set_state(stack, *([LoadedModel(name=MODEL, state="loading")] if is_alive else []))
    await put_crash(stack, 1)
    waiting = stack.read()
    await stack.next_request()
    assert stack.gateway.context.catalog.failure(MODEL) is None, "once may be chance"
    await put_crash(stack, 2)
    await waiting.end()
    assert waiting.status == 503 and b"exited with code 1 (2 times in a row)" in waiting.failed_body
    error = (await stack.post("/v1/completions", prompt="x")).json()["error"]
    assert error["code"] == "unavailable"
    assert error["message"] == f"The model '{MODEL}' cannot be served now: a exited with code 1 (2 times in a row)"
    another = msgspec.structs.replace(instance, instance_id="b")
    await (await stack.peer.bus.key_value(PLANS)).put(
        "current", msgspec.structs.replace(plan, instances=[instance, another])
    )
    await until(lambda: stack.gateway.context.catalog.failure(MODEL) is None, "another instance that may load it")
    await (await stack.peer.bus.key_value(PLANS)).put("current", plan)
    await until(lambda: stack.gateway.context.catalog.failure(MODEL), "the plan")
    await put_crash(stack, 0)
    assert stack.gateway.context.catalog.failure(MODEL) is None


async def test_a_model_whose_instances_end_while_they_load_it_is_shown_with_the_last_end(stack: Stack) -> None:
    instance = InstancePlan("a", "node", [stack.gateway.context.catalog.spec(MODEL)], pool_bytes=0, merged_bytes=1)
    plan = msgspec.structs.replace(stack.peer.plan, instances=[instance])
    await (await stack.peer.bus.key_value(PLANS)).put("current", plan)
    await put_crash(stack, 1)
    await set_state(stack, LoadedModel(name=MODEL, state="loading"))

    async def shown() -> dict[str, object]:
        [model] = (await stack.client.get("/admin/models")).json()["models"]
        return {name: model[name] for name in ("state", "failure")}

    assert await shown() == {"state": "loading", "failure": "a exited with code 1"}
    await set_state(stack, LoadedModel(name=MODEL, state="ready"))
    assert await shown() == {"state": "ready", "failure": None}


@pytest.mark.parametrize("has_begun", [False, True])
async def test_requests_wait_for_a_server_that_is_down_as_long_as_for_any_instance(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    monkeypatch.setattr(recovery, "PATIENCE_S", 1.0)
    monkeypatch.setattr(recovery, "RECOVERY_PATIENCE_S", 2.0)
    stack.peer.automatic = False
    waiting = stack.read()
    request = await stack.next_request()
    if has_begun:
        stack.peer.emit(request, 0, stack.ids("Hello"))
        await until(lambda: waiting.text, "output")
        stack.peer.lose(request, request.epoch)
    await set_state(stack, waiting_for_a_server())
    began_s = time.monotonic()
    await waiting.end()
    assert time.monotonic() - began_s >= (1.5 if has_begun else 0.5)
    if has_begun:
        assert waiting.error is not None and REASON in waiting.error["message"]
    else:
        assert waiting.status == 503 and REASON.encode() in waiting.failed_body


async def test_a_checkpoint_that_placement_cannot_use(stack: Stack) -> None:
    await set_state(stack)
    plan = msgspec.structs.replace(stack.peer.plan, unplaced={MODEL: REASON}, unusable={MODEL: REASON})
    await (await stack.peer.bus.key_value(PLANS)).put("current", plan)
    await until(lambda: stack.gateway.context.catalog.failure(MODEL), "the plan")
    answer = await stack.post("/v1/completions", prompt="x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_failed")


BROKEN_AT_TOOLS = "{% for m in messages %}{{ m.content.strip() }}{% endfor %}{% if tools %}{{ tools.x.y }}{% endif %}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer_config.json": '{"chat_template": "{% for m in %}"}'}, "The chat template of"),
        ({"tokenizer_config.json": '{"chat_template": "{{ messages.x.y }}"}'}, "a chat with a user's message"),
        ({"tokenizer_config.json": '{"chat_template": "{{ raise_exception(0) }}"}'}, "a chat with a user's message"),
        ({"chat_template.jinja": BROKEN_AT_TOOLS}, "a chat with tools"),
        ({"tokenizer.json": "{}"}, "tokenizer"),
        ({"config.json": {"vocab_size": 100}}, "its vocabulary 100"),
    ],
)
async def test_what_could_not_serve_chats_is_refused_before_it_is_added(
    stack: Stack, tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    folder = write_checkpoint(tmp_path / "model", byte_level_tokenizer(), GOOD)
    add = {"name": "new", "source": str(folder)}
    assert (await stack.client.post("/admin/models", json=add)).status_code == 200
    assert (await stack.client.delete("/admin/models/new")).status_code in (200, 404)
    for name, content in change.items():
        file = folder / name
        text = json.dumps(json.loads(file.read_text()) | content) if isinstance(content, dict) else str(content)
        file.write_text(text)
    answer = await stack.client.post("/admin/models", json=add | {"name": "bad"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "source") and reason in error["message"], error
    assert "bad" not in [model["name"] for model in (await stack.client.get("/admin/models")).json()["models"]]


async def test_one_that_embeds_needs_no_chat_template(stack: Stack, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", byte_level_tokenizer(), "{{ raise_exception('documents only') }}")
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"architectures": ["LlamaModel"]}
    for vocab_size, status in ((config["vocab_size"], 200), (100, 400)):
        file.write_text(json.dumps(config | {"vocab_size": vocab_size}))
        answer = await stack.client.post("/admin/models", json={"name": f"v{vocab_size}", "source": str(folder)})
        assert answer.status_code == status, answer.text
    assert "its vocabulary 100" in answer.json()["error"]["message"]


async def test_one_that_failed_is_corrected_under_its_name(stack: Stack, tmp_path: Path) -> None:
    await set_state(stack, failed(is_final=True))
    await until(lambda: stack.gateway.context.catalog.failure(MODEL), "the failure")
    folder = write_checkpoint(tmp_path / "model", byte_level_tokenizer(), GOOD)
    answer = await stack.client.post("/admin/models", json={"name": MODEL, "source": str(folder)})
    assert answer.status_code == 200, answer.text
    entry = await (await stack.peer.bus.key_value(MODELS)).get(bucket_key(MODEL))
    assert entry is not None and entry.value.source == str(folder)
    # One that is served is not replaced so.
    await set_state(stack, LoadedModel(name=MODEL, state="ready"))
    answer = await stack.client.post("/admin/models", json={"name": MODEL, "source": str(folder)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (409, "name")


GOOD = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"


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
    plan = msgspec.structs.replace(plan, unplaced={MODEL: REASON}, unusable={MODEL: REASON})
    await (await stack.peer.bus.key_value(PLANS)).put("current", plan)
    await until(lambda: REASON in catalog.failure(MODEL).message, "that it cannot be read")
