"""A request from one engine to another: it goes on as if nothing had happened, or stays where it is."""

from __future__ import annotations

import msgspec
import pytest

from shared.costs.model import StepShape
from shared.engine.calls import (
    Adopt,
    Detach,
    Freeze,
    OnStep,
    Pin,
    PinRest,
    Reattach,
    Release,
    RemoveModel,
    SetCostModel,
    Submit,
    Unpin,
)
from shared.engine.handover import Detached, rebased
from shared.engine.leaders import EXPECTED_STEPS
from shared.engine.plan import StepResult
from shared.engine.sequence import State
from shared.messages.migration import Commit, SequenceProgress
from shared.messages.requests import ErrorCode, pack_tokens
from tests.shared.costs import costs
from tests.shared.engine.cluster import Cluster, Node
from tests.shared.engine.fake_executor import request
from tests.shared.engine.moves_setup import OFFLINE, make, pair, run


def move(cluster: Cluster, name: str = "r") -> None:
    """A whole move."""
    candidates = cluster.nodes[0].engine.migration_candidates(cluster.now, include_offline=True)
    index = [candidate.request.request_id for candidate in candidates].index(name)
    moving = cluster.begin_move(*cluster.nodes, index)
    assert moving is not None
    for step in (cluster.deliver, cluster.detach, cluster.send_rest, cluster.deliver, cluster.freeze, cluster.commit):
        step(moving)
    assert moving.is_committed
    cluster.forget(moving)


def test_a_decoding_request_goes_on_where_it_was():
    cluster, source, destination = pair()
    sent = request("r", list(range(10)), 20, min_tokens=3, stop_token_ids=(1,), ttft_objective_s=0.7)
    cluster.submit(source, sent)
    for _ in range(5):
        cluster.now += 1.0
        run(source, 1, cluster.now)
    before = source.engine.held("r")
    cluster.now += 1.0
    move(cluster)
    after = destination.engine.held("r")
    assert after.num_computed == 14 and after.num_output == 5 and after.state == State.RESTORING
    assert (after.arrived_s, after.submitted_s, after.deadline_s) == (0.0, 0.0, 600.0)
    assert (after.first_planned_s, after.first_token_s, after.first_total) == (1.0, 1.0, 11)
    assert after.ttft_due_s == pytest.approx(0.7) and after.tpot_objective_s == before.tpot_objective_s
    assert after.device_s == before.device_s and after.last_ran_s == 5.0 and after.num_migrations == 1
    assert source.engine.pool.used_merged() == 0
    assert len(destination.engine.pool.find("a", after.hashes[:3])) == 3
    assert destination.plan(cluster.now) and destination.in_flight[0].num_tokens == 1
    cluster.finish()
    assert cluster.ended["r"].first_token_s == 1.0 and cluster.ended["r"].num_migrations == 1


def test_who_comes_runs_at_once_beside_little_of_the_prompts_that_wait():
    cluster, source, destination = pair(num_merged=40, budget=512)
    cost = costs(0.02, 0.001, decode_s=0.001)
    destination.engine.apply(SetCostModel("a", cost), 0.0)
    cluster.submit(source, request("r", list(range(10)), 20))
    run(source, 5)
    move(cluster)
    cluster.submit(destination, request("long", list(range(50)), 5))
    tokens = []
    for _ in range(2):
        assert destination.plan(cluster.now)
        tokens.append(destination.in_flight[0].num_tokens)
        assert destination.engine.held("r").row in destination.in_flight[0].rows
        destination.step_returns(cluster.now)
    first_s = cost.predict(StepShape(tokens[0], 0.0))
    assert first_s <= EXPECTED_STEPS * cost.predict(StepShape(0, 0.0, 1)) and tokens[1] > 30


def test_a_prompt_moves_between_its_chunks():
    cluster, source, destination = pair(budget=6)
    cluster.submit(source, request("r", list(range(30)), 5))
    run(source, 2)
    move(cluster)
    after = destination.engine.held("r")
    assert after.num_computed == 12 and len(after.blocks) == 8 and after.first_token_s is None
    cluster.finish()


def test_a_checkpoint_moves_to_host_memory_and_is_restored_there():
    cluster, source, destination = pair(num_merged=4, rows=1, host=4)
    cluster.submit(source, request("r", list(range(24)), 10, request_class=OFFLINE))
    for _ in range(5):
        source.plan(0.0)
        source.take_copies()
        source.step_returns(0.0)
        while source.copies:
            source.copy_ends(0.0)
    cluster.submit(source, request("online", [7, 8, 9], 3))
    run(source, 1)
    num_saved = len(source.engine.held("r").host_blocks)
    assert source.engine.held("r").state == State.WAITING and num_saved >= 3
    cluster.collect()
    cluster.now = 1.0
    move(cluster)
    after = destination.engine.held("r")
    assert after.state == State.WAITING and len(after.host_blocks) == num_saved and after.num_preemptions == 1
    assert source.engine.memory.host.pool.used_merged() == 0
    destination.engine.check()
    cluster.finish()
    assert cluster.ended["r"].restored_blocks == num_saved


def test_a_request_without_room_moves_to_where_it_begins():
    cluster, source, destination = pair(rows=1)
    for name in ("runs", "r"):
        cluster.submit(source, request(name, [1, 2, 3], 20))
    run(source, 2)
    cluster.collect()
    move(cluster)
    assert destination.plan(cluster.now)
    cluster.finish()
    assert cluster.ended["r"].num_cached_tokens == 0


def test_a_request_that_would_wait_there_too_stays():
    cluster, source, destination = pair(rows=1)
    for name in ("runs", "r"):
        cluster.submit(source, request(name, [1, 2, 3], 20))
    run(source, 2)
    cluster.collect()
    for name in ("there", "waits"):
        cluster.submit(destination, request(name, [1, 2, 3], 20))
    run(destination, 2)
    cluster.collect()
    moving = cluster.begin_move(source, destination, 0)
    for step in (cluster.send_rest, cluster.freeze, cluster.commit):
        step(moving)
    assert moving not in cluster.moving and source.engine.held("r").state == State.WAITING
    cluster.finish()


def committed(cluster: Cluster, source: Node, destination: Node) -> tuple[Commit, Detached]:
    """All that is to be sent has been; the commit is not."""
    moving = cluster.begin_move(source, destination, 0)
    for step in (cluster.deliver, cluster.detach, cluster.send_rest, cluster.deliver, cluster.freeze):
        step(moving)
    request_, progress = rebased(moving.taken.request, moving.taken.progress, cluster.now - moving.taken.taken_s)
    request_ = msgspec.structs.replace(request_, epoch=1)
    return Commit("m1", "source", request_, progress, moving.num_sent), moving.taken


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda c: msgspec.structs.replace(c, migration_id="other"), ErrorCode.GONE),
        (lambda c: msgspec.structs.replace(c, num_blocks=99), ErrorCode.BAD_REQUEST),
        (lambda c: msgspec.structs.replace(c, num_blocks=1), ErrorCode.BAD_REQUEST),
        (lambda c: msgspec.structs.replace(c, on_host=True), ErrorCode.BAD_REQUEST),
        (lambda c: msgspec.structs.replace(c, progress=SequenceProgress()), ErrorCode.BAD_REQUEST),
        (lambda c: changed(c, prompt=pack_tokens([5] * 10)), ErrorCode.BAD_REQUEST),
        (lambda c: changed(c, model="b"), ErrorCode.GONE),
        (lambda c: changed(c, sampling=msgspec.structs.replace(c.request.sampling, max_tokens=59)), ErrorCode.TOO_LONG),
    ],
)
def test_adopt_refuses_what_does_not_fit_what_was_announced(change, code):
    cluster, source, destination = pair()
    cluster.submit(source, request("r", list(range(10)), 20))
    run(source, 3)
    cluster.collect()
    commit, _ = committed(cluster, source, destination)
    assert destination.engine.apply(Adopt(change(commit)), 0.0).code == code
    destination.engine.check()
    assert destination.engine.apply(Adopt(commit), 0.0) is None
    assert destination.engine.apply(Adopt(commit), 0.0).code == ErrorCode.CONFLICT
    assert destination.engine.apply(Adopt(changed(commit, epoch=0)), 0.0).code == ErrorCode.CONFLICT
    destination.engine.check()


def changed(commit: Commit, **fields) -> Commit:
    return msgspec.structs.replace(commit, request=msgspec.structs.replace(commit.request, **fields))


def test_the_model_length_of_the_source_holds():
    source, destination = make(num_merged=4), make()
    cluster = Cluster([source, destination])
    assert source.limits["a"] == 48 < destination.limits["a"] == 60
    cluster.submit(source, request("r", list(range(40)), 100))
    run(source, 2)
    cluster.collect()
    move(cluster)
    cluster.finish()
    assert cluster.ended["r"].num_output_tokens == 8


def test_a_later_placement_replaces_what_is_leaving():
    node = make()
    sent = request("r", [1, 2, 3], 20)
    node.engine.apply(Submit(sent), 0.0)
    run(node, 2)
    assert node.engine.apply(Detach("r"), 0.0) and node.engine.apply(Freeze("r"), 0.0)
    assert node.engine.apply(Submit(msgspec.structs.replace(sent, epoch=64)), 0.0) is None
    assert not node.engine.apply(Release("r"), 0.0) and not node.engine.apply(Freeze("r"), 0.0)
    node.engine.apply(Reattach("r", 2), 0.0)
    assert node.engine.held("r").request.epoch == 64
    node.engine.check()


def test_a_later_placement_is_not_pinned_behind_what_was_sent_of_the_former():
    node = make()
    sent = request("r", list(range(9)), 20)
    node.engine.apply(Submit(sent), 0.0)
    run(node, 2)
    node.engine.apply(Unpin(node.engine.apply(Pin("r", 0), 0.0)), 0.0)
    assert node.engine.apply(Submit(msgspec.structs.replace(sent, epoch=64)), 0.0) is None
    run(node, 2)
    assert node.engine.apply(Pin("r", 2), 0.0) is None
    assert node.engine.apply(Detach("r"), 0.0) and node.engine.apply(PinRest("r", 2), 0.0) is None


def test_what_was_reserved_is_freed_where_the_request_comes_without_kv():
    cluster, source, destination = pair()
    cluster.submit(source, request("r", list(range(10)), 20))
    run(source, 3)
    cluster.collect()
    commit, _ = committed(cluster, source, destination)
    lost = msgspec.structs.replace(commit, num_blocks=0, progress=SequenceProgress(num_migrations=1))
    assert destination.engine.apply(Adopt(lost), 0.0) is None
    assert destination.engine.pool.used_merged() == 0 and destination.engine.memory.num_free_rows == 8
    destination.engine.check()


def test_a_model_stays_while_one_of_its_requests_is_perhaps_anothers():
    node = make()
    node.engine.apply(Submit(request("r", [1, 2, 3], 20)), 0.0)
    run(node, 1)
    assert node.engine.apply(Detach("r"), 0.0) and node.engine.apply(Freeze("r"), 0.0)
    assert not node.engine.apply(RemoveModel("a"), 0.0)
    node.engine.apply(Release("r"), 0.0)
    assert node.engine.apply(RemoveModel("a"), 0.0)


@pytest.mark.parametrize(("ordering", "length"), [("doubling_budget", 2), ("mlfq", 1), ("fcfs", 0), ("round_robin", 0)])
def test_the_state_of_the_order_travels(ordering, length):
    cluster, source, destination = pair(ordering=ordering)
    cluster.submit(source, request("r", list(range(10)), 20))
    for _ in range(6):
        assert source.plan(cluster.now)
        cluster.now += 0.4
        source.step_returns(cluster.now)
    cluster.collect()
    state = source.engine.memory.ordering.export_state(source.engine.held("r"))
    assert len(state) == length
    move(cluster)
    ordering_there = destination.engine.memory.ordering
    assert ordering_there.export_state(destination.engine.held("r")) == state
    cluster.finish()


def test_an_online_arrival_of_kv_interrupts_offline_steps():
    cluster, source, destination = pair(ttft_s=0.1, slo=True)
    cluster.submit(source, request("r", list(range(10)), 20))
    run(source, 3)
    cluster.collect()
    destination.engine.apply(SetCostModel("a", costs(5.0, num_layers=4)), 0.0)
    cluster.submit(destination, request("offline", list(range(20)), 5, request_class=OFFLINE))
    assert destination.plan(0.0) and destination.in_flight[0].is_interruptible
    assert destination.engine.take_interrupt(0.0) is None
    move(cluster)
    assert destination.engine.take_interrupt(0.0) == destination.in_flight[0].step_id
    destination.engine.apply(OnStep(StepResult(destination.in_flight.pop().step_id, [], error="lost")), 0.0)
