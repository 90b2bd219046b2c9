"""How fast batches may submit: the scheduler grants tokens, for all of a gateway's batches at once.

A grant is room that exists now, so each reply replaces what is left of the last one, and none is good for longer than
`MAX_INTERVAL_S`; a line may overdraw it. While nobody grants, nothing is submitted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from shared.bus.interface import Bus, BusError
from shared.messages import SCHEDULER_GRANT, GrantQuery, GrantReply, OfflineDemand

logger = logging.getLogger(__name__)

GRANT_TIMEOUT_S = 2.0
MIN_INTERVAL_S = 0.05
MAX_INTERVAL_S = 1.0
RETRY_INTERVAL_S = 0.5


class Account:
    """What one batch may submit for one model."""

    def __init__(self, demand: Callable[[int], OfflineDemand]) -> None:
        """`demand(wanted_tokens)`: what the scheduler should know."""
        self.demand = demand
        self.credit = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def wanted_tokens(self) -> int:
        return sum(tokens for tokens, future in self._waiting if not future.done())

    def grant(self, tokens: int) -> None:
        self.credit = tokens
        while self._waiting and self.credit > 0:
            wanted, future = self._waiting.popleft()
            if not future.done():
                self.credit -= wanted
                future.set_result(None)

    async def take(self, tokens: int) -> None:
        """Returns when so much may be submitted; first come, first served."""
        if self.credit > 0:  # then nobody waits
            self.credit -= tokens
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((tokens, future))
        await future


class Grants:
    def __init__(self, bus: Bus, gateway_id: str) -> None:
        self.tokens_per_s: dict[str, float] = {}
        """Offline throughput of each model over the cluster, as last heard."""
        self._bus = bus
        self._gateway_id = gateway_id
        self._accounts: dict[tuple[str, str], Account] = {}
        self._has_demand = asyncio.Event()
        self._is_refused = False
        self._granted_at = float("-inf")

    def open(self, batch_id: str, model: str, demand: Callable[[int], OfflineDemand]) -> Account:
        account = self._accounts[batch_id, model] = Account(demand)
        self._has_demand.set()
        return account

    def close(self, batch_id: str, model: str) -> None:
        self._accounts.pop((batch_id, model), None)

    async def run(self) -> None:
        """Asks for ever."""
        while True:
            if not self._accounts:
                self._has_demand.clear()
                await self._has_demand.wait()
            await asyncio.sleep(await self._ask())

    async def _ask(self) -> float:
        """Seconds until the next question."""
        wanted = [(account, account.wanted_tokens) for account in self._accounts.values()]
        demands = [account.demand(tokens) for account, tokens in wanted if tokens > 0]
        if not demands:
            if self._bus.now() - self._granted_at > MAX_INTERVAL_S:
                self._apply(GrantReply([], 0.0, self.tokens_per_s))
            return MIN_INTERVAL_S
        try:
            query = GrantQuery(self._gateway_id, demands)
            reply = await self._bus.request(SCHEDULER_GRANT, query, timeout_s=GRANT_TIMEOUT_S)
        except BusError as error:
            if not self._is_refused:
                logger.warning("batches pause, because no scheduler grants tokens: %s", error)
            self._is_refused = True
            self._apply(GrantReply([], RETRY_INTERVAL_S, self.tokens_per_s))
            return RETRY_INTERVAL_S
        if self._is_refused:
            logger.info("batches go on: tokens are granted again")
        self._is_refused = False
        self._apply(reply)
        self._granted_at = self._bus.now()
        return min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, reply.ask_again_s))

    def _apply(self, reply: GrantReply) -> None:
        self.tokens_per_s = reply.tokens_per_s
        granted = {(grant.batch_id, grant.model): grant.tokens for grant in reply.grants}
        for key, account in self._accounts.items():
            account.grant(granted.get(key, 0))
