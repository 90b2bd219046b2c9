"""A model on two emulated devices, one thread each, whose calls to each other go through a NCCL that checks their order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from services.worker.executor.executor import Executor, region_bytes
from services.worker.ranks.group import GroupError, Ranks
from services.worker.ranks.shared_memory import RankMemory
from shared.engine.plan import ModelShape, StepPlan, StepResult
from shared.messages.cluster import ModelSpec
from tests.emulated_cuda.tensors import device
from tests.worker.checkpoints import prompt_of, reference_outputs, write_checkpoint
from tests.worker.step_driver import Driver

pytestmark = pytest.mark.gpu
T = TypeVar("T")
NUM_MERGED, MERGED_BYTES, NUM_ROWS, STEPS = 8, 1 << 19, 4, 5
LENGTHS = (5, 40, 33)
TIMEOUT_S = 60.0


class Rank:
    """A thread that computes on a device of its own."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.executor: Executor
        self.group: Ranks
        self._work: queue.Queue[tuple[Callable[[Rank], Any], Future[Any]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=f"rank {index}")
        self._thread.start()

    def _run(self) -> None:
        torch.cuda.set_device(self.index)
        while (work := self._work.get()) is not None:
            function, future = work
            try:
                future.set_result(function(self))
            except BaseException as error:
                future.set_exception(error)

    def begin(self, function: Callable[[Rank], T]) -> Future[T]:
        future: Future[T] = Future()
        self._work.put((function, future))
        return future

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()


class Pair:
    """Both ranks, as one executor."""

    def __init__(self, folder: Path, num_stages: int = 1, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: of a call of one to the other."""
        self.ranks = [Rank(index) for index in range(2)]
        size = 2 // num_stages
        part = MERGED_BYTES // size
        memory = RankMemory.create(2, region_bytes(NUM_MERGED, part, 0, 1))

        def join(rank: Rank) -> None:
            stage, of_stage = divmod(rank.index, size)
            where = torch.device("cuda", rank.index)
            rank.group = Ranks(
                of_stage, size, folder / "rendezvous", where, stage=stage, num_stages=num_stages, timeout_s=timeout_s
            )
            rank.executor = Executor(
                where, NUM_MERGED, part, NUM_ROWS, group=rank.group, shared=memory, num_window_merged=1
            )

        self.on_all(join)

    def on_all(self, function: Callable[[Rank], T]) -> list[T]:
        futures = [rank.begin(function) for rank in self.ranks]
        return [future.result(TIMEOUT_S * 3) for future in futures]

    def load(self, path: Path) -> ModelShape:
        spec = ModelSpec("m", str(path))
        shapes = self.on_all(lambda rank: rank.executor.add_model(rank.executor.prepare_model(spec)))
        assert shapes[0] == shapes[1]
        return shapes[0]

    def execute(self, plan: StepPlan) -> StepResult:
        results = self.on_all(lambda rank: rank.executor.execute(plan))
        sampled = [result for result in results if result.tokens]
        assert all(result == sampled[0] for result in sampled)
        if self.ranks[0].group.num_stages > 1 and sampled:
            self.ranks[0].begin(lambda rank: rank.executor.enter_tokens(plan.step_id, sampled[0].tokens)).result(
                TIMEOUT_S
            )
        return sampled[0] if sampled else results[0]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(tmp_path, getattr(request, "param", 1))
    yield made
    made.close()


def tokens(pair: Pair, shape: ModelShape, steps: int = STEPS) -> list[list[int]]:
    driver = Driver(pair, shape, range(NUM_MERGED))  # type: ignore[arg-type]
    rows = [driver.add(i, prompt_of(n)) for i, n in enumerate(LENGTHS)]
    driver.step([(row, len(row.tokens) // 2) for row in rows])
    driver.step([(row, len(row.tokens) - row.computed) for row in rows])
    driver.decode(rows, steps - 1)
    return [row.output for row in rows]


@pytest.mark.parametrize("pair", [1, 2], indirect=True, ids=["tensors", "stages"])
def test_two_devices_make_the_tokens_of_one(pair: Pair, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama")
    found = tokens(pair, pair.load(path))
    assert found == reference_outputs(path, [prompt_of(n) for n in LENGTHS], STEPS)


def test_sums_are_captured_with_the_rest_of_a_decode(pair: Pair, tmp_path: Path) -> None:
    path = write_checkpoint(
        tmp_path, "qwen3", dtype=torch.bfloat16, head_dim=64, num_attention_heads=4, num_key_value_heads=2
    )
    shape = pair.load(path)
    assert pair.on_all(lambda rank: rank.executor._models["m"].graphs.num_captured) == [4, 4]  # type: ignore[union-attr]
    with_graphs = tokens(pair, shape)

    def drop(rank: Rank) -> None:
        rank.executor._models["m"].graphs = None

    pair.on_all(drop)
    assert tokens(pair, shape) == with_graphs


def test_a_rank_that_cannot_capture_keeps_the_others_from_it(pair: Pair, tmp_path: Path) -> None:
    """They go on together, without."""
    path = write_checkpoint(
        tmp_path, "qwen3", dtype=torch.bfloat16, head_dim=64, num_attention_heads=4, num_key_value_heads=2
    )

    def refuse(rank: Rank) -> None:
        if rank.index == 1:
            new_capture = rank.executor._preparation.new_capture
            assert new_capture is not None
            capture = new_capture()

            def failing(function: Callable[[], Any], /) -> Any:
                def and_waits() -> Any:
                    result = function()
                    torch.zeros(1, device="cuda").item()
                    return result

                return capture(and_waits)

            rank.executor._preparation.new_capture = lambda: failing

    pair.on_all(refuse)
    shape = pair.load(path)
    assert pair.on_all(lambda rank: rank.executor._models["m"].graphs.num_captured) == [0, 0]  # type: ignore[union-attr]
    assert len(tokens(pair, shape)[0]) == STEPS


def test_ranks_that_call_in_different_orders_are_found(pair: Pair) -> None:
    def call(rank: Rank) -> None:
        x = torch.ones(4, device=rank.executor.device)
        (rank.group.all_reduce if rank.index else rank.group.all_gather)(x)

    with pytest.raises(GroupError, match="all_gather"):
        pair.on_all(call)
    assert [report.kind for report in device.reports] == ["collective"]
    device.reports.clear()


def test_a_rank_that_calls_alone_ends_at_its_deadline(tmp_path: Path) -> None:
    pair = Pair(tmp_path, timeout_s=0.5)
    call = pair.ranks[0].begin(lambda rank: rank.group.all_reduce(torch.ones(4, device=rank.executor.device)))
    with pytest.raises(GroupError, match=r"waited 0\.5 s"):
        call.result(TIMEOUT_S)
    pair.close()
