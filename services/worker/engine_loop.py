"""The thread that drives one instance: plan, execute, apply, for ever.

Threads and who may touch what:
- The loop's thread plans and applies under `_lock`, and executes without it. Only it calls the executor, but for
  `interrupt`, which the thread that brings a request may call while a step runs.
- Any other thread (the event loop) may call what engine_calls.py has: it takes the lock.
- `claim_slots` is a call of the executor too, so the loop's thread makes it, at its next turn: steps in flight go on.
- `between_steps` hands a function to the loop's thread, which runs it when neither a step nor a copy of KV slots is in
  flight: loading and unloading of models touch executor and engine together.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import msgspec

from services.worker.engine_calls import EngineCalls
from shared.engine.engine import Engine
from shared.engine.moving import TakenOut
from shared.engine.plan import KvCopy, StepPlan, StepResult
from shared.engine.requests import Ended, Output

log = logging.getLogger(__name__)

T = TypeVar("T")

Effect = Output | Ended | TakenOut

_Calls = deque[tuple[Callable[[], Any], "Future[Any]"]]

MAX_FAILED_STEPS = 8
"""In a row: the device is lost, and every request that still comes here would fail too."""


class StepExecutor(Protocol):
    """What the loop needs of an executor: steps run in the order of `launch`; `collect` waits for the oldest one that was
    launched and not collected. Copies run beside them."""

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...

    def interrupt(self, step_id: int) -> None:
        """From any thread; does not block. The step's result says whether it came in time."""

    def start_copy(self, copy: KvCopy) -> None:
        """A move within the device takes place at once, in the order of steps and claims; it raises where it cannot."""

    def finished_copies(self) -> list[tuple[int, bool]]:
        """(copy id, whether it succeeded) of those that ended since the last call."""

    def claim_slots(self, model: str, slots: list[int]) -> Any:
        """They will be written to by something beside the steps: such writes on the device wait for the CUDA event that
        this returns, if it returns one. `KeyError` where the model is not here."""

    def on_copy_finished(self, callback: Callable[[], None]) -> None:
        """`callback` is called in any thread when `finished_copies` has something new."""


class StepStats(msgspec.Struct, frozen=True):
    """One executed step, for metrics."""

    model: str
    num_tokens: int
    num_decodes: tuple[int, int]
    """Online, offline."""
    duration_s: float
    limit_s: float = math.inf
    """What the objectives allowed it."""
    is_suspended: bool = False
    """It stopped at a safepoint; the rest of it will be a step of its own here."""


class EngineLoop(EngineCalls):
    """Runs `engine` on `executor`. `on_effects(effects, stats)` is called in the loop's thread after each step and after
    each change from outside; it must not block."""

    def __init__(
        self,
        engine: Engine,
        executor: StepExecutor,
        clock: Callable[[], float],
        on_effects: Callable[[list[Effect], StepStats | None], None],
        *,
        on_failure: Callable[[], None] = lambda: None,
        niceness: int = 0,
    ) -> None:
        """`on_failure` is called in the loop's thread when it dies: the instance is then of no more use.

        `niceness`: scheduling priority of this thread and of the compute threads it starts, relative to the process. On a
        CPU that the model shares with the services, a few steps of niceness let a frame or a request pass at once instead
        of waiting for a time slice of the model's threads."""
        super().__init__(engine, clock, executor.interrupt)
        self._niceness = niceness
        self._on_failure = on_failure
        self._num_failed_in_a_row = 0
        self._collected_s = 0.0
        self._executor = executor
        self._on_effects = on_effects
        self._stopping = False
        self._is_over = False
        """The thread has ended: nobody runs calls any more."""
        self._calls: _Calls = deque()
        self._quick_calls: _Calls = deque()
        self._in_flight: deque[tuple[StepPlan, float, float]] = deque()
        """With the time of planning and the duration allowed."""
        self._num_copies = 0
        """In flight."""
        self._lost: Exception | None = None
        """Why a move of slots was not carried out in a call."""
        executor.on_copy_finished(self._wake.set)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._step_started_s: float | None = None
        self.num_steps = 0
        self.failure: str = ""
        """Why the thread died, if it did: the instance is then of no more use."""

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread after the step that runs now; waits at most `timeout_s`."""
        self._stopping = True  # before the event: the loop clears the event first and looks at this flag after
        self._wake.set()
        self._thread.join(timeout_s)

    # ------------------------------------------------------------------------------- calls from other threads

    def between_steps(self, function: Callable[[], T]) -> Future[T]:
        """Runs `function` in the loop's thread while no step and no copy is in flight. It reaches the engine through
        `locked`."""
        return self._post(self._calls, function)

    def claim_slots(self, model: str, slots: list[int]) -> Future[Any]:
        """Before something beside the steps writes to slots of a model, in the loop's thread beside the steps; its result is
        the executor's (StepExecutor.claim_slots), or `KeyError`."""

        def claim() -> Any:
            # What moves made free is not overwritten before it has been moved.
            with self._lock:
                copies = self._engine.next_copies()
            try:
                self._start_copies(copies)
            except Exception as error:
                self._lost = error
                raise
            return self._executor.claim_slots(model, slots)

        return self._post(self._quick_calls, claim)

    def _post(self, calls: _Calls, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        calls.append((function, future))
        self._wake.set()
        if self._is_over:
            _give_up(calls)
        return future

    def stuck_for_s(self) -> float:
        """How long the step that runs now has been running; 0 between steps."""
        started = self._step_started_s
        return 0.0 if started is None else self._clock() - started

    # ------------------------------------------------------------------------------------- the loop's thread

    def _run(self) -> None:
        if self._niceness:
            # On Linux a thread id is a scheduling entity of its own, and the threads it starts inherit its priority. Less
            # niceness than the process has would need a privilege.
            thread_id = threading.get_native_id()
            niceness = os.getpriority(os.PRIO_PROCESS, thread_id) + self._niceness
            os.setpriority(os.PRIO_PROCESS, thread_id, niceness)
        try:
            while not self._stopping:
                self._iterate()
        except Exception as error:
            log.exception("the engine loop failed")
            self.failure = f"{type(error).__name__}: {error}"
            self._on_failure()
        finally:
            self._is_over = True
            for calls in (self._quick_calls, self._calls):
                _give_up(calls)

    def _iterate(self) -> None:
        in_flight = self._in_flight
        self._wake.clear()
        _run(self._quick_calls)
        if self._lost is not None:
            raise self._lost
        if finished := self._executor.finished_copies():
            self._apply_copies(finished)
        if self._calls and not in_flight and not self._num_copies:
            _run(self._calls)
        now = self._clock()
        with self._lock:
            self._engine.on_time(now)
            # while calls wait, nothing is begun: what is in flight comes to its end
            plan = None if self._calls else self._engine.plan(now)
            copies = self._engine.next_copies()
            limit_s = self._engine.planner.last_limit_s
            self._interrupt(now)
            effects = self._engine.effects()
            wakeup = self._engine.next_wakeup()
        if effects:
            self._on_effects(effects, None)
        self._start_copies(copies)
        if plan is not None:
            self._step_started_s = self._step_started_s or now
            # one that is resumed was filled under other limits, or none
            in_flight.append((plan, now, math.inf if plan.resumes else limit_s))
            self._executor.launch(plan)
            if len(in_flight) < self._engine.steps_in_flight:
                return
        if in_flight:
            self._collect(*in_flight.popleft())
            self._step_started_s = in_flight[0][1] if in_flight else None
        elif not self._stopping and (self._num_copies or not self._calls):
            self._wake.wait(None if wakeup is None else max(0.0, wakeup - self._clock()))

    def _collect(self, plan: StepPlan, started_s: float, limit_s: float) -> None:
        result = self._executor.collect()
        now = self._clock()
        self._num_failed_in_a_row = self._num_failed_in_a_row + 1 if result.error else 0
        if result.error:
            log.error("step %d of %s failed: %s", plan.step_id, plan.model, result.error)
            if self._num_failed_in_a_row >= MAX_FAILED_STEPS:
                raise RuntimeError(f"{MAX_FAILED_STEPS} steps in a row failed; the last one: {result.error}")
        with self._lock:
            self._engine.on_step(result, now)
            copies = self._engine.next_copies()
            effects = self._engine.effects()
        self._start_copies(copies)
        self.num_steps += 1
        # With two steps in flight the second waits for the first: its own time begins when that one was done.
        duration_s = now - max(started_s, self._collected_s)
        self._collected_s = now
        is_suspended = result.suspended_share >= 0
        stats = StepStats(plan.model, plan.num_tokens, plan.num_decodes, duration_s, limit_s, is_suspended)
        self._on_effects(effects, stats)

    def _apply_copies(self, finished: list[tuple[int, bool]]) -> None:
        self._num_copies -= len(finished)
        now = self._clock()
        with self._lock:
            for copy_id, ok in finished:
                self._engine.on_copy(copy_id, ok, now)
            copies = self._engine.next_copies()
        self._start_copies(copies)

    def _start_copies(self, copies: list[KvCopy]) -> None:
        self._num_copies += len(copies)
        for copy in copies:
            self._executor.start_copy(copy)


def _run(calls: _Calls) -> None:
    while calls:
        call, future = calls.popleft()
        if not future.set_running_or_notify_cancel():
            continue
        try:
            result = call()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)


def _give_up(calls: _Calls) -> None:
    with contextlib.suppress(IndexError):
        while True:
            future = calls.popleft()[1]
            if future.set_running_or_notify_cancel():
                future.set_exception(RuntimeError("the engine loop has ended"))
