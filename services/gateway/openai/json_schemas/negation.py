"""The negation of a JSON schema, in keywords that grammars can enforce. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from services.gateway.openai.json_schemas.keywords import ASSERTIONS, KNOWN_FORMATS, TYPES
from services.gateway.openai.json_schemas.patterns import negated

MAX_EXCLUDED_CHARACTERS = 1000
"""Most characters of strings that are excluded in one place."""
MAX_EXCLUDED_LENGTH = 50
"""Most characters of one of them: regular expressions are nested as deep, which llguidance bounds."""
MAX_NEGATED = 2000
"""Most schemas within a schema whose opposites are asked for."""
MAX_DEPTH = 32
"""How deep they are nested at most."""
MAX_PAIRED = 4
"""Most branches of a `oneOf` that has an opposite, which names each pair of them."""
MAX_EXCLUDED_NUMBERS = 32
"""Most numbers that are excluded in one place."""
MAX_EXCLUDED_CONTAINERS = 8
"""Most objects and lists that are excluded in one place, and most members of one of them."""
_BOUNDS = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
}
"""By keyword: the type whose values it limits, what its opposite is called, and what is added to the limit."""


class Negation:
    """Opposites of a schema's parts. What is asked in all is bounded, since a reference may stand for any number of
    schemas."""

    def __init__(self, resolve: Callable[[Any], Any]) -> None:
        """`resolve`: gives what a schema refers to, an empty one where that is not known."""
        self._resolve = resolve
        self._num_left = MAX_NEGATED
        self._depth = 0

    def of(self, schema: Any) -> Any:
        """The schema of all values that `schema` does not allow; None: no schema that a grammar follows is known, or it
        would be too large."""
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or not self._num_left or self._depth >= MAX_DEPTH:
            return None
        self._num_left -= 1
        self._depth += 1
        try:
            return self._of_keywords(schema)
        finally:
            self._depth -= 1

    def _of_keywords(self, schema: dict[str, Any]) -> Any:
        if "$ref" in schema:
            is_alone = not (schema.keys() & ASSERTIONS) - {"$ref"}
            return self.of(found) if is_alone and (found := self._resolve(schema)) else None
        alternatives: list[Any] = []
        for name, value in schema.items():
            if name not in ASSERTIONS:
                continue
            found = self._opposites(name, value)
            if found is None:
                return None
            alternatives += [one for one in found if one is not False]
        if not alternatives:
            return False
        return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}

    def _of_all(self, schemas: Iterable[Any]) -> list[Any] | None:
        """The opposite of each; None: that of one is not known."""
        found = []
        for schema in schemas:
            if (opposite := self.of(schema)) is None:
                return None
            found.append(opposite)
        return found

    def _opposites(self, name: str, value: Any) -> list[Any] | None:
        """Schemas of which a value has to follow one, so that it does not follow the keyword `name`; None: not known."""
        match name, value:
            case "type", str() | list():
                return _other_types([value] if isinstance(value, str) else value)
            case "required", list():
                are_names = all(isinstance(one, str) for one in value)
                return [{"type": "object", "properties": {one: False}} for one in value] if are_names else None
            case "properties", dict():
                if (opposites := self._of_all(value.values())) is None:
                    return None
                return [
                    {"type": "object", "required": [key], "properties": {key: opposite}}
                    for key, opposite in zip(value, opposites, strict=True)
                    if opposite is not False
                ]
            case "const", _:
                return self._other_values([value])
            case "enum", list():
                return self._other_values(value)
            case "pattern", str():
                if (pattern := negated(value)) is None:
                    return None
                return [{"type": "string", "pattern": pattern}] if pattern else []
            case "anyOf", list():
                opposites = self._of_all(value)
                return None if opposites is None else [{"allOf": opposites}]
            case "allOf", list():
                return self._of_all(value)
            case "oneOf", list() if len(value) <= MAX_PAIRED:
                if (opposites := self._of_all(value)) is None:
                    return None
                return [{"allOf": opposites}, *({"allOf": [*pair]} for pair in itertools.combinations(value, 2))]
            case "not", dict() | bool():
                return [value]
            case "contains", dict() | bool():
                return None if (opposite := self.of(value)) is None else [{"type": "array", "items": opposite}]
            case (("items" | "additionalProperties" | "propertyNames"), True | dict()) if value is True or not value:
                return []
            case "items", dict() | bool():
                return None if (opposite := self.of(value)) is None else [{"type": "array", "contains": opposite}]
            case "patternProperties", dict():
                if (opposites := self._of_all(value.values())) is None:
                    return None
                # One member is enough; values with others beside it are left out.
                return [
                    {
                        "type": "object",
                        "patternProperties": {p: other},
                        "additionalProperties": False,
                        "minProperties": 1,
                    }
                    for p, other in zip(value, opposites, strict=True)
                    if other is not False
                ]
            case "uniqueItems", False:
                return []
            case "format", str() if value not in KNOWN_FORMATS:
                return []
            case _, int() | float() if name in _BOUNDS and not isinstance(value, bool):
                kind, opposite, added = _BOUNDS[name]
                # No text or list is shorter than an empty one.
                is_never = opposite.startswith("max") and added and value < 1
                return [] if is_never else [{"type": kind, opposite: value + added}]
            case _:
                return None

    def _other_values(self, values: Sequence[Any]) -> list[Any] | None:
        containers = [value for value in values if isinstance(value, dict | list)]
        others = _other_scalars([value for value in values if not isinstance(value, dict | list)])
        if not containers or others is None or len(containers) > MAX_EXCLUDED_CONTAINERS:
            return None if containers else others
        choices = [self._other_than(container) for container in containers]
        if None in choices:
            return None
        return [{"allOf": [{"anyOf": choice} for choice in (others, *choices)]}]

    def _other_than(self, container: dict[str, Any] | list[Any]) -> list[Any] | None:
        """Schemas of all values but an object or a list."""
        size = len(container)
        if size > MAX_EXCLUDED_CONTAINERS:
            return None
        values = container if isinstance(container, list) else container.values()
        opposites = self._of_all({"const": value} for value in values)
        if opposites is None:
            return None
        if isinstance(container, list):
            kind, found = "array", [{"type": "array", "minItems": size + 1}]
            found += [{"type": "array", "maxItems": size - 1}] if size else []
            found += [
                {"type": "array", "prefixItems": [*[{}] * place, other], "minItems": place + 1}
                for place, other in enumerate(opposites)
            ]
        else:
            kind, found = "object", [{"type": "object", "minProperties": size + 1}]
            named = dict.fromkeys(container, True)  # in their order
            for name, other in zip(container, opposites, strict=True):
                found.append({"type": "object", "properties": named | {name: False}})
                found.append({"type": "object", "required": [name], "properties": named | {name: other}})
        return [{"type": [one for one in TYPES if one != kind]}, *found]


def _other_types(types: Sequence[Any]) -> list[Any] | None:
    if any(one not in (*TYPES, "integer") for one in types) or ("integer" in types and "number" not in types):
        return None
    others = [one for one in TYPES if one not in types]
    return [{"type": others}] if others else []


def _other_scalars(values: Sequence[Any]) -> list[Any] | None:
    values = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    if not all(value is None or isinstance(value, bool | str | int) for value in values):
        return None
    strings = {value for value in values if isinstance(value, str)}
    numbers = sorted({value for value in values if isinstance(value, int) and not isinstance(value, bool)})
    if len(numbers) > MAX_EXCLUDED_NUMBERS:
        return None
    lengths = [*map(len, strings)]
    if sum(lengths) > MAX_EXCLUDED_CHARACTERS or max(lengths, default=0) > MAX_EXCLUDED_LENGTH:
        return None
    types = [
        *("object", "array"),
        *([] if numbers else ["number"]),
        *([] if None in values else ["null"]),
        *([] if strings else ["string"]),
    ]
    booleans = [one for one in (True, False) if not any(value is one for value in values)]
    found: list[Any] = [{"type": types}, {"enum": booleans}] if booleans else [{"type": types}]
    found += _other_numbers(numbers)
    return [*found, {"type": "string", "pattern": f"^{''.join(_other_strings(strings))}$"}] if strings else found


def _other_numbers(numbers: list[int]) -> Iterator[Any]:
    """Ranges of all numbers but these, which are in order."""
    if numbers:
        yield {"type": "number", "exclusiveMaximum": numbers[0]}
        yield {"type": "number", "exclusiveMinimum": numbers[-1]}
    for one, next_one in itertools.pairwise(numbers):
        yield {"type": "number", "exclusiveMinimum": one, "exclusiveMaximum": next_one}


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
