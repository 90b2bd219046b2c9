"""The search for a placement: its time (`speed`), its distance from the best of all plans (`optimum`), whether the estimate
ranks plans as the faithful simulation does (`rank`), whether it leaves services behind (`floors`; `small-floors`: on four
devices), a day of several models' traffic with plans that follow it (`day`; with turns of the models' popularity: `turns`),
a window of it on one plan in the order of different policies (`orders`), and how well traffic can be foretold (`forecast`).

python -m bench.placement {speed,optimum,rank,floors,small-floors,day,turns,orders,forecast} ... [--seed N] [--output DIR]
                          [--load X] [--window 10:00-11:30]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.placement import day, experiments, floors, forecasts, orders, window
from bench.reporting import judged, machine, save_figure, table_of, write


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.placement", description=__doc__)
    parser.add_argument(
        "experiments",
        nargs="+",
        choices=("speed", "optimum", "rank", "floors", "small-floors", "day", "turns", "orders", "forecast"),
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(".tideway/bench"), help="folder of JSON and table")
    parser.add_argument(
        "--load",
        type=float,
        help=f"of the day, see bench/placement/day.py; default: {day.LOAD:g}, turns {day.TURNS_LOAD:g}",
    )
    parser.add_argument("--day", type=int, default=0, help="of the table of rates, which has 14; 0: the first")
    parser.add_argument("--processes", type=int, default=2, help="of the day, in which its rows are made")
    parser.add_argument("--rows", type=Path, help="folder: rows of the day that are there are not made again")
    parser.add_argument(
        "--intervals",
        nargs="+",
        default=list(day.INTERVALS_S),
        choices=list(day.INTERVALS_S),
        help="of the day; adaptive and none are always there",
    )
    parser.add_argument(
        "--window",
        type=window.window,
        help="hours of the day, such as 10:00-11:30: every step simulated, not estimated (0-24: all); orders: 10:00-10:45",
    )
    options = parser.parse_args(arguments)
    names = list(dict.fromkeys(["adaptive", "none", *options.intervals]))

    def play(seed: int, course: day.Course = day.WHOLE, load: float = day.LOAD) -> experiments.Table:
        asked = day.Asked(seed, options.load or load, options.day, course=course)
        if options.window is not None:
            return window.serve_all(asked, options.window, names, options.processes)
        return day.day(asked, options.processes, names, options.rows)

    known: dict[str, Callable[[int], experiments.Table]] = {
        "speed": experiments.speed,
        "optimum": experiments.optimum,
        "rank": experiments.rank,
        "floors": floors.floors,
        "small-floors": floors.small_floors,
        "day": play,
        "turns": lambda seed: play(seed, day.TURNS, day.TURNS_LOAD),
        "orders": lambda seed: orders.compare(
            day.Asked(seed, options.load or day.LOAD, options.day), options.window or orders.WINDOW, options.processes
        ),
        "forecast": lambda seed: forecasts.compare(),
    }
    for name in options.experiments:
        began_s = time.monotonic()
        found = known[name](options.seed)
        took_s, date = time.monotonic() - began_s, time.strftime("%Y-%m-%d")
        lines = [*table_of(found.rows), "", found.notes, "", *(f"    {target}" for target in found.targets)]
        head = f"# Placement: {name}, {date}\n\n{machine()}, seed {options.seed}, {took_s:.0f} s\n\n"
        document = {
            "date": date, "machine": machine(), "seed": options.seed, "took_s": round(took_s, 1), "rows": found.rows,
            "series": found.series, "notes": found.notes, "targets": judged(found.targets),
        }  # fmt: skip
        stem = write(options.output, f"placement-{found.name}-{date}", document, head + "\n".join(lines))
        if found.draw is not None:
            save_figure(found.draw, stem.with_suffix(".png"))
        print("\n".join(lines))
        print(f"{took_s:.0f} s; written: {stem}.json, .md", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
