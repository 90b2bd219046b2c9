"""The bench of the search for a placement."""

from __future__ import annotations

import argparse

import msgspec
import numpy as np
import pytest

from bench.placement import day
from bench.placement.day import (
    INTERVALS_S,
    MODELS,
    SEARCH_S,
    TURNS,
    WHOLE,
    Asked,
    Day,
    Played,
    Way,
    play,
    popularity,
    rates,
    settings,
    timeline,
)
from bench.placement.experiments import every_plan
from bench.placement.floors import reachable_share, worst_share
from bench.placement.forecasts import DAY, FORECASTS, errors
from bench.placement.orders import compare
from bench.placement.problems import draw, draw_models
from bench.placement.window import Window, serve, window
from shared.placement.estimator import Estimator
from shared.placement.plan import ModelPrediction, Prediction, plan_of
from shared.placement.problem import Group, Proposal
from shared.placement.rehearsal import Episode, rehearse
from shared.placement.replacement import ReplacementSettings
from shared.placement.search import search
from tests.shared.placement import small


def test_all_plans_of_a_small_node_can_be_estimated():
    rng = np.random.default_rng(3)
    problem = draw(4, draw_models(2, rng, names=("llama-2-7b", "opt-6.7b")), 4.0, 20.0, rng)
    plans = [plan_of(slots).groups for slots in every_plan(problem)]
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


def test_every_day_of_the_table_has_its_rates(tmp_path):
    both = [f"m,{600 * number},{1 + (number >= 144)}" for number in range(288)]
    rising = [f"once,{600 * number},{1 + number}" for number in range(144)]
    (tmp_path / "servegen_model_rates.csv").write_text("\n".join(["model,window_start_s,rate_rps", *both, *rising]))
    first, second = rates(tmp_path), rates(tmp_path, 1)
    assert np.allclose(first["m"], 1.0) and np.allclose(second["m"], 1.0)
    # Of one that was recorded on the first day only, that is taken.
    assert np.array_equal(first["once"], second["once"])


def test_turns_keep_each_models_share_until_the_next():
    factors = popularity(TURNS, 21)
    assert factors.shape == (3, 144) and np.allclose(factors.mean(0), 1.0)
    assert all(sorted(column, reverse=True) == list(TURNS.shares) for column in factors.T.tolist())
    turns = np.flatnonzero((np.diff(factors, axis=1) != 0).any(0))
    assert 1 <= len(turns) <= TURNS.num_turns
    assert np.array_equal(popularity(TURNS, 21), factors) and (popularity(WHOLE, 21) == 1.0).all()
    hourly = settings("1 hour", TURNS.speed)
    assert hourly.least_s == hourly.most_s == 600.0 and settings("adaptive", TURNS.speed).most_s == 3600.0


def test_forecasts_know_the_traffic_that_they_assume():
    steady, at = np.full(3 * DAY, 2.0), np.arange(3 * DAY)
    assert all(errors(steady, forecast, 6).max() < 1e-9 for forecast in FORECASTS.values())
    daily = 2.0 + np.sin(2 * np.pi * at / DAY)
    found = {name: errors(daily, forecast, 18).mean() for name, forecast in FORECASTS.items()}
    assert sorted(found, key=found.__getitem__)[2] == "daily change" and max(found["yesterday"], found["scaled"]) < 1e-9
    # Of a jump that lasts, the last window alone knows nothing that was before.
    jump = np.where(at < 2 * DAY, 1.0, 2.0)
    assert errors(jump, FORECASTS["last window"], 1).sum() == min(
        errors(jump, one, 1).sum() for one in FORECASTS.values()
    )


def test_who_serves_when_on_a_day():
    one, two, pair = (Group("n", devices, ("a",)) for devices in ((0,), (1,), (0, 1)))
    stays = Group("n", (2,), ("b",))
    episodes = [Episode(two, 0.0, 5.0), Episode(one, 0.0, 10.0), Episode(stays), Episode(pair, 30.0)]
    ways = [Way(100.0, 30.0, episodes, plan_of([pair, stays]))]
    first = plan_of([one, two, stays])
    assert set(timeline(first, ways)) == {
        Episode(one, 0.0, 110.0), Episode(two, 0.0, 105.0), Episode(stays, 0.0), Episode(pair, 130.0),
    }  # fmt: skip
    assert set(timeline(first, ways, is_free=True)) == {
        Episode(one, 0.0, 100.0), Episode(two, 0.0, 100.0), Episode(stays, 0.0), Episode(pair, 100.0),
    }  # fmt: skip
    assert set(timeline(first, [])) == {Episode(group) for group in first.groups}


def test_the_next_interval_of_a_day_begins_when_a_change_is_over(monkeypatch):
    given = small.problem(
        [small.model("a"), small.model("b")], [small.node()], (1, 1), interval_s=400.0, execution_s={"a": 1.0, "b": 1.0}
    )  # fmt: skip
    before, after = (
        plan_of([Group("n0", (number,), models) for number, models in enumerate(own)])
        for own in ((("a",), ("a",), ("b",)), (("a",), ("b",), ("b",)))
    )
    told = Prediction(attainment=1.0, normalised_latency=1.0, models={})
    # What breaks a limit is changed without a trial.
    monkeypatch.setattr(day, "search", lambda asked: Proposal(plan=after, prediction=told, incumbent=None, rejected=()))
    played = Day(given, before, told, ReplacementSettings(initial_s=60.0, least_s=60.0, most_s=60.0))
    began_s, begin = [], played.core.begin

    def noted(now_s, measured):
        began_s.append(now_s)
        begin(now_s, measured)

    monkeypatch.setattr(played.core, "begin", noted)
    played.play()
    change_s = rehearse(given, before, after).seconds
    assert change_s > 20.0 and played.num_changes == 1
    # A fixed interval, from the end of one search to the next; the first is followed by the change.
    assert began_s[:3] == pytest.approx([60.0, 120.0 + SEARCH_S + change_s, 180.0 + 2 * SEARCH_S + change_s])
    assert [since_s for since_s, _ in played.plans] == pytest.approx([0.0, 60.0 + SEARCH_S + change_s])


def test_a_row_that_was_kept_is_not_made_again(tmp_path):
    made = Played({"interval": "none"}, 0.9, 1.5, [(0.0, plan_of([Group("n", (0,), ("a",))]))], [0.9, 0.8])
    (tmp_path / "day3-seed2-4-none.json").write_bytes(msgspec.json.encode(made))
    assert play("none", Asked(2, 4.0, 3), tmp_path) == made


def test_a_window_of_a_day_is_told_in_hours():
    assert window("10:00-11:30") == window("10-11.5") == Window(10.0, 11.5)
    assert str(Window(9.75, 11.5)) == "09:45-11:30"
    for text in ("10", "10-9", "23-25", "ten-11"):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            window(text)


@pytest.fixture
def light(tmp_path):
    """A day of little traffic."""
    rows = [f"{name},{600 * number},1" for name in MODELS for number in range(144)]
    (tmp_path / "servegen_model_rates.csv").write_text("\n".join(["model,window_start_s,rate_rps", *rows]))
    lengths = "num_prefill_tokens,num_decode_tokens\n" + "".join(f"{200 + n},{20 + n}\n" for n in range(20))
    for _, name in MODELS.values():
        (tmp_path / name).write_text(lengths)
    return Asked(load=0.03, folder=tmp_path)


@pytest.mark.long
def test_a_window_in_several_orders(light):
    table = compare(light, Window(10.0, 10.05), 1, ["doubling_budget", "fcfs"])
    assert [row["order"] for row in table.rows] == ["doubling_budget", "fcfs"]
    assert all(row["attainment"] == "1.0000" and row["requests"] > 5 for row in table.rows)
    assert [target.value for target in table.targets[:2]] == pytest.approx([1.0, 1.0], rel=0.1)


@pytest.mark.long
def test_every_request_of_a_window_is_served_step_by_step(light):
    served = serve("10 minutes", light, Window(10.0, 10.25))
    assert served.row["requests"] > 50 and served.row["without an answer"] == 0
    # One interval of ten minutes ended, and of so light a load nothing has to change.
    assert (served.row["searches"], served.changes) == (1, [])
    assert served.attainment == 1.0 and served.course == [1.0, 1.0]


def test_the_worst_service_is_told_over_the_mean_and_few_requests_say_nothing():
    def of(num: int, attainment: float) -> ModelPrediction:
        return ModelPrediction(
            num_requests=num, attainment=attainment, normalised_latency=1.0, mean_latency_s=1.0, p99_latency_s=1.0
        )

    models = {"busy": of(90, 0.9), "rare": of(9, 0.45), "once": of(1, 0.0)}
    assert worst_share(Prediction(attainment=0.9, normalised_latency=1.0, models=models)) == pytest.approx(0.5)


def test_no_plan_does_more_for_the_worst_model_than_can_be_reached():
    rng = np.random.default_rng(5)
    problem = draw(3, draw_models(2, rng, names=("llama-2-7b", "opt-6.7b")), 20.0, 20.0, rng, exponent=2.5)
    reachable = reachable_share(problem)
    assert reachable is not None
    assert 0.0 < worst_share(search(problem).prediction) <= reachable + 1e-9
