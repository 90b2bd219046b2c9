"""Executors on a CUDA device: every kind of model, in graphs and without, several at once, and what goes on beside their
steps. On a real one, or on the emulated one (tests/emulated_cuda), which also sees that everything is ordered."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from services.worker.executor.executor import Executor
from services.worker.kv_transport import KvTransport
from shared.engine.plan import CopyKind, KvCopy, ModelShape, NewSequence, StepPlan
from shared.messages.cluster import ModelSpec
from shared.messages.requests import pack_tokens
from tests.worker.adapters import ALL, write_adapter
from tests.worker.checkpoints import BY_TRANSFORMERS, prompt_of, reference_outputs, write_checkpoint
from tests.worker.kv_transport.local import LocalHub, LocalNetwork
from tests.worker.step_driver import Driver, Row
from tests.worker.test_draft_model import run, similar

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
BF16 = {"dtype": torch.bfloat16}
MERGED_BYTES = 1 << 20
LENGTHS = (5, 40, 60)
SIZES = 5
"""Sizes of graphs for 12 rows: 1, 2, 4, 8, 16."""


def executor_of(**options: Any) -> Executor:
    return Executor("cuda", 16, MERGED_BYTES, 12, **options)


def load(executor: Executor, path: Path, name: str = "m", **spec: Any) -> ModelShape:
    return executor.add_model(executor.prepare_model(ModelSpec(name, str(path), **spec)))


def graphs_of(executor: Executor, name: str = "m") -> int:
    graphs = executor._models[name].graphs
    return 0 if graphs is None else graphs.num_captured


def generated(driver: Driver, lengths: tuple[int, ...] = LENGTHS, steps: int = 4, **fields: Any) -> list[Row]:
    """Prompts in two chunks, then decodes of all and of some."""
    rows = [driver.add(i, prompt_of(n), **fields) for i, n in enumerate(lengths)]
    driver.step([(row, max(1, len(row.tokens) // 2)) for row in rows])
    driver.step([(row, len(row.tokens) - row.computed) for row in rows])
    driver.decode(rows, steps)
    driver.decode(rows[::2], 2)
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def small(folder: Path) -> Path:
    """With heads that FlashInfer has kernels for: in graphs."""
    return write_checkpoint(folder / "small", "qwen3", head_dim=64, **BF16)


# ------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    "variant", ["gemma2", "gemma3", "phi3", "llama-dynamic", "mixtral", "qwen3-moe", *BY_TRANSFORMERS]
)
def test_models_make_the_tokens_of_transformers(folder: Path, variant: str) -> None:
    """In float32, which torch computes; whatever the model is run by."""
    path = write_checkpoint(folder / "wide", variant)
    executor = executor_of()
    rows = generated(Driver(executor, load(executor, path), range(16)))
    assert [row.output[:5] for row in rows] == reference_outputs(path, [prompt_of(n) for n in LENGTHS], 5)


@pytest.mark.parametrize(
    ("variant", "changes", "quantization", "num_graphs"),
    [
        pytest.param("qwen3", {"head_dim": 64}, "", SIZES, marks=pytest.mark.long),
        ("qwen3", {"head_dim": 64}, "fp8", SIZES),
        pytest.param("qwen3", {"head_dim": 64}, "int8", SIZES, marks=pytest.mark.long),
        pytest.param("qwen3-moe", {"head_dim": 64}, "", SIZES, marks=pytest.mark.long),
        pytest.param("qwen3-moe", {"head_dim": 64}, "int8", 0, marks=pytest.mark.long),
        ("qwen3-moe", {"head_dim": 64}, "fp8", 0),
        ("gemma3", {"head_dim": 64}, "", SIZES),
        pytest.param("gpt2", {"n_embd": 128, "n_head": 2}, "", SIZES, marks=pytest.mark.long),
        ("llama-dynamic", {"head_dim": 64}, "", SIZES),
    ],
)
def test_graphs_make_the_tokens_of_steps_without(
    folder: Path,
    variant: str,
    changes: dict[str, Any],
    quantization: str,
    num_graphs: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_checkpoint(folder / f"{variant}-{quantization}", variant, **changes, **BF16)
    outputs = []
    for with_graphs in (True, False):
        executor = executor_of()
        shape = load(executor, path, quantization=quantization)
        assert graphs_of(executor) == num_graphs
        if not with_graphs:
            executor._models["m"].graphs = None
        rows = generated(Driver(executor, shape, range(16)), temperature=0.7, seed=3, top_p=0.9, top_k=50, logprobs=2)
        outputs.append([row.output for row in rows])
    assert outputs[0] == outputs[1]
    assert "run without CUDA graphs: CUDA error" not in caplog.text, "what waits for the device is not tried"


def test_adapters_beside_their_model(folder: Path) -> None:
    """Rows with adapters and without in one step; a row with one is not replayed, and computes what it does elsewhere."""
    path = write_checkpoint(folder / "adapted", "llama")
    adapter = write_adapter(folder / "adapter", path, ALL)
    outputs = []
    for where in ("cpu", "cuda"):
        executor = Executor(where, 16, MERGED_BYTES, 12)
        driver = Driver(executor, load(executor, path), range(16))
        executor.load_adapter("m", adapter)
        rows = [driver.add(i, prompt_of(n), adapter=adapter.version if i % 2 else "") for i, n in enumerate(LENGTHS)]
        driver.step([(row, len(row.tokens)) for row in rows])
        driver.decode(rows, 4)
        outputs.append([row.output for row in rows])
    assert outputs[0] == outputs[1]


def test_an_adapter_goes_while_a_step_with_it_is_on_the_device(folder: Path) -> None:
    path = write_checkpoint(folder / "dropped", "llama")
    executor = executor_of()
    driver = Driver(executor, load(executor, path), range(16))
    adapter = write_adapter(folder / "of dropped", path, ALL)
    executor.load_adapter("m", adapter)
    row = driver.add(0, prompt_of(20), adapter=adapter.version)
    driver.step([(row, 20)])
    executor.launch(plan_of(700, "m", [row], 0))
    executor.drop_adapter(adapter.version)
    assert len(executor.collect().tokens) == 1


def plan_of(step_id: int, model: str, rows: list[Row], ahead: int) -> StepPlan:
    return StepPlan(
        step_id=step_id, model=model, rows=[row.row for row in rows], starts=[row.computed + ahead for row in rows],
        counts=[1] * len(rows), samples=[True] * len(rows), new_sequences=[], new_blocks=[],
    )  # fmt: skip


def in_flight(executor: Executor, drivers: list[tuple[Driver, list[Row]]], steps: int, depth: int) -> list[list[int]]:
    """Decodes of several models in turn, so many steps launched before the oldest is collected."""
    results: list[list[int]] = []
    number = 10_000
    for step in range(steps):
        for driver, rows in drivers:
            if executor.num_in_flight == depth:
                results.append(executor.collect().tokens)
            executor.launch(plan_of(number := number + 1, driver.shape.name, rows, step))
    while executor.num_in_flight:
        results.append(executor.collect().tokens)
    return results


def prefilled(
    executor: Executor, shape: ModelShape, merged: range, first_row: int, **fields: Any
) -> tuple[Driver, list[Row]]:
    driver = Driver(executor, shape, merged)
    rows = [driver.add(first_row + i, prompt_of(n), seed=i, **fields) for i, n in enumerate(LENGTHS)]
    driver.step([(row, len(row.tokens)) for row in rows])
    return driver, rows


def test_two_models_with_two_steps_in_flight(folder: Path, small: Path) -> None:
    other = write_checkpoint(folder / "window", "mistral-window", **BF16)
    outputs = []
    for depth in (2, 1):
        executor = executor_of()
        drivers = [
            prefilled(executor, load(executor, small, "a"), range(8), 0, temperature=0.7),
            prefilled(executor, load(executor, other, "b"), range(8, 16), 4),
        ]
        outputs.append(in_flight(executor, drivers, 8, depth))
    assert outputs[0] == outputs[1] and len(outputs[0]) == 16


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.long), {"steps_in_flight": 2}])
def test_drafts_of_a_model_change_no_token(folder: Path, small: Path, options: dict[str, Any]) -> None:
    """Passes of the draft model, in graphs and without, before the steps that score their tokens."""
    draft = folder / f"draft {len(options)}"
    similar(small, draft, 0.02)
    wishes: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7, "top_p": 0.9}]
    here: dict[str, Any] = {"device": "cuda", "merged_bytes": MERGED_BYTES, "num_merged": 16, **options}
    expected, _, num_plain_steps = run(small, None, wishes, **here)
    got, engine, num_steps = run(small, draft, wishes, **here)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    assert engine.counters.accepted_tokens["m"] > 10 and num_steps < num_plain_steps


# ------------------------------------------------------------------------------------------------- beside the steps


def copied(executor: Executor, copy: KvCopy, meanwhile: Callable[[], object]) -> None:
    done = threading.Event()
    executor.on_copy_finished(done.set)
    executor.start_copy(copy)
    meanwhile()
    assert done.wait(20)
    assert [ended[:2] for ended in executor.finished_copies()] == [(copy.copy_id, True)]


def checkpoint_and_restore(executor: Executor, shape: ModelShape) -> None:
    driver, rows = prefilled(executor, shape, range(8), 0)
    source, target = rows[2].blocks[:1], [12 * shape.blocks_per_merged]
    copied(executor, KvCopy(1, CopyKind.CHECKPOINT, "m", source, [0]), lambda: driver.decode(rows[:2], 2))
    kept_at_once = executor.block_rows("m", on_host=True)
    assert isinstance(kept_at_once, torch.Tensor) and kept_at_once[0].numpy().any()
    copied(executor, KvCopy(2, CopyKind.RESTORE, "m", target, [0]), lambda: driver.decode(rows[:2], 2))
    cells, kept = executor.block_rows("m", on_host=False), executor.block_rows("m", on_host=True)
    assert isinstance(cells, torch.Tensor) and isinstance(kept, torch.Tensor)
    # What is reported is complete, for whoever looks: nothing is waited for here.
    assert kept[0].numpy().any() and torch.equal(cells[source[0]], cells[target[0]])
    in_flight(executor, [(driver, rows)], 6, 2)
    executor.close()


def test_checkpoints_are_copied_beside_steps(small: Path) -> None:
    executor = executor_of(num_host_merged=4)
    checkpoint_and_restore(executor, load(executor, small))


async def test_a_request_goes_on_from_copies_in_the_host_memory_of_another(small: Path) -> None:
    """Blocks go from a device into another instance's host memory while steps run, and from there onto its device."""
    source, holder = executor_of(), executor_of(num_host_merged=4)
    driver, rows = prefilled(source, load(source, small), range(8), 0)
    shape = load(holder, small)
    lost = driver.add(3, prompt_of(shape.block_size + 20))
    driver.step([(lost, len(lost.tokens))])
    num_full = lost.computed // shape.block_size
    on_device, on_host = source.block_rows("m", on_host=False), holder.block_rows("m", on_host=True)
    assert isinstance(on_device, torch.Tensor) and isinstance(on_host, torch.Tensor) and num_full
    torch.cuda.synchronize()  # an instance asks its loop whether they are filled
    hub = LocalHub()
    ends = [KvTransport(LocalNetwork(hub)) for _ in range(2)]
    for transport, blocks in zip(ends, (on_device, on_host), strict=True):
        await transport.open()
        transport.register("m", blocks)
    incoming = ends[1].expect("m", range(num_full), deadline_s=30)
    sending = ends[0].send(ends[1].address, incoming.ticket, "m", lost.blocks[:num_full], deadline_s=30)
    driver.decode(rows[:2], 2)
    await asyncio.gather(sending, incoming.wait())
    for transport in ends:
        await transport.close()
    known = list(lost.tokens)
    driver.decode([lost], 6)
    other = Driver(holder, shape, range(8))
    again = other.add(5, known)
    again.num_prompt, again.blocks = lost.num_prompt, [other.free.pop() for _ in range(num_full)]
    again.computed = num_full * shape.block_size
    copied(holder, KvCopy(1, CopyKind.RESTORE, "m", again.blocks, list(range(num_full))), lambda: None)
    other.step([(again, len(known) - again.computed)])
    other.decode([again], 5)
    assert again.output == lost.output
    for executor in (source, holder):
        executor.close()


def test_a_block_is_moved_and_copied_at_once(small: Path) -> None:
    """The copy waits for the move, which waits for the steps."""
    executor = executor_of(num_host_merged=4)
    shape = load(executor, small)
    driver, rows = prefilled(executor, shape, range(8), 0)
    source, target = rows[2].blocks[0], 12 * shape.blocks_per_merged
    in_flight(executor, [(driver, rows)], 2, 2)
    ended: queue.Queue[int] = queue.Queue()
    executor.on_copy_finished(lambda: ended.put(1))
    executor.start_copy(
        KvCopy(1, CopyKind.MOVE, "m", [source], [], target_blocks=[target], tables=[(rows[2].row, 0, target)])
    )
    executor.start_copy(KvCopy(2, CopyKind.CHECKPOINT, "m", [target], [0]))
    for _ in range(2):
        ended.get(timeout=20)
    finished = executor.finished_copies()
    assert sorted(ended[:2] for ended in finished) == [(1, True), (2, True)]
    cells, kept = (executor.block_rows("m", on_host=on_host) for on_host in (False, True))
    assert isinstance(cells, torch.Tensor) and isinstance(kept, torch.Tensor)
    assert torch.equal(cells[target].cpu(), kept[0]) and torch.equal(cells[source].cpu(), kept[0])
    executor.close()


def test_copies_under_way_end_with_their_executor(small: Path) -> None:
    executor = executor_of(num_host_merged=8)
    shape = load(executor, small)
    _, rows = prefilled(executor, shape, range(8), 0)
    for number in range(20):
        executor.start_copy(KvCopy(number, CopyKind.CHECKPOINT, "m", rows[2].blocks[:1], [number % 8]))
    executor.close()


def test_a_step_is_suspended_and_goes_on(small: Path) -> None:
    """Another runs meanwhile, of graphs and of prompts."""
    expected = None
    for stop_share in (1.0, 0.4):
        executor = executor_of(layers_per_safepoint=1)
        shape = load(executor, small)
        driver, rows = prefilled(executor, shape, range(8), 0)
        prompt = prompt_of(70)
        blocks = [9 * shape.blocks_per_merged, 10 * shape.blocks_per_merged]
        sampling = driver.add(0, prompt).sampling
        plan = StepPlan(
            step_id=500, model="m", rows=[8], starts=[0], counts=[len(prompt)], samples=[True],
            new_sequences=[NewSequence(8, pack_tokens(prompt), len(prompt), sampling, blocks)], new_blocks=[],
            is_interruptible=True, stop_share=stop_share,
        )  # fmt: skip
        result = executor.execute(plan)
        assert (result.suspended_share > 0) == (stop_share < 1)
        driver.decode(rows, 3)
        driver.step([(row := driver.add(9, prompt_of(33)), 33)])
        if stop_share < 1:
            resumed = msgspec.structs.replace(plan, resumes=True, new_sequences=[], stop_share=1.0)
            result = executor.execute(resumed)
        assert result.error == "" and len(row.output) == 1
        expected = expected or result.tokens
        assert result.tokens == expected
        executor.close()


def test_a_model_is_loaded_beside_steps(folder: Path, small: Path) -> None:
    other = write_checkpoint(folder / "beside", "llama", head_dim=64, **BF16)
    executor = executor_of()
    driver, rows = prefilled(executor, load(executor, small), range(8), 0)
    steps, prepared = meanwhile(executor, other, lambda: driver.decode(rows, 1))
    assert steps > 3
    later, others = prefilled(executor, executor.add_model(prepared), range(8, 14), 4)
    assert graphs_of(executor, "b") == SIZES
    later.decode(others, 2)
    driver.decode(rows, 1)
    executor.close()


def meanwhile(executor: Executor, path: Path, act: Callable[[], object]) -> tuple[int, Any]:
    """How often `act` was called while another thread prepared the checkpoint as model `b`, and what came of that."""
    prepared: list[Any] = []
    thread = threading.Thread(target=lambda: prepared.append(executor.prepare_model(ModelSpec("b", str(path)))))
    thread.start()
    count = 0
    while thread.is_alive():
        act()
        count += 1
    return count, prepared.pop()
