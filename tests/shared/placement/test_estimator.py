"""The fast estimate of a plan."""

from __future__ import annotations

import itertools
import math
import time

import msgspec
import numpy as np
import pytest

from shared.placement.estimator import Estimator, Order, estimate
from shared.placement.execution import alone_s, execution_s
from shared.placement.problem import Group, Plan, Problem, traffic
from shared.simulation.deployment import Serving, predict
from tests.shared.placement.small import model, node, problem

A, B = model("a"), model("b", 2.0)


def on(*groups: tuple[int, tuple[str, ...]]) -> Plan:
    """Groups of so many devices each, one after the other on a node."""
    found, first = [], 0
    for num_ranks, names in groups:
        found.append(Group("n0", tuple(range(first, first + num_ranks)), names))
        first += num_ranks
    return Plan(tuple(found))


def test_alone_a_request_takes_its_execution_time():
    lone = problem([A], [node()], [0.0])
    lone = msgspec.structs.replace(lone, traffic=traffic([(1.0, "a", 500, 200, True)], 60.0))
    found = estimate(lone, on((1, ("a",))))
    assert found.attainment == 1.0
    assert found.models["a"].mean_latency_s == pytest.approx(execution_s(lone)["a"], rel=0.1)
    assert found.models["a"].mean_ttft_s < 0.1


def test_more_load_is_slower_up_to_saturation_and_far_beyond():
    latencies, attained = [], []
    for rate in (0.5, 4, 12, 40, 150):
        found = estimate(problem([A, B], [node()], [rate, rate / 4]), on((1, ("a", "b")), (1, ("a",))))
        latencies.append(found.normalised_latency)
        attained.append(found.attainment)
    assert latencies == sorted(latencies)
    assert latencies[-1] > 5 * latencies[0]
    assert attained[-1] < 0.5 < attained[0]


def test_more_devices_are_not_slower():
    loaded = problem([A], [node()], [30.0])
    latencies = [estimate(loaded, on(*[(1, ("a",))] * num)).normalised_latency for num in (1, 2, 3, 4)]
    assert latencies == sorted(latencies, reverse=True)


def test_a_burst_is_worse_than_the_same_requests_spread():
    spread = problem([A], [node()], [10.0])
    times = spread.traffic.arrival_s / 10
    burst = msgspec.structs.replace(spread, traffic=spread.traffic._replace(arrival_s=times))
    plan = on((1, ("a",)))
    assert estimate(burst, plan).normalised_latency > 1.5 * estimate(spread, plan).normalised_latency


def test_long_prompts_delay_the_other_model_of_their_group():
    rows = [(0.1 * number, "a", 60, 100, True) for number in range(500)]
    long = [(0.8 * number, "b", 6000, 5, True) for number in range(60)]
    both = msgspec.structs.replace(problem([A, B], [node()], [0, 0]), traffic=traffic(rows + long, 50.0))
    together = estimate(both, on((1, ("a", "b"))))
    apart = estimate(both, on((1, ("a",)), (1, ("b",))))
    assert together.models["a"].mean_ttft_s > 2 * apart.models["a"].mean_ttft_s
    assert together.normalised_latency > 1.5 * apart.normalised_latency


def test_a_backlog_of_one_model_does_not_hold_up_anothers_prompts() -> None:
    both, plan = problem([A, model("c")], [node()], [30.0, 0.5]), on((1, ("a", "c")))
    found = estimate(both, plan).models
    assert found["a"].mean_ttft_s > 10.0 and found["c"].mean_ttft_s < 0.1 * found["a"].mean_ttft_s


def test_models_that_share_equal_groups_end_up_apart_as_dispatch_has_it() -> None:
    both = problem([A, model("c")], [node()], [4.0, 4.0])
    shared = on((1, ("a", "c")), (1, ("a", "c")))
    simulated = predict(both, shared, seed=1)
    assert estimate(both, shared).normalised_latency == pytest.approx(simulated.normalised_latency, rel=0.1), (
        "half as much again where each group has half of either"
    )


def test_the_order_of_groups_and_models_does_not_matter() -> None:
    models, groups = [A, B, model("c")], on((1, ("a", "b")), (1, ("a", "b", "c")), (1, ("a",))).groups
    found = set()
    for ordered in (models, models[::-1]):
        asked = problem(models, [node()], [4.0, 1.0, 2.0])
        asked = msgspec.structs.replace(asked, models=tuple(ordered))
        outcomes = Estimator(asked).outcomes([list(each) for each in itertools.permutations(groups)])
        found |= {(round(one.attainment, 9), round(one.normalised_latency, 9)) for one in outcomes}
    assert len(found) == 1


@pytest.mark.parametrize("order", ["turns", "fcfs"])
def test_what_is_short_is_shared(order: Order) -> None:
    granted = Estimator(problem([A], [node()], [1.0]), order=order)._granted
    wanted = np.array([[1.0, 4.0, 0.0], [1.0, 4.0, 0.0], [2.0, 1.0, 1.0], [3.0, 0.0, 0.0]])
    shares = granted(wanted, np.array([[3.0], [8.0], [0.0], [1.5]]))
    given = [[1.0, 2.0, 0.0], [1.0, 4.0, 0.0], [0.0, 0.0, 0.0], [1.5, 0.0, 0.0]]
    given[0] = given[0] if order == "turns" else [0.6, 2.4, 0.0]
    assert shares * wanted == pytest.approx(np.array(given), abs=1e-9)


def test_near_its_capacity_a_device_has_no_more_time_than_there_is():
    """Two models whose steps, each as often as alone, would take more than all of the time."""
    both, plan = problem([A, model("c")], [node()], [4.5, 4.5]), on((1, ("a", "c")))
    estimated, simulated = estimate(both, plan), predict(both, plan, seed=1)
    assert estimated.attainment < 0.9
    assert estimated.attainment == pytest.approx(simulated.attainment, abs=0.03)
    assert estimated.normalised_latency == pytest.approx(simulated.normalised_latency, rel=0.1)


@pytest.mark.parametrize(
    ("rates", "outputs"),
    [((2.0, 0.2), (50, 600)), pytest.param((4.0, 0.5), (100, 100), marks=pytest.mark.long)],
    ids=["long beside short", "alike"],
)
def test_first_come_first_served_all_models_requests_grow_equally_old(
    rates: tuple[float, float], outputs: tuple[int, int]
) -> None:
    """The engine serves in that order: short requests wait for the long ones of the other model."""
    rng, rows = np.random.default_rng(3), []
    for name, rate, num_output in zip("ab", rates, outputs, strict=True):
        rows += [(float(at_s), name, 100, num_output, True) for at_s in rng.uniform(0, 120, int(120 * rate))]
    both = msgspec.structs.replace(problem([A, B], [node()], [0, 0]), traffic=traffic(rows, 120.0, ["a", "b"]))
    plan = on((1, ("a", "b")))
    estimated, simulated = estimate(both, plan, order="fcfs"), predict(both, plan, Serving(order_policy="fcfs"), seed=1)
    for name in "ab":
        assert estimated.models[name].normalised_latency == pytest.approx(
            simulated.models[name].normalised_latency, rel=0.2
        )
    assert estimated.models["a"].normalised_latency > 1.5 * estimate(both, plan).models["a"].normalised_latency


def test_a_small_kv_pool_makes_requests_wait():
    loaded = problem([A], [node()], [8.0])
    small = msgspec.structs.replace(loaded, nodes=(node(memory_gb=18),))
    plan = on((1, ("a",)))
    assert estimate(small, plan).models["a"].mean_ttft_s > 3 * estimate(loaded, plan).models["a"].mean_ttft_s


def test_requests_without_a_group_and_those_too_long_miss_their_slo():
    both = problem([A, B], [node()], [2.0, 2.0])
    found = estimate(both, on((1, ("a",))))
    assert found.models["b"].attainment == 0.0
    assert found.models["b"].num_requests > 0
    assert found.attainment == pytest.approx(
        found.models["a"].attainment * found.models["a"].num_requests / both.traffic.num_requests
    )
    short = msgspec.structs.replace(both, models=(msgspec.structs.replace(A, max_model_len=10), B))
    assert estimate(short, on((1, ("a",)))).attainment == 0.0


def test_a_model_that_does_not_fit_its_group_is_an_error():
    with pytest.raises(ValueError, match="memory_bytes"):
        estimate(problem([model("a", 8.0)], [node()], [1.0]), on((1, ("a",))))


def test_short_prompts_beside_long_ones_wait_as_long_however_fine_the_bins_are():
    """A long prompt fills a short bin alone: that is no load that it meets itself."""
    rows = [(float(at), "a", 4000 if at % 5 == 0 else 20, 20, True) for at in range(60)]
    asked = Problem(nodes=(node(num_devices=1),), models=(A,), traffic=traffic(rows, 60.0))
    ttft_s = [
        Estimator(asked, num_bins=num_bins).predict(on((1, ("a",)))).models["a"].mean_ttft_s
        for num_bins in (24, 96, 400, 1600)
    ]
    alone_s = float(np.mean(alone_s_of(asked)))
    assert max(ttft_s) < 1.5 * min(ttft_s)
    assert max(ttft_s) < 2.0 * alone_s


def alone_s_of(asked: Problem) -> np.ndarray:
    return alone_s(A.costs["gpu", 1], asked.traffic.prompt_tokens, np.ones(asked.traffic.num_requests), 8192)


def test_plans_asked_about_together_get_what_each_gets_alone():
    loaded = problem([A, B], [node()], [10.0, 3.0])
    plans = [on((1, ("a", "b")), (1, ("a",))), on((2, ("a", "b"))), on((1, ("a",)), (1, ("b",)), (2, ("a", "b"))), on()]
    estimator = Estimator(loaded)
    together = estimator.outcomes([plan.groups for plan in plans])
    for plan, outcome in zip(plans, together, strict=True):
        alone = Estimator(loaded).outcomes([plan.groups])[0]
        assert outcome.attainment == pytest.approx(alone.attainment)
        assert outcome.normalised_latency == pytest.approx(alone.normalised_latency)
        assert np.allclose(outcome.rates, alone.rates)
        if plan.groups:
            assert estimate(loaded, plan).attainment == pytest.approx(outcome.attainment)


def test_many_requests_are_followed_by_a_sample_and_all_count_as_load():
    loaded = problem([A, B], [node()], [60.0, 20.0], interval_s=120.0)
    plan = on((1, ("a",)), (1, ("a",)), (1, ("a", "b")), (1, ("b",)))
    few, all_ = (Estimator(loaded, max_followed=num).outcomes([plan.groups])[0] for num in (400, 10**6))
    assert few.normalised_latency == pytest.approx(all_.normalised_latency, rel=0.1)
    assert few.attainment == pytest.approx(all_.attainment, abs=0.05)
    assert few.rates == pytest.approx(all_.rates, rel=0.05)
    assert sum(all_.rates) * 120.0 == pytest.approx(loaded.traffic.num_requests)


def test_offline_requests_take_what_is_left():
    rows = [(0.5 * number, "a", 100, 100, False) for number in range(2000)]
    idle = msgspec.structs.replace(problem([A], [node()], [0.0]), traffic=traffic(rows, 1000.0))
    busy_rows = rows + [(0.02 * number, "a", 300, 300, True) for number in range(50000)]
    busy = msgspec.structs.replace(idle, traffic=traffic(busy_rows, 1000.0))
    plan = on((1, ("a",)))
    assert estimate(idle, plan).offline_tokens_s == pytest.approx(400.0, rel=0.01)
    assert estimate(busy, plan).offline_tokens_s < 40.0
    assert estimate(idle, plan).attainment == 1.0


def test_it_is_fast():
    loaded = problem([A, B], [node()], [150.0, 50.0], interval_s=100.0)
    plan = on((1, ("a",)), (1, ("a",)), (1, ("a", "b")), (1, ("b",)))
    began_s = time.process_time()
    found = estimate(loaded, plan)
    seconds = time.process_time() - began_s
    assert not math.isnan(found.normalised_latency)
    assert loaded.traffic.num_requests / seconds > 20_000
