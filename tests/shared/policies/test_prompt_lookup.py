"""Places at which a sequence repeats itself, and how many tokens are worth a guess."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.costs.model import CostModel, StepShape
from shared.policies.prompt_lookup import (
    FIRST_HIT_RATE,
    Guess,
    LookupSettings,
    PromptLookup,
    draft_lengths,
    may_pay,
)
from tests.shared.costs import costs

COST = costs(0.02, 0.001, decode_s=0.001, decode_context_s=1e-6, over_knee_s=0.004, knee_tokens=16)  # fmt: skip


def lookup_of(tokens: list[int], **settings: int) -> PromptLookup:
    lookup = PromptLookup(LookupSettings(8, **settings))
    lookup.follow(tokens)
    return lookup


def test_what_followed_the_last_tokens_is_guessed_and_goes_round() -> None:
    tokens = [1, 2, 3, 4, 5, 9, 1, 2, 3]
    lookup = PromptLookup(LookupSettings(8))
    assert lookup.follow(tokens)
    assert lookup.draft(tokens, 3) == [4, 5, 9]
    assert lookup.draft(tokens, 8) == [4, 5, 9, 1, 2, 3, 4, 5]


def test_nothing_is_guessed_where_the_last_tokens_are_new() -> None:
    assert not PromptLookup(LookupSettings(8)).follow([1, 2, 3, 4, 5, 6])
    assert not PromptLookup(LookupSettings(8, 2, 2)).follow([7])
    assert not PromptLookup(LookupSettings(8, 1, 1)).follow([7])


def test_the_longest_match_is_taken_then_the_last() -> None:
    longer_first = [5, 1, 2, 3, 100, 6, 2, 3, 200, 5, 1, 2, 3]
    assert lookup_of(longer_first).draft(longer_first, 1) == [100]
    as_long = [1, 2, 100, 1, 2, 200, 1, 2]
    assert lookup_of(as_long).draft(as_long, 1) == [200]
    assert lookup_of(longer_first, max_ngram=2).draft(longer_first, 1) == [200]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=400), st.integers(1, 3), st.integers(0, 2), st.randoms())
def test_a_guess_follows_a_match_however_the_tokens_came(
    tokens: list[int], min_ngram: int, further: int, chance: random.Random
) -> None:
    settings = LookupSettings(4, min_ngram, min_ngram + further)
    lookup, known = PromptLookup(settings), 0
    while known < len(tokens):
        known += chance.choice([1, 1, 1, 2, 7, 100])
        seen = tokens[:known]
        found = lookup.follow(seen)
        assert lookup.follow(seen) == found and 0 <= lookup.hit_rate <= 1
        ends = [e for e in range(min_ngram, len(seen)) if seen[e - min_ngram : e] == seen[-min_ngram:]]
        assert found or not ends or min_ngram > 1, "a place was not found, though no other grams share its slot"
        if found:
            draft = lookup.draft(seen, 4)
            assert any((seen[e:] * 4)[:4] == draft for e in ends)


def test_many_tokens_at_once_are_entered_as_one_after_the_other() -> None:
    tokens = random.Random(0).choices(range(4), k=3000)
    one_by_one = PromptLookup(LookupSettings(4))
    for known in range(1, len(tokens) + 1):
        one_by_one.follow(tokens[:known])
    whole = lookup_of(tokens)
    for _ in range(200):
        tokens.append(tokens[-5])
        assert whole.follow(tokens) and one_by_one.follow(tokens)
    assert whole.draft(tokens, 4) == one_by_one.draft(tokens, 4) == tokens[-5:-1]


def test_the_rate_of_hits_follows_what_comes_whether_it_was_tried_or_not() -> None:
    tokens = [1, 2, 3, 4] * 10
    lookup = lookup_of(tokens)
    assert lookup.hit_rate == FIRST_HIT_RATE
    for _ in range(10):
        tokens += [1, 2, 3, 4]
        lookup.follow(tokens)
    assert lookup.hit_rate > 0.98
    chance = random.Random(1)
    for _ in range(60):
        tokens.append(chance.randrange(4))
        lookup.follow(tokens)
    assert lookup.hit_rate < 0.6


def lengths(cost: CostModel | None, num: int, rates: list[float], tokens_left: int = 1000, left_s: float = math.inf):
    shape = StepShape(num_decodes=num, decode_context_tokens=100 * num)
    return draft_lengths(cost, shape, num, [Guess(100, rate, 6) for rate in rates], tokens_left, left_s)


def test_more_is_guessed_of_what_comes_true_more_often() -> None:
    found, expected = lengths(COST, 1, [0.95])
    assert found == [6] and expected == pytest.approx(sum(0.95**i for i in range(1, 7)))
    assert lengths(COST, 1, [0.5])[0] == [3]
    assert lengths(COST, 1, [0.05])[0] == [0]
    found, _ = lengths(COST, 4, [0.9, 0.3])
    assert found[0] > found[1]


def test_nothing_is_guessed_where_the_step_is_large() -> None:
    assert lengths(COST, 15, [0.9])[0] == [1], "up to the knee"
    assert lengths(COST, 200, [0.99] * 8)[0] == [0] * 8
    assert not may_pay(COST, StepShape(num_decodes=100), 100)
    assert may_pay(COST, StepShape(num_decodes=10), 10) and may_pay(None, StepShape(num_decodes=100), 100)


def test_the_step_keeps_its_limits() -> None:
    assert lengths(COST, 1, [0.95, 0.95], tokens_left=3)[0] == [2, 1]
    assert lengths(COST, 1, [0.95], left_s=0.0025)[0] == [2]
    assert lengths(COST, 1, [0.95], left_s=-1.0)[0] == [0]
    assert lengths(None, 1, [0.95], tokens_left=4)[0] == [4]
    assert lengths(None, 1, [0.5])[0] == [3], "those that are unlikely are not made however cheap"


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 1), st.integers(1, 8)), max_size=12),
    st.integers(0, 40),
    st.integers(0, 30),
    st.one_of(st.just(math.inf), st.floats(-1, 0.1)),
)
def test_expected_tokens_are_cheaper_than_those_of_the_step(
    guesses: list[tuple[int, float, int]], num_others: int, tokens_left: int, left_s: float
) -> None:
    num = len(guesses) + num_others
    shape = StepShape(num_decodes=num, decode_context_tokens=100 * num)
    found, expected = draft_lengths(COST, shape, num, [Guess(*guess) for guess in guesses], tokens_left, left_s)
    assert all(0 <= length <= guess[2] for length, guess in zip(found, guesses, strict=True))
    assert sum(found) <= tokens_left
    if not sum(found):
        return
    context = sum(guess[0] * length for guess, length in zip(guesses, found, strict=True))
    drafted = shape._replace(num_decodes=num + sum(found), decode_context_tokens=100 * num + context)
    before_s, after_s = COST.predict(shape), COST.predict(drafted)
    assert after_s - before_s <= left_s + 1e-9
    assert after_s / (num + expected) < before_s / num
