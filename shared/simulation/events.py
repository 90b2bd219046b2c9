"""Virtual time: what happens when, in order; things of one moment in the order in which they were asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Events:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num = 0
        self.num_done = 0

    def at(self, time_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self._num += 1
        heappush(self._heap, (max(time_s, self.now), self._num, call, arguments))

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + delay_s, call, *arguments)

    def run(self, is_over: Callable[[], bool], limit_s: float) -> bool:
        """Until `is_over`; False where nothing is left to happen, or `limit_s` has come, before that."""
        while not is_over():
            if not self._heap or self._heap[0][0] > limit_s:
                return False
            self.now, _, call, arguments = heappop(self._heap)
            self.num_done += 1
            call(*arguments)
        return True


class Timer:
    """Calls at the earliest of the times that it was set to, and is then set to none."""

    def __init__(self, events: Events, call: Callable[[], object]) -> None:
        self._events, self._call = events, call
        self._due_s = math.inf

    def set(self, time_s: float | None) -> None:
        """None: no time."""
        if time_s is not None and time_s < self._due_s:
            self._due_s = max(time_s, self._events.now)
            self._events.at(self._due_s, self._on_time, self._due_s)

    def _on_time(self, due_s: float) -> None:
        if due_s == self._due_s:
            self._due_s = math.inf
            self._call()
