"""A run in virtual time: the real engine, with steps and copies that take as long as a cost model says.

Nothing runs on a device, so hundreds of seconds take a few, and without noise the policies alone make the figures. The
order of calls to the engine is that of the live instance's driver (shared/simulation/instance.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from bench.coserving.accounting import parts_of
from bench.coserving.journal import Journal, Requests, RunFailed, RunResult, Step
from bench.coserving.setup import MODEL, Objectives, Setup, num_merged
from bench.coserving.systems import System
from bench.reporting import machine
from shared.cost_model import CostModel
from shared.engine.calls import Submit
from shared.engine.engine import Effect
from shared.engine.plan import ModelShape
from shared.messages.requests import GenerationRequest, RequestClass
from shared.simulation.events import Events
from shared.simulation.instance import VirtualInstance, VirtualStep
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
        num_blocks = num_merged(pool_tokens or setup.pool_tokens, SHAPE.block_size, SHAPE.blocks_per_merged)
        self._engine = setup.engine(system, SHAPE, self._cost, num_blocks, objectives)
        self._journal = Journal(self._engine, system, objectives)
        self._requests = Requests(setup.seed, SHAPE.vocab_size)
        self._draw = generator(setup.seed, "step times")
        self._events = Events()
        self._instance = VirtualInstance(
            self._engine, self._events, lambda _: self._cost, lambda plan: [TOKEN_ID] * sum(plan.samples),
            self._on_effects, on_turn=self._on_turn, on_step=self._on_step, slowdown=self._slowdown,
        )  # fmt: skip
        self._num_to_come = 0
        """Online requests."""
        self._source: Iterator[tuple[PlannedRequest, GenerationRequest]] = iter(())
        self._num_online = 0

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
        self._num_to_come = len(online)
        for planned in online:
            self._events.at(planned.at_s, self._submit_online, planned, self._requests.make(planned))
        if self._system.serves_offline:
            self._source = self._requests.backlog(offline)
            for _ in range(self._backlog):
                self._submit_offline()
        self._events.at(duration_s, lambda: None)
        if not self._events.run(lambda: self._is_over(duration_s, grace_s), math.inf):
            raise RunFailed(f"nothing can run and nothing will come, with {self._num_online} online requests held")
        return self._journal.result(duration_s, self._events.now)

    def _is_over(self, duration_s: float, grace_s: float) -> bool:
        now = self._events.now
        if now < duration_s or self._num_to_come:
            return False
        return self._num_online == 0 or now >= duration_s + grace_s

    # ------------------------------------------------------------------------------------------------- steps

    def _slowdown(self) -> float:
        return math.exp(self._draw.normal(0.0, self._noise)) if self._noise else 1.0

    def _on_turn(self, _step: VirtualStep | None) -> None:
        if self._events.now >= self._journal.next_sample_s:
            self._journal.sample(self._events.now)

    def _on_step(self, ended: VirtualStep) -> None:
        plan, now = ended.plan, self._events.now
        step = Step(ended.start_s, now, plan.num_decodes, plan.is_interruptible, plan.resumes, ended.is_suspended)
        self._journal.steps.append(step)
        self._journal.count_step()
        if not ended.is_suspended:
            step.parts = parts_of(self._cost, plan.starts, plan.counts, step.num_tokens[0], ended.whole_s)

    # ---------------------------------------------------------------------------------------------- requests

    def _submit_online(self, planned: PlannedRequest, request: GenerationRequest) -> None:
        self._num_to_come -= 1
        self._num_online += 1
        self._submit(planned, request, planned.at_s)

    def _submit_offline(self) -> None:
        planned, request = next(self._source)
        self._submit(planned, request, self._events.now)

    def _submit(self, planned: PlannedRequest, request: GenerationRequest, at_s: float) -> None:
        self._journal.take_request(planned, request, at_s=at_s, now=self._events.now)
        refused = self._instance.apply(Submit(request))
        if refused is not None:
            raise RunFailed(f"request {request.request_id} was refused: {refused.message}")

    def _on_effects(self, effects: list[Effect]) -> None:
        for ended in self._journal.take_effects(effects, self._events.now):
            if ended.error:
                raise RunFailed(f"request {ended.request_id} ended with {ended.error}")
            if ended.request_class is RequestClass.ONLINE:
                self._num_online -= 1
            else:
                self._submit_offline()
