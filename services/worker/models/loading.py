"""From a checkpoint folder to a model on a device."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from services.worker.models.decoder import DecoderModel
from services.worker.models.llama import LlamaModel
from services.worker.models.opt import OptModel
from services.worker.models.weights import WeightReader
from shared import checkpoint
from shared.checkpoint import CheckpointError

_FAMILIES: dict[str, type[LlamaModel] | type[OptModel]] = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "Qwen2ForCausalLM": LlamaModel,
    "Qwen3ForCausalLM": LlamaModel,
    "OPTForCausalLM": OptModel,
}


class Identity(NamedTuple):
    """Models on one device are the same where all of this is."""

    path: Path
    files: tuple[tuple[str, int, int], ...]
    """Of the weights: name, size and time of the last change."""
    dtype: torch.dtype
    max_model_len: int
    """The longest sequence it serves."""


def identity_of(path: Path, device: torch.device, *, dtype: str = "auto", max_model_len: int | None = None) -> Identity:
    """`dtype`: auto, float32, bfloat16 or float16; `max_model_len` None: the model's own. Raises `CheckpointError`."""
    shape = checkpoint.describe(path)
    length = max_model_len or shape.max_model_len
    if length > shape.max_model_len:
        raise CheckpointError(f"{path}: max_model_len {length} exceeds the model's own {shape.max_model_len}.")
    files = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in checkpoint.weight_files(path))
    return Identity(path, files, torch_dtype(dtype, shape.dtype, device), length)


def load_model(identity: Identity, device: torch.device) -> DecoderModel:
    """Blocking, seconds to minutes. Raises `CheckpointError`."""
    path = identity.path
    shape = checkpoint.describe(path)
    reader = WeightReader(path, device, identity.dtype)
    with torch.inference_mode():
        return _FAMILIES[shape.architecture](reader, checkpoint.read_config(path), shape, identity.max_model_len)


def torch_dtype(asked: str, stored: str, device: torch.device) -> torch.dtype:
    """The dtype a model runs in. "auto" is the checkpoint's, but for float16 on CPU, which becomes bfloat16: it has
    kernels on every CPU that has fast half precision at all, takes the same memory, and cannot overflow."""
    name = asked
    if asked == "auto":
        name = "bfloat16" if stored == "float16" and device.type == "cpu" else stored
    if name not in checkpoint.ITEMSIZES:
        raise CheckpointError(f"dtype {asked!r} is not one of auto, {', '.join(checkpoint.ITEMSIZES)}.")
    result: torch.dtype = getattr(torch, name)
    return result
