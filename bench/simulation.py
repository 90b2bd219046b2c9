"""How fast a fleet is simulated: requests per second of one core, at 1, 4 and 16 instances near their capacity.

    python -m bench.simulation [--instances 1 4 16] [--requests 2000] [--device a100] [--trace LENGTHS.csv] [--profile]

Requests have ShareGPT's lengths where that trace is found, else lengths of the same kind. The engine's share is the time
inside the engines; the rest is the driver's, the scheduler's and the simulation's own.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench.rebalance.cluster import DEVICES, Cluster
from bench.rebalance.experiments import NUM_INSTANCES, SYSTEMS, Plan, capacity_rps
from bench.rebalance.workloads import Workload, draw_jobs
from bench.reporting import table
from shared.engine.engine import Engine

TRACE = Path("../shared/traces/sharegpt_8k_lengths.csv")
MIX = "S-M"
"""Without the trace."""
CALLS = ("apply", "plan", "take_interrupt", "next_copies", "effects", "load", "next_wakeup")
"""What a driver asks of an engine, each from outside of the others."""


class EngineTime:
    """Seconds inside engines while it holds, the clock's own included."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_inside = False
        self._known: dict[str, Any] = {}

    def __enter__(self) -> EngineTime:
        for name in CALLS:
            self._known[name] = getattr(Engine, name)
            setattr(Engine, name, self._timed(self._known[name]))
        return self

    def __exit__(self, *_: object) -> None:
        for name, call in self._known.items():
            setattr(Engine, name, call)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._is_inside:
                return call(*arguments, **named)
            self._is_inside, started_s = True, time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - started_s
                self._is_inside = False

        return timed


def make(options: argparse.Namespace, num_instances: int) -> Cluster:
    device = DEVICES[options.device]
    mix = str(options.trace) if options.trace.exists() else MIX
    rate_rps = options.load * capacity_rps(Plan(device=device, seeds=()), mix) / NUM_INSTANCES * num_instances
    workload = Workload(mix=mix, rate_rps=rate_rps, num_requests=options.requests * num_instances)
    jobs = draw_jobs(workload, device, options.seed)
    system = msgspec.structs.replace(SYSTEMS["tideway"], order=options.order)
    return Cluster(device, system, jobs, num_instances=num_instances, seed=options.seed)


def measure(options: argparse.Namespace, num_instances: int) -> list[str]:
    """A row of the table: one run as it is, one with the engine's calls timed."""
    cluster = make(options, num_instances)
    started_s = time.process_time()
    records = cluster.run().records
    took_s = time.process_time() - started_s
    timed = make(options, num_instances)
    with EngineTime() as engine:
        started_s = time.perf_counter()
        timed.run()
        share = engine.seconds / (time.perf_counter() - started_s)
    num_tokens = sum(record.num_tokens for record in records)
    num_steps = sum(instance.num_steps for instance in cluster.fleet.instances.values())
    return [
        str(num_instances), str(len(records)), f"{len(records) / took_s:.0f}", f"{100 * share:.0f} %", str(num_steps),
        f"{1e6 * took_s / num_steps:.0f}", f"{num_tokens / num_steps:.1f}", str(cluster.fleet.events.num_done),
        f"{cluster.fleet.events.now / took_s:.0f}",
    ]  # fmt: skip


HEAD = ["instances", "requests", "requests/s", "engine", "steps", "us/step", "tokens/step", "events", "times real time"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.simulation", description=__doc__)
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests", type=int, default=2000, help="for each instance")
    parser.add_argument("--device", choices=DEVICES, default="a100")
    parser.add_argument("--load", type=float, default=0.9, help="share of the capacity")
    parser.add_argument("--order", default="doubling_budget")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", type=Path, default=TRACE, help="of lengths")
    parser.add_argument("--profile", action="store_true", help="where the time goes, of the first number of instances")
    options = parser.parse_args()
    if options.profile:
        cluster, profile = make(options, options.instances[0]), cProfile.Profile()
        profile.runcall(cluster.run)
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return
    print("\n".join(table(HEAD, [measure(options, number) for number in options.instances])))


if __name__ == "__main__":
    main()
