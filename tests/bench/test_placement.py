"""The bench of the search for a placement."""

from __future__ import annotations

import numpy as np

from bench.placement.day import INTERVALS_S, rates, settings
from bench.placement.experiments import all_plans
from bench.placement.problems import draw, draw_models
from shared.placement.estimator import Estimator
from shared.placement.replacement import ReplacementSettings


def test_all_plans_of_a_small_node_can_be_estimated():
    rng = np.random.default_rng(3)
    problem = draw(4, draw_models(2, rng, names=("llama-2-7b", "opt-6.7b")), 4.0, 20.0, rng)
    plans = list(all_plans(problem))
    assert len(set(plans)) > 20
    outcomes = Estimator(problem).outcomes(plans)
    assert all(np.sum(outcome.rates) * 20.0 > 0.99 * problem.traffic.num_requests for outcome in outcomes)


def test_intervals_shrink_as_the_day_does(tmp_path):
    fixed, adaptive = settings("1 hour", 24.0), settings("adaptive", 24.0)
    assert fixed.least_s == fixed.initial_s == fixed.most_s == 150.0
    assert adaptive.least_s < adaptive.initial_s < adaptive.most_s
    assert adaptive.restart_s == ReplacementSettings().restart_s / 24
    assert settings("none", 24.0).initial_s == INTERVALS_S["none"]
    rows = [f"m,{600 * number},{rate}" for number, rate in enumerate([0.0, 2.0, 0.0, 4.0, *[3.0] * 140])]
    (tmp_path / "servegen_model_rates.csv").write_text("\n".join(["model,window_start_s,rate_rps", *rows]))
    (found,) = rates(tmp_path).values()
    assert np.isclose(found.mean(), 1.0)
    assert found[0] == found[1] == found[2] == found[3] / 2
