"""LoRA adapters as models compute them: beside the products of the base model's linear layers, for the tokens of a step that
are of requests with an adapter.

Tokens are grouped by adapter. Layers that are fused (queries, keys and values; gates and what they are multiplied with) have
their modules' matrices in one. Of a group each rank has the part of A or B that goes with its part of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from services.worker.linear import Linear
from services.worker.ranks.group import RankGroup
from shared.adapters import AdaptedModule, AdapterFiles
from shared.checkpoint import CheckpointError
from shared.model_families import OUTPUTS


class Adaptable(NamedTuple):
    """A module of a layer that adapters may change, as the model has it."""

    linear: str
    """Of the model's linear layers, the one that has the module's outputs."""
    inputs: int
    """Over all ranks; likewise `outputs`."""
    outputs: tuple[int, ...]
    """Several where the module itself is fused."""
    cut: int
    """OUTPUTS or INPUTS: along which axis of the weight ranks have parts."""


class Change:
    """What an adapter adds to the product of one linear layer, fused or not: two products, of which the first has the A
    matrices of all its modules, and the second their B matrices, with zeros where a module has no outputs."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """`a`: [ranks, inputs]; `b`: [outputs, ranks], scaled."""
        self.num_bytes = a.nbytes + b.nbytes
        self._lower, self._raise = Linear(a), Linear(b)

    def add_to(self, result: torch.Tensor, inputs: torch.Tensor, tokens: slice | torch.Tensor) -> None:
        """`result`: [T, outputs], in place; `inputs`: [T, inputs]; `tokens`: those that it is for, [t] int64 or a run."""
        if isinstance(tokens, slice):
            result[tokens] += self._raise(self._lower(inputs[tokens]))
        else:
            result.index_add_(0, tokens, self._raise(self._lower(inputs.index_select(0, tokens))))


class LoraWeights:
    """Of one adapter, on the device of its base model and in its dtype."""

    def __init__(self, changes: Mapping[tuple[int, str], Change]) -> None:
        """By layer of this stage and name of the linear layer."""
        self.changes = changes

    @property
    def num_bytes(self) -> int:
        return sum(change.num_bytes for change in self.changes.values())


class BatchAdapters:
    """Which tokens of a step are computed with which adapters."""

    def __init__(self, groups: Sequence[tuple[LoraWeights, slice | torch.Tensor]]) -> None:
        """Tokens ([t] int64 on the device, or a run of them), each in one group at most."""
        self._groups = groups

    def add(self, result: torch.Tensor, inputs: torch.Tensor, layer: int, linear: str) -> None:
        """To the product of `inputs` [T, inputs] with that linear layer, in place."""
        for weights, tokens in self._groups:
            if (change := weights.changes.get((layer, linear))) is not None:
                change.add_to(result, inputs, tokens)


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
    found: dict[int, dict[str, AdaptedModule]] = {}
    for module in files.modules:
        if module.layer in layers:
            found.setdefault(module.layer - layers.start, {})[module.module] = module
    try:
        with safe_open(files.weights, framework="pt") as tensors:

            def read(name: str) -> torch.Tensor:
                # in float32 until it is scaled, and copied: the file's memory is mapped
                tensor: torch.Tensor = tensors.get_tensor(name)
                return tensor.to(device=device, dtype=torch.float32, copy=True)

            changes: dict[tuple[int, str], Change] = {}
            for layer, modules in found.items():
                known = adaptable[layer]
                if unknown := sorted(modules.keys() - known.keys()):
                    raise CheckpointError(
                        f"{files.weights}: target_modules {', '.join(unknown)}: layer {layer + layers.start} of the base "
                        f"model has {', '.join(known)} to adapt."
                    )
                for linear in {known[name].linear for name in modules}:
                    of_linear = {name: where for name, where in known.items() if where.linear == linear}
                    a, b = _matrices(files, of_linear, modules, read, group)
                    changes[layer, linear] = Change(a.to(dtype), b.to(dtype))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{files.weights} cannot be read: {error}") from None
    return LoraWeights(changes)


def _matrices(
    files: AdapterFiles,
    known: Mapping[str, Adaptable],
    modules: Mapping[str, AdaptedModule],
    read: Callable[[str], torch.Tensor],
    group: RankGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[ranks, inputs] and [outputs, ranks] of one linear layer, this rank's part."""
    lowering: list[torch.Tensor] = []
    raising: list[tuple[int, torch.Tensor]] = []
    start = 0
    for name, where in known.items():
        if (module := modules.get(name)) is not None:
            expected = where.inputs, sum(where.outputs)
            if (module.inputs, module.outputs) != expected:
                raise CheckpointError(
                    f"{files.weights}: {module.path} has {module.inputs} inputs and {module.outputs} outputs, but that "
                    f"of the base model has {expected[0]} and {expected[1]}."
                )
            a, b = read(module.a), read(module.b) * module.scale
            if where.cut == OUTPUTS:
                b = _cut(b, where.outputs, group)
            else:
                a = _cut(a.T, (where.inputs,), group).T
            lowering.append(a)
            raising.append((start, b))
        start += sum(-(-n // group.size) for n in where.outputs) if where.cut == OUTPUTS else sum(where.outputs)
    a = torch.cat(lowering)
    # An even number of ranks: the compiled kernels read inputs by words of 32 bits.
    a = F.pad(a, (0, 0, 0, len(a) % 2))
    b_all, rank = a.new_zeros(start, len(a)), 0
    for first, b in raising:
        b_all[first : first + len(b), rank : rank + b.shape[1]] = b
        rank += b.shape[1]
    return a, b_all


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
