"""What becomes of requests when instances die, answers get lost, or a new scheduler takes over.

An instance knows best what it holds. Its answer to `INSTANCE_HELD` is compared with what the scheduler believes
(`reconcile`); the same comparison rebuilds the view of a new leader, settles submit calls of unknown outcome, and repairs
what lost reports left behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.messages.requests import (
    ErrorCode,
    HeldRequest,
    LostRequest,
    RequestsLost,
)
from shared.scheduling.requests import RequestState, RequestTable, TrackedRequest

FINAL = frozenset({ErrorCode.TOO_LONG, ErrorCode.BAD_REQUEST})
"""Refusals that every instance would repeat."""
FULL = frozenset({ErrorCode.OVERLOADED, ErrorCode.BUSY})
UNCERTAIN = frozenset({ErrorCode.DEADLINE, ErrorCode.CONFLICT})
"""The instance may have the request, and can be asked."""
MAYBE_DELIVERED = UNCERTAIN | {ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL}
"""The submit call may have had an effect (UNAVAILABLE: the connection may have broken while it was under way)."""


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
