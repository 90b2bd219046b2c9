"""Limits of connections: how many there may be, and what each may cost before a request of it is understood.

`Waiting` and `Connections` decide; `LimitedProtocol` is uvicorn's protocol over httptools with those decisions applied. All
connections are looked at `SWEEP_S` apart, which costs less than a timer each, and counts only the time in which this
process did read: a server that was late blames nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from services.gateway.http.errors import ApiError
from services.gateway.metrics import GatewayMetrics
from shared.runtime.settings import GatewaySettings

SWEEP_S = 0.25
MIN_BODY_BYTES_PER_S = 500
"""So many bytes of a body earn a second, of which no more than `body_idle_timeout_s` are kept."""
REFUSED_S = 1.0
"""A refused connection stays so long, unread, because closing it at once would take the answer from its client."""
CLOSING_S = 10.0
"""Time for the rest of an answer to leave, and of its request to come, before a connection that is over is cut."""
MAX_REFUSED = 256
"""Connections that stay so; others are closed at once."""
RETRY_AFTER_S = 2.0


class Waiting:
    """How long a client has made its connection wait for a request's head, or for its body. Pure."""

    def __init__(self, head_timeout_s: float, body_idle_timeout_s: float) -> None:
        self._head_timeout_s = head_timeout_s
        self._body_idle_timeout_s = body_idle_timeout_s
        self.begin(is_head=True)

    def begin(self, *, is_head: bool) -> None:
        self._is_head = is_head
        self._left_s = self._head_timeout_s if is_head else self._body_idle_timeout_s
        self.num_bytes = 0

    def on_bytes(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if not self._is_head:
            # More than this would let a body that came fast at first be held for hours by a byte now and then.
            self._left_s = min(self._body_idle_timeout_s, self._left_s + num_bytes / MIN_BODY_BYTES_PER_S)

    def tick(self, elapsed_s: float) -> ApiError | None:
        """`elapsed_s`: in which the client could have sent. The refusal, if it was too slow."""
        self._left_s -= elapsed_s
        if self._left_s >= 0:
            return None
        if self._is_head:
            what = f"The request's head did not come within {self._head_timeout_s:g} s"
            return ApiError(408, f"{what} (TIDEWAY_HEAD_TIMEOUT_S).", type="timeout_error", code="slow_head")
        limit_s = self._body_idle_timeout_s
        return ApiError(
            408,
            f"The request's body came too slowly: {limit_s:g} s without a byte (TIDEWAY_BODY_IDLE_TIMEOUT_S), or less than "
            f"{MIN_BODY_BYTES_PER_S} bytes a second.",
            type="timeout_error",
            code="slow_body",
        )


class Connections:
    """Those that are open, how many each client address has, and whether the gateway is about to go."""

    def __init__(self, settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        self.settings = settings
        self.is_leaving = False
        """Set: answers close their connections, so that clients come back elsewhere."""
        self.num_refused = 0
        self._metrics = metrics
        self._open: set[LimitedProtocol] = set()
        self._by_address: Counter[str] = Counter()
        self._max_of_client = settings.max_client_connections or max(1, settings.max_connections * 3 // 4)
        metrics.connections.set_function(lambda: len(self._open))

    def enter(self, protocol: LimitedProtocol) -> ApiError | None:
        """The refusal, where there are too many."""
        limit, name = self.settings.max_connections, "connections here (TIDEWAY_MAX_CONNECTIONS)"
        is_full = len(self._open) >= limit
        if not is_full:
            limit, name = self._max_of_client, "connections from one address (TIDEWAY_MAX_CLIENT_CONNECTIONS)"
            is_full = self._by_address[protocol.address] >= limit
        if is_full:
            message = f"There may be {limit} {name}."
            return ApiError(
                429, message, type="rate_limit_error", code="too_many_connections", retry_after_s=RETRY_AFTER_S
            )
        self._open.add(protocol)
        self._by_address[protocol.address] += 1
        return None

    def leave(self, protocol: LimitedProtocol) -> None:
        if protocol in self._open:
            self._open.remove(protocol)
            self._by_address[protocol.address] -= 1
            if not self._by_address[protocol.address]:
                del self._by_address[protocol.address]

    def all(self) -> list[LimitedProtocol]:
        return list(self._open)

    def count(self, reason: str) -> None:
        self._metrics.refused_connections.labels(reason).inc()

    async def sweep_forever(self) -> None:
        previous = time.monotonic()
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            elapsed_s, previous = min(now - previous, 2 * SWEEP_S), now
            for protocol in self.all():
                protocol.on_sweep(elapsed_s)


class AnswerBody:
    """Writes parts of an answer's body at once, as uvicorn's `send` would in a task."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.is_given_up = False
        """Its client read so slowly that its connection was ended."""

    @property
    def takes_more(self) -> bool:
        """False: the client reads too slowly, has gone, or the answer is not begun or over. `send` knows what to do then."""
        cycle = self._cycle
        is_under_way = cycle.chunked_encoding and not cycle.response_complete
        return bool(is_under_way and not cycle.flow.write_paused and not cycle.disconnected)

    def write(self, part: bytes) -> None:
        """Only where it takes more; `part` is not empty."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class _UntilClosed(int):
    """The length of a body that ends with its connection, for uvicorn's count of what is missing: never too little nor too
    much."""

    def __lt__(self, other: int) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: int) -> _UntilClosed:
        return self

    __hash__ = int.__hash__


class _RefusedError(Exception):
    """Raised to httptools, which stops there."""


class LimitedProtocol(HttpToolsProtocol):
    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        settings = connections.settings
        self._all = connections
        self._settings = settings
        self._waiting = Waiting(settings.head_timeout_s, settings.body_idle_timeout_s)
        self._is_reading = True
        """A request is being read, or the first one is awaited."""
        self._is_in_head = True
        self._num_headers = self._num_head_bytes = self._num_held_bytes = 0
        self._has_moved = False
        """The parser has told of something."""
        self._framing = b""
        """Framing of the body of a request that asks for another protocol, until a second parser reads it."""
        self._is_repeating = False
        """The second parser is being fed with it."""
        self._refusal: ApiError | None = None
        self._is_refused = False
        self._stuck_s = 0.0
        """How long the client has taken nothing of its answer, or goes on with a request that is answered."""
        self._body: AnswerBody | None = None
        """Body of the last request's answer."""
        self.address = ""

    # ---------------------------------------------------------------------------------------- asyncio's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if (refusal := self._all.enter(self)) is not None:
            self._refuse(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        if not self._is_reading and (self.cycle is None or self.cycle.response_complete):
            self._begin_head()
        self._waiting.on_bytes(len(data))
        self._has_moved = False
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or ApiError(400, "This is not HTTP/1.1.", code="bad_http"))
            return
        # The parser keeps what it has not told of, such as a header (also one after a body) that does not end.
        self._num_held_bytes = 0 if self._has_moved else self._num_held_bytes + len(data)
        if self._num_held_bytes > self._settings.max_head_bytes:
            self._refuse(self._head_too_large())

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # No other protocol is spoken here, so that the request goes on as HTTP/1.1 (RFC 9110, 7.8). The parser has
                # stopped after its head for good: another one takes the body, and what comes after it.
                data = data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                framing, self._framing = self._framing, b""
                if framing:
                    self._is_repeating = True
                    self.parser.feed_data(b"POST / HTTP/1.1\r\nhost: -\r\n" + framing + b"\r\n\r\n")
                    self._is_repeating = False

    # --------------------------------------------------------------------------------------- httptools' callbacks

    def on_message_begin(self) -> None:
        if self._is_repeating:
            return
        self._has_moved = True
        super().on_message_begin()
        self._begin_head()

    def on_url(self, url: bytes) -> None:
        if self._is_repeating:
            return
        self._has_moved = True
        super().on_url(url)
        if len(self.url) > self._settings.max_uri_bytes:
            limit = self._settings.max_uri_bytes
            message = f"The URI is longer than the limit of {limit} bytes (TIDEWAY_MAX_URI_BYTES)."
            self._stop(ApiError(414, message, code="uri_too_long"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_repeating:
            return
        self._has_moved = True
        self._num_headers += 1
        self._num_head_bytes += len(name) + len(value) + 4
        if self._num_headers > self._settings.max_headers:
            limit = self._settings.max_headers
            message = f"The request has more than {limit} headers (TIDEWAY_MAX_HEADERS)."
            self._stop(ApiError(431, message, code="too_many_headers"))
        if self._num_head_bytes > self._settings.max_head_bytes:
            self._stop(self._head_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_repeating:
            return
        self._has_moved = True
        if self.url.startswith(b"//"):  # else what follows would be taken for a host
            self.url = b"/" + self.url.lstrip(b"/")
        self._check_hosts()
        super().on_headers_complete()
        self._framing = self._framing_of_body() if self.parser.should_upgrade() else b""
        self._body = self.scope["state"]["answer_body"] = AnswerBody(self.cycle)
        if self.scope["http_version"] == "1.0":  # nginx's default; it knows no chunks
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _UntilClosed()
        self._is_in_head = False
        self._waiting.begin(is_head=False)
        if self._all.is_leaving:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._has_moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._framing:
            return  # the parser thinks that the body is of another protocol
        self._has_moved = True
        super().on_message_complete()
        self._is_reading = False

    # ------------------------------------------------------------------------------------------------------- limits

    def on_sweep(self, elapsed_s: float) -> None:
        """`elapsed_s` have passed."""
        if self._is_refused:
            return
        is_answered = self.cycle is not None and self.cycle.response_complete and not self._is_in_head
        is_over = self.transport.is_closing() or (is_answered and self._is_reading)
        if is_over or self.flow.write_paused:
            self._stuck_s += elapsed_s
            if self._stuck_s > (CLOSING_S if is_over else self._settings.write_timeout_s):
                self._all.count("slow_reader")
                if self._body is not None and not is_over:
                    self._body.is_given_up = True
                self.transport.abort()
            return
        self._stuck_s = 0.0
        if self._is_reading and not self.flow.read_paused and (late := self._waiting.tick(elapsed_s)) is not None:
            self._refuse(late)

    def _check_hosts(self) -> None:
        """RFC 9112, 3.2: one `Host`, and none in HTTP/1.0 alone."""
        count = sum(name == b"host" for name, _ in self.headers)
        if count > 1 or (count == 0 and self.parser.get_http_version() == "1.1"):
            self._stop(ApiError(400, f"The request has {count} Host headers; it needs one.", code="bad_http"))

    def _framing_of_body(self) -> bytes:
        """The header that says how long the body is; empty: there is none."""
        for name, value in self.headers:
            if name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 ")):
                return name + b": " + value
        return b""

    def _begin_head(self) -> None:
        self._is_reading = self._is_in_head = True
        self._num_headers = self._num_head_bytes = 0
        self._waiting.begin(is_head=True)

    def _head_too_large(self) -> ApiError:
        limit = self._settings.max_head_bytes
        message = f"The request's headers are larger than the limit of {limit} bytes (TIDEWAY_MAX_HEAD_BYTES)."
        return ApiError(431, message, code="head_too_large")

    def _stop(self, refusal: ApiError) -> None:
        self._refusal = refusal
        raise _RefusedError

    def _refuse(self, refusal: ApiError) -> None:
        """The answer without the application, and the end of the connection."""
        self._is_refused = True
        self._all.count(refusal.code or "")
        is_answered = self.cycle is not None and not self.cycle.response_complete and self.cycle.response_started
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        is_silent = self._is_in_head and self._waiting.num_bytes == 0 and refusal.status == 408
        if is_answered or is_silent or self._all.num_refused >= MAX_REFUSED:
            self.transport.abort()
            return
        body = refusal.body()
        fields = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        head = "".join(f"{name}: {value}\r\n" for name, value in {**fields, **refusal.headers()}.items())
        self.transport.write(STATUS_LINE[refusal.status] + head.encode() + b"\r\n" + body)
        self.transport.pause_reading()
        self._all.num_refused += 1
        self.loop.call_later(REFUSED_S, self._end_refused)
        if self.transport.can_write_eof():
            with contextlib.suppress(OSError):
                self.transport.write_eof()

    def _end_refused(self) -> None:
        self._all.num_refused -= 1
        self.transport.abort()
