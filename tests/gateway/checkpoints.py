"""Tiny checkpoints for the gateway's tests: real tokenizers of two kinds, and weights of a few bytes that nobody runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "Hello world, this is a short text about the tide that comes and goes.",
    "The tide comes in, the tide goes out; naïve café, über, 日本語, emoji 😀 and 👩‍🚀.",
    "user: assistant: system: one two three four five six seven eight nine ten",
] * 4

MAX_MODEL_LEN = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ mood | default('') }}{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", "<s>", "</s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """The layout of Llama 2's tokenizer.json: BPE on "▁" with byte fallback, and a decoder that strips one space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += list("abcdefghijklmnopqrstuvwxyzHTW.,;é")
    merges = []
    for left, right in [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "a"), ("i", "n"), ("▁", "w"), ("o", "r")]:
        merges.append((left, right))
        pieces.append(left + right)
    model = models.BPE(
        {p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def write_checkpoint(
    folder: Path, tokenizer: Tokenizer, chat_template: str | None = CHAT_TEMPLATE, max_len: int = MAX_MODEL_LEN
) -> Path:
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": max_len,
        "eos_token_id": tokenizer.token_to_id("</s>"),
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    save_file({"weight": numpy.zeros(2, dtype=numpy.float32)}, folder / "model.safetensors")
    return folder
