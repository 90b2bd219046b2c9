"""JSON schemas as clients write them, put so that llguidance enforces the same. Pure.

What only remarks on values (formats nobody knows, `discriminator`) is left out, OpenAPI's older words are translated, and
`oneOf` becomes `anyOf` where at most one branch can hold, or where each can be told to exclude the others. `not`, `if`,
`dependencies` and `uniqueItems` are put in words that grammars follow, where there are some. What a grammar would get
wrong is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from services.gateway.openai.negation import Negation

KNOWN_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Those that llguidance enforces."""
MAX_REFERENCES = 32
"""Most references of a schema that are followed for one question."""
EXACT_INTEGER = 2**53
"""Up to which a double holds every integer, as llguidance reads them."""
MAX_TAG_STEPS = 100_000
"""Most schemas that are looked at for values of tags."""
MAX_COMPARED = 100
"""Most branches of `oneOf` that are compared with each other, but for those that name their values."""
MAX_EXCLUDING = 8
"""Most branches of `oneOf` that are told to exclude each other."""
MAX_ARRANGED = 4
"""Most values that the items of a list without repetition may have: all lists are spelled out."""
GREATEST_BOUND = 2**63 - 1024
"""Greatest bound of integers: the greatest double within 64 bits."""

_SCHEMAS = (
    "items",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedItems",
)
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_KINDS = {
    dict: "object",
    list: "array",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    str: "string",
}


class SchemaError(ValueError):
    """What a schema asks for cannot be had; the message names the keyword."""


def prepared(schema: dict[str, Any], *, is_lenient: bool = False) -> dict[str, Any]:
    """The schema for llguidance. `is_lenient`: what cannot be enforced is left out. Raises `SchemaError`."""
    try:
        return _Preparation(schema, is_lenient).whole()
    except (AttributeError, TypeError):
        raise SchemaError("a keyword has a value of a type that it does not take") from None


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with objects of named properties closed where nothing is said of others: a model that is free to write
    further arguments invents some, at which functions fail. What the result allows the schema allows, too. A schema in
    which several say of one object what it is (`allOf`, `not`, `$ref` beside `properties`, ...) is left as it is: each of
    them would forbid what another one asks for."""
    return schema if _is_composed(schema) else _closed(schema)


_COMPOSING = frozenset(
    (
        "allOf",
        "oneOf",
        "not",
        "if",
        "contains",
        "dependencies",
        "dependentSchemas",
        "unevaluatedProperties",
        "$dynamicRef",
    )
)
_REFERRING = frozenset(("anyOf", "$ref"))
"""Keywords that say elsewhere what an object is."""
_OPEN = _REFERRING | {
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "dependentRequired",
    "const",
    "enum",
}
"""Keywords beside which an object is not closed."""
_OF_OBJECTS = _OPEN | {"properties", "required"}


def _is_composed(value: Any) -> bool:
    """Whether several schemas in it are of one object."""
    if isinstance(value, list):
        return any(_is_composed(one) for one in value)
    if not isinstance(value, dict):
        return False
    keys = value.keys()
    is_told_twice = keys & _REFERRING and len(keys & _OF_OBJECTS) > 1
    return bool(keys & _COMPOSING or is_told_twice) or any(_is_composed(one) for one in value.values())


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    done = dict(schema)
    properties, required = done.get("properties"), done.get("required", [])
    for name in _MAPPINGS:
        if isinstance(done.get(name), dict):
            done[name] = {key: _closed(value) for key, value in done[name].items()}
    for name in ("items", "additionalProperties"):
        done |= {name: _closed(done[name])} if name in done else {}
    for name in ("prefixItems", "anyOf"):
        if isinstance(done.get(name), list):
            done[name] = [_closed(one) for one in done[name]]
    if isinstance(properties, dict) and isinstance(required, list) and not done.keys() & _OPEN:
        may_be = all(isinstance(name, str) and name in properties for name in required)
        done |= {"additionalProperties": False} if may_be else {}
    return done


class _Branch(NamedTuple):
    """What is asked of a branch of `oneOf` again and again."""

    types: set[str]
    """Types as `types_of` has them."""
    schema: dict[str, Any]
    """The branch, or what it refers to."""
    values: frozenset[str] | None
    """The values that the schema names, as texts; None: it names none, or some that have several texts."""


class _Preparation:
    def __init__(self, root: dict[str, Any], is_lenient: bool) -> None:
        self._root = root
        self._is_lenient = is_lenient
        self._negation = Negation(self._resolved)
        self._num_tag_steps = 0
        self._types: dict[str, set[str]] = {}
        """Types by reference."""
        self._tagged: dict[tuple[str, str], tuple[str, dict[str, Any] | None]] = {}
        """By reference and tag: the name of the definition that has the tag required, and that."""

    def whole(self) -> dict[str, Any]:
        done: dict[str, Any] = self._of(self._root)
        added = {name: schema for name, schema in self._tagged.values() if schema is not None}
        if added:
            done["$defs"] = {**done.get("$defs", {}), **added}
        return done

    def _of(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        done = dict(schema)
        self._rewrite(done)
        for name in _MAPPINGS:
            if isinstance(done.get(name), dict):
                done[name] = {key: self._of(value) for key, value in done[name].items()}
        if isinstance(done.get("oneOf"), list):
            self._exclude(done)
        for name in _LISTS:
            if isinstance(done.get(name), list):
                done[name] = [self._of(one) for one in done[name]]
        for name in _SCHEMAS:
            if isinstance(done.get(name), dict):
                done[name] = self._of(done[name])
        self._annotations(done)
        self._numbers(done)
        return _or_null(done) if done.pop("nullable", False) is True else done

    # ----------------------------------------------------------------------------- what grammars know by other words

    def _rewrite(self, schema: dict[str, Any]) -> None:
        if "not" in schema and (opposite := self._negation.of(schema["not"])) is not None:
            _require(schema, opposite)
            del schema["not"]
        if "if" in schema and (opposite := self._negation.of(schema["if"])) is not None:
            condition = schema.pop("if")
            met = {"allOf": [condition, schema.pop("then", True)]}
            _require(schema, {"anyOf": [met, {"allOf": [opposite, schema.pop("else", True)]}]})
        for name in ("dependencies", "dependentRequired", "dependentSchemas"):
            for key, needed in schema.pop(name).items() if isinstance(schema.get(name), dict) else ():
                more = (
                    {"required": [key, *needed]}
                    if isinstance(needed, list)
                    else {"allOf": [{"required": [key]}, needed]}
                )
                _require(schema, {"anyOf": [{"properties": {key: False}}, more]})
        if schema.get("uniqueItems") is True and "prefixItems" not in schema:
            self._arrange(schema)

    def _arrange(self, schema: dict[str, Any]) -> None:
        """Spells out the lists without repetition, where items may have few values."""
        items = self._resolved(schema.get("items"))
        values = [True, False] if items.get("type") == "boolean" and not _values(items) else _values(items)
        if values is None or len(values) > MAX_ARRANGED or not _are_disjoint([values]):
            return
        lists = (one for count in range(len(values) + 1) for one in itertools.permutations(values, count))
        arranged = [
            {"prefixItems": [{"const": value} for value in one], "minItems": len(one), "maxItems": len(one)}
            for one in lists
        ]
        _require(schema, {"anyOf": arranged})
        del schema["uniqueItems"]

    def _annotations(self, schema: dict[str, Any]) -> None:
        schema.pop("discriminator", None)
        if isinstance(schema.get("format"), str) and schema["format"] not in KNOWN_FORMATS:
            del schema["format"]
        if isinstance(uri := schema.get("$schema"), str) and "json-schema.org" not in uri:
            del schema["$schema"]
        most = schema.get("maxItems")
        if schema.get("uniqueItems") is False or (isinstance(most, int) and most <= 1):
            schema.pop("uniqueItems", None)

    # ------------------------------------------------------------------------------------------------ numbers

    def _numbers(self, schema: dict[str, Any]) -> None:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else []
        for name, value in (("const", schema.get("const")), *(("enum", value) for value in values)):
            if (wrong := _inexact(value)) is not None:
                if not self._is_lenient:
                    raise SchemaError(
                        f"{name}: the integer {wrong} is beyond 2^53 and would be written as another; give it as a string"
                    )
                schema.pop(name, None)
        self._bound(schema, "minimum", "exclusiveMinimum", 1)
        self._bound(schema, "maximum", "exclusiveMaximum", -1)

    def _bound(self, schema: dict[str, Any], name: str, exclusive: str, sign: int) -> None:
        """`sign`: 1 of the least value, -1 of the greatest."""
        # As of draft 4 and OpenAPI 3.0.
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and name in schema:
            schema[exclusive] = schema.pop(name)
        for key in (name, exclusive):
            value = schema.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or abs(value) <= EXACT_INTEGER:
                continue
            least = sign * value + (1 if key == exclusive else 0)
            if least > GREATEST_BOUND:
                if not self._is_lenient:
                    raise SchemaError(f"{key}: {value} is beyond the integers of 64 bits")
                del schema[key]
                continue
            del schema[key]
            schema[name] = sign * _next_double(max(least, -GREATEST_BOUND))

    # ------------------------------------------------------------------------------------------------ oneOf

    def _exclude(self, schema: dict[str, Any]) -> None:
        """Makes `oneOf` an `anyOf` where at most one branch can hold."""
        branches = schema["oneOf"]
        discriminator = schema.get("discriminator")
        named = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        looked_at = [self._branch(branch) for branch in branches]
        if _are_objects_apart(looked_at) and (tag := self._tag(branches, named)) is not None:
            branches = [self._with_tag(branch, tag) for branch in branches]
        elif not self._is_lenient and not _are_exclusive(looked_at):
            if (excluding := self._excluding(branches, looked_at)) is None:
                return
            branches = excluding
        if "anyOf" in schema:
            schema["allOf"] = [*schema.get("allOf", []), {"anyOf": branches}]
        else:
            schema["anyOf"] = branches
        del schema["oneOf"]

    def _branch(self, branch: Any) -> _Branch:
        schema = self._resolved(branch)
        values = _values(schema)
        is_told = values is not None and not any(isinstance(value, float) for value in values)
        return _Branch(self._types_of(branch), schema, frozenset(map(repr, values or ())) if is_told else None)

    def _types_of(self, schema: Any) -> set[str]:
        return _types_of(schema, self._root, self._types, 0)

    def _tag(self, branches: Sequence[Any], named: Any) -> str | None:
        """A property that has another value in each branch."""
        names = [named] if isinstance(named, str) else self._properties(branches[0]) if branches else []
        return next((name for name in names if self._is_tag(branches, name)), None)

    def _properties(self, branch: Any) -> list[str]:
        found = self._resolved(branch)
        for _ in range(MAX_REFERENCES):
            if not isinstance(inner := found.get("oneOf") or found.get("anyOf"), list) or not inner:
                break
            found = self._resolved(inner[0])
        return [one for one in found.get("properties", {}) if isinstance(one, str)]

    def _is_tag(self, branches: Sequence[Any], name: str) -> bool:
        values = []
        for branch in branches:
            values.append(self._tag_values(branch, name))
            if not values[-1]:
                return False
        return _are_disjoint(values)

    def _tag_values(self, branch: Any, name: str, num_followed: int = 0) -> list[Any]:
        """Those that the property may have; empty: any, or it is not known."""
        self._num_tag_steps += 1
        if num_followed > MAX_REFERENCES or self._num_tag_steps > MAX_TAG_STEPS:
            return []
        found = self._resolved(branch)
        inner = found.get("oneOf") or found.get("anyOf")
        if isinstance(inner, list):
            of_each = [self._tag_values(one, name, num_followed + 1) for one in inner]
            return [value for values in of_each for value in values] if all(of_each) else []
        properties = found.get("properties")
        own = self._resolved(properties.get(name)) if isinstance(properties, dict) else {}
        return _values(own) or []

    def _with_tag(self, branch: dict[str, Any], tag: str) -> dict[str, Any]:
        """The branch, which has to have the property."""
        reference = branch.get("$ref")
        if isinstance(reference, str):
            key = (reference, tag)
            if key not in self._tagged:
                name = f"{reference.rpartition('/')[2]}-with-{tag}-{len(self._tagged)}"
                self._tagged[key] = (name, None)
                self._tagged[key] = (name, self._of(self._with_tag(self._resolved(branch), tag)))
            return {**branch, "$ref": f"#/$defs/{_escaped(self._tagged[key][0])}"}
        for name in ("oneOf", "anyOf"):
            if isinstance(branch.get(name), list):
                others = {key: value for key, value in branch.items() if key != name}
                return {**others, "anyOf": [self._with_tag(one, tag) for one in branch[name]]}
        kind = {} if self._types_of(branch) else {"type": "object"}
        return {**branch, **kind, "required": list(dict.fromkeys([*branch.get("required", []), tag]))}

    def _excluding(self, branches: Sequence[Any], looked_at: Sequence[_Branch]) -> list[Any] | None:
        """The branches, each of which is told not to hold where another may; None: that cannot be told."""
        if len(branches) > MAX_EXCLUDING:
            return None
        places = range(len(branches))
        overlaps = [
            [other for other in places if other != one and not _exclude_each_other(looked_at[one], looked_at[other])]
            for one in places
        ]
        opposites = {place: self._negation.of(branches[place]) for place in sorted(set().union(*overlaps))}
        if None in opposites.values():
            return None
        return [
            {"allOf": [branch, *(opposites[other] for other in others)]} if others else branch
            for branch, others in zip(branches, overlaps, strict=True)
        ]

    def _resolved(self, schema: Any) -> dict[str, Any]:
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = referred(schema, self._root)
        return schema if isinstance(schema, dict) and "$ref" not in schema else {}


def _are_objects_apart(branches: Sequence[_Branch]) -> bool:
    """No value holds in two branches but an object, if those of which no type is known take objects alone."""
    kinds = [branch.types - {"object"} for branch in branches]
    return _are_apart(kinds) and not {"integer", "number"} <= set().union(*kinds)


def _are_exclusive(branches: Sequence[_Branch]) -> bool:
    values = [branch.values for branch in branches if branch.values is not None]
    if len(values) == len(branches) and _are_apart(values):
        return True
    return len(branches) <= MAX_COMPARED and all(
        _exclude_each_other(one, other) for one, other in itertools.combinations(branches, 2)
    )


def _exclude_each_other(one: _Branch, other: _Branch) -> bool:
    both = one.types | other.types
    if one.types and other.types and not one.types & other.types and not {"integer", "number"} <= both:
        return True
    if one.values is not None and other.values is not None and one.values.isdisjoint(other.values):
        return True
    if not one.types == other.types == {"object"}:
        return False
    return any(
        second.get("additionalProperties") is False
        and "patternProperties" not in second
        and set(first.get("required") or ()) - set(second.get("properties") or ())
        for first, second in ((one.schema, other.schema), (other.schema, one.schema))
    )


def _require(schema: dict[str, Any], other: Any) -> None:
    """Makes values follow another schema too."""
    schema["allOf"] = [*schema.get("allOf", []), other]


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, or null."""
    named = schema.get("type")
    if isinstance(named, str) and "enum" not in schema and "const" not in schema:
        return schema if named == "null" else {**schema, "type": [named, "null"]}
    kept = ("$defs", "definitions", "$schema", "$id")
    definitions: dict[str, Any] = {name: schema.pop(name) for name in kept if name in schema}
    return {"anyOf": [schema, {"type": "null"}], **definitions}


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Which the schema names; None: it names none."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _are_apart(sets: Sequence[Set[str]]) -> bool:
    return sum(map(len, sets)) == len(set[str]().union(*sets))


def _are_disjoint(lists: Sequence[Sequence[Any]]) -> bool:
    keys = [repr(value) for values in lists for value in values]
    return len(keys) == len(set(keys)) and not any(isinstance(v, float) for values in lists for v in values)


def _inexact(value: Any) -> int | None:
    """An integer within a value that a double does not hold, or that has more than 64 bits; None: none has."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return next((found for one in inner if (found := _inexact(one)) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) <= EXACT_INTEGER:
        return None
    return None if abs(value) <= GREATEST_BOUND and int(float(value)) == value else value


def _next_double(value: int) -> int:
    """The least integer from `value` on that a double holds."""
    found = float(value)
    return int(found) if int(found) >= value else int(math.nextafter(found, math.inf))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def types_of(schema: Any, root: Any) -> set[str]:
    """The types that values of a schema may have; empty: any, or it is not known. `root`: in which its references are."""
    return _types_of(schema, root, {}, 0)


def _types_of(schema: Any, root: Any, known: dict[str, set[str]], depth: int) -> set[str]:
    """Finds what `types_of` gives. `known`: types by reference, none yet of those that are followed."""
    if not isinstance(schema, dict) or depth > MAX_REFERENCES:
        return set()
    found: set[str] = set()
    named = schema.get("type")
    if isinstance(named, str | list):
        found.update([named] if isinstance(named, str) else [one for one in named if isinstance(one, str)])
    else:
        found.update(_KINDS[type(value)] for value in _values(schema) or ())
        for one in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(one), list):
                of_each = [_types_of(each, root, known, depth + 1) for each in schema[one]]
                if one == "allOf" or all(of_each):
                    found.update(*of_each)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in known:
                known[reference] = set()
                known[reference] = _types_of(referred(schema, root), root, known, depth + 1)
            found |= known[reference]
    if schema.get("nullable") is True and found:
        found.add("null")
    return found


def kind_of(value: Any) -> str:
    """The type of a JSON value, as schemas name it."""
    return _KINDS.get(type(value), "")


def referred(schema: Mapping[str, Any], root: Any) -> Any:
    """What `$ref` names within the schema `root`; None: nothing there."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
