"""Loading of a checkpoint folder into a model on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from services.worker.models.decoder import DecoderModel
from services.worker.models.deterministic import FAST, Numerics
from services.worker.models.encoder import EncoderModel
from services.worker.models.llama import LlamaModel
from services.worker.models.opt import OptModel
from services.worker.models.transformers_model import TransformersModel
from services.worker.models.weights import WeightReader
from services.worker.ranks.group import ALONE, RankGroup
from shared.models import checkpoint
from shared.models.checkpoint import CheckpointError, CheckpointShape, run_dtype
from shared.models.families import ENCODERS, TRANSFORMERS, family_of
from shared.plugins import PluginError, import_path

Loader = Callable[[WeightReader, Mapping[str, Any], CheckpointShape, int], DecoderModel]
"""(weights, config.json, what it says, the longest sequence to serve). Raises `CheckpointError`."""

LOADERS: dict[str, Loader] = {
    "llama": LlamaModel,
    "opt": OptModel,
    "transformers": TransformersModel,
    "encoder": EncoderModel,
}
"""By the family's name."""


class Identity(NamedTuple):
    """Models on one device are the same where all of this is."""

    path: Path
    files: tuple[tuple[str, int, int], ...]
    """Files of the weights: name, size and time of the last change."""
    dtype: torch.dtype
    max_model_len: int
    """The longest sequence it serves, where that makes a difference; else the checkpoint's own, whatever is asked for."""
    quantization: str


def identity_of(
    path: Path, device: torch.device, *, dtype: str = "auto", max_model_len: int | None = None, quantization: str = ""
) -> Identity:
    """`dtype`: auto, float32, bfloat16 or float16; `max_model_len` None: the model's own; `quantization`: a key of
    QUANTIZATIONS, or empty. Raises `CheckpointError`."""
    shape = checkpoint.quantized(checkpoint.describe(path), quantization)
    length = max_model_len or shape.max_model_len
    if length > shape.max_model_len:
        raise CheckpointError(f"{path}: max_model_len {length} exceeds the model's own {shape.max_model_len}.")
    served = length if shape.depends_on_length else shape.max_model_len
    files = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in checkpoint.weight_files(path))
    return Identity(path, files, getattr(torch, run_dtype(dtype, shape.dtype, device.type)), served, quantization)


def load_model(
    identity: Identity, device: torch.device, group: RankGroup = ALONE, numerics: Numerics = FAST
) -> DecoderModel:
    """What this rank of `group` has of it. Blocking, seconds to minutes. Raises `CheckpointError`."""
    path = identity.path
    shape = checkpoint.describe(path)
    if shape.takes_images:
        raise CheckpointError(f"{path}: {shape.architecture} takes images, which this engine does not compute.")
    others = TRANSFORMERS if shape.pooling is None else ENCODERS
    family = family_of(shape.architecture) or others
    config = checkpoint.read_config(path)
    stored = checkpoint.read_stored_quantization(path, config)
    reader = WeightReader(
        path, device, identity.dtype, group, family.cuts, numerics, stored=stored, quantization=identity.quantization
    )
    try:
        loader: Loader = import_path(family.loader, "torch module") if family.loader else LOADERS[family.name]
    except PluginError as error:
        raise CheckpointError(f"{path}: {error}.") from error
    with torch.inference_mode():
        return loader(reader, config, shape, identity.max_model_len)
