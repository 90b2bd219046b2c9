"""The experiments that compare systems under one load: a trace, ON/OFF phases, sweeps, an ablation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from bench.coserving.bench import Bench
from bench.coserving.results import (
    ExperimentResult,
    SystemFigures,
    Table,
    figures_of,
    online_records,
    ratio,
    series_of,
    set_ratios,
    system_table,
)
from bench.coserving.runs import ABLATION, ONLINE_ONLY, TIDEWAY, VLLM_PP, Objectives, RunResult, System
from bench.reporting import Target
from tideway.bench.workload import PlannedRequest

SWITCH_WINDOW_S = 5.0
"""After a switch to ON."""
SWITCH_OBJECTIVE_SCALE = 1.25
"""Multiple of Online-Only's P99: ConServe's bound on what co-serving may add."""
ALL_LOADS = "all"


def _run_all(
    bench: Bench,
    label: str,
    order: Sequence[tuple[System, list[PlannedRequest]]],
    duration_s: float,
    warm_up_s: float,
    objectives: Objectives,
    pool_tokens: int = 0,
) -> tuple[dict[str, list[RunResult]], list[SystemFigures]]:
    """Returns the runs by system, and their figures."""
    by_system: dict[str, list[RunResult]] = {}
    for system, online in order:
        run = bench.run(system, online, duration_s, objectives, pool_tokens=pool_tokens, label=f"{label}:")
        by_system.setdefault(system.name, []).append(run)
    figures = [figures_of(runs, warm_up_s) for runs in by_system.values()]
    set_ratios(figures)
    return by_system, figures


def _compare(
    bench: Bench,
    name: str,
    title: str,
    kind: str,
    rate: float,
    order: Sequence[tuple[System, list[PlannedRequest]]],
    duration_s: float,
    warm_up_s: float,
    objectives: Objectives,
    pool_tokens: int = 0,
    **parameters: Any,
) -> tuple[ExperimentResult, dict[str, list[RunResult]]]:
    """Compares systems under one load, `kind` of the capacity that `rate` is a share of."""
    by_system, figures = _run_all(bench, name, order, duration_s, warm_up_s, objectives, pool_tokens)
    result = bench.result(
        name,
        rate_rps=rate,
        capacity_rps=bench.capacity(kind),
        objectives=_objectives_ms(objectives),
        order=[system.name for system, _ in order],
        **parameters,
    )
    result.figures[ALL_LOADS] = figures
    result.tables = [system_table(_title(title, rate, objectives), figures)]
    result.series = {name: series_of(runs[-1]) for name, runs in by_system.items()}
    return result, by_system


def _of(figures: Sequence[SystemFigures], system: System) -> SystemFigures:
    return next(one for one in figures if one.system == system.name)


def _objectives_ms(objectives: Objectives) -> dict[str, float]:
    return {"ttft_ms": objectives.ttft_s * 1000, "tpot_ms": objectives.tpot_s * 1000}


def trace(bench: Bench) -> ExperimentResult:
    """ConServe 6.2: a real trace, an offline summarisation backlog."""
    warm_up_s = bench.durations.warm_up_s
    duration_s = warm_up_s + bench.durations.trace_s
    rate = bench.options.load * bench.capacity("trace")
    samples = [bench.workloads.trace(rate, duration_s, seed) for seed in range(bench.durations.num_samples)]
    objectives = bench.objectives(*samples, duration_s=duration_s)
    systems = (ONLINE_ONLY, VLLM_PP, TIDEWAY)
    order = [
        (system, sample)
        for number, sample in enumerate(samples)
        for system in (systems[::-1] if number % 2 else systems)
    ]
    result, _ = _compare(bench, "trace", "Trace", "trace", rate, order, duration_s, warm_up_s, objectives)
    figures = result.figures[ALL_LOADS]
    tideway, plain = _of(figures, TIDEWAY), _of(figures, VLLM_PP)
    cost = f"vLLM++: {plain.ratios['ttft_p99']:.3g} and {plain.ratios['tpot_p99']:.3g} times"
    result.targets = [
        Target(name="P99 TTFT over Online-Only's", value=tideway.ratios["ttft_p99"], limit=1.10, note=cost),
        Target(name="P99 TPOT over Online-Only's", value=tideway.ratios["tpot_p99"], limit=1.10, note=cost),
        Target(name="tokens per second over vLLM++'s", value=tideway.ratios["tokens_per_s"], limit=0.90, is_least=True),
        *_lost(tideway),
    ]
    return result


def on_off(bench: Bench) -> ExperimentResult:
    """ConServe 6.3.1: load switches between much and none."""
    durations = bench.durations
    cycle_s = durations.off_s + durations.on_s
    duration_s = durations.num_cycles * cycle_s + durations.off_s
    rate = bench.options.on_load * bench.capacity("synthetic")
    online = bench.workloads.on_off(rate, durations.off_s, durations.on_s, duration_s)
    objectives = bench.objectives(online, duration_s=duration_s, scale=SWITCH_OBJECTIVE_SCALE)
    order = (ONLINE_ONLY, TIDEWAY, VLLM_PP, TIDEWAY) if durations.is_mirrored else (ONLINE_ONLY, TIDEWAY, VLLM_PP)
    starts_s = [number * cycle_s + durations.off_s for number in range(durations.num_cycles)]
    ends_s = [start_s + durations.on_s for start_s in starts_s]
    result, by_system = _compare(
        bench, "onoff", "ON/OFF phases", "synthetic", rate, [(system, online) for system in order], duration_s, 0.0,
        objectives, on_at_s=starts_s, off_at_s=ends_s,
    )  # fmt: skip
    rows: list[list[str]] = []
    measured: dict[str, dict[str, Any]] = {}
    for name, of_system in by_system.items():
        violations, requests = _violations(of_system, starts_s)
        harvest = [harvest_delay_s(run, off_s) for run in of_system for off_s in ends_s if name != ONLINE_ONLY.name]
        beside = [beside_delay_s(run, off_s) for run in of_system for off_s in ends_s if name != ONLINE_ONLY.name]
        measured[name] = {
            "violations_at_switch_to_on": violations,
            "requests_at_switch_to_on": requests,
            "offline_step_after_last_online_s": harvest,
            "offline_tokens_after_switch_to_off_s": beside,
        }
        rows.append(
            [
                name,
                f"{violations} of {requests}",
                f"{max(harvest) * 1000:.1f}" if harvest else "-",
                f"{max(beside) * 1000:.1f}" if beside else "-",
            ]
        )
    result.measured = measured
    header = [
        "system",
        f"SLO violations among arrivals within {SWITCH_WINDOW_S:g} s of OFF->ON",
        "last online request ended -> offline step, ms (worst)",
        "ON->OFF -> step with offline tokens, ms (worst)",
    ]
    result.tables.append(Table(title="Switches", header=header, rows=rows))
    mine, alone = measured[TIDEWAY.name], measured[ONLINE_ONLY.name]
    result.targets = [
        Target(
            name="SLO violations at the switch from OFF to ON",
            value=mine["violations_at_switch_to_on"],
            limit=0,
            note=f"of {mine['requests_at_switch_to_on']}; Online-Only: {alone['violations_at_switch_to_on']} of "
            f"{alone['requests_at_switch_to_on']}",
        ),
        Target(
            name="from the last online request's end to the first offline step",
            value=1000 * max(mine["offline_step_after_last_online_s"], default=math.inf),
            limit=100,
            unit=" ms",
        ),
        *_lost(_of(result.figures[ALL_LOADS], TIDEWAY)),
    ]
    return result


def _violations(runs: Sequence[RunResult], starts_s: Sequence[float]) -> tuple[int, int]:
    """(requests that missed an objective, requests) among those that came soon after a switch to ON."""
    records = [
        record
        for run in runs
        for record in online_records(run)
        if any(start_s <= record.arrival_s < start_s + SWITCH_WINDOW_S for start_s in starts_s)
    ]
    return sum(record.met_objectives() is not True for record in records), len(records)


def harvest_delay_s(run: RunResult, off_at_s: float) -> float:
    """From the moment at which no online request is left (at `off_at_s` or later) to the first step of offline requests
    alone; 0 where one runs at that moment, inf where none comes."""
    idle_s = max(
        (record.end_s for record in online_records(run) if record.arrival_s < off_at_s and record.end_s is not None),
        default=off_at_s,
    )
    idle_s = max(idle_s, off_at_s)
    starts = (
        step.start_s
        for step in run.steps
        if step.end_s > idle_s and (step.is_interruptible or (step.num_tokens[1] and not step.num_tokens[0]))
    )
    return max(0.0, next(starts, math.inf) - idle_s)


def beside_delay_s(run: RunResult, off_at_s: float) -> float:
    """From `off_at_s` to the first step with any offline token."""
    starts = (
        step.start_s
        for step in run.steps
        if step.end_s > off_at_s and (step.is_interruptible or step.resumes or step.num_tokens[1])
    )
    return max(0.0, next(starts, math.inf) - off_at_s)


def burst(bench: Bench) -> ExperimentResult:
    """ConServe 6.3.2: burstier arrivals at one rate."""
    rate = bench.options.load * bench.capacity("synthetic")
    return _sweep(bench, "burst", "CV", [(cv, rate, cv) for cv in bench.durations.cvs])


def rate(bench: Bench) -> ExperimentResult:
    """ConServe 6.3.2: rising rates of Poisson arrivals."""
    capacity = bench.capacity("synthetic")
    return _sweep(bench, "rate", "load", [(load, load * capacity, 1.0) for load in bench.durations.loads])


def _sweep(bench: Bench, name: str, label: str, points: Sequence[tuple[float, float, float]]) -> ExperimentResult:
    """`points`: (value of what is varied, requests per second, CV). At each: Online-Only, Tideway, and (if mirrored) both
    again the other way round with other arrivals; vLLM++ at the first point and the last."""
    warm_up_s = bench.durations.warm_up_s
    duration_s = warm_up_s + bench.durations.point_s
    base_rate = bench.options.load * bench.capacity("synthetic")
    objectives = bench.objectives(bench.workloads.gamma(base_rate, 1.0, duration_s), duration_s=duration_s)
    result = bench.result(
        name,
        varied=label,
        points=[{"value": value, "rate_rps": rate_rps, "cv": cv} for value, rate_rps, cv in points],
        capacity_rps=bench.capacity("synthetic"),
        objectives=_objectives_ms(objectives),
    )
    for index, (value, rate_rps, cv) in enumerate(points):
        first, second = (bench.workloads.gamma(rate_rps, cv, duration_s, seed) for seed in (0, 1))
        order: list[tuple[System, list[PlannedRequest]]] = [(ONLINE_ONLY, first), (TIDEWAY, first)]
        if bench.durations.is_mirrored:
            order += [(TIDEWAY, second), (ONLINE_ONLY, second)]
        if index in (0, len(points) - 1):
            order.append((VLLM_PP, order[-1][1]))
        key = f"{label} {value:g}"
        _, figures = _run_all(bench, key, order, duration_s, warm_up_s, objectives)
        result.figures[key] = figures
        result.tables.append(system_table(_title(key, rate_rps, objectives), figures))
        tideway = _of(figures, TIDEWAY)
        result.targets.append(
            Target(name=f"{key}: P99 TTFT over Online-Only's", value=tideway.ratios["ttft_p99"], limit=1.25)
        )
    return result


def ablation(bench: Bench) -> ExperimentResult:
    """ConServe's figure 8, one thing more at a time, in a pool small enough that memory is always short."""
    warm_up_s = bench.durations.warm_up_s
    duration_s = warm_up_s + bench.durations.ablation_s
    rate = bench.options.load * bench.capacity("synthetic")
    pool_tokens = int(bench.options.ablation_pool_share * bench.testbed.setup.pool_tokens)
    online = bench.workloads.gamma(rate, 1.0, duration_s)
    objectives = bench.objectives(online, duration_s=duration_s)
    mirrored = ABLATION[::-1] if bench.durations.is_mirrored else ()
    order = [(system, online) for system in (ONLINE_ONLY, *ABLATION, *mirrored)]
    title = f"Ablation, pool of {pool_tokens} tokens"
    result, _ = _compare(
        bench, "ablation", title, "synthetic", rate, order, duration_s, warm_up_s, objectives, pool_tokens,
        systems={system.name: system for system in ABLATION},
    )  # fmt: skip
    result.parameters["pool_tokens"] = pool_tokens
    figures = result.figures[ALL_LOADS]
    rows = []
    for before, after in pairwise(ABLATION):
        one, other = _of(figures, before), _of(figures, after)
        gain = ratio(other.offline_tokens_per_s, one.offline_tokens_per_s) - 1
        rows.append(
            [
                after.name,
                after.description,
                f"{100 * (ratio(other.ttft_s.p99, one.ttft_s.p99) - 1):+.1f} %",
                f"{100 * gain:+.1f} %",
                f"{sum(one.lost_tokens)} -> {sum(other.lost_tokens)}",
            ]
        )
    header = ["step", "what it adds", "P99 TTFT", "offline tokens/s", "recomputed tokens"]
    result.tables.append(Table(title="Gain of each step over the one before", header=header, rows=rows))
    first, last = _of(figures, ABLATION[1]), _of(figures, TIDEWAY)
    gain = ratio(last.offline_tokens_per_s, first.offline_tokens_per_s)
    result.targets = [
        Target(name="all steps over the scheduler alone, offline tokens per second", value=gain, limit=1.0,
               is_least=True),
        *_lost(last),
    ]  # fmt: skip
    return result


def _lost(figures: SystemFigures) -> list[Target]:
    whole, partial = figures.lost_tokens
    dropped = sum(counts.dropped_checkpoint_blocks for counts in figures.counts)
    return [
        Target(
            name="tokens recomputed beyond partly filled last blocks",
            value=whole,
            limit=0,
            note=f"partly filled blocks: {partial}; checkpoints dropped for want of host memory: {dropped}",
        )
    ]


def _title(what: str, rate_rps: float, objectives: Objectives) -> str:
    return (
        f"{what}: {rate_rps:.2f} online requests per s; objectives TTFT {objectives.ttft_s * 1000:.0f} ms, "
        f"TPOT {objectives.tpot_s * 1000:.0f} ms"
    )
