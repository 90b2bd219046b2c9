"""A run in virtual time: the real engine, with steps and copies that take as long as a cost model says.

Nothing runs on a device, so hundreds of seconds take a few, and without noise the policies alone make the figures. The
order of calls to the engine is that of `EngineLoop` with one step in flight: requests come in at any time, all else between
two steps. Steps stop at the safepoints at which `Safepoints` stops them; copies run one after the other beside the steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from bench.coserving.accounting import parts_of
from bench.coserving.journal import Journal, Requests, RunFailed, RunResult, Step
from bench.coserving.setup import MODEL, Objectives, Setup, num_merged
from bench.coserving.systems import System
from bench.reporting import machine
from shared.cost_model import CostModel, shape_of
from shared.engine.calls import OnCopy, OnStep, OnTime, Submit
from shared.engine.plan import CopyKind, ModelShape, StepPlan, StepResult
from shared.messages.requests import GenerationRequest, RequestClass
from tideway.bench.workload import PlannedRequest, generator

SMOLLM_135M_ON_TWO_CORES = CostModel(
    fixed_s=0.025,
    prefill_token_s=0.00035,
    prefill_attention_s=1e-6,
    decode_s=0.0025,
    decode_context_s=1e-6,
    mixed_s=0.006,
    num_layers=30,
    layers_per_safepoint=1,
    checkpoint_slot_s=1.7e-4,
    restore_slot_s=1.7e-4,
)
"""Rounded from profiles of the shape of SmolLM-135M in bfloat16, two threads of a quiet x86 server."""
SHAPE = ModelShape(MODEL, page_tokens=32, slots_per_merged=2, max_model_len=2048, vocab_size=49152)
TOKEN_ID = 5
"""What every step samples."""


class VirtualTestbed:
    """`noise`: standard deviation of the logarithm of step times around the cost model."""

    def __init__(self, setup: Setup, cost_model: CostModel = SMOLLM_135M_ON_TWO_CORES, noise: float = 0.0) -> None:
        if setup.steps_in_flight != 1:
            raise ValueError(f"{setup.steps_in_flight} steps in flight: in virtual time there is one")
        self.setup, self.cost_model, self.noise = setup, cost_model, noise

    def machine(self) -> dict[str, Any]:
        return machine()

    def close(self) -> None:
        """There is nothing to remove."""


class VirtualRun:
    """As `Run`."""

    def __init__(
        self,
        testbed: VirtualTestbed,
        system: System,
        objectives: Objectives,
        *,
        pool_tokens: int = 0,
        backlog: int = 0,
    ) -> None:
        """`backlog`: offline requests held at once; 0: more than there are rows. `pool_tokens`: 0 for the setup's."""
        setup = testbed.setup
        self._system, self._cost, self._noise = system, testbed.cost_model, testbed.noise
        self._backlog = backlog or setup.num_rows + 8
        num_blocks = num_merged(pool_tokens or setup.pool_tokens, SHAPE.page_tokens, SHAPE.slots_per_merged)
        self._engine = setup.engine(system, SHAPE, self._cost, num_blocks, objectives)
        self._journal = Journal(self._engine, system, objectives)
        self._requests = Requests(setup.seed, SHAPE.vocab_size)
        self._draw = generator(setup.seed, "step times")
        self._now = 0.0
        self._arrivals: deque[tuple[PlannedRequest, GenerationRequest]] = deque()
        self._source: Iterator[tuple[PlannedRequest, GenerationRequest]] = iter(())
        self._num_online = 0
        self._suspended: dict[int, tuple[float, float]] = {}
        """By step: share of its layers done, seconds of the whole."""
        self._copies: deque[tuple[float, int]] = deque()
        """When each ends, in that order, and its id."""

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
        self._arrivals = deque((planned, self._requests.make(planned)) for planned in online)
        if self._system.serves_offline:
            self._source = self._requests.backlog(offline)
            for _ in range(self._backlog):
                self._submit_offline()
        while not self._is_over(duration_s, grace_s):
            self._iterate(duration_s)
        return self._journal.result(duration_s, self._now)

    def _is_over(self, duration_s: float, grace_s: float) -> bool:
        if self._now < duration_s or self._arrivals:
            return False
        return self._num_online == 0 or self._now >= duration_s + grace_s

    def _iterate(self, duration_s: float) -> None:
        """One step; or, where nothing can run, the way to the next event."""
        engine, now = self._engine, self._now
        while self._copies and self._copies[0][0] <= now:
            engine.apply(OnCopy(self._copies.popleft()[1], True), now)
        self._submit_arrivals(now)
        if now >= self._journal.next_sample_s:
            self._journal.sample(now)
        engine.apply(OnTime(), now)
        plan = engine.plan(now)
        self._start_copies()
        is_interrupted = engine.take_interrupt(now) is not None
        self._take_effects()
        if plan is not None:
            self._execute(plan, is_interrupted)
            return
        events = [self._arrivals[0][0].at_s] if self._arrivals else []
        events += [self._copies[0][0]] if self._copies else []
        if not events and now >= duration_s:
            raise RunFailed(f"nothing can run and nothing will come, with {self._num_online} online requests held")
        self._now = min(events, default=duration_s)

    # ----------------------------------------------------------------------------------------------- a step

    def _execute(self, plan: StepPlan, is_interrupted: bool) -> None:
        start_s, num_layers = self._now, self._cost.num_layers
        done, whole_s = self._suspended.pop(plan.step_id) if plan.resumes else (0.0, self._duration_s(plan))
        for step_id in plan.discards:
            self._suspended.pop(step_id, None)
        stop = done if is_interrupted else 1.0
        if not is_interrupted and plan.stop_share < 1.0:
            first = self._safepoint_after(done + 1 / num_layers)
            stop = max(first, self._safepoint_after(plan.stop_share, is_before=True))
        while self._arrivals and (at_s := self._arrivals[0][0].at_s) < start_s + whole_s * (stop - done):
            self._submit_next(at_s)
            if self._engine.take_interrupt(at_s) is not None:
                stop = min(stop, self._safepoint_after(done + (at_s - start_s) / whole_s))
        self._now = start_s + whole_s * (stop - done)
        step = Step(start_s, self._now, plan.num_decodes, plan.is_interruptible, plan.resumes, stop < 1.0)
        self._journal.steps.append(step)
        if stop < 1.0:
            self._suspended[plan.step_id] = (stop, whole_s)
            result = StepResult(plan.step_id, [], suspended_share=stop)
        else:
            result = StepResult(plan.step_id, [TOKEN_ID] * sum(plan.samples))
        self._engine.apply(OnStep(result), self._now)
        self._start_copies()
        self._journal.count_step()
        if stop == 1.0:
            step.parts = parts_of(self._cost, plan.starts, plan.counts, step.num_tokens[0], whole_s)
        self._take_effects()

    def _duration_s(self, plan: StepPlan) -> float:
        seconds = self._cost.predict(shape_of(plan.starts, plan.counts))
        if plan.is_interruptible:
            seconds += self._cost.safepoint_s * self._cost.num_layers / self._cost.layers_per_safepoint
        return seconds * math.exp(self._draw.normal(0.0, self._noise)) if self._noise else seconds

    def _safepoint_after(self, share: float, *, is_before: bool = False) -> float:
        """The first safepoint from this share of the layers on (or the last up to it), as a share; 1.0 is the end."""
        every, num_layers = self._cost.layers_per_safepoint, self._cost.num_layers
        intervals = share * num_layers / every
        rounded = math.floor(intervals + 1e-9) if is_before else math.ceil(intervals - 1e-9)
        return min(1.0, rounded * every / num_layers)

    def _start_copies(self) -> None:
        for copy in self._engine.next_copies():
            # A move within the device takes no time that would count.
            slot_s = {
                CopyKind.RESTORE: self._cost.restore_slot_s,
                CopyKind.CHECKPOINT: self._cost.checkpoint_slot_s,
            }.get(copy.kind, 0.0)
            begins_s = max(self._now, self._copies[-1][0]) if self._copies else self._now
            self._copies.append((begins_s + slot_s * len(copy.device_slots), copy.copy_id))

    # --------------------------------------------------------------------------------------------- requests

    def _submit_arrivals(self, now: float) -> None:
        while self._arrivals and self._arrivals[0][0].at_s <= now:
            self._submit_next(now)

    def _submit_next(self, now: float) -> None:
        planned, request = self._arrivals.popleft()
        self._submit(planned, request, planned.at_s, now)
        self._num_online += 1

    def _submit_offline(self) -> None:
        planned, request = next(self._source)
        self._submit(planned, request, self._now, self._now)

    def _submit(self, planned: PlannedRequest, request: GenerationRequest, at_s: float, now: float) -> None:
        self._journal.take_request(planned, request, at_s=at_s, now=now)
        refused = self._engine.apply(Submit(request), now)
        if refused is not None:
            raise RunFailed(f"request {request.request_id} was refused: {refused.message}")

    def _take_effects(self) -> None:
        for ended in self._journal.take_effects(self._engine.effects(), self._now):
            if ended.error:
                raise RunFailed(f"request {ended.request_id} ended with {ended.error}")
            if ended.request_class is RequestClass.ONLINE:
                self._num_online -= 1
            else:
                self._submit_offline()
