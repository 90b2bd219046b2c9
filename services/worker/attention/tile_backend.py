"""Paged attention in which a token's result is a function of its own sequence, to the last bit: the back end of
deterministic mode where no faster one does that.

Queries are computed in tiles and keys in segments, both cut at fixed positions of the sequence: the query at position p is
in tile p // t at place p % t, beside padding where its neighbours are computed in other steps; the keys it sees begin at
position 0 and end with a segment, masked behind p. `scaled_dot_product_attention` goes over the segments one by one with
a running maximum and sum (Milakov and Gimelshein 2018), so one that is masked whole changes nothing. A tile's shape is
thereby always the same, in a decode step as in a chunk of a prompt, whatever else is in the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from services.worker.attention.facts import TORCH_CPU, TORCH_CUDA
from services.worker.attention.interface import AttentionBackend, BatchLayout
from services.worker.attention.torch_backend import Gathering, Pages, pages_of
from services.worker.kv.kv_store import LayerKv
from services.worker.kv.transfer import to_device

TILE_ROWS = 32
"""Rows of a KV head in a tile: each query has one for each of the heads that share it."""
SEGMENT_KEYS = 512
"""What torch's kernel for CPUs takes at a time; a multiple of every block size."""
SMALL_TILE_ROWS, SMALL_SEGMENT_KEYS = 8, 128
"""Sizes with which most kernels make the same bits."""


@dataclass
class _Group:
    """Tiles of as many keys: one each of several sequences, or several of one."""

    num_tiles: int
    pages: Pages
    masks: dict[int | None, torch.Tensor]
    """Per window: [tiles, 1, rows, keys] to add to the scores."""
    tokens: torch.Tensor
    """[tiles * queries] flat token of each query; padding repeats another of its sequence."""
    valid: torch.Tensor
    """Which of them are no padding."""
    targets: torch.Tensor
    """Flat tokens of those."""


@dataclass
class _Metadata:
    layout: BatchLayout
    blocks: torch.Tensor
    offsets: torch.Tensor
    groups: list[_Group] = field(default_factory=list)
    """Made by the first layer: only then the number of heads is known."""


class TileBackend(AttentionBackend):
    def __init__(self, device: torch.device, *, decode_rows: int = TILE_ROWS, key_step: int = SEGMENT_KEYS) -> None:
        """`decode_rows`: of the tiles of decodes; `key_step`: of it a multiple is computed of the last segment. Whether
        small ones make the bits of large ones is to be tried (invariance.py)."""
        self._decode_rows, self._key_step = decode_rows, key_step
        self.facts = TORCH_CPU if device.type == "cpu" else TORCH_CUDA
        self._gathering = Gathering()

    def prepare(self, layout: BatchLayout) -> _Metadata:
        return _Metadata(layout, _tensor(layout.blocks, layout), _tensor(layout.offsets, layout))

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv: LayerKv,
        metadata: _Metadata,
        window: int | None,
    ) -> torch.Tensor:
        num_heads, head_dim = queries.shape[-2:]
        num_kv_heads = kv.keys.shape[-2]
        per_head = num_heads // num_kv_heads
        if not metadata.groups:
            metadata.groups = _groups(metadata.layout, per_head, self._decode_rows, self._key_step)
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for group in metadata.groups:
            tiles = (group.num_tiles, -1, num_kv_heads, per_head, head_dim)
            chosen = queries.index_select(0, group.tokens).view(tiles).transpose(1, 2)
            near, far = self._gathering.gather(kv, group.pages)
            result = F.scaled_dot_product_attention(
                chosen.flatten(2, 3),
                near.expand(group.num_tiles, -1, -1, -1),
                far.expand(group.num_tiles, -1, -1, -1),
                attn_mask=group.masks.get(window, group.masks[None]),
            )
            rows = (
                result.view(group.num_tiles, num_kv_heads, -1, per_head, head_dim)
                .transpose(1, 2)
                .reshape(-1, num_heads, head_dim)
            )
            out.index_copy_(0, group.targets, rows.index_select(0, group.valid))
        return out


def _tensor(array: np.ndarray, layout: BatchLayout) -> torch.Tensor:
    return to_device(array.astype(np.int64, copy=False), layout.device)


def _groups(layout: BatchLayout, per_head: int, decode_rows: int, key_step: int) -> list[_Group]:
    """`per_head`: query heads of a KV head."""
    sizes = np.where(layout.counts == 1, max(1, decode_rows // per_head), max(1, TILE_ROWS // per_head))
    first, last = layout.starts // sizes, (layout.contexts - 1) // sizes
    num_tiles = last - first + 1
    sequences = np.repeat(np.arange(len(layout.counts)), num_tiles)
    tiles = np.arange(len(sequences)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles) + first[sequences]
    sizes = sizes[sequences]
    ends = np.minimum((tiles + 1) * sizes, layout.contexts[sequences])
    # tiles of a chunk share its sequence's keys; those that are alone are put together
    alone = num_tiles[sequences] == 1
    keys = np.stack((np.where(alone, -1, sequences), sizes, -(-ends // key_step) * key_step), 1)
    found, group_of = np.unique(keys, axis=0, return_inverse=True)
    groups = []
    for index, (_, size, num_keys) in enumerate(found.tolist()):
        members = np.flatnonzero(group_of.ravel() == index)
        groups.append(_group(layout, sequences[members], tiles[members], size, per_head, num_keys))
    return groups


def _group(
    layout: BatchLayout, sequences: np.ndarray, tiles: np.ndarray, size: int, per_head: int, num_keys: int
) -> _Group:
    positions = tiles[:, None] * size + np.arange(size)
    starts, contexts = layout.starts[sequences][:, None], layout.contexts[sequences][:, None]
    valid = np.flatnonzero(((positions >= starts) & (positions < contexts)).ravel())
    positions = positions.clip(starts, contexts - 1)
    tokens = (layout.query_starts[sequences][:, None] + positions - starts).ravel()
    owners = np.unique(sequences) if len(sequences) > 1 and sequences[0] == sequences[-1] else sequences
    num_pages = -(-num_keys // layout.block_size)
    tables = layout.block_tables[owners][:, np.minimum(np.arange(num_pages), layout.block_tables.shape[1] - 1)]
    masks: dict[int | None, torch.Tensor] = {
        window: _mask(layout, np.repeat(positions, per_head, 1), num_pages * layout.block_size, window)
        for window in (None, *layout.windows)
    }
    return _Group(
        len(tiles), pages_of(layout, tables, layout.contexts[owners]), masks,
        *(_tensor(array, layout) for array in (tokens, valid, tokens[valid])),
    )  # fmt: skip


def _mask(layout: BatchLayout, positions: np.ndarray, num_keys: int, window: int | None) -> torch.Tensor:
    """[tiles, 1, rows, keys] of 0 and -inf: a query sees the keys up to its own position, and with a window only the last
    `window` of them."""
    query = to_device(positions, layout.device)[:, None, :, None]
    key = torch.arange(num_keys, device=layout.device)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return torch.zeros(hidden.shape, dtype=layout.dtype, device=layout.device).masked_fill_(hidden, float("-inf"))
