"""KV between vLLM's caches and the staging memory, as vLLM's worker copies it; and the engine core's part, on what it uses
of vLLM's scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.worker.engines.moves import mapped
from services.worker.engines.vllm.staging import Staging, StagingWorker
from shared.engines.messages import EngineFacts

NUM_BLOCKS, NUM_SLOTS, BLOCK_SIZE = 10, 4, 32


def worker(seed: int, dtype: torch.dtype = torch.bfloat16) -> StagingWorker:
    torch.manual_seed(seed)
    made = StagingWorker()
    caches = [torch.randn(NUM_BLOCKS, 2, BLOCK_SIZE, 6).to(dtype) for _ in range(3)]
    made.model_runner = SimpleNamespace(kv_caches=caches)
    return made


def test_blocks_come_through_the_staging_memory_of_two_workers_as_they_were() -> None:
    source, destination = worker(1), worker(2)
    before = [cache.clone() for cache in destination.model_runner.kv_caches]
    memories = []
    for one in (source, destination):
        path, block_bytes, layout = one.tideway_open(NUM_SLOTS, NUM_BLOCKS)
        assert block_bytes == 3 * 2 * BLOCK_SIZE * 6 * 2 and "bfloat16 (2, 32, 6)" in layout
        facts = EngineFacts(
            version="1", lacks=(), max_model_len=1, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, block_bytes=block_bytes,
            max_running=1, max_step_tokens=1, staging=path, num_slots=NUM_SLOTS,
        )  # fmt: skip
        memories.append(mapped(facts))
    source.tideway_copy([7, 2], [3, 1], True)
    memories[1][[0, 2]] = memories[0][[3, 1]]  # as the transport does
    destination.tideway_copy([4, 9], [0, 2], False)
    for here, there, old in zip(source.model_runner.kv_caches, destination.model_runner.kv_caches, before, strict=True):
        assert torch.equal(there[[4, 9]], here[[7, 2]])
        others = [block for block in range(NUM_BLOCKS) if block not in (4, 9)]
        assert torch.equal(there[others], old[others])


def test_caches_that_are_not_made_of_blocks_do_not_move() -> None:
    made = worker(1)
    made.model_runner.kv_caches[1] = torch.zeros(2, NUM_BLOCKS, 4)
    with pytest.raises(ValueError, match="are not made of 10 blocks"):
        made.tideway_open(NUM_SLOTS, NUM_BLOCKS)


class Core:
    """Part of vLLM's engine core that `Staging` uses. One sequence, `r`, in the blocks 5, 6 and 7."""

    def __init__(self, num_computed: int = 70, num_free: int = 4) -> None:
        self.copies: list[tuple[list[int], list[int], bool]] = []
        self.finished: list[str] = []
        request = SimpleNamespace(num_computed_tokens=num_computed, num_in_flight_tokens=0)
        self.blocks = {"r": [5, 6, 7]}
        self.num_free = num_free
        self.model_executor = SimpleNamespace(
            collective_rpc=lambda _name, args: self.copies.append(args),
        )
        self.scheduler = SimpleNamespace(
            requests={"r": request}, running=[request], block_size=BLOCK_SIZE,
            finish_requests=lambda key, _status: self.finished.append(key),
            kv_cache_manager=SimpleNamespace(
                get_block_ids=lambda key: (self.blocks[key],), allocate_slots=self.allocate_slots
            ),
        )  # fmt: skip

    def allocate_slots(self, request: Any, num_new_tokens: int) -> object | None:
        count = -(-num_new_tokens // BLOCK_SIZE)
        if count > self.num_free:
            return None
        self.blocks[request.request_id] = list(range(20, 20 + count))
        return object()


def test_only_computed_blocks_are_copied_out() -> None:
    core = Core()
    assert Staging(core).export("r", 0, [0, 1]) and core.copies == [([5, 6], [0, 1], True)]
    assert not Staging(core).export("r", 1, [0, 1]), "the third is not full"
    assert not Staging(core).export("gone", 0, [0])
    assert len(core.copies) == 1


@pytest.mark.parametrize(
    ("first_block", "slots", "found", "copies"),
    [
        (1, [0, 1], [2, 70], [([6, 7], [0, 1], True)]),
        (2, [3, 1], [1, 70], [([7], [3], True)]),
        (1, [0], [1, 64], [([6], [0], True)]),  # there is no slot for the last block
        (2, [], [0, 64], []),
        (3, [0], [-1, -1], []),  # blocks before are lost
    ],
    ids=str,
)
def test_the_rest_is_copied_out_with_the_last_block(
    monkeypatch: pytest.MonkeyPatch, first_block: int, slots: list[int], found: list[int], copies: list[Any]
) -> None:
    status = SimpleNamespace(RequestStatus=SimpleNamespace(FINISHED_ABORTED="aborted"))
    monkeypatch.setitem(__import__("sys").modules, "vllm.v1.request", status)
    core = Core()
    assert Staging(core).take_out("r", first_block, slots) == found
    assert core.copies == copies and core.finished == ["r"]


@pytest.mark.parametrize(("num_free", "num_computed"), [(3, 70), (2, 0)])
def test_one_that_comes_begins_behind_its_kv_if_there_is_room(num_free: int, num_computed: int) -> None:
    core = Core(num_free=num_free)
    request = SimpleNamespace(
        request_id="new", num_tokens=71, num_prompt_tokens=71, num_computed_tokens=0, prefill_stats=None
    )
    Staging(core).bring_in(request, [2, 0, 1], 70)
    assert request.num_computed_tokens == num_computed
    assert core.copies == ([([20, 21, 22], [2, 0, 1], False)] if num_computed else [])
