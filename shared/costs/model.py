"""Predicts how long a step takes from what is in it: ConServe's profiler as a formula (section 4.5).

    t = fixed + a*prefill_tokens + b*sum(chunk * (context + chunk/2)) + c*decodes + d*sum(decode context)
        + e*max(0, tokens - knee) + f*[holds a chunk] + g*[holds chunks and decodes]

Up to the knee a step is bound by reading the weights, beyond it by arithmetic. A step of decodes alone is cheaper to
start: it is a replayed graph on CUDA, and one attention call a layer on CPU.

All coefficients are seconds and not negative, so t grows with every load and the inverse queries are well defined.
`LiveScale` corrects drift.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

import msgspec


class CostSource(StrEnum):
    """Origin of an instance's cost model of a model."""

    NONE = "none"
    """Too few steps have run to know anything: a cautious guess."""
    LIVE = "live"
    """Fitted to the steps that run (live.py)."""
    PROFILED = "profiled"
    """Measured here."""
    STORED = "stored"
    """Measured before, here or elsewhere."""


class StepShape(NamedTuple):
    """What of a batch determines its time."""

    prefill_tokens: int = 0
    prefill_attention: float = 0.0
    """Sum over chunks of tokens * (context before it + tokens / 2)."""
    num_decodes: int = 0
    decode_context_tokens: int = 0
    """Sum over decoding sequences of the tokens in their cache."""

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.num_decodes


def shape_of(starts: list[int], counts: list[int]) -> StepShape:
    """The shape of a step, from its plan's columns; one token is a decode."""
    prefill = decodes = decode_context = 0
    attention = 0.0
    for start, count in zip(starts, counts, strict=True):
        if count == 1:
            decodes += 1
            decode_context += start
        else:
            prefill += count
            attention += count * (start + count / 2)
    return StepShape(prefill, attention, decodes, decode_context)


def prompt_s(cost: tuple[float, float], num_tokens: int, context_tokens: int = 0) -> float:
    """Seconds for so many tokens of a prompt after others. `cost`: from `CostModel.prompt_cost`."""
    return cost[0] * num_tokens + cost[1] * num_tokens * (context_tokens + num_tokens / 2)


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one kind of device. Seconds."""

    fixed_s: float
    prefill_token_s: float
    prefill_attention_s: float
    decode_s: float
    decode_context_s: float
    over_knee_s: float = 0.0
    knee_tokens: int = 0
    num_layers: int = 1
    layers_per_safepoint: int = 1
    safepoint_s: float = 0.0
    """What one safepoint adds to a step."""
    checkpoint_block_s: float = msgspec.field(default=0.0, name="checkpoint_slot_s")
    """Copying one block to host memory. Stored cost models have it, and the next one, by another name."""
    restore_block_s: float = msgspec.field(default=0.0, name="restore_slot_s")
    """Copying one block back."""
    median_error: float = 0.0
    """Relative, on held-out steps."""
    p99_error: float = 0.0
    prefill_s: float = 0.0
    """What the first chunk adds to a step, whatever its length."""
    mixed_s: float = 0.0
    """What having both chunks and decodes adds."""

    def predict(self, shape: StepShape) -> float:
        prefill, attention, decodes, context = shape
        seconds = (
            self.fixed_s
            + self.prefill_token_s * prefill
            + self.prefill_attention_s * attention
            + self.decode_s * decodes
            + self.decode_context_s * context
        )
        over = prefill + decodes - self.knee_tokens
        if over > 0:
            seconds += self.over_knee_s * over
        if prefill:
            seconds += self.prefill_s + self.mixed_s if decodes else self.prefill_s
        return seconds

    def decode_cost_s(self, context_tokens: int) -> float:
        """What one more decoding sequence adds to others, below the knee."""
        return self.decode_s + self.decode_context_s * context_tokens

    def prefill_cost_s(self, num_tokens: int, context_tokens: int) -> float:
        """What a chunk adds to others, below the knee."""
        attention = num_tokens * (context_tokens + num_tokens / 2)
        return self.prefill_token_s * num_tokens + self.prefill_attention_s * attention

    @property
    def prompt_cost(self) -> tuple[float, float]:
        """Seconds of a token of a prompt, as most of them are (above the knee), and what each adds per token before it."""
        return self.prefill_token_s + self.over_knee_s, self.prefill_attention_s

    def max_prefill_tokens(self, seconds: float, shape: StepShape, context_tokens: int) -> int:
        """The longest chunk after `context_tokens` that, added to `shape`, adds at most `seconds`."""
        if not shape.prefill_tokens:
            seconds -= self.prefill_s
        if shape.num_decodes and not shape.prefill_tokens:
            seconds -= self.mixed_s
        if seconds <= 0:
            return 0
        below_knee = max(0, self.knee_tokens - shape.num_tokens)
        linear = self.prefill_token_s + self.prefill_attention_s * context_tokens
        quadratic = self.prefill_attention_s / 2
        count = _largest(quadratic, linear, seconds)
        if count <= below_knee or self.over_knee_s == 0:
            return count
        return max(below_knee, _largest(quadratic, linear + self.over_knee_s, seconds + self.over_knee_s * below_knee))

    def scaled(self, factor: float) -> CostModel:
        """All step times multiplied: the live correction."""
        return msgspec.structs.replace(
            self,
            fixed_s=self.fixed_s * factor,
            prefill_token_s=self.prefill_token_s * factor,
            prefill_attention_s=self.prefill_attention_s * factor,
            decode_s=self.decode_s * factor,
            decode_context_s=self.decode_context_s * factor,
            over_knee_s=self.over_knee_s * factor,
            safepoint_s=self.safepoint_s * factor,
            prefill_s=self.prefill_s * factor,
            mixed_s=self.mixed_s * factor,
        )


class KnownCosts(NamedTuple):
    """What an engine knows of a model's step times."""

    cost_model: CostModel
    """The model as it was measured, or fitted last."""
    scale: float
    """How real step times compare to it lately."""
    source: CostSource


_MOST = 2**31 - 1


def _largest(quadratic: float, linear: float, limit: float) -> int:
    """The largest n up to `_MOST` with quadratic*n^2 + linear*n <= limit; limit > 0."""
    slope = linear + math.sqrt(linear * linear + 4 * quadratic * limit)
    # this form of the root loses no digits where the quadratic term is small
    return _MOST if 2 * limit >= _MOST * slope else int(2 * limit / slope)


class LiveScale:
    """Ratio of real to predicted step times as an exponentially weighted mean of its logarithm; `factor` is 1 until
    something was observed. A stall is not drift: one step moves the mean as if it had been off by `outlier` times at most
    (Huber's bound)."""

    def __init__(self, weight: float = 0.05, *, outlier: float = 1.5) -> None:
        self._weight = weight
        self._bound = math.log(outlier)
        self._log = 0.0
        self.factor = 1.0

    def observe(self, predicted_s: float, real_s: float) -> None:
        if predicted_s <= 0 or real_s <= 0:
            return
        error = math.log(real_s) - math.log(predicted_s) - self._log
        self._log += self._weight * min(max(error, -self._bound), self._bound)
        self.factor = math.exp(self._log)
