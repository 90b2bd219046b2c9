"""The best plan for a problem: SeaLLM's placement algorithm (section 4.1, Algorithm 1 of its appendix), and moves beyond it.

    for each p in powers of two, and each limit of models that share a group:
        cut all nodes into groups of p devices, larger ones where a model does not fit
        until nothing can be added:
            UI(model) = requests over their SLO + 1e-4 * normalised latency           of the plan so far, by the estimator
            the group with the lowest request rate gets the model with the highest UI that fits
    from the best of these, and from the plan that runs:
        add, drop, replace or exchange a model, make a group like another, split a group, join two

For a small cluster all plans are estimated instead (enumeration.py).

Plans are compared by attainment less a term for models left behind (`plan.unfairness`, SeaLLM's equation 5), in steps of
`ATTAINMENT_GRAIN`, then by smaller normalised latency. One that is not affordable beside the plan that attains most
(`plan.is_affordable`) is not chosen. In a cluster of many groups, a round of Algorithm 1 gives models to
several groups; the UI of a model that got one more of its c groups is multiplied by c / (c + 1). Moves are then drawn with a
seed, and are made to several equal groups at once.

The faithful simulation, if there is one, evaluates the best few plans. Among equally good plans, the one that loads least
from where the models are now is taken. Equal groups are named so that most models stay in place.
The same problem gives the same answer, on any number of processes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from statistics import fmean
from typing import NamedTuple

import msgspec
import numpy as np

from shared.placement.enumeration import all_plans
from shared.placement.estimator import MAX_FOLLOWED, NUM_BINS, NUM_TAIL_BINS, Estimator, Outcome
from shared.placement.memory import Memory
from shared.placement.plan import (
    ATTAINMENT_GRAIN,
    FLOOR_SHARE,
    FLOOR_WEIGHT,
    MOST_FLOOR_COST,
    Trial,
    is_affordable,
    plan_of,
)
from shared.placement.problem import Group, ModelFacts, NodeFacts, Plan, Prediction, Problem, Proposal, Rejected
from shared.placement.rehearsal import change_s
from shared.placement.stretches import busier, lasting, mean_execution_s, thinned
from shared.placement.trial import try_change

ALPHA = 1e-4
"""Weight of normalised latency in a model's unserved index."""
LATENCY_GRAIN = 0.02
"""Relative: plans are equally good if their latencies differ by less, and their attainments by less than their grain."""


class Effort(NamedTuple):
    limits: tuple[int, ...]
    """Limits on the number of models that share a group; 0: as many as fit."""
    num_starts: int
    """Plans of Algorithm 1 from which moves are tried."""
    num_pairs: int
    """Bound on pairs of a group with a model, over all plans that moves lead to from one start. At least `LEAST_MOVES` in
    each of `LEAST_ROUNDS` are tried."""
    num_estimated: int
    """Number of the best by the quick estimate that are estimated with more bins."""
    num_polished: int
    """Number of the best of these from which moves are tried by estimates with more bins."""


EFFORTS = (
    (16, Effort((1, 2, 0), 3, 1 << 14, 64, 8)),
    (128, Effort((2,), 2, 6000, 12, 0)),
    (1 << 62, Effort((2,), 1, 6000, 8, 0)),
)
"""The effort for clusters up to a number of devices."""
ROUND_GROUPS = 16
"""Up to this many groups get models one by one; with k times as many, k groups get one in a round."""
PATIENCE = 8
"""Algorithm 1 ends after this many rounds without a better plan."""
QUICK_BINS, QUICK_TAIL_BINS, QUICK_FOLLOWED = 36, 12, 1000
"""Fineness of the estimates in Algorithm 1 and moves; the plans left at the end are estimated with more bins."""
BIN_SHARE, QUICK_BIN_SHARE = 0.25, 1.0
"""Longest bin, as a share of the mean execution time. What runs where is constant within a bin, so longer bins would make
estimates wrong."""
MOST_EXECUTIONS = 240.0
"""Most traffic that is estimated, in mean execution times."""
NUM_HOT = 8
"""Number of models with the highest unserved index, to which moves give groups."""
MAX_MOVES = 256
"""Tried in a round."""
LEAST_MOVES, LEAST_ROUNDS = 24, 4
MOVE_PATIENCE, POLISH_PATIENCE = 3, 2
"""Moves end after this many rounds without a better plan."""
TOTAL_PRESSURE = 1 / 3
"""Factor on the term for models left behind in moves that look for the plan that serves most in total."""
EVEN_PRESSURES, EVEN_PATIENCE, EVEN_PAIRS = (1.0, 7.0), 4, 24_000
"""Moves that help models left behind: factors on that term, rounds without a better plan after which the moves end, and
pairs of a group with a model from each start."""
MAX_ENUMERATED = 512
"""Number of plans up to which all are estimated, which takes less time than a search."""
NUM_EVALUATED = 4
NUM_REJECTED = 8

Slots = tuple[Group, ...]
"""All devices; groups may be without a model."""
Key = tuple[float, ...]
Evaluate = Callable[[Problem, Plan], Prediction]


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


def _served(outcome: Outcome | Scored) -> float:
    """Attainment less the term for models left behind: plans are compared by it."""
    return outcome.attainment - outcome.unfairness


Allocation = Generator[Slots, Outcome, list[Found]]
"""A run of Algorithm 1: yields a plan, receives its estimate, and returns the best plans."""


def search(problem: Problem, *, evaluate: Evaluate | None = None, num_processes: int = 1) -> Proposal:
    """The best plan found; the incumbent if there is nothing better. `evaluate`: the faithful simulation, for the best few
    and the incumbent; must be picklable for `num_processes` above 1."""
    searcher = Searcher(problem)
    if num_processes > 1:
        with ProcessPoolExecutor(num_processes, get_context("spawn"), _begin, (problem,)) as pool:
            found = _find(searcher, lambda asked: _divided(asked, num_processes, pool))
            return _propose(
                searcher, found, evaluate, lambda call, plans: list(pool.map(partial(_evaluated, call), plans))
            )
    found = _find(searcher, searcher.do)
    return _propose(searcher, found, evaluate, lambda call, plans: [call(problem, plan) for plan in plans])


class Asked(NamedTuple):
    """Independent work."""

    num_ranks: int = 0
    limit: int = 0
    start: Slots = ()
    """Moves from here instead of Algorithm 1."""


def _find(searcher: Searcher, do: Callable[[Sequence[Asked]], Sequence[list[Found]]]) -> list[Found]:
    """Distinct plans, best first."""
    if every := searcher.every():
        return every
    starts = _distinct(each for found in do(searcher.starts()) for each in found)
    incumbent = searcher.incumbent
    asked = [Asked(start=each.slots) for each in starts[: searcher.effort.num_starts]]
    if incumbent:
        asked.append(Asked(start=incumbent))
    found = _distinct([*starts, *(each for found in do(asked) for each in found)])
    found = _distinct([*found, *searcher.evened(found, starts)])
    return _distinct(searcher.polished(found)) or found


def _distinct(found: Iterable[Found]) -> list[Found]:
    """Best first; plans that give up more of the total than may be given up are after all others."""
    found = list(found)
    most = max((one.total for one in found), default=(0.0, 0.0))

    def rank(one: Found) -> tuple[bool, Key]:
        return one.total[0] == most[0] and is_affordable(one.total[1], most[1]), one.key

    known: dict[Slots, Found] = {}
    for each in sorted(found, key=rank, reverse=True):
        known.setdefault(each.slots, each)
    return list(known.values())


def _first(found: Sequence[Found], num: int) -> list[Found]:
    """The best `num`, including the plan with the best total, from which the cost of the floor follows."""
    if len(found) <= num:
        return list(found)
    most = max(found, key=lambda one: one.total)
    return [*found[:num]] if most in found[:num] else [*found[: num - 1], most]


_searchers: list[Searcher] = []
"""Searchers of a worker process."""


def _begin(problem: Problem) -> None:
    _searchers[:] = [Searcher(problem)]


def _do(asked: Sequence[Asked]) -> list[list[Found]]:
    return _searchers[0].do(asked)


def _divided(asked: Sequence[Asked], num: int, pool: ProcessPoolExecutor) -> list[list[Found]]:
    """Each process gets every `num`th."""
    parts = list(pool.map(_do, [asked[first::num] for first in range(num)]))
    return [parts[index % num][index // num] for index in range(len(asked))]


def _evaluated(evaluate: Evaluate, plan: Plan) -> Prediction:
    return evaluate(_searchers[0].problem, plan)


def _estimator(
    problem: Problem,
    most_bin_s: float,
    least_bins: int = NUM_BINS,
    *,
    num_tail_bins: int = NUM_TAIL_BINS,
    max_followed: int = MAX_FOLLOWED,
) -> Estimator:
    num_bins = max(least_bins, math.ceil(problem.traffic.interval_s / most_bin_s))
    return Estimator(problem, num_bins=num_bins, num_tail_bins=num_tail_bins, max_followed=max_followed)


class Searcher:
    """The parts of a search over one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_devices = sum(node.num_devices for node in problem.nodes)
        self.effort = next(effort for at_most, effort in EFFORTS if self.num_devices <= at_most)
        execution_s = mean_execution_s(problem)
        self.estimator = _estimator(thinned(problem, MOST_EXECUTIONS * execution_s), BIN_SHARE * execution_s)
        self._quick = _estimator(
            thinned(problem, MOST_EXECUTIONS * execution_s), QUICK_BIN_SHARE * execution_s, QUICK_BINS,
            num_tail_bins=QUICK_TAIL_BINS, max_followed=QUICK_FOLLOWED,
        )  # fmt: skip
        self._lasting: list[Estimator] = []
        if problem.evidence is not None:
            asked = lasting(problem, MOST_EXECUTIONS * execution_s)
            self._lasting = [_estimator(each, BIN_SHARE * execution_s) for each in (asked, busier(asked))]
        self.nodes: dict[str, NodeFacts] = {node.node_id: node for node in problem.nodes}
        self.models: dict[str, ModelFacts] = {model.name: model for model in problem.models}
        self._numbers = {model.name: number for number, model in enumerate(problem.models)}
        self._memory = Memory(problem)
        self._fits: dict[tuple[tuple[str, ...], str, int, int], bool] = {}
        self.most_ranks = max((node.num_devices for node in problem.nodes), default=0)
        sizes: list[int] = [1 << power for power in range(self.most_ranks.bit_length())]
        self._least: dict[str, int] = {}
        """Devices of the smallest group that holds the model alone."""
        for name in self.models:
            for size in sizes:
                if any(self.fits((name,), node, size) for node in problem.nodes):
                    self._least[name] = size
                    break
        replicas = {name: self.models[name].replicas for name in self._least}
        self.needed = {name: 1 if num is None else num for name, num in replicas.items()}
        """Groups that a model must have, of those that fit anywhere; one with 0 replicas is placed nowhere."""
        self.incumbent = self._incumbent()

    # --------------------------------------------------------------------------------------------------- what fits

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

    def scores(self, plans: Sequence[Plan], incumbent: Plan) -> list[Score]:
        """Scores of each plan under the traffic of the search; for a problem with evidence, under traffic as it may go on.
        A plan's gain on the incumbent (one of `plans`) counts at the recorded number of requests. If it gains less with
        more requests, the mean of both counts."""
        groups = [plan.groups for plan in plans]
        found = [estimator.outcomes(groups) for estimator in self._lasting or [self.estimator]]
        served = np.array([[_served(one) for one in each] for each in found])
        gain = served - served[:, [plans.index(incumbent)]] if incumbent in plans else served
        fewer = np.minimum(0.0, gain.mean(0) - gain[0])
        return [
            Score(one.attainment + less, one.normalised_latency, one.unfairness)
            for less, one in zip(fewer.tolist(), found[0], strict=True)
        ]

    def unserved(self, outcome: Outcome) -> np.ndarray:
        """[models] Equation 6, plus the term for a model left behind."""
        num = self.estimator.num_requests
        attained = 1.0 - outcome.missed / np.maximum(1, num)
        short = np.clip(1.0 - attained / max(FLOOR_SHARE * outcome.attainment, 1e-9), 0.0, 1.0) * (num > 0)
        behind = FLOOR_WEIGHT * outcome.attainment * num.sum() * np.sqrt(short)
        return np.asarray(outcome.missed + behind + ALPHA * outcome.normalised)

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

    def every(self) -> list[Found]:
        """All plans, best first, if they are few; otherwise none."""
        limits = {name: self.models[name].replicas for name, least in self.needed.items() if least}
        plans = all_plans(self.problem.nodes, limits, self.fits, MAX_ENUMERATED)
        outcomes = self._outcomes(self.estimator, plans)
        return _distinct(self.found(slots, each) for slots, each in zip(plans, outcomes, strict=True))

    # ------------------------------------------------------------------------------------------------- Algorithm 1

    def starts(self) -> list[Asked]:
        limits = self.effort.limits
        if own := self.problem.max_models_per_group:
            limits = tuple(dict.fromkeys(min(limit or own, own) for limit in limits))
        return [Asked(2**power, limit) for power in range(self.most_ranks.bit_length()) for limit in limits]

    def do(self, asked: Sequence[Asked]) -> list[list[Found]]:
        """Runs of Algorithm 1 advance side by side: each round estimates the plans of all at once."""
        found: list[list[Found]] = [self.improved(each.start) if each.start else [] for each in asked]
        runs: dict[int, tuple[Allocation, Slots]] = {}

        def go_on(number: int, run: Allocation, outcome: Outcome | None) -> None:
            try:
                runs[number] = run, next(run) if outcome is None else run.send(outcome)
            except StopIteration as ended:
                runs.pop(number, None)
                found[number] = ended.value

        for number, each in enumerate(asked):
            if not each.start:
                go_on(number, self.allocated(each.num_ranks, each.limit), None)
        while runs:
            now = list(runs.items())
            outcomes = self._outcomes(self._quick, [slots for _, (_, slots) in now])
            for (number, (run, _)), outcome in zip(now, outcomes, strict=True):
                go_on(number, run, outcome)
        return found

    def cut(self, num_ranks: int) -> Slots:
        """All nodes in groups of that many devices (the rest of a node in smaller ones). Some are joined for models that do
        not fit, by their share of all work."""
        found: list[Group] = []
        for node in self.problem.nodes:
            first, size = 0, num_ranks
            while first < node.num_devices:
                while first + size > node.num_devices:
                    size //= 2
                found.append(Group(node.node_id, tuple(range(first, first + size)), ()))
                first += size
        slots = sorted(found)
        for size in sorted({least for least in self._least.values() if least > num_ranks}):
            large = [name for name, least in self._least.items() if least == size]
            total = self._work(self._least)
            share = self._work(large) / total if total > 0 else 0.0
            wanted = max(1, round(share * sum(node.num_devices for node in self.problem.nodes) / size))
            for _ in range(wanted):
                if (joined := self._join(slots, size, large)) is None:
                    break
                slots = joined
        return tuple(slots)

    def _work(self, names: Iterable[str]) -> float:
        """Seconds of a device."""
        estimator = self.estimator
        numbers = [(self._numbers[name], self._least[name]) for name in names]
        return float(sum(estimator.num_requests[at] * estimator.execution_s[at] * size for at, size in numbers))

    def _join(self, slots: list[Group], size: int, names: Sequence[str]) -> list[Group] | None:
        """The last aligned groups that together have that size, as one; None if there are none left."""
        for node in reversed(self.problem.nodes):
            if not any(self.fits((name,), node, size) for name in names):
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
        if limit * len(slots) < sum(self.needed.values()) and limit not in (0, self.problem.max_models_per_group):
            return []
        first: list[str] = []
        for _ in range(3):
            found, counts = yield from self._allocated(slots, limit, first)
            if found:
                break
            lacking = [name for name, least in self.needed.items() if counts[name] < least]
            first = self._by_size({*first, *lacking})
        else:
            found, _ = yield from self._allocated(slots, limit, self._by_size(self.needed), is_last=True)
        return [self.found(found, (yield found))]

    def _by_size(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: (-self.models[name].weight_bytes, name))

    def _allocated(
        self, start: Slots, limit: int, first: Sequence[str], *, is_last: bool = False
    ) -> Generator[Slots, Outcome, tuple[Slots, Counter[str]]]:
        """The best plan on the way of Algorithm 1 in which no model lacks a group (none: empty, but for `is_last`), and how
        many groups each got in the end. `first`: models that get their groups before all others."""
        slots = list(start)
        counts: Counter[str] = Counter()

        def can(group: Group, name: str) -> Group | None:
            most = self.models[name].replicas
            if (
                name in group.models
                or (limit and len(group.models) >= limit)
                or (most is not None and counts[name] >= most)
            ):
                return None
            return self.changed(group, (*group.models, name))

        for name in first:
            for index in sorted(
                range(len(slots)), key=lambda index: (len(slots[index].models), slots[index].num_ranks)
            ):
                if counts[name] < self.needed[name] and (grown := can(slots[index], name)) is not None:
                    slots[index] = grown
                    counts[name] += 1
        names = [name for name in self.needed if self.needed[name]]
        at_once = max(1, len(slots) // ROUND_GROUPS)
        best: tuple[Key, Slots] | None = None
        num_worse = 0
        while num_worse < PATIENCE:
            lacking = [name for name in names if counts[name] < self.needed[name]]
            alike = {(self._kind(group), group.models): group for group in slots} if lacking else {}
            if not is_last and not all(any(can(group, name) for group in alike.values()) for name in lacking):
                return (), counts
            full = [index for index, group in enumerate(slots) if group.models]
            outcome = yield tuple(slots)
            if not lacking or is_last:
                num_worse += 1
                if best is None or self.key(slots, outcome) > best[0]:
                    best, num_worse = (self.key(slots, outcome), tuple(slots)), 0
            rates = np.zeros(len(slots))
            rates[full] = outcome.rates
            unserved = self.unserved(outcome)
            num_added = 0
            for index in np.argsort(rates, kind="stable").tolist():
                for name in sorted(names, key=lambda name: (-unserved[self._numbers[name]], counts[name], name)):
                    if (grown := can(slots[index], name)) is not None:
                        slots[index] = grown
                        counts[name] += 1
                        unserved[self._numbers[name]] *= (counts[name] - 1) / counts[name] if counts[name] > 1 else 0.5
                        num_added += 1
                        break
                if num_added == at_once:
                    break
            if not num_added:
                break
        return (() if best is None else best[1]), counts

    def _kind(self, group: Group) -> tuple[str, int, int]:
        """Groups that are equal for all models."""
        node = self.nodes[group.node_id]
        return (node.kind, node.memory_bytes, group.num_ranks)

    # -------------------------------------------------------------------------------------------------------- moves

    def improved(self, start: Slots) -> list[Found]:
        """The best plans reached by moves, by the quick estimate."""
        return self._moved(start, self._quick, MOVE_PATIENCE, self.effort.num_pairs, set())

    def polished(self, found: Sequence[Found]) -> list[Found]:
        """The best of these, and plans reached by moves from several of them, by estimates with more bins."""
        if not self.effort.num_polished:
            return []
        tried = [each.slots for each in _first(found, self.effort.num_estimated)]
        outcomes = self._outcomes(self.estimator, tried)
        best = _distinct(self.found(slots, each) for slots, each in zip(tried, outcomes, strict=True))
        polished, known = list(best), set[int]()
        num_pairs = self.effort.num_pairs // self.effort.num_polished
        for start in best[: self.effort.num_polished]:
            polished += self._moved(start.slots, self.estimator, POLISH_PATIENCE, num_pairs, known)
        return polished

    def _outcomes(self, estimator: Estimator, plans: Iterable[Slots]) -> list[Outcome]:
        return estimator.outcomes([[group for group in slots if group.models] for slots in plans])

    def evened(self, found: Sequence[Found], starts: Sequence[Found]) -> list[Found]:
        """If the best plan leaves models behind: plans reached by moves from the best of both, while these count more.
        Their cost in total is compared at the end, because a plan on the way may be the best."""
        if not found or not found[0].is_unfair:
            return []
        begins = dict.fromkeys([found[0].slots, *(each.slots for each in starts[: self.effort.num_starts])])
        return [
            each
            for start in begins
            for pressure in EVEN_PRESSURES
            for each in self._moved(start, self._quick, EVEN_PATIENCE, EVEN_PAIRS, set(), pressure)
        ]

    def _moved(
        self,
        start: Slots,
        estimator: Estimator,
        patience: int,
        num_pairs: int,
        known: set[int],
        pressure: float = TOTAL_PRESSURE,
    ) -> list[Found]:
        """By the best move of each round, also a bad one, until `patience` rounds have brought nothing better: the best
        plans. `num_pairs`: of a group with a model, over all plans that are tried, but for the least. `known`: signatures of
        plans that are not tried again; those that are, are added."""
        (outcome,) = self._outcomes(estimator, [start])
        now = self.found(start, outcome)
        found, found_key, num_worse = [now], self.key(start, outcome, pressure), 0
        known.add(self._signature(start))
        draw = np.random.default_rng(len(start))
        of_plan = max(1, sum(len(group.models) for group in start))
        most = min(MAX_MOVES, max(LEAST_MOVES, num_pairs // LEAST_ROUNDS // of_plan))
        left = max(num_pairs, LEAST_ROUNDS * LEAST_MOVES * of_plan)
        while left > 0:
            moves: list[Slots] = []
            for slots in self._moves(now.slots, outcome, self.num_groups(now.slots)):
                if (signature := self._signature(slots)) not in known:
                    known.add(signature)
                    moves.append(slots)
            if not moves:
                break
            if len(moves) > most:
                moves = [moves[index] for index in sorted(draw.choice(len(moves), most, replace=False).tolist())]
            outcomes = self._outcomes(estimator, moves)
            left -= max(1, len(moves) * of_plan)
            tried = [self.found(slots, each) for each, slots in zip(outcomes, moves, strict=True)]
            found = _first(_distinct([*found, *tried]), self.effort.num_estimated)
            keys = [self.key(slots, each, pressure) for each, slots in zip(outcomes, moves, strict=True)]
            best = max(range(len(tried)), key=keys.__getitem__)
            num_worse = 0 if keys[best] > found_key else num_worse + 1
            found_key = max(found_key, keys[best])
            if num_worse == patience:
                break
            now, outcome = tried[best], outcomes[best]
        return found

    def _signature(self, slots: Slots) -> int:
        """Signature of equivalent groups, wherever they are."""
        return hash(tuple(sorted((self._kind(group), group.models) for group in slots)))

    def _moves(self, slots: Slots, outcome: Outcome, counts: Counter[str]) -> Iterable[Slots]:
        """Plans that differ in a group or two, or in several of a kind alike; models lack no more groups than before."""
        unserved = self.unserved(outcome)
        names = [name for name in self.needed if self.needed[name]]
        lacking = {name for name in names if counts[name] < self.needed[name]}
        hot = sorted(names, key=lambda name: (name not in lacking, -unserved[self._numbers[name]], name))[:NUM_HOT]
        kinds: dict[tuple[tuple[str, int, int], tuple[str, ...]], list[int]] = {}
        for index, group in enumerate(slots):
            kinds.setdefault((self._kind(group), group.models), []).append(index)
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
                if models and not self.fits(models, self.nodes[slot.node_id], size):
                    return
                delta.update(models)
                made.append(group)
        lacking = 0
        for name, change in delta.items():
            most, after = self.models[name].replicas, counts[name] + change
            if change > 0 and most is not None and after > most:
                return
            lacking += max(0, self.needed[name] - after) - max(0, self.needed[name] - counts[name])
        if lacking > 0:
            return
        yield tuple(sorted([*(group for index, group in enumerate(slots) if index not in changes), *made]))

    # ------------------------------------------------------------------------------------------------------- stability

    def aligned(self, slots: Slots) -> Slots:
        """The same plan, with models on those of equivalent groups where they are now."""
        incumbent = self.problem.incumbent
        if incumbent is None:
            return slots
        held = {(group.node_id, group.devices): frozenset(group.models) for group in incumbent.groups}
        places: dict[tuple[str, int, int], list[Group]] = {}
        for group in slots:
            places.setdefault(self._kind(group), []).append(group)
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


# ---------------------------------------------------------------------------------------------------------- the choice


def _propose(
    searcher: Searcher,
    found: Sequence[Found],
    evaluate: Evaluate | None,
    evaluated: Callable[[Evaluate, Sequence[Plan]], list[Prediction]],
) -> Proposal:
    problem, incumbent = searcher.problem, plan_of(searcher.incumbent)
    found = _first(found, searcher.effort.num_estimated)
    plans = list(dict.fromkeys(plan_of(searcher.aligned(each.slots)) for each in found)) or [incumbent]
    has_incumbent = bool(incumbent.groups)
    if has_incumbent and incumbent not in plans:
        plans.append(incumbent)
    scores: dict[Plan, Scored] = dict(zip(plans, searcher.scores(plans, incumbent), strict=True))
    plans.sort(key=_ranks(searcher, plans, scores).__getitem__, reverse=True)
    asked = plans[:NUM_EVALUATED]
    if has_incumbent and incumbent not in asked:
        asked.append(incumbent)
    if (neglects := _best_in_total(searcher, plans, scores, asked[0])) is not None and neglects not in asked:
        asked.append(neglects)  # so that the cost of the floor, and whom it helps, can be reported
    predict = searcher.estimator.predict
    predictions = [predict(plan) for plan in asked] if evaluate is None else evaluated(evaluate, asked)
    known = dict(zip(asked, predictions, strict=True))
    if evaluate is not None:
        scores = _corrected(searcher, scores, known)
    elif problem.evidence is None:
        scores |= known
    ranks = _ranks(searcher, asked, scores)
    best = max(asked, key=ranks.__getitem__)
    equals = [plan for plan in asked if ranks[plan][:2] == ranks[best][:2] and _is_as_good(scores[plan], scores[best])]
    if problem.incumbent is not None:
        best = min(equals, key=lambda plan: (searcher.change_s(plan), plan != incumbent, asked.index(plan)))
    trial = None
    if has_incumbent and best != incumbent:
        best, trial = _tried(searcher, incumbent, best, _cheaper(searcher, plans, scores, best, incumbent))
        if best not in known:
            (known[best],) = [predict(best)] if evaluate is None else evaluated(evaluate, [best])
    others = sorted((plan for plan in asked if plan != best), key=ranks.__getitem__, reverse=True)
    others += [plan for plan in plans if plan not in known][: NUM_REJECTED - len(others)]
    return Proposal(
        plan=best,
        prediction=known[best],
        incumbent=known.get(incumbent) if has_incumbent else None,
        rejected=tuple(
            Rejected(plan, known.get(plan), _reason(searcher, plan, known.get(plan), best, known[best]))
            for plan in others
        ),
        unplaced=searcher.unplaced(best),
        trial=trial,
        floor_cost=_floor_cost(searcher, plans, scores, best),
    )


def _ranks(
    searcher: Searcher, plans: Sequence[Plan], scores: Mapping[Plan, Scored]
) -> dict[Plan, tuple[float, bool, float, float]]:
    """What plans are compared by, larger is better: groups that models lack, whether the plan is affordable beside the one
    that attains most, attainment less the term for models left behind, and normalised latency."""
    lacking = {plan: searcher.num_lacking(plan.groups) for plan in plans}
    least = min(lacking.values())
    most = max(scores[plan].attainment for plan in plans if lacking[plan] == least)
    found = {}
    for plan in plans:
        lacks, served, latency = searcher.key(plan.groups, scores[plan])
        found[plan] = (lacks, is_affordable(scores[plan].attainment, most), served, latency)
    return found


def _corrected(
    searcher: Searcher, scores: Mapping[Plan, Scored], simulated: Mapping[Plan, Prediction]
) -> dict[Plan, Scored]:
    """Scores corrected by the difference between simulation and estimate of the last window. If traffic as it may go on was
    estimated, plans are still compared by that. Plans that were not simulated are corrected by the mean difference of the
    others, so that all are on one scale."""
    errors = {}
    for plan, told in simulated.items():
        (estimated,) = searcher.estimator.outcomes([plan.groups])
        errors[plan] = Score(
            told.attainment - estimated.attainment,
            told.normalised_latency / max(estimated.normalised_latency, 1e-9),
            told.unfairness - estimated.unfairness,
        )
    mean = Score(*(fmean(column) for column in zip(*errors.values(), strict=True)))
    found: dict[Plan, Scored] = {}
    for plan, score in scores.items():
        error = errors.get(plan, mean)
        found[plan] = Score(
            score.attainment + error.attainment,
            score.normalised_latency * error.normalised_latency,
            max(0.0, score.unfairness + error.unfairness),
        )
    return found


def _best_in_total(searcher: Searcher, plans: Sequence[Plan], scores: Mapping[Plan, Scored], best: Plan) -> Plan | None:
    """The plan that serves most in total, if it serves more than the best one by leaving more models behind."""
    lacking, now = searcher.num_lacking(best.groups), scores[best]
    more = [
        plan
        for plan in plans
        if scores[plan].unfairness > now.unfairness
        and scores[plan].attainment > now.attainment
        and searcher.num_lacking(plan.groups) <= lacking
    ]
    return max(more, key=lambda plan: scores[plan].attainment, default=None)


def _floor_cost(searcher: Searcher, plans: Sequence[Plan], scores: Mapping[Plan, Scored], best: Plan) -> float:
    more = _best_in_total(searcher, plans, scores, best)
    return 0.0 if more is None else scores[more].attainment - scores[best].attainment


def _cheaper(
    searcher: Searcher, plans: Sequence[Plan], scores: Mapping[Plan, Scored], best: Plan, incumbent: Plan
) -> Plan:
    """The cheapest plan to change to, among those with at least half of the best one's gain."""
    now, most = scores[incumbent], scores[best]
    ranks = _ranks(searcher, plans, scores)
    plans = [plan for plan in plans if ranks[plan][1]]
    lacking = searcher.num_lacking(best.groups)
    gain = _served(most) - _served(now)
    if gain > ATTAINMENT_GRAIN:
        enough = [plan for plan in plans if _served(scores[plan]) - _served(now) >= gain / 2]
    else:
        latency = (most.normalised_latency + now.normalised_latency) / 2
        enough = [
            plan
            for plan in plans
            if _served(scores[plan]) >= _served(most) - ATTAINMENT_GRAIN and scores[plan].normalised_latency <= latency
        ]
    enough = [plan for plan in enough if plan != incumbent and searcher.num_lacking(plan.groups) <= lacking]
    return min([best, *enough], key=searcher.change_s)


def _tried(searcher: Searcher, incumbent: Plan, best: Plan, cheaper: Plan) -> tuple[Plan, Trial]:
    """The one of both plans that would have served better including its change."""
    problem = msgspec.structs.replace(searcher.problem, incumbent=incumbent)
    trials = [(plan, try_change(problem, plan)) for plan in dict.fromkeys((best, cheaper))]

    def key(tried: tuple[Plan, Trial]) -> tuple[float, float]:
        horizons = tried[1].horizons
        if not horizons:
            return (-1.0, 0.0)
        attainment = fmean(one.change_attainment - one.change_unfairness for one in horizons)
        return (round(attainment / ATTAINMENT_GRAIN), -fmean(one.change_latency for one in horizons))

    return max(trials, key=key)


def _is_as_good(one: Scored, best: Scored) -> bool:
    return _served(one) >= _served(best) - ATTAINMENT_GRAIN and one.normalised_latency <= best.normalised_latency * (
        1 + LATENCY_GRAIN
    )


def _reason(searcher: Searcher, plan: Plan, prediction: Prediction | None, best: Plan, taken: Prediction) -> str:
    if prediction is None:
        return "less by the estimate than those that were simulated"
    if searcher.num_lacking(plan.groups) > searcher.num_lacking(best.groups):
        return "not every model has its groups"
    if _served(prediction) > _served(taken) + ATTAINMENT_GRAIN and prediction.attainment < taken.attainment:
        return f"attainment {prediction.attainment:.1%}: more than {MOST_FLOOR_COST:.0%} would be given up of the most"
    if _is_as_good(prediction, taken) and searcher.problem.incumbent is not None:
        cost_s, least_s = searcher.change_s(plan), searcher.change_s(best)
        cost, least = f"{cost_s:.3g} s", f"{least_s:.3g} s"
        return (
            f"as good, but {cost} of devices to change to, not {least}"
            if cost != least
            else "as good, and as much to change"
        )
    if round(_served(prediction) / ATTAINMENT_GRAIN) < round(_served(taken) / ATTAINMENT_GRAIN):
        if prediction.unfairness > taken.unfairness:
            name, now = prediction.worst, taken.models[prediction.worst].attainment
            had = prediction.models[name].attainment
            told = f"attainment {prediction.attainment:.1%}, not {taken.attainment:.1%}"
            return f"{told}, and {name} would have {had:.1%}, not {now:.1%}"
        return f"attainment {prediction.attainment:.1%}, not {taken.attainment:.1%}"
    return f"normalised latency {prediction.normalised_latency:.3g}, not {taken.normalised_latency:.3g}"
