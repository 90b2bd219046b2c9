"""Who goes where and when, and what is refused: the core, one situation at a time."""

from __future__ import annotations

import math

import msgspec
import pytest

from shared.messages.cluster import KEY_BYTES, FinishedStats, InstanceExited, LoadedModel, ModelDemand
from shared.messages.requests import (
    Adapter,
    ErrorCode,
    FinishReason,
    GenerationRequest,
    RequestClass,
    SamplingParams,
    pack_tokens,
)
from shared.scheduling.actions import (
    Dispatch,
    LeftQueue,
    SendEntry,
    Waits,
)
from shared.scheduling.calls import OnExited, OnRegistry
from shared.scheduling.dispatching import LOOKAHEAD, NOBODY_SERVES, READ_AT_ONCE
from shared.scheduling.lifecycle import UNFIT_GRACE_S
from shared.scheduling.prefixes import prompt_keys
from shared.scheduling.queue import Lane
from shared.scheduling.recovery import LEDGER_EXPIRY_S
from shared.scheduling.requests import RequestState
from tests.shared.scheduling.driver import Driver
from tests.shared.scheduling.samples import BLOCK_SIZE, make_info, make_request

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
    driver.core.apply(OnRegistry("a", make_info("a", "other", "m")), driver.now)
    assert driver.dispatches() == {"r": "a"}


def test_what_is_asked_of_models_is_told_by_class_and_place() -> None:
    driver = Driver()
    driver.up("a", "other")
    driver.submit(make_request("served", model="other"))
    driver.submit(make_request("r1", waited_s=2.0))
    driver.submit(make_request("r2"))
    driver.submit(make_request("r3", online=False))
    assert driver.dispatches() == {"served": "a"}
    driver.now += 1.0
    demands = {one.model: one for one in driver.core.demand({"m", "other", "idle"}, driver.now)}
    assert demands == {
        "m": ModelDemand(model="m", num_online=2, num_offline=1, waited_s=pytest.approx(4.0)),
        "other": ModelDemand(model="other", num_held_online=1),
    }


def test_a_request_whose_model_is_being_loaded_waits_for_that() -> None:
    driver = Driver()
    driver.up("a", "other")
    driver.submit(make_request("r1"))
    assert [waits.why for waits in driver.take(Waits)] == [NOBODY_SERVES]
    driver.core.apply(OnRegistry("a", make_info("a", model_state="loading")), driver.now)
    driver.submit(make_request("r2"))
    assert [waits.why for waits in driver.take(Waits)] == ["its model is being loaded"]


@pytest.mark.parametrize("info", [{"state": "draining"}, {"state": "starting"}, {"model_state": "loading"}])
def test_instances_that_are_not_ready_get_nothing(info: dict[str, str]) -> None:
    driver = Driver()
    driver.up("a")
    driver.core.apply(OnRegistry("a", make_info("a", **info)), driver.now)  # type: ignore[arg-type]
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
    driver.report("a", waiting={"m": 2}, offline={"m": 2}, room=0)
    driver.submit(make_request("offline", online=False))
    driver.submit(make_request("online"))
    assert driver.dispatches() == {"online": "a"}


def test_of_those_with_memory_the_one_that_begins_the_prompt_first_takes_it() -> None:
    for policy, expected in (("first_token", "b"), ("freeness", "a")):
        driver = Driver(dispatch_policy=policy)
        for name, freeness, prompts_s in (("a", 30.0, 2.0), ("b", 20.0, 0.5), ("c", -1.0, 0.0), ("d", 10.0, 0.45)):
            driver.up(name)
            driver.report(name, freeness=freeness, num_running=2, prompts_s=prompts_s)
        driver.submit(make_request("r"))
        assert driver.dispatches() == {"r": expected}, "c has no memory, d is hardly sooner than b"


def test_predicted_time_passes_between_reports() -> None:
    driver = Driver()
    for name, prompts_s in (("a", 2.0), ("b", 0.5)):
        driver.up(name)
        driver.report(name, freeness=30.0 if name == "a" else 20.0, num_running=2, prompts_s=prompts_s)
    driver.now += 1.95
    driver.submit(make_request("r"))
    assert driver.dispatches() == {"r": "a"}


def test_prompts_in_flight_count_until_a_report_names_them() -> None:
    driver = Driver()
    for name, freeness in (("a", 30.0), ("b", 10.0)):
        driver.up(name)
        driver.report(name, freeness=freeness, num_running=2, token_s=0.01)
    requests = [
        msgspec.structs.replace(make_request(f"r{number}"), prompt=pack_tokens([number] * 40)) for number in range(3)
    ]
    for request in requests[:2]:
        driver.submit(request)
    assert driver.dispatches() == {"r0": "a", "r1": "b"}
    driver.report("a", freeness=30.0, num_running=3, token_s=0.01, admitted=["r0"])
    driver.submit(requests[2])
    assert driver.dispatches() == {"r2": "a"}


def test_a_cached_prefix_is_not_waited_for_longer_than_it_saves() -> None:
    for prompts_s, expected in ((0.3, "a"), (1.0, "b")):
        driver = Driver()
        for name in "ab":
            driver.up(name)
            driver.report(name, freeness=20.0, num_running=2, token_s=0.005)
        driver.submit(make_request("first", num_prompt=128))
        assert driver.dispatches() == {"first": "a"}
        driver.report("a", freeness=20.0, num_running=2, token_s=0.005, admitted=["first"], prompts_s=prompts_s)
        driver.report("b", freeness=20.0, num_running=2, token_s=0.005)
        driver.submit(make_request("second", num_prompt=128))
        assert driver.dispatches() == {"second": expected}


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


def test_who_has_the_prefix_takes_the_request_though_less_free_until_it_says_that_it_is_gone() -> None:
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
    assert driver.dispatches() == {"r2": "a"}, "what a prompt takes is not known: freeness decides"
    keys = [b""]
    for number, expected in enumerate("ab"):
        other = msgspec.structs.replace(make_request(f"to-{expected}"), prompt=pack_tokens([number + 1] * 200))
        driver.report("a", freeness=math.inf, token_s=0.005, admitted=["r2", "to-a"], cache_lost=keys[-1])
        keys.append(b"".join(prompt_keys(other, BLOCK_SIZE)))
        driver.report("b", freeness=9.0, num_running=1, token_s=0.005, cache_held=keys[-1])
        if expected == "a":
            driver.report("b", freeness=9.0, num_running=1, token_s=0.005, cache_lost=keys[-1])
        driver.submit(other)
        assert driver.dispatches() == {f"to-{expected}": expected}


def test_cached_blocks_of_many_reports_are_noted_little_by_little_and_none_is_forgotten() -> None:
    driver = Driver()
    driver.up("b")
    asked = make_request("r", num_prompt=200)
    keys = list(prompt_keys(asked, BLOCK_SIZE))
    num_reports = 2 * READ_AT_ONCE + 1
    for number in range(num_reports):
        held = keys[number] if number < len(keys) else number.to_bytes(KEY_BYTES, "big")
        driver.report("b", cache_held=held)
    calls = 0
    while driver.core.has_unread or not calls:
        driver.core.actions(driver.now)
        calls += 1
    assert calls == 3
    assert driver.core.dispatcher.num_known_blocks == num_reports


@pytest.mark.parametrize("adapter", [None, Adapter("poet", "1", "/poet")])
def test_a_dispatch_says_that_a_cached_prefix_decided(adapter: Adapter | None) -> None:
    driver = Driver()
    driver.up("b")
    driver.submit(msgspec.structs.replace(make_request("r0", num_prompt=200), adapter=adapter))
    assert driver.dispatches() == {"r0": "b"}
    driver.up("a")
    driver.report("a", freeness=10.0, num_running=1, token_s=0.005)
    driver.report("b", freeness=9.0, num_running=1, token_s=0.005, admitted=["r0"])
    driver.submit(msgspec.structs.replace(make_request("r1", num_prompt=200), adapter=adapter))
    (dispatch,) = driver.take(Dispatch)
    assert (dispatch.instance_id, dispatch.why) == ("b", "has its prompt's beginning in its cache")


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
    driver = Driver(max_waiting_per_model=2)
    driver.up("big", num_merged=100)
    driver.up("small", num_merged=2)
    driver.report("big", waiting={"m": 2})
    driver.submit(make_request("long", num_prompt=500, max_tokens=100))
    driver.submit(make_request("short"))
    assert driver.dispatches() == {"short": "small"}
    driver.report("big", freeness=50.0, waiting={"m": 1})
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
    # 8 merged blocks of 4 blocks of 16 tokens.
    refused = driver.submit(make_request("u", num_prompt=500, max_tokens=100))
    assert refused is not None and refused.code == ErrorCode.TOO_LONG and "512" in refused.message
    driver.up("b", max_model_len=1024, num_merged=80)
    assert driver.submit(make_request("u", num_prompt=500, max_tokens=100)) is None
    assert driver.dispatches() == {"u": "b"}


def test_an_engine_that_lacks_what_a_request_asks_is_passed_over_and_refused_by_name_where_all_do() -> None:
    driver = Driver()
    driver.up("hosted", lacks=("adapters", "kv_moves"))
    adapted = msgspec.structs.replace(make_request("r"), adapter=Adapter("summaries", "1", "/x"))
    refused = driver.submit(adapted)
    assert refused is not None and refused.code == ErrorCode.BAD_REQUEST and refused.param == "model"
    assert "lacks adapters" in refused.message
    assert driver.submit(make_request("plain")) is None
    assert driver.dispatches() == {"plain": "hosted"}
    driver.up("native")
    driver.report("native", freeness=1.0)
    assert driver.submit(adapted) is None
    assert driver.dispatches() == {"r": "native"}


def ends(driver: Driver) -> dict[str, ErrorCode]:
    return {sent.entry.request_id: sent.entry.error.code for sent in driver.take(SendEntry) if sent.entry.error}


def long_request(request_id: str, **others: object) -> GenerationRequest:
    """600 tokens, of which a pool of 8 merged blocks holds 512."""
    request = make_request(request_id, num_prompt=500, max_tokens=100, timeout_s=600.0)
    return msgspec.structs.replace(request, **others)


def lost_request(request_id: str, num_prior: int) -> GenerationRequest:
    """It ran before."""
    return long_request(request_id, epoch=64, prior=pack_tokens([1] * num_prior))


def loading(driver: Driver, instance_id: str, state: str = "loading") -> None:
    """Registers a model as workers register what they load: without its sizes."""
    model = LoadedModel(name="m", state=state)
    info = msgspec.structs.replace(make_info(instance_id), state="starting", models=[model])
    driver.core.apply(OnRegistry(instance_id, info), driver.now)


def test_what_waits_and_has_become_too_long_for_all_that_serve_its_model_is_refused_after_a_grace() -> None:
    driver = Driver()
    driver.up("large", num_merged=80)
    driver.report("large", waiting={"m": 9})
    driver.submit(long_request("long"))
    driver.submit(make_request("short", timeout_s=600.0))
    assert driver.dispatches() == {}
    driver.up("small", num_merged=8)
    assert driver.dispatches() == {"short": "small"}
    driver.pass_time(2 * UNFIT_GRACE_S)
    assert ends(driver) == {}, "one that serves its model could hold it"
    driver.up("large", num_merged=80, state="draining", heard=False)
    assert driver.submit(long_request("new")) is not None, "one that is being drained takes nothing"
    driver.pass_time(UNFIT_GRACE_S - 0.1)
    assert ends(driver) == {}
    driver.pass_time(0.2)
    (sent,) = driver.take(SendEntry)
    assert sent.entry.request_id == "long" and sent.entry.finish_reason == FinishReason.ERROR
    assert sent.entry.error is not None and sent.entry.error.code == ErrorCode.TOO_LONG
    assert "512" in sent.entry.error.message and driver.state("long") is None


def test_a_request_that_waits_and_is_too_long_waits_for_whoever_is_loading_its_model() -> None:
    driver = Driver()
    driver.up("small", num_merged=8)
    loading(driver, "large")
    assert driver.submit(long_request("new")) is not None, "how long a sequence it will hold is not known yet"
    assert driver.submit(lost_request("lost", 4)) is None
    driver.pass_time(10.5 * UNFIT_GRACE_S)
    assert ends(driver) == {} and driver.dispatches() == {}
    driver.up("large", num_merged=80)
    assert driver.dispatches() == {"lost": "large"}
    driver.submit(lost_request("again", 4))
    loading(driver, "large", "failed")
    driver.pass_time(UNFIT_GRACE_S)
    driver.report("small")
    assert driver.dispatches() == {"again": "small"}, "nobody loads it any more"


def test_an_answer_without_a_limit_of_its_own_gets_what_fits_at_once() -> None:
    driver = Driver()
    chat = {"is_open_ended": True, "prompt": pack_tokens([1] * 100), "sampling": SamplingParams(max_tokens=500)}
    driver.submit(long_request("early", **chat))
    driver.up("small", num_merged=8)
    loading(driver, "large")
    assert driver.submit(long_request("chat", **chat)) is None
    lost = msgspec.structs.replace(lost_request("lost", 4), **chat)
    assert driver.submit(lost) is None
    sent = {action.request.request_id: action.request.sampling.max_tokens for action in driver.take(Dispatch)}
    assert sent == {"early": 412, "chat": 412, "lost": 412}
    assert driver.core.queue.num_tokens(Lane("m", True)) == 0
    full = msgspec.structs.replace(make_request("full", num_prompt=512, max_tokens=12), is_open_ended=True)
    refused = driver.submit(full)
    assert refused is not None and refused.code == ErrorCode.TOO_LONG


def test_an_answer_without_a_limit_gets_what_fits_on_an_engine_that_can_run_it() -> None:
    driver = Driver()
    driver.up("hosted", num_merged=16, lacks=("grammars",))
    driver.up("native", num_merged=8)
    sampling = SamplingParams(max_tokens=5000, grammar="{}")
    assert (
        driver.submit(long_request("chat", is_open_ended=True, prompt=pack_tokens([1] * 100), sampling=sampling))
        is None
    )
    (sent,) = driver.take(Dispatch)
    assert (sent.instance_id, sent.request.sampling.max_tokens) == ("native", 412)


def test_an_answer_that_has_begun_goes_on_to_where_it_fits() -> None:
    driver = Driver()
    driver.up("small", num_merged=8)
    driver.submit(lost_request("begun", 11))
    driver.submit(lost_request("full", 12))
    driver.submit(msgspec.structs.replace(lost_request("line", 11), request_class=RequestClass.OFFLINE))
    driver.pass_time(UNFIT_GRACE_S + 0.1)
    driver.report("small")
    sent = {action.request.request_id: action.request.sampling.max_tokens for action in driver.take(Dispatch)}
    assert sent == {"begun": 12, "line": 12}
    (end,) = driver.take(SendEntry)
    assert (end.entry.request_id, end.entry.offset) == ("full", 12)
    assert (end.entry.finish_reason, end.entry.error) == (FinishReason.LENGTH, None)
    assert "finished" in [left.outcome for left in driver.take(LeftQueue) if left.request.request_id == "full"]


def test_nobody_waits_behind_those_that_are_too_long() -> None:
    driver = Driver()
    driver.up("small", num_merged=8)
    for number in range(2 * LOOKAHEAD):
        driver.submit(lost_request(f"lost{number}", 4))
    driver.submit(make_request("short"))
    assert driver.dispatches() == {"short": "small"}
    waits = {wait.request_id: wait.why for wait in driver.take(Waits)}
    assert waits["lost0"] == "it is too long for what serves the model now"


def test_a_request_that_fits_again_keeps_its_place() -> None:
    driver = Driver()
    driver.up("small", num_merged=8)
    driver.submit(lost_request("lost", 4))
    driver.report("small", waiting={"m": 9})
    driver.submit(make_request("later"))
    driver.pass_time(UNFIT_GRACE_S / 2)
    driver.up("large", num_merged=80)
    assert list(driver.dispatches()) == ["lost", "later"]
    driver.pass_time(UNFIT_GRACE_S)
    assert ends(driver) == {}


def test_one_that_was_lost_again_is_cut_where_nobody_larger_is_left() -> None:
    driver = Driver()
    driver.up("small", num_merged=8)
    driver.up("large", num_merged=80)
    driver.submit(lost_request("lost", 4))
    driver.core.apply(OnExited(InstanceExited("large", "1", "large", 1)), driver.now)
    driver.pass_time(UNFIT_GRACE_S + 0.1)
    driver.report("small")
    assert driver.dispatches() == {"lost": "small"}


def test_a_full_queue_refuses_with_an_estimate_but_lets_back_in_what_ran_before() -> None:
    driver = Driver(max_queued=3)
    for number in range(3):
        assert driver.submit(make_request(f"r{number}")) is None
    refused = driver.submit(make_request("r3"))
    assert refused is not None and refused.code == ErrorCode.OVERLOADED and refused.retry_after_s >= 1
    assert driver.submit(make_request("flex", online=False)) is None, "each class has a bound of its own"
    assert driver.submit(make_request("lost", epoch=64, num_prior=4)) is None
    assert driver.submit(make_request("r0")) is None, "sending again changes nothing"
    assert len(driver.core.queue) == 5


def test_a_request_past_its_deadline_leaves_the_queue_with_a_typed_entry() -> None:
    driver = Driver()
    driver.submit(make_request("r", timeout_s=2.0, epoch=192, num_prior=7))
    driver.submit(make_request("s", timeout_s=60.0))
    driver.pass_time(1.9)
    assert driver.take(SendEntry) == []
    driver.pass_time(0.2)
    (sent,) = driver.take(SendEntry)
    assert sent.gateway_id == "g0"
    assert (sent.entry.request_id, sent.entry.epoch, sent.entry.offset) == ("r", 192, 7)
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


def test_traffic_is_counted_per_model() -> None:
    driver = Driver()
    driver.submit(make_request("r0"))
    driver.submit(make_request("r0", epoch=64))
    driver.submit(make_request("s0", model="n"))
    driver.now += 2.0
    driver.up("a")
    driver.dispatches()
    stats = FinishedStats(
        model="m",
        request_class=RequestClass.ONLINE,
        prompt_tokens=10,
        output_tokens=20,
        queued_s=0.5,
        execution_s=1.5,
        finish_reason=FinishReason.STOP,
    )
    driver.submit(make_request("batch", online=False))
    driver.report("a", finished=[stats, stats])
    driver.report("a", finished=[msgspec.structs.replace(stats, request_class=RequestClass.OFFLINE)])
    m, n = driver.core.statistics.take(1.0, {"n": 1})
    assert (m.offline_prompt_tokens, m.offline_output_tokens) == (10, 20)
    assert (m.model, m.num_arrived, m.num_finished, m.prompt_tokens, m.output_tokens) == ("m", 2, 3, 30, 60)
    assert m.queued_s == pytest.approx(3.5) and m.execution_s == pytest.approx(4.5)
    assert (n.model, n.num_arrived, n.num_queued) == ("n", 1, 1)
    assert driver.core.statistics.take(1.0, {}) == []


def test_nan_freeness_does_not_break_the_order() -> None:
    driver = Driver()
    driver.up("a")
    driver.up("b")
    driver.report("a", freeness=math.nan)
    driver.report("b", freeness=5.0)
    driver.submit(make_request("r"))
    assert driver.dispatches() == {"r": "b"}


def test_an_instance_full_of_offline_work_is_as_free_as_an_empty_one() -> None:
    """Offline work yields: a long online request goes there rather than where online requests hold most of the pool."""
    driver = Driver()
    for name in ("a", "b"):
        driver.up(name, max_model_len=100_000)
    driver.report("a", freeness=math.inf, free_merged=0.0, num_running=8, offline={"m": 8})
    driver.report("b", freeness=2.5, free_merged=50.0, num_running=20)
    driver.submit(make_request("r", num_prompt=640))
    assert driver.dispatches() == {"r": "a"}
