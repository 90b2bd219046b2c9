"""An instance in virtual time: the real engine and the live instance's driver; steps and copies take what cost models say.

Steps run one after the other in the order of their launch. One that is interrupted stops at its next safepoint, one that is
resumed in part at the last safepoint up to its share. Copies run one after the other beside the steps; moves within the
device take no time that would count. As a live instance's thread, the host does nothing while it waits for a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from shared.costs.model import CostModel
from shared.engine.calls import Call
from shared.engine.driver import Driver
from shared.engine.engine import Effect, Engine
from shared.engine.plan import CopyKind, EndedCopy, KvCopy, StepPlan, StepResult
from shared.simulation.disk import LOOK_S, VirtualDisk
from shared.simulation.events import Events

T = TypeVar("T")


class VirtualStep:
    """A step, or the part of one that ran without a stop. Seconds of virtual time, shares of its layers."""

    __slots__ = ("done_share", "plan", "start_s", "stop_share", "whole_s")

    def __init__(self, plan: StepPlan, start_s: float, whole_s: float, done_share: float, stop_share: float) -> None:
        self.plan = plan
        self.start_s = start_s
        self.whole_s = whole_s
        """Seconds of all its layers."""
        self.done_share = done_share
        """Time at which it began."""
        self.stop_share = stop_share

    @property
    def end_s(self) -> float:
        return self.start_s + self.whole_s * (self.stop_share - self.done_share)

    @property
    def is_suspended(self) -> bool:
        return self.stop_share < 1.0


class VirtualInstance:
    def __init__(
        self,
        engine: Engine,
        events: Events,
        cost_model: Callable[[str], CostModel],
        sample: Callable[[StepPlan], list[int]],
        on_effects: Callable[[list[Effect]], None],
        *,
        on_turn: Callable[[VirtualStep | None], None] = lambda _: None,
        on_step: Callable[[VirtualStep], None] = lambda _: None,
        on_copy: Callable[[KvCopy], None] = lambda _: None,
        slowdown: Callable[[], float] = lambda: 1.0,
        disk: VirtualDisk | None = None,
    ) -> None:
        """`cost_model`: what a model's steps really take, times `slowdown`. `sample`: a step's tokens; also
        asked of one that was suspended, whose row changes count. `on_turn` is told
        what each turn launched, if anything; `on_step` each step that has ended, before its effects; `on_copy` each copy
        that has. `disk`: for an engine that keeps KV blocks there."""
        self.engine = engine
        self._disk = disk
        self._events = events
        self._cost_model = cost_model
        self._sample = sample
        self._on_effects = on_effects
        self._on_turn = on_turn
        self._on_step = on_step
        self._on_copy = on_copy
        self._slowdown = slowdown
        self._driver = Driver(engine)
        self._steps: deque[VirtualStep] = deque()
        self._collects = False
        """The host waits for the oldest of them."""
        self._is_due = False
        self._wakeup_s = math.inf
        self._interrupted: set[int] = set()
        """Before they were launched."""
        self._suspended: dict[int, tuple[float, float]] = {}
        """Step -> share of its layers done, seconds of the whole."""
        self._copies_end_s = 0.0
        self._finished: list[EndedCopy] = []
        self.is_stopped = False
        """It does nothing any more."""

    @property
    def is_computing(self) -> bool:
        return bool(self._steps)

    def apply(self, call: Call[T]) -> T:
        """Applies a call as the live instance's loop does."""
        now = self._events.now
        result = self.engine.apply(call, now)
        if call.brings_work:
            self._interrupt(self.engine.take_interrupt(now))
        self.wake()
        return result

    def ask(self, question: Callable[[Engine], T]) -> T:
        """Asks the engine as the live instance's loop does."""
        return question(self.engine)

    def wake(self) -> None:
        """Looks again, after what else happens at this moment."""
        if not self._is_due:
            self._is_due = True
            self._events.after(0.0, self._iterate)

    def _iterate(self) -> None:
        self._is_due = False
        if self._collects or self.is_stopped:
            return
        driver, now = self._driver, self._events.now
        if self._finished:
            finished, self._finished = self._finished, []
            self._start_copies(driver.on_copies(finished, now))
        turn = driver.turn(now)
        self._interrupt(turn.interrupt)
        self._start_copies(turn.copies)
        step = None if turn.plan is None else self._launch(turn.plan)
        self._on_turn(step)
        self._on_effects(turn.effects)
        self._collects = driver.collects
        if not self._collects and not driver.waits:
            self.wake()
        elif driver.waits and (wakeup_s := self.engine.next_wakeup()) is not None and wakeup_s < self._wakeup_s:
            self._wakeup_s = wakeup_s
            self._events.at(wakeup_s, self._on_wakeup)

    def _on_wakeup(self) -> None:
        self._wakeup_s = math.inf
        self.wake()

    # ------------------------------------------------------------------------------------------------- steps

    def _launch(self, plan: StepPlan) -> VirtualStep:
        cost = self._cost_model(plan.model)
        done, whole_s = self._suspended.pop(plan.step_id) if plan.resumes else (0.0, self._duration_s(plan, cost))
        for step_id in plan.discards:
            self._suspended.pop(step_id, None)
        stop = 1.0
        if plan.step_id in self._interrupted:
            self._interrupted.discard(plan.step_id)
            stop = done
        elif plan.stop_share < 1.0:
            first = _safepoint(cost, done + 1 / cost.num_layers)
            stop = max(first, _safepoint(cost, plan.stop_share, is_before=True))
        start_s = max(self._events.now, self._steps[-1].end_s if self._steps else 0.0)
        step = VirtualStep(plan, start_s, whole_s, done, stop)
        self._steps.append(step)
        self._events.at(step.end_s, self._end, step, stop)
        return step

    def _duration_s(self, plan: StepPlan, cost: CostModel) -> float:
        seconds = cost.predict(plan.shape)
        if plan.is_interruptible:
            seconds += cost.safepoint_s * cost.num_layers / cost.layers_per_safepoint
        return seconds * self._slowdown()

    def _interrupt(self, step_id: int | None) -> None:
        if step_id is None:
            return
        step = next((step for step in self._steps if step.plan.step_id == step_id), None)
        if step is None:
            self._interrupted.add(step_id)
            return
        share = step.done_share + (self._events.now - step.start_s) / step.whole_s
        stop = _safepoint(self._cost_model(step.plan.model), share)
        if stop < step.stop_share:
            step.stop_share = stop
            self._events.at(step.end_s, self._end, step, stop)

    def _end(self, step: VirtualStep, stop_share: float) -> None:
        if stop_share != step.stop_share or self.is_stopped:
            return  # it was interrupted
        assert self._steps.popleft() is step
        plan = step.plan
        tokens = self._sample(plan)
        if step.is_suspended:
            self._suspended[plan.step_id] = (stop_share, step.whole_s)
            result = StepResult(plan.step_id, [], suspended_share=stop_share)
        else:
            result = StepResult(plan.step_id, tokens)
        turn, _ = self._driver.on_result(result, self._events.now)
        self._start_copies(turn.copies)
        self._on_step(step)
        self._on_effects(turn.effects)
        self._collects = False
        self._iterate()

    def _start_copies(self, copies: list[KvCopy]) -> None:
        for copy in copies:
            if copy.hashes:
                assert self._disk is not None
                end_s, seconds = self._disk.begin(copy, self._events.now)
                self._events.at(end_s, self._end_disk_copy, self._disk, copy, seconds)
                continue
            cost = self._cost_model(copy.model)
            block_s = {CopyKind.RESTORE: cost.restore_block_s, CopyKind.CHECKPOINT: cost.checkpoint_block_s}
            begins_s = max(self._events.now, self._copies_end_s)
            seconds = block_s.get(copy.kind, 0.0) * len(copy.device_blocks)
            self._copies_end_s = begins_s + seconds
            self._events.at(self._copies_end_s, self._end_copy, copy, seconds)

    def _end_copy(self, copy: KvCopy, seconds: float, ok: bool = True) -> None:
        self._on_copy(copy)
        self._finished.append(EndedCopy(copy.copy_id, ok, seconds))
        self.wake()

    def _end_disk_copy(self, disk: VirtualDisk, copy: KvCopy, seconds: float) -> None:
        self._end_copy(copy, seconds, disk.end(copy, self._events.now))
        if copy.kind == CopyKind.WRITE:
            self._events.after(LOOK_S, disk.tell, copy)


def _safepoint(cost: CostModel, share: float, *, is_before: bool = False) -> float:
    """The first safepoint from this share of the layers on (or the last up to it), as a share; 1.0 is the end."""
    intervals = share * cost.num_layers / cost.layers_per_safepoint
    rounded = math.floor(intervals + 1e-9) if is_before else math.ceil(intervals - 1e-9)
    return min(1.0, rounded * cost.layers_per_safepoint / cost.num_layers)
