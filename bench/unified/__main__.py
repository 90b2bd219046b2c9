"""The three papers in one run: several models, batches in the background, requests that move and a placement that follows
the traffic, against the same with each part switched off (README.md beside this file).

    python -m bench.unified simulated [--seconds 60] [--rate 50] [--seeds 101] [--turn 150] [--no-batches]
    python -m bench.unified live [--seconds 30] [--rate 4]
    python -m bench.unified small [--seeds 101,102]
    python -m bench.unified WHERE --only 'all parts' 'as ' 'placement at fixed' 'round robin' 'fixed partitions'

Simulated: 32 A800, about 6 minutes of one core. Live: three small models on this machine, about 9 minutes. Small: these in
virtual time, with short and long steps (small.py), about 2 minutes a seed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from bench.reporting import machine, save_figure, write
from bench.unified.variants import BASELINES, VARIANTS, WHOLE, Row, Variant, markdown, of_seeds
from shared.placement.hardware import HARDWARE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

J = TypeVar("J")


def simulated(variants: Sequence[Variant], options: argparse.Namespace) -> list[Row]:
    from bench.unified.simulated import simulate

    seeds = [int(seed) for seed in options.seeds.split(",")]
    if options.no_batches:
        variants = [msgspec.structs.replace(one, harvests=False) for one in variants]
    case = options.seconds or 60.0, options.rate or 50.0, options.turn or math.inf
    jobs = [(variant, seed, *case) for variant in variants for seed in seeds]
    return _in_processes(simulate, jobs, len(seeds), options.processes)


def small(variants: Sequence[Variant], options: argparse.Namespace) -> list[Row]:
    """Each variant in each case. Without those that differ in what is placed, or when: here nothing is placed anew."""
    from bench.unified.small import CASES, simulate

    seeds = [int(seed) for seed in options.seeds.split(",")]
    differ = [
        one
        for one in variants
        if one.placement in ("search", "dedicated")
        and (one is WHOLE or msgspec.structs.replace(one, name="", is_adaptive=True, is_interval_fixed=False) != _WHOLE)
    ]
    jobs = [(variant, case, seed) for case in CASES for variant in differ for seed in seeds]
    rows = _in_processes(simulate, jobs, len(seeds), options.processes)
    names = [f"{case.name}: {variant.name}" for case in CASES for variant in differ]
    return [msgspec.structs.replace(row, variant=name) for row, name in zip(rows, names, strict=True)]


_WHOLE = msgspec.structs.replace(WHOLE, name="")


def _in_processes(simulate: Callable[[J], Row], jobs: Sequence[J], num_seeds: int, num_processes: int) -> list[Row]:
    """Jobs beside each other; of each `num_seeds` after one another the mean."""
    rows: list[Row] = []
    # the parent holds threads of numpy's, so children are not forked from it
    with ProcessPoolExecutor(min(num_processes, len(jobs)), mp_context=get_context("spawn")) as pool:
        for row in pool.map(simulate, jobs):
            rows.append(row)
            print(f"{row.variant}: {row.num_requests} requests, attainment {row.attainment:.3f}", flush=True)
    return [of_seeds(rows[first : first + num_seeds]) for first in range(0, len(rows), num_seeds)]


def live(variants: Sequence[Variant], options: argparse.Namespace) -> list[Row]:
    from bench.unified.live import Checkpoints, run

    execution_s: dict[str, float] = {}
    rows = []
    with Checkpoints(options.emulate) as checkpoints:
        checkpoints.profile()
        for variant in variants:
            rows.append(
                run(
                    variant, checkpoints, execution_s, rate_rps=options.rate or 4.0, run_s=options.seconds or 30.0,
                    seed=int(options.seeds.split(",")[0]), num_lines=options.lines,
                )
            )  # fmt: skip
            print(
                f"{variant.name}: {rows[-1].num_requests} requests, load average {os.getloadavg()[0]:.2f}", flush=True
            )
    return rows


def draw(rows: Sequence[Row]) -> Figure:
    """What the users see over what batches get. Raises `PlotsUnavailable`."""
    from tideway.bench.plots import new_figure

    figure, axes = new_figure(2, "Each part switched off")
    names = {"attainment": "attainment", "normalised_latency": "normalised latency"}
    for axis, (field, name) in zip(axes, names.items(), strict=True):
        for index, row in enumerate(rows):
            axis.plot(row.offline_tokens_s, getattr(row, field), "o", color=f"C{index % 10}", label=row.variant)
        axis.set_ylabel(name)
    axes[1].set_yscale("log")
    axes[0].legend(fontsize="x-small")
    axes[1].set_xlabel("offline tokens/s")
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.unified", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("where", choices=("simulated", "live", "small"))
    parser.add_argument("--seconds", type=float, default=0.0, help="of arrivals; default: 60 simulated, 30 live")
    parser.add_argument("--rate", type=float, default=0.0, help="requests/s; default: 50 simulated, 4 live")
    parser.add_argument(
        "--seeds", default="101", help="comma-separated; of simulated runs the means, live the first one"
    )
    parser.add_argument(
        "--turn",
        type=float,
        default=0.0,
        help="of simulated runs: after so many seconds the popularity of services is turned round; 0: never",
    )
    parser.add_argument("--lines", type=int, default=12, help="of live runs: offline requests in flight")
    parser.add_argument("--emulate", default="", choices=sorted(HARDWARE), metavar="DEVICE",
                        help="of live runs: steps take what they would on such a device")  # fmt: skip
    parser.add_argument("--no-batches", action="store_true", help="of simulated runs: in no variant")
    parser.add_argument("--processes", type=int, default=2, help="of simulated runs")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="variants whose names begin so, also of others' parts"
    )
    parser.add_argument("--output", type=Path, default=Path(".tideway/bench"), help="folder of JSON, table and plot")
    options = parser.parse_args(arguments)
    known = (*VARIANTS, *BASELINES)
    variants = [one for one in known if one.name.startswith(tuple(options.only))] if options.only else VARIANTS
    if not variants:
        parser.error(f"--only {' '.join(options.only)}: variants are {', '.join(one.name for one in known)}")
    began_s = time.monotonic()
    rows = {"simulated": simulated, "live": live, "small": small}[options.where](variants, options)
    took_s, date = time.monotonic() - began_s, time.strftime("%Y-%m-%d")
    where = "-".join(filter(None, [options.where, options.emulate]))
    text = f"# Each part switched off, {where}, {date}\n\n{machine()}, {took_s:.0f} s\n\n{markdown(rows)}\n"
    print(text)
    result = {"date": date, "machine": machine(), "took_s": round(took_s, 1),
              "seeds": options.seeds, "variants": variants, "rows": rows}  # fmt: skip
    stem = write(options.output, f"unified-{where}{'-turn' if options.turn else ''}-{date}", result, text)
    save_figure(lambda: draw(rows), stem.with_suffix(".png"))
    print(f"written: {stem}.json, .md, .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
