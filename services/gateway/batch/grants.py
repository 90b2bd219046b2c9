"""Asks the scheduler how much the gateway's batches may submit (shared/scheduling/batch_feed.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from shared.bus.interface import Bus, BusError
from shared.messages.batches import GrantReply, OfflineDemand
from shared.messages.catalogue import SCHEDULER_GRANT
from shared.scheduling.batch_feed import MIN_INTERVAL_S, Account, BatchFeed, Ticket

logger = logging.getLogger(__name__)

GRANT_TIMEOUT_S = 2.0


async def take(account: Account, tokens: int) -> Ticket:
    """Returns when so much may be submitted; to be settled by the caller."""
    taken = asyncio.Event()
    ticket = account.want(tokens, taken.set)
    try:
        await taken.wait()
    except asyncio.CancelledError:
        ticket.settle()
        raise
    return ticket


class Grants:
    def __init__(self, bus: Bus, gateway_id: str) -> None:
        self.feed = BatchFeed(gateway_id)
        self._bus = bus
        self._has_demand = asyncio.Event()

    def open(self, batch_id: str, model: str, demand: Callable[[int], OfflineDemand]) -> Account:
        self._has_demand.set()
        return self.feed.open(batch_id, model, demand)

    async def run(self) -> None:
        """Asks for ever."""
        while True:
            if not self.feed.accounts:
                self._has_demand.clear()
                await self._has_demand.wait()
            await asyncio.sleep(await self._ask())

    async def _ask(self) -> float:
        """Seconds until the next question."""
        query = self.feed.ask(self._bus.now())
        if query is None:
            return MIN_INTERVAL_S
        was_refused = self.feed.is_refused
        reply: GrantReply | None = None
        try:
            reply = await self._bus.request(SCHEDULER_GRANT, query, timeout_s=GRANT_TIMEOUT_S)
        except BusError as error:
            if not was_refused:
                logger.warning("batches pause, because no scheduler grants tokens: %s", error)
        else:
            if was_refused:
                logger.info("batches go on: tokens are granted again")
        return self.feed.answered(reply, self._bus.now())
