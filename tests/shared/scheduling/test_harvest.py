"""Offline work: where it goes, and how much of it gateways may submit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.messages.batches import GrantQuery, OfflineDemand
from shared.messages.cluster import FinishedStats
from shared.messages.requests import ErrorCode, FinishReason, RequestClass
from shared.runtime.settings import SchedulerSettings
from shared.scheduling.actions import Dispatch
from shared.scheduling.calls import Grant, OnDispatched, OnRegistry, OnReport, Submit
from shared.scheduling.core import SchedulerCore
from shared.scheduling.harvest import (
    ASK_AGAIN_S,
    GRANT_EXPIRY_S,
    NOBODY_SERVES_S,
    THROUGHPUT_EXPIRY_S,
    GrantBook,
)
from tests.shared.scheduling.driver import Driver
from tests.shared.scheduling.samples import make_info, make_report, make_request

TOKENS = 30
"""Tokens of `make_request`: 10 of prompt, 20 of output."""


def demand(
    tokens: int, batch: str = "b", *, model: str = "m", tenant: str = "t", slack_s: float = 1e6
) -> OfflineDemand:
    return OfflineDemand(batch, tenant, model, tokens, tokens, slack_s)


def query(gateway_id: str, *demands: OfflineDemand) -> GrantQuery:
    return GrantQuery(gateway_id, list(demands))


def granted(driver: Driver, gateway_id: str, *demands: OfflineDemand) -> list[int]:
    return [grant.tokens for grant in driver.core.apply(Grant(query(gateway_id, *demands)), driver.now).grants]


def finished(tokens: int, request_class: RequestClass = RequestClass.OFFLINE) -> FinishedStats:
    return FinishedStats(
        model="m",
        request_class=request_class,
        prompt_tokens=tokens // 2,
        output_tokens=tokens - tokens // 2,
        queued_s=0.0,
        execution_s=1.0,
        finish_reason=FinishReason.STOP,
    )


# ------------------------------------------------------------------------------------------------------ dispatch


def test_offline_requests_go_where_most_room_is_and_only_there() -> None:
    driver = Driver()
    for name in "abc":
        driver.up(name)
    driver.report("a", freeness=100.0, room=20)
    driver.report("b", freeness=1.0, room=70)
    driver.report("c", freeness=1000.0, room=0)
    for number in range(9):
        driver.submit(make_request(f"r{number}", online=False))
    # 70 > 40 > 20 > 10: the last one may overdraw, and then nothing goes before a report.
    assert driver.dispatches() == {"r0": "b", "r1": "b", "r2": "a", "r3": "b"}
    driver.report("b", room=31, admitted=["r0"])
    assert driver.dispatches() == {}, "two are not in the report yet, and overdraw it"
    driver.report("b", room=31, admitted=["r1", "r3"])
    assert driver.dispatches() == {"r4": "b", "r5": "b"}
    driver.report("a", room=30)
    assert driver.dispatches() == {}, "the room that is reported does not know of r2"


def test_offline_requests_neither_delay_nor_repel_online_ones() -> None:
    driver = Driver(max_waiting_per_model=2)
    for name in "ab":
        driver.up(name)
    driver.report("a", freeness=50.0, num_running=2, waiting={"m": 9}, offline={"m": 9}, room=500)
    driver.report("b", freeness=40.0, num_running=2, room=0)
    for number in range(5):
        driver.submit(make_request(f"offline{number}", online=False))
    assert set(driver.dispatches().values()) == {"a"}
    driver.submit(make_request("online"))
    assert driver.dispatches() == {"online": "a"}, "as free as if there were no offline work"


def test_an_offline_dispatch_without_effect_gives_its_room_back() -> None:
    driver = Driver()
    driver.up("a")
    driver.report("a", room=10)
    driver.submit(make_request("r0", online=False))
    driver.submit(make_request("r1", online=False))
    driver.refuse(ErrorCode.OVERLOADED)
    driver.submit(make_request("online"))
    assert driver.dispatches() == {"online": "a"}, "the refusal was meant for offline requests"
    driver.report("a", room=10, admitted=["online"])
    assert driver.dispatches() == {"r0": "a"}
    driver.pass_time(2.1)  # the ledger's entry is as old as it may get
    assert driver.dispatches() == {"r1": "a"}


# -------------------------------------------------------------------------------------------------------- grants


def test_a_token_of_room_is_given_away_once_on_its_whole_way() -> None:
    driver = Driver()
    driver.up("a")
    driver.report("a", room=100)
    assert granted(driver, "g0", demand(70)) == [70]
    assert granted(driver, "g1", demand(70)) == [30], "the rest is promised"
    driver.submit(make_request("r0", online=False, gateway_id="g0"))
    assert granted(driver, "g1", demand(70)) == [30], "submitted and waiting, no longer promised"
    assert driver.dispatches() == {"r0": "a"}
    assert granted(driver, "g1", demand(70)) == [30], "on its way"
    driver.report("a", room=70, admitted=["r0"])
    assert granted(driver, "g1", demand(70)) == [30], "reported"
    driver.now += GRANT_EXPIRY_S + 0.1
    assert granted(driver, "g1", demand(70)) == [70], "what the other gateway never used"
    assert granted(driver, "g1", demand(20)) == [20], "in place of the last grant"
    assert granted(driver, "g0", demand(70)) == [50]


def test_room_counts_where_requests_may_be_sent() -> None:
    driver = Driver()
    for name in "abc":
        driver.up(name, "m", "n")
    driver.report("a", room={"m": 40, "n": 5})
    driver.report("b", room={"m": 20})
    driver.report("c", room={"m": 1000})
    driver.core.apply(OnRegistry("c", make_info("c", "m", state="draining")), driver.now)
    assert granted(driver, "g0", demand(500), demand(500, model="n"), demand(500, model="unknown")) == [60, 5, 0]


def test_who_asks_first_does_not_take_it_all() -> None:
    driver = Driver()
    driver.up("a")
    driver.report("a", room=0)
    granted(driver, "g0", demand(500, "b0", tenant="t0"))
    granted(driver, "g1", demand(500, "b1", tenant="t1"))
    driver.report("a", room=100)
    assert granted(driver, "g0", demand(500, "b0", tenant="t0")) == [50]
    assert granted(driver, "g1", demand(0, "b1", tenant="t1")) == [0]
    assert granted(driver, "g0", demand(500, "b0", tenant="t0")) == [100]


def test_a_batch_near_its_deadline_comes_first_at_any_gateway() -> None:
    driver = Driver()
    driver.up("a")
    driver.report("a", room=0, finished=[finished(1000)])
    granted(driver, "g0", demand(80, "late", slack_s=0.1))
    driver.report("a", room=100)
    assert granted(driver, "g1", demand(500, "idle")) == [25], "half of it went by need"
    driver.now += GRANT_EXPIRY_S + 0.1
    granted(driver, "g1", demand(500, "idle", tenant="other"))
    driver.report("a", room=1000)
    assert granted(driver, "g0", demand(80, "late", slack_s=0.1)) == [80]


def test_the_reply_says_when_to_ask_again() -> None:
    driver = Driver()
    assert driver.core.apply(Grant(query("g0", demand(10))), driver.now).ask_again_s == NOBODY_SERVES_S
    driver.up("a")
    driver.report("a", room=0)
    assert driver.core.apply(Grant(query("g0", demand(10))), driver.now).ask_again_s == ASK_AGAIN_S
    assert driver.core.grants.unmet_tokens(driver.now) == {"m": 10}
    assert not driver.core.grants.unmet_tokens(driver.now + GRANT_EXPIRY_S + 0.1)


def test_throughput_is_that_of_offline_requests_lately() -> None:
    book = GrantBook()
    assert book.tokens_per_s(0.0) == {}
    for tick in range(200):
        book.count_finished([finished(100), finished(9999, RequestClass.ONLINE)], tick * 0.5)
        if tick > 4:
            assert 150 < book.tokens_per_s(tick * 0.5)["m"] < 400, "right from the start"
    assert 190 < book.tokens_per_s(100.0)["m"] < 210
    assert book.tokens_per_s(100.0 + THROUGHPUT_EXPIRY_S) == {}
    book.count_finished([finished(100)], 1000.0)
    assert book.tokens_per_s(1001.0)["m"] > 50, "the pause does not count"


steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from("xyz"), st.integers(0, 300)),
        st.tuples(st.just("submit"), st.sampled_from("xyz"), st.just(0)),
        st.tuples(st.just("report"), st.sampled_from("ab"), st.integers(0, 200)),
        st.tuples(st.just("time"), st.just(""), st.sampled_from([0, 1, 3])),
    ),
    max_size=50,
)


@given(steps)
def test_never_more_than_the_room_is_promised(events: list[tuple[str, str, int]]) -> None:
    """Instances whose room shrinks by what they are given alone, gateways that submit what they may."""
    core = SchedulerCore(SchedulerSettings(lost_after_s=1e9), term=1)
    now, held = 0.0, {"a": 0, "b": 0}
    capacity = {"a": 300, "b": 100}
    sequence = 0
    admitted: dict[str, list[str]] = {"a": [], "b": []}
    credit: dict[str, int] = dict.fromkeys("xyz", 0)
    granted_s: dict[str, float] = dict.fromkeys("xyz", 0.0)
    num_requests = 0
    for name in "ab":
        core.apply(OnRegistry(name, make_info(name)), now)

    def report(name: str) -> None:
        nonlocal sequence
        sequence += 1
        held[name] += TOKENS * len(admitted[name])
        room = max(0, capacity[name] - held[name])
        core.apply(OnReport(make_report(name, sequence, room=room, admitted=admitted[name])), now)
        admitted[name] = []

    for name in "ab":
        report(name)
    for kind, who, value in events:
        if kind == "ask":
            reply = core.apply(Grant(query(who, demand(value, who))), now)
            credit[who], granted_s[who] = reply.grants[0].tokens, now
            assert 0 <= credit[who] <= value
        elif kind == "submit" and credit[who] >= TOKENS and now - granted_s[who] <= GRANT_EXPIRY_S:
            num_requests += 1
            credit[who] -= TOKENS
            core.apply(Submit(make_request(f"r{num_requests}", gateway_id=who, online=False)), now)
        elif kind == "report":
            report(who)
        else:
            now += value
        for action in core.actions(now):
            if isinstance(action, Dispatch):
                core.apply(OnDispatched.to(action, None), now)
                admitted[action.instance_id].append(action.request.request_id)
        promised = sum(credit[gateway] for gateway in credit if now - granted_s[gateway] <= GRANT_EXPIRY_S)
        # A request may overdraw the room of the instance it goes to, which is not known when tokens are granted.
        assert promised + TOKENS * num_requests <= sum(capacity.values()) + 2 * TOKENS
