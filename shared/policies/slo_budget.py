"""The step's length from the users' objectives: ConServe sections 4.2 and 4.5 (Algorithm 1, calc_budget).

ConServe bounds each step by the TPOT objective. Here the objective is a pace that each decoding online sequence is to keep:
its k-th token after the first is due at

    due(k) = first token + PACE * TPOT objective * (k - HEAD_START_TOKENS)

and the slack of a step is the time to the earliest of these. Offline tokens are added to a step while it ends within the
slack. A user delayed by others' prompts thus gets only online steps until the pace is reached again, and a user who is ahead
leaves more time to offline work. The head start is a user's lead before any offline work: it pays for later prompts, which
are not known yet.

Online prompts are chunked so that decodes keep the pace, while their first tokens are still in time. Otherwise a step takes
as much of them as it can, as if there were no decodes.
"""

from __future__ import annotations

import math

from shared.policies.token_budget import Limits, StepView, TokenBudgetPolicy

PACE = 0.85
"""Share of the TPOT objective."""
HEAD_START_TOKENS = 6
MAX_SLACK = 2.0
"""Multiple of the TPOT objective: an online arrival waits for the end of a step."""


class SloTokenBudget(TokenBudgetPolicy):
    """`max_tokens` bounds every step. It is the only bound without a cost model, and in offline batching mode (no online
    request is runnable anywhere), in which the step is interruptible.

    Beside prompts without a first token, offline tokens fill at most `filler_share` of the time left to it. Prompts are
    chunked for the decodes while they still finish within `chunking_share` of the time left. `other_step_s` bounds a
    step of offline sequences only while another model has online work. Where n models have online work their steps take
    turns, so each has a share of 1/n."""

    def __init__(
        self, max_tokens: int, *, filler_share: float = 0.05, chunking_share: float = 0.25, other_step_s: float = 0.05
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"token budget {max_tokens} must be at least 1")
        if not (0 < filler_share <= 1 and 0 <= chunking_share <= 1):
            raise ValueError(f"filler share {filler_share} and chunking share {chunking_share} must be in (0, 1]")
        self._max_tokens = max_tokens
        self._filler_share = filler_share
        self._chunking_share = chunking_share
        self._other_step_s = other_step_s

    def limits(self, view: StepView) -> Limits:
        max_tokens = min(self._max_tokens, view.max_known_tokens)
        if not view.is_online and not view.num_other_online:
            return Limits(max_tokens, is_interruptible=True)
        if view.cost_model is None:
            return Limits(max_tokens)
        if not view.is_online:
            return Limits(max_tokens, self._other_step_s)
        share = 1 / (1 + view.num_other_online)
        offline_s = share * self.offline_limit_s(view.slack_s, view.ttft_left_s)
        return Limits(max_tokens, self._prompts_limit_s(view, share), offline_s)

    def offline_limit_s(self, slack_s: float, ttft_left_s: float) -> float:
        return max(0.0, min(slack_s, self._filler_share * ttft_left_s))

    def _prompts_limit_s(self, view: StepView, share: float) -> float:
        if max(view.tpot_objective_s, view.own_ttft_left_s) == math.inf:
            return math.inf
        assert view.cost_model is not None
        all_s = view.cost_model.predict(view.online)
        decodes_s = view.cost_model.predict(view.online._replace(prefill_tokens=0, prefill_attention=0.0))
        step_s = share * PACE * view.tpot_objective_s
        # Each step of that length gives the prompts what its decodes leave.
        num_steps = (all_s - decodes_s) / (step_s - decodes_s) if step_s > decodes_s else math.inf
        if num_steps * step_s > share * self._chunking_share * view.own_ttft_left_s:
            return math.inf
        return max(step_s, share * view.slack_s)
