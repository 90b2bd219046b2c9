"""Garbage collection in the scheduler's process: rarely, because each full one stops it for tens of milliseconds.

What the scheduler keeps is freed by reference counts: the core makes no cycles, and those of the event loop (tasks that
failed, closed connections) are few and small.
"""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 50, 1_000)
"""Allocations that outlive their freeing, until a young, middle and full collection."""


def collect_rarely() -> None:
    """Once, when all is imported: what exists now is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
