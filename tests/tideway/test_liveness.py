"""Conditions under which a process that runs counts as one that does not answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tideway.liveness import MIN_MISSES, START_TIMEOUT_S, Liveness, has_space


def started(timeout_s: float = 30.0) -> Liveness:
    liveness = Liveness(timeout_s)
    liveness.on_start(0.0)
    return liveness


def test_silence_for_the_timeout_ends_it() -> None:
    liveness = started()
    liveness.on_answer(5.0)
    assert [liveness.on_miss(now) for now in (10.0, 20.0, 34.9, 35.0)] == [False, False, False, True]


def test_one_answer_that_is_late_proves_nothing() -> None:
    liveness = started()
    liveness.on_answer(1.0)
    # whoever asks was stopped for an hour itself
    assert not liveness.on_miss(3600.0) and not liveness.on_miss(3605.0)
    liveness.on_answer(3606.0)
    assert not liveness.on_miss(3640.0)


def test_a_start_may_take_longer() -> None:
    liveness = started()
    assert not any(liveness.on_miss(float(now)) for now in range(5, int(START_TIMEOUT_S), 5))
    assert liveness.on_miss(START_TIMEOUT_S)
    liveness.on_start(200.0)
    assert not liveness.on_miss(240.0)


@given(st.floats(1.0, 100.0), st.lists(st.floats(0.1, 20.0), max_size=60))
def test_what_answers_more_often_than_the_timeout_is_left_alone(timeout_s: float, pauses: list[float]) -> None:
    liveness, now = started(timeout_s), 0.0
    for pause in pauses:
        now += min(pause, 0.99 * timeout_s)
        for _ in range(MIN_MISSES):
            assert not liveness.on_miss(now)
        liveness.on_answer(now)


@pytest.mark.parametrize(
    ("free_mib", "inodes", "free_inodes", "expected"),
    [(100, 10_000, 5_000, True), (10, 10_000, 5_000, False), (100, 10_000, 3, False), (100, 0, 0, True)],
)
def test_a_disk_without_inodes_has_no_space(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_mib: int, inodes: int, free_inodes: int, expected: bool
) -> None:
    """A NATS that is restarted then cannot start, and streams that would go on break."""
    found = os.statvfs(tmp_path)
    fields = list(found)
    fields[1], fields[4], fields[5], fields[7] = 4096, free_mib * 256, inodes, free_inodes
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    assert has_space(tmp_path) is expected
