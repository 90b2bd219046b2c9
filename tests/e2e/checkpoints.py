"""Small random checkpoints with a byte-level tokenizer, for tests of the whole system."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def save_tokenizer(folder: Path) -> int:
    """A byte-level tokenizer without merges; returns its vocabulary size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.save(str(folder / "tokenizer.json"))
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration))
    return len(vocabulary)


def make_llama(
    folder: Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    max_len: int = 1024,
    dtype: torch.dtype = torch.float32,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = save_tokenizer(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_len,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def make_opt(folder: Path, *, seed: int = 1, hidden: int = 48, layers: int = 3, max_len: int = 512) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = save_tokenizer(folder)
    torch.manual_seed(seed)
    config = OPTConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        word_embed_proj_dim=hidden,
        ffn_dim=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=max_len,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        init_std=0.3,
    )
    OPTForCausalLM(config).float().save_pretrained(folder)
    return folder
