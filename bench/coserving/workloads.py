"""The requests of each experiment, scaled to the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from shared.messages.requests import RequestClass
from tideway.bench.arrivals import Arrivals, Closed, Gamma, Phase, Phases, Replay
from tideway.bench.lengths import Fixed, LogNormal
from tideway.bench.traces import Trace, TraceSource, read_trace
from tideway.bench.workload import PlannedRequest, StreamSpec, Workload, plan_requests

ONLINE_TRACE = "azure_llm_2023_conv.csv"
OFFLINE_TRACE = "arxiv_summarization_lengths.csv"
ONLINE_PROMPT_TOKENS = 1024
"""Prompts of the synthetic workloads before scaling: ConServe section 6.3."""
ONLINE_OUTPUT_TOKENS = 128
TRACE_PROMPT_TOKENS = 1155
"""Means of the online trace; its lengths vary by about their means."""
TRACE_OUTPUT_TOKENS = 211
NUM_OFFLINE = 256
"""Different offline requests; they come again when all have been."""


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    length_divisor: float = 4.0
    """Divisor of the lengths of prompts and outputs."""
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
        if self.has_traces:
            return self._backlog("offline", lengths_from=self._source(OFFLINE_TRACE), **self._bound)
        return self._backlog("offline", **self._fixed(2588, 291), **self._bound)

    def trace(self, rate_rps: float, duration_s: float, seed: int = 0) -> list[PlannedRequest]:
        """Samples BurstGPT as ConServe does (6.1): the whole trace is squeezed into the run, and as many of its requests are
        kept, drawn by the seed, as the rate says."""
        if not self.has_traces:
            return self._plan(duration_s, seed, Gamma(rate_rps=rate_rps), **self._like_trace())
        trace = self._traces[self._paths[self._online_trace]]
        assert trace.at_s is not None
        whole_s = float(trace.at_s[-1]) + 1e-3
        keep = min(1.0, rate_rps * duration_s / trace.at_s.size)
        source = msgspec.structs.replace(self._source(self._online_trace), time_scale=duration_s / whole_s, keep=keep)
        return self._plan(duration_s, seed, Replay(trace=source), **self._bound)

    def trace_as_backlog(self) -> list[PlannedRequest]:
        """The trace's lengths as offline requests, to measure the capacity."""
        if self.has_traces:
            return self._backlog("capacity", lengths_from=self._source(self._online_trace), **self._bound)
        return self._backlog("capacity", **self._like_trace())

    def synthetic_as_backlog(self) -> list[PlannedRequest]:
        return self._backlog("capacity", **self._fixed(ONLINE_PROMPT_TOKENS, ONLINE_OUTPUT_TOKENS))

    def gamma(self, rate_rps: float, cv: float, duration_s: float, seed: int = 0) -> list[PlannedRequest]:
        return self._synthetic(duration_s, seed, Gamma(rate_rps=rate_rps, cv=cv))

    def on_off(
        self, rate_rps: float, off_s: float, on_s: float, duration_s: float, seed: int = 0
    ) -> list[PlannedRequest]:
        """Begins with OFF, so that every ON is a switch."""
        phases = [Phase(duration_s=off_s, rate_rps=0.0), Phase(duration_s=on_s, rate_rps=rate_rps)]
        return self._synthetic(duration_s, seed, Phases(phases=phases))

    def _backlog(self, name: str, **lengths: Any) -> list[PlannedRequest]:
        stream = StreamSpec(
            name=name,
            request_class=RequestClass.OFFLINE,
            models={"model": 1},
            arrivals=Closed(concurrency=1),
            num_requests=NUM_OFFLINE,
            **lengths,
        )
        return plan_requests(Workload(streams=[stream], seed=self.seed), self._traces)

    def _synthetic(self, duration_s: float, seed: int, arrivals: Arrivals) -> list[PlannedRequest]:
        return self._plan(duration_s, seed, arrivals, **self._fixed(ONLINE_PROMPT_TOKENS, ONLINE_OUTPUT_TOKENS))

    def _plan(self, duration_s: float, seed: int, arrivals: Arrivals, **lengths: Any) -> list[PlannedRequest]:
        stream = StreamSpec(name="online", models={"model": 1}, arrivals=arrivals, **lengths)
        workload = Workload(streams=[stream], duration_s=duration_s, seed=1000 * self.seed + seed)
        return plan_requests(workload, self._traces)

    @property
    def _bound(self) -> dict[str, int]:
        return {"max_total_tokens": self.scale.max_total_tokens}

    def _like_trace(self) -> dict[str, Any]:
        factor = 1 / self.scale.length_divisor
        prompt, output = (LogNormal(mean_tokens=mean * factor) for mean in (TRACE_PROMPT_TOKENS, TRACE_OUTPUT_TOKENS))
        return {"prompt_tokens": prompt, "output_tokens": output, **self._bound}

    def _source(self, name: str) -> TraceSource:
        factor = 1 / self.scale.length_divisor
        return TraceSource(path=self._paths[name], prompt_scale=factor, output_scale=factor)

    def _fixed(self, *tokens: int) -> dict[str, Fixed]:
        """Fixed lengths of prompt and output."""
        scaled = (Fixed(tokens=max(1, round(count / self.scale.length_divisor))) for count in tokens)
        return dict(zip(("prompt_tokens", "output_tokens"), scaled, strict=True))
