"""The results of a batch's lines: kept one by one, read back, and put together into its output and error files.

Each is created once under its own key, so a line has one answer whoever else may have answered it too. The files are a
function of these results alone, hence may be made again, by anybody, until the batch is concluded. That a line was not run
is no result: when a batch expires or fails, its lines without one get their place in the error file here, so that a batch
can end where no more results can be stored. When it was cancelled they are in neither file.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import msgspec

from services.gateway.batch.files import DEFAULT_EXPIRY_S, Files
from services.gateway.batch.line_answering import LineFailure, encode_line
from services.gateway.batch.reading import InputError, InputLine
from services.gateway.batch.records import Batches, result_key
from services.gateway.batch.state import BatchFiles, is_terminal
from services.gateway.batch.validation import custom_id_of
from shared.bus.interface import BusError, ObjectWriter, RevisionConflict
from shared.messages.batches import BatchLineResult, BatchRecord, StoredFile
from shared.messages.channels import MAX_MESSAGE_BYTES
from shared.messages.requests import ErrorCode, ErrorInfo

logger = logging.getLogger(__name__)

READ_WINDOW = 64
"""Results asked for at once."""
MAX_RESULT_BYTES = MAX_MESSAGE_BYTES - 1024
"""A larger line lies in the object store, under the key of its result."""

_LOST = LineFailure("result_lost", "The answer to this line was stored and is lost.")


class BatchOutput:
    def __init__(self, batches: Batches, files: Files, batch_id: str) -> None:
        self._batches = batches
        self._files = files
        self._batch_id = batch_id

    async def keep(self, index: int, result: BatchLineResult) -> BatchLineResult:
        """The result that the line now has: this one, or the one it had already. Raises `BusError`, `ResultsFull`."""
        key = result_key(self._batch_id, index)
        await self._batches.take_room(self._batch_id, min(len(result.line), MAX_RESULT_BYTES))
        if len(result.line) > MAX_RESULT_BYTES:
            await self._files.put_part(key, result.line)
            result = msgspec.structs.replace(result, line=b"")
        try:
            await self._batches.create_result(self._batch_id, index, result)
            return result
        except RevisionConflict:
            entry = await self._batches.results.get(key)
            if entry is None:
                raise self._conflict(f"result {index} was purged") from None
            return entry.value

    async def read(self, num_lines: int) -> AsyncIterator[tuple[int, BatchLineResult | None]]:
        """Every line's result in order, None for those that have none; a window of them in memory. Raises `BusError`."""
        for start in range(0, num_lines, READ_WINDOW):
            window = range(start, min(num_lines, start + READ_WINDOW))
            entries = await asyncio.gather(*(self._batches.results.get(result_key(self._batch_id, i)) for i in window))
            for index, entry in zip(window, entries, strict=True):
                yield index, None if entry is None else entry.value

    async def assemble(
        self,
        record: BatchRecord,
        num_lines: int,
        lines: AsyncIterator[InputLine],
        not_run: LineFailure | None,
        *,
        is_cancelled: bool = False,
    ) -> BatchFiles:
        """Writes the files in the order of the input. `lines`: the input, read as far as it is needed. `not_run`: why lines
        without a result have none; None: all should have one. `is_cancelled`: lines without a result are left out. Raises
        `BusError`: CONFLICT where somebody else has concluded the batch."""
        output, error = (_Part(file_id) for file_id in output_ids(self._batch_id))
        custom_ids = _CustomIds(lines)
        try:
            for part in (output, error):
                part.writer = await self._files.writer(part.file_id)
            async for index, result in self.read(num_lines):
                if result is None and is_cancelled:
                    continue
                if result is None and not_run is None:
                    raise self._conflict(f"line {index} has no result")
                line, failure = b"", not_run or _LOST
                if result is not None:
                    line, failure = result.line or await self._part_of(index), _LOST
                if line:
                    part = output if result is not None and result.is_success else error
                else:
                    part, line = error, await custom_ids.failed_line(index, failure)
                await part.write(line + b"\n")
            # Results are purged when the batch is concluded: where they were not there for that, it shows here.
            current = await self._batches.record(self._batch_id)
            if current is None or is_terminal(current):
                raise self._conflict("it is concluded")
            for part in (output, error):
                if part.num_lines:
                    await part.commit()
                    await self._files.register(part.stored(record, time.time()))
        finally:
            for part in (output, error):
                await part.abort()
        return BatchFiles(output.stored_id, error.stored_id, output.num_lines, error.num_lines)

    async def _part_of(self, index: int) -> bytes:
        """Empty where it is not there any more."""
        try:
            return await self._files.get_part(result_key(self._batch_id, index)) or b""
        except BusError as error:
            if error.code is not ErrorCode.INTERNAL:
                raise
            logger.error("%s, line %d: %s", self._batch_id, index, error)
            return b""

    def _conflict(self, message: str) -> BusError:
        return BusError(ErrorInfo(ErrorCode.CONFLICT, f"{self._batch_id}: {message}"))


class _CustomIds:
    """Reads along in the input, for lines of which nothing else is kept."""

    def __init__(self, lines: AsyncIterator[InputLine]) -> None:
        self._lines = lines
        self._is_lost = False

    async def failed_line(self, index: int, failure: LineFailure) -> bytes:
        """The error file's line; called with growing indices."""
        custom_id = None if self._is_lost else await self._find(index)
        if custom_id is None:
            message = f"{failure.message} Its custom_id is lost with the input file, in which it was line {index + 1}."
            return encode_line("", None, LineFailure(failure.code, message)).line
        return encode_line(custom_id, None, failure).line

    async def _find(self, index: int) -> str | None:
        try:
            async for line in self._lines:
                if line.index == index:
                    return custom_id_of(line.raw)
        except InputError as error:
            logger.warning("the rest of an input is lost: %s", error)
        self._is_lost = True
        return None


class _Part:
    """One of the two files in the making."""

    def __init__(self, file_id: str) -> None:
        self.file_id = file_id
        self.num_lines = 0
        self._num_bytes = 0
        self.writer: ObjectWriter | None = None

    @property
    def stored_id(self) -> str:
        """Empty for a file without lines, which is not stored."""
        return self.file_id if self.num_lines else ""

    async def write(self, line: bytes) -> None:
        assert self.writer is not None
        await self.writer.write(line)
        self._num_bytes += len(line)
        self.num_lines += 1

    async def commit(self) -> None:
        assert self.writer is not None
        await self.writer.commit()

    async def abort(self) -> None:
        """Never raises a `BusError`, which would take the place of the cancellation that brought it here."""
        if self.writer is not None:
            try:
                await self.writer.abort()
            except BusError as error:
                logger.info("chunks of an unfinished file stay: %s", error)

    def stored(self, record: BatchRecord, now_s: float) -> StoredFile:
        return stored_output(record, self.file_id, self._num_bytes, now_s)


def output_ids(batch_id: str) -> tuple[str, str]:
    """Ids of a batch's output and error files."""
    stem = batch_id.removeprefix("batch_")
    return f"file-{stem}-output", f"file-{stem}-error"


def stored_output(record: BatchRecord, file_id: str, num_bytes: int, now_s: float) -> StoredFile:
    """The record of one of a batch's files, as made at `now_s`."""
    return StoredFile(
        file_id=file_id,
        filename=f"{record.batch_id}_{file_id.rpartition('-')[2]}.jsonl",
        purpose="batch_output",
        num_bytes=num_bytes,
        created_s=now_s,
        expires_s=now_s + (record.output_expires_after_s or DEFAULT_EXPIRY_S),
        tenant=record.tenant,
    )


def outputs_of(record: BatchRecord) -> list[StoredFile]:
    """Records, but for their sizes, of the files that an ended batch names."""
    ended_s = record.status_s[record.status]
    return [stored_output(record, name, 0, ended_s) for name in (record.output_file_id, record.error_file_id) if name]
