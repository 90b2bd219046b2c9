"""Runs of one engine: what they are put together from, who submits their requests, and what they leave behind; and runs in
virtual time, of the real engine with steps and copies that take as long as a cost model says. (Real time: testbed.py.)

In virtual time nothing runs on a device, so hundreds of seconds take a few, and without noise the policies alone make the
figures. The order of calls to the engine is that of the live instance's driver (shared/simulation/instance.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from bench.coserving.accounting import StepParts, parts_of
from bench.reporting import machine
from shared.costs.model import CostModel
from shared.engine.calls import AddModel, SetCostModel, Submit
from shared.engine.engine import Effect, Engine
from shared.engine.plan import ModelShape, StepPlan
from shared.engine.recording import Configuration
from shared.engine.requests import Ended, Output
from shared.messages.requests import FinishReason, GenerationRequest, RequestClass, SamplingParams, pack_tokens
from shared.simulation.events import Events
from shared.simulation.instance import VirtualInstance, VirtualStep
from tideway.bench.records import UNFINISHED, RequestRecord
from tideway.bench.workload import PlannedRequest, generator

MODEL = "model"
SAMPLE_S = 0.25
"""Between two looks at queues and pool."""
FIRST_TOKEN_ID = 3


class System(msgspec.Struct, frozen=True):
    """What is compared: one engine, put together differently by its configuration alone."""

    name: str
    description: str
    co_serving: str
    """Value as in `Configuration`, like the next ones."""
    interruption: str = "off"
    checkpoints: bool = False
    """Has host memory for them."""
    prefetch: bool = False
    step_tokens: int = 0
    """At most; 0: as the setup says."""


ONLINE_ONLY = System("online_only", "online requests alone", "online_only")
VLLM_PP = System(
    "vllm++",
    "online first, offline in all that the token budget leaves; who is preempted computes again",
    "priority_only",
)
SCHEDULER = System(
    "scheduler", "SLO token budget; an arrival stops an offline step, which is thrown away", "slo", "discard"
)
CHECKPOINT = System(
    "+checkpoint", "and incremental checkpoints in host memory; steps wait for restores", "slo", "discard", True
)
PREFETCH = System("+prefetch", "and restores beside other steps", "slo", "discard", True, True)
TIDEWAY = System("tideway", "and stopped steps are suspended and go on later: everything", "slo", "suspend", True, True)

ABLATION = (VLLM_PP, SCHEDULER, CHECKPOINT, PREFETCH, TIDEWAY)
"""Each adds one thing to the one before: ConServe's figure 8, and suspension."""


class Objectives(msgspec.Struct, frozen=True):
    ttft_s: float
    tpot_s: float


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """All that a result depends on beside the experiments' own parameters."""

    model: str = "135m"
    device: str = "cpu"
    dtype: str = "bfloat16"
    num_threads: int = 2
    pool_tokens: int = 16384
    """KV pool; host memory for checkpoints is `host_share` of it."""
    host_share: float = 2.0
    num_rows: int = 64
    max_step_tokens: int = 512
    steps_in_flight: int = 1
    ordering: str = "fcfs"
    """Order of one class, alike in all systems."""
    niceness: int = 5
    """Niceness of the compute threads, as in an instance on CPU."""
    profile_s: float = 12.0
    seed: int = 1

    def num_host_merged(self, num_merged: int) -> int:
        return int(num_merged * self.host_share)

    def configuration(self, system: System, num_merged: int, objectives: Objectives) -> Configuration:
        return Configuration(
            num_merged=num_merged,
            num_rows=self.num_rows,
            ordering=self.ordering,
            token_budget=system.step_tokens or self.max_step_tokens,
            steps_in_flight=self.steps_in_flight,
            co_serving=system.co_serving,
            interruption=system.interruption,
            num_host_merged=self.num_host_merged(num_merged) if system.checkpoints else 0,
            prefetch=system.prefetch,
            ttft_s=objectives.ttft_s,
            tpot_s=objectives.tpot_s,
        )

    def engine(
        self, system: System, shape: ModelShape, cost_model: CostModel, num_merged: int, objectives: Objectives
    ) -> Engine:
        """A fresh one, with the model on it."""
        engine = self.configuration(system, num_merged, objectives).build()
        engine.apply(AddModel(shape), 0.0)
        engine.apply(SetCostModel(MODEL, cost_model), 0.0)
        return engine


def num_merged(pool_tokens: int, block_size: int, blocks_per_merged: int) -> int:
    """Merged blocks of a pool for so many tokens."""
    return max(1, -(-pool_tokens // block_size) // blocks_per_merged)


class Step(msgspec.Struct, array_like=True):
    """One launch on the device; a suspended step has one more when it goes on."""

    start_s: float
    end_s: float
    num_decodes: tuple[int, int]
    """Online, offline."""
    is_interruptible: bool
    resumes: bool
    is_suspended: bool = False
    num_tokens: tuple[int, int] = (0, 0)
    """Computed for online and offline requests; all at the last launch of the step."""
    recomputed_tokens: int = 0
    """Tokens among these that were computed once more after a preemption, or by a later step: counted where a sequence
    comes back."""
    parts: StepParts | None = None
    """Parts of all its launches together, at the last; in virtual time."""

    @classmethod
    def of(cls, plan: StepPlan, start_s: float, end_s: float, is_suspended: bool) -> Step:
        return cls(start_s, end_s, plan.num_decodes, plan.is_interruptible, plan.resumes, is_suspended)


class Sample(msgspec.Struct, array_like=True):
    at_s: float
    online_running: int
    online_waiting: int
    offline_running: int
    pool_used_share: float
    host_used_share: float


class Counts(msgspec.Struct, kw_only=True):
    """The engine's counters over the whole run."""

    preemptions: dict[str, int]
    steps_suspended: int
    steps_discarded: int
    dropped_checkpoint_blocks: int
    recomputed_tokens: int
    recomputed_partial_tokens: int
    online_tokens: int
    harvested_tokens: int


class RunResult(msgspec.Struct, kw_only=True):
    system: str
    duration_s: float
    """Nothing arrives later."""
    end_s: float
    records: list[RequestRecord]
    steps: list[Step]
    samples: list[Sample]
    counts: Counts
    reactions_s: list[float]
    """Reactions to online requests: arrival at the engine to the plan of the first step that computes them."""
    late_p99_s: float
    """Lateness of the feeder: submissions after their planned time."""


class RunFailed(Exception):
    """The engine loop died, a request was refused or failed, or nothing could go on."""


class Clients:
    """Clients of one run: they submit its requests, and write down what came of them. Times are seconds since the run's
    start.

    `take_effects` and `count_step` are called in the thread that drives the engine, `sample` by whoever may touch it."""

    def __init__(
        self,
        setup: Setup,
        system: System,
        objectives: Objectives,
        engine: Engine,
        vocab_size: int,
        num_held: int,
        now: Callable[[], float],
        apply: Callable[[Submit], Any],
    ) -> None:
        """`num_held`: offline requests at once; 0: more than there are rows. `apply` is the engine's, or returns what it
        does."""
        self.steps: list[Step] = []
        self.next_sample_s = 0.0
        self._seed, self._system, self._objectives, self._engine = setup.seed, system, objectives, engine
        self._vocab_size, self._num_held = vocab_size, num_held or setup.num_rows + 8
        self._now, self._apply = now, apply
        self._num_to_come = self._num_online = 0
        """Online requests that were not submitted, and those that have not ended."""
        self._offline: Iterator[tuple[PlannedRequest, GenerationRequest]] = iter(())
        self._records: dict[str, RequestRecord] = {}
        self._reactions_s: list[float] = []
        self._samples: list[Sample] = []
        self._late_s: list[float] = []
        self._counted = (0, 0, 0)

    def expect(
        self, online: Sequence[PlannedRequest], offline: Sequence[PlannedRequest]
    ) -> list[tuple[PlannedRequest, GenerationRequest]]:
        """`offline` comes in a circle, for ever. Returns what `submit_online` is to be called with."""
        self._num_to_come = len(online)
        if self._system.co_serving != "online_only":
            self._offline = self._in_circle(offline)
        return [(planned, self._make(planned)) for planned in online]

    def begin(self) -> None:
        for planned, request in islice(self._offline, self._num_held):
            self._submit(planned, request, self._now())

    def submit_online(self, planned: PlannedRequest, request: GenerationRequest) -> None:
        self._num_to_come -= 1
        self._num_online += 1
        self._late_s.append(self._now() - planned.at_s)
        self._submit(planned, request, planned.at_s)

    def take_ended(self, record: RequestRecord) -> None:
        """An offline request that has ended gives way to the next. Raises `RunFailed`."""
        if record.error:
            raise RunFailed(f"request {record.request_id} ended with {record.error}")
        if record.request_class is RequestClass.ONLINE:
            self._num_online -= 1
        else:
            self._submit(*next(self._offline), self._now())

    def is_over(self, duration_s: float, grace_s: float) -> bool:
        """All online requests have ended, or the grace has."""
        now = self._now()
        if now < duration_s or self._num_to_come:
            return False
        return self._num_online == 0 or now >= duration_s + grace_s

    def _in_circle(self, offline: Sequence[PlannedRequest]) -> Iterator[tuple[PlannedRequest, GenerationRequest]]:
        turn = 0
        while offline:
            for planned in offline:
                yield planned, self._make(planned, f"/{turn}")
            turn += 1

    def _make(self, planned: PlannedRequest, suffix: str = "") -> GenerationRequest:
        """Its prompt is drawn, from its own name."""
        name = planned.request_id + suffix
        prompt = generator(self._seed, name).integers(FIRST_TOKEN_ID, self._vocab_size, planned.prompt_tokens)
        return GenerationRequest(
            request_id=name,
            gateway_id="bench",
            model=MODEL,
            prompt=pack_tokens(prompt.tolist()),
            sampling=SamplingParams(max_tokens=planned.output_tokens, temperature=0.0),
            request_class=planned.request_class,
            timeout_s=3600.0,
            ttft_objective_s=planned.ttft_objective_s or 0.0,
            tpot_objective_s=planned.tpot_objective_s or 0.0,
        )

    def _submit(self, planned: PlannedRequest, request: GenerationRequest, at_s: float) -> None:
        is_online = request.request_class is RequestClass.ONLINE
        self._records[request.request_id] = RequestRecord(
            request_id=request.request_id,
            model=MODEL,
            request_class=request.request_class,
            stream=planned.stream,
            arrival_s=at_s,
            sent_s=self._now(),
            prompt_tokens=planned.prompt_tokens,
            planned_prompt_tokens=planned.prompt_tokens,
            planned_output_tokens=planned.output_tokens,
            ttft_objective_s=(planned.ttft_objective_s or self._objectives.ttft_s) if is_online else None,
            tpot_objective_s=(planned.tpot_objective_s or self._objectives.tpot_s) if is_online else None,
        )
        refused = self._apply(Submit(request))
        if refused is not None:
            raise RunFailed(f"request {request.request_id} was refused: {refused.message}")

    # --------------------------------------------------------------------------------------- what is written down

    def count_step(self) -> None:
        """The engine has taken the result of the step noted last."""
        counters = self._engine.counters
        counted = (counters.online_tokens, counters.harvested_tokens, counters.recomputed_tokens)
        online, offline, self.steps[-1].recomputed_tokens = (
            now - before for now, before in zip(counted, self._counted, strict=True)
        )
        self.steps[-1].num_tokens = (online, offline)
        self._counted = counted

    def take_effects(self, effects: Iterable[Output | Ended], now: float) -> list[RequestRecord]:
        """Returns those of the requests that have ended."""
        ended = []
        for effect in effects:
            if isinstance(effect, Ended):
                ended.append(self._end(effect, now))
                continue
            for entry in effect.entries:
                record = self._records[entry.request_id]
                if num := len(entry.tokens) // 4:
                    record.first_token_s = now if record.first_token_s is None else record.first_token_s
                    record.last_token_s = now
                    record.token_times.append(now)
                    record.output_tokens += num
        return ended

    def _end(self, ended: Ended, now: float) -> RequestRecord:
        record = self._records[ended.request.request_id]
        record.end_s = now
        record.finish_reason = str(ended.reason)
        if ended.reason is not FinishReason.LENGTH:
            record.error = str(ended.reason)
        if record.request_class is RequestClass.ONLINE and ended.first_planned_s is not None:
            self._reactions_s.append(ended.first_planned_s - ended.submitted_s)
        return record

    def sample(self, now: float) -> None:
        self.next_sample_s = now + SAMPLE_S
        pool, host = self._engine.pool, self._engine.memory.host.pool
        queue = self._engine.memory.queues[MODEL]
        *online, offline = queue.running
        self._samples.append(
            Sample(
                now,
                sum(len(running) for running in online),
                sum(len(waiting) for waiting in queue.waiting[:-1]),
                len(offline) + len(queue.suspended),
                pool.used_merged() / pool.num_merged,
                0.0 if host is None else host.used_merged() / host.num_merged,
            )
        )

    def result(self, duration_s: float, end_s: float) -> RunResult:
        records = list(self._records.values())
        for record in records:
            if record.end_s is None:
                record.end_s, record.error = end_s, UNFINISHED
        counters = self._engine.counters
        totals = {name: getattr(counters, name) for name in Counts.__struct_fields__ if name != "preemptions"}
        return RunResult(
            system=self._system.name,
            duration_s=duration_s,
            end_s=end_s,
            records=records,
            steps=self.steps,
            samples=self._samples,
            counts=Counts(
                preemptions={"/".join(key): count for key, count in sorted(counters.preemptions.items())},
                **{name: one.total() if isinstance(one, Counter) else one for name, one in totals.items()},
            ),
            reactions_s=self._reactions_s,
            late_p99_s=float(np.percentile(self._late_s, 99)) if self._late_s else 0.0,
        )


SMOLLM_135M_ON_TWO_CORES = CostModel(
    fixed_s=0.025,
    prefill_token_s=0.00035,
    prefill_attention_s=1e-6,
    decode_s=0.0025,
    decode_context_s=1e-6,
    mixed_s=0.006,
    num_layers=30,
    layers_per_safepoint=1,
    checkpoint_block_s=1.7e-4,
    restore_block_s=1.7e-4,
)
"""Rounded from profiles of the shape of SmolLM-135M in bfloat16, two threads of a quiet x86 server."""
SHAPE = ModelShape(MODEL, block_size=32, blocks_per_merged=2, max_model_len=2048, vocab_size=49152)
TOKEN_ID = 5
"""What every step samples."""


class VirtualTestbed:
    """`noise`: standard deviation of the logarithm of step times around the cost model."""

    def __init__(self, setup: Setup, cost_model: CostModel = SMOLLM_135M_ON_TWO_CORES, noise: float = 0.0) -> None:
        self.setup, self.cost_model, self.noise = setup, cost_model, noise

    def machine(self) -> dict[str, Any]:
        return machine()

    def close(self) -> None:
        """There is nothing to remove."""


class VirtualRun:
    def __init__(
        self,
        testbed: VirtualTestbed,
        system: System,
        objectives: Objectives,
        *,
        pool_tokens: int = 0,
        num_held: int = 0,
    ) -> None:
        """`pool_tokens`: 0 for the setup's. `num_held`: of `Clients`."""
        setup = testbed.setup
        self._cost, self._noise = testbed.cost_model, testbed.noise
        num_blocks = num_merged(pool_tokens or setup.pool_tokens, SHAPE.block_size, SHAPE.blocks_per_merged)
        self.engine = setup.engine(system, SHAPE, self._cost, num_blocks, objectives)
        self._draw = generator(setup.seed, "step times")
        self._events = Events()
        self._instance = VirtualInstance(
            self.engine, self._events, lambda _: self._cost, lambda plan: [TOKEN_ID] * sum(plan.samples),
            self._on_effects, on_turn=self._on_turn, on_step=self._on_step, slowdown=self._slowdown,
        )  # fmt: skip
        self._clients = Clients(
            setup, system, objectives, self.engine, SHAPE.vocab_size, num_held,
            lambda: self._events.now, self._instance.apply,
        )  # fmt: skip

    def run(
        self,
        online: Sequence[PlannedRequest],
        offline: Sequence[PlannedRequest],
        duration_s: float,
        *,
        grace_s: float = 20.0,
    ) -> RunResult:
        """`online` at their times and `offline`, in a circle, as a backlog. Goes on after `duration_s` until all online
        requests have ended, `grace_s` at most. Raises `RunFailed`."""
        clients, events = self._clients, self._events
        for planned, request in clients.expect(online, offline):
            events.at(planned.at_s, clients.submit_online, planned, request)
        clients.begin()
        events.at(duration_s, lambda: None)
        if not events.run(lambda: clients.is_over(duration_s, grace_s), math.inf):
            raise RunFailed("nothing can run and nothing will come, and online requests are held")
        return clients.result(duration_s, events.now)

    def _slowdown(self) -> float:
        return math.exp(self._draw.normal(0.0, self._noise)) if self._noise else 1.0

    def _on_turn(self, _step: VirtualStep | None) -> None:
        if self._events.now >= self._clients.next_sample_s:
            self._clients.sample(self._events.now)

    def _on_step(self, ended: VirtualStep) -> None:
        plan = ended.plan
        step = Step.of(plan, ended.start_s, self._events.now, ended.is_suspended)
        self._clients.steps.append(step)
        self._clients.count_step()
        if not ended.is_suspended:
            step.parts = parts_of(self._cost, plan.starts, plan.counts, step.num_tokens[0], ended.whole_s)

    def _on_effects(self, effects: list[Effect]) -> None:
        for ended in self._clients.take_effects(effects, self._events.now):
            self._clients.take_ended(ended)
