"""Every policy by the name that settings use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from shared.policies.baselines import RoundRobin, SkipJoinMlfq
from shared.policies.dispatch import DispatchParameters, DispatchPolicy, FewestRequests, FirstToken, Freest, InTurn
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


DISPATCH_POLICIES: dict[str, type[DispatchPolicy]] = {
    "first_token": FirstToken,
    "freeness": Freest,
    "round_robin": InTurn,
    "fewest_requests": FewestRequests,
}

P = TypeVar("P")


def _named(name: str, catalogue: Mapping[str, P], what: str) -> P:
    if name not in catalogue:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(catalogue)}")
    return catalogue[name]


def ordering_policy(name: str, *, mix_phases: bool = True) -> OrderingPolicy:
    """A new policy object. ValueError for an unknown name."""
    policy = _named(name, ORDERING_POLICIES, "order policy")()
    policy.mixes_phases = mix_phases
    return policy


def token_budget_policy(name: str, max_tokens: int) -> TokenBudgetPolicy:
    """A new policy object. ValueError for an unknown name."""
    return _named(name, TOKEN_BUDGET_POLICIES, "co-serving mode")(max_tokens)


def dispatch_policy(name: str, parameters: DispatchParameters) -> DispatchPolicy:
    """A new policy object. ValueError for an unknown name."""
    return _named(name, DISPATCH_POLICIES, "dispatch policy")(parameters)
