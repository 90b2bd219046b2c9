"""Sums over ranks in their order: an element's bits do not depend on its place in the tensor."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path

import torch

from services.worker.ranks.group import Ranks

NUM_RANKS = 4


def test_a_rows_sum_is_the_same_in_any_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(33, 40).to(torch.bfloat16) for _ in range(NUM_RANKS)]

    def sums(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        group = Ranks(rank, NUM_RANKS, tmp_path / "rendezvous", torch.device("cpu"), in_order=True)
        try:
            return group.all_reduce(parts[rank].clone()), group.all_reduce(parts[rank][17:18].clone())
        finally:
            group.close()

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        results = list(pool.map(sums, range(NUM_RANKS)))
    expected = reduce(torch.add, [part.float() for part in parts]).bfloat16()
    for whole, row in results:
        assert torch.equal(whole, expected)
        assert torch.equal(row, expected[17:18])
