"""Metrics and spans of one instance. The `vllm:` names are used where the meaning is the same as there, so that routers
and dashboards made for vLLM work unchanged; every latency carries the class label."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily

from services.worker.instance.coserving_telemetry import CoServingTelemetry
from services.worker.instance.spans import InstanceSpans
from shared.engine.driver import StepStats
from shared.engine.load import InstanceLoad
from shared.engine.requests import Ended
from shared.messages.requests import FinishReason, RequestClass
from shared.runtime.telemetry import Telemetry

LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0,
)  # fmt: skip
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000)
LABELS = ("model_name", "engine")
DEPTH_BUCKETS = (1, 2, 3, 4, 8)
CLASS_LABELS = (*LABELS, "class")


class WeightedHistogram:
    """A histogram to which one call adds many equal observations: one step's duration counts once for each of the
    sequences that decoded in it."""

    def __init__(self, name: str, help_text: str, labels: tuple[str, ...], registry: CollectorRegistry) -> None:
        self._name, self._help, self._labels = name, help_text, labels
        self._counts: dict[tuple[str, ...], list[float]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def observe(self, labels: tuple[str, ...], value: float, times: int) -> None:
        counts = self._counts.setdefault(labels, [0.0] * (len(LATENCY_BUCKETS) + 1))
        index = next((i for i, bound in enumerate(LATENCY_BUCKETS) if value <= bound), len(LATENCY_BUCKETS))
        counts[index] += times
        self._sums[labels] = self._sums.get(labels, 0.0) + value * times

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for labels, counts in list(self._counts.items()):
            total, buckets = 0.0, []
            for bound, count in zip([*map(str, LATENCY_BUCKETS), "+Inf"], counts, strict=True):
                total += count
                buckets.append((bound, total))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family


class InstanceTelemetry:
    def __init__(self, instance_id: str, telemetry: Telemetry, clock: Callable[[], float]) -> None:
        """`clock`: that of the engine's times, in seconds."""
        registry = telemetry.registry
        self._engine = instance_id
        self.spans = InstanceSpans(instance_id, telemetry.tracer, clock)
        self.coserving = CoServingTelemetry(instance_id, registry)
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        latency = partial(histogram, labelnames=CLASS_LABELS, buckets=LATENCY_BUCKETS)
        self._running = gauge("vllm:num_requests_running", "Sequences in the batch", LABELS)
        self._waiting = gauge("vllm:num_requests_waiting", "Sequences waiting on the instance", LABELS)
        self._kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1", LABELS)
        self._cache_config = gauge(
            "vllm:cache_config_info", "KV pool of a model", (*LABELS, "block_size", "num_gpu_blocks")
        )
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens", LABELS)
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated", LABELS)
        self._cached_tokens = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", LABELS)
        self._queried_tokens = counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", LABELS
        )
        self._preemptions = counter("vllm:num_preemptions", "Preemptions", ("engine",))
        self._num_preemptions = 0
        self._success = counter(
            "vllm:request_success", "Requests ended, by reason", (*LABELS, "finished_reason", "class")
        )
        self._ttft = latency("vllm:time_to_first_token_seconds", "Arrival on the instance to the first token")
        self._queue = latency("vllm:request_queue_time_seconds", "Arrival on the instance to the first step")
        self._prefill = latency("vllm:request_prefill_time_seconds", "First step to first token")
        self._decode = latency("vllm:request_decode_time_seconds", "First token to last")
        self._e2e = latency("vllm:e2e_request_latency_seconds", "Arrival on the instance to the end")
        self._tpot = latency("vllm:request_time_per_output_token_seconds", "Mean over a request's decode")
        self._itl = WeightedHistogram(
            "vllm:inter_token_latency_seconds", "Duration of a step, once per decoding sequence", CLASS_LABELS, registry
        )
        self._max_itl = latency(
            "tideway_instance_max_inter_token_latency_seconds",
            "Longest time between two tokens of a request, once each",
        )
        self._iteration_tokens = histogram(
            "vllm:iteration_tokens_total", "Tokens in a step", LABELS, buckets=TOKEN_BUCKETS
        )
        self._step_seconds = histogram(
            "tideway_instance_step_seconds", "Duration of a step", LABELS, buckets=LATENCY_BUCKETS
        )
        self._steps_in_flight = histogram(
            "tideway_instance_steps_in_flight", "Steps in flight when one ended, itself among them", LABELS,
            buckets=DEPTH_BUCKETS,
        )  # fmt: skip

    def set_model(self, model: str, block_size: int, num_blocks: int) -> None:
        self._cache_config.labels(model, self._engine, str(block_size), str(num_blocks)).set(1)
        for gauge in (self._running, self._waiting, self._kv_usage):
            gauge.labels(model, self._engine).set(0)
        # Counters begin at 0, so that rates are known from the first request on.
        for counter in (self._prompt_tokens, self._generation_tokens, self._queried_tokens, self._cached_tokens):
            counter.labels(model, self._engine)
        for reason, request_class in product(FinishReason, RequestClass):
            self._success.labels(model, self._engine, str(reason), str(request_class))
        self.coserving.set_model(model)

    def remove_model(self, model: str, block_size: int, num_blocks: int) -> None:
        self._cache_config.remove(model, self._engine, str(block_size), str(num_blocks))
        for gauge in (self._running, self._waiting, self._kv_usage):
            gauge.remove(model, self._engine)
        self.coserving.remove_model(model)

    def on_step(self, stats: StepStats) -> None:
        model, engine = stats.model, self._engine
        if stats.is_suspended:
            return
        self.coserving.on_step(model, stats.duration_s, stats.limit_s)
        self._iteration_tokens.labels(model, engine).observe(stats.num_tokens)
        self._step_seconds.labels(model, engine).observe(stats.duration_s)
        self._steps_in_flight.labels(model, engine).observe(stats.num_in_flight)
        for request_class, count in zip(RequestClass, stats.num_decodes, strict=True):
            if count:
                self._itl.observe((model, engine, str(request_class)), stats.duration_s, count)

    def on_load(self, load: InstanceLoad, used_share: float, num_preemptions: int) -> None:
        for model in load.models:
            self._running.labels(model.model, self._engine).set(model.num_running)
            self._waiting.labels(model.model, self._engine).set(model.num_waiting)
            self._kv_usage.labels(model.model, self._engine).set(used_share)
        self._preemptions.labels(self._engine).inc(num_preemptions - self._num_preemptions)
        self._num_preemptions = num_preemptions

    def on_ended(self, ended: Ended) -> None:
        self.coserving.on_ended(ended)
        request = ended.request
        model, engine, klass = request.public_model, self._engine, str(request.request_class)
        num_new = ended.num_output_tokens - len(request.prior) // 4
        self._success.labels(model, engine, str(ended.reason), klass).inc()
        self._prompt_tokens.labels(model, engine).inc(ended.num_prompt_tokens)
        self._queried_tokens.labels(model, engine).inc(ended.num_prompt_tokens)
        self._cached_tokens.labels(model, engine).inc(ended.num_cached_tokens)
        self._generation_tokens.labels(model, engine).inc(num_new)
        labels = (model, engine, klass)
        self._e2e.labels(*labels).observe(ended.ended_s - ended.submitted_s)
        if ended.first_planned_s is not None:
            self._queue.labels(*labels).observe(ended.first_planned_s - ended.submitted_s)
        if ended.first_token_s is not None and ended.first_planned_s is not None:
            self._ttft.labels(*labels).observe(ended.first_token_s - ended.submitted_s)
            self._prefill.labels(*labels).observe(ended.first_token_s - ended.first_planned_s)
            decode_s = ended.ended_s - ended.first_token_s
            self._decode.labels(*labels).observe(decode_s)
            if num_new > 1:
                self._tpot.labels(*labels).observe(decode_s / (num_new - 1))
                self._max_itl.labels(*labels).observe(ended.max_itl_s)

    def on_migrated_away(self, model: str, num_new: int) -> None:
        """A request left for another instance after `num_new` tokens of here; all else is counted where it ends."""
        self._generation_tokens.labels(model, self._engine).inc(num_new)
