"""What every decoder-only model offers the executor, and the batch that is passed down its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from services.worker.attention.interface import AttentionBackend, Heads
from services.worker.kv.kv_store import KvShape, KvViews, LayerKv
from services.worker.models.adapters import Adaptable, BatchAdapters
from services.worker.ranks.group import RankGroup
from shared.models.checkpoint import SUPPORTED_ACTIVATIONS, CheckpointError


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
    adapters: BatchAdapters | None = None
    """None: no token is computed with one."""

    def adapted(self, result: torch.Tensor, inputs: torch.Tensor, layer: int, linear: str) -> torch.Tensor:
        """`result`, the product of `inputs` with a linear layer, and what adapters add to it (in place)."""
        if self.adapters is not None:
            self.adapters.add(result, inputs, layer, linear)
        return result

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None = None
    ) -> torch.Tensor:
        """Writes the layer's keys and values to the cache and attends; [T, heads, head_dim] each."""
        kv: LayerKv = self.kv.layers[layer]
        self.attention.write_kv(kv, keys, values, self.metadata)
        return self.attention.attend(queries, keys, values, kv, self.metadata, window)


@dataclass
class ForwardState:
    """State of a forward pass between two layers."""

    hidden: torch.Tensor
    """[T, hidden_size]: the residual stream."""
    pending: torch.Tensor | None = None
    """[T, hidden_size]: the last layer's output, not yet added to the stream; None: nothing is."""
    rope: tuple[torch.Tensor, torch.Tensor] | None = None
    most_likely: Callable[[], torch.Tensor] | None = None
    """Function of a pass that was replayed from a graph, until the next one is: computes the token with the largest logit
    after each of the batch's S tokens, [S] int64, and puts it behind that one."""
    local_rope: tuple[torch.Tensor, torch.Tensor] | None = None
    """Rotations of layers that attend within a window, in models where those are rotated by other frequencies."""

    @property
    def residual(self) -> torch.Tensor:
        """[T, hidden_size]: with all that was computed."""
        return self.hidden if self.pending is None else self.hidden + self.pending


class DecoderModel(ABC):
    """A forward pass is `begin`, `run_layers` over consecutive ranges that cover all layers, `logits`; it may pause
    between two ranges for as long as its KV blocks stay its own.

    Of several ranks each has a part of the heads; of several stages each has a run of the layers, whose indices are its own,
    from 0, and only the last has `logits`."""

    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    hidden_size: int
    num_layers: int
    """Layers of this stage."""
    num_heads: int
    """Heads of this rank; so are `num_kv_heads`."""
    num_kv_heads: int
    head_dim: int
    layers_at_once: int = 1
    """Layers that `run_layers` takes at least: all, where a forward pass cannot be cut."""
    windows: tuple[int, ...] = ()
    """Sliding windows that some layer uses."""
    softcap: float = 0.0
    """Cap of the attention scores of all layers: cap * tanh(score / cap); 0: none."""
    can_be_captured: bool = True
    """In a CUDA graph: no layer asks the device for a value while a step is launched."""
    layers: range
    """This stage's layers among the whole model's."""
    adaptable: Sequence[Mapping[str, Adaptable]] = ()
    """By layer: the modules that LoRA adapters may change, by name, those of a fused layer in the order of its outputs.
    Empty: there are none."""

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim, self.softcap)

    def kv_shape(self, block_size: int) -> KvShape:
        return KvShape(self.num_layers, block_size, self.num_kv_heads, self.head_dim, self.dtype)

    @abstractmethod
    def begin(self, batch: ForwardBatch, hidden: torch.Tensor | None = None) -> ForwardState:
        """`hidden`: `[T, hidden_size]`, what the stage before has handed on (`residual` of its state); None: this is the
        first stage, which embeds."""

    @abstractmethod
    def run_layers(self, state: ForwardState, start: int, stop: int, batch: ForwardBatch) -> None:
        """Advances `state` over layers start..stop-1."""

    @abstractmethod
    def logits(self, state: ForwardState, tokens: torch.Tensor | None) -> torch.Tensor:
        """[S, vocab_size] in the model's dtype, of the tokens at these indices ([S] int64; None: all), from a state after
        all layers. Of a model without a head, whose hidden states are pooled: these, [S, hidden_size], after the last norm.
        Does not change the state."""

    def most_likely(self, state: ForwardState, tokens: torch.Tensor | None) -> torch.Tensor | None:
        """[S] int64: where the `logits` of the same arguments are largest, for less than those cost; nothing is asked of the
        state after it. None: there is no such way."""
        return None

    def forward(self, batch: ForwardBatch, hidden: torch.Tensor | None = None) -> ForwardState:
        """Runs all layers; `hidden` as of `begin`."""
        state = self.begin(batch, hidden)
        self.run_layers(state, 0, self.num_layers, batch)
        return state


def heads_of_rank(num_heads: int, num_kv_heads: int, group: RankGroup) -> tuple[int, int]:
    """(query heads, KV heads) of each rank. Raises `CheckpointError`."""
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{num_heads} query heads do not divide over {num_kv_heads} KV heads.")
    if num_kv_heads % group.size:
        raise CheckpointError(f"{num_kv_heads} KV heads do not divide over {group.size} ranks.")
    return num_heads // group.size, num_kv_heads // group.size


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
