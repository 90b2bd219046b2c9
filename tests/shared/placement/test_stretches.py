"""Stretches of recorded traffic that stand for all of it."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.placement.problem import Problem, Traffic, traffic
from shared.placement.stretches import between, evidence_s, horizons, joined, lasting, mean_execution_s, spread, thinned
from tests.shared.placement.small import model, node, problem


def steady(rate: float, seconds: float, name: str = "a") -> Traffic:
    rows = [(number / rate, name, 10, 5, True) for number in range(int(rate * seconds))]
    return traffic(rows, seconds, ["a", "b"])


@given(st.floats(0, 1e4), st.floats(1, 1e5), st.floats(1, 1e4), st.floats(1, 1e3))
def test_stretches_are_spread_evenly(since_s: float, seconds: float, most_s: float, stretch_s: float) -> None:
    found = spread(since_s, since_s + seconds, most_s, stretch_s)
    assert sum(one.seconds for one in found) <= max(most_s, 0) * (1 + 1e-9) or len(found) == 1
    assert found[0].since_s >= since_s - 1e-6 and found[-1].until_s == pytest.approx(since_s + seconds)
    assert all(one.until_s <= other.since_s + 1e-6 for one, other in pairwise(found))
    if seconds < most_s * (1 - 1e-9):
        assert found == [(since_s, since_s + seconds)]


def test_what_is_joined_keeps_its_rates() -> None:
    recorded = steady(2.0, 1000.0)
    part = joined(recorded, spread(0.0, 1000.0, 200.0, 50.0))
    assert part.interval_s == pytest.approx(200.0) and part.num_requests == pytest.approx(400, abs=4)
    assert np.all(np.diff(part.arrival_s) >= 0) and part.arrival_s[-1] <= part.interval_s
    found = between(recorded, 20.0, 50.0)
    assert found.num_requests == 60 and found.interval_s == 30.0 and found.arrival_s[0] == 0.0


def test_horizons_reach_as_far_as_traffic_is_known() -> None:
    assert horizons(100.0, steady(1.0, 1600.0)) == [100.0, 200.0, 400.0, 800.0, 1600.0]
    assert horizons(100.0, steady(1.0, 5000.0)) == [100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0, 5000.0]
    assert horizons(100.0, steady(1.0, 250.0)) == [100.0, 200.0, 250.0]
    assert horizons(100.0, steady(1.0, 50.0)) == [50.0]
    assert horizons(100.0, traffic([], 50.0)) == []
    silent = [(80.0 + number, "a", 10, 5, True) for number in range(20)]
    assert horizons(10.0, traffic(silent, 100.0)) == [10.0, 20.0]
    assert evidence_s(100.0) == 1600.0


def asked(recorded: Traffic, window_s: float) -> Problem:
    window = between(recorded, recorded.interval_s - window_s, recorded.interval_s)
    given_one = problem([model("a"), model("b")], [node()], (0, 0))
    return msgspec.structs.replace(given_one, traffic=window, evidence=recorded)


def test_the_longer_ago_the_less_it_counts() -> None:
    rows = [(float(at_s), "a" if at_s < 1500 else "b", 10, 5, True) for at_s in range(1600)]
    given_one = asked(traffic(rows, 1600.0, ["a", "b"]), 100.0)
    found = lasting(given_one, 1e9).traffic
    share = np.mean(found.model == found.models.index("b"))
    # Of the horizons, the last 100 s are 1, 1/2, 1/4, 1/8 and 1/16.
    assert share == pytest.approx((1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 16) / 5, abs=0.03)
    assert found.interval_s <= 1600 and np.all(np.diff(found.arrival_s) >= 0)
    seconds = 20 * mean_execution_s(given_one)
    less = lasting(given_one, seconds).traffic
    assert less.interval_s == pytest.approx(min(seconds, found.interval_s), rel=0.01)


def test_without_more_evidence_it_is_the_traffic_itself() -> None:
    given_one = asked(steady(1.0, 100.0), 100.0)
    assert lasting(given_one, 1e9).traffic is given_one.traffic
    assert thinned(given_one, 100.0) is given_one
    assert thinned(given_one, 30.0).traffic.interval_s == pytest.approx(30.0)
    # SLOs stay what they were by all requests.
    assert thinned(given_one, 30.0).execution_s.keys() == {"a"}
