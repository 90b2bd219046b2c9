"""Reading a request's body within its limits."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.http.encodings import decompressed
from services.gateway.http.errors import ApiError, decode
from services.gateway.http.ignored_fields import IgnoredFields

T = TypeVar("T")

LINGER_S = 3.0
FREE_BYTES = 64 * 1024
"""Bytes of each body that do not count: they are bounded by the number of connections."""
RETRY_AFTER_S = 1.0


class BodyRoom:
    """Bytes that request bodies may take: one alone, and all that are being read."""

    def __init__(self, max_body_bytes: int, max_total_bytes: int, ignored_fields: IgnoredFields | None = None) -> None:
        """`ignored_fields`: who tells of what has no effect; None: nobody does."""
        self.ignored_fields = ignored_fields
        self.max_body_bytes = max_body_bytes
        self._max_total_bytes = max_total_bytes
        self._num_bytes = 0
        self.turn = asyncio.Lock()
        """One long body is decoded, then streams have their turn, then the next one."""

    def grow(self, before: int, after: int) -> None:
        """A body has grown from `before` to `after` bytes. Raises `ApiError` 413 or 429; what it took before remains."""
        if after > self.max_body_bytes:
            message = f"The request body is larger than the limit of {self.max_body_bytes} bytes."
            raise ApiError(413, message, code="body_too_large")
        more = max(0, after - FREE_BYTES) - max(0, before - FREE_BYTES)
        if self._num_bytes + more > self._max_total_bytes:
            raise ApiError(
                429,
                f"The server is reading {self._num_bytes} bytes of long request bodies; the limit is "
                f"{self._max_total_bytes} (TIDEWAY_MAX_BODY_BYTES_IN_FLIGHT).",
                type="rate_limit_error",
                code="overloaded",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_bytes += more

    def release(self, num_bytes: int) -> None:
        self._num_bytes -= max(0, num_bytes - FREE_BYTES)


async def read_message(request: Request, decoder: msgspec.json.Decoder[T], room: BodyRoom) -> T:
    """The decoded JSON body. Raises `ApiError` 400, 413 (before all of it is read), 415 or 429, or `ClientDisconnect`."""
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise ApiError(
            415,
            f"The content type must be application/json, got '{media_type[:100]}'.",
            param="content-type",
            code="unsupported_media_type",
        )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (announced := int(length[:20])) > room.max_body_bytes:
        room.grow(0, announced)
    body = bytearray()
    num_taken = 0
    try:
        async for chunk in request.stream():
            room.grow(num_taken, num_taken + len(chunk))
            num_taken += len(chunk)
            body += chunk
        plain: bytes | bytearray = body
        if encodings := request.headers.get("content-encoding"):
            plain = decompressed(body, encodings, room.max_body_bytes)
            room.grow(num_taken, max(num_taken, len(plain)))
            num_taken = max(num_taken, len(plain))
        if num_taken <= FREE_BYTES:
            return _decoded(request, decoder, plain, room)
        async with room.turn:
            message = _decoded(request, decoder, plain, room)
            await asyncio.sleep(0)
        return message
    finally:
        room.release(num_taken)


def _decoded(request: Request, decoder: msgspec.json.Decoder[T], body: bytes | bytearray, room: BodyRoom) -> T:
    message = decode(decoder, body)
    kind = type(message)
    if room.ignored_fields is not None and issubclass(kind, msgspec.Struct):
        room.ignored_fields.note_unknown(request, kind, body)
    return message


class EarlyAnswer(Response):
    """An answer to a request whose body has not been read. The connection is closed after it, but not at once: closing
    with unread data resets the connection, and the client may lose the answer before it has seen it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers["connection"] = "close"
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body"):
                    pass
        except TimeoutError:
            pass
        await send({"type": "http.response.body"})
