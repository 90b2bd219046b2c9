"""Sends planned requests at their times and collects their records.

An open loop never waits for an answer, nor for a connection: every request is a task of its own. How late the client itself
was is measured, both in sending and on its event loop (which would make answers look later than they came).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np

from shared.messages.requests import RequestClass
from shared.runtime.garbage import frozen_heap
from tideway.bench.records import INTERRUPTED, UNFINISHED, RequestRecord
from tideway.bench.workload import PlannedRequest

logger = logging.getLogger(__name__)

LOOP_PROBE_INTERVAL_S = 0.02
CANCEL_TIMEOUT_S = 5.0

Sender = Callable[[PlannedRequest, RequestRecord, Callable[[], float]], Awaitable[None]]
"""Sends one request and fills in its record; the last argument reads the run's clock. Raises nothing that is expected."""


class Lateness(msgspec.Struct, frozen=True, kw_only=True):
    """The client's own. Where it is not small against the latencies, they are the client's and not the server's."""

    num_sent: int = 0
    """Requests sent by the open loop."""
    send_p50_s: float = 0.0
    send_p99_s: float = 0.0
    send_max_s: float = 0.0
    """Time from the planned time to the sending."""
    loop_p99_s: float = 0.0
    loop_max_s: float = 0.0
    """By how much a timer of the event loop fires late."""


class Run:
    """One run of a workload: call `run` once; the fields may be read while it runs."""

    def __init__(
        self, requests: Sequence[PlannedRequest], send: Sender, *, duration_s: float | None, drain_s: float
    ) -> None:
        """`duration_s`: nothing is sent after it; None: all is sent, closed loops while open ones still send.
        `drain_s`: how long what is in flight may then take."""
        self._send = send
        self._drain_s = drain_s
        self._open = sorted((r for r in requests if not r.concurrency), key=lambda request: request.at_s)
        self._closed: dict[str, deque[PlannedRequest]] = {}
        for request in requests:
            if request.concurrency:
                self._closed.setdefault(request.stream, deque()).append(request)
        if duration_s is None and self._open and self._closed:
            duration_s = self._open[-1].at_s
        self.duration_s = duration_s
        if duration_s is not None:
            self._open = [request for request in self._open if request.at_s <= duration_s]
        self.records: list[RequestRecord] = []
        self.in_flight: Counter[RequestClass] = Counter()
        self._send_lateness: list[float] = []
        self._loop_lateness: list[float] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._start_s = 0.0
        self._is_sending = True

    def now(self) -> float:
        return time.perf_counter() - self._start_s

    async def run(self, stop: asyncio.Event) -> list[RequestRecord]:
        """Until all is done, or `stop` is set; what is then in flight is given up."""
        with frozen_heap():
            return await self._run(stop)

    async def _run(self, stop: asyncio.Event) -> list[RequestRecord]:
        self._start_s = time.perf_counter()
        sending = [asyncio.create_task(self._send_open())]
        for waiting in self._closed.values():
            slots = min(waiting[0].concurrency, len(waiting))
            sending += [asyncio.create_task(self._send_closed(waiting)) for _ in range(slots)]
        all_sent = asyncio.create_task(asyncio.wait(sending, return_when=asyncio.FIRST_EXCEPTION))
        probe, stopping = asyncio.create_task(self._probe_loop()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((all_sent, stopping), timeout=self.duration_s, return_when=asyncio.FIRST_COMPLETED)
            self._is_sending = False
            # One planned for the very end may still be on its way out.
            await asyncio.wait((sending[0], stopping), return_when=asyncio.FIRST_COMPLETED)
            for sender in sending:
                if sender.done():
                    sender.result()
            in_flight = {*self._tasks, *(task for task in sending[1:] if not task.done())}
            if in_flight and not stop.is_set():
                drained = asyncio.create_task(asyncio.wait(in_flight))
                await asyncio.wait((drained, stopping), timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED)
                drained.cancel()
        finally:
            self._is_sending = False
            cancelled = {all_sent, *sending, *self._tasks, probe, stopping}
            for task in cancelled:
                task.cancel()
            await asyncio.wait(cancelled, timeout=CANCEL_TIMEOUT_S)
            for record in self.records:
                if record.end_s is None:
                    record.error = INTERRUPTED if stop.is_set() else UNFINISHED
                    record.end_s = self.now()
        return self.records

    async def _send_open(self) -> None:
        for request in self._open:
            if (wait_s := request.at_s - self.now()) > 0:
                await asyncio.sleep(wait_s)
            record = self._record(request, request.at_s)
            self._send_lateness.append(max(0.0, self.now() - request.at_s))
            task = asyncio.create_task(self._one(request, record))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send_closed(self, waiting: deque[PlannedRequest]) -> None:
        while waiting and self._is_sending:
            request = waiting.popleft()
            if (wait_s := request.at_s - self.now()) > 0:
                await asyncio.sleep(wait_s)
            if self._is_sending:
                await self._one(request, self._record(request, self.now()))

    def _record(self, request: PlannedRequest, arrival_s: float) -> RequestRecord:
        record = RequestRecord(
            request_id=request.request_id,
            model=request.model,
            request_class=request.request_class,
            stream=request.stream,
            arrival_s=arrival_s,
            planned_prompt_tokens=request.prompt_tokens,
            planned_output_tokens=request.output_tokens,
            ttft_objective_s=request.ttft_objective_s,
            tpot_objective_s=request.tpot_objective_s,
        )
        self.records.append(record)
        return record

    async def _one(self, request: PlannedRequest, record: RequestRecord) -> None:
        self.in_flight[request.request_class] += 1
        try:
            await self._send(request, record, self.now)
        except Exception as error:
            logger.exception("request %s", request.request_id)
            record.error, record.error_message, record.end_s = "client_error", repr(error), self.now()
        finally:
            self.in_flight[request.request_class] -= 1

    async def _probe_loop(self) -> None:
        while True:
            due_s = self.now() + LOOP_PROBE_INTERVAL_S
            await asyncio.sleep(LOOP_PROBE_INTERVAL_S)
            self._loop_lateness.append(max(0.0, self.now() - due_s))

    def lateness(self) -> Lateness:
        send, loop = np.array(self._send_lateness or [0.0]), np.array(self._loop_lateness or [0.0])
        send_p50, send_p99 = np.percentile(send, (50, 99))
        return Lateness(
            num_sent=len(self._send_lateness),
            send_p50_s=float(send_p50),
            send_p99_s=float(send_p99),
            send_max_s=float(send.max()),
            loop_p99_s=float(np.percentile(loop, 99)),
            loop_max_s=float(loop.max()),
        )
