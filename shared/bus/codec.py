"""Bytes on the wire: message bodies (msgspec msgpack, with a checksum), NATS header blocks, and typed errors in micro's
convention."""

from __future__ import annotations

import math
from typing import Any
from zlib import crc32

import msgspec

from shared.bus.interface import BusError, ServiceError
from shared.messages.requests import ErrorCode, ErrorInfo

TIMEOUT_HEADER = b"Tideway-Timeout"
"""Seconds that the requester will wait, counted from sending."""
TRACE_HEADER = b"traceparent"
ERROR_HEADER = b"Nats-Service-Error"

_HEADER_LINE = b"NATS/1.0"

encode = msgspec.msgpack.Encoder().encode

_MARK = b"\xd6\x43"
"""Beginning of a checksum on the wire: msgpack's extension of 4 bytes, type 67. No text has it, since it is no UTF-8."""
_MARKED = len(_MARK) + 4


class DamagedError(msgspec.DecodeError):
    """A message was not sent as it has arrived."""


def sealed(body: bytes) -> bytes:
    """The body with its CRC-32, as one more element of its array, which readers of no checksum skip as they skip fields that
    they do not know. Without TLS a bit may flip where TCP's sum of 16 bits does not show it."""
    first = body[0]
    if 0x90 <= first < 0x9F:
        whole = bytes((first + 1,)) + body[1:]
    elif first == 0xDC and body[1:3] != b"\xff\xff":
        whole = b"\xdc" + (int.from_bytes(body[1:3], "big") + 1).to_bytes(2, "big") + body[3:]
    else:  # no struct of the catalogue
        return body
    return b"%b%b%b" % (whole, _MARK, crc32(whole).to_bytes(4, "big"))


def opened(data: bytes) -> bytes:
    """The body that was sealed; one without a checksum as it is. Raises `DamagedError`."""
    if data[-_MARKED:-4] != _MARK:
        return data
    whole = data[:-_MARKED]
    if crc32(whole) != int.from_bytes(data[-4:], "big"):
        raise DamagedError("its checksum is wrong")
    if whole[0] != 0xDC:
        return bytes((whole[0] - 1,)) + whole[1:]
    return b"\xdc" + (int.from_bytes(whole[1:3], "big") - 1).to_bytes(2, "big") + whole[3:]


UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoders raise for bytes that are not what they should be, whose strings are no UTF-8, or that nest too deep."""

_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """One a type, made at its first use."""
    if kind not in _decoders:
        _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return _decoders[kind]


def request_headers(timeout_s: float, traceparent: str) -> bytes:
    if traceparent:
        return b"NATS/1.0\r\nTideway-Timeout: %.3f\r\ntraceparent: %b\r\n\r\n" % (timeout_s, traceparent.encode())
    return b"NATS/1.0\r\nTideway-Timeout: %.3f\r\n\r\n" % timeout_s


def trace_headers(traceparent: str) -> bytes:
    return b"NATS/1.0\r\ntraceparent: %b\r\n\r\n" % traceparent.encode() if traceparent else b""


_HTTP_STATUS = {
    ErrorCode.BAD_REQUEST: 400,
    ErrorCode.TOO_LONG: 400,
    ErrorCode.UNKNOWN_MODEL: 404,
    ErrorCode.CONFLICT: 409,
    ErrorCode.GONE: 410,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.NOT_PERMITTED: 500,
    ErrorCode.INTERNAL: 500,
    ErrorCode.NOT_FINITE: 500,
    ErrorCode.CRASHED: 500,
    ErrorCode.STORAGE_FULL: 507,
    ErrorCode.DEADLINE: 504,
}
"""micro's error codes are HTTP's by convention; every other code is 503."""


def error_headers(info: ErrorInfo) -> bytes:
    message = " ".join(info.message.split()).encode()
    status = _HTTP_STATUS.get(info.code, 503)
    return b"NATS/1.0\r\nNats-Service-Error: %b\r\nNats-Service-Error-Code: %d\r\n\r\n" % (message, status)


def parse_headers(block: bytes) -> dict[bytes, bytes]:
    """The fields of a header block. A status that the server put on the first line is the field `Status`."""
    first, _, rest = block.partition(b"\r\n")
    fields = {}
    if status := first[len(_HEADER_LINE) :].strip():
        fields[b"Status"] = status[:3]
    for line in rest.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        if colon:
            fields[name.strip()] = value.strip()
    return fields


def timeout_of(fields: dict[bytes, bytes]) -> float | None:
    """Seconds that the requester still waits; None if it did not say so in a way that can be read."""
    try:
        seconds = float(fields[TIMEOUT_HEADER])
    except (KeyError, ValueError):
        return None
    return seconds if math.isfinite(seconds) else None


def decode_reply(kind: type[Any], subject: str, fields: dict[bytes, bytes], data: bytes) -> Any:
    """A reply's body, or raises: the peer's `ServiceError`, `UNAVAILABLE` for a reply that was damaged on the way (as if it
    had not come), or `INTERNAL` for one that cannot be read."""
    try:
        data = opened(data)
    except DamagedError as error:
        raise BusError(ErrorInfo(ErrorCode.UNAVAILABLE, f"the reply on {subject} was damaged: {error}")) from None
    if ERROR_HEADER in fields:
        try:
            info = decoder(ErrorInfo).decode(data)
        except UNREADABLE:
            info = ErrorInfo(ErrorCode.INTERNAL, fields[ERROR_HEADER].decode(errors="replace"))
        raise ServiceError(info)
    try:
        return decoder(kind).decode(data)
    except UNREADABLE as error:
        raise BusError(ErrorInfo(ErrorCode.INTERNAL, f"the reply on {subject} cannot be read: {error}")) from None
