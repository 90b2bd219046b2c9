"""Content encodings of request bodies, each decoded within a limit on the result. Pure.

gzip and deflate are always there; zstd (which Codex sends) and br where the packages `zstandard` and `brotli` are
installed.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from typing import Any

from services.gateway.http.errors import ApiError


def _installed(name: str) -> Any:
    """The module; None: it is not there."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


zstandard, brotli = _installed("zstandard"), _installed("brotli")

MAX_ENCODINGS = 3
MAX_MEMBERS = 1000
"""Limit of a gzip body: each member copies up to a piece of what follows it."""
_GZIP_MAGIC = b"\x1f\x8b"
MAX_ZSTD_WINDOW_BYTES = 8 * 1024 * 1024
"""What RFC 8878 would have every reader take; more would be memory that a small body asks for."""
PIECE_BYTES = 64 * 1024

Undo = Callable[[bytes, int], bytes]
"""Decodes a body, given a number of bytes: what it was, or more than so many bytes of it. Raises `ValueError` where it
is broken."""


def _of_gzip(body: bytes, max_bytes: int) -> bytes:
    """Decodes all members (RFC 1952, 2.2). What is behind them is ignored, as `gzip` does."""
    plain, place, num_members = bytearray(), 0, 0
    while num_members == 0 or body.startswith(_GZIP_MAGIC, place):
        if num_members == MAX_MEMBERS:
            raise ValueError(f"it has more than {MAX_MEMBERS} members")
        member = zlib.decompressobj(16 + zlib.MAX_WBITS)
        num_members += 1
        while not member.eof:
            piece = body[place : place + PIECE_BYTES]
            plain += _inflated(member, piece, max_bytes - len(plain))
            if len(plain) > max_bytes:
                return bytes(plain)
            if not piece:
                raise ValueError("it is cut off")
            place += len(piece) - len(member.unused_data)
    return bytes(plain)


def _of_deflate(body: bytes, max_bytes: int) -> bytes:
    """A zlib stream, or one without zlib's header, which many clients send under this name (RFC 9110, 8.4.1.2)."""
    has_header = len(body) > 1 and body[0] & 15 == zlib.DEFLATED and int.from_bytes(body[:2]) % 31 == 0
    engine = zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
    plain = _inflated(engine, body, max_bytes)
    if len(plain) <= max_bytes and not engine.eof:
        raise ValueError("it is cut off")
    return plain


def _inflated(engine: Any, piece: bytes, max_bytes: int) -> bytes:
    """Up to one byte more than `max_bytes` of what a piece is decoded to."""
    try:
        return bytes(engine.decompress(piece, max_bytes + 1))
    except zlib.error as error:
        raise ValueError(str(error)) from None


def _of_zstd(body: bytes, max_bytes: int) -> bytes:
    engine = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW_BYTES)
    try:
        plain = engine.stream_reader(body, read_across_frames=True).read(max_bytes + 1)
        size = zstandard.frame_content_size(body)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    if len(plain) < size <= max_bytes:
        raise ValueError("it is cut off")
    return bytes(plain)


def _of_brotli(body: bytes, max_bytes: int) -> bytes:
    engine, plain = brotli.Decompressor(), bytearray()
    try:
        piece = engine.process(body, output_buffer_limit=PIECE_BYTES)
        while piece and len(plain) <= max_bytes:
            plain += piece
            piece = b"" if engine.can_accept_more_data() else engine.process(b"", output_buffer_limit=PIECE_BYTES)
    except brotli.error as error:
        raise ValueError(str(error)) from None
    if len(plain) <= max_bytes and not engine.is_finished():
        raise ValueError("it is cut off")
    return bytes(plain)


ENCODINGS: dict[str, Undo] = {
    "gzip": _of_gzip,
    "deflate": _of_deflate,
    **({} if zstandard is None else {"zstd": _of_zstd}),
    **({} if brotli is None else {"br": _of_brotli}),
}


def decompressed(body: bytes | bytearray, encodings: str, max_bytes: int) -> bytes | bytearray:
    """The body without its content encodings, named as in the header. Raises `ApiError`: 415 for one that is not known, 413
    where more than `max_bytes` come of it, 400 where it is broken."""
    named = (one.strip() for one in encodings.lower().split(","))
    names = [
        "gzip" if name == "x-gzip" else name for name in named if name not in ("", "identity")
    ]  # RFC 9110, 8.4.1.3
    if len(names) > MAX_ENCODINGS or not ENCODINGS.keys() >= set(names):
        known = [*ENCODINGS]
        error = ApiError(
            415,
            f"Content-Encoding '{encodings[:100]}' is not supported here; {', '.join(known[:-1])} and {known[-1]} are.",
            param="content-encoding",
            code="unsupported_content_encoding",
        )
        error.more_headers = {"accept-encoding": ", ".join(known)}
        raise error
    for name in reversed(names):
        try:
            body = ENCODINGS[name](bytes(body), max_bytes)
        except ValueError as error:
            message = f"The request body is not what its Content-Encoding says ({name}): {error}."
            raise ApiError(400, message, param="content-encoding", code="invalid_body") from None
        if len(body) > max_bytes:
            raise ApiError(
                413, f"The request body is larger than the limit of {max_bytes} bytes.", code="body_too_large"
            )
    return body
