"""What ranks and stages have of a checkpoint and of KV blocks, in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.attention.interface import BatchLayout
from services.worker.attention.torch_backend import TorchBackend
from services.worker.kv.kv_store import BlockParts, KvStore, WindowedBlocks
from services.worker.kv_transport.staging import KvPool
from services.worker.models.decoder import DecoderModel, ForwardBatch
from services.worker.models.loading import identity_of, load_model
from services.worker.models.weights import WeightReader
from services.worker.ranks.group import Alone, RankGroup
from shared.models.checkpoint import CheckpointError
from shared.models.families import FAMILIES
from tests.worker.checkpoints import prompt_of, write_checkpoint

CPU = torch.device("cpu")
PROMPT = prompt_of(20)


def place(**places: int) -> RankGroup:
    group = Alone()
    for name, value in places.items():
        setattr(group, name, value)
    return group


def load(path: Path, group: RankGroup) -> DecoderModel:
    return load_model(identity_of(path, CPU), CPU, group)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("variant", ["llama-tied-bias", "llama", "opt-post-norm-projected", "opt"])
def test_stages_compute_what_the_whole_model_computes(tmp_path: Path, variant: str, num_stages: int) -> None:
    path = write_checkpoint(tmp_path, variant, num_hidden_layers=4)
    results = []
    for count in (1, num_stages):
        hidden: torch.Tensor | None = None
        models = [load(path, place(stage=stage, num_stages=count)) for stage in range(count)]
        assert sum(model.num_layers for model in models) == 4
        with torch.inference_mode():
            for model in models:
                state = model.forward(batch_of(model), hidden)
                hidden = state.residual
            results.append(models[-1].logits(state, None))
    assert torch.equal(*results)


def batch_of(model: DecoderModel) -> ForwardBatch:
    shape = model.kv_shape(32)
    store = KvStore(1, -(-shape.block_bytes // 64) * 64, CPU)
    views = store.attach(shape, 1)
    layout = BatchLayout(
        np.zeros(1, np.int64), np.array([len(PROMPT)]), np.zeros((1, 1), np.int32), 32, model.dtype, CPU
    )
    backend = TorchBackend(CPU)
    positions = torch.arange(len(PROMPT))
    return ForwardBatch(torch.tensor(PROMPT), positions, views, backend, backend.prepare(layout))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_parts_of_a_tensor_make_the_whole(tmp_path: Path, size: int) -> None:
    """Along the axis of its family's cut; what ranks do not divide is filled up with zeros."""
    path = write_checkpoint(tmp_path, "llama-tied-bias")
    whole = WeightReader(path, CPU, torch.float32)
    parts = [WeightReader(path, CPU, torch.float32, place(rank=r, size=size), FAMILIES[0].cuts) for r in range(size)]
    layer = "model.layers.1."
    for name, shape, axis in (
        ("model.embed_tokens.weight", (211, 48), 0),
        (f"{layer}self_attn.q_proj.weight", (48, 48), 0),
        (f"{layer}self_attn.q_proj.bias", (48,), 0),
        (f"{layer}mlp.down_proj.weight", (48, 80), 1),
    ):
        joined = torch.cat([reader.get(name, *shape) for reader in parts], axis)
        assert torch.equal(joined.narrow(axis, 0, shape[axis]), whole.get(name, *shape))
        assert not joined.narrow(axis, shape[axis], joined.shape[axis] - shape[axis]).any()
    # A sum over the ranks has the bias once; a norm is whole on each.
    biases = [reader.get(f"{layer}mlp.down_proj.bias", 48) for reader in parts]
    assert torch.equal(sum(biases), whole.get(f"{layer}mlp.down_proj.bias", 48))
    norms = [reader.get(f"{layer}input_layernorm.weight", 48) for reader in parts]
    assert all(torch.equal(norm, norms[0]) for norm in norms)
    with pytest.raises(CheckpointError, match=r"has shape \[48, 80\], but config.json asks for \[48, 40\]"):
        parts[0].get(f"{layer}mlp.down_proj.weight", 48, 40)


@pytest.mark.parametrize(
    ("source_shape", "target_shape"),
    [((1, 1), (1, 2)), ((1, 2), (1, 1)), ((1, 2), (1, 4)), ((2, 2), (3, 1)), ((2, 1), (1, 2))],
)
def test_blocks_of_groups_of_any_shape_are_the_same_on_the_way(
    source_shape: tuple[int, int], target_shape: tuple[int, int]
) -> None:
    """(stages, ranks of each). Heads of K and V of each layer come to the rank that has them there."""
    layers, heads, run, num_blocks = 3, 8, 48, 5
    whole = torch.randint(0, 256, (num_blocks, layers, 2, heads, run), dtype=torch.uint8)

    def parts(shape: tuple[int, int], blocks: torch.Tensor) -> tuple[BlockParts, Callable[[], torch.Tensor]]:
        """With a gap between the blocks, as in the slab; and what lies there, whole."""
        num_stages, num_ranks = shape
        stages, views = [], []
        for stage in range(num_stages):
            own = place(stage=stage, num_stages=num_stages).layers_of(layers)
            slabs = [
                torch.zeros(num_blocks, len(own) * 2 * heads // num_ranks * run + 64, dtype=torch.uint8)
                for _ in range(num_ranks)
            ]
            stages.append([slab[:, :-64] for slab in slabs])
            views.append([rows.unflatten(1, (len(own), 2, -1, run)) for rows in stages[-1]])  # type: ignore[no-untyped-call]
            for view, part in zip(views[-1], blocks[:, own.start : own.stop].chunk(num_ranks, 3), strict=True):
                view.copy_(part)
        return BlockParts(stages, heads // num_ranks * run), lambda: torch.cat(
            [torch.cat(ranks, 3) for ranks in views], 1
        )

    source, (target, whole_target) = parts(source_shape, whole)[0], parts(target_shape, torch.zeros_like(whole))
    pools = KvPool(source), KvPool(target)
    assert pools[0].block_bytes == pools[1].block_bytes == layers * 2 * heads * run
    staging = torch.zeros(3 * pools[0].block_bytes, dtype=torch.uint8)
    out, into = [4, 0, 3], [1, 2, 4]
    assert pools[0].gather(out, staging, 64) == pools[1].scatter(into, staging, 64)
    assert torch.equal(whole_target()[into], whole[out])
    pools[1].zero(into)
    assert not whole_target().any()
    assert (pools[0].run_of([1]) is None) == (source_shape != (1, 1))


def test_blocks_pass_through_a_window_that_is_smaller_than_what_is_moved() -> None:
    """Two ranks have half of every block each."""
    num_blocks, part_bytes = 9, 96
    blocks = [torch.randint(0, 256, (num_blocks, part_bytes), dtype=torch.uint8) for _ in range(2)]
    window = [torch.zeros(2, part_bytes, dtype=torch.uint8) for _ in range(2)]
    moved: list[tuple[list[int], bool]] = []

    def move(some: Sequence[int], outward: bool) -> None:
        moved.append(([*some], outward))
        for place, block in enumerate(some):
            for mine, shown in zip(blocks, window, strict=True):
                (shown[place] if outward else mine[block]).copy_(mine[block] if outward else shown[place])

    direct = KvPool(BlockParts([[part.clone() for part in blocks]], part_bytes // 2))
    pool = KvPool(WindowedBlocks(num_blocks, BlockParts([window], part_bytes // 2), move, threading.Lock()))
    assert (pool.num_blocks, pool.block_bytes) == (num_blocks, 2 * part_bytes) and pool.run_of([1]) is None
    staged, expected = (torch.zeros(5 * pool.block_bytes, dtype=torch.uint8) for _ in range(2))
    assert pool.gather([8, 1, 2, 5, 0], staged, 64) == direct.gather([8, 1, 2, 5, 0], expected, 64)
    assert torch.equal(staged, expected) and moved == [([8, 1], True), ([2, 5], True), ([0], True)]
    pool.scatter([3, 4, 6], staged, 64)
    direct.scatter([3, 4, 6], staged, 64)
    pool.zero([7])
    direct.zero([7])
    all_of = [torch.zeros(num_blocks * pool.block_bytes, dtype=torch.uint8) for _ in range(2)]
    assert pool.gather(range(num_blocks), all_of[0], 64) == direct.gather(range(num_blocks), all_of[1], 64)
    assert torch.equal(*all_of)
