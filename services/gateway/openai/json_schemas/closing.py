"""Closes objects against members that nobody named, for the arguments of functions."""

from __future__ import annotations

from typing import Any

from services.gateway.openai.json_schemas.keywords import MAPPINGS


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
    for name in MAPPINGS:
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
