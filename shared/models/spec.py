"""Checks of models and adapters that need none of their files: the same before a start, and where one is added while
everything runs. Pure; a refusal is a `ServiceError` that names the field."""

from __future__ import annotations

import re
import shlex

from shared.bus.interface import ServiceError
from shared.engines.capabilities import ENGINES
from shared.messages.cluster import DEFAULT_IDLE_S, AdapterSpec, ModelSpec, tool_formats
from shared.messages.requests import ErrorCode
from shared.models.checkpoint import ITEMSIZES
from shared.models.quantization import QUANTIZATIONS

MAX_SLO_SCALE = 1000.0
MAX_IDLE_S = 30 * 86_400.0
MAX_NAME_LENGTH = 128
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:-]*(/[A-Za-z0-9_:-][A-Za-z0-9._:-]*)*"
"""No part between slashes is empty or begins with a dot: names stand in paths of URLs, whose `..` clients resolve."""
NAME_RULE = (
    f"1 to {MAX_NAME_LENGTH} letters, digits and . _ : / -, the first a letter or digit, no / at the end or before another "
    "or a dot"
)


def refuse(message: str, param: str, code: ErrorCode = ErrorCode.BAD_REQUEST) -> ServiceError:
    return ServiceError.of(code, message, param)


def is_name(text: str) -> bool:
    """Whether a model, an adapter or a route may have this name."""
    return len(text) <= MAX_NAME_LENGTH and re.fullmatch(NAME_PATTERN, text) is not None


def check_name(name: str) -> None:
    """Checks a model's or an adapter's name. Raises `ServiceError`."""
    if not is_name(name):
        raise refuse(f"{name!r} is no model name: {NAME_RULE}", "name")


def check_slo_scale(scale: float) -> None:
    """Checks a model's or an adapter's objectives. Raises `ServiceError`."""
    if scale and not 1 <= scale <= MAX_SLO_SCALE:
        raise refuse(f"slo_scale is {scale:g}: expected 1 to {MAX_SLO_SCALE:g}, or 0", "slo_scale")


def check_spec(spec: ModelSpec) -> None:
    """Raises `ServiceError`."""
    check_name(spec.name)
    if not spec.source.strip():
        raise refuse("source is empty: a folder in Hugging Face format, or a hub id", "source")
    if spec.dtype != "auto" and spec.dtype not in ITEMSIZES:
        raise refuse(f"dtype {spec.dtype!r}: expected auto, {', '.join(ITEMSIZES)}", "dtype")
    if spec.quantization and spec.quantization not in QUANTIZATIONS:
        raise refuse(f"quantization {spec.quantization!r}: expected {', '.join(QUANTIZATIONS)}", "quantization")
    if spec.tool_format and ":" not in spec.tool_format and spec.tool_format not in (known := tool_formats()):
        raise refuse(
            f"tool_format {spec.tool_format!r}: expected {', '.join(known)}, or module:attribute", "tool_format"
        )
    _check_engine(spec)
    if spec.on_demand and not spec.is_native:
        raise refuse(f"on_demand is for models on Tideway's own engine, and this one is on {spec.engine}", "on_demand")
    if spec.draft and not spec.is_native:
        raise refuse(f"draft is for models on Tideway's own engine, and this one is on {spec.engine}", "draft")
    for field, value in (("max_model_len", spec.max_model_len), ("replicas", spec.replicas)):
        if value is not None and value < 1:
            raise refuse(f"{field} is {value}: expected 1 or more", field)
    if not 0 <= spec.idle_s <= MAX_IDLE_S:
        raise refuse(f"idle_s is {spec.idle_s:g}: expected 0 to {MAX_IDLE_S:g} seconds", "idle_s")
    if not spec.on_demand and spec.idle_s != DEFAULT_IDLE_S:
        raise refuse("idle_s is of models on demand: set on_demand too", "idle_s")
    check_slo_scale(spec.slo_scale)


def check_adapter(spec: AdapterSpec) -> None:
    """Raises `ServiceError`."""
    check_name(spec.name)
    if not spec.source.strip():
        raise refuse("source is empty: a folder with adapter_config.json, or a hub id", "source")
    check_slo_scale(spec.slo_scale)


def _check_engine(spec: ModelSpec) -> None:
    if spec.engine not in ("", *ENGINES):
        raise refuse(f"engine {spec.engine!r}: expected {', '.join(ENGINES)}", "engine")
    if spec.engine_args and spec.is_native:
        raise refuse("engine_args are for another engine than Tideway's own: name it as engine", "engine_args")
    try:
        shlex.split(spec.engine_args)
    except ValueError as error:
        raise refuse(f"engine_args cannot be read: {error}", "engine_args") from None
    if spec.is_endpoint != bool(spec.engine_url):
        raise refuse("engine_url is given for the engine endpoint, and for it alone", "engine_url")
    if spec.engine_url and not spec.engine_url.startswith(("http://", "https://")):
        raise refuse(f"engine_url {spec.engine_url!r}: expected http://... or https://...", "engine_url")
    if spec.is_endpoint and (spec.replicas or 1) > 1:
        raise refuse(f"replicas is {spec.replicas}: a server that runs already is one", "replicas")
