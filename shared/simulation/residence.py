"""Models on demand of a fleet in virtual time: loaded when requests for them come and put away when they are idle, as the
live placement decides (shared/placement/on_demand.py).

    FleetResidence(fleet, {"b": OnDemand(model, idle_s=30.0, host_load_s=0.3)}, fits)

The scheduler's report comes each second, and at once for a model that nobody serves. A model is loaded on all instances,
from disk the first time and from host memory then. Where others were put away for it, an instance begins when they are gone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from shared.messages.cluster import ModelDemand
from shared.messages.requests import GenerationRequest
from shared.placement.on_demand import Demands, Wake, decide
from shared.simulation.events import Timer
from shared.simulation.fleet import POLL_S, Fleet, Instance, Model
from shared.simulation.nodes import GRACE_S

REPORT_S, LEAST_REPORT_S = 1.0, 0.1
"""Between two reports of the scheduler, and at least where somebody asks for a model that nobody serves (as live)."""
DISK, HOST = "disk", "host"


class OnDemand(NamedTuple):
    """A model on demand."""

    model: Model
    """Its `load_s` is from disk."""
    idle_s: float
    """Time without requests after which it is put away."""
    host_load_s: float
    """Seconds to load it from host memory."""


class FleetResidence:
    def __init__(
        self,
        fleet: Fleet,
        models: Mapping[str, OnDemand],
        fits: Callable[[frozenset[str]], bool],
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        """Begins with all of these put away. `fits`: whether instances hold so many of them beside what is always loaded."""
        self.wakes: list[Wake] = []
        """Models that became ready, in order."""
        self.num_put_away = 0
        self._fleet, self._models, self._fits, self._grace_s = fleet, models, fits, grace_s
        self._demands = Demands()
        self._demands.configure({name: one.idle_s for name, one in models.items()}, fleet.events.now)
        self._awake: set[str] = set()
        self._in_host_memory: set[str] = set()
        self._told_s, self._is_due = -math.inf, False
        self._timer = Timer(fleet.events, self._decide)
        fleet.on_submit = self._on_submit
        fleet.events.after(REPORT_S, self._beat)

    def _beat(self) -> None:
        self._tell()
        self._fleet.events.after(REPORT_S, self._beat)

    def _on_submit(self, request: GenerationRequest) -> None:
        if request.model not in self._models or self._is_due or self._is_ready(request.model):
            return
        self._is_due = True
        self._fleet.events.at(self._told_s + LEAST_REPORT_S, self._tell)

    def _is_ready(self, name: str) -> bool:
        return any(name in one.ready_models for one in self._fleet.instances.values())

    def _tell(self) -> None:
        """The scheduler's report, unless nobody is the scheduler now."""
        fleet, self._is_due = self._fleet, False
        if not fleet.scheduler.is_over:
            self._told_s = fleet.events.now
            fleet.events.after(fleet.control_s, self._hear, fleet.core.demand(self._models, fleet.events.now))

    def _hear(self, demands: list[ModelDemand]) -> None:
        self._demands.hear(demands, self._fleet.events.now)
        self._decide()

    def _look(self) -> None:
        states = {
            name: [one.model_states[name] for one in self._fleet.instances.values() if name in one.model_states]
            for name in self._models
        }
        self.wakes += self._demands.see(states, self._fleet.events.now)

    def _decide(self) -> None:
        now = self._fleet.events.now
        self._look()
        if not self._demands.is_known(now):
            return
        decision = decide(self._demands.models(self._awake, now), now, self._fits)
        for name in decision.put_away:
            self.num_put_away += 1
            for instance in self._fleet.instances.values():
                if name in instance.model_states:
                    instance.begin_unload(name, self._grace_s)
        self._awake = set(decision.awake)
        for name in decision.woken:
            tier = HOST if name in self._in_host_memory else DISK
            self._in_host_memory.add(name)
            self._demands.wake(name, tier, now)
            for instance in self._fleet.instances.values():
                self._load(instance, name, tier)
        if decision.due_s > now:
            self._timer.set(decision.due_s)

    def _load(self, instance: Instance, name: str, tier: str) -> None:
        if instance.is_gone or name not in self._awake:
            return
        leaving = [one for one in instance.model_states if one in self._models and one not in self._awake]
        if leaving or name in instance.model_states:
            self._fleet.events.after(POLL_S, self._load, instance, name, tier)
            return
        one = self._models[name]
        load_s = one.host_load_s if tier == HOST else one.model.load_s
        instance.begin_load(msgspec.structs.replace(one.model, load_s=load_s))
        self._fleet.events.after(load_s + self._fleet.control_s, self._look)
