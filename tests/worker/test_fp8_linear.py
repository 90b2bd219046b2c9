"""Float8 weights against what they are made of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from services.worker.models import fp8_linear
from services.worker.models.fp8_linear import Fp8Linear, compare, multiply, quantise, scaled_product_of

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])]


def random(*shape: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def test_quantising_keeps_each_row_within_a_rounding() -> None:
    x = random(9, 64) * torch.logspace(-6, 6, 9)[:, None]
    x[4] = 0
    narrow, scales = quantise(x)
    assert narrow.dtype == torch.float8_e4m3fn and scales.shape == (9, 1) and scales.dtype == torch.float32
    again = narrow.float() * scales
    assert again.isfinite().all()
    # 3 bits of mantissa: half a step is a sixteenth; below the least normal number the steps stay as they are.
    allowed = x.float().abs() / 16 + scales * 2**-10
    assert ((again - x.float()).abs() <= allowed).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 128), (50, 72)])
def test_a_product_is_near_that_of_the_whole_weights(device: str, has_bias: bool, outputs: int, inputs: int) -> None:
    weight = random(outputs, inputs, device=device)
    bias = random(outputs, device=device, seed=1) if has_bias else None
    linear = Fp8Linear(weight, bias)
    assert linear.num_bytes < weight.nbytes * 0.62 + (0 if bias is None else bias.nbytes)
    for rows in (1, 7, 40):
        x = random(rows, inputs, device=device, seed=rows)
        got, expected = linear(x), F.linear(x, weight, bias)
        assert got.shape == expected.shape and got.dtype == torch.bfloat16
        assert (got - expected).float().norm() < 0.06 * expected.float().norm()


def test_the_scaled_product_is_used_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA; here with its definition."""
    monkeypatch.setattr(fp8_linear, "scaled_product_of", lambda *_: multiply)
    weight, bias = random(64, 96), random(64, seed=1)
    x = random(5, 96, seed=2)
    got, expected = Fp8Linear(weight, bias)(x), F.linear(x, weight, bias)
    assert (got - expected).float().norm() < 0.08 * expected.float().norm()


def test_a_product_that_computes_otherwise_is_found() -> None:
    with pytest.raises(AssertionError):
        compare(lambda x, w, a, b, t: multiply(x, w, a, b.flip(1), t), torch.device("cpu"), torch.bfloat16)
    assert scaled_product_of(torch.device("cpu"), torch.bfloat16) is None


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs Ada or later"
)
def test_scaled_products_on_cuda() -> None:
    assert scaled_product_of(torch.device("cuda"), torch.bfloat16) is not None
