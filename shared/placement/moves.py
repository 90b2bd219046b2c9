"""Moves from a plan to its neighbours: plans that differ in a group or two, or in several of a kind alike. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from shared.placement.enumeration import Slots
from shared.placement.problem import Group
from shared.placement.space import Space

NUM_HOT = 8
"""Number of models with the highest unserved index, to which moves give groups."""


class Moves:
    def __init__(self, space: Space) -> None:
        self._space = space

    def signature(self, slots: Slots) -> int:
        """Signature of equivalent groups, wherever they are."""
        return hash(tuple(sorted((self._space.kind(group), group.models) for group in slots)))

    def of(self, slots: Slots, unserved: np.ndarray) -> Iterable[Slots]:
        """Plans that differ in a group or two, or in several of a kind alike; models lack no more groups than before.
        `unserved`: [models] the unserved index of each."""
        counts = self._space.num_groups(slots)
        names = [name for name in self._space.needed if self._space.needed[name]]
        lacking = {name for name in names if counts[name] < self._space.needed[name]}
        hot = sorted(names, key=lambda name: (name not in lacking, -unserved[self._space.numbers[name]], name))[
            :NUM_HOT
        ]
        kinds: dict[tuple[tuple[str, int, int], tuple[str, ...]], list[int]] = {}
        for index, group in enumerate(slots):
            kinds.setdefault((self._space.kind(group), group.models), []).append(index)
        alike = list(kinds.values())
        for indices in alike:
            group = slots[indices[0]]
            sets: list[tuple[str, ...]] = []
            for name in hot:
                if name not in group.models:
                    sets += [(*group.models, name), (name,)]
                    sets += [(*(other for other in group.models if other != out), name) for out in group.models]
            sets += [tuple(other for other in group.models if other != out) for out in group.models]
            sets += [slots[others[0]].models for others in alike if slots[others[0]].num_ranks == group.num_ranks]
            for models in dict.fromkeys(tuple(sorted(each)) for each in sets):
                for many in dict.fromkeys((1, max(1, len(indices) // 4))):
                    yield from self._with(
                        slots, counts, {index: [(0, group.num_ranks, models)] for index in indices[:many]}
                    )
            yield from self._splits(slots, counts, indices[0], hot)
        yield from self._joins(slots, counts)
        for position, indices in enumerate(alike):
            for others in alike[position + 1 :]:
                first, second = slots[indices[0]], slots[others[0]]
                for one in first.models:
                    for two in second.models:
                        if one not in second.models and two not in first.models:
                            left = tuple(sorted({*first.models, two} - {one}))
                            right = tuple(sorted({*second.models, one} - {two}))
                            yield from self._with(
                                slots,
                                counts,
                                {indices[0]: [(0, first.num_ranks, left)], others[0]: [(0, second.num_ranks, right)]},
                            )

    def _splits(self, slots: Slots, counts: Counter[str], index: int, hot: Sequence[str]) -> Iterable[Slots]:
        group = slots[index]
        half, models = group.num_ranks // 2, group.models
        if group.num_ranks < 2:
            return
        pairs = [(models, models), *((models, (name,)) for name in hot)]
        for number in range(1, 2 ** min(len(models), 4)):
            one = tuple(name for place, name in enumerate(models) if number >> place & 1)
            pairs += [(one, tuple(name for name in models if name not in one)), (one, models)]
        for left, right in dict.fromkeys(pairs):
            yield from self._with(slots, counts, {index: [(0, half, left), (half, half, right)]})

    def _joins(self, slots: Slots, counts: Counter[str]) -> Iterable[Slots]:
        """`slots`: ascending, so neighbours are beside each other."""
        known = set()
        for index, (one, two) in enumerate(pairwise(slots)):
            size = one.num_ranks
            is_pair = one.node_id == two.node_id and two.num_ranks == size and two.devices[0] == one.devices[0] + size
            if not is_pair or one.devices[0] % (2 * size) or (one.models, two.models, size) in known:
                continue
            known.add((one.models, two.models, size))
            for models in dict.fromkeys((tuple(sorted({*one.models, *two.models})), one.models, two.models)):
                yield from self._with(slots, counts, {index: [(0, 2 * size, models)], index + 1: []})

    def _with(
        self, slots: Slots, counts: Counter[str], changes: dict[int, list[tuple[int, int, tuple[str, ...]]]]
    ) -> Iterable[Slots]:
        """Variants with slots replaced by groups of (first device from the slot's first, devices, models); none if it is no
        plan."""
        made: list[Group] = []
        delta: Counter[str] = Counter()
        for index, parts in changes.items():
            slot = slots[index]
            delta.subtract(slot.models)
            for first, size, models in parts:
                begin = slot.devices[0] + first
                group = Group(slot.node_id, tuple(range(begin, begin + size)), models)
                if models and not self._space.fits(models, self._space.nodes[slot.node_id], size):
                    return
                delta.update(models)
                made.append(group)
        lacking = 0
        for name, change in delta.items():
            most, after = self._space.models[name].replicas, counts[name] + change
            if change > 0 and most is not None and after > most:
                return
            lacking += max(0, self._space.needed[name] - after) - max(0, self._space.needed[name] - counts[name])
        if lacking > 0:
            return
        yield tuple(sorted([*(group for index, group in enumerate(slots) if index not in changes), *made]))
