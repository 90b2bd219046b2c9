"""The calls in one output, as its answer tells of them."""

from __future__ import annotations

from collections.abc import Iterable

from services.gateway.replies import FunctionChunk, ToolCallChunk
from services.gateway.tools.formats import ToolFormat
from services.gateway.tools.parsers import CallDelta
from services.gateway.tools.use import ToolUse


class CallWatch:
    def __init__(self, spelled: ToolFormat, use: ToolUse) -> None:
        self._parser = spelled.parser(use.names)
        self._new_id = spelled.new_id
        self._max_calls = None if use.is_parallel else 1

    @property
    def has_calls(self) -> bool:
        return self._parser.num_calls > 0

    def take(self, text: str, *, is_over: bool) -> tuple[str, list[ToolCallChunk]]:
        """What of the output's text is content, and what is new of its calls."""
        parsed = self._parser.feed(text)
        content, calls = parsed.content, parsed.calls
        if is_over:
            rest = self._parser.flush()
            content, calls = content + rest.content, calls + rest.calls
        if self._max_calls is not None:
            calls = [call for call in calls if call.index < self._max_calls]
        return content, [self._chunk(call) for call in one_per_call(calls)]

    def _chunk(self, call: CallDelta) -> ToolCallChunk:
        if not call.name:
            return ToolCallChunk(call.index, FunctionChunk(call.arguments))
        return ToolCallChunk(call.index, FunctionChunk(call.arguments, call.name), self._new_id(), "function")


def one_per_call(deltas: Iterable[CallDelta]) -> list[CallDelta]:
    """The deltas with those of one call put together. Clients take the entries of a chunk's `tool_calls` for different
    calls, or overwrite one by the next of its index."""
    joined: dict[int, CallDelta] = {}
    for delta in deltas:
        before = joined.get(delta.index, CallDelta(delta.index))
        joined[delta.index] = CallDelta(delta.index, before.name + delta.name, before.arguments + delta.arguments)
    return list(joined.values())
