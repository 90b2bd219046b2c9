"""Recordings of cores: what went into one, and what it decided, so that any incident can be run again, and become a test.

A core is given plain data (`Call`) and asked, with the time, what is to be done. A recording is a sequence of
length-prefixed msgpack records: what the core was made of, then each call and each decision with its time. The same code
decides the same, byte for byte; a hash of a string, which is another one in each process, must decide nothing.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from functools import reduce
from operator import or_
from typing import Any, Protocol

import msgspec

logger = logging.getLogger(__name__)

LENGTH_BYTES = 4


def _tag(name: str) -> str:
    return re.sub("(?<!^)(?=[A-Z])", "_", name).lower()


class Call(msgspec.Struct, frozen=True, tag=_tag):
    """An input of a core."""


class Applied(msgspec.Struct, frozen=True, tag=True):
    call: msgspec.Raw
    now: float


class Decided(msgspec.Struct, frozen=True, tag=True):
    decision: bytes
    """Encoded; empty for None."""
    now: float


Recorder = Callable[[object, float], None]
"""Takes each call before it is carried out and each decision after it was made, with the time."""


class Core(Protocol):
    def apply(self, call: Any, now: float) -> object: ...


class ReplayMismatch(Exception):
    """What was run again decided something else than what was recorded, or there is nothing to run."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Applied | Decided).decode


def decoder_of(calls: type[Call]) -> msgspec.msgpack.Decoder[Any]:
    """Decoder of all inputs of one core: the kinds of `calls` that are known by now."""
    return msgspec.msgpack.Decoder(reduce(or_, calls.__subclasses__()))


def framed(record: msgspec.Struct) -> bytes:
    """A record as it stands in a recording."""
    encoded = _encode(record)
    return len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded


def recorder(header: msgspec.Struct, write: Callable[[bytes], object]) -> Recorder:
    """Begins a recording. `header`: what the core is made of; has a tag."""
    write(framed(header))

    def record(what: object, now: float) -> None:
        if isinstance(what, Call):
            write(framed(Applied(msgspec.Raw(_encode(what)), now)))
        else:
            write(framed(Decided(_encoded(what), now)))

    return record


def _encoded(decision: object) -> bytes:
    return b"" if decision is None else _encode(decision)


def file_writer(path: str, max_bytes: int) -> Callable[[bytes], None]:
    """Writes whole records to a new file that only its owner may read, until it would be larger than `max_bytes` or cannot
    be written: then it ends there, and the log says so. Raises `OSError` where it cannot be begun."""
    # Unbuffered: the end of a process, which matters most, is not always an orderly one.
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0)
    num_bytes = 0

    def write(record: bytes) -> None:
        nonlocal num_bytes
        if file.closed:
            return
        num_bytes += len(record)
        try:
            if num_bytes <= max_bytes and file.write(record) == len(record):
                return
            logger.warning("the recording %s ends here: it has its %d bytes, or the disk is full", path, max_bytes)
        except OSError as error:
            logger.warning("the recording %s ends here: %s", path, error)
        file.close()

    return write


def frames(recording: bytes) -> Iterator[bytes]:
    """The encoded records in order; a torn last one (the process was killed while writing) ends the iteration."""
    position = 0
    while position + LENGTH_BYTES <= len(recording):
        end = position + LENGTH_BYTES + int.from_bytes(recording[position : position + LENGTH_BYTES], "little")
        if end > len(recording):
            return
        yield recording[position + LENGTH_BYTES : end]
        position = end


def header_of(recording: bytes, kind: Any) -> Any:
    """What the recorded core was made of, a `kind` or one of that union. Raises `ReplayMismatch`."""
    try:
        return msgspec.msgpack.decode(next(frames(recording), b""), type=kind)
    except msgspec.MsgspecError as error:
        raise ReplayMismatch(f"not a recording, or one of another version: {error}") from None


def records(recording: bytes) -> Iterator[Applied | Decided]:
    """All but the header. Raises `ReplayMismatch`."""
    rest = frames(recording)
    next(rest, None)
    for frame in rest:
        try:
            yield _decode(frame)
        except msgspec.MsgspecError as error:
            raise ReplayMismatch(f"not a recording: {error}") from None


def replay(recording: bytes, core: Core, calls: msgspec.msgpack.Decoder[Any], decide: Callable[[float], object]) -> int:
    """Runs a recording again on a new core. Returns the number of decisions; raises `ReplayMismatch` at the first that
    differs, and says in what."""
    number = 0
    for record in records(recording):
        if isinstance(record, Applied):
            try:
                call = calls.decode(record.call)
            except msgspec.MsgspecError as error:
                raise ReplayMismatch(f"a call of another version: {error}") from None
            core.apply(call, record.now)
        elif (decision := _encoded(decide(record.now))) == record.decision or _is_same(record.decision, decision):
            number += 1
        else:
            what = difference(_plain(record.decision), _plain(decision))
            raise ReplayMismatch(f"decision {number} at {record.now:.6f} s differs: {what}")
    return number


def _is_same(recorded: bytes, replayed: bytes) -> bool:
    """Whether they differ in nothing but fields that were added to the end since it was recorded, and are empty."""
    one, other = _plain(recorded), _plain(replayed)
    if not (isinstance(one, list) and isinstance(other, list)):
        return False
    return one == other[: len(one)] and not any(other[len(one) :])


def _plain(decision: bytes) -> object:
    return msgspec.msgpack.decode(decision) if decision else None


def difference(recorded: object, replayed: object, place: str = "") -> str:
    """The first place in which two plain values differ, and both."""
    if isinstance(recorded, dict) and isinstance(replayed, dict) and recorded.keys() == replayed.keys():
        for key, value in recorded.items():
            if value != replayed[key]:
                return difference(value, replayed[key], f"{place}.{key}")
    if isinstance(recorded, list) and isinstance(replayed, list):
        for index, (one, other) in enumerate(zip(recorded, replayed, strict=False)):
            if one != other:
                return difference(one, other, f"{place}[{index}]")
        if len(recorded) != len(replayed):
            index = min(len(recorded), len(replayed))
            recorded, replayed, place = recorded[index:], replayed[index:], f"{place}[{index}:]"
    return f"{place or 'all of it'} was {_short(recorded)}, and is {_short(replayed)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
