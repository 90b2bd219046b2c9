"""Which nodes count, and which instances are out of the plan on purpose. Pure: time is an argument.

The latter are of two kinds: those that somebody drained, which stay out until that is undone, and those that scaling took
out ("released"), which come back when there should be more, and are forgotten when they do not exist any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from shared.messages.cluster import InstanceInfo, NodeInfo, PlacementPlan


class Fleet(NamedTuple):
    draining: tuple[str, ...] = ()
    """In the order in which they were drained."""
    released: tuple[str, ...] = ()
    """Released ones among them."""

    @classmethod
    def of(cls, plan: PlacementPlan | None) -> Fleet:
        """The one that a plan was made for; a plan that is stored is what remembers it."""
        return cls() if plan is None else cls(tuple(plan.draining), tuple(plan.released))

    def drain(self, instance_ids: Iterable[str], *, is_for_scaling: bool = False) -> Fleet:
        """What an operator drains is his, also if scaling had taken it out before; never the other way."""
        added = tuple(instance_ids)
        new = tuple(i for i in added if i not in self.draining)
        if is_for_scaling:
            return Fleet(self.draining + new, self.released + new)
        return Fleet(self.draining + new, _without(self.released, added))

    def undo(self, instance_ids: Iterable[str]) -> Fleet:
        gone = set(instance_ids)
        return Fleet(_without(self.draining, gone), _without(self.released, gone))


def _without(instance_ids: tuple[str, ...], gone: Collection[str]) -> tuple[str, ...]:
    return tuple(i for i in instance_ids if i not in gone)


def instance_ids(nodes: Iterable[NodeInfo]) -> list[str]:
    """All that the nodes have room for: each is named after its first device."""
    return [f"{node.node_id}-{k * num_ranks(node)}" for node in nodes for k in range(node.num_instances)]


def num_ranks(node: NodeInfo) -> int:
    """Devices of each of its instances."""
    return node.groups[0].num_ranks if node.groups else 1


def num_stages(node: NodeInfo, num_devices: int) -> int:
    """Stages of an instance of so many of a node's devices: as the node says, where it is one of those that the node
    offers."""
    return node.groups[0].num_stages if node.groups and node.groups[0].num_ranks == num_devices else 1


def node_of(instance_id: str) -> tuple[str, int]:
    """(node id, index); the index is -1 for what is no instance id."""
    node_id, _, index = instance_id.rpartition("-")
    return node_id, int(index) if index.isdecimal() else -1


def active_by_node(nodes: Sequence[NodeInfo], draining: Collection[str]) -> dict[str, list[str]]:
    """Instances that are to run, per node, in order of their index."""
    return {node.node_id: [i for i in instance_ids([node]) if i not in draining] for node in nodes}


def serving(instances: Iterable[InstanceInfo]) -> frozenset[tuple[str, str]]:
    """(model, instance) pairs that take requests."""
    return frozenset((m.name, info.instance_id) for info in instances for m in info.models if m.state == "ready")


GRACE_S = 10.0
"""A node that is missing for less keeps its part of the plan: long enough for a restart of its agent or of NATS, short
enough that its models are soon elsewhere if it is dead. (Its requests are placed again at once, by the scheduler.)"""


class NodePresence:
    def __init__(self) -> None:
        self._missing_since: dict[str, float] = {}

    def view(
        self, registered: Mapping[str, NodeInfo], planned: Collection[str], now: float
    ) -> tuple[list[NodeInfo], frozenset[str]]:
        """The nodes to plan with, and the planned ones that are missing but still in their grace. What an agent reports
        about its progress is left out, so that equal views ask for equal plans.

        While no node is there at all, nothing is gained by giving any up, and the graces begin when the first is back.
        """
        missing = set(planned) - registered.keys()
        if not registered:
            self._missing_since = {}
        self._missing_since = {node: self._missing_since.get(node, now) for node in missing}
        held = frozenset(node for node, since in self._missing_since.items() if now - since < GRACE_S)
        nodes = [
            msgspec.structs.replace(info, plan_version=0, problem="", fetched=(), fetch_problems={})
            for _, info in sorted(registered.items())
        ]
        return nodes, held
