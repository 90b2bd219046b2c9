"""The global queue: requests that no instance has taken yet.

Order: online before offline, high priority before normal, then the order policy (first come, first served: a request that
was submitted again keeps its place, because the time it has waited is counted), then arrival here. The queue is kept in
lanes of one model and class, because those are what an instance has room for or not.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from math import exp
from typing import NamedTuple

from services.scheduler.requests import TrackedRequest
from shared.messages import ErrorCode, ErrorInfo, Priority
from shared.policies.ordering import OrderingPolicy


class Lane(NamedTuple):
    model: str
    is_online: bool


class GlobalQueue:
    """Bounded over all lanes. A place in the queue is `TrackedRequest.key`, given once, at the first `push`."""

    def __init__(self, order: OrderingPolicy, max_queued: int) -> None:
        if not order.is_static:
            raise ValueError("the global queue needs an order policy whose keys do not change")
        self._order = order
        self._max_queued = max_queued
        self._lanes: dict[Lane, list[tuple[tuple[float, ...], TrackedRequest]]] = {}
        self._length = 0
        self._outflow = Outflow()

    def __len__(self) -> int:
        return self._length

    def lengths(self) -> dict[Lane, int]:
        return {lane: len(entries) for lane, entries in self._lanes.items()}

    def refusal(self, now: float) -> ErrorInfo | None:
        """Why one more request cannot be queued, with an estimate of when it could be."""
        if self._length < self._max_queued:
            return None
        retry_after_s = min(60.0, max(1.0, self._length / max(1e-3, self._outflow.per_second(now))))
        message = f"{self._length} requests wait in the queue already (at most {self._max_queued})"
        return ErrorInfo(ErrorCode.OVERLOADED, message, retry_after_s=round(retry_after_s, 1))

    def push(self, tracked: TrackedRequest, now: float) -> None:
        """Queues a request, at its old place if it was here before. Does not look at the bound: what was once let in is
        not turned away later."""
        if not tracked.key:
            assert tracked.request is not None
            is_normal = tracked.request.priority != Priority.HIGH
            tracked.key = (not tracked.is_online, is_normal, *self._order.key(tracked, now), tracked.number)
        insort(self._lanes.setdefault(lane_of(tracked), []), (tracked.key, tracked), key=_key)
        self._length += 1

    def remove(self, tracked: TrackedRequest) -> None:
        lane = lane_of(tracked)
        entries = self._lanes[lane]
        index = bisect_left(entries, tracked.key, key=_key)
        assert entries[index][1] is tracked
        del entries[index]
        if not entries:
            del self._lanes[lane]
        self._length -= 1

    def first(self, lane: Lane, limit: int = 1) -> list[TrackedRequest]:
        """The first `limit` requests of a lane, in order."""
        return [tracked for _, tracked in self._lanes.get(lane, ())[:limit]]

    def count_dispatch(self, now: float) -> None:
        """A request left for an instance; feeds the estimate of how fast the queue drains."""
        self._outflow.count(now)


class Outflow:
    """Events per second, exponentially weighted over about `window_s`."""

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._weight = 0.0
        self._at_s = 0.0

    def count(self, now: float) -> None:
        self._weight = self._decayed(now) + 1.0
        self._at_s = now

    def per_second(self, now: float) -> float:
        return self._decayed(now) / self._window_s

    def _decayed(self, now: float) -> float:
        return self._weight * exp(-max(0.0, now - self._at_s) / self._window_s)


def lane_of(tracked: TrackedRequest) -> Lane:
    return Lane(tracked.model, tracked.is_online)


def _key(entry: tuple[tuple[float, ...], TrackedRequest]) -> tuple[float, ...]:
    return entry[0]
