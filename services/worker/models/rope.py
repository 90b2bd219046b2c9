"""Rotary position embeddings and the scalings that Llama, Mistral and Qwen checkpoints use.

On CPU they are looked up in a table that grows with the positions seen (one of 131,072 at once would be large, and few
angles take torch as long as many); elsewhere they are computed for each step. The formulas are those of transformers'
`modeling_rope_utils`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shared.models.checkpoint import CheckpointError

_TABLE_BLOCK = 64
"""Positions; torch computes so few angles in one thread."""
_LEAST_TABLE = 1024
"""Positions of the first table."""

Rope = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Signature of `RotaryEmbedding.__call__`."""


class RotaryEmbedding:
    """cos and sin for positions, in the form that `rotate` takes."""

    def __init__(
        self,
        head_dim: int,
        rope: Mapping[str, Any],
        max_position_embeddings: int,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`rope`: as `shared.models.checkpoint.rope_parameters` gives it."""
        self._dtype = dtype
        self._max_model_len = max_model_len
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None
        self._head_dim = head_dim
        self._theta = float(rope["rope_theta"])
        self._dynamic: tuple[float, int] | None = None
        self.attention_factor = 1.0
        kind = rope["rope_type"]
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inverse = 1.0 / (self._theta**exponents)
        try:
            if kind == "linear":
                inverse = inverse / float(rope["factor"])
            elif kind == "dynamic":
                self._dynamic = (float(rope["factor"]), max_position_embeddings)
            elif kind == "llama3":
                inverse = _llama3(inverse, rope)
            elif kind == "yarn":
                inverse, self.attention_factor = _yarn(inverse, rope, head_dim, max_position_embeddings)
            elif kind in ("longrope", "su"):
                inverse, self.attention_factor = _longrope(
                    self._theta, exponents, rope, max_position_embeddings, max_model_len
                )
            elif kind != "default":
                raise CheckpointError(f"rope scaling {kind!r} is not supported")
        except KeyError as error:
            raise CheckpointError(f"rope scaling {kind!r} lacks its parameter {error.args[0]!r}") from None
        self._inverse = inverse.to(device)
        self._exponents = exponents.to(device)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T] int64 -> cos and signed sin, each [T, 1, head_dim] in the model's dtype."""
        cos, sin = self.cos_sin(positions)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cos.to(self._dtype)[:, None], sin.to(self._dtype)[:, None]

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T] int64 -> cos and sin, each [T, head_dim / 2] float32."""
        table = self._table
        if positions.device.type == "cpu":
            num_positions = int(positions.max()) + 1
            if table is None or num_positions > len(table[0]):
                table = self.tabulate(max(num_positions, min(2 * num_positions, self._max_model_len), _LEAST_TABLE))
        if table is None:
            return self._computed(positions)
        return table[0].index_select(0, positions), table[1].index_select(0, positions)

    def tabulate(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes all positions now, in blocks of a fixed shape, so that those of a position do not depend on the others of
        a step."""
        blocks = [
            self._computed(torch.arange(start, start + _TABLE_BLOCK, device=self._inverse.device))
            for start in range(0, num_positions, _TABLE_BLOCK)
        ]
        self._table = torch.cat([cos for cos, _ in blocks]), torch.cat([sin for _, sin in blocks])
        return self._table

    def _computed(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None].float() * self._inverse_at(positions)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos, sin

    def _inverse_at(self, positions: torch.Tensor) -> torch.Tensor:
        """[head_dim / 2], or [T, head_dim / 2] where frequencies depend on the position.

        Dynamic NTK scaling is defined by the length so far. It is applied per position (a token at position p takes the
        base for length p + 1), as a token decoded at p sees it in transformers: a cached key then never depends on how
        its sequence was cut into steps."""
        if self._dynamic is None:
            return self._inverse
        factor, original = self._dynamic
        length = (positions + 1).clamp(min=original).float()[:, None]
        growth = factor * length / original - (factor - 1)
        base = self._theta * growth ** (self._head_dim / (self._head_dim - 2))
        return 1.0 / base**self._exponents


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates `x [T, heads, head_dim]`; first and second half of head_dim are the pairs' parts. `sin` has the sign of
    the first half turned, so that swapping the halves is all that is left. Where they are of fewer dimensions than x, the
    rest of x stays."""
    if (width := cos.shape[-1]) < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), -1)
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def _llama3(inverse: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, scaled)


def _yarn(
    inverse: torch.Tensor, rope: Mapping[str, Any], head_dim: int, max_position_embeddings: int
) -> tuple[torch.Tensor, float]:
    """Peng et al. 2023: interpolates low frequencies, keeps high ones, ramps between; scales attention."""
    theta = float(rope["rope_theta"])
    original = float(rope.get("original_max_position_embeddings") or max_position_embeddings)
    factor = float(rope.get("factor") or max_position_embeddings / original)

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    if rope.get("attention_factor") is not None:
        attention_factor = float(rope["attention_factor"])
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        attention_factor = magnitude(factor, rope["mscale"]) / magnitude(factor, rope["mscale_all_dim"])
    else:
        attention_factor = magnitude(factor)
    low = dimension_of(float(rope.get("beta_fast") or 32))
    high = dimension_of(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inverse / factor * ramp + inverse * (1 - ramp), attention_factor


def _longrope(
    theta: float, exponents: torch.Tensor, rope: Mapping[str, Any], max_position_embeddings: int, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """Long or short factors are chosen once, by whether the served length exceeds the original one: keys in the cache
    cannot be rotated again when a sequence grows past it."""
    original = int(rope.get("original_max_position_embeddings") or max_position_embeddings)
    long = max_model_len > original
    factors = torch.tensor(rope["long_factor" if long else "short_factor"], dtype=torch.float32)
    factor = float(rope.get("factor") or max_position_embeddings / original)
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0 / (factors * theta**exponents), float(attention_factor)
