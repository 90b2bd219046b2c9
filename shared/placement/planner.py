"""Which models are on which instances, and how large their KV pools are. Pure: the same arguments give the same plan. The
live service (services/placement/planning.py), the search and the simulation (memory.py, places.py) plan with this.

Memory of a node is divided evenly over the instances that it could run at most. Each device of an instance holds

    sum(weights) + max(activations) + KV pool + one merged block of scratch  <=  memory of the device

with a part of each weight and KV block. Names of the same weights share one copy of them.

Instances of as many devices of one kind (cpu | cuda) have merged blocks of one size: that of those that run while it holds a
block of every model, else the best for all models that can be there at all (slab.py).

Memory is left for models *on demand*, whether they are loaded or not: for all of them where that is no more than half of
what models that are always loaded leave, else for as many as that half, and for the largest one in any case. So one that is
woken changes no pool.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from shared.engine.memory import slab
from shared.messages.cluster import DeviceGroup, InstancePlan, ModelSpec, first_device
from shared.placement.footprint import Footprint
from shared.placement.hardware import RANKS
from shared.placement.plan import Group

MAX_CPU_POOL_BYTES = 1 << 30
"""Most pool bytes of a whole group. On CPU the pool is main memory that others can use better: at tens of tokens per second
it holds minutes of output."""

POOL_SHARE = {"cpu": 0.75, "cuda": 0.9}
"""Share of what weights and activations leave: the rest stays free, so that one more model usually fits without a restart.
Less of a GPU, where the pool is what limits the batch."""

LEAST_MERGED_BYTES = {"cpu": 4 << 20, "cuda": 32 << 20}
"""Least bytes of a merged block over a whole group: merged blocks are at least so large, so that a model that is added
later usually fits into them (other merged blocks need a restart of the instance)."""

KEPT_POOL = 1.25
"""A group keeps its KV pool, and so its process, until it could have one that much larger and needs it."""

POOL_HEADROOM = 2.0
"""A pool that holds so many times what is asked of it is large enough: a model's requests are not spread evenly over its
groups, and what nobody holds is a cache of prefixes."""

Layout = Mapping[str, Sequence[tuple[int, int]]]
"""By node: first device and number of devices of each instance that it has, or could have."""


class DoesNotFit(Exception):
    """A chosen assignment cannot be had; the message says why."""


class PlannedModel(NamedTuple):
    """A model to plan."""

    spec: ModelSpec
    weights: Hashable
    """Names with equal ones share a copy of them."""
    footprint: Callable[[Any], Footprint | None]
    """Memory on each device of an instance of a kind (`PlannedNode.kind`); None: it cannot run there, or is not known."""
    is_known: bool = True
    """Whether its footprints are known."""
    is_asleep: bool = False
    """On demand, and put away."""

    @property
    def is_wanted(self) -> bool:
        """Whether it is to have a place."""
        return self.is_known and not self.is_asleep


class PlannedNode(NamedTuple):
    """A node to plan with."""

    node_id: str
    device: str
    """cpu | cuda"""
    num_devices: int
    memory_bytes: int
    """Memory of each device."""
    kind: Callable[[int], Hashable]
    """What footprints on instances of so many of its devices are known by."""
    group: Callable[[int, int], DeviceGroup]
    """The group of so many devices from this one on."""


blocks_per_merged = functools.lru_cache(maxsize=4096)(slab.blocks_per_merged)
"""Asked again and again for the same few pairs."""


@functools.lru_cache(maxsize=4096)
def _best_merged_bytes(blocks: tuple[int, ...], at_least: int) -> int:
    return slab.choose_merged_bytes(list(blocks), at_least=at_least)


def is_kept(pool_bytes: int, largest_bytes: int, held_bytes: float) -> bool:
    """Whether a KV pool stays that a restart of its instance could make as large as `largest_bytes`, where requests hold
    `held_bytes` (inf: not known)."""
    return pool_bytes >= min(largest_bytes / KEPT_POOL, POOL_HEADROOM * held_bytes)


@functools.lru_cache(maxsize=4096)
def for_instance(spec: ModelSpec) -> ModelSpec:
    """What an instance is told of a model. Its number of replicas may change under the instance."""
    return msgspec.structs.replace(spec, replicas=None)


def replicas(spec: ModelSpec) -> int | None:
    """Number of instances that hold it; None: every instance that it fits."""
    return 1 if (spec.on_demand or spec.is_endpoint) and spec.replicas is None else spec.replicas


@dataclass(kw_only=True)
class InstanceBudget:
    """One instance as a plan fills it. Bytes are of each of its devices; in plans they are of all."""

    instance_id: str
    node_id: str
    device: str
    """cpu | cuda"""
    kind: Hashable
    capacity_bytes: int
    group: DeviceGroup
    incumbent: InstancePlan | None = None
    is_frozen: bool = False
    merged_bytes: int = 0
    on_demand: Sequence[Footprint] = ()
    """Footprints of all models on demand, wherever they are; none beside an engine that shares with nobody."""
    specs: dict[str, ModelSpec] = field(default_factory=dict)
    weights: set[Hashable] = field(default_factory=set)
    weight_bytes: int = 0
    activation_bytes: int = 0
    least_blocks: int = 0
    """Merged blocks that the least KV pool needs."""
    always_bytes: int = 0
    """Bytes within `weight_bytes` of models that are always loaded; the next field counts blocks in the same way."""
    always_blocks: int = 0

    @property
    def used_bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes + self.least_blocks * self.merged_bytes

    def free_bytes(self, added: Footprint | None = None) -> int:
        """Memory beyond weights, activations, scratch and the least pool, with `added` too; negative: does not fit."""
        weights, activations, blocks = self.weight_bytes, self.activation_bytes, self.least_blocks
        if added is not None:
            weights += added.weight_bytes
            activations = max(activations, added.activation_bytes)
            blocks += self._blocks(added)
        return self.capacity_bytes - weights - activations - (blocks + 1) * self.merged_bytes

    def fits(self, added: Footprint) -> bool:
        return blocks_per_merged(self.merged_bytes, added.block_bytes) > 0 and self.free_bytes(added) >= 0

    def keeps_pool(self, added: Footprint | None = None) -> bool:
        """Whether the incumbent's pool can stay as it is."""
        if self.incumbent is None or self.incumbent_merged_bytes != self.merged_bytes:
            return False
        blocks = self.least_blocks + (0 if added is None else self._blocks(added))
        least_bytes = blocks * self.merged_bytes
        pool_bytes = self.incumbent.pool_bytes // self.group.num_ranks
        return least_bytes <= pool_bytes <= self.free_bytes(added) + least_bytes

    def is_needed(self, is_chosen: bool) -> bool:
        """One without a model is there for those on demand: it has their weights, and starting it would take longer than
        loading them."""
        is_offered = self.incumbent is not None or not is_chosen
        return bool(self.specs) or (is_offered and not self.is_frozen and bool(self.on_demand))

    def largest_pool(self) -> tuple[int, int]:
        """Bytes of the largest KV pool beside models that are always loaded and what is left for those on demand, and the
        least. The same whichever of the latter are loaded."""
        activation_bytes = max([self.activation_bytes, *(size.activation_bytes for size in self.on_demand)])
        least_blocks = self.always_blocks + max((self._blocks(size) for size in self.on_demand), default=0)
        left_bytes = self.capacity_bytes - self.always_bytes - activation_bytes - self.merged_bytes
        beside_bytes = left_bytes - least_blocks * self.merged_bytes
        sizes = [size.weight_bytes for size in self.on_demand if size.weight_bytes <= beside_bytes]
        reserved_bytes = min(sum(sizes), max([0, beside_bytes // 2, *sizes]))
        return left_bytes - reserved_bytes, max(self.least_blocks, least_blocks if sizes else 0) * self.merged_bytes

    @property
    def incumbent_merged_bytes(self) -> int:
        """0 where there is none, or one of more or fewer devices."""
        if self.incumbent is None or self.incumbent.group.num_ranks != self.group.num_ranks:
            return 0
        return self.incumbent.merged_bytes // self.group.num_ranks

    def added(self, model: PlannedModel, size: Footprint) -> Footprint:
        """What the model adds to the instance."""
        return replace(size, weight_bytes=0) if model.weights in self.weights else size

    def add(self, model: PlannedModel, size: Footprint) -> None:
        size, spec = self.added(model, size), model.spec
        self.specs[spec.name] = spec
        self.weights.add(model.weights)
        self.weight_bytes += size.weight_bytes
        self.activation_bytes = max(self.activation_bytes, size.activation_bytes)
        self.least_blocks += self._blocks(size)
        if not spec.is_native:
            self.on_demand = ()
        if not spec.on_demand:
            self.always_bytes += size.weight_bytes
            self.always_blocks += self._blocks(size)

    def plan(self, max_cpu_pool_bytes: int = MAX_CPU_POOL_BYTES, held_bytes: float = 0.0) -> InstancePlan:
        """The pool of before stays, where it can, if it is large enough for requests that hold so much (`is_kept`)."""
        pool_bytes, merged_bytes = (0, 0) if self.is_frozen else self.best_pool(max_cpu_pool_bytes)
        if self.incumbent is not None and (
            self.is_frozen
            or (
                self.keeps_pool()
                and self.incumbent.pool_bytes // self.group.num_ranks <= self.largest_pool()[0]
                and is_kept(self.incumbent.pool_bytes, pool_bytes, held_bytes)
            )
        ):
            pool_bytes, merged_bytes = self.incumbent.pool_bytes, self.incumbent.merged_bytes
        models = [for_instance(self.specs[name]) for name in sorted(self.specs)]
        return InstancePlan(self.instance_id, self.node_id, models, pool_bytes, merged_bytes, self.group)

    def best_pool(self, max_cpu_pool_bytes: int = MAX_CPU_POOL_BYTES) -> tuple[int, int]:
        """Bytes of the pool and of a merged block, of all devices."""
        num_ranks, merged_bytes = self.group.num_ranks, self.merged_bytes
        largest_bytes, least_bytes = self.largest_pool()
        pool_bytes = int(largest_bytes * POOL_SHARE[self.device])
        if self.device == "cpu":
            pool_bytes = min(pool_bytes, max_cpu_pool_bytes // num_ranks)
        return num_ranks * max(pool_bytes // merged_bytes * merged_bytes, least_bytes), num_ranks * merged_bytes

    def _blocks(self, size: Footprint) -> int:
        if count := blocks_per_merged(self.merged_bytes, size.block_bytes):
            return -(-size.least_blocks // count)
        return -(-size.least_blocks * size.block_bytes // self.merged_bytes)  # it has no place; this is what it lacks


class Planner:
    """The models and nodes of a plan."""

    def __init__(
        self, models: Iterable[PlannedModel], nodes: Iterable[PlannedNode], running: Iterable[InstancePlan] = ()
    ) -> None:
        """`running`: instances that stay, or whose merged blocks are to."""
        self.models = {model.spec.name: model for model in sorted(models, key=lambda one: one.spec.name)}
        self.nodes = {node.node_id: node for node in sorted(nodes, key=lambda one: one.node_id)}
        self.running = {place.instance_id: place for place in running}
        self._sizes: dict[tuple[str, Hashable], Footprint | None] = {}
        self._merged: dict[tuple[str, int], int] = {}

    def size(self, name: str, kind: Hashable) -> Footprint | None:
        """Footprint of a model; None: it cannot run there, or is not known yet."""
        if (name, kind) not in self._sizes:
            self._sizes[name, kind] = self.models[name].footprint(kind)
        return self._sizes[name, kind]

    def merged_bytes(self, device: str, num_ranks: int) -> int:
        """Merged blocks of instances of so many devices, on each device."""
        if (known := self._merged.get((device, num_ranks))) is not None:
            return known
        alike = {node.node_id: node for node in self.nodes.values() if node.device == device}
        largest = max((node.memory_bytes for node in alike.values()), default=0)
        sizes = [
            self.size(name, kind)
            for kind in dict.fromkeys(node.kind(num_ranks) for node in alike.values())
            for name in self.models
        ]
        blocks = {
            size.block_bytes
            for size in sizes
            if size is not None
            and size.weight_bytes + size.activation_bytes + size.least_blocks * size.block_bytes <= largest
        }
        counts = Counter(
            place.merged_bytes // num_ranks
            for place in self.running.values()
            if place.node_id in alike and place.group.num_ranks == num_ranks and place.merged_bytes
        )
        merged_bytes = max(counts, key=lambda size: (counts[size], size), default=0)
        if not merged_bytes or not all(blocks_per_merged(merged_bytes, block) for block in blocks):
            merged_bytes = _best_merged_bytes(tuple(sorted(blocks)), LEAST_MERGED_BYTES[device] // num_ranks)
        self._merged[device, num_ranks] = merged_bytes
        return merged_bytes

    def budget(self, node: PlannedNode, first: int, num_ranks: int) -> InstanceBudget:
        """An instance of these devices, without a model."""
        kind, instance_id = node.kind(num_ranks), f"{node.node_id}-{first}"
        asked = [self.size(name, kind) for name, model in self.models.items() if model.spec.on_demand]
        return InstanceBudget(
            instance_id=instance_id, node_id=node.node_id, device=node.device, kind=kind,
            capacity_bytes=node.memory_bytes, group=node.group(first, num_ranks),
            incumbent=self.running.get(instance_id), merged_bytes=self.merged_bytes(node.device, num_ranks),
            on_demand=[size for size in asked if size is not None],
        )  # fmt: skip

    def budgets(self, layout: Layout) -> list[InstanceBudget]:
        """Instances of a layout, as far as their devices are there."""
        return [
            self.budget(node, first, num_ranks)
            for node_id, node in self.nodes.items()
            for first, num_ranks in layout.get(node_id, ())
            if first + num_ranks <= node.num_devices
        ]

    def chosen(
        self, groups: Iterable[Group], *, max_cpu_pool_bytes: int = MAX_CPU_POOL_BYTES,
        held_bytes: Mapping[str, float] | None = None,
    ) -> list[InstancePlan]:  # fmt: skip
        """Instances of exactly these groups. One that runs keeps its KV pool where it can, if that is large enough for its
        requests, which hold `held_bytes` by instance id (`is_kept`). Raises `DoesNotFit`."""
        wanted = {group.instance_id: group for group in groups}
        layout: dict[str, list[tuple[int, int]]] = {}
        for group in sorted(wanted.values()):
            layout.setdefault(group.node_id, []).append((group.devices[0], group.num_ranks))
        assignment = Assignment(self, self.budgets(layout))
        if missing := wanted.keys() - {budget.instance_id for budget in assignment.budgets}:
            raise DoesNotFit(f"the devices of {', '.join(sorted(missing))} are not there")
        held = held_bytes or {}
        for budget in assignment.budgets:
            for name in wanted[budget.instance_id].models:
                if not assignment.has_place(name, budget):
                    raise DoesNotFit(assignment.why_not(name, budget))
                assignment.put(name, budget)
        return [
            budget.plan(max_cpu_pool_bytes, held.get(budget.instance_id, math.inf)) for budget in assignment.budgets
        ]

    def fits(self, place: InstancePlan, specs: Sequence[ModelSpec]) -> bool:
        """Whether an instance can hold these models with the KV pool that it has."""
        names, node = sorted({spec.name for spec in specs}), self.nodes.get(place.node_id)
        if node is None or not self.models.keys() >= set(names):
            return False
        first, num_ranks = first_device(place.instance_id), place.group.num_ranks
        if first + num_ranks > node.num_devices:
            return False
        budget = self.budget(node, first, num_ranks)
        budget.incumbent, budget.merged_bytes = place, place.merged_bytes // num_ranks
        assignment = Assignment(self, [budget])
        for name in names:
            if not assignment.has_place(name, budget):
                return False
            assignment.put(name, budget)
        return budget.keeps_pool()

    def with_free_groups(self, num_ranks: int) -> Layout:
        """The groups that run, and groups of so many of the devices that are free."""
        layout: dict[str, list[tuple[int, int]]] = {}
        for node in self.nodes.values():
            groups = [
                (first_device(place.instance_id), place.group.num_ranks)
                for place in self.running.values()
                if place.node_id == node.node_id
            ]
            taken = {first + rank for first, size in groups for rank in range(size)}
            for first in range(0, node.num_devices - num_ranks + 1, num_ranks):
                if not taken.intersection(range(first, first + num_ranks)):
                    groups.append((first, num_ranks))
            layout[node.node_id] = sorted(groups)
        return layout

    def extended(
        self,
        budgets: Callable[[Layout], list[InstanceBudget]] | None = None,
        *,
        ready: Collection[tuple[str, str]] = (),
        in_host_memory: Collection[tuple[str, str]] = (),
    ) -> Assignment:
        """What runs, with the models that it lacks: each on the smallest group that holds it without a change of its KV
        pool, of free devices where there are any. `budgets`: of a layout."""
        assignments = []
        for num_ranks in RANKS:
            assignment = Assignment(self, (budgets or self.budgets)(self.with_free_groups(num_ranks)), in_host_memory)
            assignment.keep_incumbents(ready)
            assignment.fill(everywhere=False)
            assignments.append(assignment)
            if all(assignment.num_replicas[name] for name in assignment.to_place):
                break
        return max(assignments, key=lambda one: sum(num > 0 for num in one.num_replicas.values()))


class Assignment:
    """Models on instances, while they are being assigned; counts the replicas."""

    def __init__(
        self, planner: Planner, budgets: list[InstanceBudget], in_host_memory: Collection[tuple[str, str]] = ()
    ) -> None:
        """`in_host_memory`: (model, instance) pairs of which the instance has the model's weights in host memory."""
        self._planner, self._models, self._in_host_memory = planner, planner.models, in_host_memory
        self.budgets = budgets
        self.num_replicas = dict.fromkeys(planner.models, 0)
        self.to_place = [name for name, model in planner.models.items() if model.is_wanted]

    def keep_incumbents(self, ready: Collection[tuple[str, str]] = ()) -> None:
        """Whatever runs stays while it fits; where a model is to be on fewer instances, it stays on the `ready` ones."""
        placed = [(spec, one) for one in self.budgets if one.incumbent for spec in one.incumbent.models]
        for spec, budget in sorted(placed, key=lambda pair: (pair[0].name, pair[1].instance_id) not in ready):
            model = self._models.get(spec.name)
            if model is None or model.is_asleep or for_instance(model.spec) != for_instance(spec):
                continue
            if not self._wants_more(spec.name):
                continue
            if budget.is_frozen:
                budget.specs[spec.name] = spec
                self.num_replicas[spec.name] += 1
            elif self.has_place(spec.name, budget):
                self.put(spec.name, budget)

    def fill(self, *, everywhere: bool) -> None:
        """First one replica of each model, so that none takes the last memory of another, those first that take an instance
        alone; then the asked numbers of replicas; then, if `everywhere`, every instance with every model that has no
        number. Large models first, as they fit in fewest, and those on demand last, as they may be put away."""
        names = sorted(
            self.to_place,
            key=lambda name: (
                self._models[name].spec.on_demand,
                self._models[name].spec.is_native,
                -self._weight(name),
                name,
            ),
        )
        for name in names:
            if not self.num_replicas[name]:
                self._put_in_best(name)
        for name in names:
            if replicas(self._models[name].spec) is not None:
                while self._wants_more(name) and self._put_in_best(name):
                    pass
        always = [name for name in names if not self._models[name].spec.on_demand]
        for budget in self.budgets if everywhere else ():
            # The rarest model first, so that scarce memory is shared evenly.
            for name in sorted(always, key=lambda n: self.num_replicas[n]):
                if self._wants_more(name) and self.has_place(name, budget):
                    self.put(name, budget)

    def why_not(self, name: str, budget: InstanceBudget) -> str:
        """Why it has no place there."""
        beside = f" beside {', '.join(sorted(budget.specs))}" if budget.specs else ""
        if self.is_taken(name, budget):
            specs = [self._models[name].spec, *budget.specs.values()]
            engine = next(spec.engine for spec in specs if not spec.is_native)
            return (
                f"{name!r} cannot be on {budget.instance_id}{beside}: the engine {engine} takes an instance for itself"
            )
        return (
            f"{name!r} does not fit on {budget.instance_id}{beside}: {self.needs(name, budget)}; there {free(budget)}"
        )

    def needs(self, name: str, budget: InstanceBudget) -> str:
        """Memory that it would need there."""
        size, num_ranks = self._planner.size(name, budget.kind), budget.group.num_ranks
        if size is None:
            is_known = self._models[name].is_known
            return f"{name!r} cannot be computed by {num_ranks} devices" if is_known else f"{name!r} is not read yet"
        least = size.least_blocks * size.block_bytes
        needed = size.weight_bytes + size.activation_bytes + least
        each = " on each device" if num_ranks > 1 else ""
        return (
            f"{name!r} needs {mib(needed)}{each} ({mib(size.weight_bytes)} weights, "
            f"{mib(size.activation_bytes)} activations, {mib(least)} least KV pool)"
        )

    def has_place(self, name: str, budget: InstanceBudget) -> bool:
        if budget.is_frozen or name in budget.specs or self.is_taken(name, budget):
            return False
        size = self._added(name, budget)
        return size is not None and budget.fits(size)

    def is_taken(self, name: str, budget: InstanceBudget) -> bool:
        """Whether it cannot share the instance with what is there: an engine of another's has one for itself."""
        if not self._models[name].spec.is_native:
            return bool(budget.specs)
        return any(not spec.is_native for spec in budget.specs.values())

    def put(self, name: str, budget: InstanceBudget) -> None:
        size = self._planner.size(name, budget.kind)
        assert size is not None
        budget.add(self._models[name], size)
        self.num_replicas[name] += 1

    def _added(self, name: str, budget: InstanceBudget) -> Footprint | None:
        size = self._planner.size(name, budget.kind)
        return None if size is None else budget.added(self._models[name], size)

    def _wants_more(self, name: str) -> bool:
        wanted = replicas(self._models[name].spec)
        return wanted is None or self.num_replicas[name] < wanted

    def _weight(self, name: str) -> int:
        kinds = dict.fromkeys(budget.kind for budget in self.budgets if not budget.is_frozen)
        sizes = [self._planner.size(name, kind) for kind in kinds]
        return max((size.weight_bytes for size in sizes if size is not None), default=0)

    def _keeps_pool(self, name: str, budget: InstanceBudget) -> bool:
        """Whether nothing has to be started anew for it."""
        return budget.incumbent is None or budget.keeps_pool(self._added(name, budget))

    def _put_in_best(self, name: str) -> bool:
        """Puts it where no pool must change, if there is such an instance (a model on demand goes nowhere else); among
        those, where its weights are in host memory, on the fewest devices, where the most is left. False: it has no
        place."""
        may_change = not self._models[name].spec.on_demand
        best = max(
            (
                budget
                for budget in self.budgets
                if self.has_place(name, budget) and (may_change or self._keeps_pool(name, budget))
            ),
            key=lambda budget: (
                self._keeps_pool(name, budget),
                (name, budget.instance_id) in self._in_host_memory,
                -budget.group.num_ranks,
                budget.free_bytes(self._added(name, budget)),
            ),
            default=None,
        )
        if best is not None:
            self.put(name, best)
        return best is not None


def free(budget: InstanceBudget) -> str:
    return f"{mib(budget.capacity_bytes - budget.used_bytes)} free of {mib(budget.capacity_bytes)}"


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
