"""Calls of tools in a model's output, found as its text comes, wherever it is cut."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field

from services.gateway.tools.call_reader import CallReader, ValueReader


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of one call."""

    index: int
    name: str = ""
    """With the first delta of a call."""
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What a piece of text brought."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ToolParser(ABC):
    """Of one output. `feed` is called with each piece of its text and `flush` once at its end; every character is of a call,
    of the marks around it, or content."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: of the tools that there are."""
        self._names = names
        self._rest = ""
        """Text that is not decided about."""
        self._parsed = Parsed()
        self._space = ""
        """White space that is content where other content follows."""
        self._call: CallReader | None = None
        self._call_text = ""
        self._is_begun = False
        """The call's name is known and was told."""
        self.num_calls = 0

    def feed(self, text: str) -> Parsed:
        self._rest += text
        while self._advance():
            pass
        return self._take()

    def flush(self) -> Parsed:
        """What is left is content, unless it is of a call."""
        if self._call is not None:
            if not self._is_begun:
                self._say(self._call_text)
            self._call = None
        self._say(self._rest)
        self._rest = ""
        if not self.num_calls:
            self._parsed.content += self._space
        return self._take()

    @abstractmethod
    def _advance(self) -> bool:
        """Takes some of `_rest`; False: nothing can be before more text comes."""

    # ------------------------------------------------------------------------------------------ what they share

    def _take(self) -> Parsed:
        taken, self._parsed = self._parsed, Parsed()
        return taken

    def _say(self, text: str) -> None:
        if kept := text.rstrip():
            self._parsed.content += self._space + kept
            self._space = ""
        self._space += text[len(kept) :]

    def _say_until(self, mark: str) -> bool:
        """Whether the mark was found; what is before it is content, what is after it is left."""
        before, found, after = self._rest.partition(mark)
        if not found:
            held = _num_beginning(self._rest, mark)
            before, after = self._rest[: len(self._rest) - held], self._rest[len(self._rest) - held :]
        self._say(before)
        self._rest = after
        return bool(found)

    def _begin_call(self, marks: str = "") -> None:
        """`marks`: what was taken before it, content if it is no call."""
        self._call, self._call_text, self._is_begun = CallReader(), marks, False

    def _read_call(self, *, is_certain: bool) -> bool | None:
        """Whether the text was a call to its end; None: more is needed. `is_certain`: a call of any name is one."""
        call = self._call
        assert call is not None
        count = call.feed(self._rest)
        if not self._is_begun:
            self._call_text += self._rest[:count]
        self._rest = self._rest[count:]
        if not self._is_begun and call.name and (is_certain or call.name in self._names):
            self._is_begun = True
            self._tell(CallDelta(self.num_calls, call.name))
            self.num_calls += 1
        if self._is_begun and (arguments := call.take_arguments()):
            self._tell(CallDelta(self.num_calls - 1, arguments=arguments))
        if not call.is_done and not call.is_broken:
            return None
        self._call = None
        if not self._is_begun:
            self._say(self._call_text)
        return self._is_begun

    def _tell(self, delta: CallDelta) -> None:
        self._parsed.calls.append(delta)


class TaggedParser(ToolParser):
    """`<tool_call>{...}</tool_call>`, any number of times, among other text (Hermes, Qwen)."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._is_closing = False

    def _advance(self) -> bool:
        if self._is_closing:
            self._rest = self._rest.lstrip()
            if len(self._rest) < len(self.CLOSE) and self.CLOSE.startswith(self._rest):
                return False
            self._rest = self._rest.removeprefix(self.CLOSE)
            self._is_closing = False
            return True
        if self._call is None:
            if not self._say_until(self.OPEN):
                return False
            self._begin_call(self.OPEN)
            return True
        ended = self._read_call(is_certain=True)
        self._is_closing = ended is True
        return ended is not None

    def flush(self) -> Parsed:
        if self._is_closing:
            self._rest = ""  # a part of the mark
        return super().flush()


class BareParser(ToolParser):
    """Calls of known tools and nothing else: `{...}`, `[{...}, {...}]` or `{...}; {...}`, after a mark perhaps (Llama 3, and
    models that are told of tools in plain words). What begins otherwise is content."""

    def __init__(self, names: Collection[str], mark: str = "") -> None:
        super().__init__(names)
        self._mark = mark
        self._is_text = False
        self._before = ""
        """Between calls, or before the first; content if none follows."""

    def _advance(self) -> bool:
        if not self._rest:
            return False
        if self._is_text:
            self._say(self._rest)
            self._rest = ""
            return False
        if self._call is not None:
            ended = self._read_call(is_certain=False)
            self._is_text = ended is False
            return ended is not None
        rest = self._rest.lstrip(" \t\r\n[],;")
        if rest != self._rest:
            self._before += self._rest[: len(self._rest) - len(rest)]
            self._rest = rest
        elif rest[0] == "{":
            self._begin_call(self._before)
            self._before = ""
        elif self._mark and self._rest.startswith(self._mark):
            self._rest = self._rest[len(self._mark) :]
        elif self._mark.startswith(self._rest) and self._mark:
            return False
        else:
            self._end_calls()
        return True

    def _end_calls(self) -> None:
        self._is_text = True
        if not self.num_calls:
            self._say(self._before)
        self._before = ""

    def flush(self) -> Parsed:
        if self._call is None:
            self._end_calls()
        return super().flush()


class MarkedParser(ToolParser):
    """After `[TOOL_CALLS]` either `[{...}, {...}]`, or `name{...}` with a mark each, `[ARGS]` perhaps between (Mistral)."""

    MARK = "[TOOL_CALLS]"
    NAME = re.compile(r"[\w.:-]+")

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._is_marked = False
        self._value: ValueReader | None = None
        """Of the arguments after a name."""

    def _advance(self) -> bool:
        if self._value is not None:
            count = self._value.feed(self._rest)
            if count:
                self._tell(CallDelta(self.num_calls - 1, arguments=self._rest[:count]))
            self._rest = self._rest[count:]
            if self._value.is_done:
                self._value = None
                return True
            return False
        if self._call is not None:
            return self._read_call(is_certain=True) is not None
        if not self._is_marked:
            self._is_marked = self._say_until(self.MARK)
            return self._is_marked
        self._rest = self._rest.lstrip(" \t\r\n],")
        if self._rest.startswith(self.MARK):
            self._rest = self._rest[len(self.MARK) :]
        elif self.MARK.startswith(self._rest):
            return False
        elif self._rest[0] == "[":
            self._rest = self._rest[1:]
        elif self._rest[0] == "{":
            self._begin_call()
        else:
            return self._begin_named()
        return True

    def _begin_named(self) -> bool:
        before, found, arguments = self._rest.partition("{")
        if not found:
            return False
        name = before.partition("[")[0].strip()
        if self.NAME.fullmatch(name):
            self._tell(CallDelta(self.num_calls, name))
            self.num_calls += 1
            self._rest = found + arguments
            self._value = ValueReader()
        else:
            self._say(before + found)
            self._rest = arguments
            self._is_marked = False
        return True


def _num_beginning(text: str, mark: str) -> int:
    """How many of the last characters of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
