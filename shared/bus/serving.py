"""One served endpoint, whatever the transport: bounded concurrency, deadline, typed errors, trace context, statistics.

Every request is answered exactly once. There is no queue: beyond `max_concurrency` running handlers the answer is BUSY.
A handler still running when its requester has given up is cancelled. A handler that is a plain function runs at once,
without a task; a coroutine, which it may return where it has to wait, goes on in one.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from opentelemetry import context as trace_context

from shared.bus.codec import UNREADABLE, DamagedError, decoder, encode, opened, sealed
from shared.bus.interface import ServiceError
from shared.bus.metrics import BusMetrics, subject_pattern
from shared.messages.channels import Endpoint
from shared.messages.requests import ErrorCode, ErrorInfo
from shared.runtime.telemetry import context_of

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 1.0

Answer = Callable[[bytes, ErrorInfo | None], None]
"""Called with the encoded reply, or with the encoded `ErrorInfo` and the info itself."""


QUEUE_GROUP = "q"
"""One of an endpoint's servers hears a request, where several processes may serve it."""


class EndpointServer:
    def __init__(
        self, endpoint: Endpoint[Any, Any], handler: Callable[[Any], Any], max_concurrency: int, metrics: BusMetrics
    ) -> None:
        """`handler`: returns the reply, or a coroutine of it."""
        self.subject = endpoint.subject
        # Of a group a server chooses one member, which may be what is left of this process on a node that hangs.
        self.queue_group = "" if endpoint.is_addressed else QUEUE_GROUP
        self.num_requests = 0
        self.num_errors = 0
        self.processing_s = 0.0
        self.last_error = ""
        self._handler = handler
        self._decode = decoder(endpoint.query).decode
        self._max_concurrency = max_concurrency
        self._running: set[asyncio.Task[None]] = set()
        pattern = subject_pattern(endpoint.subject)
        self._outcomes = {"ok": metrics.served.labels(pattern, "ok")}
        self._outcomes |= {code: metrics.served.labels(pattern, code) for code in ErrorCode}
        self._seconds = metrics.served_seconds.labels(pattern)
        self._handlers = metrics.handlers.labels(pattern)
        self._closing = ErrorInfo(ErrorCode.UNAVAILABLE, f"the server of {self.subject} is closing")

    def accept(self, data: bytes, timeout_s: float | None, traceparent: str, answer: Answer) -> None:
        """Takes a request that has arrived; `timeout_s`: how long the requester still waits, None if it did not say."""
        self.num_requests += 1
        if len(self._running) >= self._max_concurrency:
            self._answer_error(ErrorInfo(ErrorCode.BUSY, f"{self._max_concurrency} requests run already"), answer)
            return
        if timeout_s is not None and timeout_s <= 0:
            self._answer_error(ErrorInfo(ErrorCode.DEADLINE, f"the request on {self.subject} came too late"), answer)
            return
        started_s = time.perf_counter()
        body, error = b"", None
        token = trace_context.attach(context_of(traceparent))
        try:
            reply = self._handler(self._query(data))
            if inspect.iscoroutine(reply):
                task = asyncio.get_running_loop().create_task(
                    self._run(reply, timeout_s, answer)
                )  # takes the trace along
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                return
            body = sealed(encode(reply))
        except ServiceError as raised:
            error = raised.info
        except Exception as raised:
            error = self._internal(raised)
        finally:
            trace_context.detach(token)
        self._end(started_s, body, error, answer)

    async def wait_idle(self, timeout_s: float) -> None:
        """Waits for running handlers, then cancels those still running."""
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=timeout_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=CANCEL_TIMEOUT_S)

    async def _run(self, work: Coroutine[Any, Any, Any], timeout_s: float | None, answer: Answer) -> None:
        started_s = time.perf_counter()
        body = b""
        error: ErrorInfo | None = self._closing  # unless it comes to an end of its own
        self._handlers.inc()
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                body = sealed(encode(await work))
            error = None
        except ServiceError as raised:
            error = raised.info
        except TimeoutError as raised:
            if deadline.expired():
                error = ErrorInfo(ErrorCode.DEADLINE, f"{self.subject} was not done within {timeout_s:.3g} s")
            else:
                error = self._internal(raised)
        except Exception as raised:
            error = self._internal(raised)
        finally:
            self._handlers.dec()
            self._end(started_s, body, error, answer)

    def _query(self, data: bytes) -> Any:
        try:
            return self._decode(opened(data))
        except DamagedError as raised:
            raise ServiceError.of(
                ErrorCode.UNAVAILABLE, f"the request on {self.subject} was damaged: {raised}"
            ) from None
        except UNREADABLE as raised:
            message = f"the request on {self.subject} cannot be read: {raised}"
            raise ServiceError.of(ErrorCode.BAD_REQUEST, message) from None

    def _end(self, started_s: float, body: bytes, error: ErrorInfo | None, answer: Answer) -> None:
        elapsed_s = time.perf_counter() - started_s
        self.processing_s += elapsed_s
        self._seconds.observe(elapsed_s)
        if error is None:
            self._outcomes["ok"].inc()
            answer(body, None)
        else:
            self._answer_error(error, answer)

    def _internal(self, error: Exception) -> ErrorInfo:
        logger.error("the handler of %s failed", self.subject, exc_info=error)
        return ErrorInfo(ErrorCode.INTERNAL, f"the handler of {self.subject} failed: {type(error).__name__}")

    def _answer_error(self, info: ErrorInfo, answer: Answer) -> None:
        self.num_errors += 1
        self.last_error = f"{info.code}: {info.message}"
        self._outcomes[info.code].inc()
        answer(sealed(encode(info)), info)
