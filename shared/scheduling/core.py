"""The scheduler's decisions for one term of leadership: calls in, actions out; no clock, no I/O, no randomness.

Its host (the service, a simulation, a test) calls, always with its clock's `now`:

    apply(call, now)        whatever changes it (calls.py): what gateways want and instances say, answers, time
    actions(now)            what to do now, in order (actions.py); after every call, or after all that came in together, and
                            again while it `has_more`
    next_wakeup()           when to apply `OnTime`

The parts own their state, and meet here:

    cluster       who is there, and the last word of each (cluster.py)
    queue         what waits, in order (queue.py)
    dispatcher    who goes where (dispatching.py, candidates.py, in_flight.py; policies/dispatch.py)
    life          each request from its coming to its end (lifecycle.py, requests.py)
    intake        what gateways want (intake.py), with their grants (harvest.py)
    delivery      how dispatches were answered (recovery.py)
    inquiries     what instances hold, when that is not known (recovery.py)
    membership    instances that come and go (membership.py)
    migrations    requests that went from one instance to another (migrations.py)
    rescheduler   who gives requests to whom (rescheduling.py)
    roles         which instances compute prompts for others (roles.py)
    scaler        how many instances there are (scaling.py)
    monitor       execution times of models (monitor.py)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

from shared.messages.cluster import ExecutionStatistics, LoadReport, ModelDemand
from shared.policies.catalogue import dispatch_policy, ordering_policy
from shared.policies.dispatch import DispatchParameters
from shared.recording import Recorder
from shared.runtime.settings import SchedulerSettings
from shared.scheduling.actions import Action
from shared.scheduling.calls import Call
from shared.scheduling.cluster import ClusterView
from shared.scheduling.dispatching import Dispatcher
from shared.scheduling.intake import Intake
from shared.scheduling.lifecycle import RequestLifecycle
from shared.scheduling.membership import Membership
from shared.scheduling.migrations import MigrationBook
from shared.scheduling.monitor import ServiceMonitor
from shared.scheduling.queue import GlobalQueue
from shared.scheduling.recovery import Delivery, Inquiries
from shared.scheduling.requests import RequestState, TrackedRequest
from shared.scheduling.rescheduling import Rescheduler
from shared.scheduling.roles import Roles
from shared.scheduling.scaling import Scaler

R = TypeVar("R")


class SchedulerCore:
    """See the module's docstring."""

    def __init__(
        self,
        settings: SchedulerSettings,
        term: int,
        inherited: Mapping[str, ExecutionStatistics] | None = None,
        *,
        picks_at_once: int | None = None,
        record: Recorder | None = None,
    ) -> None:
        """`inherited`: execution statistics as the leader before published them. `picks_at_once`: dispatches that one call
        of `actions` decides on, for a host that sends them before it asks for more (`has_more`); None: all. `record` is
        given each call before it is carried out, and what each call of `actions` said."""
        self._actions: list[Action] = []
        self.cluster = ClusterView(settings.lost_after_s)
        self.queue = GlobalQueue(ordering_policy(settings.order_policy), settings.max_queued)
        parameters = DispatchParameters(settings.max_defragmenting_share)
        self.roles = Roles("off" if settings.migration == "off" else settings.roles, self.cluster)
        self.dispatcher = Dispatcher(
            self.cluster,
            self.queue,
            dispatch_policy(settings.dispatch_policy, parameters),
            max_waiting_per_model=settings.max_waiting_per_model,
            growth_steps=settings.dispatch_growth_steps,
            roles=self.roles,
        )
        self.rescheduler = Rescheduler(settings, self.cluster, self.roles, self.dispatcher.held_of)
        self.scaler = Scaler(settings)
        self.life = life = RequestLifecycle(self.dispatcher, self.cluster, self.say)
        self.migrations = MigrationBook(self)
        self.inquiries = Inquiries(self)
        self.intake = Intake(self, term)
        self.delivery = Delivery(self)
        self.membership = Membership(self)
        self.monitor = ServiceMonitor(inherited or {})
        for statistics in (inherited or {}).values():
            self.queue.set_statistics(statistics)
        self.requests = life.requests
        self.statistics = life.statistics
        self.grants = self.intake.grants
        self._picks_at_once = picks_at_once
        self._record = record

    def say(self, action: Action) -> None:
        """What a part wants done."""
        self._actions.append(action)

    def apply(self, call: Call[R], now: float) -> R:
        """Carries a call out, and returns what it says."""
        if self._record is not None:
            self._record(call, now)
        return call.on(self, now)

    def actions(self, now: float) -> list[Action]:
        """Dispatches what can be dispatched, and returns everything there is to do since the last call."""
        self.dispatcher.catch_up()
        for tracked, instance_id in self.dispatcher.picks(now, self._picks_at_once):
            self.life.dispatch(tracked, instance_id, now)
        if not self.dispatcher.has_more:
            self.life.tell_who_waits(now)
        actions = self._actions + self.rescheduler.due(now) + self.roles.due(self.dispatcher.long_work, now)
        self._actions.clear()
        if self._record is not None:
            self._record(actions, now)
        return actions

    @property
    def has_more(self) -> bool:
        """Whether `actions` is to be called again at once: there were more dispatches than it decides on in one call."""
        return self.dispatcher.has_more

    @property
    def has_unread(self) -> bool:
        """Whether `actions` is to be called again when nothing else is to be done: to note what caches hold."""
        return self.dispatcher.has_unread

    def next_wakeup(self) -> float | None:
        """Time at which `OnTime` must be applied next, if nothing else happens before."""
        parts = (self.cluster.next_silence(), self.rescheduler.next_wakeup(), self.roles.next_wakeup())
        times = (self.life.timers.next(), *parts)
        return min((at for at in times if at is not None), default=None)

    # ------------------------------------------------------------------------------ what concerns several parts

    def on_report(self, report: LoadReport, now: float) -> None:
        """What an instance says of itself, to all whom it concerns."""
        if finished := [stats for stats in report.finished if not stats.is_mirror]:
            self.statistics.count_finished(finished)
            self.monitor.count_finished(finished)
            self.grants.count_finished(finished, now)
        heard = self.cluster.hear(report, now)
        if heard is None:
            return
        state, last = heard
        instance_id = state.info.instance_id  # the text that everything is kept by, so that comparisons end at once
        if last is None:
            self.monitor.on_new_instance()
        for request_id in report.admitted:
            self.life.leave_ledger(request_id, instance_id)
        for held in report.migrated_in:
            self.migrations.migrated_in(held, instance_id, now)
        for outcome in report.migrations:
            self.migrations.ended(outcome, instance_id, now)
        self._record_ends(report, now)
        for request_id in report.ended:
            self.inquiries.on_ended(request_id, instance_id, state, now)
        has_gap = last is not None and report.sequence != last.sequence + 1
        if has_gap or not state.has_answered:
            self.inquiries.ask_if_idle(instance_id, state, now)
        self.dispatcher.on_report(instance_id, report, has_gap or last is None)
        self.rescheduler.on_report(report, state, now)

    def _record_ends(self, report: LoadReport, now: float) -> None:
        for request_id, stats in zip(report.ended, report.finished, strict=False):
            tracked = self.requests.get(request_id)
            if tracked is not None and tracked.instance_id != report.instance_id:
                continue  # another's by now: an older epoch ended there
            if tracked is not None:
                self.queue.tenants.charge(tracked, stats.service_s, now, is_whole=not stats.is_given_up)
            if not stats.is_given_up:
                self.life.recorder.ended(request_id, stats, now)

    def on_model(self, model: str, is_known: bool, now: float) -> None:
        if not is_known:
            self.monitor.forget(model)
        self.life.on_model(model, is_known, now)

    def take_execution_statistics(self) -> list[ExecutionStatistics]:
        changed = self.monitor.take()
        for statistics in changed:
            self.queue.set_statistics(statistics)
        return changed

    def demand(self, models: Collection[str], now: float) -> list[ModelDemand]:
        """Demand for those of these models that are asked for. Changes nothing."""
        unmet = self.grants.unmet_tokens(now)
        counts = {model: _Demand(num_offline=int(unmet[model] > 0)) for model in models}
        for tracked in self.requests:
            if (count := counts.get(tracked.model)) is not None:
                count.add(tracked, now)
        return [
            ModelDemand(model=model, **asdict(count)) for model, count in counts.items() if any(asdict(count).values())
        ]

    def look_at_scale(self, replicas: Mapping[str, int], now: float) -> None:
        queued = {lane.model: length for lane, length in self.queue.lengths().items() if lane.is_online}
        work, pressure = self.dispatcher.prompt_work(now), self.grants.pressure(now)
        self._actions += self.scaler.due(self.cluster, queued, now, replicas, work, pressure)

    def on_time(self, now: float) -> None:
        for kind, name in self.life.timers.due(now):
            match kind:
                case "deadline":
                    self.life.on_deadline(name, now)
                case "unfit":
                    self.life.on_unfit(name, now)
                case "ledger":
                    self.delivery.expire(name)
                case "backoff":
                    self.delivery.end_back_off(name)
                case "confirm":
                    self.inquiries.confirm(name, now)
        self.membership.look_for_silence(now)


@dataclass
class _Demand:
    """Fields of a `ModelDemand`."""

    num_online: int = 0
    num_offline: int = 0
    num_held_online: int = 0
    num_held_offline: int = 0
    waited_s: float = 0.0

    def add(self, tracked: TrackedRequest, now: float) -> None:
        is_queued = tracked.state == RequestState.QUEUED
        self.num_online += is_queued and tracked.is_online
        self.num_offline += is_queued and not tracked.is_online
        self.num_held_online += not is_queued and tracked.is_online
        self.num_held_offline += not (is_queued or tracked.is_online)
        if is_queued and tracked.is_online:
            self.waited_s += max(0.0, now - tracked.arrived_s)
