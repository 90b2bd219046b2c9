"""The requests of each experiment, scaled to the machine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shared.messages.requests import RequestClass
from tideway.bench.arrivals import Arrivals, Closed, Gamma, Phase, Phases, Replay
from tideway.bench.lengths import Fixed, LogNormal
from tideway.bench.traces import Trace, TraceSource, read_trace
from tideway.bench.workload import PlannedRequest, StreamSpec, Workload, plan_requests

ONLINE_TRACE = "azure_llm_2023_conv.csv"
OFFLINE_TRACE = "arxiv_summarization_lengths.csv"
ONLINE_PROMPT_TOKENS = 1024
"""Of the synthetic workloads before scaling: ConServe section 6.3."""
ONLINE_OUTPUT_TOKENS = 128
TRACE_PROMPT_TOKENS = 1155
"""Means of the online trace; its lengths vary by about their means."""
TRACE_OUTPUT_TOKENS = 211
NUM_OFFLINE = 256
"""Different offline requests; they come again when all have been."""


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    length_divisor: float = 4.0
    """Of prompts and outputs."""
    max_total_tokens: int = 1536
    """Longer requests are scaled down to it."""


class Workloads:
    """`traces`: folder with the two files. Where they are missing, `has_traces` is False, offline lengths are fixed, the
    means of the trace, and the online trace gives way to Poisson arrivals with log-normal lengths of its means."""

    def __init__(self, folder: Path, scale: Scale, seed: int, online_trace: str = ONLINE_TRACE) -> None:
        self.scale, self.seed, self._online_trace = scale, seed, online_trace
        self._paths = {name: str(folder / name) for name in (online_trace, OFFLINE_TRACE)}
        self.has_traces = all(Path(path).is_file() for path in self._paths.values())
        self._traces: dict[str, Trace] = {}
        if self.has_traces:
            self._traces = {path: read_trace(Path(path)) for path in self._paths.values()}

    def offline(self) -> list[PlannedRequest]:
        scale = self.scale
        stream = StreamSpec(
            name="offline",
            request_class=RequestClass.OFFLINE,
            models={"model": 1},
            arrivals=Closed(concurrency=1),
            num_requests=NUM_OFFLINE,
            max_total_tokens=scale.max_total_tokens,
        )
        if self.has_traces:
            source = self._source(OFFLINE_TRACE)
            stream = msgspec.structs.replace(stream, lengths_from=source)
        else:
            stream = msgspec.structs.replace(stream, prompt_tokens=self._fixed(2588), output_tokens=self._fixed(291))
        return plan_requests(Workload(streams=[stream], seed=self.seed), self._traces)

    def trace(self, rate_rps: float, duration_s: float, seed: int = 0) -> list[PlannedRequest]:
        """As ConServe samples BurstGPT (6.1): the whole trace is squeezed into the run, and as many of its requests are
        kept, drawn by the seed, as the rate says."""
        if not self.has_traces:
            return self._plan(self._like_trace(self._online(Gamma(rate_rps=rate_rps))), duration_s, seed)
        trace = self._traces[self._paths[self._online_trace]]
        assert trace.at_s is not None
        whole_s = float(trace.at_s[-1]) + 1e-3
        keep = min(1.0, rate_rps * duration_s / trace.at_s.size)
        source = msgspec.structs.replace(self._source(self._online_trace), time_scale=duration_s / whole_s, keep=keep)
        stream = self._online(Replay(trace=source))
        return self._plan(
            msgspec.structs.replace(stream, max_total_tokens=self.scale.max_total_tokens), duration_s, seed
        )

    def trace_as_backlog(self) -> list[PlannedRequest]:
        """The trace's lengths as offline requests, to measure the capacity."""
        stream = StreamSpec(
            name="capacity",
            request_class=RequestClass.OFFLINE,
            models={"model": 1},
            arrivals=Closed(concurrency=1),
            num_requests=NUM_OFFLINE,
        )
        if self.has_traces:
            source = self._source(self._online_trace)
            stream = msgspec.structs.replace(stream, lengths_from=source, max_total_tokens=self.scale.max_total_tokens)
        else:
            stream = self._like_trace(stream)
        return plan_requests(Workload(streams=[stream], seed=self.seed), self._traces)

    def synthetic_as_backlog(self) -> list[PlannedRequest]:
        stream = StreamSpec(
            name="capacity",
            request_class=RequestClass.OFFLINE,
            models={"model": 1},
            arrivals=Closed(concurrency=1),
            num_requests=NUM_OFFLINE,
            prompt_tokens=self._fixed(ONLINE_PROMPT_TOKENS),
            output_tokens=self._fixed(ONLINE_OUTPUT_TOKENS),
        )
        return plan_requests(Workload(streams=[stream], seed=self.seed))

    def gamma(self, rate_rps: float, cv: float, duration_s: float, seed: int = 0) -> list[PlannedRequest]:
        return self._plan(self._synthetic(Gamma(rate_rps=rate_rps, cv=cv)), duration_s, seed)

    def on_off(
        self, rate_rps: float, off_s: float, on_s: float, duration_s: float, seed: int = 0
    ) -> list[PlannedRequest]:
        """Begins with OFF, so that every ON is a switch."""
        phases = [Phase(duration_s=off_s, rate_rps=0.0), Phase(duration_s=on_s, rate_rps=rate_rps)]
        return self._plan(self._synthetic(Phases(phases=phases)), duration_s, seed)

    def _online(self, arrivals: Arrivals) -> StreamSpec:
        return StreamSpec(name="online", models={"model": 1}, arrivals=arrivals)

    def _synthetic(self, arrivals: Arrivals) -> StreamSpec:
        return msgspec.structs.replace(
            self._online(arrivals),
            prompt_tokens=self._fixed(ONLINE_PROMPT_TOKENS),
            output_tokens=self._fixed(ONLINE_OUTPUT_TOKENS),
        )

    def _like_trace(self, stream: StreamSpec) -> StreamSpec:
        factor = 1 / self.scale.length_divisor
        return msgspec.structs.replace(
            stream,
            prompt_tokens=LogNormal(mean_tokens=TRACE_PROMPT_TOKENS * factor),
            output_tokens=LogNormal(mean_tokens=TRACE_OUTPUT_TOKENS * factor),
            max_total_tokens=self.scale.max_total_tokens,
        )

    def _plan(self, stream: StreamSpec, duration_s: float, seed: int) -> list[PlannedRequest]:
        workload = Workload(streams=[stream], duration_s=duration_s, seed=1000 * self.seed + seed)
        return plan_requests(workload, self._traces)

    def _source(self, name: str) -> TraceSource:
        factor = 1 / self.scale.length_divisor
        return TraceSource(path=self._paths[name], prompt_scale=factor, output_scale=factor)

    def _fixed(self, tokens: int) -> Fixed:
        return Fixed(tokens=max(1, round(tokens / self.scale.length_divisor)))
