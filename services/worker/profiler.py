"""Measures how long steps of given shapes take on a real executor, and fits a cost model to them (ConServe section 4.5).

A profile is a sequence of steps that can be left after each and gone on with later, so that it runs in the gaps between
requests. It uses the executor's rows and KV slots as sequences would, and leaves nothing in them that anybody reads.

First each step runs once: kernels are compiled, memory is committed, and what would take too long is left out. Then all run
in random order, again and again, and the lower quartile counts: other work on the machine comes and goes, and only ever
makes a step longer.
Contexts within a batch differ as they do in service, so that the cost of ragged batches is in the coefficients.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from shared import cost_fit
from shared.cost_model import CostModel, StepShape, shape_of
from shared.engine.plan import ModelShape, NewSequence, StepPlan, StepResult
from shared.messages import SamplingParams, pack_tokens

SAFEPOINT_SHARE = 0.01
"""Of an interruptible step's time, for all its safepoints."""
WARM_UP_SHARE = 0.5
"""Of the time of a profile, for the first run of each step."""
NUM_COPIED_BYTES = 64 * 1024 * 1024
"""More than caches hold."""
FIRST_STEP_ID = -2
"""And downwards: none is one of the engine's, nor the executor's mark for none."""


class ProfileError(Exception):
    """A step of the profile failed."""


class ProfiledExecutor(Protocol):
    """What is measured; no other step is in flight."""

    device: torch.device
    num_rows: int

    def execute(self, plan: StepPlan) -> StepResult: ...

    def set_layers_per_safepoint(self, name: str, num_layers: int) -> None: ...


class ProfiledModel(msgspec.Struct, frozen=True):
    """A model on an executor, and under which key its cost model is stored."""

    shape: ModelShape
    num_layers: int
    slot_bytes: int
    key: str


class Work(NamedTuple):
    """What a step computes: of each sequence the tokens in its cache and those computed. One token is a decode."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def shape(self) -> StepShape:
        return shape_of(list(self.starts), list(self.counts))

    @property
    def lengths(self) -> list[int]:
        """Of the sequences after the step."""
        return [start + count for start, count in zip(self.starts, self.counts, strict=True)]


def work_of(sequences: list[tuple[int, int]]) -> Work:
    """Of (tokens in the cache, tokens computed) of each sequence; the longest comes first, so that works share rows."""
    starts, counts = zip(*sorted(sequences, key=lambda sequence: (-sum(sequence), sequence)), strict=True)
    return Work(starts, counts)


@dataclass(frozen=True)
class Extent:
    """How much is measured. Works beyond the executor's room are left out."""

    decodes: tuple[int, ...]
    decode_contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    chunk_contexts: tuple[int, ...]
    num_mixed: int
    """Random works among the fitted ones."""
    num_held_out: int
    """Other random works, for the error."""
    time_s: float
    """For all; what is left of the works by then is left out."""
    max_step_s: float
    """Works that take longer are left out."""
    num_repeats: int


BRIEF = Extent((1, 4, 16, 64), (64, 512), (16, 64, 256), (0, 512), 6, 8, time_s=5.0, max_step_s=0.25, num_repeats=7)
FULL = Extent(
    (1, 2, 4, 8, 16, 32, 64, 128, 256), (32, 256, 1024, 4096), (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    (0, 256, 1024, 4096), 40, 40, time_s=180.0, max_step_s=10.0, num_repeats=15,
)  # fmt: skip
ESSENTIAL = Extent((1, 4), (64, 256), (8, 32), (0, 128), 0, 0, 0.0, 0.0, 0)
"""Measured however long it takes: without these the coefficients are not determined."""


class _Rows:
    """How long the sequence of each row must be for all works admitted; within what the executor has."""

    def __init__(self, num_rows: int, num_slots: int, shape: ModelShape, max_step_tokens: int) -> None:
        self.num_rows, self._max_slots, self._shape = num_rows, num_slots, shape
        self._max_step_tokens = max_step_tokens
        self.lengths: list[int] = []

    def num_blocks(self, lengths: list[int]) -> list[int]:
        return [-(-length // self._shape.page_tokens) for length in lengths]

    @property
    def num_slots(self) -> int:
        return sum(self.num_blocks(self.lengths))

    def admit(self, work: Work) -> bool:
        """Whether there is room for the work, which is then kept for it."""
        lengths = [max(pair) for pair in zip_longest(self.lengths, work.lengths, fillvalue=0)]
        admitted = (
            len(lengths) <= self.num_rows
            and max(lengths) <= self._shape.max_model_len
            and sum(work.counts) <= self._max_step_tokens
            and sum(self.num_blocks(lengths)) <= self._max_slots
        )
        if admitted:
            self.lengths = lengths
        return admitted


class Profile(msgspec.Struct, frozen=True):
    cost_model: CostModel
    fitted: list[tuple[Work, float]]
    """With the lower quartile of its times in seconds."""
    held_out: list[tuple[Work, float]]


class Profiling:
    """One profile in the making."""

    def __init__(
        self,
        executor: ProfiledExecutor,
        model: ProfiledModel,
        num_slots: int,
        max_step_tokens: int,
        extent: Extent = BRIEF,
        *,
        clock: Callable[[], float] | None = None,
        seed: int = 0,
    ) -> None:
        """`num_slots`: KV slots of the model at most, all of which may be needed. `clock`: None: `step_clock`."""
        shape = model.shape
        self._executor, self._model, self._extent = executor, model, extent
        self._clock = clock or step_clock(executor.device)
        self._random = random.Random(seed)
        self._rows = _Rows(executor.num_rows, num_slots, shape, max_step_tokens)
        self._essential = [work for work in grid(ESSENTIAL, self._random) if self._rows.admit(work)]
        fitted = [work for work in grid(extent, self._random) if self._rows.admit(work)]
        self._fitted = set(self._essential + fitted) | set(self._draw(extent.num_mixed))
        self._held_out = set(self._draw(extent.num_held_out)) - self._fitted
        self.num_slots = self._rows.num_slots
        """That `run` needs."""
        self._tokens = pack_tokens([self._random.randrange(shape.vocab_size or 1) for _ in range(shape.max_model_len)])
        self._times: dict[Work, list[float]] = {}
        self._next_step_id = FIRST_STEP_ID
        self._spent_s = 0.0
        self._safepoint = (0.0, 1)
        self._copy_s = (0.0, 0.0)
        self._program = self._measure_all()

    def run(self, slots: Sequence[int], may_go_on: Callable[[], bool] = lambda: True) -> bool:
        """Goes on in the executor's thread with `num_slots` KV slots that are nobody else's, until the profile is
        complete (True) or, asked after each step, may not go on. Raises `ProfileError`."""
        self._announce(slots)
        return all(may_go_on() for _ in self._program)

    def result(self) -> Profile:
        """After `run` has returned True. Raises `ProfileError` if the room was too small to measure anything."""
        seconds_of = {work: _lower_quartile(times) for work, times in self._times.items() if times}
        fitted = [(work, seconds) for work, seconds in seconds_of.items() if work in self._fitted]
        held_out = [(work, seconds) for work, seconds in seconds_of.items() if work in self._held_out]
        if not fitted:
            raise ProfileError("no step fits the rows, slots and tokens that may be used")
        cost_model = cost_fit.fit([(work.shape, seconds) for work, seconds in fitted])
        errors = cost_fit.errors(cost_model, [(work.shape, seconds) for work, seconds in held_out or fitted])
        cost_model = msgspec.structs.replace(
            cost_model,
            num_layers=self._model.num_layers,
            safepoint_s=self._safepoint[0],
            layers_per_safepoint=self._safepoint[1],
            checkpoint_slot_s=self._copy_s[0],
            restore_slot_s=self._copy_s[1],
            median_error=errors[0],
            p99_error=errors[1],
        )
        return Profile(cost_model, sorted(fitted), sorted(held_out))

    # ------------------------------------------------------------------------------------------------- what

    def _draw(self, count: int) -> list[Work]:
        """Random works, sizes spread over orders of magnitude, most of them mixed."""
        draw, extent, max_length = self._random, self._extent, self._model.shape.max_model_len
        works: list[Work] = []
        for _ in range(50 * count):
            if len(works) == count:
                break
            most = min(self._rows.num_rows, max(extent.decodes))
            num_decodes = _spread(draw, 1, most) if draw.random() < 0.8 else 0
            mean = _spread(draw, 16, min(max_length // 2, max(extent.decode_contexts)))
            sequences = [(min(round(mean * draw.uniform(0.25, 1.75)), max_length - 1), 1) for _ in range(num_decodes)]
            for _ in range(draw.choice((0, 1, 1, 2)) if num_decodes else 1):
                start = draw.choice((0, draw.randrange(1 + max(extent.chunk_contexts))))
                sequences.append((start, _spread(draw, 4, max(extent.chunks))))
            work = work_of(sequences)
            if self._rows.admit(work):
                works.append(work)
        return works

    # -------------------------------------------------------------------------------------------------- how

    def _measure_all(self) -> Iterator[None]:
        """Yields after each step."""
        yield from self._warm_up()
        for repeat in range(self._extent.num_repeats):
            works = sorted(self._times)
            self._random.shuffle(works)
            for work in works:
                if self._spent_s > self._extent.time_s and (repeat or work not in self._essential):
                    continue
                self._times[work].append(self._time(work))
                yield
        yield from self._measure_safepoints()
        self._copy_s = _slot_copy_s(self._executor.device, self._model.slot_bytes, self._clock)

    def _warm_up(self) -> Iterator[None]:
        """Enters the works that are to be measured into `_times`."""
        extent, first = self._extent, []
        for work in self._essential:
            seconds = self._time(work)
            yield
            if self._spent_s < WARM_UP_SHARE / 2 * extent.time_s:
                seconds = self._time(work)
                yield
            first.append((work.shape, seconds))
            self._times[work] = []
        if not first:
            return
        rough = cost_fit.fit(first)
        others = sorted((self._fitted | self._held_out) - set(self._essential))
        self._random.shuffle(others)
        for work in others:
            if self._spent_s > WARM_UP_SHARE * extent.time_s:
                return
            if rough.predict(work.shape) > extent.max_step_s:
                continue
            seconds = self._time(work)
            yield
            if seconds > extent.max_step_s:
                # compiling may have taken that long
                seconds = self._time(work)
                yield
            if seconds <= extent.max_step_s:
                self._times[work] = []

    def _measure_safepoints(self) -> Iterator[None]:
        """What they cost, from pairs of a step without and with one at each layer, and how many layers apart they may be.
        The lower quartile of the differences counts, so that noise does not pass for a cost."""
        name, num_layers = self._model.shape.name, self._model.num_layers
        work = max((work for work in self._essential if not work.shape.num_decodes), default=None)
        if work is None:
            return
        self._executor.set_layers_per_safepoint(name, 1)
        plain, differences = [], []
        for repeat in range(max(3, self._extent.num_repeats)):
            if repeat >= 3 and self._spent_s > self._extent.time_s:
                break
            plain.append(self._time(work))
            differences.append(self._time(work, is_interruptible=True) - plain[-1])
            yield
        cost_s = max(0.0, _lower_quartile(differences)) / num_layers
        num_safepoints = num_layers
        if cost_s:
            num_safepoints = max(1, int(SAFEPOINT_SHARE * _lower_quartile(plain) / cost_s))
        layers = min(num_layers, max(1, -(-num_layers // num_safepoints)))
        self._executor.set_layers_per_safepoint(name, layers)
        self._safepoint = (cost_s, layers)

    def _announce(self, slots: Sequence[int]) -> None:
        """Gives each row a sequence as long as any work needs there; all begin with the same tokens."""
        if not self._rows.lengths:
            return
        left, sampling = iter(slots), SamplingParams(max_tokens=1 << 30)
        num_blocks = self._rows.num_blocks(self._rows.lengths)
        new = [
            NewSequence(row, self._tokens[: 4 * length], length, sampling, list(islice(left, num_blocks[row])))
            for row, length in enumerate(self._rows.lengths)
        ]
        self._execute([0], [0], [1], new, False)

    def _time(self, work: Work, *, is_interruptible: bool = False) -> float:
        """Seconds of one step."""
        rows = list(range(len(work.starts)))
        return self._execute(rows, list(work.starts), list(work.counts), [], is_interruptible)

    def _execute(
        self, rows: list[int], starts: list[int], counts: list[int], new: list[NewSequence], is_interruptible: bool
    ) -> float:
        step_id = self._next_step_id
        self._next_step_id -= 1
        plan = StepPlan(
            step_id, self._model.shape.name, rows, starts, counts, [True] * len(rows), new, [],
            is_interruptible=is_interruptible,
        )  # fmt: skip
        started_s = self._clock()
        result = self._executor.execute(plan)
        seconds = self._clock() - started_s
        self._spent_s += seconds
        if result.error:
            raise ProfileError(result.error)
        return seconds


def step_clock(device: torch.device) -> Callable[[], float]:
    """Where one thread computes, its own time: other processes on its core do not count. It is what a clock on the wall
    shows on a quiet machine; what it shows on this one, the engine learns from real steps."""
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def profile(
    executor: ProfiledExecutor,
    model: ProfiledModel,
    slots: Sequence[int],
    max_step_tokens: int,
    extent: Extent = FULL,
    *,
    on_step: Callable[[], None] = lambda: None,
) -> Profile:
    """A whole profile at once. `slots`: KV slots that nobody else uses. Raises `ProfileError`."""

    def go_on() -> bool:
        on_step()
        return True

    profiling = Profiling(executor, model, len(slots), max_step_tokens, extent)
    profiling.run(slots, go_on)
    return profiling.result()


def grid(extent: Extent, draw: random.Random) -> list[Work]:
    """Decodes alone, chunks alone, and each chunk with decodes; contexts of a batch spread evenly around their mean."""
    works = []

    def decodes(num: int, mean: int) -> list[tuple[int, int]]:
        return [(round(start), 1) for start in np.linspace(0.25 * mean, 1.75 * mean, num)] if num > 1 else [(mean, 1)]

    for num in extent.decodes:
        for mean in extent.decode_contexts:
            works.append(work_of(decodes(num, mean)))
    for chunk in extent.chunks:
        for context in extent.chunk_contexts:
            works.append(work_of([(context, chunk)]))
        beside = decodes(draw.choice(extent.decodes), draw.choice(extent.decode_contexts))
        works.append(work_of([*beside, (draw.choice(extent.chunk_contexts), chunk)]))
    return works


def _spread(draw: random.Random, least: int, most: int) -> int:
    """From `least` to `most`, each order of magnitude alike."""
    return int(least * max(1.0, most / least) ** draw.random() + 0.5)


def _lower_quartile(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.25))


def _slot_copy_s(device: torch.device, slot_bytes: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of one slot's copy to host memory and back."""
    num = max(1, min(64, NUM_COPIED_BYTES // slot_bytes))
    on_device = torch.zeros(num, slot_bytes, dtype=torch.uint8, device=device)
    on_host = torch.zeros(num, slot_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def seconds(target: torch.Tensor, source: torch.Tensor) -> float:
        times = []
        for _ in range(5):
            started_s = clock()
            for i in range(num):
                if device.type == "cuda":
                    target[i].copy_(source[i], non_blocking=True)
                else:
                    # one thread, as checkpoints are copied
                    np.copyto(target[i].numpy(), source[i].numpy())
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append((clock() - started_s) / num)
        return _lower_quartile(times)

    return seconds(on_host, on_device), seconds(on_device, on_host)
