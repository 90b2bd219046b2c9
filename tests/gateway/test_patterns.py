"""Expressions that are said to have no text in common have none."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.openai.json_schemas.patterns import are_apart, finds_nothing, negated
from services.gateway.openai.structured import json_grammar


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("^a", "^b"),
        ("^[0-9a-f]{24}$", "^$"),
        ("^-?\\d+/\\d+$", "^-?0x1\\.[0-9a-f]{13}p[+-]\\d+$"),
        ("^[^:]+$", "^[^:]+:[^:]+:[0-9]+$"),
        ("^https?://.+$", "^\\./.+$"),
        ("^(a|b)c$|^d$", "^(?:e|[f-h]c?)$"),
        ("^[0-9]+(m|M)(b|B)?$", "^[0-9]+(g|G)(b|B)?$"),
        ("^[\\w-]+$", "^.*\\{\\{.+}}.*$"),
        ("^[^\\d]$", "^[0-9]$"),
    ],
)
def test_expressions_that_exclude_each_other(one: str, other: str) -> None:
    assert are_apart(one, other) and are_apart(other, one)
    assert not are_apart(one, one) and not are_apart(other, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a", "b"),
        ("^[0-9a-f]+$", "^[0-9A-F]+$"),
        ("^\\d$", "^[^0-9]$"),  # which of them an Arabic digit is depends on the dialect
        ("^\\d$", "^[\\D]$"),
        ("^a(?=b)", "^b"),
        ("(?i)^a", "^b"),
        ("^a++", "^b"),
        ("^(^a)", "^b"),
        ("^[[a]]", "^b"),
        ("^a{,3}$", "^b"),
        ("^\\ba", "^b"),
        ("^" + "a" * 600, "^b"),
        ("^(a{1000}){1000}$", "^b"),
    ],
)
def test_what_is_not_known_excludes_nothing(one: str, other: str) -> None:
    assert not are_apart(one, other) and not are_apart(other, one)


def test_texts_in_which_nothing_is_found() -> None:
    assert finds_nothing("^[0-9]+%$", "unlimited") and not finds_nothing("^[0-9]+%$", "10%")
    assert finds_nothing("^x", "") and not finds_nothing("b", "abc") and not finds_nothing("^(?!x)", "x")


def test_comparing_takes_a_bounded_time() -> None:
    begun_s = time.process_time()
    hard = ["^" + "(a|b|ab)*" * 20 + f"c{{{n}}}$" for n in (3, 4)] + ["(a|b)*a(a|b){15}$", "(a|b)*b(a|b){15}$"]
    for one in hard:
        for other in hard:
            are_apart(one, other)
    assert time.process_time() - begun_s < 2


def test_a_schema_of_many_large_expressions_takes_a_bounded_time() -> None:
    """They are looked at on the event loop. `deep` would take Python's whole stack."""
    many = [{"type": "string", "pattern": f"^(a?b?c?){{90}}{number}z$"} for number in range(24)]
    members = {
        f"m{place}": {"oneOf": [{**one, "pattern": one["pattern"] + f"{place}"} for one in many]} for place in range(40)
    }
    deep = [{"type": "string", "pattern": f"^[a-z]{{0,{number}}}{end}$"} for number in (299, 900) for end in "xy"]
    words = [
        {"enum": ["x" * 190 + str(number) for number in range(400)]},
        {"type": "string", "pattern": "^(x?){180}y$"},
    ]
    begun_s = time.process_time()
    for schema in ({"oneOf": many}, {"type": "object", "properties": members}, {"oneOf": deep}, {"oneOf": words}):
        json_grammar(schema, "schema", [])
    assert time.process_time() - begun_s < 1


ATOMS = st.sampled_from(["a", "b", "[ab]", "[^a]", ".", "\\d", "\\W", "\\.", "(a|bc)", "(?:ab|)", "[a-c1]"])
PARTS = st.tuples(ATOMS, st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,3}", "{2,}", "*?"])).map("".join)
PATTERNS = st.tuples(st.sampled_from(["", "^"]), st.lists(PARTS, max_size=4).map("".join), st.sampled_from(["", "$"]))


@given(PATTERNS.map("".join), PATTERNS.map("".join), st.lists(st.text("abc1.\n", max_size=6), max_size=20))
def test_no_text_is_found_by_both(one: str, other: str, texts: list[str]) -> None:
    found = [{text for text in texts if re.search(each.replace("$", r"\Z"), text)} for each in (one, other)]
    for each, those in zip((one, other), found, strict=True):
        assert {text for text in texts if not finds_nothing(each, text)} >= those
    if found[0] & found[1]:
        assert not are_apart(one, other)


ALPHABET = "a5b7 -\n\u00e9\u0660\U0001f642"
WHOLE = (
    "^(?:a|5b)$",
    "(^[^5]*$)|7",
    "^a*b?$",
    "a5b",
    "[xyz]$",
    "^$",
    "^[a-b]{2,3}$",
    "\\$|5",
    "^([a-b][0-9])+$",
    ".",
    "",
)
DIALECTS = ("\\w3", "^\\d{2}-\\d$", "[^\\s]b", "^\\W+$")
"""Their classes have more characters in some dialects."""


@pytest.mark.parametrize("pattern", [*WHOLE, *DIALECTS])
@given(st.text(ALPHABET, max_size=6))
def test_the_opposite_of_an_expression(pattern: str, text: str) -> None:
    # Of Python, whose $ matches before a line break at the end, too.
    finds = re.compile(pattern.replace("$", "\\Z").replace("\\\\Z", "\\$"))
    other = negated(pattern)
    assert other is not None
    is_without = bool(other) and re.fullmatch(other[1:-1], text) is not None
    if pattern in WHOLE:
        assert is_without is not bool(finds.search(text))
    elif is_without:
        assert not finds.search(text) and not re.search(finds.pattern, text, re.ASCII)


@pytest.mark.parametrize(
    "pattern", ["(?!a)", "a(?=b)", ".{14,}(?:ghlint|plugin)", "^((c1d3g3).{4,8}){6,6}", "(^a)b", "\\ud800"]
)
def test_an_opposite_that_is_not_known_or_too_large(pattern: str) -> None:
    begun_s = time.process_time()
    assert negated(pattern) is None
    assert time.process_time() - begun_s < 1.0


def test_groups_with_anchors_that_are_whole_branches() -> None:
    assert are_apart("(^a$)|(?:^b)", "(^c)") and not are_apart("(^a$)|b", "^b")
    assert not are_apart("(^a)+", "^b") and not are_apart("(^a$)c", "^b")
