"""A kind of device from profiles: which efficiencies the measured cost models of one or more models show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from shared.costs.fit import nnls
from shared.costs.model import CostModel
from shared.models.checkpoint import CheckpointShape
from shared.placement.hardware import Hardware, Work, work_of


class Profiled(NamedTuple):
    """A model that was measured on one device."""

    name: str
    shape: CheckpointShape
    dtype: str
    """Dtype that it ran in."""
    block_size: int
    cost_model: CostModel


def fitted(base: Hardware, profiles: Sequence[Profiled]) -> Hardware:
    """`base` with the efficiencies that profiles of one or more models show, and these themselves; what they do not show
    (interconnects, memory) stays. Where something is faster than the base's rate, the rate is raised.

    One model cannot tell the reading of weights from the fixed costs of its layers: weights are then read at the base's
    rate, if the steps leave room for that. Raises `ValueError` without a profile."""
    if not profiles:
        raise ValueError("a fit needs the profile of a model")
    works = [work_of(profile.shape, profile.dtype) for profile in profiles]
    costs = [profile.cost_model for profile in profiles]
    layers = np.array([profile.shape.num_layers for profile in profiles], float)
    token_s = [cost.prefill_token_s + cost.over_knee_s for cost in costs]
    weight_rate, layer_s = _fixed_costs(base, works, layers, np.array([cost.fixed_s for cost in costs]))
    block_bytes = [work.kv_bytes * profile.block_size for work, profile in zip(works, profiles, strict=True)]
    host_rate = _rate(block_bytes, [cost.checkpoint_block_s for cost in costs])
    changes: dict[str, float] = {"layer_s": layer_s, "step_s": 0.0}
    for share, of, rate in (
        ("weight_share", "memory_bytes_s", weight_rate),
        ("kv_share", "memory_bytes_s", _rate([w.kv_bytes for w in works], [cost.decode_context_s for cost in costs])),
        ("flops_share", "flops", _rate([w.token_flops for w in works], token_s)),
        (
            "attention_share",
            "flops",
            _rate([w.attention_flops for w in works], [cost.prefill_attention_s for cost in costs]),
        ),
    ):
        # as bytes or FLOPs a second, until the highest is known
        changes[share] = rate or getattr(base, share) * getattr(base, of)
        changes[of] = max(changes.get(of, getattr(base, of)), changes[share])
    for share in ("weight_share", "kv_share"):
        changes[share] /= changes["memory_bytes_s"]
    for share in ("flops_share", "attention_share"):
        changes[share] /= changes["flops"]
    if host_rate:
        changes["host_bytes_s"] = host_rate
    hidden = [cost.over_knee_s / seconds for cost, seconds in zip(costs, token_s, strict=True) if seconds > 0]
    changes["hidden_share"] = float(np.mean(hidden)) if hidden else base.hidden_share
    for name, extra_s in (
        ("decode_layer_s", [max(0.0, cost.decode_s - cost.prefill_token_s) for cost in costs]),
        ("prefill_layer_s", [cost.prefill_s for cost in costs]),
        ("mixed_layer_s", [cost.mixed_s for cost in costs]),
    ):
        changes[name] = float(np.mean(np.array(extra_s) / layers))
    source = f"fitted to steps of {', '.join(profile.name for profile in profiles)}"
    return msgspec.structs.replace(
        base,
        **changes,
        sources=base.sources
        | {name: source for name, value in changes.items() if value and value != getattr(base, name)},
        measured={profile.name: {1: profile.cost_model} for profile in profiles},
    )


def _rate(amounts: Sequence[float], seconds: Sequence[float]) -> float:
    """Geometric mean of those whose time shows; 0: none does."""
    logs = [np.log(amount / taken) for amount, taken in zip(amounts, seconds, strict=True) if taken > 0]
    return float(np.exp(np.mean(logs))) if logs else 0.0


def _fixed_costs(base: Hardware, works: Sequence[Work], layers: np.ndarray, fixed_s: np.ndarray) -> tuple[float, float]:
    """Bytes a second at which weights are read, and seconds of a layer."""
    weight_bytes = np.array([work.weight_bytes for work in works])
    rate = base.memory_bytes_s * base.weight_share
    if len(works) > 1:
        # relative: each model counts alike
        columns = np.stack([weight_bytes / rate, layers], axis=1) / fixed_s[:, None]
        times, layer_s = nnls(columns, np.ones(len(works)))
        if times > 0:
            return rate / float(times), float(layer_s)
    left_s = fixed_s - weight_bytes / rate
    if (left_s >= 0).all():
        return rate, float(np.mean(left_s / layers))
    return _rate(list(weight_bytes), list(fixed_s)), 0.0
