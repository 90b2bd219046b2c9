"""What the attention back ends take, as data without torch: the node agent reports it, so that placement sizes KV blocks as
the executor will."""

from __future__ import annotations

from shared.messages.cluster import AttentionFacts
from shared.models.checkpoint import ITEMSIZES

TORCH_CPU = AttentionFacts("torch", (32, 64, 96, 128), tuple(ITEMSIZES))
TORCH_CUDA = AttentionFacts("torch", (128, 64, 32, 256), tuple(ITEMSIZES))


def flash(generation: int, block_size: int, max_head_dim: int) -> AttentionFacts:
    return AttentionFacts(f"flash-attention {generation}", (block_size,), ("float16", "bfloat16"), max_head_dim, 16)


def flashinfer(other: AttentionFacts, *, takes_prompts: bool) -> AttentionFacts:
    """Beside a back end for what it does not run; `takes_prompts`: prompts are not that one's. Heads of 64 and 128."""
    dtypes = tuple(dtype for dtype in ("float16", "bfloat16") if dtype in other.dtypes)
    name = "FlashInfer" if takes_prompts else f"FlashInfer, {other.name} for prompts"
    return AttentionFacts(name, other.block_sizes, dtypes, 128, 64)
