"""Checks of what an operator asks for. Pure; a refusal is a `ServiceError` that names the field."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from services.placement.fleet import node_of, num_ranks, num_stages
from services.placement.footprint import ConfiguredModel
from shared.bus.interface import ServiceError
from shared.checkpoint import ITEMSIZES, CheckpointError, CheckpointShape, quantized
from shared.messages.cluster import TOOL_FORMATS, ModelSpec, NodeInfo
from shared.messages.requests import ErrorCode
from shared.placement.hardware import RANKS
from shared.placement.plan import Group, Plan, plan_of
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


CONFLICT = ErrorCode.CONFLICT


def check_plan(
    groups: Sequence[Group], models: Sequence[ConfiguredModel], nodes: Sequence[NodeInfo], draining: Collection[str]
) -> Plan:
    """A plan that an operator wrote, but for the memory that it needs. `draining`: ids of instances."""
    by_id, by_name = {node.node_id: node for node in nodes}, {model.spec.name: model for model in models}
    taken: dict[tuple[str, int], int] = {}
    out = [node_of(instance_id) for instance_id in draining]
    for number, group in enumerate(groups):
        where, size, first = f"groups[{number}]", len(group.devices), min(group.devices)
        node = by_id.get(group.node_id)
        if node is None:
            raise refuse(f"{group.node_id!r} is no node: {_told(by_id)}", f"{where}.node_id")
        offered = node.num_instances * num_ranks(node)
        if size not in RANKS or sorted(group.devices) != list(range(first, first + size)):
            message = f"devices {list(group.devices)}: expected {', '.join(map(str, RANKS))} neighbours, such as [0, 1]"
            raise refuse(message, f"{where}.devices")
        if first + size > offered:
            raise refuse(f"{group.node_id} has devices 0 to {offered - 1}, not {first + size - 1}", f"{where}.devices")
        for device in group.devices:
            if (other := taken.setdefault((group.node_id, device), number)) != number:
                message = f"device {device} of {group.node_id} is in groups[{other}] too"
                raise refuse(message, f"{where}.devices")
            if (group.node_id, device) in out:
                raise refuse(f"{group.node_id}-{device} is drained: undrain it first", f"{where}.devices", CONFLICT)
        for name in group.models:
            if name not in by_name:
                raise refuse(f"{name!r} is no model: {_told(by_name)}", f"{where}.models")
            shape, parts = by_name[name].shape, size // num_stages(node, size)
            if shape is None:
                problem = by_name[name].problem or "is still being read"
                raise refuse(f"the checkpoint of {name!r} is not known: {problem}", f"{where}.models", CONFLICT)
            if shape.num_kv_heads % parts:
                message = f"the {shape.num_kv_heads} KV heads of {name!r} cannot be cut over {parts} devices"
                raise refuse(message, f"{where}.devices")
    plan = plan_of(Group(one.node_id, tuple(sorted(one.devices)), tuple(sorted(set(one.models)))) for one in groups)
    if left := sorted(by_name.keys() - plan.models):
        raise refuse(f"{', '.join(left)} would be on no group: add it to one, or unload it first", "groups")
    return plan


def _told(known: Collection[str]) -> str:
    return f"there are {', '.join(sorted(known))}" if known else "there is none"
