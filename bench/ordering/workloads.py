"""Two models on one instance: what their steps cost, how long their requests are, and when these come."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import msgspec
import numpy as np

from shared.costs.model import CostModel, StepShape
from shared.simulation.gateway import Job
from tideway.bench.arrivals import renewal_times
from tideway.bench.lengths import LogNormal, sample_lengths
from tideway.bench.traces import TraceError, read_trace

LLAMA_7B_A100 = CostModel(
    fixed_s=0.010, prefill_token_s=6.5e-5, prefill_attention_s=2.6e-9, decode_s=3e-5, decode_context_s=3.6e-7,
    prefill_s=0.002,
)  # fmt: skip
"""Not measured: 13.5 GB of weights and 0.5 MB of KV a token at 1.4 TB/s, 13.5 GFLOP a token at 210 TFLOP/s."""
LLAMA_135M_CPU = CostModel(
    fixed_s=0.025, prefill_token_s=3.5e-4, prefill_attention_s=1e-7, decode_s=0.0025, decode_context_s=1e-6,
    mixed_s=0.006,
)  # fmt: skip
"""About what a 135M-parameter Llama shape takes on two cores: a decode is a tenth of a step's fixed cost."""

Lengths = tuple[np.ndarray, np.ndarray]
"""Prompt and output tokens, parallel, of which pairs are drawn."""


class Service(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    share: float
    """Share of the requests."""
    prompt: LogNormal
    output: LogNormal


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """An instance and what is asked of it. All orders get the same."""

    name: str
    device: str
    cost_model: CostModel
    """Cost model of both models."""
    max_step_tokens: int
    num_rows: int
    pool_tokens: int
    services: tuple[Service, Service]
    block_size: int = 32


def _lengths(mean_tokens: float, cv: float, max_tokens: int, min_tokens: int = 4) -> LogNormal:
    return LogNormal(mean_tokens=mean_tokens, cv=cv, min_tokens=min_tokens, max_tokens=max_tokens)


SEALLM_CHAT = Service(model="chat", share=0.5, prompt=_lengths(73, 1.0, 1024), output=_lengths(427, 0.8, 2048))
SEALLM_SUMMARIES = Service(
    model="summaries", share=0.5, prompt=_lengths(13187, 0.5, 16000, 1000), output=_lengths(21, 1.0, 256)
)
SEALLM = Setting(
    name="seallm",
    device="A100-like, both models Llama-2-7B shapes",
    cost_model=LLAMA_7B_A100,
    max_step_tokens=2048,
    num_rows=256,
    pool_tokens=110_000,
    services=(SEALLM_CHAT, SEALLM_SUMMARIES),
)
"""Mean lengths of SeaLLM's table 1: ShareGPT and LongBench."""
MODERATE = msgspec.structs.replace(
    SEALLM,
    name="moderate",
    services=(
        Service(model="chat", share=0.7, prompt=_lengths(73, 1.0, 1024), output=_lengths(427, 0.8, 2048)),
        Service(model="summaries", share=0.3, prompt=_lengths(2588, 0.4, 4000), output=_lengths(291, 1.8, 3000)),
    ),
)
"""Shorter documents with longer answers, and more chat."""
SMALL = Setting(
    name="small",
    device="2 CPU cores, both models 135M-parameter shapes",
    cost_model=LLAMA_135M_CPU,
    max_step_tokens=512,
    num_rows=64,
    pool_tokens=65_536,
    services=(
        Service(model="chat", share=0.5, prompt=_lengths(128, 0.8, 1024), output=_lengths(100, 0.8, 512)),
        Service(model="summaries", share=0.5, prompt=_lengths(1024, 0.4, 2048), output=_lengths(64, 0.6, 256)),
    ),
)
ALIKE = msgspec.structs.replace(
    SEALLM,
    name="alike",
    services=(
        msgspec.structs.replace(SEALLM_CHAT, model="first", prompt=_lengths(512, 1.0, 4096)),
        msgspec.structs.replace(SEALLM_CHAT, model="second", prompt=_lengths(512, 1.0, 4096)),
    ),
)
"""Both models with the same lengths: nothing but single requests differ."""


PREFILL_HEAVY = Service(
    model="prefill-heavy", share=0.5, prompt=_lengths(2600, 0.7, 7500, 200), output=_lengths(22, 1.0, 300, 2)
)
"""Workload like code completion: prompts of thousands of tokens, answers of a line."""
MOST_MEAN_PROMPT = 4000.0
"""Tokens; the prompts of a trace with more are halved until it has not."""


def real_settings(folder: Path) -> list[tuple[Setting, dict[str, Lengths]]]:
    """Each pair of the traces with lengths in a folder and of `PREFILL_HEAVY`, half of the requests each."""
    services: dict[str, tuple[Service, Lengths | None]] = {PREFILL_HEAVY.model: (PREFILL_HEAVY, None)}
    for path in sorted([*folder.glob("*.csv"), *folder.glob("*.jsonl")]):
        try:
            lengths = read_lengths(path, SEALLM.pool_tokens // 2, MOST_MEAN_PROMPT)
        except TraceError:
            continue
        if lengths[0].size:
            services[path.stem] = (msgspec.structs.replace(PREFILL_HEAVY, model=path.stem), lengths)
    found = []
    for first, second in combinations(services, 2):
        pair = {name: services[name] for name in (first, second)}
        ours = tuple(service for service, _ in pair.values())
        setting = msgspec.structs.replace(SEALLM, name=f"{first} + {second}", services=ours)
        found.append((setting, {name: lengths for name, (_, lengths) in pair.items() if lengths is not None}))
    return found


def draw_jobs(
    setting: Setting, num: int, rate_rps: float, seed: int, traces: dict[str, Lengths] | None = None
) -> list[Job]:
    """Poisson arrivals of each model. Rate 0: all at once, mixed. `traces`: lengths of a model instead of drawn ones."""
    jobs = []
    for index, service in enumerate(setting.services):
        rng = np.random.default_rng([seed, index])
        count = round(num * service.share)
        if rate_rps:
            at_s = renewal_times([(np.inf, rate_rps * service.share)], 1.0, rng, num_requests=count)
        else:
            at_s = np.zeros(count)
        if traces and service.model in traces:
            prompts, outputs = traces[service.model]
            drawn = rng.integers(0, len(prompts), count)
            lengths = prompts[drawn], outputs[drawn]
        else:
            lengths = sample_lengths(service.prompt, count, rng), sample_lengths(service.output, count, rng)
        jobs += [
            Job(float(at), int(prompt), int(output), model=service.model)
            for at, prompt, output in zip(at_s, *lengths, strict=True)
        ]
    np.random.default_rng(seed).shuffle(jobs)
    return sorted(jobs, key=lambda job: job.at_s)


def read_lengths(path: Path, max_tokens: int, most_mean_prompt: float = np.inf) -> Lengths:
    """Requests of a trace within `max_tokens` together, with prompts halved until their mean is at most so many tokens.
    Raises `TraceError`, `OSError`."""
    trace = read_trace(path)
    prompts, outputs = trace.prompt_tokens, trace.output_tokens
    while prompts.size and prompts.mean() > most_mean_prompt:
        prompts = np.maximum(1, prompts // 2)
    fits = prompts + outputs <= max_tokens
    return prompts[fits], outputs[fits]


def time_alone_s(setting: Setting, job: Job) -> float:
    """From arrival to end on an instance with nothing else."""
    cost, seconds = setting.cost_model, 0.0
    for start in range(0, job.prompt_tokens, setting.max_step_tokens):
        chunk = min(setting.max_step_tokens, job.prompt_tokens - start)
        seconds += cost.predict(StepShape(chunk, chunk * (start + chunk / 2)))
    decodes = job.output_tokens - 1
    context = decodes * job.prompt_tokens + decodes * (decodes - 1) / 2
    return seconds + decodes * cost.predict(StepShape(0, 0.0, 1, 0)) + cost.decode_context_s * context
