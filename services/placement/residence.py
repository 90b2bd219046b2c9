"""Which models on demand are loaded, live: hosts `shared.placement.on_demand`, which decides.

    SCHEDULER_DEMAND, INSTANCES -> Demands -> decide -> `why_asleep` of each model -> planning

Owns what is known of requests for these models. A new leader begins with what the plan says; it puts nothing away before it
has heard the scheduler.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping

from services.placement.inputs import Inputs
from services.placement.metrics import PlacementMetrics
from shared.bus.interface import Bus, Subscription, Watch
from shared.messages.catalogue import INSTANCES, SCHEDULER_DEMAND
from shared.messages.cluster import DemandReport, InstanceInfo, ModelSpec, PlacementPlan, WhyAsleep
from shared.placement.on_demand import Demands, decide

logger = logging.getLogger(__name__)

LEAST_WAIT_S = 0.05
IN_HOST_MEMORY = "host"
"""State of such a model on an instance."""


class Residence:
    """`on_change` is called when a decision is due."""

    def __init__(self, bus: Bus, metrics: PlacementMetrics, on_change: Callable[[], None]) -> None:
        self._bus = bus
        self._metrics = metrics
        self._on_change = on_change
        self._demands = Demands()
        self._asleep: dict[str, WhyAsleep] = {}
        self._names: frozenset[str] = frozenset()
        self._due_s = math.inf
        self._seen: dict[str, dict[str, str]] = {}
        """By instance: the states that models on demand have there."""
        self._instances: Watch[InstanceInfo] | None = None
        self._reports: Subscription | None = None
        self.is_urgent = False
        """Somebody waits for a model that is put away, and no decision was made since."""

    async def open(self, models: Mapping[str, ModelSpec], plan: PlacementPlan) -> None:
        """`plan`: the one that runs. Raises `BusError`."""
        self.configure(models)
        for name in {spec.name for place in plan.instances for spec in place.models}:
            self._asleep.pop(name, None)
        self._instances = await (await self._bus.key_value(INSTANCES)).watch(self._on_instance)
        self._reports = await self._bus.subscribe(SCHEDULER_DEMAND, self._on_demand)

    async def close(self) -> None:
        for source in (self._reports, self._instances):
            if source is not None:
                await source.stop()

    def configure(self, models: Mapping[str, ModelSpec]) -> None:
        """The models as they are now; a new one on demand is put away."""
        idle_s = {name: spec.idle_s for name, spec in models.items() if spec.on_demand}
        self._demands.configure(idle_s, self._bus.now())
        awake = self._names - self._asleep.keys()
        self._asleep = {name: self._asleep.get(name, WhyAsleep.IDLE) for name in idle_s.keys() - awake}
        self._names = frozenset(idle_s)

    def why_asleep(self, spec: ModelSpec) -> str:
        """A `WhyAsleep`; empty: it is to be placed."""
        if not spec.on_demand:
            return ""
        return self._asleep.get(spec.name, "") if spec.name in self._names else WhyAsleep.IDLE

    def due_in_s(self) -> float:
        """Until time alone may change what was decided."""
        return max(LEAST_WAIT_S, self._due_s - self._bus.now())

    @property
    def is_waited_for(self) -> bool:
        """Requests wait for a model that is put away."""
        return self.is_urgent or self._demands.is_wanted(self._asleep)

    def in_host_memory(self) -> frozenset[tuple[str, str]]:
        """(model, instance) pairs."""
        return frozenset((name, i) for name, states in self._states().items() for i in states.get(IN_HOST_MEMORY, ()))

    async def decide(self, inputs: Inputs) -> None:
        """`inputs`: with the models as they are in the plan."""
        self.is_urgent = False
        now = self._bus.now()
        self._look(now)
        if not self._names or not self._demands.is_known(now):
            self._due_s = math.inf
            return
        models = self._demands.models(self._names - self._asleep.keys(), now)
        decision = await asyncio.to_thread(decide, models, now, inputs.fit)
        if any(self._demands.has_online(name) for name in decision.put_away):
            self._due_s = now  # somebody asked for it meanwhile: decided again
            return
        in_host_memory = {name for name, _ in self.in_host_memory()}
        for name in decision.woken:
            tier = "host" if name in in_host_memory else "disk"
            self._demands.wake(name, tier, now)
            self._metrics.wakes.labels(name, tier).inc()
            logger.info("model %r is loaded from %s: requests wait for it", name, tier)
        for name, cause in decision.put_away.items():
            self._metrics.put_aways.labels(name, cause).inc()
            logger.info("model %r is put away (%s)", name, cause)
        self._asleep = {name: why for name, why in decision.asleep.items() if name in self._names}
        self._due_s = decision.due_s

    def _states(self) -> dict[str, dict[str, list[str]]]:
        """By model on demand: the instances on which it is in each state."""
        states: dict[str, dict[str, list[str]]] = {}
        for instance_id, of_models in self._seen.items():
            for name, state in of_models.items():
                if name in self._names:
                    states.setdefault(name, {}).setdefault(state, []).append(instance_id)
        return states

    def _look(self, now: float) -> None:
        for wake in self._demands.see(self._states(), now):
            self._metrics.wake_seconds.labels(wake.tier).observe(wake.seconds)
            logger.info("model %r is ready %.2f s after it was asked for", wake.model, wake.seconds)

    def _on_instance(self, instance_id: str, info: InstanceInfo | None) -> None:
        """Entries are written each second, and few of them say anything new of these models."""
        models = info.models if info is not None else ()
        states = {model.name: model.state for model in models if model.name in self._names}
        if states != self._seen.get(instance_id, {}):
            self._seen[instance_id] = states
            if not states:
                del self._seen[instance_id]
            self._look(self._bus.now())

    def _on_demand(self, report: DemandReport) -> None:
        if self._demands.hear(report.models, self._bus.now()):
            self.is_urgent = True
            self._on_change()
