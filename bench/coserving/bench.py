"""What the experiments have in common: the testbed, measured capacities, and runs in an order that averages drift."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bench.coserving.results import ExperimentResult, figures_of, online_records
from bench.coserving.runs import ONLINE_ONLY, VLLM_PP, Objectives, RunResult, System, VirtualRun, VirtualTestbed
from bench.coserving.testbed import Run, Testbed
from bench.coserving.workloads import Workloads
from tideway.bench.summary import Distribution
from tideway.bench.workload import PlannedRequest

CAPACITY_CONCURRENCY = 16
"""Requests at once, at which the capacity is measured."""


class Durations(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    capacity_s: float = 20.0
    trace_s: float = 75.0
    num_samples: int = 2
    """Samples of the trace; their requests count together."""
    on_s: float = 8.0
    off_s: float = 7.0
    num_cycles: int = 2
    point_s: float = 12.0
    """Duration of one run of a sweep."""
    ablation_s: float = 20.0
    warm_up_s: float = 4.0
    """At the start of every run, in which requests come and do not count."""
    grace_s: float = 45.0
    """After the last arrival, for online requests to end."""
    cvs: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)
    loads: tuple[float, ...] = (0.25, 0.5, 0.75)
    """Shares of the capacity."""
    objectives_cvs: tuple[float, ...] = (1.0, 4.0)
    num_seeds: int = 3
    """Seeds of the arrivals at each load of `objectives`; their requests count together."""
    num_step_pairs: int = 160
    num_reactions: int = 40
    is_mirrored: bool = True
    """Whether the systems run a second time in reverse order, so that a drift of the machine averages out."""


SHORT = Durations(
    capacity_s=4.0, trace_s=6.0, num_samples=1, on_s=3.0, off_s=3.0, num_cycles=1, point_s=4.0, ablation_s=5.0,
    warm_up_s=1.0, grace_s=5.0, cvs=(1.0, 8.0), loads=(0.5,), num_step_pairs=12, num_reactions=10, is_mirrored=False,
    objectives_cvs=(1.0,), num_seeds=1,
)  # fmt: skip

VIRTUAL = Durations(
    capacity_s=60.0, trace_s=300.0, num_samples=8, on_s=20.0, off_s=20.0, num_cycles=8, point_s=200.0,
    ablation_s=300.0, warm_up_s=10.0, grace_s=60.0, num_reactions=200, is_mirrored=False,
)  # fmt: skip
"""In virtual time nothing drifts, so nothing is mirrored."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    load: float = 0.5
    """Online load over the capacity, where it is not varied."""
    on_load: float = 0.75
    """In ON phases."""
    ttft_ms: float = 0.0
    """0: the P99 of Online-Only, measured first (ConServe 6.2)."""
    tpot_ms: float = 0.0
    ablation_pool_share: float = 0.4
    """Share of the pool that the others have."""
    pairs: tuple[Objectives, ...] = (Objectives(0.75, 0.055), Objectives(1.5, 0.11), Objectives(3.0, 0.22))
    """Pairs of `objectives`, beside those that Online-Only's latencies say."""


class Bench:
    def __init__(
        self,
        testbed: Testbed | VirtualTestbed,
        workloads: Workloads,
        durations: Durations,
        options: Options,
        command: str,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.testbed, self.workloads = testbed, workloads
        self.durations, self.options, self.say = durations, options, say
        self.offline = workloads.offline()
        self._command = command
        self._capacities: dict[str, float] = {}

    def result(self, experiment: str, **parameters: Any) -> ExperimentResult:
        return ExperimentResult(
            experiment=experiment,
            date=time.strftime("%Y-%m-%d"),
            command=self._command,
            virtual_noise=self.testbed.noise if isinstance(self.testbed, VirtualTestbed) else None,
            machine=self.testbed.machine(),
            setup=msgspec.to_builtins(self.testbed.setup) | msgspec.to_builtins(self.workloads.scale),
            cost_model=msgspec.to_builtins(self.testbed.cost_model),
            parameters={"options": self.options, "durations": self.durations, **parameters},
        )

    def new_run(self, system: System, objectives: Objectives, **options: int) -> Run | VirtualRun:
        kind = VirtualRun if isinstance(self.testbed, VirtualTestbed) else Run
        return kind(self.testbed, system, objectives, **options)

    def run(
        self,
        system: System,
        online: Sequence[PlannedRequest],
        duration_s: float,
        objectives: Objectives,
        *,
        pool_tokens: int = 0,
        label: str = "",
    ) -> RunResult:
        """`duration_s` with the warm-up."""
        run = self.new_run(system, objectives, pool_tokens=pool_tokens)
        result = run.run(online, self.offline, duration_s, grace_s=self.durations.grace_s)
        one = figures_of([result], self.durations.warm_up_s)
        self.say(
            f"{label}{' ' if label else ''}{system.name}: TTFT P99 {one.ttft_s.p99 * 1000:.0f} ms, TPOT P99 "
            f"{one.tpot_s.p99 * 1000:.0f} ms, ITL P99 {one.itl_s.p99 * 1000:.0f} ms over {one.num_online} online "
            f"requests; {one.tokens_per_s:.0f} tokens/s, {one.offline_tokens_per_s:.0f} of them offline"
        )
        return result

    def capacity(self, kind: str) -> float:
        """Online requests per second (kind: trace or synthetic) that the engine completes when it never waits for any."""
        if kind not in self._capacities:
            requests = self.workloads.trace_as_backlog() if kind == "trace" else self.workloads.synthetic_as_backlog()
            run = self.new_run(VLLM_PP, Objectives(1.5, 0.11), num_held=CAPACITY_CONCURRENCY)
            duration_s = self.durations.capacity_s
            result = run.run([], requests, duration_s)
            computed = sum(sum(step.num_tokens) for step in result.steps)
            tokens_per_s = computed / sum(step.end_s - step.start_s for step in result.steps)
            tokens = sum(request.prompt_tokens + request.output_tokens for request in requests) / len(requests)
            self._capacities[kind] = tokens_per_s / tokens
            self.say(f"capacity for {kind} requests: {self._capacities[kind]:.3f} per s, {tokens_per_s:.0f} tokens/s")
        return self._capacities[kind]

    def objectives(self, *online: Sequence[PlannedRequest], duration_s: float, scale: float = 1.0) -> Objectives:
        """Objectives that the options give; else `scale` times the P99 of runs of Online-Only with the same requests."""
        options = self.options
        if options.ttft_ms and options.tpot_ms:
            return Objectives(options.ttft_ms / 1000, options.tpot_ms / 1000)
        runs = [
            self.run(ONLINE_ONLY, sample, duration_s, Objectives(1.5, 0.11), label="objectives:") for sample in online
        ]
        records = [record for run in runs for record in online_records(run, self.durations.warm_up_s)]
        ttft = Distribution.of(record.ttft_s for record in records).p99 or 1.5
        tpot = Distribution.of(record.tpot_s for record in records).p99 or 0.11
        found = Objectives(options.ttft_ms / 1000 or scale * ttft, options.tpot_ms / 1000 or scale * tpot)
        self.say(f"objectives: TTFT {found.ttft_s * 1000:.0f} ms, TPOT {found.tpot_s * 1000:.0f} ms")
        return found
