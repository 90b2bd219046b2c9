"""What the adapter is told at its start; its argument, as JSON."""

from __future__ import annotations

import msgspec

from shared.models.pooling import Pooling


class HostedSpec(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    """A folder in Hugging Face format, or a hub id."""
    dtype: str = "auto"
    max_model_len: int | None = None
    quantization: str = ""
    pool_bytes: int = 0
    """Memory for KV blocks; 0, or where `engine_args` say it: as vLLM decides."""
    engine_args: tuple[str, ...] = ()
    """vLLM's own flags, as of `vllm serve`."""
    ttft_s: float = 0.0
    """Objective of online requests that name none; 0: none. Likewise per output token."""
    tpot_s: float = 0.0
    scheduler: str = "tideway"
    """tideway | stock"""
    moves: bool = True
    """Whether requests move to other instances with their KV, where this vLLM lets them."""
    pooling: Pooling | None = None
    """What the model's hidden states are made into; None: it generates text."""
    interrupts: bool = False
    """Whether steps of offline work are given up for online requests, where this vLLM lets them."""
