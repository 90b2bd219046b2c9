"""Geometry of the KV slab: one flat pool cut into merged blocks, shared by models of different slot sizes.

A slot holds one block of `page_tokens` tokens of one model for all its layers, K and V, as one run of bytes. A merged
block holds slots of one model at a time at a uniform stride that divides the merged block exactly, so that the flat slot
index `merged_id * slots_per_merged + place` addresses the whole slab with a single stride (SeaLLM section 4.4, unified
KV cache; its second block-table index is `place`).
"""

from __future__ import annotations

import math

ALIGNMENT_BYTES = 64
"""Slots start on this boundary; enough for vector loads and for every element type."""

MIN_MERGED_BYTES = 1 << 20


def slot_bytes(num_layers: int, page_tokens: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of one KV block of a model: all layers, K and V."""
    return num_layers * 2 * page_tokens * num_kv_heads * head_dim * itemsize


def slots_per_merged(merged_bytes: int, slot_bytes: int) -> int:
    """Most slots of a size that fit into a merged block at an exact, aligned stride; 0 if the slot is too large."""
    for count in range(merged_bytes // slot_bytes, 0, -1):
        if merged_bytes % (count * ALIGNMENT_BYTES) == 0:
            return count
    return 0


def waste(merged_bytes: int, slot_bytes: int) -> float:
    """Share of a merged block that a model of this slot size leaves unused."""
    return 1.0 - slots_per_merged(merged_bytes, slot_bytes) * slot_bytes / merged_bytes


def choose_merged_bytes(slot_sizes: list[int], *, max_slots: int = 64) -> int:
    """The merged block that wastes the least over the worst of the models; among those within half a percent of the
    best, the smallest, because a small merged block fragments less.

    Candidates are the multiples of the largest slot (up to `max_slots` of the smallest per merged block), rounded up so
    that exact strides exist.
    """
    if not slot_sizes:
        return MIN_MERGED_BYTES
    largest, smallest = max(slot_sizes), min(slot_sizes)
    limit = max(max_slots * smallest, 2 * largest, 2 * MIN_MERGED_BYTES)
    rounding = ALIGNMENT_BYTES * math.lcm(*range(1, 9))
    candidates = set()
    for size in set(slot_sizes):
        for count in range(max(1, -(-largest // size)), limit // size + 1):
            exact = count * size
            candidates.add(-(-exact // rounding) * rounding)
            for other in set(slot_sizes):
                fitting = exact // other
                if fitting:
                    unit = math.lcm(count, fitting) * ALIGNMENT_BYTES
                    candidates.add(-(-exact // unit) * unit)
    allowed = [c for c in candidates if c >= min(MIN_MERGED_BYTES, limit)] or [limit]
    scored = sorted((max(waste(c, s) for s in slot_sizes), c) for c in allowed)
    best = scored[0][0]
    return min(c for w, c in scored if w <= best + 0.005)
