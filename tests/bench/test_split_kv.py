"""bench/split_kv: both kinds of blocks give the same attention."""

from __future__ import annotations

import pytest
import torch

from bench.split_kv import PARTS, Cache, Model, measure
from services.worker.attention.choice import choose_backends

MODEL = Model(layers=3, query_heads=6, kv_heads=2, head_dim=16, dtype=torch.float32)


@pytest.mark.parametrize("block", [16, 32])
def test_split_blocks_attend_to_the_same(block: int) -> None:
    torch.manual_seed(1)
    batch, context = 3, 45
    keys, values = (torch.randn(3, batch, context, 2, 16) for _ in range(2))
    asked = torch.randn(3, batch, 6, 16), torch.randn(3, batch, 2, 16), torch.randn(3, batch, 2, 16)
    found = []
    for is_split in (False, True):
        cache = Cache(
            MODEL, choose_backends(torch.device("cpu"))[0], "cpu", batch, context, block=block, is_split=is_split
        )
        cache.fill(keys, values)
        found.append(cache.step(*asked))
    assert torch.allclose(*found, atol=1e-5)
    every_k, every_v = (torch.cat([x, new[:, :, None]], 2) for x, new in ((keys, asked[1]), (values, asked[2])))
    scores = torch.einsum("lbhgd,lbthd->lbhgt", asked[0].view(3, batch, 2, 3, 16), every_k) / 4
    expected = torch.einsum("lbhgt,lbthd->lbhgd", scores.softmax(-1), every_v).reshape(found[0].shape)
    assert torch.allclose(found[0], expected, atol=1e-5)


def test_split_tables_have_an_entry_for_each_layer_and_head() -> None:
    merged, split, *_ = measure("tiny", MODEL, "cpu", 2, 40, 1)
    assert (merged.entries, split.entries) == (2 * 2, 2 * 2 * 3 * 2)
    assert merged.ratio == 1.0 and set(split.parts_ms) == set(PARTS) and min(split.parts_ms.values()) > 0
