"""Turns in proportion to weights."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.policies.turns import LEAST_SHARE, Turns


def took(turns: Turns, weights: dict[str, float], num: int) -> list[str]:
    taken = []
    for _ in range(num):
        taken.append(turns.next(weights))
        turns.take(taken[-1], weights)
    return taken


def test_turns_are_in_proportion_and_spread() -> None:
    taken = took(Turns(), {"a": 5.0, "b": 1.0, "c": 1.0}, 14)
    assert taken[:7] == ["a", "a", "b", "a", "c", "a", "a"]
    assert Counter(taken) == {"a": 10, "b": 2, "c": 2}


def test_everybody_has_a_least_share() -> None:
    taken = took(Turns(), {"a": 1.0, "b": 0.0}, 210)
    assert Counter(taken)["b"] == pytest.approx(210 * LEAST_SHARE / (1 + LEAST_SHARE), abs=1)
    assert set(took(Turns(), {"a": 0.0, "b": 0.0}, 9)) <= {"a", "b"}, "no weights at all are no error"


def test_new_weights_count_at_once() -> None:
    turns: Turns = Turns()
    took(turns, {"a": 100.0, "b": 1.0}, 50)
    turns.take("b", {"a": 100.0, "b": 1.0})
    assert took(turns, {"a": 1.0, "b": 9.0}, 3).count("b") >= 2, "what was taken at other weights is no debt"


def test_asking_changes_nothing() -> None:
    turns: Turns = Turns()
    assert [turns.next({"a": 1.0, "b": 1.0}) for _ in range(3)] == ["a", "a", "a"]


def test_turns_of_others_in_between_change_nothing() -> None:
    turns: Turns = Turns()
    taken = []
    for _ in range(12):
        took(turns, {"c": 1.0, "d": 1.0}, 3)
        taken += took(turns, {"a": 2.0, "b": 1.0}, 1)
    assert Counter(taken) == {"a": 8, "b": 4}


def test_turns_given_for_other_reasons_are_no_debt_and_no_treasure() -> None:
    turns: Turns = Turns()
    for _ in range(1000):
        turns.take("a", {"a": 1.0, "b": 9.0})
    taken = took(turns, {"a": 1.0, "b": 1.0}, 10)
    assert taken.count("a") >= 4, taken


@given(st.lists(st.dictionaries(st.sampled_from("abcde"), st.floats(0, 1e6), min_size=1), min_size=1, max_size=60))
def test_nobody_waits_for_ever_while_weights_change(changes: list[dict[str, float]]) -> None:
    """Who keeps wanting turns, at the least weight there is, has one among so many."""
    turns: Turns = Turns()
    waited = 0
    for weights in changes * 3:
        weights = {**weights, "z": 0.0}
        destination = turns.next(weights)
        turns.take(destination, weights)
        waited = 0 if destination == "z" else waited + 1
        assert waited <= len("abcde") / LEAST_SHARE + len("abcde") + 1
