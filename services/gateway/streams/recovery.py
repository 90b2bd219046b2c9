"""Finds again what was lost: frames, instances, schedulers, the connection to NATS.

Gaps and silence are answered by a replay query to the owner (who may know that the request moved), a lost owner by placing
the request again with the tokens so far in a higher epoch, a new scheduler by telling it of every unfinished request, a lost
NATS by waiting a while.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

from services.gateway.metrics import GatewayMetrics
from services.gateway.models.catalog import DRAINING, Catalog, serves
from services.gateway.streams.placing import FINAL_CODES, NOBODY_CODES, PATIENCE_S, RECOVERY_PATIENCE_S, Placer
from services.gateway.streams.stream import MAX_QUIET_S, QUIET_S, Stream
from services.gateway.streams.timelines import Timelines
from shared.bus.interface import Bus, BusError, ServiceError, Subscription
from shared.messages.catalogue import (
    GATEWAY_LOST,
    INSTANCE_EXITED,
    INSTANCE_REPLAY,
    SCHEDULER_ANNOUNCE,
)
from shared.messages.cluster import InstanceExited, InstanceInfo, LeaseHolder
from shared.messages.requests import (
    ErrorCode,
    ErrorInfo,
    MigratedRequest,
    ReplayQuery,
    ReplayReply,
    RequestsLost,
    StreamPosition,
    TokenEntry,
)
from shared.runtime.tasks import TaskSet
from shared.streams import Loss, gives_up

logger = logging.getLogger(__name__)

TICK_S = 0.25
REPLAY_TIMEOUT_S = 2.0
MAX_REPLAY_POSITIONS = 64
NATS_LOSS_LIMIT_S = 60.0
"""How long open streams survive without a connection to NATS."""
ANNOUNCE_JITTER_S = 0.2
FAREWELL_S = 0.25
"""An owner that left in order has handed its requests over; the first word of who has one now may come so much later."""
ADOPTION_ROUNDS = 3
MAX_CONCURRENT_RECOVERIES = 32


class Streams(Protocol):
    """The stream table as recovery sees it."""

    streams: dict[str, Stream]

    def take(self, sender: str, entries: list[TokenEntry]) -> None: ...
    def follow(self, stream: Stream, earlier: str | None, epoch: int) -> None: ...
    def end(self, stream: Stream) -> None: ...
    def fail(self, stream: Stream, code: ErrorCode, message: str) -> None: ...


class Recovery:
    def __init__(
        self,
        bus: Bus,
        catalog: Catalog,
        placer: Placer,
        metrics: GatewayMetrics,
        timelines: Timelines,
        table: Streams,
    ) -> None:
        self._bus = bus
        self._catalog = catalog
        self._placer = placer
        self._metrics = metrics
        self._timelines = timelines
        self._table = table
        self._known: dict[str, tuple[str, bool]] = {}
        """By instance: its incarnation, and whether it was draining, when last heard of."""
        self._tasks = TaskSet()
        self._subscriptions: list[Subscription] = []
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_RECOVERIES)
        self._cut_since: float | None = None
        self._failing_since: dict[str, float] = {}
        """Models that streams wait for and no instance can serve now; when that was seen first."""

    async def start(self, gateway_id: str) -> None:
        self._subscriptions = [
            await self._bus.subscribe(GATEWAY_LOST.at(gateway_id=gateway_id), self.on_lost),
            await self._bus.subscribe(INSTANCE_EXITED, self._on_exited),
            await self._bus.subscribe(SCHEDULER_ANNOUNCE, self._on_announce),
        ]
        self._bus.on_reconnect(self._on_reconnect)
        self._tasks.start(self._tick_forever())

    async def stop(self) -> None:
        for subscription in self._subscriptions:
            await subscription.stop()
        await self._tasks.end_all()

    # -------------------------------------------------------------------------------------------- lost owners

    def on_lost(self, message: RequestsLost) -> None:
        for lost in message.requests:
            if (stream := self._table.streams.get(lost.request_id)) is not None:
                self.lose(stream, lost.epoch, "scheduler")

    def _on_exited(self, message: InstanceExited) -> None:
        for request_id in message.suspects:
            stream = self._table.streams.get(request_id)
            if stream is not None and (error := stream.suspect()) is not None:
                self._table.fail(stream, error.code, error.message)
        for stream in self._owned_by(message.instance_id):
            if stream.owner_incarnation in (None, message.incarnation):
                self._left(stream, "exited", message.exit_code == 0)

    def on_instance(self, instance_id: str, info: InstanceInfo | None) -> None:
        """An instance that is gone from the registry (None), or was restarted, has lost what it held."""
        incarnation, was_draining = self._known.pop(instance_id, ("", False))
        if info is not None:
            self._known[instance_id] = (info.incarnation, info.state == DRAINING)
            if info.incarnation == incarnation:
                return
        for stream in self._owned_by(instance_id):
            if info is None or stream.owner_incarnation not in (None, info.incarnation):
                self._left(stream, "vanished", was_draining)

    def _owned_by(self, instance_id: str) -> list[Stream]:
        return [stream for stream in self._table.streams.values() if stream.owner == instance_id]

    def _left(self, stream: Stream, reason: str, in_order: bool) -> None:
        if in_order:
            self._tasks.start(self._await_next_owner(stream, stream.owner, stream.epoch))
        else:
            self.lose(stream, stream.epoch, reason)

    async def _await_next_owner(self, stream: Stream, owner: str | None, epoch: int) -> None:
        await asyncio.sleep(FAREWELL_S)
        is_same = stream.owner == owner and stream.epoch == epoch
        if stream.is_open and is_same and not stream.is_placing:
            stream.owned_by(None)
            stream.heard(self._bus.now())
            await self._seek(stream)

    def lose(self, stream: Stream, epoch: int, reason: str) -> None:
        """The owner in `epoch` does not continue the stream. Told again of the same loss, this does nothing."""
        if not stream.is_open:
            return
        owner, loss = stream.owner, stream.lose(epoch)
        if loss is Loss.COMPLETE:
            self._table.end(stream)
        if loss in (Loss.COMPLETE, Loss.IGNORED):
            return
        if self._catalog.is_gone(stream.model):
            self._table.fail(stream, ErrorCode.UNKNOWN_MODEL, f"The model '{stream.model}' was removed.")
            return
        self._metrics.replacements.labels(reason).inc()
        self._timelines.lose(stream, owner, reason)
        logger.info("%s: owner %s lost (%s) at %d tokens", stream.request_id, owner, reason, len(stream.tokens))
        stream.must_place = True
        if not stream.is_placing:
            self.place_again(stream)

    def place_again(self, stream: Stream) -> None:
        stream.is_placing = True
        self._tasks.start(self._place_again(stream))

    async def _place_again(self, stream: Stream) -> None:
        try:
            while stream.must_place:
                await asyncio.sleep(stream.pause_s)
                if not stream.is_open:
                    break
                await self._placer.place(stream, patient=True, slots=self._slots)
        except ServiceError as error:
            if stream.is_open:
                self._table.fail(stream, error.code, error.info.message)
        finally:
            stream.is_placing = False
            stream.heard(self._bus.now())
        if stream.must_announce:
            self.announce(stream)

    # ---------------------------------------------------------------------------------------- a new scheduler

    def _on_announce(self, scheduler: LeaseHolder) -> None:
        streams = list(self._table.streams.values())
        logger.info("scheduler %s serves now; %d streams are announced to it", scheduler.scheduler_id, len(streams))
        for stream in streams:
            if stream.is_placing:
                stream.must_announce = True
            else:
                self.announce(stream)

    def announce(self, stream: Stream) -> None:
        self._tasks.start(self._announce(stream))

    async def _announce(self, stream: Stream) -> None:
        await asyncio.sleep(random.random() * ANNOUNCE_JITTER_S)
        async with self._slots:
            if stream.is_open:
                try:
                    await self._placer.announce(stream)
                except BusError as error:  # silence is noticed by the next tick that finds the stream quiet
                    self._on_not_announced(stream, error)

    def _on_not_announced(self, stream: Stream, error: BusError) -> None:
        logger.info("%s could not be announced: %s", stream.request_id, error)
        # Whoever runs it goes on, whatever the scheduler says.
        if error.code in FINAL_CODES and stream.is_open and stream.owner is None:
            self._table.fail(stream, error.code, str(error))

    # ------------------------------------------------------------------------------------ silence and deadlines

    def _on_reconnect(self) -> None:
        """Frames of the time without a connection are lost: everything is asked after at the next tick."""
        for stream in self._table.streams.values():
            stream.quiet_s = 0.0

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._tick(self._bus.now())
            except Exception:
                logger.exception("a check of the open streams failed")

    def _tick(self, now: float) -> None:
        connected = self._bus.is_connected
        if connected:
            self._cut_since = None
        elif self._cut_since is None:
            self._cut_since = now
        is_cut_off = self._cut_since is not None and now - self._cut_since > NATS_LOSS_LIMIT_S
        quiet: dict[str | None, list[Stream]] = defaultdict(list)
        unowned = {stream.model for stream in self._table.streams.values() if stream.owner is None}
        failures = {model: found for model in unowned if (found := self._catalog.failure(model)) is not None}
        self._failing_since = {model: self._failing_since.get(model, now) for model in failures}
        for stream in list(self._table.streams.values()):
            if now >= stream.deadline:
                self._table.fail(stream, ErrorCode.DEADLINE, "The request's time limit has passed.")
            elif is_cut_off:
                message = f"The message bus was away for more than {NATS_LOSS_LIMIT_S:g} s."
                self._table.fail(stream, ErrorCode.UNAVAILABLE, message)
            elif (
                stream.owner is None
                and (reason := failures.get(stream.model))
                and self._is_hopeless(stream, reason, now)
            ):
                self._table.fail(stream, reason.code, reason.message)
            elif connected and not stream.is_placing and now - stream.heard_at > stream.quiet_s:
                stream.heard_at = now
                stream.quiet_s = min(MAX_QUIET_S, max(QUIET_S, 2 * stream.quiet_s))
                quiet[stream.owner].append(stream)
        for owner, streams in quiet.items():
            if owner is not None:
                self.replay(owner, streams, "quiet")
            else:
                for stream in streams:
                    self._tasks.start(self._seek(stream))

    def _is_hopeless(self, stream: Stream, reason: ErrorInfo, now: float) -> bool:
        """What may pass is waited for as long as for anybody who takes a request, and by batch lines for as long as they
        have; a model that cannot be loaded at all is not, nor one that was loaded for these."""
        if reason.code is ErrorCode.MODEL_FAILED or self._catalog.is_on_demand(stream.model):
            return True
        patience_s = RECOVERY_PATIENCE_S if stream.tokens else PATIENCE_S
        return stream.is_online and now - self._failing_since[stream.model] >= patience_s

    def replay(self, instance_id: str, streams: list[Stream], reason: str) -> None:
        """Asks an instance for what may be missing of its streams."""
        waiting = [stream for stream in streams if not stream.is_replaying]
        for i in range(0, len(waiting), MAX_REPLAY_POSITIONS):
            self._tasks.start(self._replay(instance_id, waiting[i : i + MAX_REPLAY_POSITIONS], reason))

    async def _replay(self, instance_id: str, streams: list[Stream], reason: str) -> None:
        self._metrics.replays.labels(reason).inc()
        epochs = {stream.request_id: stream.epoch for stream in streams}
        for stream in streams:
            stream.is_replaying = True
        moved: list[MigratedRequest] = []
        try:
            reply = await self._ask(instance_id, streams)
            unknown: Iterable[str] = reply.unknown
            moved = reply.moved
        except BusError as error:
            logger.info("no replay from %s: %s", instance_id, error)
            # An instance in the registry may only be slow, or reconnecting; its entry expires if it is gone.
            unknown = () if instance_id in self._catalog.instances else epochs
        finally:
            for stream in streams:
                stream.is_replaying = False
        self._follow(moved)
        # One that is said to have gone where nobody is, by somebody who is still taken for its owner, is nowhere.
        nowhere = [told.request_id for told in moved if told.instance_id not in self._catalog.instances]
        for request_id in (*unknown, *nowhere):
            known = self._table.streams.get(request_id)
            if known is not None and known.owner == instance_id and request_id in epochs:
                self.lose(known, epochs[request_id], "unknown")

    def _follow(self, moved: list[MigratedRequest]) -> None:
        """Asks those that have the requests now. Each answer "moved" is of a higher epoch, so this ends."""
        streams: dict[str, list[Stream]] = defaultdict(list)
        for told in moved:
            stream = self._table.streams.get(told.request_id)
            if stream is None:
                continue
            owner, epoch = stream.owner, stream.epoch
            if stream.follow(told.instance_id, told.epoch):
                self._table.follow(stream, owner, epoch)
                streams[told.instance_id].append(stream)
        for instance_id, theirs in streams.items():
            self.replay(instance_id, theirs, "moved")

    async def _ask(self, instance_id: str, streams: list[Stream]) -> ReplayReply:
        """Takes what the instance replays. Raises `BusError`."""
        query = ReplayQuery([stream.position for stream in streams])
        endpoint = INSTANCE_REPLAY.at(instance_id=instance_id)
        reply = await self._bus.request(endpoint, query, timeout_s=REPLAY_TIMEOUT_S)
        self._table.take(instance_id, reply.entries)
        return reply

    def adopt(self, stream: Stream) -> None:
        """A stream that another gateway had: whoever makes it is found and asked for all of it; where nobody is, it is
        placed (again)."""
        stream.is_placing = True
        self._tasks.start(self._adopt(stream))

    async def _adopt(self, stream: Stream) -> None:
        try:
            found = await self._find(stream)
        finally:
            stream.is_placing = False
        if not stream.is_open:
            return
        if found is not None:
            instance_id, entry = found
            self._table.take(instance_id, [entry])
            if stream.is_open and entry.tokens and not gives_up(entry):
                # Not all may have fitted into one answer.
                self.replay(instance_id, [stream], "resumed")
        elif stream.owner is None:
            logger.info("%s: nobody has it; it is placed", stream.request_id)
            stream.must_place = True
        if stream.must_place and stream.is_open and not stream.is_placing:
            self.place_again(stream)

    async def _find(self, stream: Stream) -> tuple[str, TokenEntry] | None:
        """The instance that has a request in the highest epoch, and all that it has of it."""
        query = ReplayQuery([StreamPosition(stream.request_id, 0, 0)], is_of_any_epoch=True)

        async def ask(instance_id: str) -> tuple[str, ReplayReply | None]:
            try:
                endpoint = INSTANCE_REPLAY.at(instance_id=instance_id)
                return instance_id, await self._bus.request(endpoint, query, timeout_s=REPLAY_TIMEOUT_S)
            except BusError as error:
                logger.info("%s cannot be asked for %s: %s", instance_id, stream.request_id, error)
                return instance_id, None

        for _ in range(ADOPTION_ROUNDS):
            async with self._slots:
                replies = await asyncio.gather(*map(ask, list(self._catalog.instances)))
            found = [(name, entry) for name, reply in replies if reply is not None for entry in reply.entries]
            if found:
                return max(found, key=lambda each: each[1].epoch)
            if not any(reply is None or reply.moved for _, reply in replies):
                return None
            # It was on its way from one to the other, or is with one that is slow to answer.
            await asyncio.sleep(FAREWELL_S)
        return None

    async def _seek(self, stream: Stream) -> None:
        """A quiet stream that a scheduler was to place. The scheduler is asked to take it (again: without effect where
        it has it); if none answers, an instance may have it all the same."""
        async with self._slots:
            epoch = stream.epoch
            if not stream.is_open or stream.owner is not None:
                return
            try:
                await self._placer.announce(stream)
                return
            except BusError as error:
                if error.code not in NOBODY_CODES:
                    self._on_not_announced(stream, error)
                    return
            for instance_id in [i for i, info in self._catalog.instances.items() if serves(info, stream.model)]:
                try:
                    reply = await self._ask(instance_id, [stream])
                    self._follow(reply.moved)
                    if not reply.unknown and not reply.moved and stream.owner is None:
                        stream.owned_by(instance_id)
                    if stream.owner is not None:
                        return
                except BusError as error:
                    logger.info("%s cannot be asked for %s: %s", instance_id, stream.request_id, error)
        if stream.owner is None:
            self.lose(stream, epoch, "unknown")
