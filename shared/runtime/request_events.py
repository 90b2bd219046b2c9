"""Events of requests on their way to the requests' gateways, for timelines: a few messages a second to each."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict

import msgspec

from shared.bus.interface import Bus
from shared.messages.catalogue import GATEWAY_EVENTS
from shared.messages.timeline import RequestEvent, RequestEvents

INTERVAL_S = 0.1
MAX_MESSAGE_EVENTS = 1024


class EventPost:
    def __init__(self, bus: Bus, sender: str) -> None:
        """`sender`: this instance or scheduler."""
        self._bus = bus
        self._sender = sender
        self._waiting: defaultdict[str, list[RequestEvent]] = defaultdict(list)
        self._timer: asyncio.TimerHandle | None = None

    def add(self, gateway_id: str, event: RequestEvent) -> None:
        """Sent with others within `INTERVAL_S`. `event.at_s` is on the bus's clock. In the event loop."""
        self._waiting[gateway_id].append(event)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self.flush)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, defaultdict(list)
        since_epoch_s = time.time() - self._bus.now()
        for gateway_id, events in waiting.items():
            topic = GATEWAY_EVENTS.at(gateway_id=gateway_id)
            for first in range(0, len(events), MAX_MESSAGE_EVENTS):
                some = events[first : first + MAX_MESSAGE_EVENTS]
                told = [msgspec.structs.replace(event, at_s=event.at_s + since_epoch_s) for event in some]
                self._bus.publish(topic, RequestEvents(self._sender, told))
