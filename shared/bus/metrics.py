"""Prometheus metrics of a bus. Subjects appear as patterns of the catalogue, never with ids, so labels are bounded."""

from __future__ import annotations

import re
from functools import lru_cache
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.messages import catalogue
from shared.messages.catalogue import PREFIX
from shared.messages.channels import Endpoint, Topic

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)

_CATALOGUE = [channel.subject for channel in vars(catalogue).values() if isinstance(channel, Topic | Endpoint)]
_PATTERNS = [
    (re.compile(r"[^.]+".join(re.escape(part) for part in re.split(r"\{\w+\}", subject))), subject)
    for subject in _CATALOGUE
]


@lru_cache(maxsize=4096)
def subject_pattern(subject: str) -> str:
    """The catalogue's pattern that `subject` was made from, without the prefix; `other` if none."""
    for expression, pattern in _PATTERNS:
        if expression.fullmatch(subject):
            return pattern.removeprefix(PREFIX + ".")
    return "other"


class BusMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter("tideway_bus_" + name, text, labels, registry=registry)

        self.requests = counter("requests", "Requests sent, by how they ended", "subject", "outcome")
        self.request_seconds = Histogram(
            "tideway_bus_request_seconds",
            "Time from sending a request to its reply",
            ["subject"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.served = counter("served", "Requests served, by how they ended", "subject", "outcome")
        self.served_seconds = Histogram(
            "tideway_bus_served_seconds",
            "Time from a request's arrival to its reply",
            ["subject"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.handlers = Gauge("tideway_bus_handlers", "Running handlers", ["subject"], registry=registry)
        self.published = counter("published", "Messages published", "subject")
        self.dropped = counter("dropped", "Messages lost on this side", "subject", "reason")
        self.refused = counter("refused", "Subjects that NATS did not permit this process's user")
        self.reconnects = counter("reconnects", "Connections made after a loss")
        self.slow_consumer = counter("slow_consumer", "Messages or connections dropped because this side was slow")
        self.connected = Gauge("tideway_bus_connected", "1 while connected to NATS", registry=registry)
        self.problems = Gauge("tideway_bus_problems", "Current problems of the bus", registry=registry)


_made: WeakKeyDictionary[CollectorRegistry, BusMetrics] = WeakKeyDictionary()


def bus_metrics(registry: CollectorRegistry | None) -> BusMetrics:
    """The metrics on `registry`, made at the first call for it; on a registry of their own if None."""
    if registry is None:
        return BusMetrics(CollectorRegistry())
    if registry not in _made:
        _made[registry] = BusMetrics(registry)
    return _made[registry]
