"""Both ways to the lowest score that stays in leave the same tokens in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.executor.nucleus import by_bisection, by_sorting

torch.set_num_threads(1)

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")])]  # fmt: skip  # noqa: E501


def check(scores: torch.Tensor, top_k: list[int], top_p: list[float], floors: list[float] | None) -> None:
    def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=scores.device)[:, None]

    vocab = scores.shape[1]
    k, p = column(top_k, torch.int64), column(top_p, torch.float32)
    floor = None if floors is None else scores.amax(-1, keepdim=True) + column(floors, torch.float32)
    largest = scores.sort(-1, descending=True).values
    by_sort = by_sorting(scores, largest, k, p, floor)
    bisected = by_bisection(scores, None if min(top_k) == vocab else k, p, floor)
    different = ((scores >= by_sort) != (scores >= bisected)).any(-1)
    for row in different.nonzero()[:, 0].tolist():
        # Sums in another order may differ in their last bits: then the probability above lies at the limit.
        kept = scores[row] >= torch.minimum(by_sort, bisected)[row]
        mass = scores[row].double().softmax(-1) * kept
        edge = torch.maximum(by_sort, bisected)[row]
        above = mass[scores[row] >= edge].sum() / mass.sum()
        assert abs(float(above) - top_p[row]) < 1e-5, (row, float(above), top_p[row])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("digits", [7, 1, 0])
def test_bisection_leaves_in_what_sorting_does(device: str, digits: int) -> None:
    """Also of many equal scores."""
    generator = torch.Generator().manual_seed(digits)
    scores = (torch.randn(60, 3000, generator=generator) * 3).round(decimals=digits).to(device)
    top_p = [0.0, 1e-6, 0.1, 0.503, 0.91, 0.999, 2.0] * 10
    check(scores, [3000] * 60, top_p[:60], None)
    check(scores, [1, 2, 40, 2999, 3000, 700] * 10, top_p[:60], None)
    check(scores, [1, 2, 40, 2999, 3000, 700] * 10, top_p[:60], [-0.1, -3.0, -8.0, 0.0, -80.0] * 12)


@given(
    st.lists(st.lists(st.floats(-40, 40, width=32), min_size=9, max_size=9), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.317, 0.733, 0.97, 2.0]),
    st.integers(1, 9),
)
def test_of_any_scores(rows: list[list[float]], top_p: float, top_k: int) -> None:
    check(torch.tensor(rows), [top_k] * len(rows), [top_p] * len(rows), None)


def test_masked_tokens_and_one_token_that_has_it_all() -> None:
    scores = torch.full((2, 50), -torch.inf)
    scores[0, 3], scores[0, 7], scores[1, 9] = 1.0, 0.5, 60.0
    bisected = by_bisection(scores, None, torch.tensor([[0.99], [0.5]]), None)
    assert (scores >= bisected).nonzero().tolist() == [[0, 3], [0, 7], [1, 9]]
