"""Answers that go on where their connection or their gateway has ended: each client gets exactly the rest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from tokenizers import Tokenizer

from services.gateway.requests.kept_calls import KEY_HEADER, STREAM_HEADER, WINDOW_HEADER, Kept
from services.gateway.service import GatewayService
from services.worker.instance.output_log import OutputLog
from shared.bus.interface import BusError
from shared.bus.nats_bus import NatsBus
from shared.messages.catalogue import KEPT_CALLS, TAKEN_OVER
from shared.messages.cluster import ModelSpec
from shared.messages.kept import TakenOver
from shared.messages.requests import (
    ErrorCode,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    ReplayQuery,
    ReplayReply,
    TokenFrame,
    unpack_tokens,
)
from shared.runtime.settings import BusSettings
from tests.gateway.checkpoints import byte_level_tokenizer, write_checkpoint
from tests.gateway.conftest import MODEL, Stack, running_gateway, running_stack
from tests.gateway.peer import ScriptedPeer, until
from tests.gateway.test_anthropic import WEATHER
from tests.gateway.test_reasoning import TEMPLATE as REASONING_TEMPLATE
from tests.gateway.test_responses import CODEX_TOOLS
from tests.gateway.test_rolling_restart import Gateway
from tests.gateway.test_rolling_restart import until as until_started
from tests.gateway.test_tools import MAX_LEN, TEMPLATE, TOOLS
from tests.nats_cluster import LEAST_ELECTION_S, NatsCluster

RESPONSE = {"model": MODEL, "input": "Hi", "stream": True}
TEXT = "One, two, three: 東京 and the rest"


class LoggingPeer(ScriptedPeer):
    """Instance "a" keeps its output as a real one does."""

    def __init__(self, bus: NatsBus) -> None:
        super().__init__(bus)
        self.log = OutputLog()
        self.num_lost = 0
        self.interval_s = 0.0

    def send(self, gateway_id: str, frame: TokenFrame) -> None:
        self.log.frames(frame.sender, frame.entries, self.bus.now())
        super().send(gateway_id, frame)

    def replay(self, instance_id: str, query: ReplayQuery) -> ReplayReply:
        reply = ReplayReply([], [])
        for position in query.positions:
            if query.is_of_any_epoch:
                position = msgspec.structs.replace(position, epoch=max(0, self.log.epoch(position.request_id)))
            entry = self.log.replay(position)
            if entry is None:
                reply.unknown.append(position.request_id)
            else:
                reply.entries.append(entry)
        return reply

    def lose_all(self) -> None:
        """The instance knows nothing any more of what it accepted so far."""
        self.log = OutputLog()
        self.num_lost = len(self.submitted)

    async def _run(self, instance_id: str, request: GenerationRequest) -> None:
        number = len(self.submitted)
        tokens = self.script(request)
        for offset in range(len(request.prior) // 4, len(tokens)):
            if number <= self.num_lost:
                return
            finish = self.finish if offset == len(tokens) - 1 else None
            self.emit(request, offset, tokens[offset : offset + 1], finish, sender=instance_id)
            await asyncio.sleep(self.interval_s)


class Event(msgspec.Struct):
    id: str
    data: Any


def events_of(text: str) -> list[Event]:
    found = []
    for block in filter(None, text.split("\n\n")):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        found.append(Event(fields.get("id", ""), data if data == "[DONE]" else json.loads(data)))
    return found


def text_of(events: list[Event]) -> str:
    choices = [choice for event in events if event.data != "[DONE]" for choice in event.data["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


@asynccontextmanager
async def logging_stack(bus_settings: BusSettings, checkpoint: Path, **overrides: Any) -> AsyncIterator[Stack]:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with running_stack(bus_settings, specs, peer_type=LoggingPeer, **overrides) as stack:
        stack.say(TEXT)
        yield stack


@asynccontextmanager
async def beside_another(
    bus_settings: BusSettings, checkpoint: Path
) -> AsyncIterator[tuple[Stack, GatewayService, httpx.AsyncClient]]:
    """A stack, another gateway and a client of that."""
    async with (
        logging_stack(bus_settings, checkpoint) as stack,
        running_gateway(bus_settings, gateway_id="other") as other,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{other.port}", timeout=30) as client,
    ):
        yield stack, other, client


@pytest.fixture
async def kept(nats_settings: BusSettings, checkpoint: Path) -> AsyncIterator[Stack]:
    async with logging_stack(nats_settings, checkpoint) as stack:
        yield stack


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True, **more}


async def read_some(
    stack: Stack, path: str, body: dict[str, Any], headers: dict[str, str], num_events: int
) -> list[Event]:
    """The first events of a stream, whose connection is closed then."""
    text = ""
    async with stack.client.stream("POST", path, json=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for piece in answer.aiter_text():
            text += piece
            if text.count("\n\n") >= num_events:
                break
    return events_of(text[: text.rindex("\n\n") + 2])[:num_events]


async def test_the_rest_comes_after_whichever_event_was_last(kept: Stack) -> None:
    body = chat(stream_options={"include_usage": True})
    answer = await kept.client.post("/v1/chat/completions", json=body, headers={WINDOW_HEADER: "30"})
    whole = events_of(answer.text)
    stream_id = answer.headers[STREAM_HEADER]
    assert text_of(whole) == TEXT and whole[0].data["id"] == stream_id
    assert [event.data["event_id"] for event in whole[:-2]] == [event.id for event in whole[:-2]]
    assert whole[-3].id == f"{len(kept.ids(TEXT)) + 1}e-{stream_id[-6:]}" and not whole[-2].id
    await kept.until_metrics('tideway_gateway_kept_call_ends_total{outcome="stored"} 1.0')
    for number, event in enumerate(whole[:-2]):
        rest = await kept.client.get(f"/v1/streams/{stream_id}", headers={"last-event-id": event.id})
        assert rest.status_code == 200 and rest.headers[STREAM_HEADER] == stream_id
        events = events_of(rest.text)
        assert text_of(whole[: number + 1]) + text_of(events) == TEXT
        # The usage and the end, and the finish_reason once.
        assert events[-2:] == whole[-2:]
        reasons = [c["finish_reason"] for e in events[:-2] for c in e.data["choices"] if c["finish_reason"]]
        assert reasons == ([] if "e-" in event.id else ["stop"])
    again = await kept.client.get(f"/v1/streams/{stream_id}")
    assert text_of(events_of(again.text)) == TEXT
    assert len(kept.peer.submitted) == 1


def message_text(events: list[Event]) -> str:
    deltas = [event.data["delta"] for event in events if event.data["type"] == "content_block_delta"]
    return "".join(delta["text"] for delta in deltas)


def message_events(text: str) -> list[Event]:
    return [event for event in events_of(text) if event.data["type"] != "ping"]


async def test_the_rest_of_a_message_comes_after_whichever_event_was_last(kept: Stack) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100, "stream": True}
    headers = {KEY_HEADER: "a-message"}
    answer = await kept.client.post("/v1/messages", json=body, headers=headers)
    whole, stream_id = message_events(answer.text), answer.headers[STREAM_HEADER]
    assert message_text(whole) == TEXT and whole[0].data["message"]["id"] == stream_id
    assert [event.id for event in whole] == [f"{number}-{stream_id[-6:]}" for number in range(len(whole))]
    await kept.until_metrics('tideway_gateway_kept_call_ends_total{outcome="stored"} 1.0')
    for number, event in enumerate(whole):
        position = {"last-event-id": event.id}
        for rest in (
            await kept.client.get(f"/v1/streams/{stream_id}", headers=position),
            await kept.client.post("/v1/messages", json=body, headers=headers | position),
        ):
            assert rest.status_code == 200 and message_events(rest.text) == whole[number + 1 :]
    again = await kept.client.post("/v1/messages", json=body, headers=headers)
    assert message_events(again.text) == whole and whole[0].data["message"]["usage"]["output_tokens"] == 0
    assert len(kept.peer.submitted) == 1
    other = await kept.client.post("/v1/messages", json=body | {"max_tokens": 9}, headers=headers)
    assert other.status_code == 422 and other.json()["type"] == "error"
    bad = await kept.client.get(f"/v1/streams/{stream_id}", headers={"last-event-id": "x"})
    assert bad.status_code == 400 and bad.json()["error"]["type"] == "invalid_request_error"
    assert (await kept.client.get(f"/v1/responses/{stream_id}?stream=true")).status_code == 404


async def test_a_message_goes_on_while_its_client_comes_again(kept: Stack) -> None:
    kept.peer.interval_s = 0.02
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100, "stream": True}
    seen = await read_some(kept, "/v1/messages", body, {WINDOW_HEADER: "30"}, 6)
    stream_id = seen[0].data["message"]["id"]
    rest = await kept.client.get(f"/v1/streams/{stream_id}", headers={"last-event-id": seen[-1].id})
    assert message_text(seen) + message_text(message_events(rest.text)) == TEXT
    assert kept.peer.cancelled == [] and len(kept.peer.submitted) == 1
    plain = {**body, "stream": False}
    answers = [await kept.client.post("/v1/messages", json=plain, headers={KEY_HEADER: "k"}) for _ in range(2)]
    assert answers[0].json() == answers[1].json() and answers[0].json()["content"][0]["text"] == TEXT
    assert len(kept.peer.submitted) == 2


async def test_a_client_that_asked_for_it_finds_its_stream_going_on(kept: Stack) -> None:
    kept.peer.interval_s = 0.02
    for body, path in (
        (chat(), "/v1/chat/completions"),
        ({"model": MODEL, "prompt": "x", "stream": True}, "/v1/completions"),
    ):
        seen = await read_some(kept, path, {**body, "max_tokens": 100}, {WINDOW_HEADER: "30"}, 5)
        stream_id = seen[0].data["id"]
        rest = await kept.client.get(f"/v1/streams/{stream_id}", headers={"last-event-id": seen[-1].id})
        assert text_of(seen) + text_of(events_of(rest.text)) == TEXT
        assert events_of(rest.text)[-1].data == "[DONE]"
    assert kept.peer.cancelled == [] and len(kept.peer.submitted) == 2
    await kept.until_metrics(
        'tideway_gateway_resumed_calls_total{outcome="here"} 2.0', "tideway_gateway_kept_calls 0.0"
    )


async def test_choices_keep_their_places_with_their_log_probabilities(kept: Stack) -> None:
    kept.peer.interval_s = 0.01
    body = {
        "model": MODEL,
        "prompt": ["a", "b"],
        "n": 2,
        "stream": True,
        "max_tokens": 100,
        "logprobs": 1,
        "stop": "the",
    }

    def by_choice(events: list[Event]) -> dict[int, tuple[str, list[str]]]:
        found: dict[int, tuple[str, list[str]]] = {index: ("", []) for index in range(4)}
        for event in events[:-1] if events[-1].data == "[DONE]" else events:
            for choice in event.data["choices"]:
                text, tokens = found[choice["index"]]
                more = choice["logprobs"]["tokens"] if choice["logprobs"] else []
                found[choice["index"]] = text + choice["text"], tokens + more
        return found

    seen = await read_some(kept, "/v1/completions", body, {WINDOW_HEADER: "30"}, 30)
    assert seen[-1].id.count(".") == 3
    url = f"/v1/streams/{seen[0].data['id']}"
    rest = by_choice(events_of((await kept.client.get(url, headers={"last-event-id": seen[-1].id})).text))
    before, whole = by_choice(seen), by_choice(events_of((await kept.client.get(url)).text))
    for index in range(4):
        text, tokens = before[index][0] + rest[index][0], before[index][1] + rest[index][1]
        assert (text, tokens) == whole[index]
        assert text == TEXT[: TEXT.index("the")]
    assert len(kept.peer.submitted) == 4


async def test_where_none_was_asked_for_and_after_the_window_the_request_is_cancelled(kept: Stack) -> None:
    kept.peer.automatic = False
    for headers in ({}, {WINDOW_HEADER: "0.2"}):
        number = len(kept.peer.submitted)
        reader = kept.read(headers=headers)
        request = await kept.next_request(number)
        kept.peer.emit(request, 0, [40])
        await until(lambda reader=reader: reader.status == 200)
        await reader.hang_up()
        await until(lambda request=request: request.request_id in kept.peer.cancelled)
        call_id = request.request_id.rpartition("-")[0]
        await asyncio.sleep(0.05)
        gone = await kept.client.get(f"/v1/streams/{call_id}")
        assert gone.status_code == 404 and gone.json()["error"]["code"] == "stream_not_found"
    await kept.until_metrics('tideway_gateway_kept_call_ends_total{outcome="given_up"} 1.0')


async def test_nobody_else_may_have_it(nats_settings: BusSettings, checkpoint: Path) -> None:
    async with logging_stack(nats_settings, checkpoint, api_keys="one,other") as stack:
        mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "other"))
        body = chat()
        answer = await stack.client.post("/v1/chat/completions", json=body, headers={**mine, KEY_HEADER: "k"})
        url = f"/v1/streams/{answer.headers[STREAM_HEADER]}"
        assert (await stack.client.get(url)).status_code == 401
        assert (await stack.client.get(url, headers=other)).status_code == 404
        assert text_of(events_of((await stack.client.get(url, headers=mine)).text)) == TEXT
        # The same key of somebody else is another one.
        theirs = await stack.client.post("/v1/chat/completions", json=body, headers={**other, KEY_HEADER: "k"})
        assert theirs.headers[STREAM_HEADER] != answer.headers[STREAM_HEADER]
        assert len(stack.peer.submitted) == 2


async def test_what_cannot_be_asked_for(kept: Stack) -> None:
    async def refused(headers: dict[str, str], **body: Any) -> dict[str, Any]:
        answer = await kept.client.post("/v1/chat/completions", json=chat(**body), headers=headers)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    for text in ("x", "0", "-1", "61", "nan", "1_0"):
        assert (await refused({WINDOW_HEADER: text}))["param"] == WINDOW_HEADER
    assert "60" in (await refused({WINDOW_HEADER: "61"}))["message"]
    assert (await refused({WINDOW_HEADER: "5"}, stream=False))["param"] == WINDOW_HEADER
    assert (await refused({KEY_HEADER: "k" * 256}))["param"] == KEY_HEADER
    answer = await kept.client.post("/v1/chat/completions", json=chat(), headers={KEY_HEADER: "k"})
    url = f"/v1/streams/{answer.headers[STREAM_HEADER]}"
    for text in ("x", "3.4", "-1", "e", "99999999"):
        bad = await kept.client.get(url, headers={"last-event-id": text})
        assert bad.status_code == 400 and bad.json()["error"]["param"] == "last-event-id"
    # Ids that no event had: a position behind the end, and ends elsewhere than the end.
    for text in ("500", "0e", "1e", "500e"):
        async with asyncio.timeout(10):
            nothing = events_of((await kept.client.get(url, headers={"last-event-id": text})).text)
        assert text_of(nothing) == "" and nothing[-1].data == "[DONE]"
    for unknown in ("chatcmpl-kept-0", "a.b", "*"):
        assert (await kept.client.get(f"/v1/streams/{unknown}")).status_code == 404


async def test_after_its_time_it_is_gone_by_name(nats_settings: BusSettings, checkpoint: Path) -> None:
    async with logging_stack(nats_settings, checkpoint, resume_s=0.3) as stack:
        headers = {KEY_HEADER: "k"}
        answer = await stack.client.post("/v1/chat/completions", json=chat(), headers=headers)
        url = f"/v1/streams/{answer.headers[STREAM_HEADER]}"
        await stack.until_metrics('tideway_gateway_kept_call_ends_total{outcome="stored"} 1.0')
        assert (await stack.client.get(url)).status_code == 200
        await asyncio.sleep(0.4)
        gone = await stack.client.get(url)
        assert gone.status_code == 410 and gone.json()["error"]["code"] == "stream_expired"
        again = await stack.client.post("/v1/chat/completions", json=chat(temperature=0), headers=headers)
        assert again.status_code == 200 and len(stack.peer.submitted) == 2
    async with logging_stack(nats_settings, checkpoint, resume_s=0) as stack:
        answer = await stack.client.post("/v1/chat/completions", json=chat(), headers=headers)
        assert answer.status_code == 200 and STREAM_HEADER not in answer.headers
        refused = await stack.client.post("/v1/chat/completions", json=chat(), headers={WINDOW_HEADER: "1"})
        assert refused.status_code == 400 and "turned off" in refused.json()["error"]["message"]


async def test_a_response_goes_on_by_its_id(kept: Stack) -> None:
    kept.peer.interval_s = 0.01
    async with asyncio.timeout(20), kept.openai() as client:
        stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
        whole = [event async for event in stream]
        response_id = whole[0].response.id  # type: ignore[union-attr]
        assert [event.sequence_number for event in whole] == list(range(len(whole)))
        for after in (0, 1, 2, 7, len(whole) - 2):
            resumed = await client.responses.retrieve(response_id, stream=True, starting_after=after)
            assert [event.model_dump() async for event in resumed] == [e.model_dump() for e in whole[after + 1 :]]
        await client.responses.delete(response_id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response_id, stream=True)
        kept.peer.automatic = False
        begun = asyncio.create_task(
            client.responses.create(model=MODEL, input="Hi", stream=True, extra_headers={WINDOW_HEADER: "30"})
        )
        request = await kept.next_request(1)
        tokens = kept.ids(TEXT)
        kept.peer.emit(request, 0, tokens[:4])
        stream = await begun
        seen = [await anext(stream) for _ in range(5)]  # type: ignore[arg-type]
        await stream.close()
        kept.peer.emit(request, 4, tokens[4:], FinishReason.LENGTH)
        resumed = await client.responses.retrieve(
            seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number
        )
        events = seen + [event async for event in resumed]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_another_gateway_takes_a_stream_over_from_one_that_lives(
    nats_settings: BusSettings, checkpoint: Path
) -> None:
    async with (
        logging_stack(nats_settings, checkpoint) as stack,
        running_gateway(nats_settings, gateway_id="other") as other,
    ):
        stack.peer.automatic = False
        tokens = stack.ids(TEXT)
        reader = stack.read(headers={WINDOW_HEADER: "10"}, max_tokens=200)
        request = await stack.next_request()
        stack.peer.emit(request, 0, tokens[:3])
        await until(lambda: reader.status == 200)
        await reader.hang_up()
        url = f"http://127.0.0.1:{other.port}/v1/streams/{request.request_id.rpartition('-')[0]}"
        async with httpx.AsyncClient(timeout=30) as client:
            rest = asyncio.create_task(client.get(url, headers={"last-event-id": "2"}))
            await until(lambda: not stack.gateway.context.table.streams, "the other one to have it alone")
            stack.peer.emit(request, 3, tokens[3:], FinishReason.LENGTH)
            events = events_of((await rest).text)
        assert stack.tokenizer.decode(tokens[:2]) + text_of(events) == TEXT
        assert stack.peer.cancelled == [] and stack.peer.instance_cancelled == []


async def test_silence_is_no_event_to_openais_client(nats_settings: BusSettings, checkpoint: Path) -> None:
    """Which takes for an event whatever an empty line ends after an id."""
    async with logging_stack(nats_settings, checkpoint, stream_keep_alive_s=0.1) as stack, stack.openai() as client:
        stack.peer.automatic = False
        tokens, headers, texts = stack.ids(TEXT), {KEY_HEADER: "k"}, ["", ""]

        async def read_response() -> None:
            events = await client.responses.create(model=MODEL, input="Hi", stream=True)
            async for event in events:
                texts[0] += event.delta if event.type == "response.output_text.delta" else ""

        async def read_completion() -> None:
            chunks = await client.completions.create(model=MODEL, prompt="Hi", stream=True, extra_headers=headers)
            async for chunk in chunks:
                texts[1] += chunk.choices[0].text

        for number, read in enumerate((read_response, read_completion)):
            reading = asyncio.create_task(read())
            request = await stack.next_request(len(stack.peer.submitted))
            stack.peer.emit(request, 0, tokens[:9])
            await until(lambda number=number: texts[number], "the beginning")
            await asyncio.sleep(0.5)
            stack.peer.emit(request, 9, tokens[9:], FinishReason.LENGTH)
            await reading
        assert texts == [TEXT, TEXT]


@pytest.mark.parametrize("window", ["0.5", ""], ids=["window", "stored response"])
async def test_who_leaves_a_call_that_is_read_elsewhere_leaves_it_there(
    nats_settings: BusSettings, checkpoint: Path, window: str
) -> None:
    """A reader at another gateway comes and goes; the call goes on, and may be resumed, until nobody reads it."""
    body = chat(max_tokens=200) if window else RESPONSE
    path = "/v1/chat/completions" if window else "/v1/responses"
    async with beside_another(nats_settings, checkpoint) as (stack, other, client):
        stack.peer.automatic = False
        tokens, headers = stack.ids(TEXT), {WINDOW_HEADER: window} if window else {}
        async with stack.client.stream("POST", path, json=body, headers=headers) as staying:
            request = await stack.next_request()
            pieces = staying.aiter_text()
            for number in (2, 4):
                stack.peer.emit(request, number - 2, tokens[number - 2 : number])
                await anext(pieces)
                async with client.stream("GET", f"/v1/streams/{staying.headers[STREAM_HEADER]}") as leaving:
                    assert leaving.status_code == 200, await leaving.aread()
                    await anext(leaving.aiter_text())
                await until(lambda: not other.context.kept._here, "the one that was left to let it go")
            await until(lambda: all(held.writing is None or held.writing.done() for held in here(stack)))
            assert len(here(stack)) == 1 and stack.peer.cancelled == stack.peer.instance_cancelled == []
            assert len(await stack.gateway.context.kept._records.entries()) == 1
        await until(lambda: stack.peer.instance_cancelled, "the call to be cancelled after its last reader")
        await until(lambda: not here(stack) and not stack.gateway.context.table.streams)
        async with asyncio.timeout(10):
            while await stack.gateway.context.kept._records.entries():
                await asyncio.sleep(0.02)
        assert {request.epoch for request in stack.peer.submitted} == {0}, "it was never lost"


async def test_of_gateways_that_take_a_call_over_at_once_one_has_it(
    nats_settings: BusSettings, checkpoint: Path
) -> None:
    """So it is cancelled when nobody reads it any more."""
    async with beside_another(nats_settings, checkpoint) as (stack, other, client):
        stack.peer.automatic = False
        sent = {"json": chat(max_tokens=200), "headers": {WINDOW_HEADER: "0.2"}}
        async with stack.client.stream("POST", "/v1/chat/completions", **sent) as one:
            stack.peer.emit(await stack.next_request(), 0, stack.ids(TEXT)[:3])
            ones = one.aiter_text()
            await anext(ones)
            call_id = one.headers[STREAM_HEADER]
            async with client.stream("GET", f"/v1/streams/{call_id}") as two:
                twos = two.aiter_text()
                await anext(twos)
                both = [gateway.context for gateway in (stack.gateway, other)]
                held = [context.kept._here[call_id] for context in both]
                await until(lambda: held[0].is_elsewhere)
                for context in both:
                    context.bus.publish(TAKEN_OVER, TakenOver(call_id, context.gateway_id))
                await until(lambda: held[0].is_elsewhere and not held[1].is_elsewhere)
                await asyncio.sleep(0.1)
        await until(lambda: stack.peer.instance_cancelled, "the call to be cancelled")


def here(stack: Stack) -> list[Kept]:
    return list(stack.gateway.context.kept._here.values())


async def test_a_stream_that_had_no_turn_is_placed_again_at_once(nats_settings: BusSettings, checkpoint: Path) -> None:
    """Its gateway was gone when the instance gave it up."""
    async with beside_another(nats_settings, checkpoint) as (stack, other, client):
        peer = stack.peer
        assert isinstance(peer, LoggingPeer)
        peer.automatic = False
        tokens = stack.ids(TEXT)
        reader = stack.read(headers={WINDOW_HEADER: "10"}, max_tokens=200)
        request = await stack.next_request()
        no_turn = ErrorInfo(ErrorCode.UNAVAILABLE, "online requests left it no turn for 5 s")
        peer.log.frames("a", [peer.entry(request, 0, tokens[:3], FinishReason.ERROR, error=no_turn)], 0.0)
        rest = asyncio.create_task(client.get(f"/v1/streams/{request.request_id.rpartition('-')[0]}"))
        again = await stack.next_request(1)
        assert unpack_tokens(again.prior) == tokens[:3]
        (stream,) = other.context.table.streams.values()
        assert stream.pause_s == 0.0
        peer.emit(again, 3, tokens[3:], FinishReason.LENGTH)
        assert text_of(events_of((await rest).text)) == TEXT
        await reader.hang_up()


async def test_streams_are_resumed_and_begun_while_their_records_have_no_leader(checkpoint: Path) -> None:
    """In a cluster of NATS servers, one of which dies."""
    cluster = await asyncio.to_thread(NatsCluster)
    try:
        settings = BusSettings(nats_url=cluster.url, nats_replicas=3)
        async with (
            logging_stack(settings, checkpoint, nats_replicas=3) as stack,
            running_gateway(settings, gateway_id="other", nats_replicas=3) as other,
        ):
            stack.peer.interval_s = 0.05
            headers = {KEY_HEADER: "k"}
            seen = await read_some(stack, "/v1/chat/completions", chat(max_tokens=100), headers, 5)
            leader = await asyncio.to_thread(cluster.leader_of, f"KV_{KEPT_CALLS.name}")
            assert leader is not None
            leader.kill()
            url, headers = f"http://127.0.0.1:{other.port}", {**headers, "last-event-id": seen[-1].id}
            async with AsyncExitStack() as resources:
                client = await resources.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30))
                async with asyncio.timeout(LEAST_ELECTION_S):
                    rest, begun = await asyncio.gather(
                        answered(lambda: client.get(f"/v1/streams/{seen[0].data['id']}", headers=headers)),
                        resources.enter_async_context(client.stream("POST", "/v1/responses", json=RESPONSE)),
                    )
                assert begun.status_code == 200, await begun.aread()
                await begun.aread()
            assert text_of(seen) + text_of(events_of(rest.text)) == TEXT
            assert len(stack.peer.submitted) == 2
            records = await stack.peer.bus.key_value(KEPT_CALLS)
            record = None
            async with asyncio.timeout(20):
                while record is None or not record.value.outputs:
                    with suppress(BusError):
                        record = await records.get(begun.headers[STREAM_HEADER])
                    await asyncio.sleep(0.1)
    finally:
        await asyncio.to_thread(cluster.close)


async def answered(ask: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    """The answer to one who asks again while it is refused for now."""
    while (answer := await ask()).status_code == 503:
        await asyncio.sleep(0.1)
    assert answer.status_code == 200, answer.text
    return answer


NUM_STREAMS = 16


@asynccontextmanager
async def two_gateways(
    bus_settings: BusSettings,
    checkpoint: Path,
    hosts: Sequence[str] = 2 * ("127.0.0.1",),
    port: int = 0,
    **environment: str,
) -> AsyncIterator[tuple[LoggingPeer, list[Gateway]]]:
    """On `hosts`, at `port` or (0) any that is free; what they say to everything is three times TEXT."""
    bus = await NatsBus.connect(bus_settings, service="peer", service_id="peer")
    peer = LoggingPeer(bus)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokens = tokenizer.encode(3 * TEXT, add_special_tokens=False).ids
    peer.script, peer.finish, peer.interval_s = lambda request: tokens, FinishReason.LENGTH, 0.03
    gateways = [
        Gateway(bus_settings.nats_url, f"gateway-{number}", host, port, **environment)
        for number, host in enumerate(hosts)
    ]
    try:
        await peer.start(ModelSpec(MODEL, str(checkpoint)))
        await peer.add_instance("a", MODEL)
        for gateway in gateways:
            await gateway.start()
        await until_started(lambda: all(gateway.is_ready for gateway in gateways))
        yield peer, gateways
    finally:
        for gateway in gateways:
            await gateway.close()
        await peer.stop()
        await bus.close()


class Conversation:
    """OpenAI's client at a gateway that ends, and then at another one. `texts`: what came with each event's id."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.text = ""
        self.stream_id = ""
        self.event_id = ""
        self.is_over = False
        self.error: str | None = None

    async def begin(self, client: openai.AsyncOpenAI) -> None:
        try:
            if self.number % 2:
                self._take(await self._ask(client, {}))
            else:
                self._take_response(await client.responses.create(model=MODEL, input="Hi", stream=True))
            await self._reading
        except httpx.TransportError:
            pass
        except openai.APIError as error:
            self.error = error.code

    async def _ask(self, client: openai.AsyncOpenAI, headers: dict[str, str]) -> Any:
        return await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            extra_headers={KEY_HEADER: f"order-{self.number}", **headers},
        )

    def _take(self, stream: Any) -> None:
        self._reading = asyncio.create_task(self._read(stream))

    def _take_response(self, stream: Any) -> None:
        self._reading = asyncio.create_task(self._read_response(stream))

    async def _read(self, stream: Any) -> None:
        async for chunk in stream:
            self.text += chunk.choices[0].delta.content or ""
            self.event_id = chunk.event_id
            self.is_over = chunk.choices[0].finish_reason is not None

    async def _read_response(self, stream: Any) -> None:
        async for event in stream:
            if event.type == "response.created":
                self.stream_id = event.response.id
            elif event.type == "response.output_text.delta":
                self.text += event.delta
            elif event.type == "error":
                self.error = event.code
            self.event_id = str(event.sequence_number)
            self.is_over = event.type in ("response.completed", "response.incomplete")

    async def go_on(self, client: openai.AsyncOpenAI) -> None:
        """The same call again says where this client is."""
        if self.number % 2:
            self._take(await self._ask(client, {"Last-Event-ID": self.event_id}))
        else:
            after = int(self.event_id)
            self._take_response(await client.responses.retrieve(self.stream_id, stream=True, starting_after=after))
        await self._reading


def client_of(gateway: Gateway | GatewayService) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none", max_retries=0)


async def test_a_killed_gateways_streams_go_on_at_another_one(nats_settings: BusSettings, checkpoint: Path) -> None:
    async with two_gateways(nats_settings, checkpoint) as (peer, (first, second)):
        conversations = [Conversation(number) for number in range(NUM_STREAMS)]
        async with client_of(first) as dying, client_of(second) as living:
            begun = asyncio.gather(*(each.begin(dying) for each in conversations))
            await until_started(lambda: all(len(each.text) > 6 for each in conversations))
            first.kill()
            # One that is started again under the same name leaves alone what it had.
            await first.start()
            await begun
            assert not any(each.is_over for each in conversations)
            async with asyncio.timeout(30):
                await asyncio.gather(*(each.go_on(living) for each in conversations))
            await until_started(lambda: first.is_ready)
            assert all(each.is_over for each in conversations)
            assert [each.text for each in conversations] == [3 * TEXT] * NUM_STREAMS
        # No new generation: what is placed again, as where the machine stands still, is the same request.
        assert len({(request.request_id, request.sampling.seed) for request in peer.submitted}) == NUM_STREAMS
        metrics = (await second.client.get("/metrics")).text
        assert f'tideway_gateway_resumed_calls_total{{outcome="elsewhere"}} {NUM_STREAMS}.0' in metrics
        assert peer.cancelled == []


@pytest.mark.parametrize("instance_dies", [False, True])
async def test_a_gateway_that_stops_hands_its_streams_over(
    nats_settings: BusSettings, checkpoint: Path, instance_dies: bool
) -> None:
    async with AsyncExitStack() as resources:
        stack = await resources.enter_async_context(logging_stack(nats_settings, checkpoint))
        peer = stack.peer
        assert isinstance(peer, LoggingPeer)
        peer.interval_s = 0.1  # so that none has ended when the last one has begun
        conversations = [Conversation(number) for number in range(4)]
        leaving = AsyncExitStack()
        gateway = await leaving.enter_async_context(running_gateway(nats_settings, gateway_id="b", stop_grace_s=0))
        async with client_of(gateway) as client:
            begun = asyncio.gather(*(each.begin(client) for each in conversations))
            await until(lambda: all(len(each.text) > 6 for each in conversations))
            await leaving.aclose()
            await begun
        assert {each.error for each in conversations} == {"handed_over"}
        peer.interval_s = 0.02
        if instance_dies:
            peer.lose_all()
        async with asyncio.timeout(20), client_of(stack.gateway) as client:
            await asyncio.gather(*(each.go_on(client) for each in conversations))
        assert [each.text for each in conversations] == [TEXT] * 4
        assert peer.cancelled == [] and peer.instance_cancelled == []
        # Placed again where all is lost, with the seed that it had.
        requests = {(request.request_id, request.sampling.seed) for request in peer.submitted}
        assert len(requests) == 4 and len(peer.submitted) == (8 if instance_dies else 4)


@pytest.mark.parametrize("spelled", ["hermes", "mistral", "llama3"])
async def test_calls_of_tools_are_resumed_within_their_arguments(
    nats_settings: BusSettings, tmp_path: Path, spelled: str
) -> None:
    folder = write_checkpoint(tmp_path / "tools", byte_level_tokenizer(), TEMPLATE, MAX_LEN)
    call = '{"name": "weather", "arguments": {"city": "東京", "days": 2}}'
    text = {
        "hermes": f"Let me see.\n<tool_call>\n{call}\n</tool_call>\n<tool_call>\n{call}\n</tool_call>",
        "mistral": f"[TOOL_CALLS][{call}, {call}]",
        "llama3": call.replace('"arguments"', '"parameters"'),
    }[spelled]
    specs = [ModelSpec(MODEL, str(folder), tool_format=spelled)]
    async with running_stack(nats_settings, specs, peer_type=LoggingPeer) as stack:
        stack.say(text)
        stack.peer.interval_s = 0.004  # so that events end within the arguments
        await stack.peer.add_instance("a", MODEL, max_model_len=MAX_LEN)
        body = chat(tools=TOOLS, max_tokens=300)
        answer = await stack.client.post("/v1/chat/completions", json=body, headers={KEY_HEADER: "k"})
        whole = events_of(answer.text)
        expected = message_of(whole)
        assert len(expected[1]) == (1 if spelled == "llama3" else 2) and expected[1][0][1] == "weather"
        await stack.until_metrics('tideway_gateway_kept_call_ends_total{outcome="stored"} 1.0')
        url = f"/v1/streams/{answer.headers[STREAM_HEADER]}"
        ids = sorted({event.id for event in whole if event.id}, key=lambda text: int(text.split("-")[0].rstrip("e")))
        for last in ids[:: max(1, len(ids) // 24)]:
            number = max(n for n, event in enumerate(whole) if event.id == last)
            rest = events_of((await stack.client.get(url, headers={"last-event-id": last})).text)
            assert message_of(whole[: number + 1] + rest) == expected


async def test_reasoning_and_custom_tools_of_a_response_are_resumed(nats_settings: BusSettings, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "thinks", byte_level_tokenizer(), REASONING_TEMPLATE, MAX_LEN)
    calls = [
        {"name": "apply_patch", "arguments": {"input": "*** Begin"}},
        {"name": "weather", "arguments": {"city": "東京"}},
    ]
    text = "<think>I see.</think>" + "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    specs = [ModelSpec(MODEL, str(folder), tool_format="hermes")]
    async with running_stack(nats_settings, specs, peer_type=LoggingPeer) as stack, stack.openai() as client:
        stack.say(text)
        stack.peer.interval_s = 0.004
        await stack.peer.add_instance("a", MODEL, max_model_len=MAX_LEN)
        stream = await client.responses.create(model=MODEL, input="Hi", stream=True, tools=CODEX_TOOLS)  # type: ignore[call-overload]
        whole = [event async for event in stream]
        response = whole[-1].response
        assert [item.type for item in response.output] == ["reasoning", "custom_tool_call", "function_call"]
        for after in range(len(whole) - 1):
            resumed = await client.responses.retrieve(response.id, stream=True, starting_after=after)
            assert [event.model_dump() async for event in resumed] == [e.model_dump() for e in whole[after + 1 :]]


async def test_blocks_of_a_message_are_resumed_within(nats_settings: BusSettings, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "thinks", byte_level_tokenizer(), REASONING_TEMPLATE, MAX_LEN)
    call = {"name": WEATHER["name"], "arguments": {"city": "Bergen"}}
    specs = [ModelSpec(MODEL, str(folder), tool_format="hermes")]
    async with running_stack(nats_settings, specs, peer_type=LoggingPeer) as stack:
        stack.say(f"<think>I see.</think>One moment.\n<tool_call>\n{json.dumps(call)}\n</tool_call>")
        await stack.peer.add_instance("a", MODEL, max_model_len=MAX_LEN)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300, "tools": [WEATHER]}
        answer = await stack.client.post("/v1/messages", json=body | {"stream": True}, headers={WINDOW_HEADER: "30"})
        whole = message_events(answer.text)
        begun = [event.data["content_block"]["type"] for event in whole if "content_block" in event.data]
        assert begun == ["thinking", "text", "tool_use"]
        for event in whole:
            url = f"/v1/streams/{answer.headers[STREAM_HEADER]}?starting_after={event.id}"
            rest = await stack.client.get(url)
            assert message_events(rest.text) == whole[int(event.id.split("-")[0]) + 1 :]


def message_of(events: list[Event]) -> tuple[str, list[list[str]], list[str]]:
    """Content; id, name and arguments of each call; reasons to finish."""
    content, calls, reasons = "", [], []
    for event in events:
        for choice in [] if event.data == "[DONE]" else event.data["choices"]:
            content += choice["delta"].get("content") or ""
            for chunk in choice["delta"].get("tool_calls", ()):
                if "id" in chunk:
                    calls.append([chunk["id"], chunk["function"]["name"], ""])
                calls[chunk["index"]][2] += chunk["function"]["arguments"]
            if choice["finish_reason"]:
                reasons.append(choice["finish_reason"])
    return content, calls, reasons
