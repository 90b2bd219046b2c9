"""The plans that there can be for a problem: which models fit which groups, what a plan lacks, and the key by which plans
are compared. Of equal plans, the one that keeps most models where they are. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from shared.placement.enumeration import Slots
from shared.placement.estimator import Outcome
from shared.placement.memory import Memory
from shared.placement.plan import ATTAINMENT_GRAIN
from shared.placement.problem import Group, ModelFacts, NodeFacts, Plan, Prediction, Problem
from shared.placement.rehearsal import change_s

Key = tuple[float, ...]


class Found(NamedTuple):
    key: Key
    """Larger is better."""
    slots: Slots
    total: Key
    """The key without the term for models left behind."""
    is_unfair: bool
    """Whether any model is left behind."""


class Score(NamedTuple):
    attainment: float
    normalised_latency: float
    unfairness: float


Scored = Score | Prediction


def served_by(outcome: Outcome | Scored) -> float:
    """Attainment less the term for models left behind: plans are compared by it."""
    return outcome.attainment - outcome.unfairness


class Space:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_devices = sum(node.num_devices for node in problem.nodes)
        self.nodes: dict[str, NodeFacts] = {node.node_id: node for node in problem.nodes}
        self.models: dict[str, ModelFacts] = {model.name: model for model in problem.models}
        self.numbers = {model.name: number for number, model in enumerate(problem.models)}
        self._memory = Memory(problem)
        self._fits: dict[tuple[tuple[str, ...], str, int, int], bool] = {}
        self.most_ranks = max((node.num_devices for node in problem.nodes), default=0)
        sizes: list[int] = [1 << power for power in range(self.most_ranks.bit_length())]
        self.least: dict[str, int] = {}
        """Devices of the smallest group that holds the model alone."""
        for name in self.models:
            for size in sizes:
                if any(self.fits((name,), node, size) for node in problem.nodes):
                    self.least[name] = size
                    break
        replicas = {name: self.models[name].replicas for name in self.least}
        self.needed = {name: 1 if num is None else num for name, num in replicas.items()}
        """Groups that a model must have, of those that fit anywhere; one with 0 replicas is placed nowhere."""
        self.incumbent = self._incumbent()

    def fits(self, names: tuple[str, ...], node: NodeFacts, num_ranks: int) -> bool:
        """`names`: ascending."""
        limit = self.problem.max_models_per_group
        if num_ranks > node.num_devices or (limit and len(names) > limit):
            return False
        key = (names, node.kind, node.memory_bytes, num_ranks)
        if (known := self._fits.get(key)) is None:
            known = not self._memory.why_not(names, node, num_ranks)
            self._fits[key] = known
        return known

    def changed(self, group: Group, names: Iterable[str]) -> Group | None:
        """The group with these models; None: they do not fit."""
        models = tuple(sorted(set(names)))
        if not self.fits(models, self.nodes[group.node_id], group.num_ranks):
            return None
        return Group(group.node_id, group.devices, models)

    def num_groups(self, slots: Iterable[Group]) -> Counter[str]:
        return Counter(name for group in slots for name in group.models)

    def num_lacking(self, slots: Iterable[Group]) -> int:
        """Number of groups that models lack, or have beyond their limit."""
        counts = self.num_groups(slots)
        lacking = sum(max(0, least - counts[name]) for name, least in self.needed.items())
        return lacking + sum(
            max(0, counts[name] - (self.models[name].replicas or counts[name])) for name in self.needed
        )

    def key(self, slots: Iterable[Group], outcome: Outcome | Scored, pressure: float = 1.0) -> Key:
        """Larger is better. `pressure`: factor on the term for models left behind, 1 in the final comparison."""
        served = round((outcome.attainment - pressure * outcome.unfairness) / ATTAINMENT_GRAIN)
        return (-self.num_lacking(slots), served, -outcome.normalised_latency)

    def found(self, slots: Slots, outcome: Outcome) -> Found:
        key = self.key(slots, outcome)
        total = (key[0], round(outcome.attainment / ATTAINMENT_GRAIN), key[2])
        return Found(key, slots, total, is_unfair=outcome.unfairness > 0)

    def kind(self, group: Group) -> tuple[str, int, int]:
        """Groups that are equal for all models."""
        node = self.nodes[group.node_id]
        return (node.kind, node.memory_bytes, group.num_ranks)

    def _incumbent(self) -> Slots:
        """The part of the incumbent that still exists, with the devices that it leaves free; empty without one."""
        if self.problem.incumbent is None:
            return ()
        slots: list[Group] = []
        taken: set[tuple[str, int]] = set()
        for group in self.problem.incumbent.groups:
            node = self.nodes.get(group.node_id)
            if node is None or group.devices[-1] >= node.num_devices:
                continue
            names = tuple(name for name in group.models if self.needed.get(name))
            if names and self.fits(names, node, group.num_ranks):
                slots.append(Group(group.node_id, group.devices, names))
                taken |= {(group.node_id, device) for device in group.devices}
        if not slots:
            return ()
        for node in self.problem.nodes:
            for device in range(node.num_devices):
                if (node.node_id, device) not in taken:
                    slots.append(Group(node.node_id, (device,), ()))
        return tuple(sorted(slots))

    def aligned(self, slots: Slots) -> Slots:
        """The same plan, with models on those of equivalent groups where they are now."""
        incumbent = self.problem.incumbent
        if incumbent is None:
            return slots
        held = {(group.node_id, group.devices): frozenset(group.models) for group in incumbent.groups}
        places: dict[tuple[str, int, int], list[Group]] = {}
        for group in slots:
            places.setdefault(self.kind(group), []).append(group)
        found: list[Group] = []
        for groups in places.values():
            sets = Counter(group.models for group in groups)
            places_left = []
            for group in groups:
                models = tuple(sorted(held.get((group.node_id, group.devices), ())))
                if sets[models]:
                    sets[models] -= 1
                    found.append(Group(group.node_id, group.devices, models))
                else:
                    places_left.append(group)
            for group in places_left:
                has = held.get((group.node_id, group.devices), frozenset())
                models = max(
                    (each for each, left in sets.items() if left), key=lambda each: (self._kept(each, has), each)
                )
                sets[models] -= 1
                found.append(Group(group.node_id, group.devices, models))
        return tuple(sorted(found))

    def _kept(self, names: tuple[str, ...], has: frozenset[str]) -> int:
        """Bytes that need not be loaded, less those that must be."""
        return sum(self.models[name].weight_bytes * (1 if name in has else -1) for name in names)

    def change_s(self, plan: Plan) -> float:
        """Device seconds that the change from the incumbent takes."""
        return change_s(self.problem.incumbent, plan, self.problem)

    def unplaced(self, plan: Plan) -> dict[str, str]:
        """Models without their groups, and why."""
        counts, found = self.num_groups(plan.groups), {}
        for name, model in self.models.items():
            if name not in self.needed:
                sizes = [
                    (node, num_ranks)
                    for node in self.problem.nodes
                    for kind, num_ranks in model.costs
                    if kind == node.kind
                ]
                if not sizes:
                    found[name] = f"costs: {name!r} is not known to run on any kind of device that is there"
                    continue
                node, num_ranks = max(
                    sizes, key=lambda size: (min(size[1], size[0].num_devices), size[0].memory_bytes, -size[1])
                )
                found[name] = self._memory.why_not([name], node, num_ranks)
            elif counts[name] < self.needed[name]:
                who = "no group" if not counts[name] else f"{counts[name]} of {self.needed[name]} groups; no other"
                limit = self.problem.max_models_per_group
                if any(self._has_memory(group, name) for group in plan.groups if len(group.models) == limit):
                    found[name] = f"{who} may hold {name!r} beside the other models (max_models_per_group: {limit})"
                else:
                    found[name] = f"{who} has memory for {name!r} beside the other models"
        return found

    def _has_memory(self, group: Group, name: str) -> bool:
        """Whether a group has the memory for one more model."""
        names = (*group.models, name)
        return name not in group.models and not self._memory.why_not(names, self.nodes[group.node_id], group.num_ranks)
