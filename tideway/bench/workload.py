"""What is to be sent: streams of load, made into a list of planned requests by a seed. Pure but for `load_traces`.

Every stream draws from generators of its own, so that leaving one out (online only) changes nothing in the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from shared.messages.requests import RequestClass
from tideway.bench.arrivals import Arrivals, Closed, Phases, RateSteps, Replay, renewal_times, steps_of
from tideway.bench.lengths import Lengths, Tokens, sample_lengths
from tideway.bench.traces import Trace, TraceSource, read_trace, spread


class WorkloadError(ValueError):
    """The specification contradicts itself or its traces; the message names the stream."""


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    request_class: RequestClass = msgspec.field(default=RequestClass.ONLINE, name="class")
    models: Annotated[dict[str, float], Meta(min_length=1)]
    """Name to weight; each request draws its model."""
    arrivals: Arrivals
    start_s: Annotated[float, Meta(ge=0)] = 0.0
    num_requests: Annotated[int, Meta(ge=1)] | None = None
    """Number of requests at most. A closed loop without it has as many as the trace of its lengths."""
    is_rate_exact: bool = True
    """Scales drawn arrivals so that their number is the rate's, see `renewal_times`."""
    lengths_from: TraceSource | None = None
    """Pairs of lengths drawn from a trace; default: those of the replayed trace."""
    prompt_tokens: Lengths | None = None
    """Goes before the trace's."""
    output_tokens: Lengths | None = None
    max_total_tokens: Tokens | None = None
    """Longer requests are scaled down to it, prompt and output alike."""
    prefix_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """This share of each prompt is the beginning of a text that requests of the same prefix group have in common."""
    num_prefix_groups: Annotated[int, Meta(ge=1)] = 1
    ttft_ms: Annotated[float, Meta(gt=0)] | None = None
    tpot_ms: Annotated[float, Meta(gt=0)] | None = None
    api_key_env: str = ""
    """Name of the environment variable with this tenant's key; the key itself never gets into a result."""
    extra_body: dict[str, Any] = {}
    """Fields for the body of each request, as they are."""


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    streams: Annotated[list[StreamSpec], Meta(min_length=1)]
    duration_s: Annotated[float, Meta(gt=0)] | None = None
    """Nothing is sent after it."""
    seed: int = 0


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    at_s: float
    """Seconds since the start of the run; in a closed loop the earliest time."""
    stream: str
    model: str
    request_class: RequestClass = msgspec.field(name="class")
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[str, ...] = ()
    """Identities of the blocks that the prompt begins with; equal ones hold equal text."""
    prefix_block_tokens: int = 0
    concurrency: int = 0
    """Above 0: a closed loop, at most so many of its stream at once."""
    ttft_objective_s: float | None = None
    tpot_objective_s: float | None = None


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """A generator of its own for everything that has a name."""
    return np.random.default_rng([seed & 0xFFFFFFFF, *(zlib.crc32(str(name).encode()) for name in names)])


def load_traces(workload: Workload) -> dict[str, Trace]:
    """All that the workload names, by path. Raises `TraceError`, `OSError`."""
    sources = [stream.lengths_from for stream in workload.streams]
    sources += [stream.arrivals.trace for stream in workload.streams if isinstance(stream.arrivals, Replay)]
    return {source.path: read_trace(Path(source.path)) for source in sources if source is not None}


def plan_requests(workload: Workload, traces: Mapping[str, Trace] | None = None) -> list[PlannedRequest]:
    """All requests of the workload, by time; a function of its arguments alone. Raises `WorkloadError`."""
    if len({stream.name for stream in workload.streams}) < len(workload.streams):
        raise WorkloadError("two streams have the same name")
    planned: list[PlannedRequest] = []
    for stream in workload.streams:
        try:
            planned += _plan_stream(stream, workload, traces or {})
        except ValueError as error:
            raise WorkloadError(f"stream {stream.name!r}: {error}") from None
    return sorted(planned, key=lambda request: request.at_s)


def _plan_stream(stream: StreamSpec, workload: Workload, traces: Mapping[str, Trace]) -> list[PlannedRequest]:
    seed = workload.seed
    duration_s = None if workload.duration_s is None else workload.duration_s - stream.start_s
    if duration_s is not None and duration_s <= 0:
        raise ValueError("it starts after the end of the run")
    at_s, rows = _arrivals(stream, duration_s, generator(seed, stream.name, "arrivals"), traces)
    num = at_s.size
    prompt, output, source, rows = _lengths(stream, num, rows, seed, traces)
    if stream.max_total_tokens is not None:
        shrink = np.minimum(1.0, stream.max_total_tokens / (prompt + output))
        output = np.maximum(1, np.floor(output * shrink)).astype(np.int64)
        prompt = np.maximum(1, np.minimum(prompt, stream.max_total_tokens - output))
    prefixes, block_tokens = _prefixes(stream, prompt, source, rows, generator(seed, stream.name, "prefix"), traces)
    names = sorted(stream.models)
    weights = np.array([stream.models[name] for name in names], float)
    if (weights < 0).any() or not weights.sum():
        raise ValueError("the models' weights must be 0 or more, and not all 0")
    models = generator(seed, stream.name, "models").choice(len(names), num, p=weights / weights.sum())
    concurrency = stream.arrivals.concurrency if isinstance(stream.arrivals, Closed) else 0
    return [
        PlannedRequest(
            request_id=f"{stream.name}-{index:06d}",
            at_s=float(at_s[index]) + stream.start_s,
            stream=stream.name,
            model=names[models[index]],
            request_class=stream.request_class,
            prompt_tokens=int(prompt[index]),
            output_tokens=int(output[index]),
            prefix=prefixes[index],
            prefix_block_tokens=int(block_tokens[index]),
            concurrency=concurrency,
            ttft_objective_s=None if stream.ttft_ms is None else stream.ttft_ms / 1000,
            tpot_objective_s=None if stream.tpot_ms is None else stream.tpot_ms / 1000,
        )
        for index in range(num)
    ]


def _trace(source: TraceSource, traces: Mapping[str, Trace]) -> Trace:
    if source.path not in traces:
        raise ValueError(f"the trace {source.path} was not loaded")
    return traces[source.path]


def _arrivals(
    stream: StreamSpec, duration_s: float | None, rng: np.random.Generator, traces: Mapping[str, Trace]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Times from the stream's start, and for a replay the trace's rows they belong to."""
    arrivals = stream.arrivals
    if isinstance(arrivals, Closed):
        num = stream.num_requests
        if num is None:
            if stream.lengths_from is None:
                raise ValueError("a closed loop needs num_requests, or lengths from a trace")
            num = _trace(stream.lengths_from, traces).prompt_tokens.size
        return np.zeros(num), None
    if not isinstance(arrivals, Replay):
        steps, cv = steps_of(arrivals)
        return _renewal(stream, steps, cv, rng, duration_s, is_cyclic=isinstance(arrivals, Phases)), None
    source, trace = arrivals.trace, _trace(arrivals.trace, traces)
    if trace.rates:
        return _renewal(stream, _rate_steps(source, trace), arrivals.cv, rng, duration_s, is_cyclic=False), None
    if trace.at_s is None:
        raise ValueError(f"{source.path} has lengths but no arrivals")
    at_s = spread(trace.at_s, trace.grid_s, rng) if trace.grid_s else trace.at_s
    is_used = at_s >= source.start_s
    if source.length_s is not None:
        is_used &= at_s < source.start_s + source.length_s
    is_used &= rng.random(at_s.size) < source.keep
    at_s = (at_s - source.start_s) * source.time_scale
    if duration_s is not None:
        is_used &= at_s < duration_s
    rows = np.flatnonzero(is_used)[: stream.num_requests]
    return at_s[rows], rows


def _renewal(
    stream: StreamSpec,
    steps: RateSteps,
    cv: float,
    rng: np.random.Generator,
    duration_s: float | None,
    *,
    is_cyclic: bool,
) -> np.ndarray:
    if duration_s is None and not is_cyclic and np.isfinite(steps[-1][0]):
        duration_s = sum(step_s for step_s, _ in steps)
    return renewal_times(
        steps,
        cv,
        rng,
        duration_s=duration_s,
        num_requests=stream.num_requests,
        is_exact=stream.is_rate_exact,
        is_cyclic=is_cyclic,
    )


def _rate_steps(source: TraceSource, trace: Trace) -> RateSteps:
    """The part of the series that is used, in seconds of the run and requests per second of the run."""
    series = source.series or (next(iter(trace.rates)) if len(trace.rates) == 1 else "")
    if series not in trace.rates:
        raise ValueError(f"series must be one of {', '.join(sorted(trace.rates))}")
    steps, at_s = [], 0.0
    end_s = np.inf if source.length_s is None else source.start_s + source.length_s
    for width_s, rate in trace.rates[series]:
        covered_s = min(at_s + width_s, end_s) - max(at_s, source.start_s)
        if covered_s > 0:
            steps.append((covered_s * source.time_scale, rate * source.rate_scale * source.keep))
        at_s += width_s
    if not steps:
        raise ValueError("no part of the trace lies in the chosen window")
    return steps


def _lengths(
    stream: StreamSpec, num: int, rows: np.ndarray | None, seed: int, traces: Mapping[str, Trace]
) -> tuple[np.ndarray, np.ndarray, TraceSource | None, np.ndarray | None]:
    """Prompt and output lengths, and the trace and rows they come from, if any."""
    source = stream.lengths_from
    if source is None and rows is not None and isinstance(stream.arrivals, Replay):
        source = stream.arrivals.trace
    elif source is not None:
        rows = generator(seed, stream.name, "rows").integers(0, _trace(source, traces).prompt_tokens.size or 1, num)
    prompt = output = None
    if source is not None and rows is not None:
        trace = _trace(source, traces)
        if not trace.prompt_tokens.size:
            raise ValueError(f"{source.path} has no lengths")
        prompt = np.maximum(1, np.rint(trace.prompt_tokens[rows] * source.prompt_scale)).astype(np.int64)
        output = np.maximum(1, np.rint(trace.output_tokens[rows] * source.output_scale)).astype(np.int64)
    if stream.prompt_tokens is not None:
        prompt = sample_lengths(stream.prompt_tokens, num, generator(seed, stream.name, "prompt"))
    if stream.output_tokens is not None:
        output = sample_lengths(stream.output_tokens, num, generator(seed, stream.name, "output"))
    if prompt is None or output is None:
        raise ValueError("it needs lengths of prompts and outputs, from a trace or given")
    return prompt, output, source, rows


def _prefixes(
    stream: StreamSpec,
    prompt: np.ndarray,
    source: TraceSource | None,
    rows: np.ndarray | None,
    rng: np.random.Generator,
    traces: Mapping[str, Trace],
) -> tuple[list[tuple[str, ...]], np.ndarray]:
    """Per request its prefix blocks and the tokens of one block."""
    num = prompt.size
    if stream.prefix_share:
        groups = rng.integers(0, stream.num_prefix_groups, num)
        return [(f"{stream.name}/{group}",) for group in groups], np.floor(prompt * stream.prefix_share).astype(int)
    if source is not None and rows is not None and _trace(source, traces).blocks:
        trace = _trace(source, traces)
        block_tokens = max(1, round(trace.block_tokens * source.prompt_scale))
        return [tuple(str(block) for block in trace.blocks[row]) for row in rows], np.full(num, block_tokens)
    return [()] * num, np.zeros(num, int)
