"""Long traffic on one plan, simulated faithfully only in stretches: every step of a day of a million requests would take an
hour of a core.

    sampled = sample(problem, plan, num_stretches=24)

The estimate that searches go by (shared/placement/estimator.py) follows all requests; `num_stretches` stretches, one at
random in each equal part of the time, are simulated step by step as well. What the estimate has wrong in them it has wrong
elsewhere:

    mean  =  mean of the estimate over all requests  +  mean over the stretches' requests of (simulated - estimated)

The standard error follows from how the difference varies from one stretch to the next (a difference estimator of survey
sampling; Cochran, Sampling Techniques, 1977, section 7.8). A stretch is simulated from `LEAD_EXECUTIONS` before it, with an
empty fleet, until its requests have ended; a queue that is longer than that is too short in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from shared.placement.estimator import Estimator
from shared.placement.execution import execution_s
from shared.placement.problem import Plan, Problem
from shared.placement.rehearsal import Episode
from shared.placement.stretches import Stretch, between, mean_execution_s
from shared.simulation.deployment import LIVE, Serving, simulate
from shared.simulation.fleet import Fleet
from shared.simulation.itl import Itl, ItlHistogram

STRETCH_EXECUTIONS, LEAD_EXECUTIONS, TRAIL_EXECUTIONS = 20.0, 10.0, 3.0
"""Mean execution times of a stretch, of what arrives before it, and after it while its last requests run."""
BIN_SHARE = 0.25
"""Bins of the estimate, as a share of the mean execution time."""


class Mean(msgspec.Struct, frozen=True):
    """Over all online requests."""

    value: float
    error: float
    """Standard error."""


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    num_requests: int
    """Online ones of all the traffic."""
    num_simulated: int
    """Those that were simulated step by step, without those of leads and trails."""
    attainment: Mean
    normalised_latency: Mean
    ttft_s: Mean
    """Mean over the requests of the stretches that got a token; the estimate is not asked for it. Likewise the next."""
    tpot_s: Mean
    itl_s: Itl
    """Gaps of the requests of the stretches."""
    estimated_attainment: float
    """By the estimate alone; likewise the next."""
    estimated_latency: float


class Part(NamedTuple):
    """A stretch: sums over its online requests."""

    num: int
    late: float
    normalised: float
    ttft_s: float
    num_first: int
    """Requests that `ttft_s` is of; likewise the next."""
    tpot_s: float
    num_paced: int
    itl: ItlHistogram


class Cut(NamedTuple):
    """A stretch as it is simulated: its traffic begins with the lead."""

    problem: Problem
    since_s: float
    """Time of this traffic at which the stretch begins; likewise the next."""
    until_s: float
    longest_s: float
    """Latency of what finds no group: the time of the whole traffic, as in the estimate."""


Map = Callable[[Callable[[Cut], Part], Iterable[Cut]], Iterator[Part]]
"""The built-in `map`, or that of a pool of processes."""


def sample(
    problem: Problem,
    plan: Plan,
    serving: Serving = LIVE,
    *,
    num_stretches: int,
    seed: int = 0,
    in_order: Map = map,
) -> Sampled:
    """All stretches are simulated by `in_order`, whose results come in their order. ValueError: no online request, or
    stretches that are longer than the traffic together."""
    problem = msgspec.structs.replace(problem, execution_s=execution_s(problem))
    chosen = _stretches(problem, num_stretches, seed)
    late, normalised, at_s = _estimated(problem, plan)
    parts = list(in_order(partial(simulated, plan, serving, seed), (_cut(problem, stretch) for stretch in chosen)))
    inside = [(at_s >= one.since_s) & (at_s < one.until_s) for one in chosen]
    share = sum(part.num for part in parts) / len(at_s)

    def corrected(estimated: np.ndarray, sums: Sequence[float]) -> Mean:
        differences = [found - float(estimated[rows].sum()) for found, rows in zip(sums, inside, strict=True)]
        mean = _ratio(differences, [part.num for part in parts], share)
        return Mean(float(estimated.mean()) + mean.value, mean.error)

    lateness = corrected(late, [part.late for part in parts])
    return Sampled(
        num_requests=len(at_s), num_simulated=sum(part.num for part in parts),
        attainment=Mean(1.0 - lateness.value, lateness.error),
        normalised_latency=corrected(normalised, [part.normalised for part in parts]),
        ttft_s=_ratio([part.ttft_s for part in parts], [part.num_first for part in parts], share),
        tpot_s=_ratio([part.tpot_s for part in parts], [part.num_paced for part in parts], share),
        itl_s=ItlHistogram.merged(part.itl for part in parts).summary(),
        estimated_attainment=1.0 - float(late.mean()), estimated_latency=float(normalised.mean()),
    )  # fmt: skip


def _stretches(problem: Problem, num: int, seed: int) -> list[Stretch]:
    """One at random in each of `num` equal parts of the time, so that no daily or hourly pattern falls in with them."""
    seconds, traffic = mean_execution_s(problem), problem.traffic
    length, pitch = STRETCH_EXECUTIONS * seconds, traffic.interval_s / num
    if not traffic.is_online.any():
        raise ValueError("there are no online requests to sample")
    if pitch < length:
        told = f"{num} stretches of {length:.0f} s are more than the {traffic.interval_s:.0f} s of the traffic"
        raise ValueError(f"{told}: simulate it whole")
    begins = pitch * np.arange(num) + np.random.default_rng(seed).uniform(0.0, pitch - length, num)
    return [Stretch(begin, begin + length) for begin in begins.tolist()]


def _estimated(problem: Problem, plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whether each online request is late, its normalised latency, and when it arrives."""
    traffic = problem.traffic
    num_bins = math.ceil(traffic.interval_s / (BIN_SHARE * mean_execution_s(problem)))
    estimator = Estimator(problem, num_bins=num_bins, max_followed=2 * traffic.num_requests)
    served = estimator.served([[Episode(group) for group in plan.groups]])
    return served.is_late[0].astype(float), served.normalised[0], served.at_s


def _cut(problem: Problem, stretch: Stretch) -> Cut:
    seconds, traffic = mean_execution_s(problem), problem.traffic
    since_s = max(0.0, stretch.since_s - LEAD_EXECUTIONS * seconds)
    until_s = min(traffic.interval_s, stretch.until_s + TRAIL_EXECUTIONS * seconds)
    given = msgspec.structs.replace(problem, traffic=between(traffic, since_s, until_s))
    return Cut(given, stretch.since_s - since_s, stretch.until_s - since_s, traffic.interval_s)


def simulated(plan: Plan, serving: Serving, seed: int, cut: Cut) -> Part:
    """A stretch, step by step."""
    problem = cut.problem

    def watch(fleet: Fleet) -> None:
        fleet.gateway.itl_of_s = (cut.since_s, cut.until_s)

    outcome = simulate(problem, plan, serving, seed=seed, on_deployed=watch)
    found = outcome.requests
    mine = found.is_online & (found.arrival_s >= cut.since_s) & (found.arrival_s < cut.until_s)
    alone_s = np.array([problem.execution_s.get(name, math.nan) for name in found.models])[found.model[mine]]
    scales = np.array([problem.slo_scale_of(name) for name in found.models])[found.model[mine]]
    latency_s = np.nan_to_num(found.latency_s[mine], nan=cut.longest_s)
    meets = found.is_done[mine] & (latency_s <= scales * alone_s)
    ttft_s, tpot_s = found.ttft_s[mine], found.tpot_s[mine]
    return Part(
        num=int(mine.sum()), late=float((~meets).sum()), normalised=float(np.nansum(latency_s / alone_s)),
        ttft_s=float(np.nansum(ttft_s)), num_first=int(np.count_nonzero(~np.isnan(ttft_s))),
        tpot_s=float(np.nansum(tpot_s)), num_paced=int(np.count_nonzero(~np.isnan(tpot_s))),
        itl=outcome.itl,
    )  # fmt: skip


def _ratio(sums: Sequence[float], counts: Sequence[int], share: float) -> Mean:
    """Sum over sum of stretches. `share`: of all requests that they are."""
    total, num = np.array(sums, float), np.array(counts, float)
    mean = float(total.sum() / max(1.0, num.sum()))
    beyond = total - mean * num
    spread = float(np.sqrt(len(total) / max(1, len(total) - 1) * np.sum(beyond**2)))
    return Mean(mean, spread / max(1.0, float(num.sum())) * math.sqrt(max(0.0, 1.0 - share)))
