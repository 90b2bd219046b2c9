"""One run: planned requests at their times on one engine, with an offline backlog that never runs dry.

Threads: the engine loop's, which also notes outputs and steps, and the feeder (the caller), which submits each request at
its planned time and keeps a window of offline requests held. Times are seconds since the run's start.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue

import msgspec
import numpy as np

from bench.coserving.systems import System
from bench.coserving.testbed import MODEL, Testbed
from services.worker.engine_loop import EngineLoop, StepExecutor, StepStats
from services.worker.executor import Executor
from shared.engine.plan import KvCopy, StepPlan, StepResult
from shared.engine.requests import Ended, Output
from shared.messages import FinishReason, GenerationRequest, RequestClass, SamplingParams, pack_tokens
from tideway.bench.records import UNFINISHED, RequestRecord
from tideway.bench.workload import PlannedRequest, generator

log = logging.getLogger(__name__)

SAMPLE_S = 0.25
"""Between two looks at queues and pool."""
FIRST_TOKEN_ID = 3


class Objectives(msgspec.Struct, frozen=True):
    ttft_s: float
    tpot_s: float


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


class Sample(msgspec.Struct, array_like=True):
    at_s: float
    online_running: int
    online_waiting: int
    offline_running: int
    pool_used_share: float
    host_used_share: float


class Counts(msgspec.Struct, kw_only=True):
    """Of the engine's counters, over the whole run."""

    preemptions: dict[str, int]
    steps_suspended: int
    steps_resumed: int
    steps_discarded: int
    checkpointed_blocks: int
    restored_blocks: int
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
    """Of online requests: arrival at the engine to the plan of the first step that computes them."""
    late_p99_s: float
    """Of the feeder: submissions after their planned time."""


class RunFailed(Exception):
    """The engine loop died, or a request was refused or failed."""


class ObservedExecutor:
    """An executor, and when each step was on it. `launch` and `collect` are called in the loop's thread alone."""

    def __init__(self, inner: Executor, now: Callable[[], float]) -> None:
        self._inner = inner
        self._now = now
        self._running: deque[Step] = deque()
        self.steps: list[Step] = []

    def launch(self, plan: StepPlan) -> None:
        now = self._now()
        self._running.append(Step(now, now, plan.num_decodes, plan.is_interruptible, plan.resumes))
        self._inner.launch(plan)

    def collect(self) -> StepResult:
        result = self._inner.collect()
        step = self._running.popleft()
        step.start_s = max(step.start_s, self.steps[-1].end_s if self.steps else 0.0)
        step.end_s = self._now()
        step.is_suspended = result.suspended_share >= 0
        self.steps.append(step)
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
        self._testbed, self._system, self._objectives = testbed, system, objectives
        self._backlog = backlog or testbed.setup.num_rows + 8
        engine, self._executor = testbed.build(
            system, pool_tokens or testbed.setup.pool_tokens, objectives.ttft_s, objectives.tpot_s
        )
        self._engine = engine
        self._origin_s = time.perf_counter()
        self._observed = ObservedExecutor(self._executor, self.now)
        executor: StepExecutor = self._observed
        self._loop = EngineLoop(
            engine,
            executor,
            time.perf_counter,
            self._on_effects,
            on_failure=lambda: self._ended.put(None),
            niceness=testbed.setup.niceness if testbed.setup.device == "cpu" else 0,
        )
        self._records: dict[str, RequestRecord] = {}
        self._reactions_s: list[float] = []
        self._samples: list[Sample] = []
        self._late_s: list[float] = []
        self._ended: SimpleQueue[RequestRecord | None] = SimpleQueue()
        self._counted = (0, 0)

    def now(self) -> float:
        return time.perf_counter() - self._origin_s

    # ------------------------------------------------------------------------------------ the loop's thread

    def _on_effects(self, effects: list[Output | Ended], stats: StepStats | None) -> None:
        now = self.now()
        if stats is not None:
            counters = self._engine.counters
            counted = (counters.online_tokens, counters.harvested_tokens)
            self._observed.steps[-1].num_tokens = (counted[0] - self._counted[0], counted[1] - self._counted[1])
            self._counted = counted
        for effect in effects:
            if isinstance(effect, Ended):
                self._on_ended(effect, now)
                continue
            for entry in effect.entries:
                record = self._records[entry.request_id]
                if num := len(entry.tokens) // 4:
                    record.first_token_s = now if record.first_token_s is None else record.first_token_s
                    record.last_token_s = now
                    record.token_times.append(now)
                    record.output_tokens += num

    def _on_ended(self, ended: Ended, now: float) -> None:
        record = self._records[ended.request.request_id]
        record.end_s = now
        record.finish_reason = str(ended.reason)
        if ended.reason is not FinishReason.LENGTH:
            record.error = str(ended.reason)
        if record.request_class is RequestClass.ONLINE and ended.first_planned_s is not None:
            self._reactions_s.append(ended.first_planned_s - ended.submitted_s)
        self._ended.put(record)

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
        requests = [(planned, self._request(planned)) for planned in online]
        source = self._cycle(offline) if self._system.serves_offline and offline else None
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
        return self._result(duration_s, end_s)

    def _feed(
        self,
        requests: deque[tuple[PlannedRequest, GenerationRequest]],
        source: Iterator[tuple[PlannedRequest, GenerationRequest]] | None,
        duration_s: float,
        grace_s: float,
    ) -> None:
        num_online = 0
        next_sample_s = 0.0
        while True:
            now = self.now()
            while requests and requests[0][0].at_s <= now:
                planned, request = requests.popleft()
                self._late_s.append(self.now() - planned.at_s)
                self._submit(planned, request, at_s=planned.at_s)
                num_online += 1
            if now >= next_sample_s:
                self._sample(now)
                next_sample_s = now + SAMPLE_S
            if now >= duration_s and not requests and (num_online == 0 or now >= duration_s + grace_s):
                return
            due_s = min(next_sample_s, requests[0][0].at_s if requests else next_sample_s)
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
        is_online = request.request_class is RequestClass.ONLINE
        self._records[request.request_id] = RequestRecord(
            request_id=request.request_id,
            model=MODEL,
            request_class=request.request_class,
            stream=planned.stream,
            arrival_s=at_s,
            sent_s=self.now(),
            prompt_tokens=planned.prompt_tokens,
            planned_prompt_tokens=planned.prompt_tokens,
            planned_output_tokens=planned.output_tokens,
            ttft_objective_s=(planned.ttft_objective_s or self._objectives.ttft_s) if is_online else None,
            tpot_objective_s=(planned.tpot_objective_s or self._objectives.tpot_s) if is_online else None,
        )
        refused = self._loop.submit(request)
        if refused is not None:
            raise RunFailed(f"request {request.request_id} was refused: {refused.message}")

    def _request(self, planned: PlannedRequest, suffix: str = "") -> GenerationRequest:
        testbed = self._testbed
        name = planned.request_id + suffix
        draw = generator(testbed.setup.seed, name)
        prompt = draw.integers(FIRST_TOKEN_ID, testbed.vocab_size, planned.prompt_tokens)
        return GenerationRequest(
            name,
            "bench",
            MODEL,
            pack_tokens(prompt.tolist()),
            SamplingParams(planned.output_tokens, temperature=0.0),
            planned.request_class,
            timeout_s=3600.0,
            ttft_objective_s=planned.ttft_objective_s or 0.0,
            tpot_objective_s=planned.tpot_objective_s or 0.0,
        )

    def _cycle(self, offline: Sequence[PlannedRequest]) -> Iterator[tuple[PlannedRequest, GenerationRequest]]:
        turn = 0
        while True:
            for planned in offline:
                yield planned, self._request(planned, f"/{turn}")
            turn += 1

    def _sample(self, now: float) -> None:
        used_share, host_share = self._loop.used_share(), self._loop.host_used_share()
        with self._loop.locked() as engine:
            queue = engine.planner.queues[MODEL]
            *online, offline = queue.running
            num_waiting = sum(len(waiting) for waiting in queue.waiting[:-1])
            num_online = sum(len(running) for running in online)
            num_offline = len(offline) + len(queue.suspended)
        self._samples.append(Sample(now, num_online, num_waiting, num_offline, used_share, host_share))

    def _result(self, duration_s: float, end_s: float) -> RunResult:
        records = list(self._records.values())
        for record in records:
            if record.end_s is None:
                record.end_s, record.error = end_s, UNFINISHED
        counters = self._engine.counters
        return RunResult(
            system=self._system.name,
            duration_s=duration_s,
            end_s=end_s,
            records=records,
            steps=self._observed.steps,
            samples=self._samples,
            counts=Counts(
                preemptions={"/".join(key): count for key, count in sorted(counters.preemptions.items())},
                steps_suspended=counters.steps_suspended,
                steps_resumed=counters.steps_resumed,
                steps_discarded=counters.steps_discarded,
                checkpointed_blocks=counters.checkpointed_blocks.total(),
                restored_blocks=counters.restored_blocks.total(),
                dropped_checkpoint_blocks=counters.dropped_checkpoint_blocks.total(),
                recomputed_tokens=counters.recomputed_tokens,
                recomputed_partial_tokens=counters.recomputed_partial_tokens,
                online_tokens=counters.online_tokens,
                harvested_tokens=counters.harvested_tokens,
            ),
            reactions_s=self._reactions_s,
            late_p99_s=float(np.percentile(self._late_s, 99)) if self._late_s else 0.0,
        )
