"""Garbage collection in the scheduler's process: rarely, because each full one stops it for tens of milliseconds.

What the scheduler keeps is freed by reference counts: the core makes no cycles. Those of the event loop (a standby's tries
for the lease, calls that failed, closed connections) are few, and are collected while little else has been made.
"""

from __future__ import annotations

import asyncio
import gc

from shared.runtime.garbage import freeze_heap

THRESHOLD = 1_000_000
"""Allocations that outlive their freeing, until a collection. With 1,024 instances and 500 requests a second none came in
8 s. It looks only at what lives by then of what was made since the last one."""

INTERVAL_S = 10.0
FEW = 20_000
"""Allocations that a collection looks at in a millisecond or two."""


def collect_rarely() -> None:
    """Exempts what exists now, and what outlives a collection, from later ones. Called once, when all is imported."""
    freeze_heap()
    gc.set_threshold(THRESHOLD)
    gc.callbacks.append(_keep_survivors)


def _keep_survivors(phase: str, _info: dict[str, int]) -> None:
    if phase == "stop":
        gc.freeze()


async def collect_few(interval_s: float = INTERVAL_S) -> None:
    """Collects in each interval, where that takes no time to speak of. Never ends. Nothing in a process that collects as
    Python does by itself."""
    while True:
        await asyncio.sleep(interval_s)
        if gc.get_threshold()[0] == THRESHOLD and gc.get_count()[0] <= FEW:
            gc.collect(0)
