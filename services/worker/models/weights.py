"""Tensors of a checkpoint, read one at a time and checked against the shapes that the model expects; of several ranks each
reads its part alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from services.worker.models import stored_weights
from services.worker.models.deterministic import FAST, Numerics
from services.worker.models.linear import Linear
from services.worker.models.quantized_linear import AnyLinear, GroupedWeights, from_groups, quantized
from services.worker.native.library import Packed, PackedWeight, packs
from services.worker.ranks.group import ALONE, RankGroup
from shared.models.checkpoint import CheckpointError, weight_files
from shared.models.families import OUTPUTS
from shared.models.quantization import StoredQuantization

logger = logging.getLogger(__name__)

SCORE_WEIGHT = "score.weight"
"""Name of a classifier's head, in place of a language model's."""
_DERIVED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
"""Buffers that older exporters stored with the weights."""


def rows_of(path: Path, names: Sequence[str], rows: Sequence[int] | None = None) -> torch.Tensor:
    """The first of these tensors that the checkpoint in `path` has, as float32 on the CPU; of a matrix perhaps only some
    rows. Raises `CheckpointError`."""
    for name in names:
        for file in weight_files(path):
            try:
                with safe_open(file, framework="pt") as handle:
                    if name not in handle.keys():  # noqa: SIM118, no mapping
                        continue
                    part = handle.get_slice(name)
                    found = part[:] if rows is None else torch.stack([part[row] for row in rows])
                    return found.float()
            except (SafetensorError, OSError, IndexError) as error:
                raise CheckpointError(f"{file}: tensor {name} cannot be read: {error}") from None
    raise CheckpointError(f"{path} has no tensor {' or '.join(names)}.")


class TokenEmbedding:
    """Each rank has a part of the vocabulary's rows."""

    def __init__(self, weight: torch.Tensor, group: RankGroup) -> None:
        """`weight`: `[part, width]`"""
        self._weight: torch.Tensor | PackedWeight = weight
        self._num_rows = len(weight)
        self._group = group

    def head(self, numerics: Numerics) -> Linear:
        """The linear layer of the same weight. Where the kernels take it packed, rows are looked up there from now on: it is
        in memory once."""
        weight = self._weight
        assert isinstance(weight, torch.Tensor), "one head only"
        linear = numerics.linear(weight, shared=not packs(weight))
        if linear.compiled is not None:
            self._weight = linear.compiled
        return linear

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, width]"""
        if self._group.size == 1:
            return self._rows(token_ids)
        rows = token_ids - self._group.rank * self._num_rows
        is_others = (rows < 0) | (rows >= self._num_rows)
        hidden = self._rows(rows.masked_fill_(is_others, 0)).masked_fill_(is_others[:, None], 0)
        return self._group.all_reduce(hidden)

    def _rows(self, indices: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        return weight.rows(indices) if isinstance(weight, PackedWeight) else F.embedding(indices, weight)


class TokenHead:
    """Each rank computes the logits of a part of the vocabulary, and gets all."""

    def __init__(self, linear: AnyLinear, vocab_size: int, group: RankGroup) -> None:
        self._linear = linear
        self._vocab_size = vocab_size
        self._group = group

    @property
    def compiled(self) -> Packed | None:
        """What computes all logits by itself; None: more than the kernels' product is needed."""
        packed: Packed | None = getattr(self._linear, "compiled", None)
        is_whole = packed is not None and self._group.size == 1 and packed.out_features == self._vocab_size
        return packed if is_whole else None

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
        *,
        stored: StoredQuantization | None = None,
        quantization: str = "",
    ) -> None:
        """`cuts`: as of `ModelFamily`. `stored`: how layers are quantised in the files. `quantization`: what to make of
        layers that are not, a key of QUANTIZATIONS; empty: nothing."""
        if quantization and numerics is not FAST:
            raise CheckpointError(f"quantization {quantization!r} is not possible{numerics.asks}.")
        self.stored, self.quantization = stored, quantization
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

    def has_layer(self, name: str) -> bool:
        """Whether there is a linear layer of this name, quantised or not."""
        return f"{name}.weight" in self or self._is_quantized(name)

    def is_tied(self, embedding: str, *, is_said: bool | None) -> bool:
        """Whether the head has the weights of the tensor `embedding`. `is_said`: by config.json, None: it does not say. A
        head of its own, which fine-tuning may leave behind, goes before that, as in transformers 5."""
        head = "lm_head.weight"
        if not self.has_layer("lm_head"):
            if is_said is False:
                logger.warning(
                    "%s has no %s: the embeddings are taken, though config.json says otherwise", self.path, head
                )
            return True
        if not is_said or head not in self:
            return False
        (own, _), (tied, _) = self._files[head], self._files[embedding]
        if torch.equal(own.get_tensor(head), tied.get_tensor(embedding)):
            return True
        logger.warning("%s: %s is used, though config.json says that the embeddings are", self.path, head)
        return False

    def _is_quantized(self, name: str) -> bool:
        return self.stored is not None and f"{name}.{stored_weights.mark(self.stored)}" in self

    def prefix_of(self, name: str, prefixes: tuple[str, ...]) -> str:
        """The first of `prefixes` with which `name` exists; exporters differ in the leading module names."""
        for prefix in prefixes:
            if prefix + name in self:
                return prefix
        raise CheckpointError(f"{self.path} has no tensor {prefixes[0]}{name}.")

    def get(self, name: str, *shape: int, fused: Sequence[int] = ()) -> torch.Tensor:
        """This rank's part of the tensor, which must have this shape as a whole. The last part is padded with zeros where
        the ranks do not divide the whole. `fused`: the outputs of layers that are stored one behind the other, each of which
        is cut."""
        if name not in self._files:
            raise CheckpointError(f"{self.path} has no tensor {name}.")
        handle, file = self._files[name]
        try:
            found = tuple(handle.get_slice(name).get_shape())
            if found != shape:
                raise CheckpointError(
                    f"{file}: tensor {name} has shape {list(found)}, but config.json asks for {list(shape)}."
                )
            tensor = self._part(handle, name, shape, fused)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: tensor {name} cannot be read: {error}") from None
        self._unread.discard(name)
        # copied even if nothing changes: a tensor in mapped memory would keep the whole file mapped
        return tensor.to(device=self.device, dtype=self.dtype, copy=True)

    def _part(self, handle: Any, name: str, shape: tuple[int, ...], fused: Sequence[int] = ()) -> torch.Tensor:
        """Reads no more of the file than this."""
        rank, size = self.group.rank, self.group.size
        axis = self._cuts.get(name.split(".")[-2]) if size > 1 else None
        if axis is None:
            return handle.get_tensor(name)  # type: ignore[no-any-return]
        if axis >= len(shape):
            # A bias of what is summed over the ranks.
            return handle.get_tensor(name) if rank == 0 else torch.zeros(shape)
        parts, start = [], 0
        for whole in fused if fused and axis == OUTPUTS else (shape[axis],):
            count = -(-whole // size)
            begin, end = (start + min(whole, at * count) for at in (rank, rank + 1))
            tensor = handle.get_slice(name)[(slice(None),) * axis + (slice(begin, end),)]
            if missing := count - (end - begin):
                tensor = F.pad(tensor, (0, 0) * (len(shape) - 1 - axis) + (0, missing))
            parts.append(tensor)
            start += whole
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def get_optional(self, name: str, *shape: int, fused: Sequence[int] = ()) -> torch.Tensor | None:
        return self.get(name, *shape, fused=fused) if name in self else None

    def linear(self, names: list[str], in_features: int, out_features: list[int]) -> AnyLinear:
        """One layer fused from those at `names` (without ".weight") by stacking their outputs; biases where stored. One name
        of several outputs: they are stored fused."""
        if self._is_quantized(names[0]):
            return self._stored_linear(names, in_features, out_features)
        return self.made(*self._fused(names, in_features, out_features), is_head=names == ["lm_head"])

    def made(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_head: bool = False, shared: bool = False
    ) -> AnyLinear:
        """In as few bits as is asked for, but the head."""
        if self.quantization and not is_head:
            return quantized(weight, bias, self.quantization)
        return self.numerics.linear(weight, bias, shared=shared)

    def router(self, name: str, in_features: int, num_experts: int) -> AnyLinear:
        return self.numerics.linear(self.get(f"{name}.weight", num_experts, in_features))

    def linears(
        self, names: Sequence[list[str]], in_features: int, out_features: list[int]
    ) -> list[AnyLinear] | torch.Tensor:
        """Linear layers of a layer's experts, each as of `linear`, without biases. Where grouped matrix products run:
        all weights `[experts, inputs, outputs]`, outputs outside of inputs."""
        if self.device.type == "cpu" or self.numerics is not FAST or self.stored is not None or self.quantization:
            return [self.linear(of_expert, in_features, out_features) for of_expert in names]
        stacked: torch.Tensor | None = None
        for index, of_expert in enumerate(names):
            weight, _ = self._fused(of_expert, in_features, out_features)
            if stacked is None:
                stacked = weight.new_empty(len(names), *weight.shape)
            stacked[index] = weight
        assert stacked is not None
        return stacked.mT

    def _fused(
        self, names: list[str], in_features: int, out_features: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if len(names) == 1 < len(out_features):
            name, size = names[0], sum(out_features)
            weight = self.get(f"{name}.weight", size, in_features, fused=out_features)
            return weight, self.get_optional(f"{name}.bias", size, fused=out_features)
        weights = [self.get(f"{n}.weight", out, in_features) for n, out in zip(names, out_features, strict=True)]
        biases = [self.get_optional(f"{n}.bias", out) for n, out in zip(names, out_features, strict=True)]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return weight, self._joined(biases, [len(weight) for weight in weights])

    def _stored_linear(self, names: list[str], in_features: int, out_features: list[int]) -> AnyLinear:
        assert self.stored is not None
        wholes = out_features if len(names) == len(out_features) else [sum(out_features)]
        biases = [
            self.get_optional(f"{n}.bias", out, fused=out_features if len(names) == 1 else ())
            for n, out in zip(names, wholes, strict=True)
        ]
        parts: list[GroupedWeights] = []
        for name, out in zip(names, wholes, strict=True):
            try:
                whole = stored_weights.read_groups(self.stored, self._stored_tensors(name), out, in_features)
                parts.append(self._cut_groups(whole, name, out_features if len(names) == 1 else [out]))
            except CheckpointError as error:
                raise CheckpointError(f"{self.path}: {name}: {error}.") from None
        bias = self._joined(biases, [len(part.values) for part in parts])
        moved = [part.to(self.device) for part in parts]
        if self.numerics is not FAST:
            return self.made(torch.cat([part.dequantized() for part in moved]).to(self.dtype), bias)
        return from_groups(moved, bias, self.dtype)

    def _cut_groups(self, weights: GroupedWeights, name: str, fused: Sequence[int]) -> GroupedWeights:
        rank, size = self.group.rank, self.group.size
        axis = self._cuts.get(name.split(".")[-1]) if size > 1 else None
        if axis is None:
            return weights
        if axis == OUTPUTS:
            if any(whole % size for whole in fused):
                raise CheckpointError(f"{list(fused)} outputs do not divide over {size} ranks")
            starts = [sum(fused[:i]) for i in range(len(fused))]
            chosen = [
                torch.arange(start + rank * whole // size, start + (rank + 1) * whole // size)
                for start, whole in zip(starts, fused, strict=True)
            ]
            return weights.of_outputs(torch.cat(chosen))
        unit = weights.group_size if weights.scales.shape[1] > 1 else 1
        if weights.columns is not None or weights.values.shape[1] % (size * unit):
            raise CheckpointError(f"groups of {weights.group_size} inputs cannot be cut over {size} ranks")
        return weights.of_inputs(rank, size)

    def _stored_tensors(self, name: str) -> stored_weights.Read:
        def read(part: str) -> torch.Tensor | None:
            key = f"{name}.{part}"
            if key not in self._files:
                return None
            self._unread.discard(key)
            tensor: torch.Tensor = self._files[key][0].get_tensor(key)
            return tensor

        return read

    def _joined(self, biases: list[torch.Tensor | None], sizes: list[int]) -> torch.Tensor | None:
        """Zeros where some have none."""
        if all(bias is None for bias in biases):
            return None
        zeros = torch.zeros(max(sizes), dtype=self.dtype, device=self.device)
        return torch.cat([zeros[:n] if bias is None else bias for bias, n in zip(biases, sizes, strict=True)])

    def head(self, vocab_size: int, hidden_size: int, *, tied_to: TokenEmbedding | None) -> TokenHead:
        """`tied_to`: the weights are those of the embedding; None: they are the checkpoint's lm_head."""
        linear = self.linear(["lm_head"], hidden_size, [vocab_size]) if tied_to is None else tied_to.head(self.numerics)
        return TokenHead(linear, vocab_size, self.group)

    def finish(self, ignored: tuple[str, ...], layers: tuple[str, ...]) -> None:
        """Raises if a tensor was never read; names that end like `ignored` may be left. `layers`: prefixes of this rank's;
        of several stages each looks at its own, as none reads all of the rest."""
        if self.stored is not None:
            ignored += stored_weights.IGNORED
        left = sorted(n for n in self._unread if not n.endswith(_DERIVED + ignored))
        if self.group.num_stages > 1:
            left = [name for name in left if name.startswith(layers)]
        if left:
            shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
            raise CheckpointError(f"{self.path} holds tensors that its architecture does not use: {shown}.")
