"""Figures of runs, and what they are held against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from bench.rebalance.cluster import Cluster
from bench.reporting import met, table, table_of
from shared.simulation.gateway import Record
from shared.simulation.itl import Itl, ItlHistogram
from tideway.bench.summary import Distribution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST_FEWER_PREEMPTIONS = 0.70
LEAST_HIGH_GAIN = 1.5
MOST_NORMAL_LOSS = 1.10
MOST_START_S = 1.0
MOST_LONG_START = 1.2
"""Worst start of a long prompt, times the better one's of systems that move nothing."""
MOST_MOVES = 300
"""In a run of two minutes with four instances."""
MOST_BESIDE_BATCH = 1.10
"""P99 of TTFT and TPOT beside a batch, times without it, as of bench/coserving."""
MOST_P99 = 1.02
"""Times the better baseline's."""
MOST_PAUSE_STEPS = 3.0
MOST_MOVED_INTO = 1.05
"""Mean TTFT, times what it is without migration: what moves cost those who wait where another moves in; likewise P99 TTFT
and TPOT of short ones where long prompts start the sooner for it."""
OURS = "tideway"
UNMOVED = "late"
BASELINES = ("round_robin", "infaas++")


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one system in one case: the requests of all seeds together. Seconds."""

    case: str
    """Workload and load."""
    system: str
    num_requests: int
    ttft: Distribution
    tpot: Distribution
    itl: Itl
    """The gap before each token after the first, of all requests; TPOT is a request's mean."""
    high_itl: Itl
    longest_gap: Distribution
    """Between two tokens of a request."""
    latency: Distribution
    high_latency: Distribution
    """Latency of the tenth that is of high priority, whether or not the system knows."""
    normal_latency: Distribution
    high_ttft: Distribution
    num_preemptions: int
    num_preempted: int
    """Requests."""
    preemption_loss_s: float
    """From each preemption to the request's next token, summed over requests."""
    recomputed_tokens: int
    moves: dict[str, int]
    """How migrations ended -> how many."""
    pause_steps: Distribution
    """From a moved request's last token at the source to the next one, in decode steps of the source."""
    moved_gigabytes: float
    mean_instances: float
    ttft_p99_by_seed: list[float]
    offline_tokens_s: float
    """Prompts and answers of batches."""


def figures_of(case: str, system: str, clusters: Sequence[Cluster]) -> Figures:
    records = [record for cluster in clusters for record in cluster.records]
    gateways = [cluster.gateway for cluster in clusters]
    high = [record for record in records if record.is_high]
    normal = [record for record in records if not record.is_high]
    moves: Counter[str] = Counter()
    for cluster in clusters:
        moves.update(cluster.migrations.outcomes)
    pauses = [pause / step_s for cluster in clusters for _, pause, step_s in cluster.gateway.pauses]
    return Figures(
        case=case,
        system=system,
        num_requests=len(records),
        ttft=Distribution.of(record.ttft_s for record in records),
        tpot=Distribution.of(record.tpot_s for record in records),
        itl=ItlHistogram.merged(gateway.itl_of() for gateway in gateways).summary(),
        high_itl=ItlHistogram.merged(gateway.itl_of(is_high=True) for gateway in gateways).summary(),
        longest_gap=Distribution.of(record.longest_gap_s for record in records),
        latency=Distribution.of(record.latency_s for record in records),
        high_latency=Distribution.of(record.latency_s for record in high),
        normal_latency=Distribution.of(record.latency_s for record in normal),
        high_ttft=Distribution.of(record.ttft_s for record in high),
        num_preemptions=sum(record.num_preemptions for record in records),
        num_preempted=sum(record.num_preemptions > 0 for record in records),
        preemption_loss_s=sum(record.loss_s for record in records),
        recomputed_tokens=sum(record.recomputed_tokens for record in records),
        moves=dict(moves),
        pause_steps=Distribution.of(pauses),
        moved_gigabytes=sum(cluster.migrations.num_bytes for cluster in clusters) / 1e9,
        mean_instances=float(np.mean([cluster.mean_instances() for cluster in clusters])),
        ttft_p99_by_seed=[_p99(cluster.records) for cluster in clusters],
        offline_tokens_s=float(np.mean([cluster.offline_tokens_s for cluster in clusters])),
    )


def _p99(records: Sequence[Record]) -> float:
    return float(np.percentile([record.ttft_s for record in records], 99))


class Experiment(msgspec.Struct, kw_only=True):
    """What one experiment found."""

    name: str
    about: str
    figures: list[Figures] = []
    rows: list[dict[str, Any]] = []
    """Rows of experiments that measure something else."""
    verdicts: list[str] = []

    def add(self, row: dict[str, Any], show: Callable[[str], None]) -> None:
        self.rows.append(row)
        show(str(row))

    def markdown(self) -> str:
        lines = [f"## {self.name}", "", self.about, ""]
        if self.figures:
            lines += [*_figures_table(self.figures), ""]
        if self.rows:
            lines += table_of(self.rows)
        return "\n".join([*lines, "", *(f"    {verdict}" for verdict in self.verdicts)])


def _figures_table(figures: Sequence[Figures]) -> list[str]:
    has_high = any(one.high_latency.num for one in figures)
    has_batch = any(one.offline_tokens_s for one in figures)
    head = ["case", "system", "TTFT mean", "P99", "by seed", "TPOT mean, ms", "P99", "ITL P50, ms", "P99",
            "max, s", "longest gap P99, s", "preemptions", "requests", "loss, s",
            "moved", "pause P50, steps", "P99"]  # fmt: skip
    if has_high:
        head += ["latency high, s", "normal", "TTFT P99 high", "ITL P99 high, ms"]
    if has_batch:
        head += ["offline tokens/s"]
    rows = []
    for one in figures:
        cells = [
            one.case, one.system, f"{one.ttft.mean:.3f}", f"{one.ttft.p99:.2f}",
            ", ".join(f"{value:.3g}" for value in one.ttft_p99_by_seed),
            f"{1000 * one.tpot.mean:.1f}", f"{1000 * one.tpot.p99:.1f}",
            f"{1000 * one.itl.p50:.1f}", f"{1000 * one.itl.p99:.1f}", f"{one.itl.max:.2f}",
            f"{one.longest_gap.p99:.2f}", one.num_preemptions, one.num_preempted,
            f"{one.preemption_loss_s:.0f}", sum(n for how, n in one.moves.items() if how.startswith("moved")),
            f"{one.pause_steps.p50:.2f}", f"{one.pause_steps.p99:.2f}",
        ]  # fmt: skip
        if has_high:
            cells += [f"{one.high_latency.mean:.2f}", f"{one.normal_latency.mean:.2f}", f"{one.high_ttft.p99:.2f}",
                      f"{1000 * one.high_itl.p99:.1f}"]  # fmt: skip
        if has_batch:
            cells += [f"{one.offline_tokens_s:,.0f}"]
        rows.append(cells)
    return table(head, rows)


def balance_verdicts(figures: Sequence[Figures]) -> list[str]:
    """Lower P99 TTFT than both baselines in every case; fewer preemptions, over all cases and in each."""
    lines, ours = [], {one.case: one for one in figures if one.system == OURS}
    for name in BASELINES:
        pairs = [(one, ours[one.case]) for one in figures if one.system == name]
        ratios = {mine.case: theirs.ttft.p99 / mine.ttft.p99 for theirs, mine in pairs}
        worst, best = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
        lines.append(
            f"{met(ratios[worst] > 1)} P99 TTFT against {name}: {ratios[worst]:.2f} times lower in the worst case "
            f"({worst}), {ratios[best]:.1f} times in the best ({best}); geometric mean "
            f"{_geometric(list(ratios.values())):.2f}"
        )
        for theirs, mine in pairs:
            lines.append(
                f"        {mine.case} against {name}: P99 TTFT {theirs.ttft.p99:.2f} -> {mine.ttft.p99:.2f} s "
                f"({ratios[mine.case]:.2f} times), mean {theirs.ttft.mean / mine.ttft.mean:.2f} times, P99 TPOT "
                f"{theirs.tpot.p99 / mine.tpot.p99:.2f} times; preemptions {theirs.num_preemptions} -> "
                f"{mine.num_preemptions}, loss {theirs.preemption_loss_s:.0f} -> {mine.preemption_loss_s:.0f} s"
            )
        before = sum(theirs.num_preemptions for theirs, _ in pairs)
        after = sum(mine.num_preemptions for _, mine in pairs)
        fewer = 1 - after / before if before else float(after == 0)
        lines.append(
            f"{met(fewer >= LEAST_FEWER_PREEMPTIONS)} preemptions against {name}, all cases: {before} -> {after} "
            f"({100 * fewer:.0f} % fewer)"
        )
    return lines


def latency_verdicts(figures: Sequence[Figures]) -> list[str]:
    """In every case: P99 TTFT and P99 TPOT at most as high as the better baseline's (with a margin), mean TTFT below both;
    short pauses of those that move; and moves do not delay first tokens."""
    lines = []
    cases = dict.fromkeys(one.case for one in figures)
    for case in cases:
        mine, *theirs = (
            one for name in (OURS, *BASELINES) for one in figures if (one.case, one.system) == (case, name)
        )
        for name, ours, best, most in (
            ("P99 TTFT", mine.ttft.p99, min(one.ttft.p99 for one in theirs), MOST_P99),
            ("P99 TPOT", mine.tpot.p99, min(one.tpot.p99 for one in theirs), MOST_P99),
            ("mean TTFT", mine.ttft.mean, min(one.ttft.mean for one in theirs), 1.0),
        ):
            lines.append(
                f"{met(ours <= most * best)} {case}: {name} {ours:.3f} s, times {ours / best:.3f} the better baseline's"
            )
        if mine.pause_steps.num:
            lines.append(
                f"{met(mine.pause_steps.p99 <= MOST_PAUSE_STEPS)} {case}: P99 pause of {mine.pause_steps.num} moved "
                f"requests {mine.pause_steps.p99:.2f} decode steps"
            )
        for unmoved in (one for one in figures if (one.case, one.system) == (case, UNMOVED)):
            ratio = mine.ttft.mean / unmoved.ttft.mean
            lines.append(f"{met(ratio <= MOST_MOVED_INTO)} {case}: mean TTFT times {ratio:.3f} that without migration")
    return lines


def _geometric(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def draw_balance(figures: Sequence[Figures], title: str) -> Figure:
    """P99 TTFT and preemptions of each case and system. Raises `PlotsUnavailable`."""
    from tideway.bench.plots import new_figure

    figure, axes = new_figure(3, title)
    cases = list(dict.fromkeys(one.case for one in figures))
    for index, system in enumerate(dict.fromkeys(one.system for one in figures)):
        found = {one.case: one for one in figures if one.system == system}
        at = [number for number, case in enumerate(cases) if case in found]
        chosen = [found[case] for case in cases if case in found]
        for axis, values in (
            (axes[0], [one.ttft.p99 for one in chosen]),
            (axes[1], [1000 * one.tpot.p99 for one in chosen]),
            (axes[2], [one.num_preemptions for one in chosen]),
        ):
            axis.plot(at, values, "o", color=f"C{index}", label=system)
    for axis, label in zip(axes, ("P99 TTFT, s", "P99 TPOT, ms", "preemptions"), strict=True):
        axis.set_ylabel(label)
        axis.set_yscale("symlog" if label == "preemptions" else "log")
        axis.legend(fontsize="small")
    axes[-1].set_xticks(range(len(cases)), cases, rotation=60, ha="right", fontsize="x-small")
    axes[-1].set_xlabel("")
    return figure
