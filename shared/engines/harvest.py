"""What of a step of another's engine is offline work's, where its scheduler can be told: the native engine's policies
(`slo_budget.py`, ConServe's Algorithm 1) on what that scheduler holds.

A scheduler of vLLM's kind gives each running sequence what it wants, in order, until a step's tokens are used up, and
then lets in waiting ones. So what is decided here is: who gives up row and blocks before the step, who is passed over
in it, and how many tokens it has. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shared.costs.model import CostModel, StepShape
from shared.policies.silence import PLANNED_SHARE
from shared.policies.slo_budget import HEAD_START_TOKENS, MAX_SLACK, PACE
from shared.policies.token_budget import StepBudget, StepView, TokenBudgetPolicy

WAIT_SHARE = 0.15
"""Share of the TTFT objective for which an online request that arrives waits at most for the end of a step with offline
work. A step that cannot be interrupted takes no longer."""

MOST_INTERRUPTIONS = 3
"""Steps in a row that one online request may interrupt: it may arrive at the scheduler a little after its number."""


SHARE_GROWTH = 1.25
"""By which interruptible steps grow again with each one that ended."""


class SequenceView(NamedTuple):
    """A sequence as the engine's scheduler holds it. Times are on the clock of `now`."""

    key: str
    is_online: bool
    is_running: bool
    num_new: int
    """Tokens that it could compute in the next step: 1 decodes."""
    context: int
    """Tokens whose KV is there."""
    num_output: int
    arrived_s: float
    first_token_s: float | None
    ttft_s: float
    """Objectives; inf: none."""
    tpot_s: float

    @property
    def is_decode(self) -> bool:
        return self.num_new <= 1 and self.num_output > 0


class StepDecision(NamedTuple):
    max_tokens: int
    """Tokens of the step; at least 1."""
    held: tuple[str, ...]
    """Running offline sequences that are passed over."""
    limit_s: float
    """Predicted duration that it has at most; inf: none."""
    patience_s: float = math.inf
    """Time that the step may go on for after an online arrival, else it is given up; inf: it is not interruptible."""


def interruptible_step_s(start_s: float, arrivals_per_s: float, patience_s: float) -> float:
    """Duration of offline steps that loses least time, if online requests arrive at random and a step that would go on for
    more than `patience_s` after an arrival is lost.

    Of each second, steps of s seconds lose start_s / s because each begins anew, and arrivals_per_s * (s - patience_s)^2 /
    (2 s) because they are given up. `start_s`: what a step costs before its first token."""
    if arrivals_per_s <= 0:
        return math.inf
    return math.sqrt(patience_s**2 + 2 * start_s / arrivals_per_s)


class StepShare:
    """`share`: of `interruptible_step_s` that steps take. Requests that do not arrive at random, but one soon after the
    other's end, could interrupt every step. So steps become shorter with each that is lost, until they end."""

    def __init__(self) -> None:
        self.share = 1.0

    def on_lost(self) -> None:
        self.share /= 2

    def on_done(self) -> None:
        self.share = min(1.0, SHARE_GROWTH * self.share)


def is_given_up(elapsed_s: float, num_done: int, num_layers: int, patience_s: float) -> bool:
    """Whether a step that has computed `num_done` of its equal layers ends here for an online request that has arrived."""
    return not num_done or elapsed_s * (num_layers - num_done) > patience_s * num_done


def slack_s(sequences: Iterable[SequenceView], now: float) -> tuple[float, float]:
    """Slack of the online sequences that decode: the tightest TPOT objective, and the time until the earliest next token is
    due."""
    tightest, slack = math.inf, math.inf
    for one in sequences:
        if one.is_online and one.is_decode and one.first_token_s is not None and one.tpot_s < math.inf:
            due_s = one.first_token_s + PACE * one.tpot_s * (one.num_output - HEAD_START_TOKENS)
            tightest = min(tightest, one.tpot_s)
            slack = min(slack, due_s - now, MAX_SLACK * one.tpot_s)
    return tightest, slack


def decide(
    sequences: Sequence[SequenceView],
    policy: TokenBudgetPolicy,
    cost_model: CostModel | None,
    now: float,
    max_tokens: int,
    ttft_s: float = math.inf,
    arrivals_per_s: float | None = None,
    step_share: float = 1.0,
) -> StepDecision:
    """`sequences`: those that run in the scheduler's order, then those that wait in theirs. `max_tokens`: of a step at most.
    `cost_model`: None while nothing is known. `ttft_s`: the objective of online requests that may arrive; inf: none.
    `arrivals_per_s`: of these; None: steps cannot be interrupted. `step_share`: a `StepShare`'s."""
    online = [one for one in sequences if one.is_online]
    tpot_s, slack = slack_s(online, now)
    before = [one for one in online if not one.is_decode]
    ttft_left_s = min((one.arrived_s + one.ttft_s - now for one in before), default=math.inf)
    view = StepView(
        model="",
        now=now,
        cost_model=cost_model,
        is_online=bool(online),
        num_other_online=0,
        tpot_objective_s=tpot_s,
        slack_s=slack,
        ttft_left_s=ttft_left_s,
        own_ttft_left_s=ttft_left_s,
        online=_shape(online),
    )
    limits = policy.limits(view)
    patience_s = math.inf
    if cost_model is not None:
        wait_s = WAIT_SHARE * ttft_s
        if not online and arrivals_per_s is not None and ttft_s < math.inf:
            patience_s = wait_s
            start_s = cost_model.fixed_s + cost_model.prefill_s
            wait_s = max(patience_s, step_share * interruptible_step_s(start_s, arrivals_per_s, patience_s))
        limits = limits._replace(offline_limit_s=min(limits.offline_limit_s, wait_s, PLANNED_SHARE * tpot_s))
    budget = StepBudget(limits._replace(max_tokens=min(limits.max_tokens, max_tokens)), cost_model)
    _fill(budget, online)
    offline = [one for one in sequences if not one.is_online]
    if not online and limits.offline_limit_s == math.inf:
        return StepDecision(max(1, budget.tokens_left), (), math.inf, patience_s)
    budget.begin_offline()
    if before and any(not one.is_running for one in before):
        # Whoever runs is served before whoever waits: a prompt of offline work would take the tokens of the online one.
        held = {one.key for one in offline if one.is_running and not one.is_decode}
    else:
        held = set()
    held |= _fill(budget, [one for one in offline if one.key not in held])
    if not budget.shape.num_tokens:
        held = set()  # not even a token is short enough: the step has one
    running = {one.key for one in offline if one.is_running}
    limit_s = min(limits.limit_s, limits.offline_limit_s)
    return StepDecision(max(1, budget.shape.num_tokens), tuple(sorted(held & running)), limit_s, patience_s)


def _fill(budget: StepBudget, sequences: Sequence[SequenceView]) -> set[str]:
    """Adds what fits, decodes first; returns those of which nothing does."""
    decodes = [one for one in sequences if one.is_decode]
    count = budget.fits_decodes([one.context for one in decodes])
    budget.take_decodes(count, sum(one.context for one in decodes[:count]))
    left = {one.key for one in decodes[count:]}
    for one in sequences:
        if not one.is_decode:
            chunk = budget.fits_prefill(one.num_new, one.context)
            if chunk > 0:
                budget.take_prefill(chunk, one.context)
            else:
                left.add(one.key)
    return left


def _shape(sequences: Iterable[SequenceView]) -> StepShape:
    prefill = decodes = context = 0
    attention = 0.0
    for one in sequences:
        if one.is_decode:
            decodes, context = decodes + 1, context + one.context
        else:
            prefill += one.num_new
            attention += one.num_new * (one.context + one.num_new / 2)
    return StepShape(prefill, attention, decodes, context)


class Victim(NamedTuple):
    """A running offline sequence."""

    key: str
    num_blocks: int
    num_computed: int
    """Tokens that would be computed again."""


def victims(needs: Iterable[int], free_rows: int, free_blocks: int, offline: Iterable[Victim]) -> list[str]:
    """Offline sequences that give up row and blocks, so that waiting online ones, which need so many blocks each, are
    let in: those that lose least first. No more than help: where all of them are not enough for one, it waits."""
    left = sorted(offline, key=lambda one: (one.num_computed, one.key))
    chosen: list[str] = []
    for need in needs:
        rows, blocks, taken = free_rows, free_blocks, 0
        while (rows < 1 or blocks < need) and taken < len(left):
            rows, blocks, taken = rows + 1, blocks + left[taken].num_blocks, taken + 1
        if rows < 1 or blocks < need:
            break
        chosen += [one.key for one in left[:taken]]
        left = left[taken:]
        free_rows, free_blocks = rows - 1, blocks - need
    return chosen
