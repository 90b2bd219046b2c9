"""One call, `{"name": "f", "arguments": {...}}`, read as its text comes: the name as soon as it is whole, the arguments as
the model writes them."""

from __future__ import annotations

import json
from enum import Enum, auto

ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class _At(Enum):
    START = auto()
    KEY = auto()
    """Or the end."""
    COLON = auto()
    VALUE = auto()
    END = auto()
    BROKEN = auto()


class ValueReader:
    """Where a JSON value ends that begins with the first character given. It is not checked further."""

    def __init__(self) -> None:
        self._is_begun = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_done = False

    def feed(self, text: str) -> int:
        """How many of the characters belong to it."""
        for place, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
                    self.is_done = self._depth == 0
            elif self._is_begun and self._depth == 0:  # a number, true, false or null
                if character in _SPACE or character in ",}]":
                    self.is_done = True
                    return place
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                self.is_done = self._depth == 0
            self._is_begun = True
            if self.is_done:
                return place + 1
        return len(text)


class CallReader:
    def __init__(self) -> None:
        self.name: str | None = None
        self._arguments = ""
        self._has_arguments = False
        """Some were taken."""
        self._key = ""
        self._value: ValueReader | None = None
        """Of the key or value that has begun."""
        self._string: str | None = None
        """What there is of it, if it is a string: that counts when it is whole."""
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
        taken, self._arguments = self._arguments, ""
        if not self._has_arguments and not taken and (self.is_done or self.is_broken):
            taken = "{}"
        self._has_arguments |= bool(taken)
        return taken

    def feed(self, text: str) -> int:
        """How many of the characters belong to it: all, unless it has ended or is broken."""
        place = 0
        while place < len(text) and not (self.is_done or self.is_broken):
            if self._value is None:
                self._step(text[place])
            if self._value is not None:
                place += self._read(self._value, text[place:])
            else:
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
                self._at = _At.END
            case _At.COLON, ":":
                self._at = _At.VALUE
            case (_At.KEY, '"') | (_At.VALUE, _) if character not in ",:]}":
                self._value, self._string = ValueReader(), "" if character == '"' else None
            case _:
                self._at = _At.BROKEN

    def _read(self, value: ValueReader, text: str) -> int:
        count = value.feed(text)
        if self._string is not None:
            self._string += text[:count]
        elif self._key in ARGUMENT_KEYS:
            self._arguments += text[:count]
        if value.is_done:
            self._value = None
            self._end(None if self._string is None else _text_of(self._string))
        return count

    def _end(self, text: str | None) -> None:
        """Of a key or value. `text`: if it was a string."""
        if self._at is _At.KEY:
            self._key, self._at = text or "", _At.COLON
            return
        self._at = _At.KEY
        if text is not None and self._key == "name":
            self.name = text
        elif text is not None and self._key in ARGUMENT_KEYS:
            self._arguments += text  # JSON in a string


def _text_of(string: str) -> str:
    """Of a JSON string as models write it: with line breaks, wrong escapes, halves of characters."""
    try:
        text = str(json.loads(string, strict=False))
    except ValueError:
        text = string.strip('"')
    return text.encode(errors="replace").decode()
