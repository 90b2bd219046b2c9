"""All plans of small clusters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.placement.enumeration import all_plans
from shared.placement.problem import Group, NodeFacts
from tests.shared.placement.small import node
from tests.stalls import Stopwatch

LARGE = "large"
"""Fits no single device."""


def fits(names: tuple[str, ...], _: NodeFacts, num_ranks: int) -> bool:
    return len(names) <= 2 and not (LARGE in names and num_ranks == 1)


def signature(groups: Sequence[Group], nodes: Sequence[NodeFacts]) -> object:
    """Equal of plans that differ in devices that are alike."""
    of_node = [
        (
            one.num_devices,
            tuple(sorted((g.num_ranks, g.models) for g in groups if g.node_id == one.node_id and g.models)),
        )
        for one in nodes
    ]
    return tuple(sorted(of_node))


def by_hand(one: NodeFacts, names: Sequence[str]) -> list[list[Group]]:
    """Every way to cut a node into aligned groups, with every choice of models for each."""

    def cuts(first: int) -> list[list[tuple[int, ...]]]:
        if first == one.num_devices:
            return [[]]
        found = []
        for size in (1, 2, 4):
            if first % size == 0 and first + size <= one.num_devices:
                found += [[tuple(range(first, first + size)), *rest] for rest in cuts(first + size)]
        return found

    sets = [each for size in range(3) for each in itertools.combinations(names, size)]
    plans = []
    for cut in cuts(0):
        for chosen in itertools.product(sets, repeat=len(cut)):
            if all(not each or fits(each, one, len(devices)) for each, devices in zip(chosen, cut, strict=True)):
                plans.append([Group(one.node_id, devices, each) for each, devices in zip(chosen, cut, strict=True)])
    return plans


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=2), st.integers(1, 2), st.booleans(), st.sampled_from([None, 1])
)
def test_every_plan_is_there_once(sizes, num_models, has_large, limit):
    if sum(sizes) > 4:
        sizes = sizes[:1]
    nodes = [node(f"n{number}", size) for number, size in enumerate(sizes)]
    names = sorted([*(f"m{number}" for number in range(num_models)), *([LARGE] if has_large else [])])
    models: dict[str, int | None] = {name: limit if name == "m0" else None for name in names}
    found = all_plans(nodes, models, fits, 1 << 14)
    every = [list(itertools.chain(*each)) for each in itertools.product(*(by_hand(one, names) for one in nodes))]

    def holds(groups: Sequence[Group]) -> int:
        counts = [sum(name in group.models for group in groups) for name in names]
        if limit is not None and counts[names.index("m0")] > limit:
            return -1
        return sum(count > 0 for count in counts)

    wanted = [each for each in every if holds(each) == len(names)] or [each for each in every if holds(each) >= 0]
    signatures = [signature(slots, nodes) for slots in found]
    assert len(signatures) == len(set(signatures))
    assert set(signatures) == {signature(each, nodes) for each in wanted}
    for slots in found:
        devices = [(group.node_id, device) for group in slots for device in group.devices]
        assert sorted(devices) == [(one.node_id, device) for one in nodes for device in range(one.num_devices)]
        assert all(group.devices[0] % group.num_ranks == 0 for group in slots)


def test_more_than_asked_for_are_none():
    few = all_plans([node(num_devices=4)], {"a": None}, fits, 100)
    assert few
    assert all_plans([node(num_devices=4)], {"a": None}, fits, len(few) - 1) == []
    assert all_plans([node(num_devices=8)], dict.fromkeys("abcdefghijklmnop"), fits, 100) == []


def test_nothing_to_place():
    assert all_plans([node(num_devices=1)], {}, fits, 10) == [(Group("n0", (0,), ()),)]
    assert all_plans([], {"a": None}, fits, 10) == [()]


def test_more_plans_than_memory_holds_are_not_made():
    models = {f"m{number}": None for number in range(8)}
    with Stopwatch() as watch:
        assert all_plans([node("n", num_devices=8)], models, lambda *_: True, 1 << 20) == []
    assert watch.seconds < 5
