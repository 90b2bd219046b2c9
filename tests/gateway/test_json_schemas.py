"""Schemas as pydantic, schemars, OpenAPI and others write them: the grammar that is made of one takes what it allows
alone."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from services.gateway.http.errors import ApiError
from services.gateway.openai.json_schemas.closing import closed
from services.gateway.openai.json_schemas.numbers import EXACT_INTEGER, GREATEST_BOUND
from services.gateway.openai.json_schemas.preparing import prepared
from services.gateway.openai.json_schemas.shortfalls import SchemaError
from services.gateway.openai.json_schemas.unions import MAX_COMPARED
from services.gateway.openai.structured import json_grammar

BYTES = LLTokenizer("byte")


def takes(schema: Any, value: Any, left_out: list[str] | None = None) -> bool:
    grammar = json.dumps({"grammars": [json_grammar(schema, "p", left_out)]})
    matcher, written = LLMatcher(BYTES, grammar, log_level=0), list(json.dumps(value).encode())
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting()


def refusal(schema: Any) -> str:
    with pytest.raises(SchemaError) as refused:
        prepared(schema)
    return str(refused.value)


NESTED = {"type": "object", "properties": {"b": {"type": "integer"}}}
TWO_SAY = {
    "$defs": {"n": NESTED},
    "properties": {"a": {"$ref": "#/$defs/n", "properties": {"c": {"type": "integer"}}, "required": ["c"]}},
}
"""A reference, and beside it what its object must have besides."""


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        (NESTED, [{}, {"b": 1}], [{"c": 1}, {"b": 1, "c": 1}]),
        ({"type": "object", "properties": {}}, [{}], [{"c": 1}]),
        ({"type": "object"}, [{}, {"c": 1}], [1]),
        ({"type": "object", "properties": {"a": NESTED}}, [{"a": {"b": 1}}], [{"a": {"c": 1}}]),
        ({"type": "array", "items": NESTED}, [[{"b": 1}]], [[{"c": 1}]]),
        ({"anyOf": [NESTED, {"type": "null"}]}, [None, {"b": 1}], [{"c": 1}]),
        ({"$defs": {"n": NESTED}, "properties": {"a": {"$ref": "#/$defs/n"}}}, [{"a": {"b": 1}}], [{"a": {"c": 1}}]),
        ({**NESTED, "additionalProperties": {"type": "null"}}, [{"b": 1, "c": None}], [{"c": 1}]),
        ({**NESTED, "required": ["c"]}, [{"c": 1}], [{}]),
        ({**NESTED, "anyOf": [{"required": ["c"]}, {"required": ["b"]}]}, [{"b": 1}, {"c": 1}], [{}]),
        ({"allOf": [NESTED, {"properties": {"c": {"type": "integer"}}}]}, [{"b": 1, "c": 1}], [{"c": None}]),
        ({**NESTED, "required": True}, [], []),
        (TWO_SAY, [{"a": {"b": 1, "c": 1}}], [{"a": {"b": 1}}]),
        ({"anyOf": [NESTED], "required": ["c"]}, [{"b": 1, "c": 1}], [{"b": 1}]),
        (
            {"anyOf": [NESTED], "$ref": "#/$defs/n", "$defs": {"n": {"required": ["c"], "properties": {"c": {}}}}},
            [{"b": 1, "c": 1}],
            [{"b": 1}],
        ),
        ({**NESTED, "const": {"b": 1, "c": 1}}, [{"b": 1, "c": 1}], [{"b": 1}]),
        ({**NESTED, "required": ["b"], "dependentRequired": {"b": ["c"]}}, [{"b": 1, "c": 1}], [{"b": 1}]),
    ],
)
def test_objects_of_named_properties_are_closed(schema: Any, taken: list[Any], refused: list[Any]) -> None:
    """Objects are closed where the schema says nothing of others and what it asks for stays possible."""
    found = closed(schema)
    assert all(takes(found, value) and takes(schema, value) for value in taken)
    assert not any(takes(found, value) for value in refused)


FORMATS = (
    "byte binary password uri-reference regex json-pointer phone path file-path url base64url decimal int32 x-mine"
)


AB: dict[str, Any] = {"type": "object", "properties": {"a": {}, "b": {}}}
RUN = {"properties": {"kind": {"const": "run"}}, "required": ["kind"]}
KINDS = {"type": "object", "properties": {"kind": {"enum": ["run", "ask"]}, "command": {"type": "string"}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({**AB, "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}, {"a": 1, "b": 1}]),
        ({**AB, "not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
        ({**AB, "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}}, [{}, {"c": 1}], [{"a": 1}, {"b": 1}]),
        ({**KINDS, "not": RUN}, [{}, {"kind": "ask"}], [{"kind": "run"}]),
        ({"not": {"type": ["string", "null"]}}, [1, True, [], {}], ["", None]),
        ({"not": {"not": {"type": "string"}}}, ["x"], [1]),
        ({"not": {"enum": ["a", "ab", "]^-", True, None]}}, ["", "b", "aa", "abc", "]", "]^-]", 1, False],
         ["a", "ab", "]^-", True, None]),
        ({"oneOf": [True, {"type": "string"}]}, [1, None], ["x"]),
        ({"type": "string", "not": {"const": ""}}, ["x", '"'], [""]),
        ({"type": "string", "not": {"minLength": 3}}, ["", "ab"], ["abc"]),
        ({"type": "integer", "not": {"minimum": 3, "maximum": 5}}, [2, 6], [3, 4, 5]),
        ({"type": "array", "not": {"maxItems": 1}}, [[1, 2]], [[], [1]]),
        ({**AB, "dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
        ({**AB, "dependencies": {"a": ["b"]}}, [{}, {"a": 1, "b": 1}], [{"a": 1}]),
        ({**AB, "dependencies": {"a": {"properties": {"b": {"type": "string"}}}}}, [{"b": 1}, {"a": 1}, {"a": 1, "b": "x"}],
         [{"a": 1, "b": 1}]),
        ({**AB, "dependentSchemas": {"a": {"required": ["b"]}}}, [{}, {"a": 1, "b": 1}], [{"a": 1}]),
        ({**KINDS, "if": RUN, "then": {"required": ["command"]}}, [{}, {"kind": "ask"}, {"kind": "run", "command": "x"}],
         [{"kind": "run"}]),
        ({**KINDS, "if": RUN, "else": {"required": ["command"]}}, [{"kind": "run"}, {"kind": "ask", "command": "x"}],
         [{"kind": "ask"}]),
        ({"type": "array", "items": {"enum": ["x", "y", "z"]}, "uniqueItems": True, "minItems": 1},
         [["x"], ["z", "x"], ["y", "z", "x"]], [[], ["x", "x"], ["x", "y", "x"]]),
        ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, [[], [True, False]], [[True, True]]),
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 1.0}, [[2, 1]], [[], [1, 1]]),
        ({"type": "object", "propertyNames": {"minLength": 2.0, "maxLength": 3}}, [{"ab": 1}], [{"a": 1}, {"abcd": 1}]),
        ({**AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
        ({"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 2}]}, ["a", "abcd"], ["ab", "abc"]),
        ({"not": {"enum": [0, 2]}}, [1, -1, 1.5, 20, True, "x"], [0, 2, 2.0, -0.0]),
        ({"not": {"oneOf": [{"type": "string"}, {"type": ["string", "null"]}]}}, ["x", 1], [None]),
        ({"type": "array", "not": {"contains": {"type": "string"}}}, [[], [1, None]], [["x"], [1, "x"]]),
        ({"type": "string", "not": {"const": "a", "title": "A", "x-order": 1}}, ["b"], ["a"]),
        ({"type": "array", "contains": {"type": "integer"}}, [[1], ["x", 1], ["x", "y", None, 2, "z"]], [[], ["x"], 1]),
        ({"type": "array", "items": {"type": ["integer", "null"]}, "contains": {"minimum": 5, "type": "integer"}},
         [[7], [None, 5]], [[], [4], [7, "x"]]),
        ({"contains": {"const": "a"}}, ["x", 1, {}, ["a"]], [[], ["b"]]),
        ({"not": {"type": "array", "items": {"type": "string"}}}, [1, {}, [1], ["x", 1]], [[], ["x"], ["x", "y"]]),
        ({"not": {"items": False}}, [[1], [1, 2]], [[], 1]),
        ({"type": "object", "not": {"patternProperties": {"^a": {"type": "string"}}}},
         [{"a": 1}, {"ab": None}], [{}, {"b": 1}, {"a": "x"}]),
        ({"not": {"pattern": "a5b"}}, ["", "a5", "a55b", "\n\\"], ["a5b", "xa5b\n", 1, {}]),
        ({"type": "string", "not": {"pattern": "(^[^5]*$)|7"}}, ["5", "a5\n"], ["", "a", "57"]),
        ({"type": "string", "if": {"pattern": "^a"}, "then": {"maxLength": 2}}, ["ab", "bcd"], ["abc"]),
        ({"type": "object", "propertyNames": {"not": {"pattern": "^x-"}}}, [{}, {"x": 1}], [{"x-a": 1}]),
        ({"not": {"const": [1, "a"]}}, [[1], [1, "b"], [2, "a"], [1, "a", 0], [], {}, "a"], [[1, "a"]]),
        ({"not": {"const": []}}, [[0], {}, None], [[]]),
        ({"not": {"enum": [{"a": 1, "b": None}, 2, [True]]}}, [{}, {"a": 1}, {"a": 1, "b": 0}, {"a": 1, "b": None, "c": 2},
                                                               {"a": 2, "b": None}, [], [False], [True, 1], 3, "x"],
         [{"a": 1, "b": None}, 2, [True]]),
        ({"not": {"const": {"a": {"b": [1]}}}}, [{"a": {"b": [2]}}, {"a": {}}, {"a": 1}, {}], [{"a": {"b": [1]}}]),
        ({"not": {"enum": [-2.0, 3]}}, [2, -1, -2.5], [-2, 3]),
        ({"type": "array", "items": {"enum": [1, 2, 3, 4, 5]}, "uniqueItems": True}, [[5, 1, 3, 2, 4]], [[5, 5]]),
        ({"type": "array", "items": {"enum": [*range(9)]}, "uniqueItems": True, "maxItems": 2},
         [[8, 0]], [[7, 7], [1, 2, 3]]),
        ({**AB, "minProperties": 1, "additionalProperties": False}, [{"a": 1}, {"a": 1, "b": 1}], [{}]),
        ({**AB, "minProperties": 2, "maxProperties": 2, "additionalProperties": False}, [{"a": 1, "b": 1}], [{}, {"b": 1}]),
        ({**AB, "maxProperties": 1, "additionalProperties": False}, [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
        ({**AB, "maxProperties": 2, "required": ["a"]},
         [{"a": 1}, {"a": 1, "b": 1}], [{}, {"b": 1}, {"a": 1, "b": 1, "c": 1}]),
        ({**AB, "minProperties": 1}, [{"a": 1}, {"b": 1, "c": 1}], [{}]),
        ({"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "integer"}},
         [{}, {"x": 1}, {"x": 1, "y": 2}], [{"z": 1}, {"x": "1"}]),
        ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "integer"}},
         [{}, {"abc": 1}], [{"A": 1}, {"abc": "1"}]),
        ({"type": "object", "propertyNames": {"not": {"const": "x"}}}, [{}, {"y": 1}, {"xx": 1}], [{"x": 1}]),
        ({"type": "object", "propertyNames": {"anyOf": [{"const": "x.y"}, {"pattern": "^[0-9]+$"}]}},
         [{"x.y": 1, "12": 2}], [{"xzy": 1}, {"a": 1}]),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "null"}},
         [{"a": None}], [{"a": 1}]),
        ({"type": "integer", "then": {"type": "string"}, "else": False}, [1], ["x"]),
        ({"$defs": {"A": {"required": ["a"]}}, **AB, "oneOf": [{"$ref": "#/$defs/A"}, {"required": ["b"]}]},
         [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    ],
)  # fmt: skip
def test_keywords_that_grammars_lack_hold_by_others(schema: Any, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not takes(schema, value)] == []
    assert [value for value in bad if takes(schema, value)] == []


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "not": {"pattern": "(?=a)"}}, "not"),
        ({"type": "integer", "not": {"multipleOf": 2}}, "not"),
        ({"not": {"type": "integer"}}, "not"),
        ({"not": {"enum": [1.5]}}, "not"),
        ({"if": {"pattern": "(?=a)"}, "then": False}, "if"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": {"enum": [1, 1.0]}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": {"enum": [1, 2, 3, 4, 5, 6]}, "uniqueItems": True}, "uniqueItems"),
    ],
)
def test_what_no_grammar_can_follow_is_refused_by_name(schema: Any, keyword: str) -> None:
    assert refusal(schema) == f"'{keyword}': it cannot be enforced"
    assert refusal({"properties": {"a": {"items": schema}}}) == f"'properties.a.items.{keyword}': it cannot be enforced"


@pytest.mark.parametrize(
    ("schema", "left_out", "good", "bad"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, ["uniqueItems"], ["a", "a"], [1]),
        ({"properties": {"a": {"type": "integer", "not": {"multipleOf": 2}}}}, ["properties.a.not"], {"a": 2}, {"a": 0.5}),
        ({"type": "string", "maxLength": 2, "pattern": "(?!a)b"}, ["pattern"], "ab", "abb"),
        ({"type": "string", "pattern": r"\bb"}, ["pattern"], "ab", 1),
        ({"type": "string", "pattern": r"(a|b)\1"}, ["pattern"], "ab", 1),
        ({"type": "string", "pattern": r"^[(?=]\\b$"}, [], "=\\b", "(?=b"),
        ({"type": "object", "patternProperties": {"^(?=a)": {}, "^b": {"type": "null"}}},
         ["patternProperties.^(?=a)"], {"a": 1, "b": None}, {"b": 1}),
        ({"type": "object", "propertyNames": {"pattern": "(?=a)"}}, ["propertyNames"], {"b": 1}, []),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf"], 1, "x"),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"}, [], {"a": 1}, {"a": 1, "b": 1}),
        ({"if": {"multipleOf": 2}, "then": {"type": "string"}, "type": "integer"}, ["if"], 2, "x"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"items": {"const": 2**53 + 1}}}}, ["$defs.n.items.const"], [1], None),
        ({"type": "array", "contains": {"const": 1}, "minContains": 2, "items": {"type": "integer"}},
         ["contains", "minContains"], [2], ["x"]),
        ({"type": "object", "properties": {f"p{i}": {} for i in range(20)}, "minProperties": 9}, ["minProperties"], {}, []),
        ({"type": "object", "unevaluatedProperties": False}, ["unevaluatedProperties"], {"a": 1}, []),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "unevaluatedProperties": False}, [], {"a": 1}, None),
        ({"type": "null", "$defs": {"unused": {"not": {"multipleOf": 2}}}}, [], None, 1),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_left_out_and_named_and_the_rest_holds(
    schema: Any, left_out: list[str], good: Any, bad: Any
) -> None:
    found: list[str] = []
    assert takes(schema, good, found) and found == left_out
    assert bad is None or not takes(schema, bad, [])
    if left_out:
        assert refusal(schema).startswith(f"'{left_out[0]}': ")
    else:
        prepared(schema)


def test_patterns_of_members_that_overlap_are_left_out() -> None:
    schema = {"type": "object", "patternProperties": {"a": {"type": "integer"}, "b": {}, "^c$": {"type": "null"}}}
    left_out: list[str] = []
    assert takes(schema, {"b": "x", "ab": 1, "c": None}, left_out) and left_out == ["patternProperties.b"]
    assert not takes(schema, {"ab": "x"}, []) and not takes(schema, {"c": 1}, [])


def test_a_schema_that_holds_its_own_opposite_is_refused() -> None:
    opposite = {"maxProperties": 1, "not": {"$ref": "#/$defs/A"}}
    schema = {"$defs": {"A": {"oneOf": [{"required": ["a"]}, {}, opposite]}}, "not": {"$ref": "#/$defs/A"}}
    assert "its own opposite" in refusal(schema)


TEXTS = {"type": "array", "items": {"type": "string", "format": "date"}}
NODE = {
    "type": "object",
    "properties": {"of": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["of"],
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # What one branch needs, the others do not have.
        (
            {
                "type": "object",
                "oneOf": [
                    {"required": ["a"], "properties": {"a": TEXTS}},
                    {"required": ["b"], "properties": {"b": TEXTS}},
                ],
            },
            [{"a": []}, {"b": ["2026-11-28"]}, {"a": [], "c": 1}],
            [{}, {"a": [], "b": []}, {"c": 1}],
        ),
        # A member of another kind in each, by a base that several share.
        (
            {
                "$defs": {"base": {"type": "object", "required": ["of"], "properties": {"n": {"type": "integer"}}}},
                "oneOf": [
                    {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"of": TEXTS}}]},
                    {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"of": {"type": "integer"}}}]},
                ],
            },
            [{"n": 1, "of": []}, {"n": 1, "of": 3}],
            [{"n": 1}, {"of": "x"}, {"n": "1", "of": 3}],
        ),
        # Members that may be left out: with neither, both branches hold.
        (
            {
                "oneOf": [
                    {"type": "object", "properties": {"a": TEXTS}, "additionalProperties": False},
                    {"type": "object", "properties": {"b": TEXTS}, "additionalProperties": False},
                ]
            },
            [{"a": []}, {"b": []}],
            [{}, {"a": [], "b": []}],
        ),
        (
            {"oneOf": [{"type": "array", "items": {"type": "number"}}, {"type": "array", "items": TEXTS}]},
            [[1], [["2026-11-28"]], [[]]],
            [[], [1, []]],
        ),
        (
            {"oneOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}]},
            ["1.2.3.4", "::1"],
            ["x"],
        ),
        (
            {"oneOf": [{"type": "string", "pattern": "^a/.+[0-9]$"}, {"type": "string", "pattern": "^b/.+[0-9]$"}]},
            ["a/x1", "b/x1"],
            ["a/x", "c/x1"],
        ),
        (
            {"oneOf": [{"enum": ["auto", "none"]}, {"type": "string", "pattern": "^#[0-9a-f]{6}$"}]},
            ["auto", "#00ff00"],
            ["red"],
        ),
        ({"oneOf": [{"enum": ["a", "b", 1.0]}, {"enum": ["b", 1, "c"]}]}, ["a", "c"], ["b", 1, 1.0]),
        (
            {
                "oneOf": [
                    {"type": "integer", "maximum": 3, "multipleOf": 2},
                    {"type": "integer", "minimum": 5, "multipleOf": 3},
                ]
            },
            [2, 6],
            [3, 4, 5],
        ),
        (
            {
                "oneOf": [
                    {"type": ["string", "object"], "properties": {"a": TEXTS}},
                    {"type": "object", "properties": {"a": {"type": "null"}}},
                ]
            },
            ["x", {"a": []}, {"a": None}],
            [{}, 1],
        ),
        # Texts of which the expressions of two branches cannot both say something.
        (
            {
                "oneOf": [
                    {"type": "string", "pattern": "^[A-Fa-f\\d]{6}$"},
                    {"type": "string", "maxLength": 0},
                    {"const": "auto"},
                ]
            },
            ["00ffAA", "", "auto"],
            ["x", "00ff"],
        ),
        (
            {
                "oneOf": [
                    {"type": "string", "pattern": "^-?\\d+/\\d+$"},
                    {"type": "string", "pattern": "^-?0x[0-9a-f]+$"},
                ]
            },
            ["1/2", "-0x1f"],
            ["1", "0x1/2"],
        ),
        # Schemas that hold themselves, beside other keywords.
        (
            {
                "$defs": {
                    "node": {
                        **NODE,
                        "properties": {
                            **NODE["properties"],
                            "to": {"allOf": [{"$ref": "#/$defs/node"}, {"required": ["n"]}]},
                        },
                    }
                },
                "$ref": "#/$defs/node",
            },
            [{"of": {"of": None}}, {"of": None, "to": {"of": None, "n": 1}}],
            [{}, {"of": None, "to": {"of": None}}],
        ),
        (
            {
                "$defs": {"node": NODE},
                "type": "object",
                "minProperties": 1,
                "anyOf": [{"$ref": "#/$defs/node"}, {"required": ["x"]}],
            },
            [{"of": None}, {"x": 1}],
            [{}, {"of": 1}],
        ),
        # Draft 7 ignores what stands beside a reference, and later ones do not.
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "definitions": {"s": {"type": "string"}},
                "properties": {"a": {"$ref": "#/definitions/s", "maxLength": 1}},
            },
            [{"a": "xx"}],
            [{"a": 1}],
        ),
        (
            {"$defs": {"s": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/s", "maxLength": 1}}},
            [{"a": "x"}],
            [{"a": "xx"}],
        ),
        # References into what is put in other words, and into what is no keyword.
        (
            {
                "properties": {
                    "a": {"oneOf": [{"type": "string"}, {"not": {"type": "string"}}]},
                    "b": {"$ref": "#/properties/a/oneOf/1/not"},
                    "c": {"$ref": "#/types/none%20at~1all"},
                },
                "types": {"none at/all": {"type": "null", "format": "x"}},
            },
            [{"a": 1, "b": "x", "c": None}],
            [{"b": 1}, {"c": 1}],
        ),
    ],
)
def test_schemas_that_are_put_in_other_words(schema: Any, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not takes(schema, value)] == []
    assert [value for value in bad if takes(schema, value)] == []


def test_remarks_do_not_travel() -> None:
    schema = {"description": "x" * 200_000, "properties": {"description": {"title": "D", "type": "string"}}}
    assert prepared(schema) == {"properties": {"description": {"type": "string"}}}
    assert takes(schema, {"description": "x"}) and not takes(schema, {"description": 1})


def test_what_lists_contain_in_each_other_is_bounded() -> None:
    schema: dict[str, Any] = {"const": 1}
    for _ in range(40):
        schema = {"type": "array", "contains": schema}
    assert len(json.dumps(prepared(schema, []))) < 1_000_000


def test_a_schema_costs_a_bounded_time_whatever_it_joins() -> None:
    """Within the event loop."""
    big = {f"p{i}": {"type": "string"} for i in range(500)}
    node = {"type": "object", "properties": {**big, "of": {"$ref": "#/$defs/n"}}}
    beside = {f"q{i}": {"$ref": "#/$defs/n", "required": [f"p{i}"]} for i in range(3000)}
    few = {f"r{i}": {"type": "array", "items": {"enum": [1, 2, 3, 4, 5]}, "uniqueItems": True} for i in range(3000)}
    counted = {f"s{i}": {"properties": {**AB["properties"], f"{i}": {}}, "maxProperties": 1} for i in range(3000)}
    begun_s = time.process_time()
    prepared({"$defs": {"n": node}, "properties": {**beside, **few, **counted}}, [])
    assert time.process_time() - begun_s < 1
    with pytest.raises(ApiError, match="more than 524288 bytes"):
        json_grammar({"title": "x" * 2**19}, "p")


LIST = {"type": "object", "properties": {"next": {"$ref": "#/$defs/list"}}}
TWICE: dict[str, Any] = {
    f"a{i}": {"type": "object", "properties": {key: {"$ref": f"#/$defs/a{i + 1}"} for key in "xy"}} for i in range(30)
}
CHAIN: dict[str, Any] = {f"c{i}": {"properties": {"k": {"$ref": f"#/$defs/c{i + 1}"}}} for i in range(400)}
NESTED: dict[str, Any] = {
    "$defs": {"list": LIST, **TWICE, "a30": {"type": "string"}, **CHAIN, "c400": {"type": "string"}}
}


@pytest.mark.parametrize("name", ["list", "a0", "c0"])
@pytest.mark.parametrize("keyword", ["not", "if", "oneOf"])
def test_opposites_of_recursive_and_of_huge_schemas_are_not_sought(name: str, keyword: str) -> None:
    reference = {"$ref": f"#/$defs/{name}"}
    schema = {
        **NESTED,
        keyword: [reference, {"type": "object", "required": ["b"]}] if keyword == "oneOf" else reference,
        "then": {"type": "object"},
    }
    assert f"'{keyword}': " in refusal(schema)


@pytest.mark.parametrize(
    ("branches", "good", "bad"),
    [
        ([{"anyOf": [{"type": "string"}, {"minimum": 3}]}, {"type": "number"}], ["x", 1, None], [3, 4.5]),
        ([{"properties": {"k": {"const": "a"}}}, {"properties": {"k": {"const": "b"}}}],
         [{"k": "a"}, {"k": "b"}], [5, None, [], "x", {"k": "c"}, {}]),
        ([{"type": ["object", "null"], "properties": {"k": {"const": "a"}}, "required": ["k"]},
          {"type": ["object", "null"], "properties": {"k": {"const": "b"}}, "required": ["k"]}],
         [{"k": "a"}, {"k": "b"}], [None, {"k": "c"}]),
        ([{"anyOf": [{"properties": {"k": {"const": "a"}}}, {"properties": {"k": {"const": "c"}}}]},
          {"properties": {"k": {"const": "b"}}}], [{"k": "a"}, {"k": "b"}, {"k": "c"}], [None, 5]),
    ],
)  # fmt: skip
def test_values_of_any_type_hold_in_one_branch(branches: list[Any], good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not takes({"oneOf": branches}, value)] == []
    assert [value for value in bad if takes({"oneOf": branches}, value)] == []


def test_branches_that_always_hold_exclude_each_other() -> None:
    for branches in ([True, True], [True, {"type": "string"}, True]):
        grammar = json.dumps({"grammars": [json_grammar({"oneOf": branches}, "p")]})
        assert "Unsatisfiable" in LLMatcher(BYTES, grammar, log_level=0).get_error()


def test_types_of_branches_are_looked_for_once() -> None:
    """Within the event loop: by pairs it takes seconds."""
    shared = {"anyOf": [{"type": "object"}] * 500}
    one = {"allOf": [{"$ref": "#/$defs/shared"}], "additionalProperties": False}
    branches = [{**one, "properties": {f"p{i}": {}}, "required": [f"p{i}"]} for i in range(MAX_COMPARED)]
    begun_s = time.process_time()
    assert "oneOf" not in prepared({"$defs": {"shared": shared}, "oneOf": branches})
    assert time.process_time() - begun_s < 0.5


def test_branches_that_refer_to_themselves_are_looked_at_once() -> None:
    again = [{"$ref": "#/$defs/a"}] * 3
    tagged = {"properties": {"k": {"const": "x"}}}
    other = {"type": "object", "properties": {"k": {"const": "y"}}}
    for inner in (again, [*again, tagged]):
        assert "'oneOf'" in refusal({"$defs": {"a": {"anyOf": inner}}, "oneOf": [other, {"$ref": "#/$defs/a"}]})
    assert takes({"oneOf": [{"const": number} for number in range(2000)]}, 1999)


@pytest.mark.parametrize("length", [50, 51, 1000])
def test_an_excluded_string_is_followed_or_stays(length: int) -> None:
    schema: dict[str, Any] = {"type": "string", "not": {"const": "a" * length}}
    if length > 50:
        assert "'not'" in refusal(schema)
    else:
        assert [takes(schema, "a" * each) for each in (length - 1, length, length + 1)] == [True, False, True]


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}, "allOf": 5},
        {"oneOf": [{"properties": 5}, {"type": "string"}]},
        {
            "oneOf": [
                {"type": "object", "required": 5, "additionalProperties": False},
                {"type": "object", "required": 5},
            ]
        },
    ],
)
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(ApiError, match="a value of a type that it does not take") as refused:
        json_grammar(schema, "response_format")
    assert refused.value.status == 400


@pytest.mark.parametrize("types", ["text", ["string", ["null"]]])
def test_types_that_do_not_exist_have_no_opposite(types: Any) -> None:
    assert "'not'" in refusal({"not": {"type": types}})


@pytest.mark.parametrize("name", FORMATS.split())
def test_a_format_that_nobody_knows_is_a_remark(name: str) -> None:
    assert takes({"type": "object", "properties": {"a": {"type": "string", "format": name}}}, {"a": "text"})
    assert takes({"type": "integer", "format": name}, 7)
    assert takes({"properties": {"format": {"type": "string"}}, "required": ["format"]}, {"format": "x"})


def test_a_format_that_is_known_holds() -> None:
    assert not takes({"type": "string", "format": "date"}, "text")
    assert takes({"type": "string", "format": "date"}, "2026-11-27")


CAT = {
    "type": "object",
    "properties": {"kind": {"const": "c", "default": "c", "type": "string"}, "n": {"type": "integer"}},
}
DOG = {"type": "object", "properties": {"kind": {"enum": ["d", "e"], "type": "string"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [CAT, DOG], "discriminator": {"propertyName": "kind"}},
        {"oneOf": [CAT, DOG]},
        {"$defs": {"C": CAT, "D": DOG}, "oneOf": [{"$ref": "#/$defs/C"}, {"$ref": "#/$defs/D"}]},
        {
            "$defs": {"C": CAT, "D": DOG, "U": {"oneOf": [{"$ref": "#/$defs/C"}, {"$ref": "#/$defs/D"}]}},
            "oneOf": [{"$ref": "#/$defs/U"}, {"type": "object", "properties": {"kind": {"const": "z"}}}],
        },
        {"definitions": {"C": CAT, "D": DOG}, "oneOf": [{"$ref": "#/definitions/C"}, {"$ref": "#/definitions/D"}]},
    ],
)
def test_a_union_by_tag_is_had_with_its_tag(schema: Any) -> None:
    assert takes(schema, {"kind": "c", "n": 1}) and takes(schema, {"kind": "d"}) and takes(schema, {"kind": "e"})
    assert not takes(schema, {"kind": "x"}) and not takes(schema, {}) and not takes(schema, {"kind": "d", "n": "1"})


def test_a_union_may_hold_itself() -> None:
    leaf = {"type": "object", "properties": {"t": {"const": "leaf"}}, "additionalProperties": False}
    inner = {"type": "array", "items": {"oneOf": [{"$ref": "#/$defs/L"}, {"$ref": "#/$defs/N"}]}}
    node = {"type": "object", "properties": {"t": {"const": "node"}, "of": inner}, "additionalProperties": False}
    schema = {"$defs": {"L": leaf, "N": node}, "oneOf": [{"$ref": "#/$defs/N"}, {"$ref": "#/$defs/L"}]}
    assert takes(schema, {"t": "node", "of": [{"t": "leaf"}, {"t": "node", "of": []}]})
    assert not takes(schema, {"t": "node", "of": [{}]})


@pytest.mark.parametrize(
    ("branches", "good", "bad"),
    [
        ([{"type": "string"}, {"type": "null"}], ["a", None], [1]),
        ([{"const": "a"}, {"const": "b"}, {"enum": ["c"]}], ["a", "c"], ["d"]),
        (
            [
                {
                    "type": "object",
                    "properties": {"A": {"type": "integer"}},
                    "required": ["A"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {"B": {"type": "string"}},
                    "required": ["B"],
                    "additionalProperties": False,
                },
            ],
            [{"A": 1}, {"B": "x"}],
            [{}, {"A": 1, "B": "x"}],
        ),
    ],
)
def test_branches_that_exclude_each_other_are_a_choice(branches: Any, good: list[Any], bad: list[Any]) -> None:
    assert all(takes({"oneOf": branches}, value) for value in good)
    assert not any(takes({"oneOf": branches}, value) for value in bad)


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"type": "object", "properties": {"a": {"pattern": "(?=x)"}}}] * 2,
        [{"$ref": "#/$defs/loop"}, {"type": "string"}],
        [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}],
    ],
)
def test_branches_that_may_both_hold_stay(branches: Any) -> None:
    schema = {"oneOf": branches, "$defs": {"loop": {"$ref": "#/$defs/loop"}}}
    assert "'oneOf'" in refusal(schema)
    assert prepared(schema, left_out := [])["anyOf"] and left_out[0] == "oneOf"


@pytest.mark.parametrize(
    "value", [EXACT_INTEGER + 1, 12345678901234567890, -(2**63) - 1, 2**63, {"id": [EXACT_INTEGER + 1]}]
)
def test_an_integer_that_would_be_written_as_another_is_refused(value: Any) -> None:
    for schema in ({"const": value}, {"enum": [1, value]}, {"properties": {"a": {"const": value}}}):
        with pytest.raises(ApiError, match=r"2\^53"):
            json_grammar(schema, "p")
        json_grammar(schema, "p", [])
    assert takes({"const": 2**60}, 2**60) and takes({"enum": [EXACT_INTEGER]}, EXACT_INTEGER)


@given(
    st.integers(-(2**64), 2**63 - 2000),
    st.integers(0, 2**64),
    st.sampled_from([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")]),
)
def test_no_integer_outside_of_large_bounds_is_taken(least: int, length: int, names: tuple[str, str]) -> None:
    greatest = least + length + 4096
    if greatest < -GREATEST_BOUND:
        return
    schema = {"type": "integer", names[0]: least, names[1]: greatest}
    is_exclusive = names[0] != "minimum"
    for bound, sign in ((least, 1), (greatest, -1)):
        assert not takes(schema, bound - sign)
        assert not is_exclusive or not takes(schema, bound)
    within = max(least + 2048, -GREATEST_BOUND + 2048)
    if within < min(greatest - 2048, GREATEST_BOUND - 2048):
        assert takes(schema, within)


def test_the_integers_of_64_bits() -> None:
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    assert takes(schema, 0) and takes(schema, -(2**62) - 1) and takes(schema, 2**62 + 1)
    assert takes({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, 2**62 + 1)
    with pytest.raises(ApiError, match="64 bits"):
        json_grammar({"type": "integer", "minimum": 2**64}, "p")


def test_openapis_older_words() -> None:
    for schema in ({"type": "string", "nullable": True}, {"enum": ["a"], "nullable": True}):
        assert takes(schema, "a") and takes(schema, None)
    whole = {"$defs": {"s": {"type": "string"}}, "allOf": [{"$ref": "#/$defs/s"}], "nullable": True}
    assert takes(whole, "a") and takes(whole, None) and not takes(whole, 1)
    assert not takes({"type": "string", "nullable": False}, None)
    assert not takes({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, 1)
    assert takes({"type": "integer", "minimum": 1, "exclusiveMinimum": False}, 1)
    assert takes({"$schema": "https://spec.openapis.org/oas/3.1/dialect/base", "type": "string"}, "a")


def test_lists_of_one_are_unique() -> None:
    assert takes({"type": "array", "items": {"const": 1}, "maxItems": 1, "uniqueItems": True}, [1])
    assert takes({"type": "array", "uniqueItems": False}, [1, 1])


def test_what_is_named_like_a_keyword_is_left() -> None:
    """Properties, values and examples are no schemas."""
    schema = {
        "type": "object",
        "properties": {"discriminator": {"const": {"format": "x", "oneOf": [1]}}, "nullable": {"type": "string"}},
        "required": ["discriminator", "nullable"],
        "default": {"nullable": True},
    }
    assert takes(schema, {"discriminator": {"format": "x", "oneOf": [1]}, "nullable": "a"})
    before = json.dumps(schema)
    prepared(schema)
    assert json.dumps(schema) == before
