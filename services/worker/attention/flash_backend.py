"""Paged attention with flash-attention kernels on CUDA.

Two generations are used, whichever the device and the installed packages offer:
- flash-attention 4 (package `flash-attn-4`, module `flash_attn.cute`) on Hopper and data-centre Blackwell, pages of 128:
  a page is then a key tile and loads by TMA. It splits long contexts over processors only on Blackwell.
- flash-attention 2 (package `flash-attn`) on Ampere and later, pages of 256, the only size its paged kernels take.

Both take the block stride from the tensor, so a layer's strided view of the KV slab is passed as it is.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.worker.attention.facts import flash
from services.worker.attention.interface import AttentionBackend, BatchLayout
from services.worker.kv.kv_store import LayerKv
from services.worker.kv.transfer import Field, pack_to_device
from shared.messages.cluster import AttentionFacts


class FlashUnavailable(Exception):
    """No flash-attention kernels for this device are installed."""


@dataclass(kw_only=True)
class _Metadata:
    """S sequences, T tokens, P pages in the longest table."""

    blocks: torch.Tensor
    """[T] int64"""
    offsets: torch.Tensor
    """[T] int64"""
    query_starts: torch.Tensor
    """[S + 1] int32"""
    contexts: torch.Tensor
    """[S] int32: keys of each sequence, this step's included"""
    context_starts: torch.Tensor
    """[S + 1] int32: their cumulative sum"""
    page_table: torch.Tensor
    """[S, P] int32"""
    max_queries: int
    max_context: int
    """Bound on `contexts`; of a captured batch, the whole table."""
    softcap: float
    packed_tables: torch.Tensor | None = None
    """Table of a captured batch: where each replay's table arrives, as wide as that replay needs it."""


class FlashBackend(AttentionBackend):
    """Kernels are compiled at their first use with a shape, so models are warmed up before they serve."""

    def __init__(self, device: torch.device, *, is_split: bool = True) -> None:
        """`is_split`: a context may be divided over processors, by what else is in the step. Raises `FlashUnavailable`."""
        major, _ = torch.cuda.get_device_capability(device)
        self._attend, self.facts = _choose_kernels(major, is_split=is_split)

    def prepare(self, layout: BatchLayout) -> _Metadata:
        values = self.replay_values(layout)
        moved = pack_to_device([*values.values(), layout.query_starts.astype(np.int32)], layout.device)
        fields, query_starts = dict(zip(values, moved, strict=False)), moved[-1]
        table = fields.pop("tables").view(layout.block_tables.shape)
        return _Metadata(
            **fields, query_starts=query_starts, page_table=table, max_queries=int(layout.counts.max()),
            max_context=int(layout.contexts.max()),
            softcap=layout.softcap,
        )  # fmt: skip

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv: LayerKv,
        metadata: _Metadata,
        window: int | None,
    ) -> torch.Tensor:
        return self._attend(queries, kv, metadata, window)

    def replay_fields(self, layout: BatchLayout, max_pages: int) -> Mapping[str, Field]:
        num_rows = len(layout.counts)
        return {
            "blocks": Field(np.int64, num_rows),
            "offsets": Field(np.int64, num_rows),
            "contexts": Field(np.int32, num_rows),
            "context_starts": Field(np.int32, num_rows + 1),
            "tables": Field(np.int32, num_rows * max_pages),
        }

    def replay_values(self, layout: BatchLayout) -> Mapping[str, np.ndarray]:
        return {
            "blocks": layout.blocks.astype(np.int64),
            "offsets": layout.offsets,
            "contexts": layout.contexts.astype(np.int32),
            "context_starts": np.concatenate(([0], np.cumsum(layout.contexts))).astype(np.int32),
            "tables": layout.block_tables,
        }

    def allocate_replay(
        self, layout: BatchLayout, fields: Mapping[str, torch.Tensor], max_pages: int, larger: _Metadata | None
    ) -> _Metadata:
        num_rows = len(layout.counts)
        static = _Metadata(
            blocks=fields["blocks"],
            offsets=fields["offsets"],
            query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=layout.device),
            contexts=fields["contexts"],
            context_starts=fields["context_starts"],
            page_table=torch.zeros(num_rows, max_pages, dtype=torch.int32, device=layout.device),
            max_queries=1,
            max_context=max_pages * layout.block_size,
            softcap=layout.softcap,
            packed_tables=fields["tables"],
        )
        self.begin_replay(static, layout)
        return static

    def begin_replay(self, static: _Metadata, layout: BatchLayout) -> None:
        assert static.packed_tables is not None
        num_rows, num_pages = layout.block_tables.shape
        packed = static.packed_tables[: num_rows * num_pages].view(num_rows, num_pages)
        static.page_table[:, :num_pages].copy_(packed)


_FLASH4_ARGUMENTS = {
    "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k", "seqused_k", "page_table", "causal", "window_size", "num_splits",
    "softcap",
}  # fmt: skip

_Attend = Callable[[torch.Tensor, LayerKv, _Metadata, "int | None"], torch.Tensor]


def _choose_kernels(major: int, *, is_split: bool = True) -> tuple[_Attend, AttentionFacts]:
    """Kernels for devices of this compute capability. `is_split`: see `FlashBackend`."""
    problems = []
    if major in (9, 10, 11):  # elsewhere flash-attention 4 has no paging
        try:
            return _flash4(major, is_split), flash(4, 128, 256 if major == 9 else 128)
        # Its compiler checks versions and devices when it is imported, with errors of any kind.
        except Exception as error:
            problems.append(_problem("flash-attn-4", error))
    if major >= 8:
        try:
            return _flash2(is_split), flash(2, 256, 256)
        except Exception as error:
            problems.append(_problem("flash-attn", error))
    raise FlashUnavailable("; ".join(problems) or f"compute capability {major} is too old")


def _problem(package: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{package} is not installed ({error})"
    return f"{package} cannot be used ({type(error).__name__}: {error})"


def _flash4(major: int, is_split: bool) -> _Attend:
    # kernels are compiled in Python; without its cache on disk every process would compile them again
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    from flash_attn.cute import flash_attn_varlen_func

    # flash-attn 2 brings an early copy of this module along, which lacks some of them.
    if missing := _FLASH4_ARGUMENTS - inspect.signature(flash_attn_varlen_func).parameters.keys():
        raise ImportError(f"flash_attn.cute is too old: it knows no {', '.join(sorted(missing))}")
    num_splits = 1 if major == 9 or not is_split else 0  # 0: as many as a heuristic says; Hopper's kernel has no splits

    def attend(queries: torch.Tensor, kv: LayerKv, metadata: _Metadata, window: int | None) -> torch.Tensor:
        result: Any = flash_attn_varlen_func(
            queries,
            kv.keys,
            kv.values,
            cu_seqlens_q=metadata.query_starts,
            max_seqlen_q=metadata.max_queries,
            max_seqlen_k=metadata.max_context,
            seqused_k=metadata.contexts,
            page_table=metadata.page_table,
            causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
            num_splits=num_splits,
            softcap=metadata.softcap,
        )
        return _only_output(result)

    return attend


def _flash2(is_split: bool) -> _Attend:
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    def attend(queries: torch.Tensor, kv: LayerKv, metadata: _Metadata, window: int | None) -> torch.Tensor:
        limits = (-1, -1) if window is None else (window - 1, 0)
        if metadata.max_queries == 1 and is_split:
            result: Any = flash_attn_with_kvcache(
                queries[:, None],
                kv.keys,
                kv.values,
                cache_seqlens=metadata.contexts,
                block_table=metadata.page_table,
                causal=True,
                window_size=limits,
                softcap=metadata.softcap,
            )
            return _only_output(result).flatten(0, 1)
        result = flash_attn_varlen_func(
            queries,
            kv.keys,
            kv.values,
            metadata.query_starts,
            metadata.context_starts,
            metadata.max_queries,
            metadata.max_context,
            causal=True,
            window_size=limits,
            softcap=metadata.softcap,
            block_table=metadata.page_table,
        )
        return _only_output(result)

    return attend


def _only_output(result: Any) -> torch.Tensor:
    """Some releases return the log-sum-exp beside the output."""
    output: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return output
