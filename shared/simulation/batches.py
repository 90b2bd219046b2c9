"""Batches in virtual time: lines in the background, as many under way as the scheduler grants (`BatchFeed`, as the live
gateway's)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import msgspec

from shared.messages.batches import GrantQuery, GrantReply, OfflineDemand
from shared.messages.requests import RequestClass
from shared.scheduling.batch_feed import MIN_INTERVAL_S, BatchFeed, Ticket
from shared.scheduling.calls import Grant
from shared.simulation.fleet import Fleet
from shared.simulation.gateway import NAME, Job

GRANT_TIMEOUT_S = 2.0
LINES_IN_FLIGHT = 128
"""Lines in flight of one batch and model; the gateway's default."""


class Batches:
    """Batches of a fleet. A batch is a list of jobs, whose times and classes say nothing."""

    def __init__(self, fleet: Fleet, *, lines_in_flight: int = LINES_IN_FLIGHT) -> None:
        self.fleet, self.lines_in_flight = fleet, lines_in_flight
        self.feed = BatchFeed(NAME)
        self.ended_s: dict[str, float] = {}
        """Time at which each batch had all its answers."""
        self._is_asking = False

    def begin_at(self, at_s: float, batch_id: str, lines: Sequence[Job], *, window_s: float = 86400.0) -> None:
        """`window_s`: from then on, in which it should be over."""
        self.fleet.events.at(at_s, self._begin, batch_id, list(lines), at_s + window_s)

    def _begin(self, batch_id: str, lines: list[Job], deadline_s: float) -> None:
        for model in dict.fromkeys(line.model for line in lines):
            _Feeding(self, batch_id, model, [line for line in lines if line.model == model], deadline_s).fill()
        if not self._is_asking:
            self._is_asking = True
            self._ask()

    def _ask(self) -> None:
        events = self.fleet.events
        self._is_asking = bool(self.feed.accounts)
        if not self._is_asking:
            return
        query = self.feed.ask(events.now)
        if query is None:
            events.after(MIN_INTERVAL_S, self._ask)
        else:
            events.after(self.fleet.control_s, self._on_query, query)

    def _on_query(self, query: GrantQuery) -> None:
        """Answers a question as the scheduler does."""
        scheduler, control_s = self.fleet.scheduler, self.fleet.control_s
        reply = scheduler.apply(Grant(query)) if scheduler.is_serving else None
        self.fleet.events.after(control_s if reply else GRANT_TIMEOUT_S - control_s, self._on_reply, reply)

    def _on_reply(self, reply: GrantReply | None) -> None:
        events = self.fleet.events
        events.after(self.feed.answered(reply, events.now), self._ask)


class _Feeding:
    """The lines of one batch and model."""

    def __init__(self, batches: Batches, batch_id: str, model: str, lines: list[Job], deadline_s: float) -> None:
        self._batches, self._batch_id, self._model, self._deadline_s = batches, batch_id, model, deadline_s
        self._events, self._gateway = batches.fleet.events, batches.fleet.gateway
        self._lines = deque(lines)
        self._unfinished_tokens = sum(map(tokens_of, lines))
        self._tickets: dict[int, Ticket] = {}
        """Tickets of the lines that wait for a grant, by number of their requests."""
        self._num_under_way = 0
        self._account = batches.feed.open(batch_id, model, self._demand)

    def _demand(self, wanted_tokens: int) -> OfflineDemand:
        slack_s = max(0.0, self._deadline_s - self._events.now)
        return OfflineDemand(
            batch_id=self._batch_id, tenant="", model=self._model, wanted_tokens=wanted_tokens,
            unfinished_tokens=self._unfinished_tokens, slack_s=slack_s,
        )  # fmt: skip

    def fill(self) -> None:
        while self._lines and self._num_under_way < self._batches.lines_in_flight:
            line = msgspec.structs.replace(
                self._lines.popleft(), at_s=self._events.now, request_class=RequestClass.OFFLINE, is_high=False
            )
            number = self._gateway.expect(line, self._on_ended)
            self._num_under_way += 1
            self._tickets[number] = self._account.want(
                tokens_of(line), partial(self._events.after, 0.0, self._submit, number)
            )

    def _submit(self, number: int) -> None:
        self._gateway.send(number)
        self._tickets.pop(number).settle()

    def _on_ended(self, number: int) -> None:
        self._num_under_way -= 1
        self._unfinished_tokens -= tokens_of(self._gateway.jobs[number])
        self.fill()
        if not self._num_under_way:
            self._batches.feed.close(self._batch_id, self._model)
            if not any(batch_id == self._batch_id for batch_id, _ in self._batches.feed.accounts):
                self._batches.ended_s[self._batch_id] = self._events.now


def tokens_of(line: Job) -> int:
    """Tokens of a line as the gateway estimates them."""
    return line.prompt_tokens + (line.max_tokens or line.output_tokens)
