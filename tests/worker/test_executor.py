"""Step plans, whatever their shape, make the tokens of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.attention.flashinfer_backend import FlashInferBackend
from services.worker.attention.interface import BatchLayout
from services.worker.attention.torch_backend import TorchBackend
from services.worker.executor.executor import Executor
from services.worker.executor.first_steps import WARM_UP
from services.worker.kv.transfer import Field
from services.worker.models.decode_graphs import Capture, Replayable
from services.worker.models.decoder import ForwardState
from services.worker.native import library
from services.worker.ranks.group import Alone
from services.worker.ranks.shared_memory import RankMemory
from shared.engine.plan import NO_TOKEN, CopyKind, KvCopy, ModelShape, NewSequence, StepPlan
from shared.messages.cluster import ModelSpec
from shared.messages.requests import SamplingParams, pack_tokens
from shared.models.checkpoint import CheckpointError
from tests.seeds import seeds
from tests.worker import fake_flashinfer
from tests.worker.checkpoints import prompt_of, reference_outputs, write_checkpoint
from tests.worker.step_driver import Driver, Row

MERGED_BYTES = 1 << 18
LENGTHS = (5, 40, 60, 33)
STEPS = 12
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
ON_EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {v: write_checkpoint(folder, v) for v in ("llama", "opt", "qwen3", "mistral-window")}


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> dict[str, list[list[int]]]:
    return {v: reference_outputs(p, [prompt_of(n) for n in LENGTHS], STEPS) for v, p in checkpoints.items()}


def load(executor: Executor, path: Path, name: str | None = None) -> ModelShape:
    return executor.add_model(executor.prepare_model(ModelSpec(name or path.name, str(path))))


def test_two_models_in_one_slab_take_turns_and_blocks(
    checkpoints: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    """Merged blocks change hands between models of different block sizes."""
    executor = Executor("cpu", 12, MERGED_BYTES, 8)
    executor._store.slab.fill_(0xFF)  # NaN in every type
    names = ["llama", "opt"]
    shapes = [load(executor, checkpoints[v]) for v in names]
    assert shapes[0].blocks_per_merged != shapes[1].blocks_per_merged
    for turn in range(2):
        merged = [range(6), range(6, 12)] if turn == 0 else [range(6, 12), range(6)]
        drivers = [Driver(executor, s, m, seed=turn) for s, m in zip(shapes, merged, strict=True)]
        rows = [[d.add(4 * i + j, prompt_of(n)) for j, n in enumerate(LENGTHS)] for i, d in enumerate(drivers)]
        while any(len(r.output) < STEPS for group in rows for r in group):
            for driver, group in zip(drivers, rows, strict=True):
                if work := [(r, min(25, len(r.tokens) - r.computed)) for r in group if len(r.output) < STEPS]:
                    driver.step(work)
        assert [[r.output for r in group] for group in rows] == [expected[v] for v in names]


@ON_EACH_DEVICE
@pytest.mark.parametrize("variant", ["llama", "mistral-window", "opt"])
@pytest.mark.parametrize("seed", seeds(3, normally=1))
def test_any_schedule_makes_the_same_tokens(
    checkpoints: dict[str, Path], expected: dict[str, list[list[int]]], variant: str, seed: int, device: str
) -> None:
    """Random subsets, random chunks, rows and blocks reused, preemption by recompute in the middle."""
    chance = random.Random(seed)
    executor = Executor(device, 4, MERGED_BYTES, 6)
    driver = Driver(executor, load(executor, checkpoints[variant]), range(4), seed)
    rows = [driver.add(i, prompt_of(n)) for i, n in enumerate(LENGTHS)]
    spare = [4, 5]
    while unfinished := [r for r in rows if len(r.output) < STEPS]:
        chosen = chance.sample(unfinished, chance.randint(1, len(unfinished)))
        driver.step([(r, chance.randint(1, len(r.tokens) - r.computed)) for r in chosen])
        if chance.random() < 0.3:
            victim = chance.choice(chosen)
            driver.preempt(victim)
            spare.append(victim.row)
            victim.row = spare.pop(0)
    assert [r.output for r in rows] == expected[variant]


def test_sequences_share_the_blocks_of_a_common_prefix(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["qwen3"]
    executor = Executor("cpu", 4, MERGED_BYTES, 3)
    shape = load(executor, path)
    driver = Driver(executor, shape, range(4))
    prefix = prompt_of(2 * shape.block_size)
    prompts = [prefix + prompt_of(n) for n in (9, 21, 40)]
    first = driver.add(0, prompts[0])
    driver.step([(first, len(prompts[0]))])
    others = [driver.add(i, prompts[i]) for i in (1, 2)]
    for row in others:
        row.blocks, row.computed = first.blocks[:2], len(prefix)
    driver.step([(first, 1), *((r, len(r.tokens) - r.computed) for r in others)])
    rows = [first, *others]
    driver.decode(rows, 7)
    assert [r.output[:8] for r in rows] == reference_outputs(path, prompts, 8)


def test_a_token_in_flight_is_not_sent_back(checkpoints: dict[str, Path], expected: dict[str, list[list[int]]]) -> None:
    """Plans of later steps are launched before the first is collected; sampled tokens never leave the device between."""
    executor = Executor("cpu", 4, MERGED_BYTES, 1)
    shape = load(executor, checkpoints["llama"])
    prompt = prompt_of(LENGTHS[0])
    new = NewSequence(0, pack_tokens(prompt), len(prompt), SamplingParams(max_tokens=99, temperature=0.0), [3])
    executor.launch(
        StepPlan(
            step_id=0,
            model=shape.name,
            rows=[0],
            starts=[0],
            counts=[len(prompt)],
            samples=[True],
            new_sequences=[new],
            new_blocks=[],
        )
    )
    for i in range(1, STEPS):
        executor.launch(
            StepPlan(
                step_id=i,
                model=shape.name,
                rows=[0],
                starts=[len(prompt) + i - 1],
                counts=[1],
                samples=[True],
                new_sequences=[],
                new_blocks=[],
            )
        )
    assert executor.num_in_flight == STEPS
    results = [executor.collect() for _ in range(STEPS)]
    assert [r.step_id for r in results] == list(range(STEPS))
    assert [r.tokens[0] for r in results] == expected["llama"][0]


def step_of(row: Row, shape: ModelShape, **changes: Any) -> StepPlan:
    new = NewSequence(row.row, pack_tokens(row.tokens), row.num_prompt, row.sampling, [0])
    plan = StepPlan(
        step_id=9,
        model=shape.name,
        rows=[row.row],
        starts=[0],
        counts=[len(row.tokens)],
        samples=[True],
        new_sequences=[new],
        new_blocks=[],
    )
    return msgspec.structs.replace(plan, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "nobody"}, "'nobody' is not loaded"),
        ({"new_blocks": [(0, [10**6])]}, "blocks 1000000..1000000 of"),
        ({"starts": [40]}, "rows [0] lack KV blocks"),
        ({"rows": [99]}, "IndexError"),
        (
            {"new_sequences": [NewSequence(0, pack_tokens([5, 211]), 2, SamplingParams(max_tokens=1), [0])]},
            "5..211 of a vocabulary of",
        ),
    ],
)
def test_a_failing_step_is_an_error_result_and_the_next_one_runs(
    checkpoints: dict[str, Path], expected: dict[str, list[list[int]]], changes: dict[str, Any], words: str
) -> None:
    executor = Executor("cpu", 2, MERGED_BYTES, 2)
    shape = load(executor, checkpoints["llama"])
    driver = Driver(executor, shape, range(2))
    result = executor.execute(step_of(driver.add(0, prompt_of(5)), shape, **changes))
    assert (result.step_id, result.tokens) == (9, []) and words in result.error
    row = driver.add(0, prompt_of(5))
    driver.step([(row, 5)])
    driver.decode([row], STEPS - 1)
    assert row.output == expected["llama"][0]


@ON_EACH_DEVICE
def test_models_come_and_go(checkpoints: dict[str, Path], expected: dict[str, list[list[int]]], device: str) -> None:
    executor = Executor(device, 4, MERGED_BYTES, 2)
    for name in ("first", "second"):
        shape = load(executor, checkpoints["opt"], name)
        block_size = executor._preparation.backends[-1].facts.block_sizes[0]
        assert (shape.name, shape.block_size, shape.max_model_len) == (name, block_size, 256)
        driver = Driver(executor, shape, range(4), seed=1)
        row = driver.add(1, prompt_of(LENGTHS[1]))
        driver.step([(row, LENGTHS[1])])
        driver.decode([row], STEPS - 1)
        assert row.output == expected["opt"][1]
        executor.remove_model(name)
        assert "not loaded" in executor.execute(step_of(row, shape)).error
    assert executor.free_memory_bytes() > 0


@ON_EACH_DEVICE
def test_names_of_one_checkpoint_share_its_weights_until_the_last_is_gone(
    checkpoints: dict[str, Path], expected: dict[str, list[list[int]]], device: str
) -> None:
    executor = Executor(device, 8, MERGED_BYTES, 8)
    shapes = [load(executor, checkpoints["llama"], name) for name in ("one", "two")]
    load(executor, checkpoints["opt"], "other")
    assert executor._models["one"].model is executor._models["two"].model
    drivers = [Driver(executor, shapes[i], range(4 * i, 4 * i + 4), seed=i) for i in range(2)]
    rows = [[d.add(4 * i + j, prompt_of(n)) for j, n in enumerate(LENGTHS)] for i, d in enumerate(drivers)]

    def run(num_tokens: int, *names: int) -> None:
        while any(len(row.output) < num_tokens for i in names for row in rows[i]):
            for i in names:
                drivers[i].step([(row, len(row.tokens) - row.computed) for row in rows[i]])

    run(STEPS // 2, 0, 1)
    executor.remove_model("one")
    run(STEPS, 1)
    assert [row.output for row in rows[1]] == expected["llama"]
    assert len(executor._preparation.weights) == 2
    executor.remove_model("two")
    assert list(executor._preparation.weights.values()) == [executor._models["other"].model], (
        "nothing else holds the weights"
    )


def test_lengths_share_weights_where_they_make_no_difference(checkpoints: dict[str, Path]) -> None:
    """The second name is added and the first removed; each has its own bound."""
    executor = Executor("cpu", 4, MERGED_BYTES, 4)
    full = executor.prepare_model(ModelSpec("full", str(checkpoints["llama"])))
    short = executor.prepare_model(ModelSpec("short", str(checkpoints["llama"]), max_model_len=40))
    assert short.model is full.model
    shapes = [executor.add_model(prepared) for prepared in (full, short)]
    assert [shape.max_model_len for shape in shapes] == [256, 40]
    executor.remove_model("full")
    del full
    driver = Driver(executor, shapes[1], range(4))
    row = driver.add(0, prompt_of(LENGTHS[0]))
    driver.step([(row, LENGTHS[0])])
    assert len(executor._preparation.weights) == 1
    long = executor.prepare_model(ModelSpec("long", str(checkpoints["llama"]), max_model_len=80))
    assert long.model is short.model
    assert "41 tokens exceed the model's 40" in executor.execute(step_of(driver.add(0, prompt_of(41)), shapes[1])).error


def test_another_dtype_or_file_or_length_of_windows_is_another_model(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    executor = Executor("cpu", 4, MERGED_BYTES, 4)
    path = write_checkpoint(tmp_path, "mistral-window")
    specs = [
        ModelSpec("a", str(path)),
        ModelSpec("b", str(path), dtype="bfloat16"),
        ModelSpec("c", str(path), max_model_len=20),
    ]
    models = [executor.prepare_model(spec).model for spec in specs]
    weights = next(path.glob("*.safetensors"))
    os.utime(weights, ns=(0, 0))
    models.append(executor.prepare_model(specs[0]).model)
    assert len({id(model) for model in models}) == 4


def test_a_model_whose_blocks_exceed_the_pools_is_refused(checkpoints: dict[str, Path]) -> None:
    executor = Executor("cpu", 4, 4096, 2)
    with pytest.raises(CheckpointError, match="takes 12288 bytes, but the pool is cut into 4096"):
        load(executor, checkpoints["llama"])
    with pytest.raises(CheckpointError, match="does not exist"):
        executor.prepare_model(ModelSpec("x", "/no/such/folder"))


def test_a_sequence_may_fill_the_models_whole_length(checkpoints: dict[str, Path]) -> None:
    executor = Executor("cpu", 4, MERGED_BYTES, 1)
    shape = executor.add_model(executor.prepare_model(ModelSpec("m", str(checkpoints["llama"]), max_model_len=50)))
    driver = Driver(executor, shape, range(4))
    row = driver.add(0, prompt_of(48))
    driver.step([(row, 48)])
    driver.decode([row], 2)
    assert len(row.tokens) == 51
    result = executor.execute(step_of(driver.add(0, prompt_of(51)), shape))
    assert "51 tokens exceed the model's 50" in result.error


def test_sampling_and_logprobs_do_not_depend_on_the_batch(checkpoints: dict[str, Path]) -> None:
    """Alone, or among others with chunked prefill and a preemption: same tokens, same log-probabilities."""
    executor = Executor("cpu", 4, MERGED_BYTES, 6)
    shape = load(executor, checkpoints["llama"])
    driver = Driver(executor, shape, range(4))
    wish: dict[str, Any] = {
        "temperature": 0.9, "top_p": 0.95, "seed": 7, "logprobs": 2, "repetition_penalty": 1.3,
        "frequency_penalty": 0.2, "min_tokens": 5, "stop_token_ids": tuple(range(100)),
    }  # fmt: skip
    alone = driver.add(0, prompt_of(30), **wish)
    driver.step([(alone, 30)])
    driver.decode([alone], 9)
    assert all(token >= 100 for token in alone.output[:5]), "stop ids are masked until min_tokens"
    driver.preempt(alone)

    others = [driver.add(i, prompt_of(20 + i), temperature=float(i % 2), seed=i, logprobs=i - 3) for i in range(1, 5)]
    again = driver.add(5, prompt_of(30), **wish)
    driver.step([(others[0], 10), (again, 11), (others[1], 22)])
    driver.step([(others[1], 1), (again, 19), (others[2], 23)])
    driver.decode([again, others[1]], 4)
    driver.preempt(again)
    driver.step([(again, len(again.tokens)), (others[3], 24)])
    driver.decode([others[3], again], 4)
    assert again.output == alone.output
    for a, b in zip(alone.logprobs, again.logprobs, strict=True):
        assert a is not None and b is not None
        assert a.top_ids == b.top_ids and a.rank == b.rank
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
    assert others[1].logprobs == [None] * len(others[1].output) or all(p is None for p in others[1].logprobs)


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executor without compiled kernels, as where there is no compiler."""
    monkeypatch.setattr(library, "_team_of", lambda num_threads: None)


class StaticTorchBackend(TorchBackend):
    """Gives captured batches what flash attention gives them, static metadata, so that the graphs' padding and buffers
    are tested without a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.filled: list[int] = []

    def replay_fields(self, layout: BatchLayout, max_pages: int) -> dict[str, Field]:
        return {"tables": Field(np.int32, len(layout.counts) * max_pages)}

    def replay_values(self, layout: BatchLayout) -> dict[str, np.ndarray]:
        return {"tables": layout.block_tables}

    def allocate_replay(self, layout: BatchLayout, fields: Any, max_pages: int, larger: Any | None) -> Any:
        return self.prepare(layout)

    def begin_replay(self, static: Any, layout: BatchLayout) -> None:
        static.__dict__.update(self.prepare(layout).__dict__)
        self.filled.append(len(layout.counts))


def eager_capture(function: Callable[[], Any]) -> tuple[Any, Replayable]:
    """Runs the function again at each replay and copies what it makes into the memory of the first run."""
    static = function()

    class Graph:
        def replay(self) -> None:
            for old, new in zip(tensors(static), tensors(function()), strict=True):
                old.copy_(new)

    return static, Graph()


def tensors(result: ForwardState | torch.Tensor) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    assert result.pending is not None
    return [result.hidden, result.pending]


@pytest.mark.usefixtures("torch_alone")
def test_decode_graphs_pad_to_their_sizes(checkpoints: dict[str, Path], expected: dict[str, list[list[int]]]) -> None:
    executor = Executor("cpu", 4, MERGED_BYTES, 12, capture=eager_capture)
    backend = StaticTorchBackend(torch.device("cpu"))
    executor._preparation.backends = [backend]
    shape = load(executor, checkpoints["llama"])
    driver = Driver(executor, shape, range(4))
    rows = [driver.add(i, prompt_of(n)) for i, n in enumerate(LENGTHS)]
    driver.step([(r, len(r.tokens)) for r in rows])
    for _ in range(3):
        for group in (rows, rows[:3], rows[3:], rows[1:3]):
            driver.step([(r, 1) for r in group])
    while unfinished := [r for r in rows if len(r.output) < STEPS]:
        driver.step([(r, 1) for r in unfinished])
    assert [r.output[:STEPS] for r in rows] == expected["llama"]
    assert set(backend.filled) == {1, 2, 4}


@pytest.mark.gpu
@NEEDS_CUDA
def test_graphs_on_cuda_make_the_tokens_of_steps_without(tmp_path: Path) -> None:
    """Greedy and drawn; with a head size that FlashInfer has kernels for, where it is installed."""
    path = write_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, head_dim=64)
    outputs = []
    for with_graphs in (True, False):
        executor = Executor("cuda", 16, 1 << 20, 12)
        driver = Driver(executor, load(executor, path, "m"), range(16))
        if not with_graphs:
            executor._models["m"].graphs = None
        elif len(executor._preparation.backends) > 1:
            graphs = executor._models["m"].graphs
            assert graphs is not None and graphs.num_captured == 5
        rows = [driver.add(i, prompt_of(n), temperature=0.7 * (i % 2), seed=i) for i, n in enumerate(LENGTHS)]
        driver.step([(row, len(row.tokens)) for row in rows])
        driver.decode(rows, STEPS)
        driver.decode(rows[::2], STEPS)
        outputs.append([row.output for row in rows])
    assert outputs[0] == outputs[1]


def test_flashinfers_graphs_make_the_tokens_of_steps_without(tmp_path: Path) -> None:
    """With kernels in plain torch: padding, planning and static memory are those of CUDA."""
    path = write_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, head_dim=64)
    outputs, num_plans = [], []
    for capture in (eager_capture, None):
        executor = Executor("cpu", 16, 1 << 20, 12, capture=capture)
        device = torch.device("cpu")
        executor._preparation.backends = [FlashInferBackend(device, TorchBackend(device), fake_flashinfer)]
        shape = load(executor, path, "m")
        graphs = executor._models["m"].graphs
        assert (graphs is None) == (capture is None)
        driver = Driver(executor, shape, range(16))
        rows = [driver.add(i, prompt_of(n), temperature=0.7 * (i % 2), seed=i) for i, n in enumerate(LENGTHS)]
        driver.step([(row, len(row.tokens)) for row in rows])
        for group in (rows, rows[:3], rows[2:], rows[1:2]):
            driver.decode(group, 2)
        outputs.append([row.output for row in rows])
        num_plans.append(len(executor._preparation.backends[0]._wrappers))
    assert outputs[0] == outputs[1]
    assert num_plans == [1, 2], "prompts, and decodes without graphs, which have wrappers of their own"


@pytest.mark.gpu
@NEEDS_CUDA
def test_launching_waits_for_nothing_on_the_device(checkpoints: dict[str, Path]) -> None:
    executor = Executor("cuda", 8, 1 << 20, 12)
    driver = Driver(executor, load(executor, checkpoints["llama"]), range(8))
    fields = {"temperature": 0.7, "top_p": 0.9, "logprobs": 3, "logit_bias": ((5, 1.0),), "repetition_penalty": 1.1}
    row = driver.add(0, prompt_of(40), **fields)
    driver.step([(row, 40)])
    launch = executor.launch

    def checked(plan: StepPlan) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    executor.launch = checked  # type: ignore[method-assign]
    driver.decode([row], 3)
    assert len(row.output) == 4


@pytest.mark.usefixtures("torch_alone")
def test_graphs_are_captured_before_the_model_serves_the_largest_first(checkpoints: dict[str, Path]) -> None:
    sizes: list[int] = []

    def capture(function: Callable[[], Any]) -> tuple[Any, Replayable]:
        result, graph = eager_capture(function)
        sizes.append(len(tensors(result)[0]))
        assert tensors(result)[0].isfinite().all(), "padding rows read NaN"
        return result, graph

    executor = Executor("cpu", 4, MERGED_BYTES, 12, capture=capture)
    executor._store.slab.fill_(0xFF)
    executor._preparation.backends = [StaticTorchBackend(torch.device("cpu"))]
    shape = load(executor, checkpoints["llama"])
    assert sizes == [16, 16, 8, 8, 4, 4, 2, 2, 1, 1], "layers, and the most likely tokens"
    driver = Driver(executor, shape, range(4))
    driver.decode([driver.add(0, prompt_of(5))], 3)
    assert len(sizes) == 10


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize(("most", "tried"), [(8, [16, 8, 4]), (4, [16, 8, 4]), (3, [16, 8, 4]), (0, [16, 8, 4])])
def test_where_a_graph_cannot_be_captured_steps_run_without(
    checkpoints: dict[str, Path], expected: dict[str, list[list[int]]], most: int, tried: list[int]
) -> None:
    """Smaller ones may still be: of half as many rows or less, until three were tried in vain."""
    sizes: list[int] = []

    def capture(function: Callable[[], Any]) -> tuple[Any, Replayable]:
        result, graph = eager_capture(function)
        sizes.append(len(tensors(result)[0]))
        if sizes[-1] > most:
            raise RuntimeError("out of memory")
        return result, graph

    executor = Executor("cpu", 4, MERGED_BYTES, 12, capture=capture)
    backend = StaticTorchBackend(torch.device("cpu"))
    executor._preparation.backends = [backend]
    driver = Driver(executor, load(executor, checkpoints["llama"]), range(4))
    assert list(dict.fromkeys(sizes))[: len(tried)] == tried and (most > 3 or sizes[-1] == 4)
    rows = [driver.add(i, prompt_of(n)) for i, n in enumerate(LENGTHS)]
    driver.step([(row, len(row.tokens)) for row in rows])
    driver.decode(rows, 2)
    driver.decode(rows[:1], STEPS - 3)
    assert [row.output for row in rows] == [
        tokens[: len(row.output)] for row, tokens in zip(rows, expected["llama"], strict=True)
    ]
    replayed = {8: {4, 1}, 4: {4, 1}, 3: set(), 0: set()}[most]
    assert set(backend.filled) == replayed


class FirstOfTwo(Alone):
    """The other rank can go on so many times, and then not: to allocate for a size, to record its layers, and its head."""

    size = 2

    def __init__(self, num_times: int) -> None:
        self.num_left = num_times

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (1,):
            self.num_left -= 1
            return tensor + float(self.num_left >= 0)
        return tensor


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize(("num_times", "num_captured"), [(4, 1), (5, 1), (6, 2), (99, 5), (0, 0)])
def test_ranks_capture_the_sizes_that_all_of_them_can(
    checkpoints: dict[str, Path], num_times: int, num_captured: int
) -> None:
    def executor_of(group: Alone, capture: Capture) -> Executor:
        executor = Executor("cpu", 4, MERGED_BYTES, 12, capture=capture, group=group, shared=RankMemory.create(2, 0))
        executor._preparation.backends = [StaticTorchBackend(torch.device("cpu"))]
        return executor

    def fails(_: Callable[[], Any]) -> tuple[Any, Replayable]:
        raise RuntimeError("out of memory")

    for capture, expected in ((eager_capture, num_captured), (fails, 0)):
        executor = executor_of(FirstOfTwo(num_times), capture)
        load(executor, checkpoints["llama"])
        graphs = executor._models["llama"].graphs
        assert graphs is not None and graphs.num_captured == expected


def test_the_warm_up_covers_long_prompts_and_many_sequences_on_cuda(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[int, int]] = []
    prepare = TorchBackend.prepare

    def noted(self: TorchBackend, layout: BatchLayout) -> Any:
        ran.append((len(layout.counts), int(layout.counts.max())))
        return prepare(self, layout)

    monkeypatch.setattr(TorchBackend, "prepare", noted)
    monkeypatch.setitem(WARM_UP, "cpu", WARM_UP["cuda"])
    Executor("cpu", 4, MERGED_BYTES, 12).prepare_model(ModelSpec("m", str(checkpoints["llama"])))
    assert ran == [(1, 2), (1, 1), (1, 256), (257, 1)], "no longer than the model's sequences"
    assert WARM_UP["cuda"][2][2] == 512


def test_graphs_of_a_back_end_without_capture_are_not_used(
    checkpoints: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    executor = Executor("cpu", 4, MERGED_BYTES, 12, capture=eager_capture)
    driver = Driver(executor, load(executor, checkpoints["llama"]), range(4))
    row = driver.add(3, prompt_of(LENGTHS[2]))
    driver.step([(row, LENGTHS[2])])
    driver.decode([row], STEPS - 1)
    assert row.output == expected["llama"][2]


def test_a_sequence_goes_on_where_its_blocks_were_copied_to(
    checkpoints: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    """Blocks that are claimed before they are written keep what was written, where the model computes in their merged block
    for the first time after it."""
    source, target = Executor("cpu", 6, MERGED_BYTES, 4), Executor("cpu", 6, MERGED_BYTES, 4, num_host_merged=1)
    target._store.slab.fill_(0xFF)
    drivers = [Driver(executor, load(executor, checkpoints["llama"]), range(6)) for executor in (source, target)]
    moved = drivers[0].add(0, prompt_of(LENGTHS[1]))
    drivers[0].step([(moved, LENGTHS[1])])
    drivers[0].decode([moved], 4)
    free = drivers[1].free
    blocks = [free.pop() for _ in moved.blocks]
    assert target.claim_blocks("llama", blocks) is None, "there is no device to wait for"
    from_rows, to_rows = source.block_rows("llama", on_host=False), target.block_rows("llama", on_host=False)
    assert from_rows.shape == to_rows.shape and from_rows.dtype == torch.uint8
    assert len(to_rows) == 6 * drivers[1].shape.blocks_per_merged
    for mine, theirs in zip(moved.blocks, blocks, strict=True):
        to_rows[theirs] = from_rows[mine]
    moved.blocks, moved.announced, moved.row = blocks, False, 3
    drivers[1].decode([moved], STEPS - len(moved.output))
    assert moved.output == expected["llama"][1]
    assert len(source.block_rows("llama", on_host=True)) == 0
    assert len(target.block_rows("llama", on_host=True)) == drivers[1].shape.blocks_per_merged
    with pytest.raises(KeyError):
        target.claim_blocks("opt", [0])


class _Queue:
    """A device's queue: an event recorded is known by what was queued before it."""

    def __init__(self, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_zeroed = 0
        claim = executor._store.claim

        def counted(*arguments: Any) -> bool:
            zeroed = claim(*arguments)
            self.num_zeroed += zeroed
            return zeroed

        monkeypatch.setattr(executor._store, "claim", counted)
        monkeypatch.setattr(executor, "_mark", lambda: ("after zeroing", self.num_zeroed))


def test_writes_to_claimed_blocks_wait_for_zeroing_by_an_earlier_step(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that first used the merged block may still be in the device's queue."""
    executor = Executor("cpu", 6, MERGED_BYTES, 4)
    driver = Driver(executor, load(executor, checkpoints["llama"]), range(6))
    _Queue(executor, monkeypatch)
    assert executor.claim_blocks("llama", []) is None
    row = driver.add(0, prompt_of(5))
    driver.step([(row, 5)])
    per_merged = driver.shape.blocks_per_merged
    first = row.blocks[0] // per_merged * per_merged
    others = [block for block in range(first, first + per_merged) if block not in row.blocks]
    assert executor.claim_blocks("llama", others) == ("after zeroing", 1)
    elsewhere = (first + per_merged) % (6 * per_merged)
    assert executor.claim_blocks("llama", [elsewhere]) == ("after zeroing", 2)


def test_a_sequence_goes_on_when_its_blocks_were_moved(checkpoints: dict[str, Path]) -> None:
    """Between two steps; what was left behind is another model's at once."""
    outputs = []
    for moves in (False, True):
        executor = Executor("cpu", 6, MERGED_BYTES, 4)
        driver = Driver(executor, load(executor, checkpoints["llama"]), range(3))
        other = Driver(executor, load(executor, checkpoints["opt"]), range(3, 6))
        row = driver.add(0, prompt_of(100))
        driver.step([(row, 100)])
        driver.decode([row], 3)
        if moves:
            per_merged = driver.shape.blocks_per_merged
            blocks = row.blocks[:]
            targets = [4 * per_merged - 1 - index for index in range(len(blocks))]
            tables = [(0, index, block) for index, block in enumerate(targets)]
            executor.start_copy(KvCopy(1, CopyKind.MOVE, "llama", blocks, [], targets, tables))
            assert [ended[:2] for ended in executor.finished_copies()] == [(1, True)]
            taken = other.add(1, prompt_of(30))
            other.free = [
                merged * other.shape.blocks_per_merged for merged in {block // per_merged for block in blocks}
            ]
            other.step([(taken, 30)])
            row.blocks = targets
            driver.free = [5 * per_merged - 1 - index for index in range(per_merged)]
        driver.decode([row], 40)
        outputs.append(row.output)
    assert outputs[0] == outputs[1]


def test_a_move_that_cannot_be_raises(checkpoints: dict[str, Path]) -> None:
    executor = Executor("cpu", 6, MERGED_BYTES, 4)
    driver = Driver(executor, load(executor, checkpoints["llama"]), range(3))
    row = driver.add(0, prompt_of(5))
    driver.step([(row, 5)])
    blocks, num_blocks = row.blocks[:1], 6 * driver.shape.blocks_per_merged
    with pytest.raises(IndexError):
        executor.start_copy(KvCopy(1, CopyKind.MOVE, "llama", [num_blocks], [], blocks))
    with pytest.raises(KeyError):
        executor.start_copy(KvCopy(1, CopyKind.MOVE, "opt", [0], [], [0]))


def test_copies_and_writes_wait_for_moves_before_them(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device they are on other queues than the steps, between which blocks are moved."""
    executor = Executor("cpu", 6, MERGED_BYTES, 4, num_host_merged=1)
    driver = Driver(executor, load(executor, checkpoints["llama"]), range(1))
    row = driver.add(0, prompt_of(5))
    driver.step([(row, 5)])
    marks = iter(range(100))
    monkeypatch.setattr(executor, "_mark", lambda: next(marks))
    begun: list[Any] = []
    monkeypatch.setattr(executor.copies, "start", lambda copy, _views, after: begun.append((copy.kind, after)))
    monkeypatch.setattr(executor.copies, "await_move", lambda copy, _views, end: begun.append((copy.kind, end)))
    (block,), target = row.blocks, driver.free[0]
    executor.start_copy(KvCopy(0, CopyKind.MOVE, "llama", [block], [], [target], [(0, 0, target)]))
    executor.start_copy(KvCopy(1, CopyKind.CHECKPOINT, "llama", [target], [0]))
    executor.start_copy(KvCopy(2, CopyKind.RESTORE, "llama", [block], [0]))
    assert begun == [(CopyKind.MOVE, 0), (CopyKind.CHECKPOINT, 0), (CopyKind.RESTORE, 0)]
    assert executor.claim_blocks("llama", [block]) == 0


def test_a_model_whose_logits_are_no_numbers_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama")
    file = next(path.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    save_file({**tensors, name: torch.full_like(tensors[name], float("nan"))}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="logits are NaN"):
        Executor("cpu", 4, MERGED_BYTES, 2).prepare_model(ModelSpec("llama", str(path)))


DRAWN = {"temperature": 0.9, "top_k": 5, "seed": 3, "logprobs": 2}


def write_lame(folder: Path, variant: str = "llama", token: int = 7) -> Path:
    """A checkpoint that makes NaN of what follows one token alone."""
    path = write_checkpoint(folder, variant)
    file = next(path.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    # The head of its own keeps the token's logit a number for everybody else.
    tensors.setdefault("lm_head.weight", tensors[name].clone())
    tensors[name][token] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return path


@ON_EACH_DEVICE
@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        ("compiled", {}),
        ("torch", DRAWN),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("compiled", DRAWN), ("torch", {}), ("deterministic", {}), ("deterministic", DRAWN))
        ),
    ],
)
def test_a_sequence_without_numbers_gets_no_token_and_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, sampling: dict[str, Any], device: str
) -> None:
    """Beside it, after it in its blocks, and where steps that compute it are still in flight."""
    if kind == "torch":
        monkeypatch.setattr(library, "_team_of", lambda num_threads: None)
    # The compiled kernels take heads of 16 only.
    path, prompts = write_lame(tmp_path, "qwen3" if kind == "compiled" else "llama"), [prompt_of(n) for n in (40, 9)]
    prompts = [[token + (token == 7) for token in prompt] for prompt in prompts]
    outputs = []
    for has_lame in (False, True):
        executor = Executor(device, 1, MERGED_BYTES, 3, deterministic=kind == "deterministic")
        driver = Driver(executor, load(executor, path), range(1))
        others = [driver.add(row, prompt, **sampling) for row, prompt in enumerate(prompts)]
        if has_lame:
            lame = driver.add(2, [3, 7, *prompts[0]], **sampling)
            driver.step([(lame, len(lame.tokens)), (others[0], len(prompts[0]))])
            driver.step([(lame, 1), (others[0], 1)])
            assert lame.output == [NO_TOKEN] * 2
            driver.free += lame.blocks
        else:
            driver.step([(others[0], len(prompts[0]))])
            driver.step([(others[0], 1)])
        driver.step([(others[1], len(prompts[1]))])
        driver.decode(others, 5)
        outputs.append([row.output for row in others])
        executor.close()
    assert outputs[0] == outputs[1] and not any(NO_TOKEN in output for output in outputs[0])


def test_a_model_is_checked_while_it_serves(tmp_path: Path) -> None:
    executor = Executor("cpu", 4, MERGED_BYTES, 2)
    shape = load(executor, write_lame(tmp_path))
    assert executor.is_sound(shape.name), "one token of its vocabulary does not make it useless"
    with torch.inference_mode():
        executor._models[shape.name].model._norm.fill_(float("nan"))  # type: ignore[operator]
    assert not executor.is_sound(shape.name)


def test_a_model_that_could_not_be_added_may_come_again(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Executor("cpu", 4, MERGED_BYTES, 2)
    prepared = executor.prepare_model(ModelSpec("llama", str(checkpoints["llama"])))
    rows = executor._rows
    with monkeypatch.context() as patched:
        patched.setattr(rows, "widen", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            executor.add_model(prepared)
    assert executor.add_model(prepared).name == "llama"
