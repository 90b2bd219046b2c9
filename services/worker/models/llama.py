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
from services.worker.models.decoder import DecoderModel, ForwardBatch, ForwardState, activation
from services.worker.models.rope import RotaryEmbedding, rotate
from services.worker.models.weights import WeightReader
from shared.checkpoint import CheckpointError, CheckpointShape, positive_int, rope_parameters


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
        self.dtype, self.device = reader.dtype, reader.device
        self.vocab_size, self.num_layers = shape.vocab_size, shape.num_layers
        self.num_heads, self.num_kv_heads = (
            positive_int(config, "num_attention_heads", reader.config_file),
            shape.num_kv_heads,
        )
        self.head_dim = shape.head_dim
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"{self.num_heads} query heads do not divide over {self.num_kv_heads} KV heads.")
        self._eps = float(config.get("rms_norm_eps") or 1e-6)
        self._activation = activation(str(config.get("hidden_act") or "silu"))
        windows = _layer_windows(config, shape, max_model_len)
        self.windows = tuple(sorted({w for w in windows if w is not None}))
        self._rope = RotaryEmbedding(
            self.head_dim,
            rope_parameters(config),
            positive_int(config, "max_position_embeddings", reader.config_file),
            max_model_len,
            self.device,
            self.dtype,
        )
        prefix = reader.prefix_of("embed_tokens.weight", ("model.", ""))
        self._embedding = reader.get(f"{prefix}embed_tokens.weight", shape.vocab_size, shape.hidden_size)
        self._layers = [
            self._read_layer(reader, f"{prefix}layers.{i}.", config, shape, windows[i]) for i in range(self.num_layers)
        ]
        self._norm = reader.get(f"{prefix}norm.weight", shape.hidden_size)
        if config.get("tie_word_embeddings") or "lm_head.weight" not in reader:
            self._head = Linear(self._embedding, shared=True)
            reader.finish(ignored=("lm_head.weight",))
        else:
            self._head = reader.linear(["lm_head"], shape.hidden_size, [shape.vocab_size])
            reader.finish()

    def _read_layer(
        self, reader: WeightReader, prefix: str, config: Mapping[str, Any], shape: CheckpointShape, window: int | None
    ) -> _Layer:
        hidden, inner = shape.hidden_size, positive_int(config, "intermediate_size", reader.config_file)
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
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

    def begin(self, batch: ForwardBatch) -> ForwardState:
        return ForwardState(F.embedding(batch.token_ids, self._embedding), None, self._rope(batch.positions))

    def run_layers(self, state: ForwardState, start: int, stop: int, batch: ForwardBatch) -> None:
        for index in range(start, stop):
            layer = self._layers[index]
            normed = self._add_and_norm(state, layer.input_norm)
            attended = self._attention(layer, index, normed, state, batch)
            state.pending = layer.out(attended)
            normed = self._add_and_norm(state, layer.post_norm)
            gate, up = layer.gate_up(normed).chunk(2, -1)
            state.pending = layer.down(self._activation(gate).mul_(up))

    def _attention(
        self, layer: _Layer, index: int, normed: torch.Tensor, state: ForwardState, batch: ForwardBatch
    ) -> torch.Tensor:
        assert state.rope is not None
        heads = layer.qkv(normed).view(len(normed), -1, self.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys, values = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
            queries = F.rms_norm(queries, (self.head_dim,), layer.query_norm, self._eps)
            keys = F.rms_norm(keys, (self.head_dim,), layer.key_norm, self._eps)
            rotated = rotate(torch.cat((queries, keys), 1), *state.rope)
        else:
            rotated = rotate(heads[:, : -self.num_kv_heads], *state.rope)
            values = heads[:, -self.num_kv_heads :]
        queries, keys = torch.split(rotated, [self.num_heads, self.num_kv_heads], 1)
        return batch.attend(index, queries, keys, values, layer.window).flatten(1)

    def _add_and_norm(self, state: ForwardState, weight: torch.Tensor) -> torch.Tensor:
        if state.pending is not None:
            state.hidden = state.hidden + state.pending
            state.pending = None
        return F.rms_norm(state.hidden, weight.shape, weight, self._eps)

    def logits(self, state: ForwardState, tokens: torch.Tensor | None) -> torch.Tensor:
        hidden = state.hidden if state.pending is None else state.hidden + state.pending
        if tokens is not None:
            hidden = hidden.index_select(0, tokens)
        return self._head(F.rms_norm(hidden, self._norm.shape, self._norm, self._eps))


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
