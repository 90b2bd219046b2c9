"""Ranks stop an interruptible step between the same two layers, without a collective.

One rank decides, and writes to shared memory how far the others may go; they read it before each interval of layers and
never run past it. It releases one interval more than it is at, so that on a GPU, where launching runs ahead, the others find
the word there: an interrupted step then stops one interval later than it would alone.

Each run of a step (a step that is resumed is run again) has a word of its own, of a ring of words: the number of the run,
whether the last interval is known, and how many intervals are released. All ranks count the same runs.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from services.worker.ranks.group import CALL_TIMEOUT_S, GroupError

RING = 64
"""Runs that the one who decides may be ahead: far more than steps are in flight."""
_SPINS = 200
_PAUSE_S = 50e-6
_FINAL = 1 << 31


class Agreement(Protocol):
    def begin_run(self) -> None:
        """Before the first interval of an interruptible step, or of its next part."""

    def goes_on(self, interval: int, wants_to: bool) -> bool:
        """Whether interval `interval` (0, 1, ... of this run) is computed. `wants_to`: what this rank would do alone. Raises
        `GroupError`."""


class Free:
    """Nobody else is to know."""

    def begin_run(self) -> None:
        pass

    def goes_on(self, interval: int, wants_to: bool) -> bool:
        return wants_to


FREE = Free()


class Leader:
    """The rank that decides. `words`: of the group's shared memory, at least `RING`."""

    def __init__(self, words: np.ndarray) -> None:
        self._words = words
        self._run = 0
        self._released = 0

    def begin_run(self) -> None:
        self._run += 1
        self._released = 0

    def goes_on(self, interval: int, wants_to: bool) -> bool:
        if wants_to:
            self._release(interval + 2, 0)
        elif interval >= self._released:
            self._release(interval, _FINAL)
        return interval < self._released

    def _release(self, num_intervals: int, final: int) -> None:
        self._released = num_intervals
        self._words[self._run % RING] = self._run << 32 | final | num_intervals


class Follower:
    def __init__(self, words: np.ndarray, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """`timeout_s`: for a decision."""
        self._words = words
        self._timeout_s = timeout_s
        self._run = 0

    def begin_run(self) -> None:
        self._run += 1

    def goes_on(self, interval: int, wants_to: bool) -> bool:
        deadline_s, spins = time.monotonic() + self._timeout_s, 0
        while True:
            run, word = divmod(int(self._words[self._run % RING]), 1 << 32)
            if run > self._run:
                raise GroupError(f"the word of run {self._run} is that of run {run} already")
            released = word & ~_FINAL
            if run == self._run:
                if interval < released:
                    return True
                if word & _FINAL:
                    return False
            spins += 1
            if spins > _SPINS:
                if time.monotonic() > deadline_s:
                    raise GroupError(f"nobody said within {self._timeout_s:g} s whether a step goes on")
                time.sleep(_PAUSE_S)
