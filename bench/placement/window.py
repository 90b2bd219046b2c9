"""A window of a day (day.py), all of its requests simulated faithfully: with the plan of the day's first hour to begin with
(with turns, of the hour before the window), and with replacement at adaptive and fixed intervals and without. Searches know
the day's traffic before the window; the first interval begins with it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

import msgspec
import numpy as np

from bench.placement.day import BIN_S, DAY_S, SEARCH_S, Asked, begun, name_of, settings
from bench.placement.experiments import Table
from bench.reporting import Target
from shared.placement.estimator import Estimator
from shared.placement.problem import Problem, Proposal, Traffic
from shared.placement.search import search
from shared.placement.stretches import between
from shared.simulation.deployment import simulate
from shared.simulation.fleet import Fleet
from shared.simulation.replacement import FleetReplacement

SHOWN_S = 600.0
"""Seconds of the series in the JSON."""


class Window(NamedTuple):
    """Hours of the day."""

    since_h: float
    until_h: float

    def __str__(self) -> str:
        return "-".join(f"{round(60 * hour) // 60:02}:{round(60 * hour) % 60:02}" for hour in self)


def window(text: str) -> Window:
    """Such as 10:00-11:30 or 10-11.5. Raises `ArgumentTypeError`."""
    try:
        since_h, until_h = (
            sum(float(part) / 60**place for place, part in enumerate(one.split(":"))) for one in text.split("-")
        )
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no window such as 10:00-11:30 or 10-11.5") from None
    if not 0 <= since_h < until_h <= DAY_S / 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not within a day")
    return Window(since_h, until_h)


class Served(NamedTuple):
    """By the fleet in the window."""

    row: dict[str, object]
    attainment: float
    latency: float
    course: list[float]
    """Attainment of the requests of each `SHOWN_S` as recorded; nan where there were none."""
    changes: list[float]
    """Hours at which another plan served."""


def _bounded(problem: Problem) -> Problem:
    """No model allows more tokens than its longest request has: users ask for as many as it allows, and answers that have
    begun are cut where the groups of the next plan hold fewer."""
    traffic = problem.traffic
    total = traffic.prompt_tokens + traffic.output_tokens
    longest = {name: int(total[traffic.model == index].max(initial=1)) for index, name in enumerate(traffic.models)}
    models = tuple(msgspec.structs.replace(model, max_model_len=longest[model.name]) for model in problem.models)
    return msgspec.structs.replace(problem, models=models)


def seconds(asked: Asked, asked_window: Window) -> tuple[float, float]:
    """Its bounds in seconds of the day as it is played."""
    return 3600 * asked_window.since_h / asked.course.speed, 3600 * asked_window.until_h / asked.course.speed


def cut(asked: Asked, asked_window: Window) -> tuple[Problem, Traffic, Proposal]:
    """The window, the day before it, and the plan of the day's first hour; on a day with turns, of the hour before."""
    problem, first = begun(asked)
    problem = _bounded(problem)
    since_s, until_s = seconds(asked, asked_window)
    past = between(problem.traffic, 0.0, since_s)
    hour_s = 3600 / asked.course.speed
    if asked.course.num_turns and since_s >= hour_s:
        first = search(msgspec.structs.replace(problem, traffic=between(past, since_s - hour_s, since_s)))
    return msgspec.structs.replace(problem, traffic=between(problem.traffic, since_s, until_s)), past, first


def serve(name: str, asked: Asked, asked_window: Window) -> Served:
    """`name`: of the intervals."""
    problem, past, first = cut(asked, asked_window)
    speed = asked.course.speed
    changing: list[FleetReplacement] = []

    def replace(fleet: Fleet) -> None:
        how = settings(name, speed)
        if math.isfinite(how.initial_s):
            changing.append(
                FleetReplacement(
                    fleet, problem, first.plan, search, settings=how, search_s=SEARCH_S, predicted=first.prediction,
                    past=past,
                )
            )  # fmt: skip

    began_s = time.process_time()
    requests, metrics, *_ = simulate(problem, first.plan, seed=asked.seed, on_deployed=replace)
    used_s = time.process_time() - began_s
    ends = [one for replacement in changing for one in replacement.changes]
    changes = [asked_window.since_h + one.stage_s * speed / 3600 for one in ends if one.stage == "carried_out"]
    total = metrics.total
    row: dict[str, object] = {
        "interval": name, "requests": total.num_requests, "attainment": f"{total.attainment:.4f}",
        "normalised latency": round(total.normalised_latency, 3), "P99 latency s": round(total.latency_s.p99, 1),
        "P99 TTFT s": round(total.ttft_s.p99, 1), "P99 TPOT ms": round(1e3 * total.tpot_s.p99),
        "P50 ITL ms": round(1e3 * total.itl_s.p50), "P99 ITL ms": round(1e3 * total.itl_s.p99),
        "max ITL s": round(total.itl_s.max, 1),
        "searches": sum(len(one.searches) for one in changing), "changes": len(changes),
        "served from, h": ", ".join(f"{hour:.2f}" for hour in changes) or "-", "without an answer": total.num_unserved,
        "processor seconds": round(used_s),
    }  # fmt: skip
    alone_s = np.array([problem.execution_s[model] for model in requests.models])[requests.model]
    meets = requests.is_done & (requests.latency_s <= problem.slo_scale * alone_s)
    part = (requests.arrival_s * speed / SHOWN_S).astype(np.int64)
    num_parts = math.ceil(problem.traffic.interval_s * speed / SHOWN_S)
    with np.errstate(invalid="ignore"):
        course = np.bincount(part, meets, num_parts) / np.bincount(part, minlength=num_parts)
    return Served(row, total.attainment, total.normalised_latency, course.tolist(), changes)


def serve_all(asked: Asked, asked_window: Window, names: Sequence[str], num_processes: int) -> Table:
    """`names`: of intervals, with adaptive and none among them."""
    served: dict[str, Served] = {}
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        for name, one in zip(
            names, pool.map(partial(serve, asked=asked, asked_window=asked_window), names), strict=True
        ):
            served[name] = one
            print(one.row, flush=True)
    problem, _, first = cut(asked, asked_window)
    traffic = problem.traffic
    estimator = Estimator(problem, num_bins=int(traffic.interval_s / BIN_S), max_followed=traffic.num_requests)
    estimated = estimator.predict(first.plan)
    adaptive, none = served["adaptive"], served["none"]
    targets = [
        Target(name="attainment, adaptive over none", value=adaptive.attainment / none.attainment, limit=1.0, is_least=True),
        *(
            Target(name=f"attainment, adaptive over {name}", value=adaptive.attainment / one.attainment, limit=1.0,
                   is_least=True)
            for name, one in served.items() if name not in ("adaptive", "none")
        ),
        Target(name="normalised latency, adaptive over none", value=adaptive.latency / none.latency, limit=1.0),
    ]  # fmt: skip
    notes = (
        f"{asked.course.num_devices} L4s, load {asked.load:g}, day {asked.number_of_day}, hours {asked_window}, "
        f"{asked.course.speed:g} times as fast as recorded, {asked.course.num_turns} turns of popularity, every "
        f"step simulated; a search takes {SEARCH_S:g} s. The estimate of the first plan: attainment "
        f"{estimated.attainment:.4f}, normalised latency {estimated.normalised_latency:.2f}."
    )
    return Table(
        name=f"{name_of(asked.course)}-{asked.number_of_day}-seed{asked.seed}-{asked_window}".replace(":", ""),
        rows=[one.row for one in served.values()], targets=targets, notes=notes,
        series={name: {"attainment": one.course, "changes": one.changes} for name, one in served.items()},
    )  # fmt: skip
