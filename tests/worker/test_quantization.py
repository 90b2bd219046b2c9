"""Weights of few bits: what checkpoints store, and what `--quantization` makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from services.worker.models.deterministic import INVARIANT
from services.worker.models.linear import Linear
from services.worker.models.loading import identity_of, load_model
from services.worker.models.quantized_linear import (
    GroupedWeights,
    Int4Linear,
    Int8Linear,
    from_groups,
    quantized,
    rounded_to_int4,
)
from services.worker.ranks.group import Alone
from shared.models import checkpoint
from shared.models.checkpoint import CheckpointError
from shared.models.quantization import QUANTIZATIONS, QuantizationError, stored_quantization
from tests.worker.checkpoints import prompt_of, reference_outputs, write_checkpoint
from tests.worker.test_models import generate

CPU = torch.device("cpu")
GROUP = 32
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_hidden_layers": 2}
Tensors = dict[str, torch.Tensor]


def words(values: torch.Tensor, bits: int, axis: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Whole numbers in 32-bit words along an axis; `order`: of the columns in a word, lowest bits first."""
    values = values.long() if axis == 1 else values.long().T
    per_word = 32 // bits
    columns = values.unflatten(1, (-1, per_word))[..., list(order or range(per_word))]
    packed = (columns << torch.arange(per_word) * bits).sum(2)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
    return packed if axis == 1 else packed.T.contiguous()


def grouped(
    weight: torch.Tensor, bits: int, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, zeros and scales [outputs, inputs or groups], and the weight that they stand for."""
    parts = weight.unflatten(1, (-1, group))
    low, high = parts.amin(2), parts.amax(2)
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = (-low / scales).round().clamp(1, 2**bits - 1)
    values = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return values.flatten(1), zeros, scales, ((values - zeros[..., None]) * scales[..., None]).flatten(1)


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    values, zeros, scales, stands_for = grouped(weight, 4, GROUP)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(values.T, 4, 1, order),
        "qzeros": words(zeros.T, 4, 1, order),
        "scales": scales.T.half(),
    }
    return tensors, stands_for


def gptq(weight: torch.Tensor, bits: int = 4, *, in_order: bool = True) -> tuple[Tensors, torch.Tensor]:
    inputs = weight.shape[1]
    columns = (
        torch.arange(inputs) if in_order else torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    )
    values, zeros, scales, stands_for = grouped(weight[:, columns], bits, GROUP)
    original = columns.argsort()
    tensors = {
        "qweight": words(values[:, original].T, bits, 0), "qzeros": words(zeros.T - 1, bits, 1),
        "scales": scales.T.half(), "g_idx": (original // GROUP).int(),
    }  # fmt: skip
    return tensors, stands_for[:, original]


def packed(weight: torch.Tensor, *, symmetric: bool = True) -> tuple[Tensors, torch.Tensor]:
    values, zeros, scales, stands_for = grouped(weight, 4, GROUP)
    tensors = {
        "weight_packed": words(values, 4, 1),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        return tensors | {"weight_zero_point": words(zeros, 4, 0)}, stands_for
    return tensors, ((values.unflatten(1, (-1, GROUP)) - 8) * scales[..., None]).flatten(1)


def int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127).half().float()
    values = (weight / scales).round().clamp(-128, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scales.half()}, values * scales


def fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    values = (weight / 0.5).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": torch.tensor([0.5]), "input_scale": torch.ones(1)}, values.float() * 0.5


def compressed(layout: str, **weights: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
STORED: dict[str, tuple[dict[str, object], Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "gptq": (GPTQ, gptq),
    "gptq-act-order": (GPTQ | {"desc_act": True}, lambda weight: gptq(weight, in_order=False)),
    "gptq-8": (GPTQ | {"bits": 8}, lambda weight: gptq(weight, 8)),
    "packed": (compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP), packed),
    "packed-zeros": (
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP),
        lambda weight: packed(weight, symmetric=False),
    ),
    "int8": (compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8),
    "fp8": (compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), fp8),
}
QUICK = ("awq", "gptq-act-order", "packed-zeros", "fp8")
"""Those of them that are run each time."""


def store(folder: Path, name: str) -> tuple[Path, Path]:
    """A checkpoint with its layers quantised so, and one of the same values in float32."""
    config, pack = STORED[name]
    plain = write_checkpoint(folder / "plain", "llama", **SIZES)
    tensors, values = load_file(plain / "model.safetensors"), {}
    quantised: Tensors = {}
    for key, tensor in tensors.items():
        if key.endswith("_proj.weight"):
            parts, values[key] = pack(tensor)
            quantised |= {f"{key.removesuffix('weight')}{part}": t.contiguous() for part, t in parts.items()}
        else:
            quantised[key] = values[key] = tensor
    save_file(values, plain / "model.safetensors")
    path = folder / name
    path.mkdir()
    text = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    (path / "config.json").write_text(json.dumps(text))
    save_file(quantised, path / "model.safetensors")
    return path, plain


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in STORED]
)
def test_quantised_checkpoints_give_the_tokens_of_their_values(tmp_path: Path, name: str) -> None:
    path, plain = store(tmp_path, name)
    assert generate(path, [prompt_of(40)], 6) == reference_outputs(plain, [prompt_of(40)], 6)
    shape = checkpoint.describe(path)
    assert shape.stored_as == name.partition("-")[0] and shape.dtype == "float32"
    with pytest.raises(CheckpointError, match="is quantised already"):
        identity_of(path, CPU, quantization="int8")


@pytest.mark.parametrize("name", ["awq", "fp8"])
def test_ranks_have_the_parts_of_quantised_layers(tmp_path: Path, name: str) -> None:
    """Whose inputs are cut between groups."""
    path, plain = store(tmp_path, name)
    group = Alone()
    group.size, group.rank = 2, 1
    if name != "fp8":  # 96 inputs are three groups
        with pytest.raises(CheckpointError, match=r"down_proj: groups of 32 inputs cannot be cut over 2 ranks"):
            load_model(identity_of(path, CPU), CPU, group)
        return
    part, expected = (load_model(identity_of(p, CPU), CPU, group)._layers[0] for p in (path, plain))  # type: ignore[attr-defined]
    x = torch.randn(3, 64)
    torch.testing.assert_close(part.qkv(x), expected.qkv(x))
    torch.testing.assert_close(part.out(x[:, :32]), expected.out(x[:, :32]))


def test_deterministic_mode_widens_what_is_stored_and_quantises_nothing(tmp_path: Path) -> None:
    path, plain = store(tmp_path, "awq")
    layer = load_model(identity_of(path, CPU), CPU, numerics=INVARIANT)._layers[0]  # type: ignore[attr-defined]
    assert isinstance(layer.qkv, Linear)
    with pytest.raises(CheckpointError, match="TIDEWAY_DETERMINISTIC"):
        load_model(identity_of(plain, CPU, quantization="int8"), CPU, numerics=INVARIANT)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantization_config.quant_method 'bitsandbytes'"),
        ({"quant_method": "awq", "version": "gemv"}, "quantization_config.version 'gemv'"),
        ({"quant_method": "gptq", "bits": 3}, "quantization_config.bits 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "all"}, "quantization_config.group_size 'all'"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "quantization_config.config_groups: 0 groups"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "weights.num_bits 4"),
        (compressed("float-quantized", num_bits=8, type="float", strategy="block"), "weights.strategy 'block'"),
        (compressed("marlin-24", num_bits=8, type="int", strategy="channel"), "quantization_config.format 'marlin-24'"),
    ],
)
def test_other_schemes_are_refused_by_their_field(config: dict[str, object], message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        stored_quantization({"quantization_config": config})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "least"), [("int8", 40), ("int4", 17), ("fp8", 25)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_quantised_products_are_close(dtype: torch.dtype, kind: str, least: float, with_bias: bool) -> None:
    """`least`: signal over noise in dB."""
    torch.manual_seed(0)
    weight = torch.randn(320, 192).to(dtype)
    bias = torch.randn(320).to(dtype) if with_bias else None
    linear = quantized(weight, bias, kind)
    for rows in (1, 3, 40):
        x = torch.randn(rows, 192).to(dtype)
        with torch.inference_mode():
            expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
            noise = linear(x).float() - expected
        assert 10 * torch.log10(expected.square().mean() / noise.square().mean()) > least


def test_products_are_those_of_the_dequantised_weights() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 128)
    four = rounded_to_int4(torch.randn(64, 128))
    linear = from_groups([four], None, torch.float32)
    assert isinstance(linear, Int4Linear)
    torch.testing.assert_close(linear(x), F.linear(x, four.dequantized()), rtol=1e-3, atol=1e-3)
    eight = GroupedWeights(
        torch.randint(0, 256, (48, 128)).to(torch.uint8), torch.rand(48, 1), torch.full((48, 1), 128.0), 8
    )
    linear = from_groups([eight], None, torch.float32)
    assert isinstance(linear, Int8Linear)
    torch.testing.assert_close(linear(x), F.linear(x, eight.dequantized()), rtol=1e-4, atol=1e-2)
    odd = GroupedWeights(four.values[:20], four.scales[:20], four.zeros[:20], 4)
    assert isinstance(from_groups([odd], None, torch.float32), Linear), "int4 products take multiples of 16 outputs"


@pytest.mark.parametrize(
    ("variant", "kind"), [*(("llama", kind) for kind in QUANTIZATIONS), ("qwen3-moe", "int4"), ("gpt2", "int8")]
)
def test_models_run_with_quantised_layers(tmp_path: Path, variant: str, kind: str) -> None:
    sizes = {"n_embd": 64, "n_head": 8, "n_layer": 2} if variant == "gpt2" else SIZES
    path = write_checkpoint(tmp_path, variant, **sizes)
    shape = checkpoint.describe(path)
    smaller = checkpoint.quantized(shape, kind)
    assert shape.weight_bytes > smaller.weight_bytes > shape.weight_bytes - shape.linear_bytes
    assert len(generate(path, [prompt_of(20)], 4, quantization=kind)[0]) == 4
    with pytest.raises(CheckpointError, match="'int2' is not one of int8, int4, fp8"):
        identity_of(path, CPU, quantization="int2")
