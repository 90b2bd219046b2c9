"""The opposite of a JSON schema, in keywords that grammars follow. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "$comment",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$defs",
        "definitions",
    )
)
"""Keywords that say nothing of which values are valid."""
MAX_EXCLUDED_CHARACTERS = 1000
"""Most characters of strings that are excluded in one place."""
_TYPES = ("null", "boolean", "object", "array", "number", "string")
_BOUNDS = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
}
"""By keyword: the type whose values it limits, what its opposite is called, and what is added to the limit."""


def negated(schema: Any, resolve: Callable[[Any], Any]) -> Any:
    """The schema of all values that `schema` does not allow; None: no schema that a grammar follows is known. `resolve`:
    gives what a schema refers to, an empty one where that is not known."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        return None
    if "$ref" in schema:
        is_alone = not schema.keys() - ANNOTATIONS - {"$ref"}
        return negated(found, resolve) if is_alone and (found := resolve(schema)) else None
    alternatives: list[Any] = []
    for name, value in schema.items():
        if name in ANNOTATIONS:
            continue
        found = _opposites(name, value, resolve)
        if found is None:
            return None
        alternatives += [one for one in found if one is not False]
    if not alternatives:
        return False
    return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}


def _opposites(name: str, value: Any, resolve: Callable[[Any], Any]) -> list[Any] | None:
    """Schemas of which a value has to follow one, that it may not follow the keyword `name`."""
    match name, value:
        case "type", str() | list():
            return _other_types([value] if isinstance(value, str) else value)
        case "required", list():
            return [{"type": "object", "properties": {one: False}} for one in value]
        case "properties", dict():
            opposites = {key: negated(own, resolve) for key, own in value.items()}
            if None in opposites.values():
                return None
            return [
                {"type": "object", "required": [key], "properties": {key: opposite}}
                for key, opposite in opposites.items()
                if opposite is not False
            ]
        case "const", _:
            return _other_values([value])
        case "enum", list():
            return _other_values(value)
        case "anyOf", list():
            opposites_of_all = [negated(one, resolve) for one in value]
            return None if None in opposites_of_all else [{"allOf": opposites_of_all}]
        case "allOf", list():
            found = [negated(one, resolve) for one in value]
            return None if None in found else found
        case "not", dict() | bool():
            return [value]
        case _, int() | float() if name in _BOUNDS and not isinstance(value, bool):
            kind, opposite, added = _BOUNDS[name]
            # No text or list is shorter than an empty one.
            return (
                [] if opposite.startswith("max") and added and value < 1 else [{"type": kind, opposite: value + added}]
            )
        case _:
            return None


def _other_types(types: Sequence[Any]) -> list[Any] | None:
    if "integer" in types and "number" not in types:
        return None
    others = [one for one in _TYPES if one not in types]
    return [{"type": others}] if others else []


def _other_values(values: Sequence[Any]) -> list[Any] | None:
    if not all(value is None or isinstance(value, bool | str) for value in values):
        return None
    strings = {value for value in values if isinstance(value, str)}
    if sum(map(len, strings)) > MAX_EXCLUDED_CHARACTERS:
        return None
    types = ["object", "array", "number", *([] if None in values else ["null"]), *([] if strings else ["string"])]
    booleans = [one for one in (True, False) if not any(value is one for value in values)]
    found: list[Any] = [{"type": types}, {"enum": booleans}] if booleans else [{"type": types}]
    return [*found, {"type": "string", "pattern": f"^{''.join(_other_strings(strings))}$"}] if strings else found


def _other_strings(strings: set[str]) -> Iterator[str]:
    """A regular expression, in pieces, of all strings but these."""
    heads = sorted({string[0] for string in strings if string})
    yield "("
    if heads:
        yield f"[^{''.join(map(_in_class, heads))}][\\s\\S]*"
    else:
        yield "[\\s\\S]+"
    for head in heads:
        yield f"|{re.escape(head)}"
        yield from _other_strings({string[1:] for string in strings if string.startswith(head)})
    yield ")" if "" in strings else ")?"


def _in_class(character: str) -> str:
    return "\\" + character if character in "\\]^[-&~|" else character
