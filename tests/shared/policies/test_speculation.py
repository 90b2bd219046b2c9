"""A draft model drafts never for long where it costs, soon where it pays, and how many tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.costs.live import LiveCosts
from shared.costs.model import CostModel, StepShape
from shared.policies.speculation import (
    DraftCandidate,
    DraftChoice,
    GateState,
    SpeculationGate,
    Speculator,
    StepRoom,
    choose_drafts,
)

COST = CostModel(fixed_s=0.02, prefill_token_s=0.001, prefill_attention_s=0.0, decode_s=0.001, decode_context_s=0.0)


def learnt(pass_s: float, row_s: float = 0.0) -> LiveCosts:
    """Costs of a draft model whose passes of decodes take so long."""
    costs = LiveCosts()
    for num in (1, 2, 4, 8, 16, 32) * 4:
        costs.observe(StepShape(0, 0.0, num, 100 * num), pass_s + row_s * num)
        costs.observe(StepShape(8 * num, 32.0 * num, 0, 0), pass_s + row_s * 8 * num)
    return costs


def choose(
    draft: LiveCosts, candidates: list[DraftCandidate], left_s: float = 10.0, tokens_left: int = 500, *, trial=False
) -> DraftChoice:
    shape = StepShape(0, 0.0, len(candidates), 100 * len(candidates))
    room = StepRoom(shape, len(candidates), tokens_left, left_s)
    return choose_drafts(COST, draft, room, candidates, 0.3, is_trial=trial)


def ready(rate: float, num_missing: int = 1, most: int = 5, remaining: int = 100) -> DraftCandidate:
    return DraftCandidate(100, num_missing, rate, most, remaining)


class Machine:
    """Steps that take 20 ms without drafts."""

    def __init__(self, seconds: float, tokens: float, noise: float = 0.0) -> None:
        """With drafts they take `seconds` and make `tokens`."""
        self.gate = SpeculationGate()
        self.drafted_s, self.tokens, self.noise = seconds, tokens, noise
        self.seconds = self.made = 0.0
        self.num_drafted = 0
        self._draw = random.Random(1)

    def step(self) -> None:
        factor = 1 + self.noise * (2 * self._draw.random() - 1)
        if self.gate.take_turn() is GateState.WAITS:
            took_s, made = 0.02 * factor, 1.0
            self.gate.on_plain(took_s, 0.02)
        else:
            took_s, made = self.drafted_s * factor, self.tokens
            self.num_drafted += 1
            self.gate.on_drafted(took_s, 0.02, made, is_usual=True)
        self.seconds += took_s
        self.made += made

    def run(self, num_steps: int) -> Machine:
        for _ in range(num_steps):
            self.step()
        return self


def test_drafts_that_pay_begin_after_a_trial_and_stay() -> None:
    machine = Machine(0.03, 2.0, noise=0.2).run(400)
    assert machine.gate.state is GateState.DRAFTS and machine.gate.gain == pytest.approx(4 / 3, rel=0.1)
    assert machine.num_drafted > 380 - 400 // SpeculationGate.PROBE_STEPS


@settings(max_examples=60, deadline=None)
@given(seconds=st.floats(0.01, 0.2), tokens=st.floats(1.0, 3.0), noise=st.floats(0, 0.3), steps=st.integers(2000, 6000))
def test_drafts_never_cost_two_percent_over_the_time(seconds: float, tokens: float, noise: float, steps: int) -> None:
    """After the first trial, which may lose the time of its steps."""
    machine = Machine(seconds, tokens, noise).run(steps)
    lost_s = machine.seconds - 0.02 * machine.made
    first_trial_s = SpeculationGate.TRIAL_STEPS * 0.2
    assert lost_s <= 0.02 * machine.seconds + first_trial_s


def test_what_no_longer_pays_ends_and_is_tried_again() -> None:
    machine = Machine(0.03, 2.5).run(200)
    assert machine.gate.state is GateState.DRAFTS
    machine.tokens, before = 1.0, machine.num_drafted
    machine.run(120)
    assert machine.gate.state is GateState.WAITS and machine.num_drafted - before <= 80
    machine.tokens = 2.5
    machine.run(4000)
    assert machine.gate.state is GateState.DRAFTS


def test_a_gain_between_the_two_bounds_changes_nothing() -> None:
    machine = Machine(0.0195, 1.0).run(3000)  # 2.6 % faster: not enough to begin
    assert machine.gate.state is not GateState.DRAFTS
    machine = Machine(0.018, 1.0).run(100)
    assert machine.gate.state is GateState.DRAFTS
    machine.drafted_s = 0.0195
    machine.run(1000)
    assert machine.gate.state is GateState.DRAFTS


def test_where_none_are_predicted_to_pay_they_end() -> None:
    machine = Machine(0.03, 2.0).run(100)
    for _ in range(SpeculationGate.MOST_EMPTY_STEPS - 1):
        machine.gate.on_nothing()
    assert machine.gate.state is GateState.DRAFTS
    machine.gate.on_nothing()
    assert machine.gate.state is GateState.WAITS
    machine = Machine(0.03, 2.0).run(SpeculationGate.PLAIN_STEPS + 1)
    assert machine.gate.state is GateState.TRIES
    machine.gate.on_nothing()
    assert machine.gate.state is GateState.WAITS


def test_one_step_that_stands_still_ends_nothing() -> None:
    machine = Machine(0.03, 2.0).run(100)
    machine.gate.on_drafted(3.0, 0.02, 2.0, is_usual=True)
    assert machine.gate.state is GateState.DRAFTS


def test_more_are_drafted_for_who_keeps_more() -> None:
    choice = choose(learnt(0.001), [ready(0.9), ready(0.5), ready(0.05)])
    assert choice.lengths[0] > choice.lengths[1] > choice.lengths[2] == 0
    assert choice.computes[:2] == [1, 1] and choice.computes[2] == 0
    assert 0 < choice.expected < sum(choice.lengths) and choice.predicted_s > 0


def test_dear_passes_are_not_made_but_in_a_trial() -> None:
    dear = learnt(0.03)
    assert choose(dear, [ready(0.8)]).lengths == [0]
    assert choose(learnt(0.017), [ready(0.8)]).lengths == [0] != choose(learnt(0.017), [ready(0.8)], trial=True).lengths
    assert choose(dear, [ready(0.8)], trial=True).lengths == [0], "it would be in vain for certain"


def test_nothing_is_drafted_beyond_what_the_step_has_left() -> None:
    assert sum(choose(learnt(0.001), [ready(0.9)] * 4, tokens_left=3).lengths) <= 3
    choice = choose(learnt(0.001), [ready(0.9)], left_s=0.006)
    assert choice.lengths[0] * 0.001 + choice.predicted_s <= 0.007


def test_a_long_prompt_is_computed_in_parts_within_a_steps_time_and_only_where_it_is_worth_it() -> None:
    costs = learnt(0.002, 0.0005)
    choice = choose(costs, [ready(0.9, num_missing=101), ready(0.9)])
    assert 0 < choice.computes[0] < 101 and choice.lengths[0] == 0 < choice.lengths[1]
    assert choice.predicted_s < 0.05
    assert choose(costs, [ready(0.9, num_missing=101, remaining=3)]).computes == [0]
    assert choose(costs, [ready(0.9, num_missing=101)], left_s=0.001).computes == [0]


def test_acceptance_is_learnt_of_sequence_and_model() -> None:
    speculator = Speculator()
    rate = 0.6
    for _ in range(40):
        rate = speculator.observe(4, 4, rate)
    assert rate > 0.95 and speculator.acceptance_rate > 0.9
    for _ in range(40):
        rate = speculator.observe(4, 0, rate)
    assert rate < 0.05
    assert speculator.gate(3) is speculator.gate(2) is not speculator.gate(4)
    assert list(speculator.gates) == [3, 7]
