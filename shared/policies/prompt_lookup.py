"""Prompt lookup decoding: what followed the last tokens where they stood before is guessed to follow them again.

A. Saxena, "Prompt Lookup Decoding", 2023: a draft without a draft model, for texts that repeat their prompt or themselves
(summaries, edits of code). A step computes the guessed tokens behind the last known one, each is sampled as if those
before it were the text, and they are kept for as long as they are what was sampled.

How many are guessed is decided by what they bring and cost. Each sequence has a rate of hits: how often the token that was
looked up was the next one, whether or not it was tried. The i-th guessed token is kept with the i-th power of that rate. Of
all sequences of a step the cheapest expected tokens are taken first, for as long as they are cheaper than those that the
step makes anyway.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from shared.costs.model import CostModel, StepShape

FIRST_HIT_RATE = 0.5
HIT_WEIGHT = 0.125
"""Weight of the last looked up token in the rate of hits."""
LEAST_HIT_RATE = 0.1
"""A guess that is less likely is not made, however little it is said to cost."""
LEAST_GAIN = 1.25
"""Expected tokens are to cost so many times less than those that the step makes anyway: cost models err."""
MAX_CANDIDATES = 8
"""Places looked at for the longest match, the last ones first."""

_FACTOR, _MIX, _MASK = 0x01000193, 0x9E3779B1, 0xFFFFFFFF
_MIN_SLOT_BITS = 8
_BULK_TOKENS = 64
"""So many new tokens are entered at once."""


class LookupSettings(NamedTuple):
    num_tokens: int = 0
    """Guessed at most for a sequence in a step; 0: none ever are."""
    min_ngram: int = 2
    """So many of the last tokens must have stood before, in that order."""
    max_ngram: int = 4
    """Among several places that with the longest match is taken, up to so many tokens; then the last one."""


class PromptLookup:
    """The places of all n-grams of one sequence, and where it may repeat itself now.

    `_table` has the last position before which a gram with a given hash stands, `_previous` for each position the one
    before it in the same slot; four bytes each. What is found is compared with the tokens, so hashes may collide."""

    __slots__ = ("_at", "_bits", "_max_ngram", "_ngram", "_num_seen", "_previous", "_slot", "_table", "hit_rate")

    def __init__(self, settings: LookupSettings) -> None:
        self._ngram = settings.min_ngram
        self._max_ngram = settings.max_ngram
        self._num_seen = 0
        self._at = -1
        """Position at which the next token is expected to have stood before; -1: nowhere."""
        self._bits = 0
        self._slot = 0
        """Slot of the last tokens."""
        self._table = array("i")
        self._previous = array("i")
        self.hit_rate = FIRST_HIT_RATE

    def follow(self, tokens: list[int]) -> bool:
        """Takes in the sequence, of which tokens may have been added since the last call; whether something can be
        guessed."""
        num, seen = len(tokens), self._num_seen
        if num == seen:
            return self._at >= 0
        self._num_seen = num
        if not self._bits or num - seen >= _BULK_TOKENS or num > 1 << self._bits:
            self._enter_all(tokens)
            self._slot = self._slot_of(tokens, num)
            self._at = self._find(tokens, num)
            return self._at >= 0
        for position in range(seen, num):
            if self._at >= 0:
                is_hit = tokens[self._at] == tokens[position]
                self.hit_rate += HIT_WEIGHT * (is_hit - self.hit_rate)
                self._at = self._at + 1 if is_hit else -1
            if position >= self._ngram:
                self._previous.append(self._table[self._slot])
                self._table[self._slot] = position
            self._slot = self._slot_of(tokens, position + 1)
            if self._at < 0:
                self._at = self._find(tokens, position + 1)
        return self._at >= 0

    def draft(self, tokens: list[int], count: int) -> list[int]:
        """The next `count` tokens if the sequence repeats itself, after `follow` has found that it may. What began fewer
        tokens ago goes round."""
        found = tokens[self._at : self._at + count]
        while len(found) < count:
            found += found[: count - len(found)]
        return found

    def _slot_of(self, tokens: list[int], end: int) -> int:
        """Slot of the gram before `end`."""
        value = 0
        for token in tokens[end - self._ngram : end]:
            value = value * _FACTOR + token & _MASK
        return (value * _MIX & _MASK) >> 32 - self._bits

    def _enter_all(self, tokens: list[int]) -> None:
        """All positions, into a new table with room for as many again."""
        import numpy as np  # the command and the scheduler import this module, and have none

        num, n = len(tokens), self._ngram
        self._bits = max(_MIN_SLOT_BITS, num.bit_length() + 1)
        table = np.full(1 << self._bits, -1, np.int32)
        previous = np.full(max(0, num - n), -1, np.int32)
        if num > n:
            ids = np.array(tokens, np.uint32)
            values = np.zeros(num - n, np.uint32)
            for first in range(n):
                values = values * np.uint32(_FACTOR) + ids[first : first + num - n]
            slots = (values * np.uint32(_MIX)) >> np.uint32(32 - self._bits)
            order = np.argsort(slots, kind="stable")
            is_next_same = slots[order[1:]] == slots[order[:-1]]
            previous[order[1:][is_next_same]] = order[:-1][is_next_same] + n
            last = order[np.append(~is_next_same, True)]
            table[slots[last]] = last + n
        self._table, self._previous = array("i", table.tobytes()), array("i", previous.tobytes())

    def _find(self, tokens: list[int], end: int) -> int:
        """The position before which the longest match of the tokens before `end`, whose slot is known, stands; -1: there is
        none."""
        n, most = self._ngram, self._max_ngram
        best, longest = -1, n - 1
        at = self._table[self._slot] if end >= n else -1
        for _ in range(MAX_CANDIDATES):
            if at < 0:
                break
            length = 0
            while length < most and length < at and tokens[at - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > longest:
                best, longest = at, length
                if length == most:
                    break
            at = self._previous[at - n]
        return best


class Guess(NamedTuple):
    """What could be guessed of a sequence."""

    context_tokens: int
    hit_rate: float
    most: int
    """Tokens."""


def may_pay(cost_model: CostModel | None, shape: StepShape, num_sampled: int) -> bool:
    """Whether certain guesses would, for a step that samples so many tokens without them."""
    if cost_model is None:
        return True
    over_s = cost_model.over_knee_s if shape.num_tokens >= cost_model.knee_tokens else 0.0
    return LEAST_GAIN * (cost_model.decode_s + over_s) * num_sampled < cost_model.predict(shape)


def draft_lengths(
    cost_model: CostModel | None,
    shape: StepShape,
    num_sampled: int,
    guesses: list[Guess],
    tokens_left: int,
    left_s: float,
) -> tuple[list[int], float]:
    """How many tokens to guess of each sequence, and how many of them are expected to be kept.

    `shape`: of the step without them, which samples `num_sampled` tokens, one of each of the sequences at least.
    `tokens_left`, `left_s`: what its limits leave. Without a cost model all guesses are free."""
    options = []
    for index, (context_tokens, hit_rate, most) in enumerate(guesses):
        token_s = 0.0 if cost_model is None else cost_model.decode_cost_s(context_tokens)
        gain = 1.0
        for number in range(most):
            gain *= hit_rate
            if gain < LEAST_HIT_RATE:
                break
            options.append((token_s / gain, number, index, gain, token_s))
    options.sort()
    lengths, expected = [0] * len(guesses), 0.0
    if cost_model is None:
        step_s, over_knee_s, num_below_knee = 0.0, 0.0, 0
    else:
        step_s, over_knee_s = cost_model.predict(shape), cost_model.over_knee_s
        num_below_knee = cost_model.knee_tokens - shape.num_tokens
    for num_taken, (_, _, index, gain, token_s) in enumerate(options):
        added_s = token_s if num_taken < num_below_knee else token_s + over_knee_s
        if num_taken >= tokens_left or added_s > left_s:
            break
        if LEAST_GAIN * added_s * (num_sampled + expected) > gain * step_s:
            break
        lengths[index] += 1
        expected += gain
        step_s += added_s
        left_s -= added_s
    return lengths, expected
