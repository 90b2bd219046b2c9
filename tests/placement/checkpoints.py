"""Checkpoints that are all shape and no weights: configs, and safetensors headers that claim any size."""

from __future__ import annotations

import json
import struct
from pathlib import Path


def write_checkpoint(
    folder: Path, *, weight_mib: int = 10, layers: int = 4, kv_heads: int = 2, length: int = 1024
) -> str:
    """A small Llama in float32 as config.json and a header describe it; returns the folder as source."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": 1000,
        "max_position_embeddings": length,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    size = weight_mib << 20
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)  # a hole
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)
