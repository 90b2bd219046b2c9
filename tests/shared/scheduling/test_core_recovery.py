"""Deaths, silence, missed reports and take-overs, as the core decides on them."""

from __future__ import annotations

import msgspec
import pytest

from shared.messages.cluster import InstanceExited
from shared.messages.requests import PLACEMENT_EPOCHS, ErrorCode, LostRequest
from shared.scheduling.actions import (
    AskHeld,
    CancelAt,
    Dispatch,
    InstanceLost,
    NotifyLost,
    ProbeSilence,
    SendEntry,
)
from shared.scheduling.calls import (
    AskEveryone,
    BeginServing,
    DeclareLost,
    GrantGrace,
    OnDispatched,
    OnExited,
    OnHeld,
    OnRegistry,
)
from shared.scheduling.intake import TERM_EPOCHS
from shared.scheduling.requests import RequestState
from tests.shared.scheduling.driver import Driver, held, lost, running
from tests.shared.scheduling.samples import make_info, make_request

# ---------------------------------------------------------------------------------------------------- recovery


def test_an_exit_is_told_to_every_gateway_in_one_message_each() -> None:
    driver = Driver()
    driver.up("a")
    running(driver, "a", "r0", "r1")
    running(driver, "a", "r2", gateway_id="g1")
    driver.core.apply(OnExited(InstanceExited("a", "0", "node", 1)), driver.now)
    assert driver.take(NotifyLost) == [], "an older incarnation"
    driver.core.apply(OnExited(InstanceExited("a", "1", "node", 137)), driver.now)
    assert driver.take(NotifyLost) == [NotifyLost("g0", lost("r0", "r1")), NotifyLost("g1", lost("r2"))]
    assert driver.take(InstanceLost) == [InstanceLost("a", "exited", 3)]
    # The registry still shows it, and a late report arrives.
    driver.core.apply(OnRegistry("a", make_info("a")), driver.now)
    driver.report("a")
    driver.submit(make_request("r0", epoch=64))
    assert driver.dispatches() == {}
    driver.core.apply(OnRegistry("a", None), driver.now)
    assert driver.take(NotifyLost) == []
    driver.up("a", incarnation="2")
    assert driver.dispatches() == {"r0": "a"}


@pytest.mark.parametrize("exit_code", [None, 0, 137])
def test_one_that_was_drained_is_not_counted_among_those_that_died(exit_code: int | None) -> None:
    """`exit_code` None: its entry in the registry goes first."""
    driver = Driver()
    driver.up("a")
    driver.core.apply(OnRegistry("a", make_info("a", state="draining")), driver.now)
    if exit_code is None:
        driver.core.apply(OnRegistry("a", None), driver.now)
    else:
        driver.core.apply(OnExited(InstanceExited("a", "1", "node", exit_code)), driver.now)
    assert driver.take(InstanceLost) == [InstanceLost("a", "exited" if exit_code else "drained", 0)]


@pytest.mark.parametrize("state", ["ready", "draining"])
@pytest.mark.parametrize("incarnation", [None, "2"])
def test_vanishing_and_restarting_are_deaths(incarnation: str | None, state: str) -> None:
    driver = Driver()
    driver.up("a")
    running(driver, "a", "r")
    driver.core.apply(OnRegistry("a", make_info("a", state=state)), driver.now)
    info = make_info("a", incarnation=incarnation) if incarnation else None
    driver.core.apply(OnRegistry("a", info), driver.now)
    assert driver.take(NotifyLost) == [NotifyLost("g0", lost("r"))]
    assert driver.take(InstanceLost) == [InstanceLost("a", "restarted" if incarnation else "vanished", 1)]
    assert driver.state("r") is None


def test_silence_is_death_once_the_bus_is_proven_to_work() -> None:
    driver = Driver(lost_after_s=3.0)
    driver.up("a")
    driver.up("b")
    running(driver, "a", "r")
    driver.pass_time(2.0)
    driver.report("b", freeness=1.0)
    driver.pass_time(1.5)
    (probe,) = driver.take(ProbeSilence)
    assert probe.instance_ids == ["a"]
    driver.submit(make_request("s"))
    assert driver.dispatches() == {"s": "b"}, "nothing new for a silent one"
    driver.core.apply(DeclareLost(["a"]), driver.now)
    assert driver.take(NotifyLost) == [NotifyLost("g0", lost("r"))]
    driver.pass_time(10.0)
    assert ["a"] not in [probe.instance_ids for probe in driver.take(ProbeSilence)], "dead once"


def test_a_report_during_the_probe_saves_the_instance() -> None:
    driver = Driver()
    driver.up("a")
    running(driver, "a", "r")
    driver.pass_time(3.5)
    (probe,) = driver.take(ProbeSilence)
    driver.report("a")
    driver.core.apply(DeclareLost(probe.instance_ids), driver.now)
    assert driver.take(NotifyLost) == []
    assert driver.state("r") == RequestState.ASSIGNED
    driver.pass_time(3.5)
    assert len(driver.take(ProbeSilence)) == 1, "it is watched again"


def test_an_outage_of_the_bus_kills_nobody() -> None:
    driver = Driver()
    driver.up("a")
    running(driver, "a", "r")
    for _ in range(4):
        driver.pass_time(3.1)
        assert len(driver.take(ProbeSilence)) == 1
        driver.core.apply(GrantGrace(), driver.now)
    assert driver.take(NotifyLost) == []
    assert driver.state("r") == RequestState.ASSIGNED


def test_an_instance_that_comes_back_is_asked_and_its_leftovers_are_cancelled() -> None:
    driver = Driver()
    driver.up("a")
    running(driver, "a", "r", "gone")
    driver.pass_time(3.5)
    driver.core.apply(DeclareLost(["a"]), driver.now)
    driver.up("b")
    driver.submit(make_request("r", epoch=64))
    assert driver.dispatches() == {"r": "b"}
    driver.report("a")
    (ask,) = driver.take(AskHeld)
    driver.core.apply(OnHeld(ask, [held("r", 0)]), driver.now)
    assert driver.take(CancelAt) == [CancelAt("a", "r", 0)]
    driver.report("a", ended=["r"])
    assert driver.core.requests.get("r") is not None, "the end of the older epoch is not the end of the request"


def test_death_during_the_submit_call_places_again_from_here() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    (first,) = driver.take(Dispatch)
    driver.core.apply(OnExited(InstanceExited("a", "1", "node", 1)), driver.now)
    driver.up("b")
    (second,) = driver.take(Dispatch)
    assert (second.instance_id, second.request.epoch) == ("b", PLACEMENT_EPOCHS)
    driver.core.apply(OnDispatched.to(first, None), driver.now)
    assert driver.state("r") == RequestState.DISPATCHING, "an outcome of the dead does not count"
    driver.core.apply(OnDispatched.to(second, None), driver.now)
    assert driver.state("r") == RequestState.ASSIGNED
    assert driver.take(NotifyLost) == []


def test_a_higher_epoch_replaces_the_request_wherever_it_is() -> None:
    driver = Driver(max_waiting_per_model=1)
    driver.submit(make_request("r"))
    driver.submit(make_request("r", epoch=128, num_prior=5))
    assert len(driver.core.queue) == 1
    driver.up("a")
    (dispatch,) = driver.take(Dispatch)
    assert dispatch.request.epoch == 128 and len(dispatch.request.prior) == 20
    driver.core.apply(OnDispatched.to(dispatch, None), driver.now)
    driver.report("a", freeness=0.0, admitted=["r"])
    driver.up("b")
    assert driver.submit(make_request("r", epoch=64)) is None
    assert driver.dispatches() == {}, "an old epoch changes nothing"
    driver.submit(make_request("r", epoch=192))
    assert driver.dispatches() == {"r": "b"}
    assert driver.take(CancelAt) == [CancelAt("a", "r", 128)]


def test_no_cancel_reaches_the_new_owner_if_it_is_the_old_one() -> None:
    driver = Driver()
    driver.up("a")
    running(driver, "a", "r")
    driver.submit(make_request("r", epoch=64))
    assert driver.dispatches() == {"r": "a"}
    assert driver.take(CancelAt) == []
    # "r ended": the old epoch or the new one? The instance is asked.
    driver.report("a", ended=["r"])
    (ask,) = driver.take(AskHeld)
    driver.core.apply(OnHeld(ask, [held("r", 64)]), driver.now)
    assert driver.state("r") == RequestState.ASSIGNED
    driver.report("a", ended=["r"])
    assert driver.state("r") is None


def test_missed_reports_are_made_up_for_by_asking() -> None:
    driver = Driver()
    driver.up("a")
    running(driver, "a", "r0", "r1")
    driver.now += 1.0
    driver.sequences["a"] += 1
    driver.report("a")
    (ask,) = driver.take(AskHeld)
    driver.core.apply(OnHeld(ask, [held("r1"), held("by-bypass")]), driver.now)
    assert driver.state("r0") is None, "its end was in the missed report"
    assert driver.state("r1") == RequestState.ASSIGNED
    assert driver.state("by-bypass") == RequestState.ASSIGNED


def test_an_end_that_overtakes_the_answer_leaves_no_ghost() -> None:
    driver = Driver()
    driver.core.apply(OnRegistry("a", make_info("a")), driver.now)
    driver.core.apply(AskEveryone(), driver.now)
    (ask,) = driver.take(AskHeld)
    driver.report("a", ended=["r"])
    driver.core.apply(OnHeld(ask, [held("r")]), driver.now)
    assert driver.state("r") is None


def test_a_new_leader_rebuilds_from_what_instances_hold() -> None:
    driver = Driver()
    for name in "ab":
        driver.core.apply(OnRegistry(name, make_info(name)), driver.now)
    driver.core.apply(AskEveryone(), driver.now)
    asks = {ask.instance_id: ask for ask in driver.take(AskHeld)}
    driver.core.apply(OnHeld(asks["a"], [held("r", 128), held("old", 0)]), driver.now)
    driver.core.apply(OnHeld(asks["b"], [held("old", 1)]), driver.now)
    driver.core.apply(BeginServing(), driver.now)
    driver.report("a")
    driver.report("b")
    for request in (make_request("r", epoch=128), make_request("r", epoch=64), make_request("old")):
        assert driver.submit(request) is None
    assert driver.dispatches() == {}
    driver.submit(make_request("queued-before", waited_s=4.0))
    assert len(driver.dispatches()) == 1
    driver.core.apply(OnRegistry("b", None), driver.now)
    (notice,) = driver.take(NotifyLost)
    assert LostRequest("old", 1) in notice.lost.requests


def test_an_instance_that_did_not_answer_at_take_over_may_hold_anything() -> None:
    driver = Driver()
    for name in "ab":
        driver.core.apply(OnRegistry(name, make_info(name)), driver.now)
    driver.core.apply(AskEveryone(), driver.now)
    asks = {ask.instance_id: ask for ask in driver.take(AskHeld)}
    driver.core.apply(OnHeld(asks["a"], []), driver.now)
    driver.core.apply(OnHeld(asks["b"], None), driver.now)
    driver.core.apply(BeginServing(), driver.now)
    driver.report("a")
    driver.submit(make_request("r"))
    (dispatch,) = driver.take(Dispatch)
    assert (dispatch.instance_id, dispatch.request.epoch) == ("a", 3 * TERM_EPOCHS)
    driver.core.apply(OnDispatched.to(dispatch, None), driver.now)
    driver.pass_time(1.5)
    driver.report("a", admitted=["r"])
    driver.report("b")
    (ask,) = driver.take(AskHeld)
    driver.core.apply(OnHeld(ask, [held("r", 0)]), driver.now)
    assert driver.take(CancelAt) == [], "the gateway has perhaps not seen the raised epoch yet"
    driver.submit(make_request("s"))
    (dispatch,) = driver.take(Dispatch)
    assert dispatch.request.epoch == 0, "all have answered"


def test_a_queued_request_that_is_found_on_an_instance_is_not_dispatched() -> None:
    driver = Driver(max_waiting_per_model=2)
    driver.core.apply(OnRegistry("a", make_info("a")), driver.now)
    driver.core.apply(BeginServing(), driver.now)
    driver.submit(make_request("r"))
    driver.report("a", waiting={"m": 2})
    (ask,) = driver.take(AskHeld)
    driver.core.apply(OnHeld(ask, [held("r")]), driver.now)
    assert driver.state("r") == RequestState.ASSIGNED and len(driver.core.queue) == 0
    driver.report("a")
    assert driver.take(Dispatch) == []


def test_assignments_that_nobody_ends_expire_after_their_deadline() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r", timeout_s=5.0))
    assert driver.dispatches() == {"r": "a"}
    for _ in range(20):
        driver.pass_time(1.0)
        driver.report("a")
    assert driver.state("r") is None and driver.take(SendEntry) == []


def test_an_answer_of_the_dead_gives_it_nothing() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    driver.refuse(ErrorCode.DEADLINE)
    (ask,) = driver.take(AskHeld)
    driver.pass_time(3.5)
    driver.core.apply(DeclareLost(["a"]), driver.now)
    driver.core.apply(OnHeld(ask, [held("r")]), driver.now)
    assert driver.state("r") == RequestState.QUEUED, "nobody would notice if it stayed dead"


def test_the_end_of_an_outage_ends_the_back_off_too() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    driver.refuse(ErrorCode.OVERLOADED, retry_after_s=2.0)
    assert driver.take(Dispatch) == []
    driver.core.apply(GrantGrace(), driver.now)
    assert driver.dispatches() == {"r": "a"}


def test_an_owner_whose_epoch_the_gateway_no_longer_hears_is_none() -> None:
    driver = Driver(max_waiting_per_model=2)
    driver.up("a")
    driver.submit(make_request("r"))
    driver.refuse(ErrorCode.DEADLINE)
    (ask,) = driver.take(AskHeld)
    driver.core.apply(OnHeld(ask, None), driver.now)  # back in the queue, for epoch 1
    assert driver.submit(make_request("r", epoch=64)) is None
    driver.report("a", waiting={"m": 2})
    driver.pass_time(1.1)
    driver.report("a", waiting={"m": 2})
    (ask,) = driver.take(AskHeld)
    driver.core.apply(OnHeld(ask, [held("r", 0)]), driver.now)
    assert driver.state("r") == RequestState.QUEUED


def test_an_entry_that_is_written_again_with_another_load_has_nobody_ranked_again() -> None:
    """Each instance writes one each second."""
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    assert driver.dispatches() == {"r": "a"}
    state, ranking = driver.core.cluster.get("a"), driver.core.dispatcher.ranking
    assert state is not None
    ranking.woken()
    info = make_info("a")
    loads = [msgspec.structs.replace(model, num_running=3, num_waiting=1) for model in info.models]
    again = msgspec.structs.replace(info, models=loads, dispatch_freeness=7.0)
    driver.core.apply(OnRegistry("a", again), driver.now)
    assert ranking.woken() == [] and state.info is again
    for news in (
        make_info("a", num_merged=50),
        make_info("a", num_merged=50, kv_address=""),
        make_info("a", "m", "n", num_merged=50, kv_address=""),
        make_info("a", "m", "n", num_merged=50, kv_address="", max_model_len=512),
        make_info("a", "m", "n", num_merged=50, kv_address="", max_model_len=512, state="draining"),
    ):
        driver.core.apply(OnRegistry("a", news), driver.now)
        assert [lane.model for lane in ranking.woken()] == ["m"]
    assert not state.is_reachable and state.is_draining and state.leaving == {"m", "n"}
    assert {served.max_model_len for served in state.ready.values()} == {512}
