from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from shared.placement.baselines import Evaluate, NoPlacement, alpaserve, dedicated, dedicated_by_need, muxserve
from shared.placement.facts import SHAPES, model_facts, node_facts
from shared.placement.hardware import HARDWARE
from shared.placement.memory import Memory
from shared.placement.problem import Group, ModelPrediction, Plan, Prediction, Problem, traffic
from shared.policies.multiplexing import UNITS

A800 = HARDWARE["A800-80G"]
SMALL, LARGE = "llama-2-7b", "llama-2-70b"


def problem(shapes: Sequence[str], rates: Sequence[float], *, num_nodes: int = 1, num_devices: int = 8) -> Problem:
    """100 s of requests of each model, evenly spaced."""
    models = tuple(model_facts(f"{number}-{shape}", SHAPES[shape], [A800]) for number, shape in enumerate(shapes))
    rows = [
        (number / rate, model.name, 500, 100, True)
        for model, rate in zip(models, rates, strict=True)
        for number in range(int(100 * rate))
    ]
    nodes = tuple(node_facts(f"node-{number}", A800, num_devices) for number in range(num_nodes))
    return Problem(nodes=nodes, models=models, traffic=traffic(rows, 100.0, [model.name for model in models]))


def by_devices(problem: Problem, plan: Plan) -> Prediction:
    """The load of a group is its share of the requests, each some time per gigabyte of weights and device; of a load above 1
    the rest is not served in time."""
    counts = dict(
        zip(problem.traffic.models, np.bincount(problem.traffic.model, minlength=len(problem.models)), strict=True)
    )
    held = {model.name: sum(model.name in group.models for group in plan.groups) for model in problem.models}
    load = {
        group.instance_id: sum(
            counts[model.name] / held[model.name] * model.weight_bytes * 3e-13 / group.num_ranks
            for model in problem.models
            if model.name in group.models
        )
        for group in plan.groups
    }
    predictions = {}
    for model in problem.models:
        loads = [load[group.instance_id] for group in plan.groups if model.name in group.models]
        mean = sum(loads) / len(loads) if loads else 0.0
        predictions[model.name] = ModelPrediction(
            num_requests=int(counts[model.name]), attainment=min(1.0, 1 / mean) if mean else 0.0,
            normalised_latency=mean, mean_latency_s=mean, p99_latency_s=mean,
        )  # fmt: skip
    total = sum(counts.values())
    return Prediction(
        attainment=float(sum(one.attainment * one.num_requests for one in predictions.values()) / total),
        normalised_latency=float(sum(one.normalised_latency * one.num_requests for one in predictions.values()) / total),
        models=predictions, use=load,
    )  # fmt: skip


def check(problem: Problem, groups: Sequence[Group]) -> None:
    """Each model somewhere, no device twice, all within memory."""
    models, memory = {model.name: model for model in problem.models}, Memory(problem)
    nodes = {node.node_id: node for node in problem.nodes}
    devices = [(group.node_id, index) for group in groups for index in group.devices]
    assert len(set(devices)) == len(devices)
    assert {name for group in groups for name in group.models} == set(models)
    for group in groups:
        assert not memory.why_not(group.models, nodes[group.node_id], group.num_ranks)


@pytest.mark.parametrize(("num_nodes", "num_devices"), [(4, 8), (3, 8), (6, 8)])
def test_dedicated_gives_each_model_as_many_devices(num_nodes: int, num_devices: int) -> None:
    case = problem([LARGE, SMALL] * 4, [1.0] * 8, num_nodes=num_nodes, num_devices=num_devices)
    if num_nodes == 3:
        case = problem([SMALL] * 8, [1.0] * 8, num_nodes=3)
    groups = dedicated(case, by_devices).groups
    check(case, groups)
    for model in case.models:
        own = [group for group in groups if group.models == (model.name,)]
        assert sum(group.num_ranks for group in own) <= num_nodes * num_devices // 8
    assert all(len(group.models) == 1 for group in groups)


def test_dedicated_says_which_model_its_share_does_not_hold() -> None:
    with pytest.raises(NoPlacement, match=f"0-{LARGE}"):
        dedicated(problem([LARGE, SMALL], [1.0, 1.0], num_devices=2), by_devices)


def test_devices_go_to_whom_most_are_unserved_and_nobody_shares() -> None:
    case = problem([SMALL, SMALL, LARGE, LARGE], [40.0, 1.0, 0.2, 0.2], num_nodes=4, num_devices=4)
    groups = dedicated_by_need(case, by_devices).groups
    check(case, groups)
    assert all(len(group.models) == 1 for group in groups)
    devices = [sum(group.num_ranks for group in groups if model.name in group.models) for model in case.models]
    assert sum(devices) == 16, "none is idle"
    assert devices[0] > 4 and devices[1] < 4, "each has as much as it needs, not an even share"


def test_nobody_has_devices_of_its_own_where_there_are_too_few() -> None:
    with pytest.raises(NoPlacement):
        dedicated_by_need(problem([LARGE, LARGE, SMALL], [1.0, 1.0, 1.0], num_devices=4), by_devices)


def test_alpaserve_gives_replicas_to_whom_most_are_unserved() -> None:
    case = problem([SMALL, SMALL, SMALL], [18.0, 1.0, 0.2], num_nodes=8, num_devices=1)
    groups = alpaserve(case, by_devices).groups
    check(case, groups)
    held = [sum(model.name in group.models for group in groups) for model in case.models]
    assert held[0] == 8, "with seven, some of its requests would not be served in time"


@pytest.mark.parametrize("place", [alpaserve, dedicated_by_need])
def test_no_device_is_left_idle_where_all_are_served_in_time(place: Callable[[Problem, Evaluate], Plan]) -> None:
    case = problem([SMALL, SMALL, SMALL], [0.8, 0.1, 0.02], num_nodes=8, num_devices=1)
    groups = place(case, by_devices).groups
    check(case, groups)
    assert len(groups) == 8
    held = [sum(model.name in group.models for group in groups) for model in case.models]
    assert held[0] == max(held)


def test_alpaserve_says_that_not_all_fit() -> None:
    with pytest.raises(NoPlacement, match=LARGE):
        alpaserve(problem([LARGE], [1.0], num_devices=1), by_devices)
    with pytest.raises(NoPlacement, match="together"):
        alpaserve(problem([LARGE, LARGE], [1.0, 1.0], num_devices=4), by_devices)


def test_muxserve_gives_each_model_one_mesh_and_units_beside_which_decodes_go_on() -> None:
    case = problem([LARGE, SMALL, SMALL, SMALL], [1.0, 20.0, 5.0, 0.5], num_nodes=2)
    units = muxserve(case)
    check(case, [unit.group for unit in units])
    assert sum(len(unit.group.models) for unit in units) == 4
    for unit in units:
        assert set(unit.units) == set(unit.group.models)
        assert all(own.prefill + own.decode <= UNITS + 2 for own in unit.units.values())


def test_muxserve_says_that_not_all_fit() -> None:
    with pytest.raises(NoPlacement):
        muxserve(problem([LARGE, LARGE], [1.0, 1.0], num_devices=4))
