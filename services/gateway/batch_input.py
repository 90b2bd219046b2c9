"""A batch's input, line by line, through whatever happens to the connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from services.gateway.files import Files
from shared.bus.interface import BusError, RevisionConflict
from shared.messages import ErrorCode

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_INTERVAL_S = 0.5


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
    """The outcome of `call`, tried again for as long as the bus fails it; its deadline is the caller's cancellation, when
    the batch's lease is lost. Raises `RevisionConflict`."""
    complained = False
    while True:
        try:
            return await call()
        except RevisionConflict:
            raise
        except BusError as error:
            if not complained:
                logger.warning("a batch waits: %s", error)
            complained = True
            await asyncio.sleep(RETRY_INTERVAL_S)


async def read_lines(files: Files, file_id: str, max_line_bytes: int) -> AsyncIterator[InputLine]:
    """Each line once, in order. Raises `InputError`."""
    last = -1
    while True:
        chunks = await insist(lambda: files.read(file_id))
        if chunks is None:
            raise InputError("input_file_gone", f"The content of the input file '{file_id}' is gone.")
        try:
            async for line in _split(chunks, max_line_bytes):
                if line.index > last:
                    last = line.index
                    yield line
            return
        except BusError as error:
            if error.code is ErrorCode.INTERNAL:
                raise InputError("input_file_damaged", error.info.message) from None
            logger.info("input of a batch is read again from line %d on: %s", last + 1, error)
            await asyncio.sleep(RETRY_INTERVAL_S)


async def _split(chunks: AsyncIterator[bytes], max_line_bytes: int) -> AsyncIterator[InputLine]:
    index, number, rest = 0, 0, b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for raw in lines:
            number += 1
            if raw.strip():
                yield InputLine(index, number, raw)
                index += 1
        if len(rest) > max_line_bytes:
            raise InputError("line_too_long", f"A line has more than {max_line_bytes} bytes.", number + 1)
    if rest.strip():
        yield InputLine(index, number + 1, rest)
