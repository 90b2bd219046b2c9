"""Groups of devices whose models compute beside each other (MuxServe), in virtual time: a baseline, without the engine and
the scheduler.

A model's prefills and decodes are jobs on a fixed share of the compute units; shared/policies/multiplexing.py says which
begin. With the time t of the cost model, a job on u of `UNITS` units takes, alone,

    prefill   t * UNITS / u                     bound by arithmetic
    decode    t * max(1, DECODE_UNITS / u)      bound by memory: fewer units than those cost nothing

times `overhead` (of a split KV cache). Jobs that are under way together are all slowed down alike, by as much as what they
ask for, of arithmetic or of memory bandwidth, is more than there is, and by `interference` beside that: what caches, memory
banks and kernels that share a device cost each other. A prefill is whole prompts, as many as fit into
`max_prefill_tokens`, at least one. A model keeps to its quota of KV, but for its only request; where it lacks some, its
newest request is put back and computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from shared.costs.model import CostModel, StepShape
from shared.policies.multiplexing import (
    QUOTA_INTERVAL_S,
    UNITS,
    JobId,
    Multiplexing,
    Phase,
    Units,
    adapted_quotas,
    first_quotas,
)
from shared.simulation.events import Events
from shared.simulation.gateway import Job, Record, RunFailed
from shared.simulation.itl import ItlHistogram

DECODE_UNITS = 4
"""Assumed: so many saturate the memory (MuxServe's figure 3 shows decodes that hardly gain from more)."""
PREFILL_BANDWIDTH, DECODE_BANDWIDTH, DECODE_ARITHMETIC = 0.1, 0.6, 0.2
"""Assumed: of the devices', that a prefill uses, and a decode with enough units."""


class SpatialModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    cost_model: CostModel
    """Cost model of the group's devices together, with all units."""
    units: Units
    block_size: int
    block_bytes: int
    max_model_len: int
    """The least quota is a request of this length."""
    demand: float
    """Demand for KV, in the measure of `first_quotas`."""


class _Sequence:
    __slots__ = ("job", "num_blocks", "num_tokens", "record")

    def __init__(self, job: Job, record: Record) -> None:
        self.job, self.record = job, record
        self.num_tokens = job.prompt_tokens
        """Prompt and output so far."""
        self.num_blocks = 0


class _Running:
    """A job under way."""

    __slots__ = ("arithmetic", "bandwidth", "id", "left_s", "sequences")

    def __init__(self, job_id: JobId, sequences: list[_Sequence], units: int, left_s: float) -> None:
        self.id, self.sequences, self.left_s = job_id, sequences, left_s
        is_prefill = job_id.phase is Phase.PREFILL
        self.arithmetic = units / UNITS if is_prefill else DECODE_ARITHMETIC
        self.bandwidth = PREFILL_BANDWIDTH if is_prefill else DECODE_BANDWIDTH * min(1.0, units / DECODE_UNITS)


class SpatialGroup:
    def __init__(
        self,
        events: Events,
        models: Sequence[SpatialModel],
        pool_bytes: int,
        *,
        overhead: float = 1.0,
        max_prefill_tokens: int = 8192,
        max_rows: int = 256,
        interference: float = 0.0,
    ) -> None:
        """`interference`: by how much longer jobs take while others are under way, 0.1: a tenth. ValueError: the pool does
        not hold a longest request of each model."""
        self.models = {model.name: model for model in models}
        self.num_preemptions = 0
        self.num_open = 0
        """Requests that came, or are to come, and have not ended."""
        self._events, self._overhead = events, overhead
        self._max_prefill_tokens, self._max_rows, self._interference = max_prefill_tokens, max_rows, interference
        self._policy = Multiplexing({model.name: model.units for model in models})
        self._least = {model.name: -(-model.max_model_len // model.block_size) * model.block_bytes for model in models}
        self.quotas = first_quotas(pool_bytes, {model.name: model.demand for model in models}, self._least)
        """Bytes of KV, by model."""
        self.used_bytes = dict.fromkeys(self.models, 0)
        self.busy_s = dict.fromkeys(self.models, 0.0)
        """In which jobs were under way, divided evenly over those of one moment."""
        self.itl = {name: ItlHistogram() for name in self.models}
        self._waiting: dict[str, deque[_Sequence]] = {name: deque() for name in self.models}
        self._running: dict[str, list[_Sequence]] = {name: [] for name in self.models}
        """Sequences that have their prompt's KV, the oldest first."""
        self._jobs: list[_Running] = []
        self._speed, self._since_s, self._turn = 1.0, 0.0, 0
        self._use = dict.fromkeys(self.models, (0.0, 0))
        """Sum and number of the uses of the quotas at decodes, since these were last adapted."""

    def submit_at(self, job: Job, record: Record) -> None:
        if not self.num_open:
            self._events.after(QUOTA_INTERVAL_S, self._adapt)
        self.num_open += 1
        self._events.at(job.at_s, self._submit, _Sequence(job, record))

    def _submit(self, sequence: _Sequence) -> None:
        self._waiting[sequence.job.model].append(sequence)
        self._begin()

    # --------------------------------------------------------------------------------------------------- jobs

    def _begin(self) -> None:
        """Looks at what can begin now, and when the next job ends."""
        self._advance()
        can_prefill = [name for name, waiting in self._waiting.items() if waiting and self._has_room(name, waiting[0])]
        can_decode = [name for name, running in self._running.items() if running]
        for job_id in self._policy.begin(can_prefill, can_decode, [job.id for job in self._jobs]):
            begin = self._prefill if job_id.phase is Phase.PREFILL else self._decode
            sequences, seconds = begin(self.models[job_id.model])
            units = self._policy.units_of(job_id)
            self._jobs.append(_Running(job_id, sequences, units, seconds * self._overhead))
        if self._jobs:
            asked = max(sum(job.arithmetic for job in self._jobs), sum(job.bandwidth for job in self._jobs))
            self._speed = 1.0 / max(1.0, asked)
            if len(self._jobs) > 1:
                self._speed /= 1.0 + self._interference
            self._turn += 1
            self._events.after(min(job.left_s for job in self._jobs) / self._speed, self._end, self._turn)

    def _advance(self) -> None:
        passed_s, self._since_s = self._events.now - self._since_s, self._events.now
        for job in self._jobs:
            job.left_s -= passed_s * self._speed
            self.busy_s[job.id.model] += passed_s / len(self._jobs)

    def _end(self, turn: int) -> None:
        if turn != self._turn:
            return  # others have begun or ended meanwhile
        self._advance()
        first = min(self._jobs, key=lambda job: job.left_s)
        self._jobs.remove(first)
        running = self._running[first.id.model]
        if first.id.phase is Phase.PREFILL:
            running += first.sequences
        for sequence in first.sequences:
            self._give_token(sequence)
        self._running[first.id.model] = [one for one in running if one.record.ended_s < 0]
        self._begin()

    def _give_token(self, sequence: _Sequence) -> None:
        record, now = sequence.record, self._events.now
        if record.first_s < 0:
            record.first_s = now
        else:
            gap_s = now - record.last_s
            self.itl[sequence.job.model].add(gap_s)
            record.longest_gap_s = max(record.longest_gap_s, gap_s)
        record.last_s = now
        record.num_tokens += 1
        sequence.num_tokens += 1
        if record.num_tokens == record.output_tokens:
            if record.ended_s >= 0:
                raise RunFailed("a request ended twice")
            record.ended_s = now
            self.num_open -= 1
            self._free(sequence)

    # ------------------------------------------------------------------------------------------------- phases

    def _prefill(self, model: SpatialModel) -> tuple[list[_Sequence], float]:
        waiting, chosen = self._waiting[model.name], list[_Sequence]()
        tokens, attention = 0, 0.0
        room = self._max_rows - len(self._running[model.name])
        while waiting and self._has_room(model.name, waiting[0]) and len(chosen) < max(1, room):
            num = waiting[0].num_tokens
            if chosen and tokens + num > self._max_prefill_tokens:
                break
            sequence = waiting.popleft()
            self._grow(sequence)
            tokens, attention = tokens + num, attention + num * num / 2
            if sequence.record.planned_s < 0:
                sequence.record.planned_s = self._events.now
            chosen.append(sequence)
        seconds = model.cost_model.predict(StepShape(tokens, attention)) * UNITS / model.units.prefill
        return chosen, seconds

    def _decode(self, model: SpatialModel) -> tuple[list[_Sequence], float]:
        running, quota = self._running[model.name], self.quotas[model.name]
        while len(running) > 1 and self.used_bytes[model.name] + self._growth(model, running) > quota:
            newest = running.pop()
            self._free(newest)
            newest.record.num_preemptions += 1
            newest.record.recomputed_tokens += newest.num_tokens
            self.num_preemptions += 1
            self._waiting[model.name].appendleft(newest)
        for sequence in running:
            self._grow(sequence)
        total, num = self._use[model.name]
        self._use[model.name] = (total + self.used_bytes[model.name] / quota, num + 1)
        context = sum(sequence.num_tokens for sequence in running)
        seconds = model.cost_model.predict(StepShape(0, 0.0, len(running), context))
        return list(running), seconds * max(1.0, DECODE_UNITS / model.units.decode)

    # ----------------------------------------------------------------------------------------------------- KV

    def _has_room(self, name: str, sequence: _Sequence) -> bool:
        return self.used_bytes[name] + self._missing(sequence) * self.models[name].block_bytes <= self.quotas[name]

    def _growth(self, model: SpatialModel, sequences: Sequence[_Sequence]) -> int:
        return sum(map(self._missing, sequences)) * model.block_bytes

    def _missing(self, sequence: _Sequence) -> int:
        """Blocks, for its tokens and the next."""
        return -(-(sequence.num_tokens + 1) // self.models[sequence.job.model].block_size) - sequence.num_blocks

    def _grow(self, sequence: _Sequence) -> None:
        missing = self._missing(sequence)
        sequence.num_blocks += missing
        self.used_bytes[sequence.job.model] += missing * self.models[sequence.job.model].block_bytes

    def _free(self, sequence: _Sequence) -> None:
        self.used_bytes[sequence.job.model] -= sequence.num_blocks * self.models[sequence.job.model].block_bytes
        sequence.num_blocks = 0

    def _adapt(self) -> None:
        use = {name: total / num if num else 0.0 for name, (total, num) in self._use.items()}
        backlog = {name: len(waiting) for name, waiting in self._waiting.items()}
        self.quotas = adapted_quotas(self.quotas, use, backlog, self._least)
        self._use = dict.fromkeys(self.models, (0.0, 0))
        if self.num_open:
            self._events.after(QUOTA_INTERVAL_S, self._adapt)
            self._begin()


def run(events: Events, groups: Mapping[str, SpatialGroup], jobs: Sequence[Job]) -> list[Record]:
    """`groups`: by model. Until every request has ended."""
    records = submit(groups, jobs)
    if not events.run(lambda: not any(group.num_open for group in groups.values()), float("inf")):
        raise RunFailed("requests have not ended, and nothing is left to happen")
    return records


def submit(groups: Mapping[str, SpatialGroup], jobs: Sequence[Job]) -> list[Record]:
    """Each comes at its time. Returns what will be seen of them."""
    records = [
        Record(
            arrival_s=job.at_s, is_high=job.is_high, prompt_tokens=job.prompt_tokens, output_tokens=job.output_tokens,
            num_placements=1,
        )
        for job in jobs
    ]  # fmt: skip
    for job, record in zip(jobs, records, strict=True):
        groups[job.model].submit_at(job, record)
    return records
