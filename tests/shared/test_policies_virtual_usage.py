"""Formulas of virtual usage and freeness, against the paper's statements and brute force per request."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.costs.model import StepShape
from shared.policies.virtual_usage import (
    HIGH_WEIGHT,
    IDEAL_SLOWDOWN,
    TYPICAL_CONTEXT_TOKENS,
    decode_steps,
    dispatch_virtual_usage,
    freeness,
    headroom,
    ideal_load_tokens,
    left_of,
    merged_demand,
    migration_virtual_usage,
)
from tests.shared.costs import costs

blocks = st.floats(0, 1e4)


def test_merged_demand_counts_whole_blocks() -> None:
    assert merged_demand(1, 16, 4) == 0.25
    assert merged_demand(16, 16, 4) == 0.25
    assert merged_demand(17, 16, 4) == 0.5
    assert merged_demand(0, 16, 4) == 0


def test_idle_is_freest() -> None:
    assert freeness(100, dispatch_virtual_usage(0, 0), 0) == math.inf
    assert left_of(100, math.inf, 0) == 100


@given(blocks, blocks, st.integers(0, 500))
def test_what_is_left_can_be_had_from_the_freeness(total: float, usage: float, num_running: int) -> None:
    assert left_of(total, freeness(total, usage, num_running), num_running) == pytest.approx(total - usage)


def test_waiting_requests_alone_are_load() -> None:
    assert freeness(100, dispatch_virtual_usage(0, 30), 0) == 70


def test_overload_is_negative() -> None:
    assert freeness(100, dispatch_virtual_usage(90, 50), 4) == -10


def test_dispatch_counts_all_waiting_and_migration_the_head() -> None:
    assert dispatch_virtual_usage(40, 30) == 70
    assert migration_virtual_usage(40, 10) == 50


def test_headroom_grows_with_what_high_requests_hold_up_to_what_lies_above_the_ideal_load() -> None:
    assert headroom(100, 25, 0) == 0
    assert headroom(1000, 25, 2) == 2 * HIGH_WEIGHT
    assert headroom(100, 25, 50) == 75
    assert headroom(100, 200, 2) == 0


def test_headroom_does_not_count_for_moves_where_nobody_could_leave() -> None:
    assert dispatch_virtual_usage(10, 0, high_headroom=40) == 50
    assert migration_virtual_usage(10, 0, high_headroom=40) == 50
    assert migration_virtual_usage(10, 0, high_headroom=40, runs_normal=False) == 10


@given(
    st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=20),
    st.lists(st.integers(1, 50), max_size=10),
)
def test_the_sums_are_those_over_single_requests(running: list[tuple[int, bool]], waiting: list[int]) -> None:
    """The instance-level formulas equal the sum of V(r) over single requests."""
    held = sum(size for size, _ in running)
    room = headroom(1e9, 0, sum(size for size, is_high in running if is_high))
    dispatch = dispatch_virtual_usage(held, sum(waiting), high_headroom=room)
    assert dispatch == pytest.approx(
        sum(size * (1 + HIGH_WEIGHT * is_high) for size, is_high in running) + sum(waiting)
    )
    head = waiting[0] if waiting else 0
    migration = migration_virtual_usage(held, head, high_headroom=room)
    assert migration == pytest.approx(sum(size * (1 + HIGH_WEIGHT * is_high) for size, is_high in running) + head)


@given(blocks, blocks, blocks, st.integers(1, 500))
def test_freeness_falls_with_usage_and_migration_never_sees_more_than_dispatch(
    total: float, usage: float, more: float, num_running: int
) -> None:
    assert freeness(total, usage + more, num_running) <= freeness(total, usage, num_running)
    assert migration_virtual_usage(usage, 0) <= dispatch_virtual_usage(usage, more)


def test_decode_steps_until_the_pool_is_full() -> None:
    assert decode_steps(30, 2 / 16) == 240
    assert decode_steps(-3, 0.5) == -6
    assert decode_steps(100, 0) == math.inf


@given(
    st.floats(1e-4, 1),
    st.just(0.0) | st.floats(1e-9, 1e-2),
    st.just(0.0) | st.floats(1e-12, 1e-5),
    st.just(0.0) | st.floats(1e-9, 1e-3),
    st.integers(0, 300),
)
def test_the_ideal_load_slows_a_step_by_no_more_than_that(
    fixed_s: float, decode_s: float, context_s: float, over_knee_s: float, knee: int
) -> None:
    cost = costs(
        fixed_s, decode_s=decode_s, decode_context_s=context_s, over_knee_s=over_knee_s, knee_tokens=max(1, knee)
    )
    tokens = ideal_load_tokens(cost)
    if tokens == math.inf:
        assert not decode_s and not context_s and not over_knee_s
        return
    num = tokens / TYPICAL_CONTEXT_TOKENS
    alone_s = cost.predict(StepShape(0, 0, 1, TYPICAL_CONTEXT_TOKENS))
    over = max(0.0, num - cost.knee_tokens)
    real_s = fixed_s + num * cost.decode_cost_s(TYPICAL_CONTEXT_TOKENS) + over * over_knee_s
    assert num >= 1
    assert real_s == pytest.approx(IDEAL_SLOWDOWN * alone_s, rel=1e-6)
