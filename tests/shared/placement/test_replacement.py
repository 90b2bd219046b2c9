"""Decisions of when to search, and of what is worth a change."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.placement.plan import Horizon, Trial
from shared.placement.problem import Group, ModelPrediction, Plan, Prediction, Problem, Proposal, traffic
from shared.placement.rehearsal import change_s
from shared.placement.replacement import Replacement, ReplacementSettings, deviation, loss, next_interval_s
from tests.shared.placement.test_memory import model, node

SETTINGS = ReplacementSettings(initial_s=100, least_s=50, most_s=200)
GIB = 1 << 30


def prediction(**models: tuple[int, float, float]) -> Prediction:
    """By model: requests, attainment, normalised latency."""
    told = {
        name: ModelPrediction(
            num_requests=num, attainment=attainment, normalised_latency=latency, mean_latency_s=1, p99_latency_s=1
        )
        for name, (num, attainment, latency) in models.items()
    }
    total = sum(num for num, _, _ in models.values())
    mean = [sum(row[0] * row[column] for row in models.values()) / max(1, total) for column in (1, 2)]
    return Prediction(attainment=mean[0] if total else 1.0, normalised_latency=mean[1], models=told)


@pytest.mark.parametrize(
    ("predicted", "measured", "expected"),
    [
        (prediction(a=(50, 0.9, 2)), prediction(a=(80, 0.9, 2)), 0.0),
        (prediction(a=(50, 0.9, 2)), prediction(a=(50, 0.9, 2.5)), 0.25),
        (prediction(a=(50, 0.8, 2)), prediction(a=(50, 0.4, 2)), 0.5),
        # Over all requests, as many as each model had.
        (prediction(a=(50, 1, 2), b=(50, 1, 4)), prediction(a=(50, 1, 2), b=(50, 1, 4.6)), 0.1),
        # A model with requests on one side alone: its share of them.
        (prediction(a=(75, 1, 2), b=(25, 0.1, 9)), prediction(a=(75, 1, 2)), 0.25),
        (prediction(a=(75, 1, 2)), prediction(a=(60, 1, 2), b=(40, 1, 2)), 0.4),
        (prediction(a=(75, 1, 2)), prediction(b=(75, 1, 2)), 1.0),
        (prediction(a=(75, 0, 2)), prediction(a=(75, 0, 2)), 0.0),
        (prediction(a=(75, 0, 2)), prediction(a=(75, 0.5, 2)), math.inf),
        (prediction(), prediction(), 0.0),
    ],
)
def test_what_is_compared(predicted: Prediction, measured: Prediction, expected: float) -> None:
    assert deviation(predicted, measured) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("interval_s", "latency", "expected_s"),
    [(100, 2.1, 110), (100, 2.19, 110), (100, 2.3, 90), (100, 1.7, 90), (195, 2, 200), (52, 9, 50)],
)
def test_equation_8_within_bounds(interval_s: float, latency: float, expected_s: float) -> None:
    found = next_interval_s(interval_s, prediction(a=(50, 1, 2)), prediction(a=(50, 1, latency)), SETTINGS)
    assert found == pytest.approx(expected_s)


def test_few_requests_say_nothing() -> None:
    assert next_interval_s(100, prediction(a=(19, 1, 2)), prediction(a=(19, 1, 9)), SETTINGS) == 100
    assert next_interval_s(100, prediction(a=(20, 1, 2)), prediction(a=(2, 1, 9)), SETTINGS) == 90


@given(
    latencies=st.lists(st.floats(0, 10), max_size=60),
    bounds=st.tuples(st.floats(1, 100), st.floats(0, 100)),
    initial_s=st.floats(1, 1000),
)
def test_the_interval_stays_within_its_bounds(
    latencies: list[float], bounds: tuple[float, float], initial_s: float
) -> None:
    settings = ReplacementSettings(initial_s=initial_s, least_s=bounds[0], most_s=sum(bounds))
    core, now_s = Replacement(settings, 0.0), 0.0
    for latency in latencies:
        assert settings.least_s <= core.interval_s <= settings.most_s
        assert not core.due(math.nextafter(core.next_s, 0.0))
        now_s = core.next_s
        assert core.due(now_s)
        core.begin(now_s, prediction(a=(50, 1, latency)))
        core.settled(now_s, prediction(a=(50, 1, 2.0)))


@pytest.mark.parametrize(
    ("predicted", "measured", "is_lost"),
    [
        (prediction(a=(500, 0.99, 2)), prediction(a=(100, 0.85, 2)), True),
        # As much as a change has to gain, if that is more than chance.
        (prediction(a=(500, 0.99, 2)), prediction(a=(10_000, 0.978, 2)), True),
        (prediction(a=(500, 0.99, 2)), prediction(a=(10_000, 0.982, 9)), False),
        (prediction(a=(500, 0.99, 2)), prediction(a=(100, 0.96, 9)), False),
        (prediction(a=(500, 1.0, 2)), prediction(a=(100, 0.97, 9)), False),
        (prediction(a=(500, 0.3, 2)), prediction(a=(100, 0.9, 2)), False),
        # Chance: two standard errors of so few are 0.22.
        (prediction(a=(500, 0.5, 2)), prediction(a=(20, 0.3, 2)), False),
        (prediction(a=(500, 0.99, 2)), prediction(a=(19, 0.0, 2)), False),
        # Of those that were predicted.
        (prediction(a=(500, 0.99, 2)), prediction(b=(100, 0.0, 2)), False),
        (prediction(), prediction(), False),
    ],
)
def test_what_ends_an_interval(predicted: Prediction, measured: Prediction, is_lost: bool) -> None:
    assert bool(loss(predicted, measured, SETTINGS)) is is_lost


def test_a_plan_that_fails_ends_its_interval() -> None:
    core = Replacement(SETTINGS, 0.0)
    core.settled(10.0, prediction(a=(500, 1, 2)))
    assert core.look_s == 60.0
    core.watch(60.0, prediction(a=(100, 0.97, 2)))
    assert not core.due(60.0) and core.next_s == 110.0
    # Nothing is left to look at before the interval is over.
    assert core.look_s == math.inf
    core = Replacement(msgspec.structs.replace(SETTINGS, initial_s=180.0), 0.0)
    core.settled(10.0, prediction(a=(500, 1, 2)))
    core.watch(60.0, prediction(a=(100, 0.97, 2)))
    assert core.look_s == 110.0 and not core.has_failed
    core.watch(110.0, prediction(a=(100, 0.5, 2)))
    assert "50.0%" in core.due(110.0)
    # The next search goes by the traffic that it fails under, and the next interval is short too.
    assert core.window(110.0) == (60.0, 110.0)
    # What its plan is tried on is as long as for the first interval.
    assert core.evidence(110.0) == (110.0 - 16 * 180.0, 110.0)
    core.begin(110.0, prediction(a=(200, 0.75, 2)))
    assert core.interval_s == 50 and core.state.deviation == 0.25 and not core.due(110.0)
    # Of what a search under way finds nothing is predicted yet.
    core.watch(170.0, prediction(a=(100, 0.0, 2)))
    assert not core.due(150.0)
    core.settled(170.0, prediction(a=(500, 0.5, 2)))
    assert core.next_s == 220.0


@pytest.mark.parametrize("interval_s", [100.0, math.inf])
def test_a_fixed_interval_is_not_looked_into(interval_s: float) -> None:
    core = Replacement(ReplacementSettings(initial_s=interval_s, least_s=interval_s, most_s=interval_s), 0.0)
    core.settled(0.0, prediction(a=(500, 1, 2)))
    assert core.look_s == math.inf


def test_a_fixed_interval_stays() -> None:
    core = Replacement(ReplacementSettings(initial_s=100, least_s=100, most_s=100), 0.0)
    core.settled(0.0, prediction(a=(50, 1, 2)))
    core.begin(100.0, prediction(a=(50, 1, 9)))
    assert core.interval_s == 100 and core.state.deviation == pytest.approx(3.5)
    never = Replacement(ReplacementSettings(initial_s=math.inf, most_s=math.inf), 0.0)
    assert not never.due(1e12)


def test_what_is_asked_for_comes_at_once_and_ends_no_interval() -> None:
    core = Replacement(SETTINGS, 0.0)
    core.settled(10.0, prediction(a=(50, 1, 2)))
    assert core.due(11.0) == ""
    core.ask("model 'b' was added")
    core.ask("later reasons are not told")
    assert core.due(11.0) == "model 'b' was added"
    assert core.window(11.0) == (-89.0, 11.0)
    core.begin(11.0, prediction(a=(50, 1, 9)))
    assert core.interval_s == 100 and core.due(12.0) == ""
    core.settled(15.0, prediction(a=(50, 1, 2)))
    assert core.next_s == 115.0 and core.due(115.0) == "the interval is over"


def test_what_is_stored_is_taken_up() -> None:
    core = Replacement(SETTINGS, 0.0)
    core.settled(10.0, prediction(a=(50, 1, 2)))
    stored = msgspec.json.encode(core.state)
    again = Replacement(SETTINGS, 50.0, msgspec.json.decode(stored, type=type(core.state)))
    again.begin(110.0, prediction(a=(50, 1, 3)))
    assert again.interval_s == 90


# ------------------------------------------------------------------------------------------------ worth a change

ONE, TWO = Group("n", (0,), ("a",)), Group("n", (0, 1), ("a",))


def problem(incumbent: Plan | None = None) -> Problem:
    return Problem(nodes=(node(),), models=(model("a"), model("b")), traffic=traffic([], 100.0), incumbent=incumbent)


def proposal(plan: Plan, before: tuple[float, float], after: tuple[float, float]) -> Proposal:
    return Proposal(
        plan=plan, prediction=prediction(a=(100, *after)), incumbent=prediction(a=(100, *before)), rejected=()
    )


def test_what_a_change_takes() -> None:
    before, after = Plan((ONE,)), Plan((TWO,))
    assert change_s(before, before, problem()) == 0
    load_s = 14 * GIB / 2e9
    assert change_s(before, after, problem()) == pytest.approx(load_s + 2 * 15)
    both = Plan((Group("n", (0,), ("a", "b")),))
    assert change_s(before, both, problem()) == pytest.approx(load_s)
    assert change_s(both, before, problem()) == 0
    shared = msgspec.structs.replace(problem(), models=(model("a"), model("b", weights="a")))
    assert change_s(before, both, shared) == 0


@pytest.mark.parametrize(
    ("before", "after", "is_worth"),
    [
        ((0.5, 9), (0.9, 2), True),
        ((0.90, 2), (0.905, 2), False),
        ((1.0, 2.0), (1.0, 1.95), False),
        # The change takes 9 % of the fleet's time in the next interval, and as many requests.
        ((1.0, 3.0), (1.0, 2.0), False),
        ((1.0, 3.0), (0.995, 2.0), False),
        ((0.80, 3.0), (0.88, 2.9), False),
    ],
)
def test_what_is_worth_a_change(before: tuple[float, float], after: tuple[float, float], is_worth: bool) -> None:
    core = Replacement(SETTINGS, 0.0)
    verdict = core.judge(proposal(Plan((TWO,)), before, after), problem(Plan((ONE,))))
    assert verdict.is_worth is is_worth, verdict
    assert verdict.cause == ("pays" if is_worth else verdict.cause) and (verdict.cause != "pays") is not is_worth


def test_what_few_requests_show_may_be_chance() -> None:
    core = Replacement(msgspec.structs.replace(SETTINGS, initial_s=10_000.0, most_s=10_000.0), 0.0)
    for num, is_worth in ((20, False), (2_000, True)):
        for before, after in (((0.90, 2.0), (0.93, 2.0)), ((1.0, 2.0), (1.0, 1.7))):
            found = Proposal(
                plan=Plan((TWO,)),
                prediction=prediction(a=(num, *after)),
                incumbent=prediction(a=(num, *before)),
                rejected=(),
            )
            verdict = core.judge(found, problem(Plan((ONE,))))
            assert (verdict.is_worth, verdict.cause) == (is_worth, "pays" if is_worth else "chance"), (num, before)


def test_a_plan_that_places_more_is_worth_it_and_one_that_places_less_is_not() -> None:
    core = Replacement(SETTINGS, 0.0)
    both = Plan((Group("n", (0,), ("a", "b")),))
    assert core.judge(proposal(both, (1, 1), (0, 9)), problem(Plan((ONE,)))).is_worth
    assert not core.judge(proposal(Plan((ONE,)), (0, 9), (1, 1)), problem(both)).is_worth
    assert not core.judge(proposal(both, (0, 9), (1, 1)), problem(both)).is_worth
    assert core.judge(proposal(both, (0, 9), (1, 1)), problem()).is_worth
    # Nor where the plan that runs breaks a limit, or another model would be placed.
    broken = msgspec.structs.replace(proposal(Plan(()), (0, 9), (1, 1)), incumbent=None)
    other = proposal(Plan((Group("n", (0,), ("b",)),)), (0, 9), (1, 1))
    for fewer in (broken, other):
        verdict = core.judge(fewer, problem(Plan((ONE,))))
        assert (verdict.is_worth, verdict.cause) == (False, "places_fewer")


def horizon(
    seconds: float,
    stay: tuple[float, float],
    change: tuple[float, float],
    free: tuple[float, float],
    error: float = 0.001,
) -> Horizon:
    return Horizon(
        seconds=seconds, num_requests=1000, stay_attainment=stay[0], change_attainment=change[0], free_attainment=free[0],
        attainment_error=error, stay_latency=stay[1], change_latency=change[1], free_latency=free[1],
        latency_error=10 * error,
    )  # fmt: skip


def tried(*horizons: Horizon, busier_gain: float = 0.1) -> Proposal:
    trial = Trial(
        change_s=40, lost_device_s=100, moved_bytes=10**9, interrupted=[], horizons=list(horizons), busier_gain=busier_gain
    )  # fmt: skip
    return msgspec.structs.replace(proposal(Plan((TWO,)), (0.8, 3.0), (0.9, 2.0)), trial=trial)


STAY, FREE = (0.8, 3.0), (0.9, 2.0)


@pytest.mark.parametrize(
    ("horizons", "cause"),
    [
        ([], "takes_too_long"),
        ([horizon(60, STAY, (0.7, 4.0), FREE)], "cost"),
        ([horizon(60, STAY, (0.7, 4.0), FREE), horizon(120, STAY, (0.85, 2.5), FREE)], "cost"),
        ([horizon(60, STAY, (0.75, 4.0), FREE), *[horizon(120, STAY, (0.85, 2.5), FREE)] * 2], "pays"),
        ([horizon(60, STAY, (0.7, 4.0), (0.805, 2.9))], "small_gain"),
        ([horizon(60, STAY, (0.85, 2.5), FREE, error=0.03)], "chance"),
        # As much attained, sooner.
        ([horizon(60, (1.0, 3.0), (1.0, 2.5), (1.0, 2.4))] * 2, "pays"),
        # What it was searched with is not enough, nor a gain that longer times outweigh.
        ([horizon(60, STAY, (0.85, 2.5), FREE)], "chance"),
        ([horizon(60, STAY, (0.85, 2.5), FREE), horizon(120, STAY, (0.64, 3.1), (0.65, 3.1))], "small_gain"),
        ([horizon(60, STAY, (0.85, 2.5), FREE), horizon(120, STAY, (0.78, 3.1), (0.79, 3.1))], "pays"),
        ([horizon(60, (1.0, 3.0), (0.99, 2.5), (1.0, 2.4))], "cost"),
    ],
)
def test_a_change_has_to_pay_on_the_mean_of_its_horizons(horizons: list[Horizon], cause: str) -> None:
    core = Replacement(SETTINGS, 0.0)
    verdict = core.judge(tried(*horizons), problem(Plan((ONE,))))
    assert (verdict.cause, verdict.is_worth) == (cause, cause == "pays"), verdict
    assert core.window_s == 100 and core.state.change_s == 40
    assert msgspec.json.decode(msgspec.json.encode(core.state), type=type(core.state)) == core.state


def test_a_plan_without_room_for_more_requests_is_not_worth_it() -> None:
    sooner = [horizon(60, (0.99, 3.0), (0.99, 2.5), (0.991, 2.4))] * 2
    for horizons, busier_gain, cause in (
        (sooner, -0.2, "fragile"),
        (sooner, 0.0, "pays"),
        # Room alone is no reason.
        ([horizon(60, STAY, STAY, STAY)] * 2, 0.5, "small_gain"),
        # Where much is late already it counts as much as the room.
        ([horizon(60, (0.5, 9.0), (0.8, 3.0), (0.9, 2.0))] * 2, -0.2, "pays"),
        ([horizon(60, (0.5, 9.0), (0.8, 3.0), (0.9, 2.0))] * 2, -0.4, "fragile"),
    ):
        verdict = Replacement(SETTINGS, 0.0).judge(tried(*horizons, busier_gain=busier_gain), problem(Plan((ONE,))))
        assert verdict.cause == cause, verdict


def test_a_plan_that_serves_better_than_predicted_is_not_left_for_what_is_predicted() -> None:
    found = tried(*[horizon(60, STAY, (0.85, 2.5), FREE)] * 2)
    for measured, cause in (
        (prediction(a=(100, 0.95, 1.5)), "serves_better"),
        (prediction(a=(100, 0.7, 4.0)), "pays"),
        (prediction(a=(5, 1.0, 1.0)), "pays"),  # too few to say so
    ):
        assert Replacement(SETTINGS, 0.0).judge(found, problem(Plan((ONE,))), measured).cause == cause


def failed() -> Replacement:
    core = Replacement(msgspec.structs.replace(SETTINGS, initial_s=180.0), 0.0)
    core.settled(0.0, prediction(a=(500, 0.99, 2)))
    core.watch(50.0, prediction(a=(100, 0.8, 4)))
    return core


def test_a_plan_that_failed_is_not_protected_by_chance() -> None:
    """The gain is within its error; the plan that runs was measured to fail what was predicted of it."""
    unsure = tried(*[horizon(60, STAY, (0.85, 2.5), FREE, error=0.03)] * 2)
    core = failed()
    verdict = core.judge(unsure, problem(Plan((ONE,))))
    assert core.has_failed and verdict.cause == "pays" and "worse than was predicted" in verdict.reason
    # What costs more than it gains is not done for that.
    costly = tried(*[horizon(60, STAY, (0.7, 4.0), FREE)] * 2)
    assert core.judge(costly, problem(Plan((ONE,)))).cause == "cost"
    # A plan that fits the search's traffic alone is chance still.
    assert core.judge(tried(horizon(60, STAY, (0.85, 2.5), FREE)), problem(Plan((ONE,)))).cause == "chance"


def test_a_failed_plan_is_protected_again_once_it_serves_as_predicted_or_another_runs() -> None:
    core = failed()
    core.begin(50.0, prediction(a=(100, 0.8, 4)))
    core.kept(60.0, prediction(a=(100, 0.98, 2)), prediction(a=(100, 0.8, 4)))
    # It is expected to serve as badly as it was measured to, so the same failure ends no interval.
    assert core.state.predicted is not None and core.state.predicted.attainment == pytest.approx(0.8)
    core.watch(110.0, prediction(a=(100, 0.8, 4)))
    assert not core.due(109.0) and core.has_failed
    core.begin(110.0, prediction(a=(19, 1.0, 2)))
    assert core.has_failed  # too few to say otherwise
    core.begin(120.0, prediction(a=(100, 0.99, 2)))
    assert not core.has_failed
    core = failed()
    core.settled(60.0, prediction(a=(100, 0.98, 2)))
    assert not core.has_failed


def test_a_fixed_interval_knows_no_failure() -> None:
    core = Replacement(ReplacementSettings(initial_s=100.0, least_s=100.0, most_s=100.0), 0.0)
    core.settled(0.0, prediction(a=(500, 0.99, 2)))
    core.begin(100.0, prediction(a=(500, 0.5, 9)))
    assert not core.has_failed


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0.001, 0.1))
def test_nothing_that_costs_more_than_it_gains_is_done(stay: float, change: float, free: float, error: float) -> None:
    found = tried(*[horizon(60, (stay, 3.0), (change, 3.0), (free, 3.0), error)] * 2)
    verdict = Replacement(SETTINGS, 0.0).judge(found, problem(Plan((ONE,))))
    if verdict.is_worth:
        assert change > stay + 2 * error - 1e-9
    assert verdict.reason


def test_a_search_sees_twice_the_time_that_a_change_takes() -> None:
    core = Replacement(SETTINGS, 0.0)
    slow = tried()
    assert slow.trial is not None
    trial = msgspec.structs.replace(slow.trial, change_s=300.0)
    core.judge(msgspec.structs.replace(slow, trial=trial), problem(Plan((ONE,))))
    assert core.interval_s == 100 and core.window(1000.0) == (400.0, 1000.0)
    assert core.evidence(1000.0)[0] < 400.0
