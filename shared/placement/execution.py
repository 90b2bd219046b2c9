"""How long requests take alone: what SLOs and normalised latencies are reckoned by (SeaLLM, equation 1 and section 6.1)."""

from __future__ import annotations

import numpy as np

from shared.costs.model import CostModel
from shared.placement.memory import Memory
from shared.placement.plan import is_cpu
from shared.placement.problem import ModelFacts, Problem

STEP_TOKENS, CPU_STEP_TOKENS = 8192, 512
"""Most tokens of a step, as instances have it by default."""


def step_tokens(kind: str) -> int:
    return CPU_STEP_TOKENS if is_cpu(kind) else STEP_TOKENS


def alone_s(cost: CostModel, prompt_tokens: np.ndarray, output_tokens: np.ndarray, max_step_tokens: int) -> np.ndarray:
    """Time from arrival to the last token on an idle instance. `prompt_tokens`, `output_tokens`: [n], at least 1; -> [n]."""
    prompt, decodes = prompt_tokens.astype(float), output_tokens - 1.0
    chunks = np.ceil(prompt / max_step_tokens)
    last = prompt - (chunks - 1) * max_step_tokens
    over = (chunks - 1) * max(0, max_step_tokens - cost.knee_tokens) + np.maximum(0, last - cost.knee_tokens)
    prefill_s = (
        chunks * (cost.fixed_s + cost.prefill_s)
        + cost.prefill_token_s * prompt
        + cost.prefill_attention_s * prompt**2 / 2
        + cost.over_knee_s * over
    )
    # A last chunk of one token is computed as a decode is (`shape_of`).
    as_prefill = cost.prefill_s + cost.prefill_token_s + cost.prefill_attention_s * (prompt - 0.5)
    as_decode = cost.decode_s + cost.decode_context_s * (prompt - 1)
    prefill_s += np.where(last == 1, as_decode - as_prefill, 0.0)
    decode_s = cost.fixed_s + cost.decode_s + cost.over_knee_s * max(0, 1 - cost.knee_tokens)
    context = decodes * prompt + decodes * (decodes - 1) / 2
    seconds: np.ndarray = prefill_s + decodes * decode_s + cost.decode_context_s * context
    return seconds


def least_group(problem: Problem, model: ModelFacts, memory: Memory | None = None) -> tuple[str, int] | None:
    """Kind and number of the fewest devices that hold the model alone; None where it fits nowhere. `memory`: of the problem,
    where the caller has it."""
    nodes, memory = {node.kind: node for node in problem.nodes}, memory or Memory(problem)
    fitting = [
        (p, kind) for kind, p in model.costs if kind in nodes and not memory.why_not([model.name], nodes[kind], p)
    ]
    return None if not fitting else min(fitting)[::-1]


def execution_s(problem: Problem) -> dict[str, float]:
    """Mean execution time of each model of the problem: `problem.execution_s`, else what its online requests (without any,
    all of its requests) take alone on its least group. Models without a request, or that fit nowhere, are left out."""
    found = dict(problem.execution_s)
    traffic, memory = problem.traffic, Memory(problem)
    for model in problem.models:
        if model.name in found or model.name not in traffic.models:
            continue
        rows = traffic.model == traffic.models.index(model.name)
        if (online := rows & traffic.is_online).any():
            rows = online
        if rows.any() and (group := least_group(problem, model, memory)) is not None:
            cost = model.costs[group]
            seconds = alone_s(cost, traffic.prompt_tokens[rows], traffic.output_tokens[rows], step_tokens(group[0]))
            found[model.name] = float(seconds.mean())
    return found
