"""Prometheus metrics of the gateway. Labels are bounded: `model` is a served model's name, `class` online, offline
or mirror, `outcome` one of `OUTCOMES`, `tenant` as tenant_labels.py says. Durations are seconds from the arrival of the
HTTP request unless said otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric

from shared.messages.requests import RequestClass
from shared.policies.tenant_labels import TenantLabels

OUTCOMES = ("ok", "invalid", "refused", "overloaded", "deadline", "disconnected", "failed")
"""invalid: 4xx for what was asked; refused: 401, 403; overloaded: 429; failed: 5xx or an error in the stream."""

FINISH_REASONS = ("stop", "length", "tool_calls")

CONNECTION_REFUSALS = (
    "bad_http", "head_too_large", "too_many_headers", "uri_too_long", "slow_head", "slow_body", "slow_reader",
    "too_many_connections",
)  # fmt: skip
TEXT_ENDS = ("time", "memory", "cancelled", "failed")

LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 30.0, 60.0, 120.0, 600.0)
TENANT_BUCKETS = (0.02, 0.1, 0.5, 1.0, 2.5, 10.0, 60.0)
LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
"""Tokens, as vLLM's."""
CHOICE_BUCKETS = (1, 2, 5, 10, 20)
TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
# OpenTelemetry's GenAI conventions advise these for the gen_ai.server.* histograms.
GEN_AI_DURATION_BUCKETS = tuple(0.01 * 2**k for k in range(14))
GEN_AI_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
GEN_AI_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CallMetrics:
    """The children of the latency metrics for one model and class: looked up once a call, not once a token."""

    first_token: Histogram
    inter_token: Histogram
    max_inter_token: Histogram
    duration: Histogram
    queue: Histogram
    prompt_tokens: Counter
    output_tokens: Counter
    gen_ai_duration: Histogram
    gen_ai_first_token: Histogram
    gen_ai_per_token: Histogram
    prompt_lengths: Histogram
    output_lengths: Histogram
    longest_outputs: Histogram
    max_tokens: Histogram
    num_choices: Histogram
    prefill: Histogram
    decode: Histogram
    inference: Histogram
    per_token: Histogram
    finished: dict[str, Counter]


@dataclass(frozen=True)
class TenantMetrics:
    """What is counted of a tenant at the end of each of its requests."""

    label: str
    requests: Counter
    tokens: Counter
    first_token: Histogram

    def count(self, outcome: str) -> None:
        self.requests.labels(self.label, outcome).inc()

    def measure(self, num_prompt: int, num_output: int, ttft_s: float | None) -> None:
        """`ttft_s` None: no token came."""
        self.tokens.labels(self.label, "input").inc(num_prompt)
        self.tokens.labels(self.label, "output").inc(num_output)
        if ttft_s is not None:
            self.first_token.labels(self.label).observe(ttft_s)


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry, tenants: Iterable[str] = ()) -> None:
        """`tenants`: those that have labels of their own in any case."""

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter("tideway_gateway_" + name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge("tideway_gateway_" + name, text, labels, registry=registry)

        both = ("model", "class")

        def of_model(name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS) -> Histogram:
            return Histogram("tideway_gateway_" + name, text, both, buckets=buckets, registry=registry)

        def gen_ai(name: str, buckets: tuple[float, ...]) -> Histogram:
            """`name`: OpenTelemetry's, after `gen_ai.server`."""
            labels = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "class")
            full_name = f"gen_ai_server_{name.replace('.', '_')}_seconds"
            return Histogram(full_name, f"gen_ai.server.{name}", labels, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Generation requests ended, by outcome", "model", "class", "outcome")
        self.route_requests = counter(
            "route_requests",
            "Requests of routes ended, by the model that answered, as what (arm, fallback, mirror) and how",
            "route",
            "model",
            "role",
            "outcome",
        )
        self.stored_responses = counter(
            "stored_responses",
            "Responses to be kept, by what came of it (stored, too_large, failed, deleted)",
            "outcome",
        )
        self.in_flight = gauge("in_flight_requests", "HTTP generation requests in flight", "class")
        self.open_streams = gauge("open_streams", "Sequences being generated for clients")
        self.structured_requests = counter(
            "structured_requests", "Requests whose output follows a grammar, by what asks for it", "model", "kind"
        )
        self.ignored_fields = counter("ignored_fields", "Fields of requests and keywords of schemas that had no effect")
        self.kept_calls = gauge("kept_calls", "Calls here that may be resumed and have not ended")
        self.background_responses = gauge(
            "background_responses", "Responses in the background that are being made here"
        )
        self.kept_call_ends = counter(
            "kept_call_ends",
            "Such calls that ended here, by how (stored, too_large, failed, given_up, cancelled, superseded)",
            "outcome",
        )
        self.resumed_calls = counter(
            "resumed_calls",
            "Connections that read a call that another one began, by where it was (here, elsewhere, stored) or why none "
            "is (not_found, expired)",
            "outcome",
        )
        self.copied_records = counter(
            "copied_records",
            "Calls whose records went to the other gateways, as JetStream did not take them, by what came of it (copied, "
            "joined: another one has their idempotency key, stored: JetStream took it after all, refused)",
            "outcome",
        )
        self.disconnects = counter("disconnected_clients", "Clients that went away before the end")
        self.replacements = counter("replacements", "Requests placed again after their owner was lost", "reason")
        self.moved_streams = counter("moved_streams", "Times that a sequence was handed from instance to instance")
        self.replays = counter("replays", "Replay queries sent to instances", "reason")
        self.bypassed = counter("bypass_placements", "Requests placed on an instance without a scheduler")
        self.cold_starts = counter(
            "cold_starts", "Calls that came while their model was put away, by where it was: host, disk, loading, failed",
            "model", "state",
        )  # fmt: skip
        self.dropped_entries = counter("dropped_entries", "Token entries not taken, by reason", "reason")
        self.storage_writable = gauge("storage_writable", "0 while NATS cannot write to its disk, else 1")
        self.storage_writable.set(1)
        self.files_lost = gauge("files_lost", "Files whose content NATS has lost, at the last hourly look")
        self.batches = gauge("batches", "Batches of the cluster by status (every gateway shows all)", "status")
        self.batch_lines = counter("batch_lines", "Batch lines ended here, by result", "result")
        self.batch_retries = counter("batch_line_retries", "Failures of batch lines that were tried again", "reason")
        self.batch_lines_in_flight = gauge("batch_lines_in_flight", "Batch lines being generated for this gateway")
        self.connections = gauge("connections", "Open HTTP connections")
        self.refused_connections = counter(
            "refused_connections", "Connections ended for breaking a limit of HTTP, by the limit", "reason"
        )
        for reason in CONNECTION_REFUSALS:
            self.refused_connections.labels(reason)
        self.text_characters = gauge("text_characters", "Of texts that are rendered or tokenised, or wait for it")
        self.killed_text_processes = counter(
            "killed_text_processes", "Ends of processes at a text, by reason", "reason"
        )
        for reason in TEXT_ENDS:
            self.killed_text_processes.labels(reason)
        self.waiting_submissions = gauge("waiting_submissions", "Requests that wait for their turn to be submitted")
        self.key_reloads = counter("key_reloads", "Times that changed files of keys were read, or refused", "outcome")
        self.key_claims = counter(
            "key_claims", "Claims on limits of API keys, decided by what all gateways use (shared) or here alone", "by"
        )
        self.key_use_conflicts = counter(
            "key_use_conflicts", "Writes of an API key's use that another gateway came before"
        )
        self.admin_refusals = counter(
            "admin_refusals", "Tries to change something by the admin API without a key for it"
        )
        self._tenant_labels = TenantLabels(tenants)
        self._tenant_requests = counter(
            "tenant_requests", "Generation requests ended, by tenant and outcome", "tenant", "outcome"
        )
        self._tenant_tokens = counter(
            "tenant_tokens", "Tokens of prompts and answers, by tenant", "tenant", "direction"
        )
        self._tenant_first_token = Histogram(
            "tideway_gateway_tenant_time_to_first_token_seconds", "Arrival to first token, by tenant", ("tenant",),
            buckets=TENANT_BUCKETS, registry=registry,
        )  # fmt: skip
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests", *both)
        self._output_tokens = counter("output_tokens", "Tokens delivered", *both)
        self._first_token = of_model("time_to_first_token_seconds", "Arrival to first token")
        self._inter_token = of_model("inter_token_latency_seconds", "Between tokens of one sequence", TOKEN_BUCKETS)
        self._max_inter_token = of_model(
            "max_inter_token_latency_seconds", "Longest time between tokens of a sequence, once each"
        )
        self._duration = of_model("request_duration_seconds", "Arrival to last token")
        self._queue = of_model("queue_time_seconds", "Submission to the start of prefill")
        self._prompt_lengths = of_model("request_prompt_tokens", "Prompt tokens of a request", LENGTH_BUCKETS)
        self._output_lengths = of_model("request_output_tokens", "Tokens of a sequence", LENGTH_BUCKETS)
        self._longest_outputs = of_model("request_max_output_tokens", "Longest sequence of a request", LENGTH_BUCKETS)
        self._max_tokens = of_model("request_max_tokens", "Tokens that might have come", LENGTH_BUCKETS)
        self._num_choices = of_model("request_n", "Choices that were asked for", CHOICE_BUCKETS)
        self._prefill = of_model("prefill_time_seconds", "First step to first token")
        self._decode = of_model("decode_time_seconds", "First token to last")
        self._inference = of_model("inference_time_seconds", "First step to last token")
        self._per_token = of_model("time_per_output_token_seconds", "Mean after a sequence's first", TOKEN_BUCKETS)
        self.finished = counter("finished_sequences", "Sequences that ended, by reason", *both, "reason")
        self._gen_ai_duration = gen_ai("request.duration", GEN_AI_DURATION_BUCKETS)
        self._gen_ai_first_token = gen_ai("time_to_first_token", GEN_AI_FIRST_TOKEN_BUCKETS)
        self._gen_ai_per_token = gen_ai("time_per_output_token", GEN_AI_TOKEN_BUCKETS)
        self._calls: dict[tuple[str, str, str], CallMetrics] = {}
        for request_class in RequestClass:
            self.in_flight.labels(request_class.value)

    def of_tenant(self, tenant: str) -> TenantMetrics:
        """`tenant`: as it is shown."""
        label = self._tenant_labels.of(tenant)
        return TenantMetrics(label, self._tenant_requests, self._tenant_tokens, self._tenant_first_token)

    def as_vllm(self) -> Iterator[tuple[str, Metric]]:
        """Families of vLLM's metrics that mean the same, by the names there."""
        for name, collector in (
            ("vllm:time_to_first_token_seconds", self._first_token),
            ("vllm:inter_token_latency_seconds", self._inter_token),
            ("vllm:e2e_request_latency_seconds", self._duration),
            ("vllm:request_queue_time_seconds", self._queue),
            ("vllm:request_prefill_time_seconds", self._prefill),
            ("vllm:request_decode_time_seconds", self._decode),
            ("vllm:request_inference_time_seconds", self._inference),
            ("vllm:request_time_per_output_token_seconds", self._per_token),
            ("vllm:request_prompt_tokens", self._prompt_lengths),
            ("vllm:request_generation_tokens", self._output_lengths),
            ("vllm:request_max_num_generation_tokens", self._longest_outputs),
            ("vllm:request_params_max_tokens", self._max_tokens),
            ("vllm:request_params_n", self._num_choices),
            ("vllm:request_success", self.finished),
            ("vllm:prompt_tokens", self._prompt_tokens),
            ("vllm:generation_tokens", self._output_tokens),
        ):
            for family in collector.collect():
                yield name, family

    def of_call(self, operation: str, model: str, class_label: str) -> CallMetrics:
        """`class_label`: online, offline, or mirror."""
        key = (operation, model, class_label)
        if (found := self._calls.get(key)) is None:
            both = (model, class_label)
            gen_ai = (operation, "tideway", model, class_label)
            found = self._calls[key] = CallMetrics(
                first_token=self._first_token.labels(*both),
                inter_token=self._inter_token.labels(*both),
                max_inter_token=self._max_inter_token.labels(*both),
                duration=self._duration.labels(*both),
                queue=self._queue.labels(*both),
                prompt_tokens=self._prompt_tokens.labels(*both),
                output_tokens=self._output_tokens.labels(*both),
                gen_ai_duration=self._gen_ai_duration.labels(*gen_ai),
                gen_ai_first_token=self._gen_ai_first_token.labels(*gen_ai),
                gen_ai_per_token=self._gen_ai_per_token.labels(*gen_ai),
                prompt_lengths=self._prompt_lengths.labels(*both),
                output_lengths=self._output_lengths.labels(*both),
                longest_outputs=self._longest_outputs.labels(*both),
                max_tokens=self._max_tokens.labels(*both),
                num_choices=self._num_choices.labels(*both),
                prefill=self._prefill.labels(*both),
                decode=self._decode.labels(*both),
                inference=self._inference.labels(*both),
                per_token=self._per_token.labels(*both),
                finished={reason: self.finished.labels(*both, reason) for reason in FINISH_REASONS},
            )
        return found
