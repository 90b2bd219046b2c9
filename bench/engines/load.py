"""Requests of random token ids, greedy, streamed, whose answers all have the length that was asked for."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench.peers.checkpoints import NUM_SINGLE
from bench.reporting import others_processor_s
from shared.messages.requests import RequestClass
from tideway.bench.client import Body, Connections, Target, send
from tideway.bench.records import UNFINISHED, RequestRecord

HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
RAMP_S = 4.0
"""Time for which a batch runs before the first online request."""
ABORT_S = 2.0
"""Time for a server to notice that the clients of a batch have left."""


class LoadError(Exception):
    """A request failed."""


class Lengths(NamedTuple):
    """Tokens of a request."""

    prompt: int
    output: int


class Turn(NamedTuple):
    """What one turn of a server gave. Times are seconds since its start."""

    online: list[RequestRecord]
    batch: list[RequestRecord]
    duration_s: float
    """Seconds from the first online request to the end of the last answer, or of the measured time."""
    began_s: float
    others_cores: float
    """Processor cores that processes outside of this bench took."""

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second of online requests."""
        return sum(record.output_tokens for record in self.online) / self.duration_s

    @property
    def batch_tokens_per_s(self) -> float:
        """Prompt and output tokens of the batch within the measured time: a prompt counts at its first output token."""
        end_s, total = self.began_s + self.duration_s, 0.0
        for record in self.batch:
            if record.first_token_s is None:
                continue
            if self.began_s <= record.first_token_s <= end_s:
                total += record.planned_prompt_tokens
            inside = sum(self.began_s <= at_s <= end_s for at_s in record.token_times)
            total += record.output_tokens * inside / max(1, len(record.token_times))
        return total / self.duration_s


class Client:
    """Sends to one server's model. `vocabulary`: token ids are below it."""

    def __init__(self, url: str, model: str, vocabulary: int) -> None:
        self._target = Target(url=url)
        self._model = model
        self._vocabulary = vocabulary
        self._began_s = time.monotonic()

    def _now(self) -> float:
        return time.monotonic() - self._began_s

    def _body(self, lengths: Lengths, number: int, seed: int, fields: Mapping[str, Any]) -> Body:
        random = np.random.default_rng((seed, number))
        content = {
            "model": self._model,
            "prompt": random.integers(NUM_SINGLE, self._vocabulary, lengths.prompt).tolist(),
            "max_tokens": lengths.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        return Body(msgspec.json.encode(content), HEADERS)

    def _record(self, lengths: Lengths, name: str, request_class: RequestClass, arrival_s: float) -> RequestRecord:
        return RequestRecord(
            request_id=name, model=self._model, request_class=request_class, arrival_s=arrival_s,
            planned_prompt_tokens=lengths.prompt, planned_output_tokens=lengths.output,
        )  # fmt: skip

    async def closed_loop(self, lengths: Lengths, num_streams: int, num_requests: int, seed: int) -> Turn:
        """`num_streams` at once, each request after another. Raises `LoadError`."""
        records: list[RequestRecord] = []
        bodies = [self._body(lengths, number, seed, {}) for number in range(num_requests)]
        others_s, began_s = _others_s(), self._now()
        left = iter(enumerate(bodies))

        async def stream(connections: Connections) -> None:
            for number, body in left:
                record = self._record(lengths, f"{seed}-{number}", RequestClass.ONLINE, self._now())
                records.append(record)
                await send(connections, self._target, body, record, self._now)

        async with Connections(num_streams) as connections:
            await asyncio.gather(*(stream(connections) for _ in range(num_streams)))
        duration_s = self._now() - began_s
        _check(records)
        return Turn(records, [], duration_s, began_s, (_others_s() - others_s) / duration_s)

    async def open_loop(
        self,
        lengths: Lengths,
        rate: float,
        duration_s: float,
        seed: int,
        prompts_seed: int,
        batch: Lengths | None = None,
        batch_streams: int = 0,
        batch_fields: Mapping[str, Any] | None = None,
        ramp_s: float = RAMP_S,
    ) -> Turn:
        """Online requests at Poisson times; beside them a batch, of which `batch_streams` requests are always unanswered,
        from `ramp_s` before. `seed` is of the times. Raises `LoadError`."""
        times_s = arrivals(rate, duration_s, seed)
        bodies = [self._body(lengths, number, prompts_seed, {}) for number in range(len(times_s))]
        online: list[RequestRecord] = []
        offline: list[RequestRecord] = []

        async def one(connections: Connections, number: int, at_s: float) -> None:
            await asyncio.sleep(at_s - self._now())
            record = self._record(lengths, f"{seed}-{number}", RequestClass.ONLINE, at_s)
            online.append(record)
            await send(connections, self._target, bodies[number], record, self._now)

        async def work(connections: Connections, lengths: Lengths, number: int) -> None:
            while True:
                body = self._body(lengths, number, prompts_seed + 1, batch_fields or {})
                record = self._record(lengths, f"batch-{number}", RequestClass.OFFLINE, self._now())
                record.error = UNFINISHED
                offline.append(record)
                await send(connections, self._target, body, record, self._now)
                if record.error == UNFINISHED:
                    record.error = ""
                number += batch_streams

        async with Connections(len(times_s) + batch_streams) as connections:
            workers = []
            if batch is not None:
                workers = [asyncio.create_task(work(connections, batch, number)) for number in range(batch_streams)]
                await asyncio.sleep(ramp_s)
            others_s, began_s = _others_s(), self._now()
            try:
                await asyncio.gather(
                    *(one(connections, number, began_s + at_s) for number, at_s in enumerate(times_s)),
                    asyncio.sleep(duration_s),
                )
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
            passed_s = self._now() - began_s
        if workers:
            await asyncio.sleep(ABORT_S)
        _check(online)
        _check([record for record in offline if not record.is_unfinished])
        return Turn(online, offline, passed_s, began_s, (_others_s() - others_s) / passed_s)


def arrivals(rate: float, duration_s: float, seed: int) -> list[float]:
    """At least one."""
    random = np.random.default_rng(seed)
    times: list[float] = []
    at_s = float(random.exponential(1 / rate))
    while at_s < duration_s or not times:
        times.append(at_s)
        at_s += float(random.exponential(1 / rate))
    return times


def _check(records: Sequence[RequestRecord]) -> None:
    for record in records:
        if record.error or record.output_tokens != record.planned_output_tokens:
            raise LoadError(
                f"{record.request_id} of {record.model}: {record.output_tokens} of {record.planned_output_tokens} tokens; "
                f"{record.error} {record.error_message}"
            )


def _others_s() -> float:
    times = os.times()
    return others_processor_s() - times.children_user - times.children_system
