"""The node agents of a fleet in virtual time, with the decisions of the live ones (shared/placement/node.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from shared.messages.admin import Drain, LoadModel, UnloadModel
from shared.messages.cluster import InstancePlan, PlacementPlan
from shared.placement.node import Action, Ask, Kill, NodeState, Start, Terminate
from shared.simulation.fleet import Device, Fleet, Model

GRACE_S = 30.0
"""Time for requests to leave what is drained or unloaded."""


class FleetNodes:
    """Brings a fleet to placements while it serves. Call `step` whenever an instance may have come or gone."""

    def __init__(
        self,
        fleet: Fleet,
        node_ids: Iterable[str],
        device: Callable[[InstancePlan], Device],
        models: Callable[[InstancePlan], Mapping[str, Model]],
        start_s: Callable[[InstancePlan], float],
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        """`device`, `models` (by name), `start_s` (until it serves): of an instance of a plan."""
        self.num_ranks: dict[str, int] = {}
        """Devices of each instance that runs."""
        self._fleet, self._device, self._models, self._start_s = fleet, device, models, start_s
        self._states = {node_id: NodeState(node_id, grace_s) for node_id in node_ids}
        self._places: dict[str, InstancePlan] = {}
        self._running: dict[str, NodeState] = {}

    def bring_about(self, plan: PlacementPlan) -> None:
        """Instances of the first plan that the fleet has already are taken to be as it says."""
        self._places |= {place.instance_id: place for place in plan.instances}
        for state in self._states.values():
            state.on_plan(plan)
        self.step()

    def step(self) -> None:
        now, instances = self._fleet.events.now, self._fleet.instances
        for instance_id, state in list(self._running.items()):
            if instance_id in instances:
                state.on_registry(instance_id, instances[instance_id].info(), now)
            else:
                del self._running[instance_id]
                state.on_exit(instance_id, "exited unexpectedly", now)
        for state in self._states.values():
            for action in state.step(now):
                self._act(state, action)

    def _act(self, state: NodeState, action: Action) -> None:
        match action:
            case Start(place):
                self._running[place.instance_id], self.num_ranks[place.instance_id] = state, place.group.num_ranks
                if place.instance_id not in self._fleet.instances:
                    models = self._models(place).values()
                    self._fleet.add_instance(
                        place.instance_id, self._device(place), models, start_s=self._start_s(place)
                    )
            case Ask(instance_id, LoadModel(spec)):
                place = self._places[instance_id]
                self._fleet.instances[instance_id].begin_load(self._models(place)[spec.name])
            case Ask(instance_id, UnloadModel(name, grace_s)):
                self._fleet.instances[instance_id].begin_unload(name, grace_s)
            case Ask(instance_id, Drain(is_undone=True)):
                self._fleet.undrain(instance_id)
            case Ask(instance_id, Drain(grace_s)):
                self._fleet.drain(instance_id, grace_s)
            case Terminate(instance_id) | Kill(instance_id):
                self._fleet.remove(instance_id)
