"""The bound of bench.tiers on what a cache can have."""

from __future__ import annotations

import pytest

from bench.tiers import best_share
from shared.simulation.gateway import Job


def turns(order: str) -> list[Job]:
    """A turn of 100 tokens a second, each of the conversation that a letter names; others ask between them."""
    jobs = [Job(float(at), 100, 0, texts=((ord(name), 100),)) for at, name in enumerate(order)]
    return sorted([*jobs, Job(0.5, 1000, 10)], key=lambda job: job.at_s)


@pytest.mark.parametrize(
    ("order", "num_tokens", "found"),
    [
        ("abab", 0, 0),
        ("abab", 1000, 200),
        ("abab", 100, 100),  # either of them stays
        ("abcabc", 100, 100),  # where the least recently used one would go, nothing is found
        ("abcabc", 150, 150),  # a part of a context is of use
        ("abba", 100, 100),
        ("abba", 200, 200),
    ],
)
def test_the_best_share_is_of_an_order_that_knows_what_comes(order: str, num_tokens: int, found: int) -> None:
    assert best_share(turns(order), num_tokens, 0.0) == pytest.approx(found / (100 * len(order)))


def test_turns_of_the_warm_up_fill_the_cache_and_are_not_counted() -> None:
    assert best_share(turns("abab"), 1000, 2.0) == 1.0
