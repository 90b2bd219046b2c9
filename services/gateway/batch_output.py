"""The results of a batch's lines: kept one by one, read back, and put together into its output and error files.

Each is created once under its own key, so a line has one answer whoever else may have answered it too. The files are a
function of these results alone, hence may be made again, by anybody, until the batch is concluded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec

from services.gateway.batches import Batches, result_key
from services.gateway.files import DEFAULT_EXPIRY_S, Files
from shared.bus.interface import BusError, RevisionConflict
from shared.messages import MAX_MESSAGE_BYTES, BatchLineResult, BatchRecord, ErrorCode, ErrorInfo, StoredFile

READ_WINDOW = 64
"""Results asked for at once."""
MAX_RESULT_BYTES = MAX_MESSAGE_BYTES - 1024
"""A larger line lies in the object store, under the key of its result."""


class BatchOutput:
    def __init__(self, batches: Batches, files: Files, batch_id: str) -> None:
        self._batches = batches
        self._files = files
        self._batch_id = batch_id

    async def keep(self, index: int, result: BatchLineResult) -> BatchLineResult:
        """The result that the line now has: this one, or the one it had already. Raises `BusError`."""
        key = result_key(self._batch_id, index)
        if len(result.line) > MAX_RESULT_BYTES:
            await self._files.put_part(key, result.line)
            result = msgspec.structs.replace(result, line=b"")
        try:
            await self._batches.results.create(key, result)
            return result
        except RevisionConflict:
            entry = await self._batches.results.get(key)
            if entry is None:
                raise BusError(ErrorInfo(ErrorCode.CONFLICT, f"result {key} was purged")) from None
            return entry.value

    async def read(self, num_lines: int) -> AsyncIterator[tuple[int, BatchLineResult | None]]:
        """Every line's result in order, None for those that have none; a window of them in memory. Raises `BusError`."""
        for start in range(0, num_lines, READ_WINDOW):
            window = range(start, min(num_lines, start + READ_WINDOW))
            entries = await asyncio.gather(*(self._batches.results.get(result_key(self._batch_id, i)) for i in window))
            for index, entry in zip(window, entries, strict=True):
                yield index, None if entry is None else entry.value

    async def assemble(self, record: BatchRecord, num_lines: int) -> tuple[str, str]:
        """Writes the files in the order of the input; returns their ids, empty for one without lines. Raises `BusError`:
        CONFLICT where a line has no result, because somebody else has concluded the batch."""
        stem = self._batch_id.removeprefix("batch_")
        output = _Part(f"file-{stem}-output", f"{self._batch_id}_output.jsonl")
        error = _Part(f"file-{stem}-error", f"{self._batch_id}_error.jsonl")
        writers = {part.file_id: await self._files.writer(part.file_id) for part in (output, error)}
        try:
            async for index, result in self.read(num_lines):
                if result is None:
                    raise BusError(ErrorInfo(ErrorCode.CONFLICT, f"line {index} of {self._batch_id} has no result"))
                line = result.line or await self._files.get_part(result_key(self._batch_id, index)) or b""
                part = output if result.is_success else error
                await writers[part.file_id].write(line + b"\n")
                part.num_bytes += len(line) + 1
            for part in (output, error):
                if part.num_bytes:
                    await writers[part.file_id].commit()
                    await self._files.register(part.stored(record, time.time()))
        finally:
            for writer in writers.values():
                await writer.abort()
        return output.file_id if output.num_bytes else "", error.file_id if error.num_bytes else ""


class _Part:
    def __init__(self, file_id: str, filename: str) -> None:
        self.file_id = file_id
        self.filename = filename
        self.num_bytes = 0

    def stored(self, record: BatchRecord, now_s: float) -> StoredFile:
        expires_s = now_s + (record.output_expires_after_s or DEFAULT_EXPIRY_S)
        return StoredFile(self.file_id, self.filename, "batch_output", self.num_bytes, now_s, expires_s, record.tenant)
