"""What becomes of dispatches: taken, refused for now or for good, or not known; and of requests when instances die, answers
get lost, or a new scheduler takes over.

An instance knows best what it holds. Its answer to `INSTANCE_HELD` is compared with what the scheduler believes
(`reconcile`); the same comparison rebuilds the view of a new leader, settles submit calls of unknown outcome, and repairs
what lost reports left behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.messages.requests import ErrorCode, FinishReason, HeldRequest
from shared.scheduling.actions import AskHeld
from shared.scheduling.calls import OnDispatched
from shared.scheduling.cluster import InstanceState
from shared.scheduling.migrations import is_owner
from shared.scheduling.requests import RequestState, RequestTable, TrackedRequest

if TYPE_CHECKING:
    from shared.scheduling.core import SchedulerCore

FINAL = frozenset({ErrorCode.TOO_LONG, ErrorCode.BAD_REQUEST, ErrorCode.MODEL_FAILED})
"""Refusals that every instance would repeat."""
FULL = frozenset({ErrorCode.OVERLOADED, ErrorCode.BUSY})
UNCERTAIN = frozenset({ErrorCode.DEADLINE, ErrorCode.CONFLICT})
"""The instance may have the request, and can be asked."""
MAYBE_DELIVERED = UNCERTAIN | {ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL}
"""The submit call may have had an effect (UNAVAILABLE: the connection may have broken while it was under way)."""
ASK_AGAIN_S = 1.0
"""Between questions to an instance that does not say what it holds."""
LEDGER_EXPIRY_S = 2.0
"""After its dispatch was acknowledged: a report that names the request is lost, or was never sent."""
BACKOFF_S = 0.1
"""Pause for an instance that refused; it doubles with each refusal in a row."""
MAX_BACKOFF_S = 2.0
MAX_FAILURES = 3
"""Attempts at a request that failed inside instances, before it is given up."""


@dataclass(slots=True)
class Reconciliation:
    adopt: list[HeldRequest] = field(default_factory=list)
    """The instance owns these from now on, whatever was believed."""
    forget: list[TrackedRequest] = field(default_factory=list)
    """Believed to be there, and are not: they ended."""
    place_again: list[TrackedRequest] = field(default_factory=list)
    """Submit calls of unknown outcome that did not arrive (or may still)."""
    superseded: list[HeldRequest] = field(default_factory=list)
    """Older epochs of requests that have, or will have, another owner."""


def reconcile(
    table: RequestTable, instance_id: str, asked_s: float, held: list[HeldRequest], ended: set[str]
) -> Reconciliation:
    """Compares. `asked_s`: when the question was sent; `ended`: ids whose end was reported since."""
    result = Reconciliation()
    present: set[str] = set()
    for item in held:
        present.add(item.request_id)
        known = table.get(item.request_id)
        if item.request_id in ended:
            continue
        if known is None or is_owner(item.epoch, known, instance_id):
            result.adopt.append(item)
        elif item.epoch == known.epoch and known.instance_id == instance_id:
            known.is_confirmed = True
        elif item.epoch < known.epoch:
            present.discard(item.request_id)
            if known.instance_id != instance_id:
                result.superseded.append(item)
    for known in table.on_instance(instance_id):
        if known.request_id in present or known.since_s > asked_s:
            continue
        if known.state == RequestState.ASSIGNED:
            result.forget.append(known)
        elif known.state == RequestState.ASKING:
            result.place_again.append(known)
    return result


class Inquiries:
    """Asks instances what they hold, and goes by what they say."""

    def __init__(self, core: SchedulerCore) -> None:
        self.unheard: set[str] = set()
        """Live instances that did not say in time, at take-over, what they hold."""
        self._core = core

    def ask(self, instance_id: str, state: InstanceState, now: float) -> None:
        state.num_asks += 1
        self._core.say(AskHeld(instance_id, state.info.incarnation, now))

    def ask_if_idle(self, instance_id: str, state: InstanceState, now: float) -> None:
        if state.num_asks == 0 and now >= state.next_ask_s:
            self.ask(instance_id, state, now)

    def ask_everyone(self, now: float) -> None:
        for instance_id, state in self._core.cluster:
            self.ask(instance_id, state, now)

    def begin_serving(self) -> None:
        self.unheard = {name for name, state in self._core.cluster if state.is_alive and not state.has_answered}

    def give_up(self, instance_id: str) -> None:
        """It will not answer any more, and nothing that it held will go on there."""
        self.unheard.discard(instance_id)

    def confirm(self, request_id: str, now: float) -> None:
        """Only its last owner has told whose the request is; is it?"""
        tracked = self._core.life.requests.get(request_id)
        if tracked is not None and (owner := self._core.cluster.get(tracked.instance_id)) is not None:
            self.ask(tracked.instance_id, owner, now)

    def on_held(self, ask: AskHeld, held: list[HeldRequest] | None, now: float) -> None:
        instance_id, life = ask.instance_id, self._core.life
        state = self._core.cluster.get(instance_id)
        if state is None or state.info.incarnation != ask.incarnation:
            return
        if not state.is_alive:
            held = None  # it was declared dead meanwhile; should it come back, it will be asked again
        result = reconcile(life.requests, instance_id, ask.asked_s, held or [], state.ended_while_asking)
        state.num_asks -= 1
        if state.num_asks == 0:
            state.ended_while_asking.clear()
        for tracked in result.place_again:
            life.place_again(tracked, now, raise_epoch=True)
        if held is None:
            state.has_answered = False
            state.next_ask_s = now + ASK_AGAIN_S
            return
        state.has_answered = True
        self.unheard.discard(instance_id)
        for tracked in result.forget:
            # Whether it ended there, or went down with where it has moved to, its gateway knows.
            if not tracked.is_confirmed or self._may_have_moved(tracked, instance_id, now):
                self._core.migrations.lose([tracked], instance_id)
            else:
                life.forget(tracked)
        for item in result.adopt:
            life.adopt(item, instance_id, now)
        for item in result.superseded:
            life.supersede(item, instance_id)

    def _may_have_moved(self, tracked: TrackedRequest, instance_id: str, now: float) -> bool:
        """Whether the instance may have given the request away. A new leader does not know of whom decoders were named."""
        core = self._core
        is_handed_over = bool(tracked.decoder) or core.roles.is_prefill(instance_id)
        return is_handed_over or core.rescheduler.has_given(instance_id, now)

    def on_ended(self, request_id: str, instance_id: str, state: InstanceState, now: float) -> None:
        """A report says that a request has ended there."""
        life = self._core.life
        life.leave_ledger(request_id, instance_id)
        tracked = life.requests.get(request_id)
        if tracked is not None and tracked.older_owners.pop(instance_id, None) is not None:
            # The report names no epoch: it may be the older one that ended.
            if tracked.instance_id == instance_id:
                self.ask(instance_id, state, now)
            return
        if state.num_asks:
            state.ended_while_asking.add(request_id)
        if tracked is None or tracked.instance_id != instance_id:
            return
        if tracked.state == RequestState.DISPATCHING:
            tracked.has_ended = True
        else:
            life.forget(tracked)


class Delivery:
    """What becomes of a dispatch. Who refuses is left alone for a while."""

    def __init__(self, core: SchedulerCore) -> None:
        self._core = core

    def on_dispatched(self, answer: OnDispatched, now: float) -> None:
        request_id, instance_id, error = answer.request_id, answer.instance_id, answer.error
        life = self._core.life
        tracked = life.requests.get(request_id)
        state = self._core.cluster.get(instance_id)
        if tracked is None or tracked.state != RequestState.DISPATCHING:
            return
        if (tracked.instance_id, tracked.epoch) != (instance_id, answer.epoch):
            return
        if error is None:
            if state is not None:
                state.num_refusals = 0
            if request_id in self._core.dispatcher.ledger:
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
            state.load.takes_offline = False
            self._core.dispatcher.touch(instance_id)
        elif (
            state is not None and error.code != ErrorCode.LOADING
        ):  # such an answer comes late; others it does not concern
            self._back_off(instance_id, state, error.retry_after_s, now)
        if error.code in UNCERTAIN and state is not None:
            life.requests.move(tracked, RequestState.ASKING, instance_id, now)
            self._core.inquiries.ask(instance_id, state, now)
            return
        tracked.num_failures += error.code == ErrorCode.INTERNAL
        if tracked.num_failures >= MAX_FAILURES:
            life.end(tracked, FinishReason.ERROR, error, now)
        else:
            life.place_again(tracked, now, raise_epoch=error.code in MAYBE_DELIVERED)

    def expire(self, request_id: str) -> None:
        """No report has named the request in time: it is not in flight any more."""
        instance_id = self._core.dispatcher.ledger.remove(request_id)
        if instance_id is not None:
            self._core.dispatcher.touch(instance_id)

    def end_back_off(self, instance_id: str) -> None:
        state = self._core.cluster.get(instance_id)
        if state is not None:
            state.is_backing_off = False
            self._core.dispatcher.touch(instance_id)

    def _back_off(self, instance_id: str, state: InstanceState, retry_after_s: float, now: float) -> None:
        delay_s = max(retry_after_s, BACKOFF_S * 2**state.num_refusals)
        state.num_refusals = min(state.num_refusals + 1, 10)
        state.is_backing_off = True
        self._core.life.timers.set(("backoff", instance_id), now + min(MAX_BACKOFF_S, delay_s))
        self._core.dispatcher.touch(instance_id)
