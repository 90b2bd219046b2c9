"""What gateways want: requests, their ends before their time, and leave to submit offline ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.messages.batches import GrantQuery, GrantReply
from shared.messages.requests import (
    PLACEMENT_EPOCHS,
    ErrorCode,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    RequestClass,
    next_placement,
)
from shared.scheduling.actions import CancelAt
from shared.scheduling.harvest import GrantBook
from shared.scheduling.lifecycle import removed_error
from shared.scheduling.requests import RequestState, TrackedRequest

if TYPE_CHECKING:
    from shared.scheduling.core import SchedulerCore

TERM_EPOCHS = 1024 * PLACEMENT_EPOCHS
"""More than the placements that a leader makes of one request in its term."""


class Intake:
    def __init__(self, core: SchedulerCore, term: int) -> None:
        self.grants = GrantBook()
        self._core = core
        self._term = term

    def submit(self, request: GenerationRequest, now: float) -> ErrorInfo | None:
        known = self._core.life.requests.get(request.request_id)
        if known is not None and known.epoch >= request.epoch:
            # The gateway may have raised it to what it had been raised to here, and hears no lower one from now on.
            known.gateway_epoch = max(known.gateway_epoch, request.epoch)
            return None
        # What ran before counts as let in: the bound is not for it, and what serves its model may be about to change.
        is_new = request.epoch == 0 and not request.prior
        # What can be cut is when it enters the queue.
        if (
            is_new
            and (refused := self._core.cluster.refusal(request))
            and not (refused.code is ErrorCode.TOO_LONG and request.is_open_ended and self._core.cluster.cut(request))
        ):
            return refused
        if request.model in self._core.life.removed_models:
            return removed_error(request.model)
        is_online = request.request_class != RequestClass.OFFLINE
        if is_new and (refused := self._core.queue.refusal(is_online, now)):
            self._core.life.recorder.refused(request, now)
            return refused
        tracked = TrackedRequest.submitted(request, self._core.life.next_number(), len(self._core.queue), now)
        if known is not None:
            tracked.older_owners = known.older_owners
            if known.instance_id:
                tracked.older_owners[known.instance_id] = known.epoch
            self._core.life.leave_queue(known, "replaced", now)
            self._core.life.forget(known)
        if request.epoch % PLACEMENT_EPOCHS:
            # It has moved within its placement. From here it begins another one: no epoch is used twice.
            tracked.epoch = next_placement(request.epoch)
        if self._core.inquiries.unheard:
            tracked.epoch += self._term * TERM_EPOCHS
        if is_new and not request.is_mirror:
            self._core.life.statistics.count_arrival(request.public_model)
            self._core.life.recorder.arrived(request, now)
            if not is_online:
                self.grants.on_submitted(request.gateway_id, request.model, tracked.num_tokens_at_most)
        self._core.life.requests.add(tracked)
        self._core.life.enqueue(tracked, now)
        return None

    def cancel(self, request_id: str, now: float) -> None:
        tracked = self._core.life.requests.get(request_id)
        if tracked is None:
            return
        for instance_id in tracked.older_owners:
            self._core.say(CancelAt(instance_id, request_id))
        if tracked.state == RequestState.QUEUED:
            self._core.life.recorder.ended_here(tracked, FinishReason.CANCELLED, now)
            self._core.life.leave_queue(tracked, "cancelled", now)
            self._core.life.forget(tracked)
        elif tracked.state == RequestState.ASSIGNED:
            self._core.say(CancelAt(tracked.instance_id, request_id))
        else:
            tracked.is_cancelled = True  # passed on as soon as the instance is known to have it

    def grant(self, query: GrantQuery, now: float) -> GrantReply:
        room = self._core.dispatcher.offline_room(demand.model for demand in query.demands)
        return self.grants.answer(query, room, now)
