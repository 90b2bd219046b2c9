"""Steps for a pipeline of stages: as many in flight, none with a sequence of another."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.calls import AddModel, OnStep, Submit
from shared.engine.engine import Engine
from shared.policies.catalogue import ORDERING_POLICIES, ordering_policy
from shared.policies.token_budget import FixedTokenBudget
from tests.seeds import examples
from tests.shared.engine.fake_executor import FakeExecutor, request
from tests.shared.engine.test_engine_under_load import SHAPES, Run, go


def watched(run: Run, used: Counter) -> Run:
    """`used` counts plans by how many are in flight with each."""
    check = run.engine.check

    def check_steps() -> None:
        check()
        held = [sequence.number for step in run.engine.steps.in_flight.values() for sequence in step.sequences]
        assert len(held) == len(set(held)), "a sequence is in two steps"
        used[len(run.engine.steps.in_flight)] += 1

    run.engine.check = check_steps  # type: ignore[method-assign]
    return run


@pytest.mark.slow
@given(seed=st.integers(0, 10_000), ordering=st.sampled_from(sorted(ORDERING_POLICIES)), stages=st.integers(2, 4))
@settings(max_examples=examples(3), deadline=None)
def test_no_sequence_is_in_two_steps_and_every_output_is_that_of_one_stage(seed, ordering, stages):
    used, in_flight = Counter(), Counter()
    go(watched(Run(seed, used, ordering=ordering, num_stages=stages, steps_in_flight=stages), in_flight), 60)
    assert in_flight[2] and used["steps_suspended"] == 0


def test_those_that_decode_are_divided_over_the_stages():
    engine = Engine(14, 8, ordering_policy("fcfs"), FixedTokenBudget(64), steps_in_flight=2, num_stages=2)
    engine.apply(AddModel(SHAPES[0]), 0.0)
    executor = FakeExecutor(SHAPES)
    for index in range(5):
        engine.apply(Submit(request(f"r{index}", [index] * 4, 12)), 0.0)
    in_flight = []
    for turn in range(8):
        while len(in_flight) < 2 and (plan := engine.plan(float(turn))):
            executor.launch(plan)
            in_flight.append(plan)
        engine.apply(OnStep(executor.execute(in_flight.pop(0))), float(turn))
    (first,), second = in_flight, engine.plan(9.0)
    assert {len(first.rows), len(second.rows)} == {2, 3} and not set(first.rows) & set(second.rows)
