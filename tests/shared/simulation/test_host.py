"""A machine whose cores instances share with the services."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.simulation.host import MOST_LOST, WINDOW_S, Demand, Host, Load, lost

DEMAND = Demand(request_s=0.004, token_s=1e-4)


def test_load_is_what_came_lately() -> None:
    load = Load(DEMAND)
    assert load.cores(5.0) == 0.0
    for number in range(4000):  # 100 requests/s and 2,000 tokens/s for 40 s
        load.add(0.01 * number, num_requests=1, num_tokens=20)
    assert load.cores(40.0) == pytest.approx(100 * DEMAND.request_s + 2000 * DEMAND.token_s, rel=0.03)
    assert load.cores(39.99 + WINDOW_S) == pytest.approx(load.cores(39.99) / math.e)


def test_services_use_idle_cores_before_they_take_one_from_a_step() -> None:
    assert lost(0.6, num_cores=2, num_computing=1) == 0.0
    assert lost(0.6, num_cores=2, num_computing=2) == pytest.approx(0.3)
    assert lost(1.5, num_cores=2, num_computing=1) == pytest.approx(0.5)
    assert lost(9.0, num_cores=2, num_computing=2) == MOST_LOST


@given(load=st.floats(0, 8), cores=st.integers(1, 8), computing=st.integers(1, 8), more=st.floats(0, 2))
def test_more_load_costs_no_less_and_more_cores_no_more(load: float, cores: int, computing: int, more: float) -> None:
    share = lost(load, cores, computing)
    assert 0.0 <= share <= MOST_LOST
    assert lost(load + more, cores, computing) >= share >= lost(load, cores + 1, computing)


def test_a_step_is_slowed_by_services_and_by_its_neighbour() -> None:
    host = Host(DEMAND, num_cores=2, beside=1.2)
    assert (host.slowdown(0.0, 1), host.slowdown(0.0, 2)) == (1.0, 1.2)
    host.load.add(0.0, num_requests=45)  # 0.6 cores
    assert host.slowdown(0.0, 1) == 1.0
    assert host.slowdown(0.0, 2) == pytest.approx(1.2 / 0.7)
    assert host.slowdown(10.0, 2) == pytest.approx(1.2)
