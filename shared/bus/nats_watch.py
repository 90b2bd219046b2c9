"""A watch of a key-value bucket on JetStream that survives whatever happens to the server.

It is an ephemeral push consumer that delivers the last message per key and then each new one. Its messages are numbered and
the server sends heartbeats, so a gap, a deleted consumer or a new server is noticed; the consumer is then made anew and,
when all entries have come, the view reconciled (`EntryView.resume`).

No entry leaves the view because of silence alone. A server that hangs, an election, and a consumer whose copy of the stream
lags all look as if nobody wrote any more: an entry whose time is over is gone when the stream's leader says so and, where it
has a TTL, its owner had the time to write it since that leader was elected and since anything was heard here again.
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
from shared.bus.nats_streams import CALL_TIMEOUT_S, Streams, bus_errors, delivery, silent

M = TypeVar("M")

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
HEARTBEATS_A_TTL = 6
"""Heartbeats in the life of an entry, at least: its last word must be followed by another of the server before its time is
over."""
MISSED_HEARTBEATS = 3
RESTART_AFTER_S = 3.0
"""Time at least without a heartbeat."""
RECHECK_S = 0.5
"""While it is not known whether entries are gone."""
ELECTION_GRACE_S = 2 * CALL_TIMEOUT_S
"""Time for a write that was sent to a leader that is gone, and is to be sent again."""
INACTIVE_THRESHOLD_S = 10.0
"""After which the server deletes the consumer of a watcher that is gone."""
RESTART_RETRY_S = 0.5
CATCH_UP_S = 0.05
"""Between two looks at whether a copy has what the stream's leader has."""


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
        view.on_due = self._on_due
        self._streams = streams
        self._client = streams.client
        self._config = config
        self._subjects = (config.subjects or [""])[0]
        self._prefix_length = len(self._subjects) - 1
        self._decode = decode
        self._view = view
        self._now = now
        self._watches = watches
        ttl_s = config.max_age or 0
        self._heartbeat_s = min(HEARTBEAT_S, ttl_s / HEARTBEATS_A_TTL) if ttl_s else HEARTBEAT_S
        self._sid = 0
        self._seen: set[str] = set()
        """Keys that this opening has reported."""
        self._num_received = 0
        self._newest = 0
        """Sequence of the newest message that this opening has brought."""
        self._last_heard_s = self._heard_since_s = now()
        """The latter: since when there was no silence."""
        self._settling: asyncio.Task[None] | None = None
        self._is_current, self._lost_s = False, now()
        self._complete: asyncio.Future[bool] | None = None
        """The outcome of an opening: whether all that the server announced has come."""
        self._monitor: asyncio.TimerHandle | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def problem(self) -> str:
        """Why the entries may not be what the bucket has, as a sentence; empty: they are."""
        if self._is_current and not self._is_silent:
            return ""
        since_s = self._last_heard_s if self._is_current else self._lost_s
        return f"NATS does not tell what is in {self._config.name}, since {self._now() - since_s:.0f} s"

    @property
    def _is_silent(self) -> bool:
        return self._now() - self._last_heard_s > self._heartbeat_s * MISSED_HEARTBEATS

    async def stop(self) -> None:
        self.close()

    def close(self) -> None:
        self._is_closed = True
        self.pause()
        self._watches.discard(self)

    def pause(self) -> None:
        """The connection is lost, or nobody wants to watch any more."""
        self._end()
        if self._restarting is not None:
            self._restarting.cancel()

    def _end(self) -> None:
        if self._is_current:
            self._is_current, self._lost_s = False, self._last_heard_s
        self._view.pause()
        self._client.unsubscribe_direct(self._sid)
        if self._monitor is not None:
            self._monitor.cancel()
        if self._settling is not None:
            self._settling.cancel()

    def reopen(self) -> asyncio.Task[None]:
        """After a connection was made again; the task ends when the view is what the bucket has, however often it has to
        try."""
        self._restarting = asyncio.get_running_loop().create_task(self._reopen_until_done())
        return self._restarting

    async def open(self) -> None:
        """Returns when all present entries are in the view. Raises `BusError`."""
        self._client.unsubscribe_direct(self._sid)
        inbox = self._client.new_inbox()
        self._num_received = self._newest = 0
        self._seen.clear()
        self._last_heard_s = self._heard_since_s = self._now()
        self._complete = asyncio.get_running_loop().create_future()
        self._sid = self._client.subscribe_direct(inbox, self._on_message)
        consumer = ConsumerConfig(
            deliver_subject=inbox,
            deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
            ack_policy=AckPolicy.NONE,
            filter_subject=self._subjects,
            idle_heartbeat=self._heartbeat_s,
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
            self._set_complete(has_all=True)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                has_all = await self._complete
        except TimeoutError:
            raise silent(f"{what}: entries did not come in time") from None
        if not has_all or self._streams.damaged.get(str(self._config.name)):
            seen = {self._subjects[:-1] + key for key in self._seen}
            await self._streams.look_for_damage(str(self._config.name), self._subjects, seen)
        elif self._streams.num_replicas > 1:
            await self._catch_up(what)
        self._is_current = True
        self._view.resume(self._seen)
        self._monitor = asyncio.get_running_loop().call_later(self._heartbeat_s, self._check_heartbeat)

    async def _catch_up(self, what: str) -> None:
        """Waits until all has come that the stream's leader has: the server may have made the consumer on a copy that lags
        behind, as that of a node does which hung until now. Raises `BusError`."""
        give_up_s, name = self._now() + CALL_TIMEOUT_S, str(self._config.name)
        while self._newest < await self._streams.newest(name, self._subjects):
            if self._now() >= give_up_s:
                raise silent(f"{what}: the copy that is read lags behind")
            await asyncio.sleep(CATCH_UP_S)

    def _set_complete(self, *, has_all: bool) -> None:
        if self._complete is not None and not self._complete.done():
            self._complete.set_result(has_all)

    def _on_message(self, subject: bytes, reply: bytes, headers: bytes | None, data: bytes) -> None:
        now = self._now()
        if self._is_silent:
            self._heard_since_s = now
        self._last_heard_s = now
        fields = parse_headers(headers) if headers else {}
        if b"Status" in fields:
            if (last := fields.get(b"Nats-Last-Consumer")) is not None:
                if int(last) != self._num_received:
                    self._restart("a message was lost")
                else:  # the server is idle: of what it announced, it cannot read the rest, or that has gone meanwhile
                    self._set_complete(has_all=False)
            return
        revision, sequence, num_pending = delivery(reply)
        if sequence != self._num_received + 1:
            self._restart("a message was lost")
            return
        self._num_received, self._newest = sequence, max(self._newest, revision)
        key = subject[self._prefix_length :].decode()
        if not self._is_current:
            self._seen.add(key)
        if b"KV-Operation" in fields or b"Nats-Marker-Reason" in fields:
            self._view.remove(key)
        else:
            try:
                self._view.put(key, self._decode(data), revision)
            except UNREADABLE as error:
                logger.error("entry %s of %s cannot be read: %s", key, self._config.name, error)
        if num_pending == 0:
            self._set_complete(has_all=True)

    def _check_heartbeat(self) -> None:
        if self._now() - self._last_heard_s > max(RESTART_AFTER_S, self._heartbeat_s * MISSED_HEARTBEATS):
            self._restart("no heartbeat")
        else:
            self._monitor = asyncio.get_running_loop().call_later(self._heartbeat_s, self._check_heartbeat)

    def _restart(self, reason: str) -> None:
        if self._is_closed or (self._restarting is not None and not self._restarting.done()):
            return
        logger.warning("watching %s anew: %s", self._config.name, reason)
        self._end()
        self.reopen()

    async def _reopen_until_done(self) -> None:
        """Ends with success; or cancelled by `pause`, because a lost connection brings `reopen` from elsewhere."""
        while True:
            try:
                await self.open()
                return
            except BusError as error:
                logger.info("%s", error)
            except Exception:
                logger.exception("watching %s anew failed; trying again", self._config.name)
            await asyncio.sleep(RESTART_RETRY_S)

    # ----------------------------------------------------------------------------------------- what is gone

    def _on_due(self, keys: list[str]) -> None:
        self._settling = asyncio.get_running_loop().create_task(self._settle(keys))

    async def _settle(self, keys: list[str]) -> None:
        try:
            stored = await self._still_stored(keys)
        except BusError as error:
            logger.debug("%s", error)
            self._view.postpone(keys, RECHECK_S)
        else:
            self._view.expire(set(keys) - stored)
            self._view.postpone(stored, RECHECK_S)

    async def _still_stored(self, keys: list[str]) -> set[str]:
        """Which of them the stream's leader has. Raises `BusError` where one that it has not may be one that nobody could
        write."""
        name = str(self._config.name)
        if ttl_s := self._config.max_age:
            health = await self._streams.health(name)
            if health.problem or health.writable_for_s < ttl_s + ELECTION_GRACE_S:
                raise silent(f"stream {name} {health.problem or 'has a new leader'}")
        stored = set()
        for key in keys:
            asked_s = self._now()
            if await self._is_stored(key):
                stored.add(key)
            now = self._now()
            # An answer that took long says that the server hung, and what is behind it may not be read yet.
            if self._is_silent or now - asked_s > self._heartbeat_s or now - self._heard_since_s < (ttl_s or 0):
                raise silent(f"stream {name} was silent until now")
        return stored

    async def _is_stored(self, key: str) -> bool:
        with bus_errors(f"look at {self._config.name}"):
            subject, name = self._subjects[:-1] + key, str(self._config.name)
            try:
                message = await self._streams.read(name, lambda: self._streams.context.get_last_msg(name, subject))
            except nats.js.errors.NotFoundError:
                return False
        return not (message.headers or {}).keys() & {"KV-Operation", "Nats-Marker-Reason"}
