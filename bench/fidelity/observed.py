"""What an instance did, from the recording of its engine (shared/engine/recording.py): its steps, and when it had which
request.

Times are those of the machine's monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shared import recording
from shared.costs.model import CostModel, StepShape, shape_of
from shared.engine.calls import AddModel, OnStep, SetCostModel, SetStatistics, Submit
from shared.engine.engine import Engine
from shared.engine.plan import ModelShape, StepPlan
from shared.engine.recording import CALLS, Configuration
from shared.engine.requests import Output
from shared.messages.cluster import ExecutionStatistics


class Step(NamedTuple):
    model: str
    shape: StepShape
    start_s: float
    end_s: float
    """Time at which its tokens were known."""
    is_followed: bool
    """Requests were still held then: the next step follows as soon as the host comes to it."""
    num_tokens: int = 0
    """Output tokens that came of it."""


class Observed(NamedTuple):
    configuration: Configuration
    models: dict[str, ModelShape]
    cost_models: dict[str, CostModel]
    """Cost models that the engine was given."""
    steps: list[Step]
    submitted_s: dict[bytes, float]
    """Time at which each request reached the engine, by its prompt (the API gives requests other names)."""
    first_s: dict[bytes, float]
    """Time at which its first token was known there."""
    statistics: list[tuple[float, ExecutionStatistics]]
    """Statistics of the models' requests, when the engine was given them."""

    def statistics_at(self, at_s: float) -> list[ExecutionStatistics]:
        """What it had been told by then."""
        return list({one.model: one for told_s, one in self.statistics if told_s < at_s}.values())


class _Watched:
    """An engine that runs a recording again, and notes what comes of it."""

    def __init__(self, configuration: Configuration) -> None:
        self.engine: Engine = configuration.build()
        self.seen = Observed(configuration, {}, {}, [], {}, {}, [])
        self._plans: dict[int, tuple[StepPlan, float]] = {}
        self._prompts: dict[str, bytes] = {}
        """By id of the request."""
        self._last_end_s = 0.0

    def apply(self, call: Any, now: float) -> None:
        seen = self.seen
        self.engine.apply(call, now)
        if isinstance(call, Submit):
            self._prompts[call.request.request_id] = call.request.prompt
            seen.submitted_s.setdefault(call.request.prompt, now)
        elif isinstance(call, AddModel):
            seen.models[call.shape.name] = call.shape
        elif isinstance(call, SetCostModel):
            seen.cost_models[call.name] = call.cost_model
        elif isinstance(call, SetStatistics):
            seen.statistics.append((now, call.statistics))
        for effect in self.engine.effects():
            if isinstance(effect, Output):
                for entry in effect.entries:
                    if entry.tokens:
                        seen.first_s.setdefault(self._prompts[entry.request_id], now)
        if isinstance(call, OnStep):
            plan, planned_s = self._plans.pop(call.result.step_id)
            # With two steps in flight the second begins when the first has ended.
            start_s, self._last_end_s = max(planned_s, self._last_end_s), now
            shape = shape_of(plan.starts, plan.counts)
            num_tokens = sum(plan.samples)
            seen.steps.append(Step(plan.model, shape, start_s, now, bool(self.engine.num_held()), num_tokens))

    def decide(self, now: float) -> StepPlan | None:
        plan = self.engine.plan(now)
        if plan is not None:
            self._plans[plan.step_id] = (plan, now)
        return plan


def observe(recorded: bytes) -> Observed:
    """Raises `ReplayMismatch` where the bytes are no recording of this version's engine."""
    watched = _Watched(recording.header_of(recorded, Configuration))
    recording.replay(recorded, watched, CALLS, watched.decide)
    return watched.seen
