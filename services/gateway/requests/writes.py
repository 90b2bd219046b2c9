"""Writes to JetStream that outlast the election of a stream's leader."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shared.bus.interface import BusError, RevisionConflict
from shared.messages.requests import ErrorCode

logger = logging.getLogger(__name__)

T = TypeVar("T")

ELECTION_S = 10.0
"""Time for a write that a client waits for: an election takes up to 9 s."""
WRITE_WITHIN_S, WRITE_RETRY_S = 60.0, 1.0
"""Time for a write that nobody waits for, and between two tries."""


async def patiently(what: str, write: Callable[[], Awaitable[T]], within_s: float = WRITE_WITHIN_S) -> T:
    """The outcome of `write`, begun again while JetStream does not answer, for so long. Raises as `write` does."""
    give_up_s, is_told = time.monotonic() + within_s, False
    while True:
        try:
            return await write()
        except RevisionConflict:
            raise
        except BusError as error:
            is_over = error.code is not ErrorCode.UNAVAILABLE or time.monotonic() > give_up_s
            if is_over or not is_told:
                logger.warning("%s: %s", what, error)
            if is_over:
                raise
        is_told = True
        await asyncio.sleep(WRITE_RETRY_S)
