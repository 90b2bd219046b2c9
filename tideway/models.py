"""`tideway models`: each model's traffic, as the service monitor counts it, from the gateway's admin API."""

from __future__ import annotations

from pathlib import PurePath

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shared.messages.admin import AdapterState, ModelState
from shared.messages.traffic import MeanStd, ModelSummary
from tideway.console import LOOK, SLO_TOLD, show_listing, turned
from tideway.operations import AdminClient

LEAST_WANTED = (
    "max ITL\nP50",
    "TPOT\nmean",
    "TTFT\nP99",
    "refused",
    "latency\nP50",
    "max ITL\nP99",
    "waits",
    "output\ntokens",
    "prompt\ntokens",
    "latency\nmean",
)
"""Columns that give way to long names of models."""


def show_models(client: AdminClient, console: Console, *, interval_s: int, as_json: bool) -> None:
    """Raises `OperatorError`."""
    states = client.models(interval_s)
    table = Table(
        "model", "class", "req/s", "refused", "prompt\ntokens", "output\ntokens", "execution", "latency\nmean",
        "latency\nP50", "latency\nP99", "TTFT\nP99", "TPOT\nmean",
        "max ITL\nP50", "max ITL\nP99", "SLO", "within\nSLO", "waits", title=f"Models in the last {interval_s} s", **LOOK,
    )  # fmt: skip
    shown: list[ModelState | AdapterState] = [*states.models, *states.adapters]
    for state in shown:
        for row in _rows(state):
            table.add_row(*row)
    table = turned(table, console)
    show_listing(console, states, table, as_json=as_json, least_wanted=LEAST_WANTED)
    if not as_json and any(state.traffic is not None and state.traffic.online.num_finished for state in shown):
        console.print(SLO_TOLD)
    if not as_json and any(state.traffic is None for state in shown):
        console.print("Of some the traffic is not known: no placement answers, or it does not know them yet.")


def _rows(state: ModelState | AdapterState) -> list[list[str]]:
    """Offline requests in a row of their own, if there were any."""
    if isinstance(state, AdapterState):
        waits, note = "", f"on {state.base}"  # its requests wait as its base model's
    else:
        waits, note = (
            str(state.num_waiting + (state.num_queued or 0)),
            ", ".join(filter(None, (state.quantization, f"draft {PurePath(state.draft).name}" if state.draft else ""))),
        )
    if state.traffic is None:
        return [[escape(state.name), *["?"] * 15, waits]]
    name = escape(f"{state.name} ({note})" if note else state.name)
    rows = [[name, "online", *_cells(state.traffic.online), waits]]
    offline = state.traffic.offline
    if offline.num_arrived or offline.num_finished:
        rows.append(["", "offline", *_cells(offline), ""])
    return rows


def _cells(summary: ModelSummary) -> list[str]:
    def seconds(value: float) -> str:
        if not summary.num_finished:
            return "-"
        return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"

    def spread(values: MeanStd) -> str:
        return f"{values.mean:.0f}±{values.std:.0f}" if values.mean else "-"

    return [
        f"{summary.arrivals_per_s:.3g}",
        str(summary.num_refused),
        spread(summary.prompt_tokens),
        spread(summary.output_tokens),
        seconds(summary.execution_s.mean),
        seconds(summary.latency_s.mean),
        seconds(summary.latency_s.p50),
        seconds(summary.latency_s.p99),
        seconds(summary.ttft_s.p99),
        seconds(summary.tpot_s.mean),
        seconds(summary.max_itl_s.p50),
        seconds(summary.max_itl_s.p99),
        f"{summary.slo_s:.3g} s" if summary.slo_s else "-",
        "-" if summary.attainment is None else f"{summary.attainment:.1%}",
    ]
