"""A gateway while NATS takes connections and answers nothing: nobody is told what is not so."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from services.gateway.requests import other_routes
from shared.messages.cluster import ModelSpec
from shared.runtime.settings import BusSettings
from tests.conftest import NatsServer
from tests.gateway.batching import ended, line, reach, read, start
from tests.gateway.conftest import MODEL, Stack, running_stack
from tests.gateway.peer import until

NUM_LINES = 60
SEEN_S = 4.0
"""Until it is known that nothing comes from NATS any more."""
PAUSE_S = 7.0


@pytest.fixture
async def stack(fresh_nats: NatsServer, checkpoint: Path) -> AsyncIterator[Stack]:
    settings = BusSettings(nats_url=fresh_nats.url)
    async with running_stack(settings, [ModelSpec(MODEL, str(checkpoint))], batch_lines_in_flight=4) as stack:
        stack.say("Hello world")
        yield stack


async def test_a_server_that_hangs_makes_no_model_unknown(stack: Stack, fresh_nats: NatsServer) -> None:
    batch = await start(stack.openai(), [line(number) for number in range(NUM_LINES)])
    os.kill(fresh_nats.pid, signal.SIGSTOP)
    try:
        asking = []
        for _ in range(int(2 * SEEN_S)):
            asking.append(asyncio.create_task(stack.post("/v1/completions", prompt="x", max_tokens=5)))
            await asyncio.sleep(0.5)
        body = {"model": "never-there", "prompt": "x"}
        unseen = await stack.client.post("/v1/completions", json=body)
        ready = await stack.client.get("/ready")
        names = [card["id"] for card in (await stack.client.get("/v1/models")).json()["data"]]
        await asyncio.sleep(PAUSE_S - SEEN_S)
    finally:
        os.kill(fresh_nats.pid, signal.SIGCONT)
    assert names == [MODEL]
    assert ready.status_code == 200 and ready.json()["models"] == [MODEL] and ready.json()["problems"]
    assert_is_true_refusal(unseen)
    for answer in await asyncio.gather(*asking):
        if answer.status_code != 200:
            assert_is_true_refusal(answer)
    await until(lambda: not stack.gateway.context.bus.problems, "all is well again")
    assert (await stack.post("/v1/completions", prompt="x", max_tokens=5)).status_code == 200
    assert (await stack.client.post("/v1/completions", json=body)).status_code == 404
    done = await reach(stack.openai(), batch.id, ended)
    assert (done.status, done.request_counts.completed) == ("completed", NUM_LINES)
    assert len(await read(stack.openai(), done.output_file_id)) == NUM_LINES


def assert_is_true_refusal(answer: httpx.Response) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "unavailable"), error
    assert "NATS" in error["message"] and int(answer.headers["retry-after"]) >= 1


async def test_it_is_ready_for_a_while_without_nats(
    stack: Stack, fresh_nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_nats.kill()
    await until(lambda: not stack.gateway.context.bus.is_connected, "loss noticed")
    ready = await stack.client.get("/ready")
    assert ready.status_code == 200 and "not connected to NATS" in ready.json()["problems"][0]
    monkeypatch.setattr(other_routes, "READY_WITHOUT_NATS_S", 0.1)
    await asyncio.sleep(0.2)
    assert (await stack.client.get("/ready")).status_code == 503
