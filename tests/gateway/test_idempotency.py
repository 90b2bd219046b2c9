"""One answer for each idempotency key, however often and at whichever gateways its request is made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from services.gateway.requests import writes
from services.gateway.requests.kept_calls import KEY_HEADER, STREAM_HEADER, AlreadyKept, Kept, KeptCalls
from shared.bus.interface import BusError, KvEntry, ServiceError
from shared.bus.nats_streams import silent
from shared.messages.catalogue import IDEMPOTENCY_KEYS, KEPT_CALLS
from shared.messages.kept import IdempotencyClaim
from shared.messages.requests import ErrorCode, FinishReason
from shared.runtime.settings import BusSettings
from tests.gateway.conftest import MODEL, Stack, running_gateway
from tests.gateway.peer import until
from tests.gateway.test_resuming import TEXT, beside_another, chat, events_of, logging_stack, read_some, text_of
from tests.nats_cluster import NatsCluster

KEY = {KEY_HEADER: "k"}


@pytest.fixture
async def kept(nats_settings: BusSettings, checkpoint: Path) -> AsyncIterator[Stack]:
    async with logging_stack(nats_settings, checkpoint) as stack:
        yield stack


async def test_integers_that_no_record_holds_are_refused(kept: Stack) -> None:
    schema = {"type": "object", "properties": {"number": {"maximum": 2**70}}}
    common = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
    for path, tool in (
        ("/v1/messages", {"name": "tool", "input_schema": schema}),
        ("/v1/chat/completions", {"type": "function", "function": {"name": "tool", "parameters": schema}}),
    ):
        answer = await kept.client.post(path, json={**common, "tools": [tool]}, headers={KEY_HEADER: "large"})
        assert answer.status_code == 400 and KEY_HEADER in answer.json()["error"]["message"]
    assert kept.peer.submitted == []


async def test_a_key_stands_for_one_answer(kept: Stack) -> None:
    kept.peer.interval_s = 0.01
    headers = {KEY_HEADER: "order-66"}
    body = {**chat(stream=False), "temperature": 1}
    path = "/v1/chat/completions"
    answers = await asyncio.gather(*(kept.client.post(path, json=body, headers=headers) for _ in range(3)))
    answers.append(await kept.client.post(path, json=body, headers=headers))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].json()["choices"][0]["message"]["content"] == TEXT
    assert len(kept.peer.submitted) == 1
    for other in ({**body, "temperature": 0.5}, {**body, "stream": True}):
        refused = await kept.client.post(path, json=other, headers=headers)
        assert refused.status_code == 422
        error = refused.json()["error"]
        assert error["code"] == "idempotency_key_reused" and error["param"] == KEY_HEADER
    async with openai.AsyncOpenAI(base_url=kept.url + "/v1", api_key="none") as client:
        again = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            extra_headers={KEY_HEADER: "order-67"},
        )
        first = [chunk async for chunk in again]
        again = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            extra_headers={KEY_HEADER: "order-67", "Last-Event-ID": first[3].event_id},  # type: ignore[attr-defined]
        )
        rest = [chunk async for chunk in again]
    assert "".join(c.choices[0].delta.content or "" for c in first[:4] + rest) == TEXT
    assert len(kept.peer.submitted) == 2


async def test_an_event_of_another_call_is_refused(kept: Stack) -> None:
    """What comes after it would not fit to what the client has, though it asks with the key of its call."""
    turns = [{"role": "user", "content": "Hi"}]
    for path, fields in (
        ("/v1/chat/completions", {"messages": turns}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", {"messages": turns, "max_tokens": 100}),
        ("/v1/responses", {"input": "Hi"}),
    ):
        body = {"model": MODEL, "stream": True, **fields}
        first, second = [
            await kept.client.post(path, json=body, headers={KEY_HEADER: f"{name}{path}"}) for name in ("a", "b")
        ]
        last, stream_id = events_of(first.text)[0].id, first.headers[STREAM_HEADER]
        assert last.endswith(f"-{stream_id[-6:]}")
        for asked, is_own in ((first, True), (second, False)):
            key = asked.request.headers[KEY_HEADER]
            rest = await kept.client.post(path, json=body, headers={KEY_HEADER: key, "last-event-id": last})
            after = await kept.client.get(f"/v1/streams/{asked.headers[STREAM_HEADER]}?starting_after={last}")
            if is_own:
                assert rest.status_code == after.status_code == 200, rest.text + after.text
                continue
            for answer, param in ((rest, "last-event-id"), (after, "starting_after")):
                error = answer.json()["error"]
                assert answer.status_code == 409 and "another call" in error["message"], answer.text
                if path != "/v1/messages":
                    assert (error["code"], error["param"]) == ("conflict", param)


async def test_an_answer_without_events_is_whole_whatever_event_is_named(kept: Stack) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    for path, fields in (
        ("/v1/chat/completions", {"messages": turns}),
        ("/v1/completions", {"prompt": "x", "n": 2}),
        ("/v1/messages", {"messages": turns, "max_tokens": 100}),
        ("/v1/responses", {"input": "Hi"}),
    ):
        body, key, position = {"model": MODEL, **fields}, {KEY_HEADER: path}, {"last-event-id": "3-9f3ab2"}
        first = await kept.client.post(path, json=body, headers=key)
        assert first.status_code == 200, first.text
        again = await kept.client.post(path, json=body, headers=key | position)
        rest = await kept.client.get(f"/v1/streams/{first.headers[STREAM_HEADER]}", headers={"last-event-id": "3"})
        assert again.text == first.text
        # Responses are read as streams there.
        assert rest.text == first.text or path == "/v1/responses"


async def test_requests_that_share_an_answer_use_its_tokens_once(nats_settings: BusSettings, checkpoint: Path) -> None:
    async with logging_stack(nats_settings, checkpoint, api_keys="one::1000") as stack:
        stack.peer.interval_s = 0.01
        headers = {KEY_HEADER: "k", "authorization": "Bearer one"}
        path, body = "/v1/chat/completions", chat(stream=False)
        answers = await asyncio.gather(*(stack.client.post(path, json=body, headers=headers) for _ in range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4 and len(stack.peer.submitted) == 1
        last = await stack.client.post(path, json=body, headers=headers)
        assert int(last.headers["x-ratelimit-remaining-tokens"]) == 1000 - last.json()["usage"]["total_tokens"]


async def test_a_client_that_hangs_up_and_tries_again_joins_its_request(kept: Stack) -> None:
    kept.peer.interval_s = 0.02
    headers, body = {KEY_HEADER: "k"}, {"model": MODEL, "prompt": "x", "max_tokens": 100}
    with pytest.raises(httpx.ReadTimeout):
        await kept.client.post("/v1/completions", json=body, headers=headers, timeout=0.2)
    answer = await kept.client.post("/v1/completions", json=body, headers=headers)
    assert answer.json()["choices"][0]["text"] == TEXT
    assert len(kept.peer.submitted) == 1 and kept.peer.cancelled == []


async def test_what_was_refused_or_has_failed_is_begun_anew(kept: Stack) -> None:
    headers, body = {KEY_HEADER: "k"}, {"model": MODEL, "prompt": "x", "max_tokens": 100}
    kept.peer.refusal = ServiceError.of(ErrorCode.OVERLOADED, "full")
    assert (await kept.client.post("/v1/completions", json=body, headers=headers)).status_code == 429
    kept.peer.refusal = None
    kept.peer.finish = FinishReason.ERROR
    assert (await kept.client.post("/v1/completions", json=body, headers=headers)).status_code == 500
    await kept.until_metrics('tideway_gateway_kept_call_ends_total{outcome="failed"} 2.0')
    kept.peer.finish = FinishReason.STOP
    # It would get the end of another answer than the one whose beginning it has.
    resumed = await kept.client.post("/v1/completions", json=body, headers={**headers, "last-event-id": "3"})
    error = resumed.json()["error"]
    assert (resumed.status_code, error["code"], error["param"]) == (404, "stream_not_found", "last-event-id")
    answer = await kept.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == TEXT


async def test_a_refused_call_leaves_nothing_though_jetstream_elects(
    kept: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers, body = {KEY_HEADER: "k"}, {"model": MODEL, "prompt": "x", "max_tokens": 100}
    records, claims = await kept.peer.bus.key_value(KEPT_CALLS), await kept.peer.bus.key_value(IDEMPOTENCY_KEYS)
    there = kept.gateway.context.kept._claims
    purge, has_leader = there.purge_revision, asyncio.Event()

    async def purge_at_a_leader(key: str, revision: int) -> bool:
        if not has_leader.is_set():
            raise silent("no leader")
        return await purge(key, revision)

    monkeypatch.setattr(there, "purge_revision", purge_at_a_leader)
    monkeypatch.setattr(writes, "WRITE_RETRY_S", 0.02)
    kept.peer.refusal = ServiceError.of(ErrorCode.OVERLOADED, "full")
    async with asyncio.timeout(5):  # the client waits for no election
        assert (await kept.client.post("/v1/completions", json=body, headers=headers)).status_code == 429
    assert await claims.entries()
    has_leader.set()
    await kept.until_metrics('tideway_gateway_kept_call_ends_total{outcome="failed"} 1.0')
    assert not await records.entries() and not await claims.entries()


async def test_a_call_that_is_taken_up_again_keeps_its_record(kept: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    headers, body = {KEY_HEADER: "k"}, {"model": MODEL, "prompt": "x", "max_tokens": 100}
    there = kept.gateway.context.kept._claims
    refused = asyncio.Event()

    async def no_leader(key: str, revision: int) -> bool:
        refused.set()
        raise silent("no leader")

    monkeypatch.setattr(there, "purge_revision", no_leader)
    monkeypatch.setattr(writes, "WRITE_RETRY_S", 0.5)
    kept.peer.refusal = ServiceError.of(ErrorCode.OVERLOADED, "full")
    assert (await kept.client.post("/v1/completions", json=body, headers=headers)).status_code == 429
    await refused.wait()
    kept.peer.refusal = None
    answer = await kept.client.post("/v1/completions", json=body, headers=headers)
    monkeypatch.undo()
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == TEXT
    await asyncio.sleep(0.6)  # the time of the next try to remove it
    same = await kept.client.post("/v1/completions", json=body, headers=headers)
    assert same.json() == answer.json()


async def test_a_key_stands_for_one_answer_while_jetstream_has_no_leader(checkpoint: Path) -> None:
    """In a cluster of three NATS servers, of which two are away: at two gateways, which ask each other."""
    cluster = await asyncio.to_thread(NatsCluster)
    path, body, headers = "/v1/chat/completions", chat(max_tokens=100), {KEY_HEADER: "k"}
    try:
        settings = BusSettings(nats_url=cluster.nodes[0].url, nats_replicas=3)
        async with (
            logging_stack(settings, checkpoint, nats_replicas=3) as stack,
            running_gateway(settings, gateway_id="other", nats_replicas=3) as other,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{other.port}", timeout=60) as client,
        ):
            stack.peer.interval_s = 0.1
            for node in cluster.nodes[1:]:
                node.kill()
            seen = await read_some(stack, path, body, headers, 2)
            await stack.until_metrics('tideway_gateway_copied_records_total{outcome="copied"} 1.0')
            resumed = {**headers, "last-event-id": seen[-1].id}
            again, rest = await asyncio.gather(
                client.post(path, json=body, headers=headers),
                client.get(f"/v1/streams/{seen[0].data['id']}", headers=resumed),
            )
            assert again.status_code == rest.status_code == 200, again.text + rest.text
            assert text_of(events_of(again.text)) == text_of(seen) + text_of(events_of(rest.text)) == TEXT
            assert len(stack.peer.submitted) == 1
            for node in cluster.nodes[1:]:
                await asyncio.to_thread(node.start)
            claims = await stack.peer.bus.key_value(IDEMPOTENCY_KEYS)
            found: dict[str, KvEntry[IdempotencyClaim]] = {}
            async with asyncio.timeout(60):
                while not found:
                    with suppress(BusError):
                        found = await claims.entries()
                    await asyncio.sleep(0.1)
            assert [entry.value.call_id for entry in found.values()] == [seen[0].data["id"]]
    finally:
        await asyncio.to_thread(cluster.close)


async def test_a_key_stands_for_the_answer_that_has_ended_while_jetstream_is_silent(
    nats_settings: BusSettings, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, headers = {"model": MODEL, "prompt": "x", "max_tokens": 100}, {KEY_HEADER: "k"}

    async def no_leader(*_: object) -> None:
        raise silent("no leader")

    async with beside_another(nats_settings, checkpoint) as (stack, other, client):
        first = await stack.client.post("/v1/completions", json=body, headers=headers)
        await stack.until_metrics('tideway_gateway_kept_call_ends_total{outcome="stored"} 1.0')
        for gateway in (stack.gateway, other):
            for bucket in (gateway.context.kept._records, gateway.context.kept._claims):
                for name in ("get", "get_from_any_copy", "create", "put", "update"):
                    monkeypatch.setattr(bucket, name, no_leader)
        for asked in (client, stack.client):  # the other one asks who was first
            again = await asked.post("/v1/completions", json=body, headers=headers)
            assert again.status_code == 200 and again.json() == first.json()
            assert (await asked.post("/v1/completions", json=body | {"n": 2}, headers=headers)).status_code == 422
            unknown = {KEY_HEADER: "another", "last-event-id": "3"}
            refused = await asked.post("/v1/completions", json=body, headers=unknown)
            assert refused.status_code == 503 and "cannot be looked for" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"]
        assert len(stack.peer.submitted) == 1
        (ended,) = stack.gateway.context.kept._ended.values()
        await other.context.kept.remove(ended.call_id)
        await until(lambda: not stack.gateway.context.kept._ended, "no gateway remembers what its owner has removed")


async def test_records_go_with_their_calls(kept: Stack) -> None:
    kept.peer.automatic = False
    reader = kept.read(headers={KEY_HEADER: "k"})
    await kept.next_request()
    records = await kept.peer.bus.key_value(KEPT_CALLS)
    (record,) = (await records.entries()).values()
    assert record.value.window_s == 60 and record.value.outputs == []
    await reader.hang_up()


async def test_of_two_calls_that_replace_a_claim_that_is_over_the_second_joins_the_first(
    kept: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the second one's look at the claim and its writing, the first one's was stored."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 100}
    assert (await kept.client.post("/v1/completions", json=body, headers={KEY_HEADER: "k"})).status_code == 200
    calls = kept.gateway.context.kept
    records, claims = calls._records, calls._claims
    ((name, first),) = (await claims.entries()).items()
    (record,) = (await records.entries()).values()
    over = IdempotencyClaim("chatcmpl-kept-over", first.value.digest)
    revision = await claims.update(name, over, first.revision)
    get, looks = claims.get, []

    async def late(key: str) -> KvEntry[IdempotencyClaim] | None:
        found = await get(key)
        if not looks:
            await claims.update(name, first.value, revision)
        looks.append(key)
        return found

    monkeypatch.setattr(claims, "get", late)
    second = msgspec.structs.replace(record.value, call_id="chatcmpl-kept-second")
    with pytest.raises(AlreadyKept) as joined:
        await calls._claim(second)
    assert joined.value.record.call_id == record.value.call_id and len(looks) == 2


@pytest.mark.parametrize("seen_last", ["_claims", "_records"])
async def test_a_call_that_is_taken_up_while_it_is_removed_keeps_its_key(
    nats_settings: BusSettings, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, seen_last: str
) -> None:
    """One gateway has looked at what it is to remove when another one takes the call up."""
    path, headers = "/v1/completions", {KEY_HEADER: "k"}
    body = {"model": MODEL, "prompt": "x", "max_tokens": 100}
    async with beside_another(nats_settings, checkpoint) as (stack, other, client):
        bucket = getattr(stack.gateway.context.kept, seen_last)
        get, has_seen, may_go_on = bucket.get, asyncio.Event(), asyncio.Event()

        async def seen(key: str) -> Any:
            if (found := await get(key)) is not None:
                has_seen.set()
                await may_go_on.wait()
            return found

        monkeypatch.setattr(bucket, "get", seen)
        stack.peer.refusal = ServiceError.of(ErrorCode.OVERLOADED, "full")
        refused = asyncio.create_task(stack.client.post(path, json=body, headers=headers))
        async with asyncio.timeout(10):
            await has_seen.wait()
        stack.peer.refusal, stack.peer.automatic = None, False
        number, tokens = len(stack.peer.submitted), stack.ids(TEXT)
        taken_up = asyncio.create_task(client.post(path, json=body, headers=headers))
        request = await stack.next_request(number)
        stack.peer.emit(request, 0, tokens[:2])
        (held,) = other.context.kept._here.values()
        await until(lambda: held.writing is None or held.writing.done(), "the other gateway to store that it has it")
        may_go_on.set()
        await stack.until_metrics('tideway_gateway_kept_call_ends_total{outcome="failed"} 1.0')
        again = asyncio.create_task(stack.client.post(path, json=body, headers=headers))
        await stack.until_metrics('tideway_gateway_resumed_calls_total{outcome="elsewhere"} 1.0')
        stack.peer.emit(request, 2, tokens[2:], FinishReason.LENGTH)
        assert (await refused).status_code == 429
        assert (await taken_up).json() == (await again).json()
        assert len({request.request_id for request in stack.peer.submitted}) == 1


async def test_who_takes_a_call_up_leaves_its_end_alone(kept: Stack) -> None:
    """Between the look at its record and what is done then, the call has ended where it was."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 100}
    assert (await kept.client.post("/v1/completions", json=body, headers={KEY_HEADER: "k"})).status_code == 200
    await kept.until_metrics('tideway_gateway_kept_call_ends_total{outcome="stored"} 1.0')
    calls = kept.gateway.context.kept
    (ended,) = [entry.value for entry in (await calls._records.entries()).values()]
    assert ended.outputs
    late = Kept(calls, msgspec.structs.replace(ended, outputs=[], holder="late"))
    late.earlier = {ended.holder}
    await calls._hold(late.record, late.earlier)
    await calls._purge(late)
    assert [entry.value for entry in (await calls._records.entries()).values()] == [ended]
    assert len(await calls._claims.entries()) == 1


class Silence:
    """A JetStream that tells one gateway nothing of kept calls until `end`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls: KeptCalls) -> None:
        self._is_over = False
        monkeypatch.setattr(writes, "WRITE_RETRY_S", 0.02)
        for bucket in (calls._records, calls._claims):
            for name in ("get", "get_from_any_copy", "create", "put", "update"):
                monkeypatch.setattr(bucket, name, self._unless_silent(getattr(bucket, name)))

    def end(self) -> None:
        self._is_over = True

    def _unless_silent(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def called(*arguments: Any) -> Any:
            if not self._is_over:
                raise silent("no leader")
            return await call(*arguments)

        return called


@asynccontextmanager
async def second_call(
    bus_settings: BusSettings, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> AsyncIterator[tuple[Stack, Silence, str]]:
    """A gateway for a second call under a key. JetStream cannot tell it of the first one (its answer: the text that is
    given), whose gateway is gone."""
    async with logging_stack(bus_settings, checkpoint) as stack:
        async with (
            running_gateway(bus_settings, gateway_id="gone") as gone,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{gone.port}", timeout=30) as client,
        ):
            first = await client.post("/v1/completions", json=body, headers=KEY)
            assert first.status_code == 200, first.text
            await until(lambda: not gone.context.kept._here, "the first call to be stored")
        stack.peer.automatic = False
        yield stack, Silence(monkeypatch, stack.gateway.context.kept), first.text


@pytest.mark.parametrize("max_tokens", [100, 99])
async def test_a_call_that_was_not_the_first_under_its_key_gets_the_answer_of_the_first(
    nats_settings: BusSettings, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 100}
    async with second_call(nats_settings, checkpoint, monkeypatch, body) as (stack, silence, first):
        asked = {**body, "max_tokens": max_tokens}
        asking = asyncio.create_task(stack.client.post("/v1/completions", json=asked, headers=KEY))
        request = await stack.next_request(1)
        stack.peer.emit(request, 0, stack.ids("Four"))
        silence.end()
        answer = await asking
        if asked == body:
            assert answer.status_code == 200 and answer.text == first
        else:
            assert answer.status_code == 422 and answer.json()["error"]["code"] == "idempotency_key_reused"
        await until(lambda: request.request_id in stack.peer.cancelled, "the second call to end")
        await stack.until_metrics('tideway_gateway_kept_call_ends_total{outcome="superseded"} 1.0')
        again = await stack.client.post("/v1/completions", json=body, headers=KEY)
        assert again.text == first and len(stack.peer.submitted) == 2
        assert len(await stack.gateway.context.kept._records.entries()) == 1


async def test_a_stream_that_was_not_the_first_under_its_key_ends_by_name(
    nats_settings: BusSettings, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has the beginning of another text than the first one's."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 100, "stream": True}
    async with second_call(nats_settings, checkpoint, monkeypatch, body) as (stack, silence, first):
        reader = stack.read(headers=KEY)
        request = await stack.next_request(1)
        stack.peer.emit(request, 0, stack.ids("Four"))
        await until(lambda: reader.text, "the first event")
        silence.end()
        await reader.end()
        assert reader.text == "Four" and reader.error is not None
        assert (reader.error["code"], reader.error["param"]) == ("conflict", KEY_HEADER)
        again = await stack.client.post("/v1/completions", json=body, headers=KEY)
        assert text_of(events_of(again.text)) == text_of(events_of(first)) == TEXT
        assert request.request_id in stack.peer.cancelled and len(stack.peer.submitted) == 2
