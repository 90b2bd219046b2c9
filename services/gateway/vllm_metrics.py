"""The gateway's numbers under vLLM's names, for benchmark clients that read `/metrics` of the address they send load to.

Only the API's own `/metrics` has them: instances serve the same names, and Prometheus, which scrapes those and the
gateway's metrics port, would count everything twice.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.gateway.metrics import GatewayMetrics
from shared.messages.admin import InstanceState
from shared.runtime.telemetry import metrics_text


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def vllm_text(metrics: GatewayMetrics, instances: list[InstanceState], models: Iterable[str]) -> bytes:
    """Counters and histograms of what went through this gateway; gauges of the whole cluster, of which
    `kv_cache_usage_perc` is the mean over the instances that have the model."""
    registry = CollectorRegistry()
    registry.register(_Families([*(_renamed(*each) for each in metrics.as_vllm()), *_gauges(instances, models)]))
    return metrics_text(registry)


_LABELS = {"model": "model_name", "reason": "finished_reason"}
"""vLLM's names of our labels."""


def _renamed(name: str, family: Metric) -> Metric:
    """Renames labels: `model_name` for `model`, as vLLM calls it."""
    renamed = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
        renamed.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
    return renamed


def _gauges(instances: list[InstanceState], models: Iterable[str]) -> list[Metric]:
    running = GaugeMetricFamily("vllm:num_requests_running", "Sequences in batches", labels=["model_name"])
    waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Sequences waiting on instances", labels=["model_name"])
    by_reason = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason",
        "Sequences waiting on instances, for room",
        labels=["model_name", "reason"],
    )
    usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV pools in use, 0 to 1", labels=["model_name"])
    for name in models:
        found = [(model, instance.load) for instance in instances for model in instance.models if model.name == name]
        running.add_metric([name], sum(model.num_running for model, _ in found))
        waiting.add_metric([name], sum(model.num_waiting for model, _ in found))
        by_reason.add_metric([name, "capacity"], sum(model.num_waiting for model, _ in found))
        uses = [load.pool_use for _, load in found if load is not None and load.pool_use is not None]
        if uses:
            usage.add_metric([name], sum(uses) / len(uses))
    return [running, waiting, by_reason, usage]
