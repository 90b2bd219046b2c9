"""Metrics and spans of one instance. The `vllm:` names are used where the meaning is the same as there, so that routers
and dashboards made for vLLM work unchanged; every latency carries the class label."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from opentelemetry import trace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily

from services.worker.coserving_telemetry import CoServingTelemetry
from services.worker.engine_loop import StepStats
from shared.engine.load import InstanceLoad
from shared.engine.requests import Ended
from shared.messages.requests import FinishReason, RequestClass
from shared.telemetry import context_of

LATENCY_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    600.0,
)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000)
LABELS = ("model_name", "engine")
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
    def __init__(self, instance_id: str, registry: CollectorRegistry, tracer: trace.Tracer) -> None:
        self._engine = instance_id
        self._tracer = tracer
        self.coserving = CoServingTelemetry(instance_id, registry)
        self._running = Gauge("vllm:num_requests_running", "Sequences in the batch", LABELS, registry=registry)
        self._waiting = Gauge(
            "vllm:num_requests_waiting", "Sequences waiting on the instance", LABELS, registry=registry
        )
        self._kv_usage = Gauge(
            "vllm:kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1", LABELS, registry=registry
        )
        self._cache_config = Gauge(
            "vllm:cache_config_info",
            "KV pool of a model",
            (*LABELS, "block_size", "num_gpu_blocks"),
            registry=registry,
        )
        self._prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens", LABELS, registry=registry)
        self._generation_tokens = Counter("vllm:generation_tokens", "Tokens generated", LABELS, registry=registry)
        self._cached_tokens = Counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", LABELS, registry=registry
        )
        self._queried_tokens = Counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", LABELS, registry=registry
        )
        self._preemptions = Counter("vllm:num_preemptions", "Preemptions", ("engine",), registry=registry)
        self._num_preemptions = 0
        self._success = Counter(
            "vllm:request_success",
            "Requests ended, by reason",
            (*LABELS, "finished_reason", "class"),
            registry=registry,
        )

        def latency(name: str, text: str) -> Histogram:
            return Histogram(name, text, CLASS_LABELS, registry=registry, buckets=LATENCY_BUCKETS)

        self._ttft = latency("vllm:time_to_first_token_seconds", "Arrival on the instance to the first token")
        self._queue = latency("vllm:request_queue_time_seconds", "Arrival on the instance to the first step")
        self._prefill = latency("vllm:request_prefill_time_seconds", "First step to first token")
        self._decode = latency("vllm:request_decode_time_seconds", "First token to last")
        self._e2e = latency("vllm:e2e_request_latency_seconds", "Arrival on the instance to the end")
        self._tpot = latency("vllm:request_time_per_output_token_seconds", "Mean over a request's decode")
        self._itl = WeightedHistogram(
            "vllm:inter_token_latency_seconds", "Duration of a step, once per decoding sequence", CLASS_LABELS, registry
        )
        self._iteration_tokens = Histogram(
            "vllm:iteration_tokens_total", "Tokens in a step", LABELS, registry=registry, buckets=TOKEN_BUCKETS
        )
        self._step_seconds = Histogram(
            "tideway_instance_step_seconds", "Duration of a step", LABELS, registry=registry, buckets=LATENCY_BUCKETS
        )

    def set_model(self, model: str, page_tokens: int, num_slots: int) -> None:
        self._cache_config.labels(model, self._engine, str(page_tokens), str(num_slots)).set(1)
        for gauge in (self._running, self._waiting, self._kv_usage):
            gauge.labels(model, self._engine).set(0)

    def remove_model(self, model: str, page_tokens: int, num_slots: int) -> None:
        self._cache_config.remove(model, self._engine, str(page_tokens), str(num_slots))
        for gauge in (self._running, self._waiting, self._kv_usage):
            gauge.remove(model, self._engine)

    def on_step(self, stats: StepStats) -> None:
        model, engine = stats.model, self._engine
        if stats.is_suspended:
            return
        self.coserving.on_step(model, stats.duration_s, stats.limit_s)
        self._iteration_tokens.labels(model, engine).observe(stats.num_tokens)
        self._step_seconds.labels(model, engine).observe(stats.duration_s)
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
        model, engine, klass = request.model, self._engine, str(request.request_class)
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

    def on_moved_away(self, model: str, num_new: int) -> None:
        """A request left for another instance after `num_new` tokens of here; all else is counted where it ends."""
        self._generation_tokens.labels(model, self._engine).inc(num_new)

    def trace_ended(self, ended: Ended, clock: Callable[[], float]) -> None:
        """Spans of a request's time on the instance, made when it has ended: never one per token."""
        request = ended.request
        if not request.traceparent:
            return
        offset_ns = time.time_ns() - int(clock() * 1e9)

        def wall_ns(at_s: float) -> int:
            return offset_ns + int(at_s * 1e9)

        root = self._tracer.start_span(
            "instance",
            context=context_of(request.traceparent),
            start_time=wall_ns(ended.submitted_s),
            attributes={
                "tideway.instance_id": self._engine,
                "tideway.request_id": request.request_id,
                "tideway.epoch": request.epoch,
                "gen_ai.request.model": request.model,
                "gen_ai.usage.input_tokens": ended.num_prompt_tokens,
                "gen_ai.usage.output_tokens": ended.num_output_tokens,
                "gen_ai.usage.cache_read.input_tokens": ended.num_cached_tokens,
                "gen_ai.response.finish_reasons": [str(ended.reason)],
                "tideway.request_class": str(request.request_class),
                "tideway.num_preemptions": ended.num_preemptions,
                "tideway.num_suspended_steps": ended.num_suspensions,
                "tideway.num_recomputed_tokens": ended.recomputed_tokens,
                "tideway.num_restored_blocks": ended.restored_blocks,
                "tideway.device_s": ended.device_s,
                "tideway.ttft_objective_s": ended.ttft_objective_s,
                "tideway.tpot_objective_s": ended.tpot_objective_s,
            },
        )
        if ended.reason == FinishReason.ERROR:
            root.set_status(trace.StatusCode.ERROR)
        context = trace.set_span_in_context(root)
        stages = (
            ("instance queue", ended.submitted_s, ended.first_planned_s),
            ("prefill", ended.first_planned_s, ended.first_token_s),
            ("decode", ended.first_token_s, ended.ended_s),
        )
        for name, start_s, end_s in stages:
            if start_s is None:
                continue
            span = self._tracer.start_span(name, context=context, start_time=wall_ns(start_s))
            span.end(wall_ns(end_s if end_s is not None else ended.ended_s))
        root.end(wall_ns(ended.ended_s))
