"""What the scheduler's core wants done: plain data, carried out by the service."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages.migration import Rebalance
from shared.messages.requests import GenerationRequest, RequestsLost, TokenEntry


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Submit to the instance and answer with `SchedulerCore.on_dispatched`."""

    instance_id: str
    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class AskHeld:
    """Ask the instance what it holds and answer with `SchedulerCore.on_held`."""

    instance_id: str
    incarnation: str
    asked_s: float


@dataclass(frozen=True, slots=True)
class CancelAt:
    instance_id: str
    request_id: str
    epoch: int | None = None
    """Only in this epoch or a lower one; None: wherever it has moved to, in any epoch."""


@dataclass(frozen=True, slots=True)
class SendEntry:
    """A queued request ended here: tell its gateway."""

    gateway_id: str
    entry: TokenEntry


@dataclass(frozen=True, slots=True)
class NotifyLost:
    """Tell a gateway which of its requests went down with an instance."""

    gateway_id: str
    lost: RequestsLost


@dataclass(frozen=True, slots=True)
class InstanceLost:
    """For the log and metrics: an instance is gone, with so many requests on it or on their way to it."""

    instance_id: str
    reason: str
    """drained (as was wanted) | exited | vanished (from the registry) | restarted | silent"""
    num_requests: int


@dataclass(frozen=True, slots=True)
class ProbeSilence:
    """Find out whether the bus works, then call `declare_lost` (it does) or `grant_grace` (it does not)."""

    instance_ids: list[str]


@dataclass(frozen=True, slots=True)
class LeftQueue:
    """For metrics and traces: a request is not in this scheduler's hands any more. Times on the core's clock."""

    request: GenerationRequest
    outcome: str
    """dispatched | deadline | cancelled | refused | replaced (by a higher epoch) | found (on an instance)"""
    instance_id: str
    attempts: int
    num_ahead: int
    """Length of the queue when the request arrived."""
    submitted_s: float
    left_s: float
    """For dispatched ones: when the submit call that succeeded began."""


@dataclass(frozen=True, slots=True)
class SendRebalance:
    """Tell an instance whom to give requests to; nobody: no one any more."""

    instance_id: str
    rebalance: Rebalance


@dataclass(frozen=True, slots=True)
class Paired:
    """For the log and metrics: an instance gives requests away from now on."""

    instance_id: str
    rebalance: Rebalance
    freeness: float


@dataclass(frozen=True, slots=True)
class MoveEnded:
    """For metrics: a migration ended."""

    source_id: str
    destination_id: str
    reason: str
    """Why it failed, an `AbortReason`; empty: it did not."""


Action = (
    Dispatch
    | AskHeld
    | CancelAt
    | SendEntry
    | NotifyLost
    | InstanceLost
    | ProbeSilence
    | LeftQueue
    | SendRebalance
    | Paired
    | MoveEnded
)
