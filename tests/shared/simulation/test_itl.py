"""Inter-token latencies in bounded memory: percentiles as of all values, mean and maximum exact."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.plan import ModelShape
from shared.engine.recording import Configuration
from shared.messages.requests import RequestClass
from shared.runtime.settings import SchedulerSettings
from shared.simulation.fleet import Device, Fleet, Model
from shared.simulation.gateway import Job
from shared.simulation.itl import LEAST_S, NUM_PENDING, Itl, ItlHistogram
from tests.shared.costs import costs

SECONDS = st.floats(2 * LEAST_S, 1e4)


@given(st.lists(SECONDS, min_size=1, max_size=200))
def test_percentiles_are_right_within_half_of_a_percent(gaps_s: list[float]) -> None:
    found = ItlHistogram.of(gaps_s).summary()
    assert (found.num, found.max) == (len(gaps_s), max(gaps_s))
    assert found.mean == pytest.approx(np.mean(gaps_s))
    for share, value in ((50, found.p50), (99, found.p99)):
        below, above = (np.percentile(gaps_s, share, method=how) for how in ("lower", "higher"))
        assert 0.995 * below <= value <= 1.005 * above


@given(st.lists(st.lists(SECONDS, max_size=30), max_size=4))
def test_merged_they_are_one_of_all_gaps(parts: list[list[float]]) -> None:
    merged = ItlHistogram.merged(map(ItlHistogram.of, parts)).summary()
    whole = ItlHistogram.of(gap_s for part in parts for gap_s in part).summary()
    assert (merged.num, merged.p50, merged.p99, merged.max) == (whole.num, whole.p50, whole.p99, whole.max)
    assert merged.mean == pytest.approx(whole.mean)


def test_memory_is_bounded_and_a_copy_in_another_process_is_equal() -> None:
    histogram = ItlHistogram.of(np.random.default_rng(1).exponential(0.05, 3 * NUM_PENDING + 5).tolist())
    assert histogram.summary().num == 3 * NUM_PENDING + 5
    copy = pickle.loads(pickle.dumps(histogram))
    assert copy == histogram and len(pickle.dumps(histogram)) < 50_000
    copy.add(7.0)
    assert copy != histogram


def test_nothing_and_what_lies_outside_of_the_bins() -> None:
    assert ItlHistogram().summary() == Itl()
    found = ItlHistogram.of([0.0, 0.0, 1e9]).summary()
    assert (found.num, found.max) == (3, 1e9) and found.p50 < 2 * LEAST_S


def test_a_gateway_counts_each_token_after_the_first_by_class_model_and_priority() -> None:
    """A stream that stands still once: its TPOT hardly shows it."""
    cost = costs(0.01, 1e-4)
    fleet = Fleet(SchedulerSettings(), noise=0.0)
    configuration = Configuration(
        num_merged=1000, num_rows=16, ordering="fcfs", token_budget=8192, steps_in_flight=1, co_serving="priority_only"
    )
    models = [
        Model(shape=ModelShape(name=name, block_size=16, blocks_per_merged=1, max_model_len=9000), cost_model=cost)
        for name in ("a", "b")
    ]
    fleet.add_instance("instance", Device(configuration=configuration), models)
    jobs = [
        Job(0.0, 10, 101, model="a"), Job(0.5, 4000, 1, model="a"), Job(30.0, 10, 5, model="b", is_high=True),
        Job(60.0, 10, 8, model="a", request_class=RequestClass.OFFLINE),
    ]  # fmt: skip
    stream, *_ = fleet.run(jobs).records
    gateway = fleet.gateway
    found = gateway.itl_of(model="a").summary()
    assert found.num == 100 and found.p50 == pytest.approx(0.01, rel=0.02)
    assert found.max == stream.longest_gap_s > 0.3
    assert stream.tpot_s == pytest.approx(found.mean) and stream.tpot_s < 0.02
    assert gateway.itl_of(model="b").summary().num == gateway.itl_of(is_high=True).summary().num == 4
    assert gateway.itl_of(is_high=False).summary().num == 100 and gateway.itl_of().summary().num == 104
    assert gateway.itl_of(RequestClass.OFFLINE).summary().num == 7
