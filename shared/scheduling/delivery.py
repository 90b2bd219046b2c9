"""What becomes of a dispatch: taken, refused for now or for good, or not known. Who refuses is left alone for a while."""

from __future__ import annotations

from shared.messages.requests import ErrorCode, FinishReason
from shared.scheduling.calls import OnDispatched
from shared.scheduling.cluster import ClusterView, InstanceState
from shared.scheduling.dispatching import Dispatcher
from shared.scheduling.lifecycle import RequestLifecycle
from shared.scheduling.recovery import FINAL, FULL, MAYBE_DELIVERED, UNCERTAIN, Inquiries
from shared.scheduling.requests import RequestState

LEDGER_EXPIRY_S = 2.0
"""After its dispatch was acknowledged: a report that names the request is lost, or was never sent."""
BACKOFF_S = 0.1
"""Of an instance that refused; doubles with each refusal in a row."""
MAX_BACKOFF_S = 2.0
MAX_FAILURES = 3
"""Attempts at a request that failed inside instances, before it is given up."""


class Delivery:
    def __init__(
        self, cluster: ClusterView, dispatcher: Dispatcher, life: RequestLifecycle, inquiries: Inquiries
    ) -> None:
        self._cluster = cluster
        self._dispatcher = dispatcher
        self._life = life
        self._inquiries = inquiries

    def on_dispatched(self, answer: OnDispatched, now: float) -> None:
        """See `OnDispatched`."""
        request_id, instance_id, error = answer.request_id, answer.instance_id, answer.error
        life = self._life
        tracked = life.requests.get(request_id)
        state = self._cluster.get(instance_id)
        if tracked is None or tracked.state != RequestState.DISPATCHING:
            return
        if (tracked.instance_id, tracked.epoch) != (instance_id, answer.epoch):
            return
        if error is None:
            if state is not None:
                state.num_refusals = 0
            if request_id in self._dispatcher.ledger:
                life.timers.set(("ledger", request_id), now + LEDGER_EXPIRY_S)
            life.assign(tracked, "dispatched", instance_id, now)
            if tracked.has_ended:
                life.forget(tracked)
            return
        life.leave_ledger(request_id, instance_id)
        if error.code in FINAL:
            life.end(tracked, FinishReason.ERROR, error, now)
            return
        if state is not None and error.code in FULL and not tracked.is_online:
            # Online requests may go there all the same; offline ones when the next report shows room.
            state.load.offline_room.clear()
            self._dispatcher.touch(instance_id)
        elif state is not None:
            self._back_off(instance_id, state, error.retry_after_s, now)
        if error.code in UNCERTAIN and state is not None:
            life.requests.move(tracked, RequestState.ASKING, instance_id, now)
            self._inquiries.ask(instance_id, state, now)
            return
        tracked.num_failures += error.code == ErrorCode.INTERNAL
        if tracked.num_failures >= MAX_FAILURES:
            life.end(tracked, FinishReason.ERROR, error, now)
        else:
            life.place_again(tracked, now, raise_epoch=error.code in MAYBE_DELIVERED)

    def expire(self, request_id: str) -> None:
        """No report has named the request in time: it is not in flight any more."""
        instance_id = self._dispatcher.ledger.remove(request_id)
        if instance_id is not None:
            self._dispatcher.touch(instance_id)

    def end_back_off(self, instance_id: str) -> None:
        state = self._cluster.get(instance_id)
        if state is not None:
            state.is_backing_off = False
            self._dispatcher.touch(instance_id)

    def _back_off(self, instance_id: str, state: InstanceState, retry_after_s: float, now: float) -> None:
        delay_s = max(retry_after_s, BACKOFF_S * 2**state.num_refusals)
        state.num_refusals = min(state.num_refusals + 1, 10)
        state.is_backing_off = True
        self._life.timers.set(("backoff", instance_id), now + min(MAX_BACKOFF_S, delay_s))
        self._dispatcher.touch(instance_id)
