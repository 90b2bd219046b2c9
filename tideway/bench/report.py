"""A run as JSON, and its figures as a table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from tideway.bench.records import RequestRecord
from tideway.bench.runner import Lateness
from tideway.bench.server_metrics import Series
from tideway.bench.summary import ALL, Attainment, Distribution, Summary

RESULT_VERSION = 1


class Result(msgspec.Struct, kw_only=True):
    """All that a run was asked to do and did. Without `records` the figures stand, and plots cannot be made again."""

    version: int = RESULT_VERSION
    created: str
    """UTC, ISO 8601."""
    machine: dict[str, Any]
    """Machine of the client."""
    target: dict[str, Any]
    workload: dict[str, Any]
    """Workload as given, with its seed: the same again plans the same requests."""
    num_planned: int
    lateness: Lateness
    summary: Summary
    tokens_per_word: dict[str, tuple[float, float]] = {}
    """Per model (base, slope) as calibrated: with them the prompts' texts are the same again."""
    was_interrupted: bool = False
    series: dict[str, Series] = {}
    """Series of the server's metrics."""
    records: list[RequestRecord] = []


def write_result(result: Result, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def table(summary: Summary, title: str = "") -> Table:
    """A row a figure, a column a group; sums over a single group are left out."""
    shown = Table(title=title or None, title_justify="left")
    shown.add_column("", no_wrap=True)
    models = Counter(group.request_class for group in summary.groups if group.model != ALL)
    groups = [
        group
        for group in summary.groups
        if group.model != ALL or (len(models) > 1 if group.request_class == ALL else models[group.request_class] > 1)
    ]
    for group in groups:
        shown.add_column(f"{group.request_class}\n{group.model}", justify="right", overflow="fold")
    has_objective = any(group.attainment != Attainment() for group in groups)

    def row(name: str, values: list[str]) -> None:
        if any(value not in ("", "-") for value in values):
            shown.add_row(name, *values)

    row("requests", [str(group.num_requests) for group in groups])
    row("  succeeded", [str(group.num_succeeded) for group in groups])
    row("  unfinished at the end", [str(group.num_unfinished or "-") for group in groups])
    for reason in sorted({reason for group in groups for reason in group.failures}):
        row(f"  failed: {reason}", [str(group.failures.get(reason, "-")) for group in groups])
    row("mean prompt tokens", [f"{group.mean_prompt_tokens:.0f}" for group in groups])
    row("mean output tokens", [f"{group.mean_output_tokens:.0f}" for group in groups])
    shown.add_section()
    for name, field in (
        ("TTFT", "ttft_s"),
        ("TPOT", "tpot_s"),
        ("ITL", "itl_s"),
        ("E2E", "latency_s"),
        ("E2E per token", "normalized_latency_s"),
    ):
        row(f"{name}, ms: mean", [_ms(getattr(group, field), "mean") for group in groups])
        for percentile in ("p50", "p90", "p99"):
            row(f"  {percentile.upper()}", [_ms(getattr(group, field), percentile) for group in groups])
    row("max ITL, ms: median request", [_ms(group.max_itl_s, "p50") for group in groups])
    row("  worst request", [_ms(group.max_itl_s, "max") for group in groups])
    shown.add_section()
    row("SLO attainment: TTFT", [_percent(group.attainment.ttft) for group in groups])
    row("  TPOT", [_percent(group.attainment.tpot) for group in groups])
    row("  both", [_percent(group.attainment.both) for group in groups])
    row("requests per s", [f"{group.requests_per_s:.3f}" for group in groups])
    if has_objective:
        row("  within the SLO", [f"{group.goodput_rps:.3f}" for group in groups])
    row("prompt tokens per s", [f"{group.prompt_tokens_per_s:.1f}" for group in groups])
    row("output tokens per s", [f"{group.output_tokens_per_s:.1f}" for group in groups])
    if has_objective:
        row("  within the SLO", [f"{group.goodput_tokens_per_s:.1f}" for group in groups])
    return shown


def _ms(distribution: Distribution, name: str) -> str:
    return f"{getattr(distribution, name) * 1000:.1f}" if distribution.num else "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f} %"


def lateness_sentence(lateness: Lateness, ttft_p50_s: float) -> str:
    text = (
        f"Client: {lateness.num_sent} open-loop requests sent late by {lateness.send_p50_s * 1000:.1f} ms (median), "
        f"{lateness.send_p99_s * 1000:.1f} (P99), {lateness.send_max_s * 1000:.1f} (most); "
        f"its event loop by {lateness.loop_p99_s * 1000:.1f} ms (P99)."
    )
    if max(lateness.send_p99_s, lateness.loop_p99_s) > max(0.005, 0.1 * ttft_p50_s):
        text += " That is not small: latencies are partly the client's own. Give it a machine of its own, or less load."
    return text
