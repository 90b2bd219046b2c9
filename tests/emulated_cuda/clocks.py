"""Who knows what has happened: vector clocks (Mattern 1989, "Virtual time and global states of distributed systems")."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

_numbers = itertools.count()

Clock = dict[int, int]
"""Time of each agent by its number; those that are missing stand at 0."""


class Agent:
    """Does one thing after the other: a host thread, or a stream of a device."""

    def __init__(self, name: str, *, is_host: bool = False) -> None:
        self.name = name
        self.is_host = is_host
        self.number = next(_numbers)
        self.clock: Clock = {self.number: 0}

    def tick(self) -> int:
        """The time of what it does next."""
        self.clock[self.number] += 1
        return self.clock[self.number]

    def learn(self, clock: Mapping[int, int]) -> None:
        """What happened before `clock` was taken happened before anything that this agent does from now on."""
        for number, time in clock.items():
            if self.clock.get(number, 0) < time:
                self.clock[number] = time

    def knows(self, number: int, time: int) -> bool:
        """Whether what that agent did at that time happened before what this one does next."""
        return number == self.number or self.clock.get(number, 0) >= time
