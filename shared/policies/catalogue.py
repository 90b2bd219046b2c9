"""Every policy by the name that settings use, built in or brought by another package (`shared.plugins`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shared.plugins import Registry
from shared.policies.autoscaling import Autoscaling, ScalingBounds
from shared.policies.baselines import RoundRobin, SkipJoinMlfq
from shared.policies.dispatch import DispatchParameters, DispatchPolicy, FewestRequests, FirstToken, Freest, InTurn
from shared.policies.doubling_budget import DoublingBudget
from shared.policies.ordering import FirstComeFirstServed, OrderingPolicy
from shared.policies.rebalancing import Rebalancer
from shared.policies.slo_budget import SloTokenBudget
from shared.policies.token_budget import FixedTokenBudget, TokenBudgetPolicy

ORDERING_POLICIES: Registry[Callable[[], OrderingPolicy]] = Registry(
    "order policy",
    "tideway.order_policies",
    {
        "doubling_budget": DoublingBudget,
        "seallm": partial(DoublingBudget, shares_turns=False),
        "fcfs": FirstComeFirstServed,
        "round_robin": RoundRobin,
        "mlfq": SkipJoinMlfq,
    },
)

TOKEN_BUDGET_POLICIES: Registry[Callable[[int], TokenBudgetPolicy]] = Registry(
    "co-serving mode",
    "tideway.token_budget_policies",
    {"slo": SloTokenBudget, "priority_only": FixedTokenBudget, "online_only": FixedTokenBudget},
)
"""By the name of the co-serving mode; from the most tokens of a step."""

DISPATCH_POLICIES: Registry[Callable[[DispatchParameters], DispatchPolicy]] = Registry(
    "dispatch policy",
    "tideway.dispatch_policies",
    {"first_token": FirstToken, "freeness": Freest, "round_robin": InTurn, "fewest_requests": FewestRequests},
)

REBALANCE_POLICIES: Registry[Callable[[float, float, float], Rebalancer]] = Registry(
    "rebalance policy", "tideway.rebalance_policies", {"freeness": Rebalancer}
)
"""Makers of a rebalancer from the bounds of freeness, low and high, and the most pairings a second."""

SCALING_POLICIES: Registry[Callable[[ScalingBounds], Autoscaling]] = Registry(
    "scaling policy", "tideway.scaling_policies", {"freeness": Autoscaling}
)


def ordering_policy(name: str, *, mix_phases: bool = True) -> OrderingPolicy:
    """A new policy object. Raises `PluginError`."""
    policy = ORDERING_POLICIES.find(name)()
    policy.mixes_phases = mix_phases
    return policy


def token_budget_policy(name: str, max_tokens: int) -> TokenBudgetPolicy:
    """A new policy object. Raises `PluginError`."""
    return TOKEN_BUDGET_POLICIES.find(name)(max_tokens)


def dispatch_policy(name: str, parameters: DispatchParameters) -> DispatchPolicy:
    """A new policy object. Raises `PluginError`."""
    return DISPATCH_POLICIES.find(name)(parameters)
