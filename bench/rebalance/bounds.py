"""What priorities could bring at most on a device, whatever the policy: against which the experiment is read.

`alone_s` is the time of a request with an instance of its own, or beside so many tokens. `ideal` runs the requests on
instances between which they move at no cost: at each moment those of high priority are spread over so many hosts, and the
normal ones so over all instances, that the sum over requests of weight times step time is least, a high request weighing
so much more than a normal one. Normal requests can be divided, prompts of others take no time, memory is one for all. A
greater weight trades more of the normal requests' time for that of the high ones, so several weights give the curve of what
can be had for what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.rebalance.cluster import Device
from shared.costs.model import StepShape
from shared.simulation.gateway import Job

TICK_S = 0.1
WEIGHTS = (4.0, 8.0, 16.0, 1000.0)


class Latencies(NamedTuple):
    """Means, seconds."""

    high_s: float
    normal_s: float


class Curve(NamedTuple):
    """Over `WEIGHTS`, in order, against the same requests without priorities."""

    gains: list[float]
    """How many times lower the latency of high priority is."""
    losses: list[float]
    """By what the latency of normal priority is multiplied."""

    def gain_at(self, loss: float) -> float:
        """The most that high requests gain where normal ones lose no more."""
        return float(np.interp(loss, [1.0, *self.losses], [1.0, *self.gains]))

    def loss_at(self, gain: float) -> float:
        """The least that normal requests lose for that gain; inf where no weight brings it."""
        return float(np.interp(gain, [1.0, *self.gains], [1.0, *self.losses], right=np.inf))


def mean_size(jobs: Sequence[Job]) -> float:
    """Tokens of a request over its steps: what one that runs holds at any time."""
    steps = sum(job.output_tokens for job in jobs)
    return sum(job.output_tokens * (job.prompt_tokens + job.output_tokens / 2) for job in jobs) / steps


def alone_s(device: Device, job: Job, beside_tokens: float = 0.0, beside_sequences: float = 0.0) -> float:
    """Time of the job with nothing but decodes of that many sequences beside it."""
    cost, prompt, steps = device.cost_model, job.prompt_tokens, job.output_tokens - 1
    context = prompt + job.output_tokens / 2 + beside_tokens
    step_s = cost.fixed_s + cost.decode_s * (1 + beside_sequences) + cost.decode_context_s * context
    return cost.predict(StepShape(prompt, prompt * prompt / 2)) + steps * step_s


def curve(device: Device, num_instances: int, runs: Sequence[Sequence[Job]]) -> Curve:
    """Curve of the means over all requests of the runs."""

    def mean(weight: float) -> Latencies:
        found = [ideal(device, num_instances, jobs, weight) for jobs in runs]
        high_s, normal_s = np.mean([list(one) for one in found], axis=0)
        return Latencies(float(high_s), float(normal_s))

    before, after = mean(1.0), [mean(weight) for weight in WEIGHTS]
    return Curve([before.high_s / one.high_s for one in after], [one.normal_s / before.normal_s for one in after])


def ideal(device: Device, num_instances: int, jobs: Sequence[Job], weight: float) -> Latencies:
    """`weight` 1: without priorities, first come, first served."""
    cost = device.cost_model
    num_blocks = num_instances * device.pool_tokens
    prompts = np.array([job.prompt_tokens for job in jobs], float)
    outputs = np.array([job.output_tokens for job in jobs], float)
    is_high = np.array([job.is_high for job in jobs])
    prefill_s = np.array([cost.predict(StepShape(job.prompt_tokens, job.prompt_tokens**2 / 2)) for job in jobs])
    starts_s = np.array([job.at_s for job in jobs]) + prefill_s
    done, end_s = np.ones(len(jobs)), np.zeros(len(jobs))
    running, waiting, coming, now = np.zeros(len(jobs), bool), list[int](), list(np.argsort(starts_s)[::-1]), 0.0
    while coming or waiting or running.any():
        while coming and starts_s[coming[-1]] <= now:
            waiting.append(int(coming.pop()))
        if weight != 1.0:
            waiting.sort(key=lambda number: (not is_high[number], number))
        used = float((prompts + done)[running].sum())
        while waiting and used + prompts[waiting[0]] <= num_blocks:
            used += prompts[waiting[0]]
            running[waiting.pop(0)] = True
        held = np.flatnonzero(running)
        now += TICK_S
        if held.size:
            extra_s = cost.decode_s + cost.decode_context_s * (prompts + done)[held]
            rates = _rates(cost.fixed_s, num_instances, extra_s, is_high[held] & (weight != 1.0), weight)
            done[held] += TICK_S * rates
            over = done[held] >= outputs[held]
            ended = held[over]
            end_s[ended] = now - (done[ended] - outputs[ended]) / rates[over]
            running[ended] = False
    taken_s = end_s - np.array([job.at_s for job in jobs])
    return Latencies(float(taken_s[is_high].mean()), float(taken_s[~is_high].mean()))


def _rates(fixed_s: float, num_instances: int, extra_s: np.ndarray, is_high: np.ndarray, weight: float) -> np.ndarray:
    """Tokens a second of each sequence; `extra_s`: by what each makes a step longer."""
    high_s, total_s = extra_s[is_high], float(extra_s[~is_high].sum())
    typical_s = total_s / max(1, extra_s.size - high_s.size)
    longest_first = np.argsort(-high_s)
    best_cost, rates = np.inf, np.empty(extra_s.size)
    for num_hosts in range(1, min(high_s.size, num_instances) + 1) if high_s.size else (1,):
        host_s, num_high = np.zeros(num_instances), np.zeros(num_instances)
        host_of = np.zeros(high_s.size, int)
        for number in longest_first:
            host_of[number] = host = int(np.argmin(host_s[:num_hosts]))
            host_s[host] += high_s[number]
            num_high[host] += 1
        normal_s = _divided(total_s, fixed_s + host_s + weight * num_high * typical_s)
        step_s = fixed_s + host_s + normal_s
        num_normal = normal_s / typical_s if typical_s else 0.0
        total = float(((weight * num_high + num_normal) * step_s).sum())
        if total < best_cost:
            best_cost = total
            rates[is_high] = 1 / step_s[host_of]
            rates[~is_high] = float((normal_s / step_s).sum()) / total_s if total_s else 0.0
    return rates


def _divided(total: float, burdens: np.ndarray) -> np.ndarray:
    """Amounts of sum `total` that make burden + 2 * amount equal wherever there is any: where the sum of costs is least."""
    ordered = np.sort(burdens)
    levels = (2 * total + np.cumsum(ordered)) / np.arange(1, burdens.size + 1)
    level = levels[np.flatnonzero(levels >= ordered)[-1]]
    return np.maximum(0.0, (level - burdens) / 2)
