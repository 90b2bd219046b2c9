"""The scheduler's decisions, one situation at a time: no bus, no clock."""

from __future__ import annotations

import math
from typing import TypeVar

import pytest

from services.scheduler.actions import (
    Action,
    AskHeld,
    CancelAt,
    Dispatch,
    InstanceLost,
    LeftQueue,
    NotifyLost,
    ProbeSilence,
    SendEntry,
)
from services.scheduler.core import LEDGER_EXPIRY_S, TERM_EPOCHS, SchedulerCore
from services.scheduler.requests import RequestState
from shared.messages import (
    ErrorCode,
    ErrorInfo,
    FinishedStats,
    FinishReason,
    GenerationRequest,
    HeldRequest,
    InstanceExited,
    LostRequest,
    RequestClass,
    RequestsLost,
)
from shared.settings import SchedulerSettings
from tests.scheduler.samples import make_info, make_report, make_request

A = TypeVar("A", bound=Action)


class Driver:
    """A core with a clock that stands still unless told; collects actions."""

    def __init__(self, **settings: object) -> None:
        self.core = SchedulerCore(SchedulerSettings(**settings), term=3)  # type: ignore[arg-type]
        self.now = 100.0
        self.sequences: dict[str, int] = {}
        self.log: list[Action] = []

    def take(self, kind: type[A]) -> list[A]:
        """Actions of a kind since they were last taken."""
        self.log += self.core.actions(self.now)
        taken = [action for action in self.log if isinstance(action, kind)]
        self.log = [action for action in self.log if not isinstance(action, kind)]
        return taken

    def up(self, instance_id: str, *models: str, heard: bool = True, **info: object) -> None:
        """A new instance that has answered and reported."""
        self.core.on_registry(instance_id, make_info(instance_id, *models, **info), self.now)  # type: ignore[arg-type]
        if heard:
            self.report(instance_id, incarnation=info.get("incarnation", "1"))
            for ask in self.take(AskHeld):
                self.core.on_held(ask, [], self.now)

    def report(self, instance_id: str, **report: object) -> None:
        self.sequences[instance_id] = self.sequences.get(instance_id, 0) + 1
        message = make_report(instance_id, self.sequences[instance_id], **report)  # type: ignore[arg-type]
        self.core.on_report(message, self.now)

    def submit(self, request: GenerationRequest) -> ErrorInfo | None:
        return self.core.submit(request, self.now)

    def dispatches(self) -> dict[str, str]:
        """Request id to instance id of new dispatches, which are then accepted."""
        made = self.take(Dispatch)
        for dispatch in made:
            self.core.on_dispatched(dispatch, None, self.now)
        return {dispatch.request.request_id: dispatch.instance_id for dispatch in made}

    def refuse(self, code: ErrorCode, retry_after_s: float = 0.0) -> Dispatch:
        """The single new dispatch, answered with an error."""
        (dispatch,) = self.take(Dispatch)
        self.core.on_dispatched(dispatch, ErrorInfo(code, "no", retry_after_s=retry_after_s), self.now)
        return dispatch

    def pass_time(self, seconds: float) -> None:
        """To each deadline on the way, as a timer would."""
        end = self.now + seconds
        while (wakeup := self.core.next_wakeup()) is not None and wakeup <= end:
            self.now = max(self.now, wakeup)
            self.core.on_time(self.now)
            self.log += self.core.actions(self.now)
        self.now = end

    def state(self, request_id: str) -> RequestState | None:
        tracked = self.core.requests.get(request_id)
        return tracked.state if tracked else None


def held(request_id: str, epoch: int = 0, gateway_id: str = "g0") -> HeldRequest:
    return HeldRequest(request_id, gateway_id, epoch, "m", 10, True)


# ------------------------------------------------------------------------------------------------ dispatching


def test_a_request_goes_to_the_freest_instance_that_serves_its_model() -> None:
    driver = Driver()
    driver.up("a")
    driver.up("b")
    driver.up("c", "other")
    driver.report("a", freeness=5.0, num_running=3)
    driver.report("b", freeness=9.0, num_running=3)
    driver.submit(make_request("r", timeout_s=30, waited_s=2.0))
    driver.now += 1.0
    (dispatch,) = driver.take(Dispatch)
    assert dispatch.instance_id == "b"
    assert dispatch.request.timeout_s == pytest.approx(29)
    assert dispatch.request.waited_s == pytest.approx(3)
    assert dispatch.request.epoch == 0


def test_a_request_waits_for_a_model_that_nobody_serves_yet() -> None:
    driver = Driver()
    driver.up("a", "other")
    assert driver.submit(make_request("r")) is None
    assert driver.dispatches() == {}
    driver.core.on_registry("a", make_info("a", "other", "m"), driver.now)
    assert driver.dispatches() == {"r": "a"}


@pytest.mark.parametrize("info", [{"state": "draining"}, {"state": "starting"}, {"model_state": "loading"}])
def test_instances_that_are_not_ready_get_nothing(info: dict[str, str]) -> None:
    driver = Driver()
    driver.up("a")
    driver.core.on_registry("a", make_info("a", **info), driver.now)  # type: ignore[arg-type]
    driver.submit(make_request("r"))
    assert driver.dispatches() == {}


def test_an_instance_is_used_only_after_its_first_report() -> None:
    driver = Driver()
    driver.up("a", heard=False)
    driver.submit(make_request("r"))
    assert driver.dispatches() == {}
    driver.report("a")
    assert driver.dispatches() == {"r": "a"}


def test_a_burst_between_two_reports_spreads_over_instances() -> None:
    driver = Driver(max_waiting_per_model=4)
    for name in "abc":
        driver.up(name)
    for number in range(9):
        driver.submit(make_request(f"r{number}"))
    placed = list(driver.dispatches().values())
    assert sorted(placed) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3


def test_each_instance_holds_few_waiting_requests_of_a_model() -> None:
    driver = Driver(max_waiting_per_model=2)
    driver.up("a", "m", "n")
    driver.report("a", waiting={"m": 1})
    for number in range(4):
        driver.submit(make_request(f"m{number}"))
        driver.submit(make_request(f"n{number}", model="n"))
    assert driver.dispatches() == {"m0": "a", "n0": "a", "n1": "a"}
    driver.report("a", waiting={"m": 2}, admitted=["m0", "n0", "n1"])
    assert driver.dispatches() == {"n2": "a", "n3": "a"}


def test_online_goes_before_offline_high_before_normal_then_first_come() -> None:
    driver = Driver(max_waiting_per_model=10)
    driver.submit(make_request("offline", online=False, high=True))
    driver.submit(make_request("late"))
    driver.submit(make_request("early", waited_s=5.0))
    driver.submit(make_request("high", high=True))
    driver.up("a")
    assert list(driver.dispatches()) == ["high", "early", "late", "offline"]


def test_order_holds_over_models_too() -> None:
    driver = Driver(max_waiting_per_model=10)
    driver.submit(make_request("n-offline", model="n", online=False))
    for number in range(3):
        driver.submit(make_request(f"m{number}", model="m"))
        driver.now += 0.1
        driver.submit(make_request(f"n{number}", model="n"))
        driver.now += 0.1
    driver.up("a", "m", "n")
    assert list(driver.dispatches()) == ["m0", "n0", "m1", "n1", "m2", "n2", "n-offline"]


def test_waiting_offline_requests_do_not_keep_online_ones_away() -> None:
    driver = Driver(max_waiting_per_model=2)
    driver.up("a")
    driver.report("a", waiting={"m": 2}, offline={"m": 2})
    driver.submit(make_request("offline", online=False))
    driver.submit(make_request("online"))
    assert driver.dispatches() == {"online": "a"}


@pytest.mark.parametrize(("policy", "expected"), [("fewest_requests", "b"), ("round_robin", "a"), ("freeness", "c")])
def test_baselines_are_chosen_by_name(policy: str, expected: str) -> None:
    driver = Driver(dispatch_policy=policy)
    for name in "abc":
        driver.up(name)
    driver.report("a", freeness=1.0, num_running=5)
    driver.report("b", freeness=2.0, num_running=1)
    driver.report("c", freeness=3.0, num_running=9)
    driver.submit(make_request("r"))
    assert driver.dispatches() == {"r": expected}


def test_unknown_policies_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"fastest.*freeness"):
        Driver(dispatch_policy="fastest")
    with pytest.raises(ValueError, match=r"lifo.*fcfs"):
        Driver(order_policy="lifo")


def test_equals_are_chosen_by_cached_prefix_and_affinity_outweighs_some_freeness() -> None:
    long_prompt = {"num_prompt": 200}
    driver = Driver()
    driver.up("b")
    driver.submit(make_request("r0", **long_prompt))  # type: ignore[arg-type]
    assert driver.dispatches() == {"r0": "b"}
    driver.up("a")
    driver.report("b", admitted=["r0"], ended=["r0"])
    driver.submit(make_request("r1", **long_prompt))  # type: ignore[arg-type]
    assert driver.dispatches() == {"r1": "b"}, "both idle, and b has the prefix"
    driver.report("a", freeness=10.0, num_running=1)
    driver.report("b", freeness=9.0, num_running=1, admitted=["r1"])
    driver.submit(make_request("r2", **long_prompt))  # type: ignore[arg-type]
    assert driver.dispatches() == {"r2": "a"}, "without affinity, freeness decides"

    driver = Driver(cache_affinity_merged=2.0)
    driver.up("b")
    driver.submit(make_request("r0", **long_prompt))  # type: ignore[arg-type]
    assert driver.dispatches() == {"r0": "b"}
    driver.up("a")
    driver.report("a", freeness=10.0, num_running=1)
    driver.report("b", freeness=9.0, num_running=1, admitted=["r0"])
    driver.submit(make_request("r1", **long_prompt))  # type: ignore[arg-type]
    assert driver.dispatches() == {"r1": "b"}
    driver.report("b", freeness=7.0, num_running=1, admitted=["r1"])
    driver.submit(make_request("r2", **long_prompt))  # type: ignore[arg-type]
    assert driver.dispatches() == {"r2": "a"}, "more than the affinity behind"


def test_ledger_entries_leave_by_report_and_by_expiry() -> None:
    driver = Driver(max_waiting_per_model=1)
    driver.up("a")
    driver.submit(make_request("r0"))
    driver.submit(make_request("r1"))
    assert driver.dispatches() == {"r0": "a"}
    driver.report("a")  # names nobody
    assert driver.dispatches() == {}
    driver.report("a", admitted=["r0"])
    assert driver.dispatches() == {"r1": "a"}
    driver.submit(make_request("r2"))
    driver.pass_time(LEDGER_EXPIRY_S - 0.1)
    assert driver.dispatches() == {}
    driver.pass_time(0.2)
    assert driver.dispatches() == {"r2": "a"}


def test_a_request_for_the_larger_pool_does_not_hold_up_the_others() -> None:
    driver = Driver()
    driver.up("big", num_merged=100)
    driver.up("small", num_merged=2)
    driver.report("big", waiting={"m": 2})
    driver.submit(make_request("long", num_prompt=500, max_tokens=100))
    driver.submit(make_request("short"))
    assert driver.dispatches() == {"short": "small"}
    driver.report("big", freeness=1.0, waiting={"m": 1})
    assert driver.dispatches() == {"long": "big"}


# ------------------------------------------------------------------------------------------- refusals, deadlines


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    driver = Driver()
    assert driver.submit(make_request("r", num_prompt=5000)) is None, "nobody serves the model: nothing is known"
    driver.up("a", max_model_len=1024, num_merged=8)
    refused = driver.submit(make_request("s", num_prompt=1000, max_tokens=100))
    assert refused is not None and refused.code == ErrorCode.TOO_LONG
    assert "1000 prompt tokens" in refused.message and "100 output" in refused.message and "1024" in refused.message
    assert refused.param == "max_tokens"
    refused = driver.submit(make_request("t", num_prompt=2000))
    assert refused is not None and refused.param == "prompt"
    # 8 merged blocks of 4 slots of 16 tokens.
    refused = driver.submit(make_request("u", num_prompt=500, max_tokens=100))
    assert refused is not None and refused.code == ErrorCode.TOO_LONG and "512" in refused.message
    driver.up("b", max_model_len=1024, num_merged=80)
    assert driver.submit(make_request("u", num_prompt=500, max_tokens=100)) is None
    assert driver.dispatches() == {"u": "b"}


def test_a_full_queue_refuses_with_an_estimate_but_lets_back_in_what_ran_before() -> None:
    driver = Driver(max_queued=3)
    for number in range(3):
        assert driver.submit(make_request(f"r{number}")) is None
    refused = driver.submit(make_request("r3"))
    assert refused is not None and refused.code == ErrorCode.OVERLOADED and refused.retry_after_s >= 1
    assert driver.submit(make_request("lost", epoch=1, num_prior=4)) is None
    assert driver.submit(make_request("r0")) is None, "sending again changes nothing"
    assert len(driver.core.queue) == 4


def test_a_request_past_its_deadline_leaves_the_queue_with_a_typed_entry() -> None:
    driver = Driver()
    driver.submit(make_request("r", timeout_s=2.0, epoch=3, num_prior=7))
    driver.submit(make_request("s", timeout_s=60.0))
    driver.pass_time(1.9)
    assert driver.take(SendEntry) == []
    driver.pass_time(0.2)
    (sent,) = driver.take(SendEntry)
    assert sent.gateway_id == "g0"
    assert (sent.entry.request_id, sent.entry.epoch, sent.entry.offset) == ("r", 3, 7)
    assert sent.entry.finish_reason == FinishReason.DEADLINE
    assert sent.entry.error is not None and sent.entry.error.code == ErrorCode.DEADLINE
    assert driver.state("r") is None and driver.state("s") == RequestState.QUEUED
    driver.up("a")
    assert driver.dispatches() == {"s": "a"}


def test_a_request_whose_time_is_over_is_not_dispatched_even_if_the_timer_is_late() -> None:
    driver = Driver()
    driver.submit(make_request("r", timeout_s=2.0))
    driver.now += 3.0
    driver.up("a")
    assert driver.dispatches() == {}
    driver.pass_time(0)
    assert len(driver.take(SendEntry)) == 1


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
    assert epochs == [0, 1, 2], "each attempt may have had an effect"
    (sent,) = driver.take(SendEntry)
    assert sent.entry.error is not None and sent.entry.error.code == ErrorCode.INTERNAL


def test_unknown_outcome_and_the_instance_has_it() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    driver.refuse(ErrorCode.DEADLINE)
    (ask,) = driver.take(AskHeld)
    assert driver.state("r") == RequestState.ASKING
    driver.core.on_held(ask, [held("r")], driver.now)
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
    driver.core.on_held(ask, answer, driver.now)
    (dispatch,) = driver.take(Dispatch)
    assert (dispatch.instance_id, dispatch.request.epoch) == ("b", 1)
    driver.core.on_dispatched(dispatch, None, driver.now)
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
    driver.core.on_held(early, [], driver.now)
    assert driver.state("r") == RequestState.ASKING
    driver.core.on_held(late, [held("r")], driver.now)
    assert driver.state("r") == RequestState.ASSIGNED


def test_an_end_reported_before_the_acceptance() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    (dispatch,) = driver.take(Dispatch)
    driver.report("a", admitted=["r"], ended=["r"])
    driver.core.on_dispatched(dispatch, None, driver.now)
    assert driver.state("r") is None
    assert [left.outcome for left in driver.take(LeftQueue)] == ["dispatched"]


def test_an_end_reported_and_the_acceptance_lost() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    (dispatch,) = driver.take(Dispatch)
    driver.report("a", admitted=["r"], ended=["r"])
    driver.core.on_dispatched(dispatch, ErrorInfo(ErrorCode.UNAVAILABLE, "connection lost"), driver.now)
    driver.pass_time(1.0)
    assert driver.state("r") is None and driver.take(Dispatch) == [], "it ended; it must not run twice"


# ------------------------------------------------------------------------------------------------------ cancel


def test_cancel_in_the_queue_and_on_an_instance() -> None:
    driver = Driver()
    driver.submit(make_request("queued"))
    driver.core.cancel("queued", driver.now)
    driver.core.cancel("unknown", driver.now)
    driver.up("a")
    assert driver.dispatches() == {} and driver.take(SendEntry) == []
    driver.submit(make_request("r"))
    assert driver.dispatches() == {"r": "a"}
    driver.core.cancel("r", driver.now)
    assert driver.take(CancelAt) == [CancelAt("a", "r")]
    driver.report("a", admitted=["r"], ended=["r"])
    assert driver.state("r") is None


def test_cancel_while_the_submit_call_is_under_way() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    (dispatch,) = driver.take(Dispatch)
    driver.core.cancel("r", driver.now)
    assert driver.take(CancelAt) == []
    driver.core.on_dispatched(dispatch, None, driver.now)
    assert driver.take(CancelAt) == [CancelAt("a", "r")]

    driver.submit(make_request("s"))
    (dispatch,) = driver.take(Dispatch)
    driver.core.cancel("s", driver.now)
    driver.core.on_dispatched(dispatch, ErrorInfo(ErrorCode.OVERLOADED, "no"), driver.now)
    driver.pass_time(5.0)
    driver.report("a")
    assert driver.state("s") is None and driver.take(Dispatch) == []


# ---------------------------------------------------------------------------------------------------- recovery


def running(driver: Driver, instance_id: str, *request_ids: str, gateway_id: str = "g0") -> None:
    """Requests that were dispatched to the instance and run there."""
    for request_id in request_ids:
        driver.submit(make_request(request_id, gateway_id=gateway_id))
        assert driver.dispatches() == {request_id: instance_id}
        driver.report(instance_id, admitted=[request_id])


def lost(*request_ids: str, instance_id: str = "a", epoch: int = 0) -> RequestsLost:
    return RequestsLost(instance_id, [LostRequest(request_id, epoch) for request_id in request_ids])


def test_an_exit_is_told_to_every_gateway_in_one_message_each() -> None:
    driver = Driver()
    driver.up("a")
    running(driver, "a", "r0", "r1")
    running(driver, "a", "r2", gateway_id="g1")
    driver.core.on_exited(InstanceExited("a", "0", "node", 1), driver.now)
    assert driver.take(NotifyLost) == [], "an older incarnation"
    driver.core.on_exited(InstanceExited("a", "1", "node", 137), driver.now)
    assert driver.take(NotifyLost) == [NotifyLost("g0", lost("r0", "r1")), NotifyLost("g1", lost("r2"))]
    assert driver.take(InstanceLost) == [InstanceLost("a", "exited", 3)]
    # The registry still shows it, and a late report arrives.
    driver.core.on_registry("a", make_info("a"), driver.now)
    driver.report("a")
    driver.submit(make_request("r0", epoch=1))
    assert driver.dispatches() == {}
    driver.core.on_registry("a", None, driver.now)
    assert driver.take(NotifyLost) == []
    driver.up("a", incarnation="2")
    assert driver.dispatches() == {"r0": "a"}


@pytest.mark.parametrize("incarnation", [None, "2"])
def test_vanishing_and_restarting_are_deaths(incarnation: str | None) -> None:
    driver = Driver()
    driver.up("a")
    running(driver, "a", "r")
    info = make_info("a", incarnation=incarnation) if incarnation else None
    driver.core.on_registry("a", info, driver.now)
    assert driver.take(NotifyLost) == [NotifyLost("g0", lost("r"))]
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
    driver.core.declare_lost(["a"], driver.now)
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
    driver.core.declare_lost(probe.instance_ids, driver.now)
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
        driver.core.grant_grace(driver.now)
    assert driver.take(NotifyLost) == []
    assert driver.state("r") == RequestState.ASSIGNED


def test_an_instance_that_comes_back_is_asked_and_its_leftovers_are_cancelled() -> None:
    driver = Driver()
    driver.up("a")
    running(driver, "a", "r", "gone")
    driver.pass_time(3.5)
    driver.core.declare_lost(["a"], driver.now)
    driver.up("b")
    driver.submit(make_request("r", epoch=1))
    assert driver.dispatches() == {"r": "b"}
    driver.report("a")
    (ask,) = driver.take(AskHeld)
    driver.core.on_held(ask, [held("r", 0)], driver.now)
    assert driver.take(CancelAt) == [CancelAt("a", "r")]
    driver.report("a", ended=["r"])
    assert driver.core.requests.get("r") is not None, "the end of the older epoch is not the end of the request"


def test_death_during_the_submit_call_places_again_from_here() -> None:
    driver = Driver()
    driver.up("a")
    driver.submit(make_request("r"))
    (first,) = driver.take(Dispatch)
    driver.core.on_exited(InstanceExited("a", "1", "node", 1), driver.now)
    driver.up("b")
    (second,) = driver.take(Dispatch)
    assert (second.instance_id, second.request.epoch) == ("b", 1)
    driver.core.on_dispatched(first, None, driver.now)
    assert driver.state("r") == RequestState.DISPATCHING, "an outcome of the dead does not count"
    driver.core.on_dispatched(second, None, driver.now)
    assert driver.state("r") == RequestState.ASSIGNED
    assert driver.take(NotifyLost) == []


def test_a_higher_epoch_replaces_the_request_wherever_it_is() -> None:
    driver = Driver(max_waiting_per_model=1)
    driver.submit(make_request("r"))
    driver.submit(make_request("r", epoch=2, num_prior=5))
    assert len(driver.core.queue) == 1
    driver.up("a")
    (dispatch,) = driver.take(Dispatch)
    assert dispatch.request.epoch == 2 and len(dispatch.request.prior) == 20
    driver.core.on_dispatched(dispatch, None, driver.now)
    driver.report("a", freeness=0.0, admitted=["r"])
    driver.up("b")
    assert driver.submit(make_request("r", epoch=1)) is None
    assert driver.dispatches() == {}, "an old epoch changes nothing"
    driver.submit(make_request("r", epoch=3))
    assert driver.dispatches() == {"r": "b"}
    assert driver.take(CancelAt) == [CancelAt("a", "r")]


def test_no_cancel_reaches_the_new_owner_if_it_is_the_old_one() -> None:
    driver = Driver()
    driver.up("a")
    running(driver, "a", "r")
    driver.submit(make_request("r", epoch=1))
    assert driver.dispatches() == {"r": "a"}
    assert driver.take(CancelAt) == []
    # "r ended": the old epoch or the new one? The instance is asked.
    driver.report("a", ended=["r"])
    (ask,) = driver.take(AskHeld)
    driver.core.on_held(ask, [held("r", 1)], driver.now)
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
    driver.core.on_held(ask, [held("r1"), held("by-bypass")], driver.now)
    assert driver.state("r0") is None, "its end was in the missed report"
    assert driver.state("r1") == RequestState.ASSIGNED
    assert driver.state("by-bypass") == RequestState.ASSIGNED


def test_an_end_that_overtakes_the_answer_leaves_no_ghost() -> None:
    driver = Driver()
    driver.core.on_registry("a", make_info("a"), driver.now)
    driver.core.ask_everyone(driver.now)
    (ask,) = driver.take(AskHeld)
    driver.report("a", ended=["r"])
    driver.core.on_held(ask, [held("r")], driver.now)
    assert driver.state("r") is None


def test_a_new_leader_rebuilds_from_what_instances_hold() -> None:
    driver = Driver()
    for name in "ab":
        driver.core.on_registry(name, make_info(name), driver.now)
    driver.core.ask_everyone(driver.now)
    asks = {ask.instance_id: ask for ask in driver.take(AskHeld)}
    driver.core.on_held(asks["a"], [held("r", 2), held("old", 0)], driver.now)
    driver.core.on_held(asks["b"], [held("old", 1)], driver.now)
    driver.core.begin_serving()
    driver.report("a")
    driver.report("b")
    for request in (make_request("r", epoch=2), make_request("r", epoch=1), make_request("old")):
        assert driver.submit(request) is None
    assert driver.dispatches() == {}
    driver.submit(make_request("queued-before", waited_s=4.0))
    assert len(driver.dispatches()) == 1
    driver.core.on_registry("b", None, driver.now)
    (notice,) = driver.take(NotifyLost)
    assert LostRequest("old", 1) in notice.lost.requests


def test_an_instance_that_did_not_answer_at_take_over_may_hold_anything() -> None:
    driver = Driver()
    for name in "ab":
        driver.core.on_registry(name, make_info(name), driver.now)
    driver.core.ask_everyone(driver.now)
    asks = {ask.instance_id: ask for ask in driver.take(AskHeld)}
    driver.core.on_held(asks["a"], [], driver.now)
    driver.core.on_held(asks["b"], None, driver.now)
    driver.core.begin_serving()
    driver.report("a")
    driver.submit(make_request("r"))
    (dispatch,) = driver.take(Dispatch)
    assert (dispatch.instance_id, dispatch.request.epoch) == ("a", 3 * TERM_EPOCHS)
    driver.core.on_dispatched(dispatch, None, driver.now)
    driver.pass_time(1.5)
    driver.report("a", admitted=["r"])
    driver.report("b")
    (ask,) = driver.take(AskHeld)
    driver.core.on_held(ask, [held("r", 0)], driver.now)
    assert driver.take(CancelAt) == [], "the gateway has perhaps not seen the raised epoch yet"
    driver.submit(make_request("s"))
    (dispatch,) = driver.take(Dispatch)
    assert dispatch.request.epoch == 0, "all have answered"


def test_a_queued_request_that_is_found_on_an_instance_is_not_dispatched() -> None:
    driver = Driver()
    driver.core.on_registry("a", make_info("a"), driver.now)
    driver.core.begin_serving()
    driver.submit(make_request("r"))
    driver.report("a", waiting={"m": 2})
    (ask,) = driver.take(AskHeld)
    driver.core.on_held(ask, [held("r")], driver.now)
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


def test_traffic_is_counted_per_model() -> None:
    driver = Driver()
    driver.submit(make_request("r0"))
    driver.submit(make_request("r0", epoch=1))
    driver.submit(make_request("s0", model="n"))
    driver.now += 2.0
    driver.up("a")
    driver.dispatches()
    stats = FinishedStats("m", RequestClass.ONLINE, 10, 20, 0.5, 1.5, FinishReason.STOP)
    driver.report("a", finished=[stats, stats])
    m, n = driver.core.statistics.take(1.0, {"n": 1})
    assert (m.model, m.num_arrived, m.num_finished, m.prompt_tokens, m.output_tokens) == ("m", 1, 2, 20, 40)
    assert m.queued_s == pytest.approx(3.0) and m.execution_s == pytest.approx(3.0)
    assert (n.model, n.num_arrived, n.num_queued) == ("n", 1, 1)
    assert driver.core.statistics.take(1.0, {}) == []


def test_nan_freeness_does_not_break_the_order() -> None:
    driver = Driver()
    driver.up("a")
    driver.up("b")
    driver.report("a", freeness=math.nan)
    driver.report("b", freeness=-5.0)
    driver.submit(make_request("r"))
    assert driver.dispatches() == {"r": "b"}
