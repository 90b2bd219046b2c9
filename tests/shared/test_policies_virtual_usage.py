"""Formulas of virtual usage and freeness, against the paper's statements and brute force per request."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cost_model import CostModel, StepShape
from shared.policies.virtual_usage import (
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

blocks = st.floats(0, 1e4)


def test_merged_demand_counts_whole_slots() -> None:
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


def test_high_priority_headroom_is_charged_once() -> None:
    room = headroom(100, 25)
    assert room == 75
    assert headroom(100, 200) == 0
    for num_high in (1, 2, 7):
        assert dispatch_virtual_usage(10, 0, high_headroom=room, num_high=num_high) == 85
        assert migration_virtual_usage(10, 0, high_headroom=room, num_high=num_high) == 85
    assert dispatch_virtual_usage(10, 0, high_headroom=room, num_high=0) == 10


def test_a_high_request_sees_the_headroom_only_where_it_is_new() -> None:
    assert dispatch_virtual_usage(10, 0, high_headroom=75, num_high=2, for_high=True) == 10
    assert dispatch_virtual_usage(10, 0, high_headroom=75, num_high=0, for_high=True) == 85


@given(
    st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=20),
    st.lists(st.integers(1, 50), max_size=10),
    st.floats(0, 200),
)
def test_the_sums_are_those_over_single_requests(
    running: list[tuple[int, bool]], waiting: list[int], room: float
) -> None:
    """The instance-level formulas equal the sum of V(r) as the paper defines it per request."""
    num_high = sum(is_high for _, is_high in running)
    per_request = [size + (room / num_high if is_high else 0.0) for size, is_high in running]
    held = sum(size for size, _ in running)
    dispatch = dispatch_virtual_usage(held, sum(waiting), high_headroom=room, num_high=num_high)
    assert dispatch == pytest.approx(sum(per_request) + sum(waiting))
    head = waiting[0] if waiting else 0
    migration = migration_virtual_usage(held, head, high_headroom=room, num_high=num_high)
    assert migration == pytest.approx(sum(per_request) + head)


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
    cost = CostModel(fixed_s, 0.0, 0.0, decode_s, context_s, over_knee_s=over_knee_s, knee_tokens=max(1, knee))
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
