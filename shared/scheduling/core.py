"""The scheduler's decisions for one term of leadership: calls in, actions out; no clock, no I/O, no randomness.

Its host (the service, a simulation, a test) calls, always with its clock's `now`:

    apply(call, now)        whatever changes it (calls.py): what gateways want and instances say, answers, time
    actions(now)            what to do now, in order (actions.py); after every call, or after all that came in together
    next_wakeup()           when to apply `OnTime`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from shared.messages.batches import GrantQuery, GrantReply
from shared.messages.cluster import (
    ExecutionStatistics,
    InstanceExited,
    InstanceInfo,
    LoadReport,
)
from shared.messages.requests import (
    PLACEMENT_EPOCHS,
    ErrorCode,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    HeldRequest,
    RequestClass,
    next_placement,
)
from shared.policies.catalogue import dispatch_policy, ordering_policy
from shared.policies.dispatch import DispatchParameters
from shared.recording import Recorder
from shared.scheduling.actions import Action, AskHeld, CancelAt, InstanceLost, ProbeSilence
from shared.scheduling.calls import Call, OnDispatched
from shared.scheduling.cluster import ClusterView, InstanceState, Liveness
from shared.scheduling.dispatching import Dispatcher
from shared.scheduling.harvest import GrantBook
from shared.scheduling.lifecycle import RequestLifecycle, removed_error
from shared.scheduling.monitor import ServiceMonitor
from shared.scheduling.moves import MoveBook
from shared.scheduling.queue import GlobalQueue
from shared.scheduling.recovery import FINAL, FULL, MAYBE_DELIVERED, UNCERTAIN, reconcile
from shared.scheduling.requests import RequestState, TrackedRequest
from shared.scheduling.rescheduling import Rescheduler
from shared.scheduling.scaling import Scaler
from shared.settings import SchedulerSettings

R = TypeVar("R")

LEDGER_EXPIRY_S = 2.0
"""After its dispatch was acknowledged: a report that names the request is lost, or was never sent."""
BACKOFF_S = 0.1
"""Of an instance that refused; doubles with each refusal in a row."""
MAX_BACKOFF_S = 2.0
ASK_AGAIN_S = 1.0
"""Between questions to an instance that does not say what it holds."""
TERM_EPOCHS = 1024 * PLACEMENT_EPOCHS
"""More than the placements that a leader makes of one request in its term."""
MAX_FAILURES = 3
"""Attempts at a request that failed inside instances, before it is given up."""


class SchedulerCore:
    def __init__(
        self,
        settings: SchedulerSettings,
        term: int,
        inherited: Mapping[str, ExecutionStatistics] | None = None,
        *,
        record: Recorder | None = None,
    ) -> None:
        """`inherited`: execution statistics as the leader before published them. `record` is given each call before it is
        carried out, and what each call of `actions` said."""
        self.cluster = ClusterView(settings.lost_after_s)
        self.queue = GlobalQueue(ordering_policy(settings.order_policy), settings.max_queued)
        self.dispatcher = Dispatcher(
            self.cluster,
            self.queue,
            dispatch_policy(
                settings.dispatch_policy,
                DispatchParameters(settings.max_gathering_share, settings.cache_affinity_merged),
            ),
            max_waiting_per_model=settings.max_waiting_per_model,
            growth_steps=settings.dispatch_growth_steps,
        )
        self._life = RequestLifecycle(self.cluster, self.dispatcher)
        self.requests = self._life.requests
        self.statistics = self._life.statistics
        self.grants = GrantBook()
        self.rescheduler = Rescheduler(settings, self.cluster)
        self.scaler = Scaler(settings)
        self._moves = MoveBook(self._life, self.cluster)
        self._monitor = ServiceMonitor(inherited or {})
        for statistics in (inherited or {}).values():
            self.queue.set_statistics(statistics)
        self._record = record
        self._term = term
        self._num_submitted = 0
        self._unheard: set[str] = set()
        """Live instances that did not say in time, at take-over, what they hold."""

    def apply(self, call: Call[R], now: float) -> R:
        """Carries a call out, and returns what it says."""
        if self._record is not None:
            self._record(call, now)
        return call.on(self, now)

    def actions(self, now: float) -> list[Action]:
        """Dispatches what can be dispatched, and returns everything there is to do since the last call."""
        for tracked, instance_id in self.dispatcher.picks(now):
            self._life.dispatch(tracked, instance_id, now)
        actions, self._life.actions = self._life.actions, []
        actions += self.rescheduler.due(now)
        if self._record is not None:
            self._record(actions, now)
        return actions

    def next_wakeup(self) -> float | None:
        """When `on_time` must be called next, if nothing else happens before."""
        times = (self._life.timers.next(), self.cluster.next_silence(), self.rescheduler.next_wakeup())
        return min((at for at in times if at is not None), default=None)

    # ---------------------------------------------------------------------------------------------- take-over

    def ask_everyone(self, now: float) -> None:
        """Begins the rebuilding of the view: what do the instances of the registry hold?"""
        for instance_id, state in self.cluster:
            self._ask(instance_id, state, now)

    def begin_serving(self) -> None:
        """Ends the rebuilding. Whoever has not answered may hold any request, in an epoch that the last leader raised;
        so until it has, what is submitted is placed in an epoch of this term alone."""
        self._unheard = {name for name, state in self.cluster if state.is_alive and not state.has_answered}

    # ----------------------------------------------------------------------------------------------- gateways

    def submit(self, request: GenerationRequest, now: float) -> ErrorInfo | None:
        """Queues a request; None is acceptance. One that is known in this epoch or a higher one is accepted with no
        effect; a lower epoch is replaced."""
        known = self.requests.get(request.request_id)
        if known is not None and known.epoch >= request.epoch:
            # The gateway may have raised it to what it had been raised to here, and hears no lower one from now on.
            known.gateway_epoch = max(known.gateway_epoch, request.epoch)
            return None
        if refused := self.cluster.refusal(request):
            return refused
        if request.model in self._life.removed_models:
            return removed_error(request.model)
        # The bound is for new work. What ran before already counts as let in.
        is_online = request.request_class != RequestClass.OFFLINE
        if request.epoch == 0 and (refused := self.queue.refusal(is_online, now)):
            return refused
        self._num_submitted += 1
        tracked = TrackedRequest.submitted(request, self._num_submitted, len(self.queue), now)
        if known is not None:
            tracked.older_owners = known.older_owners
            if known.instance_id:
                tracked.older_owners[known.instance_id] = known.epoch
            self._life.leave_queue(known, "replaced", now)
            self._life.forget(known)
        if request.epoch % PLACEMENT_EPOCHS:
            # It has moved within its placement. From here it begins another one: no epoch is used twice.
            tracked.epoch = next_placement(request.epoch)
        if self._unheard:
            tracked.epoch += self._term * TERM_EPOCHS
        if request.epoch == 0:
            self.statistics.count_arrival(request.model)
            if not is_online:
                self.grants.on_submitted(request.gateway_id, request.model, tracked.num_tokens_at_most)
        self.requests.add(tracked)
        self._life.enqueue(tracked, now)
        return None

    def cancel(self, request_id: str, now: float) -> None:
        tracked = self.requests.get(request_id)
        if tracked is None:
            return
        for instance_id in tracked.older_owners:
            self._life.actions.append(CancelAt(instance_id, request_id))
        if tracked.state == RequestState.QUEUED:
            self._life.leave_queue(tracked, "cancelled", now)
            self._life.forget(tracked)
        elif tracked.state == RequestState.ASSIGNED:
            self._life.actions.append(CancelAt(tracked.instance_id, request_id))
        else:
            tracked.is_cancelled = True  # passed on as soon as the instance is known to have it

    def grant(self, query: GrantQuery, now: float) -> GrantReply:
        """How many offline tokens a gateway may submit."""
        room = self.dispatcher.offline_room(demand.model for demand in query.demands)
        return self.grants.answer(query, room, now)

    # ------------------------------------------------------------------------------------ models and statistics

    def on_model(self, model: str, is_known: bool, now: float) -> None:
        """The operator added (or changed) a model, or removed it: what waits for it ends."""
        if is_known:
            self._life.removed_models.discard(model)
            return
        self._life.removed_models.add(model)
        self._monitor.forget(model)
        for tracked in self.queue.of_model(model):
            self._life.end(tracked, FinishReason.ERROR, removed_error(model), now)

    def take_execution_statistics(self) -> list[ExecutionStatistics]:
        """Those that changed since the last call; all for an instance that is new. From now on the queue goes by them."""
        changed = self._monitor.take()
        for statistics in changed:
            self.queue.set_statistics(statistics)
        return changed

    def look_at_scale(self, replicas: Mapping[str, int], now: float) -> None:
        """See `LookAtScale`."""
        queued = {lane.model: length for lane, length in self.queue.lengths().items() if lane.is_online}
        self._life.actions += self.scaler.due(self.cluster, queued, now, replicas)

    # ---------------------------------------------------------------------------------------------- instances

    def on_registry(self, instance_id: str, info: InstanceInfo | None, now: float) -> None:
        """The instance's entry was written, or has vanished (None)."""
        state = self.cluster.get(instance_id)
        before = list(state.ready) if state else []
        if state is not None and (info is None or info.incarnation != state.info.incarnation):
            how = "vanished" if info is None else "restarted"
            is_empty = not self.requests.on_instance(instance_id)
            self._lose(instance_id, "drained" if state.is_draining and is_empty else how, now)
        if info is not None:
            self.cluster.register(info, now)
        else:
            self.cluster.remove(instance_id)
        self._life.touch(instance_id, before)
        self.rescheduler.on_registry(instance_id, self.cluster.get(instance_id), now)

    def on_exited(self, exited: InstanceExited, now: float) -> None:
        state = self.cluster.get(exited.instance_id)
        if state is None or state.info.incarnation != exited.incarnation or state.liveness == Liveness.EXITED:
            return
        before = list(state.ready)
        self._lose(exited.instance_id, "drained" if state.is_draining and exited.exit_code == 0 else "exited", now)
        self.cluster.mark_exited(exited.instance_id)
        self._life.touch(exited.instance_id, before)

    def on_report(self, report: LoadReport, now: float) -> None:
        instance_id = report.instance_id
        if report.finished:
            self.statistics.count_finished(report.finished)
            self._monitor.count_finished(report.finished)
            self.grants.count_finished(report.finished, now)
        heard = self.cluster.hear(report, now)
        if heard is None:
            return
        state, last = heard
        if last is None:
            self._monitor.on_new_instance()
        for request_id in report.admitted:
            self._life.leave_ledger(request_id, instance_id)
        for held in report.moved_in:
            self._num_submitted += 1
            self._moves.moved_in(held, instance_id, self._num_submitted, now)
        for outcome in report.moves:
            self._moves.ended(outcome, instance_id, now)
        for request_id in report.ended:
            self._life.leave_ledger(request_id, instance_id)
            self._on_ended(request_id, instance_id, state, now)
        has_gap = last is not None and report.sequence != last.sequence + 1
        if has_gap or not state.has_answered:
            self._ask_if_idle(instance_id, state, now)
        self.dispatcher.on_report(report)
        self.rescheduler.on_report(report, state, now)

    def _on_ended(self, request_id: str, instance_id: str, state: InstanceState, now: float) -> None:
        tracked = self.requests.get(request_id)
        if tracked is not None and tracked.older_owners.pop(instance_id, None) is not None:
            # The report names no epoch: it may be the older one that ended.
            if tracked.instance_id == instance_id:
                self._ask(instance_id, state, now)
            return
        if state.num_asks:
            state.ended_while_asking.add(request_id)
        if tracked is None or tracked.instance_id != instance_id:
            return
        if tracked.state == RequestState.DISPATCHING:
            tracked.has_ended = True
        else:
            self._life.forget(tracked)

    def declare_lost(self, instance_ids: list[str], now: float) -> None:
        """The bus works, so instances that are silent still are dead."""
        for instance_id in self.cluster.still_silent(instance_ids):
            self._lose(instance_id, "silent", now)
            self.cluster.mark_lost(instance_id)

    def grant_grace(self, now: float) -> None:
        """The bus did not work: nobody's silence or refusal of that time says anything."""
        self.cluster.grant_grace(now)
        for instance_id, state in self.cluster:
            state.num_refusals, state.is_backing_off = 0, False
            self._life.touch(instance_id)

    def _lose(self, instance_id: str, reason: str, now: float) -> None:
        """Nothing on the instance will be finished. Requests that it had accepted go back to their gateways, which know
        the tokens so far; those on their way to it are placed again from here."""
        self._unheard.discard(instance_id)
        there = self.requests.on_instance(instance_id)
        state = self.cluster.get(instance_id)
        if there or (state is not None and state.is_known_alive):
            self._life.actions.append(InstanceLost(instance_id, reason, len(there)))
        for tracked in there:
            self._life.leave_ledger(tracked.request_id, instance_id)
        self._moves.lose([tracked for tracked in there if tracked.state == RequestState.ASSIGNED], instance_id)
        for tracked in there:
            if tracked.state != RequestState.ASSIGNED:
                self._life.place_again(tracked, now, raise_epoch=True)

    # ------------------------------------------------------------------------------------------------ answers

    def on_dispatched(self, answer: OnDispatched, now: float) -> None:
        """See `OnDispatched`."""
        request_id, instance_id, error = answer.request_id, answer.instance_id, answer.error
        tracked = self.requests.get(request_id)
        state = self.cluster.get(instance_id)
        if tracked is None or tracked.state != RequestState.DISPATCHING:
            return
        if (tracked.instance_id, tracked.epoch) != (instance_id, answer.epoch):
            return
        if error is None:
            if state is not None:
                state.num_refusals = 0
            if request_id in self.dispatcher.ledger:
                self._life.timers.set(("ledger", request_id), now + LEDGER_EXPIRY_S)
            self._life.assign(tracked, "dispatched", instance_id, now)
            if tracked.has_ended:
                self._life.forget(tracked)
            return
        self._life.leave_ledger(request_id, instance_id)
        if error.code in FINAL:
            self._life.end(tracked, FinishReason.ERROR, error, now)
            return
        if state is not None and error.code in FULL and not tracked.is_online:
            # Online requests may go there all the same; offline ones when the next report shows room.
            state.load.offline_room.clear()
            self._life.touch(instance_id)
        elif state is not None:
            self._back_off(instance_id, state, error.retry_after_s, now)
        if error.code in UNCERTAIN and state is not None:
            self.requests.move(tracked, RequestState.ASKING, instance_id, now)
            self._ask(instance_id, state, now)
            return
        tracked.num_failures += error.code == ErrorCode.INTERNAL
        if tracked.num_failures >= MAX_FAILURES:
            self._life.end(tracked, FinishReason.ERROR, error, now)
        else:
            self._life.place_again(tracked, now, raise_epoch=error.code in MAYBE_DELIVERED)

    def on_held(self, ask: AskHeld, held: list[HeldRequest] | None, now: float) -> None:
        """What the instance holds; None: it did not say in time."""
        instance_id = ask.instance_id
        state = self.cluster.get(instance_id)
        if state is None or state.info.incarnation != ask.incarnation:
            return
        if not state.is_alive:
            held = None  # it was declared dead meanwhile; should it come back, it will be asked again
        result = reconcile(self.requests, instance_id, ask.asked_s, held or [], state.ended_while_asking)
        state.num_asks -= 1
        if state.num_asks == 0:
            state.ended_while_asking.clear()
        for tracked in result.place_again:
            self._life.place_again(tracked, now, raise_epoch=True)
        if held is None:
            state.has_answered = False
            state.next_ask_s = now + ASK_AGAIN_S
            return
        state.has_answered = True
        self._unheard.discard(instance_id)
        for tracked in result.forget:
            # Whether it ended there, or went down with where it has moved to, its gateway knows.
            if not tracked.is_confirmed or self.rescheduler.has_given(instance_id, now):
                self._moves.lose([tracked], instance_id)
            else:
                self._life.forget(tracked)
        for item in result.adopt:
            self._num_submitted += 1
            self._life.adopt(item, instance_id, self._num_submitted, now)
        for item in result.superseded:
            self._life.supersede(item, instance_id)

    # --------------------------------------------------------------------------------------------------- time

    def on_time(self, now: float) -> None:
        for kind, name in self._life.timers.due(now):
            tracked, state = self.requests.get(name), self.cluster.get(name)
            if kind == "ledger":
                instance_id = self.dispatcher.ledger.remove(name)
                if instance_id is not None:
                    self._life.touch(instance_id)
            elif kind == "confirm" and tracked is not None and (owner := self.cluster.get(tracked.instance_id)):
                self._ask(tracked.instance_id, owner, now)
            elif kind == "backoff" and state is not None:
                state.is_backing_off = False
                self._life.touch(name)
            elif kind == "deadline" and tracked is not None:
                if tracked.state == RequestState.QUEUED:
                    waited = f"the request waited {now - tracked.arrived_s:.3g} s in the queue until its deadline"
                    self._life.end(tracked, FinishReason.DEADLINE, ErrorInfo(ErrorCode.DEADLINE, waited), now)
                elif tracked.state == RequestState.ASSIGNED:
                    self._life.forget(tracked)
        if silent := self.cluster.fall_silent(now):
            for instance_id in silent:
                self._life.touch(instance_id)
            self._life.actions.append(ProbeSilence(silent))

    def _back_off(self, instance_id: str, state: InstanceState, retry_after_s: float, now: float) -> None:
        delay_s = max(retry_after_s, BACKOFF_S * 2**state.num_refusals)
        state.num_refusals = min(state.num_refusals + 1, 10)
        state.is_backing_off = True
        self._life.timers.set(("backoff", instance_id), now + min(MAX_BACKOFF_S, delay_s))
        self._life.touch(instance_id)

    def _ask_if_idle(self, instance_id: str, state: InstanceState, now: float) -> None:
        if state.num_asks == 0 and now >= state.next_ask_s:
            self._ask(instance_id, state, now)

    def _ask(self, instance_id: str, state: InstanceState, now: float) -> None:
        state.num_asks += 1
        self._life.actions.append(AskHeld(instance_id, state.info.incarnation, now))
