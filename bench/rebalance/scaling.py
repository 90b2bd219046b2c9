"""A fleet that grows and shrinks: the scheduler's scaler, and a placement that does at once what it says, but for the time
that an instance takes to start."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.rebalance.cluster import Cluster, System
from bench.rebalance.devices import Device
from bench.rebalance.instance import Instance
from bench.rebalance.moving import CONTROL_S
from bench.rebalance.workloads import Job
from shared.scheduling.calls import OnRegistry
from shared.scheduling.scaling import CancelDrain, DrainAction, Scaler, ScaleUp

INTERVAL_S = 1.0
"""Between two looks of the scaler."""


class Fleet(Cluster):
    """Begins with `num_instances`. `start_s`: from the decision until an instance serves; it counts from the decision on."""

    def __init__(
        self, device: Device, system: System, jobs: Sequence[Job], *, num_instances: int, seed: int, start_s: float
    ) -> None:
        super().__init__(device, system, jobs, num_instances=num_instances, seed=seed)
        self._scaler = Scaler(msgspec.structs.replace(system.settings(), autoscale=True))
        self._start_s = start_s
        self.num_started = 0
        self._instance_s = 0.0
        self._counted_s = 0.0
        self.events.after(INTERVAL_S, self._look)

    def mean_instances(self) -> float:
        self._count()
        return self._instance_s / self.events.now

    def _count(self) -> None:
        """Instances since the last call."""
        self._instance_s += len(self.instances) * (self.events.now - self._counted_s)
        self._counted_s = self.events.now

    def _look(self) -> None:
        queued = {lane.model: number for lane, number in self.core.queue.lengths().items()}
        for action in self._scaler.due(self.core.cluster, queued, self.events.now, {}):
            self._count()
            released = []
            match action:
                case ScaleUp():
                    self.num_started += 1
                    instance = self.add_instance(f"started-{self.num_started}", state="starting")
                    self.events.after(self._start_s, self._set_state, instance, "ready")
                case DrainAction(instance_id):
                    self._drain(self.instances[instance_id])
                    released = [instance_id]
                case CancelDrain(instance_id):
                    if instance_id in self.instances:
                        self._set_state(self.instances[instance_id], "ready")
            self._scaler.answered(released, self.events.now)
        for instance_id in list(self.emptied_s):
            del self.emptied_s[instance_id]
            instance = self.instances[instance_id]
            if instance.engine.all_held():  # dispatched before the scheduler knew
                self._watch_drain(instance)
            elif instance.state == "draining":
                self._remove(instance)
        self.events.after(INTERVAL_S, self._look)

    def _set_state(self, instance: Instance, state: str) -> None:
        instance.state = state
        self.events.after(CONTROL_S, self._register, instance)

    def _remove(self, instance: Instance) -> None:
        self._count()
        instance.stop()
        del self.instances[instance.instance_id]
        self.core.apply(OnRegistry(instance.instance_id, None), self.events.now)
        self._act()
