"""Weights of few bits: what `--quantization` makes of a checkpoint, and what quantised checkpoints say of theirs.
Activations stay as they are.

Without torch: placement counts the bytes, the worker has the products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GROUP_SIZE = 64
"""Inputs of an output that share a scale and a zero in int4."""

QUANTIZATIONS: dict[str, float] = {
    "int8": 1.0 + 1 / 256,
    "int4": 0.5 + 4 / GROUP_SIZE,
    "fp8": 1.0 + 1 / 256,
}
"""Bytes of a weight, with its share of scales (a scale for each output; in int4 two numbers of 2 bytes for each group)."""

_PACKED_BITS = (4, 8)


class QuantizationError(ValueError):
    """A checkpoint is quantised in a way that is not supported; the message begins with the field."""


@dataclass(frozen=True)
class StoredQuantization:
    """How the linear layers of a checkpoint are stored; those that have a plain `weight` are not quantised."""

    method: str
    """awq | gptq | packed | int8 | fp8: which tensors there are. The last three are formats of compressed-tensors."""
    bits: int
    group_size: int
    """Inputs that share a scale; 0: all of an output."""
    zero_offset: int = 0
    """Added to stored zeros."""


def stored_quantization(config: Mapping[str, Any]) -> StoredQuantization | None:
    """By config.json; None: it is not quantised. Raises `QuantizationError`."""
    for key in ("quantization_config", "compression_config"):
        if found := config.get(key):
            if not isinstance(found, dict):
                raise QuantizationError(f"{key} is no JSON object")
            return _read(key, found)
    return None


def _read(key: str, found: Mapping[str, Any]) -> StoredQuantization:
    method = found.get("quant_method")
    if method == "awq":
        _expect(key, "bits", found.get("bits", found.get("w_bit", 4)), (4,))
        _expect(key, "version", str(found.get("version") or "gemm").lower(), ("gemm",))
        return StoredQuantization("awq", 4, _group_size(key, found.get("group_size", found.get("q_group_size", 128))))
    if method == "gptq":
        bits = _expect(key, "bits", found.get("bits"), _PACKED_BITS)
        layout = _expect(key, "checkpoint_format", found.get("checkpoint_format") or "gptq", ("gptq", "gptq_v2"))
        offset = 1 if layout == "gptq" else 0
        return StoredQuantization("gptq", bits, _group_size(key, found.get("group_size", 128)), offset)
    if method == "compressed-tensors":
        return _compressed_tensors(key, found)
    raise QuantizationError(
        f"{key}.quant_method {method!r} is not supported; supported are awq, gptq, compressed-tensors"
    )


def _compressed_tensors(key: str, found: Mapping[str, Any]) -> StoredQuantization:
    groups = found.get("config_groups") or {}
    if len(groups) != 1:
        raise QuantizationError(f"{key}.config_groups: {len(groups)} groups, but one is supported")
    name, group = next(iter(groups.items()))
    at = f"{key}.config_groups.{name}"
    _expect(at, "targets", group.get("targets"), (["Linear"],))
    weights = group.get("weights") or {}
    layout = group.get("format") or found.get("format")
    at += ".weights"
    if layout == "pack-quantized":
        _expect(at, "type", weights.get("type", "int"), ("int",))
        bits = _expect(at, "num_bits", weights.get("num_bits"), _PACKED_BITS)
        strategy = _expect(at, "strategy", weights.get("strategy") or "group", ("group", "channel"))
        size = _group_size(at, weights.get("group_size")) if strategy == "group" else 0
        return StoredQuantization("packed", bits, size)
    _expect(at, "num_bits", weights.get("num_bits"), (8,))
    _expect(at, "strategy", weights.get("strategy") or "tensor", ("tensor", "channel"))
    if layout in ("int-quantized", "naive-quantized") and weights.get("type", "int") == "int":
        return StoredQuantization("int8", 8, 0)
    if layout in ("float-quantized", "naive-quantized"):
        return StoredQuantization("fp8", 8, 0)
    raise QuantizationError(
        f"{key}.format {layout!r} is not supported; supported are pack-quantized, int-quantized, float-quantized"
    )


def _group_size(at: str, value: Any) -> int:
    if value in (-1, None):
        return 0
    if not isinstance(value, int) or value <= 0:
        raise QuantizationError(f"{at}.group_size {value!r} is no number of inputs")
    return value


def _expect(at: str, field: str, value: Any, supported: tuple[Any, ...]) -> Any:
    if value not in supported:
        known = ", ".join(map(str, supported))
        raise QuantizationError(f"{at}.{field} {value!r} is not supported; supported: {known}")
    return value
