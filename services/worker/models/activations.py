"""Activation functions by their names in config.json."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from shared.checkpoint import SUPPORTED_ACTIVATIONS, CheckpointError

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Raises `CheckpointError`."""
    if name not in SUPPORTED_ACTIVATIONS:
        supported = ", ".join(SUPPORTED_ACTIVATIONS)
        raise CheckpointError(f"activation {name!r} is not supported; supported are {supported}.")
    return _ACTIVATIONS[name]
