"""The layers of a Llama-like decoder by the compiled kernels: one call for all of them, or for as many as lie between two
safepoints; sums over ranks are in between."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from services.worker.attention.compiled_backend import kv_struct
from services.worker.kv.kv_store import KvViews
from services.worker.models.adapters import BatchAdapters, CompiledChanges, LoraWeights
from services.worker.models.decoder import DecoderModel, ForwardBatch, ForwardState
from services.worker.native.library import (
    ACTIVATIONS,
    LANES,
    MAX_HEAD_DIM,
    PANEL,
    ChangesStruct,
    ChangeStruct,
    DecoderStruct,
    KvStruct,
    LayerStruct,
    Packed,
    PassStruct,
    address,
    kernels,
)  # fmt: skip
from services.worker.ranks.group import RankGroup

LINEARS = ("qkv", "out", "gate_up", "down")
"""In the kernels' order."""


class CompiledLayers:
    def __init__(self, layers: Sequence[Any], model: DecoderModel, activation: str, eps: float) -> None:
        """Use `of`, which knows what can be compiled. Keeps the layers, whose weights are pointed to, and packs those of the
        gates anew."""
        self._keeps = list(layers)
        for layer in layers:
            layer.mlp.gate_up = layer.mlp.gate_up.compiled.gated(activation)
        self._structs = (LayerStruct * len(layers))(*map(_layer_struct, layers))
        self._inner_size = layers[0].mlp.gate_up.out_features
        self._heads_width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        self._attended_width = model.num_heads * model.head_dim
        self._decoder = DecoderStruct(
            self._structs, model.hidden_size, self._inner_size, model.num_heads, model.num_kv_heads, model.head_dim,
            model.dtype == torch.bfloat16, ACTIVATIONS[activation], eps,
        )  # fmt: skip
        self._kv: tuple[KvViews, ctypes.Array[KvStruct]] | None = None

    @classmethod
    def of(cls, layers: Sequence[Any], model: DecoderModel, activation: str, eps: float) -> CompiledLayers | None:
        """`layers`: with the attributes of llama.py's. None: something of it is not compiled."""
        linears = [linear for one in layers for linear in (one.qkv, one.out, one.mlp.gate_up, one.mlp.down)]
        if not linears or not all(getattr(linear, "compiled", None) for linear in linears):
            return None
        if not all(one.mlp.gate_up.compiled.can_be_gated(activation) for one in layers):
            return None
        if model.head_dim % (2 * LANES) or model.head_dim > MAX_HEAD_DIM or model.hidden_size % LANES:
            return None
        return cls(layers, model, activation, eps)

    def run(self, state: ForwardState, start: int, stop: int, batch: ForwardBatch, group: RankGroup) -> None:
        """Advances `state`, whose `rope` is of `RotaryEmbedding.cos_sin`, over layers start..stop-1. Raises `GroupError`."""
        compiled = kernels()
        assert compiled is not None and state.rope is not None
        num_tokens, dtype = len(state.hidden), state.hidden.dtype
        has_pending = state.pending is not None
        if state.pending is None:
            state.pending = torch.empty_like(state.hidden)
        work = [
            torch.empty(num_tokens, width, dtype=dtype)
            for width in (state.hidden.shape[1], self._heads_width, self._attended_width, self._inner_size)
        ]
        forward = PassStruct(
            ctypes.pointer(batch.metadata.struct), self._kv_of(batch.kv), address(state.hidden), address(state.pending),
            *map(address, state.rope), *map(address, work), 2 * start, 2 * stop, has_pending,
        )  # fmt: skip
        if batch.adapters is not None:
            # what it points to lives until the call returns
            of_rows, lowered = self._changes(batch.adapters, num_tokens, dtype)
            changes = ChangesStruct(address(of_rows), address(lowered), lowered.stride(0) * dtype.itemsize)
            forward.changes = ctypes.pointer(changes)
        if group.size == 1 or group.exchange is not None:
            forward.ranks = None if group.exchange is None else group.exchange.pointer
            compiled.run_parts(self._decoder, forward)
            group.raise_if_lost()
            return
        for part in range(2 * start, 2 * stop):
            forward.first, forward.last = part, part + 1
            compiled.run_parts(self._decoder, forward)
            state.pending = group.all_reduce(state.pending)
            forward.pending, forward.has_pending = address(state.pending), True

    def last_norm(self, state: ForwardState, tokens: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size]: that of the residual stream, of these tokens; None: of all."""
        compiled = kernels()
        assert compiled is not None
        hidden, pending = _of_tokens(state, tokens)
        return compiled.add_rms_norm(hidden.clone() if tokens is None else hidden, pending, weight, self._decoder.eps)

    def most_likely(
        self, state: ForwardState, tokens: torch.Tensor | None, weight: torch.Tensor, head: Packed
    ) -> torch.Tensor:
        """Most likely tokens (`DecoderModel.most_likely`), by the norm of this weight and this head."""
        compiled = kernels()
        assert compiled is not None
        return compiled.most_likely(*_of_tokens(state, tokens), weight, self._decoder.eps, head)

    def _changes(self, adapters: BatchAdapters, num_tokens: int, dtype: torch.dtype) -> tuple[np.ndarray, torch.Tensor]:
        """[T] addresses of each token's changes, or 0, and [T, ranks] to work in."""
        of_rows, num_ranks = np.zeros(num_tokens, np.uint64), 0
        for weights, tokens in adapters.groups:
            if weights.compiled is None:
                weights.compiled = self._compiled_changes(weights)
            of_rows[tokens if isinstance(tokens, slice) else tokens.numpy()] = ctypes.addressof(
                weights.compiled.structs
            )
            num_ranks = max(num_ranks, weights.compiled.num_ranks)
        return of_rows, torch.empty(num_tokens, num_ranks, dtype=dtype)

    def _compiled_changes(self, weights: LoraWeights) -> CompiledChanges:
        """`weights` keeps what these point to."""
        structs, num_ranks = (ChangeStruct * (len(LINEARS) * len(self._keeps)))(), 0
        for (layer, linear), change in weights.changes.items():
            down, up = change.down.compiled, change.up.compiled
            assert down is not None and up is not None, "they are of the layers' own dtype"
            structs[len(LINEARS) * layer + LINEARS.index(linear)] = ChangeStruct(down.struct, up.struct)
            num_ranks = max(num_ranks, down.out_features)
        return CompiledChanges(structs, -(-num_ranks // PANEL) * PANEL)

    def _kv_of(self, views: KvViews) -> ctypes.Array[KvStruct]:
        known = self._kv
        if known is None or known[0] is not views:
            known = self._kv = views, (KvStruct * len(views.layers))(*map(kv_struct, views.layers))
        return known[1]


def _of_tokens(state: ForwardState, tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What is hidden and what is pending, of these or of all."""
    hidden, pending = state.hidden, state.pending
    if tokens is None:
        return hidden, pending
    return hidden.index_select(0, tokens), None if pending is None else pending.index_select(0, tokens)


def _layer_struct(layer: Any) -> LayerStruct:
    packed = (layer.qkv.compiled, layer.out.compiled, layer.mlp.gate_up, layer.mlp.down.compiled)
    norms = (layer.input_norm, layer.post_norm, layer.query_norm, layer.key_norm)
    return LayerStruct(*map(address, norms), *(one.struct for one in packed), layer.window or 0)
