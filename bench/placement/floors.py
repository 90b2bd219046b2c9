"""Whether any service is left behind where one has most of the requests: the worst service's attainment over the mean in the
plans that searches choose, and what of the total is given up for it.

SeaLLM's equation 5 as it is meant here: at least 0.8 of the mean (`plan.FLOOR_SHARE`), for 2 % of the total at most.
`floors`: services, models and requests of bench/sharing on 32 A800, with simulated plans beside. `small-floors`: three or
four models on four devices, beside the best that any plan can do for the worst of them at that price.
"""

from __future__ import annotations

import numpy as np

from bench.placement.experiments import NAMES, Table, every_plan
from bench.placement.problems import draw, draw_models
from bench.reporting import Target
from bench.sharing.systems import Case, drawn
from bench.sharing.workloads import Workload
from shared.placement.estimator import Outcome
from shared.placement.plan import FLOOR_SHARE, MOST_FLOOR_COST, is_affordable, plan_of
from shared.placement.problem import Prediction, Problem
from shared.placement.search import Searcher, search
from shared.simulation.deployment import predict
from tideway.simulate import cpu_s

RATE_RPS, POPULARITY, NUM_DEVICES, HISTORY_S = 90.0, 2.5, 32, 120.0
NUM_PROBLEMS = 6
NUM_SMALL, SMALL_DEVICES, SMALL_RATES_RPS, SMALL_S = 10, 4, (8.0, 11.0, 14.0), 60.0
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


def reachable_share(problem: Problem) -> float | None:
    """The largest share of the mean that the worst model has in a plan which gives up no more than it may, by the estimate;
    None: there are too many plans."""
    estimator = Searcher(problem).estimator
    outcomes = estimator.outcomes([plan_of(slots).groups for slots in every_plan(problem)])
    counted = estimator.num_requests >= LEAST_REQUESTS

    def share(outcome: Outcome) -> float:
        attained = 1.0 - outcome.missed[counted] / estimator.num_requests[counted]
        return float(attained.min()) / max(1e-9, outcome.attainment)

    most = max((one.attainment for one in outcomes), default=0.0)
    return max((share(one) for one in outcomes if is_affordable(one.attainment, most)), default=None)


def small_floors(seed: int, num: int = NUM_SMALL) -> Table:
    rows: list[dict[str, object]] = []
    shares, short, costs = [], [], []
    for number in range(num):
        rng = np.random.default_rng([seed, number])
        models = draw_models(int(rng.choice([3, 4])), rng, names=NAMES)
        rate = float(rng.choice(SMALL_RATES_RPS))
        problem = draw(SMALL_DEVICES, models, rate, SMALL_S, rng, exponent=POPULARITY)
        found, reachable = search(problem), reachable_share(problem)
        told = found.prediction
        shares.append(worst_share(told))
        costs.append(found.floor_cost / max(1e-9, told.attainment + found.floor_cost))
        if reachable is not None:
            short.append(max(0.0, min(FLOOR_SHARE, reachable) - shares[-1]))
        rows.append(
            {
                "models": len(models), "req/s": rate, "requests": problem.traffic.num_requests,
                "attainment": f"{told.attainment:.3f}", "worst over mean": round(shares[-1], 2),
                "of any plan": "" if reachable is None else round(reachable, 2), "given up": f"{costs[-1]:.1%}",
            }
        )  # fmt: skip
    targets = [
        Target(name="worst model over the mean, mean", value=float(np.mean(shares)), limit=FLOOR_SHARE, is_least=True),
        Target(
            name="below the floor where a plan reaches it, worst problem", value=max(short, default=0.0), limit=0.02
        ),
        Target(name="given up of the total, at most", value=max(costs), limit=MOST_FLOOR_COST),
    ]
    notes = f"exponent {POPULARITY:g}, {SMALL_DEVICES} A800, {SMALL_S:g} s, by the estimate; {min(shares):.2f} at worst"
    return Table(name="small-floors", rows=rows, targets=targets, notes=notes)
