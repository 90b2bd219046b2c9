"""A node agent whose instances are scripted: the decisions are the real ones (`NodeState`), processes and weights are
not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec

from shared.bus.interface import Bus, KeyValue
from shared.messages.admin import Drain, LoadModel, UnloadModel
from shared.messages.catalogue import INSTANCES, NODES, PLANS
from shared.messages.cluster import DeviceGroup, InstanceInfo, InstancePlan, LoadedModel, NodeInfo, PlacementPlan
from shared.placement.node import Ask, Kill, NodeState, Start, Terminate

GIB = 1 << 30
TURN_S = 0.05


@dataclass
class _Instance:
    plan: InstancePlan
    incarnation: str
    models: dict[str, str]
    """Name -> state."""
    state: str = "starting"

    def info(self) -> InstanceInfo:
        models = [
            LoadedModel(name=name, state=state, error="no such tensor" if state == "failed" else "")
            for name, state in sorted(self.models.items())
        ]
        return InstanceInfo(
            instance_id=self.plan.instance_id, incarnation=self.incarnation, node_id=self.plan.node_id, state=self.state,
            models=models, group=self.plan.group,
        )  # fmt: skip


@dataclass
class ScriptedNode:
    """`start`, `stop`. Each turn, what is loading becomes ready."""

    bus: Bus
    node_id: str
    num_devices: int = 2
    memory_bytes: int = 4 * GIB
    groups: tuple[DeviceGroup, ...] = ()
    failing: set[str] = field(default_factory=set)
    """Models that cannot be loaded."""
    is_loading: bool = True
    """Else no model becomes ready."""
    is_fetching: bool = True
    """Else weights do not come."""
    fetch_problems: dict[str, str] = field(default_factory=dict)
    ever_missing: set[str] = field(default_factory=set)
    """Models that were ready once, and then on no instance at some time."""

    async def start(self) -> None:
        self._state = NodeState(self.node_id, 0.2)
        self._instances: dict[str, _Instance] = {}
        self._num_started = 0
        self._plan = PlacementPlan(0, [])
        self._served: set[str] = set()
        self._nodes: KeyValue[NodeInfo] = await self.bus.key_value(NODES)
        self._registry: KeyValue[InstanceInfo] = await self.bus.key_value(INSTANCES)
        await (await self.bus.key_value(PLANS)).watch(self._on_plan)
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._nodes.delete(self.node_id)
        for instance_id in self._instances:
            await self._registry.delete(instance_id)

    @property
    def models(self) -> dict[str, set[str]]:
        """Ready ones, by instance."""
        return {i: {n for n, s in one.models.items() if s == "ready"} for i, one in self._instances.items()}

    @property
    def failed(self) -> set[str]:
        """Instances with a model that could not be loaded."""
        return {i for i, one in self._instances.items() if "failed" in one.models.values()}

    def _on_plan(self, _: str, plan: PlacementPlan | None) -> None:
        if plan is not None:
            self._plan = plan
            self._state.on_plan(plan)

    async def _run(self) -> None:
        while True:
            now = self.bus.now()
            for action in self._state.step(now):
                match action:
                    case Start(plan):
                        self._num_started += 1
                        states = {spec.name: "loading" for spec in plan.models}
                        self._instances[plan.instance_id] = _Instance(plan, str(self._num_started), states)
                    case Ask(instance_id, query):
                        self._ask(self._instances[instance_id], query)
                    case Terminate(instance_id) | Kill(instance_id):
                        await self._end(instance_id)
            for instance_id, instance in list(self._instances.items()):
                if instance.state == "gone":
                    await self._end(instance_id)
                    continue
                await self._registry.put(instance_id, instance.info())
                self._state.on_registry(instance_id, instance.info(), now)
                self._go_on(instance)
            serving = set().union(*self.models.values(), set())
            self.ever_missing |= self._served - serving
            self._served |= serving
            await self._register()
            await asyncio.sleep(TURN_S)

    def _go_on(self, instance: _Instance) -> None:
        if instance.state == "draining":
            instance.state = "gone"
        for name, state in list(instance.models.items()):
            if state == "loading" and self.is_loading:
                instance.models[name] = "failed" if name in self.failing else "ready"
                instance.state = "ready"
            elif state == "unloading":
                del instance.models[name]

    def _ask(self, instance: _Instance, query: LoadModel | UnloadModel | Drain) -> None:
        match query:
            case LoadModel(spec):
                instance.models[spec.name] = "loading"
            case UnloadModel(name):
                instance.models[name] = "unloading"
            case Drain():
                instance.state = "ready" if query.is_undone else "draining"

    async def _end(self, instance_id: str) -> None:
        del self._instances[instance_id]
        await self._registry.delete(instance_id)
        self._state.on_registry(instance_id, None, self.bus.now())
        self._state.on_exit(instance_id, "", self.bus.now())

    async def _register(self) -> None:
        wanted = self._plan.fetch.get(self.node_id, [])
        info = NodeInfo(
            node_id=self.node_id, hostname="host", num_instances=self.num_devices, memory_bytes=self.memory_bytes,
            plan_version=self._state.plan_version, problem="; ".join(self._state.problems()),
            crashes=self._state.crashes(),
            devices=("cpu",) * self.num_devices, groups=self.groups,
            fetched=tuple(s for s in wanted if s not in self.fetch_problems) if self.is_fetching else (),
            fetch_problems={s: text for s, text in self.fetch_problems.items() if s in wanted},
        )  # fmt: skip
        await self._nodes.put(self.node_id, msgspec.structs.replace(info))
