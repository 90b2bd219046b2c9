"""Work queues and object stores on JetStream."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from typing import Any

import nats.errors
import nats.js.errors
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    ObjectInfo,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.object_store import ObjectStore as RawObjectStore

from shared.bus.codec import parse_headers
from shared.bus.interface import BusError, ObjectStore, WorkItem, WorkQueue
from shared.bus.nats_client import DirectClient, NotConnectedError
from shared.bus.nats_streams import CALL_TIMEOUT_S, DUPLICATE_WINDOW_S, Streams, bus_errors, delivery
from shared.messages import PREFIX, ErrorCode, ErrorInfo, ObjectBucket

MAX_ACK_PENDING = 4096
"""Items of one key that may be out with consumers at once."""
OBJECT_STORE_BYTES = 4 * 1024 * 1024 * 1024
OBJECT_TIMEOUT_S = 120.0
"""For putting one object; each of its chunks has `CALL_TIMEOUT_S`."""
READ_ATTEMPTS = 3


class NatsWorkItem:
    def __init__(self, client: DirectClient, reply: bytes, data: bytes) -> None:
        self.data = data
        self.num_deliveries = delivery(reply)[0]
        self._client = client
        self._reply = reply.decode()

    async def ack(self) -> None:
        await self._answer(b"+ACK")

    async def nak(self, delay_s: float = 0.0) -> None:
        await self._answer(b'-NAK {"delay": %d}' % int(delay_s * 1e9) if delay_s > 0 else b"-NAK")

    async def in_progress(self) -> None:
        await self._answer(b"+WPI")

    async def _answer(self, body: bytes) -> None:
        with bus_errors("answering for a work item"):
            await self._client.exchange(self._reply, b"", body, CALL_TIMEOUT_S)


class NatsWorkQueue(WorkQueue):
    """One stream a queue, the key in the subject, one durable pull consumer a key."""

    def __init__(self, streams: Streams, name: str, max_bytes: int, ack_wait_s: float) -> None:
        self._streams = streams
        self._client = streams.client
        self._name = name
        self._ack_wait_s = ack_wait_s
        self._prefix = f"{PREFIX}.work.{name}."
        self._consumers: set[str] = set()
        self._config = StreamConfig(
            name=f"WORK_{name}",
            subjects=[self._prefix + ">"],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
            discard=DiscardPolicy.NEW,
            max_bytes=max_bytes,
            duplicate_window=DUPLICATE_WINDOW_S,
        )

    async def declare(self) -> None:
        await self._streams.declare(self._config)

    async def push(self, key: str, data: bytes, *, deduplicate_as: str | None = None) -> None:
        headers = {"Nats-Msg-Id": deduplicate_as} if deduplicate_as is not None else None
        with bus_errors(f"push {self._name}/{key}"):
            try:
                await self._streams.context.publish(self._prefix + key, data, headers=headers)
            except nats.js.errors.NoStreamResponseError:
                await self.declare()
                await self._streams.context.publish(self._prefix + key, data, headers=headers)

    async def pull(self, key: str, max_items: int, timeout_s: float) -> list[WorkItem]:
        with bus_errors(f"pull {self._name}/{key}"):
            try:
                return await self._pull(key, max_items, timeout_s)
            except (nats.errors.NoRespondersError, nats.js.errors.NotFoundError):
                # The server lost its store, and stream or consumer with it.
                self._consumers.discard(key)
                await self.declare()
                return await self._pull(key, max_items, timeout_s)

    async def _pull(self, key: str, max_items: int, timeout_s: float) -> list[WorkItem]:
        consumer = await self._consumer(key)
        items = await self._next(consumer, max_items, 0.0)
        if not items and timeout_s > 0:
            items = await self._next(consumer, 1, timeout_s)
            if items and max_items > 1:
                items += await self._next(consumer, max_items - 1, 0.0)
        return items

    async def _consumer(self, key: str) -> str:
        name = key.replace("/", "=2F")
        if key not in self._consumers:
            config = ConsumerConfig(
                durable_name=name,
                filter_subject=self._prefix + key,
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=self._ack_wait_s,
                max_ack_pending=MAX_ACK_PENDING,
            )
            await self._streams.context.add_consumer(str(self._config.name), config)
            self._consumers.add(key)
        return name

    async def _next(self, consumer: str, max_items: int, wait_s: float) -> list[WorkItem]:
        """What is there, or, with `wait_s`, the first `max_items` to come. The server ends its answer with a status."""
        items: list[WorkItem] = []
        inbox = self._client.new_inbox()

        def on_message(subject: bytes, reply: bytes, headers: bytes | None, data: bytes) -> None:
            fields = parse_headers(headers) if headers else {}
            if b"Status" not in fields:
                items.append(NatsWorkItem(self._client, reply, data))
            if (b"Status" in fields or len(items) == max_items) and not done.done():
                done.set_result(fields)

        query: dict[str, Any] = {"batch": max_items}
        query |= {"expires": int(wait_s * 1e9)} if wait_s else {"no_wait": True}
        sid = self._client.subscribe_direct(inbox, on_message)
        try:
            with self._client.in_flight(inbox.encode()) as done:
                if not self._client.is_connected:
                    raise NotConnectedError
                subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._config.name}.{consumer}"
                self._client.send(subject, inbox, b"", json.dumps(query).encode())
                async with asyncio.timeout(wait_s + CALL_TIMEOUT_S):
                    fields = await done
        except TimeoutError:
            raise nats.errors.TimeoutError from None
        finally:
            self._client.unsubscribe_direct(sid)
        if not items and fields.get(b"Status") == b"503":
            raise nats.errors.NoRespondersError
        return items


class NatsObjectStore(ObjectStore):
    """In the layout of NATS architecture decision record 20, so that the `nats object` tool works. Deleting leaves no
    marker."""

    def __init__(self, streams: Streams, bucket: ObjectBucket) -> None:
        self._streams = streams
        self._bucket = bucket
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

    async def declare(self) -> None:
        await self._streams.declare(self._config)

    async def put(self, name: str, data: bytes) -> None:
        what = f"put object {self._bucket.name}/{name}"
        with bus_errors(what):
            try:
                async with asyncio.timeout(OBJECT_TIMEOUT_S):
                    await self._raw.put(name, data)
            except TimeoutError:
                raise nats.errors.TimeoutError from None

    async def get(self, name: str) -> bytes | None:
        with bus_errors(f"get object {self._bucket.name}/{name}"):
            for _ in range(READ_ATTEMPTS):
                try:
                    info = await self._raw.get_info(name)
                except nats.js.errors.NotFoundError:
                    return None
                try:
                    return await self._read(info)
                except nats.js.errors.NotFoundError:
                    continue  # replaced or deleted while it was read
        raise self._damaged(name)

    async def _read(self, info: ObjectInfo) -> bytes:
        """Chunk by chunk, so that a large object leaves the connection free for other messages in between."""
        chunks: list[bytes] = []
        digest = hashlib.sha256()
        sequence = 0
        subject = f"$O.{self._bucket.name}.C.{info.nuid}"
        for _ in range(info.chunks or 0):
            chunk = await self._streams.context.get_msg(
                str(self._config.name), sequence + 1, subject, direct=True, next=True
            )
            sequence = int(chunk.seq or 0)
            chunks.append(chunk.data or b"")
            digest.update(chunks[-1])
        if info.digest and info.digest.partition("=")[2] != base64.urlsafe_b64encode(digest.digest()).decode():
            raise self._damaged(info.name)
        return b"".join(chunks)

    def _damaged(self, name: str | None) -> BusError:
        return BusError(ErrorInfo(ErrorCode.INTERNAL, f"object {self._bucket.name}/{name} is damaged"))

    async def delete(self, name: str) -> None:
        with bus_errors(f"delete object {self._bucket.name}/{name}"):
            try:
                info = await self._raw.get_info(name)
            except nats.js.errors.NotFoundError:
                return
            for subject in (self._meta_subject(name), f"$O.{self._bucket.name}.C.{info.nuid}"):
                await self._streams.context.purge_stream(str(self._config.name), subject=subject)

    async def names(self) -> list[str]:
        with bus_errors(f"list objects of {self._bucket.name}"):
            info = await self._streams.context.stream_info(str(self._config.name), self._meta_prefix + ">")
        subjects = info.state.subjects or {}
        return sorted(base64.urlsafe_b64decode(subject[len(self._meta_prefix) :]).decode() for subject in subjects)

    def _meta_subject(self, name: str) -> str:
        return self._meta_prefix + base64.urlsafe_b64encode(name.encode()).decode()
