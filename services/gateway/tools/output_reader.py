"""Splits one output of a chat into reasoning, content and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from services.gateway.openai.conversations import custom_input
from services.gateway.openai.replies import CalledCustomTool, CustomCallChunk, FinishedBy, FunctionChunk, ToolCallChunk
from services.gateway.tools.formats import ToolFormat
from services.gateway.tools.parsers import CallDelta, Parsed, ToolParser
from services.gateway.tools.reasoning import ReasoningSplitter
from services.gateway.tools.use import ToolUse


@dataclass(slots=True)
class Told:
    """What is new of an output."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCallChunk] = field(default_factory=list)
    custom_calls: list[CustomCallChunk] = field(default_factory=list)


class OutputReader:
    """Is fed the text of each token, and tells what has come of it. Calls are looked for behind the reasoning alone."""

    def __init__(
        self,
        spelled: ToolFormat,
        use: ToolUse | None,
        splitter: ReasoningSplitter | None,
        output_id: str,
        *,
        shows_reasoning: bool = True,
    ) -> None:
        """`use`: None where the model was told of no tools; calls are content then. `splitter`: None where it is not to be
        parted. `output_id`: as no other output has; ids of calls are made of it. `shows_reasoning`: it is told of, and not
        left out."""
        self._parser: ToolParser | None = None
        if use is not None or spelled.has_reasoning:
            self._parser = spelled.parser({} if use is None else use.schemas)
        self._use = use
        self._splitter = splitter
        self._shows_reasoning = shows_reasoning
        self._new_id = spelled.new_id
        self._output_id = output_id
        self._max_calls = None if use is None or use.is_parallel else 1
        self._parsed = Parsed()
        self._arguments: dict[int, str] = {}
        """Arguments of each call so far."""
        self._custom_names = frozenset() if use is None else use.custom_names
        self._custom: dict[int, tuple[str, str]] = {}
        """Calls of custom tools that are not told of yet: id and name."""
        self._held = ""
        """Content of an output that has to be calls."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""
        is_within = self._splitter is not None and self._splitter.is_reasoning
        return is_within or (self._parser is not None and self._parser.is_reasoning)

    @property
    def is_in_call(self) -> bool:
        """Whether the text so far ends within a call, where stop strings do not count."""
        is_only_calls = self._use is not None and self._use.is_required
        return is_only_calls or (self._parser is not None and self._parser.is_in_call)

    def feed(self, text: str) -> None:
        if self._splitter is None:
            self._parse(text)
            return
        reasoning, answer = self._splitter.feed(text)
        self._parsed.reasoning += reasoning
        if answer:
            self._parse(answer)

    def _parse(self, text: str) -> None:
        if self._parser is None:
            self._parsed.content += text
        else:
            self._add(self._parser.feed(text))

    def _add(self, parsed: Parsed) -> None:
        self._parsed.reasoning += parsed.reasoning
        self._parsed.content += parsed.content
        self._parsed.calls += parsed.calls

    def take(self) -> Told:
        """What has come since this was asked last."""
        parsed, self._parsed = self._parsed, Parsed()
        calls = (
            parsed.calls if self._max_calls is None else [one for one in parsed.calls if one.index < self._max_calls]
        )
        chunks = []
        for call in one_per_call(calls):
            self._arguments[call.index] = self._arguments.get(call.index, "") + call.arguments
            chunk = self._chunk(call)
            if chunk.id is not msgspec.UNSET and call.name in self._custom_names:
                self._custom[call.index] = chunk.id, call.name
            elif call.index not in self._custom:
                chunks.append(chunk)
        if self._use is not None and self._use.is_required:
            self._held, parsed.content = self._held + parsed.content, ""
        whole = [index for index in self._custom if index < max(self._arguments)]
        custom = [self._custom_call(index) for index in whole]
        return Told(parsed.reasoning if self._shows_reasoning else "", parsed.content, chunks, custom)

    def _custom_call(self, index: int) -> CustomCallChunk:
        call_id, name = self._custom.pop(index)
        return CustomCallChunk(index, call_id, "custom", CalledCustomTool(name, custom_input(self._arguments[index])))

    def end(self, finished_by: FinishedBy) -> tuple[Told, FinishedBy]:
        """What is left, and why the output ended: by calls only where the arguments of each are a JSON object."""
        is_cut = finished_by == "length"
        if self._splitter is not None:
            reasoning, answer = self._splitter.flush()
            self._parsed.reasoning += reasoning
            if answer:
                self._parse(answer)
        if self._parser is not None:
            self._add(self._parser.flush(is_cut))
        told = self.take()
        # One that is cut off is no call: nobody could tell that its text is not whole.
        told.custom_calls += [
            self._custom_call(i) for i in [*self._custom] if not is_cut or _is_object(self._arguments[i])
        ]
        if not self._arguments:
            told.content += "" if is_cut else self._held
        elif finished_by == "stop" and all(map(_is_object, self._arguments.values())):
            finished_by = "tool_calls"
        return told, finished_by

    def _chunk(self, call: CallDelta) -> ToolCallChunk:
        if not call.name:
            return ToolCallChunk(call.index, FunctionChunk(call.arguments))
        call_id = call.id or self._new_id(f"{self._output_id}/{call.index}")
        return ToolCallChunk(call.index, FunctionChunk(call.arguments, call.name), call_id, "function")


def one_per_call(deltas: Iterable[CallDelta]) -> list[CallDelta]:
    """The deltas with those of one call put together. Clients take the entries of a chunk's `tool_calls` for different
    calls, or overwrite one by the next of its index."""
    joined: dict[int, CallDelta] = {}
    for delta in deltas:
        before = joined.get(delta.index, CallDelta(delta.index))
        name, arguments = before.name + delta.name, before.arguments + delta.arguments
        joined[delta.index] = CallDelta(delta.index, name, arguments, before.id or delta.id)
    return list(joined.values())


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False
