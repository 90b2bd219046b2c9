"""What a layer computes between its matrix products and attention: norms, rotary embeddings, the gate of the MLP.

`TorchOps` runs anywhere. `FlashInferOps` has the same functions with one kernel for each, on CUDA; they are used only after
a self-test has shown that they give what those of `TorchOps` give (`choose_ops`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from services.worker.attention.flashinfer_modules import explain
from services.worker.models.rope import Rope, RotaryEmbedding, rotate

logger = logging.getLogger(__name__)

Rotations = tuple[torch.Tensor, torch.Tensor]
"""What `rope` makes of a step's positions, for `rotate` of the same class."""

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Tolerance of kernels against torch: a few roundings of values around 1."""


class TorchOps:
    """Tensors are in the model's dtype; T tokens. What a function may overwrite, its caller does not use again."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Over the last axis: x / sqrt(mean(x ** 2) + eps) * weight (Zhang and Sennrich 2019)."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, hidden: torch.Tensor, pending: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, the sum) of two `[T, width]`, which it may overwrite."""
        total = hidden + pending
        return self.rms_norm(total, weight, eps), total

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`[T, 2 * n]` -> `[T, n]`: silu of the first half times the second."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def rope(self, rotary: Rope, positions: torch.Tensor) -> Rotations:
        """`positions`: [T] int64."""
        return rotary(positions)

    def rotate(self, heads: torch.Tensor, rope: Rotations) -> torch.Tensor:
        """Rotary embedding of `[T, heads, head_dim]`, contiguous in each token; may overwrite it."""
        return rotate(heads, *rope)


class WideNormOps(TorchOps):
    """Norms in float32, by weights in float32 (Gemma's)."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


class FlashInferOps(TorchOps):
    """Calls kernels with the signatures of FlashInfer 0.6 and 0.7."""

    def __init__(self, norm: Any, activation: Any, rope: Any) -> None:
        """`flashinfer.norm`, `flashinfer.activation`, `flashinfer.rope`."""
        self._norm, self._activation, self._rope = norm, activation, rope

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        result: torch.Tensor = self._norm.rmsnorm(x, weight, eps)
        return result

    def add_rms_norm(
        self, hidden: torch.Tensor, pending: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._norm.fused_add_rmsnorm(
            pending, hidden, weight, eps
        )  # (the addend becomes the norm, the residual the sum)
        return pending, hidden

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._activation.silu_and_mul(gate_up)
        return result

    def rope(self, rotary: Rope, positions: torch.Tensor) -> Rotations:
        """A table of float32 with a line for each token, `[T, head_dim]`, and the tokens' lines."""
        assert isinstance(rotary, RotaryEmbedding)
        places = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
        return torch.cat(rotary.cos_sin(positions), -1), places

    def rotate(self, heads: torch.Tensor, rope: Rotations) -> torch.Tensor:
        table, places = rope
        num_tokens, num_heads, dim = heads.shape
        # All heads are rotated alike, so that it does not matter which of them are queries.
        queries = heads[:, : num_heads - 1].view(num_tokens, -1)
        keys = heads[:, num_heads - 1 :].view(num_tokens, -1)
        self._rope.apply_rope_with_cos_sin_cache_inplace(places, queries, keys, dim, table, is_neox=True)
        return heads


_TORCH = TorchOps()


def choose_ops(device: torch.device, dtype: torch.dtype, head_dim: int) -> TorchOps:
    """The fastest that work there."""
    if device.type != "cuda" or dtype not in TOLERANCE:
        return _TORCH
    return _flashinfer_ops(device, dtype, head_dim)


@functools.cache
def _flashinfer_ops(device: torch.device, dtype: torch.dtype, head_dim: int) -> TorchOps:
    """Its first call compiles them."""
    try:
        from flashinfer import activation, norm, rope

        ops = FlashInferOps(norm, activation, rope)
        compare(ops, device, dtype, head_dim)
    # Its compiler and its checks of versions and devices raise errors of any kind.
    except Exception as error:
        logger.warning("fused kernels are not used: %s", explain(error))
        return _TORCH
    return ops


def compare(ops: TorchOps, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Raises `AssertionError` where `ops` gives other results than `TorchOps`."""
    generator = torch.Generator().manual_seed(0)
    close: Callable[..., None] = functools.partial(
        torch.testing.assert_close, rtol=TOLERANCE.get(dtype, 1e-5), atol=TOLERANCE.get(dtype, 1e-5)
    )

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    for num_tokens in (1, 7):
        hidden, pending, weight = random(num_tokens, 256), random(num_tokens, 256), random(256)
        close(ops.rms_norm(hidden.clone(), weight, 1e-5), _TORCH.rms_norm(hidden, weight, 1e-5))
        expected = _TORCH.add_rms_norm(hidden, pending, weight, 1e-5)
        close(ops.add_rms_norm(hidden.clone(), pending.clone(), weight, 1e-5), expected)
        gate_up = random(num_tokens, 512)
        close(ops.silu_and_mul(gate_up.clone()), _TORCH.silu_and_mul(gate_up))
        rotary = RotaryEmbedding(
            head_dim, {"rope_type": "default", "rope_theta": 10000.0}, 4096, 4096, device, dtype
        )  # fmt: skip
        positions = torch.arange(num_tokens, device=device) * 397
        heads = random(num_tokens, 8, head_dim)
        got = ops.rotate(heads.clone()[:, :6], ops.rope(rotary, positions))
        close(got, _TORCH.rotate(heads[:, :6], _TORCH.rope(rotary, positions)))
