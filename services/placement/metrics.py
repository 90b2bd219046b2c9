"""What placement shows to Prometheus."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.bus.interface import Bus, BusError
from shared.messages.cluster import NodeInfo, PlacementPlan, PlanChange, WhyAsleep
from shared.messages.requests import RequestClass
from shared.messages.traffic import ModelSummary, ModelTraffic
from shared.placement.plan import Prediction

_TRAFFIC: dict[str, tuple[str, Callable[[ModelSummary], float | None]]] = {
    "model_arrivals_per_second": ("Requests that arrived per second", lambda one: one.arrivals_per_s),
    "model_refused_per_second": ("Of those, refused for want of room", lambda one: one.num_refused / one.interval_s),
    "model_output_tokens_per_second": (
        "Output tokens per second of finished requests",
        lambda one: one.num_finished * one.output_tokens.mean / one.interval_s,
    ),
    "model_mean_prompt_tokens": ("Mean prompt tokens of a request", lambda one: one.prompt_tokens.mean),
    "model_std_prompt_tokens": ("Standard deviation of prompt tokens", lambda one: one.prompt_tokens.std),
    "model_mean_output_tokens": ("Mean output tokens of a finished request", lambda one: one.output_tokens.mean),
    "model_std_output_tokens": ("Standard deviation of output tokens", lambda one: one.output_tokens.std),
    "model_mean_execution_seconds": (
        "Mean seconds that a finished request takes alone on its instance",
        lambda one: one.execution_s.mean,
    ),
    "model_mean_latency_seconds": ("Mean seconds from arrival to end", lambda one: one.latency_s.mean),
    "model_p99_latency_seconds": ("99th percentile of that", lambda one: one.latency_s.p99),
    "model_p99_ttft_seconds": ("99th percentile of the time to first token", lambda one: one.ttft_s.p99),
    "model_mean_tpot_seconds": ("Mean time per output token after the first", lambda one: one.tpot_s.mean),
    "model_normalised_latency": ("Mean latency over mean execution time", lambda one: one.normalised_latency),
    "model_slo_attainment": ("Share of requests that ended within their SLO", lambda one: one.attainment),
}
"""Name of a metric to its help and its value; None: there is none."""


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
        self.searches = Counter(
            "tideway_placement_searches",
            "Placement searches by outcome: better, kept (no plan was worth the change), failed",
            ["outcome"],
            registry=registry,
        )
        self.verdicts = Counter(
            "tideway_placement_verdicts", "Placement searches by the reason of their verdict", ["cause"],
            registry=registry,
        )  # fmt: skip
        self.search_seconds = Histogram(
            "tideway_placement_search_seconds",
            "Placement search duration in seconds",
            registry=registry,
            buckets=(0.3, 1, 3, 10, 30, 100, 300),
        )
        self.replacements = Counter(
            "tideway_placement_replacements", "Replacements that have ended", ["end"], registry=registry
        )
        self.roll_backs = Counter(
            "tideway_placement_roll_backs",
            "Replacements rolled back, by reason: fetch, node_gone, instance, no_room, timeout, superseded, operator",
            ["cause"],
            registry=registry,
        )
        self._stage = gauge("replacement_stage", "1: the replacement that is under way is there", ("stage",))
        self.interval = gauge("replacement_interval_seconds", "Between two searches")
        self._attainment = gauge("replacement_attainment", "Predicted and measured, this interval", ("kind",))
        self._latency = gauge("replacement_normalised_latency", "Predicted and measured, this interval", ("kind",))
        self._traffic = {
            name: gauge(name, f"{text} (last minute)", ("model", "class")) for name, (text, _) in _TRAFFIC.items()
        }
        self._num_queued = gauge("model_num_queued", "Requests in the global queue", ("model",))
        self._log_requests = gauge("request_log_requests", "Requests that the service monitor keeps one by one")
        self._log_thinned = gauge("request_log_thinned", "Requests left out of it so far, as there were too many")
        self._log_expired = gauge("request_log_expired", "Requests that became too old for it so far")
        self._asleep = gauge("models_asleep", "Models on demand that are put away", ("why",))
        self.wakes = Counter(
            "tideway_model_wakes", "Loads of models on demand for requests, by where their weights were: host, disk",
            ["model", "tier"], registry=registry,
        )  # fmt: skip
        self.put_aways = Counter(
            "tideway_model_put_aways", "Models on demand that were put away: idle, room (another needed it), failed",
            ["model", "cause"], registry=registry,
        )  # fmt: skip
        self.wake_seconds = Histogram(
            "tideway_model_wake_seconds", "From the first request for a model that was put away until it is ready",
            ["tier"], registry=registry, buckets=(0.1, 0.2, 0.5, 1, 1.5, 2, 5, 10, 20, 60, 180, 600),
        )  # fmt: skip
        self.num_dropped_rows = Counter(
            "tideway_placement_dropped_rows",
            "Rows of the request log that schedulers dropped for lack of room",
            registry=registry,
        )

    def show(self, plan: PlacementPlan | None, nodes: Mapping[str, NodeInfo], num_queued: Mapping[str, int]) -> None:
        """`num_queued`: of each configured model."""
        num_models = len(num_queued)
        for name, count in num_queued.items():
            self._num_queued.labels(name).set(count)
        self._nodes.set(len(nodes))
        replicas: dict[str, int] = {}
        for instance in plan.instances if plan is not None else ():
            for spec in instance.models:
                replicas[spec.name] = replicas.get(spec.name, 0) + 1
        asleep = plan.asleep if plan is not None else {}
        for why in WhyAsleep:
            self._asleep.labels(why).set(sum(found == why for found in asleep.values()))
        self._models.labels("placed").set(len(replicas))
        self._models.labels("asleep").set(len(asleep))
        self._models.labels("unplaced").set(num_models - len(replicas) - len(asleep))
        self._plan_version.set(plan.version if plan is not None else 0)
        self._instances.set(len(plan.instances) if plan is not None else 0)
        num_draining, num_released = (len(plan.draining), len(plan.released)) if plan is not None else (0, 0)
        self._draining.labels("operator").set(num_draining - num_released)
        self._draining.labels("scaling").set(num_released)
        self._replicas.clear()
        for name, count in replicas.items():
            self._replicas.labels(name).set(count)

    def show_traffic(self, traffic: ModelTraffic) -> None:
        for request_class, one in ((RequestClass.ONLINE, traffic.online), (RequestClass.OFFLINE, traffic.offline)):
            for name, (_, value_of) in _TRAFFIC.items():
                value = value_of(one)
                self._traffic[name].labels(traffic.model, request_class).set(math.nan if value is None else value)

    def show_log(self, num_requests: int, num_thinned: int, num_expired: int) -> None:
        self._log_requests.set(num_requests)
        self._log_thinned.set(num_thinned)
        self._log_expired.set(num_expired)

    def show_stage(self, change: PlanChange | None) -> None:
        for stage in ("fetch", "change", "settle", "roll_back"):
            self._stage.labels(stage).set(change is not None and change.stage == stage)

    def show_interval(self, predicted: Prediction | None, measured: Prediction | None) -> None:
        for kind, found in (("predicted", predicted), ("measured", measured)):
            if found is not None:
                self._attainment.labels(kind).set(found.attainment)
                self._latency.labels(kind).set(found.normalised_latency)

    def forget(self, model: str) -> None:
        for gauge in self._traffic.values():
            for request_class in RequestClass:
                if (model, request_class) in gauge._metrics:
                    gauge.remove(model, request_class)
        if (model,) in self._num_queued._metrics:
            self._num_queued.remove(model)


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
        self._copies = gauge("copies", "Copies that a stream of JetStream should have")
        self._current_copies = gauge(
            "current_copies", "Copies of a stream of JetStream that are there and have all of it"
        )

    async def run(self, bus: Bus) -> None:
        while True:
            try:
                await self._look(bus)
            except BusError as error:
                logger.debug("the streams of NATS are not known: %s", error)
            await asyncio.sleep(NATS_INTERVAL_S)

    async def _look(self, bus: Bus) -> None:
        gauges = (
            self._messages, self._bytes, self._max_bytes, self._consumers, self._copies, self._current_copies,
        )  # fmt: skip
        try:
            uses = await bus.stream_uses()
        finally:
            for gauge in gauges:
                gauge.clear()
        for stream, use in uses.items():
            for gauge, value in zip(gauges, use, strict=True):
                gauge.labels(stream).set(value)
