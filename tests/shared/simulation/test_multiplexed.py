"""MuxServe's placement under a problem's traffic."""

from __future__ import annotations

import msgspec
import pytest

from shared.placement.baselines import NoPlacement, muxserve
from shared.placement.facts import SHAPES, model_facts, node_facts
from shared.placement.hardware import A800_80G
from shared.placement.problem import Problem, traffic
from shared.simulation.multiplexed import SplitKv, simulate

NAMES = ("llama-2-7b", "opt-6.7b")
ROWS = [(0.2 * number, NAMES[number % 2], 100 + 7 * number, 10 + number % 5, True) for number in range(20)]
PROBLEM = Problem(
    nodes=(node_facts("node", A800_80G, 2),),
    models=tuple(model_facts(name, SHAPES[name], [A800_80G]) for name in NAMES),
    traffic=traffic(
        [*ROWS, (5.0, NAMES[0], 4000, 97, True), (5.0, NAMES[1], 100, 10, False)], 10.0, NAMES
    ),
)  # fmt: skip
UNITS = muxserve(PROBLEM)


def test_what_can_be_sent_is_served_and_devices_time_is_divided_over_models() -> None:
    heard: list[float] = []
    outcome = simulate(PROBLEM, UNITS, on_progress=heard.append)
    assert outcome.is_over and heard[-1] == 1.0
    # One is longer than its model allows, one is offline: both are not sent.
    assert outcome.requests.is_done.sum() == 20 and outcome.metrics.total.num_unserved == 1
    assert (outcome.requests.num_tokens == PROBLEM.traffic.output_tokens)[outcome.requests.is_done].all()
    total = outcome.metrics.total
    used = sum(unit.group.num_ranks * outcome.metrics.use[unit.group.instance_id] for unit in UNITS)
    assert 0 < total.use < 1 and total.use == pytest.approx(used / 2)
    assert total.use == pytest.approx(sum(one.use for one in outcome.metrics.models.values()))
    assert simulate(PROBLEM, UNITS).metrics == outcome.metrics, "the same again"


def test_a_split_cache_costs_its_overhead() -> None:
    slow, plain = (simulate(PROBLEM, UNITS, SplitKv(overhead=overhead)).metrics.total for overhead in (1.5, 1.0))
    assert 1.4 < slow.tpot_s.mean / plain.tpot_s.mean < 1.6


def test_a_run_ends_with_its_patience() -> None:
    rows = [(0.0, NAMES[0], 2000, 2000, True) for _ in range(4)]
    outcome = simulate(msgspec.structs.replace(PROBLEM, traffic=traffic(rows, 1.0, NAMES)), UNITS, patience_s=5.0)
    assert not outcome.is_over and outcome.metrics.total.num_unserved == 4


def test_models_too_long_for_the_pool_are_refused() -> None:
    long = [msgspec.structs.replace(model, max_model_len=1 << 20) for model in PROBLEM.models]
    with pytest.raises(NoPlacement, match="node-0: a pool of"):
        simulate(msgspec.structs.replace(PROBLEM, models=tuple(long)), UNITS)
