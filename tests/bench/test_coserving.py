"""bench/coserving: its arithmetic on made-up runs, and all experiments for a moment on a tiny model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations_with_replacement, pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.coserving import __main__ as command
from bench.coserving import experiments
from bench.coserving.accounting import fewest_steps, most_offline_tokens, parts_of, request_s
from bench.coserving.bench import SHORT, VIRTUAL, Bench, Durations, Options
from bench.coserving.objectives import (
    account,
    attainment,
    choose_limited,
    limited,
    objectives,
    tightest_objectives,
)
from bench.coserving.results import figures_of, online_records, series_of, set_ratios
from bench.coserving.runs import (
    ABLATION,
    ONLINE_ONLY,
    SMOLLM_135M_ON_TWO_CORES,
    TIDEWAY,
    VLLM_PP,
    Counts,
    Objectives,
    RunResult,
    Sample,
    Setup,
    Step,
    System,
    VirtualRun,
    VirtualTestbed,
)
from bench.coserving.safepoints import met_step_s, safepoints
from bench.coserving.testbed import Testbed
from bench.coserving.workloads import OFFLINE_TRACE, ONLINE_TRACE, Scale, Workloads
from bench.reporting import Target
from shared.costs.model import StepShape
from shared.engine.recording import Configuration
from shared.messages.requests import RequestClass
from tideway.bench.records import UNFINISHED, RequestRecord
from tideway.bench.workload import PlannedRequest

QUICK = Durations(
    capacity_s=0.3, trace_s=0.4, on_s=0.25, off_s=0.25, num_cycles=1, point_s=0.35, ablation_s=0.2, warm_up_s=0.1,
    grace_s=10.0, cvs=(1.0,), loads=(0.5,), num_step_pairs=4, num_reactions=3, is_mirrored=False,
)  # fmt: skip
SETUP = Setup(model="tiny", num_threads=1, pool_tokens=2048, num_rows=8, max_step_tokens=128, niceness=0, profile_s=1.0)
SCALE = Scale(length_divisor=16.0, max_total_tokens=256)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [
        f"2023-11-16 18:{i // 60:02d}:{i % 60:02d}.0000000,{400 + i % 7 * 100},{100 + i % 5 * 40}" for i in range(600)
    ]
    (folder / ONLINE_TRACE).write_text("\n".join(lines))
    lines = ["num_prefill_tokens,num_decode_tokens", *(f"{1000 + i % 9 * 200},{100 + i % 4 * 50}" for i in range(100))]
    (folder / OFFLINE_TRACE).write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def testbed() -> Iterator[Testbed]:
    made = Testbed(SETUP)
    yield made
    made.close()


@pytest.fixture
def bench(testbed: Testbed, traces: Path) -> Bench:
    return Bench(testbed, Workloads(traces, SCALE, seed=1), QUICK, Options(), "test")


def record(name: str, arrival_s: float, times: list[float], *, online: bool = True, error: str = "") -> RequestRecord:
    return RequestRecord(
        request_id=name, model="model", request_class=RequestClass.ONLINE if online else RequestClass.OFFLINE,
        arrival_s=arrival_s, first_token_s=times[0] if times else None, last_token_s=times[-1] if times else None,
        end_s=times[-1] if times else 10.0, token_times=times, prompt_tokens=100, output_tokens=len(times), error=error,
        ttft_objective_s=1.0 if online else None, tpot_objective_s=0.5 if online else None,
    )  # fmt: skip


def made_up_run(records: list[RequestRecord], steps: list[Step], system: str = "tideway") -> RunResult:
    counts = Counts(
        preemptions={"memory/checkpointed": 2}, steps_suspended=3, steps_discarded=1,
        dropped_checkpoint_blocks=0, recomputed_tokens=50, recomputed_partial_tokens=20, online_tokens=1, harvested_tokens=1,
    )  # fmt: skip
    return RunResult(
        system=system, duration_s=10.0, end_s=12.0, records=records, steps=steps,
        samples=[Sample(0.0, 1, 0, 3, 0.75, 0.25)], counts=counts, reactions_s=[0.01], late_p99_s=0.001,
    )  # fmt: skip


def test_figures_pool_latencies_and_count_each_token_once() -> None:
    first = made_up_run(
        [
            record("warm-up", 0.5, [9.0, 9.5]),
            record("a", 2.0, [2.5, 3.0, 3.5]),
            record("b", 3.0, [], error=UNFINISHED),
            record("o", 0.0, [1.0, 4.0, 8.0], online=False),
        ],
        [Step(2.0, 4.0, (1, 0), False, False, False, (100, 60)), Step(11.0, 12.0, (0, 0), True, False)],
    )
    second = made_up_run([record("a", 2.0, [4.0, 4.4])], [])
    figures = figures_of([first, second], warm_up_s=2.0)
    assert (figures.num_online, figures.num_unfinished) == (3, 1)
    assert figures.ttft_s.num == 2 and figures.ttft_s.max == pytest.approx(2.0)
    # in the window of 8 s: prompts of warm-up and a with 2 + 3 outputs, two outputs of o; then prompt and 2 outputs of a
    assert figures.tokens_per_s == pytest.approx(((200 + 5 + 2) / 8 + 102 / 8) / 2)
    assert figures.offline_tokens_per_s == pytest.approx(2 / 8 / 2)
    assert figures.busy_share == pytest.approx(2 / 8 / 2)
    assert figures.lost_tokens == (60, 40)
    assert figures.attainment.ttft == pytest.approx(1 / 3)
    alone = msgspec.structs.replace(figures, system="online_only", ratios={})
    ideal = msgspec.structs.replace(figures, system="vllm++", tokens_per_s=2 * figures.tokens_per_s, ratios={})
    set_ratios([alone, ideal, figures])
    assert figures.ratios == {"ttft_p99": 1.0, "tpot_p99": 1.0, "tokens_per_s": 0.5}


def test_tokens_of_a_step_are_spread_over_its_time() -> None:
    run = made_up_run([], [Step(0.5, 2.5, (0, 0), False, False, False, (200, 0)), Step(2.5, 3.0, (0, 2), True, False)])
    series = series_of(run)
    assert series["online_tokens_per_s"][:4] == [50.0, 100.0, 50.0, 0.0]


def test_harvest_begins_when_the_last_online_request_has_ended() -> None:
    online = [record("a", 1.0, [2.0, 5.0])]
    mixed = Step(4.0, 5.0, (1, 1), False, False, False, (1, 8))
    offline = Step(5.03, 6.0, (0, 1), True, False, False, (0, 64))
    run = made_up_run(online, [mixed, offline])
    assert experiments.harvest_delay_s(run, 3.0) == pytest.approx(0.03)
    assert experiments.harvest_delay_s(run, 5.5) == 0.0
    assert experiments.harvest_delay_s(made_up_run(online, [mixed]), 3.0) == math.inf
    assert experiments.beside_delay_s(run, 3.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("value", "is_least", "text"),
    [
        (1.0, False, "met     x: 1 (at most 1.1)"),
        (2.2, False, "MISSED  x: 2.2 (at most 1.1), by a factor of 2"),
        (0.55, True, "MISSED  x: 0.55 (at least 1.1), by a factor of 2"),
        (math.nan, False, "MISSED  x: nan (at most 1.1), not measured"),
    ],
)
def test_a_missed_target_says_by_how_much(value: float, is_least: bool, text: str) -> None:
    assert str(Target(name="x", value=value, limit=1.1, is_least=is_least)) == text


def test_the_trace_keeps_rate_and_proportion_and_is_the_same_again(traces: Path) -> None:
    workloads = Workloads(traces, SCALE, seed=1)
    planned = workloads.trace(rate_rps=20.0, duration_s=10.0)
    assert planned == Workloads(traces, SCALE, seed=1).trace(rate_rps=20.0, duration_s=10.0)
    assert 150 <= len(planned) <= 250 and 9.0 <= planned[-1].at_s < 10.0
    assert {request.prompt_tokens for request in planned} <= {round((400 + i * 100) / 16) for i in range(7)}
    assert not Workloads(traces / "nowhere", SCALE, seed=1).has_traces


def test_another_trace_may_take_the_online_ones_place(traces: Path, tmp_path: Path) -> None:
    for name in (ONLINE_TRACE, OFFLINE_TRACE):
        (tmp_path / name.replace(ONLINE_TRACE, "other.csv")).write_text((traces / name).read_text())
    planned = Workloads(tmp_path, SCALE, seed=1, online_trace="other.csv").trace(20.0, 10.0)
    assert planned == Workloads(traces, SCALE, seed=1).trace(20.0, 10.0)
    assert not Workloads(tmp_path, SCALE, seed=1).has_traces


def test_on_off_load_begins_off(traces: Path) -> None:
    planned = Workloads(traces, SCALE, seed=1).on_off(10.0, off_s=2.0, on_s=3.0, duration_s=12.0)
    assert len(planned) == 60
    assert all(2.0 <= request.at_s % 5.0 <= 5.0 for request in planned)


def test_each_step_of_the_ablation_adds_one_thing() -> None:
    def arguments(system: System) -> Configuration:
        return SETUP.configuration(system, 8, Objectives(1.0, 0.1))

    def changed(one: System, other: System) -> set[str]:
        before, after = msgspec.structs.asdict(arguments(one)), msgspec.structs.asdict(arguments(other))
        return {name for name in before if before[name] != after[name]}

    steps = [changed(one, other) for one, other in pairwise(ABLATION)]
    assert steps == [{"co_serving", "interruption"}, {"num_host_merged"}, {"prefetch"}, {"interruption"}]
    assert changed(ONLINE_ONLY, VLLM_PP) == {"co_serving"}
    assert ABLATION[-1] is TIDEWAY


def test_the_step_an_arrival_meets_is_measured_over_all_its_launches() -> None:
    steps = [
        Step(0.0, 1.0, (0, 1), True, False, is_suspended=True),
        Step(1.0, 1.5, (1, 0), False, False),
        Step(1.5, 3.5, (0, 1), True, True),
        Step(3.5, 5.5, (0, 1), True, False),
    ]
    assert met_step_s(steps, [0.5, 1.2, 2.0, 4.0, 9.0]) == [3.0, 3.0, 3.0, 2.0, 2.0]


@pytest.mark.parametrize("system", [ONLINE_ONLY, VLLM_PP, TIDEWAY])
def test_a_run_serves_all_online_requests_and_never_runs_dry(bench: Bench, system: System) -> None:
    online = bench.workloads.gamma(rate_rps=10.0, cv=1.0, duration_s=1.0)
    result = bench.new_run(system, Objectives(1.5, 0.11)).run(online, bench.offline, 1.0, grace_s=20.0)
    done = online_records(result)
    assert len(done) == len(online) and all(r.is_success and r.output_tokens == 8 for r in done)
    assert [r.arrival_s for r in done] == [request.at_s for request in online]
    assert all(r.ttft_s is not None and r.ttft_s > 0 for r in done)
    assert sum(step.num_tokens[0] for step in result.steps) == result.counts.online_tokens
    offline = [r for r in result.records if r.request_class is RequestClass.OFFLINE]
    if system is ONLINE_ONLY:
        assert not offline and result.counts.harvested_tokens == 0
        return
    assert result.counts.harvested_tokens > 0
    ended = [r for r in offline if r.is_success]
    assert len(offline) - len(ended) >= SETUP.num_rows  # the backlog still waits at the end
    if system is VLLM_PP:
        assert not any(step.is_interruptible for step in result.steps)


@pytest.mark.long
def test_experiments_end_to_end(bench: Bench, tmp_path: Path) -> None:
    found = [run(bench) for run in (experiments.trace, experiments.ablation, safepoints)]
    for result in found:
        assert result.tables and result.targets
        paths = command.save(result, tmp_path)
        stored = msgspec.json.decode(paths[0].read_bytes())
        assert stored["experiment"] == result.experiment and stored["machine"]["cores"] >= 1
        assert all("is_met" in target for target in stored["targets"])
        text = paths[1].read_text()
        assert all(str(target) in text for target in result.targets)
        assert all(path.stat().st_size for path in paths)
        for figures in result.figures.values():
            assert {one.system for one in figures} >= {"online_only", "vllm++", "tideway"}
            assert all(one.num_unfinished == 0 for one in figures)


@pytest.mark.parametrize("name", ["onoff", "burst"])
def test_an_experiment_end_to_end_in_virtual_time(name: str, virtual: Bench, tmp_path: Path) -> None:
    bench = Bench(virtual.testbed, virtual.workloads, SHORT, Options(), "test")
    result = command.EXPERIMENTS[name](bench)
    assert list(result.figures) == (["all"] if name == "onoff" else ["CV 1", "CV 8"])
    assert result.tables and result.targets
    assert {path.suffix for path in command.save(result, tmp_path)} == {".json", ".md", ".png"}


@pytest.fixture(scope="module")
def virtual(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Without traces, noise, or a model."""
    workloads = Workloads(tmp_path_factory.mktemp("nothing"), Scale(), seed=1)
    return Bench(VirtualTestbed(Setup()), workloads, VIRTUAL, Options(), "test")


@pytest.mark.long
def test_users_cannot_tell_co_serving_from_serving_alone(virtual: Bench, tmp_path: Path) -> None:
    few = msgspec.structs.replace(VIRTUAL, num_samples=3)
    result = experiments.trace(Bench(virtual.testbed, virtual.workloads, few, Options(), "test"))
    alone, plain, tideway = result.figures["all"]
    assert [alone.system, plain.system, tideway.system] == ["online_only", "vllm++", "tideway"]
    assert tideway.num_online == alone.num_online > 900 and tideway.num_unfinished == 0
    assert max(tideway.ratios["ttft_p99"], tideway.ratios["tpot_p99"]) <= 1.25
    assert tideway.tokens_per_s >= 1.4 * alone.tokens_per_s
    assert tideway.lost_tokens[0] == 0
    assert plain.ratios["tpot_p99"] > 1.5 and plain.lost_tokens[0] > 0, "the load says nothing"
    names = [path.name for path in command.save(result, tmp_path)]
    assert all(name.startswith("coserving-trace-virtual-") for name in names)
    assert "(virtual time)**" in (tmp_path / names[1]).read_text()


def test_arrivals_stop_offline_steps_within_two_safepoint_intervals(virtual: Bench) -> None:
    result = safepoints(virtual)
    assert [target.is_met for target in result.targets] == [True]
    assert result.measured["reaction_s"].num == VIRTUAL.num_reactions


def test_virtual_runs_differ_by_their_noise_alone(virtual: Bench) -> None:
    online = virtual.workloads.gamma(rate_rps=1.0, cv=1.0, duration_s=30.0)

    def run(noise: float) -> RunResult:
        testbed = VirtualTestbed(Setup(), noise=noise)
        return VirtualRun(testbed, TIDEWAY, Objectives(0.8, 0.15)).run(online, virtual.offline, 30.0)

    quiet, noisy = run(0.0), run(0.1)
    assert msgspec.to_builtins(run(0.0)) == msgspec.to_builtins(quiet)
    assert msgspec.to_builtins(run(0.1)) == msgspec.to_builtins(noisy)
    assert [step.end_s for step in quiet.steps[:50]] != [step.end_s for step in noisy.steps[:50]]
    for result in (quiet, noisy):
        assert all(one.end_s <= other.start_s + 1e-9 for one, other in pairwise(result.steps))
        assert len(online_records(result)) == len(online) and all(r.is_success for r in online_records(result))
        assert sum(step.num_tokens[0] for step in result.steps) == result.counts.online_tokens
        assert result.counts.steps_suspended == sum(step.is_suspended and not step.resumes for step in result.steps)


def planned(at_s: float, prompt: int, output: int) -> PlannedRequest:
    return PlannedRequest(
        request_id=f"{at_s}", stream="s", at_s=at_s, model="model", request_class=RequestClass.ONLINE,
        prompt_tokens=prompt, output_tokens=output,
    )  # fmt: skip


def test_a_steps_time_is_divided_among_what_it_computes() -> None:
    cost = SMOLLM_135M_ON_TWO_CORES
    online = StepShape(100, 100 * 50.0, 2, 70)
    # Two online decodes and an online chunk, then an offline decode and two chunks.
    starts, counts = [30, 40, 0, 500, 0, 64], [1, 1, 100, 1, 200, 50]
    parts = parts_of(cost, starts, counts, 102, real_s=1.0)
    scale = 1.0 / cost.predict(StepShape(350, 100 * 50 + 200 * 100 + 50 * 89.0, 3, 570))
    assert parts.begin_s == pytest.approx(scale * (cost.fixed_s + cost.mixed_s))
    assert parts.online_s == pytest.approx(scale * (cost.predict(online) - cost.fixed_s - cost.mixed_s))
    assert parts.offline_decodes_s == pytest.approx(scale * cost.decode_cost_s(500))
    assert sum(msgspec.structs.astuple(parts)) == pytest.approx(1.0)


def test_requests_that_overlap_share_the_fewest_steps() -> None:
    # Three tokens each, due 1, 2 and 3 s after the arrival.
    assert fewest_steps([(0.0, 3)], ttft_s=1.0, tpot_s=1.0) == 3
    assert fewest_steps([(0.0, 3), (0.5, 3)], ttft_s=1.0, tpot_s=1.0) == 3
    assert fewest_steps([(0.0, 3), (1.5, 3)], ttft_s=1.0, tpot_s=1.0) == 4
    assert fewest_steps([(0.0, 3), (0.0, 3)], ttft_s=1.0, tpot_s=1.0) == 3
    assert fewest_steps([(0.0, 3), (9.0, 2)], ttft_s=1.0, tpot_s=1.0) == 5
    assert fewest_steps([], ttft_s=1.0, tpot_s=1.0) == 0


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 2)), min_size=1, max_size=3),
    st.integers(1, 2),
    st.integers(1, 2),
)
def test_no_other_choice_of_steps_is_smaller(requests: list[tuple[int, int]], ttft_s: int, tpot_s: int) -> None:
    """By trying all: steps at whole seconds, as many at once as are wanted."""

    def suffices(steps: tuple[int, ...]) -> bool:
        return all(
            sum(at_s <= step_s <= at_s + ttft_s + k * tpot_s for step_s in steps) > k
            for at_s, tokens in requests
            for k in range(tokens)
        )

    least = next(
        count for count in range(10) if any(suffices(steps) for steps in combinations_with_replacement(range(9), count))
    )
    assert fewest_steps([(float(at_s), tokens) for at_s, tokens in requests], ttft_s, tpot_s) == least


def test_looser_objectives_leave_more_to_offline_work_and_none_more_than_the_device_has() -> None:
    cost = SMOLLM_135M_ON_TWO_CORES
    online, offline = [planned(float(i), 200, 50) for i in range(20)], [planned(0.0, 600, 70)]

    def most(tpot_s: float) -> float:
        return most_offline_tokens(cost, 20.0, online, online, offline, 512, 1.0, tpot_s)

    nobody_kept = most_offline_tokens(cost, 20.0, online, [], offline, 512, 1.0, 0.05)
    assert 0 < most(0.05) < most(0.1) < most(0.2) < nobody_kept < 20.0 * 670 / request_s(cost, offline[0])
    assert most_offline_tokens(cost, 5.0, online, online, offline, 512, 1.0, 0.05) == 0.0


def test_a_run_that_keeps_the_pace_has_no_fewer_steps_than_the_bound_says(virtual: Bench) -> None:
    arrivals = virtual.workloads.gamma(rate_rps=2.0, cv=1.0, duration_s=60.0)
    for pair in (Objectives(0.6, 0.1), Objectives(2.0, 0.3)):
        run = virtual.new_run(TIDEWAY, pair).run(arrivals, virtual.offline, 60.0)
        kept = [
            (record.arrival_s, record.output_tokens)
            for record in online_records(run)
            if all(
                at_s <= record.arrival_s + pair.ttft_s + k * pair.tpot_s for k, at_s in enumerate(record.token_times)
            )
        ]
        assert len(kept) > 0.9 * len(arrivals)
        assert 0.2 * len(run.steps) < fewest_steps(kept, pair.ttft_s, pair.tpot_s) <= len(run.steps)


def test_the_tightest_objectives_are_kept_by_99_of_100() -> None:
    records = [record(f"{i}", 0.0, [0.1 + i / 100, 0.3 + i / 40]) for i in range(200)]
    found = tightest_objectives(records)
    assert attainment(records, found) == pytest.approx(0.99)
    assert attainment(records, Objectives(found.ttft_s * 0.999, found.tpot_s * 0.999)) < 0.99
    cut_off = [record("x", 0.0, [0.1], error=UNFINISHED), *records[:1]]
    assert attainment(cut_off, Objectives(9.0, 9.0)) == 0.5


@pytest.mark.parametrize(
    ("kept", "least", "name"),
    [
        ({"32": 0.9, "64": 0.8, "all": 0.1}, 0.75, "64"),
        ({"32": 0.9, "64": 0.8, "all": 0.1}, 0.95, "32"),
        ({"32": 0.0, "64": 0.0, "all": 0.0}, 0.95, "all"),
    ],
)
def test_the_limited_baseline_is_the_largest_step_that_keeps_as_much(
    kept: dict[str, float], least: float, name: str
) -> None:
    assert choose_limited(kept, least) == name


def test_a_devices_time_is_accounted_for(virtual: Bench) -> None:
    online = virtual.workloads.gamma(rate_rps=1.0, cv=1.0, duration_s=60.0)
    for system in (VLLM_PP, limited(64), TIDEWAY):
        run = virtual.new_run(system, Objectives(0.8, 0.1)).run(online, virtual.offline, 60.0)
        found = account([run], 5.0)
        assert sum(msgspec.structs.astuple(found)) == pytest.approx(1.0)
        # What a step that is cut by the window's ends did is all that may be missing.
        assert min(msgspec.structs.astuple(found)) > -0.02 and found.useful > 0.05
        assert max(sum(step.num_tokens) for step in run.steps) <= (system.step_tokens or 512)


@pytest.mark.long
def test_the_curve_of_objectives_end_to_end(virtual: Bench, tmp_path: Path) -> None:
    short = msgspec.structs.replace(SHORT, point_s=20.0, grace_s=60.0)
    options = Options(pairs=(Objectives(1.5, 0.11),))
    result = objectives(Bench(virtual.testbed, virtual.workloads, short, options, "test"))
    points = result.measured["points"]
    assert [(point.load, point.label) for point in points[:5]] == [
        *(("trace 0.5", f"{scale:g} x tightest") for scale in (1, 1.5, 2, 3)),
        ("trace 0.5", "fixed"),
    ]
    for point in points:
        assert set(point.attainment) == {"online_only", "vllm++", "vllm++ limited", "tideway"}
        assert point.offline_tokens_per_s["online_only"] == 0 < point.offline_tokens_per_s["vllm++"]
        assert point.offline_tokens_per_s["bound"] > 0
    assert points[0].attainment["online_only"] >= 0.99
    assert len(result.targets) == 2 * len({point.load for point in points})
    assert {path.suffix for path in command.save(result, tmp_path)} == {".json", ".md", ".png"}


def test_the_command_runs_in_virtual_time_with_a_given_cost_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fast.json"
    path.write_bytes(msgspec.json.encode(SMOLLM_135M_ON_TWO_CORES.scaled(0.5)))
    options = ["--virtual", "--short", "--noise", "0.1", "--cost-model", str(path)]
    assert command.main(["trace", *options, "--traces", str(tmp_path), "--output", str(tmp_path)]) == 0
    assert "(virtual time, noise 0.1)" in capsys.readouterr().out
    (stored,) = tmp_path.glob("coserving-trace-virtual-*.json")
    assert msgspec.json.decode(stored.read_bytes())["setup"]["model"] == "fast"
    for refused in (["trace", "--noise", "0.1"], ["objectives"], ["objectives", "--virtual", "--pairs", "1500"]):
        with pytest.raises(SystemExit):
            command.main(refused)


def test_without_traces_the_trace_experiment_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Testbed", _NoTestbed)
    assert command.main(["trace", "--traces", str(tmp_path), "--output", str(tmp_path)]) == 0
    assert "experiment trace is left out" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


class _NoTestbed:
    class cost_model:
        median_error = p99_error = 0.0

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def close(self) -> None:
        pass
