"""Time limits in tests that a busy machine cannot break: what it took away from this process does not count."""

from __future__ import annotations

import threading
import time
from types import TracebackType

TICK_S = 0.01
MAX_TICK_S = 0.05
"""What a longer one took beyond the processor time that this process had in it was taken away."""


class Stopwatch:
    """`seconds` since the block began, of those in which this process could run."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stopwatch", daemon=True)

    def _run(self) -> None:
        before_s, used_s = time.monotonic(), time.process_time()
        while not self._stop.wait(TICK_S):
            now_s, now_used_s = time.monotonic(), time.process_time()
            self.seconds += min(now_s - before_s, MAX_TICK_S + now_used_s - used_s)
            before_s, used_s = now_s, now_used_s

    def __enter__(self) -> Stopwatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
