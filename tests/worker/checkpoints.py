"""Small random checkpoints in Hugging Face format, written by transformers itself."""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

torch.set_num_threads(1)  # tensors this small are slower on several threads, much so on a loaded machine

VOCAB_SIZE = 211

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_GATED: dict[str, Any] = _COMMON | {"num_key_value_heads": 2, "intermediate_size": 80, "rms_norm_eps": 1e-5}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 64,
}

VARIANTS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**_GATED, tie_word_embeddings=False)),
    "llama-tied-bias": (
        LlamaForCausalLM,
        LlamaConfig(**_GATED, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    ),
    "llama-mha-wide-heads": (
        LlamaForCausalLM,
        LlamaConfig(**_GATED | {"num_key_value_heads": 6}, head_dim=16, rope_theta=500.0),
    ),
    "llama3": (LlamaForCausalLM, LlamaConfig(**_GATED, rope_scaling=dict(_LLAMA3))),
    "llama-linear": (LlamaForCausalLM, LlamaConfig(**_GATED, rope_scaling={"rope_type": "linear", "factor": 2.0})),
    "llama-dynamic": (
        LlamaForCausalLM,
        LlamaConfig(**_GATED | {"max_position_embeddings": 64}, rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**_GATED, sliding_window=None)),
    "mistral-window": (MistralForCausalLM, MistralConfig(**_GATED, sliding_window=24)),
    "mistral-longrope": (MistralForCausalLM, MistralConfig(**_GATED, sliding_window=None, rope_scaling=_LONGROPE)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**_GATED, tie_word_embeddings=True)),
    "qwen2-yarn-window": (
        Qwen2ForCausalLM,
        Qwen2Config(
            **_GATED, rope_scaling=dict(_YARN), use_sliding_window=True, sliding_window=20, max_window_layers=1
        ),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_GATED, head_dim=16)),
    "qwen3-yarn": (Qwen3ForCausalLM, Qwen3Config(**_GATED, head_dim=8, rope_scaling=dict(_YARN))),
    "phi3": (
        Phi3ForCausalLM,
        Phi3Config(**_GATED | {"num_attention_heads": 4}, partial_rotary_factor=0.5, sliding_window=24),
    ),
    "gemma": (GemmaForCausalLM, GemmaConfig(**_GATED, head_dim=16)),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(**_GATED, head_dim=16, sliding_window=24, query_pre_attn_scalar=40, attn_logit_softcapping=3.0),
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**_GATED, head_dim=16, sliding_window=20, query_pre_attn_scalar=24, sliding_window_pattern=3),
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**_GATED, num_local_experts=5)),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **_GATED,
            head_dim=16,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        ),
    ),
    "opt": (OPTForCausalLM, OPTConfig(**_COMMON, ffn_dim=96)),
    "opt-post-norm-projected": (
        OPTForCausalLM,
        OPTConfig(**_COMMON, ffn_dim=96, do_layer_norm_before=False, word_embed_proj_dim=32),
    ),
    "opt-gelu-untied": (
        OPTForCausalLM,
        OPTConfig(**_COMMON, ffn_dim=96, activation_function="gelu", tie_word_embeddings=False),
    ),
}

BY_TRANSFORMERS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=VOCAB_SIZE, n_embd=48, n_layer=3, n_head=6, n_positions=256, bos_token_id=1, eos_token_id=2
        ),
    ),
    "gpt-neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**_COMMON, intermediate_size=80)),
    "phi": (PhiForCausalLM, PhiConfig(**_COMMON, intermediate_size=80, partial_rotary_factor=0.5)),
    "cohere2": (
        Cohere2ForCausalLM,
        Cohere2Config(**_COMMON | {"pad_token_id": 0}, num_key_value_heads=2, intermediate_size=80, sliding_window=24),
    ),
}
"""Architectures that have no module of their own here."""


def write_checkpoint(
    folder: Path, variant: str, *, dtype: torch.dtype = torch.float32, shards: bool = False, **changes: Any
) -> Path:
    """A checkpoint with weights random enough that the next token depends on the whole prefix. `changes`: to the config of
    the variant."""
    kind, config = (VARIANTS | BY_TRANSFORMERS)[variant]
    torch.manual_seed(zlib.crc32(variant.encode()))
    model = kind(type(config)(**config.to_dict() | changes)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = 0.3 if "position" in name else 1.0 if "embed" in name or "head" in name else 0.5
                if "embed" in name and variant.startswith("gemma"):
                    scale = 0.1  # multiplied again when it is read
                parameter.normal_(0, scale)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.05)
            else:
                parameter.uniform_(0.5, 1.5)
    path = folder / variant
    model.save_pretrained(path, max_shard_size="40KB" if shards else "5GB")
    return path


def prompt_of(length: int) -> list[int]:
    """Random tokens, a function of the length."""
    return random.Random(length).choices(range(3, VOCAB_SIZE), k=length)


def reference_outputs(path: Path, prompts: list[list[int]], steps: int) -> list[list[int]]:
    """What transformers generates greedily in float32 for each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=steps, min_new_tokens=steps,
                do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs
