"""Differences of Llama's kin from Llama, read from config.json: Gemma's norms, scales and soft caps, Phi-3's
fused weights and partial rotation, the experts of Mixtral and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shared.models.checkpoint import CheckpointShape, rope_parameters


class ExpertNames(NamedTuple):
    """Names of a layer's modules in the checkpoint."""

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, kw_only=True)
class ExpertParts:
    """Parts of the layers that have experts in the place of one MLP."""

    names: ExpertNames
    num_experts: int
    top_k: int
    """Experts that a token goes to."""
    inner_size: int
    is_renormalised: bool
    """Whether the chosen experts' weights are made to sum to 1."""
    layers: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The defaults are Llama's."""

    activation: str = "silu"
    has_norm_offset: bool = False
    """Norms multiply by 1 + weight, in float32."""
    has_post_norms: bool = False
    """What attention and MLP give is normed before it is added."""
    has_fused_weights: bool = False
    """qkv_proj and gate_up_proj are stored as one tensor each."""
    embedding_scale: float = 1.0
    query_scale: float = 1.0
    """Beside attention's head_dim ** -0.5."""
    softcap: float = 0.0
    """Cap of attention scores: cap * tanh(score / cap); 0: none."""
    logit_softcap: float = 0.0
    rotary_dim: int
    """How many of each head's first dimensions are rotated."""
    experts: ExpertParts | None = None


def parts_of(config: Mapping[str, Any], shape: CheckpointShape) -> Parts:
    """Keys that are missing have the defaults of the architecture's configuration in transformers."""
    architecture, head_dim = shape.architecture, shape.head_dim
    activation = str(config.get("hidden_act") or "silu")
    if architecture.startswith("Gemma"):
        is_second = architecture.startswith("Gemma2")
        activation = str(config.get("hidden_activation") or "gelu_pytorch_tanh")
        has_scalar = architecture != "GemmaForCausalLM"
        scalar = float(config.get("query_pre_attn_scalar") or 256) if has_scalar else head_dim
        return Parts(
            activation=activation,
            has_norm_offset=True,
            has_post_norms=has_scalar,
            embedding_scale=shape.hidden_size**0.5,
            query_scale=(head_dim / scalar) ** 0.5,
            softcap=float(config.get("attn_logit_softcapping", 50.0) or 0) if is_second else 0.0,
            logit_softcap=float(config.get("final_logit_softcapping", 30.0 if is_second else 0.0) or 0),
            rotary_dim=head_dim,
        )
    share = rope_parameters(config).get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    return Parts(
        activation=activation,
        has_fused_weights=architecture == "Phi3ForCausalLM",
        rotary_dim=int(head_dim * float(share)),
        experts=_experts(config, shape),
    )


def _experts(config: Mapping[str, Any], shape: CheckpointShape) -> ExpertParts | None:
    layers = range(shape.num_layers)
    if shape.architecture == "MixtralForCausalLM":
        return ExpertParts(
            names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
            num_experts=int(config.get("num_local_experts") or 8),
            top_k=int(config.get("num_experts_per_tok") or 2),
            inner_size=int(config.get("intermediate_size") or 14336),
            is_renormalised=True,
            layers=frozenset(layers),
        )
    if shape.architecture == "Qwen3MoeForCausalLM":
        dense, step = config.get("mlp_only_layers") or (), int(config.get("decoder_sparse_step") or 1)
        return ExpertParts(
            names=ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
            num_experts=int(config.get("num_experts") or config.get("num_local_experts") or 128),
            top_k=int(config.get("num_experts_per_tok") or 8),
            inner_size=int(config.get("moe_intermediate_size") or 768),
            is_renormalised=bool(config.get("norm_topk_prob")),
            layers=frozenset(i for i in layers if i not in dense and (i + 1) % step == 0),
        )
    return None


def layer_kinds(config: Mapping[str, Any], shape: CheckpointShape) -> list[bool]:
    """Whether each layer attends within the sliding window if there is one."""
    count = shape.num_layers
    kinds = config.get("layer_types")
    if kinds is not None:
        return [kind == "sliding_attention" for kind in kinds[:count]]
    if shape.architecture.startswith("Qwen"):
        return [i >= int(config.get("max_window_layers") or 0) for i in range(count)]
    pattern = 0
    if shape.architecture.startswith("Gemma2"):
        pattern = 2
    elif shape.architecture.startswith("Gemma3"):
        pattern = int(config.get("sliding_window_pattern") or 6)
    return [not pattern or (i + 1) % pattern != 0 for i in range(count)]


def layer_windows(config: Mapping[str, Any], shape: CheckpointShape, max_model_len: int) -> list[int | None]:
    """Each layer's sliding window; None where it attends to everything or the window covers every sequence."""
    window = config.get("sliding_window")
    if shape.architecture.startswith("Qwen") and not config.get("use_sliding_window"):
        window = None
    if shape.architecture == "GemmaForCausalLM" or not window or window >= max_model_len:
        return [None] * shape.num_layers
    return [int(window) if is_local else None for is_local in layer_kinds(config, shape)]
