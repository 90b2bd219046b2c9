"""Responses in the background, over a real socket, with OpenAI's client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from services.gateway.requests import writes
from services.gateway.responses.store import Responses, answered_of
from services.gateway.service import GatewayService
from shared.bus.nats_streams import silent
from shared.messages.catalogue import KEPT_CALLS, RESPONSES
from shared.messages.requests import ErrorCode, ErrorInfo, FinishReason, GenerationRequest
from shared.runtime.settings import BusSettings
from tests.gateway.conftest import MODEL, Stack, running_gateway
from tests.gateway.peer import until
from tests.gateway.test_resuming import TEXT, logging_stack


@pytest.fixture
async def manual(nats_settings: BusSettings, checkpoint: Path) -> AsyncIterator[Stack]:
    async with logging_stack(nats_settings, checkpoint) as stack:
        stack.peer.automatic = False
        yield stack


async def begun(stack: Stack, client: openai.AsyncOpenAI, **more: Any) -> tuple[Response, GenerationRequest]:
    """A response that has been asked for, and its request."""
    number = len(stack.peer.submitted)
    response = await client.responses.create(model=MODEL, input="Hi", background=True, **more)
    assert response.status == "queued" and response.background and response.output == []
    return response, await stack.next_request(number)


async def over(client: openai.AsyncOpenAI, response_id: str) -> Response:
    async with asyncio.timeout(20):
        while (response := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
    return response


async def test_it_is_made_without_its_client(manual: Stack) -> None:
    async with manual.openai() as client:
        response, request = await begun(manual, client, metadata={"a": "b"})
    tokens = manual.ids(TEXT)
    manual.peer.emit(request, 0, tokens[:4])
    async with manual.openai() as client:
        async with asyncio.timeout(20):
            while not (so_far := await client.responses.retrieve(response.id)).output_text:
                await asyncio.sleep(0.02)
        assert so_far.status == "in_progress" and TEXT.startswith(so_far.output_text)
        with pytest.raises(openai.BadRequestError) as early:
            await client.responses.create(model=MODEL, input="And?", previous_response_id=response.id)
        assert early.value.code == "response_not_over"
        assert [item.type for item in (await client.responses.input_items.list(response.id)).data] == ["message"]
        await manual.until_metrics("tideway_gateway_background_responses 1.0")
        manual.peer.emit(request, 4, tokens[4:], FinishReason.LENGTH)
        ended = await over(client, response.id)
        assert ended.status == "incomplete" and ended.output_text == TEXT and ended.metadata == {"a": "b"}
        assert ended.usage is not None and ended.usage.output_tokens == len(tokens)
        assert manual.peer.cancelled == []
        for refused in ({"store": False}, {"store": False, "stream": True}):
            with pytest.raises(openai.BadRequestError) as unkept:
                await client.responses.create(model=MODEL, input="x", background=True, **refused)  # type: ignore[call-overload]
            assert unkept.value.param == "background"
    await manual.until_metrics("tideway_gateway_background_responses 0.0")


async def test_a_cancelled_one_keeps_what_it_has(manual: Stack) -> None:
    async with manual.openai() as client:
        response, request = await begun(manual, client)
        manual.peer.emit(request, 0, manual.ids(TEXT)[:4])
        async with asyncio.timeout(20):
            while not (await client.responses.retrieve(response.id)).output_text:
                await asyncio.sleep(0.02)
        cancelled = await client.responses.cancel(response.id)
        assert cancelled.status == "cancelled" and TEXT.startswith(cancelled.output_text) and cancelled.output_text
        await until(lambda: request.request_id in manual.peer.cancelled)
        assert (await client.responses.cancel(response.id)).model_dump() == cancelled.model_dump()
        assert (await client.responses.retrieve(response.id)).status == "cancelled"
        # Its events are those of the stored response: whoever has some of before gets the last alone.
        events = [event async for event in await client.responses.retrieve(response.id, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert deltas == [cancelled.output_text] and events[0].response.output == []  # type: ignore[union-attr]
        (rest,) = [e async for e in await client.responses.retrieve(response.id, stream=True, starting_after=3)]
        for last, number in ((events[-1], len(events) - 1), (rest, 4)):
            assert last.type == "response.failed" and last.sequence_number == number
            assert last.response.model_dump() == cancelled.model_dump()
        # What it wrote so far may be gone on from.
        manual.peer.automatic = True
        await client.responses.create(model=MODEL, input="And?", previous_response_id=response.id)
        plain = await client.responses.create(model=MODEL, input="Hi")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.cancel(plain.id)
        assert refused.value.code == "not_in_background"
        with pytest.raises(openai.NotFoundError):
            await client.responses.cancel("resp_unknown")
    await manual.until_metrics(
        'tideway_gateway_kept_call_ends_total{outcome="cancelled"} 1.0', "tideway_gateway_open_streams 0.0"
    )


async def test_its_events_are_read_by_whoever_comes(manual: Stack) -> None:
    tokens = manual.ids(TEXT)
    async with manual.openai() as client, asyncio.timeout(30):
        stream = asyncio.create_task(client.responses.create(model=MODEL, input="Hi", background=True, stream=True))
        request = await manual.next_request()
        manual.peer.emit(request, 0, tokens[:4])
        events = await stream
        seen = [await anext(events) for _ in range(5)]  # type: ignore[arg-type]
        await events.close()
        response_id = seen[0].response.id  # type: ignore[union-attr]
        await asyncio.sleep(0.1)
        assert (await client.responses.retrieve(response_id)).status == "in_progress"
        rest = asyncio.create_task(
            client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
        )
        await asyncio.sleep(0.05)
        manual.peer.emit(request, 4, tokens[4:], FinishReason.LENGTH)
        seen += [event async for event in await rest]
        assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == TEXT
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        assert (await over(client, response_id)).output_text == TEXT
        # One that was asked for without events has them all the same.
        response, request = await begun(manual, client)
        manual.peer.emit(request, 0, tokens, FinishReason.LENGTH)
        again = [event async for event in await client.responses.retrieve(response.id, stream=True)]
        assert again[-1].type == "response.incomplete" and again[0].type == "response.created"
        # Whoever reads one that is cancelled is told.
        response, request = await begun(manual, client)
        manual.peer.emit(request, 0, tokens[:4])
        events = await client.responses.retrieve(response.id, stream=True)
        seen = [await anext(events) for _ in range(3)]
        await client.responses.cancel(response.id)
        *_, last = [event async for event in events]
        assert last.type == "response.failed" and last.response.status == "cancelled"


async def test_one_that_fails_says_why(manual: Stack) -> None:
    async with manual.openai() as client:
        response, request = await begun(manual, client)
        error = ErrorInfo(ErrorCode.INTERNAL, "It broke.")
        manual.peer.emit(request, 0, [], FinishReason.ERROR, error=error)
        failed = await over(client, response.id)
        assert failed.status == "failed" and failed.error is not None and failed.error.message == "It broke."
        # One whose call was lost with all that had it.
        response, request = await begun(manual, client)
        making = manual.gateway.context.background._making
        making[response.id].task.cancel()
        await until(lambda: not making)
        records = await manual.peer.bus.key_value(KEPT_CALLS)
        manual.gateway.context.kept._here.clear()
        await records.purge(response.id)
        lost = await over(client, response.id)
        assert lost.status == "failed" and lost.error is not None and "gone" in lost.error.message


async def test_a_deleted_one_ends(manual: Stack) -> None:
    async with manual.openai() as client:
        response, request = await begun(manual, client)
        await client.responses.delete(response.id)
        await until(lambda: request.request_id in manual.peer.cancelled)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)


@asynccontextmanager
async def two_gateways(
    nats_settings: BusSettings, checkpoint: Path
) -> AsyncIterator[tuple[Stack, openai.AsyncOpenAI, GatewayService, openai.AsyncOpenAI]]:
    """A stack whose frames the test sends, a client of it, another gateway and a client of that."""
    async with (
        logging_stack(nats_settings, checkpoint) as stack,
        stack.openai() as client,
        running_gateway(nats_settings, gateway_id="other") as other,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{other.port}/v1", api_key="x", max_retries=0) as there,
    ):
        stack.peer.automatic = False
        yield stack, client, other, there


async def test_one_that_is_deleted_stays_so_whoever_makes_it(
    nats_settings: BusSettings, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_gateways(nats_settings, checkpoint) as (stack, client, _, there):
        response, request = await begun(stack, client)
        # The one that began it is not told in time, and makes it to its end.
        stack.peer.emit(request, 0, stack.ids(TEXT)[:4])
        keep, may_keep = stack.gateway.context.responses.keep, asyncio.Event()

        async def late(*args: Any) -> None:
            await may_keep.wait()
            await keep(*args)

        monkeypatch.setattr(stack.gateway.context.responses, "keep", late)
        await there.responses.delete(response.id)
        may_keep.set()
        await until(lambda: not stack.gateway.context.background._making)
        for one in (client, there):
            with pytest.raises(openai.NotFoundError):
                await one.responses.retrieve(response.id)
            with pytest.raises(openai.NotFoundError):
                await one.responses.delete(response.id)


async def test_another_gateway_has_it_too(nats_settings: BusSettings, checkpoint: Path) -> None:
    async with two_gateways(nats_settings, checkpoint) as (stack, client, _, there):
        tokens = stack.ids(TEXT)
        response, _ = await begun(stack, client)
        assert (await there.responses.cancel(response.id)).status == "cancelled"
        assert (await over(client, response.id)).status == "cancelled"
        response, request = await begun(stack, client)
        stack.peer.emit(request, 0, tokens[:4])
        assert (await there.responses.retrieve(response.id)).status == "in_progress"
        # The one that began it goes away in the middle.
        await stack.gateway.stop()
        stack.peer.emit(request, 4, tokens[4:], FinishReason.LENGTH)
        assert (await over(there, response.id)).output_text == TEXT


async def test_another_gateway_takes_it_up_once(nats_settings: BusSettings, checkpoint: Path) -> None:
    async with two_gateways(nats_settings, checkpoint) as (stack, client, other, there):
        tokens = stack.ids(TEXT)
        response, request = await begun(stack, client)
        stack.peer.emit(request, 0, tokens[:4])
        polled = await asyncio.gather(*(there.responses.retrieve(response.id) for _ in range(4)))
        assert {one.status for one in polled} == {"in_progress"}
        stack.peer.emit(request, 4, tokens[4:], FinishReason.LENGTH)
        assert (await over(there, response.id)).output_text == TEXT
        in_flight = other.context.metrics.in_flight.labels("online")._value
        await until(lambda: in_flight.get() == 0)
        assert not other.context.background._making


async def test_one_that_is_being_placed_is_found_by_its_idempotency_key(manual: Stack) -> None:
    key = {"idempotency-key": "once"}
    manual.peer.may_answer.clear()
    async with manual.openai() as client, asyncio.timeout(20):
        first = asyncio.create_task(begun(manual, client, extra_headers=key))
        request = await manual.next_request()
        again = await client.responses.create(model=MODEL, input="Hi", background=True, extra_headers=key)
        assert again.status == "queued" and again.background and again.output == []
        manual.peer.may_answer.set()
        assert (await first)[0].id == again.id
        manual.peer.emit(request, 0, manual.ids(TEXT), FinishReason.LENGTH)
        assert (await over(client, again.id)).output_text == TEXT
    assert len(manual.peer.submitted) == 1


async def test_it_is_made_where_its_client_goes_before_it_is_told_the_id(
    manual: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    responses, may_keep = manual.gateway.context.responses, asyncio.Event()
    keep = responses.keep

    async def kept_later(*args: Any) -> None:
        await may_keep.wait()
        await keep(*args)

    monkeypatch.setattr(responses, "keep", kept_later)
    async with manual.openai() as client, asyncio.timeout(20):
        creating = asyncio.create_task(client.responses.create(model=MODEL, input="Hi", background=True))
        request = await manual.next_request()
        await asyncio.sleep(0.1)
        creating.cancel()
        await asyncio.sleep(0.3)
        may_keep.set()
        manual.peer.emit(request, 0, manual.ids(TEXT), FinishReason.LENGTH)
        response_id = request.request_id.removesuffix("-0")
        stored = await manual.peer.bus.key_value(RESPONSES)
        while (entry := await stored.get(response_id)) is None or not answered_of(entry.value).is_over:
            await asyncio.sleep(0.05)


def without_a_leader(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """The stream of stored responses has none at the stack's gateway, until the event is set."""
    stored, has_leader = stack.gateway.context.responses._stored, asyncio.Event()
    get = stored.get

    async def get_from_a_leader(key: str) -> Any:
        if not has_leader.is_set():
            raise silent("stream KV_tideway_responses has no leader")
        return await get(key)

    monkeypatch.setattr(stored, "get", get_from_a_leader)
    monkeypatch.setattr(writes, "WRITE_RETRY_S", 0.02)
    return has_leader


async def test_one_that_ends_while_jetstream_elects_is_stored(manual: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    async with manual.openai() as client, asyncio.timeout(20):
        response, request = await begun(manual, client)
        has_leader = without_a_leader(manual, monkeypatch)
        manual.peer.emit(request, 0, manual.ids(TEXT), FinishReason.LENGTH)
        so_far = manual.gateway.context.background.so_far
        await until(lambda: (one := so_far(response.id)) is not None and one.status == "incomplete")
        await asyncio.sleep(0.1)
        has_leader.set()
        await manual.until_metrics("tideway_gateway_background_responses 0.0")
        stored = await (await manual.peer.bus.key_value(RESPONSES)).get(response.id)
        assert stored is not None and answered_of(stored.value).is_over


async def test_a_response_that_ends_while_jetstream_elects_is_stored(
    manual: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_leader = without_a_leader(manual, monkeypatch)
    async with manual.openai() as client, asyncio.timeout(20):
        creating = asyncio.create_task(client.responses.create(model=MODEL, input="Hi"))
        manual.peer.emit(await manual.next_request(), 0, manual.ids(TEXT), FinishReason.LENGTH)
        await asyncio.sleep(0.2)
        has_leader.set()
        response = await creating
        assert (await client.responses.retrieve(response.id)).output_text == TEXT


async def test_one_that_cannot_be_kept_is_refused_for_the_true_reason(
    manual: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_a_leader(manual, monkeypatch)
    monkeypatch.setattr(Responses.keep, "__defaults__", (0.05,))
    async with manual.openai() as client, asyncio.timeout(20):
        with pytest.raises(openai.InternalServerError) as refused:
            await client.responses.create(model=MODEL, input="Hi", background=True)
        assert refused.value.status_code == 503 and "has no leader" in refused.value.message
        assert "retry-after" in refused.value.response.headers
    await until(lambda: len(manual.peer.cancelled) == 1)


async def test_a_poll_may_be_given_up(
    nats_settings: BusSettings, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with logging_stack(nats_settings, checkpoint) as stack:
        stack.peer.automatic = False
        async with stack.openai() as client, running_gateway(nats_settings, gateway_id="other") as other:
            there = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{other.port}/v1", api_key="x", max_retries=0)
            async with there, asyncio.timeout(20):
                response, request = await begun(stack, client)
                read, asked = other.context.tokenizers.get, asyncio.Event()

                async def never(spec: Any) -> Any:
                    asked.set()
                    await asyncio.Event().wait()

                monkeypatch.setattr(other.context.tokenizers, "get", never)
                poll = asyncio.create_task(there.responses.retrieve(response.id))
                await asked.wait()
                poll.cancel()
                monkeypatch.setattr(other.context.tokenizers, "get", read)
                stack.peer.emit(request, 0, stack.ids(TEXT), FinishReason.LENGTH)
                assert (await over(there, response.id)).output_text == TEXT
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_key_s_limit_counts_it_once(nats_settings: BusSettings, checkpoint: Path) -> None:
    async with logging_stack(nats_settings, checkpoint, api_keys="k:1") as stack:
        stack.peer.automatic = False
        async with stack.openai("k") as client, asyncio.timeout(20):
            stream = await asyncio.create_task(
                client.responses.create(model=MODEL, input="Hi", background=True, stream=True, extra_headers=SIGNS)
            )
            with pytest.raises(openai.RateLimitError):
                await client.responses.create(model=MODEL, input="Hi", background=True)
            request = await stack.next_request()
            stack.peer.emit(request, 0, stack.ids(TEXT), FinishReason.LENGTH)
            assert [event async for event in stream][-1].type == "response.incomplete"
            stack.peer.automatic = True
            again = await client.responses.create(model=MODEL, input="Hi")
            assert again.status == "completed" or again.status == "incomplete"


async def test_one_that_is_over_counts_no_more_while_it_is_stored(
    nats_settings: BusSettings, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with logging_stack(nats_settings, checkpoint, api_keys="k:1") as stack:
        stack.peer.automatic = False
        async with stack.openai("k") as client, asyncio.timeout(20):
            response, request = await begun(stack, client)
            responses, is_over, may_keep = stack.gateway.context.responses, asyncio.Event(), asyncio.Event()
            keep = responses.keep

            async def late(one: Any, *more: Any) -> None:
                if one.id == response.id:
                    is_over.set()
                    await may_keep.wait()
                await keep(one, *more)

            monkeypatch.setattr(responses, "keep", late)
            stack.peer.emit(request, 0, stack.ids(TEXT), FinishReason.LENGTH)
            await is_over.wait()
            stack.peer.automatic = True
            assert (await client.responses.create(model=MODEL, input="Hi")).status in ("completed", "incomplete")
            may_keep.set()
            await until(lambda: not stack.gateway.context.background._making)
            assert (await client.responses.retrieve(response.id)).status == "incomplete"


SIGNS = {"x-keep-alive-interval": "1"}
