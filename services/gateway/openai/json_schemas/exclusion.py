"""Decides which JSON schemas exclude each other, and what keeps one apart from another. Pure.

All that is known of a schema is what each of its values has (`_Facts`); a schema may allow less than that, never more. So
two schemas whose facts contradict each other have no value in common, while those of which nothing of the kind is found
may have none either.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.openai.json_schemas.patterns import Steps, are_apart, finds_nothing

MAX_LOOKED = 20_000
"""Most schemas that are looked at, and comparisons, for one whole schema."""
MAX_PATTERN_STEPS = 40_000
"""Most steps that regular expressions are compared by, for one whole schema: some 50 ms."""
MAX_PARTS = 64
"""Most schemas that say together what one value is."""
MAX_DEPTH = 4
"""How deep members and items are compared."""
MAX_CHOICES = 16
"""Most alternatives of an `anyOf` that are compared one by one, and most conditions that keep two schemas apart."""
_NUMBER = frozenset(("integer", "fraction"))
_ALL = frozenset(("null", "boolean", "object", "array", "string")) | _NUMBER
_KINDS = {dict: "object", list: "array", bool: "boolean", int: "integer", type(None): "null", str: "string"}
_COUNTS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}
_UNBOUNDED = ((-math.inf, False), (math.inf, False))
_EXCLUSIVE_FORMATS = {frozenset(("ipv4", "ipv6")), frozenset(("date", "date-time")), frozenset(("date", "time"))}

Schemas = tuple[Any, ...]
"""Schemas that all hold of one value."""


@dataclass(slots=True)
class _Facts:
    """What each value of a schema has."""

    types: frozenset[str]
    """The value's type is one of these; numbers are `integer` or `fraction`."""
    values: list[Any] | None
    """The value is one of these; None: any."""
    required: set[str]
    members: dict[str, list[Any]]
    """Schemas that hold of a member, where an object has it."""
    names: set[str] | None
    """An object has no other members; None: any."""
    items: list[Any]
    """Schemas that hold of each item of a list."""
    bounds: dict[str, tuple[tuple[float, bool], tuple[float, bool]]]
    """By type (`number` for numbers): the least and the greatest length or number, and whether that itself is excluded."""
    patterns: list[str]
    """Each of these expressions finds something in a text."""
    formats: set[str]
    choices: list[list[Any]]
    """The value follows one schema of each of these."""


class Exclusion:
    """Answers for the parts of one schema. How much is looked at in all is bounded; beyond it nothing excludes anything."""

    def __init__(self, resolve: Callable[[Any], Any]) -> None:
        """`resolve`: gives what a schema refers to, an empty one where that is not known."""
        self._resolve = resolve
        self._num_left = MAX_LOOKED
        self._steps = Steps(MAX_PATTERN_STEPS)
        self._known: dict[tuple[int, ...], tuple[Schemas, _Facts]] = {}
        """Facts by the identities of the schemas, which are kept so that these stay theirs."""

    def is_empty_between(self, one: Schemas, other: Schemas) -> bool:
        """Whether no value follows both; False: it is not known."""
        return self._are_apart(one, other, 0, True)

    def between(self, one: Schemas, other: Schemas) -> list[Any]:
        """Schemas each of which keeps values of `one` away from `other`: no value follows it and both. Empty: none is
        known."""
        if self._num_left <= 0:
            return []
        mine, theirs = self._facts(one), self._facts(other)
        found: list[Any] = []
        if mine.values is not None:
            left = [value for value in mine.values if self._is_outside(value, theirs)]
            return [{"enum": left}] if left else []
        if (more := mine.types - theirs.types) and (types := _named(more)):
            found.append({"type": types})
        if "object" in mine.types:
            found += [{"type": "object", "properties": {n: False}} for n in sorted(theirs.required - mine.required)]
            found += [{"type": "object", "required": [name]} for name in self._telling(mine, theirs)]
        items = (tuple(mine.items), tuple(theirs.items))
        if "array" in mine.types and all(items) and self._are_apart(*items, 1, True):
            found.append({"type": "array", "minItems": 1})
        return found[:MAX_CHOICES]

    def _telling(self, mine: _Facts, theirs: _Facts) -> Iterator[str]:
        """Members that both may leave out, and whose presence is possible in `mine` alone."""
        for name in sorted(mine.members.keys() - mine.required - theirs.required):
            if theirs.names is not None and name not in theirs.names:
                yield name
            elif name in theirs.members:
                schemas = (tuple(mine.members[name]), tuple(theirs.members[name]))
                if self._are_apart(*schemas, 1, True):
                    yield name

    # ------------------------------------------------------------------------------------------------ comparing

    def _are_apart(self, one: Schemas, other: Schemas, depth: int, may_choose: bool) -> bool:
        self._num_left -= 1
        if depth > MAX_DEPTH or self._num_left <= 0:
            return False
        mine, theirs = self._facts(one), self._facts(other)
        if self._contradict(mine, theirs, depth):
            return True
        if may_choose:
            for facts, own, others in ((mine, one, other), (theirs, other, one)):
                for choice in facts.choices[:1]:
                    if all(self._are_apart((*own, each), others, depth + 1, False) for each in choice):
                        return True
        return False

    def _contradict(self, mine: _Facts, theirs: _Facts, depth: int) -> bool:
        for facts, others in ((mine, theirs), (theirs, mine)):
            if facts.values is not None and all(self._is_outside(value, others) for value in facts.values):
                return True
        return all(self._contradict_as(kind, mine, theirs, depth) for kind in mine.types & theirs.types)

    def _contradict_as(self, kind: str, mine: _Facts, theirs: _Facts, depth: int) -> bool:
        """Whether no value of a type follows both."""
        name = "number" if kind in _NUMBER else kind
        if name in mine.bounds and name in theirs.bounds:
            least = max(mine.bounds[name][0], theirs.bounds[name][0])
            greatest, is_open = min(
                mine.bounds[name][1], theirs.bounds[name][1], key=lambda bound: (bound[0], not bound[1])
            )
            if least[0] > greatest or (least[0] == greatest and (least[1] or is_open)):
                return True
        match kind:
            case "string":
                if any(bounds.get("string", _UNBOUNDED)[1][0] == 0 for bounds in (mine.bounds, theirs.bounds)):
                    return any(
                        finds_nothing(pattern, "", self._steps) for pattern in (*mine.patterns, *theirs.patterns)
                    )
                return any(are_apart(a, b, self._steps) for a in mine.patterns for b in theirs.patterns) or any(
                    frozenset((a, b)) in _EXCLUSIVE_FORMATS for a in mine.formats for b in theirs.formats
                )
            case "array":
                is_filled = any(
                    "array" in facts.bounds and facts.bounds["array"][0][0] >= 1 for facts in (mine, theirs)
                )
                schemas = (tuple(mine.items), tuple(theirs.items))
                return bool(is_filled and all(schemas) and self._are_apart(*schemas, depth + 1, True))
            case "object":
                return self._contradict_as_objects(mine, theirs, depth)
        return False

    def _contradict_as_objects(self, mine: _Facts, theirs: _Facts, depth: int) -> bool:
        for facts, others in ((mine, theirs), (theirs, mine)):
            if others.names is not None and not facts.required <= others.names:
                return True
        there = mine.required | theirs.required
        return any(
            self._are_apart(tuple(mine.members[name]), tuple(theirs.members[name]), depth + 1, True)
            for name in sorted(there & mine.members.keys() & theirs.members.keys())
        )

    def _is_outside(self, value: Any, facts: _Facts) -> bool:
        """Whether a value certainly does not have what the facts say."""
        if not _types_of_value(value) & facts.types:
            return True
        if facts.values is not None and key_of(value) not in map(key_of, facts.values):
            return True
        if isinstance(value, str | list | dict):
            (least, _), (greatest, _) = facts.bounds.get(_KINDS[type(value)], _UNBOUNDED)
            if not least <= len(value) <= greatest:
                return True
        match value:
            case str():
                return any(finds_nothing(pattern, value, self._steps) for pattern in facts.patterns)
            case dict():
                return not facts.required <= value.keys() or not (facts.names is None or value.keys() <= facts.names)
        return False

    # ------------------------------------------------------------------------------------------------ facts

    def _facts(self, schemas: Schemas) -> _Facts:
        key = tuple(map(id, schemas))
        if key not in self._known:
            self._known[key] = (schemas, self._found(schemas))
        return self._known[key][1]

    def _found(self, schemas: Schemas) -> _Facts:
        found = _Facts(_ALL, None, set(), {}, None, [], {}, [], set(), [])
        left = list(schemas)
        for _ in range(MAX_PARTS):
            if not left:
                break
            schema = left.pop()
            self._num_left -= 1
            if schema is False:
                found.types = frozenset()
            # One that takes null besides says nothing of all its values.
            elif isinstance(schema, dict) and schema.get("nullable") is not True:
                if "$ref" in schema and (referred := self._resolve(schema)):
                    left.append(referred)
                if isinstance(all_of := schema.get("allOf"), list):
                    left += all_of
                self._note(schema, found)
        return found

    def _note(self, schema: Mapping[str, Any], found: _Facts) -> None:
        """Adds what one schema says by itself."""
        named = schema.get("type")
        if isinstance(named, str | list):
            found.types &= _atoms([named] if isinstance(named, str) else named)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and found.values is None:
            found.values = values
            found.types &= frozenset[str]().union(*map(_types_of_value, values))
        for name in ("anyOf", "oneOf"):
            if isinstance(choice := schema.get(name), list):
                if len(choice) <= MAX_CHOICES:
                    found.choices.append(choice)
                types = [_atoms_of(each) for each in choice]
                found.types &= frozenset[str]().union(*types)
        found.required |= set(schema.get("required") or ())
        members = schema.get("properties")
        if isinstance(members, dict):
            for name, member in members.items():
                found.members.setdefault(name, []).append(member)
        if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
            names = set(members) if isinstance(members, dict) else set()
            found.names = names if found.names is None else found.names & names
        if "items" in schema and "prefixItems" not in schema and isinstance(schema["items"], dict | bool):
            found.items.append(schema["items"])
        if isinstance(pattern := schema.get("pattern"), str):
            found.patterns.append(pattern)
        if isinstance(kind := schema.get("format"), str):
            found.formats.add(kind)
        _note_bounds(schema, found.bounds)


def _note_bounds(schema: Mapping[str, Any], bounds: dict[str, tuple[tuple[float, bool], tuple[float, bool]]]) -> None:
    for kind, names in _COUNTS.items():
        for place, name in enumerate(names):
            if _is_number(schema.get(name)):
                _narrow(bounds, kind, place, (schema[name], False))
    for place, (name, exclusive) in enumerate((("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))):
        if _is_number(schema.get(name)):
            _narrow(bounds, "number", place, (schema[name], schema.get(exclusive) is True))
        if _is_number(schema.get(exclusive)):
            _narrow(bounds, "number", place, (schema[exclusive], True))


def _narrow(
    bounds: dict[str, tuple[tuple[float, bool], tuple[float, bool]]], kind: str, place: int, bound: tuple[float, bool]
) -> None:
    least, greatest = bounds.get(kind, _UNBOUNDED)
    if place == 0:
        bounds[kind] = (max(least, bound), greatest)
    else:
        bounds[kind] = (least, min(greatest, bound, key=lambda each: (each[0], not each[1])))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _atoms(types: Collection[Any]) -> frozenset[str]:
    return frozenset(name for name in types if isinstance(name, str)) | (_NUMBER if "number" in types else frozenset())


def _atoms_of(schema: Any) -> frozenset[str]:
    """Types of a schema's values, as far as its own `type` or values tell."""
    if schema is False:
        return frozenset()
    if not isinstance(schema, dict) or schema.get("nullable") is True:
        return _ALL
    if isinstance(named := schema.get("type"), str | list):
        return _atoms([named] if isinstance(named, str) else named)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset[str]().union(*map(_types_of_value, values)) if isinstance(values, list) else _ALL


def _types_of_value(value: Any) -> frozenset[str]:
    # Whether 1.0 is an integer depends on the draft.
    return _NUMBER if isinstance(value, float) else frozenset((_KINDS[type(value)],))


def _named(types: frozenset[str]) -> list[str]:
    """Types as schemas name them; there is no name for numbers that are no integers."""
    names = sorted(types - _NUMBER)
    if types >= _NUMBER:
        return [*names, "number"]
    return [*names, "integer"] if "integer" in types else names


def key_of(value: Any) -> tuple[str, Any]:
    """Equal for values that are equal in JSON, where 1 and 1.0 are and 1 and true are not."""
    if isinstance(value, dict | list):
        return "json", json.dumps(_whole(value), sort_keys=True)
    return ("number", value) if _is_number(value) else (type(value).__name__, value)


def _whole(value: Any) -> Any:
    match value:
        case dict():
            return {name: _whole(each) for name, each in value.items()}
        case list():
            return [_whole(each) for each in value]
        case float() if value.is_integer():
            return int(value)
    return value
