"""More requests than the scheduler, or this process, keeps up with: they wait for their turn, and none is told that nobody
answers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from shared.bus.interface import ServiceError
from shared.messages.cluster import ModelSpec
from shared.messages.requests import Accepted, ErrorCode, GenerationRequest
from shared.runtime.settings import BusSettings
from tests.gateway.conftest import MODEL, running_stack


@pytest.fixture
def spec(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    monkeypatch.setattr("services.gateway.streams.placing.SCHEDULER_TIMEOUT_S", 0.5)
    monkeypatch.setattr("services.gateway.streams.placing.PATIENCE_S", 0.2)
    return ModelSpec(MODEL, str(checkpoint))


async def test_many_at_once_wait_for_a_scheduler_that_takes_its_time(
    nats_settings: BusSettings, spec: ModelSpec
) -> None:
    async with running_stack(nats_settings, [spec], instance=False, max_submissions=8) as stack:
        stack.say("Hello world")
        peer, turn, at_once = stack.peer, asyncio.Lock(), []
        submit = peer._submit

        async def one_after_the_other(request: GenerationRequest) -> Accepted:
            at_once.append(len(stack.gateway.context.table.streams))
            async with turn:
                await asyncio.sleep(0.015)
                return await submit(request)

        await peer.stop_scheduler()
        peer._submit = one_after_the_other
        await peer.start_scheduler()
        answers = await asyncio.gather(*(stack.post("/v1/completions", prompt="x") for _ in range(100)))
        assert [answer.status_code for answer in answers] == [200] * 100
        assert max(at_once) > 50, "they did come at once"


async def test_a_gateway_that_was_late_itself_asks_again(nats_settings: BusSettings, spec: ModelSpec) -> None:
    async with running_stack(nats_settings, [spec], instance=False) as stack:
        stack.say("Hello world")
        peer, submit = stack.peer, stack.peer._submit

        async def hold_everything_up_once(request: GenerationRequest) -> Accepted:
            if not peer.submitted:
                peer.submitted.append(request)
                time.sleep(0.7)  # noqa: ASYNC251 - the gateway is on this event loop, too
                raise ServiceError.of(ErrorCode.BUSY, "too late to tell")
            return await submit(request)

        await peer.stop_scheduler()
        peer._submit = hold_everything_up_once
        await peer.start_scheduler()
        assert (await stack.post("/v1/completions", prompt="x")).status_code == 200
        assert len(peer.submitted) == 2


async def test_more_streams_than_may_be_open_are_told_when_to_come_back(
    nats_settings: BusSettings, spec: ModelSpec
) -> None:
    async with running_stack(nats_settings, [spec], max_in_flight=3) as stack:
        stack.peer.automatic = False
        readers = [stack.read() for _ in range(3)]
        for number in range(3):
            await stack.next_request(number)
        refused = await stack.post("/v1/completions", prompt="x", stream=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        for reader in readers:
            await reader.hang_up()


async def test_a_request_does_not_wait_for_its_turn_beyond_its_deadline(
    nats_settings: BusSettings, spec: ModelSpec
) -> None:
    async with running_stack(nats_settings, [spec], instance=False, max_submissions=1) as stack:
        stack.peer.hang = True
        first = asyncio.create_task(stack.post("/v1/completions", prompt="x"))
        await stack.next_request()
        headers = {"x-request-timeout": "0.1"}
        late = await stack.client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers)
        assert (late.status_code, late.json()["error"]["code"]) == (408, "deadline_exceeded")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
