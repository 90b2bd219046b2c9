"""Writes a message while it is generated: its content blocks from deltas, and their events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from services.gateway.anthropic.messages import MessageObject, MessageUsage, OutputBlock, StopReason
from services.gateway.http.errors import ApiError
from services.gateway.openai.conversations import arguments_object
from services.gateway.openai.replies import ToolCallChunk, Usage
from services.gateway.requests.answers import event_tag, on_one_line
from services.gateway.streams.generation import Delta, Generation

Event = tuple[str, dict[str, Any]]
_REASONS: dict[str, StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def message_usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


class MessageBuilder:
    """Builds the message of the only choice of a generation."""

    def __init__(self, message_id: str, model: str, generation: Generation) -> None:
        self._generation = generation
        self.message = MessageObject(id=message_id, model=model, content=[], usage=message_usage(generation.usage()))
        self._arguments = ""
        """Arguments of the call that is the last block."""
        self._is_open = False

    def take(self, delta: Delta) -> list[Event]:
        events: list[Event] = []
        calls = list(delta.calls)
        # What is left of the open call was before the text, which was before the next call.
        while calls and calls[0].id is msgspec.UNSET:
            events += self._take_call(calls.pop(0))
        if delta.reasoning:
            events += self._take("thinking", delta.reasoning)
        if delta.text:
            events += self._take("text", delta.text)
        for chunk in calls:
            events += self._take_call(chunk)
        return events

    def _take(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if not (self._is_open and self.message.content[-1].type == kind):
            block = OutputBlock(type="text", text="")
            if kind == "thinking":
                block = OutputBlock(type="thinking", thinking="", signature="")
            events += self._open(block)
        block = self.message.content[-1]
        setattr(block, kind, getattr(block, kind) + text)
        delta = {"type": f"{kind}_delta", kind: text}
        return [*events, ("content_block_delta", {"index": self._index, "delta": delta})]

    def _take_call(self, chunk: ToolCallChunk) -> list[Event]:
        events: list[Event] = []
        if chunk.id is not msgspec.UNSET and chunk.function.name is not msgspec.UNSET:
            block = OutputBlock(type="tool_use", id=chunk.id, name=chunk.function.name, input={})
            events += self._open(block)
            self._arguments = ""
        if chunk.function.arguments:
            self._arguments += chunk.function.arguments
            delta = {"type": "input_json_delta", "partial_json": chunk.function.arguments}
            events.append(("content_block_delta", {"index": self._index, "delta": delta}))
        return events

    @property
    def _index(self) -> int:
        return len(self.message.content) - 1

    def _open(self, block: OutputBlock) -> list[Event]:
        events = self._close()
        self.message.content.append(block)
        self._is_open = True
        begun = msgspec.structs.replace(block)
        return [*events, ("content_block_start", {"index": self._index, "content_block": begun})]

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        block = self.message.content[-1]
        if block.type == "tool_use":
            block.input = arguments_object(self._arguments)
        return [("content_block_stop", {"index": self._index})]

    def finish(self) -> list[Event]:
        """After the last delta."""
        (choice,) = self._generation.choices
        events = self._close()
        self.message.stop_reason = _REASONS[choice.finish_reason or "length"]
        if choice.stopped_by is not None and self.message.stop_reason == "end_turn":
            self.message.stop_reason, self.message.stop_sequence = "stop_sequence", choice.stopped_by
        self.message.usage = message_usage(self._generation.usage())
        delta = {"stop_reason": self.message.stop_reason, "stop_sequence": self.message.stop_sequence}
        return [*events, ("message_delta", {"delta": delta, "usage": self.message.usage}), ("message_stop", {})]


class MessageWriter:
    """The events of a stream; as `answers.ChunkWriter`."""

    def __init__(self, builder: MessageBuilder, usage: Callable[[], Usage], num_seen: int | None = None) -> None:
        """`usage`: so far. `num_seen`: events that the client has, which are left out; events have ids then, numbered from
        0. None: the stream cannot be resumed."""
        self._builder = builder
        self._usage = usage
        self._num_seen = num_seen
        self._num_events = 0
        self._tag = event_tag(builder.message.id).encode()

    def chunks(self, deltas: list[Delta], usage: Usage | None) -> bytes:
        return self._begin() + self._encoded([event for delta in deltas for event in self._builder.take(delta)])

    def _begin(self) -> bytes:
        if self._num_events:
            return b""
        message = self._builder.message
        # None of its tokens is told of yet, however many there are: whoever resumes the stream reads the same.
        message.usage = msgspec.structs.replace(message_usage(self._usage()), output_tokens=0)
        return self._encoded([("message_start", {"message": message})])

    async def before_end(self, usage: Usage) -> None:
        pass

    def end(self, usage: Usage) -> bytes:
        return self._encoded(self._builder.finish())

    def error(self, error: ApiError) -> bytes:
        error.is_of_messages = True
        return b"event: error\ndata: " + on_one_line(error.body()) + b"\n\n"

    def keep_alive(self) -> bytes:
        return self._begin() + _encoded("ping", {})

    def _encoded(self, events: list[Event]) -> bytes:
        parts = []
        for event in events:
            if self._num_seen is None:
                parts.append(_encoded(*event))
            elif self._num_events >= self._num_seen:
                parts.append(b"id: %d%b\n" % (self._num_events, self._tag) + _encoded(*event))
            self._num_events += 1
        return b"".join(parts)


def _encoded(kind: str, fields: dict[str, Any]) -> bytes:
    data = msgspec.json.encode({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + on_one_line(data) + b"\n\n"
