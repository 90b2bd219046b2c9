"""Llama 2 and 3, Mistral, Qwen2 and Qwen3: RMS norm, rotary embeddings, gated MLP, grouped-query attention.

They differ in biases (taken where the checkpoint has them), Qwen3's norms of queries and keys, and sliding windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from services.worker.linear import Linear
from services.worker.models.decoder import DecoderModel, ForwardBatch, ForwardState, activation, heads_of_rank
from services.worker.models.rope import RotaryEmbedding
from services.worker.models.weights import TokenEmbedding, WeightReader
from shared.checkpoint import CheckpointShape, positive_int, rope_parameters


@dataclass(kw_only=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    window: int | None


class LlamaModel(DecoderModel):
    def __init__(
        self, reader: WeightReader, config: Mapping[str, Any], shape: CheckpointShape, max_model_len: int
    ) -> None:
        self.dtype, self.device, self._group = reader.dtype, reader.device, reader.group
        self.vocab_size, self.hidden_size, self.head_dim = shape.vocab_size, shape.hidden_size, shape.head_dim
        num_heads = positive_int(config, "num_attention_heads", reader.config_file)
        self.num_heads, self.num_kv_heads = heads_of_rank(num_heads, shape.num_kv_heads, self._group)
        self._eps = float(config.get("rms_norm_eps") or 1e-6)
        self._activation = reader.numerics.by_rows(activation(str(config.get("hidden_act") or "silu")))
        self._ops = reader.numerics.ops(self.device, self.dtype, self.head_dim)
        windows = _layer_windows(config, shape, max_model_len)
        self.windows = tuple(sorted({w for w in windows if w is not None}))
        rope = RotaryEmbedding(
            self.head_dim,
            rope_parameters(config),
            positive_int(config, "max_position_embeddings", reader.config_file),
            max_model_len,
            self.device,
            self.dtype,
        )
        self._rope = reader.numerics.rope(rope, max_model_len)
        layers = self._group.layers_of(shape.num_layers)
        self.num_layers = len(layers)
        is_first, is_last = self._group.is_first_stage, self._group.is_last_stage
        is_tied = bool(config.get("tie_word_embeddings")) or "lm_head.weight" not in reader
        prefix = reader.prefix_of("embed_tokens.weight", ("model.", ""))
        self._embedding = None
        if is_first or (is_last and is_tied):
            embedding = reader.get(f"{prefix}embed_tokens.weight", shape.vocab_size, shape.hidden_size)
            self._embedding = TokenEmbedding(embedding, self._group)
        self._layers = [self._read_layer(reader, f"{prefix}layers.{i}.", config, shape, windows[i]) for i in layers]
        self._norm = self._head = None
        if is_last:
            self._norm = reader.get(f"{prefix}norm.weight", shape.hidden_size)
            self._head = reader.head(shape.vocab_size, shape.hidden_size, tied_to=self._embedding if is_tied else None)
        reader.finish(ignored=("lm_head.weight",) if is_tied else ())

    def _read_layer(
        self, reader: WeightReader, prefix: str, config: Mapping[str, Any], shape: CheckpointShape, window: int | None
    ) -> _Layer:
        hidden, inner = shape.hidden_size, positive_int(config, "intermediate_size", reader.config_file)
        query, key = (n * self._group.size * self.head_dim for n in (self.num_heads, self.num_kv_heads))
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return _Layer(
            input_norm=reader.get(f"{prefix}input_layernorm.weight", hidden),
            qkv=reader.linear([f"{attention}{x}_proj" for x in "qkv"], hidden, [query, key, key]),
            query_norm=reader.get_optional(f"{attention}q_norm.weight", self.head_dim),
            key_norm=reader.get_optional(f"{attention}k_norm.weight", self.head_dim),
            out=reader.linear([f"{attention}o_proj"], query, [hidden]),
            post_norm=reader.get(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=reader.linear([f"{mlp}gate_proj", f"{mlp}up_proj"], hidden, [inner, inner]),
            down=reader.linear([f"{mlp}down_proj"], inner, [hidden]),
            window=window,
        )

    def begin(self, batch: ForwardBatch, hidden: torch.Tensor | None = None) -> ForwardState:
        if hidden is None:
            assert self._embedding is not None
            hidden = self._embedding(batch.token_ids)
        return ForwardState(hidden, None, self._ops.rope(self._rope, batch.positions))

    def run_layers(self, state: ForwardState, start: int, stop: int, batch: ForwardBatch) -> None:
        for index in range(start, stop):
            layer = self._layers[index]
            normed = self._add_and_norm(state, layer.input_norm)
            attended = self._attention(layer, index, normed, state, batch)
            state.pending = self._group.all_reduce(layer.out(attended))
            normed = self._add_and_norm(state, layer.post_norm)
            state.pending = self._group.all_reduce(layer.down(self._gated(layer.gate_up(normed))))

    def _attention(
        self, layer: _Layer, index: int, normed: torch.Tensor, state: ForwardState, batch: ForwardBatch
    ) -> torch.Tensor:
        assert state.rope is not None
        heads = layer.qkv(normed).view(len(normed), -1, self.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys, values = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
            queries = self._ops.rms_norm(queries, layer.query_norm, self._eps)
            keys = self._ops.rms_norm(keys, layer.key_norm, self._eps)
            rotated = self._ops.rotate(torch.cat((queries, keys), 1), state.rope)
        else:
            rotated = self._ops.rotate(heads[:, : -self.num_kv_heads], state.rope)
            values = heads[:, -self.num_kv_heads :]
        queries, keys = torch.split(rotated, [self.num_heads, self.num_kv_heads], 1)
        return batch.attend(index, queries, keys, values, layer.window).flatten(1)

    def _add_and_norm(self, state: ForwardState, weight: torch.Tensor) -> torch.Tensor:
        if state.pending is None:
            return self._ops.rms_norm(state.hidden, weight, self._eps)
        normed, state.hidden = self._ops.add_rms_norm(state.hidden, state.pending, weight, self._eps)
        state.pending = None
        return normed

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * inner] -> [T, inner]"""
        if self._activation is F.silu:
            return self._ops.silu_and_mul(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return self._activation(gate).mul_(up)

    def logits(self, state: ForwardState, tokens: torch.Tensor | None) -> torch.Tensor:
        assert self._norm is not None and self._head is not None
        hidden = state.residual
        if tokens is not None:
            hidden = hidden.index_select(0, tokens)
        return self._head(self._ops.rms_norm(hidden, self._norm, self._eps))


def _layer_windows(config: Mapping[str, Any], shape: CheckpointShape, max_model_len: int) -> list[int | None]:
    """Each layer's sliding window; None where it attends to everything or the window covers every sequence."""
    window = config.get("sliding_window")
    if shape.architecture.startswith("Qwen") and not config.get("use_sliding_window"):
        window = None
    if not window or window >= max_model_len:
        return [None] * shape.num_layers
    kinds = config.get("layer_types")
    if kinds is None and shape.architecture.startswith("Qwen"):
        full = int(config.get("max_window_layers") or 0)
        kinds = ["full_attention" if i < full else "sliding_attention" for i in range(shape.num_layers)]
    if kinds is None:
        return [int(window)] * shape.num_layers
    return [int(window) if kind == "sliding_attention" else None for kind in kinds]
