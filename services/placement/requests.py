"""Checks of what an operator asks for. Pure; a refusal is a `ServiceError` that names the field."""

from __future__ import annotations

import re

from shared.bus.interface import ServiceError
from shared.checkpoint import ITEMSIZES, CheckpointError, CheckpointShape, quantized
from shared.messages.cluster import TOOL_FORMATS, ModelSpec
from shared.messages.requests import ErrorCode
from shared.quantization import QUANTIZATIONS

MAX_SLO_SCALE = 1000.0
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}"


def refuse(message: str, param: str, code: ErrorCode = ErrorCode.BAD_REQUEST) -> ServiceError:
    return ServiceError.of(code, message, param)


def check_spec(spec: ModelSpec) -> None:
    """What can be said without the checkpoint."""
    if not re.fullmatch(NAME_PATTERN, spec.name):
        raise refuse(
            f"{spec.name!r} is no model name: 1 to 128 letters, digits and . _ : / -, the first a letter or digit",
            "name",
        )
    if not spec.source.strip():
        raise refuse("source is empty: a folder in Hugging Face format, or a hub id", "source")
    if spec.dtype != "auto" and spec.dtype not in ITEMSIZES:
        raise refuse(f"dtype {spec.dtype!r}: expected auto, {', '.join(ITEMSIZES)}", "dtype")
    if spec.quantization and spec.quantization not in QUANTIZATIONS:
        raise refuse(f"quantization {spec.quantization!r}: expected {', '.join(QUANTIZATIONS)}", "quantization")
    if spec.tool_format and spec.tool_format not in TOOL_FORMATS:
        raise refuse(f"tool_format {spec.tool_format!r}: expected {', '.join(TOOL_FORMATS)}", "tool_format")
    for field, value in (("max_model_len", spec.max_model_len), ("replicas", spec.replicas)):
        if value is not None and value < 1:
            raise refuse(f"{field} is {value}: expected 1 or more", field)
    if spec.slo_scale and not 1 <= spec.slo_scale <= MAX_SLO_SCALE:
        raise refuse(f"slo_scale is {spec.slo_scale:g}: expected 1 to {MAX_SLO_SCALE:g}, or 0", "slo_scale")


def check_quantization(spec: ModelSpec, shape: CheckpointShape) -> None:
    try:
        quantized(shape, spec.quantization)
    except CheckpointError as error:
        raise refuse(str(error), "quantization") from None


def check_length(spec: ModelSpec, shape: CheckpointShape) -> None:
    if spec.max_model_len is not None and spec.max_model_len > shape.max_model_len:
        raise refuse(
            f"max_model_len is {spec.max_model_len}, but the checkpoint allows {shape.max_model_len} tokens",
            "max_model_len",
        )
