"""The step's length from the users' objectives: ConServe sections 4.2 and 4.5 (Algorithm 1, calc_budget).

    limit          = max(least, safety * share * objective)
    offline limit  = limit where something decodes, else filler_share of the time left to a first token

`objective` is the tightest TPOT of the decoding online sequences; where none decodes, the tightest TTFT left. `share` is 1/n
where n models have online work: their steps take turns, so a token waits for all. `least` is the time of
the smallest step worth its fixed cost: objectives that cannot be met must not stop the prompts behind them.

A step with a decode is bounded by the TPOT alone: a shorter one would only lower the prompts' share of it, a longer one is
what TTFT would like and TPOT forbids. Under it offline tokens are free: the user gets each token in time. Beside prompts
alone they are not, since each delays a first token, so there they fill only what hardly shows.
"""

from __future__ import annotations

import math

from shared.cost_model import CostModel, StepShape
from shared.policies.token_budget import Limits, StepView, TokenBudgetPolicy


class SloTokenBudget(TokenBudgetPolicy):
    """`max_tokens` bounds every step, and alone where there is no cost model. With no online request runnable anywhere it
    is all that does (offline batching mode), and the step is interruptible.

    `other_step_s` bounds a step of offline sequences only while another model has online work. A prompt's chunk has at
    least `min_online_chunk` tokens where nothing decodes, for contexts up to `max_context_tokens`."""

    def __init__(
        self,
        max_tokens: int,
        min_online_chunk: int = 32,
        *,
        safety: float = 0.9,
        filler_share: float = 0.05,
        other_step_s: float = 0.05,
        min_fixed_costs: float = 4.0,
        max_context_tokens: int = 8192,
    ) -> None:
        if max_tokens < 1 or min_online_chunk < 1:
            raise ValueError(f"token budget {max_tokens} and chunk of {min_online_chunk} tokens must be at least 1")
        if not (0 < safety <= 1 and 0 < filler_share <= 1):
            raise ValueError(f"safety {safety} and filler share {filler_share} must be in (0, 1]")
        self._max_tokens = max_tokens
        self._safety = safety
        self._filler_share = filler_share
        self._other_step_s = other_step_s
        self._min_fixed_costs = min_fixed_costs
        attention = min_online_chunk * (max_context_tokens + min_online_chunk / 2)
        self._least_chunk = StepShape(min_online_chunk, attention)

    def limits(self, view: StepView) -> Limits:
        decodes = view.tpot_objective_s < math.inf
        has_online = decodes or view.ttft_left_s < math.inf
        if not has_online and not view.num_other_online:
            return Limits(self._max_tokens, is_interruptible=True)
        if view.cost_model is None:
            return Limits(self._max_tokens)
        if not has_online:
            return Limits(self._max_tokens, max(self._other_step_s, self._least_s(view.cost_model, True)))
        objective_s = view.tpot_objective_s if decodes else view.ttft_left_s
        share = 1 / (1 + view.num_other_online)
        limit_s = max(self._least_s(view.cost_model, decodes), self._safety * share * objective_s)
        if decodes:
            return Limits(self._max_tokens, limit_s)
        return Limits(self._max_tokens, limit_s, self._filler_share * share * max(0.0, view.ttft_left_s))

    def _least_s(self, cost_model: CostModel, is_short: bool) -> float:
        """Where no decode waits for the step's end, also some multiple of the fixed cost: else late prompts would be cut
        into the smallest chunks, and an overload would lower the throughput by which it could pass."""
        chunk_s = cost_model.predict(self._least_chunk)
        return chunk_s if is_short else max(chunk_s, self._min_fixed_costs * cost_model.predict(StepShape()))
