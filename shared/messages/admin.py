"""What the operator, placement and node agents ask for."""

from __future__ import annotations

import msgspec

from shared.messages.cluster import ModelSpec
from shared.messages.requests import Seconds


class AddModel(msgspec.Struct, frozen=True):
    spec: ModelSpec


class RemoveModel(msgspec.Struct, frozen=True):
    name: str


class GetPlan(msgspec.Struct, frozen=True):
    pass


class LoadModel(msgspec.Struct, frozen=True):
    """Node agent to instance. Answered at once; progress shows in the registry."""

    spec: ModelSpec


class UnloadModel(msgspec.Struct, frozen=True):
    """Node agent to instance: take no new request of the model, finish those it has within `grace_s`, free its memory."""

    name: str
    grace_s: Seconds = 30.0


class Drain(msgspec.Struct, frozen=True):
    """Take no new request; move away or finish those held within `grace_s`; then exit. `is_undone`: do not, but serve as
    before; CONFLICT where it is too late for that."""

    grace_s: Seconds = 30.0
    is_undone: bool = False


class DrainInstance(msgspec.Struct, frozen=True):
    """Operator (or scheduler) to placement: leave the instance out of the plan, so that it moves its requests away and
    exits; `is_undone`: back into the plan."""

    instance_id: str
    is_undone: bool = False
    is_for_scaling: bool = False
    """One instance less is wanted, best this one: it is brought back when more are. (An operator's drain stays until it is
    undone.)"""


class ScaleModel(msgspec.Struct, frozen=True):
    """To placement: on how many instances the model is to be; None: on all."""

    name: str
    replicas: int | None


class ScaleInstances(msgspec.Struct, frozen=True):
    """To placement: how many instances there should be, over all nodes; carried out by its back end."""

    num_instances: int
    is_for_scaling: bool = False
    """From the scheduler: more are wanted, never fewer. It counts those that it sees, and others may be starting."""


class ScaleNode(msgspec.Struct, frozen=True):
    """Placement to a node agent: run so many instances, at most its `max_instances`."""

    num_instances: int


class Done(msgspec.Struct, frozen=True):
    pass
