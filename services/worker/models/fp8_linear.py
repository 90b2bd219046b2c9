"""Linear layers with weights in float8_e4m3: half the bytes of 16-bit weights, and twice their matrix rate.

Each output has a scale of its own; each row of the input gets one when it is multiplied (dynamic quantisation, as vLLM's
`--quantization fp8`). On CUDA from compute capability 8.9 on `torch._scaled_mm` multiplies; elsewhere the weights are
widened for each product, which saves memory and no time.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
_LEAST_SCALE = 1e-12
_MULTIPLE = 16
"""Both sizes of a weight must be multiples of it for the scaled product."""

ScaledProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
"""(x `[rows, in]` float8, weight `[out, in]` float8, scales of x `[rows, 1]`, of the weight `[1, out]`, result's dtype)"""


class Fp8Linear:
    """`x @ weight.T + bias`. The weight given is not kept."""

    __slots__ = ("_bias", "_product", "_scales", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """`weight`: [out_features, in_features], on its device. `bias`: [out_features]."""
        self._weight, scales = quantise(weight)
        self._scales = scales.t().contiguous()
        self._bias = bias
        fits = weight.shape[0] % _MULTIPLE == 0 == weight.shape[1] % _MULTIPLE
        self._product = scaled_product_of(weight.device, weight.dtype) if fits else None

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes + self._scales.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features]"""
        if self._product is None:
            return F.linear(x, self._weight.to(x.dtype) * self._scales.t().to(x.dtype), self._bias)
        narrow, scales = quantise(x)
        result = self._product(narrow, self._weight, scales, self._scales, x.dtype)
        return result if self._bias is None else result.add_(self._bias)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `[rows, n]` scaled to what float8 holds: (`[rows, n]` float8, `[rows, 1]` float32 to multiply them with)."""
    largest = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True, dtype=torch.float32)
    scales = largest.mul_(1 / LARGEST).clamp_(min=_LEAST_SCALE)
    return (x / scales).to(DTYPE), scales  # a rounding beyond the largest becomes the largest


def multiply(
    x: torch.Tensor, weight: torch.Tensor, x_scales: torch.Tensor, weight_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """What the kernels compute, in float32."""
    return ((x.float() @ weight.float().t()) * x_scales * weight_scales).to(dtype)


def _multiply_rowwise(
    x: torch.Tensor, weight: torch.Tensor, x_scales: torch.Tensor, weight_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Scales within the kernel: Hopper and later, results in bfloat16."""
    result: torch.Tensor = torch._scaled_mm(
        x, weight.t(), scale_a=x_scales, scale_b=weight_scales, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return result.to(dtype)


def _multiply_then_scale(
    x: torch.Tensor, weight: torch.Tensor, x_scales: torch.Tensor, weight_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    one = torch.ones((), dtype=torch.float32, device=x.device)
    result: torch.Tensor = torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    return result.mul_(x_scales).mul_(weight_scales).to(dtype)


@functools.cache
def scaled_product_of(device: torch.device, dtype: torch.dtype) -> ScaledProduct | None:
    """The first of the products that works on the device, as a self-test shows; None: weights are widened instead."""
    if device.type != "cuda":
        return None
    for product in (_multiply_rowwise, _multiply_then_scale):
        try:
            compare(product, device, dtype)
        except (RuntimeError, AttributeError, TypeError, ValueError, AssertionError) as error:
            logger.warning("%s is not used: %s", product.__name__.strip("_"), str(error))
        else:
            return product
    return None


def compare(product: ScaledProduct, device: torch.device, dtype: torch.dtype) -> None:
    """Raises where a product gives another result than `multiply`, for one row, few and many."""
    generator = torch.Generator().manual_seed(0)
    weight, weight_scales = quantise(torch.randn(64, 96, generator=generator).to(device))
    for rows in (1, 5, 32, 200):
        x, scales = quantise(torch.randn(rows, 96, generator=generator).to(device))
        arguments = x, weight, scales, weight_scales.t().contiguous(), dtype
        torch.testing.assert_close(product(*arguments), multiply(*arguments), rtol=2e-2, atol=2e-2)
