"""Geometry of the KV slab: one flat pool cut into merged blocks, shared by models whose blocks differ in size.

A block holds `block_size` tokens of one model for all its layers, K and V, as one run of bytes. A merged
block holds blocks of one model at a time at a uniform stride that divides the merged block exactly, so that the flat block
index `merged_id * blocks_per_merged + place` addresses the whole slab with a single stride (SeaLLM section 4.4, unified
KV cache; its second block-table index is `place`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ALIGNMENT_BYTES = 64
"""Blocks start on this boundary; enough for vector loads and for every element type."""

MIN_MERGED_BYTES = 1 << 20


@dataclass(frozen=True)
class KvGeometry:
    """What of a model, in the dtype it runs in, decides how many bytes its KV takes."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    """Bytes of an element."""

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block of so many tokens: all layers, K and V."""
        return self.num_layers * 2 * self.num_kv_heads * block_size * self.head_dim * self.itemsize


def blocks_per_merged(merged_bytes: int, block_bytes: int) -> int:
    """Most blocks of a size that fit into a merged block at an exact, aligned stride; 0 if the block is too large."""
    for count in range(merged_bytes // block_bytes, 0, -1):
        if merged_bytes % (count * ALIGNMENT_BYTES) == 0:
            return count
    return 0


def waste(merged_bytes: int, block_bytes: int) -> float:
    """Share of a merged block that a model of this block size leaves unused."""
    return 1.0 - blocks_per_merged(merged_bytes, block_bytes) * block_bytes / merged_bytes


MAX_WASTE = 0.05
"""Share of a merged block that may stay unused for the sake of a smaller one: a pool of few large blocks fragments."""


def choose_merged_bytes(block_sizes: list[int], *, at_least: int = MIN_MERGED_BYTES, max_blocks: int = 64) -> int:
    """The smallest merged block of which no model leaves `MAX_WASTE` or more unused; if there is none, the one that wastes
    the least. With up to `max_blocks` blocks of the smallest model, or two of the largest.

    In the smallest, the blocks of some model end close to its end, so multiples of the blocks are tried, rounded up to where
    exact strides for all models exist.
    """
    if not block_sizes:
        return at_least
    sizes = sorted(set(block_sizes))
    limit = max(max_blocks * sizes[0], 2 * sizes[-1], 2 * at_least)
    candidates = set()
    for size in sizes:
        for count in range(max(1, -(-max(sizes[-1], at_least) // size)), limit // size + 1):
            exact = count * size
            fitting = [exact // other for other in sizes]
            units = {math.lcm(*fitting), math.lcm(*range(1, 9))}
            # A block less of one model may be worth a finer rounding.
            units |= {math.lcm(count, most - less) for most in fitting for less in (0, 1) if most > less}
            candidates |= {_round_up(exact, unit * ALIGNMENT_BYTES) for unit in units}
    candidates |= {_round_up(at_least, count * ALIGNMENT_BYTES) for count in range(1, max_blocks + 1)}
    candidates = {c for c in candidates if c >= at_least}

    def most_wasted(merged_bytes: int) -> float:
        return max(waste(merged_bytes, size) for size in sizes)

    good = (c for c in sorted(candidates) if most_wasted(c) < MAX_WASTE)
    return next(good, None) or min(candidates, key=lambda c: (most_wasted(c), c))


def _round_up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit
