"""Fits a cost model to measured steps: non-negative least squares on the relative error."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from shared.costs.model import CostModel, StepShape

Measured = tuple[StepShape, float]
"""A step and its duration in seconds."""

KNEE_GAIN = 0.9
"""A knee must lower the error to this share, else it is noise that it explains."""
HUBER_BOUND = 0.1
"""Relative error up to which a step counts fully; one further off counts by its distance, not by the square of it."""
ROUNDS = 5

_COLUMNS = (
    "fixed_s", "prefill_token_s", "prefill_attention_s", "decode_s", "decode_context_s", "prefill_s", "mixed_s",
    "over_knee_s",
)  # fmt: skip


def nnls(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0 that minimises |matrix @ x - target|: Lawson and Hanson, Solving Least Squares Problems, chapter 23.
    `matrix`: [m, n], `target`: [m]; -> [n]."""
    num_columns = matrix.shape[1]
    x = np.zeros(num_columns)
    free = np.zeros(num_columns, bool)
    tolerance = 1e-10 * np.abs(matrix.T @ target).max(initial=0.0)
    for _ in range(3 * num_columns):
        gradient = np.where(free, -np.inf, matrix.T @ (target - matrix @ x))
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        free[best] = True
        while free.any():
            proposed = np.zeros(num_columns)
            proposed[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            negative = free & (proposed <= 0)
            if not negative.any():
                x = proposed
                break
            # as far towards the proposal as no variable turns negative; those that reach zero stay there
            x = x + np.min(x[negative] / (x[negative] - proposed[negative])) * (proposed - x)
            free &= x > 1e-15
            x[~free] = 0.0
    return x


def fit(steps: Sequence[Measured], *, max_knees: int = 0) -> CostModel:
    """The step times only; copies, safepoints and errors are left at their defaults. `max_knees`: so many are tried, evenly
    over the steps' sizes; 0: each size. Raises `ValueError` without any step or with a duration that is not positive."""
    times = np.array([seconds for _, seconds in steps])
    if not len(times) or times.min() <= 0:
        raise ValueError("a fit needs steps of positive duration")
    without, least_error = _fit_knee(steps, times, 0)
    best, least_error = without, KNEE_GAIN * least_error
    tokens = sorted({shape.num_tokens for shape, _ in steps})
    for knee in tokens[1 : -1 : -(-len(tokens) // max_knees) if max_knees else 1]:
        candidate, error = _fit_knee(steps, times, knee)
        if error < least_error:
            best, least_error = candidate, error
    return best


def errors(cost_model: CostModel, steps: Sequence[Measured]) -> tuple[float, float]:
    """Median and 99th percentile of the relative error."""
    relative = [abs(cost_model.predict(shape) / seconds - 1) for shape, seconds in steps]
    return float(np.median(relative)), float(np.quantile(relative, 0.99))


def _fit_knee(steps: Sequence[Measured], times: np.ndarray, knee_tokens: int) -> tuple[CostModel, float]:
    """Fit with the knee there (0: none), and its mean Huber loss."""
    matrix = np.array([_features(shape, knee_tokens) for shape, _ in steps])
    scale = np.maximum(matrix.max(axis=0), 1e-12)
    relative = matrix / scale / times[:, None]
    weights = np.ones(len(times))
    for _ in range(ROUNDS):
        coefficients = nnls(relative * weights[:, None], weights)
        distance = np.abs(relative @ coefficients - 1)
        weights = np.sqrt(np.minimum(1.0, HUBER_BOUND / np.maximum(distance, 1e-12)))
    loss = np.where(distance <= HUBER_BOUND, distance**2 / 2, HUBER_BOUND * (distance - HUBER_BOUND / 2))
    values = dict(zip(_COLUMNS, (coefficients / scale).tolist(), strict=True))
    return msgspec.convert(values | {"knee_tokens": knee_tokens}, CostModel), float(loss.mean())


def _features(shape: StepShape, knee_tokens: int) -> list[float]:
    prefill, attention, decodes, context = shape
    over_knee = max(0, shape.num_tokens - knee_tokens) if knee_tokens else 0
    return [1, prefill, attention, decodes, context, prefill > 0, prefill > 0 and decodes > 0, over_knee]
