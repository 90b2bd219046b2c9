"""A call's deltas as its answer: put together in one piece (`Collector`), or as server-sent events (`ChunkWriter`).

What is the same in all chunks of a call is encoded once; a chunk encodes its text only. Order of a stream: chunks with text
(the first of each choice carries the role), one with the finish_reason of each choice (of a chat without text), one with
the usage and no choices if asked for, `[DONE]`. A failure is an error object, and then the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import msgspec

from services.gateway.http.errors import ApiError, invalid
from services.gateway.openai.parsing import Options
from services.gateway.openai.replies import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    CustomCallChunk,
    CustomToolCall,
    FinishedBy,
    PromptLogprobs,
    ToolCall,
    ToolCallChunk,
    Usage,
)
from services.gateway.streams.generation import Delta, Seen
from services.gateway.text.logprobs import ShownToken, chat_logprobs, completion_logprobs
from services.gateway.text.tokenization import ModelTokenizer


@dataclass
class _Part:
    texts: list[str] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)
    finish_reason: FinishedBy = "length"
    calls: dict[int, ToolCall | CustomToolCall] = field(default_factory=dict)
    reasoning: list[str] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.reasoning.append(delta.reasoning)
        self.tokens.extend(delta.tokens)
        self.finish_reason = delta.finish_reason or self.finish_reason
        for chunk in delta.calls:
            if chunk.id is not msgspec.UNSET and chunk.function.name is not msgspec.UNSET:
                self.calls[chunk.index] = ToolCall(chunk.id, CalledFunction(chunk.function.name, ""))
            call = self.calls[chunk.index]
            assert isinstance(call, ToolCall)
            call.function.arguments += chunk.function.arguments
        for custom in delta.custom_calls:
            self.calls[custom.index] = CustomToolCall(custom.id, custom.custom)

    def message(self) -> AssistantMessage:
        text = "".join(self.texts)
        reasoning = "".join(self.reasoning) or msgspec.UNSET
        return AssistantMessage(
            "assistant",
            (text or None) if self.calls else text,
            tool_calls=[self.calls[index] for index in sorted(self.calls)] or msgspec.UNSET,
            reasoning_content=reasoning,
            reasoning=reasoning,
        )


class Collector:
    def __init__(self, num_choices: int) -> None:
        self._parts = [_Part() for _ in range(num_choices)]

    def add(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._parts[delta.index].add(delta)

    def body(
        self,
        operation: Operation,
        call_id: str,
        created: int,
        model: str,
        options: Options,
        tokenizer: ModelTokenizer,
        usage: Usage,
        prompts: Sequence[PromptLogprobs | msgspec.UnsetType],
    ) -> bytes:
        """`prompts`: log-probabilities of each choice's prompt, where they were asked for."""
        tier = options.service_tier or msgspec.UNSET
        num_top = options.num_top_logprobs
        answer: ChatCompletion | Completion
        if operation == "chat":
            chat_choices = [
                ChatChoice(
                    index,
                    part.message(),
                    None
                    if num_top is None
                    else chat_logprobs(tokenizer, part.tokens, num_top, by_id=options.names_token_ids),
                    part.finish_reason,
                )
                for index, part in enumerate(self._parts)
            ]
            answer = ChatCompletion(call_id, "chat.completion", created, model, chat_choices, usage, tier, prompts[0])
        else:
            choices = [
                CompletionChoice(
                    index,
                    "".join(part.texts),
                    None
                    if num_top is None
                    else completion_logprobs(tokenizer, part.tokens, num_top, by_id=options.names_token_ids),
                    part.finish_reason,
                    prompts[index],
                )
                for index, part in enumerate(self._parts)
            ]
            answer = Completion(call_id, "text_completion", created, model, choices, usage, tier)
        return msgspec.json.encode(answer)


Operation = Literal["chat", "text_completion", "embeddings", "rerank", "score"]

DONE = b"data: [DONE]\n\n"
_OBJECTS = {"chat": "chat.completion.chunk", "text_completion": "text_completion"}
_ENCODE = msgspec.json.Encoder().encode


class StreamWriter(Protocol):
    """How a generation becomes server-sent events."""

    def chunks(self, deltas: list[Delta], usage: Usage | None) -> bytes:
        """`usage` so far, if the client wants it in every chunk."""

    async def before_end(self, usage: Usage) -> None:
        """After the last delta, what takes time before the client may know of the end."""

    def end(self, usage: Usage) -> bytes: ...

    def error(self, error: ApiError) -> bytes: ...

    def keep_alive(self) -> bytes: ...


_LINE_ENDS = {end.encode(): json.dumps(end)[1:-1].encode() for end in "\x85\u2028\u2029"}


def on_one_line(encoded: bytes) -> bytes:
    """JSON in which what Unicode takes for the end of a line is escaped: many clients split streams of events and files
    of lines there."""
    if not encoded.isascii():
        for end, escaped in _LINE_ENDS.items():
            encoded = encoded.replace(end, escaped)
    return encoded


_POSITION = re.compile(r"[0-9]{1,7}e?(\.[0-9]{1,7}e?)*")


def event_tag(call_id: str) -> str:
    """What the ids of a call's events end with: events of two calls under one idempotency key are told apart by it."""
    return "-" + call_id[-6:]


def position_text(seen: Sequence[Seen]) -> str:
    """How many tokens of each choice came with the event and before it, and an e where that is the whole choice: `12`,
    `7.12e`."""
    return ".".join(f"{each.num_tokens}e" if each.is_over else str(each.num_tokens) for each in seen)


def seen_of(position: str, num_choices: int, param: str) -> list[Seen]:
    """The inverse of `position_text`; empty: nothing was seen. Raises `ApiError` 400."""
    if not position:
        return [Seen()] * num_choices
    parts = position.split(".")
    if not _POSITION.fullmatch(position) or len(parts) != num_choices:
        raise invalid(param, f"'{param}' must be the id of an event of this stream, which has {num_choices} choices.")
    return [Seen(int(part.rstrip("e")), part.endswith("e")) for part in parts]


class ChunkWriter:
    def __init__(
        self,
        operation: Operation,
        call_id: str,
        created: int,
        model: str,
        options: Options,
        tokenizer: ModelTokenizer,
        seen: Sequence[Seen] | None = None,
    ) -> None:
        """`seen`: how far the client has each choice; events have ids then, from which they may be resumed. None: not."""
        self._seen = None if seen is None else list(seen)
        self._tag = event_tag(call_id)
        head = {"id": call_id, "object": _OBJECTS[operation], "created": created, "model": model}
        if options.service_tier is not None:
            head["service_tier"] = options.service_tier
        self._head = b"data: " + _ENCODE(head)[:-1] + b',"choices":['
        self._is_chat = operation == "chat"
        self._options = options
        self._tokenizer = tokenizer
        self._end = b'],"usage":null}\n\n' if options.includes_usage else b"]}\n\n"
        self._before_text: dict[int, bytes] = {}
        """By choice: what most of its chunks begin with."""
        self._after_text = (b"}" if self._is_chat else b"") + b',"logprobs":null,"finish_reason":null}'

    def chunks(self, deltas: list[Delta], usage: Usage | None) -> bytes:
        """`usage` so far, if the client wants it in every chunk."""
        end = self._end if usage is None else b'],"usage":' + _ENCODE(usage) + b"}\n\n"
        parts: list[bytes] = []
        for delta in deltas:
            is_plain = not (delta.is_first or delta.tokens or delta.calls or delta.custom_calls or delta.reasoning)
            if delta.finish_reason is None and is_plain:
                if delta.text:
                    self._note(delta)
                    parts += self._with_id((self._before(delta.index), _ENCODE(delta.text), self._after_text), end)
                continue
            if self._is_chat and delta.finish_reason is not None and not (is_plain and not delta.text):
                # Some clients take nothing from the chunk that says why a chat has ended. Who has this one, and not the
                # next, has a token more than there are: the end is all that it lacks.
                self._note(replace(delta, finish_reason=None, num_tokens=delta.num_tokens + 1))
                parts += self._with_id((self._head, self._choice(replace(delta, finish_reason=None))), end)
                delta = Delta(delta.index, "", False, delta.finish_reason, num_tokens=delta.num_tokens)
            self._note(delta)
            parts += self._with_id((self._head, self._choice(delta)), end)
        return on_one_line(b"".join(parts))

    def _note(self, delta: Delta) -> None:
        if self._seen is not None:
            self._seen[delta.index] = Seen(delta.num_tokens, delta.finish_reason is not None)

    def _with_id(self, chunk: tuple[bytes, ...], end: bytes) -> tuple[bytes, ...]:
        if self._seen is None:
            return *chunk, end
        event_id = (position_text(self._seen) + self._tag).encode()
        return b"id: " + event_id + b"\n", *chunk, b'],"event_id":"' + event_id + b'"', end[1:]

    def _before(self, index: int) -> bytes:
        if (found := self._before_text.get(index)) is None:
            text = b'"delta":{"content":' if self._is_chat else b'"text":'
            found = self._before_text[index] = self._head + b'{"index":%d,' % index + text
        return found

    def _choice(self, delta: Delta) -> bytes:
        finish = b"null" if delta.finish_reason is None else b'"' + delta.finish_reason.encode() + b'"'
        index = str(delta.index).encode()
        if not self._is_chat:
            return b'{"index":%b,"text":%b,"logprobs":%b,"finish_reason":%b}' % (
                index,
                _ENCODE(delta.text),
                self._logprobs(delta),
                finish,
            )
        fields: dict[str, object] = {"role": "assistant"} if delta.is_first else {}
        if delta.reasoning:
            fields |= {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
        calls: list[ToolCallChunk | CustomCallChunk] = [*delta.calls, *delta.custom_calls]
        calls.sort(key=lambda call: call.index)
        if delta.text or delta.is_first:
            fields["content"] = delta.text if delta.text or not (calls or delta.reasoning) else None
        if calls:
            fields["tool_calls"] = calls
        content = _ENCODE(fields)
        return b'{"index":%b,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (
            index,
            content,
            self._logprobs(delta),
            finish,
        )

    def _logprobs(self, delta: Delta) -> bytes:
        num_top = self._options.num_top_logprobs
        if num_top is None or not delta.tokens:
            return b"null"
        by_id = self._options.names_token_ids
        if self._is_chat:
            return _ENCODE(chat_logprobs(self._tokenizer, delta.tokens, num_top, by_id=by_id))
        return _ENCODE(completion_logprobs(self._tokenizer, delta.tokens, num_top, by_id=by_id))

    async def before_end(self, usage: Usage) -> None:
        pass

    def end(self, usage: Usage) -> bytes:
        if not self._options.includes_usage:
            return DONE
        return self._head + b'],"usage":' + _ENCODE(usage) + b"}\n\n" + DONE

    def error(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def keep_alive(self) -> bytes:
        """A chunk without choices and usage: clients of benchmarks skip it, where a comment makes some lose events."""
        return self._head + b"]}\n\n"
