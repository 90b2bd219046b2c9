"""Small random checkpoints that embed or score, in Hugging Face format and as sentence-transformers stores them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    MistralConfig,
    MistralModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    XLMRobertaConfig,
    XLMRobertaModel,
)

WORDS = [f"w{i}" for i in range(90)]
SPECIAL = ["<pad>", "<s>", "</s>", "yes", "no"]
VOCAB_SIZE = len(SPECIAL) + len(WORDS)
_GATED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.2,
}  # fmt: skip
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 66, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
_QWEN3 = {**_GATED, "head_dim": 16}

CHECKPOINTS: dict[str, tuple[type[PreTrainedModel], Any, list[str], dict[str, Any]]] = {
    "qwen3-last": (Qwen3Model, Qwen3Config(**_QWEN3), ["lasttoken", "Normalize"], {"is_matryoshka": True}),
    "mistral-last": (MistralModel, MistralConfig(**_GATED, sliding_window=None), ["lasttoken", "Normalize"], {}),
    "mistral-mean": (MistralModel, MistralConfig(**_GATED, sliding_window=None), ["mean", "Dense", "Normalize"], {}),
    "bert-mean": (BertModel, BertConfig(**_ENCODER), ["mean", "Normalize"], {"matryoshka_dimensions": [16, 32]}),
    "xlmr-cls": (XLMRobertaModel, XLMRobertaConfig(**_ENCODER, type_vocab_size=1), ["cls"], {}),
    "distilbert": (
        DistilBertModel,
        DistilBertConfig(
            vocab_size=VOCAB_SIZE, dim=48, hidden_dim=80, n_layers=2, n_heads=4, max_position_embeddings=66,
            initializer_range=0.2,
        ),
        ["mean", "Normalize"],
        {},
    ),
    "cross-bert": (BertForSequenceClassification, BertConfig(**_ENCODER, num_labels=1), [], {}),
    "qwen3-score": (Qwen3ForSequenceClassification, Qwen3Config(**_QWEN3, num_labels=1), [], {}),
    "qwen3-yes-no": (Qwen3ForCausalLM, Qwen3Config(**_QWEN3), [], {"classifier_from_token": ["no", "yes"]}),
}  # fmt: skip


def write_pooling_checkpoint(folder: Path, name: str, seed: int = 0, **changes: Any) -> Path:
    """`changes`: of the model's configuration."""
    kind, config, modules, more = CHECKPOINTS[name]
    config = type(config).from_dict(config.to_dict() | changes)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = kind(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases begin as ones and zeros, which would hide faults
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    save_word_tokenizer(folder)
    if modules:
        _write_modules(folder, modules, _GATED["hidden_size"])
    return folder


def _write_modules(folder: Path, modules: list[str], hidden_size: int) -> None:
    mode, *others = modules
    stored = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for idx, kind in enumerate(("Pooling", *others), 1):
        path = f"{idx}_{kind}"
        stored.append({"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{kind}"})
        (folder / path).mkdir()
        if kind == "Pooling":
            legacy = {
                "cls": "pooling_mode_cls_token",
                "mean": "pooling_mode_mean_tokens",
                "lasttoken": "pooling_mode_lasttoken",
            }
            config = {"word_embedding_dimension": hidden_size, **{key: key == legacy[mode] for key in legacy.values()}}
            (folder / path / "config.json").write_text(json.dumps(config))
        if kind == "Dense":
            config = {
                "in_features": hidden_size,
                "out_features": 20,
                "activation_function": "torch.nn.modules.activation.Tanh",
            }
            (folder / path / "config.json").write_text(json.dumps(config))
            weights = {"linear.weight": torch.randn(20, hidden_size) * 0.3, "linear.bias": torch.randn(20)}
            save_file(weights, folder / path / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(stored))


def save_word_tokenizer(folder: Path) -> None:
    """Words between <s> and </s>, of two texts with a </s> between them and other types behind it."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL[:3])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "bos_token": "<s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
