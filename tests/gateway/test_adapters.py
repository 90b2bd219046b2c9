"""LoRA adapters over HTTP: models of their own, whose requests go to the base model with the adapter's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.messages.requests import Adapter, RequestClass
from tests.gateway.batching import ended, line, reach, start
from tests.gateway.conftest import MODEL, Stack


async def load(stack: Stack, name: str, source: Path, **more: object) -> None:
    body = {"name": name, "source": str(source), "base": MODEL, **more}
    answer = await stack.client.post("/admin/models", json=body)
    assert answer.status_code == 200, answer.text


async def test_an_adapter_is_a_model_of_its_own(stack: Stack, tmp_path: Path) -> None:
    stack.peer.script = lambda request: [72, 73]
    await load(stack, "poet", tmp_path, ttft_ms=250.0, tpot_ms=40.0)
    card = (await stack.client.get("/v1/models/poet")).json()
    assert (card["id"], card["parent"], card["root"], card["created"]) == ("poet", MODEL, str(tmp_path), 7)
    listed = (await stack.client.get("/v1/models")).json()["data"]
    assert [(one["id"], one["parent"]) for one in listed] == [(MODEL, None), ("poet", MODEL)]

    chat = {"model": "poet", "messages": [{"role": "user", "content": "Hello"}]}
    answer = await stack.client.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "poet"
    await stack.client.post("/v1/completions", json={"model": "poet", "prompt": "a", "tpot_ms": 90})
    await stack.client.post("/v1/completions", json={"model": "poet", "prompt": "a", "service_tier": "flex"})
    await stack.client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
    online, asked, offline, base = stack.peer.submitted
    assert online.adapter == Adapter("poet", "1", str(tmp_path)) and online.model == MODEL
    assert (online.ttft_objective_s, online.tpot_objective_s) == (0.25, 0.04)
    assert (asked.ttft_objective_s, asked.tpot_objective_s) == (0.25, 0.09)
    assert offline.request_class is RequestClass.OFFLINE and offline.ttft_objective_s == 0
    assert base.adapter is None and base.ttft_objective_s == 0
    metrics = (await stack.client.get("/metrics")).text
    assert 'tideway_gateway_requests_total{class="online",model="poet",outcome="ok"} 2.0' in metrics

    [shown] = (await stack.client.get("/admin/models")).json()["adapters"]
    assert (shown["name"], shown["base"], shown["rank"], shown["loaded_on"]) == ("poet", MODEL, 4, [])
    assert (await stack.client.delete("/admin/models/poet")).status_code == 200
    gone = await stack.client.post("/v1/completions", json={"model": "poet", "prompt": "a"})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")


async def test_vllms_endpoints(stack: Stack, tmp_path: Path) -> None:
    body = {"lora_name": "poet", "lora_path": str(tmp_path)}
    loaded = await stack.client.post("/v1/load_lora_adapter", json=body)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'poet' added successfully.")
    again = await stack.client.post("/v1/load_lora_adapter", json=body)
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    replaced = await stack.client.post("/v1/load_lora_adapter", json=body | {"load_inplace": True})
    assert replaced.status_code == 200, replaced.text
    absent = await stack.client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/nowhere"})
    assert (absent.status_code, absent.json()["error"]["param"]) == (404, "lora_path")
    for field, value in (("dtype", "float32"), ("tool_format", "hermes")):
        odd = await stack.client.post(
            "/admin/models", json={"name": "x", "source": str(tmp_path), "base": MODEL, field: value}
        )
        assert (odd.status_code, odd.json()["error"]["param"]) == (400, field)
    unloaded = await stack.client.post("/v1/unload_lora_adapter", json={"lora_name": "poet"})
    assert unloaded.status_code == 200
    unknown = await stack.client.post("/v1/unload_lora_adapter", json={"lora_name": "poet"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "lora_name")


async def test_a_batch_of_an_adapter_and_its_base_model_asks_for_tokens_of_one_model(
    stack: Stack, tmp_path: Path
) -> None:
    stack.peer.script = lambda request: [72]
    await load(stack, "poet", tmp_path)
    client = stack.openai()
    batch = await start(client, [line(number, model=name) for number, name in enumerate(["poet", MODEL, "poet"])])
    done = await reach(client, batch.id, ended)
    assert done.status == "completed" and len(stack.peer.submitted) == 3, done
    assert {demand.model for query in stack.peer.grant_queries for demand in query.demands} == {MODEL}
    assert sorted(request.public_model for request in stack.peer.submitted) == ["poet", "poet", MODEL]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/admin/models", {"name": "a b", "source": "org/a"}),
        ("/v1/load_lora_adapter", {"lora_name": "a/.b", "lora_path": "org/a"}),
    ],
)
async def test_a_name_that_cannot_be_is_told_in_words(stack: Stack, path: str, body: dict[str, str]) -> None:
    answer = await stack.client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, next(iter(body)))
    assert "1 to 128 letters, digits and . _ : / -" in error["message"] and "regex" not in error["message"]
