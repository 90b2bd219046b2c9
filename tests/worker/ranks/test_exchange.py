"""Ranks that sum and join through memory; here they are threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import reduce
from typing import Any

import pytest
import torch

from services.worker.native.library import kernels
from services.worker.ranks.exchange import Exchange, total_bytes

pytestmark = pytest.mark.skipif(kernels() is None, reason="there is no C compiler")

SLOT_BYTES = 4096


@contextmanager
def exchanges(size: int, timeout_s: float = 60.0) -> Iterator[list[Exchange]]:
    fd = os.memfd_create("test")
    os.truncate(fd, total_bytes(size, SLOT_BYTES))
    try:
        yield [Exchange(f"/proc/self/fd/{fd}", rank, size, timeout_s, SLOT_BYTES) for rank in range(size)]
    finally:
        os.close(fd)


def on_all(ranks: list[Exchange], call: Callable[[int, Exchange], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, range(len(ranks)), ranks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
def test_sums_and_rows_of_all_sizes_one_after_the_other(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(1, 1), (3, 7), (5, 576), (1, 1024), (40, 130)]
    parts = [[torch.randn(shape).to(dtype) for shape in shapes] for _ in range(size)]

    def calls(rank: int, exchange: Exchange) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        return [(exchange.sum(part.clone()), exchange.join(part)) for part in parts[rank]]

    with exchanges(size) as ranks:
        results = on_all(ranks, calls)
    for index in range(len(shapes)):
        of_ranks = [parts[rank][index] for rank in range(size)]
        for result in results:
            summed, joined = result[index]
            assert torch.equal(summed, reduce(torch.add, [part.float() for part in of_ranks]).to(dtype))
            assert joined is not None and torch.equal(joined, torch.cat(of_ranks, -1))


def test_a_tensor_that_is_not_contiguous_is_summed_in_place() -> None:
    with exchanges(2) as ranks:
        wholes = [torch.arange(12.0).view(3, 4).clone() for _ in ranks]
        on_all(ranks, lambda rank, exchange: exchange.sum(wholes[rank][:, 1:3]))
    for whole in wholes:
        assert whole.tolist() == [[0, 2, 4, 3], [4, 10, 12, 7], [8, 18, 20, 11]]


def test_a_rank_that_does_not_come_is_lost_for_good() -> None:
    with exchanges(2, timeout_s=0.05) as (first, second):
        first.sum(torch.ones(4))
        assert first.is_lost
        second.sum(torch.ones(4))
        assert not second.is_lost, "the first rank's part of that call was there"
        assert first.join(torch.ones(4)) is None
