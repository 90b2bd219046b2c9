"""Checks of what an operator asks for. Pure; a refusal is a `ServiceError` that names the field."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from services.placement.fleet import Fleet, node_of, num_ranks, num_stages
from services.placement.footprint import ConfiguredModel
from services.placement.inputs import Inputs
from shared.bus.interface import ServiceError
from shared.messages.cluster import ModelSpec, NodeInfo
from shared.messages.requests import ErrorCode
from shared.models.checkpoint import CheckpointError, CheckpointShape, quantized
from shared.models.spec import refuse
from shared.placement.hardware import RANKS
from shared.placement.plan import Group, Plan, group_of, plan_of
from shared.placement.replacement import losers

RETRY_S = 10.0
"""Until a node is back, or given up."""


def check_quantization(spec: ModelSpec, shape: CheckpointShape) -> None:
    try:
        quantized(shape, spec.quantization)
    except CheckpointError as error:
        raise refuse(str(error), "quantization") from None


def check_engine(spec: ModelSpec, shape: CheckpointShape) -> None:
    if shape.takes_images and spec.is_native:
        message = (
            f"{shape.architecture} takes images, which Tideway's own engine does not compute: choose the engine vllm, or "
            "endpoint for a server that runs already"
        )
        raise refuse(message, "engine")


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
