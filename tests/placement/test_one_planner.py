"""What is planned live and what the search and the simulation plan for the same cluster: the same."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.footprint import ConfiguredModel
from services.placement.live_problem import live_problem
from services.placement.planning import plan, planner_of
from shared.messages.cluster import InstancePlan, NodeInfo, PlacementPlan
from shared.placement import places
from shared.placement.demand import kv_bytes
from shared.placement.memory import Memory
from shared.placement.plan import Group, Plan, group_of
from shared.placement.planner import DoesNotFit
from shared.placement.problem import Problem, traffic
from tests.placement.test_planning import GIB, chosen, model, node, on_demand

MOST_RANKS = 4


def problem_of(models: list[ConfiguredModel], nodes: list[NodeInfo], running: list[InstancePlan]) -> Problem:
    awake = [one for one in models if not one.asleep]
    rows = [(float(k), one.spec.name, 200, 100, True) for k, one in enumerate(awake)]
    return live_problem(
        models, nodes, running, (), [], traffic(rows, 60.0), {}, slo_scale=5.0, max_models_per_group=0,
        max_ranks=MOST_RANKS,
    )  # fmt: skip


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[ConfiguredModel], list[NodeInfo]]:
    models = [
        model(f"m{k}", draw(st.integers(50, 3000)), layers=draw(st.sampled_from([12, 16, 30])),
              kv_heads=draw(st.sampled_from([4, 8])))
        for k in range(draw(st.integers(1, 4)))
    ]  # fmt: skip
    if draw(st.booleans()):
        asleep = draw(st.sampled_from(["", "idle"]))
        models.append(on_demand("demanded", draw(st.integers(50, 1500)), asleep=asleep))
    if draw(st.booleans()):
        # Its LoRA adapters.
        shape = msgspec.structs.replace(models[0].shape, adapter_bytes=draw(st.integers(1, 200)) << 20)
        models[0] = replace(models[0], shape=shape)
    if draw(st.booleans()):
        # The same weights under another name.
        models.append(replace(models[0], spec=msgspec.structs.replace(models[0].spec, name="again")))
    devices = draw(st.lists(st.sampled_from(["cpu", "cuda"]), min_size=1, max_size=2))
    return models, [node(f"n{k}", draw(st.integers(4, 40)) * GIB, 4, device) for k, device in enumerate(devices)]


@st.composite
def assignments(draw: st.DrawFn, models: list[ConfiguredModel], nodes: list[NodeInfo]) -> Plan:
    groups, names = [], [one.spec.name for one in models if not one.asleep]
    for each in nodes:
        first = 0
        while first < each.num_instances:
            size = draw(st.sampled_from([p for p in (1, 2, 4) if first % p == 0 and first + p <= each.num_instances]))
            if held := draw(st.sets(st.sampled_from(names), max_size=3)):
                groups.append(Group(each.node_id, tuple(range(first, first + size)), tuple(sorted(held))))
            first += size
    return Plan(tuple(sorted(groups)))


def told(instances: list[InstancePlan]) -> list[tuple[Group, int, int]]:
    """All that decides what an instance is."""
    return sorted((group_of(place), place.pool_bytes, place.merged_bytes) for place in instances)


def had(models: list[ConfiguredModel], nodes: list[NodeInfo], wanted: Plan, before: PlacementPlan) -> PlacementPlan:
    held = kv_bytes(problem_of(models, nodes, before.instances), wanted)
    instances = chosen(models, nodes, before, wanted.groups, kv_bytes=held)
    return msgspec.structs.replace(before, instances=instances, is_chosen=True)


def fitting(problem: Problem, wanted: Plan) -> Plan:
    """The groups of these that fit, as the search sees it."""
    nodes, memory = {one.node_id: one for one in problem.nodes}, Memory(problem)
    return Plan(
        tuple(
            group for group in wanted.groups
            if not memory.why_not(group.models, nodes[group.node_id], group.num_ranks)
        )
    )  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(clusters(), st.data())
def test_groups_fit_live_where_the_search_has_them_fit(cluster, data):
    models, nodes = cluster
    wanted = data.draw(assignments(models, nodes))
    fit = fitting(problem_of(models, nodes, []), wanted)
    for group in wanted.groups:
        try:
            chosen(models, nodes, PlacementPlan(0, []), [group])
        except DoesNotFit:
            assert group not in fit.groups
        else:
            assert group in fit.groups


@settings(max_examples=20, deadline=None)
@given(clusters(), st.data())
def test_instances_have_the_pools_that_the_search_and_the_simulation_expect(cluster, data):
    models, nodes = cluster
    empty = problem_of(models, nodes, [])
    first, second = (fitting(empty, data.draw(assignments(models, nodes))) for _ in range(2))
    live = had(models, nodes, first, PlacementPlan(0, []))
    simulated = places.places(empty, first)
    assert told(live.instances) == told(simulated)
    problem = problem_of(models, nodes, live.instances)
    assert told(had(models, nodes, second, live).instances) == told(places.places(problem, second, live.instances))


@settings(max_examples=20, deadline=None)
@given(clusters(), st.data())
def test_what_fits_beside_a_pool_live_does_so_in_the_simulation(cluster, data):
    models, nodes = cluster
    live = had(
        models,
        nodes,
        fitting(problem_of(models, nodes, []), data.draw(assignments(models, nodes))),
        PlacementPlan(0, []),
    )
    specs = [one.spec for one in models if not one.asleep]
    can_hold, can_hold_simulated = (
        planner_of(models, nodes).fits,
        places.fits(problem_of(models, nodes, live.instances)),
    )
    for place in live.instances:
        for spec in specs:
            both = [*place.models, spec]
            assert can_hold(place, both) == can_hold_simulated(place, both), (place, spec)


@settings(max_examples=20, deadline=None)
@given(clusters(), st.data())
def test_a_new_model_goes_where_the_simulation_puts_it(cluster, data):
    models, nodes = cluster
    wanted = data.draw(assignments(models, nodes))
    live = had(models, nodes, fitting(problem_of(models, nodes, []), wanted), PlacementPlan(0, []))
    after = plan(models, nodes, live)
    problem = problem_of(models, nodes, live.instances)
    running = places.places(problem, problem.incumbent, live.instances)
    assert told([place for place in after.instances if place.models]) == told(places.with_new_models(problem, running))
