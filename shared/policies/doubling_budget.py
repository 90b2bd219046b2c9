"""SeaLLM's doubling budget (section 4.2, Algorithm 2 of its appendix): shortest expected remaining time first, weighted for
normalised latency, and mended for requests that run longer than expected.

    L, D       mean and standard deviation of the execution time of the model's finished requests (the paper's "Var")
    Q = L + D  a request's budget at the start; falls by the execution time it receives
    O = Q * L  its priority, smallest first
    Q <= 0     the k-th time: Q = 2^k * (L + D)
    starving   not run for longer than theta = max(1 s, 5 L): before all others, the longest waiting first

    model      the one with the largest gain sum(1 / (max(Q, half of what Q was set to) * L)) / sqrt(n) over its n requests

Q * L minimises the sum of (latency / L) where all requests of a model take L (the paper's theorem 1): of two requests with
T_j, T_k left, j first costs T_j / L_k more for k, and k first T_k / L_j more for j.

The paper takes the model of the request with the smallest O (`weighs_batches` False). A step serves a whole batch, though:
by the c-mu rule of the paper's theorem 2 it is worth the sum of 1 / O over it, and a model with few but short requests
would else run ever smaller batches. Requests that are put off share the steps of those that come later, so a batch loses
less by waiting than its size says: the root of n lies between the gain of one request and that of all, and was best or near
it on every workload of bench/ordering. A request counts as if at least half of its budget were left, because one whose
budget is nearly used up is not for that reason near its end.

The paper batches one phase of one model; a step with chunked prefill may hold both phases. `mixes_phases` chooses, the
planner obeys: budgets and order are the same in both modes.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, ldexp, sqrt
from typing import NamedTuple

from shared.messages.cluster import ExecutionStatistics
from shared.policies.ordering import ModelView, OrderingPolicy, SequenceView, model_of_first

LEAST_TIME_S = 1e-6
"""A mean below it counts as this: budgets must not be zero."""

LEAST_GAIN_SHARE = 0.5
"""Of a budget as it was set: a request counts in its model's gain as if at least this were left."""


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
    """`default_s`: the mean of models of which no statistics, not even a prediction, were told. `weighs_batches` False: the
    paper's choice of the model."""

    is_static = False

    def __init__(
        self,
        *,
        mixes_phases: bool = True,
        weighs_batches: bool = True,
        default_s: float = 1.0,
        starvation_means: float = 5.0,
        min_starvation_s: float = 1.0,
    ) -> None:
        self.mixes_phases = mixes_phases
        self._weighs_batches = weighs_batches
        self._starvation_means = starvation_means
        self._min_starvation_s = min_starvation_s
        self._default = self._service(default_s, 0.0)
        self._services: dict[str, _Service] = {}

    def set_statistics(self, statistics: ExecutionStatistics) -> None:
        """Holds for priorities and for budgets given from now on; what is left of those given before stays."""
        self._services[statistics.model] = self._service(statistics.mean_s, statistics.std_s)

    def on_arrival(self, sequence: SequenceView, now: float) -> None:
        sequence.order_state = _Budget(self._of(sequence).budget_s)

    def charge(self, sequence: SequenceView, execution_s: float, now: float) -> None:
        budget: _Budget = sequence.order_state
        budget.left_s -= execution_s
        if budget.left_s <= 0:
            budget.num_exhausted += 1
            budget.left_s = ldexp(self._of(sequence).budget_s, budget.num_exhausted)

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

    def pick_model(self, candidates: list[ModelView], now: float) -> ModelView:
        """The model of who has starved longest, else the one with the largest gain; O(n)."""
        if not self._weighs_batches:
            return model_of_first(self, candidates, now)
        return min(candidates, key=lambda model: self._urgency(model, now))

    def _urgency(self, model: ModelView, now: float) -> tuple[int, float, float]:
        """Smaller is served first; of equals who came first."""
        service = self._services.get(model.name, self._default)
        starving_s = arrived_s = inf
        gain, num = 0.0, 0
        for sequence in model.runnable():
            num += 1
            arrived_s = min(arrived_s, sequence.arrived_s)
            if now - sequence.last_ran_s > service.starvation_s:
                starving_s = min(starving_s, sequence.last_ran_s)
            budget: _Budget = sequence.order_state
            gain += 1 / max(budget.left_s, ldexp(LEAST_GAIN_SHARE * service.budget_s, budget.num_exhausted))
        if starving_s < inf:
            return (0, starving_s, arrived_s)
        return (1, -gain / (service.mean_s * sqrt(num)), arrived_s) if num else (2, 0.0, arrived_s)

    def budgets(self, sequences: Iterable[SequenceView]) -> tuple[float, float]:
        left = [sequence.order_state.left_s for sequence in sequences]
        return (sum(left), min(left)) if left else (0.0, 0.0)

    def _of(self, sequence: SequenceView) -> _Service:
        return self._services.get(sequence.model, self._default)

    def _service(self, mean_s: float, std_s: float) -> _Service:
        mean_s = max(mean_s, LEAST_TIME_S)
        return _Service(mean_s, mean_s + std_s, max(self._min_starvation_s, self._starvation_means * mean_s))
