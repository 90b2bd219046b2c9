"""OPT: learned positions, layer norm with bias, ReLU MLP, biases everywhere (Zhang et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from services.worker.models.adapters import Adaptable
from services.worker.models.decoder import DecoderModel, ForwardBatch, ForwardState, activation, heads_of_rank
from services.worker.models.quantized_linear import AnyLinear
from services.worker.models.weights import TokenEmbedding, WeightReader
from shared.models.checkpoint import CheckpointShape, positive_int
from shared.models.families import INPUTS, OUTPUTS

_POSITION_OFFSET = 2
"""Row of the position table that position 0 takes; inherited from fairseq's padding rows."""
_EPS = 1e-5


@dataclass
class _Norm:
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    size: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (self.size,), self.weight, self.bias, _EPS)


@dataclass
class _Layer:
    attention_norm: _Norm
    qkv: AnyLinear
    out: AnyLinear
    final_norm: _Norm
    fc1: AnyLinear
    fc2: AnyLinear


class OptModel(DecoderModel):
    def __init__(
        self, reader: WeightReader, config: Mapping[str, Any], shape: CheckpointShape, max_model_len: int
    ) -> None:
        self.dtype, self.device, self._group = reader.dtype, reader.device, reader.group
        self.vocab_size, self.hidden_size, self.head_dim = shape.vocab_size, shape.hidden_size, shape.head_dim
        self.num_heads, self.num_kv_heads = heads_of_rank(shape.num_kv_heads, shape.num_kv_heads, self._group)
        self._norm_first = bool(config.get("do_layer_norm_before", True))
        self._activation = reader.numerics.by_rows(activation(str(config.get("activation_function") or "relu")))
        hidden, width = shape.hidden_size, int(config.get("word_embed_proj_dim") or shape.hidden_size)
        self.layers = layers = self._group.layers_of(shape.num_layers)
        self.num_layers = len(layers)
        is_first, is_last = self._group.is_first_stage, self._group.is_last_stage
        prefix = reader.prefix_of("embed_tokens.weight", ("model.decoder.", "decoder.", ""))
        is_tied = reader.is_tied(f"{prefix}embed_tokens.weight", is_said=config.get("tie_word_embeddings", True))
        self._embedding = self._positions = self._project_in = None
        if is_first or (is_last and is_tied):
            embedding = reader.get(f"{prefix}embed_tokens.weight", shape.vocab_size, width)
            self._embedding = TokenEmbedding(embedding, self._group)
        if is_first:
            num_positions = positive_int(config, "max_position_embeddings", reader.config_file) + _POSITION_OFFSET
            self._positions = reader.get(f"{prefix}embed_positions.weight", num_positions, hidden)
            if width != hidden:
                self._project_in = reader.linear([f"{prefix}project_in"], width, [hidden])
        ffn = positive_int(config, "ffn_dim", reader.config_file)
        names = tuple(f"{prefix}layers.{i}." for i in layers)
        self._layers = [self._read_layer(reader, name, hidden, ffn) for name in names]
        modules = {f"{x}_proj": Adaptable("qkv", hidden, (hidden,), OUTPUTS) for x in "qkv"}
        modules["out_proj"] = Adaptable("out", hidden, (hidden,), INPUTS)
        modules |= {"fc1": Adaptable("fc1", hidden, (ffn,), OUTPUTS), "fc2": Adaptable("fc2", ffn, (hidden,), INPUTS)}
        self.adaptable = [modules] * self.num_layers
        self._final_norm = self._project_out = self._head = None
        if is_last:
            if self._norm_first and not config.get("_remove_final_layer_norm"):
                self._final_norm = _read_norm(reader, f"{prefix}final_layer_norm", hidden)
            if width != hidden:
                self._project_out = reader.linear([f"{prefix}project_out"], hidden, [width])
            self._head = reader.head(shape.vocab_size, width, tied_to=self._embedding if is_tied else None)
        reader.finish(("lm_head.weight",) if is_tied else (), names)

    @staticmethod
    def _read_layer(reader: WeightReader, prefix: str, hidden: int, ffn: int) -> _Layer:
        attention = f"{prefix}self_attn."
        return _Layer(
            attention_norm=_read_norm(reader, f"{prefix}self_attn_layer_norm", hidden),
            qkv=reader.linear([f"{attention}{x}_proj" for x in "qkv"], hidden, [hidden] * 3),
            out=reader.linear([f"{attention}out_proj"], hidden, [hidden]),
            final_norm=_read_norm(reader, f"{prefix}final_layer_norm", hidden),
            fc1=reader.linear([f"{prefix}fc1"], hidden, [ffn]),
            fc2=reader.linear([f"{prefix}fc2"], ffn, [hidden]),
        )

    def begin(self, batch: ForwardBatch, hidden: torch.Tensor | None = None) -> ForwardState:
        if hidden is not None:
            return ForwardState(hidden)
        assert self._embedding is not None and self._positions is not None
        hidden = self._embedding(batch.token_ids)
        if self._project_in is not None:
            hidden = self._project_in(hidden)
        return ForwardState(hidden + F.embedding(batch.positions + _POSITION_OFFSET, self._positions))

    def run_layers(self, state: ForwardState, start: int, stop: int, batch: ForwardBatch) -> None:
        hidden, all_reduce = state.hidden, self._group.all_reduce
        for index in range(start, stop):
            layer = self._layers[index]
            x = layer.attention_norm(hidden) if self._norm_first else hidden
            heads = batch.adapted(layer.qkv(x), x, index, "qkv").view(len(x), 3 * self.num_heads, self.head_dim)
            queries, keys, values = torch.split(heads, self.num_heads, 1)
            attended = batch.attend(index, queries, keys, values).flatten(1)
            hidden = hidden + all_reduce(batch.adapted(layer.out(attended), attended, index, "out"))
            hidden = hidden if self._norm_first else layer.attention_norm(hidden)
            x = layer.final_norm(hidden) if self._norm_first else hidden
            inner = self._activation(batch.adapted(layer.fc1(x), x, index, "fc1"))
            hidden = hidden + all_reduce(batch.adapted(layer.fc2(inner), inner, index, "fc2"))
            hidden = hidden if self._norm_first else layer.final_norm(hidden)
        state.hidden = hidden

    def logits(self, state: ForwardState, tokens: torch.Tensor | None) -> torch.Tensor:
        assert self._head is not None
        hidden = state.hidden if tokens is None else state.hidden.index_select(0, tokens)
        if self._final_norm is not None:
            hidden = self._final_norm(hidden)
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        return self._head(hidden)


def _read_norm(reader: WeightReader, name: str, size: int) -> _Norm:
    """Weight and bias are absent where the checkpoint has `layer_norm_elementwise_affine` off."""
    return _Norm(reader.get_optional(f"{name}.weight", size), reader.get_optional(f"{name}.bias", size), size)
