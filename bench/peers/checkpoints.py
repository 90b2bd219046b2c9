"""The models that all servers get: Llama shapes with random bfloat16 weights, and a byte-level BPE tokenizer with a merge
for every token, which is made in a moment and without a text."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SHAPES: dict[str, dict[str, Any]] = {
    "135m": {  # SmolLM-135M
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 4096,
    },
    "500m": {  # Qwen2.5-0.5B, as a Llama
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    },
}  # fmt: skip
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
"""Ids 0, 1 and 2."""
NUM_SINGLE = len(SPECIAL_TOKENS) + 256
"""Ids of those and of single bytes."""


def make_tokenizer(num_tokens: int) -> Tokenizer:
    """Bytes, then words of letters with and without a space before them, from short to long."""
    vocabulary = {
        token: index for index, token in enumerate([*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    merges: list[tuple[str, str]] = []
    for length in itertools.count(1):
        for letters in itertools.product(ascii_lowercase, repeat=length):
            word = "".join(letters)
            for first in (word[:-1], "Ġ" + word[:-1]):
                if first and first + word[-1] not in vocabulary:
                    if len(vocabulary) == num_tokens:
                        return _byte_level(vocabulary, merges)
                    vocabulary[first + word[-1]] = len(vocabulary)
                    merges.append((first, word[-1]))
    raise AssertionError


def _byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _never_chosen(file: Path, tokens: list[int]) -> None:
    """Their scores are 0, which others exceed: a random model would end in halves of characters, for which some servers send
    no chunk. `file`: of a model whose embedding is its head."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][tokens] = 0
    save_file(tensors, file, {"format": "pt"})


def make_checkpoint(folder: Path, shape: str) -> Path:
    """Made once; returns its folder below `folder`."""
    target = folder / shape
    if (target / "tokenizer_config.json").exists():
        return target
    from bench.coserving.testbed import make_checkpoint as make_weights

    make_weights(target, SHAPES[shape])
    config_file = target / "config.json"
    # Names of older transformers, which some servers bring.
    config = {"rope_theta": 10000.0, "torch_dtype": "bfloat16", **json.loads(config_file.read_text())}
    config_file.write_text(json.dumps(config, indent=1))
    tokenizer = make_tokenizer(SHAPES[shape]["vocab_size"])
    tokenizer.save(str(target / "tokenizer.json"))
    single = {token: tokenizer.decode([token]) for token in range(NUM_SINGLE)}
    no_text = [token for token, text in single.items() if not (text.isascii() and text.isprintable() and text)]
    _never_chosen(target / "model.safetensors", no_text)
    (target / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>",
                "model_max_length": SHAPES[shape]["max_position_embeddings"],
                "clean_up_tokenization_spaces": False,
            }
        )
    )  # fmt: skip
    return target
