"""Log-probabilities in the shapes of the two endpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.openai.replies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    TopLogprob,
)
from services.gateway.text.tokenization import ModelTokenizer
from shared.messages.requests import TokenLogprob

LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    token_id: int
    logprob: TokenLogprob | None
    """None: of a token of the prompt, it is not known."""
    start: int
    """Characters of the text before the token."""
    end: int


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


class TokenNames:
    """What tokens are called: by their text, or by their ids."""

    def __init__(self, tokenizer: ModelTokenizer, *, by_id: bool) -> None:
        self._tokenizer = tokenizer
        self._by_id = by_id

    def of(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._by_id else self._tokenizer.token_text(token_id)

    def distinct(self, token_id: int) -> str:
        """Another for each token whose bytes differ: those that are no text are spelled `bytes:\\xe2\\x80`, as OpenAI
        does."""
        name, spelled = self.of(token_id), self._tokenizer.token_bytes(token_id)
        if self._by_id or name.encode() == spelled:
            return name
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def chat_logprobs(
    tokenizer: ModelTokenizer, tokens: Sequence[ShownToken], num_top: int, *, by_id: bool = False
) -> ChatLogprobs:
    names = TokenNames(tokenizer, by_id=by_id)
    content = []
    for shown in tokens:
        assert shown.logprob is not None, "prompts are no part of the text of a chat"
        top = [
            TopLogprob(names.of(i), _finite(logprob), list(tokenizer.token_bytes(i)))
            for i, logprob in zip(shown.logprob.top_ids[:num_top], shown.logprob.top_logprobs[:num_top], strict=True)
        ]
        own_bytes = list(tokenizer.token_bytes(shown.token_id))
        content.append(ChatTokenLogprob(names.of(shown.token_id), _finite(shown.logprob.logprob), own_bytes, top))
    return ChatLogprobs(content)


def completion_logprobs(
    tokenizer: ModelTokenizer, tokens: Sequence[ShownToken], num_top: int, *, by_id: bool = False
) -> CompletionLogprobs:
    """The most likely tokens of each position include the chosen one. Of two of one name the more likely counts."""
    names = TokenNames(tokenizer, by_id=by_id)
    answer = CompletionLogprobs([], [], [], [])
    for shown in tokens:
        known = shown.logprob
        answer.text_offset.append(shown.start)
        answer.tokens.append(names.distinct(shown.token_id))
        if known is None:
            answer.token_logprobs.append(None)
            answer.top_logprobs.append(None)
            continue
        logprob = _finite(known.logprob)
        top: dict[str, float] = {}
        for i, value in zip(known.top_ids[:num_top], known.top_logprobs[:num_top], strict=True):
            top.setdefault(names.distinct(i), _finite(value))
        top.setdefault(names.distinct(shown.token_id), logprob)
        answer.token_logprobs.append(logprob)
        answer.top_logprobs.append(top)
    return answer


def prompt_logprobs(
    tokenizer: ModelTokenizer, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None], num_top: int
) -> list[dict[str, PromptLogprob] | None]:
    """vLLM's shape: of each token of the prompt, by token id, its own and the `num_top` most likely."""

    def shown(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(_finite(logprob), rank, tokenizer.token_text(token_id))

    answer: list[dict[str, PromptLogprob] | None] = []
    for token_id, known in zip(tokens, logprobs, strict=True):
        if known is None:
            answer.append(None)
            continue
        of_token = {str(token_id): shown(token_id, known.logprob, known.rank)}
        for rank, (i, value) in enumerate(zip(known.top_ids[:num_top], known.top_logprobs[:num_top], strict=True), 1):
            of_token.setdefault(str(i), shown(i, value, rank))
        answer.append(of_token)
    return answer
