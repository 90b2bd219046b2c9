"""Requests for a model that was put away: what their streams, spans and metrics say while it is loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.gateway.requests import event_stream
from services.gateway.requests.kept_calls import STREAM_HEADER
from shared.messages.catalogue import PLANS
from shared.messages.cluster import LoadedModel, ModelSpec
from shared.messages.requests import FinishReason
from shared.runtime.settings import BusSettings
from tests.gateway.conftest import MODEL, Stack, running_stack
from tests.gateway.peer import until


async def set_state(stack: Stack, state: str) -> None:
    info = stack.gateway.context.catalog.instances["a"]
    await stack.peer.put_instance(msgspec.structs.replace(info, models=[LoadedModel(name=MODEL, state=state)]))
    await until(lambda: stack.gateway.context.catalog.state(MODEL) == state, "the registry")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_cold_start_is_told(
    nats_settings: BusSettings, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(event_stream, "COLD_SIGN_S", 0.2)
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint), on_demand=True)]) as stack:
        stack.gateway.context.telemetry.tracer = provider.get_tracer("test")
        tokens = stack.say("one two three")
        stack.peer.automatic = False
        await set_state(stack, "host")
        plan = msgspec.structs.replace(stack.peer.plan, asleep={MODEL: "room_in_use"})
        await (await stack.peer.bus.key_value(PLANS)).put("current", plan)
        await until(lambda: stack.gateway.context.catalog.why_asleep(MODEL), "the plan")
        body = {"model": MODEL, "max_tokens": 100, "stream": True}
        messages = [{"role": "user", "content": "x"}]
        body |= {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}.get(path, {"messages": messages})
        if path == "/v1/responses":
            del body["max_tokens"]
        asking = asyncio.create_task(stack.client.post(path, json=body))
        request = await stack.next_request()
        await asyncio.sleep(0.5)
        await set_state(stack, "loading")
        await asyncio.sleep(0.5)
        await set_state(stack, "ready")
        stack.peer.emit(request, 0, tokens, FinishReason.STOP)
        answer = await asking
        before, _, after = answer.text.partition("one two three")
        assert answer.status_code == 200 and after
        end = "\n" if STREAM_HEADER in answer.headers else "\n\n"
        put_away = f": cold start: {MODEL} is in host memory: the memory that it needs is in use{end}"
        assert before.startswith(put_away) and f": cold start: {MODEL} is being loaded{end}" in before
        metrics = (await stack.client.get("/metrics")).text
        assert f'tideway_gateway_cold_starts_total{{model="{MODEL}",state="host"}} 1.0' in metrics
        await until(
            lambda: any("tideway.cold_start" in (s.attributes or {}) for s in exporter.get_finished_spans()), "span"
        )
        [told] = [s.attributes["tideway.cold_start"] for s in exporter.get_finished_spans()
                  if "tideway.cold_start" in (s.attributes or {})]  # fmt: skip
        assert told == "host"
        # The next one meets a model that is loaded.
        warm = asyncio.create_task(stack.client.post(path, json=body))
        request = await stack.next_request(1)
        await asyncio.sleep(0.5)
        stack.peer.emit(request, 0, tokens, FinishReason.STOP)
        assert "cold start" not in (await warm).text
