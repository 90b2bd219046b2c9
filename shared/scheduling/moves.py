"""What load reports say of requests that moved from one instance to another.

Both ends tell of a move: the destination that it took the request over (`moved_in`), the source how the move ended
(`moves`). The two come in any order, and either may be lost. As the epoch grows with each owner, the first that tells is
right, and the other adds nothing. What only the source has told must be confirmed by the destination in time, or that is
asked what it holds.
"""

from __future__ import annotations

from shared.messages.cluster import MoveOutcome
from shared.messages.migration import AbortReason
from shared.messages.requests import HeldRequest
from shared.scheduling.actions import MoveEnded, NotifyLost
from shared.scheduling.cluster import ClusterView
from shared.scheduling.lifecycle import RequestLifecycle
from shared.scheduling.recovery import group_by_gateway, is_owner
from shared.scheduling.requests import RequestState, TrackedRequest

CONFIRM_S = 2.0
"""From the word of the source to that of the destination, whose reports are at most a second apart."""


class MoveBook:
    def __init__(self, life: RequestLifecycle, cluster: ClusterView) -> None:
        self._life = life
        self._cluster = cluster

    def moved_in(self, held: HeldRequest, instance_id: str, number: int, now: float) -> None:
        """The instance took a request over; `number`: its arrival number if it is new here."""
        tracked = self._life.requests.get(held.request_id)
        if tracked is None or is_owner(held.epoch, tracked, instance_id):
            self._life.adopt(held, instance_id, number, now)
        elif held.epoch < tracked.epoch:
            self._life.supersede(held, instance_id)
        elif tracked.instance_id == instance_id:
            tracked.is_confirmed = True
            self._life.timers.discard(("confirm", held.request_id))

    def ended(self, outcome: MoveOutcome, source_id: str, now: float) -> None:
        """A migration out of the instance ended. Known requests only: nothing else is said of where it came from."""
        self._life.actions.append(
            MoveEnded(source_id, outcome.destination_id, "" if outcome.is_moved else outcome.reason)
        )
        tracked = self._life.requests.get(outcome.request_id)
        if tracked is None:
            return
        if not outcome.is_moved:
            if outcome.reason != AbortReason.ENDED and is_owner(outcome.epoch, tracked, source_id):
                # It went on at the source, which believes the destination dead; that may run it all the same.
                self._life.change_owner(tracked, source_id, outcome.epoch, now, is_hand_over=False)
            return
        tracked.older_owners.pop(source_id, None)
        destination_id = outcome.destination_id
        if not is_owner(outcome.epoch, tracked, destination_id):
            return
        self._life.change_owner(tracked, destination_id, outcome.epoch, now)
        state = self._cluster.get(destination_id)
        if state is None or not state.is_alive:
            self.lose([tracked], destination_id)
        else:
            tracked.is_confirmed = False
            self._life.timers.set(("confirm", tracked.request_id), now + CONFIRM_S)

    def lose(self, assigned: list[TrackedRequest], instance_id: str) -> None:
        """They were on the instance and are not: their gateways place them again, knowing the tokens so far."""
        for tracked in assigned:
            assert tracked.state == RequestState.ASSIGNED
            self._life.forget(tracked)
        for gateway_id, lost in group_by_gateway(instance_id, assigned).items():
            self._life.actions.append(NotifyLost(gateway_id, lost))
