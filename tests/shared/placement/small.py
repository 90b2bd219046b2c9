"""Small problems of placement: models that stand for real shapes, and traffic that is drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.costs.model import CostModel
from shared.placement.problem import ModelFacts, NodeFacts, Problem, traffic

GB = 10**9
RANKS = (1, 2, 4)


def cost(size: float, num_ranks: int = 1) -> CostModel:
    """Cost of a model `size` times Llama-2-7B on `num_ranks` A100-like devices."""
    share, reduce_s = size / num_ranks, 0.0 if num_ranks == 1 else 0.003
    return CostModel(
        fixed_s=0.003 + 0.010 * share + reduce_s, prefill_token_s=6.5e-5 * share, prefill_attention_s=2.6e-9 * share,
        decode_s=3e-5 * share, decode_context_s=3.6e-7 * share, prefill_s=0.002,
    )  # fmt: skip


def model(name: str, size: float = 1.0, **fields: object) -> ModelFacts:
    """Like a Llama-2-7B of `size`."""
    known = {
        "name": name, "weights": name, "weight_bytes": int(13.5 * GB * size), "activation_bytes": GB, "block_size": 16,
        "block_bytes": int(16 * 524288 * size**0.5), "least_blocks": 128, "max_model_len": 8192, "num_layers": 32,
        "num_kv_heads": 32, "costs": {("gpu", num_ranks): cost(size, num_ranks) for num_ranks in RANKS},
    }  # fmt: skip
    return ModelFacts(**(known | fields))  # type: ignore[arg-type]


def node(name: str = "n0", num_devices: int = 4, memory_gb: float = 72) -> NodeFacts:
    return NodeFacts(node_id=name, kind="gpu", num_devices=num_devices, memory_bytes=int(memory_gb * GB))


def problem(
    models: Sequence[ModelFacts],
    nodes: Sequence[NodeFacts],
    rates: Sequence[float],
    *,
    interval_s: float = 60.0,
    seed: int = 0,
    **fields: object,
) -> Problem:
    """Poisson arrivals of each model's rate."""
    rng = np.random.default_rng(seed)
    rows = []
    for each, rate in zip(models, rates, strict=True):
        num = rng.poisson(rate * interval_s)
        prompts = np.clip(rng.lognormal(5.5, 1.0, num), 4, 4000).astype(int)
        outputs = np.clip(rng.lognormal(4.8, 0.8, num), 1, 1000).astype(int)
        times = rng.uniform(0, interval_s, num)
        rows += [
            (float(at), each.name, int(prompt), int(output), True)
            for at, prompt, output in zip(times, prompts, outputs, strict=True)
        ]
    arrivals = traffic(rows, interval_s, [each.name for each in models])
    return Problem(nodes=tuple(nodes), models=tuple(models), traffic=arrivals, **fields)  # type: ignore[arg-type]
