"""One call, `{"name": "f", "arguments": {...}}`, read as its text comes: the name as soon as it is whole, the arguments as
the model writes them."""

from __future__ import annotations

import json
from enum import Enum, auto

NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class _At(Enum):
    START = auto()
    KEY = auto()
    """Or the end."""
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    END = auto()
    BROKEN = auto()


class ValueReader:
    """Where a JSON value ends that begins with the first character given. It is not checked further."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_scalar: bool | None = None
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
            elif self._is_scalar:
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
            elif self._depth == 0:
                self._is_scalar = True
            if self._is_scalar is None:
                self._is_scalar = False
            if self.is_done:
                return place + 1
        return len(text)


class CallReader:
    def __init__(self) -> None:
        self.name: str | None = None
        self._arguments = ""
        self._key = ""
        self._value_text = ""
        self._value = ValueReader()
        self._key_reader = ValueReader()
        self._at = _At.START

    @property
    def is_done(self) -> bool:
        return self._at is _At.END

    @property
    def is_broken(self) -> bool:
        """It is no such object."""
        return self._at is _At.BROKEN

    def take_arguments(self) -> str:
        """Those that came since the last call."""
        taken, self._arguments = self._arguments, ""
        return taken

    def feed(self, text: str) -> int:
        """How many of the characters belong to it: all, unless it has ended or is broken."""
        place = 0
        while place < len(text) and self._at not in (_At.END, _At.BROKEN):
            place += self._step(text[place:])
        return place

    def _step(self, text: str) -> int:
        character = text[0]
        if self._at is _At.IN_KEY:
            count = self._key_reader.feed(text)
            self._key += text[:count]
            if self._key_reader.is_done:
                self._key = str(_loaded(self._key))
                self._at = _At.COLON
            return count
        if self._at is _At.IN_VALUE:
            return self._read_value(text)
        if character in _SPACE:
            return 1
        match self._at, character:
            case _At.START, "{":
                self._at = _At.KEY
            case _At.KEY, "}":
                self._at = _At.END
            case _At.KEY, ",":
                pass
            case _At.KEY, '"':
                self._key, self._key_reader, self._at = "", ValueReader(), _At.IN_KEY
                return 0
            case _At.COLON, ":":
                self._at = _At.VALUE
            case _At.VALUE, _:
                self._value_text, self._value, self._at = "", ValueReader(), _At.IN_VALUE
                return 0
            case _:
                self._at = _At.BROKEN
        return 1

    def _read_value(self, text: str) -> int:
        count = self._value.feed(text)
        piece, is_arguments = text[:count], self._key in ARGUMENT_KEYS
        # Arguments as a JSON string of JSON are told of when they can be decoded.
        is_text = (self._value_text or piece)[:1] == '"'
        self._value_text += piece
        if is_arguments and not is_text:
            self._arguments += piece
        if self._value.is_done:
            self._at = _At.KEY
            value = _loaded(self._value_text) if self._key in NAME_KEYS or is_text else None
            if self._key in NAME_KEYS and isinstance(value, str):
                self.name = value
            elif is_arguments and is_text:
                self._arguments += str(value)
        return count


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except RecursionError:
        return None
    except ValueError:
        return text.strip('"')
