"""The Batch API's contract on a real NATS server with a scripted scheduler, driven by the openai package."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import openai
import openai.types
import pytest

from services.gateway.batch import records as batch_records
from services.gateway.requests import writes
from shared.bus.nats_streams import silent
from shared.messages.batches import BatchRecord
from shared.messages.cluster import ModelSpec
from shared.messages.requests import GenerationRequest, RequestClass
from shared.runtime.settings import BusSettings
from tests.gateway.batching import ENDPOINT, echo, ended, jsonl, leftovers, line, reach, read, start
from tests.gateway.conftest import MODEL, Stack, running_stack


async def test_a_batch_from_beginning_to_end(stack: Stack) -> None:
    echo(stack)
    client = stack.openai()
    stack.peer.tokens_per_s = {MODEL: 1000.0}
    batch = await start(client, [line(i) for i in range(300)], metadata={"who": "me"})
    assert batch.status == "validating" and batch.object == "batch" and batch.id.startswith("batch_")
    assert batch.expires_at - batch.created_at == 86400
    batch = await reach(client, batch.id, ended)
    assert batch.status == "completed" and batch.metadata == {"who": "me"} and batch.model == MODEL
    assert batch.in_progress_at and batch.finalizing_at and batch.completed_at and batch.error_file_id is None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (300, 300, 0)
    output = await read(client, batch.output_file_id)
    assert [each["custom_id"] for each in output] == [f"id-{i}" for i in range(300)]
    assert len({each["id"] for each in output}) == 300
    for i, each in enumerate(output):
        assert each["error"] is None and each["response"]["status_code"] == 200
        assert each["response"]["body"]["choices"][0]["text"] == f"line {i}"
    usages = [each["response"]["body"]["usage"] for each in output]
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in usages)
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    assert {request.request_class for request in stack.peer.submitted} == {RequestClass.OFFLINE}
    # A line is submitted again, under its id, where an answer took two seconds.
    assert len({request.request_id for request in stack.peer.submitted}) == 300
    file = await client.files.retrieve(batch.output_file_id)
    assert file.purpose == "batch_output" and file.filename == f"{batch.id}_output.jsonl"
    assert await leftovers(stack) == []
    demand = stack.peer.grant_queries[0].demands[0]
    assert demand.batch_id == batch.id and demand.wanted_tokens > 0 and 86000 < demand.slack_s <= 86400
    assert demand.unfinished_tokens > demand.wanted_tokens, "300 lines, of which 128 are ready"
    await stack.until_metrics(
        'tideway_gateway_batch_lines_total{result="completed"} 300.0',
        'tideway_gateway_batches{status="completed"} 1.0',
        "tideway_gateway_batch_lines_in_flight 0.0",
    )


async def test_what_unicode_takes_for_the_end_of_a_line_ends_none_of_the_output(stack: Stack) -> None:
    echo(stack)
    client, text = stack.openai(), "a\x85b\u2028c\u2029d"
    batch = await start(client, [line(0, prompt=text) | {"custom_id": text}])
    batch = await reach(client, batch.id, ended)
    [answer] = await read(client, batch.output_file_id)
    assert answer["custom_id"] == answer["response"]["body"]["choices"][0]["text"] == text


async def test_chats_blank_lines_and_a_last_line_without_an_end(stack: Stack) -> None:
    client = stack.openai()
    url = "/v1/chat/completions"
    bodies = [line(i, url, messages=[{"role": "user", "content": "Hello"}]) for i in range(3)]
    raw = b"\n" + jsonl(bodies[:2]) + b"  \r\n" + json.dumps(bodies[2]).encode() + b"\r"
    file = await client.files.create(file=("input.jsonl", raw), purpose="batch")
    expiry = {"anchor": "created_at", "seconds": 7200}
    batch = await client.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="1h30m", output_expires_after=expiry
    )
    assert batch.expires_at - batch.created_at == 5400
    batch = await reach(client, batch.id, ended)
    output = await read(client, batch.output_file_id)
    assert [each["response"]["body"]["choices"][0]["message"]["content"] for each in output] == ["Hello world"] * 3
    file = await client.files.retrieve(batch.output_file_id)
    assert 7200 <= file.expires_at - file.created_at <= 7201


async def test_lines_of_responses_and_messages(stack: Stack) -> None:
    client = stack.openai()
    bodies: list[dict[str, Any]] = [
        {"input": "Hi", "instructions": "Be short.", "max_output_tokens": 20},
        {"input": "x " * 3000},
        {"input": "Hi", "tools": [{"type": "web_search"}], "text": {"format": {"type": "json_object"}}},
    ]
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/responses", "body": {"model": MODEL, **body}}
             for i, body in enumerate(bodies)]  # fmt: skip
    batch = await reach(client, (await start(client, lines, endpoint="/v1/responses")).id, ended)
    assert batch.status == "completed" and batch.endpoint == "/v1/responses"
    first, third = [each["response"]["body"] for each in await read(client, batch.output_file_id)]
    answer = openai.types.responses.Response.model_validate(first)
    assert answer.output_text == "Hello world" and answer.status == "completed" and answer.usage is not None
    assert (
        answer.id.startswith("resp_") and first["store"] is False and third["text"]["format"]["type"] == "json_object"
    )
    (refused,) = await read(client, batch.error_file_id)
    assert refused["custom_id"] == "1" and refused["response"]["body"]["error"]["param"] == "input"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(answer.id)

    bodies = [
        {"max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}], "system": "Be short."},
        {"max_tokens": 20, "messages": [{"role": "user", "content": "x " * 3000}]},
    ]
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/messages", "body": {"model": MODEL, **body}}
             for i, body in enumerate(bodies)]  # fmt: skip
    batch = await reach(client, (await start(client, lines, endpoint="/v1/messages")).id, ended)
    (only,) = await read(client, batch.output_file_id)
    message = only["response"]["body"]
    assert message["content"] == [{"type": "text", "text": "Hello world"}] and message["stop_reason"] == "end_turn"
    assert message["type"] == "message" and message["usage"]["output_tokens"] > 2
    (refused,) = await read(client, batch.error_file_id)
    assert refused["response"]["body"]["error"]["param"] == "messages"


async def test_what_a_batch_of_responses_cannot_have(stack: Stack) -> None:
    client = stack.openai()
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"input": "x", "background": True}, "body.background"),
        ({"input": "x", "previous_response_id": "resp_1"}, "body.previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1_0"}]}, "body.input"),
        ({"input": "x", "stream": True}, "body.stream"),
        ({"input": "x", "max_output_tokens": 0}, "body.max_output_tokens"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "body.text.format.schema"),
    ]
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/responses", "body": {"model": MODEL, **body}}
             for i, (body, _) in enumerate(bodies)]  # fmt: skip
    batch = await reach(client, (await start(client, lines, endpoint="/v1/responses")).id, ended)
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    assert [problem.param for problem in batch.errors.data] == [param for _, param in bodies]
    assert not stack.peer.submitted


async def test_lines_that_fail_go_to_the_error_file(stack: Stack) -> None:
    client = stack.openai()
    lines = [line(0), line(1, prompt="long " * 400), line(2, prompt=[99_999_999]), line(3)]
    batch = await reach(client, (await start(client, lines)).id, ended)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (4, 2, 2)
    assert [each["custom_id"] for each in await read(client, batch.output_file_id)] == ["id-0", "id-3"]
    too_long, unknown = await read(client, batch.error_file_id)
    assert (too_long["custom_id"], unknown["custom_id"]) == ("id-1", "id-2")
    assert too_long["response"]["status_code"] == unknown["response"]["status_code"] == 400
    assert too_long["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert too_long["error"] is None


async def test_every_wrong_line_is_named_before_anything_runs(stack: Stack) -> None:
    client = stack.openai()
    lines = [
        line(0),
        b"{not json",
        line(2, method="GET"),
        line(3, url="/v1/chat/completions"),
        line(0),
        line(5, model="nobody"),
        line(6, temperature=9),
        line(7, stream=True),
        {"method": "POST", "url": ENDPOINT, "body": {}},
        line(9, tools=[{}]),
        line(10, prompt=[]),
        line(11),
    ]
    batch = await reach(client, (await start(client, lines)).id, ended)
    assert batch.status == "failed" and batch.failed_at and batch.output_file_id is batch.error_file_id is None
    assert batch.errors is not None and batch.errors.object == "list"
    assert [(each.line, each.code, each.param) for each in batch.errors.data] == [
        (2, "invalid_json", None),
        (3, "invalid_value", "method"),
        (4, "invalid_url", "url"),
        (5, "duplicate_custom_id", "custom_id"),
        (6, "model_not_found", "body.model"),
        (7, "invalid_value", "body.temperature"),
        (8, "unsupported_value", "body.stream"),
        (9, "invalid_value", "custom_id"),
        (10, "unsupported_value", "body.tools"),
        (11, "invalid_value", "body.prompt"),
    ]
    assert stack.peer.submitted == []


async def test_files_that_are_no_batch(nats_settings: BusSettings, checkpoint: Path) -> None:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(nats_settings, specs, max_batch_lines=5, max_body_bytes=200_000) as stack:
        client = stack.openai()

        async def problem(content: bytes) -> tuple[str, int | None]:
            file = await client.files.create(file=("x", content), purpose="batch")
            batch = await client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="1h")
            batch = await reach(client, batch.id, ended)
            assert batch.status == "failed" and len(batch.errors.data) == 1
            return batch.errors.data[0].code, batch.errors.data[0].line

        assert await problem(b"") == ("empty_file", None)
        assert await problem(jsonl([line(i) for i in range(9)])) == ("too_many_lines", 6)
        assert await problem(jsonl([line(0)]) + b"x" * 900_000) == ("line_too_long", 2)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"completion_window": "0s"}, "completion_window"),
        ({"metadata": {f"k{i}": "v" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": "../*>"}, "input_file_id"),
    ],
)
async def test_what_is_wrong_with_a_batch_is_named(stack: Stack, change: dict[str, Any], param: str) -> None:
    client = stack.openai()
    file = await client.files.create(file=("x", jsonl([line(0)])), purpose="batch")
    fields = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h", **change}
    answer = await stack.client.post("/v1/batches", json=fields)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"].startswith(param), answer.text


async def test_only_files_for_batches_will_do(stack: Stack) -> None:
    client = stack.openai()
    file = await client.files.create(file=("x", jsonl([line(0)])), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="user_data"):
        await client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")


async def test_listing_in_pages_and_tenants(nats_settings: BusSettings, checkpoint: Path) -> None:
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))], api_keys="alice,bob") as stack:
        stack.say("ok")
        alice, bob = stack.openai("alice"), stack.openai("bob")
        ids = [(await start(alice, [line(i)])).id for i in range(5)]
        other = await start(bob, [line(0)])
        assert [batch.id async for batch in alice.batches.list(limit=2)] == ids[::-1]
        assert [batch.id async for batch in alice.batches.list(after=ids[2])] == [ids[1], ids[0]]
        assert [batch.id async for batch in bob.batches.list()] == [other.id]
        page = await alice.batches.list(limit=2)
        assert page.has_more and len(page.data) == 2
        for attempt in (bob.batches.retrieve(ids[0]), bob.batches.cancel(ids[0]), bob.batches.retrieve("batch_x>")):
            with pytest.raises(openai.NotFoundError):
                await attempt
        with pytest.raises(openai.BadRequestError):
            await alice.batches.list(limit=101)
        done = await reach(alice, ids[0], ended)
        with pytest.raises(openai.NotFoundError):
            await bob.files.content(done.output_file_id)
        assert len(await read(alice, done.output_file_id)) == 1
        await reach(bob, other.id, ended)
        assert len({demand.tenant for query in stack.peer.grant_queries for demand in query.demands}) == 2


# ----------------------------------------------------------------------------------------- grants, cancel, expiry


async def test_what_nats_stored_and_did_not_confirm_is_one_batch(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    echo(stack)
    records, num_answers = stack.gateway.context.batches._records, 0
    create = records.create

    async def late(key: str, record: BatchRecord) -> int:
        nonlocal num_answers
        try:
            return await create(key, record)
        finally:
            num_answers += 1
            if num_answers <= num_lost:
                raise silent("JetStream did not answer in time")

    monkeypatch.setattr(records, "create", late)
    monkeypatch.setattr(writes, "WRITE_RETRY_S", 0.02)
    client = stack.openai()
    num_lost = 2
    batch = await start(client, [line(1)])
    assert [each.id for each in (await client.batches.list()).data] == [batch.id]
    assert (await reach(client, batch.id, ended)).status == "completed"
    # One that is refused is not run: whoever asked for it asks again.
    stack.peer.grant_tokens = 0
    monkeypatch.setattr(batch_records, "ELECTION_S", 0.1)
    num_lost = 10**6
    with pytest.raises(openai.InternalServerError) as refused:
        await start(client, [line(1)])
    assert refused.value.status_code == 503 and "retry-after" in refused.value.response.headers
    async with asyncio.timeout(20):
        while len((await client.batches.list()).data) > 1:
            await asyncio.sleep(0.02)


async def test_nothing_is_submitted_without_a_grant(stack: Stack) -> None:
    client, peer = stack.openai(), stack.peer
    peer.grant_tokens = 0
    peer.tokens_per_s = {MODEL: 10.0}
    batch = await start(client, [line(i) for i in range(20)])
    waiting = await reach(client, batch.id, lambda b: b.predicted_finish_at)
    assert waiting.status == "in_progress" and waiting.request_counts.total == 20 and peer.submitted == []
    tokens = peer.grant_queries[-1].demands[0].unfinished_tokens
    assert abs(waiting.predicted_finish_at - time.time() - tokens / 10.0) < 3
    peer.grant_tokens = 1
    done = await reach(client, batch.id, ended)
    assert done.status == "completed" and done.predicted_finish_at is None
    assert len(peer.grant_queries) >= 20, "a grant of one token lets one line go"


async def test_batches_pause_while_nobody_grants(stack: Stack) -> None:
    client, peer = stack.openai(), stack.peer
    await peer.stop_scheduler()
    batch = await start(client, [line(i) for i in range(5)])
    waiting = await reach(client, batch.id, lambda b: b.waiting_for)
    assert (waiting.status, waiting.waiting_for["code"]) == ("in_progress", "scheduler")
    await peer.start_scheduler()
    batch = await reach(client, batch.id, ended)
    assert batch.request_counts.completed == 5
    assert peer.submitted_to == {}, "nothing went past the scheduler"


async def test_cancelling_keeps_what_is_finished(stack: Stack) -> None:
    client, peer = stack.openai(), stack.peer
    echo(stack)
    run = peer._run

    def names() -> list[str]:
        """Each once: on a busy machine the gateway submits some again."""
        return list(dict.fromkeys(request.request_id for request in peer.submitted))

    async def run_some(instance_id: str, request: GenerationRequest) -> None:
        if names().index(request.request_id) < 10:
            await run(instance_id, request)

    peer._run = run_some
    batch = await start(client, [line(i) for i in range(400)])
    await reach(client, batch.id, lambda b: b.request_counts.completed == 10)
    began = time.monotonic()
    cancelling = await client.batches.cancel(batch.id)
    assert cancelling.status == "cancelling" and cancelling.cancelling_at
    batch = await reach(client, batch.id, ended)
    assert time.monotonic() - began < 5
    assert batch.status == "cancelled" and batch.cancelled_at
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (400, 10, 0)
    assert len(await read(client, batch.output_file_id)) == 10 and batch.error_file_id is None
    await stack.until_metrics('tideway_gateway_batch_lines_total{result="cancelled"} 390.0')
    cancelled = set(names()[10:])
    async with asyncio.timeout(5):
        while not cancelled <= set(peer.cancelled):
            await asyncio.sleep(0.01)
    assert (await client.batches.cancel(batch.id)).status == "cancelled"


async def test_what_has_ended_cannot_be_cancelled(stack: Stack) -> None:
    client = stack.openai()
    batch = await reach(client, (await start(client, [line(0)])).id, ended)
    with pytest.raises(openai.ConflictError, match="completed"):
        await client.batches.cancel(batch.id)


async def test_a_clock_that_is_set_forward_ends_a_batch_at_once(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stack.peer.automatic = False
    client, now = stack.openai(), time.time
    batch = await start(client, [line(i) for i in range(30)])
    await reach(client, batch.id, lambda b: b.status == "in_progress" and stack.peer.submitted)
    monkeypatch.setattr(time, "time", lambda: now() + 25 * 3600)
    caplog.clear()
    batch = await reach(client, batch.id, ended, 10)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("expired", 0, 30)
    assert sum(" again in " in each.getMessage() for each in caplog.records) <= 60


async def test_a_batch_expires(stack: Stack) -> None:
    client, peer = stack.openai(), stack.peer
    run = peer._run

    async def run_one(instance_id: str, request: GenerationRequest) -> None:
        if peer.submitted.index(request) == 0:
            await run(instance_id, request)

    peer._run = run_one
    batch = await start(client, [line(i) for i in range(30)], window="2s")
    batch = await reach(client, batch.id, ended)
    assert batch.status == "expired" and 2 <= batch.expired_at - batch.created_at <= 4
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 29)
    assert len(await read(client, batch.output_file_id)) == 1
    errors = await read(client, batch.error_file_id)
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    assert [each["custom_id"] for each in errors] == [f"id-{i}" for i in range(1, 30)]


async def test_the_input_may_be_deleted_while_it_runs(stack: Stack) -> None:
    client, peer = stack.openai(), stack.peer
    peer.grant_tokens = 0
    batch = await start(client, [line(i) for i in range(5)])
    await reach(client, batch.id, lambda b: b.status == "in_progress")
    await client.files.delete(batch.input_file_id)
    peer.grant_tokens = 1000
    assert (await reach(client, batch.id, ended)).request_counts.completed == 5
