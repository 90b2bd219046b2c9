"""Geometry of the slab: views, strides, bytes, claims."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.kv.kv_store import KvShape, KvStore, KvViews
from shared.engine.memory import slab

CPU = torch.device("cpu")
NARROW = KvShape(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
WIDE = KvShape(num_layers=2, block_size=4, num_kv_heads=4, head_dim=16, dtype=torch.bfloat16)


def make_store(num_merged: int = 5) -> tuple[KvStore, KvViews, KvViews]:
    merged_bytes = 3 * 64 * 1024
    store = KvStore(num_merged, merged_bytes, CPU)
    return store, *(store.attach(s, slab.blocks_per_merged(merged_bytes, s.block_bytes)) for s in (NARROW, WIDE))


@pytest.mark.parametrize("which", [0, 1])
def test_a_block_is_one_run_of_bytes_in_which_heads_lie_outside_of_tokens(which: int) -> None:
    store, *both = make_store()
    views = both[which]
    shape = views.shape
    block = views.blocks_per_merged + 1
    store.claim(views, np.array([block]))
    parts = []
    for layer in views.layers:
        for half, view in enumerate((layer.keys, layer.values)):
            assert view.shape == (views.num_blocks + 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
            assert view.stride(-1) == 1
            part = torch.randn(view.shape[1:]).to(shape.dtype)
            view[block] = part
            parts.append(part.transpose(0, 1).flatten())
            for head in range(shape.num_kv_heads):
                row = block * layer.block_rows + (half * shape.num_kv_heads + head) * layer.head_rows
                assert torch.equal(layer.runs[row], part[:, head].flatten())
    got = store.block_rows(views)[block]
    assert got.is_contiguous() and got.numel() == shape.block_bytes
    assert torch.equal(got, torch.cat(parts).view(torch.uint8))


def test_flat_blocks_never_overlap_and_stay_in_their_merged_block() -> None:
    store, *both = make_store()
    for views in both:
        for block in range(views.num_blocks):
            begin = block * views.stride_bytes
            assert begin // store.merged_bytes == block // views.blocks_per_merged
            assert (begin + views.shape.block_bytes - 1) // store.merged_bytes == block // views.blocks_per_merged
        assert views.shape.block_bytes <= views.stride_bytes
        last = views.layers[-1].values[views.num_blocks]
        end = last.storage_offset() * last.element_size() + last.numel() * last.element_size()
        assert end <= store.slab.numel(), "the scratch block lies within the slab"


def test_a_merged_block_is_zeroed_when_it_changes_hands_and_only_then() -> None:
    store, narrow, wide = make_store()
    store.slab.fill_(0xFF)  # reads as NaN in any float type
    blocks = np.arange(wide.blocks_per_merged)
    store.claim(wide, blocks)
    assert not wide.layers[0].keys[: len(blocks)].isnan().any()
    assert wide.layers[0].keys[len(blocks)].isnan().all(), "the next merged block was not touched"
    wide.layers[1].values[0].fill_(1.5)
    store.claim(wide, blocks)
    assert (wide.layers[1].values[0] == 1.5).all(), "its own block keeps its content"
    store.claim(narrow, np.array([0]))
    assert not store.slab[: store.merged_bytes].any()


def test_claiming_nothing_is_nothing() -> None:
    store, narrow, _ = make_store()
    store.slab.fill_(1)
    store.claim(narrow, np.empty(0, np.int32))
    assert store.slab.all()


def test_refusals() -> None:
    store, *_ = make_store()
    with pytest.raises(ValueError, match="do not divide"):
        store.attach(NARROW, store.merged_bytes // NARROW.block_bytes * 2)
    with pytest.raises(ValueError, match="no slab"):
        KvStore(1, 100, CPU)
