"""Rebalancing, priorities, de-fragmentation and drain with four instances, in virtual time.

python -m bench.rebalance [EXPERIMENT ...] [--device a10|cpu] [--models N] [--offline] [--output DIR] [--short]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.rebalance.cluster import DEVICES
from bench.rebalance.experiments import DURATION_S, EXPERIMENTS, NUM_INSTANCES, Plan
from bench.rebalance.results import draw_balance
from bench.rebalance.workloads import MIXES, PREFILL_MIX
from bench.reporting import machine, save_figure, write
from shared.runtime.settings import SchedulerSettings

TRACES = ("azure_llm_2023_conv.csv", "mooncake_conversation.jsonl")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.rebalance", description=__doc__)
    parser.add_argument(
        "experiments", nargs="*", metavar="EXPERIMENT", help=f"of {', '.join(EXPERIMENTS)}; default: all"
    )
    parser.add_argument("--device", choices=DEVICES, default="a10")
    parser.add_argument("--output", type=Path, default=Path(".tideway/bench"), help="folder of JSON, table and plot")
    parser.add_argument("--short", action="store_true", help="one load, few requests")
    parser.add_argument("--seed", type=int, default=101, help="the first one")
    parser.add_argument("--num-seeds", type=int, default=0, help="default: 3, short 1")
    parser.add_argument("--requests", type=int, default=0, help="of one run; default: by the duration, short 150")
    parser.add_argument("--duration", type=float, default=DURATION_S, help="of arrivals, in seconds of virtual time")
    parser.add_argument("--loads", default="", help="shares of the capacity, comma-separated")
    parser.add_argument("--mixes", default="", help=f"of {', '.join(MIXES)}, {PREFILL_MIX}, comma-separated")
    parser.add_argument("--models", type=int, default=1, help="of one shape, on each instance")
    parser.add_argument("--offline", action="store_true", help="beside a batch that never ends")
    parser.add_argument(
        "--order",
        default=SchedulerSettings().order_policy,
        help="order policy of scheduler and instances, of all systems",
    )
    parser.add_argument(
        "--traces", type=Path, default=Path("../shared/traces"), help=f"folder with any of {', '.join(TRACES)}"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=NUMBER", help="a setting of the scheduler")
    options = parser.parse_args(arguments)
    names = options.experiments or list(EXPERIMENTS)
    if unknown := set(names) - EXPERIMENTS.keys():
        parser.error(f"unknown experiments: {', '.join(sorted(unknown))}")
    traces = tuple(path for name in TRACES if (path := options.traces / name).exists())
    plan = Plan(
        device=DEVICES[options.device],
        seeds=tuple(range(options.seed, options.seed + (options.num_seeds or (1 if options.short else 3)))),
        num_requests=options.requests or (150 if options.short else 0),
        duration_s=options.duration,
        loads=tuple(map(float, options.loads.split(",")))
        if options.loads
        else ((0.7,) if options.short else (0.6, 0.7, 0.8)),
        mixes=tuple(options.mixes.split(",")) if options.mixes else (("M-M",) if options.short else MIXES),
        traces=() if options.short else traces,
        num_models=options.models,
        has_batch=options.offline,
        order=options.order,
        scheduler={name: float(value) for name, _, value in (item.partition("=") for item in options.set)},
        is_short=options.short,
    )
    for name in names:
        started = time.monotonic()
        result = EXPERIMENTS[name](plan, lambda line: print(line, file=sys.stderr, flush=True))
        print(result.markdown() + "\n", flush=True)
        date, took_s = time.strftime("%Y-%m-%d"), time.monotonic() - started
        document = {
            "date": date, "machine": machine(), "took_s": round(took_s, 1),
            "plan": msgspec.structs.replace(plan, traces=()), "traces": [path.name for path in plan.traces],
            "result": result,
        }  # fmt: skip
        head = (
            f"# Requests that move, in virtual time, {date}\n\n{NUM_INSTANCES} instances, device {plan.device.name}, seeds "
            f"{list(plan.seeds)}, {plan.num_requests or f'{plan.duration_s:g} s of'} requests a run, order {plan.order}, "
            f"{plan.num_models} model{'s' if plan.num_models > 1 else ''}{' beside a batch' if plan.has_batch else ''}; "
            f"{machine()}, {took_s:.0f} s\n\n"
        )
        name = f"rebalance-{name}-{plan.device.name}{'-short' if options.short else ''}-{date}"
        stem = write(options.output, name, document, head + result.markdown())
        if result.figures:
            title = f"{name}, {plan.device.name}, {date}"
            save_figure(lambda: draw_balance(result.figures, title), stem.with_suffix(".png"))  # noqa: B023 (called at once)
        print(f"{took_s:.0f} s; written: {stem}.json, .md", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
