"""The calls in one output, as its answer tells of them."""

from __future__ import annotations

from services.gateway.replies import FunctionChunk, ToolCallChunk
from services.gateway.tools.formats import ToolFormat
from services.gateway.tools.parsers import CallDelta
from services.gateway.tools.use import ToolUse


class CallWatch:
    def __init__(self, spelled: ToolFormat, use: ToolUse, output_id: str) -> None:
        """`output_id`: as no other output has; ids of calls are made of it."""
        self._output_id = output_id
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
        return content, [self._chunk(call) for call in calls]

    def _chunk(self, call: CallDelta) -> ToolCallChunk:
        if not call.name:
            return ToolCallChunk(call.index, FunctionChunk(call.arguments))
        call_id = self._new_id(f"{self._output_id}/{call.index}")
        return ToolCallChunk(call.index, FunctionChunk(call.arguments, call.name), call_id, "function")
