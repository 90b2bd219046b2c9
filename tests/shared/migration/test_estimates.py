from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.migration.estimates import (
    DEFAULT_BANDWIDTH_BYTES_S,
    MAX_ASK_S,
    MAX_WAIT_S,
    MIN_ASK_S,
    Busy,
    Next,
    copy_s,
    is_worth,
    next_stage,
)


def test_copy_time_from_bandwidth_and_share() -> None:
    assert copy_s(1_000_000, 2e6, 0.5) == 1.0
    assert copy_s(10, None, 1.0) == 10 / DEFAULT_BANDWIDTH_BYTES_S


def test_a_move_is_worth_less_than_the_decode_that_is_left() -> None:
    assert is_worth(1.0, 100, 0.05)
    assert not is_worth(1.0, 10, 0.05)


def test_stages_until_the_rest_is_little() -> None:
    assert next_stage(100, 0.5, None, 0.5, 0.05, 0, 8) is Next.STAGE
    assert next_stage(5, 0.04, 0.5, 0.04, 0.05, 1, 8) is Next.STAGE
    assert next_stage(1, 0.004, 0.04, 0.004, 0.05, 2, 8) is Next.LAST
    assert next_stage(0, 0.06, 0.05, 0.06, 0.05, 1, 8) is Next.LAST


def test_what_does_not_shrink_is_the_last_if_it_fits_into_a_step() -> None:
    assert next_stage(5, 0.04, 0.04, 0.04, 0.05, 2, 8) is Next.LAST
    assert next_stage(5, 0.06, 0.05, 0.06, 0.05, 2, 8) is Next.NOT_WORTH
    assert next_stage(5, 0.06, 0.05, 0.003, 0.05, 2, 8) is Next.LAST, "without the limit it takes less"


def test_a_copy_that_does_not_catch_up_is_given_up() -> None:
    assert next_stage(100, 0.5, 0.5, 0.5, 0.05, 1, 8) is Next.NOT_WORTH
    assert next_stage(100, 0.5, 0.5, 0.5, 0.05, 7, 8) is Next.NOT_WORTH
    assert next_stage(100, 0.5, 0.6, 0.5, 0.05, 7, 8) is Next.LAST


def test_one_stage_is_a_blocking_copy() -> None:
    assert next_stage(1000, 9.0, None, 9.0, 0.05, 0, 1) is Next.LAST


def test_the_last_stage_waits_for_the_end_of_the_destinations_long_step() -> None:
    little = (1, 0.004, 0.04, 0.004, 0.05, 2, 8)
    assert next_stage(*little, busy_s=0.0) is Next.LAST
    assert next_stage(*little, busy_s=1.5) is Next.WAIT
    assert next_stage(*little, busy_s=None) is Next.STAGE, "it asks"
    assert next_stage(100, 0.5, None, 0.5, 0.05, 0, 8, busy_s=1.5) is Next.STAGE, "what is filled goes meanwhile"
    assert next_stage(100, 0.5, 0.5, 0.5, 0.05, 1, 8, busy_s=1.5) is Next.NOT_WORTH
    assert next_stage(1000, 9.0, None, 9.0, 0.05, 0, 1, busy_s=None) is Next.LAST, "a blocking copy asks nobody"


def test_a_source_asks_again_when_the_long_step_should_have_ended() -> None:
    busy = Busy()
    assert busy.left_s(0.0) is None, "nobody asked yet"
    busy.on_reserved(0.4, 1.0)
    assert busy.left_s(1.1) == pytest.approx(0.3)
    assert busy.left_s(1.4) is None, "the step may be over its time"
    busy.on_reserved(0.0, 2.0)
    assert busy.left_s(9.0) == 0.0, "steps are short while a request is expected"
    assert busy.ask_after_s(0.3, 2.0) == 0.3
    assert busy.left_s(2.3) is None, "after a wait it is not known any more"
    assert busy.ask_after_s(7.0, 2.3) == MAX_ASK_S
    assert busy.ask_after_s(0.0, 2.4) == MIN_ASK_S
    assert busy.ask_after_s(0.3, 2.0 + MAX_WAIT_S) is None


@given(st.floats(0.01, 100), st.floats(0.001, 1), st.floats(0.1, 3), st.integers(1, 12))
def test_pre_copy_ends(total_s: float, step_s: float, growth: float, max_stages: int) -> None:
    """`growth`: what is filled while a second is copied takes so long to copy."""
    left_s, previous_s, num_stages = total_s, None, 0
    while next_stage(100, left_s, previous_s, left_s, step_s, num_stages, max_stages) is Next.STAGE:
        left_s, previous_s, num_stages = left_s * growth, left_s, num_stages + 1
    assert num_stages < max_stages


def test_who_is_told_of_one_long_step_after_another_does_not_ask_for_ever() -> None:
    """Each answer has run out before it can be acted on, so nothing but the first one says since when."""
    busy, now = Busy(), 0.0
    while (left_s := busy.left_s(now)) is None:
        busy.on_reserved(0.001, now)
        now += 0.002
        assert now < MAX_WAIT_S + 1
    assert left_s > 0 and busy.ask_after_s(left_s, now) is None


@given(st.floats(1e-4, 10.0), st.integers(1, 4000), st.floats(1e-3, 0.2), st.lists(st.floats(0.0, 1.0), max_size=60))
def test_no_request_moves_more_often_than_its_copy_goes_into_what_it_has_left(
    cost_s: float, tokens_left: int, step_s: float, decoded: list[float]
) -> None:
    """Offered a move again and again, with so much of what was left decoded between two offers."""
    num_moves, most = 0, tokens_left * step_s / cost_s
    for share in [*decoded, *[0.0] * 100]:
        if is_worth(cost_s, tokens_left, step_s, num_moves):
            num_moves += 1
            assert num_moves * cost_s <= tokens_left * step_s * (1 + 1e-9), "what it moved for is ahead of it still"
        tokens_left -= int(share * tokens_left)
    assert num_moves <= most * (1 + 1e-9)
