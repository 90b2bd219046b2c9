"""Checks of what an operator asks for. Pure; a refusal is a `ServiceError` that names the field."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence

from services.placement.fleet import Fleet, node_of, num_ranks, num_stages
from services.placement.footprint import ConfiguredModel
from services.placement.inputs import Inputs
from shared.bus.interface import ServiceError
from shared.engines.capabilities import ENGINES
from shared.messages.cluster import DEFAULT_IDLE_S, ModelSpec, NodeInfo, tool_formats
from shared.messages.requests import ErrorCode
from shared.models.checkpoint import ITEMSIZES, CheckpointError, CheckpointShape, quantized
from shared.models.quantization import QUANTIZATIONS
from shared.placement.hardware import RANKS
from shared.placement.plan import Group, Plan, group_of, plan_of
from shared.placement.replacement import losers

MAX_SLO_SCALE = 1000.0
MAX_IDLE_S = 30 * 86_400.0
RETRY_S = 10.0
"""Until a node is back, or given up."""
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
    if spec.slo_scale and not 1 <= spec.slo_scale <= MAX_SLO_SCALE:
        raise refuse(f"slo_scale is {spec.slo_scale:g}: expected 1 to {MAX_SLO_SCALE:g}, or 0", "slo_scale")


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


def check_draft(spec: ModelSpec, shape: CheckpointShape, draft: CheckpointShape) -> None:
    """`draft`: of the draft model."""
    if shape.pooling is not None or draft.pooling is not None:
        raise refuse("draft is for models that generate text, and of those", "draft")
    if draft.vocab_size != shape.vocab_size:
        raise refuse(
            f"draft {spec.draft!r} has {draft.vocab_size} tokens, but {spec.name!r} has {shape.vocab_size}: it needs the "
            "same tokenizer",
            "draft",
        )


def check_plan(groups: Sequence[Group], inputs: Inputs) -> Plan:
    """A plan that an operator wrote, but for the memory that it needs."""
    if inputs.held_nodes:
        message = f"{', '.join(sorted(inputs.held_nodes))} is away, maybe for a moment: what it holds is not known"
        raise ServiceError.of(ErrorCode.UNAVAILABLE, message, "groups", retry_after_s=RETRY_S)
    nodes, models = {node.node_id: node for node in inputs.nodes}, {one.spec.name: one for one in inputs.models}
    taken: dict[tuple[str, int], int] = {}
    for number, group in enumerate(groups):
        node = nodes.get(group.node_id)
        if node is None:
            raise refuse(f"{group.node_id!r} is no node: {_told(nodes)}", f"groups[{number}].node_id")
        _check_devices(group, node, inputs.fleet, f"groups[{number}].devices")
        for device in group.devices:
            if (other := taken.setdefault((group.node_id, device), number)) != number:
                message = f"device {device} of {group.node_id} is in groups[{other}] and in groups[{number}]"
                raise refuse(message, f"groups[{number}].devices")
        for name in group.models:
            if name not in models:
                raise refuse(f"{name!r} is no model: {_told(models)}", f"groups[{number}].models")
            if models[name].asleep:
                message = f"{name!r} is on demand and put away: it is placed when requests for it come"
                raise refuse(message, f"groups[{number}].models", ErrorCode.CONFLICT)
            _check_model(models[name], group, node, f"groups[{number}]")
    plan = plan_of(Group(one.node_id, tuple(sorted(one.devices)), tuple(sorted(set(one.models)))) for one in groups)
    before = plan_of(map(group_of, inputs.incumbent.instances if inputs.incumbent is not None else ()))
    if fewer := losers(before, plan, models):
        raise refuse(f"{', '.join(fewer)} would be on no group: add it to one, or unload it first", "groups")
    for name in sorted(plan.models):
        num, replicas = sum(name in group.models for group in plan.groups), models[name].spec.replicas
        if replicas not in (None, num):
            message = f"{name!r} is to be on {replicas} instances and not on {num}: tideway scale {name} {num}, or all"
            raise refuse(message, "groups", ErrorCode.CONFLICT)
    return plan


def _check_devices(group: Group, node: NodeInfo, fleet: Fleet, field: str) -> None:
    size, first, own = len(group.devices), min(group.devices), num_ranks(node)
    if size not in (*RANKS, own) or sorted(group.devices) != list(range(first, first + size)):
        sizes = ", ".join(map(str, sorted({*RANKS, own})))
        message = f"devices {list(group.devices)}: expected neighbours such as [0, 1], {sizes} of them"
        raise refuse(message, field)
    offered = node.num_instances * own
    if first + size > offered:
        told = f"has devices 0 to {offered - 1}" if offered else "offers no device"
        raise refuse(f"{group.node_id} {told}, not {first + size - 1}", field)
    for instance_id in fleet.draining:
        node_id, begin = node_of(instance_id)
        if node_id == group.node_id and set(group.devices) & set(range(begin, begin + own)):
            told = "was taken out by scaling" if instance_id in fleet.released else "is drained: undrain it first"
            raise refuse(f"{instance_id} {told}", field, ErrorCode.CONFLICT)


def _check_model(model: ConfiguredModel, group: Group, node: NodeInfo, field: str) -> None:
    name, size = model.spec.name, len(group.devices)
    if model.shape is None:
        message = f"the checkpoint of {name!r} is not known: {model.problem or 'it is still being read'}"
        raise refuse(message, f"{field}.models", ErrorCode.CONFLICT)
    if model.shape.num_kv_heads % (parts := size // num_stages(node, size)):
        message = f"the {model.shape.num_kv_heads} KV heads of {name!r} cannot be cut over {parts} devices"
        raise refuse(message, f"{field}.devices")


def _told(known: Collection[str]) -> str:
    return f"there are {', '.join(sorted(known))}" if known else "there is none"
