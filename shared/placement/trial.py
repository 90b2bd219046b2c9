"""What a change of the placement would have been good for: the traffic of late is estimated on the plan that runs, on the
other one, and while one changes to the other, with all that draining, restarting and loading take (rehearsal.py). So the
gain of the new plan and the price of going there are one number, in requests that are late.

How long the traffic stays as it is, nobody knows: the change is tried on every horizon (stretches.py), from the last
interval to 16 of them, and has to pay on their mean. A burst, or what suits the last interval alone, is over before its plan
has paid; what lasts is followed after about the time in which the change pays. And most of that traffic is another than the
plan was searched with, of which that says too much good: the best of many is also the luckiest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from shared.placement.estimator import NUM_BINS, Estimator, Served
from shared.placement.execution import execution_s
from shared.placement.plan import Horizon, Plan, Trial, unfairness
from shared.placement.problem import Problem
from shared.placement.rehearsal import Episode, Rehearsal, rehearse
from shared.placement.stretches import STRETCH_EXECUTIONS, between, busier, horizons, lasting, mean_execution_s, spread

BIN_SHARE = 0.2
"""Share of the mean execution time that a bin of the estimates lasts."""
MOST_BINS = 720
"""Between one horizon and the next; where that is longer, stretches are estimated."""
LEAD_EXECUTIONS = 6.0
"""Mean execution times before a stretch, in which what is there when it begins has come."""
AFTER_EXECUTIONS = 20.0
"""Mean execution times after a change, in which requests may still be late because of it."""
NUM_BLOCKS = 16
"""Blocks of a horizon, whose gains are taken to be independent of each other."""


def try_change(problem: Problem, plan: Plan) -> Trial:
    """Tries the change from `problem.incumbent` to the plan, both of which fit the nodes."""
    assert problem.incumbent is not None
    rehearsal = rehearse(problem, problem.incumbent, plan)
    stay = [Episode(group) for group in problem.incumbent.groups]
    free = [Episode(group) for group in plan.groups]
    record = _Record(problem)
    found: list[Horizon] = []
    seen: list[list[Served]] = []
    """Requests served from each horizon to the next longer one."""
    nearer_s = 0.0
    held_bytes = np.zeros(len(problem.models))
    for seconds in horizons(problem.traffic.interval_s, record.evidence):
        since_s, until_s = record.evidence.interval_s - seconds, record.evidence.interval_s - nearer_s
        seen.append(record.served(since_s, until_s, [stay, free]))
        if len(seen) == 1:
            held_bytes = _held_bytes(problem, seen[0], seconds)
        nearer_s = seconds
        if seconds > rehearsal.seconds:
            after_s = min(record.evidence.interval_s, since_s + rehearsal.seconds + record.after_s)
            change = record.served(since_s, after_s, [rehearsal.episodes, free])
            found.append(_horizon(seconds, since_s, seen, change))
    return Trial(
        change_s=rehearsal.seconds, lost_device_s=rehearsal.lost_device_s, interrupted=rehearsal.interrupted,
        moved_bytes=int(np.sum(_moved_share(problem, rehearsal) * held_bytes)), horizons=found,
        busier_gain=_busier_gain(problem, plan),
    )  # fmt: skip


def _busier_gain(problem: Problem, plan: Plan) -> float:
    assert problem.incumbent is not None
    seconds = mean_execution_s(problem)
    asked = busier(lasting(problem, MOST_BINS * BIN_SHARE * seconds))
    estimator = Estimator(asked, num_bins=max(NUM_BINS, math.ceil(asked.traffic.interval_s / (BIN_SHARE * seconds))))
    before, after = estimator.outcomes([problem.incumbent.groups, plan.groups])
    return after.attainment - before.attainment


class _Record:
    """What arrived, as it is estimated."""

    def __init__(self, problem: Problem) -> None:
        self.evidence = problem.traffic if problem.evidence is None else problem.evidence
        problem = msgspec.structs.replace(problem, traffic=self.evidence)
        self._problem = msgspec.structs.replace(problem, execution_s=execution_s(problem))
        seconds = mean_execution_s(problem)
        self.after_s = AFTER_EXECUTIONS * seconds
        self._bin_s, self._lead_s, self._stretch_s = (
            BIN_SHARE * seconds, LEAD_EXECUTIONS * seconds, STRETCH_EXECUTIONS * seconds,
        )  # fmt: skip

    def served(self, since_s: float, until_s: float, courses: Sequence[Sequence[Episode]]) -> list[Served]:
        """The requests of that time, with times of the evidence, by the stretches that stand for it. Courses begin with each
        stretch, and are before it as at its beginning."""
        stretches = spread(since_s, until_s, MOST_BINS * self._bin_s, self._stretch_s)
        share = sum(one.seconds for one in stretches) / (until_s - since_s)
        found = []
        for stretch in stretches:
            lead_s = min(self._lead_s, stretch.since_s)
            traffic = between(self.evidence, stretch.since_s - lead_s, stretch.until_s)
            problem = msgspec.structs.replace(self._problem, traffic=traffic)
            estimator = Estimator(problem, num_bins=math.ceil(traffic.interval_s / self._bin_s))
            served = estimator.served([[_later(one, lead_s) for one in course] for course in courses])
            mine = served.at_s >= lead_s
            found.append(
                Served(
                    at_s=served.at_s[mine] + stretch.since_s - lead_s, weight=served.weight[mine] / share,
                    model=served.model[mine], tokens=served.tokens[mine], execution_s=served.execution_s,
                    is_late=served.is_late[:, mine], normalised=served.normalised[:, mine],
                )
            )  # fmt: skip
        return found


def _later(episode: Episode, seconds: float) -> Episode:
    """What there is at the beginning was there before."""
    return Episode(episode.group, episode.start_s + seconds if episode.start_s else 0.0, episode.end_s + seconds)


def _horizon(seconds: float, since_s: float, parts: Sequence[Sequence[Served]], change: Sequence[Served]) -> Horizon:
    """`parts`: on the plan that runs, and on the other; `change`: while one changes to the other, and on the other."""
    seen = [one for part in parts for one in part]
    lengths = [sum(len(one.at_s) for one in part) for part in parts]
    part_of = np.repeat(np.arange(len(parts)), lengths)
    at_s, weight = np.concatenate([one.at_s for one in seen]), np.concatenate([one.weight for one in seen])
    total = max(1e-9, float(weight.sum()))
    block = np.clip(((at_s - since_s) / seconds * NUM_BLOCKS).astype(np.int64), 0, NUM_BLOCKS - 1)

    def means(values: Sequence[np.ndarray], changing: Sequence[np.ndarray]) -> tuple[float, float, float, float]:
        """On the plan that runs, with the change, and on the other one, of values [plans, n]; and the standard error of the
        gain, from how it differs between blocks of time. That the traffic was another in one part than in the next is
        no error: horizons are there for it."""
        stay, free = np.concatenate(values, axis=1).astype(float)
        gain = stay - free
        expected = np.bincount(part_of, weight * gain) / np.maximum(1e-9, np.bincount(part_of, weight))
        beyond = np.bincount(block, weight * (gain - expected[part_of]), minlength=NUM_BLOCKS)
        error = float(np.sqrt(NUM_BLOCKS / (NUM_BLOCKS - 1) * np.sum(beyond**2)) / total)
        cost = sum(
            float((each[0].astype(float) - each[1]) @ one.weight) for each, one in zip(changing, change, strict=True)
        )
        on_free = float(free @ weight) / total
        return float(stay @ weight) / total, on_free + cost / total, on_free, error

    late = means([one.is_late for one in seen], [one.is_late for one in change])
    # While a change lasts, what is late because of it is late of some services only.
    stay, free = (_unfairness([(one.model, one.weight, one.is_late[place]) for one in seen]) for place in (0, 1))
    changing = _unfairness(
        [(one.model, one.weight, one.is_late[1]) for one in seen]
        + [(one.model, one.weight, one.is_late[0].astype(float) - one.is_late[1]) for one in change],
        num_counted=len(seen),
    )
    latency = means([one.normalised for one in seen], [one.normalised for one in change])
    return Horizon(
        seconds=seconds, num_requests=round(total),
        stay_attainment=1.0 - late[0], change_attainment=1.0 - late[1], free_attainment=1.0 - late[2],
        attainment_error=late[3], stay_latency=latency[0], change_latency=latency[1], free_latency=latency[2],
        latency_error=latency[3], stay_unfairness=stay, change_unfairness=changing, free_unfairness=free,
    )  # fmt: skip


def _unfairness(parts: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], *, num_counted: int | None = None) -> float:
    """`plan.unfairness` of requests. `parts`: models, weights, and whether (or by how much more) each request is late.
    `num_counted`: only the requests of so many parts count, of the others what is late; None: of all."""
    model = np.concatenate([part[0] for part in parts])
    weight = np.concatenate([part[1] for part in parts])
    late = np.bincount(model, weight * np.concatenate([part[2] for part in parts]))
    first = parts[:num_counted]
    num = np.bincount(
        np.concatenate([part[0] for part in first]), np.concatenate([part[1] for part in first]), minlength=len(late)
    )
    there = num > 0
    attained = np.clip(1.0 - late[there] / num[there], 0.0, 1.0)
    return unfairness(float(attained @ num[there]) / max(1e-9, float(num.sum())), attained.tolist())


def _held_bytes(problem: Problem, parts: Sequence[Served], seconds: float) -> np.ndarray:
    """[models] KV of the requests that there are at once on the plan that runs, on average over so long a time (Little's
    law)."""
    found = np.zeros(len(problem.models))
    for index, model in enumerate(problem.models):
        for served in parts:
            mine = served.model == index
            there_s = served.weight[mine] * served.normalised[0, mine] * served.execution_s[index]
            found[index] += float(there_s @ served.tokens[mine]) / seconds * model.block_bytes / model.block_size
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
            if other.start_s == one.end_s < other.end_s
            and other.group.devices == one.group.devices
            and other.group.node_id == one.group.node_id
            for name in other.group.models
        ]
        if one.end_s < math.inf:
            left.update(set(one.group.models) - set(then))
    return np.array([left[model.name] / max(1, has[model.name]) for model in problem.models])
