"""What becomes of requests when instances die, answers get lost, or a new scheduler takes over.

An instance knows best what it holds. Its answer to `INSTANCE_HELD` is compared with what the scheduler believes
(`reconcile`); the same comparison rebuilds the view of a new leader, settles submit calls of unknown outcome, and repairs
what lost reports left behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.messages.requests import ErrorCode, HeldRequest
from shared.scheduling.actions import Action, AskHeld
from shared.scheduling.cluster import ClusterView, InstanceState
from shared.scheduling.lifecycle import RequestLifecycle
from shared.scheduling.migrations import MigrationBook, is_owner
from shared.scheduling.requests import RequestState, RequestTable, TrackedRequest
from shared.scheduling.rescheduling import Rescheduler

FINAL = frozenset({ErrorCode.TOO_LONG, ErrorCode.BAD_REQUEST})
"""Refusals that every instance would repeat."""
FULL = frozenset({ErrorCode.OVERLOADED, ErrorCode.BUSY})
UNCERTAIN = frozenset({ErrorCode.DEADLINE, ErrorCode.CONFLICT})
"""The instance may have the request, and can be asked."""
MAYBE_DELIVERED = UNCERTAIN | {ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL}
"""The submit call may have had an effect (UNAVAILABLE: the connection may have broken while it was under way)."""
ASK_AGAIN_S = 1.0
"""Between questions to an instance that does not say what it holds."""


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

    def __init__(
        self,
        cluster: ClusterView,
        life: RequestLifecycle,
        migrations: MigrationBook,
        rescheduler: Rescheduler,
        actions: list[Action],
    ) -> None:
        self.unheard: set[str] = set()
        """Live instances that did not say in time, at take-over, what they hold."""
        self._cluster = cluster
        self._life = life
        self._migrations = migrations
        self._rescheduler = rescheduler
        self._actions = actions

    def ask(self, instance_id: str, state: InstanceState, now: float) -> None:
        state.num_asks += 1
        self._actions.append(AskHeld(instance_id, state.info.incarnation, now))

    def ask_if_idle(self, instance_id: str, state: InstanceState, now: float) -> None:
        if state.num_asks == 0 and now >= state.next_ask_s:
            self.ask(instance_id, state, now)

    def ask_everyone(self, now: float) -> None:
        """See `AskEveryone`."""
        for instance_id, state in self._cluster:
            self.ask(instance_id, state, now)

    def begin_serving(self) -> None:
        """See `BeginServing`."""
        self.unheard = {name for name, state in self._cluster if state.is_alive and not state.has_answered}

    def give_up(self, instance_id: str) -> None:
        """It will not answer any more, and nothing that it held will go on there."""
        self.unheard.discard(instance_id)

    def confirm(self, request_id: str, now: float) -> None:
        """Only its last owner has told whose the request is; is it?"""
        tracked = self._life.requests.get(request_id)
        if tracked is not None and (owner := self._cluster.get(tracked.instance_id)) is not None:
            self.ask(tracked.instance_id, owner, now)

    def on_held(self, ask: AskHeld, held: list[HeldRequest] | None, now: float) -> None:
        """See `OnHeld`."""
        instance_id, life = ask.instance_id, self._life
        state = self._cluster.get(instance_id)
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
            if not tracked.is_confirmed or self._rescheduler.has_given(instance_id, now):
                self._migrations.lose([tracked], instance_id)
            else:
                life.forget(tracked)
        for item in result.adopt:
            life.adopt(item, instance_id, now)
        for item in result.superseded:
            life.supersede(item, instance_id)

    def on_ended(self, request_id: str, instance_id: str, state: InstanceState, now: float) -> None:
        """A report says that a request has ended there."""
        life = self._life
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
