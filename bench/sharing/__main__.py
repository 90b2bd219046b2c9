"""SeaLLM's evaluation in virtual time: eight services of four models on 32 A800 of four nodes, bursts; Tideway, dedicated
instances, AlpaServe and MuxServe.

python -m bench.sharing [figure6 capacity baselines figure8 figure10 figure11 figure12 figure13 kv] [--duration S]
                        [--output DIR]
python -m bench.sharing fleets --duration S --seeds 601,602 [--devices 32,16] [--exponents 1.0,2.5]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.reporting import judged, machine, save_figure, write
from bench.sharing import fleets, kv
from bench.sharing.experiments import FIGURES, PAPER, TIDEWAY, Figure, Point, run_points, targets
from bench.sharing.results import Outcome, capacity_table, draw, draw_scales, outcome_table, ratios, scale_table
from bench.sharing.systems import SEED
from bench.sharing.workloads import CHAT, RATES, SUMMARIES, TRACES

KV, FLEETS = "kv", "fleets"
FLEETS_RUN_S = 50.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sharing", description=__doc__)
    parser.add_argument(
        "figures", nargs="*", metavar="FIGURE", help=f"of {', '.join([*FIGURES, KV])}; default: all of these; {FLEETS}"
    )
    parser.add_argument("--duration", type=float, default=0.0, help="of arrivals, seconds of virtual time")
    parser.add_argument("--seed", type=int, default=SEED, help="of lengths and arrivals")
    parser.add_argument("--systems", default="", help="comma-separated; default: all of the figure")
    parser.add_argument("--xs", default="", help="of the horizontal axis, comma-separated; default: all of the figure")
    parser.add_argument("--seeds", type=_numbers, default=[SEED], help="of fleets: of services and requests")
    parser.add_argument("--devices", type=_numbers, default=fleets.DEVICES, help="of fleets")
    parser.add_argument("--exponents", type=_numbers, default=fleets.POPULARITIES, help="of fleets: of popularity")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(".tideway/bench"), help="folder of JSON, table and plot")
    options = parser.parse_args(arguments)
    names = options.figures or [*FIGURES, KV]
    if unknown := sorted(set(names) - {*FIGURES, KV, FLEETS}):
        parser.error(f"unknown figures: {', '.join(unknown)}")
    chosen = {name: _points(FIGURES[name], options) for name in names if name in FIGURES}
    if empty := [name for name, points in chosen.items() if not points]:
        parser.error(f"no point of {', '.join(empty)} is left")
    for name in names:
        started_s, date = time.monotonic(), time.strftime("%Y-%m-%d")
        head = {"date": date, "machine": machine(), "traces": traces()}
        if name == KV:
            found = kv.compare()
            text = kv.markdown(found)
            document: dict[str, Any] = {"comparison": found}
        elif name == FLEETS:
            document, text = _fleets(options)
        else:
            document, text = _run(name, chosen[name], options.processes)
        print(text)
        took_s = time.monotonic() - started_s
        title = f"SeaLLM's {name} in virtual time, {date}"
        note = f"{machine()}, {took_s:.0f} s; {traces()}"
        stem = write(
            options.output, f"sharing-{name}-{date}", {**head, "took_s": round(took_s, 1), **document},
            f"# {title}\n\n{note}\n\n{text}",
        )  # fmt: skip
        if name in FIGURES:
            plot(name, document["outcomes"], title, stem.with_suffix(".png"))
        print(f"{took_s:.0f} s; written: {stem}.json, .md")
    return 0


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _fleets(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The document of an experiment, and its title; see `_run`."""
    run_s, wanted = options.duration or FLEETS_RUN_S, options.systems.split(",") if options.systems else None
    asked = fleets.asked_of(
        [
            fleets.Fleet(num_devices=int(num), popularity=exponent, seed=int(seed))
            for num in options.devices
            for exponent in options.exponents
            for seed in options.seeds
        ],
        run_s,
        [one for one in fleets.SYSTEMS if wanted is None or one.name.split(",")[0] in wanted],
    )
    found = fleets.compare(
        asked, options.processes, lambda one: print(fleets.told(one), f"{one.took_s:.0f} s", flush=True)
    )
    aims = fleets.targets(found)
    lines = [
        f"Requests a second that fleets of A800 carry, of {run_s:g} s of arrivals.",
        "",
        *fleets.fleet_table(found),
    ]
    return {"carried": found, "targets": judged(aims)}, "\n".join([*lines, "", *(f"    {aim}" for aim in aims)])


def _points(figure: Figure, options: argparse.Namespace) -> list[Point]:
    systems = options.systems.split(",") if options.systems else None
    xs = set(map(float, options.xs.split(","))) if options.xs else None
    return [
        msgspec.structs.replace(point, case=msgspec.structs.replace(point.case, seed=options.seed))
        for point in figure.points(options.duration or figure.run_s)
        if (systems is None or point.system.name in systems) and (xs is None or point.x in xs)
    ]


def _run(name: str, points: list[Point], num_processes: int) -> tuple[dict[str, Any], str]:
    """What is written down of a figure: as JSON, as text."""
    figure = FIGURES[name]

    def show(one: Outcome) -> None:
        told = one.error or f"normalised {one.normalised_latency:.2f}, attainment {one.attainment:.1%}"
        print(f"{figure.x_name} {one.x:g}, {one.system}: {told}, {one.took_s:.0f} s", flush=True)

    outcomes = run_points(points, num_processes, show)
    lines = [f"{figure.about} Here {points[0].case.run_s:g} s.", "", *outcome_table(outcomes, figure.x_name)]
    aims = []
    if any(one.system == TIDEWAY.name for one in outcomes):
        lines += ["", *ratios(outcomes, TIDEWAY.name, PAPER)]
        aims = targets(outcomes) if name == "figure6" else []
    if name == "capacity":
        lines += ["", *capacity_table(outcomes)]
    if name == "figure10":
        lines += ["", "Attainment by the SLO's scale:", "", *scale_table(outcomes)]
    text = "\n".join([*lines, "", *(f"    {aim}" for aim in aims)])
    return {"points": points, "outcomes": outcomes, "targets": judged(aims)}, text


def plot(name: str, outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    if name == "figure10":
        save_figure(lambda: draw_scales(outcomes, title), path)
    else:
        save_figure(lambda: draw(outcomes, title, FIGURES[name].x_name), path)


def traces() -> str:
    """Which of the traces were there."""
    found = [name for name in (CHAT, SUMMARIES, RATES) if (TRACES / name).exists()]
    return f"traces: {', '.join(found)}" if found else "no traces: lengths of SeaLLM's table 1, made-up rates"


if __name__ == "__main__":
    sys.exit(main())
