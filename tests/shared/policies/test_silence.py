"""How long streams may stand still."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.policies.silence import MAX_SILENCE_S, allowed_silence_s, room_s


def test_the_bound_follows_slow_objectives_and_has_a_floor() -> None:
    assert allowed_silence_s(0.05) == MAX_SILENCE_S == 0.5
    assert allowed_silence_s(0.3) == pytest.approx(0.9)
    assert allowed_silence_s(inf) == MAX_SILENCE_S


def test_room_is_what_the_tightest_leaves() -> None:
    assert room_s([]) == inf
    assert room_s([(inf, 0.1)]) == inf
    assert room_s([(0.5, 0.1)]) == pytest.approx(0.4)
    assert room_s([(0.5, 0.1), (0.5, 0.2)]) == pytest.approx(0.2)
    assert room_s([(0.9, 0.1), (0.2, 0.1)]) == pytest.approx(0.1)
    assert room_s([(0.1, 0.2)]) < 0


@given(st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 0.3)), min_size=1, max_size=6))
def test_turns_by_due_time_that_begin_within_the_room_are_all_in_time(streams: list[tuple[float, float]]) -> None:
    room = room_s(streams)
    at_s = max(0.0, room)
    late = False
    for left_s, step_s in sorted(streams):
        at_s += step_s
        late |= at_s > left_s + 1e-9
    assert late == (room < -1e-9)
