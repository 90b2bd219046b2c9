"""Whether regular expressions of JSON schemas can find something in the same text. Pure.

By derivatives (Brzozowski 1964): what is left of an expression after a character is an expression again, and two have a
text in common if both may end after the same characters. Where the dialects differ (`\\d` with Unicode or without, `.`), an
expression is taken for the wider one, so that those that exclude each other do so in each dialect. What is not known here
(look-arounds, flags, anchors inside of groups) excludes nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

MAX_LENGTH = 500
"""Most characters of an expression that is looked at."""
MAX_SIZE = 1000
"""Most parts that it has once repetitions are written out."""
MAX_STEPS = 2000
"""Most characters that are followed to compare two expressions."""
MAX_TEXT = 200
"""Most characters of a text that is followed."""
_LAST = 0x10FFFF
_QUANTIFIERS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}

Ranges = tuple[tuple[int, int], ...]
"""Characters, as ranges in order, with both ends."""
Node = tuple[Any, ...]
NOTHING: Node = ("nothing",)
EMPTY: Node = ("empty",)


class _UnknownError(Exception):
    """The expression has something that is not known here."""


def are_apart(one: str, other: str) -> bool:
    """Whether no text has a part that each of the expressions describes; False: it is not known."""
    return compared(one, other, MAX_STEPS)[0]


def compared(one: str, other: str, max_steps: int) -> tuple[bool, int]:
    """What `are_apart` gives, and how many steps that took: at most so many."""
    first, second = _parsed(one), _parsed(other)
    if first is None or second is None:
        return False, 0
    firsts = sorted({0, *_bounds(first), *_bounds(second)})
    seen, left, num_steps = {(first, second)}, [(first, second)], 0
    while left:
        a, b = left.pop()
        if _may_end(a) and _may_end(b):
            return False, num_steps
        for character in firsts:
            if num_steps == max_steps:
                return False, num_steps
            num_steps += 1
            pair = (_after(a, character), _after(b, character))
            if NOTHING not in pair and pair not in seen:
                seen.add(pair)
                left.append(pair)
    return True, num_steps


def finds_nothing(pattern: str, text: str) -> bool:
    """Whether the expression describes no part of the text; False: it is not known."""
    node = _parsed(pattern)
    if node is None or len(text) > MAX_TEXT:
        return False
    for character in text:
        node = _after(node, ord(character))
    return not _may_end(node)


# ----------------------------------------------------------------------------------------------------- expressions


def _joined(nodes: Iterable[Node]) -> Node:
    found = EMPTY
    for node in reversed([*nodes]):
        if NOTHING in (node, found):
            return NOTHING
        found = found if node == EMPTY else node if found == EMPTY else ("then", node, found)
    return found


def _either(nodes: Iterable[Node]) -> Node:
    flat = {inner for node in nodes for inner in (node[1] if node[0] == "either" else (node,))} - {NOTHING}
    return NOTHING if not flat else next(iter(flat)) if len(flat) == 1 else ("either", frozenset(flat))


def _may_end(node: Node) -> bool:
    match node[0]:
        case "then":
            return _may_end(node[1]) and _may_end(node[2])
        case "either":
            return any(map(_may_end, node[1]))
        case kind:
            return bool(kind in ("empty", "repeat"))


@functools.lru_cache(50_000)
def _after(node: Node, character: int) -> Node:
    """What is left of an expression after a character."""
    match node[0]:
        case "one":
            return EMPTY if any(low <= character <= high for low, high in node[1]) else NOTHING
        case "then":
            rest = _joined((_after(node[1], character), node[2]))
            return _either((rest, _after(node[2], character))) if _may_end(node[1]) else rest
        case "either":
            return _either(_after(inner, character) for inner in node[1])
        case "repeat":
            return _joined((_after(node[1], character), node))
        case _:
            return NOTHING


def _bounds(node: Node) -> set[int]:
    """Characters with which ranges begin or that follow them."""
    match node[0]:
        case "one":
            return {bound for low, high in node[1] for bound in (low, high + 1) if bound <= _LAST}
        case "then":
            return _bounds(node[1]) | _bounds(node[2])
        case "either":
            return set[int]().union(*map(_bounds, node[1]))
        case "repeat":
            return _bounds(node[1])
        case _:
            return set()


# ----------------------------------------------------------------------------------------------------- characters


def _sorted(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def _others(ranges: Ranges) -> Ranges:
    edges = [-1, *itertools.chain(*ranges), _LAST + 1]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple((low + 1, high - 1) for low, high in pairs if low + 1 < high)


_CLASSES: dict[str, Ranges] = {
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "s": ((9, 13), (32, 32)),
}
"""Their characters in ASCII; dialects differ in which others belong to them."""
_BEYOND: Ranges = ((128, _LAST),)
_ALL: Ranges = ((0, _LAST),)
_ANY: Node = ("repeat", ("one", _ALL))


def _class(name: str, *, widest: bool) -> Ranges:
    """`widest`: with all characters that belong to it in some dialect, else with those that do in each."""
    own = _CLASSES[name.lower()]
    if name.isupper():
        return _others(own if widest else _sorted((*own, *_BEYOND)))
    return _sorted((*own, *_BEYOND)) if widest else own


# ----------------------------------------------------------------------------------------------------- reading


@functools.lru_cache(1000)
def _parsed(pattern: str) -> Node | None:
    """All texts in which the expression finds something."""
    try:
        return _Reader(pattern).whole() if len(pattern) <= MAX_LENGTH else None
    except (_UnknownError, RecursionError, IndexError, ValueError):
        return None


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._place = 0
        self._size = 0

    def whole(self) -> Node:
        node = self._choice(is_whole=True)
        if self._place < len(self._pattern):
            raise _UnknownError
        return node

    def _next(self) -> str:
        return self._pattern[self._place : self._place + 1]

    def _takes(self, text: str) -> bool:
        if not self._pattern.startswith(text, self._place):
            return False
        self._place += len(text)
        return True

    def _choice(self, *, is_whole: bool = False) -> Node:
        branches = [self._sequence(is_whole)]
        while self._takes("|"):
            branches.append(self._sequence(is_whole))
        return _either(branches)

    def _sequence(self, is_whole: bool) -> Node:
        parts: list[Node] = [] if not is_whole or self._takes("^") else [_ANY]
        while self._next() not in ("", "|", ")"):
            if is_whole and self._takes("$"):
                if self._next() not in ("", "|"):
                    raise _UnknownError
                return _joined(parts)
            parts.append(self._repeated(self._atom()))
        return _joined([*parts, _ANY] if is_whole else parts)

    def _repeated(self, atom: Node) -> Node:
        sign = self._next()
        if sign == "{":
            end = self._pattern.index("}", self._place)
            least, comma, most = self._pattern[self._place + 1 : end].partition(",")
            bounds = (int(least), (int(most) if most else None) if comma else int(least))
            self._place = end + 1
        elif sign in _QUANTIFIERS:
            bounds = _QUANTIFIERS[sign]
            self._place += 1
        else:
            return self._sized(atom, 1)
        self._takes("?")
        if self._next() in ("+", "*", "?", "{"):
            raise _UnknownError
        self._sized(atom, bounds[1] or bounds[0] + 1)
        needed = [atom] * bounds[0]
        if bounds[1] is None:
            return _joined([*needed, ("repeat", atom)])
        rest = EMPTY
        for _ in range(bounds[1] - bounds[0]):
            rest = _either((EMPTY, _joined((atom, rest))))
        return _joined([*needed, rest])

    def _sized(self, node: Node, times: int) -> Node:
        self._size += times * max(1, _size(node))
        if self._size > MAX_SIZE:
            raise _UnknownError
        return node

    def _atom(self) -> Node:
        character = self._next()
        self._place += 1
        match character:
            case "(":
                if self._takes("?") and not self._takes(":"):
                    raise _UnknownError
                node = self._choice()
                if not self._takes(")"):
                    raise _UnknownError
                return node
            case "[":
                return ("one", self._set())
            case ".":
                return ("one", _others(((10, 10),)))
            case "\\":
                return ("one", self._escape(widest=True))
            case "^" | "$" | "*" | "+" | "?" | "{":
                raise _UnknownError
        return ("one", ((ord(character), ord(character)),))

    def _escape(self, *, widest: bool) -> Ranges:
        character = self._pattern[self._place]
        self._place += 1
        if character.lower() in _CLASSES:
            return _class(character, widest=widest)
        if character in _CONTROLS:
            code = ord(_CONTROLS[character])
        elif character in ("u", "x"):
            num_digits = 4 if character == "u" else 2
            digits = self._pattern[self._place : self._place + num_digits]
            if len(digits) < num_digits:
                raise _UnknownError
            code, self._place = int(digits, 16), self._place + num_digits
        elif character.isalnum() or character in "<>" or ord(character) > 127:
            raise _UnknownError
        else:
            code = ord(character)
        return ((code, code),)

    def _set(self) -> Ranges:
        is_negated = self._takes("^")
        found: list[tuple[int, int]] = []
        while not self._takes("]"):
            if any(self._pattern.startswith(two, self._place) for two in ("[", "&&", "--", "~~", "||")):
                raise _UnknownError
            low = self._member(widest=not is_negated)
            if self._next() == "-" and self._pattern[self._place + 1 : self._place + 2] not in ("]", ""):
                self._place += 1
                high = self._member(widest=not is_negated)
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] < low[0][0]:
                    raise _UnknownError
                low = ((low[0][0], high[0][1]),)
            found += low
        if not found:
            raise _UnknownError
        return _others(_sorted(found)) if is_negated else _sorted(found)

    def _member(self, *, widest: bool) -> Ranges:
        if self._takes("\\"):
            return self._escape(widest=widest)
        code = ord(self._pattern[self._place])
        self._place += 1
        return ((code, code),)


def _size(node: Node) -> int:
    match node[0]:
        case "then":
            return _size(node[1]) + _size(node[2])
        case "either":
            return sum(map(_size, node[1]))
        case "repeat":
            return 1 + _size(node[1])
        case _:
            return 1
