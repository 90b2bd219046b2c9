"""What the scheduler tells the service monitor of requests: each at its arrival and at its end, until it is acknowledged."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple

from shared.messages.cluster import FinishedStats
from shared.messages.requests import FinishReason, GenerationRequest, RequestClass
from shared.messages.traffic import Outcome, RequestRow, RequestRows, request_number
from shared.scheduling.requests import TrackedRequest

MAX_KEPT = 32_768
MAX_TOLD = 256
"""Rows of one message: so few that making them up keeps the scheduler from dispatching for a millisecond or two."""

_OUTCOMES = {
    FinishReason.STOP: Outcome.FINISHED,
    FinishReason.LENGTH: Outcome.FINISHED,
    FinishReason.CANCELLED: Outcome.CANCELLED,
    FinishReason.DEADLINE: Outcome.LATE,
    FinishReason.ERROR: Outcome.FAILED,
}


class _Event(NamedTuple):
    request_id: str
    model: str
    is_online: bool
    arrived_s: float
    prompt_tokens: int
    outcome: Outcome
    end: FinishedStats | None


class RequestRecorder:
    """Off until its host turns it on: a host that never takes rows keeps none."""

    def __init__(self) -> None:
        self.is_on = False
        self._events: deque[_Event] = deque()
        self._num_gone = 0
        """Events before those, acknowledged or dropped."""
        self._told_to = 0
        """Events, counted likewise, that were told last."""
        self._num_dropped = 0
        """Since it was last acknowledged."""

    def take_over(self, other: RequestRecorder) -> None:
        """What another one of this process, of an earlier term, was not acknowledged."""
        self._events.extendleft(reversed(other._events))
        self._num_dropped += other._num_dropped
        while len(self._events) > MAX_KEPT:
            self._forget_first()
            self._num_dropped += 1

    def arrived(self, request: GenerationRequest, now: float) -> None:
        self._of(request, now, Outcome.PENDING)

    def refused(self, request: GenerationRequest, now: float) -> None:
        self._of(request, now, Outcome.REFUSED)

    def _of(self, request: GenerationRequest, now: float, outcome: Outcome) -> None:
        if request.is_mirror:
            return
        is_online, num_prompt = request.request_class == RequestClass.ONLINE, len(request.prompt) // 4
        arrived_s = now - request.waited_s
        self._add(_Event(request.request_id, request.public_model, is_online, arrived_s, num_prompt, outcome, None))

    def ended_here(self, tracked: TrackedRequest, reason: FinishReason, now: float) -> None:
        """In the scheduler's hands, after whatever it did before."""
        request = tracked.request
        if request is None or request.is_mirror:
            return
        stats = FinishedStats(
            model=tracked.model,
            request_class=request.request_class,
            prompt_tokens=tracked.num_prompt,
            output_tokens=len(request.prior) // 4,
            queued_s=0.0,
            execution_s=0.0,
            finish_reason=reason,
            latency_s=now - tracked.arrived_s,
            ttft_s=request.ttft_s,
            is_whole=False,
            is_ttft_met=False
            if reason != FinishReason.CANCELLED and tracked.is_online and request.ttft_s < 0
            else None,
            adapter="" if request.adapter is None else request.adapter.name,
        )
        self.ended(tracked.request_id, stats, now)

    def ended(self, request_id: str, stats: FinishedStats, now: float) -> None:
        if stats.is_mirror:
            return
        is_online = stats.request_class == RequestClass.ONLINE
        outcome = _OUTCOMES[stats.finish_reason]
        arrived_s = now - stats.latency_s
        self._add(_Event(request_id, stats.public_model, is_online, arrived_s, stats.prompt_tokens, outcome, stats))

    def _add(self, event: _Event) -> None:
        if not self.is_on:
            return
        if len(self._events) >= MAX_KEPT:
            # Not the newest: an end without its arrival is still a whole request.
            self._forget_first()
            self._num_dropped += 1
        self._events.append(event)

    def _forget_first(self) -> None:
        self._events.popleft()
        self._num_gone += 1

    def told(self, scheduler_id: str, now: float) -> RequestRows | None:
        """The first rows that are not acknowledged; None: there are none."""
        events = list(islice(self._events, MAX_TOLD))
        if not events:
            return None
        models = sorted({event.model for event in events})
        index = {model: number for number, model in enumerate(models)}
        rows = [_row(event, index[event.model], now) for event in events]
        self._told_to = self._num_gone + len(events)
        return RequestRows(scheduler_id, models, rows, self._num_dropped)

    def acknowledge(self, told: RequestRows) -> None:
        """Acknowledges what `told` returned last."""
        self._num_dropped -= told.num_dropped
        while self._num_gone < self._told_to:
            self._forget_first()


def _row(event: _Event, model: int, now: float) -> RequestRow:
    age_s = now - event.arrived_s
    number, end = request_number(event.request_id), event.end
    if end is None:
        return RequestRow(number, model, event.is_online, age_s, event.prompt_tokens, event.outcome)
    return RequestRow(
        number,
        model,
        event.is_online,
        age_s,
        event.prompt_tokens,
        event.outcome,
        end.output_tokens,
        end.latency_s,
        end.ttft_s,
        (end.device_s or end.execution_s) if end.is_whole else 0.0,
        end.is_ttft_met,
        end.is_tpot_met,
        end.max_itl_s,
    )
