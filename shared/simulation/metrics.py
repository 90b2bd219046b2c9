"""What a simulated run was like, per model and in all: latencies as the user saw them, plain and over what a request takes
alone (SeaLLM, section 6.1), objectives met, tokens, and how busy instances were."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from shared.placement.problem import ModelPrediction, Prediction
from shared.simulation.itl import Itl, ItlHistogram


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel columns of n requests, in the order of their numbers."""

    models: tuple[str, ...]
    """Models that `model` indexes."""
    model: np.ndarray
    """[n] int"""
    is_online: np.ndarray
    """[n] bool"""
    arrival_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    """Output tokens that were asked for."""
    num_tokens: np.ndarray
    """Output tokens that came."""
    ttft_s: np.ndarray
    """nan: no token came."""
    tpot_s: np.ndarray
    """Mean time between its tokens; nan with fewer than two."""
    latency_s: np.ndarray
    """Time to the end; of one that had not ended when the run was over, until then; nan: it found no group, or was
    refused."""
    is_done: np.ndarray
    """[n] bool: has all its tokens."""


class Spread(msgspec.Struct, frozen=True):
    """Spread of a latency, in seconds (or of one over another); 0 without any request."""

    mean: float = 0.0
    p50: float = 0.0
    p99: float = 0.0


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of a model or of all. Latencies, attainment and normalised latency are of online requests."""

    num_requests: int = 0
    """Online ones."""
    num_unserved: int = 0
    """Requests among them that found no group, were refused, or had not ended when the run was over."""
    attainment: float = 1.0
    """Share of requests that end within their SLO."""
    normalised_latency: float = 0.0
    """Mean of latency over its model's mean execution time; of those that were taken."""
    latency_s: Spread = Spread()
    ttft_s: Spread = Spread()
    tpot_s: Spread = Spread()
    itl_s: Itl = Itl()
    """The gap before each token after the first, where TPOT is a request's mean."""
    requests_s: float = 0.0
    """Requests that ended, per second."""
    tokens_s: float = 0.0
    """Output of online requests, a second."""
    offline_requests: int = 0
    """Offline requests that ended."""
    offline_tokens_s: float = 0.0
    """Prompts and output of offline requests, a second."""
    use: float = 0.0
    """Share of the time of all devices in which they compute its steps."""


class RunMetrics(msgspec.Struct, frozen=True, kw_only=True):
    total: Metrics
    models: dict[str, Metrics]
    use: dict[str, float]
    """Instance -> share of the time in which it computes."""
    seconds: float
    """Virtual seconds that the run took."""


def spread(values: np.ndarray) -> Spread:
    """Spread of the values that are no nan."""
    known = values[~np.isnan(values)]
    if not known.size:
        return Spread()
    return Spread(float(known.mean()), *(float(value) for value in np.percentile(known, [50, 99])))


def measure(
    requests: Requests,
    execution_s: Mapping[str, float],
    slo_scale: Callable[[str], float],
    use: Mapping[str, float],
    seconds: float,
    model_use: Mapping[str, float] = {},
    itl: Mapping[str, ItlHistogram] = {},
) -> RunMetrics:
    """`execution_s`: mean execution time of each model; requests of a model without one (it fits nowhere) miss their SLO.
    `slo_scale`: of a model. `seconds`: length of the run. `model_use`: `Metrics.use`, by model. `itl`: of online
    requests, by model; nothing where it is not known."""
    alone_s = np.array([execution_s.get(name, np.nan) for name in requests.models])[requests.model]
    normalised = requests.latency_s / alone_s
    scales = np.array([slo_scale(name) for name in requests.models])[requests.model]
    meets = requests.is_done & (normalised <= scales)

    def of(rows: np.ndarray, use: float, itl: ItlHistogram) -> Metrics:
        online, offline = rows & requests.is_online, rows & ~requests.is_online
        num = int(online.sum())
        seen = offline & ~np.isnan(requests.ttft_s)
        offline_tokens = requests.num_tokens[offline].sum() + requests.prompt_tokens[seen].sum()
        return Metrics(
            num_requests=num,
            num_unserved=int((online & ~requests.is_done).sum()),
            attainment=float(meets[online].mean()) if num else 1.0,
            normalised_latency=spread(normalised[online]).mean,
            latency_s=spread(requests.latency_s[online]),
            ttft_s=spread(requests.ttft_s[online]),
            tpot_s=spread(requests.tpot_s[online]),
            itl_s=itl.summary(),
            requests_s=float((online & requests.is_done).sum() / seconds),
            tokens_s=float(requests.num_tokens[online].sum() / seconds),
            offline_requests=int((offline & requests.is_done).sum()),
            offline_tokens_s=float(offline_tokens / seconds),
            use=use,
        )

    return RunMetrics(
        total=of(np.ones(len(requests.model), np.bool_), sum(model_use.values()), ItlHistogram.merged(itl.values())),
        models={
            name: of(requests.model == index, model_use.get(name, 0.0), itl.get(name) or ItlHistogram())
            for index, name in enumerate(requests.models)
        },
        use=dict(use),
        seconds=seconds,
    )


def prediction(metrics: RunMetrics) -> Prediction:
    """What placement asks for."""
    return Prediction(
        attainment=metrics.total.attainment,
        normalised_latency=metrics.total.normalised_latency,
        models={
            name: ModelPrediction(
                num_requests=one.num_requests,
                attainment=one.attainment,
                normalised_latency=one.normalised_latency,
                mean_latency_s=one.latency_s.mean,
                p99_latency_s=one.latency_s.p99,
                mean_ttft_s=one.ttft_s.mean,
                p99_ttft_s=one.ttft_s.p99,
                mean_tpot_s=one.tpot_s.mean,
            )
            for name, one in metrics.models.items()
        },
        offline_tokens_s=metrics.total.offline_tokens_s,
        use=metrics.use,
    )
