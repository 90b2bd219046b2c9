"""Experts one after the other, and all at once by grouped products, against their definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from services.worker.models.experts import Experts
from services.worker.models.linear import Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_renormalised", [False, True])
@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 37])
def test_experts(dtype: torch.dtype, is_renormalised: bool, is_grouped: bool, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    num_experts, hidden, inner, top_k = 7, 32, 16, 3
    router = torch.randn(num_experts, hidden).to(dtype)
    shapes = ((num_experts, 2 * inner, hidden), (num_experts, hidden, inner))
    gate_up, down = ((0.3 * torch.randn(shape)).to(dtype) for shape in shapes)
    x = torch.randn(num_tokens, hidden).to(dtype)
    experts = Experts(
        Linear(router.clone()),
        gate_up.mT if is_grouped else [Linear(w.clone()) for w in gate_up],
        down.mT if is_grouped else [Linear(w.clone()) for w in down],
        F.silu,
        num_experts=num_experts,
        top_k=top_k,
        is_renormalised=is_renormalised,
    )
    shares = F.linear(x, router).softmax(-1, dtype=torch.float32)
    expected = torch.zeros(num_tokens, hidden)
    for token in range(num_tokens):
        best = shares[token].argsort(descending=True)[:top_k]
        total = shares[token, best].sum() if is_renormalised else 1.0
        for expert in best.tolist():
            gate, up = (gate_up[expert].float() @ x[token].float()).chunk(2)
            expected[token] += shares[token, expert] / total * (down[expert].float() @ (F.silu(gate) * up))
    with torch.inference_mode():
        got = experts(x).float()
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
