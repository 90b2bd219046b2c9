"""Stretches of recorded traffic, ascending, in seconds of it. Pure.

An estimate moves on in bins, which must not be longer than about the time that requests take: of hours of traffic there are
too many of them to try hundreds of plans on. So what is estimated of a long time are stretches of it, evenly spread.

How long traffic stays as it was of late nobody knows. Every *horizon*, the last interval, or twice, four, eight, 16 times as
long and so on as far as there is evidence, is taken to be as likely to be like what comes. So an interval counts less the
longer ago it was, and none is without weight. Forecasts by a trend, or by the day before, know no more of the next hours
(`python -m bench.placement forecast`). Whether there will be more of it than ever yet nobody knows either, and where almost
all requests meet their SLOs, the record does not show how near to its end a plan is: it is estimated with more of them as
well.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from shared.placement.execution import execution_s
from shared.placement.problem import Problem, Traffic

NUM_HORIZONS = 5
MORE = 1.25
"""Times the requests that are recorded, which a plan is to have room for."""
STRETCH_EXECUTIONS = 20.0
"""Mean execution times that a stretch has at least: what was there when it begins has mostly ended then."""


class Stretch(NamedTuple):
    since_s: float
    until_s: float

    @property
    def seconds(self) -> float:
        return self.until_s - self.since_s


def evidence_s(interval_s: float) -> float:
    """How much traffic there should be to try a change on."""
    return interval_s * float(2 ** (NUM_HORIZONS - 1))


def mean_execution_s(problem: Problem) -> float:
    """Mean execution time of an online request; that of all models where there are none."""
    traffic, known = problem.traffic, execution_s(problem)
    seconds = np.array([known.get(name, 0.0) for name in traffic.models])
    counts = np.bincount(traffic.model[traffic.is_online], minlength=len(seconds)) * (seconds > 0)
    if not counts.any():
        return float(np.mean([*known.values()] or [1.0]))
    return float(counts @ seconds / counts.sum())


def between(traffic: Traffic, since_s: float, until_s: float) -> Traffic:
    """Times from `since_s` on."""
    there = slice(*np.searchsorted(traffic.arrival_s, [since_s, until_s]).tolist())
    return Traffic(
        traffic.models, traffic.model[there], traffic.arrival_s[there] - since_s, traffic.prompt_tokens[there],
        traffic.output_tokens[there], traffic.is_online[there], until_s - since_s,
    )  # fmt: skip


def spread(since_s: float, until_s: float, most_s: float, stretch_s: float) -> list[Stretch]:
    """Together at most so long, each about as long as it should be; the whole where that is not more."""
    seconds = until_s - since_s
    if seconds <= most_s:
        return [Stretch(since_s, until_s)]
    num = max(1, round(most_s / stretch_s))
    pitch, length = seconds / num, most_s / num
    # Each ends where its share of the time does, so that the last ones are there.
    return [Stretch(since_s + pitch * (index + 1) - length, since_s + pitch * (index + 1)) for index in range(num)]


def joined(traffic: Traffic, stretches: Sequence[Stretch]) -> Traffic:
    """One after the other."""
    parts = [between(traffic, one.since_s, one.until_s) for one in stretches]
    ends = np.cumsum([part.interval_s for part in parts])
    at_s = np.concatenate([part.arrival_s + end - part.interval_s for part, end in zip(parts, ends, strict=True)])
    model, prompt, output, is_online = (
        np.concatenate([part[column] for part in parts]) for column in (1, 3, 4, 5)
    )  # fmt: skip
    return Traffic(traffic.models, model, at_s, prompt, output, is_online, float(ends[-1]))


def thinned(problem: Problem, most_s: float) -> Problem:
    """The problem with at most so long of its traffic."""
    traffic = problem.traffic
    if traffic.interval_s <= most_s:
        return problem
    stretches = spread(0.0, traffic.interval_s, most_s, STRETCH_EXECUTIONS * mean_execution_s(problem))
    return _with(problem, joined(traffic, stretches))


def horizons(interval_s: float, evidence: Traffic) -> list[float]:
    """Ascending, as far as traffic is known. Silence before the first request is no evidence."""
    if not evidence.num_requests:
        return []
    known_s = evidence.interval_s - float(evidence.arrival_s[0])
    found: list[float] = []
    while (seconds := interval_s * 2 ** len(found)) < known_s * (1.0 - 1e-9):
        found.append(seconds)
    return [*found, known_s]


def lasting(problem: Problem, most_s: float) -> Problem:
    """The problem with stretches of the evidence instead of the traffic, at most so long together: of each time by its
    weight."""
    evidence = problem.evidence
    ends = [0.0, *horizons(problem.traffic.interval_s, evidence)] if evidence is not None else []
    if evidence is None or len(ends) <= 2:
        return thinned(problem, most_s)
    parts = list(pairwise(ends))
    # Of each horizon, an octave has the share of its length.
    weights = np.array(
        [sum((end - begin) / horizon for horizon in ends[number + 1 :]) for number, (begin, end) in enumerate(parts)]
    )
    lengths = np.array([end - begin for begin, end in parts])
    most_s = min(most_s, float(np.min(lengths / weights)) * float(weights.sum()))
    stretch_s = STRETCH_EXECUTIONS * mean_execution_s(problem)
    found = [
        stretch
        for (begin, end), share in zip(parts, weights / weights.sum(), strict=True)
        for stretch in spread(evidence.interval_s - end, evidence.interval_s - begin, share * most_s, stretch_s)
    ]
    return _with(problem, joined(evidence, sorted(found)))


def busier(problem: Problem) -> Problem:
    """Its traffic in less time, as if there were `MORE` requests of each model."""
    traffic = problem.traffic
    faster = traffic._replace(arrival_s=traffic.arrival_s / MORE, interval_s=traffic.interval_s / MORE)
    return _with(problem, faster)


def _with(problem: Problem, traffic: Traffic) -> Problem:
    """Execution times stay those of all of the problem's traffic."""
    return msgspec.structs.replace(problem, traffic=traffic, execution_s=execution_s(problem))
