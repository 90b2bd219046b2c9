"""What a model costs on an instance: memory for weights, activations and KV blocks. Pure arithmetic on a checkpoint's
shape, with the constants and their reasons."""

from __future__ import annotations

from dataclasses import dataclass

from shared.models.checkpoint import ITEMSIZES, CheckpointShape

STEP_SEQUENCES = 256
"""Sequences in one step at most: each needs a row of logits."""

LEAST_SEQUENCE_TOKENS = 2048
"""A model is placed only where the KV pool holds at least one sequence of this length (or of the model's length, if
that is shorter) beside one such sequence of every other model there: an ordinary chat, and no deadlock between models."""

HIDDEN_VECTORS = 16
"""Activations alive at once per token, in vectors of hidden_size: residual, normalised input, queries, keys, values and
attention output (6), gate, up and their product (about 3 to 4 times hidden_size each; 10 with buffers reused)."""

LOGIT_BYTES = {"cpu": 2 * 4, "cuda": 28}
"""Per vocabulary entry and sampled row: float32 logits and one copy that sampling sorts or masks. On CUDA at most: logits, a
copy with penalties, scores, and four more while noise is made or a threshold is sought, nothing of which is sorted."""

WEIGHT_MARGIN = 1.02
"""Rotary tables, allocator rounding and packed layouts on top of the tensors in the files."""


@dataclass(frozen=True)
class Footprint:
    """Memory of one model on each device of an instance, in bytes; `least_blocks` in KV blocks."""

    weight_bytes: int
    activation_bytes: int
    """Peak during a step. Only one model of an instance is in a step at a time, so an instance needs the largest."""
    block_bytes: int
    least_blocks: int


def model_footprint(
    shape: CheckpointShape,
    dtype: str,
    device: str,
    *,
    block_size: int,
    step_tokens: int,
    max_model_len: int = 0,
    num_ranks: int = 1,
) -> Footprint:
    """`dtype`: that it runs in, a key of ITEMSIZES. `device`: cpu | cuda. `step_tokens`: of a step at most. `max_model_len`:
    of its sequences, 0: what the checkpoint allows. `num_ranks`: devices of an instance."""
    itemsize = ITEMSIZES[dtype]
    longest = min(max_model_len or shape.max_model_len, LEAST_SEQUENCE_TOKENS)
    hidden = step_tokens * HIDDEN_VECTORS * shape.hidden_size * itemsize
    return Footprint(
        weight_bytes=int(shape.weight_bytes / num_ranks * itemsize / ITEMSIZES[shape.dtype] * WEIGHT_MARGIN)
        + shape.adapter_bytes,
        activation_bytes=hidden + STEP_SEQUENCES * shape.vocab_size * LOGIT_BYTES[device],
        block_bytes=shape.kv_geometry(dtype, num_ranks).block_bytes(block_size),
        least_blocks=-(-longest // block_size),
    )
