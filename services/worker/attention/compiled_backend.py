"""Paged attention by the compiled kernels: the back end of CPUs that have them. Nothing is gathered or padded."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from services.worker.attention.facts import TORCH_CPU
from services.worker.attention.interface import AttentionBackend, BatchLayout
from services.worker.kv.kv_store import LayerKv
from services.worker.native.library import (
    MAX_HEAD_DIM,
    AttentionStruct,
    BatchStruct,
    HeadsStruct,
    Kernels,
    KvStruct,
    address,
)  # fmt: skip

FACTS = msgspec.structs.replace(
    TORCH_CPU, name="compiled", dtypes=("float32", "bfloat16"), max_head_dim=MAX_HEAD_DIM, head_dim_step=16
)


@dataclass
class CompiledBatch:
    """A step's layout as the kernels take it, with the arrays that it points to."""

    struct: BatchStruct
    arrays: tuple[np.ndarray, ...]
    softcap: float


class CompiledBackend(AttentionBackend):
    facts = FACTS

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def prepare(self, layout: BatchLayout) -> CompiledBatch:
        per_sequence = (layout.starts, layout.counts, layout.query_starts)
        arrays: tuple[np.ndarray, ...] = (
            *(np.ascontiguousarray(array, np.int64) for array in per_sequence),
            np.ascontiguousarray(layout.block_tables, np.int32),
            np.ascontiguousarray(layout.blocks, np.int32),
            np.ascontiguousarray(layout.offsets, np.int64),
        )
        num_sequences, width = layout.block_tables.shape
        num_tokens = len(layout.blocks)
        struct = BatchStruct(num_sequences, num_tokens, width, layout.block_size, *map(address, arrays))
        return CompiledBatch(struct, arrays, layout.softcap)

    def write_kv(self, kv: LayerKv, keys: torch.Tensor, values: torch.Tensor, metadata: CompiledBatch) -> None:
        keys, values = _heads_together(keys), _heads_together(values)
        heads = _heads(keys, kv)
        self._call(metadata, kv, heads, keys=address(keys), values=address(values), key_stride=keys.stride(0),
                   value_stride=values.stride(0))  # fmt: skip

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv: LayerKv,
        metadata: CompiledBatch,
        window: int | None,
    ) -> torch.Tensor:
        queries = _heads_together(queries)
        out = torch.empty(queries.shape, dtype=queries.dtype)
        heads = _heads(queries, kv, window, metadata.softcap)
        self._call(metadata, kv, heads, queries=address(queries), query_stride=queries.stride(0), out=address(out))
        return out

    def _call(self, metadata: CompiledBatch, kv: LayerKv, heads: HeadsStruct, **fields: Any) -> None:
        call = AttentionStruct(
            ctypes.pointer(metadata.struct), ctypes.pointer(kv_struct(kv)), ctypes.pointer(heads), **fields
        )
        self._kernels.attention(call)


def kv_struct(kv: LayerKv) -> KvStruct:
    return KvStruct(address(kv.keys), address(kv.values), kv.keys.stride(0), kv.keys.stride(2))


def _heads(heads: torch.Tensor, kv: LayerKv, window: int | None = None, softcap: float = 0.0) -> HeadsStruct:
    head_dim = heads.shape[2]
    return HeadsStruct(
        heads.shape[1], kv.keys.shape[2], head_dim, heads.dtype == torch.bfloat16, window or 0, head_dim**-0.5, softcap
    )


def _heads_together(x: torch.Tensor) -> torch.Tensor:
    """`[T, heads, head_dim]` of any row stride, each row contiguous."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
