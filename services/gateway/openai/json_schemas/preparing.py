"""Puts a schema in words that llguidance enforces.

What only remarks on values (formats nobody knows, `discriminator`) is left out, OpenAPI's older words are translated, and
`oneOf` becomes `anyOf` where at most one branch can hold, or where each can be told to exclude the others. `not`, `if`,
`dependencies` and `uniqueItems` are put in words that grammars follow, where there are some. What no grammar can enforce is
refused, or left out and named.
"""

from __future__ import annotations

import re
from typing import Any

from services.gateway.openai.json_schemas.exclusion import MAX_PATTERN_STEPS
from services.gateway.openai.json_schemas.joining import Joining
from services.gateway.openai.json_schemas.keywords import KNOWN_FORMATS, LISTS, MAPPINGS, SCHEMAS
from services.gateway.openai.json_schemas.lists import spell_arrangements, spell_places
from services.gateway.openai.json_schemas.members import Names, can_count, require, spell_counts
from services.gateway.openai.json_schemas.negation import Negation
from services.gateway.openai.json_schemas.numbers import bring_in_range, with_whole_counts
from services.gateway.openai.json_schemas.patterns import Steps, are_apart, looks_around
from services.gateway.openai.json_schemas.references import References, stays, without_neighbours, without_unused
from services.gateway.openai.json_schemas.shortfalls import SchemaError, Shortfalls
from services.gateway.openai.json_schemas.unions import Unions

MAX_SPELLED = 5000
"""Most lists and sets of members that are spelled out in a whole schema."""
_NESTING = frozenset((*SCHEMAS, *LISTS, *MAPPINGS))
_CONDITIONS = ("if", "then", "else")
_DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
_MEMBER_COUNTS = ("minProperties", "maxProperties")
_SINCE_2019 = frozenset(("minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef"))
_UNFOLLOWED = _SINCE_2019 | {
    *("not", *_CONDITIONS, *_DEPENDENCIES, "uniqueItems", "contains", "propertyNames", "$recursiveRef")
}
"""Keywords that grammars do not know."""
_REWRITTEN = _UNFOLLOWED | {*_MEMBER_COUNTS}
_MARKED = frozenset(("format", "$schema", "pattern", "patternProperties"))
_NUMBERED = frozenset(("const", "enum", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"))
_REMARKS = frozenset(
    (
        *("title", "description", "markdownDescription", "$comment", "default", "example", "examples"),
        *("deprecated", "readOnly", "writeOnly", "discriminator"),
    )
)
"""Keywords that are left out, since no output depends on them and requests carry their grammar."""
_LOOKS_AROUND = "look-around, word boundaries and back references cannot be enforced"
_OLD_DRAFT = re.compile(r"draft-0[3-7]\b")


def prepared(schema: dict[str, Any], left_out: list[str] | None = None) -> dict[str, Any]:
    """The schema for llguidance. `left_out`: takes the names of keywords that cannot be enforced, with their places; None:
    such a schema is refused. Raises `SchemaError`."""
    try:
        return _Preparation(without_unused(with_whole_counts(schema)), left_out).whole()
    except (AttributeError, TypeError):
        raise SchemaError("a keyword has a value of a type that it does not take") from None
    except RecursionError:
        raise SchemaError("a schema holds its own opposite") from None


class _Preparation:
    def __init__(self, root: dict[str, Any], left_out: list[str] | None) -> None:
        draft = root.get("$schema")
        self._is_old = isinstance(draft, str) and _OLD_DRAFT.search(draft) is not None
        self._root = without_neighbours(root) if self._is_old else root
        self._shortfalls = Shortfalls(self._root, left_out)
        self._references = References(self._root)
        self._negation = Negation(self._references.resolved)
        self._names = Names(self._references.resolved, self._negation)
        self._unions = Unions(self._references, self._negation, self._shortfalls)
        self._joining = Joining(self._references, self._unions)
        self._num_spelled = 0
        self._steps = Steps(MAX_PATTERN_STEPS)

    def whole(self) -> dict[str, Any]:
        done: dict[str, Any] = self._of(self._root)
        if added := self._references.definitions(self._of):
            done["$defs"] = {**done.get("$defs", {}), **added}
        return done

    def _of(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        self._shortfalls.within.append(schema)
        done = self._put(schema)
        self._shortfalls.within.pop()
        return done

    def _put(self, schema: dict[str, Any]) -> dict[str, Any]:
        if (other := self._joining.joined(schema) or self._joining.spread(schema)) is not None:
            whole: dict[str, Any] = self._of(other)
            return whole
        done = dict(schema)
        reference = done.get("$ref")
        if isinstance(reference, str) and not stays(reference):
            found = self._references.referred(schema)
            done |= {} if found is None else self._references.definition("moved", reference, lambda: found)
        # Most schemas say little, and there may be tens of thousands: each part begins by looking for what it is about.
        if not _REWRITTEN.isdisjoint(done):
            self._rewrite(done)
        if not _NESTING.isdisjoint(done):
            self._inner(done)
        if not _MARKED.isdisjoint(done):
            self._texts(done)
        if not _NUMBERED.isdisjoint(done):
            bring_in_range(done, self._shortfalls)
        for name in _REMARKS & done.keys():
            del done[name]
        return _or_null(done) if done.pop("nullable", False) is True else done

    def _inner(self, schema: dict[str, Any]) -> None:
        for name in MAPPINGS:
            if isinstance(schema.get(name), dict):
                schema[name] = {key: self._of(value) for key, value in schema[name].items()}
        if isinstance(schema.get("oneOf"), list):
            self._unions.choose(schema)
        for name in LISTS:
            if isinstance(schema.get(name), list):
                schema[name] = [self._of(one) for one in schema[name]]
        for name in SCHEMAS:
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
        most = schema.get("maxItems")
        if schema.get("uniqueItems") is False or (isinstance(most, int) and most <= 1):
            schema.pop("uniqueItems", None)
        if schema.get("uniqueItems") is True and "prefixItems" not in schema and self._may_spell():
            self._num_spelled += spell_arrangements(schema, self._references.resolved(schema.get("items")))
        if (
            "contains" in schema
            and not schema.keys() & {"minContains", "maxContains", "prefixItems"}
            and self._may_spell()
        ):
            self._num_spelled += spell_places(schema)
        if "propertyNames" in schema:
            self._names.spell(schema)
        if not schema.keys().isdisjoint(_MEMBER_COUNTS) and self._may_spell():
            self._num_spelled += spell_counts(schema)
        self._leave_out(schema)

    def _may_spell(self) -> bool:
        return self._num_spelled < MAX_SPELLED

    def _leave_out(self, schema: dict[str, Any]) -> None:
        """Leaves out what could not be put in other words."""
        unfollowed = _UNFOLLOWED if can_count(schema) else _UNFOLLOWED.union(_MEMBER_COUNTS)
        for name in [name for name in schema if name in unfollowed]:
            is_silent = name in ("then", "else") or (self._is_old and name in _SINCE_2019)
            if not is_silent:
                self._shortfalls.add(name)
            del schema[name]

    def _texts(self, schema: dict[str, Any]) -> None:
        if isinstance(schema.get("format"), str) and schema["format"] not in KNOWN_FORMATS:
            del schema["format"]
        if isinstance(uri := schema.get("$schema"), str) and "json-schema.org" not in uri:
            del schema["$schema"]
        if isinstance(pattern := schema.get("pattern"), str) and looks_around(pattern):
            self._shortfalls.add("pattern", _LOOKS_AROUND)
            del schema["pattern"]
        if isinstance(schema.get("patternProperties"), dict):
            schema["patternProperties"] = self._followed(schema["patternProperties"])

    def _followed(self, of_members: dict[str, Any]) -> dict[str, Any]:
        """Schemas of members by patterns, one of which at most may find something in a name."""
        found: dict[str, Any] = {}
        for pattern, schema in of_members.items():
            if looks_around(pattern):
                self._shortfalls.add(f"patternProperties.{pattern}", _LOOKS_AROUND)
            elif self._shortfalls.may_be_left_out and not all(are_apart(pattern, one, self._steps) for one in found):
                self._shortfalls.add(f"patternProperties.{pattern}")
            else:
                found[pattern] = schema
        return found


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, or null."""
    named = schema.get("type")
    if isinstance(named, str) and "enum" not in schema and "const" not in schema:
        return schema if named == "null" else {**schema, "type": [named, "null"]}
    kept = ("$defs", "definitions", "$schema", "$id")
    definitions: dict[str, Any] = {name: schema.pop(name) for name in kept if name in schema}
    return {"anyOf": [schema, {"type": "null"}], **definitions}
