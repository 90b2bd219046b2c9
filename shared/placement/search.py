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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from shared.placement.allocation import Algorithm1, Allocation, unserved_index
from shared.placement.choosing import Evaluate, propose
from shared.placement.enumeration import Slots, all_plans
from shared.placement.estimator import MAX_FOLLOWED, NUM_BINS, NUM_TAIL_BINS, Estimator, Outcome
from shared.placement.moves import Moves
from shared.placement.plan import is_affordable
from shared.placement.problem import Plan, Prediction, Problem, Proposal
from shared.placement.space import Found, Key, Score, Space, served_by
from shared.placement.stretches import busier, lasting, mean_execution_s, thinned


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
QUICK_BINS, QUICK_TAIL_BINS, QUICK_FOLLOWED = 36, 12, 1000
"""Fineness of the estimates in Algorithm 1 and moves; the plans left at the end are estimated with more bins."""
BIN_SHARE, QUICK_BIN_SHARE = 0.25, 1.0
"""Longest bin, as a share of the mean execution time. What runs where is constant within a bin, so longer bins would make
estimates wrong."""
MOST_EXECUTIONS = 240.0
"""Most traffic that is estimated, in mean execution times."""
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


def search(problem: Problem, *, evaluate: Evaluate | None = None, num_processes: int = 1) -> Proposal:
    """The best plan found; the incumbent if there is nothing better. `evaluate`: the faithful simulation, for the best few
    and the incumbent; must be picklable for `num_processes` above 1."""
    searcher = Searcher(problem)
    if num_processes > 1:
        with ProcessPoolExecutor(num_processes, get_context("spawn"), _begin, (problem,)) as pool:
            found = _find(searcher, lambda asked: _divided(asked, num_processes, pool))
            return searcher.proposal(
                found, evaluate, lambda call, plans: list(pool.map(partial(_evaluated, call), plans))
            )
    found = _find(searcher, searcher.do)
    return searcher.proposal(found, evaluate, lambda call, plans: [call(problem, plan) for plan in plans])


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
    incumbent = searcher.space.incumbent
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
    """The parts of a search over one problem, and its order."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.space = Space(problem)
        self.effort = next(effort for at_most, effort in EFFORTS if self.space.num_devices <= at_most)
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
        self._algorithm = Algorithm1(self.space, self.estimator)
        self._moves = Moves(self.space)

    def scores(self, plans: Sequence[Plan], incumbent: Plan) -> list[Score]:
        """Scores of each plan under the traffic of the search; for a problem with evidence, under traffic as it may go on.
        A plan's gain on the incumbent (one of `plans`) counts at the recorded number of requests. If it gains less with
        more requests, the mean of both counts."""
        groups = [plan.groups for plan in plans]
        found = [estimator.outcomes(groups) for estimator in self._lasting or [self.estimator]]
        served = np.array([[served_by(one) for one in each] for each in found])
        gain = served - served[:, [plans.index(incumbent)]] if incumbent in plans else served
        fewer = np.minimum(0.0, gain.mean(0) - gain[0])
        return [
            Score(one.attainment + less, one.normalised_latency, one.unfairness)
            for less, one in zip(fewer.tolist(), found[0], strict=True)
        ]

    def every(self) -> list[Found]:
        """All plans, best first, if they are few; otherwise none."""
        limits = {name: self.space.models[name].replicas for name, least in self.space.needed.items() if least}
        plans = all_plans(self.problem.nodes, limits, self.space.fits, MAX_ENUMERATED)
        outcomes = self._outcomes(self.estimator, plans)
        return _distinct(self.space.found(slots, each) for slots, each in zip(plans, outcomes, strict=True))

    def starts(self) -> list[Asked]:
        limits = self.effort.limits
        if own := self.problem.max_models_per_group:
            limits = tuple(dict.fromkeys(min(limit or own, own) for limit in limits))
        return [Asked(2**power, limit) for power in range(self.space.most_ranks.bit_length()) for limit in limits]

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
                go_on(number, self._algorithm.allocated(each.num_ranks, each.limit), None)
        while runs:
            now = list(runs.items())
            outcomes = self._outcomes(self._quick, [slots for _, (_, slots) in now])
            for (number, (run, _)), outcome in zip(now, outcomes, strict=True):
                go_on(number, run, outcome)
        return found

    def improved(self, start: Slots) -> list[Found]:
        """The best plans reached by moves, by the quick estimate."""
        return self._moved(start, self._quick, MOVE_PATIENCE, self.effort.num_pairs, set())

    def polished(self, found: Sequence[Found]) -> list[Found]:
        """The best of these, and plans reached by moves from several of them, by estimates with more bins."""
        if not self.effort.num_polished:
            return []
        tried = [each.slots for each in _first(found, self.effort.num_estimated)]
        outcomes = self._outcomes(self.estimator, tried)
        best = _distinct(self.space.found(slots, each) for slots, each in zip(tried, outcomes, strict=True))
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
        now = self.space.found(start, outcome)
        found, found_key, num_worse = [now], self.space.key(start, outcome, pressure), 0
        known.add(self._moves.signature(start))
        draw = np.random.default_rng(len(start))
        of_plan = max(1, sum(len(group.models) for group in start))
        most = min(MAX_MOVES, max(LEAST_MOVES, num_pairs // LEAST_ROUNDS // of_plan))
        left = max(num_pairs, LEAST_ROUNDS * LEAST_MOVES * of_plan)
        while left > 0:
            moves: list[Slots] = []
            for slots in self._moves.of(now.slots, unserved_index(outcome, self.estimator.num_requests)):
                if (signature := self._moves.signature(slots)) not in known:
                    known.add(signature)
                    moves.append(slots)
            if not moves:
                break
            if len(moves) > most:
                moves = [moves[index] for index in sorted(draw.choice(len(moves), most, replace=False).tolist())]
            outcomes = self._outcomes(estimator, moves)
            left -= max(1, len(moves) * of_plan)
            tried = [self.space.found(slots, each) for each, slots in zip(outcomes, moves, strict=True)]
            found = _first(_distinct([*found, *tried]), self.effort.num_estimated)
            keys = [self.space.key(slots, each, pressure) for each, slots in zip(outcomes, moves, strict=True)]
            best = max(range(len(tried)), key=keys.__getitem__)
            num_worse = 0 if keys[best] > found_key else num_worse + 1
            found_key = max(found_key, keys[best])
            if num_worse == patience:
                break
            now, outcome = tried[best], outcomes[best]
        return found

    def proposal(
        self,
        found: Sequence[Found],
        evaluate: Evaluate | None,
        evaluated: Callable[[Evaluate, Sequence[Plan]], list[Prediction]],
    ) -> Proposal:
        """The choice among plans that were found, best first (see `propose`)."""
        few = _first(found, self.effort.num_estimated)
        return propose(self.space, self.estimator, self.scores, few, evaluate, evaluated)
