"""What the scheduler's core wants done: plain data, carried out by its host."""

from __future__ import annotations

import msgspec

from shared.messages.cluster import Role
from shared.messages.migration import MigrationReason, Rebalance
from shared.messages.requests import GenerationRequest, RequestsLost, TokenEntry


class Dispatch(msgspec.Struct, frozen=True, tag=True):
    """Submit to the instance and answer with `OnDispatched`."""

    instance_id: str
    request: GenerationRequest
    why: str = ""
    """It goes there."""
    freeness: float = 0.0
    """Freeness of the instance when it was chosen; infinite where it idles."""
    num_serving: int = 0
    """Instances that serve the model."""


class Waits(msgspec.Struct, frozen=True, tag=True):
    """Event for timelines: a request is in the queue, and cannot be dispatched at once."""

    gateway_id: str
    request_id: str
    epoch: int
    num_ahead: int
    """Length of the queue when it came."""
    why: str


class AskHeld(msgspec.Struct, frozen=True, tag=True):
    """Ask the instance what it holds and answer with `OnHeld`."""

    instance_id: str
    incarnation: str
    asked_s: float


class CancelAt(msgspec.Struct, frozen=True, tag=True):
    instance_id: str
    request_id: str
    epoch: int | None = None
    """Only in this epoch or a lower one; None: wherever it has moved to, in any epoch."""


class SendEntry(msgspec.Struct, frozen=True, tag=True):
    """A queued request ended here: tell its gateway."""

    gateway_id: str
    entry: TokenEntry


class NotifyLost(msgspec.Struct, frozen=True, tag=True):
    """Tell a gateway which of its requests went down with an instance."""

    gateway_id: str
    lost: RequestsLost


class InstanceLost(msgspec.Struct, frozen=True, tag=True):
    """Event for the log and metrics: an instance is gone, with so many requests on it or on their way to it."""

    instance_id: str
    reason: str
    """drained (as was wanted) | exited | vanished (from the registry) | restarted | silent"""
    num_requests: int


class ProbeSilence(msgspec.Struct, frozen=True, tag=True):
    """Find out whether the bus works, then apply `DeclareLost` (it does) or `GrantGrace` (it does not)."""

    instance_ids: list[str]


class LeftQueue(msgspec.Struct, frozen=True, tag=True):
    """Event for metrics and traces: a request is not in this scheduler's hands any more. Times on the core's clock."""

    request: GenerationRequest
    outcome: str
    """dispatched | deadline | cancelled | refused | replaced (by a higher epoch) | found (on an instance) | finished (has
    all that fits what serves its model)"""
    instance_id: str
    attempts: int
    num_ahead: int
    """Length of the queue when the request arrived."""
    submitted_s: float
    left_s: float
    """Start of the submit call that succeeded, for dispatched ones."""


class SendRebalance(msgspec.Struct, frozen=True, tag=True):
    """Tell an instance whom to give requests to; nobody: no one any more."""

    instance_id: str
    rebalance: Rebalance


class TellRole(msgspec.Struct, frozen=True, tag=True):
    """Tell an instance what role it has from now on, for whoever looks on and for the next leader."""

    instance_id: str
    role: Role


class Paired(msgspec.Struct, frozen=True, tag=True):
    """Event for the log and metrics: an instance gives requests away from now on."""

    instance_id: str
    destinations: list[str]
    reason: MigrationReason
    freeness: float


class MigrationEnded(msgspec.Struct, frozen=True, tag=True):
    """Event for metrics: a migration ended."""

    source_id: str
    destination_id: str
    reason: str
    """Why it failed, an `AbortReason`; empty: it did not."""


class ScaleUp(msgspec.Struct, frozen=True, tag=True):
    """Ask placement for so many instances; answer this one and the next two with `OnScaled`."""

    num_instances: int


class DrainAction(msgspec.Struct, frozen=True, tag=True):
    instance_id: str


class CancelDrain(msgspec.Struct, frozen=True, tag=True):
    instance_id: str


ScalingAction = ScaleUp | DrainAction | CancelDrain

Action = (
    Dispatch
    | AskHeld
    | CancelAt
    | SendEntry
    | NotifyLost
    | InstanceLost
    | ProbeSilence
    | LeftQueue
    | Waits
    | SendRebalance
    | Paired
    | TellRole
    | MigrationEnded
    | ScalingAction
)
