"""What is sent, live and simulated alike: the workloads that are compared, and another one that step times are
fitted to. Pure.

The lengths have the shape of published traces, scaled to models of some ten million parameters on one core: mean and
coefficient of variation of Azure's LLM inference trace 2023 (1,155 and 0.96 in, 211 and 0.77 out), of ShareGPT as
Sarathi-Serve publishes it (2,340 and 0.89, 439 and 0.61) and of Vidur's arXiv summaries (2,588 and 0.37, 291 and 1.82).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from tideway.bench.arrivals import Arrivals, Gamma, Phase, Phases
from tideway.bench.lengths import Lengths, LogNormal, Uniform
from tideway.bench.workload import PlannedRequest, StreamSpec, Workload, plan_requests

VOCABULARY = 4096
MODELS: dict[str, dict[str, int]] = {
    name: {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads // 3, "vocab_size": VOCABULARY, "max_position_embeddings": 1024,
    }
    for name, hidden, inner, layers, heads in (
        ("small", 384, 1024, 12, 6), ("medium", 576, 1536, 10, 9), ("large", 576, 1536, 20, 9)
    )
}  # fmt: skip
"""Llama shapes of 20 to 73 million parameters, with random weights."""
EMULATED_MODELS = {"small": "llama-2-7b", "medium": "llama-3.1-8b", "large": "llama-2-13b"}
"""Whose step times the models have where another device's are emulated: shapes of `placement.facts`."""
MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 448, 120
TENANT_MARK = "-of-"
"""Between the names of a run and of a tenant."""


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """A workload but for its rate and its seed."""

    name: str
    models: dict[str, float]
    """Shares of the requests."""
    prompt_tokens: Lengths
    output_tokens: Lengths
    cv: float
    """Coefficient of variation of the intervals between arrivals."""
    phases: tuple[tuple[float, float], ...] = ()
    """(seconds, rate over the mean rate), in a circle; empty: one rate throughout."""
    tenants: dict[str, float] = {}
    """Shares of the requests, which come independently of each other's; empty: one that has no name."""

    def arrivals(self, rate_rps: float) -> Arrivals:
        if not self.phases:
            return Gamma(rate_rps=rate_rps, cv=self.cv)
        phases = [Phase(duration_s=seconds, rate_rps=factor * rate_rps) for seconds, factor in self.phases]
        return Phases(phases=phases, cv=self.cv)


def _lengths(mean: float, cv: float, most: int) -> LogNormal:
    return LogNormal(mean_tokens=mean, cv=cv, min_tokens=2, max_tokens=most)


MIXES = (
    Mix(
        name="chat",  # Azure's lengths over 10
        models={"small": 0.5, "medium": 0.3, "large": 0.2}, cv=1.1,
        prompt_tokens=_lengths(115, 0.96, MAX_PROMPT_TOKENS), output_tokens=_lengths(21, 0.77, MAX_OUTPUT_TOKENS),
    ),
    Mix(
        name="bursts",  # ShareGPT's over 25
        models={"small": 1.0, "medium": 1.0, "large": 1.0}, cv=1.3, phases=((3.0, 1.7), (4.0, 0.475)),
        prompt_tokens=_lengths(94, 0.89, MAX_PROMPT_TOKENS), output_tokens=_lengths(18, 0.61, MAX_OUTPUT_TOKENS),
    ),
    Mix(
        name="summaries",  # arXiv's over 20
        models={"small": 0.2, "medium": 0.3, "large": 0.5}, cv=1.5,
        prompt_tokens=_lengths(129, 0.37, MAX_PROMPT_TOKENS), output_tokens=_lengths(15, 1.82, MAX_OUTPUT_TOKENS),
    ),
)  # fmt: skip
TENANTS = Mix(
    name="tenants",  # chats of one tenant beside three times as many requests of another, in bursts
    models=dict.fromkeys(MODELS, 1.0), cv=1.3, phases=((3.0, 1.7), (4.0, 0.475)), tenants={"calm": 0.25, "busy": 0.75},
    prompt_tokens=_lengths(115, 0.96, MAX_PROMPT_TOKENS), output_tokens=_lengths(21, 0.77, MAX_OUTPUT_TOKENS),
)  # fmt: skip
"""Only where it is asked for: earlier tables do not have it."""
CALIBRATION = Mix(
    name="calibration", models={"small": 1.0, "medium": 1.0, "large": 1.0}, cv=1.0, phases=((2.0, 1.5), (1.0, 0.0)),
    prompt_tokens=Uniform(min_tokens=4, max_tokens=300), output_tokens=Uniform(min_tokens=2, max_tokens=50),
)  # fmt: skip
"""Lengths are evenly spread, so that all kinds of steps are seen; pauses, in which one instance computes alone."""
SHORT, LONG = (
    msgspec.structs.replace(CALIBRATION, name=name, output_tokens=Uniform(min_tokens=least, max_tokens=most))
    for name, least, most in (("short", 2, 4), ("long", 60, 100))
)
"""What requests and what tokens cost the services is told apart by these."""


def planned(mix: Mix, rate_rps: float, duration_s: float, *, name: str, seed: int) -> list[PlannedRequest]:
    """A function of its arguments. `name` becomes part of the requests' ids; `tenant_of` tells whose each is."""
    streams = [
        StreamSpec(
            name=f"{name}{TENANT_MARK}{tenant}" if tenant else name, models=mix.models,
            arrivals=mix.arrivals(share * rate_rps), prompt_tokens=mix.prompt_tokens, output_tokens=mix.output_tokens,
        )
        for tenant, share in (mix.tenants or {"": 1.0}).items()
    ]  # fmt: skip
    return plan_requests(Workload(streams=streams, duration_s=duration_s, seed=seed))


def tenant_of(request: PlannedRequest) -> str:
    """Empty: one that has no name."""
    return request.stream.partition(TENANT_MARK)[2]


class Served(msgspec.Struct, frozen=True):
    """What became of a request, live or simulated. Seconds from the beginning of its run."""

    model: str
    arrival_s: float
    first_s: float
    last_s: float
    output_tokens: int
    server_ttft_s: float = 0.0
    """From the gateway's having the request to its writing the first token."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run."""

    normalised_latency: float
    """Mean over the requests of latency / mean execution time of the model (SeaLLM, equation 1)."""
    p99_ttft_s: float
    """At the gateway."""
    client_p99_ttft_s: float
    """At the client, from the time at which the request was to be sent: late where the client is."""
    throughput_tokens_s: float
    """Output tokens from the first arrival to the last token."""
    num_requests: int


def figures(served: Sequence[Served], execution_s: Mapping[str, float]) -> Figures:
    span_s = max(one.last_s for one in served) - min(one.arrival_s for one in served)
    return Figures(
        normalised_latency=float(np.mean([(one.last_s - one.arrival_s) / execution_s[one.model] for one in served])),
        p99_ttft_s=float(np.percentile([one.server_ttft_s for one in served], 99)),
        client_p99_ttft_s=float(np.percentile([one.first_s - one.arrival_s for one in served], 99)),
        throughput_tokens_s=sum(one.output_tokens for one in served) / span_s,
        num_requests=len(served),
    )
