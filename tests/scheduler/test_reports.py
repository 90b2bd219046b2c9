"""Load reports that wait: what is done first, what is not, and that none is lost."""

from __future__ import annotations

import pytest

from services.scheduler.reports import MAX_LATE_S, SLICE_S, WaitingReports
from shared.messages.cluster import InstanceExited, LoadReport
from shared.messages.requests import ErrorCode, ErrorInfo
from shared.scheduling.actions import AskHeld
from shared.scheduling.calls import (
    BeginServing,
    Call,
    Cancel,
    DeclareLost,
    GrantGrace,
    OnDispatched,
    OnExited,
    OnHeld,
    OnRegistry,
    OnTime,
    Submit,
)
from tests.shared.scheduling.samples import make_info, make_report, make_request

REFUSED = ErrorInfo(ErrorCode.CONFLICT, "it is here already")


class Desk:
    """Takes each report in within `seconds` of a clock of its own."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.now_s = 0.0
        self.taken: list[tuple[str, int]] = []
        self.waiting = WaitingReports(self._take_in, lambda: self.now_s)
        self._seconds = seconds

    def _take_in(self, report: LoadReport) -> None:
        self.now_s += self._seconds
        self.taken.append((report.instance_id, report.sequence))
        if report.sequence == 13:
            raise ValueError(report.sequence)

    def put(self, *named: tuple[str, int]) -> None:
        for instance_id, sequence in named:
            self.waiting.put(make_report(instance_id, sequence))


def test_a_slice_is_short_and_the_next_goes_on_until_all_are_taken_in_once_in_order() -> None:
    desk, num_slices, sent = Desk(SLICE_S / 4), 0, [(f"i{number % 10}", number // 10 + 20) for number in range(30)]
    desk.put(*sent)
    while desk.waiting:
        began_s, num_taken = desk.now_s, len(desk.taken)
        desk.waiting.take_slice()
        num_slices += 1
        assert desk.now_s - began_s <= 1.6 * SLICE_S, "at most what the last instance has sent more"
        assert len(desk.taken) > num_taken
    assert num_slices > 4
    assert sorted(desk.taken) == sorted(sent)
    for name in {name for name, _ in sent}:
        assert [sequence for of, sequence in desk.taken if of == name] == [20, 21, 22]


def test_what_comes_between_slices_is_behind_what_waits() -> None:
    desk = Desk(SLICE_S)
    desk.put(("a", 1), ("b", 1), ("c", 1))
    desk.waiting.take_slice()
    desk.put(("d", 1), ("a", 2))
    while desk.waiting:
        desk.waiting.take_slice()
    assert desk.taken == [("a", 1), ("b", 1), ("c", 1), ("d", 1), ("a", 2)]


def test_a_report_that_has_waited_too_long_is_taken_in_now() -> None:
    desk = Desk(SLICE_S)
    desk.put(*((f"i{number}", 1) for number in range(5)))
    desk.now_s = MAX_LATE_S
    assert desk.waiting.late_s() == pytest.approx(MAX_LATE_S)
    desk.put(*((f"j{number}", 1) for number in range(5)))
    desk.waiting.take_slice()
    assert [name for name, _ in desk.taken] == [f"i{number}" for number in range(5)]
    assert 0.0 < desk.waiting.late_s() < MAX_LATE_S


@pytest.mark.parametrize(
    "call",
    [
        OnDispatched("a", "r", 0, None),
        OnDispatched("a", "r", 0, REFUSED),
        OnRegistry("a", make_info("a")),
        OnRegistry("a", None),
        OnHeld(AskHeld("a", "1", 0.0), []),
        OnExited(InstanceExited("a", "1", "node", 1)),
    ],
    ids=lambda call: type(call).__name__,
)
def test_what_an_instance_says_does_not_overtake_what_it_said_before(call: Call[object]) -> None:
    desk = Desk()
    desk.put(("b", 1), ("a", 1), ("b", 2), ("a", 2))
    desk.waiting.before(call)
    assert desk.taken == [("a", 1), ("a", 2)]
    desk.waiting.take_all()
    assert desk.taken[2:] == [("b", 1), ("b", 2)]


@pytest.mark.parametrize("call", [DeclareLost(["z"]), GrantGrace(), BeginServing()], ids=lambda c: type(c).__name__)
def test_a_verdict_on_silence_hears_all_reports_first(call: Call[object]) -> None:
    desk = Desk()
    desk.put(("b", 1), ("a", 1))
    desk.waiting.before(call)
    assert desk.taken == [("b", 1), ("a", 1)] and not desk.waiting


@pytest.mark.parametrize("call", [Submit(make_request("r")), Cancel("r"), OnTime()], ids=lambda c: type(c).__name__)
def test_gateways_and_time_overtake(call: Call[object]) -> None:
    desk = Desk()
    desk.put(("a", 1))
    desk.waiting.before(call)
    assert desk.taken == []


def test_a_report_that_fails_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    desk.put(("a", 13), ("a", 14), ("b", 1))
    desk.waiting.take_all()
    assert desk.taken == [("a", 13), ("a", 14), ("b", 1)]
    assert "report 13 of a was not taken in" in caplog.text
