"""bench/replacing: which requests a change is seen by."""

from __future__ import annotations

import pytest

from bench.replacing import Change, compare
from tideway.bench.records import RequestRecord

ZERO_S = 1000.0
CHANGE = Change(name="apart", number=1, begun_s=ZERO_S + 10.0, ended_s=ZERO_S + 14.0, stage="carried_out")


def record(arrival_s: float, last_s: float | None, gap_s: float = 0.1, error: str = "") -> RequestRecord:
    times = [] if last_s is None else [arrival_s + 0.1, last_s - gap_s, last_s]
    return RequestRecord(
        request_id=f"{arrival_s}", model="small", arrival_s=arrival_s, sent_s=arrival_s, token_times=times,
        first_token_s=times[0] if times else None, last_token_s=last_s, end_s=last_s or arrival_s + 1.0, output_tokens=3,
        error=error,
    )  # fmt: skip


def test_requests_that_run_during_a_change_are_told_apart() -> None:
    records = [
        record(1.0, 9.9),
        record(8.0, 10.5, gap_s=1.2),
        record(11.0, 12.0),
        record(13.9, 20.0),
        record(14.1, 15.0, gap_s=0.5),
        record(9.5, None, error="http_500"),
        record(2.0, None, error="http_429"),
    ]
    quiet, during = compare(records, ZERO_S, [CHANGE])
    assert (quiet.requests, quiet.num, quiet.num_failed) == ("no change", 3, 1)
    assert (during.requests, during.num, during.num_failed) == ("apart", 4, 1)
    assert (quiet.silence_max_s, during.silence_max_s) == (pytest.approx(8.7, abs=0.1), pytest.approx(5.9, abs=0.2))
