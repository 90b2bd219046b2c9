"""One run: planned requests at their times on one engine, with an offline backlog that never runs dry.

Threads: the engine loop's, which also notes outputs and steps, and the feeder (the caller), which submits each request at
its planned time and keeps a window of offline requests held. Times are seconds since the run's start.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue

from bench.coserving.journal import Journal, Requests, RunFailed, RunResult, Step
from bench.coserving.setup import Objectives
from bench.coserving.systems import System
from bench.coserving.testbed import Testbed
from services.worker.engine_loop import EngineLoop, StepExecutor
from services.worker.executor import Executor
from shared.engine.calls import Submit
from shared.engine.driver import StepStats
from shared.engine.plan import KvCopy, StepPlan, StepResult
from shared.engine.requests import Ended, Output
from shared.messages.requests import GenerationRequest, RequestClass
from tideway.bench.records import RequestRecord
from tideway.bench.workload import PlannedRequest


class ObservedExecutor:
    """An executor, and when each step was on it. `launch` and `collect` are called in the loop's thread alone."""

    def __init__(self, inner: Executor, now: Callable[[], float], steps: list[Step]) -> None:
        """`steps` is what those that were on it are added to."""
        self._inner = inner
        self._now = now
        self._running: deque[Step] = deque()
        self._steps = steps

    def launch(self, plan: StepPlan) -> None:
        now = self._now()
        self._running.append(Step(now, now, plan.num_decodes, plan.is_interruptible, plan.resumes))
        self._inner.launch(plan)

    def collect(self) -> StepResult:
        result = self._inner.collect()
        step = self._running.popleft()
        step.start_s = max(step.start_s, self._steps[-1].end_s if self._steps else 0.0)
        step.end_s = self._now()
        step.is_suspended = result.suspended_share >= 0
        self._steps.append(step)
        return result

    def interrupt(self, step_id: int) -> None:
        self._inner.interrupt(step_id)

    def start_copy(self, copy: KvCopy) -> None:
        self._inner.start_copy(copy)

    def finished_copies(self) -> list[tuple[int, bool]]:
        return self._inner.finished_copies()

    def on_copy_finished(self, callback: Callable[[], None]) -> None:
        self._inner.on_copy_finished(callback)


class Run:
    def __init__(
        self,
        testbed: Testbed,
        system: System,
        objectives: Objectives,
        *,
        pool_tokens: int = 0,
        backlog: int = 0,
    ) -> None:
        """`backlog`: offline requests held at once; 0: more than there are rows. `pool_tokens`: 0 for the setup's."""
        setup = testbed.setup
        self._system = system
        self._backlog = backlog or setup.num_rows + 8
        engine, self._executor = testbed.build(system, pool_tokens or setup.pool_tokens, objectives)
        self._journal = Journal(engine, system, objectives)
        self._requests = Requests(setup.seed, testbed.vocab_size)
        self._origin_s = time.perf_counter()
        executor: StepExecutor = ObservedExecutor(self._executor, self.now, self._journal.steps)
        self._loop = EngineLoop(
            engine,
            executor,
            time.perf_counter,
            self._on_effects,
            on_failure=lambda: self._ended.put(None),
            niceness=setup.niceness if setup.device == "cpu" else 0,
        )
        self._ended: SimpleQueue[RequestRecord | None] = SimpleQueue()

    def now(self) -> float:
        return time.perf_counter() - self._origin_s

    # ------------------------------------------------------------------------------------ the loop's thread

    def _on_effects(self, effects: list[Output | Ended], stats: StepStats | None) -> None:
        if stats is not None:
            self._journal.count_step()
        for ended in self._journal.take_effects(effects, self.now()):
            self._ended.put(ended)

    # ------------------------------------------------------------------------------------------- the feeder

    def run(
        self,
        online: Sequence[PlannedRequest],
        offline: Sequence[PlannedRequest],
        duration_s: float,
        *,
        grace_s: float = 20.0,
    ) -> RunResult:
        """Submits `online` at their times and `offline`, in a circle, as a backlog. Goes on after `duration_s` until all
        online requests have ended, `grace_s` at most. Raises `RunFailed`."""
        requests = [(planned, self._requests.make(planned)) for planned in online]
        source = self._requests.backlog(offline) if self._system.serves_offline and offline else None
        gc.collect()
        gc.freeze()
        self._origin_s = time.perf_counter()
        try:
            if source is not None:
                for _ in range(self._backlog):
                    self._submit(*next(source), at_s=0.0)
            self._loop.start()
            self._feed(deque(requests), source, duration_s, grace_s)
            end_s = self.now()
        finally:
            self._loop.stop(60.0)
            self._executor.close()
            gc.unfreeze()
        if self._loop.failure:
            raise RunFailed(self._loop.failure)
        return self._journal.result(duration_s, end_s)

    def _feed(
        self,
        requests: deque[tuple[PlannedRequest, GenerationRequest]],
        source: Iterator[tuple[PlannedRequest, GenerationRequest]] | None,
        duration_s: float,
        grace_s: float,
    ) -> None:
        num_online = 0
        while True:
            now = self.now()
            while requests and requests[0][0].at_s <= now:
                planned, request = requests.popleft()
                self._submit(planned, request, at_s=planned.at_s)
                num_online += 1
            if now >= self._journal.next_sample_s:
                with self._loop.locked():
                    self._journal.sample(now)
            if now >= duration_s and not requests and (num_online == 0 or now >= duration_s + grace_s):
                return
            due_s = self._journal.next_sample_s
            if requests:
                due_s = min(due_s, requests[0][0].at_s)
            try:
                ended = self._ended.get(timeout=max(0.0, due_s - self.now()))
            except Empty:
                continue
            if ended is None:
                raise RunFailed(self._loop.failure)
            if ended.error:
                raise RunFailed(f"request {ended.request_id} ended with {ended.error}")
            if ended.request_class is RequestClass.ONLINE:
                num_online -= 1
            elif source is not None:
                self._submit(*next(source), at_s=now)

    def _submit(self, planned: PlannedRequest, request: GenerationRequest, *, at_s: float) -> None:
        self._journal.take_request(planned, request, at_s=at_s, now=self.now())
        refused = self._loop.apply(Submit(request))
        if refused is not None:
            raise RunFailed(f"request {request.request_id} was refused: {refused.message}")
