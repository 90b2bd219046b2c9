"""Metrics of what grammars cost on an instance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily

from services.worker.executor.grammars import Compiled, GrammarCounters


@runtime_checkable
class FollowsGrammars(Protocol):
    """An executor that does."""

    @property
    def grammar_counters(self) -> GrammarCounters: ...

    def compile_grammar(self, model: str, grammar: str) -> Compiled:
        """Begins to, beside the steps. From any thread; it may block for a moment."""


class GrammarTelemetry:
    """A collector of Prometheus'."""

    def __init__(self, instance_id: str, registry: CollectorRegistry, counters: GrammarCounters) -> None:
        """`counters`: they go on growing."""
        self._engine = instance_id
        self._counters = counters
        registry.register(self)

    def collect(self) -> Iterable[CounterMetricFamily]:
        counters = self._counters
        for name, text, value in (
            ("grammars_compiled", "Grammars that were compiled", counters.compiled),
            ("grammar_compile_seconds", "Time that took, beside the steps", counters.compile_s),
            ("grammar_cache_hits", "Rows that found their grammar compiled, or begun", counters.cached),
            ("grammar_masks", "Masks made, one a token of a structured output", counters.masks),
            ("grammar_mask_seconds", "Time that took, beside the steps", counters.mask_s),
            ("grammar_wait_seconds", "Time that steps waited for masks", counters.wait_s),
            ("grammar_replayed_tokens", "Output that matchers were brought through again", counters.replayed_tokens),
            ("grammar_failures", "Requests that ended because their grammar could not be followed", counters.failures),
        ):
            family = CounterMetricFamily(f"tideway_instance_{name}", text, labels=["engine"])
            family.add_metric([self._engine], value)
            yield family
