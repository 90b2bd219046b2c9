"""LoRA adapters as the operator configures them, and what they take of their base model's memory. Pure, but for
`read_adapter`."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shared.messages.cluster import AdapterSpec, ModelSpec
from shared.models.adapters import AdapterFiles, check_base, describe_adapter
from shared.models.checkpoint import ITEMSIZES, CheckpointShape, resolve
from shared.models.families import TRANSFORMERS, family_of


def read_adapter(source: str, base: ModelSpec, shape: CheckpointShape, max_rank: int) -> AdapterFiles:
    """Blocking; `CheckpointError`. `shape`: of the base model's checkpoint."""
    files = describe_adapter(resolve(source), max_rank)
    check_base(files, resolve(base.source), (family_of(shape.architecture) or TRANSFORMERS).name)
    return files


def is_same(known: AdapterSpec, asked: AdapterSpec) -> bool:
    """Whether the operator asks for what is there."""
    filled = {"version": known.version, "rank": known.rank, "num_values": known.num_values, "added_s": known.added_s}
    return msgspec.structs.replace(asked, **filled) == known


def with_draft(shape: CheckpointShape, spec: ModelSpec, draft: CheckpointShape) -> CheckpointShape:
    """The model's shape with the memory of its draft model's weights, in the dtype of its own, on each device."""
    itemsize = ITEMSIZES[shape.dtype if spec.dtype == "auto" else spec.dtype]
    num_bytes = draft.weight_bytes * itemsize // ITEMSIZES[draft.dtype]
    return msgspec.structs.replace(shape, adapter_bytes=shape.adapter_bytes + num_bytes)


def with_adapters(
    shape: CheckpointShape, base: ModelSpec, adapters: Iterable[AdapterSpec], max_bytes: int
) -> CheckpointShape:
    """The base model's shape with the memory of its adapters, of which instances hold `max_bytes` at most."""
    itemsize = ITEMSIZES[shape.dtype if base.dtype == "auto" else base.dtype]
    wanted = itemsize * sum(spec.num_values for spec in adapters if spec.base == base.name)
    return msgspec.structs.replace(shape, adapter_bytes=min(wanted, max_bytes)) if wanted else shape
