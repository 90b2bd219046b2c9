"""What placement shows to Prometheus."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.placement.statistics import TrafficRates
from shared.bus.interface import Bus, BusError
from shared.messages.cluster import NodeInfo, PlacementPlan

_TRAFFIC = {
    "arrivals_per_s": ("arrivals_per_second", "Requests that arrived per second"),
    "output_tokens_per_s": ("output_tokens_per_second", "Output tokens per second of finished requests"),
    "mean_prompt_tokens": ("mean_prompt_tokens", "Mean prompt tokens of a finished request"),
    "mean_output_tokens": ("mean_output_tokens", "Mean output tokens of a finished request"),
    "mean_queued_s": ("mean_queued_seconds", "Mean seconds that a finished request waited"),
    "mean_execution_s": ("mean_execution_seconds", "Mean seconds that a finished request ran"),
    "num_queued": ("num_queued", "Requests in the global queue"),
}
"""Field of `TrafficRates` to the metric's name and help."""


class PlacementMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"tideway_placement_{name}", text, labels, registry=registry)

        self.is_leader = gauge("is_leader", "1 while this replica leads")
        self.num_plans = Counter("tideway_placement_plans", "Plans published", registry=registry)
        self._plan_version = gauge("plan_version", "Version of the current plan")
        self._models = gauge("models", "Configured models", ("state",))
        self._nodes = gauge("nodes", "Registered nodes")
        self._instances = gauge("instances", "Instances of the current plan")
        self._draining = gauge("draining", "Instances that were drained on purpose", ("by",))
        self._replicas = gauge("model_replicas", "Instances of the current plan that hold the model", ("model",))
        self._traffic = {
            field: gauge(f"model_{name}", f"{text} (last minute)", ("model",))
            for field, (name, text) in _TRAFFIC.items()
        }

    def show(self, plan: PlacementPlan | None, nodes: Mapping[str, NodeInfo], num_models: int) -> None:
        self._nodes.set(len(nodes))
        replicas: dict[str, int] = {}
        for instance in plan.instances if plan is not None else ():
            for spec in instance.models:
                replicas[spec.name] = replicas.get(spec.name, 0) + 1
        self._models.labels("placed").set(len(replicas))
        self._models.labels("unplaced").set(num_models - len(replicas))
        self._plan_version.set(plan.version if plan is not None else 0)
        self._instances.set(len(plan.instances) if plan is not None else 0)
        num_draining, num_released = (len(plan.draining), len(plan.released)) if plan is not None else (0, 0)
        self._draining.labels("operator").set(num_draining - num_released)
        self._draining.labels("scaling").set(num_released)
        self._replicas.clear()
        for name, count in replicas.items():
            self._replicas.labels(name).set(count)

    def show_traffic(self, model: str, rates: TrafficRates) -> None:
        for name, gauge in self._traffic.items():
            gauge.labels(model).set(getattr(rates, name))

    def forget(self, model: str) -> None:
        for gauge in self._traffic.values():
            if (model,) in gauge._metrics:
                gauge.remove(model)


logger = logging.getLogger(__name__)

NATS_INTERVAL_S = 10.0


class NatsMetrics:
    """What NATS keeps on disk: its own monitoring port speaks JSON alone. Every replica shows the same. While the server
    does not answer there are no values."""

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
            await asyncio.sleep(NATS_INTERVAL_S)

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
