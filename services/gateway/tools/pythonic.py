"""Calls as Llama 4 writes them: a list of calls in Python, `[name(key=value, ...), ...]`, or JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from services.gateway.openai.json_schemas.values import types_of
from services.gateway.openai.schemas import is_nested_deep
from services.gateway.tools.call_reader import ArgumentsObject
from services.gateway.tools.keyed import typed
from services.gateway.tools.parsers import CallDelta, Parsed, ToolParser

MARKS = ("<|python_start|>", "<|python_end|>")
"""Special tokens around calls or, in the template that came with Llama 4, around text before them."""
_KEY = re.compile(r"\s*([^\s=(),\"']+)\s*=\s*")
_AFTER_STRING = re.compile(r"\s*[,)\]}:]")
_BETWEEN = " \t\r\n,;"


class PythonicParser(ToolParser):
    """Reads calls of known tools at the beginning of an output, or behind one of `MARKS`; other text is content. An
    argument is passed on when it is whole."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: with the schema of each tool's arguments, where it is a mapping."""
        super().__init__(names)
        self._schemas: Mapping[str, Any] = names if isinstance(names, Mapping) else {}
        self._name = ""
        """Name of the call whose arguments are read; empty: none."""
        self._told = ArgumentsObject()
        self._end = LiteralEnd()
        """Finds the end of the argument that is read."""
        self._before = ""
        """Text between calls, or before the first; content if none follows."""
        self._is_text = False
        """What follows is content up to the next mark."""

    @property
    def is_in_call(self) -> bool:
        return bool(self._name) or super().is_in_call

    def _advance(self) -> bool:
        if not self._rest:
            return False
        if self._name:
            return self._read_argument()
        if self._call is not None:
            ended = self._read_call(is_certain=False)
            self._is_text = ended is False
            return ended is not None
        if self._is_text:
            self._is_text = not self._say_until(*MARKS)
            return not self._is_text
        return self._find_call()

    def _find_call(self) -> bool:
        rest = self._rest.lstrip(_BETWEEN + "[" + ("]" if self.num_calls else ""))
        if rest != self._rest:
            self._before += self._rest[: len(self._rest) - len(rest)]
            self._rest = rest
            return True
        mark = next((one for one in MARKS if rest.startswith(one)), "")
        name = next((one for one in self._names if rest.startswith(one + "(")), "")
        if mark:
            self._rest = rest[len(mark) :]
        elif rest[0] == "{":
            self._begin_call(self._before)
            self._before = ""
        elif name and (self.num_calls or "[" in self._before):
            self._rest = rest[len(name) + 1 :]
            self._before, self._name, self._told = "", name, ArgumentsObject()
            self._tell(CallDelta(self.num_calls, name))
            self.num_calls += 1
        elif self._is_begun_by(rest):
            return False
        else:
            self._end_calls()
        return True

    def _is_begun_by(self, rest: str) -> bool:
        """Whether `rest` may become a mark, or the head of a call."""
        heads = [name + "(" for name in self._names] if self.num_calls or "[" in self._before else []
        return any(one.startswith(rest) for one in (*MARKS, *heads))

    def _read_argument(self) -> bool:
        self._rest = rest = self._rest.lstrip(_BETWEEN)
        if rest.startswith(")"):
            self._tell_arguments(self._told.end())
            self._rest, self._name = rest[1:], ""
            return True
        key = _KEY.match(rest)
        end = self._end.find(rest, key.end() if key else 0)
        if end < 0:
            return False
        if key is not None:  # other arguments belong to none
            self._tell_value(key[1], rest[key.end() : end])
        self._rest, self._end = rest[end:], LiteralEnd()
        return True

    def _tell_value(self, key: str, text: str) -> None:
        value = python_value(text.strip(), self._schemas.get(self._name), key)
        self._tell_arguments(self._told.put(key, value))

    def _end_calls(self) -> None:
        self._is_text = True
        if not self.num_calls:
            self._say(self._before)
        self._before = ""

    def _is_mark_begun(self) -> bool:
        return bool(self.num_calls) or self._is_begun_by(self._rest)

    def flush(self, is_cut: bool = False) -> Parsed:
        if self._name and not is_cut:  # its end is missing
            if key := _KEY.match(self._rest):
                self._tell_value(key[1], self._rest[key.end() :])
            self._tell_arguments(self._told.end())
        if self._name:
            self._rest = ""
        elif self._call is None and not self._is_text:
            if is_cut and "[" in self._before and self._rest and self._is_begun_by(self._rest):
                self._before = self._rest = ""
            self._end_calls()
        return super().flush(is_cut)


class LiteralEnd:
    """Finds where the value of an argument ends: at a comma or bracket that closes none of its own, outside strings. A
    quotation mark ends a string only where a value may end, since the family's template writes strings as they are."""

    def __init__(self) -> None:
        self._place = 0
        """Place up to which the text is read."""
        self._depth = 0
        self._quote = ""

    def find(self, text: str, begin: int) -> int:
        """The place in `text`, which begins as it did before, of a value that begins at `begin`; -1: it goes on."""
        place = max(self._place, begin)
        while place < len(text):
            character = text[place]
            if self._quote:
                if character == "\\":
                    place += 1
                elif character == self._quote:
                    if not text[place + 1 :].strip():
                        break
                    if _AFTER_STRING.match(text, place + 1):
                        self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif character in ")]}" and self._depth:
                self._depth -= 1
            elif character in ",)" and not self._depth:
                return place
            place += 1
        self._place = place
        return -1


def python_value(text: str, schema: Any, key: str) -> Any:
    """The value that a literal of Python or JSON stands for. A string becomes another value where `schema`, that of all
    arguments, allows no string; what is no literal is a string."""
    value: Any = text
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
            break
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    else:
        value = text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
    if isinstance(value, str):
        return typed(value, schema, key) if _is_typed(schema, key) else value
    try:
        plain = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return text
    return text if is_nested_deep(plain) else plain


def _is_typed(schema: Any, key: str) -> bool:
    """Whether the schema says which types the argument has."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return isinstance(properties, dict) and bool(types_of(properties.get(key), schema))
