"""A window of a day (day.py) on the plan of the day's first hour, each step simulated, in the order of different policies:
what becomes of several models on one group where the KV pool is full, which bench/ordering's pairs do not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

import msgspec

from bench.placement.day import NUM_DEVICES, Asked
from bench.placement.experiments import Table
from bench.placement.window import Window, cut
from bench.reporting import Target
from shared.placement.problem import Plan, Problem
from shared.policies.silence import allowed_silence_s
from shared.simulation.deployment import LIVE, simulate
from shared.simulation.fleet import Fleet

ORDERS = ("doubling_budget", "fcfs", "round_robin", "mlfq", "seallm")
WINDOW = Window(10.0, 10.75)


class Served(NamedTuple):
    row: dict[str, object]
    attainment: float
    latency: float
    silence_s: float
    """The longest time between two tokens that 99 of 100 requests see."""


def serve(order: str, problem: Problem, plan: Plan, seed: int) -> Served:
    fleets: list[Fleet] = []
    serving = msgspec.structs.replace(LIVE, order_policy=order)
    _, metrics, *_ = simulate(problem, plan, serving, seed=seed, on_deployed=fleets.append)
    gaps = sorted(record.longest_gap_s for record in fleets[0].gateway.records)
    total, silence_s = metrics.total, gaps[int(0.99 * (len(gaps) - 1))]
    row: dict[str, object] = {
        "order": order, "requests": total.num_requests, "attainment": f"{total.attainment:.4f}",
        "normalised latency": round(total.normalised_latency, 3),
        "of each model": ", ".join(f"{one.normalised_latency:.2f}" for _, one in sorted(metrics.models.items())),
        "P99 latency s": round(total.latency_s.p99, 1), "P99 TTFT s": round(total.ttft_s.p99, 1),
        "P99 TPOT ms": round(1e3 * total.tpot_s.p99), "P50 ITL ms": round(1e3 * total.itl_s.p50),
        "P99 ITL ms": round(1e3 * total.itl_s.p99), "P99 of max ITL s": round(silence_s, 2),
        "max ITL s": round(gaps[-1], 1), "tokens/s": round(total.tokens_s),
    }  # fmt: skip
    return Served(row, total.attainment, total.normalised_latency, silence_s)


def compare(asked: Asked, asked_window: Window, num_processes: int, orders: Sequence[str] = ORDERS) -> Table:
    """`orders`: the doubling budget's first, and at least another."""
    problem, _, first = cut(asked, asked_window)
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        served = list(pool.map(partial(serve, problem=problem, plan=first.plan, seed=asked.seed), orders))
    ours, others = served[0], served[1:]
    targets = [
        Target(name="normalised latency over the best other order's", value=ours.latency / min(o.latency for o in others),
               limit=1.0),
        Target(name="attainment over the best other order's", value=ours.attainment / max(o.attainment for o in others),
               limit=1.0, is_least=True),
        Target(name="P99 of max ITL, seconds", value=ours.silence_s, limit=allowed_silence_s(LIVE.tpot_ms / 1000)),
    ]  # fmt: skip
    groups = "; ".join(f"{', '.join(group.models)} on {group.num_ranks}" for group in first.plan.groups)
    notes = (
        f"{NUM_DEVICES} L4s, load {asked.load:g}, day {asked.number_of_day}, hours {asked_window}, every step simulated. "
        f"Groups: {groups}. Models are in the order {', '.join(sorted(problem.traffic.models))}."
    )
    return Table(
        name=f"orders-{asked.number_of_day}-seed{asked.seed}-{asked_window}".replace(":", ""),
        rows=[one.row for one in served], targets=targets, notes=notes,
    )  # fmt: skip
