"""Turns of text work, shared fairly between the clients for whom it is done."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

MAX_ABSENT = 1000
"""Owners that neither hold turns nor wait, whose time is remembered."""


class Turn:
    """A turn that is held; others have it after `end`."""

    def __init__(self, turns: FairTurns, owner: str, began_s: float) -> None:
        self.owner = owner
        self.began_s = began_s
        self._turns = turns

    def end(self) -> None:
        self._turns.give_back(self)


class FairTurns:
    """A number of turns at a time. Of the owners that wait, the one that has had the least time is next; within an owner
    the order is that of arrival. Whoever comes back has saved up no time that it did not ask for (start-time fair queueing:
    Goyal, Vin and Cheng, SIGCOMM 1996)."""

    def __init__(self, num_turns: int, now: Callable[[], float] = time.monotonic) -> None:
        self._num_free = num_turns
        self._now = now
        self._used_s: dict[str, float] = {}
        """Time of owners that hold turns or wait, and of others that had more than the last that was next."""
        self._num_looked = 0
        """Owners from which on those that are absent are looked through."""
        self._least_s = 0.0
        """What the last owner that was next had had."""
        self._held: set[Turn] = set()
        self._waiting: dict[str, deque[asyncio.Future[Turn]]] = {}

    async def take(self, owner: str) -> Turn:
        self._used_s[owner] = max(self._used_s.get(owner, 0.0), self._least_s)
        if self._num_free:
            self._num_free -= 1
            return self._begin(owner)
        given: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(given)
        try:
            return await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                given.result().end()
            else:
                self._leave(owner, given)
            raise

    def _leave(self, owner: str, given: asyncio.Future[Turn]) -> None:
        waiting = self._waiting.get(owner, deque())
        with suppress(ValueError):
            waiting.remove(given)
        if not waiting:
            self._waiting.pop(owner, None)

    def give_back(self, turn: Turn) -> None:
        self._held.remove(turn)
        self._used_s[turn.owner] += self._now() - turn.began_s
        if len(self._used_s) > max(MAX_ABSENT, self._num_looked):
            self._forget_absent()
        while self._waiting:
            owner = min(self._waiting, key=self._time_of)
            waiting = self._waiting[owner]
            given = waiting.popleft()
            if not waiting:
                del self._waiting[owner]
            if not given.done():
                self._least_s = max(self._least_s, self._used_s[owner])
                given.set_result(self._begin(owner))
                return
        self._num_free += 1
        if not self._held:
            self._used_s.clear()
            self._least_s = 0.0

    def _forget_absent(self) -> None:
        """Forgets owners that would begin with the least time if they came back, and of the others those that had least, if
        they are many."""
        present = {turn.owner for turn in self._held} | self._waiting.keys()
        absent = sorted(self._used_s.keys() - present, key=self._used_s.__getitem__)
        num_extra = len(absent) - MAX_ABSENT
        for place, owner in enumerate(absent):
            if place < num_extra or self._used_s[owner] <= self._least_s:
                del self._used_s[owner]
        self._num_looked = 2 * len(self._used_s)

    def _begin(self, owner: str) -> Turn:
        turn = Turn(self, owner, self._now())
        self._held.add(turn)
        return turn

    def _time_of(self, owner: str) -> float:
        now = self._now()
        return self._used_s[owner] + sum(now - turn.began_s for turn in self._held if turn.owner == owner)
