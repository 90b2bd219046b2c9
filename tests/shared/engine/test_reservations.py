"""What the destination of a migration reserves, refuses and frees."""

from __future__ import annotations

import msgspec
import pytest

from shared.costs.model import shape_of
from shared.engine.calls import OnTime, Pin, RemoveModel, Reserve, SetCostModel, Submit, Unreserve
from shared.engine.handover import Reservation
from shared.engine.leaders import EXPECTED_S, EXPECTED_STEPS
from shared.engine.sequence import State
from shared.messages.migration import MigrationReason
from shared.messages.requests import ErrorCode, Priority, RequestClass
from tests.shared.costs import costs
from tests.shared.engine.fake_executor import request
from tests.shared.engine.moves_setup import OFFLINE, make, run, stage


def announced(prompt_tokens=10, steps=1):
    """A source whose request `r` has made some tokens, and its pinned blocks."""
    node = make()
    node.engine.apply(Submit(request("r", list(range(prompt_tokens)), 20)), 0.0)
    run(node, steps)
    return node, node.engine.apply(Pin("r", 0), 0.0)


def test_reserve_finds_the_prefix_extends_and_is_answered_alike():
    _, pinned = announced()
    node = make()
    node.engine.apply(Submit(request("other", list(range(7)), 1)), 0.0)
    run(node, 1)
    assert node.engine.pool.used_merged() == 0
    answer = node.engine.apply(Reserve(stage(node, pinned)), 0.0)
    assert answer.num_held == 1 and len(answer.blocks) == 1
    assert node.engine.apply(Reserve(stage(node, pinned)), 0.0) == answer
    later = node.engine.apply(Reserve(stage(node, None, number=1, first_block=2, num_blocks=2)), 0.0)
    assert later.num_held == 0 and len(later.blocks) == 2
    assert node.engine.pool.used_merged() == pytest.approx(4 / 3) and node.engine.memory.num_free_rows == 7
    assert not node.engine.apply(RemoveModel("a"), 0.0)
    node.engine.check()
    node.engine.apply(Unreserve("m"), 0.0)
    node.engine.apply(Unreserve("m"), 0.0)
    assert node.engine.pool.used_merged() == 0 and node.engine.memory.num_free_rows == 8
    assert node.engine.pool.find("a", [pinned.hashes[:16]]), "what was held is cached as before"
    node.engine.check()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"block_size": 8}, ErrorCode.BAD_REQUEST),
        ({"max_tokens": 61}, ErrorCode.TOO_LONG),
        ({"first_block": 1}, ErrorCode.GONE),
        ({"num_blocks": 1}, ErrorCode.BAD_REQUEST),
        ({"on_host": True}, ErrorCode.OVERLOADED),
        ({"num_blocks": 61}, ErrorCode.OVERLOADED),
    ],
)
def test_reserve_refuses(fields, code):
    _, pinned = announced()
    node = make()
    assert node.engine.apply(Reserve(stage(node, pinned, **fields)), 0.0).code == code
    assert node.engine.pool.used_merged() == 0 and node.engine.memory.num_free_rows == 8
    node.engine.check()


def test_reserve_refuses_an_unknown_model_and_a_gap():
    _, pinned = announced()
    node = make()
    unknown = msgspec.structs.replace(stage(node, pinned), model="b")
    assert node.engine.apply(Reserve(unknown), 0.0).code == ErrorCode.GONE
    assert isinstance(node.engine.apply(Reserve(stage(node, pinned)), 0.0), Reservation)
    gap = stage(node, None, number=1, first_block=3, num_blocks=1)
    assert node.engine.apply(Reserve(gap), 0.0).code == ErrorCode.BAD_REQUEST


def test_memory_that_an_online_request_waits_for_is_nobody_elses():
    _, pinned = announced()
    node = make(num_merged=8, rows=4)
    node.engine.apply(Submit(request("here", list(range(20)), 20)), 0.0)
    run(node, 1)
    before = stage(node, pinned, migration_id="before")
    assert isinstance(node.engine.apply(Reserve(before), 0.0), Reservation)
    node.engine.apply(Submit(request("long", list(range(100, 154)), 5)), 0.0)
    run(node, 1)
    assert node.engine.held("long").state == State.WAITING and node.engine.pool.num_available("a") >= len(pinned.blocks)
    assert node.engine.apply(Reserve(stage(node, pinned)), 0.0).code == ErrorCode.OVERLOADED
    next_stage = stage(node, None, migration_id="before", number=1, first_block=2, num_blocks=1)
    allowed = [next_stage, stage(node, pinned, migration_id="drained", reason=MigrationReason.DRAIN)]
    allowed.append(stage(node, pinned, migration_id="high", priority=Priority.HIGH))
    for query in allowed:
        assert isinstance(node.engine.apply(Reserve(query), 0.0), Reservation), query.migration_id
        node.engine.apply(Unreserve(query.migration_id), 0.0)
    node.engine.check()


def test_only_offline_work_gives_way_to_a_reservation():
    for offline in (True, False):
        node = make(num_merged=4, rows=2)
        kind = OFFLINE if offline else RequestClass.ONLINE
        node.engine.apply(Submit(request("here", list(range(40)), 5, request_class=kind)), 0.0)
        run(node, 1)
        answer = node.engine.apply(Reserve(stage(node, None, num_blocks=5)), 0.0)
        assert isinstance(answer, Reservation) == offline
        assert node.engine.held("here").state == (State.WAITING if offline else State.RUNNING)
        node.engine.check()
    offline_query = stage(node, None, num_blocks=5, request_class=OFFLINE)
    assert node.engine.apply(Reserve(offline_query), 0.0).code == ErrorCode.OVERLOADED


@pytest.mark.parametrize("depth", [1, 2])
def test_what_offline_work_in_flight_holds_can_be_had_at_the_next_try(depth):
    node = make(num_merged=4, rows=1, depth=depth)
    node.engine.apply(Submit(request("offline", list(range(40)), 12, request_class=OFFLINE)), 0.0)
    run(node, 1)
    for _ in range(depth):
        assert node.plan(0.0)
    query = stage(node, None, num_blocks=5)
    refused = node.engine.apply(Reserve(query), 0.0)
    assert refused.code == ErrorCode.OVERLOADED and refused.retry_after_s > 0
    for _ in range(depth):
        node.step_returns(0.1)
        node.plan(0.1)
    assert isinstance(node.engine.apply(Reserve(query), 0.1), Reservation)
    node.engine.check()
    node.engine.apply(Unreserve("m"), 0.0)
    assert node.plan(0.2), "offline work goes on"


def test_what_was_demanded_in_vain_is_given_back_to_offline_work_in_time():
    node = make(num_merged=4, rows=1)
    node.engine.apply(Submit(request("offline", list(range(40)), 8, request_class=OFFLINE)), 0.0)
    run(node, 1)
    assert node.plan(0.0)
    assert node.engine.apply(Reserve(stage(node, None, num_blocks=5)), 0.0).retry_after_s > 0
    node.step_returns(0.1)
    assert not node.plan(0.1)
    assert node.engine.next_wakeup() == pytest.approx(1.0)
    node.engine.apply(OnTime(), 1.0)
    assert node.plan(1.0)


COST = costs(0.04, 0.001, decode_s=0.001)
"""Two prompts of 50 tokens take 2.5 times as long as a decode."""


def busy_node():
    """One sequence decodes, and two prompts of 50 tokens come."""
    node = make(num_merged=40, budget=512)
    node.engine.apply(SetCostModel("a", COST), 0.0)
    node.engine.apply(Submit(request("decodes", [1, 2, 3], 40)), 0.0)
    run(node, 1)
    for name in "xy":
        node.engine.apply(Submit(request(name, list(range(50)), 5)), 0.0)
    return node


def planned_s(node, now):
    """Predicted time of the next step, which returns then."""
    assert node.plan(now)
    plan = node.in_flight[0]
    node.step_returns(now)
    return COST.predict(shape_of(plan.starts, plan.counts))


SHORT_S = EXPECTED_STEPS * COST.predict(shape_of([3], [1]))


def test_steps_are_short_while_a_request_is_about_to_come():
    node = busy_node()
    assert isinstance(node.engine.apply(Reserve(stage(node, None, num_blocks=2, arrives_s=0.0)), 0.0), Reservation)
    assert planned_s(node, 0.0) <= SHORT_S
    node.engine.apply(Unreserve("m"), 0.0)
    assert planned_s(node, 0.0) > 1.5 * SHORT_S, "nobody comes any more"


def test_steps_end_when_a_request_may_be_here():
    node = busy_node()
    node.engine.apply(Reserve(stage(node, None, num_blocks=2, arrives_s=SHORT_S + 0.02)), 0.0)
    assert SHORT_S < planned_s(node, 0.0) <= SHORT_S + 0.02


@pytest.mark.parametrize(("fields", "now"), [({"arrives_s": 0.0}, EXPECTED_S), ({}, 0.0), ({"on_host": True}, 0.0)])
def test_steps_are_as_long_as_ever_for_who_does_not_come_in_time(fields, now):
    node = busy_node()
    node.engine.apply(Reserve(stage(node, None, num_blocks=2, **fields)), 0.0)
    assert planned_s(node, now) > 2 * SHORT_S


def test_an_engine_says_how_long_it_is_busy_with_a_long_step():
    node = busy_node()
    assert node.engine.busy_s(0.0) == 0.0
    assert node.plan(0.0)
    plan = node.in_flight[0]
    predicted_s = COST.predict(shape_of(plan.starts, plan.counts))
    assert node.engine.busy_s(0.01) == pytest.approx(predicted_s - 0.01)
    assert node.engine.busy_s(predicted_s + 0.01) == pytest.approx(0.01), "as long again as it has been over"
    node.step_returns(predicted_s)
    run(node, 1, predicted_s)
    assert node.plan(predicted_s) and node.engine.busy_s(predicted_s) == 0.0, "only decodes are left"


def test_a_stage_that_only_asks_needs_no_share():
    _, pinned = announced()
    node = make()
    assert isinstance(node.engine.apply(Reserve(stage(node, pinned)), 0.0), Reservation)
    node.engine.memory.may_hold = lambda *share: False
    asked = node.engine.apply(Reserve(stage(node, None, number=1, first_block=2, num_blocks=0)), 0.0)
    assert isinstance(asked, Reservation) and asked.blocks == []
    refused = node.engine.apply(Reserve(stage(node, None, number=2, first_block=2, num_blocks=1)), 0.0)
    assert refused.code == ErrorCode.OVERLOADED
