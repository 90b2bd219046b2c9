"""A step that is suspended between any two layers, with other steps before it goes on, makes bit for bit what it makes
undisturbed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from services.worker.executor.executor import Executor
from services.worker.executor.suspension import PartialForward, Safepoints
from services.worker.models.decoder import ForwardBatch, ForwardState
from shared.engine.plan import ModelShape, NewSequence, StepPlan, StepResult
from shared.messages.cluster import ModelSpec
from shared.messages.requests import SamplingParams, pack_tokens
from tests.worker.checkpoints import VARIANTS, prompt_of, write_checkpoint

MERGED_BYTES = 1 << 18
NUM_LAYERS = 3
NUM_ROWS = 8
SUSPENDED = 100
LENGTHS = (40, 21, 33, 64)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {variant: write_checkpoint(folder, variant) for variant in VARIANTS}


def load(executor: Executor, path: Path, name: str = "") -> ModelShape:
    return executor.add_model(executor.prepare_model(ModelSpec(name or path.name, str(path))))


def make_executor(path: Path, **options: Any) -> tuple[Executor, ModelShape]:
    executor = Executor("cpu", 8, MERGED_BYTES, NUM_ROWS, **options)
    return executor, load(executor, path)


def new_sequence(row: int, length: int, **sampling: Any) -> NewSequence:
    """With the three blocks from `3 * row` on."""
    params = SamplingParams(**{"max_tokens": 99, "temperature": 0.0, "logprobs": 3} | sampling)
    return NewSequence(row, pack_tokens(prompt_of(length)), length, params, list(range(3 * row, 3 * row + 3)))


def first_step(shape: ModelShape) -> StepPlan:
    """Brings rows 0 and 1 to where they decode, row 2 half through its prompt."""
    new = [new_sequence(0, LENGTHS[0]), new_sequence(1, LENGTHS[1], temperature=0.8, seed=5, repetition_penalty=1.2)]
    new.append(new_sequence(2, LENGTHS[2]))
    return StepPlan(
        step_id=1,
        model=shape.name,
        rows=[0, 1, 2],
        starts=[0, 0, 0],
        counts=[LENGTHS[0], LENGTHS[1], 12],
        samples=[True, True, False],
        new_sequences=new,
        new_blocks=[],
    )


def mixed_step(shape: ModelShape) -> StepPlan:
    """Two decodes (greedy and drawn), the rest of a chunked prompt, and a new prompt that is not finished."""
    return StepPlan(
        step_id=SUSPENDED, model=shape.name, rows=[0, 1, 2, 3], starts=[LENGTHS[0], LENGTHS[1], 12, 0],
        counts=[1, 1, LENGTHS[2] - 12, 50], samples=[True, True, True, False],
        new_sequences=[new_sequence(3, LENGTHS[3])], new_blocks=[], is_interruptible=True,
    )  # fmt: skip


def decode_step(shape: ModelShape) -> StepPlan:
    """Only decodes."""
    starts = [LENGTHS[0], LENGTHS[1]]
    return StepPlan(
        step_id=SUSPENDED,
        model=shape.name,
        rows=[0, 1],
        starts=starts,
        counts=[1, 1],
        samples=[True, True],
        new_sequences=[],
        new_blocks=[],
        is_interruptible=True,
    )


def resumed(plan: StepPlan) -> StepPlan:
    return msgspec.structs.replace(plan, resumes=True, new_sequences=[], new_blocks=[])


def following_step(shape: ModelShape) -> StepPlan:
    starts = [LENGTHS[0] + 1, LENGTHS[1] + 1, LENGTHS[2], 50]
    return StepPlan(
        step_id=SUSPENDED + 1, model=shape.name, rows=[0, 1, 2, 3], starts=starts, counts=[1, 1, 1, LENGTHS[3] - 50],
        samples=[True] * 4, new_sequences=[], new_blocks=[]
    )  # fmt: skip


def other_step(step_id: int, shape: ModelShape) -> StepPlan:
    """Another sequence in another row, with a block in a merged block of its own."""
    new = msgspec.structs.replace(
        new_sequence(6, 30, temperature=1.0), blocks=[step_id % 2 + 6 * shape.blocks_per_merged]
    )
    return StepPlan(
        step_id=step_id,
        model=shape.name,
        rows=[6],
        starts=[0],
        counts=[30],
        samples=[True],
        new_sequences=[new],
        new_blocks=[],
    )


def interrupt_after(executor: Executor, shape: ModelShape, num_layers: int, step_id: int = SUSPENDED) -> None:
    """Once the step has computed so many layers (0: before it is launched)."""
    if num_layers == 0:
        executor.interrupt(step_id)
        return
    model = executor._models[shape.name].model
    original = model.run_layers

    def run_layers(state: ForwardState, start: int, stop: int, batch: ForwardBatch) -> None:
        original(state, start, stop, batch)
        if stop == num_layers:
            thread = threading.Thread(target=executor.interrupt, args=(step_id,))
            thread.start()
            thread.join(10)
            del model.run_layers

    model.run_layers = run_layers  # type: ignore[method-assign]


def kv_bytes(executor: Executor, shape: ModelShape) -> torch.Tensor:
    """Bytes of all blocks of the sequences' rows."""
    rows = executor._store.block_rows(executor._models[shape.name].views)
    return rows[: 3 * NUM_ROWS].clone()


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_resumed_step_is_bit_identical_in_every_family(checkpoints: dict[str, Path], variant: str) -> None:
    results: list[tuple[StepResult, ...]] = []
    for num_layers in (None, 0, 1, 2):
        executor, shape = make_executor(checkpoints[variant])
        executor._store.slab.zero_()
        executor.execute(first_step(shape))
        plan = mixed_step(shape)
        if num_layers is not None:
            interrupt_after(executor, shape, num_layers)
            assert executor.execute(plan) == StepResult(SUSPENDED, [], suspended_share=num_layers / NUM_LAYERS)
            for step_id in (101, 102):
                assert not executor.execute(other_step(step_id, shape)).error
            plan = resumed(plan)
        made = executor.execute(plan)
        assert len(made.tokens) == 3 and made.logprobs is not None and not made.error
        results.append((made, executor.execute(following_step(shape))))
        cells = kv_bytes(executor, shape)[: 3 * 4]
        if num_layers is None:
            expected_cells = cells
        assert torch.equal(cells, expected_cells)
    assert results[1:] == results[:1] * 3


@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_another_models_steps_run_in_between_and_widen_the_rows(checkpoints: dict[str, Path], num_layers: int) -> None:
    """A model that is loaded meanwhile makes the rows longer and takes other merged blocks."""
    path = checkpoints["qwen3"]
    undisturbed, shape = make_executor(path)
    undisturbed.execute(first_step(shape))
    expected = [undisturbed.execute(plan(shape)) for plan in (decode_step, following_decode)]
    executor = Executor("cpu", 8, MERGED_BYTES, NUM_ROWS)
    shape = executor.add_model(executor.prepare_model(ModelSpec("qwen3", str(path), max_model_len=100)))
    executor.execute(first_step(shape))
    interrupt_after(executor, shape, num_layers)
    assert executor.execute(decode_step(shape)).suspended_share == num_layers / NUM_LAYERS
    for variant in ("opt", "llama"):
        other = load(executor, checkpoints[variant])
        for step_id in (101, 102):
            assert not executor.execute(other_step(step_id, other)).error
    assert executor.execute(resumed(decode_step(shape))) == expected[0]
    assert executor.execute(following_decode(shape)) == expected[1]


def following_decode(shape: ModelShape) -> StepPlan:
    starts = [LENGTHS[0] + 1, LENGTHS[1] + 1]
    return StepPlan(
        step_id=SUSPENDED + 1,
        model=shape.name,
        rows=[0, 1],
        starts=starts,
        counts=[1, 1],
        samples=[True, True],
        new_sequences=[],
        new_blocks=[],
    )


def test_a_step_may_be_suspended_again_and_again(checkpoints: dict[str, Path]) -> None:
    executor, shape = make_executor(checkpoints["llama"])
    executor.execute(first_step(shape))
    expected = make_executor(checkpoints["llama"])[0]
    expected.execute(first_step(shape))
    plan = mixed_step(shape)
    for num_layers in (0, 0, 1, 2):
        interrupt_after(executor, shape, num_layers)
        assert executor.execute(plan).suspended_share == num_layers / NUM_LAYERS
        plan = resumed(plan)
    # no more safepoints: the flag is not looked at
    executor.interrupt(SUSPENDED)
    done = executor.execute(msgspec.structs.replace(plan, is_interruptible=False))
    assert done == expected.execute(mixed_step(shape))


def test_an_interval_of_several_layers_and_a_flag_that_comes_too_late(checkpoints: dict[str, Path]) -> None:
    executor, shape = make_executor(checkpoints["llama"], layers_per_safepoint=2)
    executor.execute(first_step(shape))
    interrupt_after(executor, shape, 3)
    result = executor.execute(mixed_step(shape))
    assert len(result.tokens) == 3 and result.suspended_share < 0
    interrupt_after(executor, shape, 2, step_id=200)
    plan = msgspec.structs.replace(decode_step(shape), step_id=200, starts=[41, 22])
    assert executor.execute(plan).suspended_share == 2 / 3
    executor.set_layers_per_safepoint(shape.name, 3)
    assert len(executor.execute(resumed(plan)).tokens) == 2
    with pytest.raises(ValueError, match="0 layers"):
        executor.set_layers_per_safepoint(shape.name, 0)


def test_a_step_in_parts_is_bit_identical(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["llama"]
    executor, shape = make_executor(path)
    executor.launch(first_step(shape))
    executor.collect()
    executor.launch(mixed_step(shape))
    expected = executor.collect()
    executor, shape = make_executor(path)
    executor.launch(first_step(shape))
    executor.collect()
    plan = msgspec.structs.replace(mixed_step(shape), stop_share=0.0)
    shares = []
    for stop_share in (0.5, 0.7, 1.0):
        executor.launch(plan)
        result = executor.collect()
        shares.append(result.suspended_share)
        plan = msgspec.structs.replace(resumed(plan), stop_share=stop_share)
    assert shares == pytest.approx([1 / 3, 2 / 3, -1])
    assert result.tokens == expected.tokens


def test_steps_that_are_not_interruptible_run_whole(checkpoints: dict[str, Path], monkeypatch: Any) -> None:
    executor, shape = make_executor(checkpoints["opt"])
    monkeypatch.setattr(Safepoints, "run", None)
    executor.interrupt(1)
    assert len(executor.execute(first_step(shape)).tokens) == 2
    executor.interrupt(SUSPENDED)
    plan = msgspec.structs.replace(mixed_step(shape), is_interruptible=False)
    assert len(executor.execute(plan).tokens) == 3


def test_discarded_steps_are_dropped_and_cannot_be_resumed(checkpoints: dict[str, Path]) -> None:
    executor, shape = make_executor(checkpoints["llama"])
    executor.execute(first_step(shape))
    interrupt_after(executor, shape, 1)
    executor.execute(mixed_step(shape))
    executor.execute(msgspec.structs.replace(other_step(101, shape), discards=(SUSPENDED, 55)))
    assert not executor._suspended
    assert "no such step" in executor.execute(resumed(mixed_step(shape))).error
    again = msgspec.structs.replace(mixed_step(shape), step_id=300, is_interruptible=False)
    expected, _ = make_executor(checkpoints["llama"])
    expected.execute(first_step(shape))
    assert executor.execute(again).tokens == expected.execute(mixed_step(shape)).tokens


def test_a_suspended_step_whose_row_was_given_away_fails_and_goes_with_its_model(checkpoints: dict[str, Path]) -> None:
    executor, shape = make_executor(checkpoints["llama"])
    executor.execute(first_step(shape))
    executor.interrupt(SUSPENDED)
    executor.execute(decode_step(shape))
    taken = StepPlan(
        step_id=101,
        model=shape.name,
        rows=[1],
        starts=[0],
        counts=[9],
        samples=[True],
        new_sequences=[new_sequence(1, 9)],
        new_blocks=[],
    )
    assert not executor.execute(taken).error
    assert "given to another sequence" in executor.execute(resumed(decode_step(shape))).error
    executor.interrupt(SUSPENDED)
    plan = msgspec.structs.replace(decode_step(shape), rows=[0], starts=[40], counts=[1], samples=[True])
    assert executor.execute(plan).suspended_share == 0
    executor.remove_model(shape.name)
    load(executor, checkpoints["llama"])
    assert "no such step" in executor.execute(resumed(plan)).error


class Marks:
    """Stands for a device that computes an interval only when somebody waits for its end."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_made = 0

    def make(self) -> MarkedEvent:
        self.num_made += 1
        return MarkedEvent(self.log, "ab"[self.num_made - 1])


class MarkedEvent:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def record(self) -> None:
        self._log.append(f"mark {self._name}")

    def synchronize(self) -> None:
        self._log.append(f"wait {self._name}")


def test_launching_runs_ahead_of_the_device_by_two_intervals_at_most() -> None:
    marks = Marks()
    safepoints = Safepoints(marks.make)

    class Model:
        num_layers = 7

        def run_layers(self, _state: Any, start: int, stop: int, _batch: Any) -> None:
            marks.log.append(f"{start}-{stop}")

    def forward() -> PartialForward:
        return PartialForward(Model(), None, None, None, None, None)  # type: ignore[arg-type]

    assert safepoints.run(forward(), 1, 2)
    assert marks.log == [
        "0-2", "mark a", "2-4", "mark b", "wait a", "4-6", "mark a", "wait b", "6-7", "mark b", "wait a"
    ]  # fmt: skip
    marks.log.clear()
    safepoints.interrupt(2)
    assert safepoints.run(forward(), 3, 7), "the flag of another step"
    partial = forward()
    assert not safepoints.run(partial, 2, 7) and partial.share == 0
    assert safepoints.run(partial, 2, 7), "one interrupt stops a step once"
