"""Sums over requests, from which counts, means and deviations are exact. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from shared.messages.traffic import ClassSums, MeanStd, Moments, Outcome, RequestRow


def _add(moments: Moments, value: float) -> None:
    moments.count += 1
    moments.total += value
    moments.squares += value * value


def tpot_s(row: RequestRow) -> float | None:
    """Time per output token after the first; None where there are no such tokens."""
    if row.ttft_s < 0 or row.output_tokens < 2:
        return None
    return (row.latency_s - row.ttft_s) / (row.output_tokens - 1)


def add_arrival(sums: ClassSums, row: RequestRow) -> None:
    sums.arrived += 1
    _add(sums.prompt_tokens, row.prompt_tokens)


def add_end(sums: ClassSums, row: RequestRow) -> None:
    """Adds the end of a row whose outcome is not PENDING."""
    if row.is_ttft_met is not None:
        sums.ttft_met = (sums.ttft_met[0] + row.is_ttft_met, sums.ttft_met[1] + 1)
    if row.is_tpot_met is not None:
        sums.tpot_met = (sums.tpot_met[0] + row.is_tpot_met, sums.tpot_met[1] + 1)
    match row.outcome:
        case Outcome.REFUSED:
            sums.refused += 1
        case Outcome.CANCELLED:
            sums.cancelled += 1
        case Outcome.FINISHED:
            sums.finished += 1
            _add(sums.output_tokens, row.output_tokens)
            _add(sums.latency_s, row.latency_s)
            if row.execution_s > 0:
                _add(sums.execution_s, row.execution_s)
            if row.ttft_s >= 0:
                _add(sums.ttft_s, row.ttft_s)
            if (later_s := tpot_s(row)) is not None:
                _add(sums.tpot_s, later_s)
                _add(sums.max_itl_s, row.max_itl_s)
        case _:
            sums.failed += 1


def merge(total: Moments, part: Moments, sign: int = 1) -> None:
    """Adds `part` to `total`; with -1 takes it away again."""
    total.count += sign * part.count
    total.total += sign * part.total
    total.squares += sign * part.squares


def merged(parts: Iterable[ClassSums]) -> ClassSums:
    total = ClassSums()
    for part in parts:
        total.arrived += part.arrived
        total.refused += part.refused
        total.finished += part.finished
        total.cancelled += part.cancelled
        total.failed += part.failed
        merge(total.prompt_tokens, part.prompt_tokens)
        merge(total.output_tokens, part.output_tokens)
        merge(total.execution_s, part.execution_s)
        merge(total.latency_s, part.latency_s)
        merge(total.ttft_s, part.ttft_s)
        merge(total.tpot_s, part.tpot_s)
        merge(total.max_itl_s, part.max_itl_s)
        total.ttft_met = (total.ttft_met[0] + part.ttft_met[0], total.ttft_met[1] + part.ttft_met[1])
        total.tpot_met = (total.tpot_met[0] + part.tpot_met[0], total.tpot_met[1] + part.tpot_met[1])
    return total


def mean_std(moments: Moments) -> MeanStd:
    """Mean and deviation of the population, not an estimate from a sample."""
    if not moments.count:
        return MeanStd()
    mean = moments.total / moments.count
    return MeanStd(mean, sqrt(max(0.0, moments.squares / moments.count - mean * mean)))
