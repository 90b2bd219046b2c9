"""What a run leaves behind, and what writes it down: requests, steps, samples and counters of one engine.

The same for both kinds of runs: running.py (real time) and virtual.py. Times are seconds since the run's start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from bench.coserving.accounting import StepParts
from bench.coserving.setup import MODEL, Objectives
from bench.coserving.systems import System
from shared.engine.engine import Engine
from shared.engine.requests import Ended, Output
from shared.messages.requests import (
    FinishReason,
    GenerationRequest,
    RequestClass,
    SamplingParams,
    pack_tokens,
)
from tideway.bench.records import UNFINISHED, RequestRecord
from tideway.bench.workload import PlannedRequest, generator

SAMPLE_S = 0.25
"""Between two looks at queues and pool."""
FIRST_TOKEN_ID = 3


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
    recomputed_tokens: int = 0
    """Of these, computed once more after a preemption, or by a later step: counted where a sequence comes back."""
    parts: StepParts | None = None
    """Of all its launches together, at the last; in virtual time."""


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
    """The engine loop died, a request was refused or failed, or nothing could go on."""


class Requests:
    """What the engine is given for planned requests: prompts are drawn, each from its own name."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size

    def make(self, planned: PlannedRequest, suffix: str = "") -> GenerationRequest:
        name = planned.request_id + suffix
        prompt = generator(self._seed, name).integers(FIRST_TOKEN_ID, self._vocab_size, planned.prompt_tokens)
        return GenerationRequest(
            request_id=name,
            gateway_id="bench",
            model=MODEL,
            prompt=pack_tokens(prompt.tolist()),
            sampling=SamplingParams(max_tokens=planned.output_tokens, temperature=0.0),
            request_class=planned.request_class,
            timeout_s=3600.0,
            ttft_objective_s=planned.ttft_objective_s or 0.0,
            tpot_objective_s=planned.tpot_objective_s or 0.0,
        )

    def backlog(self, offline: Sequence[PlannedRequest]) -> Iterator[tuple[PlannedRequest, GenerationRequest]]:
        """In a circle, for ever."""
        turn = 0
        while offline:
            for planned in offline:
                yield planned, self.make(planned, f"/{turn}")
            turn += 1


class Journal:
    """Of one run. `take_effects` is called in the thread that drives the engine, `sample` by whoever may touch it."""

    def __init__(self, engine: Engine, system: System, objectives: Objectives) -> None:
        self.steps: list[Step] = []
        self._engine, self._system, self._objectives = engine, system, objectives
        self._records: dict[str, RequestRecord] = {}
        self._reactions_s: list[float] = []
        self._samples: list[Sample] = []
        self._late_s: list[float] = []
        self._counted = (0, 0, 0)
        self.next_sample_s = 0.0

    def take_request(self, planned: PlannedRequest, request: GenerationRequest, *, at_s: float, now: float) -> None:
        """It is about to be submitted, `at_s` its planned time."""
        is_online = request.request_class is RequestClass.ONLINE
        if is_online:
            self._late_s.append(now - at_s)
        self._records[request.request_id] = RequestRecord(
            request_id=request.request_id,
            model=MODEL,
            request_class=request.request_class,
            stream=planned.stream,
            arrival_s=at_s,
            sent_s=now,
            prompt_tokens=planned.prompt_tokens,
            planned_prompt_tokens=planned.prompt_tokens,
            planned_output_tokens=planned.output_tokens,
            ttft_objective_s=(planned.ttft_objective_s or self._objectives.ttft_s) if is_online else None,
            tpot_objective_s=(planned.tpot_objective_s or self._objectives.tpot_s) if is_online else None,
        )

    def count_step(self) -> None:
        """The engine has taken the result of the step noted last."""
        counters = self._engine.counters
        counted = (counters.online_tokens, counters.harvested_tokens, counters.recomputed_tokens)
        online, offline, self.steps[-1].recomputed_tokens = (
            now - before for now, before in zip(counted, self._counted, strict=True)
        )
        self.steps[-1].num_tokens = (online, offline)
        self._counted = counted

    def take_effects(self, effects: Iterable[Output | Ended], now: float) -> list[RequestRecord]:
        """Returns those of the requests that have ended."""
        ended = []
        for effect in effects:
            if isinstance(effect, Ended):
                ended.append(self._end(effect, now))
                continue
            for entry in effect.entries:
                record = self._records[entry.request_id]
                if num := len(entry.tokens) // 4:
                    record.first_token_s = now if record.first_token_s is None else record.first_token_s
                    record.last_token_s = now
                    record.token_times.append(now)
                    record.output_tokens += num
        return ended

    def _end(self, ended: Ended, now: float) -> RequestRecord:
        record = self._records[ended.request.request_id]
        record.end_s = now
        record.finish_reason = str(ended.reason)
        if ended.reason is not FinishReason.LENGTH:
            record.error = str(ended.reason)
        if record.request_class is RequestClass.ONLINE and ended.first_planned_s is not None:
            self._reactions_s.append(ended.first_planned_s - ended.submitted_s)
        return record

    def sample(self, now: float) -> None:
        self.next_sample_s = now + SAMPLE_S
        pool, host = self._engine.pool, self._engine.memory.host.pool
        queue = self._engine.memory.queues[MODEL]
        *online, offline = queue.running
        self._samples.append(
            Sample(
                now,
                sum(len(running) for running in online),
                sum(len(waiting) for waiting in queue.waiting[:-1]),
                len(offline) + len(queue.suspended),
                pool.used_merged() / pool.num_merged,
                0.0 if host is None else host.used_merged() / host.num_merged,
            )
        )

    def result(self, duration_s: float, end_s: float) -> RunResult:
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
            steps=self.steps,
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
