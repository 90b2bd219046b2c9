"""Services and their requests, after SeaLLM's section 6.1: a model and requests of alike lengths make a service.

Lengths of chats and of summaries are put into as many clusters as there are services (k-means), and each cluster is given a
model at random. Services differ in popularity (Zipf), their rates change slowly, and their arrivals are bursts: a renewal
process with gamma intervals. The paper takes the arrivals from the Azure function trace, which is not here: the shape of
each service's rate is that of a production model (ServeGen's rates) where the file is present, else a random walk.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from shared.placement.problem import Traffic
from tideway.bench.arrivals import RateSteps, renewal_times
from tideway.bench.lengths import LogNormal, sample_lengths
from tideway.bench.traces import Trace, read_trace

TRACES = Path("../shared/traces")
CHAT, SUMMARIES, RATES = "sharegpt_8k_lengths.csv", "arxiv_summarization_lengths.csv", "servegen_model_rates.csv"
TABLE_1 = {
    CHAT: (LogNormal(mean_tokens=73, cv=1.0, max_tokens=1024), LogNormal(mean_tokens=427, cv=0.8, max_tokens=2048)),
    SUMMARIES: (
        LogNormal(mean_tokens=13187, cv=0.5, min_tokens=1000, max_tokens=16000),
        LogNormal(mean_tokens=21, cv=1.0, max_tokens=256),
    ),
}
"""Prompt and output tokens by SeaLLM's table 1, where a file is not present."""

SHAPES = ("llama-2-7b", "llama-2-13b", "llama-2-70b", "opt-6.7b")
NUM_SAMPLED = 2000
"""Requests of each data set that are clustered."""
NUM_ROUNDS = 50
"""Most rounds of k-means."""

Lengths = np.ndarray
"""[n, 2]: prompt and output tokens."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    rate_rps: float
    """Over all services."""
    num_services: int = 8
    length_scale: float = 0.5
    """Scale of prompts and outputs of the data sets. With 1, 50 req/s of all shapes would be more than 32 A800 can
    compute."""
    max_tokens: int = 4096
    """Most tokens of prompt and output: Llama-2's context. Longer requests are left out."""
    popularity: float = 0.7
    """Exponent of Zipf's law, over services in random order."""
    cv: float = 3.0
    """Coefficient of variation of a service's intervals between arrivals."""
    window_s: float = 20.0
    """How long a service's rate stays as it is: one window of the trace of rates."""
    num_consecutive: int = 1
    """Requests of one service that come one after the other: the order of the services is shuffled in such runs, arrival
    times stay (the paper's skew). 1: as drawn."""
    output_error: float = 0.0
    """Standard deviation of a Gaussian that is added to each output length, in output lengths (the paper's accuracy of
    profiles); the history has none."""
    turn_s: float = math.inf
    """Time of a turn: from then on the most popular service has the share of the least popular one, the second that of
    the last but one, and so on."""
    services_seed: int = 1
    """Seed of lengths, models and popularity."""


class Service(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    shape: str
    """The model's."""
    share: float
    """Share of the requests."""
    lengths: Lengths
    """Lengths from which requests are drawn."""


def data_set(name: str, num: int, rng: np.random.Generator, folder: Path = TRACES) -> Lengths:
    path = folder / name
    if path.exists():
        trace = _trace(path)
        drawn = rng.integers(0, len(trace.prompt_tokens), num)
        return np.stack([trace.prompt_tokens[drawn], trace.output_tokens[drawn]], axis=1)
    return np.stack([sample_lengths(lengths, num, rng) for lengths in TABLE_1[name]], axis=1)


def clusters(points: np.ndarray, num: int, rng: np.random.Generator) -> np.ndarray:
    """k-means (Lloyd's, begun as k-means++): the cluster of each of n points ([n, d]), none of which is empty."""
    centres = points[[rng.integers(len(points))]]
    while len(centres) < num:
        near = _squares(points, centres).min(1)
        centres = np.concatenate([centres, points[[rng.choice(len(points), p=near / near.sum())]]])
    belongs = np.zeros(len(points), int)
    for _ in range(NUM_ROUNDS):
        before, belongs = belongs, _squares(points, centres).argmin(1)
        if (belongs == before).all():
            break
        centres = np.stack(
            [points[belongs == one].mean(0) if (belongs == one).any() else centres[one] for one in range(num)]
        )
    return belongs


def services(workload: Workload, folder: Path = TRACES) -> list[Service]:
    """By falling number of tokens of a request."""
    rng = np.random.default_rng(workload.services_seed)
    lengths = np.concatenate([data_set(name, NUM_SAMPLED, rng, folder) for name in (CHAT, SUMMARIES)])
    lengths = lengths[lengths.sum(1) <= workload.max_tokens]
    lengths = np.maximum(1, np.rint(lengths * workload.length_scale)).astype(np.int64)
    num = workload.num_services
    belongs = clusters(np.log(lengths), num, rng)
    shapes = rng.permutation([SHAPES[index % len(SHAPES)] for index in range(num)])
    weights = rng.permutation((1.0 + np.arange(num)) ** -workload.popularity)
    order = sorted(range(num), key=lambda one: -float(lengths[belongs == one].mean(0).sum()))
    return [
        Service(
            name=f"service-{number}-{shapes[one]}".replace(".", "-"), shape=str(shapes[one]),
            share=float(weights[one] / weights.sum()), lengths=lengths[belongs == one],
        )
        for number, one in enumerate(order)
    ]  # fmt: skip


def rate_shapes(workload: Workload, num_windows: int, seed: int, folder: Path = TRACES) -> np.ndarray:
    """[services, windows]: each service's rate over its mean."""
    rng = np.random.default_rng([seed, 1])
    num, path = workload.num_services, folder / RATES
    if path.exists():
        known = [np.array([rate for _, rate in steps]) for steps in _trace(path).rates.values()]
        rows = []
        for one in range(num):
            rates = known[one % len(known)]
            rows.append(np.take(rates, np.arange(num_windows) + rng.integers(len(rates)), mode="wrap"))
        shapes = np.stack(rows)
    else:
        shapes = np.exp(np.cumsum(rng.normal(0.0, 0.2, (num, num_windows)), axis=1))
    mean: np.ndarray = shapes.mean(1, keepdims=True)
    return np.asarray(shapes / mean)


def draw(
    workload: Workload, history_s: float, run_s: float, seed: int, *, known: list[Service] | None = None
) -> tuple[Traffic, Traffic]:
    """What a placement is searched with, and what comes after it. The names of the traffic's models are the services'."""
    known = services(workload) if known is None else known
    end_s = history_s + run_s
    shapes = rate_shapes(workload, int(np.ceil(end_s / workload.window_s)), seed)
    columns = []
    shares = sorted(service.share for service in known)
    turned = dict(zip(shares, reversed(shares), strict=True))
    turns = np.arange(shapes.shape[1]) * workload.window_s >= history_s + workload.turn_s
    for index, service in enumerate(known):
        rng = np.random.default_rng([seed, 2, index])
        popularity = np.where(turns, turned[service.share], service.share)
        steps: RateSteps = [
            (workload.window_s, float(workload.rate_rps * share * shape))
            for share, shape in zip(popularity, shapes[index], strict=True)
        ]
        arrivals = renewal_times(steps, workload.cv, rng, duration_s=end_s)
        lengths = service.lengths[rng.integers(0, len(service.lengths), len(arrivals))]
        columns.append(np.column_stack([np.full(len(arrivals), index), arrivals, lengths]))
    rows = np.concatenate(columns)
    rows = rows[np.argsort(rows[:, 1], kind="stable")]
    past, future = rows[rows[:, 1] < history_s], rows[rows[:, 1] >= history_s]
    future[:, 1] -= history_s
    rng = np.random.default_rng([seed, 3])
    if workload.num_consecutive > 1:
        future = _in_runs(future, workload.num_consecutive, rng)
    if workload.output_error:
        error = rng.normal(0.0, workload.output_error, len(future))
        longest = workload.max_tokens - future[:, 2]
        future[:, 3] = np.clip(np.rint(future[:, 3] * (1 + error)), 1, longest)
    names = tuple(service.name for service in known)
    return _traffic(names, past, history_s), _traffic(names, future, run_s)


def _in_runs(rows: np.ndarray, num: int, rng: np.random.Generator) -> np.ndarray:
    """The same requests at the same times, but so many of a service one after the other."""
    runs: list[np.ndarray] = []
    for index in np.unique(rows[:, 0]):
        own = np.flatnonzero(rows[:, 0] == index)
        runs += [own[start : start + num] for start in range(0, len(own), num)]
    order = np.concatenate([runs[one] for one in rng.permutation(len(runs))])
    shuffled = rows[order]
    shuffled[:, 1] = rows[:, 1]
    return shuffled


def _squares(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    distance: np.ndarray = ((points[:, None, :] - centres[None]) ** 2).sum(2)
    return distance


def _traffic(names: tuple[str, ...], rows: np.ndarray, interval_s: float) -> Traffic:
    return Traffic(
        names, rows[:, 0].astype(np.int32), rows[:, 1], rows[:, 2].astype(np.int32), rows[:, 3].astype(np.int32),
        np.ones(len(rows), np.bool_), interval_s,
    )  # fmt: skip


@cache
def _trace(path: Path) -> Trace:
    return read_trace(path)
