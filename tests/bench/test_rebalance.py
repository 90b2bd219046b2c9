"""The cluster in virtual time, small: real engines and the real scheduler's core, moves keep every token, runs repeat."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bench.rebalance.__main__ import main
from bench.rebalance.bounds import alone_s, curve, ideal
from bench.rebalance.cluster import A10, A100, CPU, Cluster, Device, System
from bench.rebalance.experiments import SYSTEMS, Plan, capacity_rps
from bench.rebalance.results import Experiment, Figures, balance_verdicts, figures_of
from bench.rebalance.workloads import (
    LENGTHS,
    MIXES,
    PREFILL_MIX,
    Workload,
    chats_and_long_prompts,
    draw_jobs,
    long_prompt_tokens,
    power_law,
)
from shared.costs.model import StepShape
from shared.messages.requests import RequestClass
from shared.placement.facts import SHAPES, model_facts, node_facts
from shared.placement.hardware import HARDWARE
from shared.placement.places import places
from shared.placement.plan import Group
from shared.placement.plan import Plan as PlacedGroups
from shared.placement.planner import LEAST_MERGED_BYTES
from shared.placement.problem import Problem, Traffic
from shared.simulation.deployment import LIVE
from shared.simulation.events import Events
from shared.simulation.gateway import Job


def small(**changes: object) -> Device:
    """A pool that few requests fill."""
    return msgspec.structs.replace(A10, num_blocks=128, max_length=900, **changes)


def test_events_come_in_order_and_stop_at_the_limit() -> None:
    events, seen = Events(), list[str]()
    events.at(2.0, seen.append, "c")
    events.at(1.0, seen.append, "a")
    events.at(1.0, lambda: (seen.append("b"), events.after(0.5, seen.append, "b2")))
    assert not events.run(lambda: False, 1.7)
    assert (seen, events.now) == (["a", "b", "b2"], 1.5)
    assert events.run(lambda: len(seen) == 4, 10.0)
    assert seen[-1] == "c"


@pytest.mark.parametrize("kind", LENGTHS)
def test_lengths_have_the_quantiles_of_the_paper(kind: str) -> None:
    drawn = power_law(kind, 200_000, np.random.default_rng(0), 6000)
    np.testing.assert_allclose(np.percentile(drawn, (50, 80, 95, 99)), LENGTHS[kind][1:5], rtol=0.05)
    assert drawn.min() >= LENGTHS[kind][0] and drawn.max() <= 6000


@pytest.mark.parametrize("mix", [*MIXES, PREFILL_MIX])
def test_jobs_are_seeded_and_rates_and_priorities_change_nothing_else(mix: str) -> None:
    workload = Workload(mix=mix, rate_rps=4.0, num_requests=300)
    jobs = draw_jobs(workload, A10, 1)
    assert jobs == draw_jobs(workload, A10, 1) != draw_jobs(workload, A10, 2)
    assert jobs[-1].at_s == pytest.approx(75.0, rel=0.3)
    faster = draw_jobs(msgspec.structs.replace(workload, rate_rps=8.0, high_share=0.1), A10, 1)
    assert [(j.prompt_tokens, j.output_tokens) for j in faster] == [(j.prompt_tokens, j.output_tokens) for j in jobs]
    assert 10 <= sum(job.is_high for job in faster) <= 60


def test_a_trace_gives_its_requests_and_its_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{at},{100 + at},{9000 + at}\n" for at in range(40))
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    jobs = draw_jobs(Workload(mix=str(trace), rate_rps=2.0, num_requests=10), A10, 3)
    assert all(job.output_tokens == A10.max_length for job in jobs)
    assert np.diff([job.prompt_tokens for job in jobs]).tolist() == [1] * 9
    assert jobs[-1].at_s == pytest.approx(5.0)
    np.testing.assert_allclose(np.diff([job.at_s for job in jobs]), 5.0 / 9)


@pytest.mark.parametrize("device", [A10, CPU], ids=lambda device: device.name)
def test_the_devices_are_what_they_say(device: Device) -> None:
    cost = device.cost_model
    alone_s = cost.predict(StepShape(0, 0.0, 1, 100))
    full_s = cost.predict(StepShape(0, 0.0, 64, device.pool_tokens - 64))
    assert 0.015 < alone_s < 0.04 and 1.5 < full_s / alone_s < 8
    assert device.max_length * 2 < device.pool_tokens


def test_instances_are_as_placement_has_them_live() -> None:
    hardware = HARDWARE["A10"]
    models = (model_facts("model", SHAPES["llama-2-7b"], [hardware]),)
    none = np.zeros(0, np.int32)
    traffic = Traffic(("model",), none, none.astype(float), none, none, none.astype(bool), 1.0)
    problem = Problem(nodes=(node_facts("node", hardware, 1),), models=models, traffic=traffic)
    (place,) = places(problem, PlacedGroups((Group("node", (0,), ("model",)),)))
    live, mine = LIVE.device(problem, place).configuration, A10.simulated("doubling_budget").configuration
    for field in ("ordering", "token_budget", "steps_in_flight", "co_serving", "interruption", "mix_phases", "prefetch",
                  "checkpoint_start", "least_share", "num_stages", "fits_costs", "ttft_s", "tpot_s"):  # fmt: skip
        assert getattr(mine, field) == getattr(live, field), field
    assert mine.num_host_merged == mine.num_merged == 212 and live.num_host_merged == live.num_merged
    (model,) = A10.models(1)
    assert A10.merged_bytes == LEAST_MERGED_BYTES["cuda"] and model.shape.blocks_per_merged == 4
    assert CPU.blocks_per_merged > 1 and CPU.simulated("fcfs").configuration.steps_in_flight == 1
    assert A10.pool_tokens == 212 * 64


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=lambda system: system.name)
def test_a_request_alone_takes_its_steps(system: System) -> None:
    cluster = Cluster(A10, system, [Job(0.5, 300, 5)], noise=0.0)
    (record,) = cluster.run().records
    steps = [StepShape(300, 300 * 150.0), *(StepShape(0, 0.0, 1, 300 + n) for n in range(4))]
    assert record.latency_s == pytest.approx(sum(A10.cost_model.predict(step) for step in steps) + 0.001)
    assert (record.num_tokens, record.num_preemptions, record.start_s) == (5, 0, pytest.approx(0.001))


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=lambda system: system.name)
def test_every_request_gets_every_token_once_and_runs_repeat(system: System) -> None:
    """The journal fails a run in which an offset is repeated or left out, or an answer ends early or late."""
    device = small()
    jobs = draw_jobs(Workload(mix="L-L", rate_rps=40.0, num_requests=80), device, 4)

    def run() -> tuple[list[float], int, dict[str, int]]:
        cluster = Cluster(device, system, jobs, seed=4)
        records = cluster.run().records
        cluster.fleet.events.run(lambda: False, cluster.fleet.events.now + 10.0)  # copies to host memory hold blocks
        for instance in cluster.fleet.instances.values():
            instance.engine.check()
            assert not instance.engine.all_held() and instance.num_transfers == 0
            assert instance.engine.pool.num_available("model") == 128
        return (
            [record.latency_s for record in records],
            sum(r.num_migrations for r in records),
            cluster.migrations.outcomes,
        )

    first = run()
    assert not system.migrates or first == run()
    assert (first[1] > 0) == system.migrates
    assert first[1] == sum(number for how, number in first[2].items() if how.startswith("moved"))


def test_models_share_instances_and_their_requests_move() -> None:
    device = small()
    jobs = draw_jobs(Workload(mix="L-L", rate_rps=40.0, num_requests=80), device, 4)
    cluster = Cluster(device, SYSTEMS["tideway"], jobs, seed=4, num_models=3)
    records = cluster.run().records
    assert len(records) == 80 and all(record.num_tokens == record.output_tokens for record in records)
    assert sum(record.num_migrations for record in records) > 0
    of_model = {name: cluster.gateway.itl_of(model=name).summary().num for name in ("model", "model-1", "model-2")}
    assert min(of_model.values()) > 0 and sum(of_model.values()) == cluster.gateway.itl_of().summary().num
    cluster.fleet.events.run(lambda: False, cluster.fleet.events.now + 10.0)
    for instance in cluster.fleet.instances.values():
        instance.engine.check()
        assert instance.ready_models == set(of_model)
        assert {instance.engine.pool.num_available(name) for name in of_model} == {128}
    assert capacity_rps(plan := Plan(device=A10, seeds=(1,), num_models=3), "M-M") < capacity_rps(
        msgspec.structs.replace(plan, num_models=1), "M-M"
    ), "models take turns"


@pytest.mark.long
def test_a_batch_gets_what_is_left_and_does_not_keep_a_run_from_ending() -> None:
    jobs = draw_jobs(Workload(mix="S-S", rate_rps=4.0, num_requests=60), A10, 1)
    alone, beside = (
        Cluster(A10, SYSTEMS["tideway"], jobs, seed=1, num_models=2, has_batch=has_batch) for has_batch in (False, True)
    )
    alone.run()
    beside.run()
    assert alone.offline_tokens_s == 0 < 2000 < beside.offline_tokens_s
    assert len(alone.records) == len(beside.records) == 60 < len(beside.gateway.records)
    assert beside.gateway.itl_of(RequestClass.OFFLINE).summary().num > 1000
    assert np.percentile([record.ttft_s for record in beside.records], 99) < A10.ttft_s
    one = figures_of("case", "tideway", [beside])
    assert (one.num_requests, one.itl.num) == (60, sum(record.num_tokens - 1 for record in beside.records))
    assert "offline tokens/s" in Experiment(name="e", about="", figures=[one]).markdown()


def test_a_drained_instance_is_emptied_by_moving_what_it_has() -> None:
    jobs = [Job(0.01 * number, 200, 300) for number in range(16)]
    cluster = Cluster(A10, SYSTEMS["tideway"], jobs)
    cluster.fleet.events.at(3.0, cluster.fleet.drain, "instance-0")
    records = cluster.run().records
    assert 3.0 < cluster.fleet.emptied_s["instance-0"] < 5.0
    assert sum(record.num_migrations for record in records) == 4
    assert len(cluster.gateway.pauses) == 4
    assert all(0 < pause < 5 * step_s for _, pause, step_s in cluster.gateway.pauses)


def test_requests_move_to_an_instance_with_long_prompts_without_a_long_pause() -> None:
    """Without the wait for the end of a step, and short steps while somebody comes, the pauses are 16 to 24 steps."""
    decoding = [Job(0.01 * number, 200, 600) for number in range(8)]
    prompts = [Job(2.5 + 0.9 * number, 5000, 10) for number in range(8)]
    cluster = Cluster(A10, SYSTEMS["tideway"], decoding + prompts, num_instances=2)
    cluster.fleet.events.at(3.0, cluster.fleet.drain, "instance-0")
    cluster.run()
    steps = [pause / step_s for _, pause, step_s in cluster.gateway.pauses]
    assert len(steps) >= 4 and max(steps) < 3.0


@pytest.mark.long
def test_long_prompts_do_not_starve_while_short_ones_move_in_circles() -> None:
    jobs = chats_and_long_prompts(6.0, 60.0, A10, 3)
    records = Cluster(A10, SYSTEMS["tideway"], jobs).run().records
    unmoved = Cluster(A10, SYSTEMS["late"], jobs).run().records
    long = long_prompt_tokens(A10)
    worst_s, unmoved_s = (max(r.start_s for r in of if r.prompt_tokens == long) for of in (records, unmoved))
    assert worst_s <= 1.2 * unmoved_s
    assert sum(record.num_migrations for record in records) <= 150 and max(r.num_migrations for r in records) <= 4


def test_prompts_go_where_they_are_begun_soonest() -> None:
    workload = Workload(mix=PREFILL_MIX, rate_rps=3.0, num_requests=80, cv=2.0)
    drawn = [draw_jobs(workload, A10, seed) for seed in (1, 2)]

    def mean_ttft_s(system: System) -> float:
        return float(np.mean([record.ttft_s for jobs in drawn for record in Cluster(A10, system, jobs).run().records]))

    ours_s = mean_ttft_s(SYSTEMS["tideway"])
    by_memory_s = mean_ttft_s(msgspec.structs.replace(SYSTEMS["tideway"], dispatch="freeness"))
    assert ours_s < 0.95 * by_memory_s
    assert ours_s < min(mean_ttft_s(SYSTEMS[name]) for name in ("infaas++", "round_robin"))


@pytest.mark.slow
def test_a_fleet_grows_under_load_and_shrinks_after_it() -> None:
    device = small()
    jobs = [Job(0.1 * number, 100, 700) for number in range(40)] + [Job(60.0 + number, 100, 20) for number in range(40)]
    bounds = {"scale_low": 100.0, "scale_high": 400.0, "scale_period_s": 5.0, "max_instances": 4}
    system = msgspec.structs.replace(SYSTEMS["tideway"], scheduler=bounds)
    cluster = Cluster(device, system, jobs, num_instances=1, seed=0, start_s=2.0)
    cluster.run()
    assert cluster.scaling is not None and (num_started := cluster.scaling.num_started) >= 2
    assert len(cluster.fleet.instances) < 1 + num_started
    assert 1.0 < cluster.mean_instances() < 1 + num_started


@pytest.mark.long
def test_a_fleet_short_of_time_and_not_of_memory_grows_at_once_and_does_not_swing() -> None:
    """Prompts that take 0.3 s, in pools that they hardly fill: 0.45 instances' time at first, then 2.7."""
    draw = np.random.default_rng(5)
    slow, fast = draw.uniform(0.0, 120.0, 180), draw.uniform(120.0, 240.0, 1080)
    jobs = [Job(at_s, 6000, 20) for at_s in sorted([*slow.tolist(), *fast.tolist()])]
    system = msgspec.structs.replace(SYSTEMS["tideway"], scheduler={"max_instances": 12})
    cluster = Cluster(A100, system, jobs, num_instances=2, start_s=10.0)
    sizes, asked = list[tuple[float, str]](), cluster.fleet.scale
    cluster.fleet.scale = lambda action: (sizes.append((cluster.fleet.events.now, str(action))), asked(action))[1]
    cluster.run()
    up = [at_s for at_s, action in sizes if action.startswith("ScaleUp")]
    assert up and 120.0 < up[0] < 150.0 and len(up) <= 2
    assert all(at_s < 120.0 for at_s, action in sizes if action.startswith("DrainAction"))
    late = [record.ttft_s for record in cluster.gateway.records if record.arrival_s > 190.0]
    assert len(late) > 300 and np.percentile(late, 90) < 1.5


def test_a_miss_is_called_a_miss() -> None:
    cluster = Cluster(A10, SYSTEMS["tideway"], [Job(0.0, 10, 2)])
    cluster.run()
    base = figures_of("case", "tideway", [cluster])

    def figures(system: str, p99: float, num_preemptions: int) -> Figures:
        ttft = msgspec.structs.replace(base.ttft, p99=p99)
        return msgspec.structs.replace(base, system=system, ttft=ttft, num_preemptions=num_preemptions)

    def verdicts(mine: tuple[float, int]) -> list[bool]:
        lines = balance_verdicts(
            [figures("round_robin", 2.0, 10), figures("infaas++", 2.0, 10), figures("tideway", *mine)]
        )
        return [line.startswith("met") for line in lines if not line.startswith(" ")]

    assert verdicts((1.0, 3)) == [True] * 4
    assert verdicts((2.5, 4)) == [False] * 4


@pytest.mark.long
@pytest.mark.slow
def test_the_short_form_writes_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["balance", "drain", "models"]
    assert main([*names, "--short", "--mixes", "S-S", "--requests", "10", "--output", str(tmp_path)]) == 0
    for name in names:
        (file,) = tmp_path.glob(f"rebalance-{name}-a10-short-*.json")
        document = json.loads(file.read_text())
        result = msgspec.convert(document["result"], Experiment)
        assert result.markdown() in file.with_suffix(".md").read_text()
        assert result.verdicts and document["plan"]["seeds"] == [101] and document["machine"]["cores"]
        assert result.figures or result.rows
    assert "emptied" in capsys.readouterr().out


def test_an_ideal_cluster_trades_normal_for_high_latency_by_the_weight() -> None:
    workload = Workload(mix="S-S", rate_rps=8.0, num_requests=120, high_share=0.1)
    runs = [draw_jobs(workload, A10, 1)]
    found = curve(A10, 4, runs)
    assert 1.0 < found.gains[0] < found.gains[-1] and 1.0 <= found.losses[0] < found.losses[-1]
    high = [job for job in runs[0] if job.is_high]
    alone = np.mean([alone_s(A10, job) for job in high])
    assert ideal(A10, 4, runs[0], 1000.0).high_s > 0.99 * alone
    assert found.gain_at(1.0) == pytest.approx(1.0, abs=0.05) and found.loss_at(100.0) == np.inf


def test_a_request_alone_takes_what_the_bound_says() -> None:
    job = Job(0.5, 300, 40)
    cluster = Cluster(A10, SYSTEMS["tideway"], [job], noise=0.0)
    (record,) = cluster.run().records
    assert record.latency_s == pytest.approx(alone_s(A10, job), rel=0.02)
