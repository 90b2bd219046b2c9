"""The thread that drives one instance: plan, execute, apply, for ever.

Threads and who may touch what:
- The loop's thread plans and applies under `_lock`, and executes without it. Only it calls the executor, but for
  `interrupt`, which the thread that brings a request may call while a step runs.
- Any other thread (the event loop) may call `submit`, `cancel` and the reading methods; they take the lock, which is never
  held longer than one plan or apply (well under a millisecond).
- `between_steps` hands a function to the loop's thread, which runs it when neither a step nor a copy of KV slots is in
  flight: loading and unloading of models touch executor and engine together.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import msgspec

from shared.cost_model import CostModel
from shared.engine.counters import EngineCounters
from shared.engine.engine import Engine
from shared.engine.load import InstanceLoad
from shared.engine.plan import KvCopy, StepPlan, StepResult
from shared.engine.requests import Ended, Output
from shared.engine.sequence import State
from shared.messages import ErrorInfo, ExecutionStatistics, GenerationRequest, HeldRequest

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FAILED_STEPS = 8
"""In a row: the device is lost, and every request that still comes here would fail too."""


class StepExecutor(Protocol):
    """What the loop needs of an executor: steps run in the order of `launch`; `collect` waits for the oldest one that was
    launched and not collected. Copies run beside them."""

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...

    def interrupt(self, step_id: int) -> None:
        """From any thread; does not block. The step's result says whether it came in time."""

    def start_copy(self, copy: KvCopy) -> None: ...

    def finished_copies(self) -> list[tuple[int, bool]]:
        """(copy id, whether it succeeded) of those that ended since the last call."""

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


class EngineLoop:
    """Runs `engine` on `executor`. `on_effects(effects, stats)` is called in the loop's thread after each step and after
    each change from outside; it must not block."""

    def __init__(
        self,
        engine: Engine,
        executor: StepExecutor,
        clock: Callable[[], float],
        on_effects: Callable[[list[Output | Ended], StepStats | None], None],
        *,
        on_failure: Callable[[], None] = lambda: None,
        niceness: int = 0,
    ) -> None:
        """`on_failure` is called in the loop's thread when it dies: the instance is then of no more use.

        `niceness`: scheduling priority of this thread and of the compute threads it starts, relative to the process. On a
        CPU that the model shares with the services, a few steps of niceness let a frame or a request pass at once instead
        of waiting for a time slice of the model's threads."""
        self._niceness = niceness
        self._on_failure = on_failure
        self._num_failed_in_a_row = 0
        self._collected_s = 0.0
        self._engine = engine
        self._executor = executor
        self._clock = clock
        self._on_effects = on_effects
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._in_flight: deque[tuple[StepPlan, float, float]] = deque()
        """With the time of planning and the duration allowed."""
        self._num_copies = 0
        """In flight."""
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

    def now(self) -> float:
        return self._clock()

    # ------------------------------------------------------------------------------- calls from other threads

    def submit(self, request: GenerationRequest) -> ErrorInfo | None:
        with self._lock:
            now = self._clock()
            refused = self._engine.submit(request, now)
            self._interrupt(now)
        self._wake.set()
        return refused

    def cancel(self, request_id: str) -> None:
        with self._lock:
            self._engine.cancel(request_id, self._clock())
        self._wake.set()

    def load(self) -> InstanceLoad:
        with self._lock:
            return self._engine.load()

    def cost_models(self) -> dict[str, tuple[CostModel, float]]:
        """Of each model that has one, as it was measured, and the live correction."""
        with self._lock:
            return self._engine.cost_models()

    @property
    def counters(self) -> EngineCounters:
        """They go on growing; to be read only."""
        return self._engine.counters

    def used_share(self) -> float:
        """Share of the KV pool that sequences hold, 0 to 1."""
        with self._lock:
            return self._engine.pool.used_merged() / self._engine.pool.num_merged

    def host_used_share(self) -> float:
        """Share of the host memory that checkpoints hold, 0 to 1."""
        with self._lock:
            pool = self._engine.planner.host.pool
            return 0.0 if pool is None else pool.used_merged() / pool.num_merged

    def held_requests(self) -> list[HeldRequest]:
        with self._lock:
            return [
                HeldRequest(
                    sequence.request.request_id,
                    sequence.request.gateway_id,
                    sequence.request.epoch,
                    sequence.model,
                    sequence.num_tokens,
                    sequence.state == State.RUNNING,
                    sequence.is_online,
                )
                for sequence in self._engine.all_held()
            ]

    def held_epoch(self, request_id: str) -> int | None:
        """The epoch in which a request is held; None if it is not."""
        with self._lock:
            sequence = self._engine.held(request_id)
            return None if sequence is None else sequence.request.epoch

    def num_held(self, model: str | None = None) -> int:
        with self._lock:
            return sum(1 for sequence in self._engine.all_held() if model is None or sequence.model == model)

    def set_statistics(self, statistics: list[ExecutionStatistics]) -> None:
        with self._lock:
            for of_model in statistics:
                self._engine.set_statistics(of_model)

    def clear_prefix_cache(self) -> None:
        with self._lock:
            self._engine.clear_prefix_cache()

    def between_steps(self, function: Callable[[], T]) -> Future[T]:
        """Runs `function` in the loop's thread while no step and no copy is in flight. It reaches the engine through
        `locked`."""
        future: Future[T] = Future()
        self._calls.append((function, future))
        self._wake.set()
        return future

    @contextmanager
    def locked(self) -> Iterator[Engine]:
        """The engine, for as long as nobody else may touch it: be quick."""
        with self._lock:
            yield self._engine

    def stuck_for_s(self) -> float:
        """How long the step that runs now has been running; 0 between steps."""
        started = self._step_started_s
        return 0.0 if started is None else self._clock() - started

    def _interrupt(self, now: float) -> None:
        """Under the lock, so that no later step is planned before the executor knows."""
        step_id = self._engine.take_interrupt(now)
        if step_id is not None:
            self._executor.interrupt(step_id)

    # ------------------------------------------------------------------------------------- the loop's thread

    def _run(self) -> None:
        if self._niceness:
            # On Linux a thread id is a scheduling entity of its own, and the threads it starts inherit its priority.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        try:
            while not self._stopping:
                self._iterate()
        except Exception as error:
            log.exception("the engine loop failed")
            self.failure = f"{type(error).__name__}: {error}"
            self._on_failure()

    def _iterate(self) -> None:
        in_flight = self._in_flight
        self._wake.clear()
        if finished := self._executor.finished_copies():
            self._apply_copies(finished)
        if self._calls and not in_flight and not self._num_copies:
            self._run_calls()
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

    def _run_calls(self) -> None:
        while self._calls:
            call, future = self._calls.popleft()
            try:
                result = call()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)
