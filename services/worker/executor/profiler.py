"""Measures how long steps of given shapes take on a real executor, and fits a cost model to them (ConServe section 4.5).

A profile is a sequence of steps that can be left after each and gone on with later, so that it runs in the gaps between
requests. It uses the executor's rows and KV blocks as sequences would, and leaves nothing in them that anybody reads.

First each step runs once: kernels are compiled, memory is committed, and what would take too long is left out. Then all run
in random order, again and again, and a low quantile counts: other work on the machine comes and goes, and only ever makes a
step longer. How much longer steps are in service, the engine learns from them.

Contexts within a batch differ as they do in service, so that the cost of ragged batches is in the coefficients.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import msgspec
import numpy as np
import torch

from services.worker.executor.profiled_steps import BRIEF, ESSENTIAL, FULL, Extent, Rows, Work, grid, random_works
from shared.costs import fit as cost_fit
from shared.costs.model import CostModel
from shared.engine.plan import ModelShape, NewSequence, StepPlan, StepResult
from shared.messages.requests import SamplingParams, pack_tokens

SAFEPOINT_SHARE = 0.01
"""Share of an interruptible step's time for all its safepoints."""
WARM_UP_SHARE = 0.5
"""Share of a profile's time for the first run of each step."""
UNDISTURBED_QUANTILE = 0.1
"""Quantile of a step's times that counts as undisturbed."""
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

    @property
    def is_alone(self) -> bool: ...

    @property
    def launching_computes(self) -> bool: ...

    def set_layers_per_safepoint(self, name: str, num_layers: int) -> None: ...


class ProfiledModel(msgspec.Struct, frozen=True):
    """A model on an executor, and under which key its cost model is stored."""

    shape: ModelShape
    num_layers: int
    block_bytes: int
    """Bytes of a block's part on each device: they are copied beside each other."""
    key: str


class Profile(msgspec.Struct, frozen=True):
    cost_model: CostModel
    fitted: list[tuple[Work, float]]
    """Steps, each with its undisturbed time in seconds."""
    held_out: list[tuple[Work, float]]


class Profiling:
    """One profile in the making."""

    def __init__(
        self,
        executor: ProfiledExecutor,
        model: ProfiledModel,
        num_blocks: int,
        max_step_tokens: int,
        extent: Extent = BRIEF,
        *,
        clock: Callable[[], float] | None = None,
        seed: int = 0,
    ) -> None:
        """`num_blocks`: KV blocks of the model at most, all of which may be needed. `clock`: None: `step_clock`."""
        shape = model.shape
        self._executor, self._model, self._extent = executor, model, extent
        self._clock = clock or step_clock(executor)
        self._random = random.Random(seed)
        self._rows = Rows(executor.num_rows, num_blocks, shape, max_step_tokens)
        self._essential = [work for work in grid(ESSENTIAL, self._random) if self._rows.admit(work)]
        fitted = [work for work in grid(extent, self._random) if self._rows.admit(work)]
        self._fitted = set(self._essential + fitted) | set(
            random_works(extent, self._random, self._rows, extent.num_mixed)
        )
        self._held_out = set(random_works(extent, self._random, self._rows, extent.num_held_out)) - self._fitted
        self.num_blocks = self._rows.num_blocks
        """Blocks that `run` needs."""
        self._tokens = pack_tokens([self._random.randrange(shape.vocab_size or 1) for _ in range(shape.max_model_len)])
        self._times: dict[Work, list[float]] = {}
        self._next_step_id = FIRST_STEP_ID
        self._spent_s = 0.0
        self._safepoint = (0.0, 1)
        self._copy_s = (0.0, 0.0)
        self._program = self._measure_all()

    def run(self, blocks: Sequence[int], may_go_on: Callable[[], bool] = lambda: True) -> bool:
        """Goes on in the executor's thread with `num_blocks` KV blocks that are nobody else's, until the profile is
        complete (True) or, asked after each step, may not go on. Raises `ProfileError`."""
        self._announce(blocks)
        return all(may_go_on() for _ in self._program)

    def result(self) -> Profile:
        """After `run` has returned True. Raises `ProfileError` if the room was too small to measure anything."""
        seconds_of = {work: _undisturbed_s(times) for work, times in self._times.items() if times}
        fitted = [(work, seconds) for work, seconds in seconds_of.items() if work in self._fitted]
        held_out = [(work, seconds) for work, seconds in seconds_of.items() if work in self._held_out]
        if not fitted:
            raise ProfileError("no step fits the rows, blocks and tokens that may be used")
        cost_model = cost_fit.fit([(work.shape, seconds) for work, seconds in fitted])
        errors = cost_fit.errors(cost_model, [(work.shape, seconds) for work, seconds in held_out or fitted])
        cost_model = msgspec.structs.replace(
            cost_model,
            num_layers=self._model.num_layers,
            safepoint_s=self._safepoint[0],
            layers_per_safepoint=self._safepoint[1],
            checkpoint_block_s=self._copy_s[0],
            restore_block_s=self._copy_s[1],
            median_error=errors[0],
            p99_error=errors[1],
        )
        return Profile(cost_model, sorted(fitted), sorted(held_out))

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
        self._copy_s = _block_copy_s(self._executor.device, self._model.block_bytes, self._clock)

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
        """What they cost, from pairs of a step without and with one at each layer, and how many layers apart they may
        be. Rare ones make online requests wait, so noise must not pass for a cost: two estimates have to show it."""
        name, num_layers = self._model.shape.name, self._model.num_layers
        if self._executor.launching_computes:
            # There a safepoint is a comparison.
            self._executor.set_layers_per_safepoint(name, 1)
            return
        work = max((work for work in self._essential if not work.shape.num_decodes), default=None)
        if work is None:
            return
        self._executor.set_layers_per_safepoint(name, 1)
        plain, interruptible = [], []
        for repeat in range(max(5, self._extent.num_repeats)):
            if repeat >= 5 and self._spent_s > self._extent.time_s:
                break
            plain.append(self._time(work))
            interruptible.append(self._time(work, is_interruptible=True))
            yield
        of_pairs_s = float(np.quantile(np.subtract(interruptible, plain), 0.25))
        cost_s = max(0.0, min(of_pairs_s, min(interruptible) - min(plain))) / num_layers
        num_safepoints = num_layers
        if cost_s:
            num_safepoints = max(1, int(SAFEPOINT_SHARE * _undisturbed_s(plain) / cost_s))
        layers = min(num_layers, max(1, -(-num_layers // num_safepoints)))
        self._executor.set_layers_per_safepoint(name, layers)
        self._safepoint = (cost_s, layers)

    def _announce(self, blocks: Sequence[int]) -> None:
        """Gives each row a sequence as long as any work needs there; all begin with the same tokens."""
        if not self._rows.lengths:
            return
        left, sampling = iter(blocks), SamplingParams(max_tokens=1 << 30)
        num_blocks = self._rows.blocks_of(self._rows.lengths)
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
            step_id=step_id, model=self._model.shape.name, rows=rows, starts=starts, counts=counts, samples=[True] *
            len(rows), new_sequences=new, new_blocks=[], is_interruptible=is_interruptible,
        )  # fmt: skip
        started_s = self._clock()
        result = self._executor.execute(plan)
        seconds = self._clock() - started_s
        self._spent_s += seconds
        if result.error:
            raise ProfileError(result.error)
        return seconds


def step_clock(executor: ProfiledExecutor) -> Callable[[], float]:
    """Clock of steps: where one thread computes, its own time, in which other processes on its core do not count. It is
    what a clock on the wall shows on a quiet machine; what it shows on this one, the engine learns from real steps."""
    is_one_thread = executor.is_alone and executor.device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if is_one_thread else time.perf_counter


def profile(
    executor: ProfiledExecutor,
    model: ProfiledModel,
    blocks: Sequence[int],
    max_step_tokens: int,
    extent: Extent = FULL,
    *,
    on_step: Callable[[], None] = lambda: None,
) -> Profile:
    """A whole profile at once. `blocks`: KV blocks that nobody else uses. Raises `ProfileError`."""

    def go_on() -> bool:
        on_step()
        return True

    profiling = Profiling(executor, model, len(blocks), max_step_tokens, extent)
    profiling.run(blocks, go_on)
    return profiling.result()


def _undisturbed_s(times: Sequence[float]) -> float:
    return float(np.quantile(times, UNDISTURBED_QUANTILE))


def _block_copy_s(device: torch.device, block_bytes: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of one block's copy to host memory and back."""
    num = max(1, min(64, NUM_COPIED_BYTES // block_bytes))
    on_device = torch.zeros(num, block_bytes, dtype=torch.uint8, device=device)
    on_host = torch.zeros(num, block_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

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
                # a wait for the whole device would end captures of a thread that loads a model
                torch.cuda.current_stream(device).synchronize()
            times.append((clock() - started_s) / num)
        return _undisturbed_s(times)

    return seconds(on_host, on_device), seconds(on_device, on_host)
