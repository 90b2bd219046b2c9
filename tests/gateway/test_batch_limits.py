"""Batches where something is short or lost: room in a store, the input, an answer, a model, a place at the gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from services.gateway.batch import records as batches
from services.gateway.batch import service as batch_service
from services.gateway.batch.runner import BatchRun
from shared.bus import nats_objects
from shared.messages.batches import BatchLineResult
from shared.messages.catalogue import BATCH_RESULTS, FILE_CONTENTS, MODELS
from shared.messages.channels import bucket_key
from shared.messages.cluster import ModelSpec
from shared.messages.requests import GenerationRequest, unpack_tokens
from shared.runtime.settings import BusSettings
from tests.gateway.batching import begun_elsewhere, echo, ended, leftovers, line, reach, read, start
from tests.gateway.conftest import MODEL, Stack, running_stack
from tests.gateway.peer import until


@pytest.fixture
async def small(nats_settings: BusSettings, checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    """With room for the results of about 150 lines, or 90 of `long_lines`."""
    monkeypatch.setattr(batches, "RESULTS_BYTES", 100_000)
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))]) as stack:
        echo(stack)
        yield stack


async def wait_until_full(stack: Stack) -> None:
    results = stack.gateway.context.batches.results
    async with asyncio.timeout(10):
        while (await results.room()).free_bytes > 5000:
            await asyncio.sleep(0.02)


def long_lines(count: int) -> list[dict[str, Any]]:
    return [line(i, logprobs=3) for i in range(count)]


@pytest.mark.parametrize(("window", "status"), [("24h", "cancelled"), ("3s", "expired")])
async def test_a_batch_ends_where_no_more_results_can_be_stored(small: Stack, window: str, status: str) -> None:
    client = small.openai()
    batch = await start(client, long_lines(160), window=window)
    await wait_until_full(small)
    if status == "cancelled":
        await client.batches.cancel(batch.id)
    batch = await reach(client, batch.id, ended, 10)
    assert batch.status == status
    counts = batch.request_counts
    output, errors = await read(client, batch.output_file_id), await read(client, batch.error_file_id)
    assert 20 < counts.completed < counts.total == 160 and len(output) == counts.completed
    assert counts.failed == len(errors) == (160 - counts.completed if status == "expired" else 0)
    assert {each["error"]["code"] for each in errors} <= {"batch_expired"}
    named = {each["custom_id"] for each in output + errors}
    assert len(named) == len(output + errors) and named <= {f"id-{i}" for i in range(160)}
    assert await leftovers(small) == []


async def test_a_batch_waits_for_room_before_it_begins(small: Stack) -> None:
    client = small.openai()
    results = await small.peer.bus.key_value(BATCH_RESULTS, max_bytes=100_000)
    await results.create("batch_other.0", BatchLineResult(True, b"x" * 60_000))
    held = [await start(client, [line(0)]) for _ in range(2)]
    await client.batches.cancel(held[0].id)
    assert (await reach(client, held[0].id, ended)).status == "cancelled"
    held = [held[1], await start(client, [line(i) for i in range(50)])]
    await reach(client, held[0].id, ended)
    waiting = await reach(client, held[1].id, lambda batch: batch.waiting_for)
    assert (waiting.status, waiting.waiting_for["code"]) == ("validating", "storage"), "the small one fits"
    await results.purge("batch_other")
    done = await reach(client, held[1].id, ended)
    assert (done.request_counts.completed, done.waiting_for) == (50, None)


async def test_uploads_leave_room_for_the_output(
    nats_settings: BusSettings, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_objects, "OBJECT_STORE_BYTES", 1_000_000)
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))]) as stack:
        client = stack.openai()
        await client.files.create(file=("a", b"x" * 500_000), purpose="batch")
        with pytest.raises(openai.RateLimitError) as raised:
            await client.files.create(file=("b", b"x" * 500_000), purpose="batch")
        assert raised.value.code == "storage_full" and int(raised.value.response.headers["retry-after"]) > 0


async def lose_input(stack: Stack, batch: openai.types.Batch) -> None:
    await (await stack.peer.bus.object_store(FILE_CONTENTS)).delete(batch.input_file_id)


async def test_cancelling_a_batch_whose_input_is_lost(stack: Stack) -> None:
    client, peer = stack.openai(), stack.peer
    peer.grant_tokens = 0
    batch = await start(client, [line(i) for i in range(5)])
    await reach(client, batch.id, lambda b: b.status == "in_progress")
    await lose_input(stack, batch)
    await client.batches.cancel(batch.id)
    batch = await reach(client, batch.id, ended)
    assert (batch.status, batch.request_counts.total, batch.request_counts.failed) == ("cancelled", 5, 0)
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


@pytest.mark.parametrize(
    ("status", "times", "end"),
    [("in_progress", {}, "failed"), ("cancelling", {}, "cancelled"), ("finalizing", {"expired": 2.0}, "expired")],
)
async def test_the_input_is_lost_when_another_gateway_goes_on(
    stack: Stack, status: str, times: dict[str, float], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = stack.openai()
    monkeypatch.setattr(batch_service, "MAX_OWNED", 0)
    batch_id = await begun_elsewhere(stack, status, 2, **times)
    await lose_input(stack, await client.batches.retrieve(batch_id))
    monkeypatch.setattr(batch_service, "MAX_OWNED", 1)
    batch = await reach(client, batch_id, ended)
    num_failed = 0 if end == "cancelled" else 1
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == (end, 2, num_failed)
    assert [each["custom_id"] for each in await read(client, batch.output_file_id)] == ["id-0", "id-1"]
    if end == "failed":
        assert [each.code for each in batch.errors.data] == ["input_file_gone"]
        (missing,) = await read(client, batch.error_file_id)
        assert missing["error"]["code"] == "input_lost"


async def test_an_answer_that_is_lost_is_an_error_of_its_line(stack: Stack) -> None:
    client = stack.openai()
    batch_id = await begun_elsewhere(stack, "finalizing", 3, b"")
    batch = await reach(client, batch_id, ended)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 0, 3)
    errors = await read(client, batch.error_file_id)
    assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [
        (f"id-{i}", "result_lost") for i in range(3)
    ]


async def test_lines_of_a_model_that_is_removed_fail_without_a_grant(stack: Stack) -> None:
    client, peer = stack.openai(), stack.peer
    peer.grant_tokens = 0
    batch = await start(client, [line(i) for i in range(200)])
    await reach(client, batch.id, lambda b: b.status == "in_progress")
    await (await peer.bus.key_value(MODELS)).delete(bucket_key(MODEL))
    batch = await reach(client, batch.id, ended, 10)
    assert (batch.status, batch.request_counts.failed) == ("completed", 200)
    errors = await read(client, batch.error_file_id)
    assert {each["response"]["body"]["error"]["code"] for each in errors} == {"model_not_found"}
    assert peer.submitted == []


async def test_a_batch_that_stands_still_makes_room_for_one_that_waits(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_service, "MAX_OWNED", 1)
    monkeypatch.setattr(batch_service, "MAX_IDLE_S", 0.3)
    client, peer = stack.openai(), stack.peer
    answered = asyncio.Event()
    run = peer._run

    async def hold_back(instance_id: str, request: GenerationRequest) -> None:
        if stack.tokenizer.decode(unpack_tokens(request.prompt)).startswith("slow"):
            await answered.wait()
        await run(instance_id, request)

    peer._run = hold_back
    first = await start(client, [line(i, prompt="slow") for i in range(3)])
    await until(lambda: len(peer.submitted) == 3, "the first batch's lines")
    second = await start(client, [line(i) for i in range(3)])
    assert (await reach(client, second.id, ended)).request_counts.completed == 3
    assert (await client.batches.retrieve(first.id)).status == "in_progress"
    answered.set()
    assert (await reach(client, first.id, ended)).request_counts.completed == 3


async def test_a_batch_that_breaks_off_again_and_again_is_given_up(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    async def break_off(run: BatchRun) -> None:
        runs.append(run)
        raise RuntimeError("a fault in the code")

    monkeypatch.setattr(batch_service, "RUN_AGAIN_S", 0.01)
    monkeypatch.setattr(BatchRun, "run", break_off)
    client = stack.openai()
    batch = await reach(client, (await start(client, [line(0)])).id, ended)
    assert batch.status == "failed" and [each.code for each in batch.errors.data] == ["internal_error"]
    assert len(runs) == batch_service.MAX_RUNS
