"""Paged decode with FlashInfer's kernels on CUDA (Ye et al. 2025); other steps go to another back end over the same blocks.

FlashInfer divides long contexts over the processors of the device (split-KV), which flash-attention 4 does not on Hopper: a
decode of few sequences would leave most of them idle. Before a step's layers a plan says which processor reads what; its
wrappers keep it, one for each sliding window of the model, and one for each captured size.

Their layout "HND" is ours: a page is `[kv_heads, page_size, head_dim]`, of any stride between pages, K and V apart.

A plan is made in page-locked memory of its wrapper and copied from there, so the next one waits until that copy is done. It
is the first thing that a step puts on the device, and the step before the last has been collected when the next is launched:
there is hardly ever something to wait for.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.worker.attention.facts import flashinfer
from services.worker.attention.interface import AttentionBackend, BatchLayout, Heads
from services.worker.attention.torch_backend import TorchBackend
from services.worker.kv_store import KvShape, KvStore, LayerKv
from services.worker.suspension import cuda_event
from services.worker.transfer import Field, pack_to_device

logger = logging.getLogger(__name__)

LEAST_TENSOR_CORE_GROUP = 4
"""Query heads of a KV head from which on tensor cores decode faster than the kernels without (SGLang's rule for 16 bits)."""
_LEAST_WORKSPACE_BYTES = 128 << 20
"""FlashInfer's own advice."""
_PLAN_BYTES = 2 << 20
_QUERY_TILES = (16, 64)
"""Rows that a tensor core kernel computes at once: one for each query head of a KV head, up to 16 or more."""
_TOLERANCE = 2e-2


class FlashInferUnavailable(Exception):
    """It is not installed, or not for this device."""


class _Workspace:
    """Of wrappers that run one after the other on one stream."""

    def __init__(self, layout: BatchLayout) -> None:
        """For as many rows as `layout` has."""
        self.floats = torch.empty(_workspace_bytes(layout), dtype=torch.uint8, device=layout.device)
        self._plans: dict[int | None, torch.Tensor] = {}

    def plan(self, window: int | None) -> torch.Tensor:
        """Where the plan of the window's layers lies: in a step all plans are made before its first layer."""
        if window not in self._plans:
            self._plans[window] = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=self.floats.device)
        return self._plans[window]


class _Wrapper:
    """FlashInfer's wrapper for one window, and when its plan may be overwritten."""

    def __init__(self, inner: Any, window: int | None) -> None:
        self._inner = inner
        self._window = window
        self._copied: Any = None

    def plan(self, layout: BatchLayout, starts: torch.Tensor, pages: torch.Tensor, last: torch.Tensor) -> None:
        """On the host, int32: `starts`, [S + 1], where each sequence's pages begin in `pages`; `last`, [S], keys in its last
        page. `pages` is on the device."""
        heads = layout.heads
        assert heads is not None
        if self._copied is not None:
            self._copied.synchronize()
        self._inner.plan(
            starts, pages, last, heads.queries, heads.keys, heads.dim, layout.block_size,
            window_left=-1 if self._window is None else self._window - 1, q_data_type=layout.dtype,
            kv_data_type=layout.dtype, non_blocking=True,
        )  # fmt: skip
        if layout.device.type == "cuda":
            self._copied = cuda_event()
            self._copied.record()

    def run(self, queries: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = self._inner.run(queries, cache)
        return result


@dataclass
class _Decode:
    """S sequences of one token each."""

    rows: torch.Tensor
    """[S] int32: 0, 1, ..."""
    positions: torch.Tensor
    """[S] int32: of the tokens."""
    starts: torch.Tensor
    """[S + 1] int32: where each sequence's pages begin in `pages`."""
    last: torch.Tensor
    """[S] int32: keys in its last page, this step's included."""
    pages: torch.Tensor
    """int32"""
    wrappers: dict[int | None, _Wrapper]
    """By window."""
    workspace: _Workspace | None = None
    """Of a captured size: what smaller ones share."""

    def plan(self, layout: BatchLayout, values: Mapping[str, np.ndarray]) -> None:
        """`values`: those of the fields, which are on the device."""
        starts, last = torch.from_numpy(values["page_starts"]), torch.from_numpy(values["last_page"])
        pages = self.pages[: len(values["pages"])]
        for wrapper in self.wrappers.values():
            wrapper.plan(layout, starts, pages, last)


class FlashInferBackend(AttentionBackend):
    """Models that its kernels turn out not to run, as a self-test at their loading shows, are left to the other back end."""

    def __init__(self, device: torch.device, chunks: AttentionBackend, kernels: Any = None) -> None:
        """`chunks`: for steps with more than decodes. `kernels`: the package `flashinfer`, or what has its signatures; None:
        it is imported. Raises `FlashInferUnavailable`."""
        self._kernels = _import() if kernels is None else kernels
        self._device = device
        self._chunks = chunks
        self.facts = flashinfer(chunks.facts)
        self._workspace: _Workspace | None = None
        self._wrappers: dict[tuple[int | None, bool], _Wrapper] = {}

    def prepare(self, layout: BatchLayout) -> Any:
        if layout.all_decode and self._runs(layout):
            return self.prepare_decode(layout)
        return self._chunks.prepare(layout)

    def prepare_decode(self, layout: BatchLayout) -> _Decode:
        """Of decodes that its kernels run."""
        values = _values(layout)
        rows = np.arange(len(layout.counts), dtype=np.int32)
        positions, starts, last, pages, of_rows = pack_to_device([*values.values(), rows], layout.device)
        if self._workspace is None or self._workspace.floats.numel() < _workspace_bytes(layout):
            self._workspace = _Workspace(layout)
            self._wrappers.clear()
        wrappers = {window: self._eager(window, layout, self._workspace) for window in (None, *layout.windows)}
        decode = _Decode(of_rows, positions, starts, last, pages, wrappers)
        decode.plan(layout, values)
        return decode

    def write_kv(self, kv: LayerKv, keys: torch.Tensor, values: torch.Tensor, metadata: Any) -> None:
        if not isinstance(metadata, _Decode):
            self._chunks.write_kv(kv, keys, values, metadata)
            return
        self._kernels.append_paged_kv_cache(
            keys, values, metadata.rows, metadata.positions, _cache(kv), metadata.pages, metadata.starts, metadata.last,
            kv_layout="HND",
        )  # fmt: skip

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv: LayerKv,
        metadata: Any,
        window: int | None,
    ) -> torch.Tensor:
        if not isinstance(metadata, _Decode):
            return self._chunks.attend(queries, keys, values, kv, metadata, window)
        return metadata.wrappers[window].run(queries, _cache(kv))

    def replay_fields(self, layout: BatchLayout, max_pages: int) -> Mapping[str, Field] | None:
        if not self._runs(layout):
            return self._chunks.replay_fields(layout, max_pages)
        num_rows = len(layout.counts)
        return {
            "kv_positions": Field(np.int32, num_rows),
            "page_starts": Field(np.int32, num_rows + 1),
            "last_page": Field(np.int32, num_rows),
            "pages": Field(np.int32, num_rows * max_pages),
        }

    def replay_values(self, layout: BatchLayout) -> Mapping[str, np.ndarray]:
        return _values(layout) if self._runs(layout) else self._chunks.replay_values(layout)

    def allocate_replay(
        self, layout: BatchLayout, fields: Mapping[str, torch.Tensor], max_pages: int, larger: Any | None
    ) -> Any:
        if not self._runs(layout):
            return self._chunks.allocate_replay(layout, fields, max_pages, larger)
        workspace = _Workspace(layout) if larger is None else larger.workspace
        buffers = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": fields["page_starts"],
            "paged_kv_indices_buffer": fields["pages"],
            "paged_kv_last_page_len_buffer": fields["last_page"],
        }
        rows = torch.arange(len(layout.counts), dtype=torch.int32, device=layout.device)
        decode = _Decode(
            rows, fields["kv_positions"], fields["page_starts"], fields["last_page"], fields["pages"],
            {window: self._new_wrapper(window, layout, workspace, **buffers) for window in (None, *layout.windows)},
            workspace,
        )  # fmt: skip
        decode.plan(layout, _values(layout))
        return decode

    def begin_replay(self, static: Any, layout: BatchLayout) -> None:
        if isinstance(static, _Decode):
            static.plan(layout, _values(layout))
        else:
            self._chunks.begin_replay(static, layout)

    def _runs(self, layout: BatchLayout) -> bool:
        assert layout.heads is not None
        windows = (None, *layout.windows)
        return not layout.softcap and all(
            _works(self._kernels, layout.heads, layout.dtype, window, self._device) for window in windows
        )

    def _eager(self, window: int | None, layout: BatchLayout, workspace: _Workspace) -> _Wrapper:
        key = window, _uses_tensor_cores(layout)
        if key not in self._wrappers:
            self._wrappers[key] = self._new_wrapper(window, layout, workspace)
        return self._wrappers[key]

    def _new_wrapper(self, window: int | None, layout: BatchLayout, workspace: _Workspace, **options: Any) -> _Wrapper:
        uses_tensor_cores = _uses_tensor_cores(layout)
        inner = self._kernels.BatchDecodeWithPagedKVCacheWrapper(
            workspace.floats, "HND", use_tensor_cores=uses_tensor_cores, backend="fa2" if uses_tensor_cores else "auto",
            **options,
        )  # fmt: skip
        inner.reset_workspace_buffer(workspace.floats, workspace.plan(window))
        return _Wrapper(inner, window)


def _import() -> Any:
    try:
        import flashinfer
    # It checks versions of its own parts and of the device when it is imported, with errors of any kind.
    except Exception as error:
        raise FlashInferUnavailable(f"flashinfer cannot be used ({type(error).__name__}: {error})") from None
    return flashinfer


def _cache(kv: LayerKv) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, each `[pages, kv_heads, page_size, head_dim]`."""
    return kv.keys.transpose(1, 2), kv.values.transpose(1, 2)


def _uses_tensor_cores(layout: BatchLayout) -> bool:
    assert layout.heads is not None
    return layout.heads.queries >= LEAST_TENSOR_CORE_GROUP * layout.heads.keys


def _values(layout: BatchLayout) -> dict[str, np.ndarray]:
    """Of the fields, for decodes; in the order of `_Decode`'s."""
    num_pages = -(-layout.contexts // layout.block_size)
    is_taken = np.arange(layout.block_tables.shape[1]) < num_pages[:, None]
    return {
        "kv_positions": layout.starts.astype(np.int32),
        "page_starts": np.concatenate(([0], np.cumsum(num_pages))).astype(np.int32),
        "last_page": (layout.contexts - (num_pages - 1) * layout.block_size).astype(np.int32),
        "pages": layout.block_tables[is_taken],
    }


def _workspace_bytes(layout: BatchLayout) -> int:
    """For partial results of all heads in float32, of twice as many rows as there are, or as the device has processors."""
    assert layout.heads is not None
    on_cuda = layout.device.type == "cuda"
    num_processors = torch.cuda.get_device_properties(layout.device).multi_processor_count if on_cuda else 1
    num_rows = 2 * max(len(layout.counts), num_processors)
    tile = next((t for t in _QUERY_TILES if layout.heads.queries <= t * layout.heads.keys), _QUERY_TILES[-1])
    return max(_LEAST_WORKSPACE_BYTES, 4 * num_rows * tile * layout.heads.queries * layout.heads.dim)


@functools.cache
def _works(kernels: Any, heads: Heads, dtype: torch.dtype, window: int | None, device: torch.device) -> bool:
    """Whether the kernels for such models can be had and give what the definition of attention gives. Compiles them."""
    try:
        _test(kernels, heads, dtype, window, device)
    # Compilers and drivers raise errors of any kind.
    except Exception as error:
        logger.warning("FlashInfer does not decode %s in %s: %s: %s", heads, dtype, type(error).__name__, error)
        return False
    return True


@torch.inference_mode()
def _test(kernels: Any, heads: Heads, dtype: torch.dtype, window: int | None, device: torch.device) -> None:
    """Raises `AssertionError` where they give another result. Three sequences on scattered pages with gaps in between."""
    generator = torch.Generator().manual_seed(0)
    tables = np.array([[7, 7, 7, 7, 7], [2, 2, 2, 2, 2], [6, 0, 3, 1, 5]], np.int32)
    contexts = np.array([1, 16, 75], np.int64)
    shape = KvShape(1, 16, heads.keys, heads.dim, dtype)
    store = KvStore(8, 2 * shape.block_bytes, device)
    views = store.attach(shape, 1)
    (kv,) = views.layers
    for half in (kv.keys, kv.values):
        half.copy_(torch.randn(half.shape, generator=generator))
    windows = () if window is None else (window,)
    layout = BatchLayout(contexts - 1, np.ones(3, np.int64), tables, 16, dtype, device, windows, heads)
    queries = torch.randn(3, heads.queries, heads.dim, generator=generator).to(device, dtype)
    keys, values = (torch.randn(3, heads.keys, heads.dim, generator=generator).to(device, dtype) for _ in range(2))
    backend = FlashInferBackend(device, TorchBackend(device), kernels)
    decode = backend.prepare_decode(layout)
    backend.write_kv(kv, keys, values, decode)
    got = backend.attend(queries, keys, values, kv, decode, window)
    for row, context in enumerate(contexts.tolist()):
        pages = torch.from_numpy(tables[row, : -(-context // 16)]).long().to(device)
        cached = [half[pages].flatten(0, 1)[:context] for half in (kv.keys, kv.values)]
        assert torch.equal(cached[0][-1], keys[row]) and torch.equal(cached[1][-1], values[row])
        first = 0 if window is None else max(0, context - window)
        k, v = (x[first:].float().repeat_interleave(heads.queries // heads.keys, 1) for x in cached)
        weights = (torch.einsum("hd,khd->hk", queries[row].float(), k) / math.sqrt(heads.dim)).softmax(-1)
        expected = torch.einsum("hk,khd->hd", weights, v)
        torch.testing.assert_close(got[row].float(), expected, rtol=_TOLERANCE, atol=_TOLERANCE)
