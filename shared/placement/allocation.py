"""Algorithm 1 of SeaLLM (search.py has it in short): groups of one size get models one by one, by the estimate of the plan
so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Sequence

import numpy as np

from shared.placement.enumeration import Slots
from shared.placement.estimator import Estimator, Outcome
from shared.placement.plan import FLOOR_SHARE, FLOOR_WEIGHT
from shared.placement.problem import Group
from shared.placement.space import Found, Key, Space

ALPHA = 1e-4
"""Weight of normalised latency in a model's unserved index."""
ROUND_GROUPS = 16
"""Up to this many groups get models one by one; with k times as many, k groups get one in a round."""
PATIENCE = 8
"""Algorithm 1 ends after this many rounds without a better plan."""

Allocation = Generator[Slots, Outcome, list[Found]]
"""A run of Algorithm 1: yields a plan, receives its estimate, and returns the best plans."""


def unserved_index(outcome: Outcome, num: np.ndarray) -> np.ndarray:
    """[models] Equation 6, plus the term for a model left behind. `num`: [models] requests."""
    attained = 1.0 - outcome.missed / np.maximum(1, num)
    short = np.clip(1.0 - attained / max(FLOOR_SHARE * outcome.attainment, 1e-9), 0.0, 1.0) * (num > 0)
    behind = FLOOR_WEIGHT * outcome.attainment * num.sum() * np.sqrt(short)
    return np.asarray(outcome.missed + behind + ALPHA * outcome.normalised)


class Algorithm1:
    def __init__(self, space: Space, estimator: Estimator) -> None:
        """`estimator`: of the traffic of the search."""
        self._space = space
        self._num_requests, self._execution_s = estimator.num_requests, estimator.execution_s

    def cut(self, num_ranks: int) -> Slots:
        """All nodes in groups of that many devices (the rest of a node in smaller ones). Some are joined for models that do
        not fit, by their share of all work."""
        found: list[Group] = []
        for node in self._space.problem.nodes:
            first, size = 0, num_ranks
            while first < node.num_devices:
                while first + size > node.num_devices:
                    size //= 2
                found.append(Group(node.node_id, tuple(range(first, first + size)), ()))
                first += size
        slots = sorted(found)
        for size in sorted({least for least in self._space.least.values() if least > num_ranks}):
            large = [name for name, least in self._space.least.items() if least == size]
            total = self._work(self._space.least)
            share = self._work(large) / total if total > 0 else 0.0
            wanted = max(1, round(share * sum(node.num_devices for node in self._space.problem.nodes) / size))
            for _ in range(wanted):
                if (joined := self._join(slots, size, large)) is None:
                    break
                slots = joined
        return tuple(slots)

    def _work(self, names: Iterable[str]) -> float:
        """Seconds of a device."""
        numbers = [(self._space.numbers[name], self._space.least[name]) for name in names]
        return float(sum(self._num_requests[at] * self._execution_s[at] * size for at, size in numbers))

    def _join(self, slots: list[Group], size: int, names: Sequence[str]) -> list[Group] | None:
        """The last aligned groups that together have that size, as one; None if there are none left."""
        for node in reversed(self._space.problem.nodes):
            if not any(self._space.fits((name,), node, size) for name in names):
                continue
            for first in range((node.num_devices // size - 1) * size, -1, -size):
                inside = [s for s in slots if s.node_id == node.node_id and first <= s.devices[0] < first + size]
                if all(s.num_ranks < size and s.devices[-1] < first + size for s in inside):
                    joined = Group(node.node_id, tuple(range(first, first + size)), ())
                    return sorted([*(s for s in slots if s not in inside), joined])
        return None

    def allocated(self, num_ranks: int, limit: int) -> Allocation:
        """Plan of groups of that many devices, with at most that many models each (0: as many as fit)."""
        slots = self.cut(num_ranks)
        if limit * len(slots) < sum(self._space.needed.values()) and limit not in (
            0,
            self._space.problem.max_models_per_group,
        ):
            return []
        first: list[str] = []
        for _ in range(3):
            found, counts = yield from self._allocated(slots, limit, first)
            if found:
                break
            lacking = [name for name, least in self._space.needed.items() if counts[name] < least]
            first = self._by_size({*first, *lacking})
        else:
            found, _ = yield from self._allocated(slots, limit, self._by_size(self._space.needed), is_last=True)
        return [self._space.found(found, (yield found))]

    def _by_size(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: (-self._space.models[name].weight_bytes, name))

    def _allocated(
        self, start: Slots, limit: int, first: Sequence[str], *, is_last: bool = False
    ) -> Generator[Slots, Outcome, tuple[Slots, Counter[str]]]:
        """The best plan on the way of Algorithm 1 in which no model lacks a group (none: empty, but for `is_last`), and how
        many groups each got in the end. `first`: models that get their groups before all others."""
        slots = list(start)
        counts: Counter[str] = Counter()

        def can(group: Group, name: str) -> Group | None:
            most = self._space.models[name].replicas
            if (
                name in group.models
                or (limit and len(group.models) >= limit)
                or (most is not None and counts[name] >= most)
            ):
                return None
            return self._space.changed(group, (*group.models, name))

        for name in first:
            for index in sorted(
                range(len(slots)), key=lambda index: (len(slots[index].models), slots[index].num_ranks)
            ):
                if counts[name] < self._space.needed[name] and (grown := can(slots[index], name)) is not None:
                    slots[index] = grown
                    counts[name] += 1
        names = [name for name in self._space.needed if self._space.needed[name]]
        at_once = max(1, len(slots) // ROUND_GROUPS)
        best: tuple[Key, Slots] | None = None
        num_worse = 0
        while num_worse < PATIENCE:
            lacking = [name for name in names if counts[name] < self._space.needed[name]]
            alike = {(self._space.kind(group), group.models): group for group in slots} if lacking else {}
            if not is_last and not all(any(can(group, name) for group in alike.values()) for name in lacking):
                return (), counts
            full = [index for index, group in enumerate(slots) if group.models]
            outcome = yield tuple(slots)
            if not lacking or is_last:
                num_worse += 1
                if best is None or self._space.key(slots, outcome) > best[0]:
                    best, num_worse = (self._space.key(slots, outcome), tuple(slots)), 0
            rates = np.zeros(len(slots))
            rates[full] = outcome.rates
            unserved = unserved_index(outcome, self._num_requests)
            num_added = 0
            for index in np.argsort(rates, kind="stable").tolist():
                for name in sorted(names, key=lambda name: (-unserved[self._space.numbers[name]], counts[name], name)):
                    if (grown := can(slots[index], name)) is not None:
                        slots[index] = grown
                        counts[name] += 1
                        unserved[self._space.numbers[name]] *= (
                            (counts[name] - 1) / counts[name] if counts[name] > 1 else 0.5
                        )
                        num_added += 1
                        break
                if num_added == at_once:
                    break
            if not num_added:
                break
        return (() if best is None else best[1]), counts
