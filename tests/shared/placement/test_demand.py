"""KV that requests of a plan hold, and the pools that are kept or made anew by it."""

from __future__ import annotations

import msgspec
import pytest

from shared.placement.demand import SLOWDOWN, kv_bytes
from shared.placement.places import incumbent_places, places, starved
from shared.placement.plan import ModelPrediction
from shared.placement.planner import POOL_HEADROOM
from shared.placement.problem import Group, Plan, Prediction, Problem, traffic
from shared.placement.replacement import Replacement, ReplacementSettings
from shared.placement.search import search
from tests.shared.placement.small import GB, model, node, problem

A, B = model("a"), model("b")
BOTH = Plan((Group("n0", (0,), ("a", "b")),))
ALONE = Plan((Group("n0", (0,), ("a",)),))


def given(*rows: tuple[float, str, int, int, bool], **fields: object) -> Problem:
    empty = problem([A, B], [node(num_devices=1)], (0, 0))
    return msgspec.structs.replace(empty, **({"traffic": traffic(rows, 60.0, ["a", "b"])} | fields))


def block_bytes(num_requests: int, num_tokens: int) -> int:
    return num_requests * -(-num_tokens // 16) * A.block_bytes


def test_it_is_what_is_held_at_the_busiest_moment_of_each_model() -> None:
    apart = [(0.0, "a", 100, 10, True), (30.0, "a", 500, 10, True), (0.0, "b", 40, 10, True)]
    assert kv_bytes(given(*apart), BOTH) == {"n0-0": block_bytes(1, 510) + block_bytes(1, 50)}
    together = [(1.0, "a", 500, 10, True)] * 3
    assert kv_bytes(given(*together), ALONE) == {"n0-0": block_bytes(3, 510)}
    spread = Plan((Group("n0", (0,), ("a",)), Group("n0", (1,), ("a",))))
    assert kv_bytes(given(*together), spread) == dict.fromkeys(("n0-0", "n0-1"), block_bytes(3, 510) // 2)
    assert kv_bytes(given(*together), spread, only=["n0-1"]) == {"n0-0": 0, "n0-1": block_bytes(3, 510) // 2}


def test_offline_requests_and_models_without_traffic_hold_nothing() -> None:
    assert kv_bytes(given((0.0, "a", 500, 10, False)), BOTH) == {"n0-0": 0}
    assert kv_bytes(given(traffic=traffic([(0.0, "b", 9, 9, True)], 60.0, ["b"])), ALONE) == {"n0-0": 0}


def test_what_is_sent_while_another_runs_is_held_beside_it() -> None:
    alone_s = 0.013 * 1000  # decode steps
    beside = [(0.0, "a", 100, 1000, True), (0.9 * SLOWDOWN * alone_s, "a", 100, 1000, True)]
    assert kv_bytes(given(*beside), ALONE) == {"n0-0": block_bytes(2, 1100)}


@pytest.mark.parametrize(("share", "is_kept"), [(0.9, True), (1.1, False)])
def test_a_pool_that_holds_twice_what_is_asked_of_it_stays(share: float, is_kept: bool) -> None:
    before = places(given(), BOTH)
    fill = int(share * before[0].pool_bytes / POOL_HEADROOM / block_bytes(1, 2000))
    after = places(given(*[(1.0, "a", 1900, 100, True)] * fill), ALONE, before)
    assert (after[0].pool_bytes == before[0].pool_bytes) is is_kept


def measured(num_requests: int, attainment: float) -> Prediction:
    of_a = ModelPrediction(
        num_requests=num_requests, attainment=attainment, normalised_latency=2.0, mean_latency_s=2.0, p99_latency_s=3.0
    )
    return Prediction(attainment=attainment, normalised_latency=2.0, models={"a": of_a})


def test_a_pool_that_requests_fill_is_made_larger_if_it_can_be() -> None:
    settings = ReplacementSettings()

    def asked(num: int, plan: Plan, pool_bytes: int) -> Problem:
        has = {"n0-0": (pool_bytes, places(given(), plan)[0].merged_bytes)}
        return given(*[(1.0, "a", 1900, 100, True)] * num, incumbent=plan, pools=has)

    full = asked(40, ALONE, 30 * GB)
    assert [place.pool_bytes for place in incumbent_places(full)] == [30 * GB]
    assert starved(full, {"a"}) == ["n0-0"]
    assert starved(full, {"b"}) == [], "who is late is not there"
    assert starved(asked(15, ALONE, 30 * GB), {"a"}) == [], "half full"
    assert starved(msgspec.structs.replace(full, pools={}), {"a"}) == [], "as large as it can be"
    only_a = msgspec.structs.replace(full, models=(A,))
    found = search(only_a)
    assert found.plan == ALONE
    late = measured(40, 0.9)
    verdict = Replacement(settings, 0.0).judge(found, only_a, late)
    assert verdict.is_worth and verdict.cause == "larger_pools" and "n0-0" in verdict.reason
    assert verdict.starved == ["n0-0"]
    for what in (measured(40, 1.0), measured(settings.least_requests - 1, 0.5), None):
        assert Replacement(settings, 0.0).judge(found, only_a, what).cause == "same_plan"
    assert Replacement(settings, 0.0).judge(found, msgspec.structs.replace(only_a, pools={}), late).cause == "same_plan"
