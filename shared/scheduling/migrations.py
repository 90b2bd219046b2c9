"""What load reports say of requests that moved from one instance to another.

Both ends tell of a move: the destination that it took the request over (`migrated_in`), the source how the move ended
(`migrations`). The two come in any order, and either may be lost. As the epoch grows with each owner, the first that tells
is right, and the other adds nothing. What only the source has told must be confirmed by the destination in time, or that is
asked what it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.messages.cluster import MigrationOutcome
from shared.messages.migration import AbortReason
from shared.messages.requests import HeldRequest, LostRequest, RequestsLost
from shared.scheduling.actions import MigrationEnded, NotifyLost
from shared.scheduling.requests import RequestState, TrackedRequest

if TYPE_CHECKING:
    from shared.scheduling.core import SchedulerCore

CONFIRM_S = 2.0
"""Time from the word of the source to that of the destination, whose reports are at most a second apart."""


class MigrationBook:
    def __init__(self, core: SchedulerCore) -> None:
        self._core = core

    def migrated_in(self, held: HeldRequest, instance_id: str, now: float) -> None:
        """The instance took a request over."""
        self._core.life.end_promise(held.request_id)
        tracked = self._core.life.requests.get(held.request_id)
        if tracked is None or is_owner(held.epoch, tracked, instance_id):
            self._core.life.adopt(held, instance_id, now)
        elif held.epoch < tracked.epoch:
            self._core.life.supersede(held, instance_id)
        elif tracked.instance_id == instance_id:
            tracked.is_confirmed = True
            self._core.life.timers.discard(("confirm", held.request_id))

    def ended(self, outcome: MigrationOutcome, source_id: str, now: float) -> None:
        """A migration out of the instance ended. Known requests only: nothing else is said of where it came from."""
        self._core.say(MigrationEnded(source_id, outcome.destination_id, "" if outcome.is_migrated else outcome.reason))
        self._core.life.end_promise(outcome.request_id)
        tracked = self._core.life.requests.get(outcome.request_id)
        if tracked is None:
            return
        if not outcome.is_migrated:
            if outcome.reason != AbortReason.ENDED and is_owner(outcome.epoch, tracked, source_id):
                # It went on at the source, which believes the destination dead; that may run it all the same.
                self._core.life.change_owner(tracked, source_id, outcome.epoch, now, is_hand_over=False)
            return
        tracked.older_owners.pop(source_id, None)
        destination_id = outcome.destination_id
        if not is_owner(outcome.epoch, tracked, destination_id):
            return
        self._core.life.change_owner(tracked, destination_id, outcome.epoch, now)
        state = self._core.cluster.get(destination_id)
        if state is None or not state.is_alive:
            self.lose([tracked], destination_id)
        else:
            tracked.is_confirmed = False
            self._core.life.timers.set(("confirm", tracked.request_id), now + CONFIRM_S)

    def lose(self, assigned: list[TrackedRequest], instance_id: str) -> None:
        """They were on the instance and are not: their gateways place them again, knowing the tokens so far."""
        for tracked in assigned:
            assert tracked.state == RequestState.ASSIGNED
            self._core.life.forget(tracked)
        for gateway_id, lost in group_by_gateway(instance_id, assigned).items():
            self._core.say(NotifyLost(gateway_id, lost))


def is_owner(epoch: int, known: TrackedRequest, instance_id: str) -> bool:
    """Whether a known request that an instance holds in `epoch` is that instance's, other than was believed. Where it moves,
    each owner's epoch is higher than that of the one before, so whoever tells of it first is right."""
    if known.state == RequestState.QUEUED:
        # The epoch in the queue is for a dispatch that has not happened; no other instance may have a newer one.
        return epoch >= max([known.gateway_epoch, *known.older_owners.values()])
    if known.state == RequestState.ASKING and known.instance_id == instance_id:
        return epoch >= known.epoch
    return epoch > known.epoch


def group_by_gateway(instance_id: str, lost: list[TrackedRequest]) -> dict[str, RequestsLost]:
    """One message a gateway for the requests that went down with an instance."""
    groups: dict[str, list[LostRequest]] = {}
    for known in lost:
        groups.setdefault(known.gateway_id, []).append(LostRequest(known.request_id, known.epoch))
    return {gateway_id: RequestsLost(instance_id, requests) for gateway_id, requests in groups.items()}
