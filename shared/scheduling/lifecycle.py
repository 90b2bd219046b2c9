"""The life of a request in the scheduler: every transition of its state, with all that goes with it.

A request is in exactly one place (see `requests`). In one epoch it is accepted by one instance at most: whoever calls
`place_again` after a submit call that may have arrived has the epoch raised, to the beginning of the next placement. Inside
a placement the request moves between instances, each of which has a higher epoch than the one before.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shared.messages.requests import (
    PLACEMENT_EPOCHS,
    ErrorCode,
    ErrorInfo,
    FinishReason,
    HeldRequest,
    TokenEntry,
    next_placement,
)
from shared.scheduling.actions import Action, CancelAt, Dispatch, LeftQueue, SendEntry, Waits
from shared.scheduling.cluster import ClusterView
from shared.scheduling.dispatching import Dispatcher
from shared.scheduling.request_rows import RequestRecorder
from shared.scheduling.requests import RequestState, RequestTable, TrackedRequest
from shared.scheduling.statistics import StatisticsCounter
from shared.scheduling.timers import Timers

ASSIGNMENT_GRACE_S = 10.0
"""Past a request's deadline, when its instance must have ended it."""

UNFIT_GRACE_S = 10.0
"""Grace period of a request in the queue that has become too long for all that serve its model: while instances restart for
another placement, one that is large enough may not have registered yet. So often it is looked whether it may load the
model."""

Timer = tuple[str, str]
"""(deadline | unfit | ledger | confirm, id of a request) or (backoff, id of an instance)"""


class RequestLifecycle:
    def __init__(
        self,
        dispatcher: Dispatcher,
        cluster: ClusterView,
        say: Callable[[Action], None],
    ) -> None:
        self.requests = RequestTable()
        self.timers: Timers[Timer] = Timers()
        self.statistics = StatisticsCounter()
        self.recorder = RequestRecorder()
        self.removed_models: set[str] = set()
        """Nobody will serve them again."""
        self._dispatcher = dispatcher
        self._tenants = dispatcher.queue.tenants
        self._cluster = cluster
        self._say = say
        self._num_known = 0
        self._entered: list[TrackedRequest] = []
        """The queue, since it was last looked at who did."""

    def next_number(self) -> int:
        """Number of a request that comes, in the order of arrival."""
        self._num_known += 1
        return self._num_known

    def on_model(self, model: str, is_known: bool, now: float) -> None:
        if is_known:
            self.removed_models.discard(model)
            return
        self.removed_models.add(model)
        for tracked in self._dispatcher.queue.of_model(model):
            self.end(tracked, FinishReason.ERROR, removed_error(model), now)

    def enqueue(self, tracked: TrackedRequest, now: float) -> None:
        self.timers.set(("deadline", tracked.request_id), tracked.deadline_s)
        self._dispatcher.enqueue(tracked, now)
        self._entered.append(tracked)
        self._watch_fit(tracked, now)

    def look_through(self, model: str, now: float) -> None:
        """What serves the model is another."""
        for tracked in self._dispatcher.queue.of_model(model):
            self._watch_fit(tracked, now)

    def _watch_fit(self, tracked: TrackedRequest, now: float) -> None:
        """Watches whether a request in the queue still fits: nobody waits for one that is too long for all that serve
        its model."""
        request, queue, timer = tracked.request, self._dispatcher.queue, ("unfit", tracked.request_id)
        assert request is not None
        refused = self._cluster.refusal(request)
        is_unfit = refused is not None
        is_long = refused is not None and refused.code is ErrorCode.TOO_LONG
        if is_long and request.is_open_ended and (shorter := self._cluster.cut(request)) is not None:
            queue.remove(tracked)
            tracked.request = shorter
            self._dispatcher.enqueue(tracked, now)
            is_unfit = False
        queue.set_unfit(tracked, is_unfit)
        if not is_unfit:
            self.timers.discard(timer)
        elif timer not in self.timers:
            self.timers.set(timer, now + UNFIT_GRACE_S)

    def on_unfit(self, request_id: str, now: float) -> None:
        """Its grace is over. What has begun gets the tokens that fit now."""
        tracked = self.requests.get(request_id)
        if tracked is None or tracked.state != RequestState.QUEUED:
            return
        request = tracked.request
        assert request is not None
        refused = self._cluster.refusal(request)
        if refused is None:
            return
        if self._cluster.may_fit_soon(request):
            self.timers.set(("unfit", request_id), now + UNFIT_GRACE_S)
            return
        is_long = refused.code is ErrorCode.TOO_LONG
        shorter = self._cluster.cut(request) if request.prior and is_long else None
        if shorter is not None:
            self._dispatcher.queue.remove(tracked)
            tracked.request = shorter
            self.enqueue(tracked, now)
        elif request.prior and is_long:
            self.end(tracked, FinishReason.LENGTH, None, now)
        else:
            self.end(tracked, FinishReason.ERROR, refused, now)

    def tell_who_waits(self, now: float) -> None:
        """Tells of requests that entered the queue since the last call and are still there."""
        for tracked in self._entered:
            if tracked.state == RequestState.QUEUED and self.requests.get(tracked.request_id) is tracked:
                why = self._dispatcher.why_waiting(tracked, now)
                waits = Waits(tracked.gateway_id, tracked.request_id, tracked.epoch, tracked.num_ahead, why)
                self._say(waits)
        self._entered.clear()

    def dispatch(self, tracked: TrackedRequest, instance_id: str, now: float) -> None:
        """After the dispatcher has picked it."""
        assert tracked.request is not None
        tracked.attempts += 1
        self.requests.move(tracked, RequestState.DISPATCHING, instance_id, now)
        request = msgspec.structs.replace(
            tracked.request,
            epoch=tracked.epoch,
            timeout_s=tracked.deadline_s - now,
            waited_s=now - tracked.arrived_s,
            decoder=tracked.decoder,
            prefix_holder="" if tracked.fetch is None else tracked.fetch.holder_id,
            prefix_tokens=0 if tracked.fetch is None else tracked.fetch.num_tokens,
        )
        why, freeness = tracked.chosen_for
        num_serving = self._dispatcher.num_serving(tracked.model)
        self._say(Dispatch(instance_id, request, why, freeness, num_serving))

    def assign(self, tracked: TrackedRequest, outcome: str, instance_id: str, now: float) -> None:
        """The instance has it. `outcome`: dispatched, or found there."""
        self.leave_queue(tracked, outcome, now)
        if tracked.promised_s is None:
            self._tenants.place(tracked, 0.0)
        self.requests.move(tracked, RequestState.ASSIGNED, instance_id, now)
        self.timers.set(("deadline", tracked.request_id), tracked.deadline_s + ASSIGNMENT_GRACE_S)
        if tracked.is_cancelled:
            self._say(CancelAt(instance_id, tracked.request_id))
        self.cancel_older_owners(tracked)

    def adopt(self, held: HeldRequest, instance_id: str, now: float) -> None:
        """An instance turned out to own a request, whatever was believed."""
        tracked = self.requests.get(held.request_id)
        if tracked is None:
            tracked = TrackedRequest.held(held, instance_id, self.next_number(), now)
            self.requests.add(tracked)
            self._tenants.enter(tracked)
            self._tenants.place(tracked, 0.0)
            self.timers.set(("deadline", held.request_id), tracked.deadline_s)
        else:
            self.change_owner(tracked, instance_id, held.epoch, now)

    def change_owner(
        self, tracked: TrackedRequest, instance_id: str, epoch: int, now: float, *, is_hand_over: bool = True
    ) -> None:
        """`is_hand_over`: the owner before gave it away, if that was in the same placement, and does not run it any more."""
        before = tracked.instance_id
        self.leave_ledger(tracked.request_id, before)
        if before != instance_id:
            self.end_promise(tracked.request_id)
        is_same_placement = tracked.epoch // PLACEMENT_EPOCHS == epoch // PLACEMENT_EPOCHS
        if before and before != instance_id and not (is_hand_over and is_same_placement):
            tracked.older_owners[before] = tracked.epoch
        tracked.older_owners.pop(instance_id, None)
        tracked.is_confirmed = True
        self.timers.discard(("confirm", tracked.request_id))
        tracked.epoch = epoch
        self.assign(tracked, "found", instance_id, now)

    def supersede(self, held: HeldRequest, instance_id: str) -> None:
        """An instance holds an older epoch of a request that has, or will have, another owner."""
        tracked = self.requests.get(held.request_id)
        if tracked is not None and tracked.instance_id != instance_id:
            tracked.older_owners[instance_id] = held.epoch
            if tracked.state == RequestState.ASSIGNED:
                self.cancel_older_owners(tracked)

    def place_again(self, tracked: TrackedRequest, now: float, *, raise_epoch: bool) -> None:
        """Back to its place in the queue after a dispatch that failed, unless there is nothing left to do for it."""
        if tracked.is_cancelled or tracked.has_ended:
            self._say(CancelAt(tracked.instance_id, tracked.request_id))
            if tracked.is_cancelled:
                self.recorder.ended_here(tracked, FinishReason.CANCELLED, now)
            self.leave_queue(tracked, "cancelled" if tracked.is_cancelled else "dispatched", now)
            self.forget(tracked)
            return
        if tracked.model in self.removed_models:
            if raise_epoch:
                self._say(CancelAt(tracked.instance_id, tracked.request_id))
            self.end(tracked, FinishReason.ERROR, removed_error(tracked.model), now)
            return
        if raise_epoch:
            tracked.older_owners[tracked.instance_id] = tracked.epoch
            tracked.epoch = next_placement(tracked.epoch)
        self._tenants.unplace(tracked)
        self.end_promise(tracked.request_id)
        self.requests.move(tracked, RequestState.QUEUED, "", now)
        self.enqueue(tracked, now)

    def end(self, tracked: TrackedRequest, reason: FinishReason, error: ErrorInfo | None, now: float) -> None:
        """Ends a request here and tells its gateway."""
        assert tracked.request is not None
        offset = len(tracked.request.prior) // 4
        entry = TokenEntry(
            request_id=tracked.request_id,
            epoch=tracked.epoch,
            offset=offset,
            tokens=b"",
            finish_reason=reason,
            error=error,
        )
        self._say(SendEntry(tracked.gateway_id, entry))
        self.recorder.ended_here(tracked, reason, now)
        outcomes = {FinishReason.DEADLINE: "deadline", FinishReason.LENGTH: "finished"}
        self.leave_queue(tracked, outcomes.get(reason, "refused"), now)
        self.forget(tracked)

    def on_deadline(self, request_id: str, now: float) -> None:
        tracked = self.requests.get(request_id)
        if tracked is None:
            return
        if tracked.state == RequestState.QUEUED:
            waited = f"the request waited {now - tracked.arrived_s:.3g} s in the queue until its deadline"
            self.end(tracked, FinishReason.DEADLINE, ErrorInfo(ErrorCode.DEADLINE, waited), now)
        elif tracked.state == RequestState.ASSIGNED:
            self.forget(tracked)

    def cancel_older_owners(self, tracked: TrackedRequest) -> None:
        """Only where the gateway itself chose the newer epoch: it would take the end of the older one, if that came
        before it has seen the newer, for the end of the request. And never where the new owner is."""
        for instance_id, epoch in list(tracked.older_owners.items()):
            if epoch < tracked.gateway_epoch and instance_id != tracked.instance_id:
                self._say(CancelAt(instance_id, tracked.request_id, epoch))
                del tracked.older_owners[instance_id]

    def leave_queue(self, tracked: TrackedRequest, outcome: str, now: float) -> None:
        """Takes a request out of the queue if it is there, and notes that it is out of this scheduler's hands; nothing
        for one that already was."""
        if tracked.state == RequestState.QUEUED:
            self._dispatcher.queue.remove(tracked)
        if tracked.request is None:
            return
        left_s = tracked.since_s if outcome == "dispatched" else now
        self._say(
            LeftQueue(
                tracked.request,
                outcome,
                tracked.instance_id,
                tracked.attempts,
                tracked.num_ahead,
                tracked.submitted_s,
                left_s,
            )
        )
        if outcome == "dispatched":
            self._dispatcher.queue.count_dispatch(now)
            if not tracked.request.is_mirror:
                model, waited_s = tracked.request.public_model, left_s - tracked.submitted_s
                self.statistics.count_queued(model, waited_s)

    def forget(self, tracked: TrackedRequest) -> None:
        """It must have left the queue."""
        self.leave_ledger(tracked.request_id, tracked.instance_id)
        self.end_promise(tracked.request_id)
        for kind in ("deadline", "unfit", "confirm"):
            self.timers.discard((kind, tracked.request_id))
        self._tenants.leave(tracked)
        self.requests.remove(tracked)

    def leave_ledger(self, request_id: str, instance_id: str) -> None:
        """Nothing if the request is not in flight to that instance."""
        if instance_id and self._dispatcher.ledger.where(request_id) == instance_id:
            self._dispatcher.ledger.remove(request_id)
            self.timers.discard(("ledger", request_id))
            self._dispatcher.ranking.relieve(instance_id)

    def end_promise(self, request_id: str) -> None:
        """The request is where it is decoded, or no more to be handed over."""
        if (decoder := self._dispatcher.ledger.end_promise(request_id)) is not None:
            self._dispatcher.ranking.relieve(decoder)


def removed_error(model: str) -> ErrorInfo:
    return ErrorInfo(ErrorCode.UNKNOWN_MODEL, f"the model {model!r} was removed", "model")
