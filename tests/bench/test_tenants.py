"""A flood of one tenant hardly delays the first tokens of another, with the real scheduler's core."""

from __future__ import annotations

import pytest

from bench.rebalance.cluster import A10
from bench.tenants import FLOODS, run

WORST_RATIO = 2.0
"""Above what the bench asks for: prompts of the flood that are in flight on a GPU are waited for."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7, 8])
def test_first_tokens_beside_each_flood(seed: int) -> None:
    alone = run(None, A10, 1, 100.0, seed)
    for kind in FLOODS:
        beside = run(kind, A10, 1, 100.0, seed)
        assert beside.num_requests > 5 and beside.flood_tokens_per_s > 20
        assert beside.p99_s <= WORST_RATIO * alone.p99_s, kind
