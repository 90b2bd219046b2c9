"""Work queues on JetStream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import nats.errors
import nats.js.errors
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)

from shared.bus.codec import parse_headers
from shared.bus.interface import WorkItem, WorkQueue
from shared.bus.nats_client import DirectClient, NotConnectedError
from shared.bus.nats_streams import CALL_TIMEOUT_S, DUPLICATE_WINDOW_S, Streams, bus_errors, delivery
from shared.messages.catalogue import PREFIX

MAX_ACK_PENDING = 4096
"""Items of one key that may be out with consumers at once."""


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
