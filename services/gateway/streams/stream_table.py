"""Every open stream of this gateway: frames go in, news for clients come out.

The thin service around `stream.Stream`. It owns the subscriptions on this gateway's frames and, while it has streams
that began at another one, on that one's; what is lost on the way is found again by `recovery`. It knows nothing of HTTP or
text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from services.gateway.metrics import GatewayMetrics
from services.gateway.models.catalog import Catalog
from services.gateway.streams.placing import Placer
from services.gateway.streams.recovery import Recovery
from services.gateway.streams.stream import Stream
from services.gateway.streams.timelines import Timelines
from shared.bus.interface import Bus, Subscription
from shared.messages.catalogue import GATEWAY_FRAMES, GATEWAY_LOST, INSTANCE_CANCEL, SCHEDULER_CANCEL
from shared.messages.cluster import InstanceInfo
from shared.messages.requests import (
    Cancel,
    ErrorCode,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    TokenEntry,
    TokenFrame,
    next_placement,
)
from shared.runtime.tasks import TaskSet
from shared.streams import Outcome

KEPT_MARK = "kept-"
"""In the ids of calls that may go on at another gateway: one that does not know them leaves them alone."""
STOP_S = 5.0


class StreamTable:
    def __init__(
        self,
        bus: Bus,
        gateway_id: str,
        catalog: Catalog,
        placer: Placer,
        metrics: GatewayMetrics,
        timelines: Timelines,
    ) -> None:
        self.streams: dict[str, Stream] = {}
        """The open ones, by request id."""
        self._bus = bus
        self._gateway_id = gateway_id
        self._catalog = catalog
        self._placer = placer
        self._metrics = metrics
        self._timelines = timelines
        self._recovery = Recovery(bus, catalog, placer, metrics, timelines, self)
        self._subscription: Subscription | None = None
        self._fostered: Counter[str] = Counter()
        """Streams here that began at other gateways, by these."""
        self._foster_subscriptions: dict[str, list[Subscription]] = {}
        self._tasks = TaskSet()
        metrics.open_streams.set_function(lambda: len(self.streams))

    async def start(self) -> None:
        topic = GATEWAY_FRAMES.at(gateway_id=self._gateway_id)
        self._subscription = await self._bus.subscribe(topic, self._on_frame)
        await self._recovery.start(self._gateway_id)

    async def stop(self) -> None:
        """Open streams end with an error, those that are kept for this gateway only."""
        for stream in list(self.streams.values()):
            if stream.is_kept:
                self.abandon(
                    stream, "The gateway is shutting down; the call goes on, and may be resumed at another one."
                )
            else:
                self.fail(stream, ErrorCode.UNAVAILABLE, "The gateway is shutting down.")
        await self._tasks.wait_all(STOP_S)
        if self._subscription is not None:
            await self._subscription.stop()
        await self._recovery.stop()

    async def open(self, request: GenerationRequest, arrived_at: float, on_news: Callable[[], None]) -> Stream:
        """Places the request; its frames may begin to come before this returns. Raises `ServiceError`."""
        stream = Stream(request, arrived_at, on_news)
        self.streams[stream.request_id] = stream
        stream.is_placing = True
        self._timelines.begin(stream, request, arrived_at)
        try:
            await self._placer.place(stream, patient=False)
        except BaseException:
            self.close(stream)
            raise
        finally:
            stream.is_placing = False
        stream.heard_at = self._bus.now()
        if stream.must_place:
            self._recovery.place_again(stream)
        elif stream.must_announce:
            self._recovery.announce(stream)
        return stream

    async def attach(self, request: GenerationRequest, arrived_at: float, on_news: Callable[[], None]) -> Stream:
        """The stream of a request that another reader has here, or that another gateway placed; its tokens are on their
        way when this returns."""
        if (known := self.streams.get(request.request_id)) is not None:
            known.listeners.append(on_news)
            return known
        stream = Stream(request, arrived_at, on_news)
        stream.heard_at = self._bus.now()
        stream.is_placing = stream.is_kept = True
        self.streams[stream.request_id] = stream
        self._timelines.begin(stream, request, arrived_at)
        try:
            await self._foster(stream.gateway_id)
        except BaseException:
            self._forget(stream)
            raise
        self._recovery.adopt(stream)
        return stream

    async def _foster(self, gateway_id: str) -> None:
        """Hears what is sent to the other gateway."""
        if gateway_id == self._gateway_id:
            return
        self._fostered[gateway_id] += 1
        if self._fostered[gateway_id] == 1:
            subscriptions = self._foster_subscriptions[gateway_id] = []
            frames, lost = GATEWAY_FRAMES.at(gateway_id=gateway_id), GATEWAY_LOST.at(gateway_id=gateway_id)
            subscriptions.append(await self._bus.subscribe(frames, self._on_foster_frame))
            subscriptions.append(await self._bus.subscribe(lost, self._recovery.on_lost))

    def _on_foster_frame(self, frame: TokenFrame) -> None:
        if entries := [entry for entry in frame.entries if entry.request_id in self.streams]:
            self.take(frame.sender, entries)

    def leave(self, stream: Stream, on_news: Callable[[], None]) -> None:
        """Whoever listens with `on_news` needs no more of it; with the last of them it is closed. May be called twice."""
        if on_news in stream.listeners:
            stream.listeners.remove(on_news)
        if not stream.listeners:
            self.close(stream)

    def abandon(self, stream: Stream, why: str) -> None:
        """Removes the stream here; it continues elsewhere."""
        if stream.is_open:
            stream.failure = ErrorInfo(ErrorCode.HANDED_OVER, why)
            self._forget(stream)
            stream.on_news()

    def close(self, stream: Stream) -> None:
        """The client needs no more of it; where it has not ended, it is cancelled everywhere. May be called twice."""
        if not stream.is_open:
            return
        self._forget(stream)
        if stream.finish_reason is None:
            self._bus.publish(SCHEDULER_CANCEL, Cancel(stream.request_id))
            if stream.owner is not None:
                self._cancel_at(stream.owner, stream.request_id)

    def end(self, stream: Stream) -> None:
        """It has a finish reason."""
        if stream.finish_reason is FinishReason.DEADLINE:
            stream.failure = stream.error or ErrorInfo(ErrorCode.DEADLINE, "The request's time limit has passed.")
        elif stream.finish_reason is FinishReason.ERROR:
            stream.failure = stream.error or ErrorInfo(ErrorCode.INTERNAL, "The instance failed on this request.")
        self._forget(stream)
        stream.on_news()

    def fail(self, stream: Stream, code: ErrorCode, message: str, param: str = "") -> None:
        stream.failure = ErrorInfo(code, message, param)
        self.close(stream)
        stream.on_news()

    def take(self, sender: str, entries: list[TokenEntry]) -> None:
        """What an instance (or scheduler) has sent, in a frame or as a replay."""
        now = self._bus.now()
        behind: list[Stream] = []
        for entry in entries:
            stream = self.streams.get(entry.request_id)
            if stream is not None and stream.extend(entry, sender):
                stream.heard(now)
                stream.on_news()
                continue
            if stream is None:
                # Its cancel was lost, or overtaken by its dispatch; one that is kept may be another gateway's by now.
                if entry.finish_reason is None and KEPT_MARK not in entry.request_id:
                    self._metrics.dropped_entries.labels("unknown").inc()
                    self._cancel_at(sender, entry.request_id)
                continue
            owner, epoch = stream.owner, stream.epoch
            is_instance = entry.finish_reason is None or entry.tokens or sender in self._catalog.instances
            outcome = stream.accept(entry, sender if is_instance else None)
            if outcome is Outcome.STALE:
                self._metrics.dropped_entries.labels("stale").inc()
                if entry.finish_reason is None and owner not in (None, sender) and not _was_moved(entry.epoch, epoch):
                    self._cancel_at(sender, entry.request_id, entry.epoch)
                continue
            if stream.owner != owner:
                self.follow(stream, owner, epoch)
            if outcome is Outcome.NEWS:
                stream.heard(now)
                if stream.finish_reason is not None:
                    self.end(stream)
                else:
                    stream.on_news()
            elif outcome is Outcome.GIVEN_UP:
                self._recovery.lose(stream, stream.epoch, "given_up")
            elif outcome is Outcome.GAP:
                behind.append(stream)
            elif stream.owner == owner:
                self._metrics.dropped_entries.labels("known").inc()
        if behind:
            self._recovery.replay(sender, behind, "gap")

    def follow(self, stream: Stream, earlier: str | None, epoch: int) -> None:
        """The stream's owner has changed; `earlier` had it, in `epoch`."""
        info = self._catalog.instances.get(stream.owner or "")
        stream.owned_by(stream.owner, info.incarnation if info else None)
        if earlier and stream.owner and _was_moved(epoch, stream.epoch):
            stream.heard(self._bus.now())
            self._metrics.moved_streams.inc()

    def on_instance(self, instance_id: str, info: InstanceInfo | None) -> None:
        """A change in the registry."""
        self._placer.on_instance(instance_id)
        self._recovery.on_instance(instance_id, info)

    def _on_frame(self, frame: TokenFrame) -> None:
        self.take(frame.sender, frame.entries)

    def _cancel_at(self, instance_id: str, request_id: str, epoch: int | None = None) -> None:
        self._bus.publish(INSTANCE_CANCEL.at(instance_id=instance_id), Cancel(request_id, epoch))

    def _forget(self, stream: Stream) -> None:
        stream.is_open = False
        self.streams.pop(stream.request_id, None)
        self._timelines.end(stream)
        other = stream.gateway_id
        if other in self._fostered:
            self._fostered[other] -= 1
            if not self._fostered[other]:
                del self._fostered[other]
                self._tasks.start(_stop_all(self._foster_subscriptions.pop(other)))


async def _stop_all(subscriptions: list[Subscription]) -> None:
    for subscription in subscriptions:
        await subscription.stop()


def _was_moved(earlier: int, later: int) -> bool:
    """Whether the owner in the `later` epoch has the request from the one in the `earlier`, which so holds it no more, and
    would forward a cancel."""
    return earlier < later < next_placement(earlier)
