"""Cost models of made-up devices."""

from __future__ import annotations

from typing import Any

import msgspec

from shared.costs.model import CostModel


def costs(fixed_s: float, prefill_token_s: float = 0.0, **others: Any) -> CostModel:
    """What is not given costs nothing."""
    fields = {"prefill_attention_s": 0.0, "decode_s": 0.0, "decode_context_s": 0.0, **others}
    return CostModel(fixed_s=fixed_s, prefill_token_s=prefill_token_s, **fields)


SMALL = costs(0.01, 0.002, prefill_attention_s=0.00001, decode_s=0.003, decode_context_s=0.0001, num_layers=4)
"""Steps of a few tokens take some tens of milliseconds."""
GPU_7B = costs(
    0.012, 1e-4, prefill_attention_s=3e-9, decode_s=3e-5, decode_context_s=3.6e-7, prefill_s=0.002, num_layers=32
)
"""About a 7B model on a GPU."""
INTERRUPTIBLE_7B = msgspec.structs.replace(
    GPU_7B, layers_per_safepoint=4, checkpoint_block_s=0.004, restore_block_s=0.004
)
