"""Linear layers. On CPU the weights are packed: for the compiled kernels, else for oneDNN, which saves the repacking of each
call.

oneDNN's packing operators are private to torch (its Inductor uses them), so they are used only after a self-test shows that
they exist and give what `F.linear` gives.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.nn.functional as F

from services.worker.native.library import PackedWeight, packs

logger = logging.getLogger(__name__)

_TYPICAL_ROWS = 32
"""Rows that the packed layout is tuned for: a decode batch. Other row counts work with the same packed weight."""

_MAX_SHARED_COPY_BYTES = 64 * 1024 * 1024


class Linear:
    """`x @ weight.T + bias`. The weight given is not kept where a packed copy replaces it."""

    __slots__ = ("_bias", "_packed", "_weight", "compiled")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, shared: bool = False) -> None:
        """`weight`: [out_features, in_features], on its device in its dtype. `bias`: [out_features]. `shared`: the caller
        keeps the weight (a tied embedding), so that packing it costs memory; done only where it is little."""
        self._bias = bias
        affordable = not shared or weight.nbytes <= _MAX_SHARED_COPY_BYTES
        self.compiled = PackedWeight(weight, bias) if affordable and packs(weight) else None
        """In the form of the compiled kernels, where they compute it."""
        self._packed = False
        if self.compiled is None:
            self._packed = weight.device.type == "cpu" and affordable and packing_works(weight.dtype)
            self._weight = _pack(weight) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features]"""
        if self.compiled is not None:
            return self.compiled(x)
        if self._packed:
            return _packed_linear(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
    return packed


def _packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether packed weights of this dtype give `F.linear`'s result here, for one row, few and many."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    try:
        packed = _pack(weight)
        for rows in (1, 5, _TYPICAL_ROWS, 200):
            x = torch.randn(rows, 64, generator=generator).to(dtype)
            got = _packed_linear(x, packed, bias)
            torch.testing.assert_close(got, F.linear(x, weight, bias), rtol=tolerance, atol=tolerance)
    except (RuntimeError, AttributeError, AssertionError) as error:
        logger.warning("prepacked %s weights are not used: %s", dtype, str(error))
        return False
    return True
