"""Reading a request's body within its limits."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.errors import ApiError, decode

LINGER_S = 3.0


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than the limit of {limit} bytes.", code="body_too_large")


async def read_message(request: Request, decoder: msgspec.json.Decoder[Any], limit: int) -> Any:
    """The decoded JSON body. Raises `ApiError` 400, 413 (before all of it is read) or 415, or `ClientDisconnect`."""
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
    if length.isdecimal() and int(length[:20]) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return decode(decoder, bytes(body))


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
