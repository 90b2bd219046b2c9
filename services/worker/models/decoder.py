"""What every decoder-only model offers the executor, and the batch that is passed down its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from services.worker.attention.interface import AttentionBackend
from services.worker.kv_store import KvShape, KvViews, LayerKv
from shared.checkpoint import SUPPORTED_ACTIVATIONS, CheckpointError


@dataclass
class ForwardBatch:
    """One step's inputs on the device; T tokens."""

    token_ids: torch.Tensor
    """[T] int64 or int32"""
    positions: torch.Tensor
    """[T] int64"""
    kv: KvViews
    attention: AttentionBackend
    metadata: Any

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None = None
    ) -> torch.Tensor:
        """Writes the layer's keys and values to the cache and attends; [T, heads, head_dim] each."""
        kv: LayerKv = self.kv.layers[layer]
        self.attention.write_kv(kv, keys, values, self.metadata)
        return self.attention.attend(queries, keys, values, kv, self.metadata, window)


@dataclass
class ForwardState:
    """Where a forward pass stands between two layers."""

    hidden: torch.Tensor
    """[T, hidden_size]: the residual stream."""
    pending: torch.Tensor | None = None
    """[T, hidden_size]: the last layer's output, not yet added to the stream; None: nothing is."""
    rope: tuple[torch.Tensor, torch.Tensor] | None = None


class DecoderModel(ABC):
    """A forward pass is `begin`, `run_layers` over consecutive ranges that cover all layers, `logits`; it may pause
    between two ranges for as long as its KV blocks stay its own."""

    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...] = ()
    """Sliding windows that some layer uses."""

    def kv_shape(self, block_size: int) -> KvShape:
        return KvShape(self.num_layers, block_size, self.num_kv_heads, self.head_dim, self.dtype)

    @abstractmethod
    def begin(self, batch: ForwardBatch) -> ForwardState: ...

    @abstractmethod
    def run_layers(self, state: ForwardState, start: int, stop: int, batch: ForwardBatch) -> None:
        """Advances `state` over layers start..stop-1."""

    @abstractmethod
    def logits(self, state: ForwardState, tokens: torch.Tensor | None) -> torch.Tensor:
        """[S, vocab_size] in the model's dtype, of the tokens at these indices ([S] int64; None: all), from a state after
        all layers. Does not change the state."""

    def forward(self, batch: ForwardBatch) -> ForwardState:
        """Runs all layers."""
        state = self.begin(batch)
        self.run_layers(state, 0, self.num_layers, batch)
        return state


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""By their names in config.json."""


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Raises `CheckpointError`."""
    if name not in SUPPORTED_ACTIVATIONS:
        supported = ", ".join(SUPPORTED_ACTIVATIONS)
        raise CheckpointError(f"activation {name!r} is not supported; supported are {supported}.")
    return ACTIVATIONS[name]
