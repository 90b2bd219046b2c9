"""The records of batches and the results of their lines, as they lie in JetStream."""

from __future__ import annotations

from collections.abc import Callable

from services.gateway.errors import ApiError
from services.gateway.files import is_id, storage_full
from shared.bus.interface import Bus, KeyValue, RevisionConflict, Watch
from shared.messages import BATCH_RESULTS, BATCHES, BatchLineResult, BatchRecord

RECORDS_BYTES = 64 << 20
RECORDS_RESERVE_BYTES = RECORDS_BYTES // 4
"""In which no batch is created: those that are there must be able to go on."""
RESULTS_BYTES = 1 << 30
"""For the answers of all batches that are not finished."""
RESULTS_RESERVED_SHARE = 0.25
"""Of that, in which no batch is begun: those that are begun must be able to go on."""
LINE_BYTES, TOKEN_BYTES = 600, 5
"""Of a stored answer, typically, without log-probabilities."""


def result_key(batch_id: str, index: int) -> str:
    return f"{batch_id}.{index}"


class Batches:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._records: KeyValue[BatchRecord]
        self.results: KeyValue[BatchLineResult]

    async def start(self) -> None:
        self._records = await self._bus.key_value(BATCHES, max_bytes=RECORDS_BYTES)
        self.results = await self._bus.key_value(BATCH_RESULTS, max_bytes=RESULTS_BYTES)

    async def create(self, record: BatchRecord) -> None:
        """Raises `ApiError` 429 where the store of records is nearly full."""
        if (await self._records.room()).free_bytes < RECORDS_RESERVE_BYTES:
            raise storage_full("batches")
        await self._records.create(record.batch_id, record)

    async def has_room(self, num_lines: int, num_tokens: int) -> bool:
        """Whether a batch of that size may begin; one that is larger than the store can only have it for itself."""
        room = await self.results.room()
        needed = num_lines * LINE_BYTES + num_tokens * TOKEN_BYTES
        reserved = RESULTS_RESERVED_SHARE * room.max_bytes
        return room.free_bytes - reserved >= min(needed, room.max_bytes - 2 * reserved)

    async def get(self, batch_id: str, tenant: str) -> BatchRecord:
        """Raises `ApiError` 404."""
        record = await self.record(batch_id)
        if record is None or record.tenant != tenant:
            raise ApiError(404, f"There is no batch '{batch_id[:100]}'.", param="batch_id", code="batch_not_found")
        return record

    async def record(self, batch_id: str) -> BatchRecord | None:
        """Whosever it is."""
        if not is_id(batch_id, "batch_"):
            return None
        entry = await self._records.get(batch_id)
        return None if entry is None else entry.value

    async def all_of(self, tenant: str) -> list[BatchRecord]:
        """The newest first."""
        records = [entry.value for entry in (await self._records.entries()).values()]
        own = [record for record in records if record.tenant == tenant]
        return sorted(own, key=lambda record: (record.created_s, record.batch_id), reverse=True)

    async def change(self, batch_id: str, change: Callable[[BatchRecord], BatchRecord]) -> BatchRecord | None:
        """Applies a pure function to the record as it is; returns the outcome, None where there is no such batch."""
        while True:
            entry = await self._records.get(batch_id)
            if entry is None:
                return None
            changed = change(entry.value)
            if changed == entry.value:
                return changed
            try:
                await self._records.update(batch_id, changed, entry.revision)
                return changed
            except RevisionConflict:
                continue  # another gateway wrote it at the same time

    async def watch(self, on_change: Callable[[str, BatchRecord | None], None]) -> Watch[BatchRecord]:
        return await self._records.watch(on_change)

    async def forget(self, batch_id: str) -> None:
        await self.results.purge(batch_id)
        await self._records.delete(batch_id)
