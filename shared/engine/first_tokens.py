"""The first tokens that online sequences of an instance still lack, and when they are due."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from shared.engine.sequence import Sequence, State

SPARE = 64
"""Entries of sequences that lack none any more, kept in any case."""


class FirstTokens:
    def __init__(self) -> None:
        self._due: list[tuple[float, int, Sequence]] = []
        """A heap; those that lack none any more leave it at its head, or when it has grown to twice what it held."""
        self._most = SPARE

    def expect(self, sequence: Sequence) -> None:
        """One that came."""
        heappush(self._due, (sequence.ttft_due_s, sequence.number, sequence))
        if len(self._due) > self._most:
            self._due = [entry for entry in self._due if _is_lacking(entry[2])]
            heapify(self._due)
            self._most = 2 * len(self._due) + SPARE

    def is_one_late(self, now: float) -> bool:
        """Whether one of them is overdue."""
        due = self._due
        while due and not _is_lacking(due[0][2]):
            heappop(due)
        return bool(due) and due[0][0] < now


def _is_lacking(sequence: Sequence) -> bool:
    return sequence.first_token_s is None and sequence.state != State.ENDED
