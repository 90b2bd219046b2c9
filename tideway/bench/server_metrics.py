"""A server's own /metrics during a run, as time series. A server without /metrics is no error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tideway.bench.client import Connections

SCRAPE_INTERVAL_S = 1.0
SCRAPE_TIMEOUT_S = 2.0
PREFIXES = ("tideway_", "vllm:")
KEPT_LABELS = ("class", "kind", "phase", "cause", "mode", "model", "model_name")
"""What a series is split by; the rest, an instance's name for one, is summed over."""

Series = list[tuple[float, float]]
"""(seconds since the start of the run, value)"""


def parse(text: str) -> dict[str, float]:
    """Gauges and counters of a model server, summed over all labels but the kept; counters' names end in _total.
    Raises `ValueError` for what is not Prometheus' text format."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.type not in ("gauge", "counter") or not family.name.startswith(PREFIXES):
            continue
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = [f"{name}={sample.labels[name]}" for name in KEPT_LABELS if sample.labels.get(name)]
            key = sample.name + (f"{{{', '.join(labels)}}}" if labels else "")
            values[key] = values.get(key, 0.0) + sample.value
    return values


async def collect(
    connections: Connections, urls: list[str], now: Callable[[], float], series: dict[str, Series]
) -> None:
    """Adds to `series` each second until it is cancelled. Addresses that do not answer with metrics are left out."""
    while True:
        at_s = now()
        totals: dict[str, float] = {}
        for text in await asyncio.gather(*(_fetch(connections, url) for url in urls)):
            # Parsing a long text would hold up the event loop that takes the answers' times.
            for key, value in (await asyncio.to_thread(_parse_or_nothing, text)).items():
                totals[key] = totals.get(key, 0.0) + value
        for key, value in totals.items():
            series.setdefault(key, []).append((at_s, value))
        await asyncio.sleep(max(0.0, at_s + SCRAPE_INTERVAL_S - now()))


async def _fetch(connections: Connections, url: str) -> str:
    try:
        async with asyncio.timeout(SCRAPE_TIMEOUT_S), connections.take() as client:
            response = await client.get(url)
        return response.text if response.status_code == 200 else ""
    except (httpx.HTTPError, TimeoutError):
        return ""


def _parse_or_nothing(text: str) -> dict[str, float]:
    try:
        return parse(text)
    except ValueError:
        return {}
