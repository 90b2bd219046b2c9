"""The files of the Files API: their records in a key-value bucket, their bytes in an object bucket.

A file is there for its tenant from the moment its record is written, which is after its bytes; it is gone for its tenant
when it is deleted or has expired. Its bytes stay while an unfinished batch reads them; `sweep` removes them.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Set
from contextlib import asynccontextmanager

import msgspec

from services.gateway.http.errors import ApiError, of_info
from services.gateway.requests.writes import ELECTION_S, patiently
from shared.bus.interface import Bus, BusError, KeyValue, ObjectStore, ObjectWriter, RevisionConflict
from shared.messages.batches import StoredFile
from shared.messages.catalogue import FILE_CONTENTS, FILES
from shared.messages.requests import ErrorCode, ErrorInfo

logger = logging.getLogger(__name__)

MAX_UPLOAD_S = 3600.0
DEFAULT_EXPIRY_S = 30 * 86400
"""Default expiry of files for batches, and of their output."""
RECORDS_BYTES = 64 << 20
RESERVED_SHARE = 0.25
"""Share of the stores of records and contents that uploads do not use: it is for the output of batches."""
FULL_RETRY_AFTER_S = 60.0


def storage_full(what: str) -> ApiError:
    message = f"The server's storage for {what} is full; there will be room when others are deleted or expire."
    return ApiError(429, message, type="server_error", code="storage_full", retry_after_s=FULL_RETRY_AFTER_S)


def new_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


class Files:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._orphans: set[str] = set()
        self._gone: set[str] = set()
        """Deleted and expired files that the last sweep saw."""
        self._unfinished: set[str] = set()
        self._uploading: Counter[str] = Counter()
        """Bytes that each tenant uploads now, as announced."""
        self._looked_s = 0.0
        self.lost: set[str] = set()
        """Files whose content was not there at the last sweep."""
        self._records: KeyValue[StoredFile]
        self._contents: ObjectStore

    async def start(self) -> None:
        self._records = await self._bus.key_value(FILES, max_bytes=RECORDS_BYTES)
        self._contents = await self._bus.object_store(FILE_CONTENTS)

    async def writer(self, file_id: str) -> ObjectWriter:
        return await self._contents.writer(file_id)

    async def check_room(self, num_bytes: int) -> None:
        """Checks that there is room for an upload of so many bytes. Raises `ApiError` 429, or 507 where NATS' disk is
        full."""
        if problem := self._bus.storage_problem:
            raise of_info(ErrorInfo(ErrorCode.STORAGE_FULL, f"{problem}.", retry_after_s=FULL_RETRY_AFTER_S))
        for room, needed in ((await self._contents.room(), num_bytes), (await self._records.room(), 0)):
            if room.free_bytes - needed < RESERVED_SHARE * room.max_bytes:
                raise storage_full("files")

    async def check_storage(self) -> None:
        await self._contents.check_storage()

    @asynccontextmanager
    async def share_of(self, tenant: str, num_bytes: int, limit: int) -> AsyncIterator[None]:
        """While a tenant uploads so many bytes, of `limit` (0: no bound) for all its files. Raises `ApiError` 429."""
        if not limit or not tenant:
            yield
            return
        self._uploading[tenant] += num_bytes
        try:
            used = sum(file.num_bytes for file in await self.all_of(tenant))
            if used + self._uploading[tenant] > limit:
                raise ApiError(
                    429,
                    f"The files of this API key may have {limit} bytes: {used} are used, and {self._uploading[tenant]} "
                    "would come; there will be room when files are deleted or expire.",
                    type="rate_limit_error",
                    param="file",
                    code="key_storage_full",
                    retry_after_s=FULL_RETRY_AFTER_S,
                )
            yield
        finally:
            self._uploading[tenant] -= num_bytes

    async def register(self, file: StoredFile) -> None:
        """Its bytes are there. Of a file that is known, only the size changes."""
        what = f"{file.file_id} is not stored"
        try:
            await patiently(what, lambda: self._records.create(file.file_id, file), ELECTION_S)
        except RevisionConflict:
            entry = await self._records.get(file.file_id)
            if entry is not None and entry.value.num_bytes != file.num_bytes:
                changed = msgspec.structs.replace(entry.value, num_bytes=file.num_bytes)
                await self._records.update(file.file_id, changed, entry.revision)

    async def get(self, file_id: str, tenant: str) -> StoredFile:
        """Raises `ApiError` 404."""
        file = await self.record(file_id)
        if file is None or not _is_visible(file, tenant, time.time()):
            raise ApiError(404, f"There is no file '{file_id[:100]}'.", param="id", code="file_not_found")
        return file

    async def record(self, file_id: str) -> StoredFile | None:
        """Whosever it is, deleted or not."""
        if not is_id(file_id, "file-"):
            return None
        entry = await self._records.get(file_id)
        return None if entry is None else entry.value

    async def all_of(self, tenant: str) -> list[StoredFile]:
        """The newest first."""
        now_s = time.time()
        files = [entry.value for entry in (await self._records.entries()).values()]
        visible = [file for file in files if _is_visible(file, tenant, now_s)]
        return sorted(visible, key=lambda file: (file.created_s, file.file_id), reverse=True)

    async def read(self, file_id: str) -> AsyncIterator[bytes] | None:
        return await self._contents.read(file_id)

    async def delete(self, file: StoredFile) -> None:
        deleted = msgspec.structs.replace(file, is_deleted=True)
        await patiently(f"{file.file_id} is not deleted", lambda: self._records.put(file.file_id, deleted), ELECTION_S)

    # ------------------------------------------------------------------------- answers too large for a message

    async def put_part(self, name: str, data: bytes) -> None:
        await self._contents.put(name, data)

    async def get_part(self, name: str) -> bytes | None:
        return await self._contents.get(name)

    # ------------------------------------------------------------------------------------------------ sweeping

    async def sweep(self, in_use: Callable[[], Set[str]], now_s: float, outputs: Iterable[StoredFile] = ()) -> int:
        """Removes what is deleted or expired, and bytes that belong to no file, where the last sweep found them so too: an
        upload writes its record after its bytes, a batch its record after a look at its input. `in_use()`: prefixes of the
        names that unfinished batches need at this moment. `outputs`: records, but for the size, of files that ended batches
        name; one that is lost is written again where its bytes are there. Returns how many objects went."""
        entries = await self._records.entries()
        gone = {file_id for file_id, each in entries.items() if not _is_visible(each.value, each.value.tenant, now_s)}
        names = set(await self._contents.names())
        self._tell_lost(entries.keys() - gone - names)
        orphans = names - entries.keys()
        for file in outputs:
            if file.file_id in orphans:
                await self._register_again(file)
                orphans.discard(file.file_id)
        removed = 0
        for name in sorted((gone & self._gone) | (orphans & self._orphans)):
            if name.partition(".")[0] not in in_use():
                await self._contents.delete(name)
                if name in gone:
                    await self._records.purge(name)
                removed += 1
        self._gone, self._orphans = gone, orphans
        if now_s - self._looked_s >= 2 * MAX_UPLOAD_S:
            self._looked_s = now_s
            self._unfinished = await self._contents.purge_unfinished(self._unfinished)
        return removed

    def _tell_lost(self, lost: Set[str]) -> None:
        for file_id in sorted(lost - self.lost):
            logger.error("%s: its content was stored and is lost", file_id)
        self.lost = set(lost)

    async def _register_again(self, file: StoredFile) -> None:
        try:
            chunks = await self._contents.read(file.file_id)
            num_bytes = 0 if chunks is None else sum([len(chunk) async for chunk in chunks])
        except BusError as error:
            logger.error("%s: its record is lost, its content cannot be read: %s", file.file_id, error)
            return
        if chunks is not None:
            logger.warning("%s: its record was lost and is written again", file.file_id)
            await self.register(msgspec.structs.replace(file, num_bytes=num_bytes))


def is_id(text: str, prefix: str) -> bool:
    """Whether it can be one of our ids, which are keys of buckets."""
    rest = text.removeprefix(prefix)
    return text.startswith(prefix) and 0 < len(rest) <= 64 and rest.isascii() and rest.replace("-", "").isalnum()


def _is_visible(file: StoredFile, tenant: str, now_s: float) -> bool:
    is_expired = file.expires_s is not None and file.expires_s <= now_s
    return file.tenant == tenant and not file.is_deleted and not is_expired
