"""Tensors of a checkpoint, read one at a time and checked against the shapes that the model expects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.worker.linear import Linear
from shared.checkpoint import CheckpointError, weight_files

_DERIVED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
"""Buffers that older exporters stored with the weights."""


class WeightReader:
    """Reads tensors by name from one or many safetensors files, cast and moved; remembers which were read, so that a
    leftover shows a variant that the model code does not know."""

    def __init__(self, path: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.device = device
        self.dtype = dtype
        self._files: dict[str, tuple[Any, Path]] = {}
        for file in weight_files(path):
            try:
                handle: Any = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} is no readable safetensors file: {error}") from None
            self._files |= dict.fromkeys(handle.keys(), (handle, file))
        self._unread = set(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def prefix_of(self, name: str, prefixes: tuple[str, ...]) -> str:
        """The first of `prefixes` with which `name` exists; exporters differ in the leading module names."""
        for prefix in prefixes:
            if prefix + name in self:
                return prefix
        raise CheckpointError(f"{self.path} has no tensor {prefixes[0]}{name}.")

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor, which must have this shape."""
        if name not in self._files:
            raise CheckpointError(f"{self.path} has no tensor {name}.")
        handle, file = self._files[name]
        try:
            tensor: torch.Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: tensor {name} cannot be read: {error}") from None
        if tensor.shape != shape:
            raise CheckpointError(
                f"{file}: tensor {name} has shape {list(tensor.shape)}, but config.json asks for {list(shape)}."
            )
        self._unread.discard(name)
        # copied even if nothing changes: a tensor in mapped memory would keep the whole file mapped
        return tensor.to(device=self.device, dtype=self.dtype, copy=True)

    def get_optional(self, name: str, *shape: int) -> torch.Tensor | None:
        return self.get(name, *shape) if name in self else None

    def linear(self, names: list[str], in_features: int, out_features: list[int]) -> Linear:
        """One layer fused from those at `names` (without ".weight") by stacking their outputs; biases where stored."""
        weights = [self.get(f"{n}.weight", out, in_features) for n, out in zip(names, out_features, strict=True)]
        biases = [self.get_optional(f"{n}.bias", out) for n, out in zip(names, out_features, strict=True)]
        present = [b for b in biases if b is not None]
        if present and len(present) != len(biases):
            present = [
                self.dtype_zeros(out) if bias is None else bias for bias, out in zip(biases, out_features, strict=True)
            ]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        del weights
        return Linear(weight, torch.cat(present) if present else None)

    def dtype_zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Raises if a tensor was never read; names that end like `ignored` may be left."""
        left = sorted(n for n in self._unread if not n.endswith(_DERIVED + ignored))
        if left:
            shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
            raise CheckpointError(f"{self.path} holds tensors that its architecture does not use: {shown}.")
