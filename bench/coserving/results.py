"""Figures of runs, targets, and what an experiment leaves behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from bench.coserving.runs import Counts, RunResult, Step
from bench.reporting import Target, table
from shared.messages.requests import RequestClass
from tideway.bench.records import RequestRecord
from tideway.bench.summary import ALL, Attainment, Distribution, summarize


class SystemFigures(msgspec.Struct, kw_only=True):
    """Figures of all runs of one system under one load. Online latencies are over the runs' requests together."""

    system: str
    num_online: int
    num_unfinished: int
    """Online requests that the end of a run cut off; they are in no percentile, so these are too good."""
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution = Distribution()
    """The gap before each token after the first, as ConServe's objective is (footnote 2); TPOT is a request's mean."""
    attainment: Attainment
    tokens_per_s: float
    """Prompt and output tokens of all requests, each counted once however often it was computed."""
    output_tokens_per_s: float
    offline_tokens_per_s: float
    busy_share: float
    """Share of the time in which a step ran."""
    counts: list[Counts]
    late_p99_s: float
    """Lateness of the feeder."""
    ratios: dict[str, float] = {}

    @property
    def lost_tokens(self) -> tuple[int, int]:
        """Computed again: of whole blocks or steps, and of partly filled last blocks."""
        partial = sum(counts.recomputed_partial_tokens for counts in self.counts)
        return sum(counts.recomputed_tokens for counts in self.counts) - partial, partial


class Table(msgspec.Struct, kw_only=True):
    title: str
    header: list[str]
    rows: list[list[str]]

    def markdown(self, remark: str = "") -> str:
        return "\n".join([f"**{self.title}{remark}**", "", *table(self.header, self.rows)])


class ExperimentResult(msgspec.Struct, kw_only=True):
    experiment: str
    date: str
    command: str
    took_s: float = 0.0
    virtual_noise: float | None = None
    """Noise of step times, where they come from the cost model; None: in real time."""
    machine: dict[str, Any]
    setup: dict[str, Any]
    cost_model: dict[str, Any]
    parameters: dict[str, Any]
    """Parameters of the experiment: rates, objectives, durations, the order of runs."""
    figures: dict[str, list[SystemFigures]] = {}
    """By load; one without variants is called `all`."""
    measured: dict[str, Any] = {}
    """What is not of that form."""
    tables: list[Table] = []
    targets: list[Target] = []
    series: dict[str, dict[str, Any]] = {}
    """Per system: of its last run, each second tokens and pool use, each online request's latencies."""

    @property
    def name(self) -> str:
        """In the names of files."""
        return self.experiment if self.virtual_noise is None else f"{self.experiment}-virtual"

    @property
    def remark(self) -> str:
        """In titles."""
        if self.virtual_noise is None:
            return ""
        return f" (virtual time, noise {self.virtual_noise:g})" if self.virtual_noise else " (virtual time)"


def figures_of(runs: Sequence[RunResult], warm_up_s: float) -> SystemFigures:
    """`runs`: all of one system and load, of one duration. What arrived during the warm-up does not count."""
    duration_s = runs[0].duration_s
    summaries = [summarize(run.records, start_s=warm_up_s, end_s=duration_s) for run in runs]
    online = [record for run in runs for record in online_records(run, warm_up_s)]
    group = summarize(online, start_s=warm_up_s, end_s=duration_s)
    latency = group.group("online") if online else None
    everything = [summary.group(ALL) for summary in summaries]
    tokens = _mean(group.prompt_tokens_per_s + group.output_tokens_per_s for group in everything)
    offline = [group for summary in summaries for group in summary.groups
               if (group.request_class, group.model) == ("offline", ALL)]  # fmt: skip
    measured_s = duration_s - warm_up_s
    steps = [[step for step in run.steps if warm_up_s <= step.end_s <= duration_s] for run in runs]
    return SystemFigures(
        system=runs[0].system,
        num_online=len(online),
        num_unfinished=0 if latency is None else latency.num_unfinished,
        ttft_s=Distribution() if latency is None else latency.ttft_s,
        tpot_s=Distribution() if latency is None else latency.tpot_s,
        itl_s=Distribution() if latency is None else latency.itl_s,
        attainment=Attainment() if latency is None else latency.attainment,
        tokens_per_s=tokens,
        output_tokens_per_s=_mean(group.output_tokens_per_s for group in everything),
        offline_tokens_per_s=sum(group.prompt_tokens_per_s + group.output_tokens_per_s for group in offline)
        / len(runs),
        busy_share=_mean(sum(step.end_s - step.start_s for step in of_run) / measured_s for of_run in steps),
        counts=[run.counts for run in runs],
        late_p99_s=max(run.late_p99_s for run in runs),
    )


def online_records(run: RunResult, since_s: float = 0.0) -> list[RequestRecord]:
    return [r for r in run.records if r.request_class is RequestClass.ONLINE and r.arrival_s >= since_s]


def ratio(value: float, base: float) -> float:
    return value / base if base else float("nan")


def set_ratios(figures: Sequence[SystemFigures]) -> None:
    """Latencies to those of Online-Only, throughput to that of vLLM++, where these ran."""
    of = {one.system: one for one in figures}
    alone, ideal = of.get("online_only"), of.get("vllm++")
    for one in figures:
        if alone is not None:
            one.ratios["ttft_p99"] = ratio(one.ttft_s.p99, alone.ttft_s.p99)
            one.ratios["tpot_p99"] = ratio(one.tpot_s.p99, alone.tpot_s.p99)
        if ideal is not None:
            one.ratios["tokens_per_s"] = ratio(one.tokens_per_s, ideal.tokens_per_s)


def system_table(title: str, figures: Sequence[SystemFigures]) -> Table:
    header = [
        "system", "TTFT P99 ms", "x Online-Only", "TPOT P99 ms", "x Online-Only", "ITL P50 ms", "P99",
        "max", "both SLOs met", "tokens/s", "x vLLM++", "offline tokens/s", "online requests",
        "unfinished", "recomputed (whole+partial)", "preempted", "suspended/discarded",
    ]  # fmt: skip
    rows = []
    for one in figures:
        whole, partial = one.lost_tokens
        rows.append(
            [
                one.system,
                f"{one.ttft_s.p99 * 1000:.0f}" if one.ttft_s.num else "-",
                _number(one.ratios.get("ttft_p99")) if one.ttft_s.num else "-",
                f"{one.tpot_s.p99 * 1000:.1f}" if one.tpot_s.num else "-",
                _number(one.ratios.get("tpot_p99")) if one.tpot_s.num else "-",
                *(
                    [f"{one.itl_s.p50 * 1000:.1f}", f"{one.itl_s.p99 * 1000:.1f}", f"{one.itl_s.max * 1000:.0f}"]
                    if one.itl_s.num
                    else ["-"] * 3
                ),
                "-" if one.attainment.both is None else f"{100 * one.attainment.both:.1f} %",
                f"{one.tokens_per_s:.0f}",
                _number(one.ratios.get("tokens_per_s")),
                f"{one.offline_tokens_per_s:.0f}",
                str(one.num_online),
                str(one.num_unfinished),
                f"{whole}+{partial}",
                str(sum(sum(counts.preemptions.values()) for counts in one.counts)),
                f"{sum(counts.steps_suspended for counts in one.counts)}/"
                f"{sum(counts.steps_discarded for counts in one.counts)}",
            ]
        )
    return Table(title=title, header=header, rows=rows)


def series_of(run: RunResult) -> dict[str, Any]:
    """Series for plots, rounded."""
    num_bins = int(np.ceil(run.end_s)) or 1
    tokens = np.zeros((num_bins, 2))
    for step in run.steps:
        _spread(tokens, step)
    return {
        "online_tokens_per_s": tokens[:, 0].round(1).tolist(),
        "offline_tokens_per_s": tokens[:, 1].round(1).tolist(),
        "samples": [[round(value, 3) for value in msgspec.to_builtins(sample)] for sample in run.samples],
        "sample_columns": ["at_s", "online_running", "online_waiting", "offline_running", "pool_used", "host_used"],
        "online": [
            [round(record.arrival_s, 3), _rounded(record.ttft_s), _rounded(record.tpot_s)]
            for record in online_records(run)
        ],
    }


def _spread(tokens: np.ndarray, step: Step) -> None:
    """Adds a step's tokens to the seconds that it ran in."""
    width_s = max(step.end_s - step.start_s, 1e-6)
    for second in range(int(step.start_s), min(int(step.end_s), len(tokens) - 1) + 1):
        overlap_s = min(step.end_s, second + 1) - max(step.start_s, second)
        tokens[second] += np.array(step.num_tokens) * max(0.0, overlap_s) / width_s


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else 0.0


def _number(value: float | None) -> str:
    return "-" if value is None or not np.isfinite(value) else f"{value:.3f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
