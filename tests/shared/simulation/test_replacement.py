"""Adaptive replacement in virtual time: a fleet whose traffic turns to another model."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from shared.placement.facts import SHAPES, model_facts, node_facts
from shared.placement.hardware import A800_80G
from shared.placement.places import fits, places, with_new_models
from shared.placement.plan import group_of
from shared.placement.problem import ChangeTimes, Group, ModelPrediction, Plan, Prediction, Problem, Proposal, traffic
from shared.placement.replacement import ReplacementSettings
from shared.simulation.deployment import LIVE, deploy
from shared.simulation.fleet import Fleet
from shared.simulation.gateway import Job
from shared.simulation.replacement import FleetReplacement

A, B, C = "llama-2-13b", "opt-13b", "llama-2-7b"
SETTINGS = ReplacementSettings(initial_s=12, least_s=10, most_s=120)


def problem(*names: str) -> Problem:
    return Problem(
        nodes=(node_facts("n", A800_80G, 4),),
        models=tuple(model_facts(name, SHAPES[name], [A800_80G], ranks=(1, 2)) for name in names),
        traffic=traffic([], 1.0, names),
        execution_s={A: 1.5, B: 1.5, C: 1.0},
        times=ChangeTimes(restart_s=5),
    )


def plan(*groups: tuple[tuple[int, ...], tuple[str, ...]]) -> Plan:
    return Plan(tuple(Group("n", devices, models) for devices, models in groups))


MOSTLY_A = plan(((0,), (A,)), ((1,), (A,)), ((2,), (A,)), ((3,), (B,)))
MOSTLY_B = plan(((0,), (A,)), ((1,), (B,)), ((2,), (B,)), ((3,), (B,)))


def by_share(given: Problem) -> Proposal:
    """The plan that has most groups for the model with most requests, whose traffic it serves well."""
    counts = np.bincount(given.traffic.model, minlength=len(given.traffic.models))
    most = given.traffic.models[int(np.argmax(counts))]
    best = MOSTLY_B if most == B else MOSTLY_A
    good, bad = (
        Prediction(
            attainment=attainment, normalised_latency=latency,
            models={
                name: ModelPrediction(
                    num_requests=int(num), attainment=attainment, normalised_latency=latency,
                    mean_latency_s=latency, p99_latency_s=latency,
                )
                for name, num in zip(given.traffic.models, counts, strict=True)
            },
        )
        for attainment, latency in ((1.0, 1.0), (0.3, 9.0))
    )  # fmt: skip
    return Proposal(plan=best, prediction=good, incumbent=good if given.incumbent == best else bad, rejected=())


def jobs(seed: int, until_s: float, turn_s: float, rate: float) -> list[Job]:
    """Nine of ten for A, from `turn_s` on for B."""
    draw = np.random.default_rng(seed)
    times = np.cumsum(draw.exponential(1 / rate, int(until_s * rate)))
    few = draw.random(len(times)) < 0.1
    return [
        Job(float(at_s), 600, 60, model=B if (at_s >= turn_s) != is_few else A)
        for at_s, is_few in zip(times, few, strict=True)
    ]


def run(settings: ReplacementSettings) -> tuple[Fleet, FleetReplacement]:
    given = problem(A, B)
    fleet = LIVE.fleet(1)
    deploy(fleet, given, MOSTLY_A)
    replacement = FleetReplacement(fleet, given, MOSTLY_A, by_share, settings=settings, search_s=2.0)
    fleet.run(jobs(1, 60, 10, 12.0))
    return fleet, replacement


@pytest.mark.slow
def test_a_fleet_follows_its_traffic_without_losing_a_request() -> None:
    fixed, without = run(ReplacementSettings(initial_s=math.inf, most_s=math.inf))
    fleet, replacement = run(SETTINGS)
    assert not without.searches
    changes = replacement.changes
    assert changes and all(change.stage == "carried_out" and not change.interrupted for change in changes), changes
    assert replacement.plan == MOSTLY_B
    assert {i: set(instance.model_states) for i, instance in fleet.instances.items()} == {
        group.instance_id: set(group.models) for group in MOSTLY_B.groups
    }
    latencies = [np.mean([r.latency_s for r in f.gateway.records]) for f in (fleet, fixed)]
    assert latencies[0] < 0.7 * latencies[1]
    # The traffic turned, which no prediction foresaw.
    assert max(search.deviation or 0 for search in replacement.searches) > 0.1
    assert replacement.searches[-1].interval_s < SETTINGS.initial_s


def test_a_plan_that_fails_is_seen_though_slos_are_longer_than_looks() -> None:
    given = problem(A, B)
    expected = [(0.1 * number, B, 600, 60, True) for number in range(60)]
    predicted = by_share(
        msgspec.structs.replace(given, traffic=traffic(expected, 6.0, (A, B)), incumbent=MOSTLY_A)
    ).prediction
    fleet = LIVE.fleet(1)
    deploy(fleet, given, MOSTLY_A)
    settings = ReplacementSettings(initial_s=100, least_s=6)
    assert settings.least_s < given.slo_scale_of(B) * given.execution_s[B]
    replacement = FleetReplacement(fleet, given, MOSTLY_A, by_share, settings=settings, predicted=predicted)
    records = fleet.run(jobs(1, 15, 0, 20.0)).records
    first = replacement.searches[0]
    assert first.why.startswith("attainment fell") and first.at_s < 30.0
    # Each request is in one interval.
    measured = [replacement.measured(at_s, at_s + 5.0) for at_s in range(0, 500, 5)]
    assert sum(one.models[name].num_requests for one in measured for name in (A, B)) == len(records)


def test_searches_go_by_what_came_before_the_run_too() -> None:
    given, asked = problem(A, B), list[Problem]()

    def search(one: Problem) -> Proposal:
        asked.append(one)
        return by_share(one)

    fleet = LIVE.fleet(1)
    deploy(fleet, given, MOSTLY_A)
    past = traffic([(number + 0.5, A, 600, 60, True) for number in range(100)], 100.0, (A, B))
    FleetReplacement(fleet, given, MOSTLY_A, search, settings=SETTINGS, past=past)
    fleet.run(jobs(1, 20, 0, 2.0))
    window, evidence = asked[0].traffic, asked[0].evidence
    assert evidence is not None
    # The interval's 12 s are of the run; the longest horizon goes back to where the past begins.
    assert window.interval_s == 12.0 and evidence.interval_s == 112.0
    assert evidence.num_requests == window.num_requests + 100
    assert evidence.arrival_s[:2].tolist() == [0.5, 1.5]


def test_a_plan_that_cannot_be_had_is_told_and_the_next_search_comes() -> None:
    given = problem(A, B)

    def search(one: Problem) -> Proposal:
        nowhere = plan(*((group.devices, group.models) for group in MOSTLY_B.groups[:3]), ((9,), (B,)))
        return msgspec.structs.replace(by_share(one), plan=nowhere)

    fleet = LIVE.fleet(1)
    deploy(fleet, given, MOSTLY_A)
    replacement = FleetReplacement(fleet, given, MOSTLY_A, search, settings=SETTINGS)
    fleet.run(jobs(1, 60, 0, 2.0))
    assert len(replacement.problems) > 1 and "n-9" in replacement.problems[0]
    assert not replacement.searches and not replacement.changes and replacement.plan == MOSTLY_A


def test_a_new_model_is_placed_at_once_where_there_is_room() -> None:
    given = problem(A, B)
    fleet = LIVE.fleet(1)
    first = plan(((0,), (A,)), ((1,), (B,)))
    deploy(fleet, given, first)
    replacement = FleetReplacement(fleet, given, first, by_share, settings=SETTINGS)
    fleet.events.at(1.0, replacement.add_model, problem(C).models[0])
    records = fleet.run([Job(0.1, 600, 40, model=A), Job(0.2, 600, 40, model=B), Job(2.0, 600, 40, model=C)]).records
    assert replacement.plan == plan(((0,), (A,)), ((1,), (B,)), ((2,), (C,)))
    load_s = given.models[0].weight_bytes / given.nodes[0].load_bytes_s
    assert 6.0 < records[2].first_s < 7.0 + load_s
    assert replacement.core.since_s >= 1.0, "a search was begun at once"


def test_pools_stay_where_models_fit_beside_them() -> None:
    given = problem(A, B, C)
    both = places(given, plan(((0,), (A, B))))
    assert places(given, plan(((0,), (A,))), both)[0].pool_bytes == both[0].pool_bytes, "nobody needs a larger one"
    at_once = [(1.0, A, 4000, 500, True)] * 12
    busy = msgspec.structs.replace(given, traffic=traffic(at_once, 60.0, [A]))
    alone = places(busy, plan(((0,), (A,))), both)
    # Without the other's 26 GB of weights the pool would be much larger.
    assert alone[0].pool_bytes > 1.25 * both[0].pool_bytes
    assert places(given, plan(((0,), (A, B))), both) == both
    small = [msgspec.structs.replace(both[0], models=both[0].models[:1])]
    again = places(given, plan(((0,), (A, B))), small)
    assert again == both, "loaded beside the pool that runs"
    assert fits(given)(both[0], both[0].models) and not fits(given)(alone[0], both[0].models)
    assert group_of(with_new_models(given, both)[-1]) == Group("n", (1,), (C,))
