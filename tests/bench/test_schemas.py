"""Schemas of JSONSchemaBench are told right, refused, or counted as what they are."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLTokenizer

from bench.schemas import told

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}

OF_NONE = "is not valid under any of the schemas listed in the 'anyOf' keyword"


def instance(data: Any, valid: bool, rust_error: str = "") -> dict[str, Any]:
    return {"data": data, "valid": valid, "rust_error": rust_error}


@pytest.mark.parametrize(
    ("schema", "instances", "kind"),
    [
        (OBJECT, [instance({"a": 1, "b": "x"}, True), instance({"a": "1"}, False), instance({}, False)], "ok"),
        (OBJECT, [instance({"b": "x", "a": 1}, True)], "order"),
        (OBJECT, [instance({"a": "1"}, True)], "too strict"),
        (OBJECT, [instance({"a": 1}, False)], "wrong"),
        ({"type": "string", "format": "regex"}, [instance("*", False, '"*" is not a "regex"')], "format"),
        ({"type": "string", "format": "regex"}, [instance("*", False, '"*" is too long')], "wrong"),
        ({"anyOf": [{"type": "string", "format": "regex"}]}, [instance("*", False, f'"*" {OF_NONE}')], "format"),
        ({"anyOf": [{"type": "string", "pattern": "."}]}, [instance("*", True)], "ok"),
        ({"type": "array", "uniqueItems": True}, [instance([1, 1], False)], "refused"),
    ],
)
def test_a_schema_is_counted_as_what_comes_of_it(schema: Any, instances: list[dict[str, Any]], kind: str) -> None:
    outcome = told(schema, instances, LLTokenizer("byte"))
    assert outcome.kind == kind, outcome
    if kind == "refused":
        assert "uniqueItems" in outcome.reason
