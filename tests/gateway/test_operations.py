"""Everything around generation: models, tokenize, health, admin, keys, metrics, traces, start and stop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, format_span_id, format_trace_id
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.admin import cluster_loads
from services.gateway.openai.parsing import MAX_SEQUENCE_TOKENS
from services.gateway.requests import other_routes
from services.gateway.service import GatewayService
from services.gateway.text.tokenization import ModelTokenizer
from shared.bus.nats_bus import NatsBus
from shared.messages.catalogue import CLEAR_PREFIX_CACHE, NODES
from shared.messages.cluster import (
    InstancePlan,
    ModelSpec,
    NodeInfo,
    PlacementPlan,
)
from shared.messages.requests import FinishReason
from shared.placement.plan import Group
from shared.runtime.settings import BusSettings, GatewaySettings, SettingsError
from shared.runtime.telemetry import start_telemetry
from tests.conftest import free_port
from tests.gateway.checkpoints import MAX_MODEL_LEN
from tests.gateway.conftest import MODEL, Stack, running_gateway, running_stack
from tests.gateway.peer import until

HI = [{"role": "user", "content": "Hi"}]


async def test_models(stack: Stack, checkpoint: Path) -> None:
    async with stack.openai() as client:
        [model] = [model async for model in client.models.list()]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("ocean/blue")
    raw = (await stack.client.get(f"/v1/models/{MODEL}")).json()
    assert raw == {
        "id": MODEL,
        "object": "model",
        "created": model.created,
        "owned_by": "tideway",
        "state": "ready",
        "root": str(checkpoint),
        "parent": None,
        "max_model_len": MAX_MODEL_LEN,
    }


async def test_the_only_model_need_not_be_named(stack: Stack) -> None:
    for path, body in {
        "/v1/chat/completions": {"messages": HI},
        "/v1/completions": {"prompt": "Hi"},
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": {"messages": HI, "max_tokens": 5},
    }.items():
        for named in ({}, {"model": ""}):
            answer = await stack.client.post(path, json=body | named)
            assert answer.status_code == 200 and answer.json()["model"] == MODEL, answer.text


async def test_tokenize_and_detokenize(stack: Stack) -> None:
    text = "The tide 😀"
    ids = stack.ids(text)
    bos = stack.tokenizer.token_to_id("<s>")
    for prefix in ("", "/v1"):
        answer = (await stack.post(prefix + "/tokenize", prompt=text, return_token_strs=True)).json()
        assert answer["tokens"] == [bos, *ids]
        assert (answer["count"], answer["max_model_len"]) == (len(ids) + 1, MAX_MODEL_LEN)
        assert answer["token_strs"] == [stack.tokenizer.id_to_token(i) for i in [bos, *ids]]
        back = await stack.post(prefix + "/detokenize", tokens=ids)
        assert back.json() == {"prompt": text}
    bare = (await stack.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()
    assert (bare["tokens"], bare["token_strs"]) == (ids, None)
    chat = (await stack.post("/tokenize", messages=HI, add_generation_prompt=False)).json()
    assert chat["tokens"] == stack.tokenizer.encode("<|user|>Hi<|end|>", add_special_tokens=False).ids
    assert (await stack.post("/tokenize", prompt="x", messages=HI)).status_code == 400
    assert (await stack.post("/detokenize", tokens=[10**6])).status_code == 400
    assert (await stack.post("/detokenize", tokens=[])).json() == {"prompt": ""}
    error = (await stack.post("/detokenize", tokens=[5] * (MAX_SEQUENCE_TOKENS + 1))).json()["error"]
    assert error["param"] == "tokens" and f"the limit is {MAX_SEQUENCE_TOKENS}" in error["message"]


async def test_the_tokens_of_a_long_text_are_spelled_out_on_a_thread(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    spell = ModelTokenizer.token_piece

    def noting(tokenizer: ModelTokenizer, token_id: int) -> str:
        threads.add(threading.current_thread())
        return spell(tokenizer, token_id)

    monkeypatch.setattr(ModelTokenizer, "token_piece", noting)
    answer = (await stack.post("/tokenize", prompt="x " * 2000, return_token_strs=True)).json()
    assert len(answer["token_strs"]) == answer["count"] >= 2000
    assert threads and threading.main_thread() not in threads
    monkeypatch.setattr(other_routes, "MAX_SEQUENCE_TOKENS", 1999)
    error = (await stack.post("/tokenize", prompt="x " * 2000, return_token_strs=True)).json()["error"]
    assert error["param"] == "return_token_strs" and "the limit is 1999" in error["message"]
    assert (await stack.post("/tokenize", prompt="x " * 2000)).status_code == 200


async def test_a_long_prompt_is_tokenised_on_a_thread(stack: Stack) -> None:
    text = "the tide " * 100_000
    num_beats = 0

    async def heartbeat() -> None:
        nonlocal num_beats
        while True:
            await asyncio.sleep(0.001)
            num_beats += 1

    beats = asyncio.create_task(heartbeat())
    answer = (await stack.post("/tokenize", prompt=text)).json()
    beats.cancel()
    assert answer["count"] > 100_000
    assert num_beats > 20, "the event loop went on"


async def test_health_and_readiness(nats_settings: BusSettings, checkpoint: Path) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, instance=False) as stack:
        assert (await stack.client.get("/health")).status_code == 200
        assert (await stack.client.get("/ping")).status_code == 200
        not_ready = await stack.client.get("/ready")
        assert (not_ready.status_code, not_ready.json()) == (503, {"ready": False, "models": [], "problems": []})
        await stack.peer.add_instance("a", MODEL, state="starting")
        await stack.peer.add_instance("b", MODEL, "a-model-nobody-configured")
        await until(lambda: len(stack.gateway.context.catalog.instances) == 2, "instances")
        ready = await stack.client.get("/ready")
        assert (ready.status_code, ready.json()) == (200, {"ready": True, "models": [MODEL], "problems": []})
        assert set((await stack.client.get("/version")).json()) == {"version"}
        assert (await stack.client.get("/openapi.json")).json()["openapi"] == "3.1.0"


async def test_admin(stack: Stack, checkpoint: Path, plain_checkpoint: Path) -> None:
    client, peer = stack.client, stack.peer
    body = {"name": "org/second", "source": str(plain_checkpoint), "replicas": 1, "ttft_ms": 300, "tpot_ms": 25.5}
    plan = PlacementPlan(7, [InstancePlan("a", "node", [], 1, 1)], {"org/second": "no memory"})
    peer.plan = plan
    added = await client.post("/admin/models", json=body)
    assert added.status_code == 200
    assert (added.json()["version"], added.json()["unplaced"]) == (7, {"org/second": "no memory"})
    await until(lambda: len(stack.gateway.context.catalog.models) == 2, "model")
    assert {m["id"] for m in (await client.get("/v1/models")).json()["data"]} == {MODEL, "org/second"}
    answer = await client.post("/v1/chat/completions", json={"model": "org/second", "messages": HI, "max_tokens": 1})
    assert answer.status_code == 200, "a checkpoint without a chat template has the default one"
    prompt = peer.submitted[-1].prompt
    decoded = await client.post(
        "/detokenize", json={"model": "org/second", "tokens": list(memoryview(prompt).cast("i"))}
    )
    assert decoded.json()["prompt"].strip() == "User: Hi\nAssistant:"
    states = {state["name"]: state for state in (await client.get("/admin/models")).json()["models"]}
    assert states[MODEL]["instances"] == {"a": "ready"}
    assert (states["org/second"]["instances"], states["org/second"]["replicas"]) == ({}, 1)
    assert (states["org/second"]["ttft_ms"], states["org/second"]["tpot_ms"]) == (300, 25.5)
    assert (states[MODEL]["ttft_ms"], states[MODEL]["tpot_ms"]) == (0, 0)
    shown = (await client.get("/admin/plan")).json()
    assert (shown["version"], shown["replacement"]["mode"]) == (7, "advise")
    begun = await client.post("/admin/plan", json={"action": "search"})
    assert (begun.status_code, begun.json()["searching"]) == (200, "search")
    refused = await client.post("/admin/plan", json={"action": "roll_back"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, "action")
    assert (await client.post("/admin/plan", json={"action": "jump"})).status_code == 400
    [_, __, audited, *_rest] = (await client.get("/admin/audit")).json()["actions"]
    assert (audited["action"], audited["body"]) == ("POST /admin/plan", '{"action":"search"}')
    group = {"node_id": "n", "devices": [0, 1], "models": [MODEL]}
    assert (await client.post("/admin/plan", json={"action": "set", "groups": [group]})).status_code == 200
    assert peer.changed_plan.groups == (Group("n", (0, 1), (MODEL,)),)
    for body in ({"action": "set"}, {"action": "search", "groups": [group]}, {"action": "set", "groups": []}):
        refused = await client.post("/admin/plan", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "groups")
    removed = await client.delete("/admin/models/org/second")
    assert removed.json()["version"] == 8
    await until(lambda: len(stack.gateway.context.catalog.models) == 1, "removal")
    assert (await client.delete("/admin/models/org/second")).status_code == 404
    conflict = await client.post("/admin/models", json={"name": MODEL, "source": str(checkpoint)})
    assert (conflict.status_code, conflict.json()["error"]["param"]) == (409, "name")
    assert (await client.post("/admin/models", json={"name": "x", "source": "/nowhere"})).status_code == 400
    assert (await client.post("/admin/models", json={"name": "../x y", "source": "z"})).status_code == 400
    [instance] = (await client.get("/admin/instances")).json()["instances"]
    assert (instance["instance_id"], instance["models"][0]["name"]) == ("a", MODEL)
    await (await peer.bus.key_value(NODES)).put(
        "node", NodeInfo(node_id="node", hostname="host", num_instances=1, memory_bytes=2**30)
    )
    assert (await client.get("/admin/nodes")).json()["nodes"][0]["memory_bytes"] == 2**30


async def test_admin_without_placement(nats_settings: BusSettings) -> None:
    async with (
        running_gateway(nats_settings) as gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}") as client,
    ):
        answer = await client.post("/admin/models", json={"name": "x", "source": "y"})
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert (await client.get("/admin/plan")).status_code == 404
        assert (await client.get("/admin/models")).json() == {"models": [], "adapters": [], "queued_age_s": None}


async def test_api_keys(nats_settings: BusSettings, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# the team\nfrom-file:1\n\nmetered::40 # tokens a minute\n")
    settings = {"api_keys": "free,one:1,calm:::normal", "api_keys_file": str(file), "admin_api_key": "root"}
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))], **settings) as stack:
        stack.say("Hello world")

        async def ask(key: str | None, path: str = "/v1/completions", **body: object) -> httpx.Response:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            full = {"model": MODEL, "prompt": "x", **body}
            return await stack.client.post(path, json=full, headers=headers)

        for key in (None, "wrong", "root", "one:1"):
            refused = await ask(key)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
        for odd in (b"Bearer \xc3\xa9", b"Basic ZnJlZTo=", b"free", b"Bearer"):
            assert (await stack.client.get("/v1/models", headers={"authorization": odd})).status_code == 401
        for path in ("/v1/models", "/admin/models"):
            assert (await stack.client.get(path)).status_code == 401
        assert (await ask(None, "/tokenize")).status_code == 401
        assert (await stack.client.get("/health")).status_code == 200
        assert (await ask("free")).status_code == 200
        async with stack.openai("one") as client:
            assert (await client.completions.create(model=MODEL, prompt="x")).choices[0].text == "Hello world"
        admin = {"authorization": "Bearer root"}
        assert (await stack.client.get("/admin/models", headers=admin)).status_code == 200
        assert (await stack.client.get("/admin/models", headers={"authorization": "Bearer free"})).status_code == 401

        refused = await ask("calm", priority="high")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "priority_not_allowed")
        assert (await ask("calm", service_tier="priority")).status_code == 403
        assert (await ask("calm", priority=0)).status_code == 200
        assert (await ask("free", priority=-1)).status_code == 200
        assert stack.peer.submitted[-1].priority == "high"

        stack.peer.automatic = False
        number = len(stack.peer.submitted)
        for i, key in enumerate(("one", "from-file")):
            reader = stack.read(headers={"authorization": f"Bearer {key}"})
            request = await stack.next_request(number + i)
            over = await ask(key)
            assert over.status_code == 429
            assert "1 requests in flight" in over.json()["error"]["message"]
            stack.peer.emit(request, 0, stack.ids("x"), FinishReason.STOP)
            await reader.end()
        stack.peer.automatic = True
        answers = [await ask("metered", prompt=[5] * 12) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
        assert "40 tokens per minute" in answers[2].json()["error"]["message"]
        assert 1 <= int(answers[2].headers["retry-after"]) <= 60


async def test_admin_is_closed_with_keys_but_no_admin_key(nats_settings: BusSettings, checkpoint: Path) -> None:
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))], api_keys="a") as stack:
        answer = await stack.client.get("/admin/models", headers={"authorization": "Bearer a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_closed")


async def test_the_prefix_cache_is_reset_in_developer_mode_only(nats_settings: BusSettings, checkpoint: Path) -> None:
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))], developer_mode=True) as stack:
        asked = asyncio.Event()
        await stack.peer.bus.subscribe(CLEAR_PREFIX_CACHE, lambda _: asked.set())
        assert (await stack.client.post("/reset_prefix_cache")).status_code == 200
        async with asyncio.timeout(5):
            await asked.wait()
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))]) as stack:
        assert (await stack.client.post("/reset_prefix_cache")).status_code == 404


@pytest.mark.parametrize(
    ("host", "keys", "level", "words"),
    [
        ("127.0.0.1", "", "INFO", "no API keys"),
        ("127.0.0.1", "secret", "INFO", "API keys are required"),
        ("0.0.0.0", "", "WARNING", "WITHOUT API KEYS"),
    ],
)
async def test_the_log_says_who_may_enter(
    nats_settings: BusSettings, caplog: pytest.LogCaptureFixture, host: str, keys: str, level: str, words: str
) -> None:
    with caplog.at_level("INFO", logger="services.gateway.service"):
        async with running_gateway(nats_settings, host=host, api_keys=keys):
            pass
    [record] = [record for record in caplog.records if "listening" in record.message]
    assert record.levelname == level
    assert words in record.message
    assert "secret" not in caplog.text


async def test_settings_that_cannot_be_used(nats_settings: BusSettings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bus = await NatsBus.connect(nats_settings, service="gateway", service_id="x")
        settings = GatewaySettings(nats_url=nats_settings.nats_url, port=taken.getsockname()[1])
        telemetry = start_telemetry("gateway", "x", settings)
        with pytest.raises(SettingsError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use"):
            await GatewayService(bus, settings, telemetry).start()
        await bus.close()
        for keys in ("a:b", "a:0", ":5", "a:1:2:3", "a:1:2:low", "a:1:2:high:-4", "a:1:2:high:b:5"):
            bad = GatewaySettings(api_keys=keys)
            with pytest.raises(SettingsError, match="TIDEWAY_API_KEYS: expected key"):
                GatewayService(bus, bad, start_telemetry("gateway", "x", bad))


async def test_metrics(stack: Stack) -> None:
    await stack.post("/v1/completions", prompt="x")
    await stack.post("/v1/completions", prompt="x", service_tier="flex", stream=True)
    await stack.post("/v1/completions", prompt="x", temperature=9)
    await stack.post("/v1/completions", prompt="x", model="m" * 50)
    await stack.until_metrics('tideway_gateway_in_flight_requests{class="offline"} 0.0')
    text = (await stack.client.get("/metrics")).text
    samples = {
        (sample.name, sample.labels.get("class"), sample.labels.get("outcome")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    prefix = "tideway_gateway_"
    assert samples[prefix + "requests_total", "online", "ok"] == 1
    assert samples[prefix + "requests_total", "offline", "ok"] == 1
    assert samples[prefix + "requests_total", "online", "invalid"] == 2
    num_tokens = len(stack.ids("Hello world")) + 1
    for request_class in ("online", "offline"):
        assert samples[prefix + "output_tokens_total", request_class, None] == num_tokens
        assert samples[prefix + "in_flight_requests", request_class, None] == 0
        for name in ("time_to_first_token_seconds", "request_duration_seconds", "queue_time_seconds"):
            assert samples[f"{prefix}{name}_count", request_class, None] == 1
        assert samples["gen_ai_server_request_duration_seconds_count", request_class, None] == 1
        assert samples["vllm:time_to_first_token_seconds_count", request_class, None] == 1
        assert samples["vllm:generation_tokens_total", request_class, None] == num_tokens
        for name in (
            "prefill_time_seconds",
            "decode_time_seconds",
            "inference_time_seconds",
            "params_n",
            "params_max_tokens",
        ):
            assert samples[f"vllm:request_{name}_count", request_class, None] == 1
        assert samples["vllm:request_generation_tokens_sum", request_class, None] == num_tokens
        assert samples["vllm:request_max_num_generation_tokens_sum", request_class, None] == num_tokens
        assert samples["vllm:request_prompt_tokens_sum", request_class, None] > 0
        assert (
            f'finished_reason="stop",model_name="{MODEL}"' in text
            and f'class="{request_class}",finished_reason' in text
        )
    assert samples[prefix + "open_streams", None, None] == 0
    assert f'vllm:num_requests_running{{model_name="{MODEL}"}} 0.0' in text
    assert "mmmm" not in text, "names that clients make up are no labels"


async def test_metrics_listen_to_no_load_reports(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    stack.peer.loads = {"a": {"free_merged": 25.0}}
    name = f'vllm:kv_cache_usage_perc{{model_name="{MODEL}"}}'
    assert name not in (await stack.client.get("/metrics")).text
    assert (await stack.client.get("/admin/instances")).status_code == 200

    async def refuse(*given: Any) -> Any:
        raise AssertionError("it listens")

    monkeypatch.setattr(cluster_loads, "FRESH_S", 0.0)
    monkeypatch.setattr(stack.gateway.context.bus, "subscribe", refuse)
    assert f"{name} 0.75" in (await stack.client.get("/metrics")).text, "as it was heard for somebody else"


async def test_one_trace_a_request(stack: Stack) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    stack.gateway.context.telemetry.tracer = provider.get_tracer("test")
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01", "x-request-id": "mine"}
    body = {"model": MODEL, "messages": HI, "stream": True, "temperature": 0.5, "max_tokens": 9}
    answer = await stack.client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200
    await until(lambda: len(exporter.get_finished_spans()) == 4, "spans")
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {f"chat {MODEL}", "tokenize", "place", "stream"}
    root = spans[f"chat {MODEL}"]
    assert root.kind is SpanKind.SERVER
    assert root.parent is not None
    assert (format_trace_id(root.context.trace_id), format_span_id(root.parent.span_id)) == (trace_id, parent_id)
    for name in ("tokenize", "place", "stream"):
        assert spans[name].parent.span_id == root.context.span_id
    own = f"00-{trace_id}-{format_span_id(root.context.span_id)}-01"
    assert answer.headers["traceparent"] == own
    assert stack.peer.submitted[0].traceparent == own
    attributes = dict(root.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == MODEL
    assert attributes["gen_ai.request.max_tokens"] == 9
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["gen_ai.usage.output_tokens"] == len(stack.ids("Hello world")) + 1
    assert attributes["gen_ai.latency.time_in_model_prefill"] == 0.002
    assert 0 < attributes["gen_ai.latency.time_to_first_token"] <= attributes["gen_ai.latency.e2e"]
    assert attributes["tideway.http_request_id"] == "mine"
    exporter.clear()
    await stack.post("/v1/completions", prompt="x", model="ocean")
    [failed] = exporter.get_finished_spans()
    assert (failed.name, failed.attributes["error.type"]) == ("text_completion", "model_not_found")


async def test_client_sockets_do_not_delay_small_writes(stack: Stack) -> None:
    """Nagle's algorithm would hold a token back for up to 40 ms."""
    stack.peer.automatic = False
    reader = stack.read()
    request = await stack.next_request()
    assert stack.gateway._server is not None
    sockets = [c.transport.get_extra_info("socket") for c in stack.gateway._server.server_state.connections]
    assert sockets
    for each in sockets:
        assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    stack.peer.emit(request, 0, stack.ids("x"), FinishReason.STOP)
    await reader.end()


async def test_a_stop_lets_answers_finish_and_then_ends_them(nats_settings: BusSettings, checkpoint: Path) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, leave_s=0.5, stop_grace_s=0.5) as stack:
        stack.peer.automatic = False
        short, long = stack.read(), stack.read()
        requests = [await stack.next_request(0), await stack.next_request(1)]
        for request in requests:
            stack.peer.emit(request, 0, stack.ids("one"))
        await until(lambda: short.text and long.text, "first tokens")
        assert (await stack.client.get("/ready")).status_code == 200
        stopping = asyncio.create_task(stack.gateway.stop())
        await asyncio.sleep(0)
        leaving = await stack.client.get("/ready")
        assert leaving.status_code == 503 and leaving.headers["connection"] == "close", "it leaves, and still answers"
        await until(lambda: stack.gateway._server.should_exit, "the end of its leaving")
        stack.peer.emit(requests[0], len(stack.ids("one")), [stack.eos], FinishReason.STOP)
        await asyncio.gather(short.end(), long.end(), stopping)
        ended = [reader for reader in (short, long) if reader.is_complete]
        failed = [reader for reader in (short, long) if reader.error is not None]
        assert (len(ended), len(failed)) == (1, 1)
        assert failed[0].error["message"] == "The gateway is shutting down."


async def test_as_a_process(nats_settings: BusSettings, checkpoint: Path) -> None:
    port = free_port()
    environment = {
        **os.environ,
        "TIDEWAY_NATS_URL": nats_settings.nats_url,
        "TIDEWAY_PORT": str(port),
        "TIDEWAY_GATEWAY_ID": "process-gateway",
    }
    bus = await NatsBus.connect(nats_settings, service="peer", service_id="peer")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", env=environment, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:

            async def answers() -> bool:
                try:
                    return (await client.get("/health")).status_code == 200
                except httpx.TransportError:
                    return False

            async with asyncio.timeout(30):
                while not await answers():
                    await asyncio.sleep(0.05)
            assert (await client.get("/v1/models")).json() == {"object": "list", "data": []}
            error = (await client.post("/v1/completions", json={"model": "x", "prompt": "y"})).json()["error"]
            assert "none yet" in error["message"]
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            _, log = await process.communicate()
        assert process.returncode == 0, log.decode()
        assert f"listening on http://127.0.0.1:{port}" in log.decode()
        assert "Traceback" not in log.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await bus.close()
