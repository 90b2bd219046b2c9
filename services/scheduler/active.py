"""One term as the active scheduler: feeds the core with what arrives on the bus, and carries out its actions.

Lives from the gain of the lease to its loss and is then thrown away, queue and all: the next leader learns from the
instances what they hold, and from the gateways what they still want.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

from opentelemetry.trace import use_span

from services.scheduler.observer import Observer
from shared.bus.interface import Bus, BusError, ServiceError, Subscription
from shared.messages.batches import GrantQuery, GrantReply
from shared.messages.catalogue import (
    EXECUTION_STATISTICS,
    GATEWAY_FRAMES,
    GATEWAY_LOST,
    INSTANCE_CANCEL,
    INSTANCE_EXITED,
    INSTANCE_HELD,
    INSTANCE_REBALANCE,
    INSTANCE_ROLE,
    INSTANCE_SUBMIT,
    LOAD_REPORTS,
    PLACEMENT_REQUESTS,
    SCHEDULER_ANNOUNCE,
    SCHEDULER_CANCEL,
    SCHEDULER_DEMAND,
    SCHEDULER_GRANT,
    SCHEDULER_STATISTICS,
    SCHEDULER_SUBMIT,
)
from shared.messages.cluster import (
    DemandReport,
    ExecutionStatistics,
    ExecutionStatisticsReport,
    InstanceExited,
    InstanceInfo,
    LeaseHolder,
    LoadReport,
    ModelSpec,
    SetRole,
    StatisticsReport,
)
from shared.messages.requests import (
    Accepted,
    Cancel,
    ErrorCode,
    ErrorInfo,
    GenerationRequest,
    ListHeldRequests,
    TokenFrame,
)
from shared.messages.timeline import EventKind, RequestEvent
from shared.recording import file_writer
from shared.runtime.request_events import EventPost
from shared.runtime.settings import SchedulerSettings
from shared.runtime.tasks import TaskSet
from shared.scheduling import calls
from shared.scheduling.actions import (
    Action,
    AskHeld,
    CancelAt,
    CancelDrain,
    Dispatch,
    DrainAction,
    InstanceLost,
    LeftQueue,
    MigrationEnded,
    NotifyLost,
    Paired,
    ProbeSilence,
    ScaleUp,
    ScalingAction,
    SendEntry,
    SendRebalance,
    TellRole,
    Waits,
)
from shared.scheduling.calls import (
    AskEveryone,
    BeginServing,
    Call,
    DeclareLost,
    Grant,
    GrantGrace,
    LookAtScale,
    OnDispatched,
    OnExited,
    OnHeld,
    OnModel,
    OnRegistry,
    OnReport,
    OnScaled,
    OnTime,
    Submit,
    TakeExecutionStatistics,
)
from shared.scheduling.core import SchedulerCore
from shared.scheduling.dispatching import NOBODY_SERVES
from shared.scheduling.recording import Configuration, recorded
from shared.scheduling.request_rows import RequestRecorder
from shared.scheduling.scaling import CALL_TIMEOUT_S, call_of

logger = logging.getLogger(__name__)

R = TypeVar("R")

DISPATCH_TIMEOUT_S = 2.0
HELD_TIMEOUT_S = 1.0
"""Also what an instance that does not answer may add to a take-over."""
PICKS_AT_ONCE = 1
"""Dispatches that are decided on before they are sent."""
SLICE_S = 0.001
MAX_SLICE_S = 0.02
"""How long dispatches are decided on and sent until the loop does what else there is."""
STATISTICS_INTERVAL_S = 1.0
DEMAND_INTERVAL_S = 0.1
"""Between two tellings that somebody waits for a model that nobody serves."""
TELL_TIMEOUT_S = 2.0
LAST_TELL_TIMEOUT_S = 0.3
"""Time for the last word at the end of the term."""


class ActiveScheduler:
    def __init__(
        self,
        bus: Bus,
        settings: SchedulerSettings,
        info: LeaseHolder,
        observer: Observer,
        is_leader: Callable[[], bool],
        inherited: Mapping[str, ExecutionStatistics],
        models: Mapping[str, ModelSpec],
        former: RequestRecorder | None = None,
    ) -> None:
        """`info`: this scheduler and its term. `is_leader`: whether the lease may be used at this moment. `inherited`: the
        last leader's execution statistics. `models`: the MODELS bucket, as it is at each moment. `former`: with what the
        service monitor was not told in this process's last term."""
        self._bus = bus
        self._info = info
        self._observer = observer
        self._is_leader = is_leader
        self._core = _core(settings, info, inherited)
        self.recorder = self._core.life.recorder
        self.recorder.is_on = True
        if former is not None:
            self.recorder.take_over(former)
        self._events = EventPost(bus, info.scheduler_id)
        self._subscriptions: list[Subscription] = []
        self._tasks = TaskSet()
        self._calls: set[asyncio.Future[Accepted]] = set()
        """Submit calls under way."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._told_demand_s = -math.inf
        """Time at which placement was last told of requests for models on demand."""
        self._is_demand_due = False
        self._is_turn_due = False
        self._num_reports = 0
        """Since the turn began."""
        self._acted_s = 0.0
        """Time at which the last actions were carried out."""
        self._models = models
        self._is_closed = False
        self._telling: asyncio.Task[None] | None = None
        self.is_serving = False

    async def open(self, instances: Mapping[str, InstanceInfo]) -> None:
        """Rebuilds the view of who holds what, then serves. `instances`: the registry as it stands; changes after this
        call come by `on_registry`."""
        for instance_id, info in instances.items():
            self._observer.on_registry(instance_id, info)
            self._apply(OnRegistry(instance_id, info))
        self._subscriptions.append(await self._bus.subscribe(LOAD_REPORTS, self._on_report))
        self._subscriptions.append(await self._bus.subscribe(SCHEDULER_CANCEL, self._on_cancel))
        self._subscriptions.append(await self._bus.subscribe(INSTANCE_EXITED, self._on_exited))
        started_s = self._bus.now()
        self._apply(AskEveryone())
        self._act()
        await self._tasks.wait_all(2 * HELD_TIMEOUT_S)
        self._apply(BeginServing())
        self._subscriptions.append(await self._bus.serve(SCHEDULER_SUBMIT, self._submit))
        self._subscriptions.append(await self._bus.serve(SCHEDULER_GRANT, self._grant))
        self._tasks.start(self._publish_statistics())
        self._telling = self._tasks.start(self._tell_requests())
        self.is_serving = True
        self._bus.publish(SCHEDULER_ANNOUNCE, self._info)
        logger.info(
            "serving: %d requests are held by %d instances (asked in %.0f ms)",
            len(self._core.requests),
            len(instances),
            1000 * (self._bus.now() - started_s),
        )

    async def close(self, timeout_s: float) -> None:
        """Takes nothing more; waits so long for submit calls under way. May be called again to wait longer."""
        self._is_closed = True
        for subscription in reversed(self._subscriptions):
            await subscription.stop()
        self._subscriptions = []
        if self._timer is not None:
            self._timer.cancel()
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
            await self._tell(LAST_TELL_TIMEOUT_S)
        self._tasks.cancel_all()
        self._events.flush()
        if self._calls:
            await asyncio.wait(self._calls, timeout=timeout_s)

    # ------------------------------------------------------------------------------------------------- inputs

    def _apply(self, call: Call[R]) -> R:
        return self._core.apply(call, self._bus.now())

    def _submit(self, request: GenerationRequest) -> Accepted:
        self._check_leader()
        try:
            GATEWAY_FRAMES.at(gateway_id=request.gateway_id)
        except ValueError as error:
            raise ServiceError.of(ErrorCode.BAD_REQUEST, str(error), "gateway_id") from None
        refused = self._apply(Submit(request))
        self._act_soon()
        if refused is not None:
            self._observer.refused.labels(refused.code).inc()
            raise ServiceError(refused)
        return Accepted(request.request_id)

    def _grant(self, query: GrantQuery) -> GrantReply:
        self._check_leader()
        reply = self._apply(Grant(query))
        self._observer.on_granted(reply)
        return reply

    def _check_leader(self) -> None:
        if not self._is_leader() or self._is_closed:
            raise ServiceError.of(ErrorCode.NOT_LEADER, f"{self._info.scheduler_id} is not the active scheduler now")

    def on_model(self, model: str, is_known: bool) -> None:
        self._apply(OnModel(model, is_known))
        self._act()

    def on_registry(self, instance_id: str, info: InstanceInfo | None) -> None:
        self._observer.on_registry(instance_id, info)
        self._apply(OnRegistry(instance_id, info))
        self._act_soon()

    def on_reconnect(self) -> None:
        self._apply(GrantGrace())
        self._act()

    def _on_report(self, report: LoadReport) -> None:
        self._apply(OnReport(report))
        self._num_reports += 1
        self._act_soon()

    def _on_cancel(self, cancel: Cancel) -> None:
        self._apply(calls.Cancel(cancel.request_id))
        self._act()

    def _on_exited(self, exited: InstanceExited) -> None:
        self._apply(OnExited(exited))
        self._act()

    def _on_timer(self) -> None:
        self._timer = None
        self._apply(OnTime())
        self._act()

    # ------------------------------------------------------------------------------------------------ actions

    def _act_soon(self) -> None:
        """Reports come by the ten thousand a second: what they lead to is done once for all that came in together."""
        if not self._is_turn_due:
            self._is_turn_due = True
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._is_turn_due = False
        self._observer.reports.inc(self._num_reports)
        self._num_reports = 0
        self._act()

    def _act(self) -> None:
        """Dispatches go out as they are decided on, and other work of the loop comes between many of them; but they get as
        much of its time as that, so that reports that are late delay no dispatch for long."""
        is_anybody_missing = False
        began_s = self._bus.now()
        until_s = began_s + min(MAX_SLICE_S, max(SLICE_S, began_s - self._acted_s))
        while True:
            for action in self._core.actions(self._bus.now()):
                is_anybody_missing |= isinstance(action, Waits) and action.why == NOBODY_SERVES
                # After the end of the term only outcomes of calls that were under way come in, to be counted.
                if not self._is_closed or isinstance(action, LeftQueue):
                    self._carry_out(action)
            if not self._core.has_more:
                break
            if self._bus.now() >= until_s:
                self._act_soon()
                break
        self._acted_s = self._bus.now()
        if not self._is_closed:
            if self._core.has_unread:
                self._act_soon()
            self._set_timer()
            if is_anybody_missing and not self._is_demand_due:
                self._is_demand_due = True
                wait_s = self._told_demand_s + DEMAND_INTERVAL_S - self._bus.now()
                asyncio.get_running_loop().call_later(max(0.0, wait_s), self._tell_demand)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Dispatch():
                self._dispatch(action)
            case LeftQueue():
                self._observer.on_left_queue(action, self._bus.now())
            case Waits(gateway_id, request_id, epoch, num_ahead, why):
                self._tell_event(gateway_id, request_id, epoch, EventKind.QUEUED, why, numbers=(num_ahead,))
            case CancelAt(instance_id, request_id, epoch):
                self._bus.publish(INSTANCE_CANCEL.at(instance_id=instance_id), Cancel(request_id, epoch))
            case SendRebalance(instance_id, rebalance):
                self._bus.publish(INSTANCE_REBALANCE.at(instance_id=instance_id), rebalance)
            case Paired():
                self._observer.on_paired(action)
            case MigrationEnded():
                self._observer.on_move(action)
            case TellRole():
                self._tasks.start(self._tell_role(action))
            case SendEntry(gateway_id, entry):
                frame = TokenFrame(self._info.scheduler_id, [entry])
                self._bus.publish(GATEWAY_FRAMES.at(gateway_id=gateway_id), frame)
            case NotifyLost(gateway_id, lost):
                self._bus.publish(GATEWAY_LOST.at(gateway_id=gateway_id), lost)
            case InstanceLost(instance_id, reason, num_requests):
                self._observer.on_instance_lost(action)
                level = logging.WARNING if num_requests or reason == "silent" else logging.INFO
                logger.log(level, "instance %s is gone (%s); it had %d requests", instance_id, reason, num_requests)
            case ScaleUp() | DrainAction() | CancelDrain():
                self._tasks.start(self._scale(action))
            case AskHeld():
                self._tasks.start(self._ask_held(action))
            case ProbeSilence(instance_ids):
                self._tasks.start(self._probe(instance_ids))

    def _dispatch(self, dispatch: Dispatch) -> None:
        started_s = self._bus.now()
        endpoint = INSTANCE_SUBMIT.at(instance_id=dispatch.instance_id)
        span = self._observer.begin_dispatch(dispatch)
        request, place = dispatch.request, dispatch.instance_id
        about = request.gateway_id, request.request_id, request.epoch
        numbers = (dispatch.freeness, dispatch.num_serving)
        self._tell_event(*about, EventKind.DISPATCHED, dispatch.why, place, numbers)
        with use_span(span):
            call = self._bus.send_request(endpoint, dispatch.request, timeout_s=DISPATCH_TIMEOUT_S)

        def on_answer(_: object) -> None:
            self._calls.discard(call)
            error = _error_of(call)
            if error is not None:
                reason = f"{error.code}: {error.message}"
                logger.info("%s did not take %s: %s", dispatch.instance_id, dispatch.request.request_id, reason)
                self._tell_event(*about, EventKind.REFUSED, error.code, place)
            self._observer.end_dispatch(dispatch, span, error, self._bus.now() - started_s)
            self._apply(OnDispatched.to(dispatch, error))
            self._act_soon()

        self._calls.add(call)
        call.add_done_callback(on_answer)

    def _tell_event(
        self,
        gateway_id: str,
        request_id: str,
        epoch: int,
        kind: EventKind,
        cause: str,
        place: str = "",
        numbers: tuple[float, ...] = (),
    ) -> None:
        event = RequestEvent(request_id, epoch, kind, self._bus.now(), cause, place, numbers)
        self._events.add(gateway_id, event)

    async def _tell_role(self, action: TellRole) -> None:
        logger.info("the role of %s is %s from now on", action.instance_id, action.role)
        endpoint = INSTANCE_ROLE.at(instance_id=action.instance_id)
        try:
            await self._bus.request(endpoint, SetRole(action.role), timeout_s=CALL_TIMEOUT_S)
        except BusError as error:
            # It does what it is sent; only those that look on do not see it.
            logger.info("%s does not take its role: %s", action.instance_id, error)

    async def _ask_held(self, ask: AskHeld) -> None:
        held = None
        try:
            endpoint = INSTANCE_HELD.at(instance_id=ask.instance_id)
            held = (await self._bus.request(endpoint, ListHeldRequests(), timeout_s=HELD_TIMEOUT_S)).requests
        except BusError as error:
            logger.info("%s does not say what it holds: %s", ask.instance_id, error)
        self._apply(OnHeld(ask, held))
        self._act()

    async def _probe(self, instance_ids: list[str]) -> None:
        """Silent instances, or a silent bus? A reply of the server proves that all reports before it were handled."""
        try:
            await self._bus.round_trip_s()
        except BusError as error:
            logger.warning("NATS does not answer (%s): the instances' silence means nothing", error)
            self._apply(GrantGrace())
        else:
            self._apply(DeclareLost(instance_ids))
        self._act()

    async def _publish_statistics(self) -> None:
        last_s = self._bus.now()
        while True:
            await asyncio.sleep(STATISTICS_INTERVAL_S)
            now = self._bus.now()
            for work in (self._tell_statistics, self._tell_demand, self._scale_if_due, self._sample):
                try:
                    work(now, now - last_s)
                except Exception:
                    logger.exception("%s failed this time", work.__name__)
                await asyncio.sleep(0)  # dispatches come between
            last_s = now

    def _tell_statistics(self, now: float, period_s: float) -> None:
        num_queued: Counter[str] = Counter()
        num_offline: Counter[str] = Counter()
        for lane, length in self._core.queue.lengths().items():
            num_queued[lane.model] += length
            num_offline[lane.model] += 0 if lane.is_online else length
        models = self._core.statistics.take(period_s, num_queued, num_offline)
        tenants = self._core.queue.tenants.statistics(now)
        self._bus.publish(SCHEDULER_STATISTICS, StatisticsReport(self._info.scheduler_id, models, tenants))
        if changed := self._apply(TakeExecutionStatistics()):
            report = ExecutionStatisticsReport(self._info.scheduler_id, changed)
            self._bus.publish(EXECUTION_STATISTICS, report)

    def _tell_demand(self, _now: float = 0.0, _period_s: float = 0.0) -> None:
        self._is_demand_due = False
        names = {spec.name for spec in self._models.values() if spec.on_demand}
        if names and not self._is_closed:
            self._told_demand_s = self._bus.now()
            demands = self._core.demand(names, self._told_demand_s)
            self._bus.publish(SCHEDULER_DEMAND, DemandReport(self._info.scheduler_id, demands))

    async def _tell_requests(self) -> None:
        while True:
            await asyncio.sleep(STATISTICS_INTERVAL_S)
            await self._tell(TELL_TIMEOUT_S)

    async def _tell(self, timeout_s: float) -> None:
        """Requests that came and ended, to the service monitor. What it does not acknowledge is told again."""
        try:
            while told := self.recorder.told(self._info.scheduler_id, self._bus.now()):
                await self._bus.request(PLACEMENT_REQUESTS, told, timeout_s=timeout_s)
                self.recorder.acknowledge(told)
        except BusError as error:
            logger.debug("placement does not take what requests there were: %s", error)

    def _scale_if_due(self, _now: float, _period_s: float) -> None:
        replicas = {spec.name: spec.replicas for spec in self._models.values() if spec.replicas is not None}
        self._apply(LookAtScale(replicas))
        self._act()

    def _sample(self, now: float, _period_s: float) -> None:
        self._observer.sample(self._core, self._models, now)

    async def _scale(self, action: ScalingAction) -> None:
        endpoint, query = call_of(action)
        logger.info("scaling: %s", action)
        released: list[str] | None = None
        try:
            plan = await self._bus.request(endpoint, query, timeout_s=CALL_TIMEOUT_S)
        except BusError as error:
            logger.warning("placement did not carry out %s: %s", action, error)
        else:
            released = plan.released
        self._apply(OnScaled(released))

    # ------------------------------------------------------------------------------------------------ plumbing

    def _set_timer(self) -> None:
        wakeup_s = self._core.next_wakeup()
        if wakeup_s is None or (self._timer is not None and self._timer_s <= wakeup_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = wakeup_s
        delay_s = max(0.0, wakeup_s - self._bus.now())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)


def _core(
    settings: SchedulerSettings, info: LeaseHolder, inherited: Mapping[str, ExecutionStatistics]
) -> SchedulerCore:
    """Recorded, if settings name a file. One that cannot be written keeps nobody from being served."""
    configuration = Configuration.of(settings, info.term, inherited, PICKS_AT_ONCE)
    if settings.record_file:
        path = f"{settings.record_file}.{info.scheduler_id}.{info.term}"
        try:
            core = recorded(configuration, file_writer(path, settings.record_max_bytes))
            logger.info("this term is recorded: %s", path)
            return core
        except OSError as error:
            logger.error("TIDEWAY_RECORD_FILE: %r cannot be written, so nothing is recorded: %s", path, error)
    return configuration.build()


def _error_of(call: asyncio.Future[Accepted]) -> ErrorInfo | None:
    """The error of a submit call that is over."""
    if call.cancelled():
        return ErrorInfo(ErrorCode.UNAVAILABLE, "the call was cancelled")
    match call.exception():
        case None:
            return None
        case BusError() as error:
            return error.info
        case error:
            logger.error("a submit call failed", exc_info=error)
            return ErrorInfo(ErrorCode.INTERNAL, f"the call failed: {type(error).__name__}")
