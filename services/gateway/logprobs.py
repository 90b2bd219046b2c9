"""Log-probabilities in the shapes of the two endpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.replies import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from services.gateway.tokenization import ModelTokenizer
from shared.messages.requests import TokenLogprob

LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    token_id: int
    logprob: TokenLogprob
    start: int
    """Characters of the output before the token."""
    end: int


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def chat_logprobs(tokenizer: ModelTokenizer, tokens: Sequence[ShownToken], num_top: int) -> ChatLogprobs:
    content = []
    for shown in tokens:
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
        text, logprob = tokenizer.token_text(shown.token_id), _finite(shown.logprob.logprob)
        top = {
            tokenizer.token_text(i): _finite(value)
            for i, value in zip(shown.logprob.top_ids[:num_top], shown.logprob.top_logprobs[:num_top], strict=True)
        }
        top.setdefault(text, logprob)
        answer.text_offset.append(shown.start)
        answer.token_logprobs.append(logprob)
        answer.tokens.append(text)
        answer.top_logprobs.append(top)
    return answer
