"""What happened to the requests of an instance, written where it is decided and taken by the host from time to time. Never
once a token: a token is told only where it is the first after a silence."""

from __future__ import annotations

from collections import deque

from shared.engine.sequence import Sequence
from shared.messages.timeline import EventKind, RequestEvent

MAX_EVENTS = 16384
"""Until they are taken; beyond it the oldest are forgotten."""


class EventLog:
    def __init__(self) -> None:
        self.is_on = False
        """Whether events are kept: only where somebody takes them."""
        self._events: deque[tuple[str, RequestEvent]] = deque(maxlen=MAX_EVENTS)

    def add(
        self,
        sequence: Sequence,
        kind: EventKind,
        now: float,
        cause: str = "",
        numbers: tuple[float, ...] = (),
        place: str = "",
    ) -> None:
        if self.is_on:
            request = sequence.request
            event = RequestEvent(request.request_id, request.epoch, kind, now, cause, place, numbers)
            self._events.append((request.gateway_id, event))

    def take(self) -> list[tuple[str, RequestEvent]]:
        """Those since the last call, each with its gateway's id; times are on the clock of the `now` arguments."""
        events = list(self._events)
        self._events.clear()
        return events
