"""Blocks are gathered by large words where their layout allows it, and consecutive ones in one copy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv_transport.staging import as_words, runs_of


@pytest.mark.parametrize(
    ("block_bytes", "stride", "offset", "word"),
    [(64, 64, 0, 16), (64, 96, 0, 16), (64, 72, 0, 8), (24, 24, 0, 8), (12, 12, 0, 4), (64, 64, 8, 8), (6, 6, 0, 1)],
)
def test_a_gather_by_words_is_a_gather_by_bytes(block_bytes: int, stride: int, offset: int, word: int) -> None:
    memory = torch.randint(0, 256, (10 * stride + offset + 16,), dtype=torch.uint8)
    rows = memory[offset:].as_strided((10, block_bytes), (stride, 1), offset)
    index = torch.tensor([3, 9, 0])
    blocks = torch.zeros(3, block_bytes, dtype=torch.uint8)
    of_rows, words = as_words(rows, blocks)
    assert of_rows.element_size() == words.element_size() == word
    torch.index_select(of_rows, 0, index, out=words)
    assert torch.equal(blocks, rows[index])
    of_rows.index_copy_(0, torch.tensor([1, 2, 4]), words)
    assert torch.equal(rows[[1, 2, 4]], blocks)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40))
def test_runs_are_all_blocks_in_order_and_as_long_as_can_be(blocks: list[int]) -> None:
    runs = list(runs_of(blocks))
    assert [first + i for first, begin, end in runs for i in range(end - begin)] == blocks
    assert [end for *_, end in runs[:-1]] == [begin for _, begin, _ in runs[1:]]
    assert all(blocks[end] != blocks[end - 1] + 1 for *_, end in runs[:-1])
