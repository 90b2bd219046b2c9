"""Weights as quantised checkpoints store them, unpacked: AWQ (Lin et al. 2023), GPTQ (Frantar et al. 2022) and formats of
compressed-tensors.

They differ in which axis is packed into 32-bit words, in the order within a word, and in where zeros lie. Of K inputs and N
outputs in G groups:

| | values | zeros | scales |
|---|---|---|---|
| AWQ | `qweight` [K, N / 8], a word has columns 0 2 4 6 1 3 5 7 | `qzeros` [G, N / 8], likewise | `scales` [G, N] |
| GPTQ | `qweight` [K * bits / 32, N] | `qzeros` [G, N * bits / 32], one too small | `scales` [G, N] |
| pack-quantized | `weight_packed` [N, K * bits / 32] | `weight_zero_point` [N * bits / 32, G] or none | `weight_scale` |
| int-quantized | `weight` [N, K] int8 | `weight_zero_point` [N, 1] or none | `weight_scale` [N, 1] |
| float-quantized | `weight` [N, K] float8 | | `weight_scale` [N, 1] or [1] |
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.worker.models.quantized_linear import GroupedWeights
from shared.models.checkpoint import CheckpointError
from shared.models.quantization import StoredQuantization

Read = Callable[[str], "torch.Tensor | None"]
"""A tensor of a layer as it is stored, by the last part of its name; None: there is none."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of eight columns."""

_MARKS = {"awq": "qweight", "gptq": "qweight", "packed": "weight_packed", "int8": "weight_scale", "fp8": "weight_scale"}

IGNORED = ("input_scale", "output_scale", "weight_shape", "k_scale", "v_scale")
"""Tensors of quantised activations, which stay as they are here."""


def mark(stored: StoredQuantization) -> str:
    """The tensor that only quantised layers have."""
    return _MARKS[stored.method]


def read_groups(stored: StoredQuantization, read: Read, num_outputs: int, num_inputs: int) -> GroupedWeights:
    """Raises `CheckpointError` where a tensor is missing or of another shape."""
    bits, columns = stored.bits, None
    if stored.method == "awq":
        values = _unpacked(_need(read, "qweight"), 4, 1, _AWQ_ORDER).T
        zeros: torch.Tensor | None = _unpacked(_need(read, "qzeros"), 4, 1, _AWQ_ORDER).T
        scales = _need(read, "scales").T
    elif stored.method == "gptq":
        values = _unpacked(_need(read, "qweight"), bits, 0).T
        zeros = _unpacked(_need(read, "qzeros"), bits, 1).T.float() + stored.zero_offset
        scales = _need(read, "scales").T
        groups = read("g_idx")
        if groups is not None and bool((groups.diff() < 0).any()):
            columns = groups.argsort(stable=True)
            values = values[:, columns]
    elif stored.method == "packed":
        if (groups := read("weight_g_idx")) is not None and bool((groups.diff() < 0).any()):
            columns = groups.argsort(stable=True)
        values = _unpacked(_need(read, "weight_packed"), bits, 1)[:, :num_inputs]
        if columns is not None:
            values = values[:, columns]
        packed_zeros = read("weight_zero_point")
        zeros = None if packed_zeros is None else _unpacked(packed_zeros, bits, 0)[:num_outputs]
        scales = _need(read, "weight_scale")
    elif stored.method == "fp8":
        values = _need(read, "weight")
        scales = _need(read, "weight_scale").reshape(-1, 1)
        zeros = torch.zeros(1)
    else:
        values = (_need(read, "weight").to(torch.int16) + 128).to(torch.uint8)
        stored_zeros = read("weight_zero_point")
        zeros = None if stored_zeros is None else stored_zeros.float().reshape(-1, 1) + 128
        scales = _need(read, "weight_scale").reshape(-1, 1)
    scales = scales.float().expand(num_outputs, -1) if len(scales) == 1 else scales.float()
    zeros = torch.full_like(scales, 1 << bits - 1) if zeros is None else zeros.float().expand(scales.shape)
    num_groups = num_inputs // stored.group_size if stored.group_size else 1
    expected = ((num_outputs, num_inputs), (num_outputs, num_groups))
    if (tuple(values.shape), tuple(scales.shape)) != expected or zeros.shape != scales.shape:
        found = [list(t.shape) for t in (values, scales, zeros)]
        raise CheckpointError(
            f"values, scales and zeros of {found}, but config.json asks for {list(expected[0])} and {list(expected[1])}"
        )
    return GroupedWeights(values.contiguous(), scales.contiguous(), zeros.contiguous(), bits, columns)


def _need(read: Read, name: str) -> torch.Tensor:
    tensor = read(name)
    if tensor is None:
        raise CheckpointError(f"there is no {name}")
    return tensor


def _unpacked(words: torch.Tensor, bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """uint8 values of 32-bit words along an axis, the lowest bits first, or by `order`."""
    per_word = 32 // bits
    shifts = torch.tensor(order or range(per_word), dtype=torch.int32, device=words.device) * bits
    spread = words.int().unsqueeze(axis + 1) >> (shifts if axis == 1 else shifts[:, None])
    return (spread & (1 << bits) - 1).to(torch.uint8).flatten(axis, axis + 1)
