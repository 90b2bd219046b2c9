"""Metrics of offline work beside online work on one instance: preemptions and interruptions, checkpoints, harvest, and
whether objectives were met."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.costs.model import CostSource, KnownCosts
from shared.engine.counters import EngineCounters
from shared.engine.requests import Ended
from shared.messages.requests import GenerationRequest, RequestClass
from shared.policies.speculation import GateState

BUDGET_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)


class CoServingTelemetry:
    def __init__(self, instance_id: str, registry: CollectorRegistry) -> None:
        self._engine = instance_id
        self._seen: dict[tuple[str, ...], float] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tideway_instance_{name}", text, ("engine", *labels), registry=registry)

        self._preemptions = counter("preemptions", "Sequences that lost their KV blocks", "cause", "mode")
        self._interrupted_steps = counter(
            "interrupted_steps", "Steps stopped at a safepoint, by what came of it", "event"
        )
        self._bytes = {
            kind: counter(kind, text, "model_name")
            for kind, text in (
                ("checkpointed_bytes", "KV blocks copied to host memory"),
                ("restored_bytes", "KV blocks copied back from host memory"),
                ("dropped_checkpoint_bytes", "Checkpoints given up because host memory was full"),
                ("moved_bytes", "KV blocks moved within the pool, so that another model could have a merged block"),
                ("offloaded_bytes", "KV blocks of ended requests copied to host memory"),
                ("disk_written_bytes", "KV blocks that went on from host memory to disk"),
                ("disk_read_bytes", "KV blocks that came back from disk"),
                ("disk_unreadable_bytes", "KV blocks that were not on disk any more, or damaged"),
            )
        }
        self._freed_merged = counter("freed_merged_blocks", "Merged blocks of the KV pool that moves within it freed")
        self._recomputed = counter("recomputed_tokens", "Computed again, by what of them was lost", "part")
        self._rescued = counter(
            "rescued_tokens", "Known tokens of requests that another instance had lost: KV found here, or computed again",
            "outcome",
        )  # fmt: skip
        self._cached = counter(
            "cached_tokens", "Tokens of prompts that were not computed, by the tier that had them", "tier"
        )
        self._computed = counter(
            "computed_tokens", "Prompt and output tokens computed; offline ones are harvest", "class"
        )
        self._tenant_tokens = counter(
            "tenant_tokens", "Tokens computed, by tenant and phase (prefill, decode)", "tenant", "phase"
        )
        self._tenant_service = counter(
            "tenant_service_seconds", "Time of steps divided over the tenants in them, by which they share", "tenant"
        )
        self._unserved = counter(
            "unserved_requests", "Offline requests given up because online work left them no turn", "model_name"
        )
        self._without_token = counter(
            "not_finite_requests", "Requests that ended since the logits were NaN or infinite", "model_name"
        )
        self._slo = counter(
            "slo", "Requests by whether they met their objective", "model_name", "class", "objective", "outcome"
        )
        self._guesses = {
            name: Counter(name, text, ("engine", "model_name"), registry=registry)
            for name, text in (
                ("vllm:spec_decode_num_drafts", "How often tokens of a sequence were guessed in a step"),
                ("vllm:spec_decode_num_draft_tokens", "Tokens guessed"),
                ("vllm:spec_decode_num_accepted_tokens", "Guessed tokens that came true"),
            )
        }
        self._batches: dict[str, set[int]] = {}
        """Sizes of batches of which there are gates, by model."""
        self._speculation = Gauge(
            "tideway_instance_speculation", "Whether the draft model drafts (off, trial, on): 1 for the current state",
            ("model_name", "engine", "batch", "state"), registry=registry,
        )  # fmt: skip
        self._speculation_gain = Gauge(
            "tideway_instance_speculation_gain", "Tokens per second with the draft model over without, as measured",
            ("model_name", "engine", "batch"), registry=registry,
        )  # fmt: skip
        self._host_use = Gauge(
            "tideway_instance_host_pool_use", "Share of the host memory for checkpoints in use, 0 to 1", ("engine",),
            registry=registry,
        )  # fmt: skip
        self._cost_scale = Gauge(
            "tideway_instance_cost_model_scale", "Recent ratio of real to predicted step times", ("model_name", "engine"),
            registry=registry,
        )  # fmt: skip
        self._cost_error = Gauge(
            "tideway_instance_cost_model_error", "Relative error of the cost model on steps it was not fitted to",
            ("model_name", "engine", "percentile"), registry=registry,
        )  # fmt: skip
        self._cost_source = Gauge(
            "tideway_instance_cost_model", "Source of the model's cost model: 1 for the current one, 0 for the others",
            ("model_name", "engine", "source"), registry=registry,
        )  # fmt: skip
        self._budget_use = Histogram(
            "tideway_instance_budget_use", "Step duration as a share of what the objectives allowed",
            ("model_name", "engine"), registry=registry, buckets=BUDGET_BUCKETS,
        )  # fmt: skip

    def on_step(self, model: str, duration_s: float, limit_s: float) -> None:
        """`limit_s`: predicted duration that the step was allowed; inf: any."""
        if math.isfinite(limit_s) and limit_s > 0:
            self._budget_use.labels(model, self._engine).observe(duration_s / limit_s)

    def on_costs(self, model: str, known: KnownCosts) -> None:
        self._cost_scale.labels(model, self._engine).set(known.scale)
        self._cost_error.labels(model, self._engine, "50").set(known.cost_model.median_error)
        self._cost_error.labels(model, self._engine, "99").set(known.cost_model.p99_error)
        for source in CostSource:
            self._cost_source.labels(model, self._engine, str(source)).set(source == known.source)

    def on_speculation(self, model: str, gates: Mapping[int, tuple[GateState, float]]) -> None:
        """`gates`: as of `Engine.speculation`."""
        for most, (state, gain) in gates.items():
            self._batches.setdefault(model, set()).add(most)
            self._speculation_gain.labels(model, self._engine, str(most)).set(gain)
            for one in GateState:
                self._speculation.labels(model, self._engine, str(most), one.value).set(state is one)

    def set_model(self, model: str) -> None:
        """It was loaded: its counters begin at 0, so that rates are known from the first event on."""
        for counter in (*self._bytes.values(), *self._guesses.values(), self._unserved, self._without_token):
            counter.labels(self._engine, model)
        self._budget_use.labels(model, self._engine)
        for request_class, objective, outcome in product(RequestClass, ("ttft", "tpot"), ("met", "missed")):
            self._slo.labels(self._engine, model, str(request_class), objective, outcome)

    def remove_model(self, model: str) -> None:
        """It was unloaded: nothing is known of its steps any more."""
        for most in self._batches.pop(model, ()):
            self._speculation_gain.remove(model, self._engine, str(most))
            for state in GateState:
                self._speculation.remove(model, self._engine, str(most), state.value)
        for gauge, values in (
            (self._cost_scale, [""]),
            (self._cost_error, ["50", "99"]),
            (self._cost_source, list(CostSource)),
        ):
            for value in values:
                with contextlib.suppress(KeyError):
                    gauge.remove(model, self._engine, *filter(None, [str(value)]))

    def on_counters(self, counters: EngineCounters, block_bytes: Mapping[str, int], host_used_share: float) -> None:
        """`counters` may grow meanwhile. `block_bytes`: of the models that are loaded."""
        for cause_and_mode, count in list(counters.preemptions.items()):
            self._advance(self._preemptions, cause_and_mode, count)
        self._advance(self._interrupted_steps, ("suspended",), counters.steps_suspended)
        self._advance(self._interrupted_steps, ("resumed",), counters.steps_resumed)
        self._advance(self._interrupted_steps, ("discarded",), counters.steps_discarded)
        for kind, blocks in (
            ("checkpointed_bytes", counters.checkpointed_blocks),
            ("restored_bytes", counters.restored_blocks),
            ("dropped_checkpoint_bytes", counters.dropped_checkpoint_blocks),
            ("moved_bytes", counters.moved_blocks),
            ("offloaded_bytes", counters.offloaded_blocks),
            ("disk_written_bytes", counters.written_blocks),
            ("disk_read_bytes", counters.read_blocks),
            ("disk_unreadable_bytes", counters.unreadable_blocks),
        ):
            for model, count in list(blocks.items()):
                self._advance(self._bytes[kind], (model,), count, block_bytes.get(model, 0))
        for name, counts in (
            ("vllm:spec_decode_num_drafts", counters.drafts),
            ("vllm:spec_decode_num_draft_tokens", counters.drafted_tokens),
            ("vllm:spec_decode_num_accepted_tokens", counters.accepted_tokens),
        ):
            for model, count in list(counts.items()):
                self._advance(self._guesses[name], (model,), count)
        for model, count in list(counters.unserved.items()):
            self._advance(self._unserved, (model,), count)
        for model, count in list(counters.without_token.items()):
            self._advance(self._without_token, (model,), count)
        self._advance(self._freed_merged, (), counters.freed_merged)
        partial = counters.recomputed_partial_tokens
        self._advance(self._recomputed, ("partial_block",), partial)
        self._advance(self._recomputed, ("whole_block",), counters.recomputed_tokens - partial)
        self._advance(self._recomputed, ("discarded_step",), counters.discarded_tokens)
        for tier in ("device", "host", "disk"):
            self._advance(self._cached, (tier,), counters.cached_tokens[tier])
        for outcome in ("kept", "recomputed"):
            self._advance(self._rescued, (outcome,), counters.rescued_tokens[outcome])
        self._advance(self._computed, (str(RequestClass.ONLINE),), counters.online_tokens)
        self._advance(self._computed, (str(RequestClass.OFFLINE),), counters.harvested_tokens)
        for label_and_phase, count in list(counters.tenant_tokens.items()):
            self._advance(self._tenant_tokens, label_and_phase, count)
        for label, service_s in list(counters.tenant_service_s.items()):
            self._advance(self._tenant_service, (label,), service_s)
        self._host_use.labels(self._engine).set(host_used_share)

    def _advance(self, counter: Counter, labels: tuple[str, ...], count: float, unit: int = 1) -> None:
        key = (counter._name, *labels)
        counter.labels(self._engine, *labels).inc(max(0, count - self._seen.get(key, 0)) * unit)
        self._seen[key] = count

    def on_ended(self, ended: Ended) -> None:
        """Counts an end as the client saw it, wherever its tokens were made."""
        for objective, is_met in zip(("ttft", "tpot"), ended.objectives_met(), strict=True):
            if is_met is not None:
                self._count_slo(ended.request, objective, is_met)

    def _count_slo(self, request: GenerationRequest, objective: str, is_met: bool) -> None:
        outcome = "met" if is_met else "missed"
        self._slo.labels(self._engine, request.public_model, str(request.request_class), objective, outcome).inc()
