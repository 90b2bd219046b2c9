"""The size of merged blocks: the smallest that wastes little, for every pair of common models."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.memory.slab import (
    ALIGNMENT_BYTES,
    MAX_WASTE,
    MIN_MERGED_BYTES,
    KvGeometry,
    blocks_per_merged,
    choose_merged_bytes,
    waste,
)

MODELS = {
    "Llama-2-7B": (32, 32, 128),
    "Llama-2-13B": (40, 40, 128),
    "Llama-2-70B": (80, 8, 128),
    "OPT-6.7B": (32, 32, 128),
}
"""Layers, KV heads, dimensions of a head; in 16 bits."""
MIB = 1 << 20


def block(name: str, block_size: int) -> int:
    layers, heads, dim = MODELS[name]
    return KvGeometry(layers, heads, dim, 2).block_bytes(block_size)


@pytest.mark.parametrize(("block_size", "pair"), list(product((16, 64, 128, 256), combinations(MODELS, 2))))
def test_every_pair_wastes_little_in_the_smallest_merged_block(block_size: int, pair: tuple[str, str]) -> None:
    sizes = [block(name, block_size) for name in pair]
    chosen = choose_merged_bytes(sizes)
    assert max(waste(chosen, size) for size in sizes) < MAX_WASTE
    step = 64 * 1024
    smaller = range(max(MIN_MERGED_BYTES, max(sizes)) // step * step, chosen, step)
    assert not [size for size in smaller if max(waste(size, each) for each in sizes) < MAX_WASTE]


def test_two_llamas_share_200_mib_instead_of_900() -> None:
    chosen = choose_merged_bytes([block("Llama-2-7B", 128), block("Llama-2-13B", 128)])
    assert 200 * MIB <= chosen < 200 * MIB + 1024, "rounded up to where exact strides for 3 and 2 blocks exist"


def test_the_least_size_is_kept() -> None:
    sizes = [block("Llama-2-7B", 16), block("Llama-2-70B", 16)]
    assert choose_merged_bytes(sizes) < 32 * MIB <= choose_merged_bytes(sizes, at_least=32 * MIB) < 64 * MIB
    assert choose_merged_bytes([], at_least=32 * MIB) == 32 * MIB


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(64, 20_000).map(lambda units: units * 512), min_size=1, max_size=4))
def test_every_model_fits_at_an_exact_stride(sizes: list[int]) -> None:
    chosen = choose_merged_bytes(sizes)
    assert chosen >= MIN_MERGED_BYTES
    for size in sizes:
        count = blocks_per_merged(chosen, size)
        assert count > 0 and chosen % (count * ALIGNMENT_BYTES) == 0 and count * size <= chosen


def test_a_model_alone_wastes_next_to_nothing_of_the_least() -> None:
    for name in MODELS:
        for block_size in (16, 64, 128, 256):
            assert waste(choose_merged_bytes([block(name, block_size)]), block(name, block_size)) < MAX_WASTE
