"""A whole fleet in virtual time: the live engines, drivers, scheduler's core and migrations; the same seed, the same run.

    fleet = Fleet(SchedulerSettings())
    for number in range(4):
        fleet.add_instance(f"instance-{number}", device, [model])
    records = fleet.run(jobs).records

Modelled are times: steps and copies take what the cost model says (with noise), messages of the scheduler `CONTROL_S`,
tokens reach their users at once. See docs/simulation.md.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from shared.costs.model import CostModel
from shared.engine.calls import AddModel, Cancel, RemoveModel, SetCostModel, SetStatistics, Submit
from shared.engine.driver import StepStats
from shared.engine.engine import Effect, Engine
from shared.engine.handover import Detached
from shared.engine.load_reports import (
    HEARTBEAT_S,
    MOST_DRIFT_INTERVAL_S,
    REPORT_INTERVAL_S,
    LoadReports,
    drift_interval_s,
    is_news,
)
from shared.engine.plan import ModelShape, StepPlan
from shared.engine.recording import Configuration
from shared.engine.requests import Ended, Output
from shared.messages.cluster import (
    ExecutionStatistics,
    InstanceExited,
    InstanceInfo,
    LoadedModel,
    MigrationOutcome,
    Role,
)
from shared.messages.migration import Rebalance
from shared.messages.requests import ErrorCode, ErrorInfo, GenerationRequest, HeldRequest
from shared.runtime.settings import SchedulerSettings
from shared.scheduling import actions, calls
from shared.scheduling.calls import Call
from shared.scheduling.core import SchedulerCore
from shared.simulation.disk import VirtualDisk
from shared.simulation.events import Events, Timer
from shared.simulation.gateway import LAST_TOKEN, Gateway, Job, RunFailed
from shared.simulation.instance import VirtualInstance, VirtualStep

if TYPE_CHECKING:
    from shared.simulation.migration import FleetMigrations, VirtualMigrations

T = TypeVar("T")

CONTROL_S = 0.001
"""Time of a message to or from the scheduler, one way."""
STATISTICS_S = 1.0
"""Between two tellings of execution times."""
POLL_S = 0.05
"""Between two looks at whether a model that is being unloaded, or an instance that drains, is empty."""
ENTRY_S = 3.0
"""Until the registry forgets an instance that does not write its entry any more."""
ANSWER_S = 1.0
"""Until a call that is not answered is given up."""
MIGRATING_SLOWDOWN = 1.01
"""Slowdown of the steps of an instance that sends or receives KV (Llumnix measures at most 1 %)."""
NUM_NOISES = 256
"""Drawn at once."""
PATIENCE_S = 3000.0
"""After the last arrival, for all to end."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance runs on."""

    configuration: Configuration
    """Configuration of its engine: KV pool, rows, policies."""
    merged_bytes: int = 1 << 20
    bandwidth_bytes_s: float = 8e9
    """Bandwidth of the link to any other instance; migrations beside the decode use `rate_share` of it."""
    rate_share: float = 0.5
    num_devices: int = 1
    """Devices that compute its steps together."""
    disk: VirtualDisk | None = None
    """Folder for KV blocks, which all instances on such devices share, if `configuration` says that they keep some there."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """On a kind of device."""

    shape: ModelShape
    cost_model: CostModel
    """What its steps take, but for noise, and what the engine knows of that."""
    load_s: float = 0.0
    """Time from the decision until an instance that runs serves it."""


class Instance:
    """Instance with the models, states and load reports of the instance service."""

    def __init__(
        self, fleet: Fleet, instance_id: str, incarnation: str, device: Device, engine: Engine, seed: int
    ) -> None:
        self.instance_id, self.incarnation, self.device, self.engine = instance_id, incarnation, device, engine
        self.state = "ready"
        """starting | ready | draining, as in the registry."""
        self.role, self.is_role_fixed = Role.BOTH, False
        self.models: dict[str, Model] = {}
        self.model_states: dict[str, str] = {}
        """loading | ready | unloading, as in the registry."""
        self.reports = LoadReports(instance_id, incarnation)
        self.step_s = 0.0
        """Mean seconds of the last steps that held decodes."""
        self.num_steps = 0
        self.on_step: Callable[[VirtualStep], None] = lambda step: None
        self.migrations: VirtualMigrations | None = None
        """None: requests stay here."""
        self._fleet, self._events, self._gateway = fleet, fleet.events, fleet.gateway
        self._draw = np.random.default_rng(seed)
        self._noises: list[float] = []
        """Noise of the next steps, the last first."""
        self.host = VirtualInstance(
            engine, fleet.events, lambda model: self.models[model].cost_model, self._sample, self._on_effects,
            on_turn=self._on_turn, on_step=self._on_step, slowdown=self._slowdown, disk=device.disk,
        )  # fmt: skip
        self._limits: dict[str, int] = {}
        self._rows: dict[int, tuple[int, int]] = {}
        """Row -> what is answered there, as of `Gateway.answer_of`."""
        self._num_preemptions = 0
        self._reported_s = -1.0
        self._drift_s = MOST_DRIFT_INTERVAL_S
        self._report_due_s = math.inf
        self._events.after(HEARTBEAT_S, self._beat)

    @property
    def is_gone(self) -> bool:
        return self.host.is_stopped

    @property
    def num_transfers(self) -> int:
        """Transfers of KV, in or out."""
        return 0 if self.migrations is None else self.migrations.num_transfers

    @property
    def ready_models(self) -> set[str]:
        """Models that take requests."""
        return {name for name, state in self.model_states.items() if state == "ready" and self.state != "starting"}

    def stop(self) -> None:
        """Stops the instance at once, whatever it does."""
        self.host.is_stopped = True
        if self.migrations is not None:
            self.migrations.is_dead = True

    def info(self) -> InstanceInfo:
        served = []
        for name, state in self.model_states.items():
            if state == "loading" or self.state == "starting":
                served.append(LoadedModel(name=name, state="loading"))  # its sizes are not known yet
                continue
            shape = self.models[name].shape
            served.append(
                LoadedModel(
                    name=name, state=state, max_model_len=self._limits.get(name, 0), block_size=shape.block_size,
                    blocks_per_merged=shape.blocks_per_merged,
                )
            )  # fmt: skip
        return InstanceInfo(
            instance_id=self.instance_id, incarnation=self.incarnation, node_id=self.instance_id, state=self.state,
            models=served, num_merged=self.device.configuration.num_merged, merged_bytes=self.device.merged_bytes,
            device="cuda", kv_address=self.instance_id, role=self.role, is_role_fixed=self.is_role_fixed,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------- models

    def begin_load(self, model: Model) -> None:
        name = model.shape.name
        self.models[name], self.model_states[name] = model, "loading"
        self._events.after(model.load_s, self.attach, model)
        self._fleet.register(self)

    def attach(self, model: Model) -> None:
        """It is loaded."""
        name, now = model.shape.name, self._events.now
        self.models[name], self.model_states[name] = model, "ready"
        self._limits[name] = self.engine.apply(AddModel(model.shape), now).max_model_len
        if self.device.disk is not None:
            self.device.disk.join(self.host, name)
        self.engine.apply(SetCostModel(name, model.cost_model), now)
        self.step_s = self.step_s or model.cost_model.fixed_s
        if self._fleet.migrations is not None:
            self._fleet.migrations.tell_fetch_cost(self, name)
        self._fleet.register(self)

    def begin_unload(self, name: str, grace_s: float) -> None:
        """Takes no new request for it, waits until those it has are gone (at most `grace_s`), ends the rest."""
        self.model_states[name] = "unloading"
        self._fleet.register(self)
        self._unload(name, self._events.now + grace_s)

    def _unload(self, name: str, deadline_s: float) -> None:
        now, migrations = self._events.now, self._fleet.migrations
        is_waiting = self.engine.num_held(name) and now < deadline_s
        if is_waiting and migrations is not None:
            migrations.give_away(self.instance_id, name)
        if is_waiting or not self.host.apply(RemoveModel(name)):
            self._events.after(POLL_S, self._unload, name, deadline_s)
            return
        if migrations is not None:
            migrations.stop_giving(self.instance_id, name)
        del self.model_states[name]
        self._fleet.register(self)

    # ---------------------------------------------------------------------------------------------- requests

    def submit_fetched(self, request: GenerationRequest, answer: Callable[[ErrorInfo | None], None]) -> None:
        """`submit`, after what the request is to fetch of its prompt has come."""
        if request.prefix_holder and self.migrations is not None and request.model in self.ready_models:
            block_size = self.models[request.model].shape.block_size
            self.migrations.fetch(request, block_size, lambda: answer(self.submit(request)))
        else:
            answer(self.submit(request))

    def submit(self, request: GenerationRequest) -> ErrorInfo | None:
        if self.state == "draining":
            return ErrorInfo(ErrorCode.DRAINING, f"instance {self.instance_id} is draining")
        if (state := self.model_states.get(request.model, "not here")) != "ready":
            return ErrorInfo(ErrorCode.GONE, f"model {request.model!r} is {state}")
        if self.migrations is None:
            request = msgspec.structs.replace(request, decoder="")
        refused = self.host.apply(Submit(request))
        if refused is None:
            self.reports.admitted.append(request.request_id)
            self._report_soon()
        return refused

    def cancel(self, action: actions.CancelAt) -> None:
        epoch = self.engine.held_epoch(action.request_id)
        if epoch is not None and (action.epoch is None or epoch <= action.epoch):
            self.host.apply(Cancel(action.request_id))

    def report_migration(self, outcome: MigrationOutcome) -> None:
        self.reports.migrations.append(outcome)
        self.wake()

    def report_migrated_in(self, held: HeldRequest) -> None:
        self.reports.migrated_in.append(held)
        self.wake()

    # ------------------------------------------------------------------------------------------------- steps

    def wake(self) -> None:
        """Something changed: a step may be possible, the load is another."""
        self.host.wake()
        self._report_soon()

    def _slowdown(self) -> float:
        if not self._noises:
            self._noises = np.exp(self._draw.normal(0.0, self._fleet.noise, NUM_NOISES))[::-1].tolist()
        return self._noises.pop() * (MIGRATING_SLOWDOWN if self.num_transfers else 1.0) * self._fleet.slowdown(self)

    def _on_turn(self, step: VirtualStep | None) -> None:
        if (num_preemptions := self.engine.counters.num_preemptions) != self._num_preemptions:
            self._num_preemptions = num_preemptions
            for sequence in self.engine.all_held():
                self._gateway.on_preempted(sequence.request.request_id, sequence.num_preemptions)
        if step is not None and any(step.plan.num_decodes):
            self.step_s += 0.1 * (step.whole_s - self.step_s)

    def _sample(self, plan: StepPlan) -> list[int]:
        rows, plan = self._rows, plan.expanded()
        for new in plan.new_sequences:
            rows[new.row] = self._gateway.answer_of(new.sampling.seed)
        return [
            LAST_TOKEN if start + count + 1 == rows[row][0] else rows[row][1]
            for row, start, count, samples in zip(plan.rows, plan.starts, plan.counts, plan.samples, strict=True)
            if samples
        ]

    def _on_step(self, step: VirtualStep) -> None:
        self.num_steps += 1
        plan, took_s = step.plan, step.whole_s * (step.stop_share - step.done_share)
        self._fleet.busy_s[self.instance_id] += took_s
        self._fleet.model_device_s[plan.model] += took_s * self.device.num_devices
        self.on_step(step)
        stats = StepStats(plan.model, sum(plan.counts), plan.num_decodes, step.whole_s)
        if self.migrations is not None and not step.is_suspended:
            self.migrations.on_step(stats)
        self._report_within(REPORT_INTERVAL_S if is_news((), stats) else self._drift_s)

    def _on_effects(self, effects: list[Effect]) -> None:
        # What is known of an ended request is noted before its user is told.
        for effect in effects:
            if isinstance(effect, Ended):
                self._gateway.on_finished(effect)
        for effect in effects:
            if isinstance(effect, Output):
                self._gateway.on_entries(effect.entries, self.instance_id)
            elif isinstance(effect, Ended):
                self.reports.on_ended(effect)
                self._report_soon()
            elif isinstance(effect, Detached) and effect.progress.num_computed:
                travelling = effect.request
                num_tokens = (len(travelling.prompt) + len(travelling.prior)) // 4
                self._gateway.on_detached(travelling.request_id, num_tokens, self.step_s)
        if self.migrations is not None:
            self.migrations.on_effects(effects)

    # ----------------------------------------------------------------------------------------------- reports

    def _report_soon(self) -> None:
        self._report_within(REPORT_INTERVAL_S)

    def _report_within(self, interval_s: float) -> None:
        due_s = max(self._reported_s + interval_s, self._events.now)
        if due_s < self._report_due_s:
            self._report_due_s = due_s
            self._events.at(due_s, self._report, due_s)

    def _beat(self) -> None:
        if not self.is_gone:
            self._report_soon()
            self._events.after(HEARTBEAT_S, self._beat)

    def _report(self, due_s: float) -> None:
        if self.is_gone or due_s != self._report_due_s:
            return
        self._report_due_s = math.inf
        self._reported_s = self._events.now
        num_out = 0 if self.migrations is None else self.migrations.num_out
        num_in = self.num_transfers - num_out
        leaving = {
            name for name, state in self.model_states.items() if state == "unloading" or self.state == "draining"
        }
        load = self.engine.load(self._events.now, leaving)
        self._drift_s = drift_interval_s(load)
        report = self.reports.take(load, num_out, num_in, self.engine.memory.cache_news.take())
        self._fleet.tell(calls.OnReport(report))


class Scheduler:
    """One term of the scheduler's core, hosted as the service hosts it."""

    def __init__(
        self, fleet: Fleet, settings: SchedulerSettings, term: int, inherited: Mapping[str, ExecutionStatistics]
    ) -> None:
        self.core = SchedulerCore(settings, term, inherited)
        self.term = term
        self.is_serving = True
        self.is_over = False
        """It is dead; another takes over."""
        self._fleet, self._events = fleet, fleet.events
        self._timer = Timer(self._events, lambda: self.apply(calls.OnTime()))

    def apply(self, call: Call[T]) -> T | None:
        """Carries the call out, does what the core says then, and returns the answer. Nothing once the term is over."""
        if self.is_over:
            return None
        answer = self.core.apply(call, self._events.now)
        self.act()
        return answer

    def act(self) -> None:
        for action in self.core.actions(self._events.now):
            self._carry_out(action)
        self._timer.set(self.core.next_wakeup())

    def _carry_out(self, action: actions.Action) -> None:
        fleet, after = self._fleet, self._events.after
        match action:
            case actions.Dispatch():
                after(fleet.control_s, self._dispatch, action)
            case actions.AskHeld():
                self._ask(action)
            case actions.SendRebalance(instance_id, rebalance):
                after(fleet.control_s, fleet.on_rebalance, instance_id, rebalance)
            case actions.CancelAt():
                after(fleet.control_s, fleet.on_cancel, action)
            case actions.SendEntry(_, entry):
                after(fleet.control_s, fleet.gateway.on_entries, [entry], None)
            case actions.NotifyLost(_, lost):
                after(fleet.control_s, fleet.gateway.on_lost, lost)
            case actions.ProbeSilence(instance_ids):  # the bus works
                after(2 * fleet.control_s, self.apply, calls.DeclareLost(instance_ids))
            case actions.ScaleUp() | actions.DrainAction() | actions.CancelDrain():
                assert fleet.scale is not None
                self.apply(calls.OnScaled(fleet.scale(action)))
            case actions.TellRole(instance_id, role):
                after(fleet.control_s, fleet.on_role, instance_id, role)
            case (
                actions.Paired()
                | actions.InstanceLost()
                | actions.LeftQueue()
                | actions.MigrationEnded()
                | actions.Waits()
            ):  # for metrics and timelines
                pass

    def _dispatch(self, action: actions.Dispatch) -> None:
        instance = self._fleet.reach(action.instance_id)
        if instance is None:
            error = ErrorInfo(ErrorCode.DEADLINE, f"{action.instance_id} does not answer")
            self._events.after(ANSWER_S, self.apply, calls.OnDispatched.to(action, error))
        else:
            instance.submit_fetched(
                action.request,
                lambda refused: self._events.after(
                    self._fleet.control_s, self.apply, calls.OnDispatched.to(action, refused)
                ),
            )

    def _ask(self, ask: actions.AskHeld) -> None:
        def answer() -> None:
            instance = self._fleet.reach(ask.instance_id)
            is_here = instance is not None and instance.incarnation == ask.incarnation
            held = instance.engine.held_requests() if instance is not None and is_here else None
            self._events.after(self._fleet.control_s if is_here else ANSWER_S, self.apply, calls.OnHeld(ask, held))

        self._events.after(self._fleet.control_s, answer)


class Fleet:
    """`run` once."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        noise: float = 0.05,
        seed: int = 0,
        migrations: Callable[[Fleet], FleetMigrations] | None = None,
        has_priorities: bool = True,
        control_s: float = CONTROL_S,
        tells_statistics: bool = True,
        statistics: Iterable[ExecutionStatistics] = (),
        slowdown: Callable[[Instance], float] = lambda _: 1.0,
    ) -> None:
        """`noise`: standard deviation of the logarithm of step times around the cost model. `migrations`: of a fleet;
        None: requests stay where they are. `has_priorities`: else all requests are normal ones. `control_s`: of a message to
        or from the scheduler. `tells_statistics`: instances hear of execution times. `statistics`: those that are known from
        before.
        `slowdown`: of a step that an instance begins now, beside noise: what others do to it that share its machine."""
        self.events = Events()
        self.noise, self.seed, self.control_s, self.slowdown = noise, seed, control_s, slowdown
        self.gateway = Gateway(lambda: self.events.now, self.events.after, self._submit)
        self.gateway.has_priorities = has_priorities
        self.instances: dict[str, Instance] = {}
        """Instances that are in the registry."""
        self.settings = settings
        self._statistics: dict[str, ExecutionStatistics] = {one.model: one for one in statistics}
        self.scheduler = Scheduler(self, settings, 1, self._statistics)
        self.migrations = None if migrations is None else migrations(self)
        self.num_role_changes = 0
        """Changes of role that the scheduler told."""
        self.emptied_s: dict[str, float] = {}
        """Time at which each instance that was drained held nothing any more."""
        self.on_submit: Callable[[GenerationRequest], None] = lambda _: None
        """Hears of each request that the scheduler was given."""
        self.scale: Callable[[actions.ScalingAction], list[str]] | None = None
        """Carries out what the scheduler wants, and says which instances it released for that."""
        self.busy_s: defaultdict[str, float] = defaultdict(float)
        """Busy seconds of each instance, in steps that have ended or parts of them; also of instances that are gone."""
        self.model_device_s: defaultdict[str, float] = defaultdict(float)
        """Devices times seconds of each model's steps, likewise."""
        self._num_made = 0
        if tells_statistics:
            self.events.after(STATISTICS_S, self._tell_statistics)

    @property
    def core(self) -> SchedulerCore:
        return self.scheduler.core

    # ---------------------------------------------------------------------------------------------- instances

    def add_instance(
        self,
        instance_id: str,
        device: Device,
        models: Iterable[Model],
        *,
        engine: Engine | None = None,
        start_s: float = 0.0,
    ) -> Instance:
        """`start_s`: until it serves; it is in the registry from now on. `engine`: where the device's configuration does
        not say all."""
        seed = self.seed * 1000 + len(self.instances)
        self._num_made += 1
        instance = Instance(
            self, instance_id, str(self._num_made), device, engine or device.configuration.build(), seed
        )  # fmt: skip
        instance.state = "starting" if start_s else "ready"
        self.instances[instance_id] = instance
        if self.migrations is not None:
            instance.migrations = self.migrations.add(instance)
        for model in models:
            instance.attach(model)
        for statistics in self._statistics.values():
            instance.engine.apply(SetStatistics(statistics), self.events.now)
        if start_s:
            self.events.after(start_s, self.set_state, instance, "ready")
        instance.wake()
        return instance

    def set_state(self, instance: Instance, state: str) -> None:
        instance.state = state
        self.events.after(self.control_s, self.register, instance)

    def register(self, instance: Instance) -> None:
        """Its entry in the registry is another."""
        if self.instances.get(instance.instance_id) is instance:
            self._tell_entry(instance.instance_id, instance.info())

    def drain(self, instance_id: str, grace_s: float = math.inf) -> None:
        """Takes no new request; those it has move away, where the fleet moves requests. `grace_s`: where given, it is
        removed when it is empty, so much later at most."""
        instance = self.instances[instance_id]
        self.set_state(instance, "draining")
        instance.wake()
        self.watch_drain(instance, self.events.now + grace_s)

    def undrain(self, instance_id: str) -> None:
        """Takes requests again, and gives none away any more for its drain."""
        self.set_state(self.instances[instance_id], "ready")
        if self.migrations is not None:
            self.migrations.end_drain(instance_id)

    def watch_drain(self, instance: Instance, deadline_s: float = math.inf) -> None:
        """Watches it until it is empty, or the deadline, at which it is removed."""
        if instance.is_gone or instance.state != "draining":
            return
        is_empty = not instance.engine.all_held()
        if not is_empty and self.events.now < deadline_s:
            self.events.after(0.01, self.watch_drain, instance, deadline_s)
            return
        if is_empty:
            self.emptied_s[instance.instance_id] = self.events.now
        if deadline_s < math.inf:
            self.remove(instance.instance_id)

    def remove(self, instance_id: str) -> None:
        """It ends in order; what it still holds is placed elsewhere."""
        instance = self.instances.pop(instance_id)
        instance.stop()
        self._tell_entry(instance_id, None)

    def _tell_entry(self, instance_id: str, info: InstanceInfo | None) -> None:
        self.scheduler.apply(calls.OnRegistry(instance_id, info))
        if self.migrations is not None:
            self.migrations.on_instance(instance_id, info)

    # ----------------------------------------------------------------------------------------------- failures

    def fail(self, instance_id: str, *, is_noticed: bool = False) -> None:
        """It dies. `is_noticed`: its node says so; else nobody does until its silence is noticed."""
        instance = self.instances[instance_id]
        instance.stop()
        if is_noticed:
            suspects = tuple(instance.engine.unproven())
            exited = InstanceExited(instance_id, instance.incarnation, instance_id, 1, suspects)
            self.tell(calls.OnExited(exited))
            self.events.after(self.control_s, self.gateway.on_exited, exited)
        self.events.after(ENTRY_S, self._expire, instance)

    def _expire(self, instance: Instance) -> None:
        if self.instances.get(instance.instance_id) is instance:
            del self.instances[instance.instance_id]
            self._tell_entry(instance.instance_id, None)
            self.gateway.on_gone(instance.instance_id)

    def replace_scheduler(self, after_s: float = 0.5) -> None:
        """The scheduler dies; another takes over so much later, and learns from the instances who holds what."""
        self.scheduler.is_over, self.scheduler.is_serving = True, False
        self.events.after(after_s, self._take_over)

    def _take_over(self) -> None:
        if not self.scheduler.is_over:
            return
        term = self.scheduler.term + 1
        self.scheduler = Scheduler(self, self.settings, term, self._statistics)
        for instance in self.instances.values():
            self.core.apply(calls.OnRegistry(instance.instance_id, instance.info()), self.events.now)
        self.core.apply(calls.AskEveryone(), self.events.now)
        self.scheduler.is_serving = False
        self.scheduler.act()
        all_answer = all(self.reach(instance_id) is not None for instance_id in self.instances)
        self.events.after((0.0 if all_answer else ANSWER_S) + 3 * self.control_s, self._begin_serving, self.scheduler)

    def _begin_serving(self, scheduler: Scheduler) -> None:
        if scheduler.is_over:
            return
        scheduler.core.apply(calls.BeginServing(), self.events.now)
        scheduler.is_serving = True
        for number in self.gateway.open_streams():
            self.gateway.send(number)

    def reach(self, instance_id: str) -> Instance | None:
        """None: it does not answer."""
        instance = self.instances.get(instance_id)
        return None if instance is None or instance.is_gone else instance

    # ------------------------------------------------------------------------------------------------ running

    def run(self, jobs: Sequence[Job], *, patience_s: float = PATIENCE_S, has_endless_batches: bool = False) -> Gateway:
        """Until all have ended; of `has_endless_batches`, these jobs alone. Raises `RunFailed` where one has not,
        `patience_s` after the last came."""
        left = set[int]()
        for job in jobs:
            left.add(self.submit_at(job, left.discard))
        limit_s = jobs[-1].at_s + patience_s
        if not self.events.run(lambda: not (left if has_endless_batches else self.gateway.num_left), limit_s):
            num_left = len(left) if has_endless_batches else self.gateway.num_left
            raise RunFailed(f"{num_left} of {len(jobs)} requests have not ended by {limit_s:.0f} s")
        return self.gateway

    def submit_at(self, job: Job, then: Callable[[int], None] | None = None) -> int:
        """Returns the request's number; `then` is called with it when the request is over."""
        number = self.gateway.expect(job, then)
        self.events.at(job.at_s, self.gateway.send, number)
        return number

    def _submit(self, request: GenerationRequest) -> None:
        # Where nobody serves, whoever takes over is told of it.
        if self.scheduler.is_serving and (refused := self.scheduler.apply(calls.Submit(request))):
            self.gateway.on_refused(request.request_id, refused.message)
        self.on_submit(request)

    def tell(self, call: Call[None]) -> None:
        """Whoever is the scheduler when it arrives there."""
        self.events.after(self.control_s, lambda: self.scheduler.apply(call))

    def on_rebalance(self, instance_id: str, rebalance: Rebalance) -> None:
        if self.migrations is not None and self.reach(instance_id) is not None:
            self.migrations.on_rebalance(instance_id, rebalance)

    def on_role(self, instance_id: str, role: Role) -> None:
        if (instance := self.reach(instance_id)) is not None:
            instance.role = role
            self.num_role_changes += 1

    def on_cancel(self, action: actions.CancelAt) -> None:
        if (instance := self.reach(action.instance_id)) is not None:
            instance.cancel(action)

    def _tell_statistics(self) -> None:
        if not self.scheduler.is_over:
            for statistics in self.core.apply(calls.TakeExecutionStatistics(), self.events.now):
                self._statistics[statistics.model] = statistics
                for instance in self.instances.values():
                    instance.engine.apply(SetStatistics(statistics), 0.0)
        self.events.after(STATISTICS_S, self._tell_statistics)
