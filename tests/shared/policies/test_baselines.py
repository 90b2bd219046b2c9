from __future__ import annotations

import random

import pytest

from shared.policies.baselines import RoundRobin, SkipJoinMlfq
from shared.policies.catalogue import ORDERING_POLICIES
from shared.policies.ordering import ModelView
from tests.shared.policies.views import FakeModel, FakeSequence


def test_round_robin_takes_turns_over_models_and_sequences() -> None:
    policy = RoundRobin()
    models: list[ModelView] = [FakeModel("a", last_planned_step=4), FakeModel("b", last_planned_step=3)]
    assert policy.pick_model(models, 0.0) is models[1]
    sequences = [FakeSequence(number) for number in range(3)]
    order = []
    for turn in range(6):
        first = min(sequences, key=lambda sequence: (policy.key(sequence, turn), sequence.number))
        first.last_ran_s = turn + 1.0
        order.append(first.number)
    assert order == [0, 1, 2, 0, 1, 2]


def arrive(policy: SkipJoinMlfq, number: int, num_tokens: int, now: float = 0.0) -> FakeSequence:
    sequence = FakeSequence(number, arrived_s=now, last_ran_s=now, num_tokens=num_tokens)
    policy.on_arrival(sequence, now)
    return sequence


def test_mlfq_joins_at_the_level_that_holds_the_prefill() -> None:
    policy = SkipJoinMlfq(quantum_s=0.1, num_levels=4, prefill_token_s=1e-3)
    levels = [policy.key(arrive(policy, 0, tokens), 0.0)[0] for tokens in (1, 100, 101, 400, 800, 5000)]
    assert levels == [0, 0, 1, 2, 3, 3]


def test_mlfq_demotes_by_one_level_a_quantum() -> None:
    policy = SkipJoinMlfq(quantum_s=0.1, num_levels=3, prefill_token_s=0.0)
    sequence = arrive(policy, 0, 10)
    policy.charge([sequence], [0.09], 1.0)
    assert policy.key(sequence, 1.0) == (0, 0.0)
    policy.charge([sequence], [0.02], 2.0)  # 0.01 of the next level's 0.2 is used
    assert policy.key(sequence, 2.0) == (1, 2.0)
    policy.charge([sequence], [0.18], 3.0)
    assert policy.key(sequence, 3.0) == (1, 2.0)
    policy.charge([sequence], [5.0], 4.0)
    assert policy.key(sequence, 4.0) == (2, 4.0), "the last level keeps it"


def test_mlfq_promotes_who_has_waited_too_long() -> None:
    policy = SkipJoinMlfq(quantum_s=0.1, prefill_token_s=1e-3, starvation_s=2.0)
    long, short = arrive(policy, 0, 700), arrive(policy, 1, 10, 1.0)
    assert policy.key(short, 1.9) < policy.key(long, 1.9)
    assert policy.key(long, 2.1) == (0, 2.1)
    assert policy.key(long, 2.2) == (0, 2.1), "promoted once"
    policy.charge([long], [0.15], 2.3)
    long.last_ran_s = 2.3
    assert policy.key(long, 2.3) == (1, 2.3), "falls again from there"


def test_mlfq_picks_the_model_of_the_first_sequence() -> None:
    policy = SkipJoinMlfq()
    a, b = FakeModel("a"), FakeModel("b")
    a.sequences = [arrive(policy, 0, 4000)]
    b.sequences = [arrive(policy, 1, 10)]
    assert policy.pick_model([a, b], 0.0) is b


def test_the_level_travels_and_the_state_of_another_order_does_not() -> None:
    policy = SkipJoinMlfq(quantum_s=0.1, num_levels=4, prefill_token_s=0.0)
    sequence, moved = arrive(policy, 0, 10), arrive(policy, 1, 10, 5.0)
    policy.charge([sequence], [0.35], 1.0)
    assert policy.export_state(sequence) == (2.0,)
    policy.import_state(moved, (2.0,), 6.0)
    assert policy.key(moved, 6.0) == (2, 6.0)
    for state in ((), (1.0, 0.0)):
        policy.import_state(moved, state, 7.0)
    assert policy.key(moved, 7.0) == (2, 6.0)
    policy.import_state(moved, (9.0,), 8.0)
    assert policy.key(moved, 8.0) == (3, 8.0), "the last level there is"
    round_robin = RoundRobin()
    assert round_robin.export_state(moved) == ()
    round_robin.import_state(moved, (1.0,), 0.0)


@pytest.mark.parametrize("name", ORDERING_POLICIES)
def test_sequences_are_sorted_by_their_keys_and_numbers(name: str) -> None:
    chooser, policy = random.Random(1), ORDERING_POLICIES[name]()
    sequences = [FakeSequence(number, arrived_s=chooser.choice([0.0, 1.0])) for number in range(40)]
    for sequence in sequences:
        sequence.last_ran_s = chooser.choice([1.0, 2.0, 9.0])
        policy.on_arrival(sequence, 1.0)
        policy.charge([sequence], [chooser.choice([0.1, 0.4])], 2.0)
    chooser.shuffle(sequences)
    expected = sorted(sequences, key=lambda sequence: (policy.key(sequence, 9.5), sequence.number))
    policy.sort(sequences, 9.5)
    assert sequences == expected
    policy.sort(empty := [], 9.5)
    assert not empty
