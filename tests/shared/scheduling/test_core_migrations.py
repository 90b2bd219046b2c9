"""Requests that move between instances: whoever tells of it first is right, and either report may be lost."""

from __future__ import annotations

import pytest

from shared.messages.cluster import InstanceExited, MigrationOutcome
from shared.messages.requests import (
    ErrorCode,
    ErrorInfo,
    HeldRequest,
    LostRequest,
    RequestsLost,
)
from shared.scheduling.actions import AskHeld, CancelAt, Dispatch, LeftQueue, MigrationEnded, NotifyLost
from shared.scheduling.calls import Cancel, OnDispatched, OnExited, OnHeld, OnRegistry
from shared.scheduling.migrations import CONFIRM_S
from shared.scheduling.requests import RequestState
from tests.shared.scheduling.driver import Driver, held, lost, running
from tests.shared.scheduling.samples import make_request


def moved(request_id: str, to: str, epoch: int = 1) -> MigrationOutcome:
    return MigrationOutcome(request_id, to, epoch, True)


def stayed(request_id: str, to: str, epoch: int = 0, reason: str = "refused") -> MigrationOutcome:
    return MigrationOutcome(request_id, to, epoch, False, reason)


def pair(*request_ids: str) -> Driver:
    """Requests that run on a, and an instance b."""
    driver = Driver(max_waiting_per_model=8)
    driver.up("a")
    running(driver, "a", *request_ids)
    driver.up("b")
    return driver


def owner(driver: Driver, request_id: str) -> tuple[str, int]:
    tracked = driver.core.requests.get(request_id)
    assert tracked is not None and tracked.state == RequestState.ASSIGNED
    return tracked.instance_id, tracked.epoch


@pytest.mark.parametrize("order", ["both", "source first", "destination only", "source only"])
def test_either_end_may_tell(order: str) -> None:
    driver = pair("r")
    if order.startswith("source"):
        driver.report("a", migrations=[moved("r", "b")])
        assert owner(driver, "r") == ("b", 1)
    if order != "source only":
        driver.report("b", migrated_in=[held("r", 1)])
        assert owner(driver, "r") == ("b", 1)
    if order == "both":
        driver.report("a", migrations=[moved("r", "b")])
        assert owner(driver, "r") == ("b", 1)
    driver.core.apply(Cancel("r"), driver.now)
    assert driver.take(CancelAt) == [CancelAt("b", "r")], "the source does not run it any more"
    driver.report("b", ended=["r"])
    assert driver.state("r") is None


def test_what_came_and_ended_between_two_reports() -> None:
    driver = pair("r", "s")
    driver.report("b", migrated_in=[held("r", 1)], ended=["r"])
    driver.report("a", migrations=[moved("r", "b")])
    assert driver.state("r") is None
    # The source tells first: the destination's report is on its way.
    driver.report("a", migrations=[moved("s", "b")])
    driver.report("b", migrated_in=[held("s", 1)], ended=["s"])
    assert driver.state("s") is None and len(driver.core.requests) == 0
    driver.pass_time(2 * CONFIRM_S)
    assert driver.take(NotifyLost) == []


def test_a_chain_of_moves_told_backwards() -> None:
    driver = pair("r")
    driver.up("c")
    driver.report("c", migrated_in=[held("r", 2)])
    driver.report("b", migrated_in=[held("r", 1)], migrations=[moved("r", "c", 2)])
    driver.report("a", migrations=[moved("r", "b", 1)])
    assert owner(driver, "r") == ("c", 2)
    driver.core.apply(Cancel("r"), driver.now)
    assert driver.take(CancelAt) == [CancelAt("c", "r")]


def test_a_word_that_the_destination_never_confirms_is_looked_into() -> None:
    driver = pair("r", "s")
    driver.report("a", migrations=[moved("r", "b"), moved("s", "b")])
    driver.pass_time(CONFIRM_S + 0.1)
    asks = driver.take(AskHeld)
    assert {ask.instance_id for ask in asks} == {"b"}
    for ask in asks:
        driver.core.apply(OnHeld(ask, [held("s", 1)]), driver.now)
    assert driver.take(NotifyLost) == [NotifyLost("g0", lost("r", instance_id="b", epoch=1))]
    assert driver.state("r") is None and owner(driver, "s") == ("b", 1)
    driver.pass_time(2 * CONFIRM_S)
    assert driver.take(AskHeld) == []


def test_a_new_leader_learns_of_a_move_from_what_is_held() -> None:
    driver = pair("r")
    driver.sequences["a"] += 1
    driver.report("a")  # the report that told was lost
    (ask,) = driver.take(AskHeld)
    driver.sequences["b"] += 1
    driver.report("b")
    (other,) = driver.take(AskHeld)
    driver.core.apply(OnHeld(other, [held("r", 1)]), driver.now)
    assert owner(driver, "r") == ("b", 1)
    driver.core.apply(OnHeld(ask, [held("r", 0)]), driver.now)
    assert owner(driver, "r") == ("b", 1), "it was leaving when it was asked"
    assert driver.take(CancelAt) == []


# -------------------------------------------------------------------------------------------------------- deaths


def test_a_source_that_dies_takes_only_what_it_still_owned() -> None:
    driver = pair("gone", "moved", "told")
    driver.report("b", migrated_in=[held("moved", 1)])
    driver.report("a", migrations=[moved("told", "b")])
    driver.core.apply(OnExited(InstanceExited("a", "1", "node", 137)), driver.now)
    assert driver.take(NotifyLost) == [NotifyLost("g0", lost("gone"))]
    driver.report("b", migrated_in=[held("gone", 1)])
    assert owner(driver, "gone") == ("b", 1), "it had moved after all; its gateway knows by its epoch"


def test_a_destination_that_dies_takes_what_it_had_taken_over() -> None:
    driver = pair("r", "s", "t")
    driver.report("b", migrated_in=[held("r", 1)])
    driver.core.apply(OnExited(InstanceExited("b", "1", "node", 137)), driver.now)
    assert driver.take(NotifyLost) == [NotifyLost("g0", lost("r", instance_id="b", epoch=1))]
    # Nothing had been heard of this one yet.
    driver.report("a", migrations=[moved("s", "b")])
    assert driver.take(NotifyLost) == [NotifyLost("g0", lost("s", instance_id="b", epoch=1))]
    # And this one goes on at its source, which does not know whether it had been taken over.
    driver.report("a", migrations=[stayed("t", "b", 2, "destination_lost")])
    assert owner(driver, "t") == ("a", 2)
    driver.core.apply(OnRegistry("a", None), driver.now)
    assert driver.take(NotifyLost) == [NotifyLost("g0", lost("t", epoch=2))]


def test_what_went_on_at_a_source_that_could_not_see_its_destination() -> None:
    """The destination lives and has it too, in a lower epoch: a cancel is for both."""
    driver = pair("r")
    driver.report("b", migrated_in=[held("r", 1)])
    driver.report("a", migrations=[stayed("r", "b", 2, "destination_lost")])
    assert owner(driver, "r") == ("a", 2)
    driver.core.apply(Cancel("r"), driver.now)
    assert sorted(driver.take(CancelAt), key=str) == [CancelAt("a", "r"), CancelAt("b", "r")]
    driver.report("b", ended=["r"])
    assert owner(driver, "r") == ("a", 2)


def test_a_source_that_had_given_and_holds_a_request_no_more_does_not_let_it_drop() -> None:
    """Both reports of the move were lost, and the destination died: the gateway must hear of it."""
    driver = pair("r")
    driver.report("a", migration_freeness=1.0, num_running=10)
    driver.pass_time(0.1)
    assert "a" in driver.core.rescheduler.policy.pairs
    driver.core.apply(OnExited(InstanceExited("b", "1", "node", 137)), driver.now)
    driver.sequences["a"] += 1
    driver.report("a")
    (ask,) = driver.take(AskHeld)
    driver.core.apply(OnHeld(ask, []), driver.now)
    assert driver.take(NotifyLost) == [NotifyLost("g0", lost("r"))]


# -------------------------------------------------------------------------------------- placements beside moves


def test_a_move_of_an_older_placement_changes_nothing_and_is_stopped() -> None:
    driver = pair("r")
    driver.report("a", freeness=1.0, num_running=1)
    driver.submit(make_request("r", epoch=64))
    (dispatch,) = driver.take(Dispatch)
    assert dispatch.instance_id == "b"
    driver.core.apply(OnDispatched.to(dispatch, None), driver.now)
    assert driver.take(CancelAt) == [CancelAt("a", "r", 0)], "in its epoch alone: it may be forwarded to the new owner"
    driver.up("c")
    driver.report("c", migrated_in=[held("r", 1)])
    assert driver.take(CancelAt) == [CancelAt("c", "r", 1)]
    assert owner(driver, "r") == ("b", 64)


def test_a_request_that_is_submitted_again_after_a_move_begins_a_new_placement() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r", epoch=65, num_prior=3))
    (dispatch,) = driver.take(Dispatch)
    assert dispatch.request.epoch == 128
    driver.core.apply(OnDispatched.to(dispatch, None), driver.now)
    driver.up("b")
    driver.report("b", migrated_in=[held("r", 65)])
    assert owner(driver, "r") == ("a", 128)


def test_a_queued_request_that_has_moved_is_not_dispatched() -> None:
    """Its dispatch seemed to fail, and the instance had given it away already."""
    driver = Driver(max_waiting_per_model=1)
    driver.up("a")
    driver.submit(make_request("r"))
    driver.refuse(ErrorCode.UNAVAILABLE)
    driver.up("b", heard=False)
    driver.report("b", waiting={"m": 1}, migrated_in=[held("r", 1)])
    assert owner(driver, "r") == ("b", 1)
    assert "found" in [left.outcome for left in driver.take(LeftQueue)]


def test_a_move_before_the_submit_call_returns() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    (dispatch,) = driver.take(Dispatch)
    driver.up("b")
    driver.report("b", migrated_in=[held("r", 1)])
    driver.report("a", admitted=["r"], migrations=[moved("r", "b")])
    driver.core.apply(OnDispatched.to(dispatch, ErrorInfo(ErrorCode.DEADLINE, "no reply")), driver.now)
    assert owner(driver, "r") == ("b", 1) and len(driver.core.dispatcher.ledger) == 0


def test_a_cancel_that_waited_for_the_submit_call_goes_to_the_new_owner() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    driver.take(Dispatch)
    driver.core.apply(Cancel("r"), driver.now)
    driver.up("b")
    driver.report("b", migrated_in=[held("r", 1)])
    assert driver.take(CancelAt) == [CancelAt("b", "r")]


def test_moves_that_fail_leave_all_as_it_is_and_are_counted() -> None:
    driver = pair("r")
    driver.report("a", migrations=[stayed("r", "b"), stayed("unknown", "b"), moved("unheard of", "b")])
    assert owner(driver, "r") == ("a", 0)
    assert driver.take(MigrationEnded) == [
        MigrationEnded("a", "b", "refused"),
        MigrationEnded("a", "b", "refused"),
        MigrationEnded("a", "b", ""),
    ]


def test_a_request_that_nobody_knew_is_adopted_where_it_came_to() -> None:
    driver = pair()
    driver.report(
        "b",
        migrated_in=[HeldRequest(request_id="r", gateway_id="g7", epoch=65, model="m", num_tokens=10, running=True)],
    )
    assert owner(driver, "r") == ("b", 65)
    driver.core.apply(OnRegistry("b", None), driver.now)
    assert driver.take(NotifyLost) == [NotifyLost("g7", RequestsLost("b", [LostRequest("r", 65)]))]
