"""Key-value buckets on JetStream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Set
from typing import Any, TypeVar

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, StorageType, StreamConfig
from nats.js.kv import KeyValue as RawKeyValue

from shared.bus.codec import UNREADABLE, decoder, encode
from shared.bus.entry_view import EntryView
from shared.bus.interface import BusError, KeyValue, KvEntry, Room, UnreadableEntry, Watch
from shared.bus.nats_streams import DUPLICATE_WINDOW_S, Streams, bus_errors
from shared.bus.nats_watch import NatsWatch
from shared.messages.channels import Bucket
from shared.messages.requests import ErrorCode, ErrorInfo

M = TypeVar("M")

MEMORY_BUCKET_BYTES = 32 * 1024 * 1024
DURABLE_BUCKET_BYTES = 32 * 1024 * 1024
"""JetStream sets the whole of it aside, for each bucket."""
LEADER_ANSWERS_S = 0.5
"""A leader that is there answers sooner; an election takes seconds."""


def _stream_name(bucket: Bucket[Any]) -> str:
    return f"KV_{bucket.name}"


def _stream_of(bucket: Bucket[Any], max_bytes: int | None) -> StreamConfig:
    """Configuration laid down by NATS architecture decision record 8, so that the `nats kv` tool works."""
    return StreamConfig(
        name=_stream_name(bucket),
        subjects=[f"$KV.{bucket.name}.>"],
        max_msgs_per_subject=1,
        max_age=bucket.ttl_s or 0,
        max_bytes=max_bytes or (DURABLE_BUCKET_BYTES if bucket.durable else MEMORY_BUCKET_BYTES),
        duplicate_window=min(bucket.ttl_s or DUPLICATE_WINDOW_S, DUPLICATE_WINDOW_S),
        storage=StorageType.FILE if bucket.durable else StorageType.MEMORY,
        discard=DiscardPolicy.OLD if bucket.drops_oldest else DiscardPolicy.NEW,
        # Whoever may write one key could clear the bucket by a header.
        allow_rollup_hdrs=False,
        deny_delete=True,
        allow_direct=True,
    )


def _is_silent(error: BaseException | None) -> bool:
    return isinstance(error, BusError) and error.code is ErrorCode.UNAVAILABLE


class NatsKeyValue(KeyValue[M]):
    def __init__(
        self,
        streams: Streams,
        bucket: Bucket[M],
        now: Callable[[], float],
        watches: set[NatsWatch[Any]],
        max_bytes: int | None = None,
    ) -> None:
        self._streams = streams
        self._bucket = bucket
        self._now = now
        self._watches = watches
        self._config = _stream_of(bucket, max_bytes)
        self._decode = decoder(bucket.type).decode
        # Not a direct get, which any copy answers: what was written here a moment ago is read at the stream's leader.
        self._raw = self._raw_on(streams.context)
        self._writing = self._raw_on(streams.writing)
        self._copies = self._raw_on(streams.context, is_direct=True)

    def _raw_on(self, context: JetStreamContext, *, is_direct: bool = False) -> RawKeyValue:
        name = self._bucket.name
        return RawKeyValue(name, _stream_name(self._bucket), f"$KV.{name}.", context, direct=is_direct)

    async def provide(self) -> None:
        """Declares the bucket, unless this process has done so."""
        await self._streams.provide(self._config)

    async def get(self, key: str) -> KvEntry[M] | None:
        with bus_errors(f"get {self._bucket.name}/{key}"):
            value, revision = await self._look(key)
        return None if value is None else self._entry(key, value, revision)

    async def get_from_any_copy(self, key: str) -> KvEntry[M] | None:
        asked = asyncio.ensure_future(self.get(key))
        try:
            await asyncio.wait({asked}, timeout=LEADER_ANSWERS_S)
            if not asked.done() or _is_silent(asked.exception()):
                try:
                    found = await self._copies.get(key)
                    return self._entry(key, found.value or b"", found.revision or 0)
                except (nats.errors.Error, nats.js.errors.Error):
                    pass  # there is none, so far as this copy knows, or no copy answers
            return await asked
        finally:
            asked.cancel()

    def _entry(self, key: str, value: bytes, revision: int) -> KvEntry[M]:
        try:
            return KvEntry(self._decode(value), revision)
        except UNREADABLE as error:
            message = f"{self._bucket.name}/{key} cannot be read: {error}"
            raise UnreadableEntry(ErrorInfo(ErrorCode.INTERNAL, message), revision) from None

    async def put(self, key: str, value: M) -> int:
        body = encode(value)
        return await self._write("put", key, body, lambda: self._writing.put(key, body))

    async def create(self, key: str, value: M) -> int:
        body = encode(value)

        async def create() -> int:
            try:
                return int(await self._writing.create(key, body))
            except nats.js.errors.KeyNotFoundError:
                # It was there at the first look and had expired by the second.
                raise nats.js.errors.KeyWrongLastSequenceError from None

        return await self._write("create", key, body, create)

    async def update(self, key: str, value: M, revision: int) -> int:
        body = encode(value)
        return await self._write("update", key, body, lambda: self._writing.update(key, body, last=revision))

    async def delete(self, key: str) -> None:
        await self._write("delete", key, None, lambda: self._writing.delete(key))

    async def is_deleted(self, key: str) -> bool:
        with bus_errors(f"get {self._bucket.name}/{key}"):
            value, revision = await self._look(key)
        return value is None and revision > 0

    async def _look(self, key: str) -> tuple[bytes | None, int]:
        """What lies under the key and its revision: no value for a deletion, revision 0 for nothing."""
        try:
            entry = await self._streams.read(_stream_name(self._bucket), lambda: self._raw.get(key))
        except nats.js.errors.KeyNotFoundError as error:
            return None, (error.entry.revision or 0) if error.entry is not None else 0
        return entry.value or b"", entry.revision or 0

    async def purge(self, prefix: str) -> None:
        subject = f"$KV.{self._bucket.name}.{prefix}"
        with bus_errors(f"purge {self._bucket.name}/{prefix}"):
            for each in (subject, f"{subject}.>"):
                await self._streams.context.purge_stream(_stream_name(self._bucket), subject=each)

    async def purge_revision(self, key: str, revision: int) -> bool:
        with bus_errors(f"purge {self._bucket.name}/{key}"):
            subject = f"$KV.{self._bucket.name}.{key}"
            return await self._streams.purge_up_to(_stream_name(self._bucket), subject, revision) > 0

    async def purge_markers(self, seen: Set[str]) -> set[str]:
        name, prefix = _stream_name(self._bucket), f"$KV.{self._bucket.name}."
        with bus_errors(f"list keys of {self._bucket.name}"):
            info = await self._streams.context.stream_info(name, prefix + ">")
        keys = {subject.removeprefix(prefix) for subject in info.state.subjects or {}}
        marked = set()
        for key in sorted(keys - (await self.entries()).keys()):
            with bus_errors(f"purge {self._bucket.name}/{key}"):
                value, revision = await self._look(key)
                if value is None and revision and key in seen:  # up to the marker: it may be written anew meanwhile
                    await self._streams.context.purge_stream(name, seq=revision + 1, subject=prefix + key)
                elif value is None and revision:
                    marked.add(key)
        return marked

    async def _write(self, what: str, key: str, body: bytes | None, write: Callable[[], Awaitable[int]]) -> int:
        """`body`: that is written; None: a deletion."""

        async def publish() -> int:
            try:
                return await write()
            except nats.js.errors.NoStreamResponseError:
                # A server without its store is back, and `declare_again` has not come this far.
                await self._streams.declare(self._config)
                return await write()

        async def stored() -> int | None:
            with bus_errors(f"get {self._bucket.name}/{key}"):
                value, revision = await self._look(key)
            return revision if revision and value == body else None

        name, what = _stream_name(self._bucket), f"{what} {self._bucket.name}/{key}"
        return await self._streams.write(name, what, publish, stored, is_repeatable=True)

    async def entries(self) -> dict[str, KvEntry[M]]:
        view: EntryView[M] = EntryView(None, self._now, None)
        watch = self._watch_into(view, set())
        try:
            await watch.open()
        finally:
            watch.close()
        return {key: KvEntry(value, view.revisions[key]) for key, value in view.entries.items()}

    async def room(self) -> Room:
        return await self._streams.room(_stream_name(self._bucket))

    async def watch(self, on_change: Callable[[str, M | None], None] | None = None) -> Watch[M]:
        view: EntryView[M] = EntryView(self._bucket.ttl_s, self._now, on_change)
        watch = self._watch_into(view, self._watches)
        try:
            await self._streams.patiently(f"entries of {self._bucket.name}", watch.open)
        except BaseException:
            watch.close()
            raise
        self._watches.add(watch)
        return watch

    def _watch_into(self, view: EntryView[M], watches: set[NatsWatch[Any]]) -> NatsWatch[M]:
        return NatsWatch(self._streams, self._config, self._decode, view, self._now, watches)
