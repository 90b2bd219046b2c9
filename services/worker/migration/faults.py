"""Named points of a migration at which a test lets it fail, wait or die. Nothing happens there by default."""

from __future__ import annotations

import asyncio
import os
import signal
from enum import StrEnum

from shared.runtime.settings import SettingsError

DELAY_S = 1.0
"""Delay where none is given."""


class FaultPoint(StrEnum):
    SOURCE_RESERVE = "source.reserve"
    """PreAllocate is about to be sent."""
    SOURCE_COPY = "source.copy"
    """Blocks of a stage are about to be sent, the last ones included."""
    SOURCE_DETACHED = "source.detached"
    """The request has left its batch; it is not frozen yet."""
    SOURCE_COMMIT = "source.commit"
    """Frozen; Commit is about to be sent. `fail`: it is lost."""
    SOURCE_ANSWER = "source.answer"
    """Commit was answered. `fail`: the answer is lost."""
    SOURCE_OWNS = "source.owns"
    """Owns is about to be sent. `fail`: it is lost."""
    DESTINATION_RESERVE = "destination.reserve"
    """PreAllocate has arrived."""
    DESTINATION_RESERVED = "destination.reserved"
    """Blocks are reserved and claimed; the answer is about to be sent. `fail`: it is lost."""
    DESTINATION_COPIED = "destination.copied"
    """The blocks of a stage are all here. `fail`: they count as damaged."""
    DESTINATION_COMMIT = "destination.commit"
    """Commit has arrived. `fail`: it is refused."""
    DESTINATION_COMMITTED = "destination.committed"
    """The request runs here; the answer is about to be sent. `fail`: it is lost."""


class FaultAction(StrEnum):
    FAIL = "fail"
    DELAY = "delay"
    EXIT = "exit"
    """The process ends at once, as if killed."""
    STOP = "stop"
    """SIGSTOP: it lives and does nothing, until SIGCONT."""


class FaultError(Exception):
    """A fault that was asked for."""


class FaultPoints:
    def __init__(self, text: str = "") -> None:
        """`text`: `name:action[:seconds]`, comma-separated. Raises `SettingsError`."""
        self._faults: dict[FaultPoint, tuple[FaultAction, float]] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, _, rest = item.partition(":")
            action, _, seconds = rest.partition(":")
            try:
                fault = FaultAction(action), float(seconds) if seconds else DELAY_S
                self._faults[FaultPoint(name)] = fault
            except ValueError as error:
                message = f"TIDEWAY_FAULT_POINTS: {item!r} is not name:action[:seconds] ({error})"
                raise SettingsError(message) from None

    def has(self, point: FaultPoint) -> bool:
        return point in self._faults

    async def at(self, point: FaultPoint) -> None:
        """Raises `FaultError` for `fail`; returns without a turn of the event loop where nothing was asked for."""
        if (fault := self._faults.get(point)) is None:
            return
        action, seconds = fault
        if action is FaultAction.FAIL:
            raise FaultError(f"at {point}")
        if action is FaultAction.DELAY:
            await asyncio.sleep(seconds)
        elif action is FaultAction.EXIT:
            os._exit(1)
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
