"""What a change of the placement would have been good for: the traffic of late is estimated on the plan that runs, and with
the change made at its beginning, with all that draining, restarting and loading take (rehearsal.py). So the gain of the new
plan and the price of going there are one number, in requests that are late.

How long the traffic stays as it is, nobody knows: it is taken to be for as long as the new plan would have been better until
now. So a change has to pay on some stretch of the recorded traffic that ends now: the last interval, or twice, four times
as long, and so on. A burst is over before its plan has paid; what lasts is followed after about the time in which the change
pays (as whoever hires skis buys them once the hire has cost as much: at most twice what foresight would have cost).
"""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np

from shared.placement.estimator import NUM_BINS, Estimator, Served
from shared.placement.plan import Horizon, Plan, Trial
from shared.placement.problem import Problem, Traffic
from shared.placement.rehearsal import Episode, Rehearsal, rehearse

NUM_HORIZONS = 5
"""The last interval, and up to 16 times as long."""
BIN_S, MOST_BINS = 2.5, 480
"""Of the estimates, as a change takes a minute: this long at least, and so many."""
NUM_BLOCKS = 16
"""Of a horizon, whose gains are taken to be independent of each other."""


def evidence_s(interval_s: float) -> float:
    """How much traffic there should be to try a change on."""
    return interval_s * float(2 ** (NUM_HORIZONS - 1))


def try_change(problem: Problem, plan: Plan) -> Trial:
    """From `problem.incumbent` to the plan, both of which fit the nodes."""
    assert problem.incumbent is not None
    evidence = problem.evidence or problem.traffic
    rehearsal = rehearse(problem, problem.incumbent, plan)
    stay = [Episode(group) for group in problem.incumbent.groups]
    free = [Episode(group) for group in plan.groups]
    horizons: list[Horizon] = []
    held_bytes = np.zeros(len(problem.models))
    for seconds in _horizons(problem.traffic.interval_s, evidence):
        if seconds <= rehearsal.seconds:
            continue
        on = _since(problem, evidence, seconds)
        num_bins = int(min(MOST_BINS, max(NUM_BINS, seconds / BIN_S)))
        served = Estimator(on, num_bins=num_bins).served([stay, rehearsal.episodes, free])
        horizons.append(_horizon(seconds, served))
        held_bytes = _held_bytes(on, served)
    return Trial(
        change_s=rehearsal.seconds, lost_device_s=rehearsal.lost_device_s, interrupted=rehearsal.interrupted,
        moved_bytes=int(np.sum(_moved_share(problem, rehearsal) * held_bytes)), horizons=horizons,
    )  # fmt: skip


def _horizons(interval_s: float, evidence: Traffic) -> list[float]:
    """Silence before the first request is no evidence."""
    if not evidence.num_requests:
        return []
    known_s = evidence.interval_s - float(evidence.arrival_s[0])
    found = [interval_s * 2**power for power in range(NUM_HORIZONS)]
    return [seconds for seconds in found if seconds < known_s] + [min(known_s, found[-1])]


def _since(problem: Problem, evidence: Traffic, seconds: float) -> Problem:
    since_s = evidence.interval_s - seconds
    there = evidence.arrival_s >= since_s
    last = Traffic(
        evidence.models, evidence.model[there], evidence.arrival_s[there] - since_s, evidence.prompt_tokens[there],
        evidence.output_tokens[there], evidence.is_online[there], seconds,
    )  # fmt: skip
    return msgspec.structs.replace(problem, traffic=last)


def _horizon(seconds: float, served: Served) -> Horizon:
    weight = served.weight
    total = max(1e-9, float(weight.sum()))
    block = np.minimum((served.at_s / seconds * NUM_BLOCKS).astype(np.int64), NUM_BLOCKS - 1)
    attainment = 1.0 - served.is_late @ weight / total
    latency = served.normalised @ weight / total

    def error(gain: np.ndarray) -> float:
        """Of the weighted mean of requests' gains, from how it differs between blocks of time."""
        beyond = np.bincount(block, weight * (gain - gain @ weight / total), minlength=NUM_BLOCKS)
        return float(np.sqrt(NUM_BLOCKS / (NUM_BLOCKS - 1) * np.sum(beyond**2)) / total)

    return Horizon(
        seconds=seconds, num_requests=round(total),
        stay_attainment=float(attainment[0]), change_attainment=float(attainment[1]), free_attainment=float(attainment[2]),
        attainment_error=error(served.is_late[0].astype(float) - served.is_late[1]),
        stay_latency=float(latency[0]), change_latency=float(latency[1]), free_latency=float(latency[2]),
        latency_error=error(served.normalised[0] - served.normalised[1]),
    )  # fmt: skip


def _held_bytes(problem: Problem, served: Served) -> np.ndarray:
    """[models] KV of the requests that there are at once on the plan that runs, on average (Little's law)."""
    found = np.zeros(len(problem.models))
    for index, model in enumerate(problem.models):
        mine = served.model == index
        seconds = served.weight[mine] * served.normalised[0, mine] * served.execution_s[index]
        tokens = served.tokens[mine] / problem.traffic.interval_s
        found[index] = float(seconds @ tokens) * model.block_bytes / model.block_size
    return found


def _moved_share(problem: Problem, rehearsal: Rehearsal) -> np.ndarray:
    """[models] Share of the groups with a model that it leaves."""
    first = [one for one in rehearsal.episodes if one.start_s == 0]
    has = Counter(name for one in first for name in one.group.models)
    left: Counter[str] = Counter()
    for one in first:
        then = [
            name
            for other in rehearsal.episodes
            if other.start_s == one.end_s
            and other.group.devices == one.group.devices
            and other.group.node_id == one.group.node_id
            for name in other.group.models
        ]
        if one.end_s < math.inf:
            left.update(set(one.group.models) - set(then))
    return np.array([left[model.name] / max(1, has[model.name]) for model in problem.models])
