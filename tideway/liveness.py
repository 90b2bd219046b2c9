"""Whether a process that runs also answers. `Liveness` decides; `probe_for_ever` asks, and ends what does not answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from tideway.readiness import Check
from tideway.supervisor import Child

MIN_MISSES = 3
"""In a row, before a process counts as hung: one answer that is late proves nothing."""
PROBES_PER_TIMEOUT = 6
START_TIMEOUT_S = 120.0
"""Until the first answer: on a busy machine a service may import for tens of seconds."""


@dataclass
class Liveness:
    """What is known of one process, over all its lives. Pure: times are seconds on the caller's clock."""

    timeout_s: float
    """Without an answer."""
    _heard_at: float = 0.0
    """The last answer, or the start."""
    _has_answered: bool = False
    _num_misses: int = 0

    def on_start(self, now: float) -> None:
        self._heard_at, self._has_answered, self._num_misses = now, False, 0

    def on_answer(self, now: float) -> None:
        self._heard_at, self._has_answered, self._num_misses = now, True, 0

    def on_miss(self, now: float) -> bool:
        """Whether the process is given up."""
        self._num_misses += 1
        limit_s = self.timeout_s if self._has_answered else max(self.timeout_s, START_TIMEOUT_S)
        return self._num_misses >= MIN_MISSES and now - self._heard_at >= limit_s


async def probe_for_ever(child: Child, check: Check, timeout_s: float) -> None:
    """For a child that has been found ready; `check` has a deadline of its own. A process that gives no answer for
    `timeout_s` is killed, and started again as after a crash."""
    liveness, num_starts = Liveness(timeout_s), child.num_starts
    liveness.on_answer(time.monotonic())
    while True:
        await asyncio.sleep(timeout_s / PROBES_PER_TIMEOUT)
        if child.pid is None:
            continue
        if child.num_starts != num_starts:
            num_starts = child.num_starts
            liveness.on_start(time.monotonic())
        if await check() is not None:
            liveness.on_answer(time.monotonic())
        elif liveness.on_miss(time.monotonic()) and child.num_starts == num_starts:
            child.give_up(f"it has not answered for {timeout_s:g} s, and was killed")
