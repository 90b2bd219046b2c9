from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.policies.interruption import (
    LEAST_GAIN_S,
    WAIT_TTFTS,
    Next,
    SuspendedStep,
    should_interrupt,
    waits,
    what_next,
)

times = st.floats(0, 10)


@pytest.mark.parametrize(
    ("elapsed_s", "predicted_s", "left_s", "safepoint_s", "interrupts"),
    [
        (0.99, 1.0, 1.5, 0.0, False),  # it ends within a hundredth of the time left
        (0.95, 1.0, 1.5, 0.0, True),  # later than that
        (0.997, 1.0, 0.3, 0.0, True),  # 0.003 + 0.3 does not fit
        (0.997, 1.0, -9.0, 0.0015, False),  # nor hardly after it
        (0.95, 1.0, 0.1, 0.1, False),  # it ends before the next safepoint
        (0.0, 1.0, -9.0, 0.1, True),  # late already: less late is better
        (2.0, 1.0, 1.2, 0.1, True),  # over its prediction by as much as it took
    ],
)
def test_interrupts_where_waiting_shows(
    elapsed_s: float, predicted_s: float, left_s: float, safepoint_s: float, interrupts: bool
) -> None:
    assert should_interrupt(elapsed_s, predicted_s, left_s, 0.3, safepoint_s) is interrupts


@settings(deadline=None)
@given(times, times, st.floats(-10, 10), times, times, times)
def test_a_longer_wait_never_speaks_against_interrupting(
    elapsed: float, predicted: float, left: float, more: float, step: float, safepoint: float
) -> None:
    if should_interrupt(elapsed, predicted, left, step, safepoint):
        assert should_interrupt(elapsed, predicted, left - more, step, safepoint)
        assert should_interrupt(elapsed, predicted, left, step + more, safepoint)


@settings(deadline=None)
@given(times, st.floats(-10, 10), times, st.floats(0, 0.1))
def test_no_step_is_stopped_that_ends_before_it_could_have_been(
    elapsed: float, left: float, step: float, safepoint: float
) -> None:
    assert not should_interrupt(elapsed, elapsed + safepoint + 0.99 * LEAST_GAIN_S, left, step, safepoint)


@settings(deadline=None)
@given(st.floats(0.05, 10), st.floats(0.05, 5))
def test_a_step_that_is_long_beside_the_objective_is_stopped(predicted: float, left: float) -> None:
    """Whatever else: nobody waits for more than a hundredth of the time that is left."""
    assert should_interrupt(0.0, predicted, left, 0.01, 0.002)


def test_a_suspended_step_waits_for_a_time_without_online_work_and_not_for_ever() -> None:
    assert waits(0.0, 1.5, has_online=True)
    assert not waits(0.0, 1.5, has_online=False)
    assert not waits(1.5 * WAIT_TTFTS, 1.5, has_online=True)


def test_what_becomes_of_a_suspended_step() -> None:
    step = SuspendedStep(done_s=0.5, remaining_s=0.2, lost_s=0.1)
    assert what_next(step, has_online=False) == Next.RESUME
    assert what_next(step, has_online=True, spare_s=0.25, safepoint_s=0.01) == Next.RESUME
    assert what_next(step, has_online=True, spare_s=0.05, safepoint_s=0.01) == Next.PART
    assert what_next(step, has_online=True, spare_s=0.005, safepoint_s=0.01) == Next.WAIT
    late = step._replace(lost_s=0.6)
    assert what_next(late, has_online=True, spare_s=0.005, safepoint_s=0.01) == Next.DISCARD
    assert what_next(late, has_online=True, spare_s=0.05, safepoint_s=0.01) == Next.PART
    assert what_next(late, has_online=False) == Next.RESUME


@settings(deadline=None)
@given(st.floats(0.01, 5), st.floats(0, 20))
def test_waiting_then_discarding_costs_at_most_twice_the_better_choice(done_s: float, online_for_s: float) -> None:
    """Online work goes on for `online_for_s`: waiting costs that, discarding at once the work done."""
    tick_s = 0.01
    waited_s = 0.0
    cost_s = online_for_s
    while waited_s < online_for_s:
        if what_next(SuspendedStep(done_s, 1.0, waited_s), has_online=True, safepoint_s=0.1) == Next.DISCARD:
            cost_s = waited_s + done_s
            break
        waited_s += tick_s
    assert cost_s <= 2 * min(done_s, online_for_s) + 2 * tick_s
