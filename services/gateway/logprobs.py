"""Log-probabilities in the shapes of the two endpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.replies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    TopLogprob,
)
from services.gateway.tokenization import ModelTokenizer
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


def chat_logprobs(tokenizer: ModelTokenizer, tokens: Sequence[ShownToken], num_top: int) -> ChatLogprobs:
    content = []
    for shown in tokens:
        assert shown.logprob is not None, "prompts are no part of the text of a chat"
        top = [
            TopLogprob(tokenizer.token_text(i), _finite(logprob), list(tokenizer.token_bytes(i)))
            for i, logprob in zip(shown.logprob.top_ids[:num_top], shown.logprob.top_logprobs[:num_top], strict=True)
        ]
        own_bytes = list(tokenizer.token_bytes(shown.token_id))
        text = tokenizer.token_text(shown.token_id)
        content.append(ChatTokenLogprob(text, _finite(shown.logprob.logprob), own_bytes, top))
    return ChatLogprobs(content)


def completion_logprobs(tokenizer: ModelTokenizer, tokens: Sequence[ShownToken], num_top: int) -> CompletionLogprobs:
    """The most likely tokens of each position include the chosen one."""
    answer = CompletionLogprobs([], [], [], [])
    for shown in tokens:
        text, known = tokenizer.token_text(shown.token_id), shown.logprob
        answer.text_offset.append(shown.start)
        answer.tokens.append(text)
        if known is None:
            answer.token_logprobs.append(None)
            answer.top_logprobs.append(None)
            continue
        logprob = _finite(known.logprob)
        top = {
            tokenizer.token_text(i): _finite(value)
            for i, value in zip(known.top_ids[:num_top], known.top_logprobs[:num_top], strict=True)
        }
        top.setdefault(text, logprob)
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
