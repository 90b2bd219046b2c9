"""Which model runs on which instance. Pure: the same arguments give the same plan.

Every configured model goes on every instance (or on `replicas` of them) as memory allows. Memory of a node is divided
evenly over the instances that it could run at most; an instance holds

    sum(weights) + max(activations) + KV pool + one merged block of scratch  <=  memory of the node / its most instances

An instance of several devices is planned by what one of them holds, as all hold as much: a part of each weight and KV block.

Stability comes before balance: what the incumbent plan placed stays where it is while it fits, with its KV pool (a pool
cannot change under a running instance). New models take what is left; nothing is moved or evicted for them.

A room whose contents cannot be judged is *frozen*: it keeps the models that are still configured and takes no others.
That holds for instances of nodes that are away for a moment, and for those with a model whose checkpoint cannot be read
just now.

An instance that is draining is no room at all: what was there goes where there is room, if it is not there already.

A plan whose assignment was *chosen* (by a search or an operator, `chosen`) keeps it: models stay on their groups and go on
no others. What is new, or was lost with a node, is put on the smallest group that holds it, of free devices where there are
any.

Models *on demand* that are put away are on no instance, but pools are laid out so that memory is left for them: for all of
them where that is no more than half of what models that are always loaded leave, else for as many as that half, and for the
largest one in any case. So one that is woken changes no pool. Who is to be woken or put away is decided elsewhere
(`shared.placement.on_demand`). One that says nothing of `replicas` is on one instance.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from services.placement.fleet import Fleet, instance_ids, node_of, num_ranks, num_stages
from services.placement.footprint import ConfiguredModel, DeviceFacts, footprint
from shared.engine.memory import slab
from shared.messages.cluster import (
    DeviceGroup,
    InstancePlan,
    ModelSpec,
    NodeInfo,
    PlacementPlan,
)
from shared.placement.demand import is_kept
from shared.placement.footprint import Footprint
from shared.placement.hardware import RANKS
from shared.placement.memory import LEAST_MERGED_BYTES, MAX_CPU_POOL_BYTES, POOL_SHARE
from shared.placement.plan import Group

NOBODY_OUT = Fleet()

Layout = Mapping[str, Sequence[tuple[int, int]]]
"""By node: first device and number of devices of each instance that it has, or could have."""


class DoesNotFit(Exception):
    """A chosen assignment cannot be had; the message says why."""


blocks_per_merged = functools.lru_cache(maxsize=4096)(slab.blocks_per_merged)
"""Asked again and again for the same few pairs."""


@dataclass(kw_only=True)
class _Room:
    """One instance as the plan fills it. Bytes are of each of its devices; in plans they are of all."""

    instance_id: str
    node_id: str
    facts: DeviceFacts
    capacity_bytes: int
    incumbent: InstancePlan | None
    group: DeviceGroup
    is_frozen: bool = False
    merged_bytes: int = 0
    specs: dict[str, ModelSpec] = field(default_factory=dict)
    weight_bytes: int = 0
    activation_bytes: int = 0
    least_blocks: int = 0
    """Merged blocks that the least KV pool needs."""
    always_bytes: int = 0
    """Bytes within `weight_bytes` of models that are always loaded; the next field counts blocks in the same way."""
    always_blocks: int = 0
    on_demand: list[Footprint] = field(default_factory=list)
    """Footprints of all configured models on demand, wherever they are; none beside an engine that shares with nobody."""

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
        pool_bytes = self.incumbent.pool_bytes // self.facts.num_ranks
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
        if self.incumbent is None or self.incumbent.group.num_ranks != self.facts.num_ranks:
            return 0
        return self.incumbent.merged_bytes // self.facts.num_ranks

    def add(self, spec: ModelSpec, size: Footprint) -> None:
        self.specs[spec.name] = spec
        self.weight_bytes += size.weight_bytes
        self.activation_bytes = max(self.activation_bytes, size.activation_bytes)
        self.least_blocks += self._blocks(size)
        if not spec.is_native:
            self.on_demand = []
        if not spec.on_demand:
            self.always_bytes += size.weight_bytes
            self.always_blocks += self._blocks(size)

    def plan(self, max_cpu_pool_bytes: int, held_bytes: float = 0.0) -> InstancePlan:
        """The pool of before stays, where it can, if it is large enough for requests that hold so much (`is_kept`)."""
        pool_bytes, merged_bytes = (0, 0) if self.is_frozen else self._best_pool(max_cpu_pool_bytes)
        if self.incumbent is not None and (
            self.is_frozen
            or (
                self.keeps_pool()
                and self.incumbent.pool_bytes // self.facts.num_ranks <= self.largest_pool()[0]
                and is_kept(self.incumbent.pool_bytes, pool_bytes, held_bytes)
            )
        ):
            pool_bytes, merged_bytes = self.incumbent.pool_bytes, self.incumbent.merged_bytes
        models = [_for_instance(self.specs[name]) for name in sorted(self.specs)]
        return InstancePlan(self.instance_id, self.node_id, models, pool_bytes, merged_bytes, self.group)

    def _best_pool(self, max_cpu_pool_bytes: int) -> tuple[int, int]:
        """Bytes of the pool and of a merged block, of all devices."""
        num_ranks, merged_bytes = self.facts.num_ranks, self.merged_bytes
        largest_bytes, least_bytes = self.largest_pool()
        pool_bytes = int(largest_bytes * POOL_SHARE[self.facts.kind])
        if self.facts.kind == "cpu":
            pool_bytes = min(pool_bytes, max_cpu_pool_bytes // num_ranks)
        return num_ranks * max(pool_bytes // merged_bytes * merged_bytes, least_bytes), num_ranks * merged_bytes

    def _blocks(self, size: Footprint) -> int:
        return -(-size.least_blocks // blocks_per_merged(self.merged_bytes, size.block_bytes))


def plan(
    models: Sequence[ConfiguredModel],
    nodes: Sequence[NodeInfo],
    incumbent: PlacementPlan | None,
    *,
    held_nodes: Collection[str] = (),
    fleet: Fleet = NOBODY_OUT,
    ready: Collection[tuple[str, str]] = (),
    in_host_memory: Collection[tuple[str, str]] = (),
    max_cpu_pool_bytes: int = MAX_CPU_POOL_BYTES,
) -> PlacementPlan:
    """The next plan; the incumbent itself if nothing changes.

    `held_nodes`: nodes that are not in `nodes` but may be back in a moment; the incumbent's instances there stay.
    `fleet`: the instances that are to be left out. `ready`: (model, instance) pairs that serve now: a model that is to be on
    fewer instances stays there. `in_host_memory`: pairs of which the instance has the model's weights in host memory.
    """
    configured = {model.spec.name: model for model in sorted(models, key=lambda m: m.spec.name)}
    draining = frozenset(fleet.draining)
    layouts: list[Layout] = [_offered(nodes)]
    if is_chosen := incumbent is not None and incumbent.is_chosen:
        layouts = [_kept(nodes, incumbent, size) for size in RANKS]
    placements = []
    for layout in layouts:
        rooms = _rooms(configured, nodes, layout, incumbent, held_nodes, draining)
        placement = _Placement(configured, rooms, has_nodes=bool(nodes), in_host_memory=in_host_memory)
        placement.keep_incumbents(ready)
        placement.fill(everywhere=not is_chosen)
        placements.append(placement)
        if all(placement.num_replicas[name] for name in placement.to_place):
            break
    placement = max(placements, key=lambda p: sum(num > 0 for num in p.num_replicas.values()))

    instances = [room.plan(max_cpu_pool_bytes) for room in placement.rooms if room.is_needed(is_chosen)]
    out = sorted(draining.intersection(instance_ids(nodes)))
    unplaced = {
        name: f"{reason}; {', '.join(out)} drained" if out and configured[name].shape is not None else reason
        for name, model in configured.items()
        if not (model.asleep and model.shape is not None)
        and not placement.num_replicas[name]
        and (reason := placement.why_unplaced(name))
    }
    version = 1 if incumbent is None else incumbent.version + 1
    unusable = {name: configured[name].problem for name in unplaced if configured[name].shape is None}
    asleep = {name: model.asleep for name, model in configured.items() if model.asleep}
    new = PlacementPlan(
        version, instances, unplaced, list(fleet.draining), list(fleet.released), unusable, is_chosen, asleep=asleep
    )
    if incumbent is not None:
        home = _home(incumbent, instances, draining) if is_chosen else []
        new = msgspec.structs.replace(new, change=incumbent.change, home=home)
    if incumbent is not None and msgspec.structs.replace(new, version=incumbent.version) == incumbent:
        return incumbent
    return new


def chosen(
    models: Sequence[ConfiguredModel],
    nodes: Sequence[NodeInfo],
    incumbent: PlacementPlan,
    groups: Iterable[Group],
    *,
    max_cpu_pool_bytes: int = MAX_CPU_POOL_BYTES,
    kv_bytes: Mapping[str, int] | None = None,
) -> list[InstancePlan]:
    """Instances of exactly these groups. A group that is there keeps its KV pool where it can, if that is large enough for
    its requests, which hold `kv_bytes` by instance id (`is_kept`). Raises `DoesNotFit`."""
    wanted = {group.instance_id: group for group in groups}
    configured = {model.spec.name: model for model in sorted(models, key=lambda m: m.spec.name)}
    layout: dict[str, list[tuple[int, int]]] = {}
    for group in sorted(wanted.values()):
        layout.setdefault(group.node_id, []).append((group.devices[0], group.num_ranks))
    rooms = _rooms(configured, nodes, layout, incumbent, (), ())
    if missing := wanted.keys() - {room.instance_id for room in rooms}:
        raise DoesNotFit(f"the devices of {', '.join(sorted(missing))} are not there")
    placement = _Placement(configured, rooms, has_nodes=True)
    for room in rooms:
        for name in wanted[room.instance_id].models:
            if not placement.has_place(name, room):
                raise DoesNotFit(placement.why_not(name, room))
            placement.put(name, room)
    held_bytes = kv_bytes or {}
    return [room.plan(max_cpu_pool_bytes, held_bytes.get(room.instance_id, math.inf)) for room in rooms]


def fits(
    models: Sequence[ConfiguredModel], nodes: Sequence[NodeInfo]
) -> Callable[[InstancePlan, Sequence[ModelSpec]], bool]:
    """Whether an instance can hold such models with the KV pool that it has."""
    configured = {model.spec.name: model for model in models if model.shape is not None}
    by_id = {node.node_id: node for node in nodes}

    def hold(place: InstancePlan, specs: Sequence[ModelSpec]) -> bool:
        names = {spec.name for spec in specs}
        first = node_of(place.instance_id)[1]
        incumbent = PlacementPlan(0, [place])
        there = [by_id[place.node_id]] if place.node_id in by_id else []
        rooms = _rooms({}, there, {place.node_id: [(first, place.group.num_ranks)]}, incumbent, (), ())
        if not rooms or not names <= configured.keys():
            return False
        placement = _Placement({name: configured[name] for name in sorted(names)}, rooms, has_nodes=True)
        if rooms[0].merged_bytes != rooms[0].incumbent_merged_bytes:
            return False
        for name in sorted(names):
            if not placement.has_place(name, rooms[0]):
                return False
            placement.put(name, rooms[0])
        return rooms[0].keeps_pool()

    return hold


def wasted(
    new: PlacementPlan, models: Sequence[ConfiguredModel], nodes: Sequence[NodeInfo]
) -> dict[tuple[str, int], dict[str, float]]:
    """By size of merged blocks on a kind of device: the share that each model leaves unused."""
    shapes = {model.spec.name: model.shape for model in models}
    kinds = {node.node_id: DeviceFacts.of(node) for node in nodes}
    found: dict[tuple[str, int], dict[str, float]] = {}
    for instance in new.instances:
        device = kinds.get(instance.node_id)
        for spec in instance.models:
            if device is not None and (shape := shapes.get(spec.name)) is not None:
                device = device._replace(num_ranks=instance.group.num_ranks, num_stages=instance.group.num_stages)
                merged_bytes = instance.merged_bytes // device.num_ranks
                share = slab.waste(merged_bytes, footprint(spec, shape, device).block_bytes)
                found.setdefault((device.kind, instance.merged_bytes), {})[spec.name] = share
    return found


def displaced(before: PlacementPlan | None, after: PlacementPlan) -> list[tuple[str, str]]:
    """(model, instance) pairs of `before` that `after` lacks."""
    kept = {(spec.name, i.instance_id) for i in after.instances for spec in i.models}
    had = [(spec.name, i.instance_id) for i in before.instances for spec in i.models] if before is not None else []
    return [pair for pair in had if pair not in kept]


def _devices(node: NodeInfo) -> tuple[str, ...]:
    """Those that the node offers now, by their names."""
    known = node.devices or tuple(device for group in node.groups for device in group.devices)
    num = node.num_instances * num_ranks(node)
    return (known + ("",) * num)[:num]


def _offered(nodes: Iterable[NodeInfo]) -> Layout:
    """The groups that nodes make of themselves."""
    return {node.node_id: [(k * num_ranks(node), num_ranks(node)) for k in range(node.num_instances)] for node in nodes}


def _kept(nodes: Iterable[NodeInfo], incumbent: PlacementPlan | None, num_free_ranks: int) -> Layout:
    """The groups that are there, and groups of so many of the devices that are free."""
    layout: dict[str, list[tuple[int, int]]] = {}
    for node in nodes:
        groups = [
            (node_of(place.instance_id)[1], place.group.num_ranks)
            for place in (incumbent.instances if incumbent is not None else ())
            if place.node_id == node.node_id
        ]
        taken = {first + rank for first, size in groups for rank in range(size)}
        for first in range(0, len(_devices(node)) - num_free_ranks + 1, num_free_ranks):
            if not taken.intersection(range(first, first + num_free_ranks)):
                groups.append((first, num_free_ranks))
        layout[node.node_id] = sorted(groups)
    return layout


def _home(incumbent: PlacementPlan, instances: Iterable[InstancePlan], draining: Collection[str]) -> list[InstancePlan]:
    """The home of these instances in the next plan; empty: it is at home."""
    out = [place for place in incumbent.instances if place.instance_id in draining]
    home = incumbent.home or (incumbent.instances if out else [])
    known, there = {place.instance_id for place in home}, {place.instance_id for place in instances}
    if known <= there:
        return []
    return [*home, *(place for place in out if place.instance_id not in known)]


def _rooms(
    configured: dict[str, ConfiguredModel],
    nodes: Iterable[NodeInfo],
    layout: Layout,
    incumbent: PlacementPlan | None,
    held_nodes: Collection[str],
    draining: Collection[str],
) -> list[_Room]:
    before = {} if incumbent is None else {i.instance_id: i for i in incumbent.instances}
    before = {instance_id: i for instance_id, i in before.items() if instance_id not in draining}
    rooms = []
    for node in sorted(nodes, key=lambda n: n.node_id):
        of_node, devices = DeviceFacts.of(node), _devices(node)
        capacity = node.memory_bytes // max(1, node.num_instances, node.max_instances) // of_node.num_ranks
        for first, size in layout.get(node.node_id, ()):
            instance_id = f"{node.node_id}-{first}"
            if instance_id not in draining and first + size <= len(devices):
                group = DeviceGroup(devices[first : first + size], num_stages(node, size))
                rooms.append(
                    _Room(
                        instance_id=instance_id,
                        node_id=node.node_id,
                        facts=of_node._replace(num_ranks=size, num_stages=group.num_stages),
                        capacity_bytes=capacity,
                        incumbent=before.get(instance_id),
                        group=group,
                    )
                )
    present = {node.node_id for node in nodes}
    for instance in before.values():
        if instance.node_id in held_nodes and instance.node_id not in present:
            rooms.append(
                _Room(
                    instance_id=instance.instance_id,
                    node_id=instance.node_id,
                    facts=DeviceFacts("cpu", (), 0),
                    capacity_bytes=0,
                    incumbent=instance,
                    group=instance.group,
                    is_frozen=True,
                )
            )
    for room in rooms:
        stays = [configured[s.name] for s in room.incumbent.models if _stays(configured, s)] if room.incumbent else []
        room.is_frozen = room.is_frozen or any(model.shape is None for model in stays)
    return rooms


def _stays(configured: dict[str, ConfiguredModel], spec: ModelSpec) -> bool:
    model = configured.get(spec.name)
    return model is not None and not model.asleep and _for_instance(model.spec) == _for_instance(spec)


@functools.lru_cache(maxsize=4096)
def _for_instance(spec: ModelSpec) -> ModelSpec:
    """What an instance is told of a model: on how many others it is, is not its business, and may change under it."""
    return msgspec.structs.replace(spec, replicas=None)


def _choose_merged_blocks(rooms: list[_Room], sizes: dict[tuple[str, DeviceFacts], Footprint]) -> None:
    """One size for all rooms of a kind of device: the incumbents' (the most frequent) while every model fits into it,
    else the best for all configured models that can be placed there at all (memory/slab.py)."""
    for device, size in {(room.facts.kind, room.facts.num_ranks) for room in rooms}:
        alike = [
            room for room in rooms if (room.facts.kind, room.facts.num_ranks) == (device, size) and not room.is_frozen
        ]
        largest_room = max((room.capacity_bytes for room in alike), default=0)
        blocks = [
            one.block_bytes
            for (_, facts), one in sizes.items()
            if (facts.kind, facts.num_ranks) == (device, size)
            and one.weight_bytes + one.activation_bytes + one.least_blocks * one.block_bytes <= largest_room
        ]
        counts = Counter(room.incumbent_merged_bytes for room in alike if room.incumbent_merged_bytes)
        merged_bytes = max(counts, key=lambda m: (counts[m], m), default=0)
        if not merged_bytes or not all(blocks_per_merged(merged_bytes, block) for block in blocks):
            merged_bytes = slab.choose_merged_bytes(blocks, at_least=LEAST_MERGED_BYTES[device] // size)
        for room in alike:
            room.merged_bytes = merged_bytes


class _Placement:
    """Fills the rooms and counts the replicas."""

    def __init__(
        self,
        configured: dict[str, ConfiguredModel],
        rooms: list[_Room],
        *,
        has_nodes: bool,
        in_host_memory: Collection[tuple[str, str]] = (),
    ) -> None:
        self._configured = configured
        self._in_host_memory = in_host_memory
        self._has_nodes = has_nodes
        self.rooms = rooms
        self._sizes = {
            (name, facts): footprint(model.spec, model.shape, facts)
            for facts in dict.fromkeys(room.facts for room in rooms if not room.is_frozen)
            for name, model in configured.items()
            if model.shape is not None
        }
        _choose_merged_blocks(rooms, self._sizes)
        for room in rooms:
            sizes = ((self._sizes.get((name, room.facts)), model) for name, model in configured.items())
            room.on_demand = [size for size, model in sizes if size is not None and model.spec.on_demand]
        self.num_replicas = dict.fromkeys(configured, 0)
        self.to_place = [name for name, model in configured.items() if model.shape is not None and not model.asleep]

    def keep_incumbents(self, ready: Collection[tuple[str, str]]) -> None:
        placed = [(spec, room) for room in self.rooms if room.incumbent for spec in room.incumbent.models]
        for spec, room in sorted(placed, key=lambda pair: (pair[0].name, pair[1].instance_id) not in ready):
            if not _stays(self._configured, spec) or not self._wants_more(spec.name):
                continue
            if room.is_frozen:
                room.specs[spec.name] = spec
                self.num_replicas[spec.name] += 1
            elif self.has_place(spec.name, room):
                self.put(spec.name, room)

    def fill(self, *, everywhere: bool) -> None:
        """First one replica of each model, so that none takes the last room of another, those first that take a room
        alone; then the asked numbers of
        replicas; then, if `everywhere`, every instance with every model that has no number. Large models first, as they
        fit in fewest, and those on demand last, as they may be put away."""
        names = sorted(
            self.to_place,
            key=lambda name: (
                self._configured[name].spec.on_demand,
                self._configured[name].spec.is_native,
                -self._weight(name),
                name,
            ),
        )
        for name in names:
            if not self.num_replicas[name]:
                self._put_in_best_room(name)
        for name in names:
            if _replicas(self._configured[name].spec) is not None:
                while self._wants_more(name) and self._put_in_best_room(name):
                    pass
        always = [name for name in names if not self._configured[name].spec.on_demand]
        for room in self.rooms if everywhere else ():
            # The rarest model first, so that scarce memory is shared evenly.
            for name in sorted(always, key=lambda n: self.num_replicas[n]):
                if self._wants_more(name) and self.has_place(name, room):
                    self.put(name, room)

    def why_unplaced(self, name: str) -> str:
        """Empty for a model whose checkpoint is still being read."""
        model = self._configured[name]
        if model.shape is None:
            return model.problem
        rooms = [room for room in self.rooms if not room.is_frozen]
        if not rooms:
            unread = next((other for other in self._configured.values() if other.shape is None and other.problem), None)
            if unread is not None:
                name = unread.spec.name
                return f"all instances wait for the checkpoint of {name!r}, which cannot be read: {unread.problem}"
            return "no instance is there to hold it" if self._has_nodes else "no worker node is registered"
        room = max(rooms, key=lambda r: (r.capacity_bytes - r.used_bytes, r.instance_id))
        if not self._configured[name].spec.is_native and all(other.specs for other in rooms):
            engine = self._configured[name].spec.engine
            return f"the engine {engine} of {name!r} takes an instance for itself, and none is empty: add one"
        if all(self._is_taken(name, other) for other in rooms):
            return f"all instances are those of models on engines that take one for themselves: {name!r} needs one more"
        return f"{self._needs(name, room)}; the instance with the most room, {room.instance_id}, has {_free(room)}"

    def why_not(self, name: str, room: _Room) -> str:
        """It has no place there."""
        beside = f" beside {', '.join(sorted(room.specs))}" if room.specs else ""
        if self._is_taken(name, room):
            specs = [self._configured[name].spec, *room.specs.values()]
            engine = next(spec.engine for spec in specs if not spec.is_native)
            return f"{name!r} cannot be on {room.instance_id}{beside}: the engine {engine} takes an instance for itself"
        return f"{name!r} does not fit on {room.instance_id}{beside}: {self._needs(name, room)}; there {_free(room)}"

    def _needs(self, name: str, room: _Room) -> str:
        size = self._sizes[name, room.facts]
        least = size.least_blocks * size.block_bytes
        needed = size.weight_bytes + size.activation_bytes + least
        each = " on each device" if room.facts.num_ranks > 1 else ""
        return (
            f"{name!r} needs {_mib(needed)}{each} ({_mib(size.weight_bytes)} weights, "
            f"{_mib(size.activation_bytes)} activations, {_mib(least)} least KV pool)"
        )

    def _wants_more(self, name: str) -> bool:
        replicas = _replicas(self._configured[name].spec)
        return replicas is None or self.num_replicas[name] < replicas

    def _size(self, name: str, room: _Room) -> Footprint:
        """What the model adds there: an instance has the weights of one checkpoint once, under however many names."""
        size, weights = self._sizes[name, room.facts], _weights_of(self._configured[name])
        if any(_weights_of(self._configured[other]) == weights for other in room.specs):
            return replace(size, weight_bytes=0)
        return size

    def _weight(self, name: str) -> int:
        return max((size.weight_bytes for (n, _), size in self._sizes.items() if n == name), default=0)

    def has_place(self, name: str, room: _Room) -> bool:
        if room.is_frozen or name in room.specs or self._is_taken(name, room):
            return False
        return room.fits(self._size(name, room))

    def _is_taken(self, name: str, room: _Room) -> bool:
        """Whether it cannot share the room with what is there: an engine of another's has an instance for itself."""
        if not self._configured[name].spec.is_native:
            return bool(room.specs)
        return any(not spec.is_native for spec in room.specs.values())

    def _keeps_pool(self, name: str, room: _Room) -> bool:
        """Whether nothing has to be started anew for it."""
        return room.incumbent is None or room.keeps_pool(self._size(name, room))

    def _put_in_best_room(self, name: str) -> bool:
        """Where no pool must change, if there is such a room (a model on demand goes nowhere else); among those, where its
        weights are in host memory, on the fewest devices, where the most is left."""
        may_change = not self._configured[name].spec.on_demand
        best = max(
            (
                room
                for room in self.rooms
                if self.has_place(name, room) and (may_change or self._keeps_pool(name, room))
            ),
            key=lambda room: (
                self._keeps_pool(name, room),
                (name, room.instance_id) in self._in_host_memory,
                -room.facts.num_ranks,
                room.free_bytes(self._size(name, room)),
            ),
            default=None,
        )
        if best is not None:
            self.put(name, best)
        return best is not None

    def put(self, name: str, room: _Room) -> None:
        room.add(self._configured[name].spec, self._size(name, room))
        self.num_replicas[name] += 1


def _replicas(spec: ModelSpec) -> int | None:
    """None: every instance that it fits."""
    return 1 if (spec.on_demand or spec.is_endpoint) and spec.replicas is None else spec.replicas


def _weights_of(model: ConfiguredModel) -> tuple[str, str, str, int | None]:
    """As the executor's identity of a model."""
    spec, shape = model.spec, model.shape
    length = spec.max_model_len if shape is None or shape.depends_on_length else None
    return spec.source, spec.dtype, spec.quantization, length


def _free(room: _Room) -> str:
    return f"{_mib(room.capacity_bytes - room.used_bytes)} free of {_mib(room.capacity_bytes)}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
