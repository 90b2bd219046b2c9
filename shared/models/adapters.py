"""What a LoRA adapter in PEFT's format is, read from adapter_config.json and the header of its safetensors file alone.

An adapter changes the product of a linear layer, x W^T, by scale * (x A^T) B^T, where A is [rank, inputs] and B is
[outputs, rank] (Hu et al. 2021). As in `shared.models.checkpoint` neither torch nor peft is needed, and each defect is a
`CheckpointError` whose message names the file, the field or tensor, and the limit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shared.models.checkpoint import CheckpointError, read_json, read_safetensors_header, weight_files
from shared.models.families import families

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 256
"""Beyond it two products cost as much as the layer's own, and the weights are better merged."""

_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<path>(?:\w+\.)*?layers\.(?P<layer>\d+)\.(?:self_attn\.|mlp\.)?(?P<module>\w+))"
    r"\.lora_(?P<side>[AB])(?:\.default)?\.weight"
)
_REFUSED = {
    "use_dora": "DoRA's magnitudes",
    "lora_bias": "biases of B",
    "modules_to_save": "whole modules beside the adapter",
    "target_parameters": "adapted parameters that belong to no linear layer",
    "trainable_token_indices": "embeddings of single tokens",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "adapters that begin at a token",
    "use_qalora": "QA-LoRA's pooled inputs",
    "use_bdlora": "block-diagonal matrices",
    "arrow_config": "routing over adapters",
}
"""Keys of the configuration that ask for more than LoRA, and what they ask for."""
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""How initialisations begin that take away from the base weights what the adapter begins with; once converted, PEFT says
true."""
_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
"""Modules that instances hold as one layer."""
_Pair = dict[str, tuple[re.Match[str], list[int]]]
"""By side, A and B: the tensor's name, matched, and shape."""


class AdaptedModule(msgspec.Struct, frozen=True, kw_only=True):
    """A pair of matrices of an adapter."""

    layer: int
    module: str
    """The last name of the layer's module: q_proj, say."""
    path: str
    """Path of the module in the base model's checkpoint: `model.layers.0.self_attn.q_proj`, perhaps
    without its first name."""
    a: str
    """Name of the tensor [rank, inputs]; likewise `b`, [outputs, rank]."""
    b: str
    rank: int
    inputs: int
    outputs: int
    scale: float


class AdapterFiles(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter, but for the numbers in it."""

    weights: Path
    modules: tuple[AdaptedModule, ...]
    """By layer and name."""

    @property
    def rank(self) -> int:
        return max(module.rank for module in self.modules)

    @property
    def num_values(self) -> int:
        """Number of values as instances hold them: modules that are one layer there have one matrix B, with zeros between
        them."""
        fused: dict[tuple[int, str], list[AdaptedModule]] = {}
        for module in self.modules:
            fused.setdefault((module.layer, _FUSED.get(module.module, module.module)), []).append(module)
        return sum(
            sum(module.rank for module in one) * (one[0].inputs + sum(module.outputs for module in one))
            for one in fused.values()
        )


def describe_adapter(path: Path, max_rank: int = MAX_RANK) -> AdapterFiles:
    """What the folder's adapter is. Raises `CheckpointError`."""
    file, weights = path / CONFIG_FILE, path / WEIGHTS_FILE
    config = read_json(file)
    _check_config(config, file)
    if not weights.is_file():
        hint = " (adapter_model.bin would have to be converted)" if (path / "adapter_model.bin").exists() else ""
        raise CheckpointError(f"{weights} is missing{hint}.")
    pairs: dict[str, _Pair] = {}
    for name, tensor in read_safetensors_header(weights).items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise CheckpointError(
                f"{weights}: tensor {name} is not supported: adapters may change linear layers of attention and MLP."
            )
        shape = tensor["shape"]
        if len(shape) != 2 or not all(shape):
            raise CheckpointError(f"{weights}: tensor {name} has shape {shape}, but a matrix is expected.")
        pairs.setdefault(found["path"], {})[found["side"]] = found, shape
    if not pairs:
        raise CheckpointError(f"{weights} holds no tensors.")
    modules = [_module(config, file, weights, where, pair, max_rank) for where, pair in pairs.items()]
    return AdapterFiles(weights=weights, modules=tuple(sorted(modules, key=lambda m: (m.layer, m.module))))


def check_base(files: AdapterFiles, base: Path, family: str) -> None:
    """Checks that the modules are there in the base model's checkpoint, with these shapes, as far as its headers say (those
    of quantised layers do not). `family`: name of its `ModelFamily`. Raises `CheckpointError`."""
    adapted = next((known.adapted for known in families() if known.name == family), ())
    if not adapted:
        raise CheckpointError(
            "LoRA adapters are not supported for a base model that runs through transformers; they are for "
            f"{', '.join(known.name for known in families())} and what is built alike."
        )
    if unknown := sorted({module.module for module in files.modules} - set(adapted)):
        raise CheckpointError(
            f"{files.weights}: target_modules {', '.join(unknown)} are not supported; supported are {', '.join(adapted)}."
        )
    shapes = {
        name[name.index("layers.") :]: list(tensor["shape"])
        for file in weight_files(base)
        for name, tensor in read_safetensors_header(file).items()
        if "layers." in name
    }
    num_layers = 1 + max((int(n) for name in shapes for n in re.findall(r"^layers\.(\d+)\.", name)), default=-1)
    for module in files.modules:
        if module.layer >= num_layers:
            raise CheckpointError(
                f"{files.weights}: tensor {module.a} is of layer {module.layer}, but the base model has {num_layers} layers."
            )
        end = module.path[module.path.index("layers.") :]
        found = shapes.get(f"{end}.weight")
        if found is None:
            continue
        sides = (module.a, module.inputs, "inputs", found[1]), (module.b, module.outputs, "outputs", found[0])
        for tensor, has, what, wanted in sides:
            if has != wanted:
                raise CheckpointError(
                    f"{files.weights}: tensor {tensor} has {has} {what}, but the base model's {end} has {wanted}."
                )


def _check_config(config: Mapping[str, Any], file: Path) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        raise CheckpointError(f"{file}: peft_type {kind!r} is not supported; supported is LORA.")
    for key, what in _REFUSED.items():
        if config.get(key):
            raise CheckpointError(f"{file}: {key}: {what} are not supported.")
    if config.get("bias") not in (None, "none"):
        raise CheckpointError(f"{file}: bias {config['bias']!r} is not supported; supported is none.")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        raise CheckpointError(
            f"{file}: init_lora_weights {start!r}: the adapter is for base weights that were changed with it, not for those "
            "of the base model; save it with PEFT's path_initial_model_for_weight_conversion."
        )
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            raise CheckpointError(f"{file}: {key} must be an object.")


def _module(
    config: Mapping[str, Any], file: Path, weights: Path, path: str, pair: _Pair, max_rank: int
) -> AdaptedModule:
    if missing := {"A", "B"} - pair.keys():
        raise CheckpointError(f"{weights}: {path} has no lora_{missing.pop()}.")
    (a, a_shape), (b, b_shape) = pair["A"], pair["B"]
    rank = a_shape[0]
    if b_shape[1] != rank:
        raise CheckpointError(f"{weights}: tensor {b.string} has shape {b_shape}, but {a.string} is of rank {rank}.")
    if rank > max_rank:
        raise CheckpointError(f"{weights}: r of {path} is {rank}; the limit is {max_rank}.")
    return AdaptedModule(
        layer=int(a["layer"]),
        module=a["module"],
        path=path,
        a=a.string,
        b=b.string,
        rank=rank,
        inputs=a_shape[1],
        outputs=b_shape[0],
        scale=_scale(config, file, path, rank),
    )


def _scale(config: Mapping[str, Any], file: Path, path: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank) where it is rank-stabilised (Kalajdzievski 2023)."""
    r = _of_pattern(config, "rank_pattern", path, config.get("r"))
    if r is not None and r != rank:
        raise CheckpointError(f"{file}: r of {path} is {r}, but its tensors are of rank {rank}.")
    alpha = _of_pattern(config, "alpha_pattern", path, config.get("lora_alpha", 8))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e6:
        raise CheckpointError(f"{file}: lora_alpha of {path} must be a positive number, but is {alpha!r}.")
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def _of_pattern(config: Mapping[str, Any], key: str, path: str, default: Any) -> Any:
    """Value for a module as PEFT chooses it: by the first pattern that the end of the module's name matches."""
    for pattern, value in (config.get(key) or {}).items():
        try:
            if re.fullmatch(rf"(.*\.)?({str(pattern).removeprefix('^')})", path):
                return value
        except re.error:
            continue
    return default
