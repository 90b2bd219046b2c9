"""What is compared, and the comparison, its runs spread over processes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

import msgspec

from bench.ordering.results import OURS, Comparison, figures_of
from bench.ordering.simulation import Run, mean_times_alone_s, normalised, simulate
from bench.ordering.workloads import ALIKE, MODERATE, SEALLM, SMALL, Lengths, Setting, draw_jobs
from shared.simulation.gateway import Job

ORDERS = (OURS, "fcfs", "round_robin", "mlfq", "seallm")
COLD = OURS + " (cold)"
"""It never hears of a finished request."""
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
FEW_LOADS = (0.5, 0.9)
PROFILE_SEED = 1_000_003
"""Of the requests by which capacity and times alone are measured: others than those that are compared."""


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
        mix_phases=plan.mix_phases,
        capacity_rps=capacity_rps,
        alone_s=alone_s,
        figures=figures,
    )
    return comparison.with_ratios()


def _run(setting: Setting, jobs: list[Job], order: str, mix_phases: bool) -> Run:
    is_cold = order == COLD
    return simulate(setting, jobs, OURS if is_cold else order, mix_phases=mix_phases, knows_times=not is_cold)
