"""Plain stand-ins for what policies read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from shared.costs.model import CostModel

COST = CostModel(
    fixed_s=0.01, prefill_token_s=1e-4, prefill_attention_s=1e-8, decode_s=2e-4, decode_context_s=1e-7, num_layers=32
)


@dataclass
class FakeSequence:
    number: int
    model: str = "m"
    arrived_s: float = 0.0
    last_ran_s: float = 0.0
    num_prompt: int = 100
    num_tokens: int = 100
    order_state: Any = None


@dataclass
class FakeModel:
    name: str
    last_planned_step: int = -1
    sequences: list[FakeSequence] = field(default_factory=list)
    due_s: float = inf
    """Time at which its streams are due."""
    serving_s: float = 0.0
    pool_share: float = 0.0
    num_short: int = 0

    def runnable(self) -> Iterable[FakeSequence]:
        return self.sequences

    def streams(self, now: float) -> tuple[float, float]:
        return self.due_s - now, self.serving_s
