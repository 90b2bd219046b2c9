"""The search for a plan."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.placement.allocation import Algorithm1
from shared.placement.choosing import LATENCY_GRAIN
from shared.placement.enumeration import all_plans
from shared.placement.memory import Memory
from shared.placement.plan import (
    ATTAINMENT_GRAIN,
    FLOOR_SHARE,
    FLOOR_WEIGHT,
    MOST_FLOOR_COST,
    is_affordable,
    plan_of,
    told_left_behind,
    unfairness,
)
from shared.placement.problem import Group, Plan, Prediction, Problem
from shared.placement.search import MAX_ENUMERATED, Asked, Searcher, search
from tests.shared.placement.small import model, node, problem


def check(found: Plan, asked: Problem) -> None:
    """It is a plan for the problem."""
    nodes, memory = {each.node_id: each for each in asked.nodes}, Memory(asked)
    devices = [(group.node_id, device) for group in found.groups for device in group.devices]
    assert len(devices) == len(set(devices))
    assert list(found.groups) == sorted(found.groups)
    for group in found.groups:
        assert group.models
        assert list(group.models) == sorted(set(group.models))
        assert group.devices == tuple(range(group.devices[0], group.devices[0] + group.num_ranks))
        assert not memory.why_not(group.models, nodes[group.node_id], group.num_ranks)
        if asked.max_models_per_group:
            assert len(group.models) <= asked.max_models_per_group


def counts_of(plan: Plan) -> Counter[str]:
    return Counter(name for group in plan.groups for name in group.models)


SIZES = st.sampled_from([0.3, 1.0, 2.0, 5.0, 12.0, 30.0])


@st.composite
def problems(draw):
    sizes = draw(st.lists(SIZES, min_size=1, max_size=4))
    models = [
        model(f"m{number}", size, replicas=draw(st.sampled_from([None, None, 1, 2])))
        for number, size in enumerate(sizes)
    ]
    nodes = [
        node(f"n{number}", draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([24, 72])))
        for number in range(draw(st.integers(1, 2)))
    ]
    rates = [draw(st.sampled_from([0.0, 0.3, 3.0])) for _ in models]
    limit = draw(st.sampled_from([0, 0, 2]))
    return problem(models, nodes, rates, interval_s=10.0, seed=draw(st.integers(0, 99)), max_models_per_group=limit)


@pytest.fixture(params=[0, MAX_ENUMERATED], ids=["searched", "enumerated"], scope="module")
def most_enumerated(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shared.placement.search.MAX_ENUMERATED", request.param)
        yield


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(asked=problems())
def test_a_plan_holds_every_model_or_says_why_and_is_the_same_each_time(most_enumerated, asked):
    found = search(asked)
    check(found.plan, asked)
    counts = counts_of(found.plan)
    for each in asked.models:
        wanted = each.replicas or 1
        assert counts[each.name] >= wanted or found.unplaced[each.name]
        assert each.replicas is None or counts[each.name] <= each.replicas
    assert search(asked) == found
    again = search(msgspec.structs.replace(asked, incumbent=found.plan))
    if not found.plan.groups:
        return
    assert again.incumbent is not None
    assert again.prediction.attainment >= again.incumbent.attainment - ATTAINMENT_GRAIN
    if again.prediction.attainment <= again.incumbent.attainment:
        assert again.prediction.normalised_latency <= again.incumbent.normalised_latency * (1 + LATENCY_GRAIN)


@pytest.mark.parametrize(
    ("rates", "seed"),
    [
        ((12.0, 0.3, 12.0), 1),
        pytest.param((6.0, 1.0, 2.0, 0.5), 0, marks=pytest.mark.long),
        pytest.param((12.0, 0.3, 12.0, 0.1), 1, marks=pytest.mark.long),
    ],
    ids=["three", "four", "four-uneven"],
)
def test_it_is_as_good_as_the_best_of_all_plans(monkeypatch, rates, seed):
    monkeypatch.setattr("shared.placement.search.MAX_ENUMERATED", 0)
    models = [model("a"), model("b", 2.0), model("c", 0.5), model("d", 1.5)][: len(rates)]
    asked = problem(models, [node(num_devices=4)], rates, seed=seed)
    searcher = Searcher(asked)
    limits = {each.name: each.replicas for each in models}
    plans = [plan_of(slots).groups for slots in all_plans(asked.nodes, limits, searcher.space.fits, 1 << 14)]
    assert len(plans) > 400
    outcomes = searcher.estimator.outcomes(plans)
    most = max(one.attainment for one in outcomes)
    best = max(
        searcher.space.key(plan, one)
        for plan, one in zip(plans, outcomes, strict=True)
        if is_affordable(one.attainment, most)
    )
    found = search(asked).prediction
    served = round((found.attainment - found.unfairness) / ATTAINMENT_GRAIN)
    assert served >= best[1] - 1
    assert found.normalised_latency <= -best[2] * (1 + LATENCY_GRAIN) or served > best[1]


@pytest.mark.parametrize("seed", [2, 3])
def test_rare_models_are_not_sacrificed_for_the_total(seed):
    """The plan that serves most in total leaves both rare models at less than 15 %."""
    models = [model("busy"), model("rare", 0.5), model("third", 0.7)]
    found = search(problem(models, [node(num_devices=4)], (26.0, 0.5, 0.3), seed=seed))
    worst = min(each.attainment for each in found.prediction.models.values())
    assert worst >= FLOOR_SHARE * found.prediction.attainment
    assert not found.prediction.left_behind
    assert 0.0 < found.floor_cost <= MOST_FLOOR_COST
    reasons = [each.reason for each in found.rejected if each.prediction and each.prediction.left_behind]
    assert any("would have" in reason for reason in reasons), "it says who would have paid for more in total"


def test_a_model_is_left_behind_rather_than_all_others_and_that_is_told():
    models = [model("busy"), model("rare", 0.5)]
    found = search(problem(models, [node(num_devices=2)], (40.0, 0.5), seed=1))
    assert found.prediction.left_behind == ["rare"]
    assert told_left_behind(found.prediction).startswith("rare (")


def test_the_model_with_more_requests_gets_more_groups():
    asked = problem([model("busy"), model("calm")], [node(num_devices=4)], [40.0, 1.0], max_models_per_group=1)
    ((found,),) = Searcher(asked).do([Asked(1, 1)])
    assert Counter(group.models for group in found.slots) == {("busy",): 3, ("calm",): 1}


def test_two_groups_are_joined_for_a_model_that_does_not_fit_one():
    asked = problem([model("small"), model("large", 8.0)], [node(num_devices=4)], [2.0, 0.5])
    searcher = Searcher(asked)
    cut = Algorithm1(searcher.space, searcher.estimator).cut(1)
    assert [group.num_ranks for group in cut] == [1, 1, 2]
    assert any("large" in group.models and group.num_ranks == 2 for group in search(asked).plan.groups)


def test_a_model_that_fits_nowhere_is_explained_and_the_others_are_placed():
    asked = problem([model("small"), model("giant", 100.0), model("odd", costs={})], [node()], [1.0, 1.0, 1.0])
    found = search(asked)
    assert found.unplaced["giant"].startswith("memory_bytes")
    assert found.unplaced["odd"].startswith("costs")
    assert set(counts_of(found.plan)) == {"small"}
    assert found.prediction.models["giant"].attainment == 0.0


def test_nothing_to_place_and_nowhere_to_place_it():
    assert search(problem([], [node()], [])).plan == Plan(())
    nowhere = search(problem([model("a")], [], [1.0]))
    assert nowhere.plan == Plan(())
    assert nowhere.unplaced["a"]


def test_a_model_goes_to_the_kind_of_device_that_it_runs_on():
    here = node("n0", 2)
    there = msgspec.structs.replace(node("n1", 2), kind="other")
    other = model("b")
    other = msgspec.structs.replace(other, costs={("other", p): cost for (_, p), cost in other.costs.items()})
    found = search(problem([model("a"), other], [here, there], [2.0, 2.0])).plan
    assert {(group.node_id, name) for group in found.groups for name in group.models} == {("n0", "a"), ("n1", "b")}


def test_what_is_as_good_stays_where_it_is():
    models = [model("a"), model("b")]
    asked = problem(models, [node(num_devices=2)], [4.0, 4.0], max_models_per_group=1)
    mirrored = Plan((Group("n0", (0,), ("b",)), Group("n0", (1,), ("a",))))
    found = search(msgspec.structs.replace(asked, incumbent=mirrored))
    assert found.plan == mirrored
    assert found.incumbent == found.prediction


def test_the_simulation_has_the_last_word_and_is_asked_of_few():
    asked = problem([model("a"), model("b", 2.0)], [node()], [8.0, 2.0])
    told = []

    def evaluate(of: Problem, plan: Plan) -> Prediction:
        told.append(plan)
        return Prediction(attainment=len(told) / 10, normalised_latency=1.0, models={})

    found = search(asked, evaluate=evaluate)
    assert 1 < len(told) <= 5
    assert found.plan == told[-1]
    assert found.prediction.attainment == len(told) / 10
    simulated = [each for each in found.rejected if each.prediction is not None]
    assert len(simulated) == len(told) - 1
    assert all("attainment" in each.reason for each in simulated)
    assert [each.prediction.attainment for each in simulated] == sorted(
        (each.prediction.attainment for each in simulated), reverse=True
    )


def test_where_not_all_models_fit_beside_each_other_as_many_as_do_are_placed():
    models = [model("a", 4.0), model("b", 4.0), model("c", 0.5)]
    found = search(problem(models, [node(num_devices=1)], [1.0, 2.0, 1.0]))
    assert len(counts_of(found.plan)) == 2
    (left,) = found.unplaced
    assert left in "ab"
    assert found.unplaced[left] == f"no group has memory for {left!r} beside the other models"


def test_where_the_limit_of_a_group_leaves_models_out_it_is_named():
    models = [model("a", 0.5), model("b", 0.5), model("c", 0.5)]
    found = search(problem(models, [node(num_devices=2)], [1.0, 2.0, 1.0], max_models_per_group=1))
    assert len(counts_of(found.plan)) == 2
    ((left, reason),) = found.unplaced.items()
    assert reason == f"no group may hold {left!r} beside the other models (max_models_per_group: 1)"


def test_a_copy_that_nobody_asks_for_stays_where_it_is():
    """To unload it takes no time, and nothing is gained by it."""
    nodes = [node(f"n{number}", 1) for number in range(4)]
    asked = problem([model("used"), model("idle")], nodes, [0.5, 0.0], interval_s=10.0)
    everywhere = Plan(tuple(Group(each.node_id, (0,), ("idle", "used")) for each in nodes))
    assert search(msgspec.structs.replace(asked, incumbent=everywhere)).plan == everywhere


def test_an_incumbent_on_nodes_that_are_gone_is_left():
    asked = problem([model("a")], [node("n1", 2)], [2.0])
    gone = Plan((Group("n0", (0,), ("a",)), Group("n1", (0,), ("a", "was"))))
    found = search(msgspec.structs.replace(asked, incumbent=gone))
    check(found.plan, asked)
    assert found.incumbent is not None


@given(
    attainment=st.floats(0.01, 1.0),
    of_services=st.lists(st.floats(0.0, 1.0), max_size=8),
    place=st.integers(0, 7),
    more=st.floats(0.0, 1.0),
)
def test_to_leave_models_behind_costs_a_bounded_share_and_never_more_when_one_is_helped(
    attainment, of_services, place, more
):
    cost = unfairness(attainment, of_services)
    assert 0.0 <= cost <= FLOOR_WEIGHT * attainment
    assert (cost == 0.0) == all(one >= FLOOR_SHARE * attainment for one in of_services) or cost < 1e-9
    if of_services:
        helped = list(of_services)
        helped[place % len(helped)] = max(helped[place % len(helped)], more)
        assert unfairness(attainment, helped) <= cost + 1e-12


def test_a_model_at_nothing_is_worth_all_that_may_be_given_up_and_no_more_is():
    assert unfairness(0.9, [0.0, 1.0]) > MOST_FLOOR_COST * 0.9
    assert unfairness(0.9, [0.6 * 0.9, 1.0]) > MOST_FLOOR_COST * 0.9, "one that has six tenths of the mean"
    assert is_affordable(0.9 * (1 - MOST_FLOOR_COST), 0.9) and not is_affordable(
        0.9 * (1 - MOST_FLOOR_COST) - 1e-6, 0.9
    )


def test_rounding_errors_below_nothing_are_nothing():
    assert unfairness(0.0, [-1e-17, 0.0]) == 0.0
    assert unfairness(0.5, [-1e-17, 0.9]) == unfairness(0.5, [0.0, 0.9])
