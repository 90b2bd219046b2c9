"""What is compared. Each experiment draws its requests from seeds, gives all systems the same ones, and states what it aims
at as met or missed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.rebalance.bounds import alone_s, curve, mean_size
from bench.rebalance.cluster import Cluster, Device, System
from bench.rebalance.results import (
    LEAST_HIGH_GAIN,
    MOST_BESIDE_BATCH,
    MOST_LONG_START,
    MOST_MOVED_INTO,
    MOST_MOVES,
    MOST_NORMAL_LOSS,
    MOST_START_S,
    Experiment,
    Figures,
    balance_verdicts,
    figures_of,
    latency_verdicts,
)
from bench.rebalance.workloads import (
    LONG_EVERY_S,
    LONG_SHARE,
    MIXES,
    PREFILL_MIX,
    Workload,
    chats_and_long_prompts,
    draw_jobs,
    is_mix,
    long_prompt_tokens,
)
from bench.reporting import met
from shared.costs.model import StepShape
from shared.runtime.settings import SchedulerSettings
from shared.simulation.gateway import Job
from shared.simulation.itl import ItlHistogram

PROFILE_SEED, PROFILE_REQUESTS = 1_000_003, 50_000
"""Seed and number of the requests by which the capacity is reckoned: others than those that are compared."""
PROFILE_RPS = 5.0
NUM_INSTANCES = 4
NUM_MODELS = 3
"""Models of the experiment with several."""
DURATION_S = 600.0
"""Seconds of arrivals, in virtual time."""
START_S = 15.0
"""Start of an instance: weights from local storage."""
FILLED_S = 8.0
"""Time at which the long prompt comes."""
DRAIN_S = 5.0
"""Time at which the word to drain comes."""

SYSTEMS = {
    "round_robin": System(name="round_robin", dispatch="round_robin", is_late=False, migrates=False),
    "infaas++": System(name="infaas++", dispatch="freeness", is_late=False, migrates=False),
    "late": System(name="late", migrates=False),
    "tideway": System(name="tideway"),
}
"""round_robin and infaas++ (freeness dispatch) as in Llumnix: dispatched at once, never moved. late: Tideway's dispatch,
which keeps requests in the scheduler's queue until an instance has room, without migration."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    device: Device
    seeds: tuple[int, ...]
    num_requests: int = 0
    """Requests of one run; 0: as many as come in `duration_s`."""
    duration_s: float = DURATION_S
    loads: tuple[float, ...] = (0.6, 0.7, 0.8)
    """Loads as shares of the capacity, for each mix."""
    mixes: tuple[str, ...] = MIXES
    traces: tuple[Path, ...] = ()
    num_models: int = 1
    """On each instance."""
    has_batch: bool = False
    """One that does not end is in the background."""
    order: str = SchedulerSettings().order_policy
    scheduler: dict[str, float] = {}
    """Settings of Tideway's scheduler that differ from its defaults."""
    is_short: bool = False

    def workload(self, mix: str, rate_rps: float, **more: float) -> Workload:
        num = self.num_requests or int(rate_rps * self.duration_s)
        return Workload(mix=mix, rate_rps=rate_rps, num_requests=num, **more)

    def system(self, name: str, /, **changes: object) -> System:
        known = SYSTEMS[name]
        if known.migrates:
            changes["scheduler"] = self.scheduler
        return msgspec.structs.replace(known, order=self.order, **changes)


def run_one(
    plan: Plan, system: System, jobs: Sequence[Job], seed: int, *, drain_s: float | None = None, **options: Any
) -> Cluster:
    """`drain_s`: when the first instance hears that it is to become empty."""
    defaults = {"num_instances": NUM_INSTANCES, "num_models": plan.num_models, "has_batch": plan.has_batch}
    cluster = Cluster(plan.device, system, jobs, seed=seed, **{**defaults, **options})
    if drain_s is not None:
        cluster.fleet.events.at(drain_s, cluster.fleet.drain, "instance-0")
    cluster.run()
    return cluster


def capacity_rps(plan: Plan, mix: str) -> float:
    """Requests per second of the cluster if every pool were always full and nothing were ever preempted: of each instance

    1 / (mean outputs * step / N + mean prefill)        N: requests of a model that fill its part of a pool, by their mean
                                                        size over their steps; models take turns
    """
    workload = Workload(mix=mix, rate_rps=1.0, num_requests=PROFILE_REQUESTS)
    return _capacity_rps(plan, draw_jobs(workload, plan.device, PROFILE_SEED))


def _capacity_rps(plan: Plan, jobs: Sequence[Job]) -> float:
    device = plan.device
    cost = device.cost_model
    size = mean_size(jobs)
    num = max(1, min(device.num_rows, int(device.pool_tokens / size)) // plan.num_models)
    step_s = cost.predict(StepShape(0, 0.0, num, int(num * size)))
    idle_s = cost.predict(StepShape())
    prompts = [job.prompt_tokens for job in jobs[:2000]]
    prefill_s = float(np.mean([cost.predict(StepShape(p, p * p / 2)) - idle_s for p in prompts]))
    return NUM_INSTANCES / (float(np.mean([job.output_tokens for job in jobs])) * step_s / num + prefill_s)


def _compare(
    plan: Plan, case: str, workload: Workload, systems: Sequence[System], show: Callable[[str], None]
) -> list[Figures]:
    figures = []
    for system in systems:
        clusters = [run_one(plan, system, draw_jobs(workload, plan.device, seed), seed) for seed in plan.seeds]
        figures.append(figures_of(case, system.name, clusters))
        one = figures[-1]
        show(
            f"{case} {system.name}: TTFT mean {one.ttft.mean:.3f} P99 {one.ttft.p99:.2f} s, TPOT P99 "
            f"{1000 * one.tpot.p99:.0f} ms, ITL P99 {1000 * one.itl.p99:.0f} ms, longest gap P99 "
            f"{one.longest_gap.p99:.2f} s, pause P99 {one.pause_steps.p99:.1f} steps, preemptions "
            f"{one.num_preemptions}, {one.moves}"
        )
    return figures


def balance(plan: Plan, show: Callable[[str], None]) -> Experiment:
    result = Experiment(
        name="balance",
        about="Llumnix's mixes of long-tailed lengths (prompts - outputs), Poisson arrivals at shares of the mix's "
        "capacity; a trace's requests at its own times, stretched.",
    )
    systems = [plan.system(name) for name in SYSTEMS]
    for mix in [*plan.mixes, *map(str, plan.traces)]:
        capacity, name = capacity_rps(plan, mix), mix if is_mix(mix) else Path(mix).stem
        for load in plan.loads:
            rate_rps = load * capacity
            workload = plan.workload(mix, rate_rps)
            result.figures += _compare(plan, f"{name} {load:g} ({rate_rps:.2f}/s)", workload, systems, show)
    result.verdicts = balance_verdicts(result.figures) + latency_verdicts(result.figures)
    return result


def prefill(plan: Plan, show: Callable[[str], None]) -> Experiment:
    result = Experiment(
        name="prefill",
        about=f"{PREFILL_MIX}: prompts of thousands of tokens, answers of 6 to 60, in bursts (gamma distributed intervals).",
    )
    systems = [plan.system(name) for name in SYSTEMS]
    for load in plan.loads:
        rate_rps = load * capacity_rps(plan, PREFILL_MIX)
        for cv in (8.0,) if plan.is_short else (4.0, 8.0, 13.0):
            workload = plan.workload(PREFILL_MIX, rate_rps, cv=cv)
            result.figures += _compare(
                plan, f"{PREFILL_MIX} {load:g} CV {cv:g} ({rate_rps:.2f}/s)", workload, systems, show
            )
    result.verdicts = latency_verdicts(result.figures)
    return result


def bursts(plan: Plan, show: Callable[[str], None]) -> Experiment:
    result = Experiment(
        name="bursts", about="M-M with gamma distributed intervals of growing coefficient of variation."
    )
    rate_rps = 0.55 * capacity_rps(plan, "M-M")
    for cv in (2.0,) if plan.is_short else (2.0, 4.0, 8.0):
        workload = plan.workload("M-M", rate_rps, cv=cv)
        systems = [plan.system(name) for name in SYSTEMS]
        result.figures += _compare(plan, f"M-M CV {cv:g} ({rate_rps:.2f}/s)", workload, systems, show)
    result.verdicts = balance_verdicts(result.figures)
    return result


def priorities(plan: Plan, show: Callable[[str], None]) -> Experiment:
    result = Experiment(
        name="priorities",
        about="S-S in bursts, as Llumnix has it, a tenth of the requests of high priority: Tideway that knows which, "
        "against Tideway that takes all for normal. Beside it what could be had on the device: the gain of a high request "
        "alone, or beside as much as Llumnix allows; and if requests could move at no cost (bounds.py), the most gain for "
        "the loss that is allowed, and the least loss for the gain that is wanted.",
    )
    device, capacity = plan.device, capacity_rps(plan, "S-S")
    few = device.high_load * device.pool_tokens
    knowing, unknowing = plan.system("tideway"), plan.system("tideway", name="no priorities", has_priorities=False)
    for load in plan.loads:
        for cv in (4.0,) if plan.is_short else (1.0, 4.0, 8.0):
            workload = plan.workload("S-S", load * capacity, cv=cv, high_share=0.1)
            case = f"S-S {load:g} CV {cv:g} ({load * capacity:.2f}/s)"
            found = _compare(plan, case, workload, [unknowing, knowing], show)
            result.figures += found
            before, after = found
            gain = before.high_latency.mean / after.high_latency.mean
            loss = after.normal_latency.mean / before.normal_latency.mean
            runs = [draw_jobs(workload, device, seed) for seed in plan.seeds]
            high = [job for jobs in runs for job in jobs if job.is_high]
            alone = float(np.mean([alone_s(device, job) for job in high]))
            beside = float(np.mean([alone_s(device, job, few, few / mean_size(high)) for job in high]))
            ideal = curve(device, NUM_INSTANCES, runs)
            row = {
                "case": case, "gain": gain, "normal times": loss, "gain alone": before.high_latency.mean / alone,
                f"beside {few:.0f} tokens": before.high_latency.mean / beside,
                f"ideal gain at {MOST_NORMAL_LOSS:g}": ideal.gain_at(MOST_NORMAL_LOSS),
                f"ideal normal times at {LEAST_HIGH_GAIN:g}": ideal.loss_at(LEAST_HIGH_GAIN),
                "TTFT high, mean": before.high_ttft.mean / after.high_ttft.mean,
                "TTFT high, P99": before.high_ttft.p99 / after.high_ttft.p99,
            }  # fmt: skip
            result.add({name: value if name == "case" else round(value, 3) for name, value in row.items()}, show)
            result.verdicts += [
                f"{met(gain >= LEAST_HIGH_GAIN)} {case}: mean latency of high priority {gain:.2f} times lower "
                f"(alone on an instance {row['gain alone']:.2f})",
                f"{met(loss <= MOST_NORMAL_LOSS)} {case}: mean latency of normal priority times {loss:.3f}",
            ]
    return result


def fragmentation(plan: Plan, show: Callable[[str], None]) -> Experiment:
    """Each instance is filled by requests that decode for long, so far that three quarters of the long prompt would fit."""
    result = Experiment(
        name="fragmentation",
        about="Time from its arrival until a prompt starts that fits into no instance's free memory (three quarters of it "
        "would), but three times into the cluster's.",
    )
    systems = ("late", "infaas++", "tideway")
    for num_each in (8,) if plan.is_short else (4, 8):
        for share in (0.3,) if plan.is_short else (0.3, 0.4):
            starts: list[list[float]] = []
            for seed in plan.seeds:
                jobs = _fragmented(plan, num_each, share, seed)
                start_s = [run_one(plan, plan.system(name), jobs, seed).records[-1].start_s for name in systems]
                if start_s[0] > MOST_START_S:  # else chance had left room on some instance
                    starts.append(start_s)
            for name, values in zip(systems, zip(*starts, strict=True), strict=False):
                row = {"requests each": num_each, "prompt, of a pool": share, "seeds": len(values), "system": name,
                       "median start, s": float(np.median(values)), "worst, s": max(values)}  # fmt: skip
                result.add(row, show)
    worst = max((row["worst, s"] for row in result.rows if row["system"] == "tideway"), default=math.inf)
    before = min((row["median start, s"] for row in result.rows if row["system"] == "late"), default=0.0)
    result.verdicts = [
        f"{met(worst <= MOST_START_S)} the long prompt starts within {MOST_START_S:g} s: {worst:.2f} s at worst; without "
        f"migration {before:.1f} s at least"
    ]
    return result


def _fragmented(plan: Plan, num_each: int, share: float, seed: int) -> list[Job]:
    """`num_each` requests for each instance, all in decode and far from their ends when the last job comes."""
    device = plan.device
    draw = np.random.default_rng(seed)
    prompt = int(share * device.pool_tokens)
    fillers = draw.uniform(0.7, 1.3, num_each)
    fillers *= (device.pool_tokens - 0.75 * prompt) / fillers.sum()
    grown = _growth(plan, fillers)
    lengths = [max(8, int(fillers[number // NUM_INSTANCES] - grown)) for number in range(NUM_INSTANCES * num_each)]
    jobs = [Job(0.01 * number, length, min(device.max_length, 1000)) for number, length in enumerate(lengths)]
    return [*jobs, Job(FILLED_S, prompt, 10)]


def _growth(plan: Plan, tokens: np.ndarray) -> float:
    """About the tokens that each of an instance's requests decodes until `FILLED_S`; models take turns."""
    cost, num = plan.device.cost_model, plan.num_models
    prefill_s = cost.predict(StepShape(int(tokens.sum()), float((tokens**2).sum() / 2)))
    step_s = cost.predict(StepShape(0, 0.0, max(1, tokens.size // num), int(tokens.sum()) // num))
    return (FILLED_S - prefill_s) / (step_s * min(num, tokens.size))


def long_prompts(plan: Plan, show: Callable[[str], None]) -> Experiment:
    """Few long prompts among short chats, which fill what a long one waits for."""
    device = plan.device
    long_tokens, duration_s = long_prompt_tokens(device), min(plan.duration_s, 120.0)
    capacity = _capacity_rps(
        plan, chats_and_long_prompts(PROFILE_RPS, PROFILE_REQUESTS / PROFILE_RPS, device, PROFILE_SEED)
    )
    result = Experiment(
        name="long-prompts",
        about=f"Short chats (Poisson arrivals, at shares of the capacity) for {duration_s:g} s, and each {LONG_EVERY_S:g} s "
        f"a prompt of {long_tokens} tokens, {100 * LONG_SHARE:.0f} % of a pool: when the long ones start, and what the "
        "short ones feel.",
    )
    systems = ("late", "infaas++", "tideway")
    for load in plan.loads if plan.is_short else (0.6, 0.7, 0.8, 0.9):
        rows: dict[str, dict[str, Any]] = {}
        for name in systems:
            runs = [
                run_one(
                    plan, plan.system(name), chats_and_long_prompts(load * capacity, duration_s, device, seed), seed
                )
                for seed in plan.seeds
            ]
            records = [record for run in runs for record in run.records]
            itl = ItlHistogram.merged(run.gateway.itl_of() for run in runs).summary()
            starts_s = [record.start_s for record in records if record.prompt_tokens == long_tokens]
            short = [record for record in records if record.prompt_tokens != long_tokens]
            rows[name] = row = {
                "load": load, "per s": round(load * capacity, 2), "system": name,
                "long start, median, s": round(float(np.median(starts_s)), 2), "worst": round(max(starts_s), 2),
                "short TTFT P99, s": round(float(np.percentile([record.ttft_s for record in short], 99)), 2),
                "TPOT P99, ms": round(1000 * float(np.percentile([record.tpot_s for record in short], 99)), 1),
                "ITL P50, ms": round(1000 * itl.p50, 1), "ITL P99, ms": round(1000 * itl.p99, 1),
                "longest, s": round(itl.max, 2),
                "preemptions": sum(record.num_preemptions for record in records),
                "most moves a run": max(sum(r.num_migrations for r in run.records) for run in runs),
                "of a request": max(record.num_migrations for record in records),
            }  # fmt: skip
            result.add(row, show)
        ours, best = rows["tideway"], min(rows[name]["worst"] for name in systems[:2])
        late_s, late_ms = rows["late"]["short TTFT P99, s"], rows["late"]["TPOT P99, ms"]
        our_s, our_ms = ours["short TTFT P99, s"], ours["TPOT P99, ms"]
        is_spared = our_s <= MOST_MOVED_INTO * late_s and our_ms <= MOST_MOVED_INTO * late_ms
        result.verdicts += [
            f"{met(ours['worst'] <= MOST_LONG_START * best)} {load:g}: the last long prompt starts after "
            f"{ours['worst']:.1f} s; the better without moves after {best:.1f} s",
            f"{met(ours['most moves a run'] <= MOST_MOVES)} {load:g}: {ours['most moves a run']} moves in a run at most",
            f"{met(is_spared)} {load:g}: short ones, P99 TTFT {late_s:.2f} -> {our_s:.2f} s, P99 TPOT {late_ms:.1f} -> "
            f"{our_ms:.1f} ms, by moves",
        ]
    return result


def drain(plan: Plan, show: Callable[[str], None]) -> Experiment:
    result = Experiment(
        name="drain",
        about="Time from the word to drain until an instance holds nothing; the others have as many requests.",
    )
    output = 400 if plan.is_short else min(plan.device.max_length, 1500)
    for num in (4,) if plan.is_short else (4, 8, 16):
        for name in ("late", "tideway"):
            times = []
            for seed in plan.seeds:
                draw = np.random.default_rng(seed)
                most = int(0.4 * plan.device.pool_tokens / num)
                jobs = [Job(0.01 * i, int(draw.uniform(0.5, 1.0) * most), output) for i in range(NUM_INSTANCES * num)]
                cluster = run_one(plan, plan.system(name), jobs, seed, drain_s=DRAIN_S)
                times.append(cluster.fleet.emptied_s.get("instance-0", cluster.fleet.events.now) - DRAIN_S)
            row = {"running": num, "system": name, "median, s": float(np.median(times)), "worst, s": max(times)}
            result.add(row, show)
    ratios = [
        slow["median, s"] / fast["median, s"] for slow, fast in zip(result.rows[::2], result.rows[1::2], strict=True)
    ]
    result.verdicts = [f"        emptied {min(ratios):.1f} to {max(ratios):.1f} times sooner than without migration"]
    return result


def scaling(plan: Plan, show: Callable[[str], None]) -> Experiment:
    result = Experiment(
        name="scaling",
        about=f"The fleet begins with two instances and grows and shrinks by its freeness, {START_S:g} s for an instance to "
        "start; M-M with intervals of CV 2, growing thresholds.",
    )
    rate_rps = 0.6 * capacity_rps(plan, "M-M")
    workload = plan.workload("M-M", rate_rps, cv=2.0)
    for scale_low in (160.0,) if plan.is_short else (80.0, 160.0, 320.0):
        for name in ("infaas++", "tideway"):
            system = plan.system(name)
            bounds = {"scale_low": scale_low, "scale_high": 6 * scale_low, "max_instances": 8}
            system = msgspec.structs.replace(system, scheduler={**system.scheduler, **bounds})
            fleets = [
                run_one(plan, system, draw_jobs(workload, plan.device, seed), seed, num_instances=2, start_s=START_S)
                for seed in plan.seeds
            ]
            one = figures_of(f"M-M, below {scale_low:g} grows ({rate_rps:.2f}/s)", name, fleets)
            result.figures.append(one)
            row = {
                "threshold": scale_low, "system": name, "mean instances": one.mean_instances,
                "TTFT P99, s": one.ttft.p99, "latency mean, s": one.latency.mean, "latency P99, s": one.latency.p99,
            }  # fmt: skip
            result.add(row, show)
    result.verdicts = [
        f"        below {theirs['threshold']:g}: instances {theirs['mean instances']:.2f} -> {mine['mean instances']:.2f}, "
        f"P99 TTFT {theirs['TTFT P99, s']:.2f} -> {mine['TTFT P99, s']:.2f} s"
        for theirs, mine in zip(result.rows[::2], result.rows[1::2], strict=True)
    ]
    return result


def several_models(plan: Plan, show: Callable[[str], None]) -> Experiment:
    """Several models on each instance, which divide its memory into merged blocks of each and its time into turns."""
    plan = msgspec.structs.replace(plan, num_models=max(plan.num_models, NUM_MODELS))
    result = Experiment(
        name="models",
        about=f"M-M over {plan.num_models} models of one shape on each instance, Poisson arrivals at shares of the "
        "capacity of models that take turns.",
    )
    capacity, systems = capacity_rps(plan, "M-M"), [plan.system(name) for name in SYSTEMS]
    for load in plan.loads:
        workload = plan.workload("M-M", load * capacity)
        case = f"M-M x {plan.num_models} {load:g} ({load * capacity:.2f}/s)"
        result.figures += _compare(plan, case, workload, systems, show)
    result.verdicts = balance_verdicts(result.figures) + latency_verdicts(result.figures)
    return result


def offline(plan: Plan, show: Callable[[str], None]) -> Experiment:
    """What a batch in the background costs those who wait, where requests move."""
    result = Experiment(
        name="offline",
        about="M-M beside a batch that never ends, Poisson arrivals at shares of the capacity: all systems, and Tideway "
        "without the batch.",
    )
    alone = msgspec.structs.replace(plan, has_batch=False)
    beside = msgspec.structs.replace(plan, has_batch=True)
    capacity, systems = capacity_rps(plan, "M-M"), [plan.system(name) for name in SYSTEMS]
    for load in plan.loads:
        workload = plan.workload("M-M", load * capacity)
        case = f"M-M {load:g} ({load * capacity:.2f}/s)"
        found = _compare(beside, f"{case} beside a batch", workload, systems, show)
        (without,) = _compare(alone, f"{case} alone", workload, [plan.system("tideway")], show)
        result.figures += [*found, without]
        mine = next(one for one in found if one.system == "tideway")
        result.verdicts += latency_verdicts(found)
        for name, with_s, without_s in (
            ("P99 TTFT", mine.ttft.p99, without.ttft.p99),
            ("P99 TPOT", mine.tpot.p99, without.tpot.p99),
        ):
            is_met = with_s <= MOST_BESIDE_BATCH * without_s
            result.verdicts.append(
                f"{met(is_met)} {case}: {name} {without_s:.3f} -> {with_s:.3f} s beside a batch, times "
                f"{with_s / without_s:.2f}"
            )
        result.verdicts.append(
            f"        {case}: the batch gets {mine.offline_tokens_s:,.0f} tokens/s; ITL P99 {1000 * without.itl.p99:.0f} -> "
            f"{1000 * mine.itl.p99:.0f} ms, longest {without.itl.max:.2f} -> {mine.itl.max:.2f} s"
        )
    return result


EXPERIMENTS: dict[str, Callable[[Plan, Callable[[str], None]], Experiment]] = {
    "balance": balance,
    "bursts": bursts,
    "prefill": prefill,
    "priorities": priorities,
    "fragmentation": fragmentation,
    "long-prompts": long_prompts,
    "drain": drain,
    "scaling": scaling,
    "models": several_models,
    "offline": offline,
}
