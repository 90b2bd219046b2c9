"""How much one step may compute: the limits that a policy sets, and the arithmetic of one planning pass under them.

ConServe sections 4.2 (Algorithm 1) and 4.5: online sequences are admitted first against the whole budget; offline ones
get what is left of it.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

from shared.costs.model import CostModel, StepShape


class StepView(NamedTuple):
    """What a policy may know when a step of `model` is about to be filled."""

    model: str
    now: float
    cost_model: CostModel | None
    """Live-corrected; None: nothing was measured yet."""
    is_online: bool
    """Whether online sequences of the model lead the step; else those that it has cannot run now."""
    num_other_online: int
    """Other models that have runnable online sequences."""
    tpot_objective_s: float = math.inf
    """Tightest over the decoding online sequences of all models; inf: none decodes."""
    slack_s: float = math.inf
    """Time from the step's start to the earliest time at which one of them is due its next token; may be negative."""
    ttft_left_s: float = math.inf
    """Tightest time left to the first token over the online sequences of all models in or before prefill; inf: there is
    none; may be negative."""
    own_ttft_left_s: float = math.inf
    """The same over those of the model."""
    online: StepShape = StepShape()
    """All that the model's online sequences have to run now; only where it has prompts and some model decodes."""
    max_known_tokens: int = sys.maxsize
    """Up to which the cost model says something of a step."""


class Limits(NamedTuple):
    """Limits of one step."""

    max_tokens: int
    limit_s: float = math.inf
    """Predicted duration at most."""
    offline_limit_s: float = math.inf
    """Predicted duration at most of a step to which offline tokens are added."""
    is_interruptible: bool = False
    """Offline batching mode: no online request is runnable, and one that arrives may interrupt the step."""


class TokenBudgetPolicy(ABC):
    @abstractmethod
    def limits(self, view: StepView) -> Limits:
        """Limits of the next step of a model; `max_tokens` at least 1."""

    def offline_limit_s(self, slack_s: float, ttft_left_s: float) -> float:
        """Longest predicted duration of an online step with offline work beside it."""
        return math.inf


class FixedTokenBudget(TokenBudgetPolicy):
    """The same number always (Sarathi-style chunked prefill)."""

    def __init__(self, num_tokens: int) -> None:
        if num_tokens < 1:
            raise ValueError(f"token budget {num_tokens} must be at least 1")
        self._limits = Limits(num_tokens)

    def limits(self, view: StepView) -> Limits:
        return self._limits


class StepBudget:
    """What is left of a step's limits while it is being filled. `shape` is what has been added."""

    __slots__ = ("_cost", "_limit_s", "_limits", "shape", "tokens_left", "used_s")

    def __init__(self, limits: Limits, cost_model: CostModel | None) -> None:
        self.tokens_left = limits.max_tokens
        self.shape = StepShape()
        is_bounded = min(limits.limit_s, limits.offline_limit_s) < math.inf
        self._cost = cost_model if is_bounded else None
        self._limits = limits
        self._limit_s = limits.limit_s
        self.used_s = 0.0 if self._cost is None else self._cost.predict(self.shape)
        """Predicted duration of what has been added; not kept up where no limit needs it."""

    def begin_offline(self) -> None:
        """What is added from now on is offline."""
        self._limit_s = min(self._limits.limit_s, self._limits.offline_limit_s)

    @property
    def left_s(self) -> float:
        """Predicted time left under the limit; negative when over it; inf without one."""
        return self._limit_s - self.used_s

    def fits_decodes(self, contexts: list[int]) -> int:
        """How many decoding sequences, of those with so many tokens in their caches, may be added in this order."""
        most = min(len(contexts), max(0, self.tokens_left))
        if self._cost is None or self._limit_s == math.inf:
            return most
        cost, shape, sums = self._cost, self.shape, [0, *accumulate(contexts[:most])]

        def predicted_s(count: int) -> float:
            context_tokens = shape.decode_context_tokens + sums[count]
            return cost.predict(
                shape._replace(num_decodes=shape.num_decodes + count, decode_context_tokens=context_tokens)
            )

        return max(0, bisect_right(range(1, most + 1), self._limit_s, key=predicted_s))

    def fits_prefill(self, wanted: int, context_tokens: int) -> int:
        """The longest chunk up to `wanted` tokens that may be added."""
        count = min(wanted, self.tokens_left)
        if self._cost is None or count <= 0 or self._limit_s == math.inf:
            return count
        return min(count, self._cost.max_prefill_tokens(self.left_s, self.shape, context_tokens))

    def take_decodes(self, num_sequences: int, context_tokens: int) -> None:
        """Adds decoding sequences with `context_tokens` together."""
        if not num_sequences:
            return
        prefill, attention, decodes, context = self.shape
        self.shape = StepShape(prefill, attention, decodes + num_sequences, context + context_tokens)
        self._charge(num_sequences)

    def take_prefill(self, num_tokens: int, context_tokens: int) -> None:
        prefill, attention, decodes, context = self.shape
        attention += num_tokens * (context_tokens + num_tokens / 2)
        self.shape = StepShape(prefill + num_tokens, attention, decodes, context)
        self._charge(num_tokens)

    def _charge(self, num_tokens: int) -> None:
        self.tokens_left -= num_tokens
        if self._cost is not None:
            self.used_s = self._cost.predict(self.shape)
