"""How fast batches may submit: the scheduler grants tokens, for all of a gateway's batches at once.

A grant is room that exists now, so each reply replaces what is left of the last one, and none is good for longer than
`MAX_INTERVAL_S`; a line may overdraw it. What was taken of a grant and has not reached the scheduler yet is asked for again
with each question, because the reply replaces that too, and is subtracted from the reply. While nobody grants, nothing is
submitted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from shared.bus.interface import Bus, BusError
from shared.messages.batches import GrantQuery, GrantReply, OfflineDemand
from shared.messages.catalogue import SCHEDULER_GRANT

logger = logging.getLogger(__name__)

GRANT_TIMEOUT_S = 2.0
MIN_INTERVAL_S = 0.05
MAX_INTERVAL_S = 1.0
RETRY_INTERVAL_S = 0.5


class Taken:
    """Tokens on their way to the scheduler."""

    def __init__(self, account: Account, tokens: int) -> None:
        self._account = account
        self._tokens = tokens

    def settle(self) -> None:
        """The scheduler knows of the request, or there will be none. May be called twice."""
        self._account.on_way -= self._tokens
        self._tokens = 0


class Account:
    """What one batch may submit for one model."""

    def __init__(self, demand: Callable[[int], OfflineDemand]) -> None:
        """`demand(wanted_tokens)`: what the scheduler should know."""
        self.credit = 0
        self.on_way = 0
        """Tokens taken that are not settled."""
        self._demand = demand
        self._is_free = False
        self._covered = 0
        """Tokens that the next reply stands for and that are gone already: on their way when it was asked for, or taken
        since."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def wanted_tokens(self) -> int:
        return sum(tokens for tokens, future in self._waiting if not future.done())

    def ask(self) -> OfflineDemand | None:
        """For the question that is sent now; None: nothing to ask for."""
        self._covered = self.on_way
        wanted = self.wanted_tokens + self.on_way
        return self._demand(wanted) if wanted else None

    def grant(self, tokens: int) -> None:
        self.credit = tokens - self._covered
        self._release()

    def set_free(self, is_free: bool) -> None:
        """Free: whatever is asked for may be taken, because it will cost nothing."""
        self._is_free = is_free
        self._release()

    def _release(self) -> None:
        while self._waiting and (self._is_free or self.credit > 0):
            tokens, future = self._waiting.popleft()
            if not future.done():
                self._spend(tokens)
                future.set_result(None)

    def _spend(self, tokens: int) -> None:
        self.credit -= tokens
        self.on_way += tokens
        self._covered += tokens

    async def take(self, tokens: int) -> Taken:
        """Returns when so much may be submitted; first come, first served."""
        if self._is_free or self.credit > 0:  # then nobody waits
            self._spend(tokens)
            return Taken(self, tokens)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((tokens, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                Taken(self, tokens).settle()
            raise
        return Taken(self, tokens)


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

    def share_per_s(self, model: str) -> float:
        """Tokens per second that each of this gateway's batches may hope for."""
        num_batches = sum(1 for _, name in self._accounts if name == model)
        return self.tokens_per_s.get(model, 0.0) / max(1, num_batches)

    async def run(self) -> None:
        """Asks for ever."""
        while True:
            if not self._accounts:
                self._has_demand.clear()
                await self._has_demand.wait()
            await asyncio.sleep(await self._ask())

    async def _ask(self) -> float:
        """Seconds until the next question."""
        if not any(account.wanted_tokens for account in self._accounts.values()):
            if self._bus.now() - self._granted_at > MAX_INTERVAL_S:
                self._apply(GrantReply([], 0.0, self.tokens_per_s))
            return MIN_INTERVAL_S
        demands = [demand for account in self._accounts.values() if (demand := account.ask()) is not None]
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
