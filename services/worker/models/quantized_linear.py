"""Linear layers whose weights have few bits; inputs and results stay in the model's dtype.

The compiled kernels multiply them where they run. torch's operators for these products are private (its Inductor uses them),
so each is used only after a self-test shows that it gives the dequantised product here; else weights are dequantised when
they are loaded.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from services.worker.models.fp8_linear import Fp8Linear
from services.worker.models.linear import Linear
from services.worker.native.library import PackedIntegers, packs_integers
from shared.models.quantization import GROUP_SIZE

logger = logging.getLogger(__name__)

AnyLinear = Callable[[torch.Tensor], torch.Tensor]
"""[rows, in_features] -> [rows, out_features]"""

_INT4_GROUPS = (32, 64, 128, 256)
_TILE_COLUMNS = 8
"""Tiles of 16 inputs that int4 weights are packed by on CUDA."""
_INT8_ROWS = 12
"""Up to which int8 products read the weights as they are; for more rows they are widened first, on CPU."""


@dataclass
class GroupedWeights:
    """`weight[n, k] = (values[n, k] - zeros[n, k // group]) * scales[n, k // group]`, or of input `columns[k]` instead of
    k. G groups."""

    values: torch.Tensor
    """[out_features, in_features] uint8, or float8 with zeros of 0"""
    scales: torch.Tensor
    """[out_features, G] float32"""
    zeros: torch.Tensor
    """[out_features, G] float32"""
    bits: int
    columns: torch.Tensor | None = None
    """[in_features] int64; None: in order."""

    @property
    def group_size(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]

    def to(self, device: torch.device) -> GroupedWeights:
        columns = None if self.columns is None else self.columns.to(device)
        return GroupedWeights(self.values.to(device), self.scales.to(device), self.zeros.to(device), self.bits, columns)

    def of_outputs(self, rows: torch.Tensor) -> GroupedWeights:
        return replace(self, values=self.values[rows], scales=self.scales[rows], zeros=self.zeros[rows])

    def of_inputs(self, part: int, num_parts: int) -> GroupedWeights:
        """Makes equal parts of the inputs, which consist of whole groups, or of one that all share."""
        values = self.values.chunk(num_parts, 1)[part]
        if self.scales.shape[1] == 1:
            return replace(self, values=values)
        scales, zeros = (x.chunk(num_parts, 1)[part] for x in (self.scales, self.zeros))
        return replace(self, values=values, scales=scales, zeros=zeros)

    def dequantized(self) -> torch.Tensor:
        """[out_features, in_features] float32"""
        grouped = self.values.view(len(self.values), -1, self.group_size).float()
        weight: torch.Tensor = ((grouped - self.zeros[..., None]) * self.scales[..., None]).flatten(1)
        if self.columns is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.columns, weight)


def quantized(weight: torch.Tensor, bias: torch.Tensor | None, quantization: str) -> AnyLinear:
    """Quantises a weight `[out_features, in_features]`, rounded to the nearest. One whose shape does not fit stays as
    it is."""
    if quantization == "fp8":
        return Fp8Linear(weight, bias)
    if quantization == "int8":
        scales = weight.abs().amax(1).float().clamp_(min=1e-12) / 127
        values = (weight.float() / scales[:, None]).round_().to(torch.int8)
        return Int8Linear(values, scales.to(weight.dtype), bias)
    if weight.shape[1] % GROUP_SIZE or not _takes_int4(rounded := rounded_to_int4(weight), weight.dtype):
        return Linear(weight, bias)
    return Int4Linear(rounded, bias, weight.dtype)


def rounded_to_int4(weight: torch.Tensor) -> GroupedWeights:
    """Each group's range, with 0 in it, is divided into 15 equal steps."""
    grouped = weight.float().view(len(weight), -1, GROUP_SIZE)
    low, high = grouped.amin(2).clamp_(max=0), grouped.amax(2).clamp_(min=0)
    scales = (high - low).clamp_(min=1e-12) / 15
    zeros = (-low / scales).round_()
    values = (grouped / scales[..., None]).round_().add_(zeros[..., None]).clamp_(0, 15)
    return GroupedWeights(values.flatten(1).to(torch.uint8), scales, zeros, 4)


def from_groups(parts: list[GroupedWeights], bias: torch.Tensor | None, dtype: torch.dtype) -> AnyLinear:
    """Joins weights that a checkpoint has quantised, one behind the other, in as few bits as this device has products
    for."""
    if len({None if part.columns is None else tuple(part.columns.tolist()) for part in parts}) > 1:
        return Linear(torch.cat([part.dequantized() for part in parts]).to(dtype), bias)
    values, scales, zeros = (torch.cat([getattr(part, n) for part in parts]) for n in ("values", "scales", "zeros"))
    weights = GroupedWeights(values, scales, zeros, parts[0].bits, parts[0].columns)
    if weights.values.is_floating_point():
        widened = weights.dequantized().to(dtype)
        return Fp8Linear(widened, bias) if widened.is_cuda else Linear(widened, bias)
    if weights.bits == 4 and _takes_int4(weights, dtype):
        return Int4Linear(weights, bias, dtype)
    if weights.bits == 8 and weights.scales.shape[1] == 1 and bool((weights.zeros == 128).all()):
        values = (weights.values.to(torch.int16) - 128).to(torch.int8)
        if weights.columns is not None:
            values = torch.empty_like(values).index_copy_(1, weights.columns, values)
        return Int8Linear(values, weights.scales[:, 0].to(dtype), bias)
    return Linear(weights.dequantized().to(dtype), bias)


class Int8Linear:
    """A scale for each output."""

    __slots__ = ("_bias", "_packed", "_scales", "_values", "compiled")

    def __init__(self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`values`: [out_features, in_features] int8. `scales`: [out_features] in the dtype of what comes in."""
        self.compiled = _compiled(values, scales[:, None], None, bias, scales.dtype)
        if self.compiled is not None:
            return
        self._values, self._scales, self._bias = values.contiguous(), scales, bias
        self._packed = values.device.type == "cpu" and int8_works(scales.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.compiled is not None:
            return self.compiled(x)
        if self._packed and len(x) <= _INT8_ROWS:
            result: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, self._values, self._scales)
        else:
            # whole numbers up to 127 are exact in 16 bits too
            result = F.linear(x, self._values.to(x.dtype)).mul_(self._scales)
        return result if self._bias is None else result.add_(self._bias)


class Int4Linear:
    """A scale and a zero for each group of inputs."""

    __slots__ = ("_bias", "_columns", "_group_size", "_is_cpu", "_packed", "_scales_and_zeros", "compiled")

    def __init__(self, weights: GroupedWeights, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.compiled = None
        if weights.columns is None:
            self.compiled = _compiled(weights.values, weights.scales, weights.zeros, bias, dtype)
        if self.compiled is not None:
            return
        self._bias, self._columns, self._group_size = bias, weights.columns, weights.group_size
        self._is_cpu = weights.values.device.type == "cpu"
        # torch's: (value - 8) * scale + zero
        zeros = (8 - weights.zeros) * weights.scales
        self._scales_and_zeros = torch.stack((weights.scales, zeros), 2).transpose(0, 1).contiguous().to(dtype)
        if self._is_cpu:
            self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weights.values.int(), 1)
        else:
            pairs = weights.values[:, ::2] << 4 | weights.values[:, 1::2]
            self._packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), _TILE_COLUMNS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.compiled is not None:
            return self.compiled(x)
        if self._columns is not None:
            x = x.index_select(1, self._columns)
        operator = torch.ops.aten._weight_int4pack_mm_for_cpu if self._is_cpu else torch.ops.aten._weight_int4pack_mm
        result: torch.Tensor = operator(x.contiguous(), self._packed, self._group_size, self._scales_and_zeros)
        return result if self._bias is None else result.add_(self._bias)


def _compiled(
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> PackedIntegers | None:
    return PackedIntegers(values, scales, zeros, bias) if packs_integers(values, scales, zeros, dtype) else None


def _takes_int4(weights: GroupedWeights, dtype: torch.dtype) -> bool:
    values, zeros = weights.values, weights.zeros
    if weights.columns is None and packs_integers(values, weights.scales, zeros, dtype):
        return True
    return weights.group_size in _INT4_GROUPS and int4_works(values.device.type, dtype, *_odd(values.shape))


def _odd(shape: torch.Size) -> tuple[int, int]:
    """What of a shape decides whether int4 operators take it."""
    return shape[0] % 64, shape[1] % 128


@functools.cache
def int8_works(dtype: torch.dtype) -> bool:
    """Whether the product on CPU gives the dequantised one."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (96, 64), generator=generator).to(torch.int8)
    scales = (torch.rand(96, generator=generator) / 64).to(dtype)
    x = torch.randn(3, 64, generator=generator).to(dtype)
    return _agrees(
        f"int8 weights with {dtype}",
        lambda: torch.ops.aten._weight_int8pack_mm(x, values, scales),
        F.linear(x.float(), values.float() * scales.float()[:, None]),
    )


@functools.cache
def int4_works(device: str, dtype: torch.dtype, odd_outputs: int, odd_inputs: int) -> bool:
    """Whether the product gives the dequantised one, for weights of such remainders by 64 and 128."""
    generator = torch.Generator().manual_seed(0)
    num_outputs, num_inputs = 128 + odd_outputs, 256 + odd_inputs
    if num_inputs % _INT4_GROUPS[0]:
        return False
    shape = (num_outputs, num_inputs // _INT4_GROUPS[0])
    weights = GroupedWeights(
        torch.randint(0, 16, (num_outputs, num_inputs), generator=generator, dtype=torch.uint8).to(device),
        (torch.rand(shape, generator=generator) / 16).to(device),
        torch.randint(0, 16, shape, generator=generator).float().to(device),
        4,
    )
    x = torch.randn(3, num_inputs, generator=generator).to(device, dtype)
    expected = F.linear(x.float(), weights.dequantized())
    return _agrees(f"int4 weights of this shape with {dtype}", lambda: Int4Linear(weights, None, dtype)(x), expected)


def _agrees(what: str, product: Callable[[], torch.Tensor], expected: torch.Tensor) -> bool:
    try:
        difference = (product().float() - expected).abs().max() / expected.abs().max()
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        logger.warning("%s are not multiplied by torch's own operator: %s", what, str(error))
        return False
    return bool(difference < 0.02)
