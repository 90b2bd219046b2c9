"""What is compared, the comparison, its runs spread over processes, its figures, and what they are held against."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from bench.ordering.simulation import Run, mean_times_alone_s, normalised, simulate
from bench.ordering.workloads import ALIKE, MODERATE, SEALLM, SMALL, Lengths, Setting, draw_jobs
from bench.reporting import met, table
from shared.policies.silence import allowed_silence_s
from shared.simulation.gateway import Job
from shared.simulation.itl import Itl, ItlHistogram

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS = "doubling_budget"
MOST_MEAN, MOST_P99, MOST_OF_A_MODEL = 1.02, 1.05, 1.3
"""On real lengths: mean over that of the best other order; P99, and the mean of each model, over that of round robin."""
MOST_SILENCE_S = allowed_silence_s(0.11)
"""At the TPOT objective of engines that are told none."""
LEAST_GAIN = 2.0
"""Over FCFS at `GAIN_LOAD`."""
GAIN_LOAD = 0.9


ORDERS = (OURS, "fcfs", "round_robin", "mlfq", "seallm")
COLD = OURS + " (cold)"
"""It never hears of a finished request."""
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
FEW_LOADS = (0.5, 0.9)
PROFILE_SEED = 1_000_003
"""Seed of the requests by which capacity and times alone are measured: others than those that are compared."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison."""

    setting: Setting
    mix_phases: bool
    loads: tuple[float, ...]
    orders: tuple[str, ...] = ORDERS
    is_real: bool = False
    """Lengths are those of traces."""

    @property
    def name(self) -> str:
        return f"{self.setting.name}, {'mixed' if self.mix_phases else 'separate'} phases"


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one order at one load: all seeds' requests together. Latencies are over the model's mean time alone."""

    order: str
    load: float
    num_requests: int
    mean: float
    p99: float
    token_mean_s: float
    token_p99_s: float
    by_model: dict[str, float]
    max_itl_s: float = 0.0
    """Longest gap of all requests."""
    itl_s: Itl = Itl()
    ratio: float = 1.0
    """Mean over that of the doubling budget."""
    num_switches: int = 0
    num_preemptions: int = 0


def figures_of(order: str, load: float, runs: Sequence[tuple[Run, dict[str, np.ndarray]]]) -> Figures:
    latencies = {name: np.concatenate([values[name] for _, values in runs]) for name in runs[0][1]}
    alone, token = latencies.pop("alone"), latencies.pop("token")
    return Figures(
        order=order,
        load=load,
        num_requests=alone.size,
        mean=float(alone.mean()),
        p99=float(np.percentile(alone, 99)),
        token_mean_s=float(token.mean()),
        token_p99_s=float(np.percentile(token, 99)),
        by_model={model: float(values.mean()) for model, values in latencies.items()},
        max_itl_s=max(max(run.max_itl_s) for run, _ in runs),
        itl_s=ItlHistogram.merged(run.itl for run, _ in runs).summary(),
        num_switches=sum(run.num_switches for run, _ in runs),
        num_preemptions=sum(run.num_preemptions for run, _ in runs),
    )


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All orders at all loads, in one setting and mode."""

    name: str
    device: str
    capacity_rps: float
    """Requests a second of a backlog under FCFS."""
    alone_s: dict[str, float]
    figures: list[Figures]
    is_real: bool = False
    """Lengths are those of traces."""

    def with_ratios(self) -> Comparison:
        ours = {one.load: one.mean for one in self.figures if one.order == OURS}
        figures = [msgspec.structs.replace(one, ratio=one.mean / ours[one.load]) for one in self.figures]
        return msgspec.structs.replace(self, figures=figures)

    def verdicts(self) -> list[str]:
        """What is aimed at, met or missed."""
        ours = {one.load: one for one in self.figures if one.order == OURS}
        others = [one for one in self.figures if not one.order.startswith(OURS)]
        silence_s = max(one.max_itl_s for one in ours.values())
        lines = [
            f"{met(silence_s <= MOST_SILENCE_S)} {self.name}: no stream stands still for over {MOST_SILENCE_S:g} s: "
            f"{silence_s:.2f} s (of the others at least {min(one.max_itl_s for one in others):.2f})"
        ]
        if self.is_real:
            return lines + self._real_verdicts(ours, others)
        worst = min((one for one in others if one.order in ("fcfs", "mlfq")), key=lambda one: one.ratio)
        lines += [
            f"{met(worst.ratio > 1)} {self.name}: lower mean than FCFS and MLFQ at every load; "
            f"least against {worst.order} at {worst.load:g}: {worst.ratio:.2f}"
        ]
        lines += [
            f"{met(one.ratio >= LEAST_GAIN)} {self.name}: FCFS at least {LEAST_GAIN:g} times as high at load {one.load:g}: "
            f"{one.ratio:.2f}"
            for one in others
            if one.order == "fcfs" and one.load == GAIN_LOAD
        ]
        return lines

    def _real_verdicts(self, ours: dict[float, Figures], others: Sequence[Figures]) -> list[str]:
        turns = {one.load: one for one in others if one.order == "round_robin"}
        means = {load: one.mean / min(o.mean for o in others if o.load == load) for load, one in ours.items()}
        tails = {load: one.p99 / turns[load].p99 for load, one in ours.items()}
        models = {
            load: max(mean / turns[load].by_model[model] for model, mean in one.by_model.items())
            for load, one in ours.items()
        }
        return [
            f"{met(max(ratios.values()) <= limit)} {self.name}: {what} at most {limit:g} times {whose}; by load "
            + ", ".join(f"{load:g}: {ratio:.3f}" for load, ratio in ratios.items())
            for what, whose, limit, ratios in (
                ("mean", "that of the best other order", MOST_MEAN, means),
                ("P99", "round robin's", MOST_P99, tails),
                ("mean of each model", "round robin's", MOST_OF_A_MODEL, models),
            )
        ]

    def markdown(self) -> str:
        alone = ", ".join(f"{model} {seconds:.2f} s" for model, seconds in self.alone_s.items())
        models = list(self.alone_s)
        head = ["load", "order", "mean", "ratio", "P99", *models, "s/token mean", "P99", "ITL P50, ms", "P99",
                "max ITL, s", "switches", "preemptions"]  # fmt: skip
        rows = [
            [
                f"{one.load:g}", one.order, f"{one.mean:.2f}", f"{one.ratio:.2f}", f"{one.p99:.2f}",
                *(f"{one.by_model[model]:.2f}" for model in models), f"{one.token_mean_s:.3f}", f"{one.token_p99_s:.3f}",
                f"{1000 * one.itl_s.p50:.1f}", f"{1000 * one.itl_s.p99:.1f}", f"{one.max_itl_s:.2f}",
                one.num_switches, one.num_preemptions,
            ]
            for one in self.figures
        ]  # fmt: skip
        title = f"**{self.name}: {self.device}; capacity {self.capacity_rps:.2f} requests/s; mean time alone {alone}**"
        return "\n".join([title, "", *table(head, rows)])


def plans(is_short: bool, loads: tuple[float, ...] = ()) -> list[Plan]:
    """`loads`: instead of those of each."""
    if is_short:
        return [Plan(setting=SEALLM, mix_phases=True, loads=loads or (0.9,))]
    mains = [
        Plan(setting=SEALLM, mix_phases=True, loads=loads or LOADS, orders=(*ORDERS, COLD)),
        Plan(setting=SEALLM, mix_phases=False, loads=loads or LOADS),
    ]
    others = [
        Plan(setting=one, mix_phases=True, loads=loads or FEW_LOADS, orders=(*ORDERS, COLD))
        for one in (MODERATE, SMALL, ALIKE)
    ]
    return mains + others


def compare(plan: Plan, num: int, seeds: Sequence[int], traces: dict[str, Lengths], pool: Executor) -> Comparison:
    setting = plan.setting
    known = {model: lengths for model, lengths in traces.items() if any(s.model == model for s in setting.services)}
    backlog = draw_jobs(setting, num, 0.0, PROFILE_SEED, known)
    capacity_rps = num / _run(setting, backlog, "fcfs", plan.mix_phases).end_s
    alone_s = mean_times_alone_s(setting, backlog)
    jobs = {
        (load, seed): draw_jobs(setting, num, capacity_rps * load, seed, known) for load in plan.loads for seed in seeds
    }
    futures = {
        (load, order, seed): pool.submit(_run, setting, jobs[load, seed], order, plan.mix_phases)
        for load in plan.loads
        for order in plan.orders
        for seed in seeds
    }
    figures = []
    for load in plan.loads:
        for order in plan.orders:
            runs = [(seed, futures[load, order, seed].result()) for seed in seeds]
            pairs = [(run, normalised(run, jobs[load, seed], alone_s)) for seed, run in runs]
            figures.append(figures_of(order, load, pairs))
    comparison = Comparison(
        name=plan.name,
        is_real=plan.is_real,
        device=setting.device,
        capacity_rps=capacity_rps,
        alone_s=alone_s,
        figures=figures,
    )
    return comparison.with_ratios()


def _run(setting: Setting, jobs: list[Job], order: str, mix_phases: bool) -> Run:
    is_cold = order == COLD
    return simulate(setting, jobs, OURS if is_cold else order, mix_phases=mix_phases, knows_times=not is_cold)


def draw(comparisons: Sequence[Comparison], title: str) -> Figure:
    """Mean and P99 over the load, a row for each comparison. Raises `PlotsUnavailable`."""
    from tideway.bench.plots import new_figure

    figure, axes = new_figure(len(comparisons), title)
    for axis, comparison in zip(axes, comparisons, strict=True):
        for index, order in enumerate(dict.fromkeys(one.order for one in comparison.figures)):
            points = [one for one in comparison.figures if one.order == order]
            loads = [one.load for one in points]
            axis.plot(loads, [one.mean for one in points], "o-", color=f"C{index}", label=order)
            axis.plot(loads, [one.p99 for one in points], "--", color=f"C{index}", linewidth=0.8)
        axis.set_yscale("log")
        axis.set_title(f"{comparison.name} (dashed: P99)", fontsize="small")
        axis.set_ylabel("latency / time alone")
        axis.legend(fontsize="small")
    axes[-1].set_xlabel("load, share of the capacity under FCFS")
    return figure
