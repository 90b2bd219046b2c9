"""Which transfers this end has agreed to receive: tickets, single use, each until its deadline. Pure: time is an argument.

| state | event | next |
|---|---|---|
| - | grant | waiting |
| waiting | redeem before the deadline | running |
| waiting, running | release | spent |
| waiting, running | deadline passes (`expire`) | spent |
| spent | its deadline is `memory_s` ago | - (forgotten) |

A spent ticket is remembered for a while only so that the refusal can say why.
"""

from __future__ import annotations

import heapq
from enum import StrEnum

from services.worker.kv_transport.errors import TransferError, TransferReason

MEMORY_S = 60.0


class LeaseState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    RELEASED = "released"
    EXPIRED = "expired"


_REFUSALS = {
    LeaseState.RUNNING: TransferReason.TICKET_USED,
    LeaseState.RELEASED: TransferReason.TICKET_USED,
    LeaseState.EXPIRED: TransferReason.TICKET_EXPIRED,
}


class Leases:
    def __init__(self, *, memory_s: float = MEMORY_S) -> None:
        self._memory_s = memory_s
        self._states: dict[bytes, LeaseState] = {}
        self._deadlines: dict[bytes, float] = {}
        self._by_deadline: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        """Tickets that are waiting or running."""
        return sum(state in (LeaseState.WAITING, LeaseState.RUNNING) for state in self._states.values())

    def grant(self, ticket: bytes, deadline: float) -> None:
        if ticket in self._states:
            raise ValueError("a ticket is granted once")
        self._states[ticket] = LeaseState.WAITING
        self._deadlines[ticket] = deadline
        heapq.heappush(self._by_deadline, (deadline, ticket))

    def redeem(self, ticket: bytes, now: float) -> float:
        """Uses up a ticket; returns its deadline. Raises `TransferError` with the reason of the refusal."""
        self.expire(now)
        state = self._states.get(ticket)
        if state is None:
            raise TransferError(TransferReason.TICKET_UNKNOWN)
        if state is not LeaseState.WAITING:
            raise TransferError(_REFUSALS[state])
        self._states[ticket] = LeaseState.RUNNING
        return self._deadlines[ticket]

    def release(self, ticket: bytes) -> None:
        """The transfer ended, in whatever way. Releasing twice, or after expiry, changes nothing."""
        if self._states.get(ticket) in (LeaseState.WAITING, LeaseState.RUNNING):
            self._states[ticket] = LeaseState.RELEASED

    def expire(self, now: float) -> list[bytes]:
        """Tickets whose deadline has passed since the last call and that were not released. Forgets old ones."""
        expired = []
        for ticket, state in self._states.items():
            if state in (LeaseState.WAITING, LeaseState.RUNNING) and self._deadlines[ticket] <= now:
                expired.append(ticket)
        for ticket in expired:
            self._states[ticket] = LeaseState.EXPIRED
        while self._by_deadline and self._by_deadline[0][0] + self._memory_s <= now:
            _, ticket = heapq.heappop(self._by_deadline)
            del self._states[ticket], self._deadlines[ticket]
        return expired
