"""Sums over requests, from which counts, means and deviations are exact. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from shared.messages.traffic import ClassSums, MeanStd, Moments, Outcome, RequestRow

_MOMENTS = ("prompt_tokens", "output_tokens", "execution_s", "latency_s", "ttft_s", "tpot_s")
_COUNTS = ("arrived", "refused", "finished", "cancelled", "failed")


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
    """Of a row whose outcome is not PENDING."""
    for name, is_met in (("ttft_met", row.is_ttft_met), ("tpot_met", row.is_tpot_met)):
        if is_met is not None:
            num_met, num = getattr(sums, name)
            setattr(sums, name, (num_met + is_met, num + 1))
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
        case _:
            sums.failed += 1


def merged(parts: Iterable[ClassSums]) -> ClassSums:
    total = ClassSums()
    for part in parts:
        for name in _COUNTS:
            setattr(total, name, getattr(total, name) + getattr(part, name))
        for name in _MOMENTS:
            own, other = getattr(total, name), getattr(part, name)
            own.count += other.count
            own.total += other.total
            own.squares += other.squares
        total.ttft_met = (total.ttft_met[0] + part.ttft_met[0], total.ttft_met[1] + part.ttft_met[1])
        total.tpot_met = (total.tpot_met[0] + part.tpot_met[0], total.tpot_met[1] + part.tpot_met[1])
    return total


def mean_std(moments: Moments) -> MeanStd:
    """Of the population, not an estimate from a sample."""
    if not moments.count:
        return MeanStd()
    mean = moments.total / moments.count
    return MeanStd(mean, sqrt(max(0.0, moments.squares / moments.count - mean * mean)))
