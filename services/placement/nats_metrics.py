"""What NATS keeps on disk, for Prometheus: the server's own monitoring port speaks JSON alone."""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import CollectorRegistry, Gauge

from shared.bus.interface import Bus, BusError

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


class NatsMetrics:
    """Every replica shows the same. While the server does not answer there are no values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"tideway_nats_stream_{name}", text, ["stream"], registry=registry)

        self._messages = gauge("messages", "Messages in a stream of JetStream")
        self._bytes = gauge("bytes", "Bytes in a stream of JetStream")
        self._max_bytes = gauge("max_bytes", "Bytes that a stream of JetStream may hold; 0: no bound")
        self._consumers = gauge("consumers", "Consumers of a stream of JetStream")

    async def run(self, bus: Bus) -> None:
        while True:
            try:
                await self._look(bus)
            except BusError as error:
                logger.debug("the streams of NATS are not known: %s", error)
            await asyncio.sleep(INTERVAL_S)

    async def _look(self, bus: Bus) -> None:
        gauges = (self._messages, self._bytes, self._max_bytes, self._consumers)
        try:
            uses = await bus.stream_uses()
        finally:
            for gauge in gauges:
                gauge.clear()
        for stream, use in uses.items():
            for gauge, value in zip(gauges, use, strict=True):
                gauge.labels(stream).set(value)
