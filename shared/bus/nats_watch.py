"""A watch of a key-value bucket on JetStream that survives whatever happens to the server.

It is an ephemeral push consumer that delivers the last message per key and then each new one. Its messages are numbered and
the server sends heartbeats, so a gap, a deleted consumer or a new server is noticed; the consumer is then made anew and
the view reconciled (`EntryView.resume`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import nats.js.errors
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StreamConfig

from shared.bus.codec import UNREADABLE, parse_headers
from shared.bus.entry_view import EntryView
from shared.bus.interface import BusError
from shared.bus.nats_streams import CALL_TIMEOUT_S, Streams, bus_errors, delivery
from shared.messages.requests import ErrorCode, ErrorInfo

M = TypeVar("M")

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
MISSED_HEARTBEATS = 3
INACTIVE_THRESHOLD_S = 10.0
"""After which the server deletes the consumer of a watcher that is gone."""
RESTART_RETRY_S = 0.5


class NatsWatch(Generic[M]):
    def __init__(
        self,
        streams: Streams,
        config: StreamConfig,
        decode: Callable[[bytes], M],
        view: EntryView[M],
        now: Callable[[], float],
        watches: set[NatsWatch[Any]],
    ) -> None:
        self.entries = view.entries
        self._streams = streams
        self._client = streams.client
        self._config = config
        self._subjects = (config.subjects or [""])[0]
        self._prefix_length = len(self._subjects) - 1
        self._decode = decode
        self._view = view
        self._now = now
        self._watches = watches
        self._sid = 0
        self._num_received = 0
        self._last_heard_s = 0.0
        self._complete: asyncio.Future[None] | None = None
        self._monitor: asyncio.TimerHandle | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._is_closed = False

    async def stop(self) -> None:
        self.close()

    def close(self) -> None:
        self._is_closed = True
        self.pause()
        self._watches.discard(self)

    def pause(self) -> None:
        """The connection is lost, or nobody wants to watch any more."""
        self._view.pause()
        self._client.unsubscribe_direct(self._sid)
        if self._monitor is not None:
            self._monitor.cancel()
        if self._restarting is not None:
            self._restarting.cancel()

    async def reopen(self) -> None:
        self._view.resume()
        await self.open()

    async def open(self) -> None:
        """Returns when all present entries are in the view. Raises `BusError`."""
        self._client.unsubscribe_direct(self._sid)
        inbox = self._client.new_inbox()
        self._num_received = 0
        self._last_heard_s = self._now()
        self._complete = asyncio.get_running_loop().create_future()
        self._sid = self._client.subscribe_direct(inbox, self._on_message)
        consumer = ConsumerConfig(
            deliver_subject=inbox,
            deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
            ack_policy=AckPolicy.NONE,
            filter_subject=self._subjects,
            idle_heartbeat=HEARTBEAT_S,
            inactive_threshold=INACTIVE_THRESHOLD_S,
            mem_storage=True,
            num_replicas=1,
        )
        what = f"watching {self._config.name}"
        with bus_errors(what):
            try:
                info = await self._streams.context.add_consumer(str(self._config.name), consumer)
            except nats.js.errors.NotFoundError:
                await self._streams.declare(self._config)
                info = await self._streams.context.add_consumer(str(self._config.name), consumer)
        if info.num_pending == 0 and self._num_received == 0:
            self._set_complete()
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._complete
        except TimeoutError:
            raise BusError(ErrorInfo(ErrorCode.DEADLINE, f"{what}: entries did not come in time")) from None
        self._monitor = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._check_heartbeat)

    def _set_complete(self) -> None:
        if self._complete is not None and not self._complete.done():
            self._complete.set_result(None)

    def _on_message(self, subject: bytes, reply: bytes, headers: bytes | None, data: bytes) -> None:
        self._last_heard_s = self._now()
        fields = parse_headers(headers) if headers else {}
        if b"Status" in fields:
            if int(fields.get(b"Nats-Last-Consumer", self._num_received)) != self._num_received:
                self._restart("a message was lost")
            return
        revision, sequence, num_pending = delivery(reply)
        if sequence != self._num_received + 1:
            self._restart("a message was lost")
            return
        self._num_received = sequence
        key = subject[self._prefix_length :].decode()
        if b"KV-Operation" in fields or b"Nats-Marker-Reason" in fields:
            self._view.remove(key)
        else:
            try:
                self._view.put(key, self._decode(data), revision)
            except UNREADABLE as error:
                logger.error("entry %s of %s cannot be read: %s", key, self._config.name, error)
        if num_pending == 0:
            self._set_complete()

    def _check_heartbeat(self) -> None:
        if self._now() - self._last_heard_s > HEARTBEAT_S * MISSED_HEARTBEATS:
            self._restart("no heartbeat")
        else:
            self._monitor = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._check_heartbeat)

    def _restart(self, reason: str) -> None:
        if self._is_closed or (self._restarting is not None and not self._restarting.done()):
            return
        logger.warning("watching %s anew: %s", self._config.name, reason)
        if self._monitor is not None:
            self._monitor.cancel()
        self._client.unsubscribe_direct(self._sid)
        self._restarting = asyncio.get_running_loop().create_task(self._reopen_until_done())

    async def _reopen_until_done(self) -> None:
        """Ends with success; or cancelled by `pause`, because a lost connection brings `reopen` from elsewhere."""
        while True:
            try:
                await self.reopen()
                return
            except BusError as error:
                logger.info("%s", error)
            except Exception:
                logger.exception("watching %s anew failed; trying again", self._config.name)
            await asyncio.sleep(RESTART_RETRY_S)
