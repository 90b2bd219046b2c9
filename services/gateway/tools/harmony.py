"""Parser of gpt-oss' output (the harmony format): messages, each with a header that names its channel and recipient."""

from __future__ import annotations

import re
from collections.abc import Collection

from services.gateway.tools.call_reader import ArgumentsText
from services.gateway.tools.parsers import CallDelta, Parsed, ToolParser, parted

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
MARKS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
_ENDS = (END, CALL, RETURN, START, CHANNEL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.:-]+)")
_HEADS = (START, CHANNEL, MESSAGE, "assistant", "to=")


class HarmonyParser(ToolParser):
    """The prompt ends within the first header. Text of the channel `analysis`, and for tools that there are none of, is
    reasoning; for a function it is its arguments; all other is content. An output that begins with no header is content."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._is_in_header = True
        self._is_new = True
        """Nothing was read yet."""
        self._goes_to = "content"
        """Part that the message's text goes to: content, reasoning or call."""
        self._has_reasoning = False
        """Some was told of the present message."""
        self._before_reasoning = ""

    @property
    def is_in_call(self) -> bool:
        return not self._is_in_header and self._goes_to == "call"

    @property
    def is_reasoning(self) -> bool:
        return not self._is_in_header and self._goes_to == "reasoning"

    def _advance(self) -> bool:
        if not self._is_in_header:
            return self._read_text()
        if self._is_new:
            rest = self._rest.lstrip()
            if not rest or any(head.startswith(rest) and head != rest for head in _HEADS):
                return False
            self._is_new = False
            if not rest.startswith(_HEADS):
                self._is_in_header = False
                return True
        header, found, rest = self._rest.partition(MESSAGE)
        if not found:
            return False
        self._rest, self._is_in_header = rest, False
        self._begin_message(header.rpartition(START)[2])
        return True

    def _begin_message(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            self._goes_to = "call" if recipient[1] in self._names else "reasoning"
        else:
            self._goes_to = "reasoning" if channel is not None and channel[1] == "analysis" else "content"
        if self._goes_to == "call":
            assert recipient is not None
            self._tell(CallDelta(self.num_calls, recipient[1]))
            self.num_calls += 1
            self._arguments = ArgumentsText()
        elif self._goes_to == "reasoning" and self._has_reasoning:
            self._before_reasoning = "\n"

    def _read_text(self) -> bool:
        text, found, self._rest = parted(self._rest, _ENDS)
        self._pass_on(text)
        if found:
            if self._goes_to == "call":
                self._tell_arguments(self._arguments.end())
            self._goes_to, self._is_in_header = "content", True
            if found == CHANNEL:
                self._rest = found + self._rest
        return bool(found)

    def _pass_on(self, text: str) -> None:
        if self._goes_to == "content":
            self._say(text)
        elif self._goes_to == "call":
            self._tell_arguments(self._arguments.feed(text))
        elif text:
            self._parsed.reasoning += self._before_reasoning + text
            self._before_reasoning, self._has_reasoning = "", True

    def flush(self, is_cut: bool = False) -> Parsed:
        if self._is_in_header:
            self._rest = self._rest if self._is_new else ""
        elif self._goes_to != "content":
            if not is_cut and self._goes_to == "call":
                self._tell_arguments(self._arguments.feed(self._rest) + self._arguments.end())
            elif self._goes_to == "reasoning":
                self._pass_on(self._rest)
            self._rest = ""
        self._is_in_header = True
        return super().flush(is_cut)
