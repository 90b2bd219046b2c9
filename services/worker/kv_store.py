"""The KV slab: one flat byte tensor on a device that holds the KV blocks of all models of an instance.

Geometry (see shared/engine/slab.py): merged blocks of `merged_bytes`; of a model, each holds `slots_per_merged` slots at
a uniform stride. A slot is `[layers, 2 (K, V), kv_heads, page_tokens, head_dim]`, contiguous, so one block of a sequence
is one run of bytes, a layer's K and V are strided views into the slab, and what a contiguous range of heads has of them is
a run again: that of one rank of several.

| memory | written by |
|---|---|
| a slot | attention's `write_kv`, for the model that owns the merged block |
| a merged block, whole | `claim`, when it goes to another model |
| a slot that nobody uses | `move`, within the merged blocks of a model |
| the scratch merged block behind the last | padding rows of replayed graphs; nobody reads it |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from shared.engine import slab

NO_OWNER = -1


class LayerKv(NamedTuple):
    """One layer's cache, each `[num_flat_slots, page_tokens, kv_heads, head_dim]`, strided: heads lie outside of tokens."""

    keys: torch.Tensor
    values: torch.Tensor
    runs: torch.Tensor
    """`[rows, page_tokens * head_dim]`, each overlapping the next: one head's K or V in one slot is one of them."""
    slot_rows: int
    """Rows of `runs` from a slot to the next."""
    head_rows: int
    """Rows of `runs` from a head to the next: those of K, then those of V."""


@dataclass(frozen=True)
class KvShape:
    """What of a model determines the size of its slots."""

    num_layers: int
    page_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        kv = slab.KvGeometry(self.num_layers, self.num_kv_heads, self.head_dim, self.dtype.itemsize)
        return kv.block_bytes(self.page_tokens)


@dataclass(frozen=True)
class KvViews:
    """A model's view of the whole slab."""

    owner: int
    shape: KvShape
    slots_per_merged: int
    stride_bytes: int
    num_slots: int
    """Addressable flat slots; slot `num_slots` itself is scratch."""
    layers: tuple[LayerKv, ...]


class KvStore:
    """Owns the slab tensor; gives models their views."""

    def __init__(self, num_merged: int, merged_bytes: int, device: torch.device) -> None:
        if num_merged <= 0 or merged_bytes <= 0 or merged_bytes % slab.ALIGNMENT_BYTES:
            raise ValueError(f"{num_merged} merged blocks of {merged_bytes} bytes make no slab")
        self.num_merged = num_merged
        self.merged_bytes = merged_bytes
        # empty, not zeros: on CPU the pages are committed only when first written
        self.slab = torch.empty((num_merged + 1) * merged_bytes, dtype=torch.uint8, device=device)
        self._owners = np.full(num_merged + 1, NO_OWNER, dtype=np.int64)
        self._next_owner = 0

    def attach(self, shape: KvShape, slots_per_merged: int) -> KvViews:
        """Views for one more model; costs no memory."""
        stride_bytes, rest = divmod(self.merged_bytes, slots_per_merged)
        if rest or stride_bytes % slab.ALIGNMENT_BYTES or stride_bytes < shape.slot_bytes:
            raise ValueError(f"{slots_per_merged} slots do not divide a merged block of {self.merged_bytes} bytes")
        elements = self.slab.view(shape.dtype)
        stride = stride_bytes // shape.dtype.itemsize
        num_slots = self.num_merged * slots_per_merged
        size = (num_slots + 1, shape.page_tokens, shape.num_kv_heads, shape.head_dim)
        run = shape.page_tokens * shape.head_dim
        half = shape.num_kv_heads * run
        row = math.gcd(stride, run)
        num_rows = (num_slots * stride + 2 * half - run) // row + 1

        def layer(start: int) -> LayerKv:
            keys, values = (
                elements.as_strided(size, (stride, shape.head_dim, run, 1), begin) for begin in (start, start + half)
            )
            return LayerKv(
                keys, values, elements.as_strided((num_rows, run), (row, 1), start), stride // row, run // row
            )

        layers = tuple(layer(2 * half * i) for i in range(shape.num_layers))
        owner = self._next_owner
        self._next_owner += 1
        return KvViews(owner, shape, slots_per_merged, stride_bytes, num_slots, layers)

    def claim(self, views: KvViews, slots: np.ndarray) -> bool:
        """Makes the merged blocks of these flat slots the model's, before it first writes there. A block that comes from
        another model is zeroed: masked positions have attention weight 0, but 0 * NaN is NaN, and another model's bytes
        may read as NaN. Returns whether any was zeroed."""
        merged = slots // views.slots_per_merged
        if (self._owners[merged] == views.owner).all():
            return False
        for index in np.unique(merged[self._owners[merged] != views.owner]).tolist():
            self.slab[index * self.merged_bytes : (index + 1) * self.merged_bytes].zero_()
            self._owners[index] = views.owner
        return True

    def move(self, views: KvViews, slots: list[int], targets: list[int]) -> None:
        """Copies whole slots of a model to others in merged blocks that it has claimed, in order with the steps. Raises
        `IndexError` for slots that do not exist."""
        for slot in (*slots, *targets):
            if not 0 <= slot < views.num_slots:
                raise IndexError(f"slot {slot} of {views.num_slots}")
        rows = self.slot_rows(views)
        if self.slab.is_cuda:
            for slot, target in zip(slots, targets, strict=True):
                rows[target].copy_(rows[slot])
        else:
            # as in kv_copies.py: torch would start a team of threads for each
            cells = rows.numpy()
            for slot, target in zip(slots, targets, strict=True):
                cells[target] = cells[slot]

    def slot_rows(self, views: KvViews, pool: torch.Tensor | None = None) -> torch.Tensor:
        """`[slots, slot_bytes]` uint8: the bytes of each slot, the unit of checkpoint and migration. `pool`: another flat
        byte tensor of merged blocks of this size; None: the slab without its scratch block."""
        pool = self.slab[: self.num_merged * self.merged_bytes] if pool is None else pool
        num_slots = pool.numel() // views.stride_bytes
        return pool.view(num_slots, views.stride_bytes)[:, : views.shape.slot_bytes]

    def slot_view(self, views: KvViews, slot: int) -> torch.Tensor:
        """The bytes of one slot, `[slot_bytes]` uint8."""
        if not 0 <= slot < views.num_slots:
            raise IndexError(f"slot {slot} of {views.num_slots}")
        return self.slot_rows(views)[slot]
