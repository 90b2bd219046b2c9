"""Metrics of the KV transport."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.worker.kv_transport.links import Refusal

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
DONE = "done"


class TransferMetrics:
    """`direction`: out | in. `reason`: done, or a `TransferReason`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self._bytes = counter("tideway_kv_transfer_bytes", "KV bytes of transfers that succeeded", ("direction",))
        self._transfers = counter(
            "tideway_kv_transfer_transfers",
            "Transfers ended, by direction and reason (done, or why they failed)",
            ("direction", "reason"),
        )
        self._seconds = Histogram(
            "tideway_kv_transfer_seconds", "Duration of transfers that succeeded", ("direction",),
            registry=registry, buckets=SECONDS_BUCKETS,
        )  # fmt: skip
        self._bandwidth = Gauge(
            "tideway_kv_transfer_bandwidth_bytes_per_second", "Bandwidth measured to a peer, without rate-limit waits",
            ("peer",), registry=registry,
        )  # fmt: skip
        self._refused = counter(
            "tideway_kv_transfer_refused_connections",
            "Connections to the KV port that were refused: for their host, or for want of handshake, hello or ticket",
            ("reason",),
        )
        self._connections = Gauge("tideway_kv_transfer_connections", "Open connections with peers", registry=registry)
        # What is counted later begins at 0, so that rates are known from the first transfer on.
        for direction in ("out", "in"):
            self._bytes.labels(direction)
            self._seconds.labels(direction)
            self._transfers.labels(direction, DONE)
        for reason in Refusal:
            self._refused.labels(reason)

    def on_done(self, direction: str, num_bytes: int, seconds: float) -> None:
        self._transfers.labels(direction, DONE).inc()
        self._bytes.labels(direction).inc(num_bytes)
        self._seconds.labels(direction).observe(seconds)

    def on_failed(self, direction: str, reason: str) -> None:
        self._transfers.labels(direction, reason).inc()

    def on_refused(self, reason: Refusal, count: int) -> None:
        self._refused.labels(reason).inc(count)

    def on_bandwidth(self, peer: str, bytes_s: float | None) -> None:
        if bytes_s is not None:
            self._bandwidth.labels(peer).set(bytes_s)

    def forget_peer(self, peer: str) -> None:
        """Peers come and go; a gauge of one that went would stay for ever."""
        self._bandwidth.remove(peer)

    def on_connections(self, count: int) -> None:
        self._connections.set(count)
