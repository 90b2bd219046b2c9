"""Values that a schema names, and the types that its values may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from services.gateway.openai.json_schemas.references import MAX_REFERENCES, referred

_KINDS = {
    dict: "object",
    list: "array",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    str: "string",
}


def kind_of(value: Any) -> str:
    """The type of a JSON value, as schemas name it."""
    return _KINDS.get(type(value), "")


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Which the schema names; None: it names none."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def are_disjoint(lists: Sequence[Sequence[Any]]) -> bool:
    """Whether no value is named twice; False too where equal ones may be written differently."""
    keys = [repr(value) for values in lists for value in values]
    return len(keys) == len(set(keys)) and not any(isinstance(v, float) for values in lists for v in values)


def types_of(schema: Any, root: Any) -> set[str]:
    """The types that values of a schema may have; empty: any, or it is not known. `root`: in which its references are."""
    return known_types_of(schema, root, {})


def known_types_of(schema: Any, root: Any, known: dict[str, set[str]], depth: int = 0) -> set[str]:
    """Finds what `types_of` gives. `known`: types by reference, none yet of those that are followed."""
    if not isinstance(schema, dict) or depth > MAX_REFERENCES:
        return set()
    found: set[str] = set()
    named = schema.get("type")
    if isinstance(named, str | list):
        found.update([named] if isinstance(named, str) else [one for one in named if isinstance(one, str)])
    else:
        found.update(_KINDS[type(value)] for value in values_of(schema) or ())
        for one in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(one), list):
                of_each = [known_types_of(each, root, known, depth + 1) for each in schema[one]]
                if one == "allOf" or all(of_each):
                    found.update(*of_each)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in known:
                known[reference] = set()
                known[reference] = known_types_of(referred(schema, root), root, known, depth + 1)
            found |= known[reference]
    if schema.get("nullable") is True and found:
        found.add("null")
    return found


def are_objects_apart(types: Sequence[Set[str]]) -> bool:
    """No value holds in two branches but an object, if those of which no type is known take objects alone."""
    kinds = [each - {"object"} for each in types]
    every = set[str]().union(*kinds)
    return sum(map(len, kinds)) == len(every) and not {"integer", "number"} <= every
