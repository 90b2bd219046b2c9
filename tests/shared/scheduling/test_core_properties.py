"""A random world around the scheduler's core: lost messages, refusals, deaths, take-overs, in any order.

Gateways and instances are played as their contracts say (shared/messages). After every step the invariants hold; at
the end, when everything works again, every request has ended.
"""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.messages.cluster import FinishedStats, InstanceExited, ModelLoad
from shared.messages.requests import (
    PLACEMENT_EPOCHS,
    ErrorCode,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    Priority,
    RequestClass,
    next_placement,
)
from shared.policies.catalogue import ORDERING_POLICIES
from shared.runtime.settings import SchedulerSettings
from shared.scheduling import recording
from shared.scheduling.actions import Action, AskHeld, CancelAt, Dispatch, NotifyLost, ProbeSilence, SendEntry
from shared.scheduling.calls import (
    AskEveryone,
    BeginServing,
    Cancel,
    DeclareLost,
    GrantGrace,
    OnDispatched,
    OnExited,
    OnHeld,
    OnModel,
    OnRegistry,
    OnReport,
    OnTime,
    Submit,
    TakeExecutionStatistics,
)
from shared.scheduling.core import SchedulerCore
from shared.scheduling.queue import Lane
from shared.scheduling.requests import RequestState
from shared.scheduling.rescheduling import Rescheduler
from tests.seeds import examples
from tests.shared.scheduling.instance_model import Instance, held_as
from tests.shared.scheduling.samples import make_info, make_report, make_request

MODELS = ("m", "n")
MAX_WAITING = 2
TOKENS = 30
"""Tokens of every request at its longest."""
ROOM = 50
"""Offline tokens of a model that an instance without any would take."""
NAMES = ("i0", "i1", "i2")
some = st.integers(0, 1000)


class World(RuleBasedStateMachine):
    @initialize(num_instances=st.integers(1, 3), order=st.sampled_from(sorted(ORDERING_POLICIES)))
    def start(self, num_instances: int, order: str) -> None:
        # Requests move here without having been told to.
        self.given = patch.object(Rescheduler, "has_given", lambda *_: True)
        self.given.start()
        self.recordings: list[list[bytes]] = []
        self.now = 0.0
        self.settings = SchedulerSettings(max_queued=12, max_waiting_per_model=MAX_WAITING, order_policy=order)
        self.core = self.new_core(1)
        self.instances: dict[str, Instance] = {}
        self.num_incarnations = 0
        self.num_requests = 0
        self.term = 1
        self.removed: set[str] = set()
        self.wanted: dict[str, GenerationRequest] = {}
        """What gateways still wait for, with the epoch they know."""
        self.over: Counter[str] = Counter()
        self.heard_owners: dict[str, Instance] = {}
        """Owners of which the gateway heard by their first frame; it notices by itself that one has gone."""
        self.calls: list[Dispatch] = []
        self.asks: list[AskHeld] = []
        for name in NAMES[:num_instances]:
            self.start_instance(name)
        self.act()

    # ------------------------------------------------------------------------------------------------- plumbing

    def new_core(self, term: int) -> SchedulerCore:
        self.recordings.append([])
        configuration = recording.Configuration.of(self.settings, term, {})
        return recording.recorded(configuration, self.recordings[-1].append)

    def start_instance(self, name: str) -> None:
        self.num_incarnations += 1
        instance = self.instances[name] = Instance(name, str(self.num_incarnations))
        self.core.apply(OnRegistry(name, make_info(name, *MODELS, incarnation=instance.incarnation)), self.now)
        self.send_report(instance)

    def send_report(self, instance: Instance, *, is_lost: bool = False) -> None:
        instance.sequence += 1
        waiting = [r for name, r in instance.held.items() if name not in instance.running]
        loads = []
        room: dict[str, int] = {}
        for model in MODELS:
            of_model = [r for r in waiting if r.model == model]
            offline = [r for r in of_model if r.request_class == RequestClass.OFFLINE]
            loads.append(ModelLoad(model=model, num_running=0, num_waiting=len(of_model), num_offline=len(offline)))
            room[model] = max(0, ROOM - TOKENS * len(offline))
        report = make_report(
            instance.name,
            instance.sequence,
            incarnation=instance.incarnation,
            freeness=100.0 - len(instance.held),
            num_running=len(instance.running),
            waiting={load.model: load.num_waiting for load in loads},
            offline={load.model: load.num_offline for load in loads},
            room=room,
            admitted=instance.admitted,
            ended=instance.ended,
            migrations=instance.migrations,
            migrated_in=instance.migrated_in,
        )
        instance.admitted, instance.ended, instance.migrations, instance.migrated_in = [], [], [], []
        if not is_lost and instance.is_reachable:
            self.core.apply(OnReport(report), self.now)

    def act(self) -> None:
        """Collects the core's actions; the world answers them when it pleases."""
        while batch := self.core.actions(self.now):
            self.carry_out(batch)

    def carry_out(self, batch: list[Action]) -> None:
        self.check_order([action for action in batch if isinstance(action, Dispatch)])
        for action in batch:
            match action:
                case Dispatch():
                    self.check_dispatch(action)
                    self.calls.append(action)
                case AskHeld():
                    self.asks.append(action)
                case CancelAt(name, request_id, epoch):
                    self.cancel_at(name, request_id, epoch)
                case SendEntry(_, entry):
                    if entry.request_id in self.wanted:
                        assert entry.finish_reason in (FinishReason.DEADLINE, FinishReason.ERROR)
                        self.finish(entry.request_id)
                case NotifyLost(_, lost):
                    for item in lost.requests:
                        if item.request_id in self.wanted and item.epoch >= self.wanted[item.request_id].epoch:
                            self.submit_again(item.request_id, item.epoch)
                case ProbeSilence(names):
                    self.core.apply(DeclareLost(names), self.now)

    def cancel_at(self, name: str, request_id: str, epoch: int | None) -> None:
        instance = self.instances.get(name)
        if instance is None:
            return
        held = instance.held.get(request_id)
        if held is not None and (epoch is None or held.epoch <= epoch):
            self.deliver_end(instance.end(request_id))
        elif held is None and epoch is None and request_id in instance.moved_to:
            self.cancel_at(instance.moved_to.pop(request_id), request_id, None)

    def deliver_end(self, request: GenerationRequest) -> None:
        """A last frame: counts unless the gateway has seen a newer epoch."""
        wanted = self.wanted.get(request.request_id)
        if wanted is not None and request.epoch >= wanted.epoch:
            self.finish(request.request_id)

    def finish(self, request_id: str) -> None:
        del self.wanted[request_id]
        self.over[request_id] += 1

    def submit_again(self, request_id: str, lost_epoch: int) -> None:
        wanted = self.wanted.get(request_id)
        self.heard_owners.pop(request_id, None)
        if wanted is not None:
            epoch = next_placement(max(wanted.epoch, lost_epoch))
            again = make_request(
                request_id,
                model=wanted.model,
                epoch=epoch,
                waited_s=1.0,
                online=wanted.request_class == RequestClass.ONLINE,
                high=wanted.priority == Priority.HIGH,
            )
            self.wanted[request_id] = again
            refused = self.core.apply(Submit(again), self.now)
            if refused is not None:
                assert refused.code == ErrorCode.UNKNOWN_MODEL and again.model in self.removed
                self.finish(request_id)

    def check_dispatch(self, dispatch: Dispatch) -> None:
        request, name = dispatch.request, dispatch.instance_id
        state = self.core.cluster.get(name)
        assert state is not None and state.is_candidate
        for instance in self.instances.values():
            self.check_single_owner(instance, request)
        ledger = self.core.dispatcher.ledger
        if request.request_class == RequestClass.ONLINE:
            in_flight = ledger.num_waiting(name, request.model)
            limit = 2 * MAX_WAITING if request.priority == Priority.HIGH else MAX_WAITING
            assert state.load.by_model[request.model].num_waiting_online + in_flight <= limit
        else:
            in_flight = ledger.offline_tokens(name, request.model)
            assert state.load.offline_room(request.model) > in_flight - TOKENS

    def check_single_owner(self, instance: Instance, request: GenerationRequest) -> None:
        """In one epoch a request runs on one instance at most."""
        held = instance.held.get(request.request_id)
        assert held is None or held.epoch != request.epoch, f"{request.request_id} runs on {instance.name} already"

    def check_order(self, dispatched: list[Dispatch]) -> None:
        """All instances are alike, so what was dispatched stood before everything that is still queued in its lane."""
        for dispatch in dispatched:
            tracked = self.core.requests.get(dispatch.request.request_id)
            if tracked is None or tracked.state != RequestState.DISPATCHING:
                continue
            for other in self.core.queue.first(Lane(tracked.model, tracked.is_online), self.now, 100):
                assert tracked.key < other.key or other.deadline_s <= self.now

    # ---------------------------------------------------------------------------------------------------- rules

    @rule(
        model=st.sampled_from(MODELS), online=st.booleans(), high=st.booleans(), timeout_s=st.sampled_from([1.0, 60.0])
    )
    def submit(self, model: str, online: bool, high: bool, timeout_s: float) -> None:
        self.num_requests += 1
        request = make_request(f"r{self.num_requests}", model=model, online=online, high=high, timeout_s=timeout_s)
        refused = self.core.apply(Submit(request), self.now)
        if refused is None:
            self.wanted[request.request_id] = request
        else:
            lanes = self.core.queue.lengths().items()
            num_queued = sum(length for lane, length in lanes if lane.is_online == online)
            is_full = refused.code == ErrorCode.OVERLOADED and num_queued >= self.settings.max_queued
            assert is_full or (refused.code == ErrorCode.UNKNOWN_MODEL and model in self.removed)
        self.act()

    @precondition(lambda self: self.wanted)
    @rule(pick=some)
    def cancel(self, pick: int) -> None:
        request_id = list(self.wanted)[pick % len(self.wanted)]
        self.finish(request_id)
        self.core.apply(Cancel(request_id), self.now)
        self.act()

    @precondition(lambda self: self.wanted)
    @rule(pick=some)
    def gateway_misses_its_instance(self, pick: int) -> None:
        """A gateway places a request again by itself."""
        self.submit_again(list(self.wanted)[pick % len(self.wanted)], 0)
        self.act()

    @precondition(lambda self: self.calls)
    @rule(pick=some, fate=st.sampled_from(["ok", "ok", "ok", "refused", "request lost", "reply lost", "cut"]))
    def call_arrives(self, pick: int, fate: str) -> None:
        self.answer_call(self.calls.pop(pick % len(self.calls)), fate)

    def answer_call(self, dispatch: Dispatch, fate: str) -> None:
        instance = self.instances.get(dispatch.instance_id)
        error: ErrorInfo | None = None
        if instance is None or not instance.is_reachable:
            error = ErrorInfo(ErrorCode.UNAVAILABLE, "nobody is there")
        elif fate == "refused":
            error = ErrorInfo(ErrorCode.OVERLOADED, "full")
        elif fate == "request lost":
            error = ErrorInfo(ErrorCode.DEADLINE, "no reply")
        else:
            for other in self.instances.values():
                if other is not instance:
                    self.check_single_owner(other, dispatch.request)
            error = instance.submit(dispatch.request)
            if fate == "reply lost":
                error = ErrorInfo(ErrorCode.DEADLINE, "no reply")
            elif fate == "cut":
                error = ErrorInfo(ErrorCode.UNAVAILABLE, "connection lost")
        self.core.apply(OnDispatched.to(dispatch, error), self.now)
        self.act()

    @precondition(lambda self: self.asks)
    @rule(pick=some, is_lost=st.booleans())
    def ask_arrives(self, pick: int, is_lost: bool) -> None:
        self.answer_ask(self.asks.pop(pick % len(self.asks)), is_lost)

    def answer_ask(self, ask: AskHeld, is_lost: bool) -> None:
        instance = self.instances.get(ask.instance_id)
        held = None
        if instance is not None and instance.is_reachable and not is_lost:
            held = [held_as(r, is_running=r.request_id in instance.running) for r in instance.held.values()]
        self.core.apply(OnHeld(ask, held), self.now)
        self.act()

    @precondition(lambda self: self.instances)
    @rule(pick=some, is_lost=st.booleans())
    def report(self, pick: int, is_lost: bool) -> None:
        self.send_report(list(self.instances.values())[pick % len(self.instances)], is_lost=is_lost)
        self.act()

    @precondition(lambda self: self.instances)
    @rule(pick=some)
    def step(self, pick: int) -> None:
        """An instance runs what waits, and ends the oldest of what ran."""
        instance = list(self.instances.values())[pick % len(self.instances)]
        if instance.running:
            self.deliver_end(instance.end(min(instance.running)))
        instance.running = set(instance.held)
        self.send_report(instance)
        self.act()

    @precondition(lambda self: any(instance.held for instance in self.instances.values()))
    @rule(pick=some, to=some, is_heard=st.booleans(), is_destination_lost=st.booleans())
    def move(self, pick: int, to: int, is_heard: bool, is_destination_lost: bool) -> None:
        """`is_heard`: the gateway hears the first frame of the new owner before anything else."""
        held = [(source, name) for source in self.instances.values() for name in source.held]
        source, request_id = held[pick % len(held)]
        if source.held[request_id].epoch % PLACEMENT_EPOCHS >= PLACEMENT_EPOCHS - 2:
            return
        if is_destination_lost:
            gone = [name for name in NAMES if name not in self.instances]
            if gone:
                source.resume(request_id, gone[to % len(gone)])
            return
        others = [instance for instance in self.instances.values() if instance is not source]
        if others:
            destination = others[to % len(others)]
            source.hand_over(request_id, destination)
            wanted = self.wanted.get(request_id)
            if is_heard and wanted is not None and destination.held[request_id].epoch > wanted.epoch:
                epoch = destination.held[request_id].epoch
                self.wanted[request_id] = msgspec.structs.replace(wanted, epoch=epoch)
                self.heard_owners[request_id] = destination

    @precondition(lambda self: self.instances)
    @rule(pick=some, how=st.sampled_from(["exited", "vanished", "restarted", "silent"]))
    def die(self, pick: int, how: str) -> None:
        instance = self.instances.pop(list(self.instances)[pick % len(self.instances)])
        if how == "exited":
            self.core.apply(OnExited(InstanceExited(instance.name, instance.incarnation, "node", 137)), self.now)
        elif how == "vanished":
            self.core.apply(OnRegistry(instance.name, None), self.now)
        elif how == "restarted":
            self.start_instance(instance.name)
        self.act()

    @rule()
    def start_missing(self) -> None:
        for name in NAMES[:2]:
            if name not in self.instances:
                self.start_instance(name)
        self.act()

    @precondition(lambda self: self.instances)
    @rule(pick=some)
    def partition_or_heal(self, pick: int) -> None:
        instance = list(self.instances.values())[pick % len(self.instances)]
        instance.is_reachable = not instance.is_reachable

    @rule(seconds=st.sampled_from([0.01, 0.3, 2.0, 5.0]))
    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while (wakeup := self.core.next_wakeup()) is not None and wakeup <= end:
            self.now = max(self.now, wakeup)
            self.core.apply(OnTime(), self.now)
            self.act()
        self.now = end

    @rule()
    def bus_fails(self) -> None:
        self.core.apply(GrantGrace(), self.now)
        self.act()

    @rule()
    def remove_or_add_a_model(self) -> None:
        model = MODELS[1]
        self.removed ^= {model}
        self.core.apply(OnModel(model, model not in self.removed), self.now)
        self.act()

    @rule(mean_s=st.floats(0.01, 10))
    def statistics_change(self, mean_s: float) -> None:
        stats = FinishedStats(
            model=MODELS[0],
            request_class=RequestClass.ONLINE,
            prompt_tokens=10,
            output_tokens=20,
            queued_s=0.0,
            execution_s=mean_s,
            finish_reason=FinishReason.STOP,
        )
        self.core.apply(OnReport(make_report("gone", 1, finished=[stats])), self.now)
        self.core.apply(TakeExecutionStatistics(), self.now)
        self.act()

    @rule(answers=st.booleans())
    def another_leader(self, answers: bool) -> None:
        """The leader is gone with its queue; calls under way arrive, their replies reach nobody."""
        for dispatch in self.calls:
            instance = self.instances.get(dispatch.instance_id)
            if instance is not None and instance.is_reachable:
                instance.submit(dispatch.request)
        self.calls, self.asks = [], []
        self.term += 1
        self.core = self.new_core(self.term)
        self.removed = set()
        for instance in self.instances.values():
            info = make_info(instance.name, *MODELS, incarnation=instance.incarnation)
            self.core.apply(OnRegistry(instance.name, info), self.now)
        self.core.apply(AskEveryone(), self.now)
        self.act()
        while self.asks:
            self.answer_ask(self.asks.pop(), is_lost=not answers)
        self.core.apply(BeginServing(), self.now)
        for request in list(self.wanted.values()):
            refused = self.core.apply(Submit(request), self.now)
            if refused is not None:
                self.finish(request.request_id)
        self.act()

    # ----------------------------------------------------------------------------------------------- invariants

    @invariant()
    def everything_is_in_its_place(self) -> None:
        core, ledger = self.core, self.core.dispatcher.ledger
        queued = {id(t) for lane in core.queue.lengths() for t in core.queue.first(lane, self.now, 10_000)}
        assert queued == {id(t) for t in core.requests if t.state == RequestState.QUEUED}
        assert len(core.queue) == len(queued)
        assert not any(lane.model in self.removed for lane in core.queue.lengths())
        num_in_flight = 0
        for tracked in core.requests:
            if tracked.state == RequestState.QUEUED:
                assert not tracked.instance_id and tracked.request_id not in ledger
            else:
                state = core.cluster.get(tracked.instance_id)
                assert state is not None and state.is_alive, "nobody may wait for the dead"
                assert ledger.where(tracked.request_id) in (None, tracked.instance_id)
                assert tracked in core.requests.on_instance(tracked.instance_id)
            assert (tracked.request is None) == (tracked.state == RequestState.ASSIGNED)
            num_in_flight += tracked.request_id in ledger
        assert num_in_flight == len(ledger)

    @invariant()
    def nobody_waits_while_an_instance_has_room(self) -> None:
        assert self.core.actions(self.now) == []
        for lane in self.core.queue.lengths():
            if all(tracked.deadline_s <= self.now for tracked in self.core.queue.first(lane, self.now, 100)):
                continue
            for name, state in self.core.cluster:
                if state.is_candidate and lane.model in state.ready:
                    assert not self.core.dispatcher.ranking.has_room(lane, name, state)

    @invariant()
    def nothing_ends_twice(self) -> None:
        assert all(count == 1 for count in self.over.values())

    def teardown(self) -> None:
        if hasattr(self, "core"):
            try:
                self.bring_to_an_end()
            finally:
                self.given.stop()

    def bring_to_an_end(self) -> None:
        """All works again: every request must come to its end. And whatever was, is the same when it is run again."""
        for instance in self.instances.values():
            instance.is_reachable = True
        for request_id, owner in list(self.heard_owners.items()):
            if owner not in self.instances.values():
                self.submit_again(request_id, 0)  # its gateway has noticed, too
        for _ in range(300):
            if not self.wanted and not len(self.core.queue):
                break
            self.start_missing()
            for dispatch in self.calls[:]:
                self.calls.remove(dispatch)
                self.answer_call(dispatch, "ok")
            for ask in self.asks[:]:
                self.asks.remove(ask)
                self.answer_ask(ask, is_lost=False)
            for index in range(len(self.instances)):
                self.step(index)
            self.pass_time(0.3)
            self.everything_is_in_its_place()
        assert not self.wanted, f"never ended: {list(self.wanted)}"
        assert len(self.core.queue) == 0
        for written in self.recordings:
            recording.replay(b"".join(written))


World.TestCase.settings = settings(
    max_examples=examples(60),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestWorld = World.TestCase
