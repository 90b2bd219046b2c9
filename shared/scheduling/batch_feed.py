"""How fast a gateway's batches may submit: the scheduler grants tokens, for all of them at once. Pure: time is an argument.

A grant is room that exists now, so each reply replaces what is left of the last one, and none is good for longer than
`MAX_INTERVAL_S`; a line may overdraw it. What was taken of a grant and has not reached the scheduler yet is asked for again
with each question, because the reply replaces that too, and is subtracted from the reply. While nobody grants, nothing is
submitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from shared.messages.batches import GrantQuery, GrantReply, OfflineDemand

MIN_INTERVAL_S = 0.05
MAX_INTERVAL_S = 1.0
RETRY_INTERVAL_S = 0.5


class Ticket:
    """Tokens that a line wants to submit, and has taken from when `on_taken` is called until they are settled."""

    def __init__(self, account: Account, tokens: int, on_taken: Callable[[], None]) -> None:
        self.tokens = tokens
        self.is_taken = False
        self.is_over = False
        self._account = account
        self._on_taken = on_taken

    def take(self) -> None:
        self.is_taken = True
        self._on_taken()

    def settle(self) -> None:
        """The scheduler knows of the request, or there will be none. May be called twice."""
        if not self.is_over:
            self.is_over = True
            self._account.on_way -= self.tokens if self.is_taken else 0


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
        self._waiting: deque[Ticket] = deque()

    @property
    def wanted_tokens(self) -> int:
        return sum(ticket.tokens for ticket in self._waiting if not ticket.is_over)

    def want(self, tokens: int, on_taken: Callable[[], None]) -> Ticket:
        """`on_taken` is called when so much may be submitted, perhaps at once; first come, first served."""
        ticket = Ticket(self, tokens, on_taken)
        self._waiting.append(ticket)
        self._release()
        return ticket

    def ask(self) -> OfflineDemand | None:
        """Demand for the question that is sent now; None: nothing to ask for."""
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
            ticket = self._waiting.popleft()
            if not ticket.is_over:
                self.credit -= ticket.tokens
                self.on_way += ticket.tokens
                self._covered += ticket.tokens
                ticket.take()


class BatchFeed:
    """Feeds the batches of one gateway. Its host asks and is answered, one question at a time:

    ask(now) -> query             to be sent; None: look again after `MIN_INTERVAL_S`
    answered(reply, now) -> s     the reply (None: nobody answered), and the time until the next question
    """

    def __init__(self, gateway_id: str) -> None:
        self.tokens_per_s: dict[str, float] = {}
        """Offline throughput of each model over the cluster, as last heard."""
        self.is_refused = False
        """Nobody answered the last question; false while there is nothing to ask for."""
        self.accounts: dict[tuple[str, str], Account] = {}
        """By batch and model."""
        self._gateway_id = gateway_id
        self._granted_s = -inf
        self._asked: dict[tuple[str, str], str] = {}
        """Accounts whose demands the last question has, in its order, which is that of the grants; and the models that
        compute them: a model and its adapters are computed by one."""

    def open(self, batch_id: str, model: str, demand: Callable[[int], OfflineDemand]) -> Account:
        account = self.accounts[batch_id, model] = Account(demand)
        return account

    def close(self, batch_id: str, model: str) -> None:
        self.accounts.pop((batch_id, model), None)

    def share_per_s(self, model: str) -> float:
        """Tokens per second that each of this gateway's batches may hope for."""
        num_batches = sum(1 for key in self.accounts if self._asked.get(key, key[1]) == model)
        return self.tokens_per_s.get(model, 0.0) / max(1, num_batches)

    def ask(self, now: float) -> GrantQuery | None:
        if not any(account.wanted_tokens for account in self.accounts.values()):
            if now - self._granted_s > MAX_INTERVAL_S:
                self._apply(GrantReply([], 0.0, self.tokens_per_s))
            self.is_refused = False
            return None
        demands = {key: demand for key, account in self.accounts.items() if (demand := account.ask()) is not None}
        self._asked = {key: demand.model for key, demand in demands.items()}
        return GrantQuery(self._gateway_id, list(demands.values()))

    def answered(self, reply: GrantReply | None, now: float) -> float:
        self.is_refused = reply is None
        if reply is None:
            self._apply(GrantReply([], RETRY_INTERVAL_S, self.tokens_per_s))
            return RETRY_INTERVAL_S
        self._apply(reply)
        self._granted_s = now
        return min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, reply.ask_again_s))

    def _apply(self, reply: GrantReply) -> None:
        self.tokens_per_s = reply.tokens_per_s
        granted = dict(zip(self._asked, (grant.tokens for grant in reply.grants), strict=False))
        for key, account in self.accounts.items():
            account.grant(granted.get(key, 0))
