"""The clients: streams over the gateway's own parts, each held against what an undisturbed run would have made."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from prometheus_client import CollectorRegistry

from bench.migration_chaos.executor import VOCABULARY, output
from services.gateway.metrics import GatewayMetrics
from services.gateway.models.catalog import Catalog
from services.gateway.streams.placing import Placer
from services.gateway.streams.stream import Stream
from services.gateway.streams.stream_table import StreamTable
from services.gateway.streams.timelines import Timelines
from shared.bus.interface import Bus, ServiceError
from shared.messages.cluster import ModelSpec
from shared.messages.requests import (
    FinishReason,
    GenerationRequest,
    Priority,
    RequestClass,
    SamplingParams,
    TokenEntry,
    pack_tokens,
)
from shared.messages.timeline import EventKind
from shared.runtime.tasks import set_within

GATEWAY_ID = "chaos"
HANG_S = 60.0
"""A stream without a new token for so long hangs. What takes long but goes on only shows how busy the machine is. Offline
requests wait as long as online ones leave them no turn, so theirs counts from the end of the last online stream."""
NUM_PREFIXES = 4
NUM_TIMELINES = 64
"""Timelines that are kept of streams that have ended, for the report of one that failed."""


class _NoTokenizers:
    """The catalog's; nobody reads text here."""

    def preload(self, spec: ModelSpec) -> None:
        """Nothing to load."""

    def forget(self, keep: set[str]) -> None:
        """Nothing was loaded."""


class Streams:
    """Keeps `target` of them under way. `on_failure(text)` is told of everything that is wrong."""

    def __init__(self, bus: Bus, seed: int, on_failure: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        self.silences_s = dict.fromkeys(map(str, RequestClass), 0.0)
        """By class, the longest until a stream's next token, or its end."""
        self._num_online = 0
        """Streams of online requests that are open."""
        self._online_ended_s = 0.0
        """Time at which the last of them ended."""
        self.target = 0
        self._bus = bus
        self._seed = seed
        self._on_failure = on_failure
        self.metrics = GatewayMetrics(CollectorRegistry())
        self._timelines = Timelines(bus, GATEWAY_ID, NUM_TIMELINES, HANG_S, lambda _: (0.0, 0.0))
        catalog = Catalog(bus, _NoTokenizers())  # type: ignore[arg-type]
        placer = Placer(bus, catalog, self.metrics, max_submissions=64)
        self.table = StreamTable(bus, GATEWAY_ID, catalog, placer, self.metrics, self._timelines)
        self._catalog = catalog
        self._expected: dict[str, list[int]] = {}
        self._numbers = itertools.count()
        self._clients: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        random = Random(f"{seed} prefixes")
        self._prefixes = [_tokens(random, random.randrange(40, 160)) for _ in range(NUM_PREFIXES)]

    async def start(self) -> None:
        await self._catalog.start(self.table.on_instance)
        take = self.table.take

        def checked(sender: str, entries: list[TokenEntry]) -> None:
            for entry in entries:
                self._check(sender, entry)
            take(sender, entries)

        self.table.take = checked  # type: ignore[method-assign]
        await self.table.start()
        self._feeding = asyncio.create_task(self._feed())

    async def stop(self) -> None:
        self._feeding.cancel()
        for client in self._clients:
            client.cancel()
        await asyncio.gather(self._feeding, *self._clients, return_exceptions=True)
        await self.table.stop()
        await self._catalog.stop()

    @property
    def num_open(self) -> int:
        return len(self._clients)

    def retarget(self, target: int) -> None:
        self.target = target
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """The client goes away."""
        if (stream := self.table.streams.get(request_id)) is not None:
            self.table.close(stream)
            stream.on_news()

    async def _feed(self) -> None:
        while True:
            self._wake.clear()
            while len(self._clients) < self.target:
                client = asyncio.create_task(self._client(next(self._numbers)))
                self._clients.add(client)
                client.add_done_callback(self._left)
            await self._wake.wait()

    def _left(self, client: asyncio.Task[None]) -> None:
        self._clients.discard(client)
        self._wake.set()
        if not client.cancelled() and (error := client.exception()) is not None:
            self._on_failure(f"a client failed: {error!r}")

    def _request(self, number: int) -> GenerationRequest:
        random = Random(f"{self._seed} request {number}")
        model = "a" if random.random() < 0.7 else "b"
        prompt = _tokens(random, random.choice((3, 20, 60, 150, 300)) + random.randrange(20))
        if random.random() < 0.3:
            prompt = self._prefixes[random.randrange(NUM_PREFIXES)] + prompt[:100]
        sampling = SamplingParams(max_tokens=random.choice((30, 100, 180, 280)) + random.randrange(20))
        if random.random() < 0.1:
            stops = tuple(random.sample(range(VOCABULARY), 4))
            sampling = SamplingParams(max_tokens=sampling.max_tokens, stop_token_ids=stops)
        request_class = RequestClass.OFFLINE if random.random() < 0.2 else RequestClass.ONLINE
        priority = Priority.HIGH if random.random() < 0.1 else Priority.NORMAL
        return GenerationRequest(
            request_id=f"r{number}",
            gateway_id=GATEWAY_ID,
            model=model,
            prompt=pack_tokens(prompt),
            sampling=sampling,
            request_class=request_class,
            priority=priority,
        )

    def _check(self, sender: str, entry: TokenEntry) -> None:
        """Whoever says it and whether or not the stream takes it: no entry may be wrong."""
        expected = self._expected.get(entry.request_id)
        if expected is None:
            return
        told = memoryview(entry.tokens).cast("i").tolist()
        if told != expected[entry.offset : entry.offset + len(told)]:
            self._on_failure(
                f"{sender} said other tokens of {entry.request_id} in epoch {entry.epoch} at {entry.offset}"
            )

    async def _client(self, number: int) -> None:
        request = self._request(number)
        request_id, sampling = request.request_id, request.sampling
        prompt = memoryview(request.prompt).cast("i").tolist()
        expected = output(request.model, prompt, sampling.max_tokens, sampling.stop_token_ids)
        self._expected[request_id] = expected
        try:
            await self._follow(request, expected)
        finally:
            # What comes later is of a stream that has ended.
            asyncio.get_running_loop().call_later(30.0, self._expected.pop, request_id, None)

    async def _follow(self, request: GenerationRequest, expected: list[int]) -> None:
        news = asyncio.Event()
        try:
            stream = await self.table.open(request, self._bus.now(), news.set)
        except ServiceError as error:
            self.counts[f"not taken: {error.code}"] += 1  # the client is told before it reads anything
            await asyncio.sleep(0.1)
            return
        self._num_online += (is_online := request.request_class is RequestClass.ONLINE)
        try:
            await self._wait(stream, request.request_class, news)
        finally:
            self._num_online -= is_online
            if not self._num_online:
                self._online_ended_s = asyncio.get_running_loop().time()
        if not stream.is_open:
            self._judge(stream, expected)
            return
        self._on_failure(f"{_describe(stream)} hangs at {len(stream.tokens)} of {len(expected)} tokens")
        self.table.close(stream)
        self.counts["hung"] += 1

    async def _wait(self, stream: Stream, request_class: RequestClass, news: asyncio.Event) -> None:
        """Returns when the stream has ended, or hangs."""
        now = asyncio.get_running_loop().time
        heard_s, num_tokens = now(), 0
        while stream.is_open:
            since_s = heard_s
            if request_class is RequestClass.OFFLINE:
                since_s = max(heard_s, now() if self._num_online else self._online_ended_s)
            if since_s + HANG_S <= now():
                return
            if not await set_within(news, since_s + HANG_S - now()):
                continue
            news.clear()
            if len(stream.tokens) > num_tokens or not stream.is_open:
                self.silences_s[request_class] = max(self.silences_s[request_class], now() - heard_s)
                heard_s, num_tokens = now(), len(stream.tokens)

    def _judge(self, stream: Stream, expected: list[int]) -> None:
        tokens = stream.tokens.tolist()
        if tokens != expected[: len(tokens)]:
            self.counts["differing"] += 1
            self._on_failure(f"{_describe(stream)} differs")
        elif stream.failure is not None:
            self.counts["failed"] += 1
            told = self._timelines.events_of(stream.request_id)
            lost = ", ".join(
                f"{event.place or 'nobody'} {event.cause} at {event.numbers[0]:.0f} tokens"
                for event in told
                if event.kind is EventKind.LOST
            )
            self._on_failure(f"{_describe(stream)} failed: {stream.failure}; lost by {lost or 'nobody'}")
        elif stream.finish_reason is None:
            self.counts["cancelled"] += 1
        elif len(tokens) != len(expected) or stream.finish_reason not in (FinishReason.LENGTH, FinishReason.STOP):
            self.counts["short"] += 1
            self._on_failure(f"{_describe(stream)} has {len(tokens)} of {len(expected)} tokens: {stream.finish_reason}")
        else:
            self.counts["complete"] += 1
            self.counts["tokens"] += len(tokens)


def _tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(count)]


def _describe(stream: Stream) -> str:
    return f"{stream.request_id} (owner {stream.owner}, epoch {stream.epoch})"


def counters(metrics: GatewayMetrics) -> dict[str, Any]:
    """What the gateway had to do, for the report."""
    found = {}
    for metric in (metrics.moved_streams, metrics.replacements, metrics.replays, metrics.dropped_entries):
        for family in metric.collect():
            for sample in family.samples:
                if sample.name.endswith("_total") and sample.value:
                    label = ",".join(sample.labels.values())
                    name = sample.name.removeprefix("tideway_gateway_").removesuffix("_total")
                    found[f"{name} {label}".strip()] = int(sample.value)
    return found
