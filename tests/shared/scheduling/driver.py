"""Drives the scheduler's core by hand: no bus, a clock that is moved."""

from __future__ import annotations

from typing import TypeVar

from shared.messages.requests import (
    ErrorCode,
    ErrorInfo,
    GenerationRequest,
    HeldRequest,
    LostRequest,
    RequestsLost,
)
from shared.runtime.settings import SchedulerSettings
from shared.scheduling.actions import (
    Action,
    AskHeld,
    Dispatch,
)
from shared.scheduling.calls import OnDispatched, OnHeld, OnRegistry, OnReport, OnTime, Submit
from shared.scheduling.core import SchedulerCore
from shared.scheduling.requests import RequestState
from tests.shared.scheduling.samples import make_info, make_report, make_request

A = TypeVar("A", bound=Action)


class Driver:
    """A core with a clock that stands still unless told; collects actions."""

    def __init__(self, **settings: object) -> None:
        self.core = SchedulerCore(SchedulerSettings(**settings), term=3)  # type: ignore[arg-type]
        self.now = 100.0
        self.sequences: dict[str, int] = {}
        self.log: list[Action] = []

    def take(self, kind: type[A]) -> list[A]:
        """Actions of a kind since they were last taken."""
        self.log += self.core.actions(self.now)
        taken = [action for action in self.log if isinstance(action, kind)]
        self.log = [action for action in self.log if not isinstance(action, kind)]
        return taken

    def up(self, instance_id: str, *models: str, heard: bool = True, **info: object) -> None:
        """A new instance that has answered and reported."""
        self.core.apply(OnRegistry(instance_id, make_info(instance_id, *models, **info)), self.now)  # type: ignore[arg-type]
        if heard:
            self.report(instance_id, incarnation=info.get("incarnation", "1"))
            for ask in self.take(AskHeld):
                self.core.apply(OnHeld(ask, []), self.now)

    def report(self, instance_id: str, **report: object) -> None:
        self.sequences[instance_id] = self.sequences.get(instance_id, 0) + 1
        message = make_report(instance_id, self.sequences[instance_id], **report)  # type: ignore[arg-type]
        self.core.apply(OnReport(message), self.now)

    def submit(self, request: GenerationRequest) -> ErrorInfo | None:
        return self.core.apply(Submit(request), self.now)

    def dispatches(self) -> dict[str, str]:
        """Request id to instance id of new dispatches, which are then accepted."""
        made = self.take(Dispatch)
        for dispatch in made:
            self.core.apply(OnDispatched.to(dispatch, None), self.now)
        return {dispatch.request.request_id: dispatch.instance_id for dispatch in made}

    def refuse(self, code: ErrorCode, retry_after_s: float = 0.0) -> Dispatch:
        """The single new dispatch, answered with an error."""
        (dispatch,) = self.take(Dispatch)
        self.core.apply(OnDispatched.to(dispatch, ErrorInfo(code, "no", retry_after_s=retry_after_s)), self.now)
        return dispatch

    def pass_time(self, seconds: float) -> None:
        """To each deadline on the way, as a timer would."""
        end = self.now + seconds
        while (wakeup := self.core.next_wakeup()) is not None and wakeup <= end:
            self.now = max(self.now, wakeup)
            self.core.apply(OnTime(), self.now)
            self.log += self.core.actions(self.now)
        self.now = end

    def state(self, request_id: str) -> RequestState | None:
        tracked = self.core.requests.get(request_id)
        return tracked.state if tracked else None


def held(request_id: str, epoch: int = 0, gateway_id: str = "g0") -> HeldRequest:
    return HeldRequest(
        request_id=request_id, gateway_id=gateway_id, epoch=epoch, model="m", num_tokens=10, running=True
    )


def running(driver: Driver, instance_id: str, *request_ids: str, gateway_id: str = "g0") -> None:
    """Requests that were dispatched to the instance and run there."""
    for request_id in request_ids:
        driver.submit(make_request(request_id, gateway_id=gateway_id))
        assert driver.dispatches() == {request_id: instance_id}
        driver.report(instance_id, admitted=[request_id])


def lost(*request_ids: str, instance_id: str = "a", epoch: int = 0) -> RequestsLost:
    return RequestsLost(instance_id, [LostRequest(request_id, epoch) for request_id in request_ids])
