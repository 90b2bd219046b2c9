"""Plans in virtual time: what a run of a plan says of its requests."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.placement.execution import alone_s, execution_s, least_group
from shared.placement.facts import SHAPES, model_facts, node_facts
from shared.placement.hardware import A800_80G, CPU, cost_model
from shared.placement.memory import Memory
from shared.placement.problem import Group, Plan, Problem, traffic
from shared.simulation.deployment import LIVE, BatchLines, Serving, predict, simulate
from shared.simulation.fleet import Fleet
from shared.simulation.metrics import Requests, measure, spread

QUIET = Serving(noise=0.0, control_s=0.0)
NAMES = ("llama-2-7b", "opt-6.7b")
ROWS = [(0.2 * number, NAMES[number % 2], 100 + 7 * number, 10 + number % 5, True) for number in range(20)]


def problem(rows, interval_s: float = 10.0, models=NAMES, **changes) -> Problem:
    return Problem(
        nodes=(node_facts("node", A800_80G, 4),),
        models=tuple(model_facts(name, SHAPES[name], [A800_80G]) for name in models),
        traffic=traffic(rows, interval_s, models),
        **changes,
    )


def plan(*groups: tuple[tuple[int, ...], tuple[str, ...]]) -> Plan:
    return Plan(tuple(Group("node", devices, models) for devices, models in groups))


SHARED = plan(((0, 1), NAMES), ((2,), ("opt-6.7b",)))


@given(prompt=st.integers(2, 3000), output=st.integers(1, 60), kind=st.sampled_from([A800_80G, CPU]))
@example(prompt=1025, output=1, kind=CPU)
@example(prompt=513, output=7, kind=CPU)
@settings(max_examples=10, deadline=None)
def test_a_request_alone_takes_what_is_reckoned(prompt, output, kind) -> None:
    model = model_facts("m", SHAPES["llama-135m"], [kind], max_model_len=4096)
    given_ = Problem(
        nodes=(node_facts("node", kind, 1),), models=(model,), traffic=traffic([(0.0, "m", prompt, output, True)], 1.0)
    )
    # a step budget for a latency would cut the prompt
    outcome = simulate(given_, plan(((0,), ("m",))), msgspec.structs.replace(QUIET, co_serving="priority_only"))
    assert outcome.requests.latency_s[0] == pytest.approx(execution_s(given_)["m"], rel=1e-6)
    assert outcome.metrics.total.normalised_latency == pytest.approx(1.0, rel=1e-6)


def test_alone_a_decode_costs_its_context() -> None:
    cost = cost_model(A800_80G, SHAPES["llama-2-7b"])
    one, two, three = alone_s(cost, np.array([100, 100, 100]), np.array([1, 2, 3]), 8192)
    assert two - one == pytest.approx(cost.fixed_s + cost.decode_s + 100 * cost.decode_context_s)
    assert three - two == pytest.approx(two - one + cost.decode_context_s)


def test_the_least_group_is_of_as_few_devices_as_hold_the_model() -> None:
    given_ = problem(ROWS, models=("llama-2-7b", "llama-2-70b"))
    assert [least_group(given_, model) for model in given_.models] == [("A800-80G", 1), ("A800-80G", 4)]


def test_each_request_of_a_plan_is_measured() -> None:
    given_ = problem(ROWS)
    outcome = simulate(given_, SHARED, seed=3)
    measured, requests = outcome.metrics, outcome.requests
    assert outcome.is_over and requests.is_done.all()
    assert (requests.num_tokens == given_.traffic.output_tokens).all()
    assert (requests.ttft_s <= requests.latency_s).all()
    assert measured.total.num_requests == 20 and measured.total.num_unserved == 0
    assert {name: one.num_requests for name, one in measured.models.items()} == dict.fromkeys(NAMES, 10)
    assert measured.total.latency_s.p99 >= measured.total.latency_s.p50 > 0
    for one in (measured.total, *measured.models.values()):
        assert one.itl_s.num == sum(requests.num_tokens - 1) * one.num_requests / 20, "each token after the first"
        assert 0 < one.itl_s.p50 <= one.itl_s.p99 <= one.itl_s.max
        assert one.itl_s.max >= one.tpot_s.p99, "a mean is no longer than its longest part"
    assert set(measured.use) == {"node-0", "node-2"} and 0 < measured.use["node-0"] < 1
    # node-0 has two devices, and one of the node's four is in no group.
    assert measured.total.use == pytest.approx((2 * measured.use["node-0"] + measured.use["node-2"]) / 4)
    assert measured.total.use == pytest.approx(sum(one.use for one in measured.models.values()))
    assert all(one.use > 0 for one in measured.models.values())


def test_the_same_seed_is_the_same_run() -> None:
    given_ = problem(ROWS)
    assert predict(given_, SHARED, seed=1) == predict(given_, SHARED, seed=1)
    assert predict(given_, SHARED, seed=1) != predict(given_, SHARED, seed=2)


def test_an_instance_has_the_pool_that_placement_reckons() -> None:
    given_ = problem(ROWS)
    fleets: list[Fleet] = []
    simulate(given_, SHARED, on_deployed=fleets.append)
    (fleet,) = fleets
    device = fleet.instances["node-0"].device
    assert (device.merged_bytes, device.configuration.num_merged) == Memory(given_).pool(
        SHARED.groups[0].models, given_.nodes[0], 2
    )
    assert device.configuration.steps_in_flight == 2
    assert fleet.instances["node-0"].models["opt-6.7b"].cost_model == given_.models[1].costs["A800-80G", 2]


def test_requests_without_a_group_miss_their_slo() -> None:
    predicted = predict(problem(ROWS), plan(((0,), ("llama-2-7b",))))
    assert predicted.models["llama-2-7b"].attainment == 1.0
    assert predicted.models["opt-6.7b"].attainment == 0.0
    assert predicted.models["opt-6.7b"].num_requests == 10
    assert predicted.attainment == 0.5


def test_a_request_that_no_instance_can_hold_misses_its_slo() -> None:
    predicted = predict(problem([*ROWS, (5.0, "llama-2-7b", 4000, 97, True)]), SHARED)
    assert predicted.models["llama-2-7b"].attainment == pytest.approx(10 / 11)


def test_a_run_ends_with_its_patience() -> None:
    rows = [(0.0, "llama-2-7b", 2000, 2000, True) for _ in range(4)]
    outcome = simulate(problem(rows, 1.0), SHARED, patience_s=5.0)
    assert not outcome.is_over
    assert outcome.metrics.total.num_unserved == 4 and outcome.metrics.total.attainment == 0.0
    assert outcome.metrics.total.normalised_latency > 0.1


def test_offline_requests_and_batches_fill_what_is_left() -> None:
    offline = [(0.0, "llama-2-7b", 500, 50, False) for _ in range(10)]
    given_ = problem(ROWS + offline)
    batch = BatchLines(1.0, [("opt-6.7b", 300, 20)] * 10 + [("nobody", 10, 10)])
    total = simulate(given_, SHARED, batches=[batch]).metrics.total
    assert total.num_requests == 20 and total.offline_requests == 20
    assert total.offline_tokens_s * 10.0 == pytest.approx(10 * 550 + 10 * 320)
    nothing = simulate(given_, SHARED, Serving(offline=False), batches=[batch]).metrics.total
    assert nothing.offline_tokens_s == 0.0 and nothing.attainment == 1.0


def test_a_model_may_have_an_slo_of_its_own() -> None:
    predicted = predict(problem(ROWS, slo_scales={"opt-6.7b": 0.01}), SHARED)
    assert [predicted.models[name].attainment for name in NAMES] == [1.0, 0.0]


def test_progress_is_told() -> None:
    heard: list[float] = []
    simulate(problem(ROWS), SHARED, on_progress=heard.append)
    assert heard == sorted(heard) and heard[-1] == 1.0


def test_spread_of_nothing_is_zero_and_leaves_out_what_is_unknown() -> None:
    assert spread(np.array([np.nan])).p99 == 0.0
    assert spread(np.array([1.0, np.nan, 3.0])).mean == 2.0


def test_slos_are_multiples_of_the_mean_execution_time() -> None:
    columns = np.array([1.0, 1.0, 1.0, 1.0])
    requests = Requests(
        models=("a",), model=np.zeros(4, int), is_online=np.array([True, True, True, False]), arrival_s=columns,
        prompt_tokens=columns * 10, output_tokens=columns * 5, num_tokens=np.array([5, 5, 2, 5]), ttft_s=columns,
        tpot_s=columns, latency_s=np.array([4.0, 6.0, 2.0, 1.0]), is_done=np.array([True, True, False, True]),
    )  # fmt: skip
    found = measure(requests, {"a": 2.0}, lambda name: 2.5, {}, 10.0)
    assert found.total.attainment == pytest.approx(1 / 3)
    assert found.total.normalised_latency == pytest.approx(2.0)
    assert found.total.num_unserved == 1
    assert found.total.tokens_s == pytest.approx(1.2)
    assert found.total.offline_tokens_s == pytest.approx(1.5)
    assert found.total == found.models["a"]
    assert LIVE.noise == 0.05
