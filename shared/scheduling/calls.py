"""All that may change the scheduler's core, as plain data: `SchedulerCore.apply(call, now)`.

A host that records or replays does so once, for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from shared.messages.batches import GrantQuery, GrantReply
from shared.messages.cluster import ExecutionStatistics, InstanceExited, InstanceInfo, LoadReport
from shared.messages.requests import ErrorInfo, GenerationRequest, HeldRequest
from shared.recording import Call as AnyCall
from shared.scheduling.actions import AskHeld, Dispatch

if TYPE_CHECKING:
    from shared.scheduling.core import SchedulerCore

R_co = TypeVar("R_co", covariant=True)


class Call(AnyCall, Generic[R_co], frozen=True):
    """`R_co`: what it returns."""

    def on(self, core: SchedulerCore, now: float) -> R_co:
        """Carries it out."""
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------------- gateways


class Submit(Call[ErrorInfo | None], frozen=True):
    """Queues a request; None is acceptance. One that is known in this epoch or a higher one is accepted with no effect; a
    lower epoch is replaced."""

    request: GenerationRequest

    def on(self, core: SchedulerCore, now: float) -> ErrorInfo | None:
        return core.intake.submit(self.request, now)


class Cancel(Call[None], frozen=True):
    request_id: str

    def on(self, core: SchedulerCore, now: float) -> None:
        core.intake.cancel(self.request_id, now)


class Grant(Call[GrantReply], frozen=True):
    """How many offline tokens a gateway may submit."""

    query: GrantQuery

    def on(self, core: SchedulerCore, now: float) -> GrantReply:
        return core.intake.grant(self.query, now)


# --------------------------------------------------------------------------------------- models and statistics


class OnModel(Call[None], frozen=True):
    """The operator added (or changed) a model, or removed it: what waits for it ends."""

    model: str
    is_known: bool

    def on(self, core: SchedulerCore, now: float) -> None:
        core.on_model(self.model, self.is_known, now)


class TakeExecutionStatistics(Call[list[ExecutionStatistics]], frozen=True):
    """Those that changed since the last call, to be published about once a second; all for an instance that is new. From now
    on the queue goes by them."""

    def on(self, core: SchedulerCore, now: float) -> list[ExecutionStatistics]:
        return core.take_execution_statistics()


class LookAtScale(Call[None], frozen=True):
    """Whether there should be more instances, or fewer, about once a second. `replicas`: of the models that are to be on so
    many instances."""

    replicas: dict[str, int]

    def on(self, core: SchedulerCore, now: float) -> None:
        core.look_at_scale(self.replicas, now)


class OnScaled(Call[None], frozen=True):
    """What placement said to a `ScalingAction`: the instances it released, or None: that it did not carry it out, or did not
    answer in time (the effect may still come, and is seen then)."""

    released: list[str] | None

    def on(self, core: SchedulerCore, now: float) -> None:
        core.scaler.answered(self.released, now)


# --------------------------------------------------------------------------------------------------- instances


class OnRegistry(Call[None], frozen=True):
    """The instance's entry was written, or has vanished (None)."""

    instance_id: str
    info: InstanceInfo | None

    def on(self, core: SchedulerCore, now: float) -> None:
        core.membership.on_registry(self.instance_id, self.info, now)


class OnReport(Call[None], frozen=True):
    report: LoadReport

    def on(self, core: SchedulerCore, now: float) -> None:
        core.on_report(self.report, now)


class OnExited(Call[None], frozen=True):
    exited: InstanceExited

    def on(self, core: SchedulerCore, now: float) -> None:
        core.membership.on_exited(self.exited, now)


# ------------------------------------------------------------------------------------------ answers to actions


class OnDispatched(Call[None], frozen=True):
    """The outcome of a `Dispatch`; without an error it was accepted."""

    instance_id: str
    request_id: str
    epoch: int
    error: ErrorInfo | None

    @classmethod
    def to(cls, dispatch: Dispatch, error: ErrorInfo | None) -> OnDispatched:
        return cls(dispatch.instance_id, dispatch.request.request_id, dispatch.request.epoch, error)

    def on(self, core: SchedulerCore, now: float) -> None:
        core.delivery.on_dispatched(self, now)


class OnHeld(Call[None], frozen=True):
    """What the instance that was asked holds; None: it did not say in time."""

    ask: AskHeld
    held: list[HeldRequest] | None

    def on(self, core: SchedulerCore, now: float) -> None:
        core.inquiries.on_held(self.ask, self.held, now)


class DeclareLost(Call[None], frozen=True):
    """The bus works, so instances that are silent still are dead (`ProbeSilence`)."""

    instance_ids: list[str]

    def on(self, core: SchedulerCore, now: float) -> None:
        core.membership.declare_lost(self.instance_ids, now)


class GrantGrace(Call[None], frozen=True):
    """The bus did not work: nobody's silence or refusal of that time says anything."""

    def on(self, core: SchedulerCore, now: float) -> None:
        core.membership.grant_grace(now)


# ------------------------------------------------------------------------------------------- take-over and time


class AskEveryone(Call[None], frozen=True):
    """Begins the rebuilding of the view: what do the instances of the registry hold?"""

    def on(self, core: SchedulerCore, now: float) -> None:
        core.inquiries.ask_everyone(now)


class BeginServing(Call[None], frozen=True):
    """Ends the rebuilding. Whoever has not answered may hold any request, in an epoch that the last leader raised; so until
    it has, what is submitted is placed in an epoch of this term alone."""

    def on(self, core: SchedulerCore, now: float) -> None:
        core.inquiries.begin_serving()


class OnTime(Call[None], frozen=True):
    """Deadlines: when `SchedulerCore.next_wakeup` says so."""

    def on(self, core: SchedulerCore, now: float) -> None:
        core.on_time(now)
