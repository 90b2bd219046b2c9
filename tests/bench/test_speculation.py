"""The models of bench.speculation: as large as they are said to be, and what they compute is the small ones'."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.speculation import agreement, widened


def test_a_widened_model_computes_what_the_small_one_does() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    small = LlamaForCausalLM(config).eval()
    shape = {"hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 12}
    wide = widened(small, shape | {"num_key_value_heads": 4}).eval()
    assert len(wide.model.layers) == 4 and wide.model.layers[0].self_attn.k_proj.weight.shape == (32, 72)
    tokens = torch.randint(101, (3, 20))
    with torch.no_grad():
        assert (wide(tokens).logits - small(tokens).logits).abs().max() < 1e-4
    greedy, rejection, same_noise = agreement(small, wide, tokens)
    assert greedy == 1.0 and rejection > 0.999 and same_noise > 0.99
