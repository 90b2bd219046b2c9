"""What a token costs where models take turns: its terms, and that they are what turns cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.policies.token_cost import first_cheap, token_cost_s


def test_alone_it_is_its_own_step() -> None:
    assert token_cost_s("a", [("a", 0, (0.01, 0.001))]) == 0.01
    assert token_cost_s("a", [("a", 0, (0.01, 0.001)), ("b", 0, (0.5, 0.1))]) == 0.01


def test_among_its_own_it_makes_their_step_longer() -> None:
    assert token_cost_s("a", [("a", 30, (0.02, 0.001))]) == pytest.approx(0.02 + 0.03 + 0.03)


def test_a_model_that_is_new_slows_all_down_and_one_that_stays_anyway_hardly() -> None:
    others = ("b", 9, (0.02, 0.001))
    others_s = (0.02 + 8 * 0.001) * 0.9
    assert token_cost_s("a", [("a", 0, (0.01, 0.0)), others]) == pytest.approx(0.01 * 10 + others_s)
    assert token_cost_s("a", [("a", 8, (0.01, 0.0)), others]) == pytest.approx(0.01 * 2 + others_s)


def test_what_is_not_known_costs_nothing() -> None:
    unknown = (0.0, 0.0)
    assert token_cost_s("a", []) == token_cost_s("a", [("a", 3, unknown), ("b", 3, unknown)]) == 0.0


@given(st.integers(0, 50), st.integers(0, 50), st.floats(1e-4, 1), st.floats(1e-4, 1))
def test_more_of_its_own_make_it_cheaper_and_more_of_others_dearer(
    num_own: int, num_others: int, own_s: float, others_s: float
) -> None:
    def cost_s(more_own: int, more_others: int) -> float:
        return token_cost_s(
            "a",
            [
                ("a", num_own + more_own, (own_s, 0.0)),
                ("b", num_others + more_others, (others_s, 0.0)),
            ],
        )

    assert cost_s(1, 0) <= cost_s(0, 0) < cost_s(0, 1)


def test_requests_of_high_priority_count_for_many_where_steps_get_longer() -> None:
    many, few = [("a", 12, (0.02, 0.0005))], [("a", 4, (0.02, 0.0005))]
    assert token_cost_s("a", few) < token_cost_s("a", many) < token_cost_s("a", few, 2)
    assert token_cost_s("a", [("a", 4, (0.02, 0.0))], 2) == 0.02, "no step gets longer"
    assert token_cost_s("a", [("a", 4, (0.0, 0.0))], 2) == 0.0, "not known"


def test_what_turns_cost_is_what_they_do_where_times_to_the_end_are_exponential_and_alike() -> None:
    times = np.random.default_rng(1).exponential(size=(200_000, 8))
    its, of_its_model, of_others = times[:, 0], times[:, 1:5].max(axis=1), times[:, 5:]
    waits_s = 0.01 * its + 0.02 * np.minimum(its, of_others.max(axis=1))
    # those of the other model wait for its model's step while it is the last of that, as if they stayed
    others_wait_s = 0.01 * np.maximum(0.0, its - of_its_model) * of_others.shape[1]
    expected = (waits_s.mean() + others_wait_s.mean()) / its.mean()
    assert token_cost_s("a", [("a", 4, (0.01, 0.0)), ("b", 3, (0.02, 0.0))]) == pytest.approx(expected, rel=0.02)


def test_the_first_of_those_that_cost_hardly_more() -> None:
    assert first_cheap([1.2, 1.05, 1.0]) == 1
    assert first_cheap([1.2, 0.0, 1.0]) == 1, "one that is not known may be as cheap"
    assert first_cheap([0.0, 0.0]) == 0
