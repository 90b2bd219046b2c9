"""What the turns say: figures of each variant, and the targets of vLLM hosted by Tideway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench.engines.load import Turn
from bench.reporting import Target, table

STOCK, HOSTED, NATIVE = "vllm serve", "hosted vllm", "native"
PRIORITY = "vllm serve, priority"
"""`vllm serve` that is told which requests are a batch's."""
ALONE = "online alone"
BESIDE = "beside a batch"

LEAST_RATE = 0.98
MOST_TTFT_MS = 10.0
MOST_TTFT_RATIO, MOST_TPOT_RATIO = 1.25, 1.1
"""ConServe's own mark."""
LEAST_HARVEST = 0.85


class Measured(NamedTuple):
    """A turn of a variant in a case."""

    variant: str
    case: str
    turn: Turn


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A variant in a case, all turns together. Latencies in milliseconds; TPOT is a request's mean, ITL each gap between
    two pieces of an answer."""

    variant: str
    case: str
    num_requests: int
    output_tokens_per_s: float
    mean_ttft_ms: float
    p50_ttft_ms: float
    p99_ttft_ms: float
    mean_tpot_ms: float
    p99_tpot_ms: float
    p50_itl_ms: float
    p99_itl_ms: float
    batch_tokens_per_s: float
    others_cores: float


def rows(measured: Sequence[Measured]) -> list[Row]:
    """Rows by case and variant, in the order in which they came first."""
    found: dict[tuple[str, str], list[Turn]] = {}
    for each in measured:
        found.setdefault((each.case, each.variant), []).append(each.turn)
    return [_row(case, variant, turns) for (case, variant), turns in found.items()]


def _row(case: str, variant: str, turns: Sequence[Turn]) -> Row:
    records = [record for turn in turns for record in turn.online]
    ttft_ms = [1e3 * record.ttft_s for record in records if record.ttft_s is not None]
    tpot_ms = [1e3 * record.tpot_s for record in records if record.tpot_s is not None]
    itl_ms = [1e3 * gap_s for record in records for gap_s in record.itl_s] or [0.0]
    duration_s = sum(turn.duration_s for turn in turns)

    def over_time(values: list[float]) -> float:
        return sum(value * turn.duration_s for value, turn in zip(values, turns, strict=True)) / duration_s

    return Row(
        variant=variant,
        case=case,
        num_requests=len(records),
        output_tokens_per_s=over_time([turn.output_tokens_per_s for turn in turns]),
        mean_ttft_ms=float(np.mean(ttft_ms)),
        p50_ttft_ms=float(np.median(ttft_ms)),
        p99_ttft_ms=float(np.percentile(ttft_ms, 99)),
        mean_tpot_ms=float(np.mean(tpot_ms)),
        p99_tpot_ms=float(np.percentile(tpot_ms, 99)),
        p50_itl_ms=float(np.median(itl_ms)),
        p99_itl_ms=float(np.percentile(itl_ms, 99)),
        batch_tokens_per_s=over_time([turn.batch_tokens_per_s for turn in turns]),
        others_cores=over_time([turn.others_cores for turn in turns]),
    )


def targets(rows: Sequence[Row]) -> list[Target]:
    """Targets of hosted vLLM beside `vllm serve`, as far as both were measured."""
    by_key = {(row.case, row.variant): row for row in rows}
    found = []
    for row in rows:
        stock = by_key.get((row.case, STOCK))
        if row.variant != HOSTED or stock is None or row.case in (ALONE, BESIDE):
            continue
        found.append(
            Target(
                name=f"{row.case}: tokens per second over vllm serve's", limit=LEAST_RATE, is_least=True,
                value=row.output_tokens_per_s / stock.output_tokens_per_s,
            )
        )  # fmt: skip
        found.append(
            Target(
                name=f"{row.case}: median TTFT over vllm serve's", limit=MOST_TTFT_MS, unit=" ms",
                value=row.p50_ttft_ms - stock.p50_ttft_ms,
                note=f"{1e3 / row.output_tokens_per_s - 1e3 / stock.output_tokens_per_s:+.3f} ms a token",
            )
        )  # fmt: skip
    alone, beside = by_key.get((ALONE, HOSTED)), by_key.get((BESIDE, HOSTED))
    if alone is None or beside is None:
        return found
    found += [
        Target(
            name="online P99 TTFT beside a batch, times that alone", limit=MOST_TTFT_RATIO,
            value=beside.p99_ttft_ms / alone.p99_ttft_ms,
        ),
        Target(
            name="online P99 TPOT beside a batch, times that alone", limit=MOST_TPOT_RATIO,
            value=beside.p99_tpot_ms / alone.p99_tpot_ms,
        ),
    ]  # fmt: skip
    if (stock := by_key.get((BESIDE, STOCK))) is not None:
        found.append(
            Target(
                name="batch tokens per second over vllm serve's", limit=LEAST_HARVEST, is_least=True,
                value=beside.batch_tokens_per_s / stock.batch_tokens_per_s,
            )
        )  # fmt: skip
    return found


def page(rows: Sequence[Row]) -> list[str]:
    """Lines of Markdown."""
    header = (
        "case", "variant", "requests", "output tok/s", "TTFT ms mean", "P50", "P99", "TPOT ms mean", "P99", "ITL ms P50",
        "P99", "batch tok/s", "others' cores",
    )  # fmt: skip
    return table(
        header,
        [
            (
                row.case, row.variant, row.num_requests, f"{row.output_tokens_per_s:.1f}", f"{row.mean_ttft_ms:.0f}",
                f"{row.p50_ttft_ms:.0f}", f"{row.p99_ttft_ms:.0f}", f"{row.mean_tpot_ms:.1f}", f"{row.p99_tpot_ms:.1f}",
                f"{row.p50_itl_ms:.1f}", f"{row.p99_itl_ms:.1f}",
                f"{row.batch_tokens_per_s:.0f}" if row.batch_tokens_per_s else "", f"{row.others_cores:.2f}",
            )
            for row in rows
        ],
    )  # fmt: skip


def document(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Lists the turns for JSON, with the latencies of its requests."""
    return [
        {
            "variant": each.variant,
            "case": each.case,
            "duration_s": each.turn.duration_s,
            "batch_tokens_per_s": each.turn.batch_tokens_per_s,
            "others_cores": each.turn.others_cores,
            "ttft_ms": [round(1e3 * (record.ttft_s or 0.0), 1) for record in each.turn.online],
            "tpot_ms": [round(1e3 * (record.tpot_s or 0.0), 2) for record in each.turn.online],
            "max_itl_ms": [round(1e3 * (record.max_itl_s or 0.0), 2) for record in each.turn.online],
        }
        for each in measured
    ]
