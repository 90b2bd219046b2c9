"""What is asked of the cluster: when requests come and how long they are."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from bench.rebalance.devices import Device
from tideway.bench.arrivals import renewal_times
from tideway.bench.traces import read_trace

QUANTILES = (0.0, 0.5, 0.8, 0.95, 0.99, 0.999)
LENGTHS = {"S": (38, 113, 413, 1464), "M": (32, 173, 1288, 4208), "L": (55, 582, 3113, 5166)}
"""P50, P80, P95 and P99 of Llumnix's power-law lengths (its table 1; means 128, 256 and 512 tokens)."""
LEAST_TOKENS, MOST_TOKENS = 8, 6000
MIXES = ("S-S", "M-M", "L-L", "S-L", "L-S")
"""Prompts - outputs."""


class Job(msgspec.Struct, frozen=True):
    at_s: float
    prompt_tokens: int
    output_tokens: int
    is_high: bool = False


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`mix`: one of `MIXES`, or the path of a trace: a run of its requests, at its times too if it has any, stretched to the
    rate."""

    mix: str
    rate_rps: float
    num_requests: int
    cv: float = 1.0
    """Of the intervals between arrivals, gamma distributed: 1 is Poisson."""
    high_share: float = 0.0


def power_law(kind: str, num: int, rng: np.random.Generator, max_tokens: int) -> np.ndarray:
    """Lengths with the quantiles of `kind`: between two of them the share of requests that are longer falls as a power of
    the length. Scaled where `max_tokens` is less than Llumnix's."""
    knots = -np.log1p(-np.array(QUANTILES))
    lengths = np.log([LEAST_TOKENS, *LENGTHS[kind], MOST_TOKENS])
    drawn = np.exp(np.interp(rng.exponential(size=num), knots, lengths))
    return np.maximum(1, np.rint(drawn * min(1.0, max_tokens / MOST_TOKENS))).astype(np.int64)


def draw_jobs(workload: Workload, device: Device, seed: int) -> list[Job]:
    """Seeded; in order of arrival. Each quantity draws from the seed for itself, so that the same requests come at every
    rate and priorities change nothing else. Raises `TraceError` or `OSError` for a trace that cannot be read."""
    num, rate_rps = workload.num_requests, workload.rate_rps
    first, second, third, fourth = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(4))
    at_s = renewal_times([(np.inf, rate_rps)], workload.cv, third, num_requests=num)
    if workload.mix in MIXES:
        kind, output_kind = workload.mix.split("-")
        prompts = power_law(kind, num, first, device.max_length)
        outputs = power_law(output_kind, num, second, device.max_length)
    else:
        trace = read_trace(Path(workload.mix))
        start = int(first.integers(max(1, trace.prompt_tokens.size - num)))
        picked = (start + np.arange(num)) % trace.prompt_tokens.size
        prompts = np.minimum(trace.prompt_tokens[picked], device.max_length)
        outputs = np.minimum(trace.output_tokens[picked], device.max_length)
        if trace.at_s is not None and trace.at_s.size >= num:
            times = trace.at_s[picked] - trace.at_s[start]
            at_s = times * (num / rate_rps / times[-1])
    is_high = fourth.random(num) < workload.high_share
    columns = (at_s.tolist(), prompts.tolist(), outputs.tolist(), is_high.tolist())
    return [Job(*row) for row in zip(*columns, strict=True)]
