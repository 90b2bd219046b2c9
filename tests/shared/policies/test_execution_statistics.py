from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages.cluster import ExecutionStatistics
from shared.policies.execution_statistics import ExecutionTimeWindow


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.integers(1, 20))
def test_moments_are_those_of_the_last_requests(times_s: list[float], num: int) -> None:
    window = ExecutionTimeWindow(num)
    for time_s in times_s:
        window.add("m", time_s)
        window.statistics("m")
    last = times_s[-num:]
    found = window.statistics("m")
    assert found.num_finished == len(last)
    assert found.mean_s == pytest.approx(statistics.fmean(last), rel=1e-12)
    assert found.std_s == pytest.approx(statistics.pstdev(last), rel=1e-9, abs=1e-9)


def test_a_large_offset_does_not_swallow_the_deviation() -> None:
    window = ExecutionTimeWindow(4)
    for time_s in [1e12, 1e-9, *[1e9 + offset for offset in (1.0, 2.0, 3.0, 4.0)]]:
        window.add("m", time_s)
    assert window.statistics("m").mean_s == 1e9 + 2.5
    assert window.statistics("m").std_s == pytest.approx(1.25**0.5, rel=1e-9)


def test_models_are_apart_and_can_be_forgotten() -> None:
    window = ExecutionTimeWindow(default_s=3.0)
    assert window.statistics("a") == ExecutionStatistics("a", 3.0, 0.0, 0)
    window.add("a", 1.0)
    window.add("b", 5.0)
    assert window.statistics("a") == ExecutionStatistics("a", 1.0, 0.0, 1)
    window.forget("a")
    assert window.statistics("a").num_finished == 0
    assert window.statistics("b").num_finished == 1


def test_times_that_are_none_are_refused() -> None:
    window = ExecutionTimeWindow()
    for time_s in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError):
            window.add("m", time_s)
    with pytest.raises(ValueError):
        ExecutionTimeWindow(0)
