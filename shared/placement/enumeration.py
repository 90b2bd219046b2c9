"""All plans of a small cluster, but for those that differ in devices that are alike. Pure."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from shared.placement.problem import Group, NodeFacts

Names = tuple[str, ...]
Slots = tuple[Group, ...]
_Shape = tuple[tuple[int, Names], ...]
"""Shape of a node: sizes of its groups, descending, with their models."""

MAX_TRIED = 1 << 14
"""Ways to give models to groups that are looked through."""


def all_plans(
    nodes: Sequence[NodeFacts],
    models: Mapping[str, int | None],
    fits: Callable[[Names, NodeFacts, int], bool],
    most: int,
) -> list[Slots]:
    """Those with every model, or where there are none, all; each as groups of all devices, some without a model. Empty where
    they are more than `most`. `models`: name -> groups that it may have at most (None: any). `fits`: whether a group
    of so many devices of a node holds models (names ascending)."""
    names = sorted(models)
    if 1 << len(names) > MAX_TRIED:
        return []
    alike: dict[tuple[str, int, int], list[NodeFacts]] = {}
    for node in nodes:
        alike.setdefault((node.kind, node.memory_bytes, node.num_devices), []).append(node)
    # Counted before any is made: of eight models on eight devices they are more than memory holds. With one model in a group
    # at most first: where these are too many already, it is soon known.
    for most_names in (1, len(names)):
        sets = sorted(each for size in range(most_names + 1) for each in itertools.combinations(names, size))
        choices = [_choices(some[0], sets, fits) for some in alike.values()]
        if _num_tried(choices, [len(some) for some in alike.values()]) > MAX_TRIED:
            return []
    shapes = [[shape for each in of_node for shape in _shapes(each)] for of_node in choices]
    chosen = itertools.product(
        *(
            itertools.combinations_with_replacement(own, len(some))
            for own, some in zip(shapes, alike.values(), strict=True)
        )
    )
    plans, whole = [], []
    for each in chosen:
        of_node = [shape for some in each for shape in some]
        counts = Counter(name for shape in of_node for _, own in shape for name in own)
        if any(limit is not None and counts[name] > limit for name, limit in models.items()):
            continue
        plans.append(of_node)
        if len(counts) == len(names):
            whole.append(of_node)
    plans = whole or plans
    ordered = [node for some in alike.values() for node in some]
    return [_slots(ordered, each) for each in plans] if len(plans) <= most else []


_Choices = list[list[tuple[int, int, list[Names]]]]
"""Choices for each way to cut a node: of each size how many groups, and the models that each of them can have."""


def _num_tried(choices: Sequence[_Choices], nums: Sequence[int]) -> int:
    """Or more than `MAX_TRIED`. `nums`: of nodes that have each of the choices."""
    found = 1
    for of_node, num_nodes in zip(choices, nums, strict=True):
        num_shapes = sum(math.prod(math.comb(len(own) + num - 1, num) for _, num, own in each) for each in of_node)
        found = max(num_shapes, found * math.comb(num_shapes + num_nodes - 1, num_nodes))
    return found


def _choices(node: NodeFacts, sets: Sequence[Names], fits: Callable[[Names, NodeFacts, int], bool]) -> _Choices:
    largest = 1 << (node.num_devices.bit_length() - 1)
    # Larger groups without a model are what smaller ones are.
    own = {
        size: [each for each in sets if (fits(each, node, size) if each else size == 1)]
        for size in (1 << power for power in range(largest.bit_length()))
    }
    return [[(size, num, own[size]) for size, num in sizes.items()] for sizes in _cuts(node.num_devices, largest)]


def _shapes(choices: Sequence[tuple[int, int, list[Names]]]) -> Iterator[_Shape]:
    parts = [
        [[(size, each) for each in some] for some in itertools.combinations_with_replacement(own, num)]
        for size, num, own in choices
    ]
    for chosen in itertools.product(*parts):
        yield tuple(itertools.chain.from_iterable(chosen))


def _cuts(num_devices: int, largest: int) -> Iterator[dict[int, int]]:
    """Powers of two, descending, and how often each: in this order all groups are aligned."""
    if largest <= 1:
        yield {1: num_devices} if num_devices else {}
        return
    for num in range(num_devices // largest + 1):
        for rest in _cuts(num_devices - num * largest, largest // 2):
            yield ({largest: num} if num else {}) | rest


def _slots(nodes: Sequence[NodeFacts], shapes: Sequence[_Shape]) -> Slots:
    found = []
    for node, shape in zip(nodes, shapes, strict=True):
        first = 0
        for size, names in shape:
            found.append(Group(node.node_id, tuple(range(first, first + size)), names))
            first += size
    return tuple(sorted(found))
