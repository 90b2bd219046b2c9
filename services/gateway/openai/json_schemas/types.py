"""Types that a schema names and JSON Schema does not have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.gateway.openai.json_schemas.keywords import LISTS, MAPPINGS, SCHEMAS, TYPES

KNOWN = frozenset((*TYPES, "integer"))


def unknown_type(schema: Any) -> tuple[str, str] | None:
    """The first such type, after its place (`properties.city.type`)."""
    left: list[tuple[str, Any]] = [("", schema)]
    while left:
        place, one = left.pop()
        if not isinstance(one, dict):
            continue
        named = one.get("type")
        for name in named if isinstance(named, list) else [named]:
            if isinstance(name, str) and name not in KNOWN:
                return f"{place}type", name
        left += reversed([(f"{place}{where}.", inner) for where, inner in _schemas_in(one)])
    return None


def _schemas_in(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in schema:
        value = schema[keyword]
        if keyword in MAPPINGS and isinstance(value, dict):
            yield from ((f"{keyword}.{name}", inner) for name, inner in value.items())
        elif keyword in LISTS and isinstance(value, list):
            yield from ((f"{keyword}[{number}]", inner) for number, inner in enumerate(value))
        elif keyword in SCHEMAS:
            yield keyword, value
