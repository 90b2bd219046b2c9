"""Reads a batch's input line by line, and resumes after a lost connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from services.gateway.batch.files import Files
from services.gateway.http.errors import BYTE_ORDER_MARK
from shared.bus.interface import BusError, RevisionConflict
from shared.messages.requests import ErrorCode

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_INTERVAL_S = 0.5
PASSING_CODES = frozenset(
    {ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE, ErrorCode.OVERLOADED, ErrorCode.BUSY, ErrorCode.STORAGE_FULL}
)
"""NATS is away, or a store or its disk is full."""
MAX_FAILURES = 5
"""In a row, of other kinds: they do not pass by themselves."""


class InputError(Exception):
    """The input cannot be read, and never will be. `line`: where."""

    def __init__(self, code: str, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.line = line


@dataclass(frozen=True, slots=True)
class InputLine:
    index: int
    """Blank lines are not counted."""
    number: int
    """In the file, from 1."""
    raw: bytes


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    """The outcome of `call`, tried again for as long as NATS is away or a store full; its deadline is the caller's
    cancellation, when the batch's lease is lost, the batch is cancelled or its window over. Raises `RevisionConflict`, and
    other `BusError`s after a few attempts."""
    complained, num_failures = False, 0
    while True:
        try:
            return await call()
        except RevisionConflict:
            raise
        except BusError as error:
            num_failures += error.code not in PASSING_CODES
            if num_failures >= MAX_FAILURES:
                raise
            if not complained:
                logger.warning("a batch waits: %s", error)
            complained = True
            await asyncio.sleep(RETRY_INTERVAL_S)


async def read_lines(files: Files, file_id: str, max_line_bytes: int) -> AsyncIterator[InputLine]:
    """Each line once, in order. Raises `InputError`."""
    last, num_broken = -1, 0
    while True:
        chunks = await insist(lambda: files.read(file_id))
        if chunks is None:
            raise InputError("input_file_gone", f"The content of the input file '{file_id}' is gone.")
        try:
            async for line in _split(chunks, max_line_bytes):
                if line.index > last:
                    last, num_broken = line.index, 0
                    yield line
            return
        except BusError as error:
            # A chunk that is missing each time was not just replaced.
            num_broken += error.code not in PASSING_CODES
            if error.code is ErrorCode.INTERNAL or num_broken >= MAX_FAILURES:
                raise InputError("input_file_damaged", error.info.message) from None
            logger.info("input of a batch is read again from line %d on: %s", last + 1, error)
            await asyncio.sleep(RETRY_INTERVAL_S)


async def _split(chunks: AsyncIterator[bytes], max_line_bytes: int) -> AsyncIterator[InputLine]:
    index, number, rest = 0, 0, b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for raw in lines:
            number += 1
            if number == 1:
                raw = raw.removeprefix(BYTE_ORDER_MARK)
            if raw.strip():
                yield InputLine(index, number, raw)
                index += 1
        if len(rest) > max_line_bytes:
            raise InputError("line_too_long", f"A line has more than {max_line_bytes} bytes.", number + 1)
    if number == 0:
        rest = rest.removeprefix(BYTE_ORDER_MARK)
    if rest.strip():
        yield InputLine(index, number + 1, rest)
