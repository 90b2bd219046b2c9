"""Several ranks make, in float32, the tokens that one makes: every family, in chunks and batches, drawn and greedy,
suspended and resumed, preempted, copied out and back, moved, and beside another model in one pool."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from services.worker.executor.executor import Executor
from services.worker.instance.engine_loop import EngineLoop
from services.worker.kv_transport.staging import KvPool
from services.worker.models.decoder import ForwardBatch, ForwardState
from services.worker.models.loading import identity_of, load_model
from services.worker.ranks.group import Alone
from shared.engine.calls import AddModel, Submit
from shared.engine.driver import StepStats
from shared.engine.engine import Effect
from shared.engine.plan import CopyKind, EndedCopy, KvCopy, ModelShape
from shared.engine.recording import Configuration
from shared.engine.requests import Ended, Output
from shared.messages.cluster import ModelSpec
from shared.messages.requests import GenerationRequest, RequestClass, SamplingParams, pack_tokens, unpack_tokens
from shared.models.checkpoint import CheckpointError
from tests.worker.adapters import ALL, OPT, write_adapter
from tests.worker.checkpoints import VARIANTS, prompt_of, write_checkpoint
from tests.worker.ranks.followers import CPU, Followers, GroupOfExecutors, followers
from tests.worker.step_driver import Driver
from tests.worker.test_adapters import WIDE
from tests.worker.test_suspension import LENGTHS as SUSPENDED_LENGTHS
from tests.worker.test_suspension import first_step, following_step, mixed_step, resumed

MERGED_BYTES = 1 << 18
NUM_MERGED = 6
LENGTHS = (5, 40, 61)
STEPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Followers]:
    with followers(2, folder) as them:
        yield them


class One(Executor):
    """A single rank, with the same calls."""

    def load(self, path: Path, name: str = "") -> ModelShape:
        return self.add_model(self.prepare_model(ModelSpec(name or path.name, str(path))))


def generate(executor: One | GroupOfExecutors, path: Path) -> tuple[list[list[int]], list[float]]:
    """Outputs, and logprobs of one: prompts in chunks, in batches with decodes; one is drawn, one penalised, one
    preempted."""
    driver = Driver(executor, executor.load(path), range(NUM_MERGED))  # type: ignore[arg-type]
    rows = [
        driver.add(0, prompt_of(LENGTHS[0])),
        driver.add(1, prompt_of(LENGTHS[1]), temperature=0.9, top_p=0.95, seed=7),
        driver.add(2, prompt_of(LENGTHS[2]), temperature=1.1, seed=3, repetition_penalty=1.2, logprobs=2),
    ]
    for step in range(100):
        work = [(row, min(25, len(row.tokens) - row.computed)) for row in rows if len(row.output) < STEPS]
        if not work:
            break
        driver.step(work)
        if step == 5:
            driver.preempt(rows[1])
    executor.remove_model(path.name)
    logprobs = [entry.logprob for entry in rows[2].logprobs if entry is not None]
    assert len(logprobs) == STEPS
    return [row.output for row in rows], logprobs


def assert_same(mine: tuple[list[list[int]], list[float]], theirs: tuple[list[list[int]], list[float]]) -> None:
    assert mine[0] == theirs[0]
    assert mine[1] == pytest.approx(theirs[1], abs=1e-3)


def make_one(**options: Any) -> One:
    return One("cpu", NUM_MERGED, MERGED_BYTES, 8, **options)


def test_two_ranks_make_the_tokens_of_one_in_every_family(folder: Path, pair: Followers) -> None:
    one, two = make_one(), pair.executor(NUM_MERGED, MERGED_BYTES, 8)
    for variant in sorted(VARIANTS.keys() - {"llama-linear", "llama3", "mistral", "qwen3-yarn", "qwen2", "gemma"}):
        path = write_checkpoint(folder, variant)
        assert_same(generate(two, path), generate(one, path))


def test_two_ranks_make_the_tokens_of_one_with_adapters(folder: Path, pair: Followers) -> None:
    """A row of each of two adapters and one without; Phi-3's layers are fused, and OPT's are others; of the last model all
    are compiled."""
    fused = ("qkv_proj", "gate_up_proj", "down_proj")
    for number, (variant, modules, sizes) in enumerate(
        (("llama", ALL, {}), ("opt", OPT, {}), ("phi3", fused, {}), ("llama", ALL, WIDE))
    ):
        path = write_checkpoint(folder / f"adapted{number}", variant, **sizes)
        adapters = [write_adapter(path / f"lora{n}", path, modules, rank=n, seed=n) for n in (3, 4)]
        outputs = []
        for executor in (make_one(), pair.executor(NUM_MERGED, MERGED_BYTES, 8)):
            driver = Driver(executor, executor.load(path), range(NUM_MERGED))  # type: ignore[arg-type]
            for adapter in adapters:
                executor.load_adapter(variant, adapter)
            versions = ["", *(adapter.version for adapter in adapters)]
            rows = [driver.add(i, prompt_of(30), version) for i, version in enumerate(versions)]
            while any(len(row.output) < STEPS for row in rows):
                driver.step([(row, min(25, len(row.tokens) - row.computed)) for row in rows])
            executor.remove_model(variant)
            outputs.append([row.output for row in rows])
        assert outputs[0] == outputs[1]
        assert len(set(map(tuple, outputs[0]))) == 3


@pytest.mark.long
def test_four_ranks_make_the_tokens_of_one(folder: Path) -> None:
    """Three of which have an equal part of the vocabulary, and the last less; through an interrupt, and from blocks that
    were checkpointed, overwritten and restored."""
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 82}
    llama = write_checkpoint(folder / "four", "llama-tied-bias", num_hidden_layers=5, **sizes)
    opt = write_checkpoint(folder / "four", "opt-gelu-untied", hidden_size=64, num_attention_heads=4)
    with followers(4, folder) as them:
        one, four = make_one(), them.executor(NUM_MERGED, MERGED_BYTES, 8, num_host_merged=NUM_MERGED)
        for path in (llama, opt):
            assert_same(generate(four, path), generate(one, path))
        check_interrupt(llama, one, four, 1)
        outputs = []
        for executor in (one, four):
            driver = Driver(executor, executor.load(opt, "restored"), range(NUM_MERGED))  # type: ignore[arg-type]
            row, other = driver.add(0, prompt_of(70)), driver.add(1, prompt_of(70)[::-1])
            driver.step([(row, 70)])
            if executor is four:
                host = list(range(len(row.blocks)))
                copy_to_end(four, KvCopy(1, CopyKind.CHECKPOINT, "restored", row.blocks, host))
                other.blocks = list(row.blocks)
                driver.step([(other, 70)])
                copy_to_end(four, KvCopy(2, CopyKind.RESTORE, "restored", row.blocks, host))
            driver.decode([row], STEPS)
            outputs.append(row.output)
        assert outputs[0] == outputs[1]


def test_heads_that_ranks_do_not_divide_are_refused(folder: Path) -> None:
    group = Alone()
    group.size = 4
    path = write_checkpoint(folder, "llama")
    with pytest.raises(CheckpointError, match="2 KV heads do not divide over 4 ranks"):
        load_model(identity_of(path, CPU), CPU, group)


@pytest.mark.parametrize("interrupted_after", [0, 1, 2])
def test_all_ranks_stop_at_the_same_safepoint_and_go_on(folder: Path, pair: Followers, interrupted_after: int) -> None:
    """One interval after the one in which rank 0 is interrupted, or at once before the first."""
    path = write_checkpoint(folder / "five", "llama", num_hidden_layers=5)
    check_interrupt(path, make_one(), pair.executor(NUM_MERGED, MERGED_BYTES, 8), interrupted_after)


def check_interrupt(path: Path, one: One, many: GroupOfExecutors, interrupted_after: int) -> None:
    """Checks interruptions of a model of five layers."""
    shape = one.load(path)
    assert many.load(path) == shape
    expected = [one.execute(plan(shape)).tokens for plan in (first_step, mixed_step, following_step)]
    assert many.execute(first_step(shape)).tokens == expected[0]
    plan = mixed_step(shape)
    if interrupted_after:
        interrupt_after(many, shape, interrupted_after, plan.step_id)
    else:
        many.interrupt(plan.step_id)
    result = many.execute(plan)  # which asserts that all say the same
    assert result.suspended_share == pytest.approx((interrupted_after + 1) / 5 if interrupted_after else 0.0)
    # Then in parts that are decided by the plan, of which another interrupt stops one.
    plan = msgspec.structs.replace(resumed(plan), stop_share=0.85)
    many.interrupt(plan.step_id)
    assert many.execute(plan).suspended_share == result.suspended_share
    assert many.execute(plan).suspended_share == pytest.approx(0.8)
    result = many.execute(msgspec.structs.replace(plan, stop_share=1.0))
    assert result.tokens == expected[1]
    assert many.execute(following_step(shape)).tokens == expected[2]
    assert len(expected[2]) == len(SUSPENDED_LENGTHS)


def interrupt_after(executor: GroupOfExecutors, shape: ModelShape, num_layers: int, step_id: int) -> None:
    """While rank 0 computes that layer."""
    model = executor.leader._models[shape.name].model
    original = model.run_layers

    def run_layers(state: ForwardState, start: int, stop: int, batch: ForwardBatch) -> None:
        if stop == num_layers:
            executor.interrupt(step_id)
            del model.run_layers
        original(state, start, stop, batch)

    model.run_layers = run_layers  # type: ignore[method-assign]


def test_whole_blocks_are_joined_from_all_ranks_parts_on_the_device_and_on_the_host(
    folder: Path, pair: Followers
) -> None:
    path = write_checkpoint(folder, "opt")
    found = []
    for executor in (make_one(num_host_merged=1), pair.executor(NUM_MERGED, MERGED_BYTES, 8, num_host_merged=1)):
        driver = Driver(executor, executor.load(path), range(NUM_MERGED))  # type: ignore[arg-type]
        row = driver.add(0, prompt_of(70))
        driver.step([(row, 70)])
        full = row.blocks[: 70 // driver.shape.block_size]
        copy_to_end(executor, KvCopy(1, CopyKind.CHECKPOINT, "opt", full, list(range(len(full)))))
        wholes = []
        for on_host, blocks in ((False, full), (True, range(len(full)))):
            pool = KvPool(executor.block_rows("opt", on_host))
            whole = torch.zeros(len(full) * pool.block_bytes, dtype=torch.uint8)
            pool.gather(blocks, whole, 64)
            wholes.append(whole)
        assert torch.equal(*wholes)
        found.append(wholes[0].view(torch.float32))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


def copy_to_end(executor: One | GroupOfExecutors, copy: KvCopy) -> None:
    executor.start_copy(copy)
    ended: list[EndedCopy] = []
    deadline_s = time.monotonic() + 20.0
    while not ended and time.monotonic() < deadline_s:
        ended = executor.finished_copies()
    assert [each[:2] for each in ended] == [(copy.copy_id, True)]


class Run:
    """An engine with its loop, on an executor."""

    def __init__(self, executor: Any, shapes: list[ModelShape], num_merged: int, num_host_merged: int) -> None:
        configuration = Configuration(
            num_merged=num_merged, num_rows=8, ordering="fcfs", token_budget=48, steps_in_flight=1,
            num_host_merged=num_host_merged, checkpoint_start=0.2, ttft_s=0.001, tpot_s=0.001,
        )  # fmt: skip
        self.engine = configuration.build()
        self.outputs: dict[str, list[int]] = {}
        self.num_ended = 0
        self._changed = threading.Condition()
        for shape in shapes:
            self.engine.apply(AddModel(shape), time.monotonic())
        self.loop = EngineLoop(self.engine, executor, time.monotonic, self._on_effects)
        self.loop.start()

    def _on_effects(self, effects: list[Effect], _stats: StepStats | None) -> None:
        with self._changed:
            for effect in effects:
                if isinstance(effect, Output):
                    for entry in effect.entries:
                        self.outputs.setdefault(entry.request_id, []).extend(unpack_tokens(entry.tokens))
                self.num_ended += isinstance(effect, Ended)
            self._changed.notify_all()

    def until(self, num_ended: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_ended >= num_ended or self.loop.failure, 60.0)
        assert not self.loop.failure, self.loop.failure


def test_two_ranks_under_the_engine_and_pressure(folder: Path, pair: Followers) -> None:
    """Two models of different shapes in a pool too small for all: offline sequences are preempted and come back from
    checkpoints, blocks move."""
    paths = [write_checkpoint(folder, variant) for variant in ("llama3", "opt")]
    one = make_one()
    blocks = [one._models[one.load(path).name].views.shape.block_bytes for path in paths]
    merged_bytes = math.lcm(*blocks)
    num_merged = 10 * max(blocks) // merged_bytes
    requests = [
        GenerationRequest(
            request_id=f"{name}-{number}",
            gateway_id="gateway",
            model=name,
            prompt=pack_tokens(prompt_of(20 + 9 * number)),
            sampling=SamplingParams(max_tokens=60, temperature=0.8 * (number % 2), seed=number),
            request_class=RequestClass.ONLINE if number > 3 else RequestClass.OFFLINE,
        )
        for number in range(7)
        for name in (path.name for path in paths)
    ]
    outputs = []
    for executor, num, host in (
        (One("cpu", 40 * num_merged, merged_bytes, 8), 40 * num_merged, 0),
        (pair.executor(num_merged, merged_bytes, 8, num_host_merged=num_merged), num_merged, num_merged),
    ):
        run = Run(executor, [executor.load(path) for path in paths], num, host)
        for request in requests:
            assert run.loop.apply(Submit(request)) is None
        run.until(len(requests))
        run.loop.stop(10.0)
        run.engine.check()
        outputs.append(run.outputs)
    counters = run.engine.counters
    assert counters.num_preemptions > 0 and counters.restored_blocks.total() > 0 and counters.moved_blocks.total() > 0
    assert outputs[1] == outputs[0]
