"""LoRA adapters on vLLM's CPU path. In a step of rows with an adapter and rows without any, vLLM 0.32 computes the latter
with the adapter in its last slot: it looks their weights up at index -1."""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType
from typing import Any


def leave_others_alone() -> None:
    """Rows without an adapter stay as their model makes them, in this process. Nothing changes if vLLM has no such path."""
    with contextlib.suppress(ImportError):
        from vllm.lora.punica_wrapper import punica_cpu

        mask(punica_cpu)


def mask(module: ModuleType) -> None:
    """Wraps the functions of the module that multiply rows with adapters' A matrices: what they make of the others is 0."""
    by_row, by_sequence = module.bgmv_shrink, module.sgmv_shrink

    @functools.wraps(by_row)
    def shrink_rows(inputs: Any, weights: Any, output: Any, indices: Any, *others: Any, **named: Any) -> None:
        by_row(inputs, weights, output, indices, *others, **named)
        output[indices < 0] = 0

    @functools.wraps(by_sequence)
    def shrink_sequences(
        inputs: Any, weights: Any, output: Any, starts: Any, lengths: Any, indices: Any, *others: Any, **named: Any
    ) -> None:
        by_sequence(inputs, weights, output, starts, lengths, indices, *others, **named)
        output[indices.repeat_interleave(lengths) < 0] = 0

    module.bgmv_shrink, module.sgmv_shrink = shrink_rows, shrink_sequences  # type: ignore[attr-defined]
