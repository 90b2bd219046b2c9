"""What a configured model costs in memory on a node, with the formulas of `shared.placement.footprint`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from services.placement.fleet import num_ranks
from shared.checkpoint import CheckpointShape, run_dtype
from shared.messages.cluster import AttentionFacts, ModelSpec, NodeInfo
from shared.placement.footprint import Footprint, model_footprint


@dataclass(frozen=True)
class ConfiguredModel:
    """A model of the MODELS bucket. `shape` is None while its checkpoint is not known: `problem` says why it cannot be read,
    or is empty while it is still being read."""

    spec: ModelSpec
    shape: CheckpointShape | None
    problem: str = ""


class DeviceFacts(NamedTuple):
    """What of a node's devices decides how much memory a model takes there, as the node reports it."""

    kind: str
    """cpu | cuda"""
    attention: tuple[AttentionFacts, ...]
    """The last runs all models."""
    step_tokens: int
    num_ranks: int = 1
    """Devices of an instance, each with a part of every weight and KV block."""

    @classmethod
    def of(cls, node: NodeInfo) -> DeviceFacts:
        kind = "cuda" if node.device.startswith("cuda") else "cpu"
        at_most = AttentionFacts("", (node.block_size,)) if node.block_size > 0 else AttentionFacts()
        return cls(kind, (*node.attention, at_most), node.step_tokens, num_ranks(node))

    def block_size(self, head_dim: int, dtype: str) -> int:
        """Tokens in a KV block of such a model."""
        return next(
            facts.block_sizes[0] for facts in self.attention if facts.block_sizes and facts.runs(head_dim, dtype)
        )


def footprint(spec: ModelSpec, shape: CheckpointShape, facts: DeviceFacts) -> Footprint:
    """`spec.dtype` is "auto" (as stored) or a key of ITEMSIZES."""
    dtype = run_dtype(spec.dtype, shape.dtype, facts.kind)
    return model_footprint(
        shape,
        dtype,
        facts.kind,
        block_size=facts.block_size(shape.head_dim, dtype),
        step_tokens=facts.step_tokens,
        max_model_len=spec.max_model_len or 0,
        num_ranks=facts.num_ranks,
    )
