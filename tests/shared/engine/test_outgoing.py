"""What the source of a migration calls: who may leave, what is pinned, how one is detached and reattached."""

from __future__ import annotations

from shared.engine.calls import (
    Cancel,
    Detach,
    EndMigration,
    Freeze,
    OnTime,
    Pin,
    PinRest,
    Reattach,
    Release,
    RemoveModel,
    SetCostModel,
    Submit,
    Unpin,
)
from shared.engine.handover import Detached
from shared.engine.requests import Ended, Output
from shared.engine.sequence import State
from shared.messages.requests import FinishReason, Priority, unpack_tokens
from tests.shared.costs import costs
from tests.shared.engine.fake_executor import expected_output, request
from tests.shared.engine.moves_setup import OFFLINE, effects, make, run, taken


def test_candidates_come_by_priority_then_by_blocks():
    node = make()
    for name, prompt, high in (("long", 20, False), ("high", 4, True), ("short", 8, False)):
        priority = Priority.HIGH if high else Priority.NORMAL
        node.engine.apply(Submit(request(name, list(range(prompt)), 20, priority=priority)), 0.0)
    run(node, 2)
    assert [c.request.request_id for c in node.engine.migration_candidates(1.0)] == ["short", "long"]
    found = node.engine.migration_candidates(1.0, include_offline=True)
    assert [c.request.request_id for c in found] == ["short", "long", "high"]
    assert [c.num_blocks for c in found] == [3, 6, 2]
    assert all(c.is_running and c.request.running for c in found)
    assert found[0].tokens_left == 18 and found[2].priority == Priority.HIGH


def test_online_requests_without_room_come_first_and_offline_ones_only_to_drain():
    node = make(num_merged=4, rows=4)
    node.engine.apply(Submit(request("runs", list(range(30)), 10)), 0.0)
    node.engine.apply(Submit(request("harvest", list(range(9)), 10, request_class=OFFLINE)), 0.0)
    run(node, 1)
    for name in ("head", "later"):
        node.engine.apply(Submit(request(name, list(range(100, 140)), 10)), 0.0)
    run(node, 1)
    assert [c.request.request_id for c in node.engine.migration_candidates(1.0)] == ["head", "later", "runs"]
    assert node.engine.migration_candidates(1.0)[0].num_blocks == 0
    drained = [c.request.request_id for c in node.engine.migration_candidates(1.0, include_offline=True)]
    assert drained == ["head", "later", "runs", "harvest"]


def test_who_moved_lately_is_moving_or_is_in_the_last_epochs_is_no_candidate():
    node = make(cooldown=0.5)
    node.engine.apply(Submit(request("r", [1, 2, 3], 20)), 0.0)
    node.engine.apply(Submit(request("last", [1, 2, 3], 20, epoch=62)), 0.0)
    run(node, 2)
    assert node.engine.apply(Pin("r", 0), 0.0).blocks == node.engine.held("r").blocks[:1]
    assert not node.engine.migration_candidates(1.0)
    node.engine.apply(EndMigration("r"), 1.0)
    assert not node.engine.migration_candidates(1.4)
    assert len(node.engine.migration_candidates(1.5)) == 1


def test_each_move_of_a_request_is_to_last_twice_as_long_as_the_one_before_but_where_it_has_to_go():
    node = make(cooldown=0.5)
    node.engine.apply(Submit(request("r", [1, 2, 3], 20)), 0.0)
    run(node, 1)
    for num_migrations in range(5):
        node.engine.held("r").num_migrations = num_migrations
        node.engine.held("r").moved_s = 10.0
        stays_s = 0.5 * 2**num_migrations
        assert not node.engine.migration_candidates(10.0 + stays_s - 0.01)
        assert len(node.engine.migration_candidates(10.0 + stays_s)) == 1
        assert len(node.engine.migration_candidates(10.5, include_offline=True)) == 1


def test_pins_are_the_filled_blocks_and_outlive_the_sequence():
    node = make()
    node.engine.apply(Submit(request("r", list(range(10)), 20)), 0.0)
    assert node.engine.apply(Pin("r", 0), 0.0) is None, "it waits"
    run(node, 1)
    first = node.engine.apply(Pin("r", 0), 0.0)
    assert first.first_block == 0 and len(first.blocks) == 2 and len(first.hashes) == 32 and not first.on_host
    run(node, 3)
    second = node.engine.apply(Pin("r", 2), 0.0)
    assert len(second.blocks) == 1 and second.blocks == node.engine.held("r").blocks[2:3]
    assert node.engine.apply(Pin("r", 3), 0.0).blocks == []
    node.engine.apply(Cancel("r"), 0.0)
    node.engine.check()
    assert node.engine.pool.used_merged() == 1
    assert not node.engine.apply(RemoveModel("a"), 0.0)
    node.engine.apply(Unpin(first), 0.0)
    node.engine.apply(Unpin(second), 0.0)
    node.engine.apply(Unpin(second), 0.0)
    assert node.engine.pool.used_merged() == 0 and node.engine.apply(Pin("r", 0), 0.0) is None
    assert node.engine.apply(RemoveModel("a"), 0.0)


def test_a_preemption_between_two_stages_is_told_once():
    node = make(num_merged=4, rows=4)
    node.engine.apply(Submit(request("victim", list(range(12)), 40, request_class=OFFLINE)), 0.0)
    run(node, 1)
    pinned = node.engine.apply(Pin("victim", 0), 0.0)
    node.engine.apply(Submit(request("online", list(range(50, 90)), 5)), 0.0)
    # While they are pinned, its blocks would not become free, and nobody preempts it for them.
    run(node, 1)
    assert node.engine.held("victim").state == State.RUNNING
    node.engine.apply(Unpin(pinned), 0.0)
    run(node, 1)
    assert node.engine.held("victim").state == State.WAITING
    assert node.engine.apply(Pin("victim", 3), 0.0) is None
    node.engine.apply(EndMigration("victim"), 0.0)
    assert node.engine.apply(Detach("victim"), 0.0), "from now on it may move as one that waits"
    node.engine.apply(Reattach("victim"), 0.0)
    node.engine.check()


def test_take_out_after_a_preemption_says_no_once():
    node = make(num_merged=4, rows=4)
    node.engine.apply(Submit(request("victim", list(range(12)), 40, request_class=OFFLINE)), 0.0)
    run(node, 1)
    node.engine.apply(Unpin(node.engine.apply(Pin("victim", 0), 0.0)), 0.0)
    node.engine.apply(Submit(request("online", list(range(50, 90)), 5)), 0.0)
    run(node, 1)
    assert not node.engine.apply(Detach("victim"), 0.0)
    assert node.engine.apply(Detach("victim"), 0.0)


def test_pinned_blocks_are_not_handed_out_when_the_sequence_is_preempted():
    node = make(num_merged=4, rows=1)
    node.engine.apply(Submit(request("victim", list(range(12)), 40, request_class=OFFLINE)), 0.0)
    run(node, 1)
    pinned = node.engine.apply(Pin("victim", 0), 0.0)
    node.engine.apply(Submit(request("online", list(range(50, 58)), 5)), 0.0)
    run(node, 3)
    assert node.engine.held("victim").state == State.WAITING
    assert not set(node.engine.held("online").blocks) & set(pinned.blocks)
    node.engine.check()
    node.engine.apply(Unpin(pinned), 0.0)
    node.engine.check()


def test_taken_out_comes_after_the_steps_in_flight_and_none_is_planned():
    node = make(depth=2)
    node.engine.apply(Submit(request("r", list(range(6)), 20)), 0.0)
    run(node, 1)
    assert node.plan(1.0) and node.plan(1.0)
    node.engine.effects()
    assert node.engine.apply(Detach("r"), 1.0)
    assert not node.plan(1.0) and not effects(node, Detached)
    node.step_returns(1.1)
    assert not effects(node, Detached)
    node.step_returns(1.2)
    output, out = node.engine.effects()
    assert isinstance(output, Output) and isinstance(out, Detached)
    assert unpack_tokens(out.request.prior) == expected_output(request("r", list(range(6)), 3), 60)
    assert out.progress.num_computed == 8 and out.taken_s == 1.2
    assert not node.plan(1.3) and node.engine.held("r").state == State.LEAVING
    assert node.engine.load().num_running == 1
    node.engine.check()


def test_it_may_end_in_the_step_in_flight():
    node = make()
    node.engine.apply(Submit(request("r", [1, 2, 3], 2)), 0.0)
    run(node, 1)
    assert node.plan(0.0) and node.engine.apply(Detach("r"), 0.0)
    node.step_returns(0.0)
    assert not [e for e in node.engine.effects() if isinstance(e, Detached)]
    assert node.engine.held("r") is None and not node.engine.apply(Freeze("r"), 0.0)
    assert node.engine.apply(PinRest("r", 0), 0.0) is None
    assert node.engine.pool.used_merged() == 0


def test_a_failed_step_costs_it_its_blocks_but_it_still_leaves():
    node = make()
    sent = request("r", list(range(8)), 6)
    node.engine.apply(Submit(sent), 0.0)
    run(node, 1)
    pinned = node.engine.apply(Pin("r", 0), 0.0)
    assert node.plan(0.0) and node.engine.apply(Detach("r"), 0.0)
    node.step_returns(0.0, fails=True)
    assert taken(node).progress.num_computed == 0
    assert node.engine.apply(PinRest("r", len(pinned.blocks)), 0.0) is None
    node.engine.apply(Unpin(pinned), 0.0)
    node.engine.apply(Reattach("r"), 0.0)
    node.engine.check()
    run(node, 5)
    assert node.engine.held("r") is None


def test_cancel_and_deadline_end_what_leaves_until_it_is_sealed():
    node = make()
    for name in ("a", "b", "c", "d"):
        node.engine.apply(Submit(request(name, [1, 2, 3], 20, timeout_s=5.0)), 0.0)
    run(node, 2)
    node.engine.effects()
    assert all(node.engine.apply(Detach(name), 0.0) for name in ("a", "b", "c", "d"))
    assert node.engine.apply(Freeze("c"), 0.0) and node.engine.apply(Freeze("d"), 0.0)
    node.engine.apply(Cancel("a"), 1.0)
    node.engine.apply(Cancel("c"), 1.0)
    node.engine.apply(OnTime(), 6.0)
    assert {(e.request.request_id, e.reason) for e in effects(node, Ended)} == {
        ("a", FinishReason.CANCELLED),
        ("b", FinishReason.DEADLINE),
    }
    assert not node.engine.apply(Freeze("a"), 0.0) and node.engine.next_wakeup() is None
    node.engine.apply(Reattach("c"), 7.0)
    node.engine.apply(Reattach("d"), 7.0)
    assert {(e.request.request_id, e.reason) for e in effects(node, Ended)} == {
        ("c", FinishReason.CANCELLED),
        ("d", FinishReason.DEADLINE),
    }
    node.engine.check()
    assert node.engine.pool.used_merged() == 0


def test_drop_moved_leaves_no_trace_and_tells_of_a_cancel():
    node = make()
    for name in ("a", "b"):
        node.engine.apply(Submit(request(name, [1, 2, 3], 20)), 0.0)
    run(node, 1)
    assert not node.engine.apply(Release("a"), 0.0), "it has not left"
    for name in ("a", "b"):
        assert node.engine.apply(Detach(name), 0.0) and node.engine.apply(Freeze(name), 0.0)
    node.engine.effects()
    node.engine.apply(Cancel("b"), 0.0)
    assert not node.engine.apply(Release("a"), 0.0)
    assert node.engine.apply(Release("b"), 0.0)
    assert not node.engine.effects() and not node.engine.all_held()
    assert node.engine.pool.used_merged() == 0 and node.engine.memory.num_free_rows == 8


def test_put_back_goes_on_with_its_blocks_in_the_given_epoch():
    node = make()
    sent = request("r", list(range(9)), 6)
    node.engine.apply(Submit(sent), 0.0)
    run(node, 2)
    node.engine.effects()
    blocks = list(node.engine.held("r").blocks)
    assert node.engine.apply(Detach("r"), 0.0) and node.engine.apply(Freeze("r"), 0.0)
    node.engine.apply(Reattach("r", epoch=2), 1.0)
    assert node.engine.held("r").blocks == blocks
    run(node, 4)
    entries = [entry for output in effects(node, Output) for entry in output.entries]
    assert [entry.epoch for entry in entries] == [2] * 4 and [entry.offset for entry in entries] == [2, 3, 4, 5]
    assert [unpack_tokens(entry.tokens)[0] for entry in entries] == expected_output(sent, 60)[2:]


def test_one_that_is_taken_out_again_leaves_once():
    node = make()
    node.engine.apply(Submit(request("r", list(range(9)), 6)), 0.0)
    run(node, 1)
    assert node.plan(0.0)
    for _ in range(2):
        assert node.engine.apply(Detach("r"), 0.0)
        node.engine.apply(Reattach("r"), 0.0)
    assert node.engine.apply(Detach("r"), 0.0)
    node.step_returns(0.1)
    node.engine.apply(Reattach("r"), 0.1)
    assert node.engine.apply(Detach("r"), 0.2)
    assert taken(node).taken_s == 0.2
    node.engine.apply(EndMigration("r"), 0.3)
    assert node.engine.held("r").state == State.RUNNING and not effects(node, Detached)
    node.engine.check()


def test_a_waiting_one_leaves_at_once_and_waits_again_when_put_back():
    node = make(rows=1)
    for name in ("runs", "waits"):
        node.engine.apply(Submit(request(name, [1, 2, 3], 20)), 0.0)
    run(node, 1)
    node.engine.effects()
    assert node.engine.apply(Detach("waits"), 2.0)
    out = taken(node)
    assert out.progress.num_computed == 0 and out.request.waited_s == 2.0 and out.progress.first_token_age_s < 0
    assert node.engine.apply(PinRest("waits", 0), 0.0).blocks == []
    assert node.engine.load().models[0].num_waiting == 1
    node.engine.apply(Reattach("waits"), 2.0)
    assert node.engine.held("waits").state == State.WAITING
    node.engine.check()


def test_a_suspended_step_is_given_up_for_what_leaves():
    node = make(ttft_s=0.2, slo=True)
    node.engine.apply(SetCostModel("a", costs(0.5, num_layers=4)), 0.0)
    sent = [request(name, list(range(9)), 4, request_class=OFFLINE) for name in ("r", "stays")]
    for offline in sent:
        node.engine.apply(Submit(offline), 0.0)
    assert node.plan(0.0)
    node.engine.apply(Submit(request("online", [1, 2, 3], 3)), 0.1)
    node.step_returns(0.1)
    assert node.engine.memory.suspended is not None
    assert node.engine.migration_candidates(9.0) == []
    found = node.engine.migration_candidates(9.0, include_offline=True)
    assert [c.request.request_id for c in found] == ["online", "r", "stays"]
    assert node.engine.apply(Detach("r"), 0.2)
    assert node.engine.memory.suspended is None and taken(node).progress.num_computed == 0
    node.engine.check()
    node.engine.apply(Release("r"), 0.2)
    for _ in range(20):
        if node.plan(1.0):
            node.step_returns(1.0)
    tokens = [
        token
        for output in effects(node, Output)
        for entry in output.entries
        if entry.request_id == "stays"
        for token in unpack_tokens(entry.tokens)
    ]
    assert tokens == expected_output(sent[1], 60)


def test_a_step_that_is_suspended_with_one_that_leaves_is_given_up():
    node = make(ttft_s=0.2, slo=True)
    node.engine.apply(SetCostModel("a", costs(0.5, num_layers=4)), 0.0)
    for name in ("r", "stays"):
        node.engine.apply(Submit(request(name, list(range(9)), 4, request_class=OFFLINE)), 0.0)
    assert node.plan(0.0)
    assert node.engine.apply(Detach("r"), 0.05)
    node.engine.apply(Submit(request("online", [1, 2, 3], 3)), 0.1)
    node.step_returns(0.1)
    assert node.engine.memory.suspended is None and node.engine.counters.steps_discarded == 1
    assert taken(node).progress.num_computed == 0
    node.engine.check()
