"""Batches through failures: of lines, of gateways, of NATS; and what is left of them afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import openai.types
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.gateway.batch.output import BatchOutput
from services.gateway.batch.reading import read_lines
from shared.bus.interface import BusError, ServiceError
from shared.messages.batches import BatchLineResult
from shared.messages.catalogue import BATCH_RESULTS, BATCHES, FILE_CONTENTS
from shared.messages.cluster import ModelSpec
from shared.messages.requests import (
    ErrorCode,
    FinishReason,
    GenerationRequest,
    unpack_tokens,
)
from shared.runtime.settings import BusSettings
from tests.conftest import NatsServer, free_port
from tests.gateway.batching import begun_elsewhere, echo, ended, leftovers, line, reach, read, start
from tests.gateway.conftest import MODEL, Stack, running_gateway, running_stack
from tests.gateway.peer import until


async def test_what_passes_is_tried_again(stack: Stack) -> None:
    client, peer = stack.openai(), stack.peer
    peer.refusal = ServiceError.of(ErrorCode.OVERLOADED, "The queue is full.")
    batch = await start(client, [line(i) for i in range(5)])
    async with asyncio.timeout(10):
        while len(peer.submitted) < 10:
            await asyncio.sleep(0.01)
    peer.refusal = None
    batch = await reach(client, batch.id, ended)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (5, 0)
    assert 'batch_line_retries_total{reason="overloaded"}' in (await stack.client.get("/metrics")).text


async def test_a_line_that_fails_again_and_again_is_given_up(stack: Stack) -> None:
    client, peer = stack.openai(), stack.peer
    run = peer._run

    async def fail_one(instance_id: str, request: GenerationRequest) -> None:
        if stack.tokenizer.decode(unpack_tokens(request.prompt)) == "poison":
            error = ServiceError.of(ErrorCode.INTERNAL, "The engine failed.").info
            peer.emit(request, 0, [], FinishReason.ERROR, error=error)
        else:
            await run(instance_id, request)

    peer._run = fail_one
    batch = await start(client, [line(0), line(1, prompt="poison"), line(2)])
    batch = await reach(client, batch.id, ended)
    assert batch.status == "completed" and batch.request_counts.completed == 2
    (failed,) = await read(client, batch.error_file_id)
    assert failed["custom_id"] == "id-1" and failed["response"]["status_code"] == 500
    assert failed["response"]["body"]["error"]["message"] == "The engine failed."
    assert len(peer.submitted) == 2 + 3


async def test_an_answer_too_large_for_a_message(nats_settings: BusSettings, checkpoint: Path) -> None:
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))]) as stack:
        client = stack.openai()
        stack.say("a" * 200, FinishReason.LENGTH)
        batch = await start(client, [line(i, n=24, logprobs=20, max_tokens=200) for i in range(2)])
        batch = await reach(client, batch.id, ended)
        output = await read(client, batch.output_file_id)
        assert [len(each["response"]["body"]["choices"]) for each in output] == [24, 24]
        assert len(json.dumps(output[0])) > 1 << 20, "larger than any message"


async def test_a_result_that_is_there_is_kept(stack: Stack) -> None:
    """Two owners at once: the first answer to a line is its answer, and is counted once."""
    client, peer = stack.openai(), stack.peer
    peer.grant_tokens = 0
    batch = await start(client, [line(i) for i in range(3)])
    await reach(client, batch.id, lambda b: b.status == "in_progress")
    results = await peer.bus.key_value(BATCH_RESULTS)
    await results.create(f"{batch.id}.1", BatchLineResult(True, b'{"custom_id":"id-1","by":"another"}', 7, 0, 9))
    peer.grant_tokens = 1000
    batch = await reach(client, batch.id, ended)
    output = await read(client, batch.output_file_id)
    assert [each["custom_id"] for each in output] == ["id-0", "id-1", "id-2"]
    assert output[1]["by"] == "another"
    assert batch.request_counts.completed == 3
    usages = [each["response"]["body"]["usage"] for each in (output[0], output[2])]
    assert batch.usage.input_tokens == 7 + sum(usage["prompt_tokens"] for usage in usages)


class SlowLines:
    """The peer answers each line after a while, so that something can happen in the middle. `answered`: by text."""

    def __init__(self, stack: Stack, seconds: float) -> None:
        self.prompts: list[str] = []
        echo(stack)
        run = stack.peer._run

        async def run_slowly(instance_id: str, request: GenerationRequest) -> None:
            self.prompts.append(stack.tokenizer.decode(unpack_tokens(request.prompt)))
            await asyncio.sleep(seconds)
            await run(instance_id, request)

        stack.peer._run = run_slowly


async def assert_complete(client: openai.AsyncOpenAI, batch_id: str, num_lines: int) -> None:
    batch = await reach(client, batch_id, ended)
    assert batch.status == "completed" and batch.request_counts.completed == num_lines, batch
    output = await read(client, batch.output_file_id)
    assert [each["custom_id"] for each in output] == [f"id-{i}" for i in range(num_lines)]
    assert [each["response"]["body"]["choices"][0]["text"] for each in output] == [
        f"line {i}" for i in range(num_lines)
    ]


def start_gateway(settings: BusSettings, port: int, folder: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "TIDEWAY_NATS_URL": settings.nats_url,
        "TIDEWAY_PORT": str(port),
        "TIDEWAY_GATEWAY_ID": "mortal",
        "TIDEWAY_BATCH_LINES_IN_FLIGHT": "20",
    }
    with open(folder / "gateway.log", "wb") as log:
        return subprocess.Popen([sys.executable, "-m", "services.gateway"], env=environment, stdout=log, stderr=log)


@asynccontextmanager
async def gateway_process(settings: BusSettings, folder: Path):
    """A gateway that can be killed; yields its process and URL."""
    port = free_port()
    process = start_gateway(settings, port, folder)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient() as client, asyncio.timeout(30):
            while True:
                try:
                    if (await client.get(f"{url}/v1/models")).json()["data"]:
                        break
                except httpx.HTTPError:
                    await asyncio.sleep(0.05)
        yield process, url
    finally:
        process.kill()
        process.wait()


async def test_another_gateway_takes_over_from_a_dead_one(
    nats_settings: BusSettings, checkpoint: Path, tmp_path: Path
) -> None:
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))]) as stack:
        slow = SlowLines(stack, 0.1)
        await stack.gateway._batch_service.stop()
        async with gateway_process(nats_settings, tmp_path) as (process, url):
            mortal = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
            batch = await start(mortal, [line(i) for i in range(200)])
            await reach(mortal, batch.id, lambda b: b.request_counts.completed >= 40)
            process.send_signal(signal.SIGKILL)
            process.wait()
            num_before = len(slow.prompts)
            async with running_gateway(nats_settings, gateway_id="heir") as heir:
                client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{heir.port}/v1", api_key="none")
                await assert_complete(client, batch.id, 200)
            assert await leftovers(stack) == []
            repeated = len(slow.prompts) - 200
            assert 40 <= num_before < 200 and 0 <= repeated <= 20, "only lines in flight are run again"


async def test_a_gateway_that_stops_hands_its_batches_over(nats_settings: BusSettings, checkpoint: Path) -> None:
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))], batch_lines_in_flight=10) as stack:
        SlowLines(stack, 0.05)
        batch = await start(stack.openai(), [line(i) for i in range(100)])
        await reach(stack.openai(), batch.id, lambda b: b.request_counts.completed >= 10)
        async with running_gateway(nats_settings, gateway_id="heir") as heir:
            client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{heir.port}/v1", api_key="none")
            await stack.gateway._batch_service.stop()
            await assert_complete(client, batch.id, 100)


async def test_two_gateways_share_the_batches(nats_settings: BusSettings, checkpoint: Path) -> None:
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))], gateway_id="one") as stack:
        SlowLines(stack, 0.2)
        async with running_gateway(nats_settings, gateway_id="two"):
            client = stack.openai()
            batches = [await start(client, [line(i) for i in range(20)]) for _ in range(6)]
            for batch in batches:
                await assert_complete(client, batch.id, 20)
        assert {request.gateway_id for request in stack.peer.submitted} == {"one", "two"}
        assert len(stack.peer.submitted) == 6 * 20


async def test_nats_goes_away_in_the_middle(fresh_nats: NatsServer, checkpoint: Path) -> None:
    settings = BusSettings(nats_url=fresh_nats.url)
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(settings, specs, batch_lines_in_flight=20) as stack:
        slow = SlowLines(stack, 0.1)
        client = stack.openai()
        batch = await start(client, [line(i) for i in range(200)])
        await reach(client, batch.id, lambda b: b.request_counts.completed >= 40)
        fresh_nats.kill()
        await asyncio.sleep(1.0)
        await asyncio.to_thread(fresh_nats.start)

        async with asyncio.timeout(15):
            while not stack.gateway.context.bus.is_connected:
                await asyncio.sleep(0.05)
        await assert_complete(client, batch.id, 200)
        assert len(slow.prompts) <= 200 + 40


async def test_a_finished_batch_leaves_only_its_files(stack: Stack) -> None:
    client = stack.openai()
    batch = await reach(client, (await start(client, [line(0)])).id, ended)
    results = await stack.peer.bus.key_value(BATCH_RESULTS)
    async with asyncio.timeout(15):
        while await leftovers(stack):  # what is done after its end
            await asyncio.sleep(0.01)
    await results.create(f"{batch.id}.0", BatchLineResult(True, b"late"))
    await stack.gateway._batch_service._sweep()
    assert await leftovers(stack) == []
    names = await (await stack.peer.bus.object_store(FILE_CONTENTS)).names()
    assert names == sorted([batch.input_file_id, batch.output_file_id])
    record = (await (await stack.peer.bus.key_value(BATCHES)).get(batch.id)).value
    assert record.status == "completed"


async def rows(stack: Stack) -> dict[str, int]:
    """Messages that the streams of batches and files hold, markers of deletions among them."""
    uses = await stack.gateway.context.bus.stream_uses()
    kept = ("KV_tideway_batches", "KV_tideway_batch_terms", "KV_tideway_batch_results", "KV_tideway_files")
    return {name: uses[name].num_messages if name in uses else 0 for name in kept}


async def test_a_batch_that_is_deleted_leaves_no_row(stack: Stack) -> None:
    client, before = stack.openai(), await rows(stack)
    stack.peer.automatic = False
    batch = await start(client, [line(0)])
    await stack.next_request()
    refused = await stack.client.delete(f"/v1/batches/{batch.id}")
    assert refused.status_code == 409 and "cancel it first" in refused.json()["error"]["message"]
    await client.batches.cancel(batch.id)
    batch = await reach(client, batch.id, ended)
    deleted = await stack.client.delete(f"/v1/batches/{batch.id}")
    assert deleted.json() == {"id": batch.id, "object": "batch", "deleted": True}
    for method in (stack.client.get, stack.client.delete):
        assert (await method(f"/v1/batches/{batch.id}")).status_code == 404
    assert (await client.batches.list()).data == []
    for file in (await client.files.list()).data:
        await client.files.delete(file.id)
    async with asyncio.timeout(5):
        while batch.id in stack.gateway._batch_service._records.entries:
            await asyncio.sleep(0.01)
    for _ in range(2):
        await stack.gateway._batch_service._sweep()
    assert await rows(stack) == before


async def test_a_batch_is_kept_for_a_time_after_its_end(
    nats_settings: BusSettings, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, batch_retention_s=7200.0) as stack:
        echo(stack)
        client, service = stack.openai(), stack.gateway._batch_service
        batch = await reach(client, (await start(client, [line(0)], "10m")).id, ended)
        real = time.time
        for later_s, is_kept in ((7100.0, True), (7300.0, False)):
            monkeypatch.setattr(time, "time", lambda later_s=later_s: real() + later_s)
            await service._sweep()
            found = await stack.client.get(f"/v1/batches/{batch.id}")
            assert found.status_code == (200 if is_kept else 404)


@pytest.mark.parametrize(
    ("status", "times", "num_results", "end", "num_completed"),
    [
        ("in_progress", {}, 1, "completed", 3),
        ("finalizing", {}, 3, "completed", 3),
        ("finalizing", {}, 2, "completed", 3),
        ("finalizing", {"expired": 2.0}, 2, "expired", 2),
        ("cancelling", {}, 2, "cancelled", 2),
    ],
)
async def test_a_batch_goes_on_from_where_it_was_left(
    stack: Stack, status: str, times: dict[str, float], num_results: int, end: str, num_completed: int
) -> None:
    batch_id = await begun_elsewhere(stack, status, num_results, **times)
    batch = await reach(stack.openai(), batch_id, ended)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.total) == (end, num_completed, 3)
    assert len(await read(stack.openai(), batch.output_file_id)) == num_completed
    num_failed = 0 if end == "cancelled" else 3 - num_completed
    assert batch.request_counts.failed == len(await read(stack.openai(), batch.error_file_id)) == num_failed
    assert len(stack.peer.submitted) == num_completed - num_results, "what was done is not done again"


async def test_an_owner_that_comes_late_overwrites_nothing(stack: Stack) -> None:
    """Its results are purged because another one has concluded the batch."""
    client = stack.openai()
    batch = await reach(client, (await start(client, [line(i) for i in range(3)])).id, ended)
    before = (await client.files.content(batch.output_file_id)).content
    context = stack.gateway.context
    record = await context.batches.record(batch.id)
    assert record is not None
    with pytest.raises(BusError) as raised:
        lines = read_lines(context.files, batch.input_file_id, 1000)
        await BatchOutput(context.batches, context.files, batch.id).assemble(record, 3, lines, None)
    assert raised.value.code is ErrorCode.CONFLICT
    assert (await client.files.content(batch.output_file_id)).content == before


async def test_each_line_has_a_span_linked_to_its_batch(nats_settings: BusSettings, checkpoint: Path) -> None:
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))]) as stack:
        stack.say("Hello")
        spans = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(spans))
        stack.gateway.context.telemetry.tracer = provider.get_tracer("test")
        batch = await reach(stack.openai(), (await start(stack.openai(), [line(0), line(1)])).id, ended)
        await until(lambda: any("batch /v1" in span.name for span in spans.get_finished_spans()), "the batch's span")
        (whole,) = [span for span in spans.get_finished_spans() if span.attributes.get("tideway.batch_id") == batch.id]
        lines = [span for span in spans.get_finished_spans() if span.name == f"batch line {MODEL}"]
        assert [span.links[0].context.span_id for span in lines] == [whole.context.span_id] * 2
        assert all(span.parent is None and span.attributes["gen_ai.usage.output_tokens"] > 0 for span in lines)
        traces = {request.traceparent.split("-")[1] for request in stack.peer.submitted}
        assert traces == {f"{span.context.trace_id:032x}" for span in lines}
        stack.peer.refusal = ServiceError.of(ErrorCode.TOO_LONG, "more than fits")
        await reach(stack.openai(), (await start(stack.openai(), [line(2)])).id, ended)
        errors = [span.attributes.get("error.type") for span in spans.get_finished_spans() if span.links]
        assert errors == [None, None, "context_length_exceeded"]
