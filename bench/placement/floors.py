"""Whether any service is left behind where one has most of the requests: the worst service's attainment over the mean in the
plans that searches choose, and what of the total is given up for it.

SeaLLM's equation 5 as it is meant here: at least 0.8 of the mean (`plan.FLOOR_SHARE`), for 2 % of the total at most.
Services, models and requests are those of bench/sharing, drawn by seeds.
"""

from __future__ import annotations

import numpy as np

from bench.placement.experiments import Table
from bench.reporting import Target
from bench.sharing.systems import Case, drawn
from bench.sharing.workloads import Workload
from shared.placement.plan import FLOOR_SHARE, MOST_FLOOR_COST
from shared.placement.problem import Prediction, Problem
from shared.placement.search import search
from shared.simulation.deployment import predict
from tideway.simulate import cpu_s

RATE_RPS, POPULARITY, NUM_DEVICES, HISTORY_S = 90.0, 2.5, 32, 120.0
NUM_PROBLEMS = 6
LEAST_REQUESTS = 4
"""A service with fewer says nothing: one request more or less that is late is a quarter."""


def worst_share(prediction: Prediction) -> float:
    """The worst service's attainment over that of all requests."""
    attained = [one.attainment for one in prediction.models.values() if one.num_requests >= LEAST_REQUESTS]
    return min(attained) / max(1e-9, prediction.attainment)


def drawn_problem(seed: int, rate_rps: float = RATE_RPS) -> Problem:
    workload = Workload(rate_rps=rate_rps, popularity=POPULARITY, services_seed=seed)
    return drawn(Case(workload=workload, seed=seed, num_devices=NUM_DEVICES, history_s=HISTORY_S))[0]


def floors(seed: int, num: int = NUM_PROBLEMS) -> Table:
    rows: list[dict[str, object]] = []
    shares, simulated, costs = [], [], []
    for number in range(num):
        problem, before_s = drawn_problem(100 * seed + number), cpu_s()
        found = search(problem)
        took_s = cpu_s() - before_s
        played = predict(problem, found.plan, seed=seed)
        told = found.prediction
        shares.append(worst_share(told))
        simulated.append(worst_share(played))
        costs.append(found.floor_cost / max(1e-9, told.attainment + found.floor_cost))
        rows.append(
            {
                "seed": 100 * seed + number, "requests": problem.traffic.num_requests,
                "attainment": f"{told.attainment:.3f}", "worst over mean": round(shares[-1], 2), "worst": told.worst,
                "given up": f"{costs[-1]:.1%}", "simulated": f"{played.attainment:.3f}",
                "simulated worst over mean": round(simulated[-1], 2), "search, s": round(took_s, 1),
            }
        )  # fmt: skip
    targets = [
        Target(name="worst service over the mean, worst problem", value=min(shares), limit=FLOOR_SHARE, is_least=True),
        Target(
            name="worst service over the mean, mean", value=float(np.mean(shares)), limit=FLOOR_SHARE, is_least=True
        ),
        Target(name="the same, simulated", value=float(np.mean(simulated)), limit=FLOOR_SHARE, is_least=True),
        Target(name="given up of the total, at most", value=max(costs), limit=MOST_FLOOR_COST),
    ]
    notes = (
        f"{RATE_RPS:g} req/s of 8 services, exponent {POPULARITY:g}, on {NUM_DEVICES} A800, {HISTORY_S:g} s; services with "
        f"at least {LEAST_REQUESTS} requests"
    )
    return Table(name="floors", rows=rows, targets=targets, notes=notes)
