"""Answers in one piece: the deltas of a call put together."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from services.gateway.generation import Delta
from services.gateway.logprobs import ShownToken, chat_logprobs, completion_logprobs
from services.gateway.parsing import Options
from services.gateway.replies import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    FinishedBy,
    Usage,
)
from services.gateway.sse import Operation
from services.gateway.tokenization import ModelTokenizer


@dataclass
class _Part:
    texts: list[str] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)
    finish_reason: FinishedBy = "length"


class Collector:
    def __init__(self, num_choices: int) -> None:
        self._parts = [_Part() for _ in range(num_choices)]

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            part = self._parts[delta.index]
            part.texts.append(delta.text)
            part.tokens.extend(delta.tokens)
            part.finish_reason = delta.finish_reason or part.finish_reason

    def body(
        self,
        operation: Operation,
        call_id: str,
        created: int,
        model: str,
        options: Options,
        tokenizer: ModelTokenizer,
        usage: Usage,
    ) -> bytes:
        tier = options.service_tier or msgspec.UNSET
        num_top = options.num_top_logprobs
        answer: ChatCompletion | Completion
        if operation == "chat":
            chat_choices = [
                ChatChoice(
                    index,
                    AssistantMessage("assistant", "".join(part.texts)),
                    None if num_top is None else chat_logprobs(tokenizer, part.tokens, num_top),
                    part.finish_reason,
                )
                for index, part in enumerate(self._parts)
            ]
            answer = ChatCompletion(call_id, "chat.completion", created, model, chat_choices, usage, tier)
        else:
            choices = [
                CompletionChoice(
                    index,
                    "".join(part.texts),
                    None if num_top is None else completion_logprobs(tokenizer, part.tokens, num_top),
                    part.finish_reason,
                )
                for index, part in enumerate(self._parts)
            ]
            answer = Completion(call_id, "text_completion", created, model, choices, usage, tier)
        return msgspec.json.encode(answer)
