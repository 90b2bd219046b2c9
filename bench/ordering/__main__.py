"""Doubling budget, FCFS, round robin and skip-join MLFQ on two models that share one instance, in virtual time.

python -m bench.ordering [--short] [--output DIR] [--trace MODEL=PATH ...] [--traces DIR]
                         [--orders NAME,module:attribute]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec

from bench.ordering.results import LOADS, Plan, compare, draw, plans
from bench.ordering.workloads import SEALLM, Lengths, read_lengths, real_settings
from bench.reporting import machine, save_figure, write
from shared.plugins import PluginError
from shared.policies.catalogue import ORDERING_POLICIES
from tideway.bench.traces import TraceError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ordering", description=__doc__)
    parser.add_argument("--short", action="store_true", help="one load, one mode, few requests")
    parser.add_argument("--output", type=Path, default=Path(".tideway/bench"), help="folder of JSON, table and plot")
    parser.add_argument("--seed", type=int, default=101, help="the first one")
    parser.add_argument("--num-seeds", type=int, default=0, help="default: 3, short 1")
    parser.add_argument("--requests", type=int, default=0, help="of one run; default: 300, short 80")
    parser.add_argument("--trace", action="append", default=[], metavar="MODEL=PATH",
                        help="lengths of chat or summaries from a trace (any that `tideway bench` reads)")  # fmt: skip
    parser.add_argument("--traces", type=Path, metavar="DIR",
                        help="instead: pairs of the traces with lengths there and a prefill-heavy generator")  # fmt: skip
    parser.add_argument("--loads", default="", help="shares of the capacity, comma-separated")
    parser.add_argument("--orders", default="",
                        help="further order policies, comma-separated: names of plug-ins, or module:attribute")  # fmt: skip
    options = parser.parse_args(arguments)
    more = tuple(filter(None, options.orders.split(",")))
    for order in more:
        try:
            ORDERING_POLICIES.find(order)
        except PluginError as error:
            parser.error(f"--orders: {error}")
    loads = tuple(map(float, options.loads.split(","))) if options.loads else ()
    num = options.requests or (80 if options.short else 300)
    seeds = range(options.seed, options.seed + (options.num_seeds or (1 if options.short else 3)))
    traces: dict[str, Lengths] = {}
    for item in options.trace:
        model, _, path = item.partition("=")
        try:
            traces[model] = read_lengths(Path(path), SEALLM.pool_tokens // 2)
        except (TraceError, OSError) as error:
            parser.error(f"--trace {item}: {error}")
    compared = [(plan, traces) for plan in plans(options.short, loads)]
    if options.traces:
        compared = [
            (Plan(setting=setting, mix_phases=True, loads=loads or LOADS, is_real=True), lengths)
            for setting, lengths in real_settings(options.traces)
        ]
        if not compared:
            parser.error(f"--traces {options.traces}: no trace with lengths there")
    compared = [
        (msgspec.structs.replace(plan, orders=tuple(dict.fromkeys((*plan.orders, *more)))), lengths)
        for plan, lengths in compared
    ]
    started = time.monotonic()
    # the parent holds threads of numpy's, so children are not forked from it
    with ProcessPoolExecutor(min(4, len(os.sched_getaffinity(0))), mp_context=get_context("spawn")) as pool:
        comparisons = []
        for plan, lengths in compared:
            comparisons.append(compare(plan, num, seeds, lengths, pool))
            print(comparisons[-1].markdown() + "\n", flush=True)
    verdicts = [line for comparison in comparisons for line in comparison.verdicts()]
    print("\n".join(verdicts))
    date, took_s = time.strftime("%Y-%m-%d"), time.monotonic() - started
    result = {
        "date": date, "machine": machine(), "took_s": round(took_s, 1),
        "seeds": list(seeds), "requests": num, "traces": options.trace, "plans": [plan for plan, _ in compared],
        "comparisons": comparisons, "verdicts": verdicts,
    }  # fmt: skip
    head = f"# Order of requests, {date}\n\n{machine()}, seeds {list(seeds)}, {num} requests a run, {took_s:.0f} s\n\n"
    tables = "\n\n".join(comparison.markdown() for comparison in comparisons)
    text = head + tables + "\n\n    " + "\n    ".join(verdicts)
    kind = "-real" if options.traces else "-short" if options.short else ""
    stem = write(options.output, f"{date}-ordering{kind}", result, text)
    save_figure(lambda: draw(comparisons, f"Order of requests, {date}"), stem.with_suffix(".png"))
    print(f"{took_s:.0f} s; written: {stem}.json, .md, .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
