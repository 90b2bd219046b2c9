"""The cluster as the bus knows it: nodes, instances, the placement plan, and the state of each model."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from shared.bus.interface import Bus, BusError, KeyValue, Watch
from shared.bus.nats_bus import NatsBus
from shared.messages.catalogue import (
    INSTANCES,
    MODELS,
    NODES,
    PLANS,
)
from shared.messages.cluster import (
    InstanceInfo,
    ModelSpec,
    NodeInfo,
    PlacementPlan,
)
from shared.runtime.settings import BusSettings
from tideway.data_folder import OperatorError


class ModelState(StrEnum):
    WAITING = "waiting"
    """Not in the plan yet, or on instances that have not started."""
    LOADING = "loading"
    UNAVAILABLE = "unavailable"
    """Loading on all of its instances, which wait for a server that is down."""
    READY = "ready"
    FAILED = "failed"
    DRAINED = "drained"
    """On no instance, because all are drained."""
    PUT_AWAY = "put away"
    """Loaded when requests for it come."""


@dataclass(frozen=True)
class ModelView:
    name: str
    state: ModelState
    num_ready: int = 0
    """Instances that serve it."""
    num_planned: int = 0
    reason: str = ""
    """Why it failed, on some instances or all, or is on none; or what it waits for."""


def view_model(
    name: str,
    plan: PlacementPlan | None,
    instances: Mapping[str, InstanceInfo],
    configured: Collection[str] | None = None,
) -> ModelView:
    """State of model `name`. It is ready when no instance of the plan is still to load it and one serves it.

    `configured`: the models that placement has; None where that is not asked.
    """
    planned = [
        instance.instance_id
        for instance in (plan.instances if plan else [])
        if any(spec.name == name for spec in instance.models)
    ]
    if not planned:
        reason = plan.unplaced.get(name, "") if plan else ""
        if plan is not None and name in plan.asleep and not reason:
            return ModelView(name, ModelState.PUT_AWAY)
        if configured is not None and name not in configured:
            reason = "it was removed while Tideway ran, and stays so until it is added again (POST /admin/models)"
        elif reason and plan and plan.draining and not plan.instances:
            return ModelView(name, ModelState.DRAINED, reason=reason)
        return ModelView(name, ModelState.FAILED if reason else ModelState.WAITING, reason=reason)
    loaded = [
        (info.state, model)
        for instance_id in planned
        if (info := instances.get(instance_id)) is not None
        for model in info.models
        if model.name == name
    ]
    num_ready = sum(model.state == "ready" and state == "ready" for state, model in loaded)
    errors = [model.error or "no reason given" for _, model in loaded if model.state == "failed"]
    waits = [model.error for _, model in loaded if model.is_held_up]
    if num_ready and num_ready + len(errors) == len(planned):
        state = ModelState.READY
    elif len(errors) == len(planned):
        return ModelView(name, ModelState.FAILED, 0, len(planned), errors[0])
    elif waits and len(waits) == len(loaded):
        state = ModelState.UNAVAILABLE
    else:
        state = ModelState.LOADING if loaded else ModelState.WAITING
    reason = f"failed on {len(errors)} of {len(planned)}: {errors[0]}" if errors else next(iter(waits), "")
    return ModelView(name, state, num_ready, len(planned), reason)


def no_jetstream(settings: BusSettings, error: BusError) -> OperatorError:
    return OperatorError(f"NATS at {settings.nats_url} answers, but not its JetStream: {error}.")


class ClusterView:
    """A live view over the bus. Raises `BusError` where a call's deadline passes."""

    def __init__(
        self,
        bus: Bus,
        instances: Watch[InstanceInfo],
        nodes: Watch[NodeInfo],
        plans: KeyValue[PlacementPlan],
        models: KeyValue[ModelSpec],
    ) -> None:
        self.bus = bus
        self._instances = instances
        self._nodes = nodes
        self._plans = plans
        self._models = models

    @classmethod
    async def connect(cls, settings: BusSettings, timeout_s: float) -> ClusterView:
        """Raises `OperatorError`."""
        settings = msgspec.structs.replace(settings, nats_wait_s=0.0)
        try:
            bus = await asyncio.wait_for(NatsBus.connect(settings, "operator", "command"), timeout_s)
        except TimeoutError:
            raise OperatorError(
                f"NATS at {settings.nats_url} does not answer, or refuses TIDEWAY_NATS_USER and TIDEWAY_NATS_PASSWORD."
            ) from None
        try:
            instances = await (await bus.key_value(INSTANCES)).watch()
            nodes = await (await bus.key_value(NODES)).watch()
            return cls(bus, instances, nodes, await bus.key_value(PLANS), await bus.key_value(MODELS))
        except BaseException as error:
            await bus.close()
            if isinstance(error, BusError):
                raise no_jetstream(settings, error) from None
            raise

    @property
    def instances(self) -> Mapping[str, InstanceInfo]:
        return self._instances.entries

    @property
    def nodes(self) -> Mapping[str, NodeInfo]:
        return self._nodes.entries

    async def plan(self) -> PlacementPlan | None:
        entry = await self._plans.get("current")
        return entry.value if entry else None

    async def configured(self) -> dict[str, ModelSpec]:
        """The models that placement keeps on some instance, by name: those of this start and of earlier ones."""
        return {entry.value.name: entry.value for entry in (await self._models.entries()).values()}

    async def close(self) -> None:
        await self._instances.stop()
        await self._nodes.stop()
        await self.bus.close()
