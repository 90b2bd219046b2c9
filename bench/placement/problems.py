"""Problems of placement, drawn by a seed: shapes of real models on A800s, and requests with real-looking lengths."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from shared.placement.facts import SHAPES, model_facts, node_facts
from shared.placement.hardware import A800_80G
from shared.placement.problem import ModelFacts, NodeFacts, Problem, traffic

SHAPE_NAMES = ("llama-2-7b", "llama-2-13b", "opt-6.7b", "llama-3.1-8b", "llama-2-70b")
SHAPE_SHARES = (0.3, 0.25, 0.2, 0.2, 0.05)
KINDS = {"chat": (5.0, 1.0, 5.2, 0.7), "summaries": (7.6, 0.4, 4.2, 0.7), "code": (6.3, 0.8, 3.2, 0.8)}
"""Kinds of requests: means and standard deviations of the logarithms of prompt and output tokens."""
BURST_SHARE = 0.3
"""Share of models whose requests come in three bursts."""


def draw_models(num: int, rng: np.random.Generator, *, names: Sequence[str] = SHAPE_NAMES) -> list[ModelFacts]:
    shares = np.array(SHAPE_SHARES[: len(names)]) / sum(SHAPE_SHARES[: len(names)])
    found = []
    for number, name in enumerate(rng.choice(list(names), num, p=shares).tolist()):
        facts = model_facts(name, SHAPES[name], [A800_80G])
        label = f"{number:02}-{name}"
        found.append(msgspec.structs.replace(facts, name=label, weights=label))
    return found


def nodes(num_devices: int, per_node: int = 8) -> tuple[NodeFacts, ...]:
    """Nodes of A800s; the last may have fewer."""
    counts = [min(per_node, num_devices - first) for first in range(0, num_devices, per_node)]
    return tuple(node_facts(f"node-{number:03}", A800_80G, count) for number, count in enumerate(counts))


def draw(
    num_devices: int,
    models: Sequence[ModelFacts],
    rate: float,
    interval_s: float,
    rng: np.random.Generator,
    *,
    per_node: int = 8,
    has_bursts: bool = True,
    exponent: float = 1.0,
) -> Problem:
    """`rate`: requests a second of all models, whose shares fall as 1 / rank ** exponent."""
    shares = np.arange(1, len(models) + 1) ** -exponent
    rows: list[tuple[float, str, int, int, bool]] = []
    for model, share in zip(models, (shares / shares.sum()).tolist(), strict=True):
        num = int(rng.poisson(rate * share * interval_s))
        prompt_log, prompt_std, output_log, output_std = KINDS[str(rng.choice(list(KINDS)))]
        at_s = rng.uniform(0, interval_s, num)
        if has_bursts and rng.random() < BURST_SHARE:
            begins = rng.uniform(0, interval_s, 3)
            at_s = np.clip(begins[rng.integers(0, 3, num)] + rng.exponential(0.05 * interval_s, num), 0, interval_s)
        most = min(model.max_model_len, 8192) // 2
        prompts = np.clip(rng.lognormal(prompt_log, prompt_std, num), 4, most).astype(int)
        outputs = np.clip(rng.lognormal(output_log, output_std, num), 1, most).astype(int)
        rows += [
            (at, model.name, prompt, output, True)
            for at, prompt, output in zip(at_s.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
        ]
    arrivals = traffic(rows, interval_s, [model.name for model in models])
    return Problem(nodes=nodes(num_devices, per_node), models=tuple(models), traffic=arrivals)
