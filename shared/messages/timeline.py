"""What happened to a request, as those who had it tell its gateway, and the timeline that is made of it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from shared.messages.requests import Epoch, Number, PeerId, RequestClass, Seconds

MAX_REQUESTS_LISTED = 200
LEAST_SLO_INTERVAL_S, MAX_SLO_INTERVAL_S = 10, 900
"""Bounds of the time for which missed objectives are explained."""


class EventKind(StrEnum):
    """What a gateway, the scheduler or an instance may tell; in brackets the `numbers` of each."""

    RECEIVED = "received"
    """By the gateway."""
    SUBMITTED = "submitted"
    """Its prompt is tokens, and on its way to a scheduler. (prompt tokens)"""
    QUEUED = "queued"
    """Queued at the scheduler, which does not dispatch it yet; `cause`: why. (requests ahead)"""
    DISPATCHED = "dispatched"
    """Dispatched to instance `place`; `cause`: why there. (freeness there, instances that serve the model)"""
    REFUSED = "refused"
    """By instance `place`; `cause`: an error's code."""
    ARRIVED = "arrived"
    """On an instance, where it waits. (objective for the time to first token, likewise per output token, requests that wait
    before it)"""
    ADMITTED = "admitted"
    """Has row and blocks, and its first step is planned. (tokens whose KV was there, tokens to compute)"""
    PREEMPTED = "preempted"
    """Row and blocks are another's; `cause`: memory | rows | failure. (tokens that had been computed, of them those with a
    checkpoint)"""
    RESTORING = "restoring"
    """Its KV is copied back from host memory. (blocks)"""
    RESTORED = "restored"
    SUSPENDED = "suspended"
    """Its step stopped between two layers, for an online request."""
    RESUMED = "resumed"
    """`cause`: discarded, where its step is to be computed again."""
    FIRST_TOKEN = "first_token"
    """(execution time charged so far)"""
    DECODE_RESUMED = "decode_resumed"
    """Its first token after a preemption, a move or a loss. (execution time charged so far)"""
    DELIVERED = "delivered"
    """Its first token is at its gateway."""
    MIGRATING = "migrating"
    """Its KV is being copied to instance `place` while it goes on; `cause`: balance | drain."""
    DETACHED = "detached"
    """It is out of its batch, and pauses until the other instance has it."""
    MOVED = "moved"
    """It is this instance's, from `place`. (tokens whose KV came with it)"""
    MIGRATION_ABORTED = "migration_aborted"
    """The move to `place` was given up; `cause`: an `AbortReason`."""
    BACKED_UP = "backed_up"
    """Instance `place` keeps copies of its KV from now on, and goes on with it if this one dies."""
    LOST = "lost"
    """Its gateway places it again: instance `place` does not go on with it; `cause`: why not. (output tokens so far)"""
    ENDED = "ended"
    """`cause`: a `FinishReason`. On an instance: (execution time charged, output tokens)"""


Text = Annotated[str, msgspec.Meta(max_length=256)]


class RequestEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    request_id: str
    epoch: Epoch
    kind: EventKind
    at_s: Seconds
    """Unix time; before it is sent, on the clock of who tells it."""
    cause: Text = ""
    place: PeerId = ""
    numbers: tuple[Number, ...] = ()
    """What they are depends on the kind."""


class RequestEvents(msgspec.Struct, frozen=True, array_like=True):
    """Instance or scheduler to gateway, some times a second at most: what happened to its requests."""

    sender: PeerId
    events: list[RequestEvent]


class Phase(StrEnum):
    """Phase in which a request spends time: it is in one of these at each moment."""

    GATEWAY = "gateway"
    """Read, checked, tokenised."""
    QUEUE = "queue"
    """Waits for the scheduler to find it an instance."""
    DISPATCH = "dispatch"
    """On its way to the instance."""
    INSTANCE_QUEUE = "instance queue"
    PREFILL = "prefill"
    """Its prompt is computed: execution time."""
    PREFILL_WAIT = "prefill, others' steps"
    """What other requests' parts of these steps, and steps between them, take."""
    DELIVERY = "delivery"
    """A token's way from the instance to the gateway."""
    DECODE = "decode"
    DECODE_WAIT = "decode, others' steps"
    PREEMPTED = "preempted"
    RECOMPUTE = "recompute"
    """What was lost by a preemption."""
    RESTORE = "restore"
    """KV from host memory."""
    SUSPENDED = "suspended"
    MOVE = "move"
    """It stands still between two instances."""
    RESCUE = "rescue"
    """Phase from the loss of its instance to the next token from another."""


class TimelineEvent(msgspec.Struct, kw_only=True):
    kind: EventKind
    after_s: float
    """Since the request's arrival; 0 where another's clock is behind."""
    teller: str
    """Id of the gateway, scheduler or instance."""
    text: str
    cause: str = ""
    place: str = ""
    numbers: tuple[float, ...] = ()


class TimelinePhase(msgspec.Struct, frozen=True):
    """One stretch of time in one phase; those of a timeline follow each other without gaps."""

    phase: Phase
    begin_s: float
    """Since the request's arrival."""
    end_s: float
    where: str = ""
    """The instance."""


class Part(msgspec.Struct, frozen=True):
    phase: Phase
    seconds: float


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """One that the request had. The parts make up `measured_s` (of the time per output token: that times the tokens after
    the first), the largest first."""

    name: str
    """ttft | tpot"""
    objective_s: float
    measured_s: float
    is_met: bool
    parts: list[Part]
    text: str
    is_default: bool = False
    """Whether it is the instance's default: neither request nor model names one."""


class SequenceTimeline(msgspec.Struct, kw_only=True):
    """One sequence of a request (`n` makes several)."""

    id: str
    request_id: str
    """Id of the answer that it is a part of."""
    http_request_id: str
    model: str
    request_class: RequestClass
    gateway_id: str
    state: str
    """The phase it is in, or how it ended."""
    is_over: bool
    arrived_s: float
    """Unix time."""
    duration_s: float
    """So far, if it is not over."""
    ttft_s: float | None
    prompt_tokens: int
    output_tokens: int
    instance_id: str
    """The last that had it."""
    num_preemptions: int
    num_moves: int
    num_losses: int
    objectives: list[Objective]
    """None while it runs."""
    num_left_out: int = 0
    """Events that there was no room to keep."""
    events: list[TimelineEvent] = []
    """Events in order; a list of requests has neither events nor phases."""
    phases: list[TimelinePhase] = []


class RequestTimelines(msgspec.Struct):
    requests: list[SequenceTimeline]


class MissedObjective(msgspec.Struct, frozen=True, kw_only=True):
    """How one objective of one model was missed, over the requests that ended in the interval."""

    model: str
    name: str
    """ttft | tpot"""
    num_judged: int
    num_missed: int
    measured_s: float
    """Mean of those that missed; likewise `parts`."""
    objective_s: float
    """Mean of all that were judged."""
    parts: list[Part]
    """Seconds a request. They make up the time that the objective is about."""
    examples: list[str]
    """Ids of the last ones that missed."""
    num_default: int = 0
    """How many had the default objective, as neither they nor their model name one."""


class SloExplanation(msgspec.Struct, frozen=True):
    interval_s: float
    objectives: list[MissedObjective]


class FindTimeline(msgspec.Struct, frozen=True, tag=True):
    request_id: str


class ListTimelines(msgspec.Struct, frozen=True, tag=True):
    limit: int
    model: str = ""
    """Empty: of all."""
    is_missed: bool = False
    """Those alone that missed an objective."""
    is_open: bool = False
    """Those alone that run."""


class ExplainSlo(msgspec.Struct, frozen=True, tag=True):
    interval_s: Seconds


class AskGateways(msgspec.Struct, frozen=True):
    """Gateway to all gateways, of which each knows its own requests alone."""

    asker_id: Annotated[PeerId, msgspec.Meta(min_length=1)]
    number: int
    """Number of the question among the asker's."""
    question: FindTimeline | ListTimelines | ExplainSlo


class ToldByGateway(msgspec.Struct, frozen=True):
    """Answer to the asker; empty where the gateway knows of nothing."""

    gateway_id: PeerId
    number: int
    requests: list[SequenceTimeline] = []
    objectives: list[MissedObjective] = []
