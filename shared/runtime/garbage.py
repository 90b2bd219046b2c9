"""Garbage collection: what a process has imported and put together is exempt, so that no full collection stops over it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_heap() -> None:
    """Exempts what exists from later collections, for good. Called once, when all is imported and put together."""
    gc.collect()
    gc.freeze()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Exempts what exists from collections within it: a full one in a process that has imported a lot takes some tenths of a
    second, in which all that is timed looks late.

    What was exempt before stays exempt afterwards, and so does the rest then: Python ends exemptions all at once or not."""
    was_frozen = gc.get_freeze_count() > 0
    freeze_heap()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
