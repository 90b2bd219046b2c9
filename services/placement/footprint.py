"""What a configured model costs in memory on a node, with the formulas of `shared.placement.footprint`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from services.placement.fleet import num_ranks, num_stages
from shared.messages.cluster import AttentionFacts, ModelSpec, NodeInfo
from shared.models.checkpoint import ITEMSIZES, CheckpointShape, run_dtype
from shared.placement.footprint import Footprint, model_footprint


@dataclass(frozen=True)
class ConfiguredModel:
    """A model of the MODELS bucket. `shape` is None while its checkpoint is not known: `problem` says why it cannot be read,
    or is empty while it is still being read."""

    spec: ModelSpec
    shape: CheckpointShape | None
    problem: str = ""
    asleep: str = ""
    """A `WhyAsleep` of a model on demand that is put away; empty: it is to be placed."""

    @property
    def weights(self) -> tuple[str, str, str, int | None]:
        """What names that share a copy of the weights have in common: as the executor's identity of a model."""
        spec, shape = self.spec, self.shape
        length = spec.max_model_len if shape is None or shape.depends_on_length else None
        return spec.source, spec.dtype, spec.quantization, length

    def footprint(self, facts: DeviceFacts) -> Footprint | None:
        """Memory on each device of an instance of that kind; None while the checkpoint is not known, and where so many
        devices cannot compute it."""
        parts = facts.num_ranks // facts.num_stages
        if self.shape is None or (parts > 1 and not self.shape.is_divisible):
            return None
        return footprint(self.spec, self.shape, facts)


class DeviceFacts(NamedTuple):
    """What of a node's devices decides how much memory a model takes there, as the node reports it."""

    kind: str
    """cpu | cuda"""
    attention: tuple[AttentionFacts, ...]
    """The last runs all models."""
    step_tokens: int
    num_ranks: int = 1
    """Devices of an instance, each with a part of every weight and KV block."""
    num_stages: int = 1
    """Over which the layers are divided, each with `num_ranks / num_stages` devices."""

    @classmethod
    def of(cls, node: NodeInfo) -> DeviceFacts:
        kind = "cuda" if node.device.startswith("cuda") else "cpu"
        at_most = AttentionFacts("", (node.block_size,)) if node.block_size > 0 else AttentionFacts()
        size = num_ranks(node)
        return cls(kind, (*node.attention, at_most), node.step_tokens, size, num_stages(node, size))

    def block_size(self, head_dim: int, dtype: str) -> int:
        """Tokens in a KV block of such a model."""
        return next(
            facts.block_sizes[0] for facts in self.attention if facts.block_sizes and facts.runs(head_dim, dtype)
        )


def device_bytes(node: NodeInfo) -> int:
    """Memory of each device of a node: it is divided evenly over the instances that the node could run at most."""
    return node.memory_bytes // max(1, node.num_instances, node.max_instances) // num_ranks(node)


def footprint(spec: ModelSpec, shape: CheckpointShape, facts: DeviceFacts) -> Footprint:
    """`spec.dtype` is "auto" (as stored) or a key of ITEMSIZES."""
    if spec.is_endpoint:
        # It is computed elsewhere; the blocks are a size like any other.
        at_home = footprint(msgspec.structs.replace(spec, engine=""), shape, facts)
        return replace(at_home, weight_bytes=0, activation_bytes=0, least_blocks=1)
    dtype = run_dtype(spec.dtype, shape.dtype, facts.kind)
    block_size = facts.block_size(shape.head_dim, dtype)
    of_stage = facts.num_ranks // facts.num_stages
    whole = model_footprint(
        shape,
        dtype,
        facts.kind,
        block_size=block_size,
        step_tokens=facts.step_tokens,
        max_model_len=spec.max_model_len or 0,
        num_ranks=of_stage,
    )
    if facts.num_stages == 1:
        return whole
    # Of the first stage, which has the most layers; the last one may have the embedding too, as its head.
    most_layers = -(-shape.num_layers // facts.num_stages)
    embedding_bytes = shape.vocab_size * shape.hidden_size * ITEMSIZES[dtype] // of_stage
    layer_bytes = max(0, whole.weight_bytes - embedding_bytes) // shape.num_layers
    return replace(
        whole,
        weight_bytes=embedding_bytes + most_layers * layer_bytes,
        block_bytes=shape.kv_geometry(dtype, of_stage, facts.num_stages).block_bytes(block_size),
    )
