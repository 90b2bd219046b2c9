"""What a node agent does next: the difference between the placement plan and what runs here, as small steps. Pure: time
(seconds, monotonic) is an argument, and whoever drives this carries the actions out and reports what happened.

Life of an instance's process (one row each; anything else is ignored):

| phase    | event                                   | next     | action of `step`                        |
|----------|-----------------------------------------|----------|-----------------------------------------|
| absent   | planned, back-off over, devices free    | starting | Start                                   |
| starting | registered                              | up       |                                         |
| starting | no longer planned so                    | stopping | Terminate (it serves nobody yet)        |
| up       | a model more or less in the plan        | up       | LoadModel, UnloadModel                  |
| up       | pool changed and its turn; not planned  | stopping | Drain                                   |
| starting, up | not heard of for too long           | stopping | Terminate                               |
| stopping | planned again while it drains           | up       | Drain, undone                           |
| stopping | too slow                                | stopping | Terminate, then Kill                    |
| any      | process exited                          | absent   | (back-off, unless it was to stop)       |

Rules: no device is of two processes at once: an instance starts when all that had its devices have ended. What the plan
leaves unchanged is not touched. A pool changes only by a restart, of one instance at a time, and only while all others of
this node that are planned are up and load nothing. Models on demand that are put away leave before others are loaded. A
request to an instance is repeated while its effect does not show in the registry. Registry entries of other processes are
the caller's to filter out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from shared.messages.admin import Drain, LoadModel, UnloadModel
from shared.messages.cluster import (
    ONE_DEVICE,
    InstanceCrash,
    InstanceInfo,
    InstancePlan,
    LoadedModel,
    ModelSpec,
    PlacementPlan,
    instance_devices,
)

BACK_OFF_FIRST_S = 0.5
BACK_OFF_MOST_S = 30.0
HEALTHY_AFTER_S = 60.0
"""A process that lived so long was healthy: its end starts the back-off anew."""

SETTLE_S = 3.0
"""A request to an instance shows in the registry (written each second) by then, or it is repeated."""

STOP_MARGIN_S = 10.0
"""Beyond a drain's grace before SIGTERM; and from SIGTERM to SIGKILL."""

START_TIMEOUT_S = 120.0
"""Time from start to the first registration: importing torch on a busy machine takes tens of seconds, never minutes."""

UNHEARD_S = 30.0
"""A registered instance that is missing from the registry for so long hangs (a lost bus connection is back sooner)."""

PLANNED_AFTER_S = 5.0
"""Time from the first step: placement has heard of a node by then, and planned what it gets."""


Query = LoadModel | UnloadModel | Drain


@dataclass(frozen=True)
class Start:
    plan: InstancePlan


@dataclass(frozen=True)
class Ask:
    """Send the query to the instance."""

    instance_id: str
    query: Query


@dataclass(frozen=True)
class Terminate:
    """SIGTERM."""

    instance_id: str
    reason: str


@dataclass(frozen=True)
class Kill:
    """SIGKILL."""

    instance_id: str


Action = Start | Ask | Terminate | Kill


def back_off_s(num_failures: int) -> float:
    """Wait after that many failures in a row (at least 1)."""
    return min(BACK_OFF_FIRST_S * 2.0 ** min(num_failures - 1, 30), BACK_OFF_MOST_S)


def _foreign(plan: InstancePlan) -> list[ModelSpec]:
    """Its model whose engine is another's, which has the process for itself and is its whole life."""
    return [spec for spec in plan.models if not spec.is_native]


def num_planned(plan: PlacementPlan, node_id: str) -> int:
    """Devices of the node up to the last one of the last instance that the plan knows, drained ones included (of which it
    knows one device each)."""
    ranks = dict.fromkeys(plan.draining, 1) | {i.instance_id: i.group.num_ranks for i in plan.instances}
    pattern = re.compile(re.escape(node_id) + r"-(\d+)")
    return max((int(match[1]) + num for i, num in ranks.items() if (match := pattern.fullmatch(i))), default=0)


@dataclass
class _Asked:
    """A load or unload that was sent to an instance."""

    kind: type
    at: float
    num_times: int = 1

    @property
    def repeat_at(self) -> float:
        return self.at + max(SETTLE_S, back_off_s(self.num_times))


@dataclass
class _Stop:
    begun_at: float
    sent_at: float = 0.0
    """Time at which the last Drain, or its undoing, was sent."""
    is_undone: bool = False
    """It is to serve again, and does not show that it does yet."""
    terminated_at: float | None = None
    is_killed: bool = False
    failure: str = ""
    """Set where the process is stopped for a fault of its own."""


@dataclass(kw_only=True)
class _Process:
    plan: InstancePlan
    """Plan with which the process was started; its pool is what the process has for life."""
    started_at: float
    heard_at: float
    """Time at which `info` was last known to be right; START_TIMEOUT_S and UNHEARD_S count from here."""
    specs: dict[str, ModelSpec]
    """Name -> the spec that this process was given last."""
    info: InstanceInfo | None = None
    was_registered: bool = False
    was_ready: bool = False
    asks: dict[str, _Asked] = field(default_factory=dict)
    stop: _Stop | None = None

    def loaded(self) -> dict[str, LoadedModel]:
        """Entries without those of which it has but the weights, in host memory."""
        return {name: model for name, model in self.entries().items() if model.state != "host"}

    def entries(self) -> dict[str, LoadedModel]:
        return {} if self.info is None else {model.name: model for model in self.info.models}

    @property
    def is_up(self) -> bool:
        """Registered and to stay; it is "ready" only with a model that is."""
        return self.stop is None and self.info is not None and self.info.state in ("starting", "ready")

    @property
    def is_ready(self) -> bool:
        return self.stop is None and self.info is not None and self.info.state == "ready"

    def serves(self, plan: InstancePlan) -> bool:
        """One without models is there for those on demand."""
        return self.is_ready or (self.is_up and not plan.models)

    @property
    def is_draining(self) -> bool:
        """Whether the registry shows it so."""
        return self.info is not None and self.info.state == "draining"

    def has_pool_of(self, plan: InstancePlan) -> bool:
        """Whether it has the plan's pool, and computes on its devices, where both name any."""
        if self.plan.group != plan.group and ONE_DEVICE not in (self.plan.group, plan.group):
            return False
        if self.plan.group.num_ranks != plan.group.num_ranks:
            return False
        if _foreign(self.plan) != _foreign(plan):
            return False
        return (self.plan.pool_bytes, self.plan.merged_bytes) == (plan.pool_bytes, plan.merged_bytes)

    def carries_out(self, plan: InstancePlan) -> bool:
        wanted = {spec.name: spec for spec in plan.models}
        return (
            self.serves(plan)
            and self.has_pool_of(plan)
            and {name: self.specs.get(name) for name in self.loaded()} == wanted
            and all(model.state == "ready" for model in self.loaded().values())
        )


@dataclass
class _Instance:
    process: _Process | None = None
    num_failures: int = 0
    """In a row."""
    num_unready: int = 0
    """Failures in a row, up to the last, of processes that were never ready."""
    failure: str = ""
    """The last one."""
    start_at: float = 0.0
    """Not before."""

    @property
    def phase(self) -> str:
        if self.process is None:
            return "absent"
        if self.process.stop is not None:
            return "stopping"
        return "ready" if self.process.is_ready else "starting"


PHASES = ("absent", "starting", "ready", "stopping")


class NodeState:
    """The instances of one node. Call `step` after every event and at least each second. `drain_grace_s`: what requests get
    to leave or finish before their instance goes."""

    def __init__(self, node_id: str, drain_grace_s: float) -> None:
        self.node_id = node_id
        self._drain_grace_s = drain_grace_s
        self._plan: PlacementPlan | None = None
        self._desired: dict[str, InstancePlan] = {}
        self._instances: dict[str, _Instance] = {}
        self._begun_at: float | None = None

    # ------------------------------------------------------------------------------------------------ events

    def on_plan(self, plan: PlacementPlan) -> None:
        self._plan = plan
        self._desired = {i.instance_id: i for i in plan.instances if i.node_id == self.node_id}
        for instance_id in self._desired:
            self._instances.setdefault(instance_id, _Instance())

    def on_registry(self, instance_id: str, info: InstanceInfo | None, now: float) -> None:
        """The registry's entry of the process that runs here now; None: it is gone."""
        instance = self._instances.get(instance_id)
        if instance is not None and instance.process is not None:
            instance.process.info = info
            instance.process.heard_at = now
            instance.process.was_registered |= info is not None
            instance.process.was_ready |= instance.process.is_ready

    def on_exit(self, instance_id: str, reason: str, now: float) -> bool:
        """The process ended, or could not be started. `reason`, for the operator, completes "the instance ...". Returns
        whether that is a failure."""
        instance = self._instances[instance_id]
        process, instance.process = instance.process, None
        instance.start_at = now
        if process is not None and process.stop is not None:
            reason = process.stop.failure
        if not reason:
            return False
        if process is not None and now - process.started_at >= HEALTHY_AFTER_S:
            instance.num_failures = 0
        instance.num_failures += 1
        instance.num_unready = 0 if process is not None and process.was_ready else instance.num_unready + 1
        instance.failure = reason
        instance.start_at += back_off_s(instance.num_failures)
        return True

    # --------------------------------------------------------------------------------------------- decisions

    def step(self, now: float, *, is_connected: bool = True) -> list[Action]:
        """What to do now. Each action counts as done: report what comes of it as an event. While the bus is away
        (`is_connected` False), silence of an instance means nothing."""
        if self._begun_at is None:
            self._begun_at = now
        actions: list[Action] = []
        for instance_id, instance in sorted(self._instances.items()):
            process, desired = instance.process, self._desired.get(instance_id)
            if process is None:
                if desired is None:
                    del self._instances[instance_id]
                elif now >= instance.start_at and not self._is_taken(desired):
                    instance.process = _Process(
                        plan=desired, started_at=now, heard_at=now, specs={spec.name: spec for spec in desired.models}
                    )
                    actions.append(Start(desired))
                continue
            if not is_connected:
                process.heard_at = now
            if process.stop is not None:
                actions += self._go_on_stopping(instance_id, process, process.stop, desired, now)
            else:
                actions += self._step_running(instance_id, process, desired, now)
        return actions

    def _is_taken(self, plan: InstancePlan) -> bool:
        """Whether a process has a device of the instance."""
        running = [instance.process.plan for instance in self._instances.values() if instance.process is not None]
        wanted = instance_devices(plan.instance_id, plan.group.num_ranks)
        return any(wanted & instance_devices(other.instance_id, other.group.num_ranks) for other in running)

    def _step_running(
        self, instance_id: str, process: _Process, desired: InstancePlan | None, now: float
    ) -> list[Action]:
        if process.info is None:
            silent_s = now - process.heard_at
            if silent_s >= (UNHEARD_S if process.was_registered else START_TIMEOUT_S):
                failure = f"was not heard of for {silent_s:.0f} s"
                process.stop = _Stop(now, terminated_at=now, failure=failure)
                return [Terminate(instance_id, failure)]
        is_as_planned = desired is not None and process.has_pool_of(desired)
        if not is_as_planned and not process.was_registered:
            process.stop = _Stop(now, terminated_at=now)
            return [Terminate(instance_id, "the plan changed before it served")]
        if desired is None or (not is_as_planned and self._others_serve(instance_id)):
            process.stop = _Stop(now, sent_at=now)
            return [Ask(instance_id, Drain(self._drain_grace_s))]
        return self._step_models(instance_id, process, desired, now) if process.is_up else []

    def _step_models(self, instance_id: str, process: _Process, desired: InstancePlan, now: float) -> list[Action]:
        actions: list[Action] = []
        loaded = process.entries()
        wanted = {spec.name: spec for spec in desired.models}
        asleep = self._plan.asleep if self._plan is not None else {}
        # What is put away may be there to make room for what is woken: both at once would not fit.
        is_leaving = any(name in asleep and entry.state != "host" for name, entry in loaded.items())
        for name in sorted(wanted.keys() | loaded.keys() | process.asks.keys()):
            want, entry, have = wanted.get(name), loaded.get(name), process.specs.get(name)
            query: Query | None = None
            if entry is not None and entry.state in ("loading", "unloading"):
                continue
            is_kept = entry is not None and entry.state == "host"
            if is_kept and want is None and name in asleep:
                pass
            elif entry is not None and want != have and not (is_kept and want is not None):
                query = UnloadModel(name, self._drain_grace_s, keeps_weights=want is None and name in asleep)
            elif want is not None and (entry is None or is_kept or (entry.state == "failed" and not entry.is_final)):
                # What is loaded beside a pool that is still to shrink might not fit.
                if not process.has_pool_of(desired) or is_leaving:
                    continue
                query = LoadModel(want)
            if query is None:
                process.asks.pop(name, None)
                continue
            ask = process.asks.get(name)
            if ask is not None and ask.kind is type(query):
                if now < ask.repeat_at:
                    continue
                process.asks[name] = _Asked(type(query), now, ask.num_times + 1)
            else:
                process.asks[name] = _Asked(type(query), now)
            if isinstance(query, LoadModel):
                process.specs[name] = query.spec
            actions.append(Ask(instance_id, query))
        return actions

    def _go_on_stopping(
        self, instance_id: str, process: _Process, stop: _Stop, desired: InstancePlan | None, now: float
    ) -> list[Action]:
        if stop.is_killed:
            return []
        if stop.terminated_at is not None:
            if now - stop.terminated_at < STOP_MARGIN_S:
                return []
            stop.is_killed = True
            return [Kill(instance_id)]
        is_wanted = desired is not None and process.has_pool_of(desired)
        request = Ask(instance_id, Drain(self._drain_grace_s, is_undone=is_wanted))
        if is_wanted != stop.is_undone:
            stop.is_undone, stop.begun_at, stop.sent_at = is_wanted, now, now
            return [request]
        # The registry may be older than what was sent last.
        is_settled = process.info is not None and now - stop.sent_at >= SETTLE_S
        if is_settled and stop.is_undone and not process.is_draining:
            process.stop = None
            return []
        if now - stop.begun_at >= self._drain_grace_s + STOP_MARGIN_S:
            stop.terminated_at = now
            return [Terminate(instance_id, "draining took too long")]
        # A draining instance that has left the registry is about to exit.
        if is_settled and process.is_draining == stop.is_undone:
            stop.sent_at = now
            return [request]
        return []

    def _others_serve(self, instance_id: str) -> bool:
        """Whether every other planned instance has a process that is up and is not loading anything."""
        for other in self._desired.keys() - {instance_id}:
            process = self._instances[other].process
            if process is None or not process.is_up:
                return False
            if any(model.state == "loading" for model in process.loaded().values()):
                return False
        return True

    # ------------------------------------------------------------------------------------------------- views

    @property
    def plan_version(self) -> int:
        """Version of the newest plan, if it is carried out whole; else 0."""
        if self._plan is None or self._instances.keys() != self._desired.keys():
            return 0
        for instance_id, desired in self._desired.items():
            process = self._instances[instance_id].process
            if process is None or not process.carries_out(desired):
                return 0
        return self._plan.version

    def crashes(self) -> dict[str, InstanceCrash]:
        """How each planned instance ended last that has not been ready since, in ascending order."""
        instances = {instance_id: self._instances[instance_id] for instance_id in sorted(self._desired)}
        return {
            instance_id: InstanceCrash(instance.failure, instance.num_failures, instance.num_unready)
            for instance_id, instance in instances.items()
            if instance.num_failures and instance.phase != "ready"
        }

    def problems(self) -> list[str]:
        """Why the plan is not carried out whole, a sentence each."""
        found, crashes = [], self.crashes()
        for instance_id, desired in sorted(self._desired.items()):
            instance = self._instances[instance_id]
            if instance_id in crashes:
                found.append(f"{instance_id} {crashes[instance_id]}")
            planned = {spec.name for spec in desired.models}
            for model in instance.process.loaded().values() if instance.process is not None else ():
                if model.state == "failed" and model.name in planned:
                    found.append(f"{instance_id} could not load {model.name!r}: {model.error}")
                elif model.is_held_up and model.name in planned:
                    found.append(f"{instance_id} waits with {model.name!r}: {model.error}")
        return found

    def unready(self, now: float) -> list[str]:
        """Why the node does not serve what the newest plan has for it, a sentence each. Empty: it does, but for models that
        failed for good (waiting helps none of them), and did not just come back from one crash of several in a row."""
        if self._plan is None:
            return ["there is no placement plan yet"]
        if not self._desired and (self._begun_at is None or now - self._begun_at < PLANNED_AFTER_S):
            return ["nothing is planned here yet"]
        found = []
        for instance_id, desired in sorted(self._desired.items()):
            instance = self._instances[instance_id]
            process, num_failures = instance.process, instance.num_failures
            if process is None or not process.serves(desired):
                found.append(f"{instance_id} is {instance.phase}")
            elif num_failures > 1 and now - process.started_at < HEALTHY_AFTER_S:
                found.append(f"{instance_id} {instance.failure} ({num_failures} times in a row) and has just come back")
            else:
                settled = {
                    name
                    for name, model in process.loaded().items()
                    if model.state == "ready" or (model.state == "failed" and model.is_final)
                }
                wanted = {spec.name for spec in desired.models if process.specs.get(spec.name) == spec}
                if missing := sorted({spec.name for spec in desired.models} - (settled & wanted)):
                    found.append(f"{instance_id} does not serve {', '.join(missing)}")
        return found

    def num_by_phase(self) -> dict[str, int]:
        """Instances in each of PHASES."""
        phases = [instance.phase for instance in self._instances.values()]
        return {phase: phases.count(phase) for phase in PHASES}
