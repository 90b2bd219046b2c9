"""Whether regular expressions of JSON schemas can find something in the same text, and in which they find nothing. Pure.

By derivatives (Brzozowski 1964): what is left of an expression after a character is an expression again, and two have a
text in common if both may end after the same characters. Where the dialects differ (`\\d` with Unicode or without, `.`), an
expression is taken for the wider one, so that those that exclude each other do so in each dialect. What is not known here
(look-arounds, flags, anchors inside of groups) excludes nothing.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

MAX_LENGTH = 500
"""Most characters of an expression that is looked at."""
MAX_SIZE = 300
"""Most parts that it has once repetitions are written out."""
MAX_STEPS = 10_000
"""Steps of one comparison at most; a step takes about a microsecond."""
MAX_STATES = 40
"""Most states of an automaton of which an expression is made."""
MAX_OPPOSITE = 2000
"""Most characters of such an expression."""
MAX_TEXT = 200
"""Most characters of a text that is followed."""
_LAST = 0x10FFFF
_QUANTIFIERS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}

Ranges = tuple[tuple[int, int], ...]
"""Characters, as ranges in order, with both ends."""
Node = tuple[Any, ...]
"""A kind of expression and what it consists of: ranges, or numbers of other expressions."""
NOTHING, EMPTY = 0, 1
"""Numbers of the expressions that describe no text and the empty one."""


class _UnknownError(Exception):
    """The expression has something that is not known here, or too many steps would be needed."""


class Steps:
    """Steps that may still be made, in several comparisons together."""

    def __init__(self, num_left: int = MAX_STEPS) -> None:
        self.num_left = num_left

    def take(self, num_steps: int) -> None:
        """Raises `_UnknownError` where there are no more."""
        self.num_left -= num_steps
        if self.num_left < 0:
            raise _UnknownError


_PART = re.compile(r"(\\[bBk1-9]|\(\?<?[=!])|\\.|\[\^?(?:\\.|[^\]\\])*\]?|.", re.DOTALL)
"""An escape, a class or a character of an expression; in a group if it looks beyond itself."""


def looks_around(pattern: str) -> bool:
    """Whether an expression has a look-around, a word boundary or a back reference, which llguidance does not know."""
    return any(part[1] for part in _PART.finditer(pattern))


def are_apart(one: str, other: str, steps: Steps | None = None) -> bool:
    """Whether no text has a part that each of the expressions describes; False: it is not known."""
    first, second = _parsed(one), _parsed(other)
    if first is None or second is None:
        return False
    try:
        return _have_no_text_in_common(first, second, Steps() if steps is None else steps)
    except (_UnknownError, RecursionError):
        return False


def _have_no_text_in_common(first: _Parsed, second: _Parsed, steps: Steps) -> bool:
    here = Steps(min(MAX_STEPS, steps.num_left))
    num_before = here.num_left
    try:
        expressions = _Expressions(here)
        pair = expressions.copy(*first), expressions.copy(*second)
        bounds = sorted({0, *_bounds(first[0]), *_bounds(second[0])})
        seen, left = {pair}, [pair]
        while left:
            a, b = left.pop()
            if expressions.may_end[a] and expressions.may_end[b]:
                return False
            for character in bounds:
                here.take(1)
                pair = expressions.after(a, character), expressions.after(b, character)
                if NOTHING not in pair and pair not in seen:
                    seen.add(pair)
                    left.append(pair)
        return True
    finally:
        steps.num_left -= num_before - max(0, here.num_left)


def finds_nothing(pattern: str, text: str, steps: Steps | None = None) -> bool:
    """Whether the expression describes no part of the text; False: it is not known."""
    parsed = _parsed(pattern)
    if parsed is None or len(text) > MAX_TEXT:
        return False
    try:
        expressions = _Expressions(Steps() if steps is None else steps)
        left = expressions.copy(*parsed)
        for character in text:
            left = expressions.after(left, ord(character))
    except (_UnknownError, RecursionError):
        return False
    return not expressions.may_end[left]


def negated(pattern: str) -> str | None:
    """An expression of whole texts in which `pattern` finds nothing in any dialect: of all of them, where dialects agree.
    Empty: there is no such text; None: it is not known, or would be too long."""
    parsed = _parsed(pattern)
    if parsed is None:
        return None
    try:
        return _written(*_without(parsed))
    except (_UnknownError, RecursionError):
        return None


_Edges = dict[tuple[int, int], list[str]]
"""By the states that they lead from and to: expressions one of which describes what is read between them."""
_START, _END = -1, -2


def _without(parsed: _Parsed) -> tuple[_Edges, int]:
    """An automaton of all texts that are none of the expression's, and how many states it has besides its ends."""
    expressions = _Expressions(Steps())
    everything = expressions.repeat(expressions.one(_ALL))
    bounds = sorted({0, *_bounds(parsed[0])})
    if any(0xD800 <= bound <= 0xDFFF for bound in bounds):
        raise _UnknownError
    first = expressions.copy(*parsed)
    states, places = [first], {first: 0}
    edges: _Edges = {(_START, 0): [""]}
    for state in states:
        node, place, ranges = expressions.nodes[state], places[state], dict[int, list[tuple[int, int]]]()
        if state == everything or (node[0] == "either" and everything in node[1]):
            continue  # all that follows is found
        if not expressions.may_end[state]:
            edges[place, _END] = [""]
        for low, following in itertools.pairwise((*bounds, _LAST + 1)):
            after = expressions.after(state, low)
            if after not in places:
                places[after] = len(states)
                states.append(after)
                if len(states) > MAX_STATES:
                    raise _UnknownError
            ranges.setdefault(places[after], []).append((low, following - 1))
        edges |= {(place, after): [_spelled(_sorted(each))] for after, each in ranges.items()}
    return edges, len(states)


def _written(edges: _Edges, num_states: int) -> str:
    """The expression of an automaton, whose states are taken out one by one (Kleene 1956), those with fewest ways through
    them first."""
    left = set(range(num_states))
    while left:
        state = min(left, key=lambda one: _num_ways(edges, one))
        left.remove(state)
        loop = edges.pop((state, state), [])
        into = [(one, edges.pop((one, other))) for one, other in [*edges] if other == state]
        out = [(other, edges.pop((one, other))) for one, other in [*edges] if one == state]
        for (one, before), (other, after) in itertools.product(into, out):
            way = _grouped(before) + (f"(?:{'|'.join(loop)})*" if loop else "") + _grouped(after)
            if len(way) > MAX_OPPOSITE:
                raise _UnknownError
            edges.setdefault((one, other), []).append(way)
    found = edges.get((_START, _END))
    written = "" if found is None else f"^{_grouped(found)}$"
    if len(written) > MAX_OPPOSITE:
        raise _UnknownError
    return written


def _num_ways(edges: _Edges, state: int) -> int:
    num_into = sum(other == state != one for one, other in edges)
    return num_into * sum(one == state != other for one, other in edges)


def _grouped(branches: Sequence[str]) -> str:
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _spelled(ranges: Ranges) -> str:
    """A class of characters, as all dialects read it."""
    others = _others(ranges)
    if not others:
        return "[\\s\\S]"
    mark, shown = ("^", others) if len(others) < len(ranges) else ("", ranges)
    return f"[{mark}{''.join(_spelled_range(low, high) for low, high in shown)}]"


def _spelled_range(low: int, high: int) -> str:
    return _spelled_character(low) + ("" if low == high else f"-{_spelled_character(high)}")


def _spelled_character(character: int) -> str:
    if chr(character).isascii() and chr(character).isalnum():
        return chr(character)
    if character < 0x100:
        return f"\\x{character:02x}"
    return f"\\u{character:04x}" if character < 0x10000 else f"\\U{character:08x}"


# ----------------------------------------------------------------------------------------------------- expressions


class _Expressions:
    """Expressions by number: equal ones have one, and parts have lower ones than what they are parts of."""

    def __init__(self, steps: Steps) -> None:
        self.nodes: list[Node] = []
        self.may_end: list[bool] = []
        """Whether the empty text is one of each expression's."""
        self._numbers: dict[Node, int] = {}
        self._after: dict[tuple[int, int], int] = {}
        self._steps = steps
        self._add(("nothing",), False)
        self._add(("empty",), True)

    def _add(self, node: Node, may_end: bool) -> int:
        number = self._numbers.get(node)
        if number is None:
            self._steps.take(1)
            number = self._numbers[node] = len(self.nodes)
            self.nodes.append(node)
            self.may_end.append(may_end)
        return number

    def one(self, ranges: Ranges) -> int:
        return self._add(("one", ranges), False)

    def repeat(self, inner: int) -> int:
        return self._add(("repeat", inner), True)

    def then(self, first: int, second: int) -> int:
        if NOTHING in (first, second):
            return NOTHING
        if EMPTY in (first, second):
            return second if first == EMPTY else first
        return self._add(("then", first, second), self.may_end[first] and self.may_end[second])

    def joined(self, parts: Sequence[int]) -> int:
        return functools.reduce(lambda rest, part: self.then(part, rest), reversed(parts), EMPTY)

    def either(self, branches: Iterable[int]) -> int:
        flat: set[int] = set()
        for branch in branches:
            node = self.nodes[branch]
            flat.update(node[1] if node[0] == "either" else (branch,))
        flat.discard(NOTHING)
        self._steps.take(len(flat))
        if len(flat) < 2:
            return flat.pop() if flat else NOTHING
        return self._add(("either", frozenset(flat)), any(self.may_end[branch] for branch in flat))

    def copy(self, nodes: Sequence[Node], number: int) -> int:
        """The expression of that number among others' `nodes`."""
        mine: list[int] = []
        for node in nodes:
            match node:
                case ("nothing",) | ("empty",):
                    mine.append(len(mine))
                case ("one", ranges):
                    mine.append(self.one(ranges))
                case ("repeat", inner):
                    mine.append(self.repeat(mine[inner]))
                case ("then", first, second):
                    mine.append(self.then(mine[first], mine[second]))
                case _:
                    mine.append(self.either(mine[branch] for branch in node[1]))
        return mine[number]

    def after(self, number: int, character: int) -> int:
        """What is left of an expression after a character."""
        key = (number, character)
        found = self._after.get(key)
        if found is None:
            self._steps.take(1)
            found = self._after[key] = self._found_after(self.nodes[number], number, character)
        return found

    def _found_after(self, node: Node, number: int, character: int) -> int:
        match node:
            case ("one", ranges):
                return EMPTY if any(low <= character <= high for low, high in ranges) else NOTHING
            case ("then", first, second):
                rest = self.then(self.after(first, character), second)
                return self.either((rest, self.after(second, character))) if self.may_end[first] else rest
            case ("either", branches):
                return self.either([self.after(branch, character) for branch in branches])
            case ("repeat", inner):
                return self.then(self.after(inner, character), number)
        return NOTHING


_Parsed = tuple[list[Node], int]
"""The nodes of an `_Expressions`, and the number of the expression among them."""


def _bounds(nodes: Iterable[Node]) -> set[int]:
    """Characters with which ranges begin or that follow them."""
    ranges = itertools.chain.from_iterable(node[1] for node in nodes if node[0] == "one")
    return {bound for low, high in ranges for bound in (low, high + 1) if bound <= _LAST}


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


def _class(name: str, *, widest: bool) -> Ranges:
    """`widest`: with all characters that belong to it in some dialect, else with those that do in each."""
    own = _CLASSES[name.lower()]
    if name.isupper():
        return _others(own if widest else _sorted((*own, *_BEYOND)))
    return _sorted((*own, *_BEYOND)) if widest else own


# ----------------------------------------------------------------------------------------------------- reading


@functools.lru_cache(1000)
def _parsed(pattern: str) -> _Parsed | None:
    """All texts in which the expression finds something; None: it is not known."""
    try:
        return _Reader(pattern).whole() if len(pattern) <= MAX_LENGTH else None
    except (_UnknownError, RecursionError, IndexError, ValueError):
        return None


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._place = 0
        self._size = 0
        self._expressions = _Expressions(Steps())
        self._any = self._expressions.repeat(self._expressions.one(_ALL))

    def whole(self) -> _Parsed:
        number, _ = self._choice(is_whole=True)
        if self._place < len(self._pattern):
            raise _UnknownError
        return self._expressions.nodes, number

    def _next(self) -> str:
        return self._pattern[self._place : self._place + 1]

    def _takes(self, text: str) -> bool:
        if not self._pattern.startswith(text, self._place):
            return False
        self._place += len(text)
        return True

    def _choice(self, *, is_whole: bool = False) -> tuple[int, int]:
        """The expression, and how many parts it has."""
        branches = [self._sequence(is_whole)]
        while self._takes("|"):
            branches.append(self._sequence(is_whole))
        return self._expressions.either(number for number, _ in branches), sum(size for _, size in branches)

    def _sequence(self, is_whole: bool) -> tuple[int, int]:
        if is_whole and self._is_group_alone():
            self._place += 1
            self._takes("?:")
            found = self._choice(is_whole=True)
            if not self._takes(")"):
                raise _UnknownError
            return found
        parts = [] if not is_whole or self._takes("^") else [self._any]
        size_before = self._size
        while self._next() not in ("", "|", ")"):
            if is_whole and self._takes("$"):
                if self._next() not in ("", "|", ")"):
                    raise _UnknownError
                break
            parts.append(self._repeated(*self._atom()))
        else:
            parts += [self._any] if is_whole else []
        return self._expressions.joined(parts), self._size - size_before

    def _is_group_alone(self) -> bool:
        """Whether a branch is one group, which may have anchors inside then."""
        if self._next() != "(" or (
            self._pattern.startswith("(?", self._place) and self._pattern[self._place + 2] != ":"
        ):
            return False
        depth = is_in_class = 0
        place = self._place
        while place < len(self._pattern):
            character = self._pattern[place]
            if character == "\\":
                place += 1
            elif is_in_class or character == "[":
                is_in_class = character != "]"
            else:
                depth += {"(": 1, ")": -1}.get(character, 0)
                if not depth:
                    return self._pattern[place + 1 : place + 2] in ("", "|", ")")
            place += 1
        return False

    def _repeated(self, atom: int, size: int) -> int:
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
            self._grow(size, 1)
            return atom
        self._takes("?")
        if self._next() in ("+", "*", "?", "{"):
            raise _UnknownError
        self._grow(size, bounds[1] or bounds[0] + 1)
        needed, expressions = [atom] * bounds[0], self._expressions
        if bounds[1] is None:
            return expressions.joined([*needed, expressions.repeat(atom)])
        rest = EMPTY
        for _ in range(bounds[1] - bounds[0]):
            rest = expressions.either((EMPTY, expressions.then(atom, rest)))
        return expressions.joined([*needed, rest])

    def _grow(self, size: int, times: int) -> None:
        self._size += times * max(1, size)
        if self._size > MAX_SIZE:
            raise _UnknownError

    def _atom(self) -> tuple[int, int]:
        character = self._next()
        self._place += 1
        match character:
            case "(":
                if self._takes("?") and not self._takes(":"):
                    raise _UnknownError
                size_before = self._size
                number, size = self._choice()
                if not self._takes(")"):
                    raise _UnknownError
                self._size = size_before
                return number, size
            case "[":
                return self._expressions.one(self._set()), 1
            case ".":
                return self._expressions.one(_others(((10, 10),))), 1
            case "\\":
                return self._expressions.one(self._escape(widest=True)), 1
            case "^" | "$" | "*" | "+" | "?" | "{":
                raise _UnknownError
        return self._expressions.one(((ord(character), ord(character)),)), 1

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
