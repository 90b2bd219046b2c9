"""Named deadlines in order of time: at most one per key, set and discarded in O(log n) amortised."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Timers(Generic[K]):
    """A heap with lazy deletion; times are on the caller's clock."""

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._serial = 0

    def __contains__(self, key: K) -> bool:
        return key in self._at

    def set(self, key: K, at: float) -> None:
        """Sets or moves the key's deadline."""
        self._at[key] = at
        self._serial += 1
        heappush(self._heap, (at, self._serial, key))
        if len(self._heap) > 2 * len(self._at) + 64:
            self._heap = [(when, number, k) for number, (k, when) in enumerate(self._at.items())]
            self._serial = len(self._heap)
            heapify(self._heap)

    def discard(self, key: K) -> None:
        self._at.pop(key, None)

    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> Iterator[K]:
        """Takes out and yields every key whose deadline is not after `now`, earliest first. Keys set while iterating are
        seen if they are due."""
        while (at := self.next()) is not None and at <= now:
            key = heappop(self._heap)[2]
            del self._at[key]
            yield key
