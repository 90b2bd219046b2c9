"""The bench of the search for a placement."""

from __future__ import annotations

import numpy as np

from bench.placement.day import INTERVALS_S, between, rates, settings
from bench.placement.experiments import all_plans
from bench.placement.problems import draw, draw_models
from shared.placement.estimator import Estimator
from shared.placement.problem import traffic


def test_all_plans_of_a_small_node_can_be_estimated():
    rng = np.random.default_rng(3)
    problem = draw(4, draw_models(2, rng, names=("llama-2-7b", "opt-6.7b")), 4.0, 20.0, rng)
    plans = list(all_plans(problem))
    assert len(set(plans)) > 20
    outcomes = Estimator(problem).outcomes(plans)
    assert all(np.sum(outcome.rates) * 20.0 > 0.99 * problem.traffic.num_requests for outcome in outcomes)


def test_intervals_of_the_day(tmp_path):
    fixed, adaptive = settings("1 hour"), settings("adaptive")
    assert fixed.least_s == fixed.initial_s == fixed.most_s == 3600.0
    assert adaptive.least_s < adaptive.initial_s < adaptive.most_s
    assert settings("none").initial_s == INTERVALS_S["none"]
    rows = [f"m,{600 * number},{rate}" for number, rate in enumerate([0.0, 2.0, 0.0, 4.0, *[3.0] * 140])]
    (tmp_path / "servegen_model_rates.csv").write_text("\n".join(["model,window_start_s,rate_rps", *rows]))
    (found,) = rates(tmp_path).values()
    assert np.isclose(found.mean(), 1.0)
    assert found[0] == found[1] == found[2] == found[3] / 2


def test_a_stretch_of_the_day_keeps_its_times():
    arrivals = traffic([(float(at_s), "m", 10, 5, True) for at_s in range(100)], 100.0)
    found = between(arrivals, 20.0, 50.0)
    assert found.num_requests == 30 and found.interval_s == 30.0 and found.arrival_s[0] == 0.0
