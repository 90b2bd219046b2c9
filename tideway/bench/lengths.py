"""How long prompts and answers are. Pure: a specification and a generator of random numbers in, token counts out."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta

from tideway.bench.arrivals import NotNegative, Positive, Spec

Tokens = Annotated[int, Meta(ge=1)]


class Fixed(Spec, frozen=True, kw_only=True, tag="fixed"):
    tokens: Tokens


class Uniform(Spec, frozen=True, kw_only=True, tag="uniform"):
    """Every length from `min_tokens` to `max_tokens` equally often."""

    min_tokens: Tokens
    max_tokens: Tokens


class LogNormal(Spec, frozen=True, kw_only=True, tag="lognormal"):
    """`mean_tokens` and `cv` are those of the lengths themselves, before they are cut to the bounds."""

    mean_tokens: Positive
    cv: NotNegative = 1.0
    min_tokens: Tokens = 1
    max_tokens: Tokens = 1 << 20


class Zipf(Spec, frozen=True, kw_only=True, tag="zipf"):
    """A length has the probability length ** -alpha, from `min_tokens` to `max_tokens`."""

    alpha: NotNegative
    min_tokens: Tokens = 1
    max_tokens: Tokens


Lengths = Fixed | Uniform | LogNormal | Zipf


def sample_lengths(lengths: Lengths, num: int, rng: np.random.Generator) -> np.ndarray:
    """`num` token counts, int64. Raises `ValueError` where the bounds are the wrong way round."""
    match lengths:
        case Fixed():
            return np.full(num, lengths.tokens)
        case Uniform():
            _check_bounds(lengths)
            return rng.integers(lengths.min_tokens, lengths.max_tokens, num, endpoint=True)
        case LogNormal():
            _check_bounds(lengths)
            variance = np.log1p(lengths.cv**2)
            drawn = rng.lognormal(np.log(lengths.mean_tokens) - variance / 2, np.sqrt(variance), num)
            return np.clip(np.rint(drawn), lengths.min_tokens, lengths.max_tokens).astype(np.int64)
        case Zipf():
            _check_bounds(lengths)
            support = np.arange(lengths.min_tokens, lengths.max_tokens + 1)
            cumulative = np.cumsum(support.astype(float) ** -lengths.alpha)
            picked = np.searchsorted(cumulative, rng.random(num) * cumulative[-1], side="right")
            return np.asarray(support[picked])


def _check_bounds(lengths: Uniform | LogNormal | Zipf) -> None:
    if lengths.min_tokens > lengths.max_tokens:
        raise ValueError(f"lengths from {lengths.min_tokens} to {lengths.max_tokens} tokens: the bounds are swapped")
