"""Ranks stop where the one that decides does, however far behind they are."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.ranks.agreement import RING, Agreement, Follower, Leader
from services.worker.ranks.group import GroupError
from services.worker.ranks.shared_memory import RankMemory

NUM_INTERVALS = 6


def run(agreement: Agreement, interrupted_at: int, pause_s: float = 0.0) -> int:
    """Intervals computed."""
    agreement.begin_run()
    for interval in range(NUM_INTERVALS):
        if not agreement.goes_on(interval, interval < interrupted_at):
            return interval
        time.sleep(pause_s)
    return NUM_INTERVALS


@given(st.lists(st.integers(0, NUM_INTERVALS + 1), min_size=1, max_size=3 * RING), st.integers(1, RING - 1))
def test_those_who_come_later_stop_where_the_leader_did(interrupts: list[int], lag: int) -> None:
    """By up to so many runs; what they would do themselves does not count."""
    words = np.zeros(RING, np.uint64)
    leader, follower = Leader(words), Follower(words, timeout_s=0.0)
    stops: list[int] = []
    seen: list[int] = []
    for interrupted_at in interrupts:
        stops.append(run(leader, interrupted_at))
        # One interval more was released before; none is where the step has not begun.
        assert stops[-1] == (min(interrupted_at + 1, NUM_INTERVALS) if interrupted_at else 0)
        if len(stops) - len(seen) >= lag:
            seen.append(run(follower, 0))
    while len(seen) < len(stops):
        seen.append(run(follower, NUM_INTERVALS))
    assert seen == stops


@pytest.mark.parametrize("interrupted_at", [0, 2, NUM_INTERVALS])
def test_those_who_come_first_wait(interrupted_at: int) -> None:
    memory = RankMemory.create(2, 0)
    others = RankMemory(memory.path, 2, 0)
    leader, follower = Leader(memory.words), Follower(others.words, timeout_s=10.0)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(run(follower, 0)))
    thread.start()
    time.sleep(0.02)
    assert thread.is_alive(), "nothing is released"
    expected = run(leader, interrupted_at, pause_s=0.002)
    thread.join(10.0)
    assert seen == [expected]


def test_a_word_that_never_comes_or_is_gone_is_an_error() -> None:
    words = np.zeros(RING, np.uint64)
    leader, follower = Leader(words), Follower(words, timeout_s=0.02)
    with pytest.raises(GroupError, match=r"within 0\.02 s"):
        run(follower, 0)
    for _ in range(RING + 2):
        run(leader, NUM_INTERVALS)
    with pytest.raises(GroupError, match="of run 66 already"):
        run(follower, 0)


def test_ranks_see_each_others_regions() -> None:
    memory = RankMemory.create(2, 1 << 16)
    other = RankMemory(memory.path, 2, 1 << 16)
    other.region(1)[5] = 7
    assert memory.region(1)[5] == 7 and not memory.region(0).any() and not memory.words.any()
    assert memory.region(1).storage_offset() == 0 and memory.region(1).data_ptr() % 64 == 0
    with pytest.raises(IndexError):
        memory.region(2)
