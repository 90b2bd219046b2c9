"""A fleet that grows and shrinks: the scheduler's scaler, and a placement that does at once what it says, but for the time
that an instance takes to start."""

from __future__ import annotations

from collections.abc import Callable

from shared.scheduling.actions import CancelDrain, DrainAction, ScaleUp, ScalingAction
from shared.scheduling.calls import LookAtScale
from shared.simulation.fleet import Fleet

INTERVAL_S = 1.0
"""Between two looks of the scaler."""


class Scaling:
    """Scaling of a fleet, from now on."""

    def __init__(self, fleet: Fleet, add: Callable[[str], object]) -> None:
        """`add(instance_id)`: to the fleet, of the kind that it grows by. The fleet's settings must say that it scales."""
        self._fleet, self._add = fleet, add
        fleet.scale = self._scale
        self.num_started = 0
        self._instance_s = 0.0
        self._counted_s = 0.0
        fleet.events.after(INTERVAL_S, self._look)

    def mean_instances(self) -> float:
        """Mean number of instances in the registry until now."""
        self._count()
        return self._instance_s / self._fleet.events.now

    def _count(self) -> None:
        """Instances since the last call."""
        now = self._fleet.events.now
        self._instance_s += len(self._fleet.instances) * (now - self._counted_s)
        self._counted_s = now

    def _look(self) -> None:
        fleet = self._fleet
        self._count()
        fleet.scheduler.apply(LookAtScale({}))
        for instance_id in list(fleet.emptied_s):
            del fleet.emptied_s[instance_id]
            instance = fleet.reach(instance_id)
            if instance is None:
                continue
            if instance.engine.all_held():  # dispatched before the scheduler knew
                fleet.watch_drain(instance)
            elif instance.state == "draining":
                fleet.remove(instance_id)
        fleet.events.after(INTERVAL_S, self._look)

    def _scale(self, action: ScalingAction) -> list[str]:
        match action:
            case ScaleUp(num_instances):
                num_staying = sum(instance.state != "draining" for instance in self._fleet.instances.values())
                for _ in range(num_instances - num_staying):
                    self.num_started += 1
                    self._add(f"started-{self.num_started}")
            case DrainAction(instance_id):
                self._fleet.drain(instance_id)
                return [instance_id]
            case CancelDrain(instance_id):
                if instance_id in self._fleet.instances:
                    self._fleet.undrain(instance_id)
        return []
