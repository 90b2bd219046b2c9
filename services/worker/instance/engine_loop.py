"""The thread that drives one instance: plan, execute, apply, for ever.

Threads and who may touch what:
- The loop's thread plans and applies under `_lock`, and executes without it. Only it calls the executor, but for
  `interrupt`, which the thread that brings a request may call while a step runs.
- Any other thread (the event loop) may `apply` calls and `ask` questions: both take the lock, which is never held longer
  than one plan or apply (well under a millisecond).
- `claim_blocks` is a call of the executor too, so the loop's thread makes it, at its next turn: steps in flight go on.
- `between_steps` hands a function to the loop's thread, which runs it when neither a step nor a copy of KV blocks is in
  flight: loading and unloading of models touch executor and engine together.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from services.worker.black_box import BlackBox
from shared.engine.calls import Call
from shared.engine.counters import EngineCounters
from shared.engine.driver import Driver, StepStats
from shared.engine.engine import Effect, Engine
from shared.engine.memory.cache_news import CacheChanges
from shared.engine.plan import CopyKind, EndedCopy, KvCopy, StepPlan, StepResult
from shared.messages.timeline import RequestEvent

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

T = TypeVar("T")

_Calls = deque[tuple[Callable[[], Any], "Future[Any]"]]

COMPUTE_NICENESS = 5
"""Niceness of the model's threads on CPU."""
MAX_FAILED_STEPS = 8
"""In a row: the device is lost, and every request that still comes here would fail too."""


class StepExecutor(Protocol):
    """What the loop needs of an executor: steps run in the order of `launch`; `collect` waits for the oldest one that was
    launched and not collected. Copies run beside them."""

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...

    def interrupt(self, step_id: int) -> None:
        """Interrupts a step; called from any thread, does not block. The step's result says whether it came in time."""

    def start_copy(self, copy: KvCopy) -> None:
        """A move within the device takes place at once, in the order of steps and claims; it raises where it cannot."""

    def finished_copies(self) -> list[EndedCopy]:
        """Those that ended since the last call."""

    def claim_blocks(self, model: str, blocks: list[int]) -> torch.cuda.Event | None:
        """They will be written to by something beside the steps: such writes on the device wait for the CUDA event that
        this returns, if it returns one. `KeyError` where the model is not here."""

    def on_copy_finished(self, callback: Callable[[], None]) -> None:
        """`callback` is called in any thread when `finished_copies` has something new."""


class DiskLane(Protocol):
    """What the loop needs of whoever copies between host memory and disk, beside all else."""

    on_finished: Callable[[], None]
    """Called in any thread when `finished_copies` has something new."""

    def start_copy(self, copy: KvCopy) -> None: ...

    def finished_copies(self) -> list[EndedCopy]:
        """Those that ended since the last call."""


class EngineLoop:
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
        disk: DiskLane | None = None,
        black_box: BlackBox | None = None,
    ) -> None:
        """`on_failure` is called in the loop's thread when it dies: the instance is then of no more use.

        `niceness`: scheduling priority of this thread and of the compute threads it starts, relative to the process. On a
        CPU that the model shares with the services, a few steps of niceness let a frame or a request pass at once instead
        of waiting for a time slice of the model's threads."""
        self._engine = engine
        self._driver = Driver(engine)
        self._executor = executor
        self._clock = clock
        self._on_effects = on_effects
        self._on_failure = on_failure
        self.niceness = niceness
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._is_over = False
        """The thread has ended: nobody runs calls any more."""
        self._calls: _Calls = deque()
        self._quick_calls: _Calls = deque()
        self._lost: Exception | None = None
        """Why the loop is to fail: a move of blocks was not carried out, or `give_up`."""
        executor.on_copy_finished(self._wake.set)
        self._black_box = black_box or BlackBox(-1)
        self._disk = disk
        if disk is not None:
            disk.on_finished = self._wake.set
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._num_failed_in_a_row = 0
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

    def now(self) -> float:
        return self._clock()

    def apply(self, call: Call[T]) -> T:
        """Carries a call out, and the loop looks again. An offline step may give way to the work that it brings."""
        with self._lock:
            now = self._clock()
            result = self._engine.apply(call, now)
            if call.brings_work:
                self._interrupt(self._engine.take_interrupt(now))
        self._wake.set()
        return result

    def ask(self, question: Callable[[Engine], T]) -> T:
        """What `question` finds, which changes nothing and is quick: a method of `Engine`, say."""
        with self._lock:
            return question(self._engine)

    def take_events(self) -> list[tuple[str, RequestEvent]]:
        """See `EventLog.take`."""
        with self._lock:
            return self._engine.memory.events.take()

    def take_cache_changes(self) -> CacheChanges:
        """See `CacheNews.take`."""
        with self._lock:
            return self._engine.memory.cache_news.take()

    def held_epoch(self, request_id: str) -> int | None:
        """The epoch in which a request is held; None if it is not."""
        return self.ask(lambda engine: engine.held_epoch(request_id))

    @contextmanager
    def locked(self) -> Iterator[Engine]:
        """The engine, for as long as nobody else may touch it: be quick."""
        with self._lock:
            yield self._engine

    def give_up(self, reason: str) -> None:
        """Gives the executor up, from any thread: the loop fails at its next turn."""
        self._lost = RuntimeError(reason)
        self._wake.set()

    @property
    def counters(self) -> EngineCounters:
        """They go on growing; to be read only."""
        return self._engine.counters

    def _interrupt(self, step_id: int | None) -> None:
        """Under the lock, so that no later step is planned before the executor knows."""
        if step_id is not None:
            self._executor.interrupt(step_id)

    def between_steps(self, function: Callable[[], T]) -> Future[T]:
        """Runs `function` in the loop's thread while no step and no copy is in flight. It reaches the engine like others."""
        return self._post(self._calls, function)

    def claim_blocks(self, model: str, blocks: list[int]) -> Future[torch.cuda.Event | None]:
        """Before something beside the steps writes to blocks of a model, in the loop's thread beside the steps; its result
        is the executor's (StepExecutor.claim_blocks), or `KeyError`."""

        def claim() -> torch.cuda.Event | None:
            # What moves made free is not overwritten before it has been moved.
            with self._lock:
                copies = self._driver.copies()
            try:
                self._start_copies(copies)
            except Exception as error:
                self._lost = error
                raise
            return self._executor.claim_blocks(model, blocks)

        return self._post(self._quick_calls, claim)

    async def filled(self, blocks: Sequence[int]) -> bool:
        """Blocks of the native engine hold what they stand for."""
        return True

    def _post(self, calls: _Calls, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        calls.append((function, future))
        self._wake.set()
        if self._is_over:
            _give_up(calls)
        return future

    def stuck_for_s(self) -> float:
        """How long the step that runs now has been running; 0 between steps."""
        started_s = self._driver.running_since_s
        return 0.0 if started_s is None else self._clock() - started_s

    # ------------------------------------------------------------------------------------- the loop's thread

    def _run(self) -> None:
        if self.niceness:
            # On Linux a thread id is a scheduling entity of its own, and the threads it starts inherit its priority. Less
            # niceness than the process has would need a privilege.
            thread_id = threading.get_native_id()
            niceness = os.getpriority(os.PRIO_PROCESS, thread_id) + self.niceness
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
        driver = self._driver
        self._wake.clear()
        _run(self._quick_calls)
        if self._lost is not None:
            raise self._lost
        finished = self._executor.finished_copies()
        if self._disk is not None:
            finished += self._disk.finished_copies()
        if finished:
            with self._lock:
                copies = driver.on_copies(finished, self._clock())
            self._start_copies(copies)
        if self._calls and driver.is_idle:
            _run(self._calls)
        with self._lock:
            # While calls wait, nothing is begun.
            turn = driver.turn(self._clock(), holds=bool(self._calls))
            self._interrupt(turn.interrupt)
            # Before each step: should it end the process, nothing can be told any more.
            plan = turn.plan
            if plan is not None and (plan.new_sequences or plan.resumes or plan.num_tokens > sum(plan.num_decodes)):
                self._black_box.note(self._engine.unproven())
            wakeup_s = self._engine.next_wakeup()
        if turn.effects:
            self._on_effects(turn.effects, None)
        self._start_copies(turn.copies)
        if turn.plan is not None:
            self._executor.launch(turn.plan)
        if driver.collects:
            self._collect()
        elif driver.waits and not self._stopping and (driver.num_copies or not self._calls):
            self._wake.wait(None if wakeup_s is None else max(0.0, wakeup_s - self._clock()))

    def _collect(self) -> None:
        result = self._executor.collect()
        with self._lock:
            turn, stats = self._driver.on_result(result, self._clock())
            if self._black_box.is_computing:
                self._black_box.note(self._engine.unproven())
        self._num_failed_in_a_row = self._num_failed_in_a_row + 1 if result.error else 0
        if result.error:
            log.error("step %d of %s failed: %s", result.step_id, stats.model, result.error)
            if self._num_failed_in_a_row >= MAX_FAILED_STEPS:
                raise RuntimeError(f"{MAX_FAILED_STEPS} steps in a row failed; the last one: {result.error}")
        self._start_copies(turn.copies)
        self.num_steps += 1
        self._on_effects(turn.effects, stats)

    def _start_copies(self, copies: list[KvCopy]) -> None:
        for copy in copies:
            if self._disk is not None and copy.kind in (CopyKind.WRITE, CopyKind.READ):
                self._disk.start_copy(copy)
            else:
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
