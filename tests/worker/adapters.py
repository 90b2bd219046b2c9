"""Small random LoRA adapters in PEFT's format, and checkpoints with the same weights merged into them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from shared.messages.requests import Adapter

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OPT = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


def write_adapter(
    path: Path,
    base: Path,
    modules: Sequence[str] = ALL,
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    **config: Any,
) -> Adapter:
    """Writes an adapter for the checkpoint at `base`, whose linear layers of these names it changes. `config`: more of its
    configuration."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        if name.split(".")[-2] in modules and name.endswith(".weight"):
            outputs, inputs = weight.shape
            prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            tensors[f"{prefix}A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.2
            tensors[f"{prefix}B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.2
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(written | config))
    return Adapter(path.name, f"version of {path.name}", str(path))


def merged(path: Path, base: Path, adapter: Adapter) -> Path:
    """The checkpoint, whose weights have the adapter's in them."""
    shutil.copytree(base, path)
    weights, config = (
        load_file(base / "model.safetensors"),
        json.loads(Path(adapter.source, "adapter_config.json").read_text()),
    )
    pairs = load_file(Path(adapter.source, "adapter_model.safetensors"))
    for name, a in pairs.items():
        if name.endswith("lora_A.weight"):
            b = pairs[name.replace("lora_A", "lora_B")]
            scale = config["lora_alpha"] / (len(a) ** 0.5 if config.get("use_rslora") else len(a))
            layer = name.removeprefix("base_model.model.").removesuffix("lora_A.weight") + "weight"
            weights[layer] = weights[layer] + scale * (b.double() @ a.double()).to(weights[layer].dtype)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path
