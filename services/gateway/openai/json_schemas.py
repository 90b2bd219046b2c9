"""Rewrites clients' JSON schemas into equivalent ones that llguidance enforces. Pure.

What only remarks on values (formats nobody knows, `discriminator`) is left out, OpenAPI's older words are translated, and
`oneOf` becomes `anyOf` where at most one branch can hold, or where each can be told to exclude the others. `not`, `if`,
`dependencies` and `uniqueItems` are put in words that grammars follow, where there are some. What a grammar would get
wrong is refused.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any
from urllib.parse import unquote

from services.gateway.openai.exclusion import Exclusion, Schemas, key_of
from services.gateway.openai.members import Names, require, spell_counts
from services.gateway.openai.negation import ASSERTIONS, KNOWN_FORMATS, Negation

MAX_REFERENCES = 32
"""Most references of a schema that are followed for one question."""
EXACT_INTEGER = 2**53
"""Up to which a double holds every integer, as llguidance reads them."""
MAX_TAG_STEPS = 100_000
"""Most schemas that are looked at for values of tags."""
MAX_COMPARED = 100
"""Most branches of `oneOf` that are compared with each other, but for those that name their values."""
MAX_EXCLUDING = 24
"""Most branches of `oneOf` that are told to exclude each other."""
MAX_ARRANGED = 350
"""Most lists that are spelled out where lists have no repetition."""
MAX_PLACES = 4
"""Places in a list, from its beginning, of which one has what the list has to contain: values are left out, and none is
added."""
MAX_SPELLED = 5000
"""Most lists and sets of members that are spelled out in a whole schema."""
MAX_WALKED = 50_000
"""Most objects and lists of a schema that are walked for references."""
MAX_JOINED = 2**18
"""Most characters of definitions that join what schemas refer to with what stands beside."""
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
_NESTING = frozenset((*_SCHEMAS, *_LISTS, *_MAPPINGS))
_CONDITIONS = ("if", "then", "else")
_DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
_MEMBER_COUNTS = ("minProperties", "maxProperties")
_REWRITTEN = frozenset(
    ("not", *_CONDITIONS, *_DEPENDENCIES, "uniqueItems", "contains", "propertyNames", *_MEMBER_COUNTS)
)
_MARKED = frozenset(("format", "$schema", "maxItems", "uniqueItems"))
_NUMBERED = frozenset(("const", "enum", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"))
_TYPES = ("null", "boolean", "object", "array", "number", "string")
_KINDS = {
    dict: "object",
    list: "array",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    str: "string",
}


_OLD_DRAFT = re.compile(r"draft-0[3-7]\b")
_REMARKS = frozenset(
    (
        *("title", "description", "markdownDescription", "$comment", "default", "example", "examples"),
        *("deprecated", "readOnly", "writeOnly", "discriminator"),
    )
)
"""Keywords that are left out, since no output depends on them and requests carry their grammar."""
_VALUES = ("const", "enum", "default", "examples")
_OF_DOCUMENTS = ("$schema", "$id", "id", "$defs", "definitions")


class SchemaError(ValueError):
    """What a schema asks for cannot be had; the message names the keyword."""


def prepared(schema: dict[str, Any], *, is_lenient: bool = False) -> dict[str, Any]:
    """The schema for llguidance. `is_lenient`: what cannot be enforced is left out. Raises `SchemaError`."""
    try:
        return _Preparation(_with_whole_counts(schema), is_lenient).whole()
    except (AttributeError, TypeError):
        raise SchemaError("a keyword has a value of a type that it does not take") from None


_COUNTS = frozenset(f"{end}{what}" for end in ("min", "max") for what in ("Items", "Length", "Properties", "Contains"))


def _with_whole_counts(value: Any) -> Any:
    """The schema with counts as integers: to JSON Schema 1.0 is one."""
    match value:
        case dict():
            return {
                name: int(each)
                if name in _COUNTS and isinstance(each, float) and each.is_integer()
                else _with_whole_counts(each)
                for name, each in value.items()
            }
        case list():
            return [_with_whole_counts(each) for each in value]
    return value


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


class _Preparation:
    def __init__(self, root: dict[str, Any], is_lenient: bool) -> None:
        draft = root.get("$schema")
        self._root = _without_neighbours(root) if isinstance(draft, str) and _OLD_DRAFT.search(draft) else root
        self._is_lenient = is_lenient
        self._negation = Negation(self._resolved)
        self._exclusion = Exclusion(self._resolved)
        self._names = Names(self._resolved, self._negation)
        self._num_tag_steps = 0
        self._types: dict[str, set[str]] = {}
        """Types by reference."""
        self._made: dict[tuple[str, str], str] = {}
        """Names of definitions that the result has besides, by kind and what they are of."""
        self._sources: dict[str, Callable[[], Any]] = {}
        """Makes of each of them what is put for llguidance."""
        self._origins: dict[str, str] = {}
        """By references to our own definitions: what these are of."""
        self._reached: dict[str, set[str]] = {}
        """By reference: the references within what it refers to."""
        self._holding: dict[str, bool] = {}
        """By reference: whether what it refers to holds itself."""
        self._num_walked = self._num_spelled = self._num_joined = 0

    def whole(self) -> dict[str, Any]:
        done: dict[str, Any] = self._of(self._root)
        added: dict[str, Any] = {}
        while len(added) < len(self._sources):
            for name, source in [*self._sources.items()][len(added) :]:
                added[name] = self._of(source())
        if added:
            done["$defs"] = {**done.get("$defs", {}), **added}
        return done

    def _definition(self, kind: str, of: str, source: Callable[[], Any]) -> dict[str, Any]:
        """A reference to a definition of our own. `source` gives it as a schema that is still to be put for llguidance,
        once all else is looked at: schemas may hold themselves."""
        key = (kind, of)
        if key not in self._made:
            self._made[key] = f"{kind}-{len(self._made)}"
            self._sources[self._made[key]] = source
        return {"$ref": f"#/$defs/{self._made[key]}"}

    def _referred(self, schema: Mapping[str, Any]) -> Any:
        """What a reference names: in the schema as it came, or one of our own definitions."""
        name = schema["$ref"].removeprefix("#/$defs/") if isinstance(schema["$ref"], str) else ""
        return self._sources[name]() if name in self._sources else referred(schema, self._root)

    def _of(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        if self._is_mixed_with_itself(schema) and (joined := self._joined(schema, ())) is not None:
            kept = {name: schema[name] for name in _OF_DOCUMENTS if name in schema}
            text = json.dumps(joined, sort_keys=True)
            self._num_joined += len(text)
            return {**self._of(kept), **self._definition("joined", text, lambda: joined)}
        if (spread := self._spread(schema)) is not None:
            return self._of(spread)
        done = dict(schema)
        reference = done.get("$ref")
        if isinstance(reference, str) and not _stays(reference) and (found := self._referred(schema)) is not None:
            done |= self._definition("moved", reference, lambda: found)
        # Most schemas say little, and there may be tens of thousands: each part begins by looking for what it is about.
        if not _REWRITTEN.isdisjoint(done):
            self._rewrite(done)
        if not _NESTING.isdisjoint(done):
            self._inner(done)
        if not _MARKED.isdisjoint(done):
            self._formats(done)
        if not _NUMBERED.isdisjoint(done):
            self._numbers(done)
        for name in _REMARKS & done.keys():
            del done[name]
        return _or_null(done) if done.pop("nullable", False) is True else done

    def _inner(self, schema: dict[str, Any]) -> None:
        for name in _MAPPINGS:
            if isinstance(schema.get(name), dict):
                schema[name] = {key: self._of(value) for key, value in schema[name].items()}
        if isinstance(schema.get("oneOf"), list):
            self._exclude(schema)
        for name in _LISTS:
            if isinstance(schema.get(name), list):
                schema[name] = [self._of(one) for one in schema[name]]
        for name in _SCHEMAS:
            if isinstance(schema.get(name), dict):
                schema[name] = self._of(schema[name])

    # ----------------------------------------------------------------------------- what grammars know by other words

    def _rewrite(self, schema: dict[str, Any]) -> None:
        if "not" in schema and (opposite := self._negation.of(schema["not"])) is not None:
            require(schema, opposite)
            del schema["not"]
        if "if" not in schema or not schema.keys() & {"then", "else"}:
            for name in _CONDITIONS:
                schema.pop(name, None)
        if "if" in schema and (opposite := self._negation.of(schema["if"])) is not None:
            condition = schema.pop("if")
            met = {"allOf": [condition, schema.pop("then", True)]}
            require(schema, {"anyOf": [met, {"allOf": [opposite, schema.pop("else", True)]}]})
        for name in _DEPENDENCIES:
            for key, needed in schema.pop(name).items() if isinstance(schema.get(name), dict) else ():
                more = (
                    {"required": [key, *needed]}
                    if isinstance(needed, list)
                    else {"allOf": [{"required": [key]}, needed]}
                )
                require(schema, {"anyOf": [{"properties": {key: False}}, more]})
        if schema.get("uniqueItems") is True and "prefixItems" not in schema:
            self._arrange(schema)
        if "contains" in schema and not schema.keys() & {"minContains", "maxContains", "prefixItems"}:
            self._place(schema)
        if "propertyNames" in schema:
            self._names.spell(schema)
        if not schema.keys().isdisjoint(_MEMBER_COUNTS) and self._num_spelled < MAX_SPELLED:
            self._num_spelled += spell_counts(schema)

    def _arrange(self, schema: dict[str, Any]) -> None:
        """Spells out the lists without repetition, where items may have few values."""
        if self._num_spelled > MAX_SPELLED:
            return
        items = self._resolved(schema.get("items"))
        values = [True, False] if items.get("type") == "boolean" and not _values(items) else _values(items)
        if values is None or not _are_disjoint([values]):
            return
        counts = range(schema.get("minItems", 0), min(schema.get("maxItems", len(values)), len(values)) + 1)
        lists = [
            *itertools.islice(
                (one for count in counts for one in itertools.permutations(values, count)), MAX_ARRANGED + 1
            )
        ]
        if not 0 < len(lists) <= MAX_ARRANGED:
            return
        self._num_spelled += len(lists)
        arranged = [
            {"prefixItems": [{"const": value} for value in one], "minItems": len(one), "maxItems": len(one)}
            for one in lists
        ]
        require(schema, {"anyOf": arranged})
        del schema["uniqueItems"]

    def _place(self, schema: dict[str, Any]) -> None:
        """Says `contains` by the places in which that may be."""
        if self._num_spelled > MAX_SPELLED:
            return
        self._num_spelled += MAX_PLACES
        held = schema.pop("contains")
        places = [{"prefixItems": [*[True] * place, held], "minItems": place + 1} for place in range(MAX_PLACES)]
        require(schema, {"anyOf": [{"type": [one for one in _TYPES if one != "array"]}, *places]})

    def _formats(self, schema: dict[str, Any]) -> None:
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
        types = [self._types_of(branch) for branch in branches]
        if _are_objects_apart(types) and (tag := self._tag(branches, named)) is not None:
            branches = [self._with_tag(branch, tag) for branch in branches]
        elif not self._is_lenient:
            beside = {name: value for name, value in schema.items() if name in ASSERTIONS and name != "oneOf"}
            if (excluding := self._excluding(branches, (beside,) if beside else ())) is None:
                return
            branches = excluding
        if "anyOf" in schema:
            schema["allOf"] = [*schema.get("allOf", []), {"anyOf": branches}]
        else:
            schema["anyOf"] = branches
        del schema["oneOf"]

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
            source = functools.partial(self._with_tag, self._resolved(branch), tag)
            made = self._definition("tagged", f"{reference} {tag}", source)
            self._origins[made["$ref"]] = reference
            return {**branch, **made}
        for name in ("oneOf", "anyOf"):
            if isinstance(branch.get(name), list):
                others = {key: value for key, value in branch.items() if key != name}
                return {**others, "anyOf": [self._with_tag(one, tag) for one in branch[name]]}
        kind = {} if self._types_of(branch) else {"type": "object"}
        return {**branch, **kind, "required": list(dict.fromkeys([*branch.get("required", []), tag]))}

    def _excluding(self, branches: Sequence[Any], beside: Schemas) -> list[Any] | None:
        """The branches, each of which is told not to hold where another may; None: that cannot be told. What keeps two
        apart is the opposite of the other one, or if that cannot be told, what the one alone may have: values are left
        out then, and none is added. `beside`: what holds of each value besides."""
        values = [_values(self._resolved(branch)) for branch in branches]
        keys = [key_of(value) for each in values for value in each or ()]
        if None not in values and len(keys) == len(set(keys)):
            return [*branches]
        if len(branches) > MAX_COMPARED:
            return None
        whole = [(*beside, branch) for branch in branches]
        overlaps: list[list[int]] = [[] for _ in branches]
        for one, other in itertools.combinations(range(len(branches)), 2):
            if not self._exclusion.is_empty_between(whole[one], whole[other]):
                overlaps[one].append(other)
                overlaps[other].append(one)
        if len(branches) > MAX_EXCLUDING and any(overlaps):
            return None
        opposites = {place: self._negation.of(branches[place]) for place in sorted(set().union(*overlaps))}
        found = []
        for place, branch in enumerate(branches):
            conditions = []
            for other in overlaps[place]:
                if (condition := opposites[other]) is None:
                    between = self._exclusion.between(whole[place], whole[other])
                    if not between:
                        return None
                    condition = between[0] if len(between) == 1 else {"anyOf": between}
                if condition not in conditions:
                    conditions.append(condition)
            found.append({"allOf": [branch, *conditions]} if conditions else branch)
        return found

    # ------------------------------------------------------------------------------------------------ references

    def _is_mixed_with_itself(self, schema: dict[str, Any]) -> bool:
        """Whether it joins a reference with something else, and what that refers to holds itself: llguidance joins
        schemas where it meets them, and would never end."""
        if self._num_joined > MAX_JOINED:
            return False
        parts = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
        inner = [part for part in parts if isinstance(part, dict) and isinstance(part.get("$ref"), str)]
        if isinstance(schema.get("$ref"), str) and schema.keys() & ASSERTIONS - {"$ref"}:
            inner.append(schema)
        elif len(schema.keys() & ASSERTIONS) == 1 and len(parts) == 1:
            return False
        return any(self._holds_itself(part) for part in inner) or any(
            isinstance(part, dict) and self._is_mixed_with_itself(part) for part in parts
        )

    def _spread(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        """The schema as an `anyOf` of its branches, each with what it says besides, where a branch refers to what holds
        itself; None: it is something else."""
        name = "anyOf" if "anyOf" in schema else "oneOf"
        if name not in schema:
            return None
        beside = {key: value for key, value in schema.items() if key in ASSERTIONS and key != name}
        branches = schema.get(name)
        if not beside or not isinstance(branches, list) or beside.keys() & {"oneOf", "nullable"}:
            return None
        inner = [one for one in branches if isinstance(one, dict) and isinstance(one.get("$ref"), str)]
        if not any(self._holds_itself(one) for one in inner):
            return None
        done = dict(schema)
        if name == "oneOf":
            self._exclude(done)
            if "oneOf" in done:
                return None
        kept = {key: schema[key] for key in _OF_DOCUMENTS if key in schema}
        return {**kept, "anyOf": [{"allOf": [beside, branch]} for branch in done["anyOf"]]}

    def _joined(self, schema: dict[str, Any], followed: tuple[str, ...]) -> dict[str, Any] | None:
        """The schema without references among what it joins: with what they refer to. None: that would not end."""
        parts: list[Any] = []
        rest = {name: value for name, value in schema.items() if name in ASSERTIONS}
        if isinstance(reference := rest.pop("$ref", None), str):
            if reference in followed or len(followed) > MAX_REFERENCES or not (found := self._resolved(schema)):
                return None
            parts.append(self._joined(found, (*followed, reference)))
        if isinstance(rest.get("allOf"), list):
            parts += [self._joined(part, followed) if isinstance(part, dict) else part for part in rest.pop("allOf")]
        if any(part is None for part in parts):
            return None
        return rest if not parts else {"allOf": [*parts, rest] if rest else parts}

    def _holds_itself(self, schema: Mapping[str, Any]) -> bool:
        reference = self._origins.get(schema["$ref"], schema["$ref"])
        if reference not in self._holding:
            seen, left = set[str](), {reference}
            while left and reference not in seen:
                one = left.pop()
                if one not in self._reached:
                    self._reached[one] = self._references_in(self._referred({"$ref": one}))
                left |= self._reached[one] - seen
                seen |= self._reached[one]
            self._holding[reference] = reference in seen
        return self._holding[reference]

    def _references_in(self, schema: Any) -> set[str]:
        found: set[str] = set()
        left = [schema]
        while left and self._num_walked < MAX_WALKED:
            self._num_walked += 1
            one = left.pop()
            if isinstance(one, dict):
                if isinstance(reference := one.get("$ref"), str):
                    found.add(reference)
                left += [value for name, value in one.items() if name not in ("$defs", "definitions")]
            elif isinstance(one, list):
                left += one
        return found

    def _resolved(self, schema: Any) -> dict[str, Any]:
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._referred(schema)
        return schema if isinstance(schema, dict) and "$ref" not in schema else {}


def _are_objects_apart(types: Sequence[set[str]]) -> bool:
    """No value holds in two branches but an object, if those of which no type is known take objects alone."""
    kinds = [each - {"object"} for each in types]
    return _are_apart(kinds) and not {"integer", "number"} <= set().union(*kinds)


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
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def _stays(reference: str) -> bool:
    """Whether the result has in the same place what a reference within a schema names, put for llguidance."""
    parts = iter(reference.split("/")[1:])
    for part in parts:
        if part in ("$defs", "definitions", "properties"):
            next(parts, None)
        elif part not in ("items", "additionalProperties"):
            return False
    return True


def _without_neighbours(schema: Any) -> Any:
    """The schema without keywords beside references, which drafts until 7 ignore."""
    if isinstance(schema, list):
        return [_without_neighbours(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = schema
    if isinstance(schema.get("$ref"), str):
        kept = {name: value for name, value in schema.items() if name == "$ref" or name not in ASSERTIONS}
    return {name: value if name in _VALUES else _without_neighbours(value) for name, value in kept.items()}
