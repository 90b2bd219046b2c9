"""How many members JSON objects may have, and their names, in keywords that grammars can enforce. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

from services.gateway.openai.json_schemas.keywords import ASSERTIONS, KNOWN_FORMATS
from services.gateway.openai.json_schemas.negation import Negation
from services.gateway.openai.json_schemas.patterns import finds_nothing, looks_around

MAX_SETS = 64
"""Most sets of members that are spelled out for one number of members."""
_ANY_NAME = frozenset(("", ".*", "^.*$", "^.*", ".*$"))
_ANY_FILLED_NAME = frozenset((".+", "^.+$", "^.+", ".+$", "."))


def require(schema: dict[str, Any], other: Any) -> None:
    """Makes values follow another schema too."""
    schema["allOf"] = [*schema.get("allOf", []), other]


def spell_counts(schema: dict[str, Any]) -> int:
    """Says `minProperties` and `maxProperties` by which of the named members are there, and gives how many sets of them it
    spelled out. Where others may be there as well, they do not count for the least number, and are not allowed beside a
    greatest one: values are left out then, and none is added."""
    members, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(members, dict) or not isinstance(required, list) or can_count(schema):
        return 0
    if not set(required) <= set(members):
        return 0
    optional = [name for name in members if name not in required and members[name] is not False]
    is_open = schema.get("additionalProperties", True) is not False or bool(schema.get("patternProperties"))
    least, most = schema.get("minProperties"), schema.get("maxProperties")
    num_spelled = 0
    if isinstance(least, int):
        num_more = least - len(set(required))
        sets = _sets(optional, num_more)
        if num_more <= 0:
            del schema["minProperties"]
        elif sets is not None and (sets or not is_open):
            require(schema, {"anyOf": [{"required": [*names]} for names in sets]} if sets else False)
            del schema["minProperties"]
            num_spelled += len(sets)
    if isinstance(most, int) and not schema.get("patternProperties"):
        num_more = most - len(set(required))
        sets = [()] if num_more >= len(optional) else _sets(optional, num_more)
        if num_more < 0 or sets is None:
            return num_spelled
        del schema["maxProperties"]
        if is_open:
            schema["additionalProperties"] = False
        if num_more < len(optional):
            absent = [{"properties": {name: False for name in optional if name not in names}} for names in sets]
            require(schema, {"anyOf": absent})
            num_spelled += len(absent)
    return num_spelled


def can_count(schema: dict[str, Any]) -> bool:
    """Whether a grammar can count the members of an object."""
    members = schema.get("properties")
    return not isinstance(members, dict) or set(members) <= set(schema.get("required", ()))


def _sets(names: list[str], size: int) -> list[tuple[str, ...]] | None:
    """All sets of so many names; None: too many."""
    if size < 0:
        return []
    found = list(itertools.islice(itertools.combinations(names, size), MAX_SETS + 1))
    return found if len(found) <= MAX_SETS else None


class Names:
    """What `propertyNames` allows."""

    def __init__(self, resolve: Callable[[Any], Any], negation: Negation) -> None:
        """`resolve`: gives what a schema refers to, an empty one where that is not known."""
        self._resolve = resolve
        self._negation = negation

    def spell(self, schema: dict[str, Any]) -> None:
        """Says `propertyNames` by named members or by a pattern, where other keywords leave that open."""
        allowed = self._allowed(schema["propertyNames"])
        if allowed == "":
            del schema["propertyNames"]
        members, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        if not allowed or not isinstance(members, dict) or not isinstance(patterns, dict):
            return
        if not patterns:
            other = schema.get("additionalProperties", True)
        elif len(patterns) == 1 and self._are_all(next(iter(patterns)), allowed):
            ((_, other),) = patterns.items()
        else:
            return
        if isinstance(allowed, list):
            rest = [] if other is False else [name for name in allowed if name not in members]
            kept = {name: member for name, member in members.items() if name in allowed}
            if patterns:
                kept = {name: {"allOf": [member, other]} for name, member in kept.items()}
            schema["properties"] = kept | dict.fromkeys(rest, other)
            schema.pop("patternProperties", None)
        elif members:
            return
        else:
            schema["patternProperties"] = {allowed: other}
        schema["additionalProperties"] = False
        del schema["propertyNames"]

    def _are_all(self, pattern: str, allowed: str | list[str]) -> bool:
        """Whether a pattern finds something in each name that is allowed."""
        if pattern in _ANY_NAME or pattern == allowed:
            return True
        is_filled = "" not in allowed if isinstance(allowed, list) else finds_nothing(allowed, "")
        return pattern in _ANY_FILLED_NAME and is_filled

    def _allowed(self, schema: Any) -> str | list[str] | None:
        """The names, or a pattern of them, which is empty for all; None: it is not known."""
        if schema is True:
            return ""
        found = self._resolve(schema)
        if not found and schema != {}:
            return None
        told = {key: found[key] for key in found if key in ASSERTIONS and key != "type"}
        if told.get("format") not in KNOWN_FORMATS:
            told.pop("format", None)
        if "type" in found and found["type"] != "string":
            return None
        if not told:
            return ""
        match told:
            case {"const": str() as name, **rest} if not rest:
                return [name]
            case {"enum": list() as names, **rest} if not rest and all(isinstance(name, str) for name in names):
                return names
            case {"pattern": str() as pattern, **rest} if not rest and not looks_around(pattern):
                return pattern
            case {"not": other, **rest} if not rest:
                return self._opposite(other)
            case {"anyOf": list() as choice, **rest} if not rest:
                return _union([self._allowed(one) for one in choice])
            case {**rest} if not rest.keys() - {"minLength", "maxLength"} and all(
                type(each) is int for each in rest.values()
            ):
                return f"^[\\s\\S]{{{rest.get('minLength', 0)},{rest.get('maxLength', '')}}}$"
        return None

    def _opposite(self, schema: Any) -> str | None:
        opposite = self._negation.of(schema)
        choice = opposite.get("anyOf", [opposite]) if isinstance(opposite, dict) else []
        of_texts = [one for one in choice if "string" in one.get("type", ()) and one.keys() <= {"type", "pattern"}]
        return of_texts[0].get("pattern", "") if len(of_texts) == 1 else None


def _union(parts: list[str | list[str] | None]) -> str | list[str] | None:
    if None in parts:
        return None
    if "" in parts:
        return ""
    names = [name for part in parts if isinstance(part, list) for name in part]
    patterns = [part for part in parts if isinstance(part, str)]
    if not patterns:
        return list(dict.fromkeys(names))
    spelled = [f"^(?:{'|'.join(map(re.escape, names))})$"] if names else []
    return "|".join(f"(?:{pattern})" for pattern in [*patterns, *spelled])
