"""Instances of one kind with the real scheduler's core, and the requests that they are given."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.rebalance.devices import Device
from shared.settings import SchedulerSettings
from shared.simulation.fleet import Fleet
from shared.simulation.gateway import Gateway, Job
from shared.simulation.migration import FleetMigrations
from shared.simulation.scaling import Scaling


class System(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the cluster."""

    name: str
    dispatch: str = "first_token"
    is_late: bool = True
    """Requests wait in the scheduler's queue until an instance has room for them; else they are dispatched at once."""
    migrates: bool = True
    has_priorities: bool = True
    """Else all requests are normal ones."""
    order: str = "doubling_budget"
    scheduler: dict[str, float] = {}
    """Settings of the scheduler that differ from its defaults."""

    def settings(self) -> SchedulerSettings:
        settings = SchedulerSettings(
            dispatch_policy=self.dispatch,
            migration="auto" if self.migrates else "off",
            order_policy=self.order,
            max_queued=1 << 20,
        )
        if not self.is_late:
            settings = msgspec.structs.replace(
                settings, max_waiting_per_model=1 << 20, dispatch_growth_steps=0.0, max_defragmenting_share=1.0
            )
        return msgspec.structs.replace(settings, **self.scheduler)


class Cluster:
    """`run` once."""

    def __init__(
        self,
        device: Device,
        system: System,
        jobs: Sequence[Job],
        *,
        num_instances: int = 4,
        noise: float = 0.05,
        seed: int = 0,
        start_s: float | None = None,
    ) -> None:
        """`start_s`: the cluster grows and shrinks by its freeness, and an instance starts in so long."""
        settings = msgspec.structs.replace(system.settings(), autoscale=start_s is not None)
        self.fleet = Fleet(
            settings, noise=noise, seed=seed, migrations=FleetMigrations, has_priorities=system.has_priorities
        )
        simulated, model = device.simulated(system.order), device.model
        for index in range(num_instances):
            self.fleet.add_instance(f"instance-{index}", simulated, [model])
        self.scaling = None
        if start_s is not None:
            self.scaling = Scaling(
                self.fleet, lambda name: self.fleet.add_instance(name, simulated, [model], start_s=start_s)
            )
        # The length of an answer is nobody's knowledge.
        self._jobs = [msgspec.structs.replace(job, max_tokens=device.max_length + 1) for job in jobs]

    @property
    def gateway(self) -> Gateway:
        return self.fleet.gateway

    @property
    def migrations(self) -> FleetMigrations:
        assert isinstance(self.fleet.migrations, FleetMigrations)
        return self.fleet.migrations

    def mean_instances(self) -> float:
        """Over the run."""
        return float(len(self.fleet.instances)) if self.scaling is None else self.scaling.mean_instances()

    def run(self) -> Gateway:
        return self.fleet.run(self._jobs)
