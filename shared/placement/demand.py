"""KV memory that requests of a plan hold. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np

from shared.placement.execution import alone_s, step_tokens
from shared.placement.plan import Plan
from shared.placement.problem import Problem

SLOWDOWN = 2.0
"""Requests of a group that others use too take so many times what they take alone."""
STARVED_HEADROOM = 1.5
"""A pool that holds fewer times what is asked of it is made larger, where it can be and requests are late."""


def kv_bytes(problem: Problem, plan: Plan, only: Collection[str] = ()) -> dict[str, int]:
    """By instance id of each group: bytes of KV that the online requests of all known traffic hold at the busiest moment of
    each model, if a model's requests are spread evenly over its groups and hold all their tokens from arrival to end.
    `only`: where not empty, the instances whose pools may be made anew for that; 0 for the others."""
    traffic = problem.traffic if problem.evidence is None else problem.evidence
    facts = {model.name: model for model in problem.models}
    kinds = {node.node_id: node.kind for node in problem.nodes}
    num_groups = Counter(name for group in plan.groups for name in group.models)
    most: dict[tuple[str, str, int], float] = {}

    def most_bytes(name: str, kind: str, num_ranks: int) -> float:
        cost = facts[name].costs.get((kind, num_ranks))
        if name not in traffic.models or cost is None:
            return 0.0
        rows = (traffic.model == traffic.models.index(name)) & traffic.is_online
        prompt, output = traffic.prompt_tokens[rows], traffic.output_tokens[rows]
        model = facts[name]
        ends_s = traffic.arrival_s[rows] + SLOWDOWN * alone_s(cost, prompt, output, step_tokens(kind))
        held = -(-(prompt + output) // model.block_size) * float(model.block_bytes)
        order = np.argsort(np.concatenate([traffic.arrival_s[rows], ends_s]), kind="stable")
        return float(np.cumsum(np.concatenate([held, -held])[order]).max(initial=0.0))

    found = {}
    for group in plan.groups:
        total = 0.0
        for name in group.models if not only or group.instance_id in only else ():
            key = name, kinds[group.node_id], group.num_ranks
            if key not in most:
                most[key] = most_bytes(*key)
            total += most[key] / num_groups[name]
        found[group.instance_id] = int(total)
    return found
