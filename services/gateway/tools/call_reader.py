"""Reads one call, `{"name": "f", "arguments": {...}}`, while its text arrives: the name once it is complete, the arguments
as the model writes them."""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Any, ClassVar

from services.gateway.openai.conversations import arguments_object, in_utf8

NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"
_QUOTES = ('"', "'")
_BEFORE_VALUES = frozenset(("", "{", "[", ",", ":"))
"""What is before a value or a key, where a single quote begins a string, as in Python; elsewhere it may be an apostrophe."""


class _At(Enum):
    START = auto()
    KEY = auto()
    """Or the end."""
    COLON = auto()
    VALUE = auto()
    END = auto()
    BROKEN = auto()


class ValueReader:
    """Finds the end of a JSON value that begins with the first character given. It is not checked further."""

    def __init__(self) -> None:
        self._is_begun = False
        self._depth = 0
        self._quote = ""
        """Quote of the string that has begun; empty: none has."""
        self._before = ""
        """Last character that is no white space."""
        self._is_escaped = False
        self.is_done = False

    def feed(self, text: str) -> int:
        """How many of the characters belong to it."""
        for place, character in enumerate(text):
            if self._quote:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == self._quote:
                    self._quote = ""
                    self.is_done = self._depth == 0
            elif self._is_begun and self._depth == 0:  # a number, true, false or null
                if character in _SPACE or character in ",}]":
                    self.is_done = True
                    return place
            elif character == '"' or (character == "'" and self._before in _BEFORE_VALUES):
                self._quote = character
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                self.is_done = self._depth == 0
            self._is_begun = True
            if character not in _SPACE:
                self._before = character
            if self.is_done:
                return place + 1
        return len(text)


class JsonMender:
    """Makes JSON valid as its text comes. In strings models write line breaks of code, and backslashes of patterns and
    paths, as they are. Some write as in Python: True, False and None, strings in single quotes, a comma behind the last
    item."""

    _PLAIN: ClassVar = {
        "": re.compile(r"""[^"',\w]+"""),
        '"': re.compile(r'[^"\\\x00-\x1f]+'),
        "'": re.compile(r"""[^'"\\\x00-\x1f]+"""),
    }
    """What stays as it is: outside strings, and in those of either quote."""
    _ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
    _ESCAPE_OF_PYTHON = re.compile(r"\\(?:x([0-9a-fA-F]{2})|U(0010[0-9a-fA-F]{4}|000[0-9a-fA-F]{5}))")
    _ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|x[0-9a-fA-F]?|U[0-9a-fA-F]{0,7})?")
    _WORD = re.compile(r"\w+")
    _SPACES = re.compile(r"[ \t\r\n]*")
    _WORDS: ClassVar = {"True": "true", "False": "false", "None": "null"}

    def __init__(self) -> None:
        self._rest = ""
        """What the text so far does not tell how to go on with: an escape or a word."""
        self._comma: list[str] = []
        """A comma that may be behind the last item, and the white space behind it in pieces."""
        self._quote = ""
        """Quote of the string that has begun; empty: none has."""
        self._before = ""
        """Last character outside strings that is no white space."""
        self._is_in_word = False
        self._is_python = False
        """A string in single quotes has begun: escapes are Python's in all that follow."""

    def feed(self, text: str) -> str:
        text, self._rest = self._rest + text, ""
        parts: list[str] = []
        place = 0
        while place < len(text):
            if self._comma:
                place = self._pass_comma(text, place, parts)
                continue
            if found := self._PLAIN[self._quote].match(text, place):
                parts.append(found[0])
                end = found.end()
                if not self._quote:
                    self._is_in_word = False
                    self._before = found[0].rstrip(_SPACE)[-1:] or self._before
            elif self._quote:
                end = self._mend_string(text, place, parts)
            else:
                end = self._mend_outside(text, place, parts)
            if end == place:
                self._rest = text[place:]
                break
            place = end
        return "".join(parts)

    def end(self) -> str:
        """What is left, where no more text comes."""
        rest, self._rest = self._rest, ""
        comma, self._comma = "".join(self._comma), []
        return comma + self._WORDS.get(rest, rest)

    def _pass_comma(self, text: str, place: int, parts: list[str]) -> int:
        """The place behind the white space that follows a comma."""
        found = self._SPACES.match(text, place)
        assert found is not None
        self._comma.append(found[0])
        if found.end() < len(text):
            parts += self._comma[1:] if text[found.end()] in "}]" else self._comma
            self._comma = []
        return found.end()

    def _mend_string(self, text: str, place: int, parts: list[str]) -> int:
        """The place behind what was read; the same: more text is needed."""
        character = text[place]
        if character == self._quote:
            parts.append('"')
            self._quote, self._before = "", character
            return place + 1
        if character != "\\":
            parts.append(json.dumps(character)[1:-1])
            return place + 1
        if self._ESCAPE_BEGUN.fullmatch(text, place):
            return place
        if text.startswith("'", place + 1):  # as Python escapes it
            parts.append("'")
            return place + 2
        if self._is_python and (found := self._ESCAPE_OF_PYTHON.match(text, place)):
            parts.append(json.dumps(chr(int(found[1] or found[2], 16)))[1:-1])
            return found.end()
        found = self._ESCAPE.match(text, place)
        parts.append(found[0] if found else "\\\\")
        return found.end() if found else place + 1

    def _mend_outside(self, text: str, place: int, parts: list[str]) -> int:
        """The place behind what was read, as `_mend_string` gives it."""
        character, end, is_in_word = text[place], place + 1, False
        if character == ",":
            self._comma = [character]
        elif character in _QUOTES:
            is_string = character == '"' or self._before in _BEFORE_VALUES
            self._quote = character if is_string else ""
            self._is_python |= self._quote == "'"
            parts.append('"' if is_string else character)
        else:
            found = self._WORD.match(text, place)
            assert found is not None
            is_whole = found.end() < len(text) or self._is_in_word
            if not is_whole and any(word.startswith(found[0]) for word in self._WORDS):
                return place
            parts.append(found[0] if self._is_in_word else self._WORDS.get(found[0], found[0]))
            end, is_in_word = found.end(), True
        self._is_in_word, self._before = is_in_word, text[end - 1]
        return end


def mended(text: str) -> str:
    """The text as JSON; as it is where it is none."""
    mender = JsonMender()
    whole = mender.feed(text) + mender.end()
    try:
        json.loads(whole, strict=False)
    except (ValueError, RecursionError):
        return text
    return whole


class ArgumentsText:
    """Arguments as a model writes them, on their way to those of an answer, which are a JSON object: one is passed on as it
    comes, made valid; what is none (null, JSON in a string, ...) is made one when it is whole."""

    def __init__(self) -> None:
        self._held = ""
        self._is_object = False
        self._mender = JsonMender()

    def feed(self, text: str) -> str:
        """Deltas that can be emitted now."""
        if self._is_object:
            return self._mender.feed(text)
        self._held += text
        if not self._held.lstrip().startswith("{"):
            return ""
        self._is_object = True
        return self._mender.feed(self._held.lstrip())

    def end(self) -> str:
        """What is told when they are whole."""
        if self._is_object:
            return ""
        written = self._held.strip()
        if not written.startswith(_QUOTES):
            written = mended(written)
        elif (text := _text_of(written)).lstrip().startswith("{"):  # JSON in a string
            written = mended(text)
        else:
            written = text
        return json.dumps(arguments_object(written), ensure_ascii=False)


class ArgumentsObject:
    """Arguments that are read one by one, on their way to the JSON object of an answer."""

    def __init__(self) -> None:
        self._is_empty = True

    def put(self, name: str, value: Any) -> str:
        """What is told of the next one."""
        before = "{" if self._is_empty else ", "
        self._is_empty = False
        return before + in_utf8(f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}")

    def end(self) -> str:
        """What is told when there are no more."""
        return "{}" if self._is_empty else "}"


class CallReader:
    def __init__(self) -> None:
        self.name: str | None = None
        self._told = ""
        """Arguments that were not taken yet."""
        self._arguments: ArgumentsText | None = None
        self._has_arguments = False
        """They are whole: what is named so again is none."""
        self._key = ""
        self._value: ValueReader | None = None
        """Reader of the key or value that has begun."""
        self._string: str | None = None
        """What there is of it, if it is a string that is no argument: that counts when it is whole."""
        self._is_nested = False
        """Within `"function": {...}`."""
        self._at = _At.START

    @property
    def is_done(self) -> bool:
        return self._at is _At.END

    @property
    def is_broken(self) -> bool:
        """It is no such object."""
        return self._at is _At.BROKEN

    def take_arguments(self) -> str:
        """Those that came since this was asked last; `{}` where the call ends without any."""
        if (self.is_done or self.is_broken) and self._arguments is None:
            self._arguments, self._told = ArgumentsText(), "{}"
        taken, self._told = self._told, ""
        return taken

    def feed(self, text: str) -> int:
        """How many of the characters belong to it: all, unless it has ended or is broken."""
        place = 0
        while place < len(text) and not (self.is_done or self.is_broken):
            if self._value is None:
                self._step(text[place])
            if self._value is not None:
                place += self._read(self._value, text[place:])
            elif not self.is_broken:
                place += 1
        return place

    def _step(self, character: str) -> None:
        if character in _SPACE:
            return
        match self._at, character:
            case _At.START, "{":
                self._at = _At.KEY
            case _At.KEY, ",":
                pass
            case _At.KEY, "}":
                self._at = _At.KEY if self._is_nested else _At.END
                self._is_nested = False
            case _At.COLON, ":":
                self._at = _At.VALUE
            case _At.VALUE, "{" if self._key == "function" and not self._is_nested:
                self._at, self._is_nested = _At.KEY, True
            case (_At.KEY, '"' | "'") | (_At.VALUE, _) if character not in ",:]}":
                self._value, self._string = ValueReader(), "" if character in _QUOTES else None
                if self._at is _At.VALUE and self._key in ARGUMENT_KEYS and self._arguments is None:
                    self._arguments, self._string = ArgumentsText(), None
            case _:
                self._at = _At.BROKEN

    def _read(self, value: ValueReader, text: str) -> int:
        count = value.feed(text)
        if self._string is not None:
            self._string += text[:count]
        elif self._is_in_arguments:
            assert self._arguments is not None
            self._told += self._arguments.feed(text[:count])
        if value.is_done:
            self._value = None
            self._end()
        return count

    @property
    def _is_in_arguments(self) -> bool:
        return self._at is _At.VALUE and self._key in ARGUMENT_KEYS and not self._has_arguments

    def _end(self) -> None:
        """Ends a key or value."""
        text = None if self._string is None else _text_of(self._string)
        if self._at is _At.KEY:
            self._key, self._at = text or "", _At.COLON
            return
        if self._is_in_arguments:
            assert self._arguments is not None
            self._told += self._arguments.end()
            self._has_arguments = True
        elif text is not None and self._key in NAME_KEYS and (self._key == "name" or not self.name):
            self.name = text
        self._at = _At.KEY


def _text_of(string: str) -> str:
    """The text of a JSON string as models write it: with line breaks, wrong escapes, halves of characters, single quotes.
    What only begins with a string stays as it is."""
    try:
        return in_utf8(json.loads(mended(string), strict=False))
    except ValueError:
        return string
