"""Arrival times of requests. Pure: a specification and a generator of random numbers in, sorted seconds out.

Rates that change (phases, rates of a trace) are renewal processes in operational time: intervals of mean 1 and the given
coefficient of variation are laid along the integral of the rate and mapped back to time.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from tideway.bench.traces import TraceSource

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
RateSteps = list[tuple[float, float]]
"""(duration in seconds, requests per second), one after the other."""


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of everything that a workload file can choose by `kind`."""


class Gamma(Spec, frozen=True, kw_only=True, tag="gamma"):
    """Gamma distributed intervals: `cv` is their coefficient of variation, 1 is Poisson, 0 is constant."""

    rate_rps: Positive
    cv: NotNegative = 1.0


class Poisson(Spec, frozen=True, kw_only=True, tag="poisson"):
    rate_rps: Positive


class Constant(Spec, frozen=True, kw_only=True, tag="constant"):
    rate_rps: Positive


class Phase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    duration_s: Positive
    rate_rps: NotNegative


class Phases(Spec, frozen=True, kw_only=True, tag="phases"):
    """Phases of different rates, repeated to the end of the run. ON/OFF is two phases, one of rate 0."""

    phases: Annotated[list[Phase], Meta(min_length=1)]
    cv: NotNegative = 1.0


class Replay(Spec, frozen=True, kw_only=True, tag="trace"):
    """The requests of a trace at their times; where it has only rates, arrivals drawn at these."""

    trace: TraceSource
    cv: NotNegative = 1.0
    """Coefficient of variation of the intervals, where the trace has rates only."""


class Closed(Spec, frozen=True, kw_only=True, tag="closed"):
    """So many requests at once, the next when one ends: a backlog."""

    concurrency: Annotated[int, Meta(ge=1)]


Arrivals = Gamma | Poisson | Constant | Phases | Replay | Closed


def steps_of(arrivals: Gamma | Poisson | Constant | Phases) -> tuple[RateSteps, float]:
    """One cycle of rates, and the coefficient of variation. One rate for ever is a step of infinite duration."""
    match arrivals:
        case Phases():
            return [(phase.duration_s, phase.rate_rps) for phase in arrivals.phases], arrivals.cv
        case Gamma():
            return [(np.inf, arrivals.rate_rps)], arrivals.cv
        case Poisson():
            return [(np.inf, arrivals.rate_rps)], 1.0
        case Constant():
            return [(np.inf, arrivals.rate_rps)], 0.0


def renewal_times(
    steps: RateSteps,
    cv: float,
    rng: np.random.Generator,
    *,
    duration_s: float | None = None,
    num_requests: int | None = None,
    is_exact: bool = True,
    is_cyclic: bool = True,
) -> np.ndarray:
    """Arrival times (seconds, sorted) of a renewal process whose rate follows `steps`.

    At least one limit must be given. `is_exact` scales the drawn intervals so that as many requests arrive in
    `duration_s` as the rates say (as `vllm bench serve` does for a number of requests): a bursty process drawn plainly
    misses its rate by tens of percent in a short run. Raises `ValueError` where no request could ever arrive.
    """
    if duration_s is None and num_requests is None:
        raise ValueError("arrivals need a duration or a number of requests")
    times, masses = _cumulative(steps, duration_s, num_requests, is_cyclic)
    total = float(masses[-1])
    if total == 0:  # All of the run lies in a phase without load.
        return np.zeros(0)
    if is_exact:
        num = round(total)
        total = float(num)
        masses = masses * (total / masses[-1])
        positions = np.cumsum(_intervals(num + 1, cv, rng))
        positions = positions[:-1] * (total / positions[-1])
    else:
        positions = np.zeros(0)
        while not positions.size or positions[-1] < total:
            start = positions[-1] if positions.size else 0.0
            positions = np.append(positions, start + np.cumsum(_intervals(max(64, int(total)), cv, rng)))
        positions = positions[positions < total]
    return np.asarray(np.interp(positions[:num_requests], masses, times))


def _intervals(num: int, cv: float, rng: np.random.Generator) -> np.ndarray:
    if cv == 0:
        return np.ones(num)
    drawn: np.ndarray = rng.gamma(1 / cv**2, cv**2, num)
    return drawn


def _cumulative(
    steps: RateSteps, duration_s: float | None, num_requests: int | None, is_cyclic: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Corners of the integral of the rate, up to the first limit that is reached."""
    if not any(rate > 0 for _, rate in steps):
        raise ValueError("the rate of arrivals is zero throughout")
    times, masses = [0.0], [0.0]
    end_s = np.inf if duration_s is None else duration_s
    limit = np.inf if num_requests is None else float(num_requests)
    while times[-1] < end_s and masses[-1] < limit:
        for step_s, rate in steps:
            left_s = min(step_s, end_s - times[-1])
            if rate:
                left_s = min(left_s, (limit - masses[-1]) / rate)
            times.append(times[-1] + left_s)
            masses.append(masses[-1] + left_s * rate)
            if times[-1] >= end_s or masses[-1] >= limit:
                break
        if not is_cyclic:
            break
    return np.array(times), np.array(masses)
