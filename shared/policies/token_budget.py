"""How many tokens one iteration may compute (prefill chunks and decodes together)."""

from __future__ import annotations

from abc import ABC, abstractmethod


class TokenBudgetPolicy(ABC):
    @abstractmethod
    def budget_tokens(self, model: str, num_decodes: int, now: float) -> int:
        """Tokens of the next iteration of `model`, at least 1; `num_decodes` online sequences are decoding."""


class FixedTokenBudget(TokenBudgetPolicy):
    """The same number always (Sarathi-style chunked prefill)."""

    def __init__(self, num_tokens: int) -> None:
        if num_tokens < 1:
            raise ValueError(f"token budget {num_tokens} must be at least 1")
        self._num_tokens = num_tokens

    def budget_tokens(self, model: str, num_decodes: int, now: float) -> int:
        return self._num_tokens
