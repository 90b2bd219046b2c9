"""What a model costs on an instance: memory for weights, activations and KV blocks. Pure arithmetic on a checkpoint's
shape, with the constants and their reasons."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from services.placement.fleet import num_ranks
from shared.checkpoint import ITEMSIZES, CheckpointShape, run_dtype
from shared.messages.cluster import AttentionFacts, ModelSpec, NodeInfo

STEP_SEQUENCES = 256
"""Sequences in one step at most: each needs a row of logits."""

LEAST_SEQUENCE_TOKENS = 2048
"""A model is placed only where the KV pool holds at least one sequence of this length (or of the model's length, if
that is shorter) beside one such sequence of every other model there: an ordinary chat, and no deadlock between models."""

HIDDEN_VECTORS = 16
"""Activations alive at once per token, in vectors of hidden_size: residual, normalised input, queries, keys, values and
attention output (6), gate, up and their product (about 3 to 4 times hidden_size each; 10 with buffers reused)."""

LOGIT_BYTES = {"cpu": 2 * 4, "cuda": 40}
"""Per vocabulary entry and sampled row: float32 logits and one copy that sampling sorts or masks. On CUDA a sort for top-p
takes more: logits, scores, the sorted ones with their indices (12), a second copy of these (12), probabilities and sums."""

WEIGHT_MARGIN = 1.02
"""Rotary tables, allocator rounding and packed layouts on top of the tensors in the files."""


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


@dataclass(frozen=True)
class Footprint:
    """Memory of one model on each device of an instance, in bytes; `least_blocks` in KV blocks."""

    weight_bytes: int
    activation_bytes: int
    """Peak during a step. Only one model of an instance is in a step at a time, so an instance needs the largest."""
    block_bytes: int
    least_blocks: int


def footprint(spec: ModelSpec, shape: CheckpointShape, facts: DeviceFacts) -> Footprint:
    """`spec.dtype` is "auto" (as stored) or a key of ITEMSIZES."""
    dtype = run_dtype(spec.dtype, shape.dtype, facts.kind)
    block_size, itemsize = facts.block_size(shape.head_dim, dtype), ITEMSIZES[dtype]
    longest = min(spec.max_model_len or shape.max_model_len, LEAST_SEQUENCE_TOKENS)
    hidden = facts.step_tokens * HIDDEN_VECTORS * shape.hidden_size * itemsize
    geometry = shape.kv_geometry(dtype)
    # Where there are fewer heads than ranks, some ranks have the same one.
    geometry = replace(geometry, num_kv_heads=-(-geometry.num_kv_heads // facts.num_ranks))
    return Footprint(
        weight_bytes=int(shape.weight_bytes / facts.num_ranks * itemsize / ITEMSIZES[shape.dtype] * WEIGHT_MARGIN),
        activation_bytes=hidden + STEP_SEQUENCES * shape.vocab_size * LOGIT_BYTES[facts.kind],
        block_bytes=geometry.block_bytes(block_size),
        least_blocks=-(-longest // block_size),
    )
