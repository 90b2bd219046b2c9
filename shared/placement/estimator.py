"""A coarse, fast estimate of what a plan does under a problem's traffic, to rank plans by before the faithful simulation
(shared/simulation/deployment.py) looks at the best few. No step and no request is simulated on its own.

Time is cut into bins. In each, every model of a group (a *pair*) has a number of decoding sequences n and of waiting
requests w, both real numbers, and all pairs of all groups, of as many plans as are asked about, move on together:

    a(m)     1 - exp(-n)                              how likely the model has something to decode
    s(m)     a F + (D + C c) n                        a decode step of it; F, D, C: fixed, per sequence, per token of context
    met      (1 - exp(-sum(n)))^(groups of the model - 1)         of n and s a request meets such a share: it goes elsewhere
    turns    x(m) ~ n / L^2 + n^2 / (16 M L), at least 1/20 of the largest; M: mean L of all n      (doubling_budget.py)
    cycle    F + (D + C c)(1 + n) + what the others take between two turns, at most as long as a stream may be silent;
             all the longer where the steps of all models, s / cycle each, would take more than the time there is
             first come first served: x(m) ~ a(m) (mean time of a request alone) / s(m), whatever the silence
    prefill  a share phi of the time, up to chunk / (chunk + sum(s)); where that is too little, each model has as much
             as the others, and what one does not need is theirs
             first come first served: in proportion to what waits
    rate     (1 - phi) / cycle                        tokens of each of its sequences
    memory   sequences are admitted while their KV fits the pool and there are rows, which the models share likewise

New requests of a model, and those that wait at a group that ends, go to its groups in proportion to

    freeness^2 / (1 + prompts' wait / 0.2 s)^2            free blocks per request
    / cost^8                                              of a token of one more (policies/token_cost.py)
    * 1.5 at one of the model's groups                    stands for chance, by which a model gathers on one of equal groups

Half of those that come while a prompt is computed there do not mind the cost: dispatch sends them elsewhere. Where arrivals
outrun what a group can do, w grows, and what came later waits until all before it is admitted.

Then each request is followed through its pair's curves: it starts when as many were admitted as had come, takes its own
prompt's time, and ends when the pair has moved on by as many tokens as it outputs. Of models with many requests an evenly
spread sample is followed; load always counts them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from shared.placement.execution import alone_s, execution_s, step_tokens
from shared.placement.memory import Memory
from shared.placement.plan import unfairness
from shared.placement.problem import Group, ModelPrediction, Plan, Prediction, Problem
from shared.placement.rehearsal import Episode
from shared.policies.doubling_budget import BATCH, LEAST_GAIN_SHARE, LEAST_TIME_S
from shared.policies.silence import MAX_SILENCE_S, PLANNED_SHARE
from shared.policies.turns import LEAST_SHARE

NUM_BINS = 96
NUM_FITS = 4
"""How often the time of prompts and the memory that is left for them are reckoned from each other."""
FEW_GROUPS = 256
"""So few groups are all reckoned anew rather than some picked out."""
NUM_TAIL_BINS = 20
TAIL_GROWTH = 1.4
"""After the interval, bins grow by this factor until the last requests have ended."""
MAX_FOLLOWED = 6000
"""Requests, over all models."""
MAX_ROWS = 256
"""Sequences of a group at once."""
OTHERS_SHARE = 0.75
"""Share of what other models would take between two turns if all had something to run independently of each
other: fitted."""
MAX_PAIRS = 1 << 14
"""Pairs of a group with a model that are reckoned at once: what lies in the processor's caches."""
WAIT_GRAIN_S = 0.2
"""A group where prompts wait for so long is half as likely to get the next one."""
LEAST_EASE = 0.2
"""Least of the way to the wanted split of arrivals that is gone in a bin. What is there changes as requests end, so in bins
that are longer than requests take, the split would overshoot."""
TILT = 0.5
"""How much more than others the group is liked in which a model gathers, all else being equal: fitted."""
SPREAD_SHARE = 0.5
"""Share of the requests that meet a prompt's computation and go where the memory is, whatever a token costs: fitted."""
CHANCE_S = 1.0
"""Over which a mean load is taken, that arrivals by chance differ from: fitted; 1 to 3 s rank plans alike."""
NEVER_S = 1e9
Order = Literal["turns", "fcfs"]
"""Order of steps on a group: turns by the weights of doubling budgets, or the model of the request that came first.
That one runs until all requests older than the next model's first are done, so all models' requests grow equally old: each
has time in proportion to what a request of it takes."""

Array = np.ndarray


class Outcome(NamedTuple):
    """Outcome of one plan; per model, in the order of `Problem.models`."""

    missed: Array
    """Requests over their SLO, or without a group."""
    normalised: Array
    """Mean latency over mean execution time, of those with a group; 0 without any."""
    attainment: float
    normalised_latency: float
    """Over all requests with a group."""
    rates: Array
    """[groups] requests per second that each group gets, in the order in which they were given."""
    unfairness: float
    """See `plan.unfairness`."""


class _Lengths(NamedTuple):
    """Lengths of a model's online requests."""

    num: int
    arrivals: Array
    """[bins] requests."""
    followed: Array
    """Indices into the traffic."""
    mean_output: float
    context: float
    """Tokens in the cache of a sequence that is decoding, on average over its tokens."""


class _Cost(NamedTuple):
    """Costs of a model on a group of one kind and size."""

    fixed_s: float
    token_s: float
    """Seconds of one more decoding sequence."""
    over_s: float
    knee: float
    prefill_s: float
    """Mean of a prompt."""
    prefill_square: float
    """Mean of its square."""
    steps_s: float
    """Fixed costs of a prompt's steps that hold no decodes."""
    mean_s: float
    """A request's, alone."""
    gain: float
    batch_gain: float
    """x(m) = gain * n + batch_gain * n^2 / M."""
    num_output: float
    kv_bytes: float
    """KV bytes of a sequence that is decoding."""
    model: float
    prompts: float
    """Index at which the times of its followed prompts begin among all."""


class _Layout(NamedTuple):
    """Groups of one or more plans. Arrays are [groups, places]; a place is one model of the group, or empty."""

    costs: Array
    """[fields of _Cost, groups, places]"""
    pool_bytes: Array
    """[groups, 1]"""
    chunk_s: Array
    """[groups, 1] longest part of prompts in a step."""
    plan: Array
    """[groups]"""
    stream: Array
    """[groups, places] which arrivals; the last stream has none."""
    rank: Array
    """[groups] place within the plan, whatever the order in which the groups are given."""
    is_open: Array | None = None
    """[bins, groups, places] share of the bin in which the place takes requests; None: always."""
    serves: Array | None = None
    """[bins, groups] share of the bin in which the group has begun to serve; None: always."""


class Served(NamedTuple):
    """The same n followed requests, in the order of their arrival, on each of some plans."""

    at_s: Array
    """[n]"""
    weight: Array
    """[n] requests that each stands for."""
    model: Array
    """[n] index into `Problem.models`"""
    tokens: Array
    """[n] in the cache, on average over the output."""
    execution_s: Array
    """[models]"""
    is_late: Array
    """[plans, n] over its SLO, or without a group."""
    normalised: Array
    """[plans, n] latency, of at most the time that the traffic covers, over the model's mean execution time."""


class _Course(NamedTuple):
    """What came of it. Arrays are [bins, groups, places] but for `phi` and `steps_s`, [bins, groups]."""

    split: Array
    came: Array
    admitted: Array
    rate: Array
    phi: Array
    steps_s: Array
    busy: Array
    """[bins, groups] share of the time."""
    leaving: Array | None
    """Requests that leave the queue of a group that ended when the bin begins; None: no group ends."""


def estimate(problem: Problem, plan: Plan, *, order: Order = "turns") -> Prediction:
    """What the plan does under the problem's traffic, coarsely. Raises ValueError for a group that its models do not fit."""
    return Estimator(problem, order=order).predict(plan)


def _index(names: Sequence[str], name: str) -> int:
    """-1 without it."""
    return names.index(name) if name in names else -1


def _homes(layout: _Layout, rank: Array, is_there: Array) -> Array:
    """[groups, places] whether the model gathers there, all else being equal: the n-th model, by its name, on the n-th of
    its groups, counted round and round. `rank`: [models]. `is_there`: [groups, places] those that count."""
    stream, there = layout.stream.ravel(), is_there.ravel()
    order = np.lexsort((np.repeat(layout.rank, layout.stream.shape[1]), stream))
    counted = np.cumsum(there[order]) - 1
    held = np.bincount(stream, there)
    number = np.empty(len(stream), np.int64)
    number[order] = counted - (np.cumsum(held) - held)[stream[order]]
    wanted = rank[stream % len(rank)] % np.maximum(held[stream], 1)
    found: Array = (there & (number == wanted)).reshape(is_there.shape)
    return found


class Estimator:
    """Estimates many plans for one problem: what depends on the traffic alone is reckoned once."""

    def __init__(
        self,
        problem: Problem,
        *,
        num_bins: int = NUM_BINS,
        num_tail_bins: int = NUM_TAIL_BINS,
        max_followed: int = MAX_FOLLOWED,
        order: Order = "turns",
    ) -> None:
        self.problem = problem
        self._is_fcfs = order == "fcfs"
        self.num_estimated = 0
        """Plans."""
        traffic = problem.traffic
        self._numbers = {model.name: number for number, model in enumerate(problem.models)}
        names = sorted(self._numbers)
        self._rank = np.array([names.index(model.name) for model in problem.models] or [0])
        """[models] by name."""
        self._nodes = {node.node_id: node for node in problem.nodes}
        execution = execution_s(problem)
        self.execution_s = np.array([execution.get(model.name, 1.0) for model in problem.models])
        last_s = float(traffic.arrival_s[-1]) if traffic.num_requests else 0.0
        span_s: float = max(traffic.interval_s, last_s, 1e-3)
        width = span_s / num_bins
        widths = np.concatenate([np.full(num_bins, width), width * TAIL_GROWTH ** np.arange(1, num_tail_bins + 1)])
        self._widths, self._num_bins = widths, num_bins
        self._span_s = span_s
        self._times = np.concatenate([[0.0], np.cumsum(widths)])
        bins = np.minimum((traffic.arrival_s / width).astype(np.int64), num_bins - 1)
        online = traffic.is_online
        self._models = [
            self._lengths(
                np.flatnonzero((traffic.model == _index(traffic.models, model.name)) & online), bins, max_followed
            )
            for model in problem.models
        ]
        self.num_requests = np.array([lengths.num for lengths in self._models])
        self._arrivals = np.stack([lengths.arrivals for lengths in self._models] or [np.zeros(len(widths))])
        followed = [lengths.followed for lengths in self._models]
        self._followed = np.concatenate([*followed, np.zeros(0, np.int64)]).astype(np.int64)
        self._model_of = np.repeat(np.arange(len(followed)), np.array([len(each) for each in followed], np.int64))
        num_followed = np.array([max(1, len(each)) for each in followed])
        self._weight = (self.num_requests / num_followed)[self._model_of]
        # Evenly spread, so that neighbours go to different groups (golden ratio).
        self._place = np.concatenate(
            [(np.arange(len(each)) * 0.6180339887498949) % 1.0 for each in followed] + [np.zeros(0)]
        )
        self._at_s = traffic.arrival_s[self._followed]
        self._bin = bins[self._followed]
        self._prompt = traffic.prompt_tokens[self._followed].astype(np.float64)
        self._output = traffic.output_tokens[self._followed].astype(np.float64)
        scales = np.array([problem.slo_scale_of(model.name) for model in problem.models])
        self._slo_s = (scales * self.execution_s)[self._model_of]
        longest = np.array([model.max_model_len for model in problem.models])
        self._is_too_long = self._prompt + self._output > longest[self._model_of]
        self._costs: dict[tuple[int, str, int], _Cost] = {}
        self._prompt_s = np.zeros(0)
        """Prompt times of the followed requests of one model after the other, on each kind and size of group that was asked
        about."""
        self._memory = Memory(problem)
        self._groups: dict[tuple[tuple[str, ...], str, int, int], tuple[Array, float, float]] = {}

    def _lengths(self, mine: Array, bins: Array, max_followed: int) -> _Lengths:
        traffic, num_bins = self.problem.traffic, len(self._widths)
        num = len(mine)
        if not num:
            return _Lengths(0, np.zeros(num_bins), mine, 1.0, 0.0)
        share = max(32, int(max_followed * num / max(1, int(np.count_nonzero(traffic.is_online)))))
        followed = mine if num <= share else mine[(np.arange(share) + 0.5).astype(np.int64) * num // share]
        prompt, output = traffic.prompt_tokens[mine].astype(np.float64), traffic.output_tokens[mine].astype(np.float64)
        context = float(np.sum(output * prompt + output * output / 2) / np.sum(output))
        arrivals = np.bincount(bins[mine], minlength=num_bins).astype(np.float64)
        return _Lengths(num, arrivals, followed, float(np.mean(output)), context)

    # --------------------------------------------------------------------------------------------------- asking

    def outcomes(self, plans: Sequence[Sequence[Group]]) -> list[Outcome]:
        """Outcome of each plan, given as its groups in any order."""
        found: list[Outcome] = []
        first = 0
        while first < len(plans):
            end, num_pairs = first, 0
            while end < len(plans) and (end == first or num_pairs < MAX_PAIRS):
                num_pairs += sum(len(group.models) for group in plans[end])
                end += 1
            found += self._outcomes(plans[first:end])
            first = end
        self.num_estimated += len(plans)
        return found

    def served(self, courses: Sequence[Sequence[Episode]]) -> Served:
        """Single requests while groups come and go, in each of the courses. Requests of a model that no group takes wait for
        the next one that does."""
        layout = self._layout([[episode.group for episode in course] for course in courses])
        layout = self._timed(layout, [episode for course in courses for episode in course])
        latency, _ = self._follow(layout, self._run(layout), len(courses))
        latency = latency.reshape(len(courses), -1)
        order = np.argsort(self._at_s, kind="stable")
        model = self._model_of[order]
        return Served(
            at_s=self._at_s[order],
            weight=self._weight[order],
            model=model,
            tokens=(self._prompt + self._output / 2)[order],
            execution_s=self.execution_s,
            is_late=(latency > self._slo_s)[:, order],
            normalised=np.minimum(latency, self._span_s)[:, order] / self.execution_s[model],
        )

    def _timed(self, layout: _Layout, episodes: Sequence[Episode]) -> _Layout:
        starts = np.array([episode.start_s for episode in episodes])
        ends = np.array([episode.end_s for episode in episodes])
        begin, end, widths = self._times[:-1, None], self._times[1:, None], self._widths[:, None]
        serves = np.maximum(0.0, end - np.maximum(begin, starts)) / widths
        shares = np.maximum(0.0, np.minimum(end, ends) - np.maximum(begin, starts)) / widths
        is_open = np.repeat(shares[:, :, None], layout.stream.shape[1], axis=2)
        places: dict[int, list[tuple[int, int]]] = {}
        for row, streams in enumerate(layout.stream.tolist()):
            for place, stream in enumerate(streams):
                places.setdefault(stream, []).append((row, place))
        for found in places.values():
            rows = [row for row, _ in found]
            for number in np.flatnonzero(shares[:, rows].sum(1) <= 0).tolist():
                coming = [one for one in found if starts[one[0]] >= begin[number, 0]]
                row, place = min(coming, key=lambda one: starts[one[0]]) if coming else found[-1]
                is_open[number, row, place] = 1.0
        return layout._replace(is_open=is_open, serves=serves)

    def predict(self, plan: Plan) -> Prediction:
        """All that is known of one."""
        layout = self._layout([plan.groups])
        course = self._run(layout)
        latency, ttft = self._follow(layout, course, 1)
        models = {}
        for number, model in enumerate(self.problem.models):
            mine = self._model_of == number
            served = latency[mine] < NEVER_S
            if not np.any(mine):
                models[model.name] = ModelPrediction(
                    num_requests=0, attainment=1.0, normalised_latency=0.0, mean_latency_s=0.0, p99_latency_s=0.0
                )
                continue
            ended, first = latency[mine][served], ttft[mine][served]
            many = self._output[mine][served]
            has = bool(len(ended))
            tpot = (ended - first)[many > 1] / (many[many > 1] - 1)
            models[model.name] = ModelPrediction(
                num_requests=int(self.num_requests[number]),
                attainment=float(np.mean(latency[mine] <= self._slo_s[mine])),
                normalised_latency=float(np.mean(ended) / self.execution_s[number]) if has else 0.0,
                mean_latency_s=float(np.mean(ended)) if has else 0.0,
                p99_latency_s=float(np.percentile(ended, 99)) if has else 0.0,
                mean_ttft_s=float(np.mean(first)) if has else 0.0,
                p99_ttft_s=float(np.percentile(first, 99)) if has else 0.0,
                mean_tpot_s=float(np.mean(tpot)) if len(tpot) else 0.0,
            )
        outcome = self._measure(latency, np.zeros(0))
        during = self._widths[: self._num_bins]
        use = during @ course.busy[: self._num_bins] / np.sum(during)
        return Prediction(
            attainment=outcome.attainment,
            normalised_latency=outcome.normalised_latency,
            models=models,
            offline_tokens_s=self._offline_tokens_s(plan, use),
            use={group.instance_id: float(share) for group, share in zip(plan.groups, use, strict=True)},
        )

    def _outcomes(self, plans: Sequence[Sequence[Group]]) -> list[Outcome]:
        layout = self._layout(plans)
        course = self._run(layout)
        latency, _ = self._follow(layout, course, len(plans))
        came = np.sum(course.came, axis=(0, 2)) / self._span_s
        num = len(self._followed)
        found = []
        for number in range(len(plans)):
            found.append(self._measure(latency[number * num : (number + 1) * num], came[layout.plan == number]))
        return found

    def _measure(self, latency: Array, rates: Array) -> Outcome:
        num_models, served = len(self.problem.models), latency < NEVER_S
        weight = self._weight
        missed = np.bincount(self._model_of, weight * (latency > self._slo_s), minlength=num_models)
        counted = np.bincount(self._model_of, weight * served, minlength=num_models)
        total = np.bincount(self._model_of, weight * np.where(served, latency, 0.0), minlength=num_models)
        normalised = total / np.maximum(counted, 1e-9) / self.execution_s
        num, num_served = float(np.sum(self.num_requests)), float(np.sum(counted))
        attainment = 1.0 - float(np.sum(missed)) / num if num else 1.0
        of_services = 1.0 - missed[self.num_requests > 0] / self.num_requests[self.num_requests > 0]
        return Outcome(
            missed=missed,
            normalised=normalised,
            attainment=attainment,
            normalised_latency=float(np.sum(total / self.execution_s)) / num_served if num_served else 0.0,
            rates=rates,
            unfairness=unfairness(attainment, of_services.tolist()),
        )

    # -------------------------------------------------------------------------------------------------- layout

    def _cost(self, number: int, kind: str, num_ranks: int) -> _Cost:
        key = (number, kind, num_ranks)
        if (known := self._costs.get(key)) is not None:
            return known
        model, lengths = self.problem.models[number], self._models[number]
        cost = model.costs[kind, num_ranks]
        prompt = self._prompt[self._model_of == number]
        alone = alone_s(cost, prompt, np.ones_like(prompt), step_tokens(kind))
        fixed = np.ceil(prompt / step_tokens(kind)) * cost.fixed_s
        beside = alone - fixed
        output = self._output[self._model_of == number]
        execution = alone + np.maximum(0.0, output - 1) * (
            cost.fixed_s + cost.decode_s + cost.decode_context_s * lengths.context
        )
        mean_s, std_s = (float(np.mean(execution)), float(np.std(execution))) if len(execution) else (1.0, 0.0)
        held_tokens = lengths.context + model.block_size / 2
        found = _Cost(
            fixed_s=cost.fixed_s,
            token_s=cost.decode_s + cost.decode_context_s * lengths.context,
            over_s=cost.over_knee_s,
            knee=float(cost.knee_tokens),
            prefill_s=float(np.mean(beside)) if len(prompt) else 0.0,
            prefill_square=float(np.mean(alone * alone)) if len(prompt) else 0.0,
            steps_s=float(np.mean(fixed)) if len(prompt) else 0.0,
            mean_s=mean_s,
            gain=1.0 / max(1e-12, LEAST_GAIN_SHARE * 1.5 * (mean_s + std_s) * mean_s),
            batch_gain=1.0 / (BATCH * max(mean_s, LEAST_TIME_S)),
            num_output=max(lengths.mean_output - 1.0, 1e-3),
            kv_bytes=model.block_bytes / model.block_size * held_tokens,
            model=float(number),
            prompts=float(len(self._prompt_s) - np.searchsorted(self._model_of, number)),
        )
        self._costs[key] = found
        self._prompt_s = np.concatenate([self._prompt_s, alone])
        return found

    def _group(self, group: Group) -> tuple[Array, float, float]:
        """Costs [fields, places], bytes of the pool, longest part of prompts in a step."""
        node = self._nodes[group.node_id]
        key = (group.models, node.kind, node.memory_bytes, group.num_ranks)
        if (known := self._groups.get(key)) is not None:
            return known
        numbers = [self._numbers[name] for name in group.models]
        models = [self.problem.models[number] for number in numbers]
        if reason := self._memory.why_not(group.models, node, group.num_ranks):
            raise ValueError(f"{group.instance_id}: {reason}")
        costs = [self._cost(number, node.kind, group.num_ranks) for number in numbers]
        held = self._memory.pool(group.models, node, group.num_ranks)
        longest = max(
            model.costs[node.kind, group.num_ranks].prefill_token_s * step_tokens(node.kind) for model in models
        )
        chunk_s = min(PLANNED_SHARE * MAX_SILENCE_S, max(longest, 1e-6))
        found = (np.array(costs).T, float(held.merged_bytes * held.num_merged), chunk_s)
        self._groups[key] = found
        return found

    def _layout(self, plans: Sequence[Sequence[Group]]) -> _Layout:
        flat = [(number, group) for number, groups in enumerate(plans) for group in groups]
        num_models = len(self.problem.models)
        num_places = max((len(group.models) for _, group in flat), default=1)
        costs = np.zeros((len(_Cost._fields), len(flat), num_places))
        costs[_Cost._fields.index("model")] = -1.0
        costs[_Cost._fields.index("num_output")] = 1.0
        costs[_Cost._fields.index("fixed_s")] = 1.0
        costs[_Cost._fields.index("knee")] = MAX_ROWS
        pools, chunks = np.zeros((len(flat), 1)), np.zeros((len(flat), 1))
        for row, (_, group) in enumerate(flat):
            cost, pools[row, 0], chunks[row, 0] = self._group(group)
            costs[:, row, : cost.shape[1]] = cost
        plan = np.array([number for number, _ in flat], np.int64)
        rank = np.empty(len(flat), np.int64)
        rank[sorted(range(len(flat)), key=lambda row: (flat[row][1].models, flat[row][1].num_ranks, flat[row][1]))] = (
            np.arange(len(flat))
        )
        model = costs[_Cost._fields.index("model")].astype(np.int64)
        stream = np.where(model >= 0, plan[:, None] * num_models + model, len(plans) * num_models)
        return _Layout(costs, pools, chunks, plan, stream, rank)

    # ---------------------------------------------------------------------------------------------- through time

    def _run(self, layout: _Layout) -> _Course:
        cost = _Cost(*layout.costs)  # of arrays
        num_models, num_bins = max(1, len(self.problem.models)), len(self._widths)
        num_streams = int(layout.stream.max(initial=0)) + 1
        shape = layout.stream.shape
        flat = layout.stream.ravel()
        is_empty = cost.model < 0
        # an even split to begin with
        held = np.bincount(flat, minlength=num_streams)
        rivals = held[layout.stream] - 1.0
        has_rivals = (rivals > 0) & ~is_empty
        split = np.where(is_empty, 0.0, 1.0 / held[layout.stream])
        likes = 1.0 + TILT * _homes(layout, self._rank, np.logical_not(is_empty))
        request_s = float(self.num_requests @ self.execution_s) / max(1, int(self.num_requests.sum()))
        eases = np.maximum(LEAST_EASE, -np.expm1(-request_s / self._widths))
        arrivals = np.concatenate([self._arrivals.T, np.zeros((num_bins, 1))], axis=1)
        of = np.where(is_empty, num_models, layout.stream % num_models)
        has_knee = bool(np.any(cost.over_s > 0))
        n, w = np.zeros(shape), np.zeros(shape)

        def shared(score: Array) -> Array:
            """Each place's share of its stream."""
            sums = np.bincount(flat, score.ravel(), minlength=num_streams)
            shares: Array = score / (sums[layout.stream] + 1e-300)
            return shares

        def to_open(split: Array, number: int) -> Array:
            """Arrivals go to places that take them."""
            if layout.is_open is None or number >= num_bins:
                return split
            return shared((split + 1e-9) * layout.is_open[number])

        split = to_open(split, 0)
        splits, came, admitted, rates = (np.empty((num_bins, *shape)) for _ in range(4))
        phis, steps, busy = (np.empty((num_bins, shape[0])) for _ in range(3))
        leaving = None if layout.is_open is None else np.zeros((num_bins, *shape))
        least = np.where(is_empty, 0.0, 1e-9)
        silence = PLANNED_SHARE * MAX_SILENCE_S
        for number in range(num_bins):
            width = self._widths[number]
            arrive = arrivals[number][of] * split
            if layout.is_open is not None and leaving is not None:
                # Requests go to none of the groups that are not there yet, or no more, and do not stay in their queues.
                is_there = layout.is_open[number] > 0
                if number == 0 or (is_there != (layout.is_open[number - 1] > 0)).any():
                    likes = 1.0 + TILT * _homes(layout, self._rank, np.logical_and(is_there, cost.model >= 0))
                held = np.bincount(flat, is_there.ravel(), minlength=num_streams)
                rivals = held[layout.stream] - 1.0
                has_rivals = (rivals > 0) & ~is_empty
                leaving[number] = np.where(is_there, 0.0, w)
                w -= leaving[number]
                arrive += np.bincount(flat, leaving[number].ravel(), minlength=num_streams)[layout.stream] * split
            active = -np.expm1(-n)
            met = np.power(-np.expm1(-np.add.reduce(n, 1, keepdims=True)), rivals, out=np.ones(shape), where=has_rivals)
            marginal = cost.token_s * n
            if has_knee:
                marginal += cost.over_s * np.maximum(0.0, n - cost.knee)
            step = active * cost.fixed_s + marginal
            total = np.add.reduce(step, 1, keepdims=True)
            if self._is_fcfs:
                turn = active * cost.mean_s / (step + 1e-12) + 1e-9
            else:
                mean_s = np.add.reduce(n * cost.mean_s, 1, keepdims=True) + 1e-12
                inverse_s = np.add.reduce(n, 1, keepdims=True) / mean_s
                turn = n * (cost.gain + cost.batch_gain * inverse_s * n) + least
                turn = np.maximum(turn, LEAST_SHARE * np.maximum.reduce(turn, 1, keepdims=True))
            others = (np.add.reduce(turn * step, 1, keepdims=True) - turn * step) / turn
            longest = math.inf if self._is_fcfs else np.maximum(total, silence)
            cycle = cost.fixed_s + cost.token_s + met * (marginal + OTHERS_SHARE * np.minimum(others, longest))
            # A device has no more time than there is.
            cycle *= np.maximum(1.0, np.add.reduce(step / cycle, 1, keepdims=True))
            ready = w + arrive
            seconds = ready * (cost.prefill_s + cost.steps_s * (1.0 - active))
            most = layout.chunk_s / (layout.chunk_s + total)
            if layout.serves is not None:
                most = most * layout.serves[number][:, None]
            done = self._granted(seconds, most * width)
            spent = done * seconds / width
            fits = np.ones(shape)
            asked = (layout.pool_bytes, n, ready, done, spent, cycle)
            rate, stay, added = self._admitted(width, fits, cost, *asked)
            short = np.minimum.reduce(fits, 1) < 1.0
            if short.any():
                # A group in which all fits is done. Of many groups only the others are reckoned again.
                rows = short if len(fits) > FEW_GROUPS else slice(None)
                costs, some, left = _Cost(*layout.costs[:, rows]), [each[rows] for each in asked], fits[rows]
                for _ in range(NUM_FITS - 1):
                    found = self._admitted(width, left, costs, *some)
                rate[rows], stay[rows], added[rows] = found
                fits[rows] = left
            phi = np.add.reduce(spent * fits, 1, keepdims=True)
            admit = done * ready * fits
            n = stay + added * fits
            w = ready - admit
            splits[number], came[number], admitted[number], rates[number] = split, arrive, admit, rate
            phis[number], steps[number] = phi[:, 0], total[:, 0]
            many = np.add.reduce(n, 1, keepdims=True)
            busy[number] = (phi + (1.0 - phi) * -np.expm1(-many))[:, 0]
            # who gets the next
            held_bytes = np.add.reduce(cost.kv_bytes * (n + w), 1, keepdims=True)
            freeness = np.maximum(layout.pool_bytes - held_bytes, 1.0) / (1.0 + many)
            wait = np.add.reduce(w * cost.prefill_s, 1, keepdims=True)
            # A token of one more costs its own model's steps and turns (token_cost.py, which is not for arrays).
            own_s, beside = cost.fixed_s + marginal, 1.0 / (n + 1.0)
            turn_s = (own_s - cost.token_s) * n * beside
            token_s = own_s * (many + 1.0) * beside + marginal + np.add.reduce(turn_s, 1, keepdims=True) - turn_s
            free = np.where(is_empty, 0.0, np.square(freeness / (1.0 + wait / WAIT_GRAIN_S)))
            if layout.is_open is not None and number + 1 < num_bins:
                free *= layout.is_open[number + 1] > 0
            cheap = shared(free * likes * np.square(np.square(np.square(1.0 / token_s))))
            spread = SPREAD_SHARE * np.bincount(flat, (cheap * phi).ravel(), minlength=num_streams)[layout.stream]
            wanted = cheap + spread * (shared(free) - cheap)
            split = to_open(split + eases[number] * (wanted - split), number + 1)
        return _Course(splits, came, admitted, rates, phis, steps, busy, leaving)

    def _granted(self, wanted: Array, most: Array) -> Array:
        """[groups, places] share of what is wanted that each gets of at most `most` [groups, 1]: in turns equally much, what
        one does not want going to the others; the same share first come first served."""
        if self._is_fcfs:
            same = np.minimum(1.0, most / (np.add.reduce(wanted, 1, keepdims=True) + 1e-12))
            return np.broadcast_to(same, wanted.shape)
        granted, short = np.ones(wanted.shape), np.flatnonzero(np.add.reduce(wanted, 1) > most[:, 0])
        if len(short):
            least_first = np.sort(wanted[short], axis=1)
            before = np.cumsum(least_first, axis=1) - least_first
            levels = np.maximum(most[short] - before, 0.0) / np.arange(wanted.shape[1], 0, -1)
            granted[short] = np.minimum(1.0, levels.max(1, keepdims=True) / (wanted[short] + 1e-12))
        return granted

    def _admitted(
        self,
        width: float,
        fits: Array,
        cost: _Cost,
        pool_bytes: Array,
        n: Array,
        ready: Array,
        done: Array,
        spent: Array,
        cycle: Array,
    ) -> tuple[Array, Array, Array]:
        """Tokens a second of each sequence, those that stay, and those that come if all fit; makes `fits` the share of them
        that does, in KV pool and rows."""
        rate = (1.0 - np.add.reduce(spent * fits, 1, keepdims=True)) / cycle
        passed = width * rate / cost.num_output
        left = np.exp(-passed)
        stay = n * left
        added = done * ready * (1.0 - left) / (passed + 1e-12)
        free = np.maximum(pool_bytes - np.add.reduce(cost.kv_bytes * stay, 1, keepdims=True), 0.0)
        rows = np.maximum(MAX_ROWS - np.add.reduce(stay, 1, keepdims=True), 0.0)
        fit = np.minimum(self._granted(cost.kv_bytes * added, free), self._granted(added, rows))
        np.multiply(0.5, fits + fit, out=fits)
        return rate, stay, added

    # -------------------------------------------------------------------------------------------------- requests

    def _follow(self, layout: _Layout, course: _Course, num_plans: int) -> tuple[Array, Array]:
        """Latency and time to the first token of the followed requests [plans * followed], NEVER_S without a group."""
        num_models, num = max(1, len(self.problem.models)), len(self._followed)
        num_bins, num_groups, num_places = course.split.shape
        latency, ttft = np.full(num_plans * num, NEVER_S), np.full(num_plans * num, NEVER_S)
        if not num or not num_groups:
            return latency, ttft
        stream = (np.arange(num_plans)[:, None] * num_models + self._model_of).ravel()
        flat = layout.stream.ravel()
        num_streams = num_plans * num_models
        held = np.bincount(flat, minlength=num_streams + 1)[:num_streams]
        served = np.flatnonzero((held[stream] > 0) & ~np.tile(self._is_too_long, num_plans))
        if not len(served):
            return latency, ttft
        request = served % num
        # where each goes: the cumulated split of its stream's places at its bin
        order = np.lexsort((np.repeat(layout.rank, num_places), flat))[: int(np.sum(held))]
        ranks = np.cumsum(held > 0) - 1  # streams without a place take none
        cumulated = np.cumsum(course.split.reshape(num_bins, -1)[:, order], axis=1)
        width = cumulated.shape[1]
        ladder = (cumulated + np.arange(num_bins)[:, None] * (width + 2.0)).ravel()
        bins = self._bin[request]
        ends = np.cumsum(held)
        firsts = ends - held

        def chosen(which: Array, bins: Array) -> Array:
            """Places that those of the served requests go to which come in these bins."""
            of = stream[served[which]]
            target = bins * (width + 2.0) + ranks[of] + self._place[request[which]]
            at = np.searchsorted(ladder, target, side="right") - bins * width
            found: Array = order[np.minimum(np.maximum(at, firsts[of]), ends[of] - 1)]
            return found

        place = chosen(np.arange(len(served)), bins)

        # curves by place, with the start of time before them
        def curve(steps: Array) -> Array:
            return np.concatenate([np.zeros((1, steps.shape[1])), np.cumsum(steps, axis=0)])

        came = curve(course.came.reshape(num_bins, -1))
        admitted = curve(course.admitted.reshape(num_bins, -1))
        moved = curve(course.rate.reshape(num_bins, -1) * self._widths[:, None])
        at_s = self._at_s[request]
        share = (at_s - self._times[bins]) / self._widths[bins]
        arrived = came[bins, place] + share * (came[bins + 1, place] - came[bins, place])
        waited = self._reaches(admitted, place, arrived * (1 - 1e-9) - 1e-9, bins)
        if course.leaving is not None:
            left = course.leaving.reshape(num_bins, -1)
            last = num_bins - 1 - np.argmax(left[::-1] > 0, axis=0)
            ends_s, since = np.where(left.max(0) > 0, self._times[last], math.inf), bins.copy()
            # Whoever waits at a group that ends comes to another one then, which may end as well.
            while len(moved_on := np.flatnonzero((since < last[place]) & (waited > ends_s[place]))):
                before, then = place[moved_on], last[place[moved_on]]
                rank = np.clip((arrived[moved_on] - admitted[then, before]) / left[then, before], 0.0, 1.0)
                now = chosen(moved_on, then)
                place[moved_on], since[moved_on] = now, then
                arrived[moved_on] = came[then, now] + rank * (came[then + 1, now] - came[then, now])
                waited[moved_on] = self._reaches(admitted, now, arrived[moved_on] * (1 - 1e-9) - 1e-9, then)
        group = place // num_places
        start = np.maximum(at_s, waited)
        start_bin = np.minimum(np.searchsorted(self._times, start, side="right") - 1, num_bins - 1)
        # The queue that builds up from bin to bin is in `waited`. Beside it a prompt meets what the chance of arrivals makes
        # of a mean load (M/G/1): of a bin as short as the prompt itself that would be the prompt's own time once more.
        phi = np.minimum(self._smoothed(course.phi * self._widths[:, None]), 0.95)
        square = self._smoothed(np.add.reduce((course.came * layout.costs[_Cost._fields.index("prefill_square")]), 2))
        residual = 0.5 * (square / (1.0 - phi) + course.steps_s)[start_bin, group]
        prompts = layout.costs[_Cost._fields.index("prompts")].ravel()[place].astype(np.int64)
        prompt_s = self._prompt_s[prompts + request]
        stretch = 1.0 + course.steps_s[start_bin, group] / layout.chunk_s[group, 0]
        first = start + residual + prompt_s * stretch
        # decoding
        first_bin = np.minimum(np.searchsorted(self._times, first, side="right") - 1, num_bins - 1)
        rate = course.rate.reshape(num_bins, -1)
        had = moved[first_bin, place] + (first - self._times[first_bin]) * rate[first_bin, place]
        target = had + self._output[request] - 1.0
        end = np.maximum(first, self._reaches(moved, place, target, first_bin, rate[-1]))
        latency[served], ttft[served] = end - at_s, first - at_s
        return latency, ttft

    def _smoothed(self, amounts: Array) -> Array:
        """[bins, n] of each bin -> a second, on average over `CHANCE_S` around the middle of the bin, or the whole bin."""
        middle = (self._times[:-1] + self._times[1:]) / 2
        first = np.searchsorted(self._times, np.maximum(0.0, middle - CHANCE_S / 2), side="right") - 1
        last = np.minimum(np.searchsorted(self._times, middle + CHANCE_S / 2), len(self._widths))
        passed = np.concatenate([np.zeros((1, amounts.shape[1])), np.cumsum(amounts, axis=0)])
        smoothed: Array = (passed[last] - passed[first]) / (self._times[last] - self._times[first])[:, None]
        return smoothed

    def _reaches(
        self, curves: Array, place: Array, value: Array, first_bin: Array, slope: Array | None = None
    ) -> Array:
        """Times at which the curves [bins + 1, places], which do not fall, reach the values, all at their own places;
        beyond their ends they go on with the slope, or never get there."""
        num_bins = len(curves) - 1
        # bisection: all requests at once, log2(bins) gathers
        flat, num_places = curves.ravel(), curves.shape[1]
        low, high = first_bin.copy(), np.full_like(first_bin, num_bins)
        for _ in range(num_bins.bit_length() + 1):
            middle = (low + high) >> 1
            is_before = flat.take(middle * num_places + place) < value
            low = np.where(is_before, middle, low)
            high = np.where(is_before, high, middle)
        high = np.maximum(high, 1)
        at = high * num_places + place
        below, above = flat.take(at - num_places), flat.take(at)
        share = np.clip((value - below) / np.maximum(above - below, 1e-12), 0.0, 1.0)
        at = self._times[high - 1] + share * self._widths[high - 1]
        beyond = value - curves[-1, place]
        if slope is not None:
            late = beyond / np.maximum(slope[place], 1e-9)
        else:
            # as fast as on average
            late = beyond * self._times[-1] / np.maximum(curves[-1, place], 1e-9)
        reached: Array = np.where(beyond > 0, np.minimum(self._times[-1] + late, NEVER_S / 10), at)
        return reached

    def _offline_tokens_s(self, plan: Plan, use: Array) -> float:
        """Tokens per second of the offline requests' prompts and outputs, computed in the time that is left."""
        traffic = self.problem.traffic
        left = []
        for number, model in enumerate(self.problem.models):
            mine = (traffic.model == _index(traffic.models, model.name)) & ~traffic.is_online
            if np.any(mine):
                prompt, output = (
                    traffic.prompt_tokens[mine].astype(np.float64),
                    traffic.output_tokens[mine].astype(np.float64),
                )
                left.append([number, prompt, output, float(np.sum(prompt + output)) / self._span_s])
        tokens_s = 0.0
        for group, busy in zip(plan.groups, use, strict=True):
            node = self._nodes[group.node_id]
            mine = [each for each in left if self.problem.models[each[0]].name in group.models and each[3] > 0]
            for each in mine:
                number, prompt, output, wanted = each
                cost = self.problem.models[number].costs[node.kind, group.num_ranks]
                _, pool_bytes, _ = self._group(group)
                context = float(np.mean(prompt) + np.mean(output) / 2)
                model = self.problem.models[number]
                rows = max(1.0, min(MAX_ROWS, pool_bytes / (model.block_bytes / model.block_size * context)))
                token_s = cost.fixed_s / rows + cost.decode_s + cost.decode_context_s * context
                request_s = float(
                    np.mean(alone_s(cost, prompt, np.ones_like(prompt), step_tokens(node.kind)) + output * token_s)
                )
                share = max(0.0, 1.0 - float(busy)) / len(mine)
                done = min(wanted, share / request_s * float(np.mean(prompt + output)))
                each[3] -= done
                tokens_s += done
        return tokens_s
