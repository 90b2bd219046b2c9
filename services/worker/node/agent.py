"""The node agent: starts, watches and restarts the instances of this machine, as the placement plan says.

Owns: the node's registry entry, the instances' processes. `state` decides what to do next, `processes` does it; here
are the bus, the clock and the loop that ties them.

    PLANS, INSTANCES (watched), exits -> NodeState -> actions -> processes, INSTANCE_LOAD_MODEL/UNLOAD_MODEL/DRAIN
                                                            -> NODES, INSTANCE_EXITED
    NODE_SCALE -> NODES (how many instances there may be) -> placement -> PLANS

How many instances the node offers is kept nowhere but in the plan: an agent that is started again begins with as many as
the plan has for it, within what its settings allow.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode
from prometheus_client import CollectorRegistry, Counter, Gauge

from services.worker.node.environment import instance_environment
from services.worker.node.fetching import Fetching
from services.worker.node.machine import Machine
from services.worker.node.processes import InstanceProcess, Processes
from shared.bus.interface import Bus, BusError, KeyValue, ServiceError, Subscription, Watch
from shared.messages.admin import Done, Drain, LoadModel, ScaleNode, UnloadModel
from shared.messages.catalogue import (
    INSTANCE_DRAIN,
    INSTANCE_EXITED,
    INSTANCE_LOAD_MODEL,
    INSTANCE_UNLOAD_MODEL,
    INSTANCES,
    NODE_SCALE,
    NODES,
    PLANS,
)
from shared.messages.channels import Endpoint
from shared.messages.cluster import (
    DeviceGroupError,
    InstanceExited,
    InstanceInfo,
    InstancePlan,
    NodeInfo,
    PlacementPlan,
)
from shared.messages.requests import ErrorCode
from shared.placement.node import Action, Ask, Kill, NodeState, Query, Start, Terminate, num_planned
from shared.runtime.settings import SettingsError, WorkerSettings, default_id
from shared.runtime.tasks import TaskSet, set_within
from shared.runtime.telemetry import Telemetry, context_of

logger = logging.getLogger(__name__)

INSTANCE_COMMAND = (sys.executable, "-m", "services.worker.instance.main")
REGISTER_INTERVAL_S = 1.0
TICK_S = 0.25
"""The longest that a due restart or repetition waits."""
CALL_TIMEOUT_S = 5.0
ENDPOINTS: dict[type[Query], Endpoint[Any, Done]] = {
    LoadModel: INSTANCE_LOAD_MODEL,
    UnloadModel: INSTANCE_UNLOAD_MODEL,
    Drain: INSTANCE_DRAIN,
}
"""Instances answer these calls at once and work afterwards."""
MAX_PROBLEM_CHARACTERS = 1000
MAX_LOGGED = 8
"""Requests that are named in the log when an instance crashes over them."""


class _Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.instances = Gauge("tideway_node_instances", "Instances by state", ["state"], registry=registry)
        self.restarts = Counter(
            "tideway_node_restarts", "Instances that exited unexpectedly", ["instance"], registry=registry
        )
        self.plan_version = Gauge(
            "tideway_node_plan_version", "Version of the last placement plan that was fully applied", registry=registry
        )
        self.ready = Gauge("tideway_node_ready", "1 if the instances serve what is planned for them", registry=registry)
        self.memory = Gauge(
            "tideway_node_memory_bytes", "Memory for weights and KV pools of all instances", registry=registry
        )


class NodeAgent:
    """`command`: argument vector of an instance's process. `drain_grace_s`: what instances get to give their requests away
    when they or models of theirs are to go. `step_tokens`: of one of their steps at most."""

    def __init__(
        self,
        bus: Bus,
        settings: WorkerSettings,
        telemetry: Telemetry,
        machine: Machine,
        command: Sequence[str] = INSTANCE_COMMAND,
        drain_grace_s: float = 0.0,
        step_tokens: int = 512,
    ) -> None:
        self.node_id = settings.node_id or default_id("node")
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.node_id):
            raise SettingsError(f"TIDEWAY_NODE_ID={self.node_id!r}: expected letters, digits, - and _ only")
        self._bus = bus
        self._settings = settings
        self._telemetry = telemetry
        self._machine = machine
        self._drain_grace_s = drain_grace_s
        self._state = NodeState(self.node_id, drain_grace_s)
        self._processes = Processes(command, self._on_exit, log_format=settings.log_format)
        self._metrics = _Metrics(telemetry.registry)
        self._metrics.memory.set(machine.memory_bytes)
        self._info = NodeInfo(
            node_id=self.node_id,
            hostname=socket.gethostname(),
            num_instances=machine.num_instances,
            memory_bytes=machine.memory_bytes,
            device=machine.device,
            max_instances=machine.most_instances,
            block_size=machine.attention[0].block_sizes[0],
            attention=machine.attention,
            groups=machine.groups,
            devices=machine.devices,
            step_tokens=step_tokens,
            device_name=machine.device_name,
        )
        self._fetching = Fetching(self._show_fetched)
        self._has_seen_plan = False
        self._reported: dict[str, str] = {}
        """Instance id -> the last incarnation whose end was published."""
        self._wake = asyncio.Event()
        self._info_changed = asyncio.Event()
        self._plan_span: Span = trace.INVALID_SPAN
        self._is_stopping = False
        self._unready = ["there is no placement plan yet"]
        self._tasks = TaskSet()
        self._watches: list[Watch[Any]] = []
        self._registry: Watch[InstanceInfo] | None = None
        self._subscriptions: list[Subscription] = []
        self._registration: asyncio.Task[None] | None = None
        self._nodes: KeyValue[NodeInfo] | None = None

    # ----------------------------------------------------------------------------------------- start and stop

    async def start(self) -> None:
        """Registers, and begins with the plan there is; returns without waiting for instances."""
        self._nodes = await self._bus.key_value(NODES)
        self._registry = await (await self._bus.key_value(INSTANCES)).watch(self._on_registry)
        self._watches.append(self._registry)
        self._watches.append(await (await self._bus.key_value(PLANS)).watch(self._on_plan))
        self._subscriptions.append(await self._bus.serve(NODE_SCALE.at(node_id=self.node_id), self._on_scale))
        self._bus.on_reconnect(self._info_changed.set)
        self._registration = self._tasks.start(self._keep_registered(), "registration")
        self._tasks.start(self._reconcile_for_ever(), "reconciliation")
        logger.info(
            "node %s offers %d instances (at most %d) on %s with %.1f GiB",
            self.node_id,
            self._info.num_instances,
            self._info.max_instances,
            self._machine.device,
            self._machine.memory_bytes / 2**30,
        )

    async def stop(self) -> None:
        """Ends the instances (SIGTERM, at which they give their requests away; SIGKILL if that takes too long) and leaves
        the registry. While they drain the node stays registered, so that a plan that counts on it stays as it is for a
        restart."""
        self._is_stopping = True
        self._unready = ["stopping"]
        for subscription in self._subscriptions:
            await subscription.stop()
        await self._tasks.end_all(but={self._registration})
        await self._processes.stop(self._drain_grace_s)
        await self._tasks.end_all()
        try:
            if self._nodes is not None:
                await self._nodes.delete(self.node_id)
        except BusError as error:
            logger.info("the node's registry entry is left to expire: %s", error)
        for watch in self._watches:
            await watch.stop()
        self._end_plan_span()

    def hurry(self) -> None:
        """While `stop` waits: the instances give their requests up; the second time they are killed."""
        logger.warning("stopping at once")
        self._processes.hurry()

    def problems(self) -> list[str]:
        """Problems for /health; called from another thread. That an instance is restarting is no fault of the agent."""
        return [] if self._bus.is_connected else ["not connected to NATS"]

    def unready(self) -> list[str]:
        """Reasons for /ready why the instances here do not serve what is planned for them; called from another thread."""
        return self._unready

    # ------------------------------------------------------------------------------------------------- events

    def _on_plan(self, key: str, plan: PlacementPlan | None) -> None:
        # A plan that vanishes (a server that lost its disk) changes nothing: placement writes it again.
        if key == "current" and plan is not None:
            self._end_plan_span()
            self._plan_span = self._telemetry.tracer.start_span(
                "node.apply_plan",
                context=plan_context(plan),
                attributes={"tideway.node": self.node_id, "tideway.plan_version": plan.version},
            )
            self._fetching.want(plan.fetch.get(self.node_id, []))
            self._show_fetched()
            if not self._has_seen_plan:
                self._has_seen_plan = True
                num_devices = num_planned(plan, self.node_id)
                self._offer(max(self._info.num_instances, -(-num_devices // self._machine.group_size)))
            self._state.on_plan(plan)
            self._wake.set()

    def _show_fetched(self) -> None:
        fetched, problems = self._fetching.fetched, self._fetching.problems
        self._info = msgspec.structs.replace(self._info, fetched=fetched, fetch_problems=problems)
        self._info_changed.set()

    def _on_scale(self, query: ScaleNode) -> Done:
        """Fewer take effect with the plan that follows: it drains the instances that are over."""
        most = self._info.max_instances
        if not 1 <= query.num_instances <= most:
            message = (
                f"{self.node_id} runs 1 to {most} instances (TIDEWAY_MAX_NODE_INSTANCES), not {query.num_instances}"
            )
            raise ServiceError.of(ErrorCode.CONFLICT, message, "num_instances")
        logger.info("%d instances are asked for instead of %d", query.num_instances, self._info.num_instances)
        self._offer(query.num_instances)
        return Done()

    def _offer(self, num_instances: int) -> None:
        self._info = msgspec.structs.replace(self._info, num_instances=min(num_instances, self._info.max_instances))
        self._info_changed.set()

    def _on_registry(self, instance_id: str, info: InstanceInfo | None) -> None:
        process = self._processes.get(instance_id)
        if info is None or (process is not None and process.pid == info.pid):
            if process is not None and info is not None:
                process.incarnation = info.incarnation
            self._state.on_registry(instance_id, info, self._bus.now())
            self._wake.set()
        elif info.node_id == self.node_id and self._reported.get(instance_id) != info.incarnation:
            self._on_stranger(info)

    def _on_stranger(self, info: InstanceInfo) -> None:
        """An entry of this node that no process of this agent wrote: its predecessor's instances died with it."""
        if _is_alive(info.pid):
            logger.warning(
                "process %d serves as %s, but this agent did not start it: is the node id %s used twice?",
                info.pid,
                info.instance_id,
                self.node_id,
            )
            self._reported[info.instance_id] = info.incarnation
        else:
            self._publish_exit(info.instance_id, info.incarnation, -signal.SIGKILL)

    def _on_exit(self, instance_id: str, process: InstanceProcess, exit_code: int) -> None:
        reason = process.exit_reason(exit_code)
        is_failure = self._state.on_exit(instance_id, reason, self._bus.now()) and not self._is_stopping
        suspects = process.suspects if is_failure and exit_code else ()
        self._publish_exit(instance_id, process.incarnation, exit_code, suspects)
        if is_failure:
            self._metrics.restarts.labels(instance_id).inc()
            computing = f", computing {', '.join(suspects[:MAX_LOGGED])}" if suspects else ""
            logger.error("%s (process %d) %s%s", instance_id, process.pid, reason, computing)
        else:
            logger.info("%s (process %d) %s, as asked", instance_id, process.pid, reason)
        self._wake.set()

    def _publish_exit(self, instance_id: str, incarnation: str, exit_code: int, suspects: tuple[str, ...] = ()) -> None:
        self._reported[instance_id] = incarnation
        self._bus.publish(INSTANCE_EXITED, InstanceExited(instance_id, incarnation, self.node_id, exit_code, suspects))

    # ----------------------------------------------------------------------------------------- reconciliation

    async def _reconcile_for_ever(self) -> None:
        while True:
            await set_within(self._wake, TICK_S)
            self._wake.clear()
            try:
                hears = self._bus.is_connected and self._registry is not None and not self._registry.problem
                for action in self._state.step(self._bus.now(), is_connected=hears):
                    self._begin(action)
                self._show_state()
            except Exception:
                logger.exception("reconciling failed")
                await asyncio.sleep(REGISTER_INTERVAL_S)

    def _begin(self, action: Action) -> None:
        """Starts and signals at once; calls to instances run on their own, and are repeated if they fail."""
        match action:
            case Start(plan):
                self._start_instance(plan)
            case Terminate(instance_id, reason):
                logger.warning("ending %s: %s", instance_id, reason)
                self._signal(instance_id, signal.SIGTERM)
            case Kill(instance_id):
                logger.warning("%s does not end; killing it", instance_id)
                self._signal(instance_id, signal.SIGKILL)
            case Ask(instance_id, query):
                self._tasks.start(self._call(action), f"{type(query).__name__} {instance_id}")

    def _start_instance(self, plan: InstancePlan) -> None:
        instance_id = plan.instance_id
        with self._span("node.start_instance", instance_id) as span:
            try:
                environment = instance_environment(self._settings, self._machine, self.node_id, plan, os.environ)
                process = self._processes.start(instance_id, environment)
            except (OSError, subprocess.SubprocessError, DeviceGroupError) as error:
                logger.error("%s could not be started: %s", instance_id, error)
                span.set_status(Status(StatusCode.ERROR, str(error)))
                self._state.on_exit(instance_id, f"could not be started: {error}", self._bus.now())
                return
        names = ", ".join(spec.name for spec in plan.models)
        logger.info("started %s as process %d with %s", instance_id, process.pid, names)

    def _signal(self, instance_id: str, number: signal.Signals) -> None:
        if (process := self._processes.get(instance_id)) is not None:
            process.signal(number)

    async def _call(self, action: Ask) -> None:
        logger.info("%s", action)
        with self._span(f"node.{type(action.query).__name__}", action.instance_id) as span:
            try:
                endpoint = ENDPOINTS[type(action.query)].at(instance_id=action.instance_id)
                await self._bus.request(endpoint, action.query, timeout_s=CALL_TIMEOUT_S)
            except BusError as error:
                span.set_status(Status(StatusCode.ERROR, str(error)))
                logger.warning("%s: %s", action, error)

    def _span(self, name: str, instance_id: str) -> AbstractContextManager[Span]:
        return self._telemetry.tracer.start_as_current_span(
            name,
            context=trace.set_span_in_context(self._plan_span),
            attributes={"tideway.node": self.node_id, "tideway.instance": instance_id},
        )

    def _end_plan_span(self) -> None:
        """The span of a plan lasts until it is carried out, or another takes its place."""
        self._plan_span.end()
        self._plan_span = trace.INVALID_SPAN

    # ------------------------------------------------------------------------------------------- registration

    def _show_state(self) -> None:
        """Metrics, and the registry entry if it changed."""
        for phase, count in self._state.num_by_phase().items():
            self._metrics.instances.labels(phase).set(count)
        self._unready = self._state.unready(self._bus.now())
        self._metrics.ready.set(not self._unready)
        problem = "; ".join(self._state.problems())[:MAX_PROBLEM_CHARACTERS]
        crashes = {
            name: msgspec.structs.replace(crash, reason=crash.reason[:MAX_PROBLEM_CHARACTERS])
            for name, crash in self._state.crashes().items()
        }
        version = self._state.plan_version or self._info.plan_version
        if self._state.plan_version:
            self._end_plan_span()
        if (version, problem, crashes) == (self._info.plan_version, self._info.problem, self._info.crashes):
            return
        if version != self._info.plan_version:
            logger.info("plan %d is carried out", version)
        self._info = msgspec.structs.replace(self._info, plan_version=version, problem=problem, crashes=crashes)
        self._metrics.plan_version.set(version)
        self._info_changed.set()

    async def _keep_registered(self) -> None:
        is_registered = True
        assert self._nodes is not None
        while True:
            self._info_changed.clear()
            try:
                await self._nodes.put(self.node_id, self._info)
                is_registered = True
            except BusError as error:
                if is_registered:
                    logger.warning("could not register the node: %s", error)
                is_registered = False
            await set_within(self._info_changed, REGISTER_INTERVAL_S)


def plan_context(plan: PlacementPlan) -> Context | None:
    """Trace context of the replacement that a plan is a step of."""
    if plan.change is None or plan.change.is_over or not plan.change.trace:
        return None
    return context_of(plan.change.trace)


def _is_alive(pid: int) -> bool:
    """Not of a zombie that nobody has waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
