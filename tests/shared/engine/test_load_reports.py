"""Time of the next report of an instance that only decodes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.load import InstanceLoad
from shared.engine.load_reports import LEAST_DRIFT_INTERVAL_S, MOST_DRIFT_INTERVAL_S, drift_interval_s
from shared.messages.cluster import ModelLoad


def load(freeness_steps: float, *running: int, step_s: float = 0.02) -> InstanceLoad:
    models = tuple(
        ModelLoad(
            model=str(number), num_running=count, num_waiting=0, num_offline=0, num_waiting_online=0,
            offline_room_tokens=0, budgets=(1.0, 0.0), decode_cost=(step_s, 0.0),
        )
        for number, count in enumerate(running)
    )  # fmt: skip
    return InstanceLoad(
        dispatch_freeness=1.0,
        free_merged=1.0,
        num_running=sum(running),
        models=models,
        migration_freeness=freeness_steps,
    )


@pytest.mark.parametrize(
    ("freeness_steps", "running", "expected_s"),
    [
        (200.0, (4,), 0.2),
        (200.0, (4, 2), 0.4),  # in turns
        (200.0, (4, 0), 0.2),
        (10.0, (4,), LEAST_DRIFT_INTERVAL_S),
        (-5.0, (4,), LEAST_DRIFT_INTERVAL_S),
        (5_000.0, (4,), MOST_DRIFT_INTERVAL_S),
        (math.inf, (), MOST_DRIFT_INTERVAL_S),
    ],
)
def test_the_less_memory_is_left_the_sooner_it_reports(
    freeness_steps: float, running: tuple[int, ...], expected_s: float
) -> None:
    assert drift_interval_s(load(freeness_steps, *running)) == pytest.approx(expected_s)


def test_steps_of_unknown_length_count_as_short() -> None:
    assert drift_interval_s(load(300.0, 1, step_s=0.0)) == pytest.approx(0.15)


@given(st.floats(allow_nan=False), st.lists(st.integers(0, 100), max_size=3), st.floats(0.0, 1e3))
def test_it_is_within_bounds_whatever_the_load(freeness_steps: float, running: list[int], step_s: float) -> None:
    interval_s = drift_interval_s(load(freeness_steps, *running, step_s=step_s))
    assert LEAST_DRIFT_INTERVAL_S <= interval_s <= MOST_DRIFT_INTERVAL_S
