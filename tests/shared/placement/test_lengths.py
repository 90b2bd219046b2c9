"""Lengths of outputs of which some have not ended."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.placement.lengths import drawn_like


@given(
    rows=st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=60),
    seed=st.integers(0, 9),
)
def test_what_ended_stays_and_what_runs_becomes_no_shorter(rows, seed):
    tokens = np.array([row[0] for row in rows], np.int64)
    has_ended = np.array([row[1] for row in rows], np.bool_)
    if not has_ended.any():
        return
    like = drawn_like(tokens, has_ended, np.random.default_rng(seed))
    assert (like[has_ended] == np.flatnonzero(has_ended)).all()
    assert has_ended[like].all()
    longest = tokens[has_ended].max()
    assert ((tokens[like] > tokens) | has_ended | (tokens >= longest)).all()


@pytest.mark.parametrize("age", [150, 300, 600])
def test_the_mean_is_not_that_of_the_short_ones(age):
    """Requests came evenly, a token a second; those that ended by now are far too short on average."""
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(5.1, 0.9, 20000), 1, 2048).astype(np.int64)
    ages = rng.uniform(0, age, len(lengths)).astype(np.int64)
    has_ended, tokens = lengths <= ages, np.minimum(lengths, ages)
    longest = lengths <= age  # of longer ones nothing is known
    found = tokens[drawn_like(tokens, has_ended, rng)]
    mean, expected = np.minimum(found, age).mean(), np.minimum(lengths, age).mean()
    assert longest.any() and lengths[has_ended].mean() < 0.7 * expected
    assert mean == pytest.approx(expected, rel=0.05)
