"""Numbers in schemas, as llguidance reads them: it takes all for doubles, and counts for integers only."""

from __future__ import annotations

import math
from typing import Any

from services.gateway.openai.json_schemas.shortfalls import Shortfalls

EXACT_INTEGER = 2**53
"""Up to which a double holds every integer, as llguidance reads them."""
GREATEST_BOUND = 2**63 - 1024
"""Greatest bound of integers: the greatest double within 64 bits."""
_COUNTS = frozenset(f"{end}{what}" for end in ("min", "max") for what in ("Items", "Length", "Properties", "Contains"))


def with_whole_counts(value: Any) -> Any:
    """The schema with counts as integers: to JSON Schema 1.0 is one."""
    match value:
        case dict():
            return {
                name: int(each)
                if name in _COUNTS and isinstance(each, float) and each.is_integer()
                else with_whole_counts(each)
                for name, each in value.items()
            }
        case list():
            return [with_whole_counts(each) for each in value]
    return value


def bring_in_range(schema: dict[str, Any], shortfalls: Shortfalls) -> None:
    """Makes bounds ones that a double holds. Raises `SchemaError`."""
    for name in ("const", "enum"):
        if (wrong := _inexact(schema.get(name))) is not None:
            shortfalls.add(
                name, f"the integer {wrong} is beyond 2^53 and would be written as another; give it as a string"
            )
            del schema[name]
    _bound(schema, "minimum", "exclusiveMinimum", 1, shortfalls)
    _bound(schema, "maximum", "exclusiveMaximum", -1, shortfalls)


def _bound(schema: dict[str, Any], name: str, exclusive: str, sign: int, shortfalls: Shortfalls) -> None:
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
            shortfalls.add(key, f"{value} is beyond the integers of 64 bits")
            del schema[key]
            continue
        del schema[key]
        schema[name] = sign * _next_double(max(least, -GREATEST_BOUND))


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
