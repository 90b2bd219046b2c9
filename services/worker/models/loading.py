"""From a checkpoint folder to a model on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from services.worker.models.decoder import DecoderModel
from services.worker.models.llama import LlamaModel
from services.worker.models.opt import OptModel
from services.worker.models.weights import WeightReader
from shared import checkpoint
from shared.checkpoint import CheckpointError, CheckpointShape, run_dtype
from shared.model_families import FAMILIES

Loader = Callable[[WeightReader, Mapping[str, Any], CheckpointShape, int], DecoderModel]
"""(weights, config.json, what it says, the longest sequence to serve). Raises `CheckpointError`."""

LOADERS: dict[str, Loader] = {"llama": LlamaModel, "opt": OptModel}
"""By the family's name."""

_LOADER_OF = {architecture: LOADERS[family.name] for family in FAMILIES for architecture in family.architectures}


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
    return Identity(path, files, getattr(torch, run_dtype(dtype, shape.dtype, device.type)), length)


def load_model(identity: Identity, device: torch.device) -> DecoderModel:
    """Blocking, seconds to minutes. Raises `CheckpointError`."""
    path = identity.path
    shape = checkpoint.describe(path)
    reader = WeightReader(path, device, identity.dtype)
    with torch.inference_mode():
        return _LOADER_OF[shape.architecture](reader, checkpoint.read_config(path), shape, identity.max_model_len)
