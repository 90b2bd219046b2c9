"""What becomes of a request as its submit call is answered, refused, lost or cancelled."""

from __future__ import annotations

import pytest

from shared.messages.requests import (
    ErrorCode,
    ErrorInfo,
    FinishReason,
    HeldRequest,
)
from shared.scheduling.actions import (
    AskHeld,
    CancelAt,
    Dispatch,
    LeftQueue,
    SendEntry,
)
from shared.scheduling.calls import Cancel, OnDispatched, OnHeld
from shared.scheduling.requests import RequestState
from tests.shared.scheduling.driver import Driver, held
from tests.shared.scheduling.samples import make_request

# ----------------------------------------------------------------------------------------- answers to dispatches


@pytest.mark.parametrize("code", [ErrorCode.OVERLOADED, ErrorCode.DRAINING, ErrorCode.GONE, ErrorCode.BUSY])
def test_a_refused_request_returns_to_its_place_and_the_instance_backs_off(code: ErrorCode) -> None:
    driver = Driver(max_waiting_per_model=1)
    driver.up("a")
    driver.submit(make_request("first"))
    driver.submit(make_request("second"))
    assert driver.refuse(code).request.request_id == "first"
    assert driver.take(Dispatch) == []
    driver.up("b")
    (dispatch,) = driver.take(Dispatch)
    assert (dispatch.request.request_id, dispatch.instance_id, dispatch.request.epoch) == ("first", "b", 0)
    driver.pass_time(0.11)
    (dispatch,) = driver.take(Dispatch)
    assert (dispatch.request.request_id, dispatch.instance_id) == ("second", "a")


def test_back_off_grows_and_heeds_the_instance() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    waits = []
    for _ in range(5):
        driver.refuse(ErrorCode.OVERLOADED)
        start = driver.now
        while not any(isinstance(action, Dispatch) for action in driver.log):
            driver.pass_time(0.05)
            driver.report("a")
        waits.append(driver.now - start)
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6], abs=0.06)
    driver.refuse(ErrorCode.OVERLOADED, retry_after_s=30.0)
    driver.pass_time(1.9)
    driver.report("a")
    assert driver.take(Dispatch) == []
    driver.pass_time(0.2)
    assert len(driver.dispatches()) == 1


@pytest.mark.parametrize("code", [ErrorCode.TOO_LONG, ErrorCode.BAD_REQUEST])
def test_a_final_refusal_goes_to_the_gateway(code: ErrorCode) -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    driver.refuse(code)
    (sent,) = driver.take(SendEntry)
    assert sent.entry.finish_reason == FinishReason.ERROR
    assert sent.entry.error is not None and sent.entry.error.code == code
    assert driver.state("r") is None and len(driver.core.dispatcher.ledger) == 0


def test_a_request_that_fails_inside_every_instance_is_given_up() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    epochs = []
    for _ in range(3):
        epochs.append(driver.refuse(ErrorCode.INTERNAL).request.epoch)
        driver.pass_time(1.0)
        driver.report("a")
    assert epochs == [0, 64, 128], "each attempt may have had an effect"
    (sent,) = driver.take(SendEntry)
    assert sent.entry.error is not None and sent.entry.error.code == ErrorCode.INTERNAL


def test_unknown_outcome_and_the_instance_has_it() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    driver.refuse(ErrorCode.DEADLINE)
    (ask,) = driver.take(AskHeld)
    assert driver.state("r") == RequestState.ASKING
    driver.core.apply(OnHeld(ask, [held("r")]), driver.now)
    assert driver.state("r") == RequestState.ASSIGNED
    assert driver.take(Dispatch) == []


@pytest.mark.parametrize("answer", [[], None])
def test_unknown_outcome_and_the_instance_does_not_have_it(answer: list[HeldRequest] | None) -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    driver.up("b")
    driver.refuse(ErrorCode.DEADLINE)
    (ask,) = driver.take(AskHeld)
    driver.core.apply(OnHeld(ask, answer), driver.now)
    (dispatch,) = driver.take(Dispatch)
    assert (dispatch.instance_id, dispatch.request.epoch) == ("b", 64)
    driver.core.apply(OnDispatched.to(dispatch, None), driver.now)
    assert driver.take(CancelAt) == [], "the gateway does not know yet that the epoch was raised"


def test_an_answer_older_than_the_question_settles_nothing() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    driver.sequences["a"] += 5  # missed reports: the instance is asked
    driver.report("a")
    (early,) = driver.take(AskHeld)
    driver.now += 0.5
    driver.refuse(ErrorCode.DEADLINE)
    (late,) = driver.take(AskHeld)
    driver.core.apply(OnHeld(early, []), driver.now)
    assert driver.state("r") == RequestState.ASKING
    driver.core.apply(OnHeld(late, [held("r")]), driver.now)
    assert driver.state("r") == RequestState.ASSIGNED


def test_an_end_reported_before_the_acceptance() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    (dispatch,) = driver.take(Dispatch)
    driver.report("a", admitted=["r"], ended=["r"])
    driver.core.apply(OnDispatched.to(dispatch, None), driver.now)
    assert driver.state("r") is None
    assert [left.outcome for left in driver.take(LeftQueue)] == ["dispatched"]


def test_an_end_reported_and_the_acceptance_lost() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    (dispatch,) = driver.take(Dispatch)
    driver.report("a", admitted=["r"], ended=["r"])
    driver.core.apply(OnDispatched.to(dispatch, ErrorInfo(ErrorCode.UNAVAILABLE, "connection lost")), driver.now)
    driver.pass_time(1.0)
    assert driver.state("r") is None and driver.take(Dispatch) == [], "it ended; it must not run twice"


# ------------------------------------------------------------------------------------------------------ cancel


def test_cancel_in_the_queue_and_on_an_instance() -> None:
    driver = Driver()
    driver.submit(make_request("queued"))
    driver.core.apply(Cancel("queued"), driver.now)
    driver.core.apply(Cancel("unknown"), driver.now)
    driver.up("a")
    assert driver.dispatches() == {} and driver.take(SendEntry) == []
    driver.submit(make_request("r"))
    assert driver.dispatches() == {"r": "a"}
    driver.core.apply(Cancel("r"), driver.now)
    assert driver.take(CancelAt) == [CancelAt("a", "r")]
    driver.report("a", admitted=["r"], ended=["r"])
    assert driver.state("r") is None


def test_cancel_while_the_submit_call_is_under_way() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    (dispatch,) = driver.take(Dispatch)
    driver.core.apply(Cancel("r"), driver.now)
    assert driver.take(CancelAt) == []
    driver.core.apply(OnDispatched.to(dispatch, None), driver.now)
    assert driver.take(CancelAt) == [CancelAt("a", "r")]

    driver.submit(make_request("s"))
    (dispatch,) = driver.take(Dispatch)
    driver.core.apply(Cancel("s"), driver.now)
    driver.core.apply(OnDispatched.to(dispatch, ErrorInfo(ErrorCode.OVERLOADED, "no")), driver.now)
    driver.pass_time(5.0)
    driver.report("a")
    assert driver.state("s") is None and driver.take(Dispatch) == []
