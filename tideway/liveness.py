"""Whether a process that runs also answers: `Liveness` decides; `probe_for_ever` asks, and ends what does not answer. And
whether the NATS server that is started here can write to its disk: it is started again once it can.

nats-server (2.15.1) stores nothing more in a stream whose file it once could not write to, not even when there is space
again, until it is started anew; its /healthz tells. What it acknowledged before is on the disk, and outlasts that.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from tideway.readiness import PROBE_TIMEOUT_S, Check
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
    """Probes a child that has been found ready, for ever; `check` has a deadline of its own. A process that gives no answer
    for `timeout_s` is killed, and started again as after a crash."""
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


CHECK_INTERVAL_S = 2.0
MIN_FREE_BYTES = 64 * 1024**2
"""Space below which the server would be full again in a moment."""


async def write_error(http: httpx.AsyncClient, monitor_port: int) -> str:
    """What the server says; empty where all is well or nothing is known."""
    try:
        answer = await http.get(f"http://127.0.0.1:{monitor_port}/healthz", timeout=PROBE_TIMEOUT_S)
        error = str(answer.json().get("error", ""))
    except (httpx.HTTPError, ValueError):
        return ""
    return error if "write error" in error else ""


MIN_FREE_INODES = 1024
"""Least number of files that can still be made: JetStream has several a stream."""


def has_space(folder: Path, min_free_bytes: int = MIN_FREE_BYTES) -> bool:
    """Whether its file system has bytes and inodes; one that has no inodes of its own to count has enough."""
    found = os.statvfs(folder)
    is_short_of_inodes = found.f_files > 0 and found.f_favail < MIN_FREE_INODES
    return found.f_bavail * found.f_frsize >= min_free_bytes and not is_short_of_inodes


async def restart_when_there_is_space(
    http: httpx.AsyncClient,
    monitor_port: int,
    store: Path,
    tell: Callable[[str], None],
    restart: Callable[[str], None],
    min_free_bytes: int = MIN_FREE_BYTES,
) -> None:
    """Restarts, for ever, what stopped for want of disk space. `tell` is called once each time the disk is full; `restart`
    with the reason when it is not any more."""
    is_told = False
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        error = await write_error(http, monitor_port)
        if not error:
            is_told = False
        elif has_space(store, min_free_bytes):
            restart("it could not write, and its disk has space again")
        elif not is_told:
            is_told = True
            tell(
                f"NATS cannot write: batches, files and changes of models wait for space on the disk of {store} ({error})"
            )
