"""Long traffic, simulated in stretches (shared/simulation/sampled.py): how far it is from the simulation of every step, and
how long a day of a million requests takes.

    python -m bench.sampling error [--hours 0.75] [--devices 8] [--day 4] [--seed 31] [--stretches 8]
    python -m bench.sampling day [--requests 1000000] [--devices 64] [--stretches 24]

The day is that of bench/placement: five production models' rates, real lengths, L4s; the plan is searched for with its first
hour. `error` simulates a part of it both ways.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec

from bench.placement.day import LOAD, NUM_DEVICES, TRACES, draw_day
from bench.reporting import Target, judged, machine, table_of, write
from shared.placement.execution import execution_s
from shared.placement.facts import node_facts
from shared.placement.hardware import L4
from shared.placement.problem import Plan, Problem
from shared.placement.search import search
from shared.placement.stretches import between
from shared.simulation.deployment import simulate
from shared.simulation.itl import Itl
from shared.simulation.sampled import Mean, Sampled, sample

DAY_TARGET_S = 600.0
NODE_DEVICES = 8
ERRORS = 3.0
"""Standard errors that a sample may be off."""
WITHIN = 0.02
"""Largest standard error of a sample: of attainment, and as a share of normalised latency."""


def drawn(options: argparse.Namespace, load: float) -> tuple[Problem, Plan]:
    """The day, and the plan of its first hour. `load`: of `NUM_DEVICES` devices."""
    arrivals, models = draw_day(options.traces, options.seed, load, options.day)
    counts = [min(NODE_DEVICES, options.devices - first) for first in range(0, options.devices, NODE_DEVICES)]
    nodes = tuple(node_facts(f"node-{number}", L4, count) for number, count in enumerate(counts))
    whole = Problem(nodes=nodes, models=tuple(models), traffic=arrivals)
    problem = msgspec.structs.replace(whole, execution_s=execution_s(whole))
    return problem, search(msgspec.structs.replace(problem, traffic=between(arrivals, 0.0, 3600.0))).plan


def _shown(name: str, found: Sampled, seconds: float) -> dict[str, object]:
    def told(mean: Mean, factor: float = 1.0) -> str:
        return f"{factor * mean.value:.4g} ± {factor * mean.error:.2g}"

    return {
        "": name, "requests": found.num_requests, "step by step": found.num_simulated, "attainment": told(found.attainment),
        "normalised latency": told(found.normalised_latency), "TTFT s": told(found.ttft_s),
        "TPOT ms": told(found.tpot_s, 1000.0), **_gaps(found.itl_s), "seconds": round(seconds),
    }  # fmt: skip


def _gaps(itl_s: Itl) -> dict[str, object]:
    """Percentiles of the gaps between tokens: TPOT is a request's mean."""
    return {"ITL P50 ms": f"{1000 * itl_s.p50:.4g}", "ITL P99 ms": f"{1000 * itl_s.p99:.4g}"}


def _sampled(problem: Problem, plan: Plan, options: argparse.Namespace) -> Sampled:
    if options.processes == 1:
        return sample(problem, plan, num_stretches=options.stretches, seed=options.seed)
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        return sample(problem, plan, num_stretches=options.stretches, seed=options.seed, in_order=pool.map)


def error(options: argparse.Namespace) -> tuple[list[dict[str, object]], list[Target]]:
    problem, plan = drawn(options, LOAD * options.devices / NUM_DEVICES)
    since_s = 3600.0 * options.at_hour
    traffic = between(problem.traffic, since_s, since_s + 3600.0 * options.hours)
    problem = msgspec.structs.replace(problem, traffic=traffic)
    began_s = time.perf_counter()
    found = _sampled(problem, plan, options)
    sampled_s, began_s = time.perf_counter() - began_s, time.perf_counter()
    whole = simulate(problem, plan, seed=options.seed + 1).metrics.total
    whole_s = time.perf_counter() - began_s
    rows = [
        _shown("sampled", found, sampled_s),
        {"": "every step", "requests": whole.num_requests, "step by step": whole.num_requests,
         "attainment": f"{whole.attainment:.4g}", "normalised latency": f"{whole.normalised_latency:.4g}",
         "TTFT s": f"{whole.ttft_s.mean:.4g}", "TPOT ms": f"{1000 * whole.tpot_s.mean:.4g}", **_gaps(whole.itl_s),
         "seconds": round(whole_s)},
        {"": "estimate alone", "requests": found.num_requests, "step by step": 0,
         "attainment": f"{found.estimated_attainment:.4g}", "normalised latency": f"{found.estimated_latency:.4g}",
         "TTFT s": "", "TPOT ms": "", **dict.fromkeys(_gaps(Itl()), ""), "seconds": ""},
    ]  # fmt: skip
    targets = [
        Target(name="attainment off, standard errors",
               value=abs(found.attainment.value - whole.attainment) / max(1e-4, found.attainment.error), limit=ERRORS),
        Target(name="normalised latency off, standard errors",
               value=abs(found.normalised_latency.value - whole.normalised_latency)
               / max(1e-4, found.normalised_latency.error), limit=ERRORS),
        Target(name="normalised latency off, share",
               value=abs(found.normalised_latency.value / whole.normalised_latency - 1), limit=2 * WITHIN),
    ]  # fmt: skip
    return rows, targets


def day(options: argparse.Namespace) -> tuple[list[dict[str, object]], list[Target]]:
    began_s = time.perf_counter()
    per_load = draw_day(options.traces, options.seed, LOAD, options.day)[0].num_requests / LOAD
    problem, plan = drawn(options, options.requests / per_load)
    drawn_s, began_s = time.perf_counter() - began_s, time.perf_counter()
    found = _sampled(problem, plan, options)
    took_s = time.perf_counter() - began_s
    targets = [
        Target(name=f"a day of {problem.traffic.num_requests} requests, {options.processes} processes", value=took_s,
               limit=DAY_TARGET_S, unit=" s", note=f"drawing it and the search for its plan {drawn_s:.0f} s"),
        Target(name="standard error of attainment", value=found.attainment.error, limit=WITHIN),
        Target(name="standard error of normalised latency, share",
               value=found.normalised_latency.error / found.normalised_latency.value, limit=WITHIN),
    ]  # fmt: skip
    return [_shown("sampled", found, took_s)], targets


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sampling", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("what", choices=("error", "day"))
    parser.add_argument("--requests", type=int, default=1_000_000, help="of the day")
    parser.add_argument("--devices", type=int, default=0, help="default: error 8, day 64")
    parser.add_argument("--stretches", type=int, default=0, help="default: error 8, day 24")
    parser.add_argument("--day", type=int, default=4, help="of the table of rates")
    parser.add_argument("--at-hour", type=float, default=9.0, help="of error: where the part begins")
    parser.add_argument("--hours", type=float, default=0.75, help="of error")
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--output", type=Path, default=Path(".tideway/bench"), help="folder of JSON and table")
    options = parser.parse_args(arguments)
    is_day = options.what == "day"
    options.devices = options.devices or (64 if is_day else 8)
    options.stretches = options.stretches or (24 if is_day else 8)
    rows, targets = (day if is_day else error)(options)
    date = time.strftime("%Y-%m-%d")
    lines = [*table_of(rows), "", *(f"    {target}" for target in targets)]
    head = f"# Sampled simulation: {options.what}, {date}\n\n{machine()}, day {options.day}, seed {options.seed}, "
    head += f"{options.devices} L4s, {options.stretches} stretches\n\n"
    document: dict[str, Any] = {"date": date, "machine": machine(), "rows": rows, "targets": judged(targets)}
    stem = write(options.output, f"sampling-{options.what}-{date}", document, head + "\n".join(lines) + "\n")
    print("\n".join(lines))
    print(f"written: {stem}.json, .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
