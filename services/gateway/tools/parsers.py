"""Calls of tools in a model's output, found as its text comes, wherever it is cut: those that are JSON. `keyed` has those
in which each argument has marks of its own, `harmony` those of gpt-oss."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from services.gateway.tools.call_reader import ArgumentsText, CallReader, ValueReader


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of one call."""

    index: int
    name: str = ""
    """Name, in the first delta of a call."""
    arguments: str = ""
    id: str = ""
    """Id, in the first delta, where the model gives the call one."""


@dataclass(slots=True)
class Parsed:
    """What a piece of text brought."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    reasoning: str = ""


class ToolParser(ABC):
    """Parses one output. `feed` is called with each piece of its text and `flush` once at its end; every character is
    of a call, of the marks around it (so are brackets and commas too many before a mark), or content."""

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
        self._value: ValueReader | None = None
        """Reader of the arguments after a name that stands alone."""
        self._arguments = ArgumentsText()
        """Those."""
        self.num_calls = 0

    @property
    def is_in_call(self) -> bool:
        """The text so far ends within a call, or may do so."""
        return self._call is not None or self._value is not None

    @property
    def is_reasoning(self) -> bool:
        """The text so far ends within reasoning."""
        return False

    def feed(self, text: str) -> Parsed:
        self._rest += text
        while self._advance():
            pass
        return self._take()

    def flush(self, is_cut: bool = False) -> Parsed:
        """What is left is content, unless it is of a call. `is_cut`: the output was cut off, so what began as a call would
        have become one, and is left out."""
        if self._call is not None:
            if not self._is_begun and not (is_cut and self._is_call_begun()):
                self._say(self._call_text)
            self._call = None
        self._end_value()
        if not is_cut or len(self._rest) < LEAST_OF_MARK or not self._is_mark_begun():
            self._say(self._rest)
        self._rest = ""
        if not self.num_calls:
            self._parsed.content += self._space
        return self._take()

    @abstractmethod
    def _advance(self) -> bool:
        """Takes some of `_rest`; False: nothing can be before more text comes."""

    def _is_call_begun(self) -> bool:
        """Whether `_call`, which has no name yet, would have been one."""
        return True

    def _is_mark_begun(self) -> bool:
        """Whether `_rest` begins a call, or the mark of one."""
        return True

    # ------------------------------------------------------------------------------------------ what they share

    def _take(self) -> Parsed:
        taken, self._parsed = self._parsed, Parsed()
        return taken

    def _say(self, text: str) -> None:
        if kept := text.rstrip():
            self._parsed.content += self._space + kept
            self._space = ""
        self._space += text[len(kept) :]

    def _say_until(self, *marks: str) -> str:
        """The mark that was found first, empty if none was; what is before it is content, what is after it is left."""
        before, found, self._rest = parted(self._rest, marks)
        self._say(before)
        return found

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

    def _begin_named(self, name: str, call_id: str = "") -> None:
        """A call whose arguments, an object, are what follows."""
        self._tell(CallDelta(self.num_calls, name, id=call_id))
        self.num_calls += 1
        self._value, self._arguments = ValueReader(), ArgumentsText()

    def _read_value(self) -> bool:
        """Whether the arguments after a name have ended."""
        assert self._value is not None
        count = self._value.feed(self._rest)
        self._tell_arguments(self._arguments.feed(self._rest[:count]))
        self._rest = self._rest[count:]
        if self._value.is_done:
            self._tell_arguments(self._arguments.end())
            self._value = None
        return self._value is None

    def _end_value(self) -> None:
        self._value = None

    def _tell_arguments(self, text: str) -> None:
        if text:
            self._tell(CallDelta(self.num_calls - 1, arguments=text))


class TaggedParser(ToolParser):
    """`<tool_call>{...}</tool_call>`, any number of times, among other text (Hermes, Qwen)."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    BETWEEN = " \t\r\n,}]"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._is_closing = False
        self._is_marked = False
        """A mark of its own precedes the object that is read, which is a call of whatever name."""
        self._behind = ""
        """Brackets and white space behind a call; content if no mark or call follows."""

    def _advance(self) -> bool:
        if self._is_closing:
            return self._close()
        if self._call is None:
            self._is_marked = bool(self._say_until(self.OPEN))
            if self._is_marked:
                self._begin_call(self.OPEN)
            return self._is_marked
        ended = self._read_call(is_certain=self._is_marked)
        self._is_closing = ended is True
        return ended is not None

    def _close(self) -> bool:
        """Takes the closing mark, and brackets too many before it. A call of a known tool may come without marks of its
        own."""
        rest = self._rest.lstrip(self.BETWEEN)
        self._behind += self._rest[: len(self._rest) - len(rest)]
        self._rest = rest
        if any(len(rest) < len(mark) and mark.startswith(rest) for mark in (self.OPEN, self.CLOSE)):
            return False
        if rest.startswith("{"):
            self._begin_call(self._behind)
            self._is_marked = False
        elif not rest.startswith((self.OPEN, self.CLOSE)):
            self._say(self._behind)
        self._rest = rest.removeprefix(self.CLOSE)
        self._is_closing, self._behind = False, ""
        return True

    def _is_call_begun(self) -> bool:
        return self._is_marked or _begins_call(self._call_text.lstrip(self.BETWEEN), self._names)

    def flush(self, is_cut: bool = False) -> Parsed:
        if self._is_closing:
            self._rest = ""  # a part of the mark
        return super().flush(is_cut)


class BareParser(ToolParser):
    """Calls of known tools and nothing else: `{...}`, `[{...}, {...}]` or `{...}; {...}`, after a mark or in a fenced block
    perhaps, or `<function=name>{...}</function>` (Llama 3, and models that are told of tools in plain words). What begins
    otherwise is content."""

    FENCE = "```"
    FENCED = re.compile(r"```(?:json|tool_calls?)?[ \t]*\n")
    NAMED = re.compile(r"<function=([^<>\n]+)>\s*")
    NAMED_BEGIN, NAMED_END = "<function=", "</function>"

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
        if self._value is not None:
            return self._read_value()
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
        elif self._mark and rest.startswith(self._mark):
            self._rest = rest[len(self._mark) :]
        elif self.num_calls and rest.startswith((self.FENCE, self.NAMED_END)):
            self._rest = rest[len(self.FENCE if rest[0] == "`" else self.NAMED_END) :]
        elif fence := self.FENCED.match(rest):
            self._before += fence[0]
            self._rest = rest[fence.end() :]
        elif (named := self.NAMED.match(rest)) and named[1] in self._names:
            if named.end() == len(rest):
                return False  # white space, or arguments
            self._before, self._rest = "", rest[named.end() :]
            self._begin_named(named[1])
        elif self._may_go_on(rest):
            return False
        else:
            self._end_calls()
        return True

    def _may_go_on(self, rest: str) -> bool:
        """Whether `rest` may become one of the marks."""
        marks = [self._mark, self.FENCE, self.NAMED_BEGIN, *([self.NAMED_END] if self.num_calls else [])]
        if any(mark.startswith(rest) for mark in marks):
            return True
        if rest.startswith(self.NAMED_BEGIN):
            name = rest[len(self.NAMED_BEGIN) :]
            return any((one + ">").startswith(name) for one in self._names)
        line = rest.removeprefix(self.FENCE)
        return rest.startswith(self.FENCE) and any(one.startswith(line.rstrip(" \t")) for one in ("json", "tool_calls"))

    def _is_call_begun(self) -> bool:
        return bool(self.num_calls) or _begins_call(self._call_text, self._names)

    def _is_mark_begun(self) -> bool:
        return bool(self.num_calls)

    def _end_calls(self) -> None:
        self._is_text = True
        if not self.num_calls:
            self._say(self._before)
        self._before = ""

    def flush(self, is_cut: bool = False) -> Parsed:
        if self._call is None and self._value is None:
            self._end_calls()
        return super().flush(is_cut)


def _begins_call(text: str, names: Collection[str]) -> bool:
    """Whether JSON that was cut off tells that it would have become a call: its name is, or begins, that of a tool."""
    written = re.sub(r"\s", "", text).lstrip("[,;").replace("'", '"')
    heads = [f'{{"name":"{name}"' for name in names]
    return any(len(written) > len('{"nam') and (head.startswith(written) or written.startswith(head)) for head in heads)


class MarkedParser(ToolParser):
    """After `[TOOL_CALLS]` either `[{...}, {...}]`, or `name{...}` with a mark each, `[ARGS]` perhaps between (Mistral)."""

    MARK = "[TOOL_CALLS]"
    NAME = re.compile(r"[\w.:-]+")

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._is_marked = False

    def _advance(self) -> bool:
        if self._value is not None:
            return self._read_value()
        if self._call is not None:
            return self._read_call(is_certain=True) is not None
        if not self._is_marked:
            self._is_marked = bool(self._say_until(self.MARK))
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
            return self._begin_after_name()
        return True

    def _begin_after_name(self) -> bool:
        before, found, arguments = self._rest.partition("{")
        if not found:
            return False
        name = before.partition("[")[0].strip()
        if self.NAME.fullmatch(name):
            self._rest = found + arguments
            self._begin_named(name)
        else:
            self._say(before + found)
            self._rest = arguments
            self._is_marked = False
        return True


class SectionParser(ToolParser):
    """Calls in a section, each with marks before its name and its arguments: Kimi K2's and DeepSeek's."""

    def __init__(
        self,
        names: Collection[str],
        *,
        sections: Sequence[str],
        call: tuple[str, str],
        head: str,
        end: str,
    ) -> None:
        """`sections`: the marks around all calls, a beginning and an end. `call`: before a call, and within its head.
        `head`: a regular expression of what is between the first of these and the arguments, with groups `name` and
        perhaps `id`. `end`: the mark after a call."""
        super().__init__(names)
        self._section, self._section_end = sections
        self._begin, self._middle = call
        self._head = re.compile(head, re.DOTALL)
        self._end = end
        self._is_within = False
        """The section, behind a call's mark."""
        self._is_after = False
        """The arguments of a call."""
        self._is_between = False
        """Calls, or behind the last."""

    @property
    def is_in_call(self) -> bool:
        return self._is_within or super().is_in_call

    def _advance(self) -> bool:
        if self._value is not None:
            self._is_after = self._read_value()
            return self._is_after
        if self._is_after:
            _, found, self._rest = parted(self._rest, (self._end, self._begin, self._section_end))
            self._is_after = not found
            self._is_within = found == self._begin
            self._is_between = found == self._end
            return bool(found)
        if not self._is_within:
            if self._is_between and not self._skip_between():
                return False
            found = self._say_until(self._section, self._begin, self._section_end)
            self._is_within = found == self._begin
            return bool(found)
        return self._read_head()

    def _skip_between(self) -> bool:
        """Leaves white space out where another mark follows it; False: that is not known yet."""
        rest = self._rest.lstrip()
        marks = (self._begin, self._section_end)
        if rest.startswith(marks):
            self._rest = rest
        elif any(mark.startswith(rest) for mark in marks):
            return False
        self._is_between = False
        return True

    def _read_head(self) -> bool:
        begun = self._rest.find(self._middle)
        brace, over = self._rest.find("{", begun) if begun >= 0 else -1, self._rest.find(self._end)
        if brace < 0 and over < 0:
            return False
        has_object = brace >= 0 and not 0 <= over < brace
        length = brace if has_object else over
        head, self._rest = self._rest[:length], self._rest[length:]
        self._is_within = False
        if (match := self._head.match(head)) is None:
            self._say(self._begin + head)
            return True
        self._begin_named(match["name"].strip(), match.groupdict().get("id") or "")
        if not has_object:
            written = self._arguments.feed(head[match.end() :].strip(" \n`"))
            self._tell_arguments(written + self._arguments.end())
            self._value, self._is_after = None, True
        return True

    def flush(self, is_cut: bool = False) -> Parsed:
        if self._is_after:
            self._rest = ""  # before the mark of the end
        elif self._is_within:
            self._rest = "" if is_cut else self._begin + self._rest
        return super().flush(is_cut)


LEAST_OF_MARK = 2
"""Characters of a mark that an output was cut off in: one alone may be content as well."""


def parted(text: str, marks: Sequence[str]) -> tuple[str, str, str]:
    """What is before the first of the marks, that mark, and what is after it. Where none is there the mark is empty, and
    what is after it may become the beginning of one."""
    found = [(place, -len(mark), mark) for mark in marks if (place := text.find(mark)) >= 0]
    if found:
        place, _, mark = min(found)
        return text[:place], mark, text[place + len(mark) :]
    held = max(_num_beginning(text, mark) for mark in marks)
    return text[: len(text) - held], "", text[len(text) - held :]


def _num_beginning(text: str, mark: str) -> int:
    """How many of the last characters of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
