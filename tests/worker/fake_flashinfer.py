"""What Tideway calls of FlashInfer 0.6, in plain torch, with the checks that it makes of its arguments and its demand for
workspace on a device of `NUM_PROCESSORS`: shows on any machine that it is called rightly. test_flashinfer_host.py compares
the demand with that of FlashInfer's own code."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

NUM_PROCESSORS = 132
"""An H100's."""
BLOCKS_PER_PROCESSOR = 2
"""Blocks of the decode kernels without tensor cores that run at the same time: what CUDA says of a compiled kernel."""

_plan_ids = itertools.count(1)

Cache = tuple[torch.Tensor, torch.Tensor]
Needs = tuple[int, int]
"""Bytes for partial results, and for the plan."""


class _Memory:
    """Counts as FlashInfer's allocator does."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, num_bytes: int, alignment: int = 16) -> None:
        self.size = -(-self.size // alignment) * alignment + num_bytes


def tensor_core_needs(
    query_starts: torch.Tensor, page_starts: torch.Tensor, heads: int, kv_heads: int, dim: int, page_size: int,
    window_left: int, *, is_fixed: bool,
) -> Needs:  # fmt: skip
    """`PrefillPlan` of its scheduler.cuh."""
    group = heads // kv_heads
    num_rows, batch = int(query_starts[-1]), len(query_starts) - 1
    packed = (query_starts.diff().long() * group).tolist()
    longest = (num_rows - batch + 1) * group if is_fixed else sum(packed) // batch
    tile = 128 if longest > 64 and dim < 256 else 64 if longest > 16 else 16
    num_tiles = [-(-rows // tile) for rows in packed]
    num_pages = page_starts.diff().tolist()
    if window_left >= 0:
        num_pages = [min(pages, -(-(window_left + tile) // page_size)) for pages in num_pages]
    most = 2 * NUM_PROCESSORS // kv_heads

    def blocks(pages_at_once: int) -> int:
        return sum(t * -(-max(p, 1) // pages_at_once) for t, p in zip(num_tiles, num_pages, strict=True))

    low, high = max(128 // page_size, 1), max(1, *num_pages)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if blocks(middle) > most else (low, middle)
    is_split = is_fixed or low < max(1, *num_pages)
    padded = max(most, -(-num_rows * group // tile) + batch - 1) if is_fixed else blocks(low)
    assert blocks(low) <= padded
    floats, plan = _Memory(), _Memory()
    for _ in range(3):
        plan.take(4 * padded)
    plan.take(4 * (batch + 1))
    plan.take(4, 1)
    if is_fixed:
        plan.take(4)
    if is_split:
        floats.take(4 * heads * padded * tile * dim)
        floats.take(4 * heads * padded * tile)
        plan.take(4 * (num_rows + 1))
        plan.take(padded)
    return floats.size, plan.size


def decode_needs(
    page_starts: torch.Tensor, heads: int, kv_heads: int, dim: int, page_size: int, *, is_fixed: bool
) -> Needs:
    """`DecodePlan` of its scheduler.cuh: without tensor cores."""
    num_pages, batch = page_starts.diff().tolist(), len(page_starts) - 1
    assert heads // kv_heads in (1, 2, 3, 4, 8), f"Unsupported group_size: {heads // kv_heads}"
    grid = BLOCKS_PER_PROCESSOR * NUM_PROCESSORS
    new_batch, is_split = batch, False
    if batch * kv_heads < grid:
        low, high = max(128 // page_size, 1), max(num_pages)
        while low < high:
            middle = (low + high) // 2
            too_many = sum(-(-p // middle) for p in num_pages) * kv_heads > grid
            low, high = (middle + 1, high) if too_many else (low, middle)
        new_batch = sum(-(-max(p, 1) // low) for p in num_pages)
        is_split = is_fixed or new_batch != batch
    padded = (grid // kv_heads if is_split else batch) if is_fixed else new_batch
    floats, plan = _Memory(), _Memory()
    plan.take(4 * padded)
    plan.take(4 * padded)
    plan.take(4 * (padded + 1))
    plan.take(4, 1)
    if is_split:
        floats.take(4 * heads * padded * dim)
        floats.take(4 * heads * padded)
        plan.take(padded)
    return floats.size, plan.size


class _PagedWrapper:
    """What both have in common."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, *, is_fixed: bool) -> None:
        assert kv_layout == "HND"
        self.device = float_workspace_buffer.device
        self.is_fixed = is_fixed
        self.workspace = float_workspace_buffer
        self.int_workspace = torch.empty(8 << 20, dtype=torch.uint8, device=self.device)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        for buffer in (float_workspace_buffer, int_workspace_buffer):
            assert buffer.dtype == torch.uint8 and buffer.device == self.device
            if buffer.numel() and buffer.data_ptr() % 16:
                raise ValueError("a workspace buffer must be 16-byte aligned")
        self.workspace, self.int_workspace = float_workspace_buffer, int_workspace_buffer

    def _check_pages(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor) -> None:
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert indptr.device.type == last_page_len.device.type == "cpu", "else it waits for the device"
        assert indices.device == self.device and len(indices) == indptr[-1] and len(indptr) == len(last_page_len) + 1

    def _planned(
        self, needs: Needs, starts: torch.Tensor, shape: tuple[int, int, int, int], window_left: int, softcap: float | None,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:  # fmt: skip
        """`starts`: of each sequence's rows."""
        for needed, buffer in zip(needs, (self.workspace, self.int_workspace), strict=True):
            if needed > buffer.numel():
                raise RuntimeError(
                    f"Buffer overflow when allocating memory with size {needed}, but only {buffer.numel()} bytes "
                    "available in AlignedAllocator. Increase the workspace buffer size."
                )
        self.starts, self.shape, self.dtypes = starts.clone(), shape, dtypes
        self.window_left, self.softcap = window_left, softcap or 0.0
        self.plan_id = next(_plan_ids)
        self.plan_memory = self.int_workspace[:8].view(torch.int64)
        self.plan_memory.fill_(self.plan_id)

    def _attended(self, q: torch.Tensor, paged_kv_cache: Cache, out: torch.Tensor | None) -> torch.Tensor:
        assert int(self.plan_memory) == self.plan_id, "another plan lies where this one was"
        heads, kv_heads, dim, page_size = self.shape
        k, v = paged_kv_cache
        assert k.stride() == v.stride() and k.shape == v.shape and k.stride(3) == 1
        assert k.shape[1:] == (kv_heads, page_size, dim) and q.shape[1:] == (heads, dim) and q.stride(2) == 1
        assert (q.dtype, k.dtype) == self.dtypes
        assert len(q) == self.starts[-1], "as many rows as were planned"
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device) and out.is_contiguous()
        page_starts, pages, last = self.buffers
        runs_of_pages, runs_of_rows = (itertools.pairwise(x.tolist()) for x in (page_starts, self.starts))
        for (begin, end), rows, num_on_last in zip(runs_of_pages, runs_of_rows, last.tolist(), strict=True):
            own = slice(*rows)
            length = (end - begin - 1) * page_size + num_on_last
            keys, values = (
                x[pages[begin:end].long()].transpose(1, 2).flatten(0, 1)[:length].double()
                .repeat_interleave(heads // kv_heads, 1) for x in (k, v)
            )  # fmt: skip
            scores = torch.einsum("qhd,khd->hqk", q[own].double(), keys) / math.sqrt(dim)
            if self.softcap:
                scores = self.softcap * (scores / self.softcap).tanh()
            key = torch.arange(length, device=scores.device)
            query = key[length - (own.stop - own.start) :, None]
            hidden = key > query
            if self.window_left >= 0:
                hidden |= key < query - self.window_left
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            out[own] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        return out


class BatchDecodeWithPagedKVCacheWrapper(_PagedWrapper):
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None, paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto", jit_args: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout, is_fixed=use_cuda_graph)
        assert backend == ("fa2" if use_tensor_cores else "auto")
        self.uses_tensor_cores = use_tensor_cores
        if use_cuda_graph:
            starts, pages, last = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
            assert starts is not None and pages is not None and last is not None
            assert len(starts) == len(last) + 1
            self.buffers = starts, pages, last

    def workspace_size(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *, window_left: int = -1, logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16, kv_data_type: torch.dtype | None = None,
    ) -> Needs:  # fmt: skip
        self._check_pages(indptr, indices, last_page_len)
        shape = num_qo_heads, num_kv_heads, head_dim, page_size
        if not self.uses_tensor_cores:
            return decode_needs(indptr, *shape, is_fixed=self.is_fixed)
        rows = torch.arange(len(indptr))
        return tensor_core_needs(rows, indptr, *shape, window_left, is_fixed=self.is_fixed)

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *, window_left: int = -1, logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16, kv_data_type: torch.dtype | None = None, non_blocking: bool = True,
    ) -> None:  # fmt: skip
        needs = self.workspace_size(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
                                    window_left=window_left)  # fmt: skip
        assert non_blocking
        if self.is_fixed:
            starts, pages, last = self.buffers
            assert len(last_page_len) == len(last) and len(indices) <= len(pages)
            starts.copy_(indptr)
            last.copy_(last_page_len)
            pages[: len(indices)].copy_(indices)
        else:
            self.buffers = indptr.clone(), indices, last_page_len.clone()
        self._planned(
            needs, torch.arange(len(indptr)), (num_qo_heads, num_kv_heads, head_dim, page_size), window_left,
            logits_soft_cap, (q_data_type, kv_data_type or q_data_type),
        )  # fmt: skip

    def run(self, q: torch.Tensor, paged_kv_cache: Cache, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._attended(q, paged_kv_cache, out)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
    num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, *, window_left: int = -1,
    logits_soft_cap: float | None = None, q_data_type: torch.dtype = torch.float16,
    kv_data_type: torch.dtype | None = None, global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Plans a wrapper that has been planned once, whose buffers have their values."""
    assert self.is_fixed and hasattr(self, "plan_id") and global_override_indptr_cpu is not None
    shape = num_qo_heads, num_kv_heads, head_dim, page_size
    needs = self.workspace_size(global_override_indptr_cpu, indices, last_page_len, *shape, window_left=window_left)
    starts, pages, last = self.buffers
    assert torch.equal(starts, indptr) and torch.equal(last, last_page_len)
    assert torch.equal(pages[: len(indices)], indices)
    dtypes = q_data_type, kv_data_type or q_data_type
    self._planned(needs, torch.arange(len(indptr)), shape, window_left, logits_soft_cap, dtypes)


class BatchPrefillWithPagedKVCacheWrapper(_PagedWrapper):
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None, paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None, paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None, mask_indptr_buf: torch.Tensor | None = None, backend: str = "auto",
        jit_args: Any = None, jit_kwargs: Any = None,
    ) -> None:  # fmt: skip
        assert backend == "fa2" and not use_cuda_graph
        super().__init__(float_workspace_buffer, kv_layout, is_fixed=False)

    def workspace_size(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *,
        causal: bool = False, window_left: int = -1, logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16, kv_data_type: torch.dtype | None = None,
        max_token_per_sequence: int | None = None,
    ) -> Needs:  # fmt: skip
        self._check_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert (
            qo_indptr.dtype == torch.int32 and qo_indptr.device.type == "cpu" and len(qo_indptr) == len(paged_kv_indptr)
        )
        return tensor_core_needs(
            qo_indptr, paged_kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, page_size, window_left, is_fixed=False
        )

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *,
        causal: bool = False, window_left: int = -1, logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16, kv_data_type: torch.dtype | None = None, non_blocking: bool = True,
        max_token_per_sequence: int | None = None,
    ) -> None:  # fmt: skip
        needs = self.workspace_size(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk,
            page_size, window_left=window_left,
        )  # fmt: skip
        assert causal and non_blocking
        assert max_token_per_sequence in (None, int(qo_indptr.diff().max()))
        self.buffers = paged_kv_indptr.clone(), paged_kv_indices, paged_kv_last_page_len.clone()
        self._planned(
            needs, qo_indptr, (num_qo_heads, num_kv_heads, head_dim_qk, page_size), window_left, logits_soft_cap,
            (q_data_type, kv_data_type or q_data_type),
        )  # fmt: skip

    def run(self, q: torch.Tensor, paged_kv_cache: Cache, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._attended(q, paged_kv_cache, out)


def append_paged_kv_cache(
    append_key: torch.Tensor, append_value: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    paged_kv_cache: Cache, kv_indices: torch.Tensor, kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:  # fmt: skip
    for indices in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        assert indices.dtype == torch.int32 and indices.is_contiguous() and indices.dim() == 1
    assert kv_layout == "HND" and len(batch_indices) == len(positions) == len(append_key)
    page_size = paged_kv_cache[0].shape[2]
    pages, starts = kv_indices.tolist(), kv_indptr.tolist()
    for i, (row, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        page = pages[starts[row] + position // page_size]
        for cache, new in zip(paged_kv_cache, (append_key, append_value), strict=True):
            cache[page, :, position % page_size] = new[i]


def _rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    assert input.dim() in (2, 3) and input.stride(-1) == 1
    return F.rms_norm(input.float(), weight.shape, weight.float(), eps).to(input.dtype)


def _fused_add_rmsnorm(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    assert input.dim() == residual.dim() == 2
    residual.add_(input)
    input.copy_(_rmsnorm(residual, weight, eps))


def _silu_and_mul(input: torch.Tensor) -> torch.Tensor:
    half = input.shape[-1] // 2
    return (F.silu(input[..., :half].float()) * input[..., half:].float()).to(input.dtype)


def _rope(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int, cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:  # fmt: skip
    assert positions.dtype == torch.int32 and cos_sin_cache.dtype == torch.float32 and is_neox
    assert cos_sin_cache.is_contiguous()
    cos, sin = cos_sin_cache[positions.long()][:, None].chunk(2, -1)
    for part in (query, key):
        heads = part.view(len(part), -1, head_size)
        first, second = heads.float().chunk(2, -1)
        heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))


norm = SimpleNamespace(rmsnorm=_rmsnorm, fused_add_rmsnorm=_fused_add_rmsnorm)
activation = SimpleNamespace(silu_and_mul=_silu_and_mul)
rope = SimpleNamespace(apply_rope_with_cos_sin_cache_inplace=_rope)
