"""What Tideway calls of FlashInfer 0.6, in plain torch, with the checks that its kernels make of their arguments: shows on
any machine that they are called rightly."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

_plan_ids = itertools.count(1)

Cache = tuple[torch.Tensor, torch.Tensor]


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None, paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto", jit_args: Any = None,
    ) -> None:  # fmt: skip
        assert kv_layout == "HND" and backend == ("fa2" if use_tensor_cores else "auto")
        self.device = float_workspace_buffer.device
        self.workspace = float_workspace_buffer
        self.is_fixed = use_cuda_graph
        self.buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert float_workspace_buffer is self.workspace and int_workspace_buffer.dtype == torch.uint8
        self.plan_memory = int_workspace_buffer[:8].view(torch.int64)

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *, window_left: int = -1,
        q_data_type: torch.dtype = torch.float16, kv_data_type: torch.dtype | None = None, non_blocking: bool = True,
    ) -> None:  # fmt: skip
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert indptr.device.type == last_page_len.device.type == "cpu", "else it waits for the device"
        assert indices.device == self.device and len(indices) == indptr[-1] and non_blocking
        if self.is_fixed:
            starts, pages, last = self.buffers
            assert starts is not None and pages is not None and last is not None
            assert len(last_page_len) == len(last) and len(indices) <= len(pages)
            starts.copy_(indptr)
            last.copy_(last_page_len)
            pages[: len(indices)].copy_(indices)
        else:
            self.buffers = indptr.clone(), indices, last_page_len.clone()
        self.shape = num_qo_heads, num_kv_heads, head_dim, page_size
        self.dtypes = q_data_type, kv_data_type
        self.window_left = window_left
        self.plan_id = next(_plan_ids)
        self.plan_memory.fill_(self.plan_id)

    def run(self, q: torch.Tensor, paged_kv_cache: Cache) -> torch.Tensor:
        assert int(self.plan_memory) == self.plan_id, "another plan lies where this one was"
        heads, kv_heads, dim, page_size = self.shape
        k, v = paged_kv_cache
        assert k.stride() == v.stride() and k.shape == v.shape and k.stride(3) == 1
        assert k.shape[1:] == (kv_heads, page_size, dim) and q.shape[1:] == (heads, dim) and q.stride(2) == 1
        assert (q.dtype, k.dtype) == self.dtypes
        starts, pages, last = self.buffers
        assert starts is not None and pages is not None and last is not None
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for row, (begin, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
            length = (end - begin - 1) * page_size + int(last[row])
            first = 0 if self.window_left < 0 else max(0, length - 1 - self.window_left)
            keys, values = (
                x[pages[begin:end].long()].transpose(1, 2).flatten(0, 1)[first:length].double()
                .repeat_interleave(heads // kv_heads, 1) for x in (k, v)
            )  # fmt: skip
            weights = (torch.einsum("hd,khd->hk", q[row].double(), keys) / math.sqrt(dim)).softmax(-1)
            out[row] = torch.einsum("hk,khd->hd", weights, values).to(q.dtype)
        return out


def append_paged_kv_cache(
    append_key: torch.Tensor, append_value: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor,
    paged_kv_cache: Cache, kv_indices: torch.Tensor, kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:  # fmt: skip
    for indices in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        assert indices.dtype == torch.int32 and indices.is_contiguous() and indices.dim() == 1
    assert kv_layout == "HND" and len(batch_indices) == len(positions) == len(append_key)
    page_size = paged_kv_cache[0].shape[2]
    for i, (row, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        page = int(kv_indices[int(kv_indptr[row]) + position // page_size])
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
