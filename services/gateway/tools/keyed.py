"""Calls in which each argument stands between marks of its own, as plain text that its schema gives a type: Qwen3-Coder's,
GLM's, MiniMax's, Seed-OSS's and DeepSeek V3.2's."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.openai.json_schemas.values import kind_of, types_of
from services.gateway.openai.schemas import is_nested_deep
from services.gateway.tools.call_reader import ArgumentsObject
from services.gateway.tools.parsers import CallDelta, Parsed, ToolParser, parted


@dataclass(frozen=True, kw_only=True)
class KeyedMarks:
    """Marks of a call, between any two of which white space may stand."""

    begin: str
    """Before the calls."""
    end: str
    name_begin: str = ""
    name_end: tuple[str, ...]
    """The first is how it is spelled; one that is the beginning of an argument, or the end, is left."""
    key_begin: str
    key_end: str
    value_begin: str = ""
    value_end: str
    call_end: str = ""
    """Empty: it is `end`."""
    after_name: str = "\n"
    """How that is spelled which comes after `name_end`."""
    key_attribute: str = ""
    """Between the key and `key_end`, before a true or false: whether the value is a text. Empty: nothing says so."""
    has_value_on_lines: bool = False
    """It is spelled between two line breaks."""

    @property
    def around_value(self) -> tuple[str, str]:
        """How that is spelled which comes between a key and its value, and what comes after it."""
        space = "\n" if self.has_value_on_lines else ""
        between = "\n" + self.value_begin if self.value_begin else ""
        return self.key_end + between + space, space + self.value_end + "\n"

    def after_key(self, *, is_text: bool) -> str:
        """How the attribute is spelled."""
        return f"{self.key_attribute}{str(is_text).lower()}" if self.key_attribute else ""


class KeyedParser(ToolParser):
    """Passes an argument on when it is whole. A value without its end ends where, on a line of its own, the next argument
    begins or the call ends."""

    def __init__(self, names: Collection[str], marks: KeyedMarks) -> None:
        """`names`: with the schema of each tool's arguments, where it is a mapping."""
        super().__init__(names)
        self._marks = marks
        self._schemas: Mapping[str, Any] = names if isinstance(names, Mapping) else {}
        self._name = ""
        self._key: str | None = None
        self._is_text: bool | None = None
        """What the argument's attribute says of its value."""
        self._told = ArgumentsObject()
        self._opened: str | None = ""
        """What was taken before the name that is read, content if it is none; None: behind another call."""
        self._is_within = False
        """The marks around calls."""
        self._is_calling = False
        """Behind a call's name."""

    @property
    def is_in_call(self) -> bool:
        return self._is_within

    def _advance(self) -> bool:
        if not self._is_within:
            return self._find_call()
        if not self._is_calling:
            return self._read_name()
        return self._read_key() if self._key is None else self._read_value_of(self._key)

    def _find_call(self) -> bool:
        """Some models leave the outer mark out."""
        marks = self._marks
        named = (marks.name_begin,) if marks.name_begin else ()
        found = self._say_until(marks.begin, *named, *((marks.end,) if self.num_calls else ()))
        self._opened = found
        if found == marks.name_begin != "":
            self._opened, self._rest = "", found + self._rest
        self._is_within = bool(found) and found != marks.end
        return bool(found)

    def _read_name(self) -> bool:
        marks, rest = self._marks, self._rest.lstrip()
        if self._opened is None and rest.startswith(marks.end):
            self._rest, self._is_within = rest[len(marks.end) :], False
            return True
        if self._opened is None and marks.end.startswith(rest):
            return False
        if not rest.startswith(marks.name_begin):
            return False if marks.name_begin.startswith(rest) else self._refuse("")
        name, found, after = parted(rest[len(marks.name_begin) :], marks.name_end)
        if not found and _NAME_BEGUN.fullmatch(name):
            return False
        name = name.strip()
        if not found or not _NAME.fullmatch(name):
            return self._refuse(marks.name_begin)
        self._rest = after if found not in (marks.key_begin, marks.end) else found + after
        self._name, self._told, self._is_calling = name, ArgumentsObject(), True
        self._tell(CallDelta(self.num_calls, name))
        self.num_calls += 1
        return True

    def _refuse(self, more: str) -> bool:
        """It is no call: what was taken before it, and `more` marks, are content."""
        before, mark, after = self._rest.partition(more) if more else ("", "", self._rest)
        self._say((self._opened or "") + before + mark)
        self._rest, self._is_within = after, False
        return True

    def _read_key(self) -> bool:
        marks, rest = self._marks, self._rest.lstrip()
        call_end = marks.call_end or marks.end
        if rest.startswith(marks.key_begin):
            key, found, after = parted(rest[len(marks.key_begin) :], (marks.key_end,))
            if found and marks.value_begin:
                after = after.lstrip()
                if not after.startswith(marks.value_begin):
                    found = "" if marks.value_begin.startswith(after) else found
                after = after.removeprefix(marks.value_begin)
            if not found:
                return False
            self._is_text = None
            if marks.key_attribute:
                key, told, says = key.partition(marks.key_attribute)
                self._is_text = says == "true" if told else None
            self._key, self._rest = key.strip(), after
            return True
        if rest.startswith((call_end, marks.end)):
            self._rest = rest[len(call_end) :] if rest.startswith(call_end) else rest
            self._end_call(is_last=not marks.call_end)
            return True
        if any(mark.startswith(rest) for mark in (marks.key_begin, call_end, marks.end)):
            return False
        self._rest = rest[1:]  # what is between arguments belongs to none
        return True

    def _read_value_of(self, key: str) -> bool:
        marks = self._marks
        others = ("\n" + marks.key_begin, "\n" + marks.call_end) if marks.call_end else ()
        value, found, after = parted(self._rest, (marks.value_end, *others))
        if not found:
            return False
        self._tell_value(key, value, found)
        self._key = None
        self._rest = after if found == marks.value_end else found + after
        return True

    def _tell_value(self, key: str, text: str, end: str = "") -> None:
        """`end`: the mark behind it."""
        value: Any = text
        if not self._is_text:
            value = typed(self._without_line_breaks(text, end), self._schemas.get(self._name), key)
        self._tell_arguments(self._told.put(key, value))

    def _without_line_breaks(self, text: str, end: str) -> str:
        """The value's own text. A line break before it belongs to the marks; one behind it does where one is before it too,
        or always is: else it is the last of a text, of a file perhaps. `end` may have taken that one."""
        is_end_taken, is_on_lines = end.startswith("\n"), self._marks.has_value_on_lines
        if text == "\n" and not is_end_taken and not is_on_lines:
            return text
        own = text.removeprefix("\n")
        if is_end_taken or (own == text and not is_on_lines):
            return own
        return own.removesuffix("\n")

    def _end_call(self, *, is_last: bool) -> None:
        self._tell_arguments(self._told.end())
        self._is_calling, self._is_within, self._opened = False, not is_last, None

    def flush(self, is_cut: bool = False) -> Parsed:
        if self._is_calling and not is_cut:  # its end is missing
            if self._key is not None:
                self._tell_value(self._key, self._rest)
            self._end_call(is_last=True)
            self._rest = ""
        elif self._is_calling or (self._is_within and (is_cut or self._opened is None)):
            self._rest = ""
        elif self._is_within:
            self._refuse("")
        return super().flush(is_cut)


_NAME = re.compile(r"[\w.:-]+")
_NAME_BEGUN = re.compile(r"\s*[\w.:-]*\s*")


def typed(text: str, schema: Any, key: str) -> Any:
    """The value that the text of the argument `key` stands for, by the schema of all arguments: a text where that may be
    one, else JSON, or the text if it is none."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    own = properties.get(key) if isinstance(properties, dict) else None
    types = types_of(own, schema) if own is not None else set()
    if types == {"string"}:
        return text
    if not types.difference({"string", "null"}) and types:
        return None if text.strip() == "null" else text
    value = literal(text)
    if is_nested_deep(value) or value != value:  # not a number
        return text
    kind = kind_of(value)
    if "string" in types and kind not in types and not (kind == "integer" and "number" in types):
        return text
    if kind == "number" and "integer" in types and "number" not in types and value.is_integer():
        return int(value)
    return value


def literal(text: str) -> Any:
    """The value of JSON, or of a dict, list, True, False or None as Python writes it; the text itself where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if len(text) > MAX_LITERAL or not _PYTHON.match(text):
        return text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that there are none of, as in a pattern
            return json.loads(json.dumps(ast.literal_eval(text.strip()), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text


MAX_LITERAL = 1 << 16
"""Characters of a Python literal that is read; longer ones are texts, since reading them would take too long."""
_PYTHON = re.compile(r"\s*(?:[\[{]|(?:True|False|None)\s*$)")


def texts_of(own: Any, schema: Any) -> list[str] | None:
    """The texts that an argument with the schema `own` may be, empty for any; None: it may be no text. See `typed`."""
    types = types_of(own, schema)
    if "string" not in types:
        return None
    named = own.get("enum") or ([own["const"]] if "const" in own else [])
    return [str(one) for one in named] if types == {"string"} else []
