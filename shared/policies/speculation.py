"""Speculative decoding with a draft model: how many tokens it drafts for whom, and whether it drafts at all.

Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", 2023; Chen et al., "Accelerating
Large Language Model Decoding with Speculative Sampling", 2023. A draft model computes the next tokens one by one, and the
model itself scores all of them in one step. Which are kept is not decided here (docs/design/engine.md): each that equals
what is sampled in its place.

The i-th draft of a sequence is kept with the i-th power of its acceptance rate. It costs a row of the step and a part of a
pass of the draft model, which costs the batch something however few sequences it drafts for. So the depth is chosen that
brings the most expected tokens per predicted second (`choose_drafts`).

Predictions err, so they are not what it is turned on by: `SpeculationGate` compares measured times per token of steps with
drafts and steps without, for each size of the batch. What a trial has lost is earned back a hundredfold in time without
drafts before the next one, so drafts that never pay cost a hundredth of the time.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

from shared.costs.live import LiveCosts
from shared.costs.model import CostModel, StepShape

FIRST_ACCEPTANCE_RATE = 0.6
"""Rate assumed of a draft model of which nothing is known."""
TRIAL_ACCEPTANCE_RATE = 0.4
"""Rate assumed at least in a trial: else bad luck would end all trials."""
SEQUENCE_WEIGHT = 0.125
MODEL_WEIGHT = 0.02
"""Weights of the last draft in the acceptance rates of its sequence and of the draft model."""
LEAST_ACCEPTANCE = 0.1
"""A draft that is less likely to be kept is not made."""
LEAST_PREDICTED_GAIN, LEAST_TRIED_GAIN = 1.03, 0.9
"""Predicted tokens per second over those without drafts; and in a trial, as predictions err."""
CATCH_UP_SHARE = 1.0
"""Share of a step's time without drafts for which the draft model computes the tokens that it lacks of sequences at most, so
that a step with it takes twice as long."""
EXPECTED_OUTPUT_TOKENS = 64
"""A sequence is expected to make as many tokens as it has made, and so many more."""
UNKNOWN_SAVING = 0.25
"""Share of a token's time that drafts are said to save before anything was measured."""


UNKNOWN_DEPTH = 2
"""Drafts at most before a pass was measured often enough."""


class DraftCandidate(NamedTuple):
    """A decoding sequence for which tokens may be drafted."""

    context_tokens: int
    num_missing: int
    """Tokens that the draft model has to compute before its first draft; at least 1."""
    acceptance_rate: float
    most: int
    """Drafts."""
    remaining: int
    """Tokens that it may still make."""


class DraftChoice(NamedTuple):
    """What the draft model does before a step; element i is for the i-th candidate."""

    computes: list[int]
    """Tokens that it computes in its first pass; where drafts follow, all that are missing."""
    lengths: list[int]
    """Drafts."""
    expected: float
    """Drafts that are expected to be kept."""
    predicted_s: float
    """Time of its passes; 0 where nothing is known of them."""


class StepRoom(NamedTuple):
    """What the limits of a step leave for drafts."""

    shape: StepShape
    """Without them."""
    num_sampled: int
    tokens_left: int
    left_s: float


def choose_drafts(
    cost: CostModel | None, draft: LiveCosts, room: StepRoom, candidates: list[DraftCandidate], saving: float, *,
    is_trial: bool,
) -> DraftChoice:  # fmt: skip
    """What the draft model is to do before a step. `cost`: of the model itself; `saving`: the share of a token's time that
    drafts save."""
    num = len(candidates)
    step_s = 0.0 if cost is None else cost.predict(room.shape)
    computes = _catch_ups(draft, room, candidates, step_s, saving)
    ready = [i for i in range(num) if computes[i] == candidates[i].num_missing]
    best_lengths, best_expected, best_s = [0] * num, 0.0, 0.0
    best_rate = 0.0
    if step_s and (draft.is_known or not is_trial):
        best_rate = (LEAST_TRIED_GAIN if is_trial else LEAST_PREDICTED_GAIN) * room.num_sampled / step_s
    first_s = _first_pass_s(draft, candidates, computes)
    usual_s = _first_pass_s(draft, candidates, [min(2, count) for count in computes])
    lengths, expected, rows_s, passes_s, num_rows = [0] * num, 0.0, 0.0, 0.0, 0
    deepest = max((candidates[i].most for i in ready), default=0)
    for depth in range(1, 1 + (deepest if draft.is_known else min(deepest, UNKNOWN_DEPTH))):
        num_drafting = context = 0
        for i in ready:
            one = candidates[i]
            kept = one.acceptance_rate**depth
            row_s = 0.0 if cost is None else cost.decode_cost_s(one.context_tokens)
            is_worth = kept >= LEAST_ACCEPTANCE and kept * step_s >= row_s * room.num_sampled
            if lengths[i] < depth - 1 or depth > one.most or not (is_worth or (is_trial and depth == 1)):
                continue
            if num_rows >= room.tokens_left:
                break
            lengths[i], num_rows, expected = depth, num_rows + 1, expected + kept
            rows_s += row_s
            if cost is not None and room.shape.num_tokens + num_rows > cost.knee_tokens:
                rows_s += cost.over_knee_s
            num_drafting, context = num_drafting + 1, context + one.context_tokens + depth
        if not num_drafting:
            break
        if depth > 1 and draft.is_known:
            passes_s += draft.cost_model.predict(StepShape(0, 0.0, num_drafting, context))
        if rows_s + first_s + passes_s > room.left_s:
            break
        total_s = step_s + rows_s + usual_s + passes_s
        rate = (room.num_sampled + expected) / total_s if total_s else math.inf
        if rate > best_rate:
            best_rate, best_lengths, best_expected, best_s = rate, list(lengths), expected, passes_s
    # Who could have drafts and has none is not followed; others are caught up with where drafts pay, as far as is known.
    pays = any(best_lengths) or not ready
    computes = [
        count if best_lengths[i] or (pays and i not in ready) else 0 for i, count in enumerate(computes)
    ]  # fmt: skip
    return DraftChoice(computes, best_lengths, best_expected, _first_pass_s(draft, candidates, computes) + best_s)


def _catch_ups(
    draft: LiveCosts, room: StepRoom, candidates: list[DraftCandidate], step_s: float, saving: float
) -> list[int]:
    """How many tokens of each the draft model computes first, of who lacks the fewest first."""
    computes = [0] * len(candidates)
    left = draft.max_step_tokens
    if draft.is_known and draft.cost_model.fixed_s >= room.left_s:
        return computes
    if draft.is_known and step_s:
        seconds = min(max(CATCH_UP_SHARE * step_s, draft.cost_model.fixed_s), room.left_s)
        left = min(left, max(len(candidates), draft.cost_model.max_prefill_tokens(seconds, StepShape(), 0)))
    token_s = step_s / max(1, room.num_sampled)
    for i in sorted(range(len(candidates)), key=lambda i: candidates[i].num_missing):
        one = candidates[i]
        if one.num_missing > 2 and draft.is_known and step_s:
            start = one.context_tokens + 1 - one.num_missing
            if draft.cost_model.prefill_cost_s(one.num_missing, start) > saving * token_s * one.remaining:
                continue
        computes[i] = min(one.num_missing, left)
        left -= computes[i]
    return computes


def _first_pass_s(draft: LiveCosts, candidates: list[DraftCandidate], computes: list[int]) -> float:
    if not draft.is_known or not any(computes):
        return 0.0
    prefill = decodes = context = 0
    attention = 0.0
    for one, count in zip(candidates, computes, strict=True):
        start = one.context_tokens + 1 - one.num_missing
        if count == 1:
            decodes, context = decodes + 1, context + start
        elif count:
            prefill, attention = prefill + count, attention + count * (start + count / 2)
    return draft.cost_model.predict(StepShape(prefill, attention, decodes, context))


class _Ratio:
    """Measured over expected seconds of the last steps, whose weights fall off exponentially. A step that stood still counts
    as if it had taken a few times as long as expected."""

    __slots__ = ("_expected_s", "_seconds", "num_steps")
    _DECAY = 63 / 64
    _OUTLIER = 4.0

    def __init__(self) -> None:
        self._seconds = self._expected_s = 0.0
        self.num_steps = 0

    def add(self, seconds: float, expected_s: float, usual_s: float) -> None:
        """`usual_s`: what a step like this takes."""
        self._seconds = self._DECAY * self._seconds + min(seconds, self._OUTLIER * usual_s)
        self._expected_s = self._DECAY * self._expected_s + expected_s
        self.num_steps += 1

    @property
    def value(self) -> float:
        return self._seconds / self._expected_s if self._expected_s else 1.0


class GateState(Enum):
    WAITS = "off"
    """No drafts until a trial is due."""
    TRIES = "trial"
    DRAFTS = "on"


class SpeculationGate:
    """Whether a draft model drafts for batches of about one size, by what was measured.

    | state | goes to | when |
    |---|---|---|
    | WAITS | TRIES | steps without drafts were measured, and as much time has passed as the last trial's loss asks |
    | TRIES | DRAFTS | the trial is over and its tokens took less time, by a twentieth |
    | TRIES | WAITS | it is over, or going badly |
    | DRAFTS | WAITS | tokens of the last steps took hardly less time, or the prompts that it reads cost more than is won |
    | TRIES, DRAFTS | WAITS | for a step of a trial, or many in a row, none are predicted to pay |
    """

    PLAIN_STEPS = 8
    """Steps without drafts before the first trial."""
    TRIAL_STEPS = 24
    HOPELESS_STEPS, HOPELESS_GAIN = 8, 0.8
    """A trial that stands so badly after so many steps is over."""
    ON_GAIN, OFF_GAIN = 1.05, 1.02
    LOSS_SHARE = 0.01
    """Share of the time without drafts that trials may lose."""
    MOST_LOST_STEPS = 100
    """Steps whose time may be lost, without being won back, before drafts end: to prompts that the draft model reads."""
    LEAST_WAIT_S = 2.0
    MOST_EMPTY_STEPS = 16
    """In a row, for which no drafts are predicted to pay, before they end."""
    MOST_DOUBLINGS = 4
    """Doublings of the wait, by trials in a row that failed."""
    PROBE_STEPS = 64
    """While it drafts, one step of so many has none: what those take may change."""

    def __init__(self) -> None:
        self.state = GateState.WAITS
        self._plain, self._drafted = _Ratio(), _Ratio()
        self._lost_s = 0.0
        """Seconds that drafts have cost beyond what their tokens would have taken, since they began or last paid."""
        self._waited_s = self._wait_s = 0.0
        self._since_probe = self._num_failed = self._num_empty = 0

    @property
    def gain(self) -> float:
        """Tokens per second with drafts over without, of the last steps of both; 1 where either was never measured."""
        if not self._plain.num_steps or not self._drafted.num_steps or not self._drafted.value:
            return 1.0
        return self._plain.value / self._drafted.value

    def take_turn(self) -> GateState:
        """What the next step is to be; WAITS: without drafts."""
        if self.state is GateState.DRAFTS and self._since_probe >= self.PROBE_STEPS:
            self._since_probe = 0
            return GateState.WAITS
        return self.state

    def on_plain(self, seconds: float, predicted_s: float) -> None:
        """A step of decodes without drafts took so long."""
        self._plain.add(seconds, predicted_s, self._usual_s(predicted_s))
        if self.state is GateState.WAITS:
            self._waited_s += seconds
            if self._plain.num_steps >= self.PLAIN_STEPS and self._waited_s >= self._wait_s:
                self.state, self._drafted, self._lost_s = GateState.TRIES, _Ratio(), 0.0

    def on_drafted(self, seconds: float, predicted_s: float, tokens_per_sequence: float, *, is_usual: bool) -> None:
        """A step with drafts took so long, and made so many tokens of each sequence. `predicted_s`: without drafts;
        `is_usual`: the draft model did not have to compute much beside drafts."""
        usual_s = self._usual_s(predicted_s)
        # One that stood still says little.
        counted_s = min(seconds, self.MOST_LOST_STEPS / 2 * usual_s)
        self._lost_s = max(0.0, self._lost_s + counted_s - usual_s * tokens_per_sequence)
        if self._lost_s > self.MOST_LOST_STEPS * usual_s and self.state is GateState.DRAFTS:
            self._stop()
            return
        self._since_probe += 1
        self._num_empty = 0
        if not is_usual:
            return
        self._drafted.add(seconds, predicted_s * tokens_per_sequence, 2 * usual_s)
        num_steps, gain = self._drafted.num_steps, self.gain
        if self.state is GateState.TRIES:
            if num_steps >= self.TRIAL_STEPS:
                if gain >= self.ON_GAIN:
                    self.state, self._num_failed = GateState.DRAFTS, 0
                else:
                    self._stop()
            elif num_steps >= self.HOPELESS_STEPS and gain < self.HOPELESS_GAIN:
                self._stop()
        elif self.state is GateState.DRAFTS and gain < self.OFF_GAIN:
            self._stop()

    def on_nothing(self) -> None:
        """No drafts were predicted to pay for a step that could have had some: looking for them takes time too."""
        self._num_empty += 1
        if self.state is GateState.TRIES or self._num_empty >= self.MOST_EMPTY_STEPS:
            self._num_empty = 0
            self._stop()

    def _usual_s(self, predicted_s: float) -> float:
        return predicted_s * self._plain.value

    def _stop(self) -> None:
        self.state = GateState.WAITS
        self._waited_s = 0.0
        self._wait_s = max(self.LEAST_WAIT_S, self._lost_s / self.LOSS_SHARE) * 2**self._num_failed
        self._num_failed = min(self._num_failed + 1, self.MOST_DOUBLINGS)


class Speculator:
    """A draft model's costs, acceptance and gates, one for each order of magnitude of the batch."""

    def __init__(self) -> None:
        self.costs = LiveCosts()
        self.acceptance_rate = FIRST_ACCEPTANCE_RATE
        self._gates: dict[int, SpeculationGate] = {}
        self._expected: dict[int, float] = {}
        """Drafts that were expected to be kept in the last step, per sequence."""

    def gate(self, num_sequences: int) -> SpeculationGate:
        """The one for batches of about so many sequences."""
        return self._gates.setdefault(num_sequences.bit_length(), SpeculationGate())

    @property
    def gates(self) -> dict[int, SpeculationGate]:
        """By the most sequences of a batch."""
        return {(1 << bits) - 1: gate for bits, gate in sorted(self._gates.items())}

    def saving(self, num_sequences: int) -> float:
        """Share of a token's time that drafts save."""
        gain = self.gate(num_sequences).gain
        return 1 - 1 / gain if gain > 1 else UNKNOWN_SAVING

    def note_expected(self, num_sequences: int, expected: float) -> None:
        """Notes what is expected of a step that has been planned."""
        self._expected[num_sequences.bit_length()] = expected / num_sequences

    def is_worth_waiting(self, num_sequences: int, least: float) -> bool:
        """Whether the next step would have drafts, of which at least so many per sequence are expected to be kept."""
        state = self.gate(num_sequences).state
        if state is GateState.TRIES:
            return True
        return state is GateState.DRAFTS and self._expected.get(num_sequences.bit_length(), math.inf) >= least

    def observe(self, num_drafted: int, num_kept: int, sequence_rate: float) -> float:
        """Drafts of a sequence were tried, one after another until the first that was wrong. Returns its new rate."""
        for is_kept in [True] * num_kept + [False] * (num_kept < num_drafted):
            sequence_rate += SEQUENCE_WEIGHT * (is_kept - sequence_rate)
            self.acceptance_rate += MODEL_WEIGHT * (is_kept - self.acceptance_rate)
        return sequence_rate
