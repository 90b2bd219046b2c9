"""What is asked of the cluster: when requests come and how long they are."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from bench.rebalance.cluster import Device
from shared.simulation.gateway import Job
from tideway.bench.arrivals import renewal_times
from tideway.bench.traces import Trace, read_trace, spread

QUANTILES = (0.0, 0.5, 0.8, 0.95, 0.99, 0.999)
MOST_TOKENS = 6000
LENGTHS = {
    "S": (8, 38, 113, 413, 1464, MOST_TOKENS),
    "M": (8, 32, 173, 1288, 4208, MOST_TOKENS),
    "L": (8, 55, 582, 3113, 5166, MOST_TOKENS),
    "P": (1000, 2000, 3700, 5200, 5800, MOST_TOKENS),
    "T": (6, 14, 20, 28, 34, 60),
}
"""At `QUANTILES`: S, M and L are Llumnix's power-law lengths (its table 1; means 128, 256 and 512 tokens); P and T prompts
and answers of a service that completes what is before it, as code."""
MIXES = ("S-S", "M-M", "L-L", "S-L", "L-S")
"""Prompts - outputs."""
PREFILL_MIX = "P-T"


LONG_EVERY_S = 10.0
LONG_SHARE = 0.37
"""Share of a pool."""

LONGEST_PERCENTILE = 95
"""Prompts of a trace are scaled so that this one of them is no longer than the device allows."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`mix`: two names of `LENGTHS`, or the path of a trace: a run of its requests, at its times too if it has any,
    stretched to the rate."""

    mix: str
    rate_rps: float
    num_requests: int
    cv: float = 1.0
    """Coefficient of variation of the intervals between arrivals, gamma distributed: 1 is Poisson."""
    high_share: float = 0.0


def power_law(kind: str, num: int, rng: np.random.Generator, max_tokens: int) -> np.ndarray:
    """Lengths with the quantiles of `kind`: between two of them the share of requests that are longer falls as a power of
    the length. Scaled where `max_tokens` is less than Llumnix's."""
    knots = -np.log1p(-np.array(QUANTILES))
    drawn = np.exp(np.interp(rng.exponential(size=num), knots, np.log(LENGTHS[kind])))
    return np.maximum(1, np.rint(drawn * min(1.0, max_tokens / MOST_TOKENS))).astype(np.int64)


def chats_and_long_prompts(rate_rps: float, duration_s: float, device: Device, seed: int) -> list[Job]:
    """Short chats, Poisson arrivals, and a prompt of `LONG_SHARE` of a pool each `LONG_EVERY_S`."""
    draw = np.random.default_rng(seed)
    scale = device.max_length / MOST_TOKENS
    num_long = int(duration_s / LONG_EVERY_S)
    jobs = [Job(LONG_EVERY_S * (1 + number), long_prompt_tokens(device), 20) for number in range(num_long)]
    for at_s in renewal_times([(np.inf, rate_rps)], 1.0, draw, num_requests=int(rate_rps * duration_s)).tolist():
        prompt, output = int(scale * draw.integers(100, 300)), int(scale * draw.integers(200, 700))
        jobs.append(Job(at_s, prompt, output))
    return sorted(jobs, key=lambda job: job.at_s)


def long_prompt_tokens(device: Device) -> int:
    return int(LONG_SHARE * device.pool_tokens)


def is_mix(name: str) -> bool:
    return all(kind in LENGTHS for kind in name.split("-"))


@cache
def _read(path: str) -> Trace:
    return read_trace(Path(path))


def draw_jobs(workload: Workload, device: Device, seed: int) -> list[Job]:
    """Seeded; in order of arrival. Each quantity draws from the seed for itself, so that the same requests come at every
    rate and priorities change nothing else. Raises `TraceError` or `OSError` for a trace that cannot be read."""
    num, rate_rps = workload.num_requests, workload.rate_rps
    first, second, third, fourth = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(4))
    at_s = renewal_times([(np.inf, rate_rps)], workload.cv, third, num_requests=num)
    if is_mix(workload.mix):
        kind, output_kind = workload.mix.split("-")
        prompts = power_law(kind, num, first, device.max_length)
        outputs = power_law(output_kind, num, second, device.max_length)
    else:
        trace = _read(workload.mix)
        start = int(first.integers(max(1, trace.prompt_tokens.size - num)))
        picked = (start + np.arange(num)) % trace.prompt_tokens.size
        scale = min(1.0, device.max_length / float(np.percentile(trace.prompt_tokens, LONGEST_PERCENTILE)))
        prompts = np.clip(np.rint(scale * trace.prompt_tokens[picked]).astype(np.int64), 1, device.max_length)
        outputs = np.minimum(trace.output_tokens[picked], device.max_length)
        if trace.at_s is not None and trace.at_s.size >= num:
            times = spread(trace.at_s[picked], trace.grid_s, third) if trace.grid_s else trace.at_s[picked]
            times = times - times[0]
            at_s = times * (num / rate_rps / times[-1])
    is_high = fourth.random(num) < workload.high_share
    columns = (at_s.tolist(), prompts.tolist(), outputs.tolist(), is_high.tolist())
    return [Job(*row) for row in zip(*columns, strict=True)]
