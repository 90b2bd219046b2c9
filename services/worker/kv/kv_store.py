"""The KV slab: one flat byte tensor on a device that holds the KV blocks of all models of an instance.

Geometry (see shared/engine/memory/slab.py): merged blocks of `merged_bytes`; of a model, each holds `blocks_per_merged`
blocks at a uniform stride. A block is `[layers, 2 (K, V), kv_heads, block_size, head_dim]`, contiguous, so one block of a
sequence is one run of bytes, a layer's K and V are strided views into the slab, and what a contiguous range of heads has of
them is a run again: that of one rank of several.

| memory | written by |
|---|---|
| a block | attention's `write_kv`, for the model that owns the merged block |
| a merged block, whole | `claim`, when it goes to another model |
| a block that nobody uses | `move`, within the merged blocks of a model |
| the scratch merged block behind the last | padding rows of replayed graphs; nobody reads it |
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from shared.engine.memory import slab

NO_OWNER = -1


class LayerKv(NamedTuple):
    """One layer's cache, each `[num_flat_blocks, block_size, kv_heads, head_dim]`, strided: heads lie outside of tokens."""

    keys: torch.Tensor
    values: torch.Tensor
    runs: torch.Tensor
    """`[rows, block_size * head_dim]`, each overlapping the next: one head's K or V in one block is one of them."""
    block_rows: int
    """Rows of `runs` from a block to the next."""
    head_rows: int
    """Rows of `runs` from a head to the next: those of K, then those of V."""

    def put(self, blocks: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores `[T, kv_heads, head_dim]` each, at these places of these blocks, [T] each."""
        self.keys.index_put_((blocks, offsets), keys)
        self.values.index_put_((blocks, offsets), values)


@dataclass(frozen=True)
class KvShape:
    """What of a model determines the size of its blocks."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        kv = slab.KvGeometry(self.num_layers, self.num_kv_heads, self.head_dim, self.dtype.itemsize)
        return kv.block_bytes(self.block_size)

    @property
    def run_bytes(self) -> int:
        """Bytes of a layer's K, or V, in a block."""
        return self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class BlockParts:
    """The blocks of a model, of which each rank has a part: of the K and V of each layer of its stage the run of its heads.

    A whole block is `[layers, 2, p, run_bytes]`, the same bytes in the same order for every p and any number of stages."""

    stages: list[list[torch.Tensor]]
    """`[num_blocks, part_bytes]` uint8 of each of p ranks of each stage, of any row stride."""
    run_bytes: int
    """Bytes of a rank in a layer's K or V."""

    def __len__(self) -> int:
        """Blocks; 0 where not all ranks' parts can be reached."""
        return len(self.stages[0][0]) if self.stages else 0


@dataclass(frozen=True)
class WindowedBlocks:
    """The blocks of a model whose parts only the ranks themselves reach (on GPUs): they pass through a window in host memory
    that all ranks map."""

    num_blocks: int
    window: BlockParts
    move: Callable[[Sequence[int], bool], None]
    """Copies these blocks, no more than the window has, to its first places on all ranks (True), or back. Blocking. Raises
    `KeyError` where the model has gone. The caller has `lock`."""
    lock: threading.Lock
    """Lock of the window, which all models share."""

    def __len__(self) -> int:
        return self.num_blocks


@dataclass(frozen=True)
class KvViews:
    """A model's view of the whole slab."""

    owner: int
    shape: KvShape
    blocks_per_merged: int
    stride_bytes: int
    num_blocks: int
    """Addressable flat blocks; block `num_blocks` itself is scratch."""
    layers: tuple[LayerKv, ...]


KvBlocks = torch.Tensor | BlockParts | WindowedBlocks


class KvStore:
    """Owns the slab tensor; gives models their views."""

    def __init__(
        self, num_merged: int, merged_bytes: int, device: torch.device, memory: torch.Tensor | None = None
    ) -> None:
        """`memory`: `[(num_merged + 1) * merged_bytes]` uint8 to use, a storage of its own; None: it is allocated."""
        if num_merged <= 0 or merged_bytes <= 0 or merged_bytes % slab.ALIGNMENT_BYTES:
            raise ValueError(f"{num_merged} merged blocks of {merged_bytes} bytes make no slab")
        self.num_merged = num_merged
        self.merged_bytes = merged_bytes
        # empty, not zeros: on CPU the pages are committed only when first written
        num_bytes = (num_merged + 1) * merged_bytes
        self.slab = torch.empty(num_bytes, dtype=torch.uint8, device=device) if memory is None else memory[:num_bytes]
        self._owners = np.full(num_merged + 1, NO_OWNER, dtype=np.int64)
        self._next_owner = 0

    def attach(self, shape: KvShape, blocks_per_merged: int) -> KvViews:
        """Views for one more model; costs no memory."""
        stride_bytes, rest = divmod(self.merged_bytes, blocks_per_merged)
        if rest or stride_bytes % slab.ALIGNMENT_BYTES or stride_bytes < shape.block_bytes:
            raise ValueError(f"{blocks_per_merged} blocks do not divide a merged block of {self.merged_bytes} bytes")
        elements = self.slab.view(shape.dtype)
        stride = stride_bytes // shape.dtype.itemsize
        num_blocks = self.num_merged * blocks_per_merged
        size = (num_blocks + 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
        run = shape.block_size * shape.head_dim
        half = shape.num_kv_heads * run
        row = math.gcd(stride, run)
        num_rows = (num_blocks * stride + 2 * half - run) // row + 1

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
        return KvViews(owner, shape, blocks_per_merged, stride_bytes, num_blocks, layers)

    def claim(self, views: KvViews, blocks: np.ndarray) -> bool:
        """Makes the merged blocks of these flat blocks the model's, before it first writes there. A block that comes from
        another model is zeroed: masked positions have attention weight 0, but 0 * NaN is NaN, and another model's bytes
        may read as NaN. Returns whether any was zeroed."""
        merged = blocks // views.blocks_per_merged
        if (self._owners[merged] == views.owner).all():
            return False
        for index in np.unique(merged[self._owners[merged] != views.owner]).tolist():
            self.slab[index * self.merged_bytes : (index + 1) * self.merged_bytes].zero_()
            self._owners[index] = views.owner
        return True

    def move(self, views: KvViews, blocks: list[int], targets: list[int]) -> None:
        """Copies whole blocks of a model to others in merged blocks that it has claimed, in order with the steps. Raises
        `IndexError` for blocks that do not exist."""
        for block in (*blocks, *targets):
            if not 0 <= block < views.num_blocks:
                raise IndexError(f"block {block} of {views.num_blocks}")
        rows = self.block_rows(views)
        if self.slab.is_cuda:
            for block, target in zip(blocks, targets, strict=True):
                rows[target].copy_(rows[block])
        else:
            # as in kv_copies.py: torch would start a team of threads for each
            cells = rows.numpy()
            for block, target in zip(blocks, targets, strict=True):
                cells[target] = cells[block]

    @property
    def pool(self) -> torch.Tensor:
        """The slab without its scratch block."""
        return self.slab[: self.num_merged * self.merged_bytes]

    def block_rows(self, views: KvViews, pool: torch.Tensor | None = None) -> torch.Tensor:
        """`[blocks, block_bytes]` uint8: the bytes of each block, the unit of checkpoint and migration. `pool`: another flat
        byte tensor of merged blocks of this size; None: the slab's."""
        pool = self.pool if pool is None else pool
        num_blocks = pool.numel() // views.stride_bytes
        return pool.view(num_blocks, views.stride_bytes)[:, : views.shape.block_bytes]
