"""What bench.migration_chaos takes for a stream that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bench.migration_chaos import streams as streams_module
from bench.migration_chaos.executor import output
from bench.migration_chaos.streams import Streams
from services.gateway.streams.stream import Stream
from shared.messages.requests import GenerationRequest, RequestClass, SamplingParams, pack_tokens
from tests.memory_bus import MemoryHub

HANG_S = 0.2
PROMPT = [1, 2, 3]


async def test_an_offline_stream_hangs_only_after_the_online_ones_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "HANG_S", HANG_S)
    failures: list[tuple[str, float]] = []
    now = asyncio.get_running_loop().time
    streams = Streams(MemoryHub().connect("g"), 1, lambda text: failures.append((text, now())))

    async def silent(request: GenerationRequest, arrived_s: float, on_news: Callable[[], None]) -> Stream:
        return Stream(request, arrived_s, on_news)

    monkeypatch.setattr(streams.table, "open", silent)
    monkeypatch.setattr(streams.table, "close", lambda _: None)
    requests = [
        GenerationRequest(
            request_id=request_class, gateway_id="g", model="a", prompt=pack_tokens(PROMPT),
            sampling=SamplingParams(max_tokens=4), request_class=request_class,
        )
        for request_class in (RequestClass.OFFLINE, RequestClass.ONLINE)
    ]  # fmt: skip
    await asyncio.gather(*(streams._follow(request, output("a", PROMPT, 4)) for request in requests))
    (online, online_s), (offline, offline_s) = failures
    assert online.startswith("online ") and offline.startswith("offline ")
    assert offline_s - online_s >= 0.9 * HANG_S
    assert streams.counts["hung"] == 2
