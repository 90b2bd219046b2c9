"""JetStream's part of the memory bus: what the hub stores, and how a bus reaches it (calls with delays there and back)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shared.bus.codec import decoder, encode
from shared.bus.entry_view import EntryView
from shared.bus.interface import (
    BusError,
    KeyValue,
    KvEntry,
    ObjectStore,
    RevisionConflict,
    Room,
    Watch,
)
from shared.messages.channels import Bucket, ObjectBucket
from shared.messages.requests import ErrorCode, ErrorInfo

if TYPE_CHECKING:
    from tests.memory_bus import MemoryBus

M = TypeVar("M")

CHUNK_BYTES = 128 * 1024
MAX_BYTES = 1 << 40
"""What every bucket here has room for, as far as `room` says; nothing is ever full."""


# ---------------------------------------------------------------------------------------------- what the hub stores


@dataclass
class _Entry:
    body: bytes
    revision: int
    ends_at_s: float


@dataclass
class _BucketState:
    durable: bool
    ttl_s: float | None
    revision: int = 0
    entries: dict[str, _Entry] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    watchers: set[Callable[[str, _Entry | None], None]] = field(default_factory=set)

    def live(self, now_s: float) -> dict[str, _Entry]:
        self.entries = {key: entry for key, entry in self.entries.items() if entry.ends_at_s > now_s}
        return self.entries

    def write(self, key: str, body: bytes | None, now_s: float, expected: int | None = None) -> int:
        """`body` None deletes. `expected`: the revision that must be there, 0 for none, None for any."""
        entries = self.live(now_s)
        present = entries[key].revision if key in entries else 0
        if expected is not None and expected != present:
            raise RevisionConflict(ErrorInfo(ErrorCode.CONFLICT, f"{key} has revision {present}, not {expected}"))
        self.revision += 1
        entry = None
        if body is None:
            entries.pop(key, None)
            self.deleted.add(key)
        else:
            self.deleted.discard(key)
            ends_at_s = float("inf") if self.ttl_s is None else now_s + self.ttl_s
            entry = entries[key] = _Entry(body, self.revision, ends_at_s)
        for watcher in list(self.watchers):
            watcher(key, entry)
        return self.revision


class MemoryStore:
    """All that a server keeps. Whatever is asked for exists: the first to ask declares it."""

    def __init__(self) -> None:
        self._buckets: dict[str, _BucketState] = {}
        self._objects: dict[str, dict[str, bytes]] = {}

    def bucket(self, bucket: Bucket[Any]) -> _BucketState:
        return self._buckets.setdefault(bucket.name, _BucketState(bucket.durable, bucket.ttl_s))

    def objects(self, bucket: ObjectBucket) -> dict[str, bytes]:
        return self._objects.setdefault(bucket.name, {})

    def lose_memory(self) -> None:
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if bucket.durable}
        for bucket in self._buckets.values():
            bucket.watchers.clear()


# -------------------------------------------------------------------------------------------------- what a bus sees


class MemoryKeyValue(KeyValue[M]):
    def __init__(self, bus: MemoryBus, bucket: Bucket[M]) -> None:
        self._bus = bus
        self._bucket = bucket
        self._decode = decoder(bucket.type).decode

    @property
    def _state(self) -> _BucketState:
        return self._bus.hub.store.bucket(self._bucket)

    def _read(self, entry: _Entry) -> KvEntry[M]:
        return KvEntry(self._decode(entry.body), entry.revision)

    async def get(self, key: str) -> KvEntry[M] | None:
        entry = await self._bus.call(lambda: self._state.live(self._bus.now()).get(key))
        return None if entry is None else self._read(entry)

    async def put(self, key: str, value: M) -> int:
        return await self._write(key, encode(value), None)

    async def create(self, key: str, value: M) -> int:
        return await self._write(key, encode(value), 0)

    async def update(self, key: str, value: M, revision: int) -> int:
        return await self._write(key, encode(value), revision)

    async def delete(self, key: str) -> None:
        await self._write(key, None, None)

    async def is_deleted(self, key: str) -> bool:
        return await self._bus.call(lambda: key in self._state.deleted)

    async def purge(self, prefix: str) -> None:
        def apply() -> None:
            entries = self._state.entries
            self._state.deleted -= {k for k in self._state.deleted if k == prefix or k.startswith(prefix + ".")}
            for key in [key for key in entries if key == prefix or key.startswith(prefix + ".")]:
                del entries[key]

        await self._bus.call(apply)

    async def purge_revision(self, key: str, revision: int) -> bool:
        def apply() -> bool:
            entry = self._state.live(self._bus.now()).get(key)
            if entry is None or entry.revision != revision:
                return False
            del self._state.entries[key]
            return True

        return await self._bus.call(apply)

    async def purge_markers(self, seen: Set[str]) -> set[str]:
        def apply() -> set[str]:
            self._state.deleted -= seen
            return set(self._state.deleted)

        return await self._bus.call(apply)

    async def _write(self, key: str, body: bytes | None, expected: int | None) -> int:
        return await self._bus.call(lambda: self._state.write(key, body, self._bus.now(), expected))

    async def entries(self) -> dict[str, KvEntry[M]]:
        entries = await self._bus.call(lambda: dict(self._state.live(self._bus.now())))
        return {key: self._read(entry) for key, entry in entries.items()}

    async def room(self) -> Room:
        entries = await self._bus.call(lambda: self._state.live(self._bus.now()))
        return Room(sum(len(entry.body) for entry in entries.values()), MAX_BYTES)

    async def watch(self, on_change: Callable[[str, M | None], None] | None = None) -> Watch[M]:
        view: EntryView[M] = EntryView(self._bucket.ttl_s, self._bus.now, on_change)
        watch = MemoryWatch(self._bus, self._bucket, view)
        await watch.open()
        return watch


class MemoryWatch(Generic[M]):
    def __init__(self, bus: MemoryBus, bucket: Bucket[M], view: EntryView[M]) -> None:
        self.entries = view.entries
        self._bus = bus
        self._bucket = bucket
        self._view = view
        self._decode = decoder(bucket.type).decode
        self._tasks: set[asyncio.Task[None]] = set()
        self.problem = ""

    async def open(self) -> None:
        present = await self._bus.call(self._begin)
        for key, entry in present.items():
            self._view.put(key, self._decode(entry.body), entry.revision)
        self._bus.watches.add(self)

    def _begin(self) -> dict[str, _Entry]:
        state = self._bus.hub.store.bucket(self._bucket)
        state.watchers.add(self._on_write)
        return dict(state.live(self._bus.now()))

    def _on_write(self, key: str, entry: _Entry | None) -> None:
        self._bus.hub.transfer(self._bus, self._bus, lambda: self._apply(key, entry))

    def _apply(self, key: str, entry: _Entry | None) -> None:
        if self not in self._bus.watches:
            return
        if entry is None:
            self._view.remove(key)
        else:
            self._view.put(key, self._decode(entry.body), entry.revision)

    def pause(self) -> None:
        self._view.pause()
        self._bus.hub.store.bucket(self._bucket).watchers.discard(self._on_write)

    def reopen(self) -> None:
        """What is there arrives as on the first opening; what is not leaves the view after its grace period."""
        self._view.resume()
        for key, entry in self._begin().items():
            self._on_write(key, entry)

    async def stop(self) -> None:
        self._bus.watches.discard(self)
        self.pause()


class MemoryObjectWriter:
    def __init__(self, store: MemoryObjectStore, name: str) -> None:
        self._store = store
        self._name = name
        self._data = bytearray()

    async def write(self, data: bytes) -> None:
        self._data += data

    async def commit(self) -> None:
        await self._store.put(self._name, bytes(self._data))

    async def abort(self) -> None:
        self._data.clear()


class MemoryObjectStore(ObjectStore):
    def __init__(self, bus: MemoryBus, bucket: ObjectBucket) -> None:
        self._bus = bus
        self._bucket = bucket

    @property
    def _objects(self) -> dict[str, bytes]:
        return self._bus.hub.store.objects(self._bucket)

    async def put(self, name: str, data: bytes) -> None:
        await self._bus.call(lambda: self._objects.update({name: bytes(data)}))

    async def get(self, name: str) -> bytes | None:
        return await self._bus.call(lambda: self._objects.get(name))

    async def writer(self, name: str) -> MemoryObjectWriter:
        return MemoryObjectWriter(self, name)

    async def read(self, name: str) -> AsyncIterator[bytes] | None:
        data = await self.get(name)
        return None if data is None else self._chunks(name, data)

    async def _chunks(self, name: str, data: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(data), CHUNK_BYTES):
            if await self.get(name) is not data:
                raise BusError(ErrorInfo(ErrorCode.GONE, f"object {name} was deleted while it was read"))
            yield data[start : start + CHUNK_BYTES]

    async def delete(self, name: str) -> None:
        await self._bus.call(lambda: self._objects.pop(name, None))

    async def room(self) -> Room:
        return Room(await self._bus.call(lambda: sum(map(len, self._objects.values()))), MAX_BYTES)

    async def check_storage(self) -> None:
        pass

    async def purge_unfinished(self, seen: Set[str]) -> set[str]:
        return set()

    async def names(self) -> list[str]:
        return await self._bus.call(lambda: sorted(self._objects))
