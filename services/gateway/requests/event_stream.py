"""A generation's answer as server-sent events, and what is written where nothing comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from opentelemetry import trace
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.gateway.http.errors import ApiError, invalid
from services.gateway.http.limits import AnswerBody
from services.gateway.openai.parsing import seconds_of
from services.gateway.requests.answers import StreamWriter
from services.gateway.requests.exchange import Call, ClientGone, Exchange
from services.gateway.requests.kept_calls import STREAM_HEADER
from services.gateway.streams.generation import Delta, Generation

logger = logging.getLogger(__name__)

COMMENT = b": keep-alive\n\n"
COLD_SIGN_S = 2.0
"""Seconds of silence after which a stream is told that its model is being loaded: longer than from host memory, and
than what cannot be loaded at all takes to be known."""
MIN_KEEP_ALIVE_S = 1.0


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """What a stream has in silence."""

    interval_s: float
    sign: bytes = b""
    """Empty: as its writer has it."""


def silence_s(call: Call, keep_alive: KeepAlive | None) -> float | None:
    """Until the next sign of life; None: there is none."""
    if keep_alive is None:
        return None
    return min(COLD_SIGN_S, keep_alive.interval_s) if call.cold_start() else keep_alive.interval_s


async def first_deltas(exchange: Exchange, generation: Generation, keep_alive: KeepAlive | None) -> list[Delta]:
    """Those that a stream begins with; none after so much silence that there is to be a sign of life. They decide about the
    status: until they come, a failure is still an HTTP error."""
    timeout_s = silence_s(exchange, keep_alive)
    with contextlib.suppress(TimeoutError):
        while not generation.is_done:
            if first := await exchange.next_deltas(generation, timeout_s):
                return first
    return []


def keep_alive_of(exchange: Exchange) -> KeepAlive | None:
    """Keep-alive as the client asks, else a comment as often as the settings say: some clients take any chunk for a token.
    None: never."""
    text = exchange.request.headers.get("x-keep-alive-interval")
    if text is None:
        default_s = exchange.context.settings.stream_keep_alive_s
        return KeepAlive(default_s, COMMENT) if default_s else None
    if not (interval_s := seconds_of(text)) >= MIN_KEEP_ALIVE_S:
        raise invalid(
            "x-keep-alive-interval",
            f"The header x-keep-alive-interval must be a number of seconds from {MIN_KEEP_ALIVE_S:g}.",
        )
    return KeepAlive(min(interval_s, 3600.0))


class EventStream(Response):
    """A generation's answer as server-sent events, one write for all that is new.

    Most news are written where they come, at the end of the event loop's turn, without waking a task. The task of the
    request writes the beginning and the end, and waits where the client reads slowly; what comes meanwhile goes into one
    write."""

    def __init__(
        self,
        exchange: Exchange,
        generation: Generation,
        writer: StreamWriter,
        first: list[Delta],
        headers: dict[str, str],
        keep_alive: KeepAlive | None,
    ) -> None:
        """`first`: what was there when the answer was begun; empty after `keep_alive.interval_s` of silence. `keep_alive`:
        the sign of life after so much of it; None: there is none."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self._exchange = exchange
        self._generation = generation
        self._writer = writer
        self._first = first
        self._keep_alive = keep_alive
        self._has_written = False
        """News, since silence was looked for last."""
        self._body: AnswerBody | None = None
        """None: the task writes all, since the server has no such way."""
        self._is_due = False
        """`_write_news` is about to run."""
        self._broken: Exception | None = None
        """What it failed with."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = self._exchange
        self._body = scope["state"].get("answer_body")
        parent = trace.set_span_in_context(exchange.span)
        failure: BaseException | None = None
        with exchange.context.telemetry.tracer.start_as_current_span("stream", parent):
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                if not self._first and not self._generation.is_done:
                    await send(self._silence())
                await self._send_all(send)
            except ClientGone as error:
                failure = error
            except ApiError as error:
                failure = error
                await send({"type": "http.response.body", "body": self._writer.error(error)})
            except Exception as error:
                failure = error
                logger.exception("%s failed in its stream", exchange.call_id)
                internal = ApiError(500, "Internal error.", type="server_error", code="internal_error")
                await send({"type": "http.response.body", "body": self._writer.error(internal)})
            except BaseException as error:
                failure = error
                raise
            finally:
                exchange.end(failure)

    async def _send_all(self, send: Send) -> None:
        generation, writer = self._generation, self._writer
        has_continuous_usage = generation.options.has_continuous_usage
        deltas = self._first
        while True:
            body = writer.chunks(deltas, generation.usage() if has_continuous_usage else None)
            if generation.is_done:
                await writer.before_end(generation.usage())
                await send({"type": "http.response.body", "body": body + writer.end(generation.usage())})
                return
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            try:
                deltas = await self._next_deltas()
            except TimeoutError:
                if not self._has_written:
                    await send(self._silence())
                self._has_written, deltas = False, []

    async def _next_deltas(self) -> list[Delta]:
        """Those that are the task's to write."""
        self._generation.listener = None if self._body is None else self._on_news
        timeout_s = silence_s(self._exchange, self._keep_alive)
        try:
            deltas = await self._exchange.next_deltas(self._generation, timeout_s)
        finally:
            self._generation.listener = None
        if self._broken is not None:
            raise self._broken
        return deltas

    def _on_news(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._write_news)

    def _write_news(self) -> None:
        self._is_due = False
        generation, body = self._generation, self._body
        if generation.listener is None or body is None:
            return  # the task was woken and has them
        if not body.takes_more:
            generation.wake()
            return
        try:
            deltas = generation.advance()
            usage = generation.usage() if generation.options.has_continuous_usage else None
            if chunks := self._writer.chunks(deltas, usage):
                body.write(chunks)
                self._has_written = True
        except Exception as error:
            self._broken = error
        if generation.is_done or generation.failure is not None or self._broken is not None:
            generation.wake()

    def _silence(self) -> Message:
        sign = (self._keep_alive.sign if self._keep_alive is not None else b"") or self._writer.keep_alive()
        body = self._exchange.cold_start() or sign
        if body.startswith(b":") and STREAM_HEADER in self.headers:
            # An empty line after it would end an event, which has the last id, for OpenAI's clients.
            body = body.removesuffix(b"\n")
        return {"type": "http.response.body", "body": body, "more_body": True}
