"""What bench/fidelity fits to the steps of a system whose times are known, and how it compares."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from bench.fidelity import simulated
from bench.fidelity.__main__ import earlier
from bench.fidelity.observed import Observed, Step, observe
from bench.fidelity.results import Cell, Comparison, Repeat, cell_order
from bench.fidelity.timing import Delays, Sample, Timing, execution_s, fit, fit_demand, samples, speed
from bench.fidelity.workloads import (
    CALIBRATION,
    LONG,
    MIXES,
    MODELS,
    SHORT,
    TENANT_MARK,
    TENANTS,
    Figures,
    Served,
    figures,
    planned,
    tenant_of,
)
from shared.costs.model import CostModel, StepShape
from shared.engine.engine import Engine
from shared.engine.plan import ModelShape
from shared.engine.recording import Configuration, recorded
from shared.messages.cluster import ExecutionStatistics
from shared.runtime.settings import SchedulerSettings
from shared.simulation.host import Demand

COSTS = {
    name: CostModel(
        fixed_s=fixed_s, prefill_token_s=4e-4, prefill_attention_s=1e-7, decode_s=1e-3, decode_context_s=2e-6
    )
    for name, fixed_s in zip(MODELS, (0.008, 0.010, 0.018), strict=True)
}
TRUTH = Timing(cost_models=COSTS, beside=1.3, noise=0.05, submit_s=0.004, answer_s=0.003)
CONFIGURATION = Configuration(
    num_merged=200, num_rows=64, ordering="doubling_budget", token_budget=512, steps_in_flight=1
)
IDLE = Observed(
    CONFIGURATION, {name: ModelShape(name, 32, 4, 1024, 4096) for name in MODELS}, COSTS, [], {}, {}, []
)  # fmt: skip
SETTINGS = SchedulerSettings(migration="off")


@pytest.mark.long
@pytest.mark.slow
def test_times_that_are_fitted_to_one_trace_predict_another() -> None:
    recordings: list[list[bytes]] = []

    def build(configuration: Configuration) -> Engine:
        recordings.append([])
        return recorded(configuration, recordings[-1].append)

    requests = planned(CALIBRATION, 4.0, 40.0, name="calibration", seed=1)
    simulated.run([IDLE, IDLE], TRUTH, SETTINGS, requests, build=build)
    observed = [observe(b"".join(one)) for one in recordings]
    assert all(one.models.keys() == MODELS.keys() and one.cost_models == COSTS for one in observed)
    assert sum(len(one.submitted_s) for one in observed) == sum(len(one.first_s) for one in observed) == len(requests)

    fitted = fit(samples(observed), TRUTH.submit_s, TRUTH.answer_s)
    assert fitted.beside == pytest.approx(TRUTH.beside, abs=0.1)
    assert fitted.noise == pytest.approx(TRUTH.noise, abs=0.02)
    assert speed(fitted, samples(observed)) == pytest.approx(1.0)
    for name in MODELS:
        for shape in (StepShape(0, 0.0, 4, 400), StepShape(100, 5000.0, 0, 0), StepShape(60, 1800.0, 3, 300)):
            assert fitted.cost_models[name].predict(shape) == pytest.approx(COSTS[name].predict(shape), rel=0.08)

    for mix in MIXES[:2]:
        requests = planned(mix, 4.0, 30.0, name=mix.name, seed=2)
        alone_s = {name: execution_s(TRUTH, name, [(100, 20)]) for name in MODELS}
        of_truth, of_fit = (
            [figures(simulated.run([IDLE, IDLE], timing, SETTINGS, requests, seed=seed), alone_s) for seed in (3, 4)]
            for timing in (TRUTH, fitted)
        )
        for metric, allowed in (("normalised_latency", 0.08), ("p99_ttft_s", 0.4), ("throughput_tokens_s", 0.02)):
            mean = [np.mean([getattr(one, metric) for one in runs]) for runs in (of_truth, of_fit)]
            assert mean[1] == pytest.approx(mean[0], rel=allowed), (mix.name, metric)


def test_a_step_goes_on_until_the_next_where_requests_are_held() -> None:
    shape = StepShape(0, 0.0, 1, 10)
    one = [Step("small", shape, 0.0, 1.0, True), Step("small", shape, 1.2, 2.0, False)]
    other = [Step("small", shape, 1.0, 1.5, False)]
    first, others, second = samples([IDLE._replace(steps=one), IDLE._replace(steps=other)])
    assert (first.seconds, others.seconds, second.seconds) == pytest.approx((1.2, 0.5, 1.0))
    assert (first.beside, others.beside, second.beside) == pytest.approx((0.2 / 1.2, 0.3 / 0.5, 0.3))
    assert [one.beside for one in samples([IDLE._replace(steps=one)])] == [0.0, 0.0]
    three = samples([IDLE._replace(steps=steps) for steps in (one, other, other)])
    assert [one.beside for one in three] == pytest.approx([0.2 / 1.2, 1.0, 1.0, 0.3])


def test_a_step_that_was_planned_ahead_begins_when_the_one_before_it_has_ended() -> None:
    written: list[bytes] = []

    def build(configuration: Configuration) -> Engine:
        return recorded(configuration, written.append)

    requests = planned(MIXES[0], 40.0, 1.0, name="ahead", seed=1)
    ahead = IDLE._replace(configuration=msgspec.structs.replace(CONFIGURATION, steps_in_flight=2))
    simulated.run([ahead], TRUTH, SETTINGS, requests, build=build)
    steps = observe(b"".join(written)).steps
    assert all(before.end_s <= after.start_s < after.end_s for before, after in pairwise(steps))
    assert any(before.end_s == after.start_s for before, after in pairwise(steps))


def test_the_factor_beside_another_is_of_sums_with_their_stalls() -> None:
    shape = StepShape(0, 0.0, 1, 10)
    alone = [Sample("small", shape, 0.010, 0.0, number) for number in range(100)]
    beside = [Sample("small", shape, 0.040 if number % 10 == 0 else 0.010, 1.0, 100 + number) for number in range(100)]
    assert fit(alone + beside, 0.0, 0.0).beside == pytest.approx(1.3)
    assert fit(alone, 0.0, 0.0).beside == 1.0


def test_a_simulation_begins_with_the_execution_times_that_were_told() -> None:
    told = [(float(at_s), ExecutionStatistics("small", seconds, 0.1, 9)) for at_s, seconds in ((1, 0.3), (5, 0.2))]
    observed = IDLE._replace(statistics=told)
    assert [one.mean_s for one in observed.statistics_at(4.0)] == [0.3]
    assert [one.mean_s for one in observed.statistics_at(6.0)] == [0.2]
    assert observed.statistics_at(1.0) == []

    recording: list[bytes] = []

    def build(configuration: Configuration) -> Engine:
        return configuration.build() if recording else recorded(configuration, recording.append)

    requests = planned(MIXES[0], 2.0, 3.0, name="few", seed=2)
    simulated.run([observed, observed], TRUTH, SETTINGS, requests, start_s=4.0, build=build)
    assert observe(b"".join(recording)).statistics == [(0.0, told[0][1])]


def test_a_slower_machine_is_simulated_slower() -> None:
    requests = planned(MIXES[0], 2.0, 10.0, name="few", seed=2)
    quiet, slow = (
        sum(one.last_s - one.arrival_s for one in simulated.run([IDLE, IDLE], TRUTH, SETTINGS, requests, speed=factor))
        for factor in (1.0, 1.5)
    )
    assert 1.4 * quiet < slow


DEMAND = Demand(request_s=0.02, token_s=4e-4)
LOADED = msgspec.structs.replace(TRUTH, demand=DEMAND)


def test_what_requests_and_tokens_cost_is_told_apart_by_runs_of_other_lengths() -> None:
    runs = [
        (10.0, requests, tokens, 10.0 * 0.05 + requests * DEMAND.request_s + tokens * DEMAND.token_s)
        for requests, tokens in ((100, 300), (20, 1600), (60, 1500), (15, 400))
    ]
    assert fit_demand(runs) == pytest.approx(DEMAND)
    assert fit_demand(runs[:1]).request_s >= 0.0


@pytest.mark.slow
def test_the_factor_beside_another_is_found_under_services_that_take_cores() -> None:
    recordings: list[list[bytes]] = []

    def build(configuration: Configuration) -> Engine:
        recordings.append([])
        return recorded(configuration, recordings[-1].append)

    requests = planned(CALIBRATION, 6.0, 20.0, name="calibration", seed=1)
    simulated.run([IDLE, IDLE], LOADED, SETTINGS, requests, build=build)
    observed = [observe(b"".join(one)) for one in recordings]
    assert sum(step.num_tokens for one in observed for step in one.steps) == sum(one.output_tokens for one in requests)
    with_demand = fit(samples(observed, DEMAND), 0.004, 0.003, DEMAND)
    without = fit(samples(observed), 0.004, 0.003)
    assert abs(with_demand.beside - TRUTH.beside) < abs(without.beside - TRUTH.beside)
    assert with_demand.noise < without.noise


def test_services_that_take_cores_slow_steps_down() -> None:
    slower = []
    for mix in (SHORT, LONG):
        requests = planned(mix, 8.0, 8.0, name=mix.name, seed=2)
        sums = [
            sum(one.last_s - one.arrival_s for one in simulated.run([IDLE, IDLE], timing, SETTINGS, requests))
            for timing in (TRUTH, LOADED)
        ]
        slower.append(sums[1] / sums[0])
    assert min(slower) > 1.02


def test_ttft_is_that_of_the_gateway_whatever_the_client_is_late_by() -> None:
    requests = planned(MIXES[0], 2.0, 4.0, name="few", seed=2)
    prompt, late = (
        simulated.run([IDLE, IDLE], TRUTH, SETTINGS, requests, delays_s=[Delays(0.01, 0.002, 0.003, answer_s)])
        for answer_s in (0.001, 0.5)
    )
    assert [one.server_ttft_s for one in prompt] == [one.server_ttft_s for one in late]
    assert all(
        two.first_s - one.first_s == pytest.approx(0.499)
        and one.first_s - one.arrival_s == pytest.approx(one.server_ttft_s + 0.01 + 0.001)
        for one, two in zip(prompt, late, strict=True)
    )


def test_tenants_have_their_shares_and_keep_their_names_in_simulations() -> None:
    requests = planned(TENANTS, 8.0, 20.0, name="run", seed=2)
    num = Counter(map(tenant_of, requests))
    assert set(num) == {"calm", "busy"} and num["calm"] == pytest.approx(len(requests) / 4, rel=0.1)
    assert {tenant_of(one) for one in planned(MIXES[0], 8.0, 1.0, name="run", seed=2)} == {""}
    recordings: list[bytes] = []

    def build(configuration: Configuration) -> Engine:
        return recorded(configuration, recordings.append)

    simulated.run([IDLE], TRUTH, SETTINGS, requests[:30], build=build)
    assert b"calm" in b"".join(recordings) and b"busy" in b"".join(recordings)


def test_figures_are_of_all_requests() -> None:
    served = [Served("small", 0.0, 0.5, 1.0, 10, 0.25), Served("large", 1.0, 2.0, 4.0, 20, 0.25)]
    found = figures(served, {"small": 0.5, "large": 2.0})
    assert (found.normalised_latency, found.throughput_tokens_s, found.num_requests) == (1.75, 7.5, 2)
    assert 0.5 < found.client_p99_ttft_s <= 1.0 and found.p99_ttft_s == 0.25


def test_errors_and_scatter_of_a_cell() -> None:
    def found(latency: float) -> Figures:
        return Figures(
            normalised_latency=latency, p99_ttft_s=1.0, client_p99_ttft_s=1.0, throughput_tokens_s=100.0, num_requests=9
        )

    repeats = [
        Repeat(
            live=found(live),
            simulated=[found(2.2)],
            hindsight=[found(2.0)],
            speed=1.0,
            own_speed=1.0,
            others_share=0.0,
            client_late_s=0.01,
        )
        for live in (1.9, 2.1)
    ]
    cell = Cell(workload="chat", load=0.3, rate_rps=1.0, repeats=repeats)
    assert cell.error("normalised_latency") == pytest.approx(0.1)
    assert cell.error("normalised_latency", hindsight=True) == pytest.approx(0.0)
    assert cell.scatter("normalised_latency") == pytest.approx(0.05)
    assert cell.simulated_scatter("normalised_latency") == 0.0
    several = msgspec.structs.replace(repeats[0], simulated=[found(1.8), found(2.2)])
    assert msgspec.structs.replace(cell, repeats=[several]).simulated_scatter("normalised_latency") == pytest.approx(
        0.1
    )
    comparison = Comparison(cells=[cell], timing=TRUTH, capacity_rps={"chat": 3.0})
    assert [target.is_met for target in comparison.targets()] == [False, False, *[True] * 6]
    assert "| chat" in comparison.markdown() and "services and client take" not in comparison.markdown()
    loaded = msgspec.structs.replace(comparison, timing=LOADED)
    assert "20.00 ms of a core for a request and 400 us for a token" in loaded.markdown()
    assert msgspec.convert(msgspec.to_builtins(comparison), Comparison) == comparison


def test_all_cells_come_once_before_any_comes_again() -> None:
    order = cell_order(("chat", "bursts"), (0.3, 0.6), 2)
    assert len(order) == 8
    assert {repeat for *_, repeat in order[:4]} == {0}


def test_what_came_before_a_run_is_simulated_and_not_told() -> None:
    requests = planned(MIXES[0], 4.0, 5.0, name="chat", seed=2)
    alone = simulated.run([IDLE, IDLE], TRUTH, SETTINGS, requests)
    # So many at once that the first ones of the run find them, but the last one is at its time.
    before = [msgspec.structs.replace(one, at_s=-0.001 * number) for number, one in enumerate(requests)]
    behind = simulated.run([IDLE, IDLE], TRUTH, SETTINGS, requests, before=before)
    told = [[(one.model, one.arrival_s, one.output_tokens) for one in served] for served in (alone, behind)]
    assert told[0] == told[1] and all(one.last_s >= one.first_s > one.arrival_s for one in behind)
    assert behind[0].server_ttft_s > 2 * alone[0].server_ttft_s


def test_tenants_that_are_gone_are_remembered() -> None:
    """They are expected back, for which chats are computed in short steps."""
    requests = planned(MIXES[0], 16.0, 5.0, name="chat", seed=2)
    before = [
        msgspec.structs.replace(one, at_s=one.at_s - 20.0, stream=f"x{TENANT_MARK}{number % 2}")
        for number, one in enumerate(planned(MIXES[0], 0.4, 12.0, name="earlier", seed=3))
    ]
    assert len(before) >= 3
    alone, after = (simulated.run([IDLE], TRUTH, SETTINGS, requests, before=each) for each in ([], before))
    mean_s = [float(np.mean([one.server_ttft_s for one in served])) for served in (alone, after)]
    assert mean_s[1] > 1.1 * mean_s[0]


def test_requests_of_the_minute_before_a_run_come_before_it() -> None:
    long, short = (planned(CALIBRATION, 2.0, seconds, name="x", seed=1) for seconds in (80.0, 5.0))
    found = earlier(1000.0, [(915.0, long), (996.0, short), (1000.0, short), (1007.0, short)])
    assert found == [
        *(msgspec.structs.replace(one, at_s=one.at_s + 915.0 - 1000.0) for one in long if one.at_s >= 25.0),
        *(msgspec.structs.replace(one, at_s=one.at_s + 996.0 - 1000.0) for one in short if one.at_s < 4.0),
    ]
