"""SeaLLM's doubling budget (section 4.2, Algorithm 2 of its appendix): shortest expected remaining time first, weighted for
normalised latency, and corrected for requests that run longer than expected; models have turns in proportion to it.

    L, D       mean and standard deviation of the execution time of the model's finished requests (the paper's "Var")
    Q = L + D  a request's budget at the start; falls by the execution time it receives
    O = Q * L  its priority, smallest first
    Q <= 0     the k-th time: Q = 2^k * (L + D)
    starving   not run for longer than theta = max(1 s, 5 L): before all others of its model, the longest waiting first

    weight     of a model with n requests: (sum(1 / max(Q, half of what Q was set to)) + n^2 / (16 M)) * (1 / L + H S / n)
    M          mean L of all runnable requests
    S          share of the KV pool that the model's requests use
    H          30 * sum(1 / L) over those that wait while one lacks room in the pool
    turn       a step. Models have turns in proportion to their weights (turns.py)
    due        before all this, the model whose streams are due the earliest, where one must run soon (silence.py); where
               that is always so, a model without streams is due MAX_SILENCE_S after its last turn

Q * L minimises the sum of (latency / L) where all requests of a model take L (the paper's theorem 1): of two requests with
T_j, T_k left, j first costs T_j / L_k more for k, and k first T_k / L_j more for j.

In the paper, the model of the request with the smallest O has the device until another O is smaller (`shares_turns` False).
Streams of other models stand still meanwhile, for seconds where budgets double. A decode step costs nearly the same for one
sequence as for many, and waiting requests share the steps of later ones. Putting a model off thus saves less than on a
device that serves requests one after another. So 1 / O, the gain by the c-mu rule of the paper's theorem 2, sets how often a
model has a turn, and doubling makes turns rarer, not longer. Turns are steps, not time, because long steps are prompts,
which requests cannot share: those are better done at once. A request counts as if at least half of its budget were left,
because a nearly used up budget does not mean that it is near its end.

By gain alone, a device near its limit is wasted: a model of short requests has so many turns that few of its requests are
there at once, and its steps serve few. So the batch that a turn serves counts too, as in Tassiulas and Ephremides' MaxWeight
(backlog times rate of service; 1992), which is stable under any load that can be served. The term in n^2 equals the gain at
16 requests. Where memory is short, all requests that wait for it pay for what others hold: H S / n is that price per
request, beside the cost of its own latency. Turns by memory held lead to batches of n ~ sqrt(load / memory of a request),
where a model's load is its share of the device's time times n. That division of memory gives the most tokens. The constants
were chosen on real lengths, with five models on eight L4s and pairs on one device. A larger batch term harms pairs in which
prompts of thousands of tokens are most of the work, because these gain nothing from a batch.

The paper batches one phase of one model; a step with chunked prefill may hold both phases. `mixes_phases`
tells the planner which to form: budgets and order are the same in both modes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from shared.messages.cluster import ExecutionStatistics
from shared.policies.ordering import ModelView, OrderingPolicy, SequenceView, model_of_first
from shared.policies.silence import MAX_SILENCE_S, URGENT_S, is_overfull, room_s
from shared.policies.turns import Turns

LEAST_TIME_S = 1e-6
"""Smaller means count as this: budgets must not be zero."""

LEAST_GAIN_SHARE = 0.5
"""In its model's weight, a request counts as if at least this share of its budget, as set, were left."""

BATCH = 16.0
"""Number of requests at which a model's batch counts as much as its gain."""

SHORT = 30.0
"""Assumed number of requests that wait for room in the pool for each that waits here: most wait in the scheduler's
queue."""


class _Service(NamedTuple):
    mean_s: float
    budget_s: float
    starvation_s: float


class _Budget:
    """`order_state` of a sequence."""

    __slots__ = ("left_s", "num_exhausted")

    def __init__(self, left_s: float) -> None:
        self.left_s = left_s
        self.num_exhausted = 0


class DoublingBudget(OrderingPolicy):
    """`default_s`: the mean of models without statistics or a prediction. `shares_turns` False: the paper's choice of the
    model."""

    is_static = False

    def __init__(
        self,
        *,
        mixes_phases: bool = True,
        shares_turns: bool = True,
        default_s: float = 1.0,
        starvation_means: float = 5.0,
        min_starvation_s: float = 1.0,
    ) -> None:
        self.mixes_phases = mixes_phases
        self.bounds_silence = self.favours_models = shares_turns
        self._turns: Turns = Turns()
        self._weights: dict[str, float] = {}
        """Weights of the candidates of the last pick."""
        self._picked_s = 0.0
        """Time at which the step of the last pick begins."""
        self._last_turn_s: dict[str, float] = {}
        self._starvation_means = starvation_means
        self._min_starvation_s = min_starvation_s
        self._default = self._service(default_s, 0.0)
        self._services: dict[str, _Service] = {}

    def set_statistics(self, statistics: ExecutionStatistics) -> None:
        """Applies to priorities and to new budgets; earlier budgets keep what is left of them."""
        self._services[statistics.model] = self._service(statistics.mean_s, statistics.std_s)

    def on_arrival(self, sequence: SequenceView, now: float) -> None:
        sequence.order_state = _Budget(self._of(sequence).budget_s)

    def charge(self, sequences: Iterable[SequenceView], seconds: Iterable[float], now: float) -> None:
        for sequence, execution_s in zip(sequences, seconds, strict=True):
            budget: _Budget = sequence.order_state
            budget.left_s -= execution_s
            if budget.left_s <= 0:
                budget.num_exhausted += 1
                budget.left_s = math.ldexp(self._of(sequence).budget_s, budget.num_exhausted)

    def export_state(self, sequence: SequenceView) -> tuple[float, ...]:
        """Seconds left and number of exhaustions."""
        budget: _Budget = sequence.order_state
        return (budget.left_s, float(budget.num_exhausted))

    def import_state(self, sequence: SequenceView, state: tuple[float, ...], now: float) -> None:
        if len(state) == 2:
            budget: _Budget = sequence.order_state
            budget.left_s, budget.num_exhausted = state[0], int(state[1])

    def key(self, sequence: SequenceView, now: float) -> tuple[float, ...]:
        service = self._of(sequence)
        last_ran_s = sequence.last_ran_s
        if now - last_ran_s > service.starvation_s:
            return (0, last_ran_s)
        return (1, sequence.order_state.left_s * service.mean_s)

    def sort(self, sequences: list[Any], now: float) -> None:
        if not sequences:
            return
        service = self._of(sequences[0])
        mean_s, starvation_s = service.mean_s, service.starvation_s
        sequences.sort(
            key=lambda sequence: (
                (0, sequence.last_ran_s, sequence.number)
                if now - sequence.last_ran_s > starvation_s
                else (1, sequence.order_state.left_s * mean_s, sequence.number)
            )
        )

    def pick_model(self, candidates: list[ModelView], now: float) -> ModelView:
        """See the module's docstring; O(n)."""
        if not self.bounds_silence:
            return model_of_first(self, candidates, now)
        self._weights = self._weights_of(candidates)
        self._picked_s = now
        streams = {model.name: model.streams(now) for model in candidates}
        if room_s(streams.values()) < URGENT_S:
            if is_overfull(serving_s for _, serving_s in streams.values()):
                return min(candidates, key=lambda model: min(streams[model.name][0], self._patience_s(model, now)))
            return min(candidates, key=lambda model: streams[model.name][0])
        name = self._turns.next(self._weights)
        return next(model for model in candidates if model.name == name)

    def _patience_s(self, model: ModelView, now: float) -> float:
        """How long its requests may still wait for a step beside streams that are always urgent."""
        waits_since_s = min((sequence.arrived_s for sequence in model.runnable()), default=now)
        return max(waits_since_s, self._last_turn_s.get(model.name, 0.0)) + MAX_SILENCE_S - now

    def on_turn(self, model: ModelView) -> None:
        if self.bounds_silence:
            self._last_turn_s[model.name] = self._picked_s
            self._turns.take(model.name, self._weights)

    def _weights_of(self, candidates: list[ModelView]) -> dict[str, float]:
        views, total_s, total, pool_cost = [], 0.0, 0, 0.0
        for model in candidates:
            service = self._services.get(model.name, self._default)
            gain, num = 0.0, 0
            for sequence in model.runnable():
                budget: _Budget = sequence.order_state
                gain += 1 / max(budget.left_s, math.ldexp(LEAST_GAIN_SHARE * service.budget_s, budget.num_exhausted))
                num += 1
            views.append((model, gain, num, service.mean_s))
            total_s += num * service.mean_s
            total += num
            pool_cost += SHORT * model.num_short / service.mean_s
        batch_s = BATCH * total_s / total if total else 1.0
        return {
            model.name: (gain + num * num / batch_s) * (1 / mean_s + pool_cost * model.pool_share / max(1, num))
            for model, gain, num, mean_s in views
        }

    def budgets(self, sequences: Iterable[SequenceView]) -> tuple[float, float]:
        left = [sequence.order_state.left_s for sequence in sequences]
        return (sum(left), min(left)) if left else (0.0, 0.0)

    def _of(self, sequence: SequenceView) -> _Service:
        return self._services.get(sequence.model, self._default)

    def _service(self, mean_s: float, std_s: float) -> _Service:
        mean_s = max(mean_s, LEAST_TIME_S)
        return _Service(mean_s, mean_s + std_s, max(self._min_starvation_s, self._starvation_means * mean_s))
