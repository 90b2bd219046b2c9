"""What the service monitor is told: each request at its arrival and its end, once, and over its whole life."""

from __future__ import annotations

import pytest

from shared.messages.cluster import FinishedStats
from shared.messages.requests import ErrorCode, FinishReason, RequestClass
from shared.messages.traffic import Outcome, RequestRows, request_number
from shared.scheduling import request_rows
from shared.scheduling.calls import Cancel
from tests.shared.scheduling.driver import Driver, held, running
from tests.shared.scheduling.samples import make_request


def recording(**settings: object) -> Driver:
    driver = Driver(**settings)
    driver.core.life.recorder.is_on = True
    return driver


def told(driver: Driver) -> list[tuple[int, Outcome]]:
    """Those that are new."""
    recorder, rows = driver.core.life.recorder, []
    while (message := recorder.told("s", driver.now)) is not None:
        rows += [(row.number, row.outcome) for row in message.rows]
        recorder.acknowledge(message)
    return rows


def ends(latency_s: float, reason: FinishReason = FinishReason.STOP, **fields: object) -> FinishedStats:
    return FinishedStats(
        model="m",
        request_class=RequestClass.ONLINE,
        prompt_tokens=10,
        output_tokens=20,
        queued_s=0.0,
        execution_s=1.0,
        finish_reason=reason,
        latency_s=latency_s,
        **fields,  # type: ignore[arg-type]
    )


R, S, T = (request_number(name) for name in "rst")


def test_a_request_is_told_when_it_comes_and_when_it_ends() -> None:
    driver = recording()
    driver.up("a")
    driver.submit(make_request("r", waited_s=1.0, num_prompt=7))
    driver.now += 4.0
    recorder = driver.core.life.recorder
    message = recorder.told("s", driver.now)
    assert message is not None and message.models == ["m"]
    assert (message.rows[0].number, message.rows[0].age_s, message.rows[0].prompt_tokens) == (R, 5.0, 7)
    again = recorder.told("s", driver.now + 1.0)
    assert again is not None and again.rows[0].age_s == 6.0, "it was not acknowledged"
    recorder.acknowledge(again)
    driver.dispatches()
    driver.report("a", ended=["r"], finished=[ends(4.0, device_s=0.5, ttft_s=2.0, is_ttft_met=True)])
    driver.now += 0.5
    message = recorder.told("s", driver.now)
    assert message is not None
    (row,) = message.rows
    assert (row.number, row.outcome, row.age_s, row.latency_s) == (R, Outcome.FINISHED, 4.5, 4.0)
    assert (row.output_tokens, row.ttft_s, row.execution_s, row.is_ttft_met) == (20, 2.0, 0.5, True)


def test_ends_in_the_scheduler_are_told_too() -> None:
    driver = recording(max_queued=2)
    driver.submit(make_request("r", timeout_s=2.0))
    driver.submit(make_request("s"))
    refused = driver.submit(make_request("t"))
    assert refused is not None and refused.code == ErrorCode.OVERLOADED
    driver.core.apply(Cancel("s"), driver.now)
    driver.pass_time(3.0)
    assert told(driver) == [
        (R, Outcome.PENDING),
        (S, Outcome.PENDING),
        (T, Outcome.REFUSED),
        (S, Outcome.CANCELLED),
        (R, Outcome.LATE),
    ]
    driver.up("a")
    driver.submit(make_request("u"))
    driver.refuse(ErrorCode.TOO_LONG)
    assert [outcome for _, outcome in told(driver)] == [Outcome.PENDING, Outcome.FAILED]


def test_what_an_older_owner_says_is_not_its_end() -> None:
    driver = recording()
    driver.up("a")
    driver.up("b")
    running(driver, "a", "r")
    driver.report("b", migrated_in=[held("r", epoch=1)])
    assert told(driver) == [(R, Outcome.PENDING)]
    driver.report("a", ended=["r"], finished=[ends(1.0, FinishReason.CANCELLED)])
    assert told(driver) == []
    driver.report("b", ended=["r"], finished=[ends(2.0)])
    assert told(driver) == [(R, Outcome.FINISHED)]


def test_who_gives_a_request_up_does_not_end_it() -> None:
    driver = recording()
    driver.up("a")
    running(driver, "a", "r")
    driver.report("a", ended=["r"], finished=[ends(1.0, FinishReason.ERROR, is_given_up=True)])
    assert told(driver) == [(R, Outcome.PENDING)]
    running(driver, "a", "s")
    driver.report("a", ended=["s"], finished=[ends(1.0, FinishReason.ERROR)])
    assert told(driver) == [(S, Outcome.PENDING), (S, Outcome.FAILED)]


def test_what_a_term_did_not_tell_the_next_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_rows, "MAX_KEPT", 3)
    first, second = recording(), recording()
    for name in "rs":
        first.submit(make_request(name))
    told_last = first.core.life.recorder.told("s", first.now)
    second.submit(make_request("t"))
    second.core.life.recorder.take_over(first.core.life.recorder)
    assert told_last is not None and told(second) == [(R, Outcome.PENDING), (S, Outcome.PENDING), (T, Outcome.PENDING)]
    for name in "uv":
        second.submit(make_request(name))
    second.core.life.recorder.take_over(first.core.life.recorder)
    message = second.core.life.recorder.told("s", second.now)
    assert message is not None and (len(message.rows), message.num_dropped) == (3, 1), "it is bounded"


def test_one_that_moved_and_ended_in_the_same_report_has_ended() -> None:
    driver = recording()
    driver.up("a")
    driver.up("b")
    running(driver, "a", "r")
    driver.report("b", migrated_in=[held("r", epoch=1)], ended=["r"], finished=[ends(2.0)])
    assert told(driver) == [(R, Outcome.PENDING), (R, Outcome.FINISHED)]


def test_a_request_placed_again_arrives_once_and_its_execution_is_not_known() -> None:
    driver = recording()
    driver.up("a")
    running(driver, "a", "r")
    driver.submit(make_request("r", epoch=64, num_prior=3))
    driver.dispatches()
    recorder = driver.core.life.recorder
    driver.report("a", ended=["r"], finished=[ends(2.0, is_whole=False, device_s=0.1)])
    message = recorder.told("s", driver.now)
    assert message is not None
    first, last = message.rows
    assert (first.outcome, last.outcome, last.execution_s) == (Outcome.PENDING, Outcome.FINISHED, 0.0)


def test_rows_are_bounded_and_those_without_room_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_rows, "MAX_KEPT", 5)
    monkeypatch.setattr(request_rows, "MAX_TOLD", 3)
    driver = recording()
    for number in range(8):
        driver.submit(make_request(f"r{number}"))
    recorder = driver.core.life.recorder
    messages: list[RequestRows] = []
    while (message := recorder.told("s", driver.now)) is not None:
        messages.append(message)
        recorder.acknowledge(message)
    assert [(len(message.rows), message.num_dropped) for message in messages] == [(3, 3), (2, 0)]
    assert [row.number for message in messages for row in message.rows] == [
        request_number(f"r{number}") for number in range(3, 8)
    ]
    driver.submit(make_request("s"))
    message = recorder.told("s", driver.now)
    assert message is not None
    for number in range(7):
        driver.submit(make_request(f"t{number}"))  # what was told, and more, is dropped before it is acknowledged
    recorder.acknowledge(message)
    message = recorder.told("s", driver.now)
    assert message is not None and message.num_dropped == 3
    assert [row.number for row in message.rows] == [request_number(f"t{number}") for number in (2, 3, 4)]
    quiet = Driver()
    quiet.submit(make_request("r"))
    assert quiet.core.life.recorder.told("s", quiet.now) is None, "a host that takes no rows keeps none"
