"""Object stores on JetStream, in the layout of NATS architecture decision record 20, so that the `nats object` tool works.
An object's chunks lie on a subject of their own; the record that names that subject is written last. Deleting leaves no
marker."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import os
from collections.abc import AsyncIterator, Set
from datetime import UTC, datetime

import nats.errors
import nats.js.errors
from nats.js.api import DiscardPolicy, ObjectInfo, ObjectMetaOptions, RawStreamMsg, StorageType, StreamConfig
from nats.js.object_store import ObjectStore as RawObjectStore

from shared.bus.interface import BusError, ObjectStore, Room
from shared.bus.nats_streams import Streams, bus_errors
from shared.messages.channels import ObjectBucket
from shared.messages.requests import ErrorCode, ErrorInfo

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 2 * 1024 * 1024 * 1024
OBJECT_TIMEOUT_S = 120.0
"""Time for putting one object in one piece; each chunk has `CALL_TIMEOUT_S`."""
CHUNK_BYTES = 128 * 1024
READ_ATTEMPTS = 3
CHECK_BYTES = 8 * 1024
"""Fewer might still fit into the last block of a file on a full disk."""
_CHECK = "check"
"""Stands where an object's chunks have the object's own mark."""


class NatsObjectWriter:
    def __init__(self, store: NatsObjectStore, name: str, nuid: str) -> None:
        self._store = store
        self._name = name
        self._nuid = nuid
        self._buffer = bytearray()
        self._digest = hashlib.sha256()
        self._num_chunks = 0
        self._num_bytes = 0
        self._is_committed = False

    async def write(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= CHUNK_BYTES:
            await self._send(bytes(self._buffer[:CHUNK_BYTES]))
            del self._buffer[:CHUNK_BYTES]

    async def _send(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        await self._store.publish(self._store.chunk_subject(self._nuid), chunk)
        self._num_chunks += 1
        self._num_bytes += len(chunk)

    async def commit(self) -> None:
        if self._buffer:
            await self._send(bytes(self._buffer))
            self._buffer.clear()
        info = ObjectInfo(
            name=self._name,
            options=ObjectMetaOptions(max_chunk_size=CHUNK_BYTES),
            bucket=self._store.bucket_name,
            nuid=self._nuid,
            size=self._num_bytes,
            chunks=self._num_chunks,
            digest="SHA-256=" + base64.urlsafe_b64encode(self._digest.digest()).decode(),
            mtime=datetime.now(UTC).isoformat(),
        )
        await self._store.replace(info)
        self._is_committed = True

    async def abort(self) -> None:
        if not self._is_committed:
            self._buffer.clear()
            await self._store.purge(self._store.chunk_subject(self._nuid))


class NatsObjectStore(ObjectStore):
    def __init__(self, streams: Streams, bucket: ObjectBucket) -> None:
        self.bucket_name = bucket.name
        self._streams = streams
        self._config = StreamConfig(
            name=f"OBJ_{bucket.name}",
            subjects=[f"$O.{bucket.name}.C.>", f"$O.{bucket.name}.M.>"],
            storage=StorageType.FILE,
            discard=DiscardPolicy.NEW,
            max_bytes=OBJECT_STORE_BYTES,
            allow_rollup_hdrs=True,
            allow_direct=True,
        )
        self._raw = RawObjectStore(bucket.name, f"OBJ_{bucket.name}", streams.context)
        self._meta_prefix = f"$O.{bucket.name}.M."

    async def provide(self) -> None:
        """Declares the store, unless this process has done so."""
        await self._streams.provide(self._config)

    # ------------------------------------------------------------------------------------------------ writing

    async def put(self, name: str, data: bytes) -> None:
        writer = await self.writer(name)
        try:
            async with asyncio.timeout(OBJECT_TIMEOUT_S):
                await writer.write(data)
                await writer.commit()
        except BaseException as error:
            try:
                await writer.abort()
            except BusError as abort_error:
                logger.info("chunks of an unfinished object stay: %s", abort_error)
            if isinstance(error, TimeoutError):
                message = f"put object {self.bucket_name}/{name}: not within {OBJECT_TIMEOUT_S:g} s"
                raise BusError(ErrorInfo(ErrorCode.DEADLINE, message)) from None
            raise

    async def writer(self, name: str) -> NatsObjectWriter:
        return NatsObjectWriter(self, name, self._streams.client._nuid.next().decode())

    async def publish(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        """With headers, which take the place of what the subject has, it may be repeated."""
        await self._streams.write(
            str(self._config.name),
            f"write to {self.bucket_name}",
            lambda: self._streams.writing.publish(subject, data, headers=headers),
            is_repeatable=headers is not None,
        )

    async def check_storage(self) -> None:
        await self.publish(self.chunk_subject(_CHECK), os.urandom(CHECK_BYTES), {"Nats-Rollup": "sub"})
        self._streams.disk_has_space()

    async def replace(self, info: ObjectInfo) -> None:
        """`info` becomes what its name stands for."""
        previous = await self._info(str(info.name))
        record = json.dumps(info.as_dict()).encode()
        await self.publish(self._meta_subject(str(info.name)), record, {"Nats-Rollup": "sub"})
        if previous is not None:
            await self.purge(self.chunk_subject(str(previous.nuid)))

    async def purge(self, subject: str) -> None:
        with bus_errors(f"purge in {self.bucket_name}"):
            await self._streams.context.purge_stream(str(self._config.name), subject=subject)

    async def delete(self, name: str) -> None:
        info = await self._info(name)
        if info is not None:
            await self.purge(self._meta_subject(name))
            await self.purge(self.chunk_subject(str(info.nuid)))

    # ------------------------------------------------------------------------------------------------ reading

    async def get(self, name: str) -> bytes | None:
        for _ in range(READ_ATTEMPTS):
            chunks = await self.read(name)
            if chunks is None:
                return None
            try:
                return b"".join([chunk async for chunk in chunks])
            except BusError as error:
                if error.code is not ErrorCode.GONE:
                    raise
        # Chunks that are missing each time were not just replaced.
        raise BusError(ErrorInfo(ErrorCode.INTERNAL, f"object {self.bucket_name}/{name} is damaged"))

    async def read(self, name: str) -> AsyncIterator[bytes] | None:
        info = await self._info(name)
        return None if info is None else self._chunks(info)

    async def _chunks(self, info: ObjectInfo) -> AsyncIterator[bytes]:
        """One by one, so that a large object leaves the connection free for other messages in between."""
        what = f"object {self.bucket_name}/{info.name}"
        digest = hashlib.sha256()
        sequence = 0
        subject = self.chunk_subject(str(info.nuid))
        for _ in range(info.chunks or 0):
            with bus_errors(f"read {what}"):
                try:
                    chunk = await self._chunk_after(sequence, subject)
                except nats.js.errors.NotFoundError:
                    message = f"{what} was replaced or deleted while it was read"
                    raise BusError(ErrorInfo(ErrorCode.GONE, message)) from None
            sequence = int(chunk.seq or 0)
            data = chunk.data or b""
            digest.update(data)
            yield data
        if info.digest and info.digest.partition("=")[2] != base64.urlsafe_b64encode(digest.digest()).decode():
            raise BusError(ErrorInfo(ErrorCode.INTERNAL, f"{what} is damaged"))

    async def _chunk_after(self, sequence: int, subject: str) -> RawStreamMsg:
        """The next message of the subject, from any copy of the stream; a copy may lag behind, its leader does not."""
        name, get = str(self._config.name), self._streams.context.get_msg
        try:
            return await get(name, sequence + 1, subject, direct=True, next=True)
        except nats.js.errors.NotFoundError:
            return await self._streams.read(name, lambda: get(name, sequence + 1, subject, next=True))

    async def _info(self, name: str) -> ObjectInfo | None:
        with bus_errors(f"look up object {self.bucket_name}/{name}"):
            try:
                return await self._streams.read(str(self._config.name), lambda: self._raw.get_info(name))
            except nats.js.errors.NotFoundError:
                return None

    async def names(self) -> list[str]:
        return sorted(base64.urlsafe_b64decode(each).decode() for each in await self._subjects(self._meta_prefix))

    async def room(self) -> Room:
        return await self._streams.room(str(self._config.name))

    async def purge_unfinished(self, seen: Set[str]) -> set[str]:
        prefix = self.chunk_subject("")
        # The chunks before the records: what is committed in between is known.
        marks = set(await self._subjects(prefix)) - {_CHECK}
        infos = [await self._info(name) for name in await self.names()]
        marks -= {str(info.nuid) for info in infos if info is not None}
        for mark in marks & seen:
            await self.purge(prefix + mark)
        return marks - seen

    async def _subjects(self, prefix: str) -> list[str]:
        """The last tokens of the subjects that hold messages."""
        with bus_errors(f"list objects of {self.bucket_name}"):
            info = await self._streams.context.stream_info(str(self._config.name), prefix + ">")
        return [subject[len(prefix) :] for subject in info.state.subjects or {}]

    def chunk_subject(self, nuid: str) -> str:
        return f"$O.{self.bucket_name}.C.{nuid}"

    def _meta_subject(self, name: str) -> str:
        return self._meta_prefix + base64.urlsafe_b64encode(name.encode()).decode()
