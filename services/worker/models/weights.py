"""Tensors of a checkpoint, read one at a time and checked against the shapes that the model expects; of several ranks each
reads its part alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from services.worker.deterministic import FAST, Numerics
from services.worker.linear import Linear
from services.worker.ranks.group import ALONE, RankGroup
from shared.checkpoint import CheckpointError, weight_files

_DERIVED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
"""Buffers that older exporters stored with the weights."""


class TokenEmbedding:
    """Each rank has a part of the vocabulary's rows."""

    def __init__(self, weight: torch.Tensor, group: RankGroup) -> None:
        """`weight`: `[part, width]`"""
        self.weight = weight
        self._group = group

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, width]"""
        if self._group.size == 1:
            return F.embedding(token_ids, self.weight)
        rows = token_ids - self._group.rank * len(self.weight)
        is_others = (rows < 0) | (rows >= len(self.weight))
        hidden = F.embedding(rows.masked_fill_(is_others, 0), self.weight).masked_fill_(is_others[:, None], 0)
        return self._group.all_reduce(hidden)


class TokenHead:
    """Each rank computes the logits of a part of the vocabulary, and gets all."""

    def __init__(self, linear: Linear, vocab_size: int, group: RankGroup) -> None:
        self._linear = linear
        self._vocab_size = vocab_size
        self._group = group

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, width] -> [S, vocab_size]"""
        logits = self._group.all_gather(self._linear(hidden))
        return logits[:, : self._vocab_size]


class WeightReader:
    """Reads tensors by name from one or many safetensors files, cast and moved; remembers which were read, so that a
    leftover shows a variant that the model code does not know.

    Callers name shapes of whole tensors, and get this rank's part of those that are cut."""

    def __init__(
        self,
        path: Path,
        device: torch.device,
        dtype: torch.dtype,
        group: RankGroup = ALONE,
        cuts: Mapping[str, int] | None = None,
        numerics: Numerics = FAST,
    ) -> None:
        """`cuts`: as of `ModelFamily`."""
        self.group = group
        self.numerics = numerics
        self._cuts = cuts or {}
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
        """This rank's part of the tensor, which must have this shape as a whole. The last part is padded with zeros where
        the ranks do not divide the whole."""
        if name not in self._files:
            raise CheckpointError(f"{self.path} has no tensor {name}.")
        handle, file = self._files[name]
        try:
            found = tuple(handle.get_slice(name).get_shape())
            if found != shape:
                raise CheckpointError(
                    f"{file}: tensor {name} has shape {list(found)}, but config.json asks for {list(shape)}."
                )
            tensor = self._part(handle, name, shape)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: tensor {name} cannot be read: {error}") from None
        self._unread.discard(name)
        # copied even if nothing changes: a tensor in mapped memory would keep the whole file mapped
        return tensor.to(device=self.device, dtype=self.dtype, copy=True)

    def _part(self, handle: Any, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Reads no more of the file than this."""
        rank, size = self.group.rank, self.group.size
        axis = self._cuts.get(name.split(".")[-2]) if size > 1 else None
        if axis is None:
            return handle.get_tensor(name)  # type: ignore[no-any-return]
        if axis >= len(shape):
            # A bias of what is summed over the ranks.
            return handle.get_tensor(name) if rank == 0 else torch.zeros(shape)
        count = -(-shape[axis] // size)
        begin, end = (min(shape[axis], at * count) for at in (rank, rank + 1))
        tensor = handle.get_slice(name)[(slice(None),) * axis + (slice(begin, end),)]
        missing = count - (end - begin)
        if missing:
            tensor = F.pad(tensor, (0, 0) * (len(shape) - 1 - axis) + (0, missing))
        return tensor  # type: ignore[no-any-return]

    def get_optional(self, name: str, *shape: int) -> torch.Tensor | None:
        return self.get(name, *shape) if name in self else None

    def linear(self, names: list[str], in_features: int, out_features: list[int]) -> Linear:
        """One layer fused from those at `names` (without ".weight") by stacking their outputs; biases where stored."""
        weights = [self.get(f"{n}.weight", out, in_features) for n, out in zip(names, out_features, strict=True)]
        biases = [self.get_optional(f"{n}.bias", out) for n, out in zip(names, out_features, strict=True)]
        present = [b for b in biases if b is not None]
        if present and len(present) != len(biases):
            present = [
                self.dtype_zeros(len(weight)) if bias is None else bias
                for bias, weight in zip(biases, weights, strict=True)
            ]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        del weights
        return self.numerics.linear(weight, torch.cat(present) if present else None)

    def dtype_zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=self.dtype, device=self.device)

    def head(self, vocab_size: int, hidden_size: int, *, tied_to: TokenEmbedding | None) -> TokenHead:
        """`tied_to`: the weights are those of the embedding; None: they are the checkpoint's lm_head."""
        linear = (
            self.linear(["lm_head"], hidden_size, [vocab_size])
            if tied_to is None
            else self.numerics.linear(tied_to.weight, shared=True)
        )
        return TokenHead(linear, vocab_size, self.group)

    def finish(self, ignored: tuple[str, ...] = ()) -> None:
        """Raises if a tensor was never read; names that end like `ignored` may be left. Of several stages none reads all, so
        nothing is checked."""
        if self.group.num_stages > 1:
            return
        left = sorted(n for n in self._unread if not n.endswith(_DERIVED + ignored))
        if left:
            shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
            raise CheckpointError(f"{self.path} holds tensors that its architecture does not use: {shown}.")
