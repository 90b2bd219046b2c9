"""What happened to an instance's requests: from the engine to their gateways, and onto their spans."""

from __future__ import annotations

from collections import OrderedDict

from services.worker.instance.engine_loop import EngineLoop
from shared.bus.interface import Bus
from shared.messages.requests import GenerationRequest
from shared.messages.timeline import EventKind, RequestEvent
from shared.runtime.request_events import EventPost

MAX_SPANS = 4096
MAX_SPAN_EVENTS = 64


class InstanceEvents:
    def __init__(self, bus: Bus, loop: EngineLoop, instance_id: str, *, are_traced: bool) -> None:
        """`are_traced`: they are kept for spans too."""
        self._bus = bus
        self._loop = loop
        self._post = EventPost(bus, instance_id)
        self._for_spans: OrderedDict[str, list[RequestEvent]] | None = OrderedDict() if are_traced else None

    def collect(self) -> None:
        """Takes what the engine has to tell."""
        for gateway_id, event in self._loop.take_events():
            self._add(gateway_id, event)

    def add(self, request: GenerationRequest, kind: EventKind, cause: str, place: str) -> None:
        """What the engine does not know, of now."""
        event = RequestEvent(request.request_id, request.epoch, kind, self._bus.now(), cause, place)
        self._add(request.gateway_id, event)

    def of_span(self, request_id: str) -> list[RequestEvent]:
        """All of one that leaves, with times on the bus's clock; forgets them."""
        if self._for_spans is None:
            return []
        self.collect()
        return self._for_spans.pop(request_id, [])

    def flush(self) -> None:
        self.collect()
        self._post.flush()

    def _add(self, gateway_id: str, event: RequestEvent) -> None:
        if self._for_spans is not None:
            events = self._for_spans.setdefault(event.request_id, [])
            if len(events) < MAX_SPAN_EVENTS:
                events.append(event)
            if len(self._for_spans) > MAX_SPANS:
                self._for_spans.popitem(last=False)
        self._post.add(gateway_id, event)
