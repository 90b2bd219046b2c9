"""A cost model from the steps that run, where none was measured: of use from the first step on.

Non-negative least squares on the relative error, as in fit.py, drawn towards a prior that is scaled to what was seen:
what the steps do not determine (decodes alone say nothing of prompts) keeps the prior's proportions. Steps are kept by
their shape's order of magnitude, of each the last few, and the median of these counts, so that a stall does not, and what
is rarely seen is not forgotten for what is always seen.

Plain arithmetic in a fixed order, without logarithms, and sums that are rounded once: a recorded run replays to the same
bytes on any machine.
"""

from __future__ import annotations

from collections import deque
from math import fsum
from statistics import median_low

import msgspec

from shared.costs.model import CostModel, StepShape

PRIOR = CostModel(
    fixed_s=0.025,
    prefill_token_s=0.001,
    prefill_attention_s=2e-6,
    decode_s=0.0025,
    decode_context_s=2e-6,
    prefill_s=0.005,
    mixed_s=0.005,
)
"""A small model on few cores. Before the first step its size counts, after that only its proportions: tokens are dear
beside what a step costs anyway, so a longer step is rather over- than underestimated."""

FIRST_STEP_TOKENS = 32
"""Tokens in the first steps of a model of which nothing is known."""
GROWTH = 2
"""A step has at most so many times the tokens of the longest one seen: predictions far beyond are guesses."""
LEAST_STEPS = 8
"""Seen before the fit is said to be one."""

_COLUMNS = (
    "fixed_s", "prefill_token_s", "prefill_attention_s", "decode_s", "decode_context_s", "prefill_s", "mixed_s",
)  # fmt: skip
_PRIOR = tuple(getattr(PRIOR, name) for name in _COLUMNS)
_NUM = len(_COLUMNS)
_STEPS_KEPT = 5
"""Steps kept of each order of magnitude."""
_AGE_STEPS = 100
"""After so many steps of other shapes a shape counts half."""
_PRIOR_WEIGHT = 0.02
"""Weight of the prior's proportions, where one shape's steps weigh 1."""
_HUBER_BOUND = 0.1
"""Relative error up to which a shape counts fully."""
_ROUNDS, _SWEEPS = 3, 30
_REFIT_STEPS = 16
"""Between two fits, once many steps have been seen."""
_ERRORS_KEPT = 128


class _Shape:
    """The last steps of one order of magnitude."""

    def __init__(self) -> None:
        self.steps: deque[tuple[float, tuple[float, ...]]] = deque(maxlen=_STEPS_KEPT)
        """Real over the prior's time, and each column's part of the prior's time."""
        self.last_step = 0


class LiveCosts:
    """`cost_model` is what is known so far, the prior at first; `max_step_tokens`: of longer steps it says too little."""

    def __init__(self, num_layers: int = 1, layers_per_safepoint: int = 1) -> None:
        self.cost_model = msgspec.structs.replace(
            PRIOR, num_layers=num_layers, layers_per_safepoint=layers_per_safepoint
        )
        self.max_step_tokens = FIRST_STEP_TOKENS
        self._shapes: dict[tuple[int, ...], _Shape] = {}
        self._factors = [1.0] * _NUM
        """Factors on the prior's coefficients, over the common scale."""
        self._errors: deque[float] = deque(maxlen=_ERRORS_KEPT)
        """Relative errors of the predictions made before each step was known."""
        self._num_steps = self._next_fit = 0

    @property
    def is_known(self) -> bool:
        """Whether there were steps enough to call it a fit."""
        return self._num_steps >= LEAST_STEPS

    def observe(self, shape: StepShape, seconds: float) -> bool:
        """A step has run; returns whether `cost_model` has changed. One that took no time says nothing."""
        if seconds <= 0:
            return False
        if self._num_steps:
            self._errors.append(abs(self.cost_model.predict(shape) / seconds - 1))
        self._num_steps += 1
        self.max_step_tokens = max(self.max_step_tokens, GROWTH * shape.num_tokens)
        parts = tuple(f * p for f, p in zip(_features(shape), _PRIOR, strict=True))
        prior_s = fsum(parts)
        context = shape.decode_context_tokens // max(1, shape.num_decodes)
        key = tuple(int(count).bit_length() for count in (shape.prefill_tokens, shape.num_decodes, context))
        seen = self._shapes.setdefault(key, _Shape())
        seen.steps.append((seconds / prior_s, tuple(part / prior_s for part in parts)))
        seen.last_step = self._num_steps
        if self._num_steps < self._next_fit:
            return False
        self._next_fit = self._num_steps + min(_REFIT_STEPS, 1 + self._num_steps // LEAST_STEPS)
        self._fit()
        return True

    def _fit(self) -> None:
        middle = [(median_low(shape.steps), shape.last_step) for shape in self._shapes.values()]
        scale = median_low(ratio for (ratio, _), _ in middle)
        rows = [[scale / ratio * part for part in parts] for (ratio, parts), _ in middle]
        ages = [1 / (1 + (self._num_steps - last_step) / _AGE_STEPS) for _, last_step in middle]
        weights = ages
        for _ in range(_ROUNDS):
            self._solve(rows, weights)
            errors = [abs(fsum(a * x for a, x in zip(row, self._factors, strict=True)) - 1) for row in rows]
            weights = [age * min(1.0, _HUBER_BOUND / max(e, 1e-12)) for age, e in zip(ages, errors, strict=True)]
        values = {
            name: scale * factor * prior
            for name, factor, prior in zip(_COLUMNS, self._factors, _PRIOR, strict=True)
        }  # fmt: skip
        errors = sorted(self._errors) or [0.0]
        values |= {"median_error": errors[len(errors) // 2], "p99_error": errors[int(0.99 * (len(errors) - 1))]}
        self.cost_model = msgspec.structs.replace(self.cost_model, **values)

    def _solve(self, rows: list[list[float]], weights: list[float]) -> None:
        """The factors x >= 0 that minimise sum(weight * (row @ x - 1)^2) + prior weight * |x - 1|^2, by coordinate descent
        from those of before."""
        gram = [[_PRIOR_WEIGHT * (i == j) for j in range(_NUM)] for i in range(_NUM)]
        target = [_PRIOR_WEIGHT] * _NUM
        for row, weight in zip(rows, weights, strict=True):
            for i, a in enumerate(row):
                if a:
                    target[i] += weight * a
                    line = gram[i]
                    for j, b in enumerate(row):
                        line[j] += weight * a * b
        x = self._factors
        for _ in range(_SWEEPS):
            for i, line in enumerate(gram):
                rest = fsum(g * factor for g, factor in zip(line, x, strict=True)) - line[i] * x[i]
                x[i] = max(0.0, (target[i] - rest) / line[i])


def _features(shape: StepShape) -> tuple[float, ...]:
    prefill, attention, decodes, context = shape
    return (1.0, prefill, attention, decodes, context, float(prefill > 0), float(prefill > 0 and decodes > 0))
