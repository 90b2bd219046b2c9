"""Whether the machine was there while a test ran: one that failed while it stood still says nothing about the code.

A shared virtual machine's host may lend its cores to others for seconds; to what runs on them that is a jump of the
clock. Leases run out and timeouts strike that would not have, on whichever side notices first.
"""

from __future__ import annotations

import os
import threading
import time
import warnings

LOOK_INTERVAL_S = 0.02
MIN_STALL_S = 0.4
"""Longer than a process waits for a core that others of this machine want, shorter than what breaks a test."""
AFTERMATH_S = 5.0
"""How long after a stall something that was told dead in it may still be missing."""


class StallWatch:
    """One thread per core looks at the clock; what it misses beyond this process's own work, the machine was away."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._began_s = time.monotonic()
        self._stalls: list[tuple[float, float]] = []
        """When each ended, and its seconds."""

    def test_begins(self) -> None:
        """Starts the threads where they do not run: a process that only collects tests needs none."""
        self._began_s = time.monotonic()
        self._stalls = [stall for stall in self._stalls if stall[0] > self._began_s - AFTERMATH_S]
        if not self._threads:
            for core in sorted(os.sched_getaffinity(0)):
                thread = threading.Thread(target=self._look, args=(core,), name=f"stalls-{core}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    @property
    def stalled_s(self) -> float:
        """The longest stall that can have touched the running test, 0.0 for none."""
        return max((seconds for _, seconds in self._stalls), default=0.0)

    def broke(self, error: BaseException | None) -> bool:
        """Whether a test that ended with `error` is to run again: the condition of pytest-rerunfailures."""
        if error is None or not self._stalls:
            return False
        warnings.warn(
            f"the machine stood still for {self.stalled_s:.1f} s, and this failed: it runs again", stacklevel=2
        )
        return True

    def _look(self, core: int) -> None:
        os.sched_setaffinity(0, {core})  # of this thread alone
        before_s, used_s = time.monotonic(), time.process_time()
        while not self._stop.wait(LOOK_INTERVAL_S):
            now_s, now_used_s = time.monotonic(), time.process_time()
            # A test that computes holds Python's lock: that is no stall.
            away_s = now_s - before_s - (now_used_s - used_s)
            if away_s > MIN_STALL_S:
                self._stalls.append((now_s, away_s))
            before_s, used_s = now_s, now_used_s
