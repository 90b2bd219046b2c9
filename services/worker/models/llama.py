"""Llama 2 and 3, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, Phi-3 and Gemma 1 to 3: RMS norm, rotary embeddings, gated MLP
or experts, grouped-query attention.

They differ in biases and norms of queries and keys, taken where the checkpoint has them, and in what parts.py names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from services.worker.attention.compiled_backend import CompiledBatch
from services.worker.models.adapters import Adaptable
from services.worker.models.compiled_layers import CompiledLayers
from services.worker.models.decoder import DecoderModel, ForwardBatch, ForwardState, activation, heads_of_rank
from services.worker.models.experts import Experts
from services.worker.models.ops import WideNormOps
from services.worker.models.parts import Parts, layer_kinds, layer_windows, parts_of
from services.worker.models.quantized_linear import AnyLinear
from services.worker.models.rope import RotaryEmbedding
from services.worker.models.weights import SCORE_WEIGHT, TokenEmbedding, WeightReader
from services.worker.native.library import Packed, in_halves
from shared.models.checkpoint import CheckpointShape, local_rope_parameters, positive_int, rope_parameters
from shared.models.families import INPUTS, OUTPUTS


@dataclass(kw_only=True)
class _Mlp:
    gate_up: AnyLinear | Packed
    """Packed: with the activation, else without."""
    down: AnyLinear


@dataclass(kw_only=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: AnyLinear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: AnyLinear
    out_norm: torch.Tensor | None
    """Norm of what attention gives, before it is added; `mlp_norm` likewise."""
    post_norm: torch.Tensor
    mlp: _Mlp | Experts
    mlp_norm: torch.Tensor | None
    window: int | None
    is_local: bool
    """Rotated as local layers are, in models where those have their own frequencies."""


class LlamaModel(DecoderModel):
    def __init__(
        self, reader: WeightReader, config: Mapping[str, Any], shape: CheckpointShape, max_model_len: int
    ) -> None:
        self.dtype, self.device, self._group = reader.dtype, reader.device, reader.group
        self.vocab_size, self.hidden_size, self.head_dim = shape.vocab_size, shape.hidden_size, shape.head_dim
        num_heads = positive_int(config, "num_attention_heads", reader.config_file)
        self.num_heads, self.num_kv_heads = heads_of_rank(num_heads, shape.num_kv_heads, self._group)
        self._eps = float(config.get("rms_norm_eps") or 1e-6)
        self._parts = parts = parts_of(config, shape)
        self.softcap = parts.softcap
        self._activation = reader.numerics.by_rows(activation(parts.activation))
        is_plain = not parts.has_norm_offset and parts.rotary_dim == self.head_dim
        self._ops = reader.numerics.ops(self.device, self.dtype, self.head_dim) if is_plain else WideNormOps()
        self._cap = reader.numerics.by_rows(lambda logits: logits.div(parts.logit_softcap).tanh_())
        # as the product of two tensors of this dtype rounds it
        self._embedding_scale = torch.tensor(parts.embedding_scale, dtype=self.dtype).item()
        self._windows, self._kinds = layer_windows(config, shape, max_model_len), layer_kinds(config, shape)
        self.windows = tuple(sorted({w for w in self._windows if w is not None}))
        max_positions = positive_int(config, "max_position_embeddings", reader.config_file)

        def rotary(rope: Mapping[str, Any]) -> RotaryEmbedding:
            made = RotaryEmbedding(parts.rotary_dim, rope, max_positions, max_model_len, self.device, self.dtype)
            return reader.numerics.rope(made, max_model_len)

        local = local_rope_parameters(config, shape.architecture)
        self._rope = rotary(rope_parameters(config))
        self._local_rope = None if local is None else rotary(local)
        self.layers = layers = self._group.layers_of(shape.num_layers)
        self.num_layers = len(layers)
        is_first, is_last = self._group.is_first_stage, self._group.is_last_stage
        prefix = reader.prefix_of("embed_tokens.weight", ("model.", ""))
        is_tied = shape.pooling is None and reader.is_tied(
            f"{prefix}embed_tokens.weight", is_said=config.get("tie_word_embeddings")
        )
        self._embedding = None
        if is_first or (is_last and is_tied):
            embedding = reader.get(f"{prefix}embed_tokens.weight", shape.vocab_size, shape.hidden_size)
            self._embedding = TokenEmbedding(embedding, self._group)
        names = tuple(f"{prefix}layers.{i}." for i in layers)
        self._layers = [self._read_layer(reader, name, i, config, shape) for i, name in zip(layers, names, strict=True)]
        experts = [layer.mlp for layer in self._layers if isinstance(layer.mlp, Experts)]
        self.can_be_captured = all(mlp.can_be_captured for mlp in experts)
        self._compiled = None
        if is_plain and self._is_llama(parts):
            self._compiled = CompiledLayers.of(self._layers, self, parts.activation, self._eps)
        self.adaptable = [self._adaptable(layer, config, shape.hidden_size) for layer in self._layers]
        self._norm = self._head = None
        if is_last:
            self._norm = self._read_norm(reader, f"{prefix}norm.weight", shape.hidden_size)
            if shape.pooling is None:
                tied_to = self._embedding if is_tied else None
                self._head = reader.head(shape.vocab_size, shape.hidden_size, tied_to=tied_to)
        unused = ("lm_head.weight", SCORE_WEIGHT) if shape.pooling is not None else ("lm_head.weight",) * is_tied
        reader.finish(unused, names)

    def _is_llama(self, parts: Parts) -> bool:
        """Without what the compiled layers do not have."""
        others = parts.has_post_norms or parts.softcap or parts.query_scale != 1.0 or self._local_rope is not None
        return not others and all(isinstance(layer.mlp, _Mlp) for layer in self._layers)

    def _read_layer(
        self, reader: WeightReader, prefix: str, index: int, config: Mapping[str, Any], shape: CheckpointShape
    ) -> _Layer:
        parts, hidden = self._parts, shape.hidden_size
        query, key = (n * self._group.size * self.head_dim for n in (self.num_heads, self.num_kv_heads))
        attention = f"{prefix}self_attn."
        names = [f"{attention}{x}_proj" for x in (("qkv",) if parts.has_fused_weights else "qkv")]
        has_query_norm = f"{attention}q_norm.weight" in reader
        post_norms = ("post_attention_layernorm",) * 2
        if parts.has_post_norms:
            post_norms = ("post_attention_layernorm", "pre_feedforward_layernorm")
        return _Layer(
            input_norm=self._read_norm(reader, f"{prefix}input_layernorm.weight", hidden),
            qkv=reader.linear(names, hidden, [query, key, key]),
            query_norm=self._read_norm(reader, f"{attention}q_norm.weight", self.head_dim) if has_query_norm else None,
            key_norm=self._read_norm(reader, f"{attention}k_norm.weight", self.head_dim) if has_query_norm else None,
            out=reader.linear([f"{attention}o_proj"], query, [hidden]),
            out_norm=self._read_norm(reader, f"{prefix}{post_norms[0]}.weight", hidden)
            if parts.has_post_norms
            else None,
            post_norm=self._read_norm(reader, f"{prefix}{post_norms[1]}.weight", hidden),
            mlp=self._read_mlp(reader, prefix, index, config, hidden),
            mlp_norm=(
                self._read_norm(reader, f"{prefix}post_feedforward_layernorm.weight", hidden)
                if parts.has_post_norms
                else None
            ),
            window=self._windows[index],
            is_local=self._local_rope is not None and self._kinds[index],
        )

    def _adaptable(self, layer: _Layer, config: Mapping[str, Any], hidden: int) -> dict[str, Adaptable]:
        query, key = (n * self._group.size * self.head_dim for n in (self.num_heads, self.num_kv_heads))
        inner = int(config.get("intermediate_size") or 0)
        wide = {
            "qkv": {"q_proj": query, "k_proj": key, "v_proj": key},
            "gate_up": {"gate_proj": inner, "up_proj": inner},
        }
        found: dict[str, Adaptable] = {}
        for linear, outputs in wide.items():
            if linear == "gate_up" and not isinstance(layer.mlp, _Mlp):
                continue
            if self._parts.has_fused_weights:
                outputs_of = {f"{linear}_proj": tuple(outputs.values())}
            else:
                outputs_of = {name: (n,) for name, n in outputs.items()}
            is_interleaved = linear == "gate_up" and self._compiled is not None
            found |= {name: Adaptable(linear, hidden, n, OUTPUTS, is_interleaved) for name, n in outputs_of.items()}
        found["o_proj"] = Adaptable("out", query, (hidden,), INPUTS)
        if isinstance(layer.mlp, _Mlp):
            found["down_proj"] = Adaptable("down", inner, (hidden,), INPUTS)
        return found

    def _read_norm(self, reader: WeightReader, name: str, size: int) -> torch.Tensor:
        weight = reader.get(name, size)
        return 1 + weight.float() if self._parts.has_norm_offset else weight

    def _read_mlp(
        self, reader: WeightReader, prefix: str, index: int, config: Mapping[str, Any], hidden: int
    ) -> _Mlp | Experts:
        experts, mlp = self._parts.experts, f"{prefix}mlp."
        if experts is None or index not in experts.layers:
            inner = positive_int(config, "intermediate_size", reader.config_file)
            names = ["gate_up_proj"] if self._parts.has_fused_weights else ["gate_proj", "up_proj"]
            return _Mlp(
                gate_up=reader.linear([mlp + name for name in names], hidden, [inner, inner]),
                down=reader.linear([f"{mlp}down_proj"], inner, [hidden]),
            )
        block, gate, up, down = experts.names
        of_experts = [f"{prefix}{block}.experts.{i}." for i in range(experts.num_experts)]
        inner = experts.inner_size
        return Experts(
            reader.router(f"{prefix}{block}.gate", hidden, experts.num_experts),
            reader.linears([[e + gate, e + up] for e in of_experts], hidden, [inner, inner]),
            reader.linears([[e + down] for e in of_experts], inner, [hidden]),
            self._activation,
            num_experts=experts.num_experts,
            top_k=experts.top_k,
            is_renormalised=experts.is_renormalised,
        )

    def begin(self, batch: ForwardBatch, hidden: torch.Tensor | None = None) -> ForwardState:
        if hidden is None:
            assert self._embedding is not None
            hidden = self._embedding(batch.token_ids)
            if self._embedding_scale != 1.0:
                hidden = hidden * self._embedding_scale
        if self._compiled_with(batch) is not None:
            return ForwardState(hidden, None, self._rope.cos_sin(batch.positions))
        local = None if self._local_rope is None else self._ops.rope(self._local_rope, batch.positions)
        rope = self._ops.rope(self._rope, batch.positions)
        return ForwardState(hidden, None, rope, local_rope=local)

    def _compiled_with(self, batch: ForwardBatch) -> CompiledLayers | None:
        """Compiled layers, where those and the attention of this batch are compiled; else None."""
        return self._compiled if isinstance(batch.metadata, CompiledBatch) else None

    def run_layers(self, state: ForwardState, start: int, stop: int, batch: ForwardBatch) -> None:
        compiled = self._compiled_with(batch)
        if compiled is not None:
            compiled.run(state, start, stop, batch, self._group)
            return
        for index in range(start, stop):
            layer = self._layers[index]
            normed = self._add_and_norm(state, layer.input_norm)
            attended = self._attention(layer, index, normed, state, batch)
            state.pending = self._group.all_reduce(batch.adapted(layer.out(attended), attended, index, "out"))
            if layer.out_norm is not None:
                state.pending = self._ops.rms_norm(state.pending, layer.out_norm, self._eps)
            normed = self._add_and_norm(state, layer.post_norm)
            if isinstance(layer.mlp, Experts):
                result = layer.mlp(normed)
            else:
                gated = self._gated(layer.mlp.gate_up, normed, index, batch)
                result = batch.adapted(layer.mlp.down(gated), gated, index, "down")
            state.pending = self._group.all_reduce(result)
            if layer.mlp_norm is not None:
                state.pending = self._ops.rms_norm(state.pending, layer.mlp_norm, self._eps)

    def _attention(
        self, layer: _Layer, index: int, normed: torch.Tensor, state: ForwardState, batch: ForwardBatch
    ) -> torch.Tensor:
        rope = state.local_rope if layer.is_local else state.rope
        assert rope is not None
        heads = batch.adapted(layer.qkv(normed), normed, index, "qkv").view(len(normed), -1, self.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys, values = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
            queries = self._ops.rms_norm(queries, layer.query_norm, self._eps)
            keys = self._ops.rms_norm(keys, layer.key_norm, self._eps)
            rotated = self._ops.rotate(torch.cat((queries, keys), 1), rope)
        else:
            rotated = self._ops.rotate(heads[:, : -self.num_kv_heads], rope)
            values = heads[:, -self.num_kv_heads :]
        queries, keys = torch.split(rotated, [self.num_heads, self.num_kv_heads], 1)
        if self._parts.query_scale != 1.0:
            queries = queries * self._parts.query_scale
        return batch.attend(index, queries, keys, values, layer.window).flatten(1)

    def _add_and_norm(self, state: ForwardState, weight: torch.Tensor) -> torch.Tensor:
        if state.pending is None:
            return self._ops.rms_norm(state.hidden, weight, self._eps)
        normed, state.hidden = self._ops.add_rms_norm(state.hidden, state.pending, weight, self._eps)
        state.pending = None
        return normed

    def _gated(self, linear: AnyLinear | Packed, normed: torch.Tensor, index: int, batch: ForwardBatch) -> torch.Tensor:
        """[T, hidden_size] -> [T, inner]"""
        if isinstance(linear, Packed):
            if batch.adapters is None:
                return linear(normed)
            gate_up = in_halves(batch.adapted(linear.ungated(normed), normed, index, "gate_up"))
        else:
            gate_up = batch.adapted(linear(normed), normed, index, "gate_up")
        if self._activation is F.silu:
            return self._ops.silu_and_mul(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return self._activation(gate).mul_(up)

    def logits(self, state: ForwardState, tokens: torch.Tensor | None) -> torch.Tensor:
        assert self._norm is not None
        if self._compiled is not None:
            normed = self._compiled.last_norm(state, tokens, self._norm)
        else:
            hidden = state.residual if tokens is None else state.residual.index_select(0, tokens)
            normed = self._ops.rms_norm(hidden, self._norm, self._eps)
        if self._head is None:
            return normed
        logits = self._head(normed)
        return self._cap(logits).mul_(self._parts.logit_softcap) if self._parts.logit_softcap else logits

    def most_likely(self, state: ForwardState, tokens: torch.Tensor | None) -> torch.Tensor | None:
        assert self._norm is not None
        head = None if self._head is None else self._head.compiled
        if self._compiled is None or head is None or self._parts.logit_softcap:
            return None
        return self._compiled.most_likely(state, tokens, self._norm, head)
