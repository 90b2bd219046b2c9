"""The records of batches and the results of their lines, as they lie in JetStream, and who may have the room for results.

A batch begins when what it will need, by estimate, is there beyond what those that are begun still need. As estimates may be
too low, the last of the room is kept for the batch that was begun first, so that one can always go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from heapq import nsmallest

import msgspec

from services.gateway.batch.files import is_id, storage_full
from services.gateway.batch.reading import InputError
from services.gateway.batch.state import is_terminal
from services.gateway.http.errors import ApiError
from services.gateway.requests.writes import ELECTION_S, patiently
from shared.bus.interface import Bus, BusError, KeyValue, RevisionConflict, Room, Watch
from shared.messages.batches import BatchLineResult, BatchRecord
from shared.messages.catalogue import BATCH_RESULTS, BATCHES
from shared.messages.requests import ErrorCode, ErrorInfo
from shared.runtime.tasks import TaskSet

RECORDS_BYTES = 64 << 20
RECORDS_RESERVE_BYTES = RECORDS_BYTES // 4
"""In which no batch is created: those that are there must be able to go on."""
RESULTS_BYTES = 1 << 30
"""Room for the answers of all batches that are not finished."""
RESULTS_RESERVED_SHARE = 0.25
"""Share of that in which no batch is begun, and only the one that was begun first goes on."""
LINE_BYTES, TOKEN_BYTES = 600, 5
"""Typical sizes of a stored answer, without log-probabilities."""
STORED_BYTES = 150
"""Bytes that JetStream adds to an answer: its key, a header, the record's frame."""
LOOK_INTERVAL_S = 1.0
"""Interval at which the room is looked at; in between, what is stored from here is subtracted."""
WATCH_TIMEOUT_S = 3.0
"""Time for a record that was written to come back."""


class ResultsFull(BusError):
    """Nothing more can be stored, not even for the batch that was begun first."""


def result_key(batch_id: str, index: int) -> str:
    return f"{batch_id}.{index}"


def outstanding_bytes(record: BatchRecord) -> int:
    """What a batch may still store, by its reservation and the share of its lines that is open."""
    if record.status not in ("validating", "in_progress"):
        return 0
    num_open = record.num_total - record.num_completed - record.num_failed
    share = num_open / record.num_total if record.num_total else 1.0
    return int(record.reserved_bytes * share)


def fits(needed_bytes: int, room: Room, others: Iterable[BatchRecord]) -> bool:
    """Whether a batch may begin beside others; one that is larger than the store can only have it for itself."""
    outstanding = sum(map(outstanding_bytes, others))
    kept = RESULTS_RESERVED_SHARE * room.max_bytes
    available = room.free_bytes - kept - outstanding
    return available >= needed_bytes or (outstanding == 0 and available >= room.max_bytes - 2 * kept)


def first_begun(records: Iterable[BatchRecord]) -> str | None:
    """The batch that has been running for longest; None: none runs."""
    running = ((r.status_s.get("in_progress", 0.0), r.batch_id) for r in records if r.status == "in_progress")
    return min(running, default=(0.0, None))[1]


class Batches:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._records: KeyValue[BatchRecord]
        self.results: KeyValue[BatchLineResult]
        self._tasks = TaskSet()
        self._watch: Watch[BatchRecord] | None = None
        self._reserving, self._looking = asyncio.Lock(), asyncio.Lock()
        self._looked_at = float("-inf")
        self._room = Room(0, 0)
        self._first: str | None = None
        self._deleted: set[str] = set()
        """Keys with a marker at the last sweep."""

    async def start(self) -> None:
        self._records = await self._bus.key_value(BATCHES, max_bytes=RECORDS_BYTES)
        self.results = await self._bus.key_value(BATCH_RESULTS, max_bytes=RESULTS_BYTES)

    async def stop(self) -> None:
        await self._tasks.end_all()

    async def create(self, record: BatchRecord) -> None:
        """Raises `ApiError` 429 where the store of records is nearly full; `BusError`: then the batch is removed, should it
        be stored, because whoever asked for it asks again."""
        if (await self._records.room()).free_bytes < RECORDS_RESERVE_BYTES:
            raise storage_full("batches")
        what = f"{record.batch_id} is not stored"

        async def create() -> None:
            with suppress(RevisionConflict):  # an earlier try was stored
                await self._records.create(record.batch_id, record)

        try:
            await patiently(what, create, ELECTION_S)
        except BusError:
            self._tasks.start(self._take_back(record.batch_id))
            raise

    async def _take_back(self, batch_id: str) -> None:
        async def take_back() -> None:
            if await self._records.get(batch_id) is not None:
                await self._records.delete(batch_id)

        with suppress(BusError):  # it is run then
            await patiently(f"{batch_id} was refused and is not removed", take_back)

    # --------------------------------------------------------------------------------------- room for results

    async def reserve(self, batch_id: str, num_lines: int, num_tokens: int) -> bool:
        """Sets room aside for a batch that is not begun, in its record; False: there is not enough now. Raises `InputError`
        for one that can never have enough, and `BusError`.

        Of several gateways that reserve at once, the one whose record is written first has the room: all see the records
        in the order in which they were written, and whoever sees its own has seen those before it.
        """
        async with self._reserving:
            room = await self.results.room()
            if num_lines * LINE_BYTES > room.max_bytes:
                message = (
                    f"The answers to {num_lines} lines cannot fit into the server's {room.max_bytes} bytes for them."
                )
                raise InputError("batch_too_large", message)
            needed = num_lines * LINE_BYTES + num_tokens * TOKEN_BYTES
            if not fits(needed, room, self._others(batch_id)):
                return False
            most = int((1.0 - RESULTS_RESERVED_SHARE) * room.max_bytes)
            if await self._set_reserved(batch_id, min(needed, most)):
                room = await self.results.room()
                if fits(needed, room, self._others(batch_id)):
                    return True
            await self._set_reserved(batch_id, 0)
            return False

    def _others(self, batch_id: str) -> list[BatchRecord]:
        return [record for record in self._known.values() if record.batch_id != batch_id and not is_terminal(record)]

    @property
    def _known(self) -> dict[str, BatchRecord]:
        assert self._watch is not None
        return self._watch.entries

    async def _set_reserved(self, batch_id: str, num_bytes: int) -> bool:
        """Returns when the watch shows it; False: it does not."""
        await self.change(batch_id, lambda record: msgspec.structs.replace(record, reserved_bytes=num_bytes))
        try:
            async with asyncio.timeout(WATCH_TIMEOUT_S):
                while (record := self._known.get(batch_id)) is None or record.reserved_bytes != num_bytes:
                    await asyncio.sleep(0.01)
            return True
        except TimeoutError:
            return False

    async def take_room(self, batch_id: str, num_bytes: int) -> None:
        """Before so much is stored for a batch that is begun. Raises `BusError` OVERLOADED where the room that is left is
        another's."""
        async with self._looking:
            now = self._bus.now()
            if now - self._looked_at >= LOOK_INTERVAL_S:
                self._room = await self.results.room()
                self._first = first_begun(self._known.values())
                self._looked_at = now
        used, most = self._room
        if self._first not in (None, batch_id) and most - used < RESULTS_RESERVED_SHARE * most:
            raise BusError(ErrorInfo(ErrorCode.OVERLOADED, f"{batch_id}: only the first batch may store results now"))
        self._room = Room(used + num_bytes + STORED_BYTES, most)

    async def create_result(self, batch_id: str, index: int, result: BatchLineResult) -> None:
        """Raises `RevisionConflict` where the line has one; `ResultsFull`, `BusError`."""
        try:
            await self.results.create(result_key(batch_id, index), result)
        except BusError as error:
            if error.code is ErrorCode.OVERLOADED and self._first in (None, batch_id):
                raise ResultsFull(error.info) from None
            raise

    # ------------------------------------------------------------------------------------------------ records

    async def get(self, batch_id: str, tenant: str | None) -> BatchRecord:
        """A batch of the tenant, None: of any. Raises `ApiError` 404."""
        record = await self.record(batch_id)
        if record is None or tenant not in (None, record.tenant):
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

    def progress(self, limit: int) -> list[BatchRecord]:
        """Batches of all tenants that are not over, and the last that ended."""
        records = self._watch.entries.values() if self._watch is not None else ()
        return nsmallest(limit, records, key=lambda record: (is_terminal(record), -record.created_s))

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
        """Once, before anything is reserved."""
        self._watch = await self._records.watch(on_change)
        return self._watch

    async def delete(self, batch_id: str) -> None:
        """Removes the record of one that is over. Its files stay."""
        await self.results.purge(batch_id)
        await patiently(f"{batch_id} is not deleted", lambda: self._records.delete(batch_id), ELECTION_S)

    async def sweep(self) -> None:
        """Removes the markers of batches that were deleted before the last sweep: every gateway has been told of them."""
        self._deleted = await self._records.purge_markers(self._deleted)
