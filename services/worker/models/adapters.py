"""LoRA adapters as models compute them: beside the products of the base model's linear layers, for the tokens of a step that
are of requests with an adapter.

Tokens are grouped by adapter. Layers that are fused (queries, keys and values; gates and what they are multiplied with) have
their modules' matrices in one. Of a group each rank has the part of A or B that goes with its part of the layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from services.worker.models.linear import Linear
from services.worker.native.library import ChangeStruct, interleaved
from services.worker.ranks.group import RankGroup
from shared.models.adapters import AdaptedModule, AdapterFiles
from shared.models.checkpoint import CheckpointError
from shared.models.families import OUTPUTS


class Adaptable(NamedTuple):
    """A module of a layer that adapters may change, as the model has it."""

    linear: str
    """The model's linear layer that has the module's outputs."""
    inputs: int
    """Over all ranks; likewise `outputs`."""
    outputs: tuple[int, ...]
    """Several where the module itself is fused."""
    cut: int
    """OUTPUTS or INPUTS: along which axis of the weight ranks have parts."""
    is_interleaved: bool = False
    """The linear layer's outputs are, as compiled layers have gates."""


class Change:
    """What an adapter adds to the product of one linear layer, fused or not: two products, of which the first has the A
    matrices of all its modules, and the second their B matrices, with zeros where a module has no outputs."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """`a`: [ranks, inputs]; `b`: [outputs, ranks], scaled."""
        self.down, self.up = Linear(a), Linear(b)

    def add_to(self, result: torch.Tensor, inputs: torch.Tensor, tokens: slice | torch.Tensor) -> None:
        """`result`: [T, outputs], in place; `inputs`: [T, inputs]; `tokens`: those that it is for, [t] int64 or a run."""
        if isinstance(tokens, slice):
            result[tokens] += self.up(self.down(inputs[tokens]))
        else:
            result.index_add_(0, tokens, self.up(self.down(inputs.index_select(0, tokens))))


class CompiledChanges(NamedTuple):
    """Changes of an adapter as the compiled kernels take them."""

    structs: ctypes.Array[ChangeStruct]
    """By layer, four each."""
    num_ranks: int
    """Ranks of the adapter with the most, with those that fill up its last panel."""


class LoraWeights:
    """Weights of one adapter, on the device of its base model and in its dtype."""

    def __init__(self, changes: Mapping[tuple[int, str], Change]) -> None:
        """By layer of this stage and name of the linear layer."""
        self.changes = changes
        self.compiled: CompiledChanges | None = None
        """Made by layers that are compiled, when they first compute with it."""


class BatchAdapters:
    """Which tokens of a step are computed with which adapters."""

    def __init__(self, groups: Sequence[tuple[LoraWeights, slice | torch.Tensor]]) -> None:
        """Tokens ([t] int64 on the device, or a run of them), each in one group at most."""
        self.groups = groups

    def add(self, result: torch.Tensor, inputs: torch.Tensor, layer: int, linear: str) -> None:
        """Adds the changes to the product of `inputs` [T, inputs] with that linear layer, in place."""
        for weights, tokens in self.groups:
            if (change := weights.changes.get((layer, linear))) is not None:
                change.add_to(result, inputs, tokens)


class _Fused(NamedTuple):
    """One linear layer that an adapter changes."""

    layer: int
    """Layer within this stage."""
    linear: str
    known: Mapping[str, Adaptable]
    """All of its modules."""
    adapted: Mapping[str, AdaptedModule]

    @property
    def is_interleaved(self) -> bool:
        return any(where.is_interleaved for where in self.known.values())

    def sizes(self, group: RankGroup) -> tuple[int, int, int]:
        """Ranks, inputs and outputs of its two matrices, this rank's part of them."""
        num_ranks = sum(module.rank for module in self.adapted.values())
        inputs, cut = next((where.inputs, where.cut) for where in self.known.values())
        outputs = [n for where in self.known.values() for n in where.outputs]
        if cut == OUTPUTS:
            outputs = [-(-n // group.size) for n in outputs]
        else:
            inputs = -(-inputs // group.size)
        # An even number of ranks: the compiled kernels read inputs by words of 32 bits.
        return num_ranks + num_ranks % 2, inputs, sum(outputs)


def lora_bytes(
    files: AdapterFiles,
    adaptable: Sequence[Mapping[str, Adaptable]],
    layers: range,
    group: RankGroup,
    dtype: torch.dtype,
) -> int:
    """Bytes of what `read_lora` makes. Raises `CheckpointError`."""
    sizes = [one.sizes(group) for one in _fused(files, adaptable, layers)]
    return dtype.itemsize * sum(ranks * (inputs + outputs) for ranks, inputs, outputs in sizes)


def read_lora(
    files: AdapterFiles,
    adaptable: Sequence[Mapping[str, Adaptable]],
    layers: range,
    group: RankGroup,
    device: torch.device,
    dtype: torch.dtype,
) -> LoraWeights:
    """What this rank has of an adapter: of its stage's `layers`, each with those of its modules that are `adaptable`, in
    the order in which fused layers have their outputs. Blocking. Raises `CheckpointError`."""
    try:
        with safe_open(files.weights, framework="pt") as tensors:
            changes: dict[tuple[int, str], Change] = {}
            for one in _fused(files, adaptable, layers):
                a, b = _matrices(files, one, tensors.get_tensor, group)
                changes[one.layer, one.linear] = Change(a.to(device, dtype), b.to(device, dtype))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{files.weights} cannot be read: {error}") from None
    return LoraWeights(changes)


def _fused(files: AdapterFiles, adaptable: Sequence[Mapping[str, Adaptable]], layers: range) -> Iterator[_Fused]:
    found: dict[int, dict[str, AdaptedModule]] = {}
    for module in files.modules:
        if module.layer in layers:
            found.setdefault(module.layer - layers.start, {})[module.module] = module
    for layer, modules in found.items():
        known = adaptable[layer]
        if unknown := sorted(modules.keys() - known.keys()):
            raise CheckpointError(
                f"{files.weights}: target_modules {', '.join(unknown)}: layer {layer + layers.start} of the base "
                f"model has {', '.join(known)} to adapt."
            )
        for linear in dict.fromkeys(known[name].linear for name in modules):
            of_linear = {name: where for name, where in known.items() if where.linear == linear}
            yield _Fused(layer, linear, of_linear, {name: modules[name] for name in of_linear if name in modules})


def _matrices(
    files: AdapterFiles, fused: _Fused, read: Callable[[str], torch.Tensor], group: RankGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """[ranks, inputs] and [outputs, ranks] in float32 on the CPU, this rank's part."""
    num_ranks, inputs, outputs = fused.sizes(group)
    a_all, b_all = torch.zeros(num_ranks, inputs), torch.zeros(outputs, num_ranks)
    rank = start = 0
    for name, where in fused.known.items():
        num_outputs = sum(-(-n // group.size) for n in where.outputs) if where.cut == OUTPUTS else sum(where.outputs)
        if (module := fused.adapted.get(name)) is not None:
            expected = where.inputs, sum(where.outputs)
            if (module.inputs, module.outputs) != expected:
                raise CheckpointError(
                    f"{files.weights}: {module.path} has {module.inputs} inputs and {module.outputs} outputs, but that "
                    f"of the base model has {expected[0]} and {expected[1]}."
                )
            a, b = read(module.a), read(module.b).float() * module.scale
            if where.cut == OUTPUTS:
                b = _cut(b, where.outputs, group)
            else:
                a = _cut(a.T, (where.inputs,), group).T
            a_all[rank : rank + module.rank] = a
            b_all[start : start + num_outputs, rank : rank + module.rank] = b
            rank += module.rank
        start += num_outputs
    return a_all, interleaved(b_all) if fused.is_interleaved else b_all


def _cut(matrix: torch.Tensor, fused: Sequence[int], group: RankGroup) -> torch.Tensor:
    """This rank's rows of each of the `fused` parts, as `WeightReader` cuts weights: the last ones padded with zeros."""
    if group.size == 1:
        return matrix
    rows, start = [], 0
    for whole in fused:
        count = -(-whole // group.size)
        begin, end = (min(whole, at * count) for at in (group.rank, group.rank + 1))
        rows.append(F.pad(matrix[start + begin : start + end], (0, 0, 0, count - (end - begin))))
        start += whole
    return torch.cat(rows)
