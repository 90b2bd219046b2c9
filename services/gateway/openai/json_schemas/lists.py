"""Lists without repetition, and what lists contain, in keywords that grammars can enforce."""

from __future__ import annotations

import itertools
from typing import Any

from services.gateway.openai.json_schemas.keywords import TYPES
from services.gateway.openai.json_schemas.members import require
from services.gateway.openai.json_schemas.values import are_disjoint, values_of

MAX_ARRANGED = 350
"""Most lists that are spelled out where lists have no repetition."""
MAX_PLACES = 4
"""Places in a list, from its beginning, of which one has what the list has to contain: values are left out, and none is
added."""


def spell_arrangements(schema: dict[str, Any], items: dict[str, Any]) -> int:
    """Spells out the lists without repetition, where items may have few values, and gives how many these are. `items`: the
    schema of the items, without references."""
    values = [True, False] if items.get("type") == "boolean" and not values_of(items) else values_of(items)
    if values is None or not are_disjoint([values]):
        return 0
    counts = range(schema.get("minItems", 0), min(schema.get("maxItems", len(values)), len(values)) + 1)
    every = (one for count in counts for one in itertools.permutations(values, count))
    lists = [*itertools.islice(every, MAX_ARRANGED + 1)]
    if not 0 < len(lists) <= MAX_ARRANGED:
        return 0
    arranged = [
        {"prefixItems": [{"const": value} for value in one], "minItems": len(one), "maxItems": len(one)}
        for one in lists
    ]
    require(schema, {"anyOf": arranged})
    del schema["uniqueItems"]
    return len(lists)


def spell_places(schema: dict[str, Any]) -> int:
    """Says `contains` by the places in which that may be, and gives how many these are."""
    held = schema.pop("contains")
    places = [{"prefixItems": [*[True] * place, held], "minItems": place + 1} for place in range(MAX_PLACES)]
    require(schema, {"anyOf": [{"type": [one for one in TYPES if one != "array"]}, *places]})
    return MAX_PLACES
