"""Every open stream of this gateway: frames go in, and whatever is lost on the way is found again.

The thin service around `streams.StreamState`. It owns the subscription on this gateway's frames and the recovery:
gaps and silence are answered by a replay query to the owner, a lost owner by placing the request again with the tokens
so far in a higher epoch, a new scheduler by telling it of every unfinished request, a lost NATS by waiting a while.
It knows nothing of HTTP or text.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec

from services.gateway.catalog import Catalog, serves
from services.gateway.metrics import GatewayMetrics
from services.gateway.placing import NOBODY_CODES, Placer
from services.gateway.streams import Outcome, StreamState
from shared.bus.interface import Bus, BusError, ServiceError, Subscription
from shared.messages import (
    GATEWAY_FRAMES,
    GATEWAY_LOST,
    INSTANCE_CANCEL,
    INSTANCE_EXITED,
    INSTANCE_REPLAY,
    SCHEDULER_ANNOUNCE,
    SCHEDULER_CANCEL,
    Cancel,
    ErrorCode,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    InstanceExited,
    InstanceInfo,
    ReplayQuery,
    RequestsLost,
    SchedulerInfo,
    TokenEntry,
    TokenFrame,
)

logger = logging.getLogger(__name__)

TICK_S = 0.25
QUIET_S = 2.0
"""A stream without a frame for so long is asked after; each further time the wait doubles, up to `MAX_QUIET_S`."""
MAX_QUIET_S = 16.0
REPLAY_TIMEOUT_S = 2.0
MAX_REPLAY_POSITIONS = 64
NATS_LOSS_LIMIT_S = 15.0
"""How long open streams survive without a connection to NATS."""
ANNOUNCE_JITTER_S = 0.2
MAX_CONCURRENT_RECOVERIES = 32
MAX_FRUITLESS_LOSSES = 5
"""A request that loses its owner so often without one new token in between may be what kills them: it fails."""


class Stream:
    """One sequence on its way to a client."""

    def __init__(self, request: GenerationRequest, arrived_at: float, on_news: Callable[[], None]) -> None:
        """`on_news` is called after new tokens, the end or a failure; it must not block. `request.timeout_s` counts
        from `arrived_at` (seconds on the bus's clock), when the client's request came."""
        self.state = StreamState(request.request_id, request.sampling)
        self.failure: ErrorInfo | None = None
        """Set: the stream has ended without success."""
        self.model = request.model
        self.deadline = arrived_at + request.timeout_s
        self.owner: str | None = None
        self.owner_incarnation: str | None = None
        self.is_open = True
        self.is_placing = False
        self.is_replaying = False
        self.must_place = False
        self.heard_at = arrived_at
        self.quiet_s = QUIET_S
        self.num_losses = 0
        self.num_tokens_at_loss = -1
        self.on_news = on_news
        self._request = request
        self._arrived_at = arrived_at

    @property
    def request_id(self) -> str:
        return self.state.request_id

    def to_send(self, now: float) -> GenerationRequest:
        self.must_place = False
        return msgspec.structs.replace(
            self._request,
            epoch=self.state.epoch,
            prior=self.state.tokens.tobytes(),
            timeout_s=max(0.001, self.deadline - now),
            waited_s=max(0.0, now - self._arrived_at),
        )

    def begin_epoch(self) -> None:
        self.state.epoch += 1

    def owned_by(self, instance_id: str | None) -> None:
        self.owner = instance_id
        self.owner_incarnation = None

    def heard(self, now: float) -> None:
        self.heard_at = now
        self.quiet_s = QUIET_S


class StreamTable:
    def __init__(self, bus: Bus, gateway_id: str, catalog: Catalog, placer: Placer, metrics: GatewayMetrics) -> None:
        self._bus = bus
        self._gateway_id = gateway_id
        self._catalog = catalog
        self._placer = placer
        self._metrics = metrics
        self._streams: dict[str, Stream] = {}
        self._incarnations: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscriptions: list[Subscription] = []
        self._recoveries = asyncio.Semaphore(MAX_CONCURRENT_RECOVERIES)
        self._cut_since: float | None = None
        metrics.open_streams.set_function(lambda: len(self._streams))

    async def start(self) -> None:
        frames = GATEWAY_FRAMES.at(gateway_id=self._gateway_id)
        lost = GATEWAY_LOST.at(gateway_id=self._gateway_id)
        self._subscriptions = [
            await self._bus.subscribe(frames, self._on_frame),
            await self._bus.subscribe(lost, self._on_lost),
            await self._bus.subscribe(INSTANCE_EXITED, self._on_exited),
            await self._bus.subscribe(SCHEDULER_ANNOUNCE, self._on_announce),
        ]
        self._bus.on_reconnect(self._on_reconnect)
        self._spawn(self._tick_forever())

    async def stop(self) -> None:
        """Open streams end with an error."""
        for stream in list(self._streams.values()):
            self._fail(stream, ErrorCode.UNAVAILABLE, "The gateway is shutting down.")
        for subscription in self._subscriptions:
            await subscription.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def open(self, request: GenerationRequest, arrived_at: float, on_news: Callable[[], None]) -> Stream:
        """Places the request; its frames may begin to come before this returns. Raises `ServiceError`."""
        stream = Stream(request, arrived_at, on_news)
        self._streams[stream.request_id] = stream
        stream.is_placing = True
        try:
            await self._placer.place(stream, patient=False)
        except BaseException:
            self.close(stream)
            raise
        finally:
            stream.is_placing = False
        stream.heard_at = self._bus.now()
        if stream.must_place:
            self._spawn(self._place_again(stream))
        return stream

    def close(self, stream: Stream) -> None:
        """The client needs no more of it; where it has not ended, it is cancelled everywhere. May be called twice."""
        if not stream.is_open:
            return
        self._forget(stream)
        if stream.state.finish_reason is None:
            cancel = Cancel(stream.request_id)
            self._bus.publish(SCHEDULER_CANCEL, cancel)
            if stream.owner is not None:
                self._bus.publish(INSTANCE_CANCEL.at(instance_id=stream.owner), cancel)

    # ------------------------------------------------------------------------------------------------- frames

    def _on_frame(self, frame: TokenFrame) -> None:
        self._take(frame.sender, frame.entries)

    def _take(self, sender: str, entries: list[TokenEntry]) -> None:
        now = self._bus.now()
        behind: list[Stream] = []
        for entry in entries:
            stream = self._streams.get(entry.request_id)
            if stream is None:
                if entry.finish_reason is None:  # its cancel was lost, or overtaken by its dispatch
                    self._metrics.dropped_entries.labels("unknown").inc()
                    self._bus.publish(INSTANCE_CANCEL.at(instance_id=sender), Cancel(entry.request_id))
                continue
            outcome = stream.state.accept(entry)
            if outcome is Outcome.STALE:
                self._metrics.dropped_entries.labels("stale").inc()
                if entry.finish_reason is None and stream.owner not in (None, sender):
                    self._bus.publish(INSTANCE_CANCEL.at(instance_id=sender), Cancel(entry.request_id))
                continue
            if stream.owner != sender:
                info = self._catalog.instances.get(sender)
                stream.owner, stream.owner_incarnation = sender, info.incarnation if info else None
            if outcome is Outcome.NEWS:
                stream.heard(now)
                if stream.state.finish_reason is not None:
                    self._end(stream)
                stream.on_news()
            elif outcome is Outcome.GIVEN_UP:
                self._lose(stream, stream.state.epoch, "given_up")
            elif outcome is Outcome.GAP:
                behind.append(stream)
            else:
                self._metrics.dropped_entries.labels("known").inc()
        if behind:
            self._replay(sender, behind, "gap")

    def _end(self, stream: Stream) -> None:
        self._forget(stream)
        state = stream.state
        if state.finish_reason is FinishReason.DEADLINE:
            stream.failure = state.error or ErrorInfo(ErrorCode.DEADLINE, "The request's time limit has passed.")
        elif state.finish_reason is FinishReason.ERROR:
            stream.failure = state.error or ErrorInfo(ErrorCode.INTERNAL, "The instance failed on this request.")

    def _fail(self, stream: Stream, code: ErrorCode, message: str) -> None:
        stream.failure = ErrorInfo(code, message)
        self.close(stream)
        stream.on_news()

    def _forget(self, stream: Stream) -> None:
        stream.is_open = False
        self._streams.pop(stream.request_id, None)

    # ----------------------------------------------------------------------------------------------- recovery

    def _on_lost(self, message: RequestsLost) -> None:
        for lost in message.requests:
            if (stream := self._streams.get(lost.request_id)) is not None:
                self._lose(stream, lost.epoch, "scheduler")

    def _on_exited(self, message: InstanceExited) -> None:
        for stream in self._owned_by(message.instance_id):
            if stream.owner_incarnation in (None, message.incarnation):
                self._lose(stream, stream.state.epoch, "exited")

    def on_instance(self, instance_id: str, info: InstanceInfo | None) -> None:
        """A change in the registry: an instance that is gone or was restarted has lost what it held."""
        self._placer.on_instance(instance_id)
        if info is None:
            self._incarnations.pop(instance_id, None)
        elif self._incarnations.get(instance_id) == info.incarnation:
            return
        else:
            self._incarnations[instance_id] = info.incarnation
        for stream in self._owned_by(instance_id):
            if info is None or stream.owner_incarnation not in (None, info.incarnation):
                self._lose(stream, stream.state.epoch, "vanished")

    def _owned_by(self, instance_id: str) -> list[Stream]:
        return [stream for stream in self._streams.values() if stream.owner == instance_id]

    def _lose(self, stream: Stream, epoch: int, reason: str) -> None:
        if not stream.is_open:
            return
        if not stream.state.lose(epoch):
            if stream.state.finish_reason is not None:
                self._end(stream)
                stream.on_news()
            return
        num_tokens = len(stream.state.tokens)
        stream.num_losses = stream.num_losses + 1 if num_tokens == stream.num_tokens_at_loss else 1
        stream.num_tokens_at_loss = num_tokens
        if stream.num_losses > MAX_FRUITLESS_LOSSES:
            self._fail(stream, ErrorCode.INTERNAL, f"{stream.num_losses} instances in turn gave this request up.")
            return
        self._metrics.replacements.labels(reason).inc()
        logger.info("%s: owner %s lost (%s) at %d tokens", stream.request_id, stream.owner, reason, num_tokens)
        stream.must_place = True
        if not stream.is_placing:
            self._spawn(self._place_again(stream))

    async def _place_again(self, stream: Stream) -> None:
        stream.is_placing = True
        try:
            while stream.must_place and stream.is_open:
                async with self._recoveries:
                    await self._placer.place(stream, patient=True)
        except ServiceError as error:
            if stream.is_open:
                self._fail(stream, error.code, error.info.message)
        finally:
            stream.is_placing = False
            stream.heard(self._bus.now())

    def _on_announce(self, scheduler: SchedulerInfo) -> None:
        logger.info("scheduler %s: %d streams are announced to it", scheduler.scheduler_id, len(self._streams))
        for stream in self._streams.values():
            if not stream.is_placing:
                self._spawn(self._announce(stream))

    async def _announce(self, stream: Stream) -> None:
        await asyncio.sleep(random.random() * ANNOUNCE_JITTER_S)
        async with self._recoveries:
            if stream.is_open:
                try:
                    await self._placer.announce(stream)
                except BusError as error:  # silence is noticed by the next tick that finds the stream quiet
                    logger.info("%s could not be announced: %s", stream.request_id, error)

    def _on_reconnect(self) -> None:
        """Frames of the time without a connection are lost: everything is asked after at the next tick."""
        for stream in self._streams.values():
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
        for stream in list(self._streams.values()):
            if now >= stream.deadline:
                self._fail(stream, ErrorCode.DEADLINE, "The request's time limit has passed.")
            elif is_cut_off:
                self._fail(stream, ErrorCode.UNAVAILABLE, f"The message bus was away for {NATS_LOSS_LIMIT_S:.0f} s.")
            elif connected and not stream.is_placing and now - stream.heard_at > stream.quiet_s:
                stream.heard_at = now
                stream.quiet_s = min(MAX_QUIET_S, max(QUIET_S, 2 * stream.quiet_s))
                quiet[stream.owner].append(stream)
        for owner, streams in quiet.items():
            if owner is not None:
                self._replay(owner, streams, "quiet")
            else:
                for stream in streams:
                    self._spawn(self._seek(stream))

    def _replay(self, instance_id: str, streams: list[Stream], reason: str) -> None:
        waiting = [stream for stream in streams if not stream.is_replaying]
        for i in range(0, len(waiting), MAX_REPLAY_POSITIONS):
            self._spawn(self._ask_replay(instance_id, waiting[i : i + MAX_REPLAY_POSITIONS], reason))

    async def _ask_replay(self, instance_id: str, streams: list[Stream], reason: str) -> None:
        self._metrics.replays.labels(reason).inc()
        epochs = {stream.request_id: stream.state.epoch for stream in streams}
        for stream in streams:
            stream.is_replaying = True
        try:
            unknown: Iterable[str] = await self._ask_for(instance_id, streams)
        except BusError as error:
            logger.info("no replay from %s: %s", instance_id, error)
            # An instance in the registry may only be slow, or reconnecting; its entry expires if it is gone.
            unknown = () if instance_id in self._catalog.instances else epochs
        finally:
            for stream in streams:
                stream.is_replaying = False
        for request_id in unknown:
            stream_or_none = self._streams.get(request_id)
            if stream_or_none is not None and stream_or_none.owner == instance_id:
                self._lose(stream_or_none, epochs.get(request_id, -1), "unknown")

    async def _ask_for(self, instance_id: str, streams: list[Stream]) -> list[str]:
        """Takes what the instance replays; returns the ids that it does not hold. Raises `BusError`."""
        query = ReplayQuery([stream.state.position for stream in streams])
        endpoint = INSTANCE_REPLAY.at(instance_id=instance_id)
        reply = await self._bus.request(endpoint, query, timeout_s=REPLAY_TIMEOUT_S)
        self._take(instance_id, reply.entries)
        return reply.unknown

    async def _seek(self, stream: Stream) -> None:
        """A quiet stream that a scheduler was to place. The scheduler is asked to take it (again: without effect where
        it has it); if none answers, an instance may have it all the same."""
        async with self._recoveries:
            epoch = stream.state.epoch
            if not stream.is_open or stream.owner is not None:
                return
            try:
                await self._placer.announce(stream)
                return
            except BusError as error:
                if error.code not in NOBODY_CODES:
                    logger.info("%s: the scheduler does not know of it: %s", stream.request_id, error)
                    return
            for instance_id in [i for i, info in self._catalog.instances.items() if serves(info, stream.model)]:
                try:
                    if not await self._ask_for(instance_id, [stream]):
                        if stream.owner is None:
                            stream.owned_by(instance_id)
                        return
                except BusError as error:
                    logger.info("%s cannot be asked for %s: %s", instance_id, stream.request_id, error)
        if stream.owner is None:
            self._lose(stream, epoch, "unknown")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a recovery task failed", exc_info=error)
