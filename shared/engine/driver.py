"""What an executor is to do for an engine, as a state machine that is given results and time.

A host (the instance's thread, virtual time) owns executor and clock, and repeats

    turn(now) -> Turn            interrupt what it names, start its copies, launch its plan
    on_result(result, now)       where `collects` says that the oldest launched step is to be awaited
    on_copies(finished, now)     whenever copies have ended

and in between, at any time, applies calls to the engine, and asks it for an interrupt (`Engine.take_interrupt`) after those
that bring work.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from shared.engine.calls import OnCopy, OnStep, OnTime
from shared.engine.engine import Effect, Engine
from shared.engine.plan import EndedCopy, KvCopy, StepPlan, StepResult


class StepStats(msgspec.Struct, frozen=True):
    """One executed step, for metrics."""

    model: str
    num_tokens: int
    num_decodes: tuple[int, int]
    """Online, offline."""
    duration_s: float
    limit_s: float = math.inf
    """What the objectives allowed it; decodes that nothing could join are not limited."""
    is_suspended: bool = False
    """It stopped at a safepoint; the rest of it will be a step of its own here."""
    num_in_flight: int = 1
    """Steps when it ended, itself among them."""
    planned_s: float | None = None
    ended_s: float | None = None
    """None: it is told of when it ends, and was planned when it began."""


class Turn(NamedTuple):
    """What is to be done now, in this order."""

    interrupt: int | None
    """The step in flight that is to stop at its next safepoint: the executor must know before a later plan is made."""
    effects: list[Effect]
    copies: list[KvCopy]
    plan: StepPlan | None
    """Plan to be launched."""


class _InFlight(NamedTuple):
    plan: StepPlan
    planned_s: float
    limit_s: float


class Driver:
    """Drives one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._in_flight: deque[_InFlight] = deque()
        self._last_end_s = -math.inf
        self._num_copies = 0
        self.running_since_s: float | None = None
        """Time at which the oldest step in flight was planned."""
        self._is_full = False
        """The last turn launched nothing, or filled what may be in flight."""

    @property
    def is_idle(self) -> bool:
        """Neither a step nor a copy is in flight."""
        return not self._in_flight and not self._num_copies

    @property
    def num_copies(self) -> int:
        """In flight."""
        return self._num_copies

    @property
    def collects(self) -> bool:
        """Whether nothing is to be done before the oldest step in flight has ended (or something else comes)."""
        return self._is_full and bool(self._in_flight)

    @property
    def waits(self) -> bool:
        """Whether nothing is to be done before `Engine.next_wakeup`, the end of a copy or a call."""
        return self._is_full and not self._in_flight

    def turn(self, now: float, *, holds: bool = False) -> Turn:
        """`holds`: no step is begun; what is in flight comes to its end."""
        engine = self._engine
        engine.apply(OnTime(), now)
        plan = None if holds else engine.plan(now)
        copies = self.copies()
        interrupt = engine.take_interrupt(now)
        if plan is not None:
            # One that is resumed was filled under other limits, or none.
            limit_s = math.inf if plan.resumes else engine.planner.last_limit_s
            self._in_flight.append(_InFlight(plan, now, limit_s))
            self.running_since_s = self._in_flight[0].planned_s
        self._is_full = plan is None or len(self._in_flight) >= engine.steps.max_in_flight
        return Turn(interrupt, engine.effects(), copies, plan)

    def copies(self) -> list[KvCopy]:
        """Copies to be started now."""
        copies = self._engine.next_copies()
        self._num_copies += len(copies)
        return copies

    def on_result(self, result: StepResult, now: float) -> tuple[Turn, StepStats]:
        """Takes the result of the oldest step in flight."""
        num_in_flight = len(self._in_flight)
        step = self._in_flight.popleft()
        self.running_since_s = self._in_flight[0].planned_s if self._in_flight else None
        self._engine.apply(OnStep(result), now)
        # With two steps in flight the second waits for the first: its own time begins when that one was done.
        duration_s = now - max(step.planned_s, self._last_end_s)
        self._last_end_s = now
        plan = step.plan
        is_suspended = result.suspended_share >= 0
        stats = StepStats(
            plan.model,
            plan.num_tokens,
            plan.num_decodes,
            duration_s,
            step.limit_s,
            is_suspended,
            num_in_flight,
            step.planned_s,
            now,
        )
        return Turn(None, self._engine.effects(), self.copies(), None), stats

    def on_copies(self, finished: Iterable[EndedCopy], now: float) -> list[KvCopy]:
        """Takes in the copies that have ended. Returns those to start now."""
        for ended in finished:
            self._num_copies -= 1
            self._engine.apply(OnCopy(*ended), now)
        return self.copies()
