"""Every policy by the name that settings use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shared.policies.baselines import RoundRobin, SkipJoinMlfq
from shared.policies.doubling_budget import DoublingBudget
from shared.policies.ordering import FirstComeFirstServed, OrderingPolicy
from shared.policies.slo_budget import SloTokenBudget
from shared.policies.token_budget import FixedTokenBudget, TokenBudgetPolicy

ORDERING_POLICIES: dict[str, Callable[[], OrderingPolicy]] = {
    "fcfs": FirstComeFirstServed,
    "doubling_budget": DoublingBudget,
    "seallm": partial(DoublingBudget, shares_turns=False),
    "round_robin": RoundRobin,
    "mlfq": SkipJoinMlfq,
}

TOKEN_BUDGET_POLICIES: dict[str, Callable[[int], TokenBudgetPolicy]] = {
    "slo": SloTokenBudget,
    "priority_only": FixedTokenBudget,
    "online_only": FixedTokenBudget,
}
"""By the name of the co-serving mode; from the most tokens of a step."""


def ordering_policy(name: str, *, mix_phases: bool = True) -> OrderingPolicy:
    """A new policy object. ValueError for an unknown name."""
    if name not in ORDERING_POLICIES:
        raise ValueError(f"unknown order policy {name!r}; known: {', '.join(ORDERING_POLICIES)}")
    policy = ORDERING_POLICIES[name]()
    policy.mixes_phases = mix_phases
    return policy


def token_budget_policy(name: str, max_tokens: int) -> TokenBudgetPolicy:
    """A new policy object. ValueError for an unknown name."""
    if name not in TOKEN_BUDGET_POLICIES:
        raise ValueError(f"unknown co-serving mode {name!r}; known: {', '.join(TOKEN_BUDGET_POLICIES)}")
    return TOKEN_BUDGET_POLICIES[name](max_tokens)
