"""Guessed tokens: fewer steps, the same tokens, and nothing left of those that were wrong."""

from __future__ import annotations

import math

import msgspec
import pytest

from shared.costs.model import CostModel
from shared.engine.calls import AddModel, Detach, OnStep, SetCostModel, Submit
from shared.engine.engine import Engine
from shared.engine.handover import Detached
from shared.engine.plan import ModelShape, StepPlan, StepResult
from shared.engine.requests import Ended, Output
from shared.messages.requests import FinishReason, GenerationRequest, TokenEntry, TokenLogprob, unpack_tokens
from shared.policies.catalogue import ordering_policy
from shared.policies.prompt_lookup import LookupSettings
from shared.policies.token_budget import FixedTokenBudget
from tests.shared.costs import costs
from tests.shared.engine.fake_executor import FakeExecutor, expected_output, repeating_token, request

SHAPE = ModelShape("a", 4, 2, 200)
LOOKUP = LookupSettings(6, 2, 4)
COST = costs(0.02, 0.001, decode_s=0.001)  # fmt: skip


def going_round(prefix: list[int]) -> int:
    """0, 1, 2, 3, 4, 0, ... whatever the prompt."""
    return (prefix[-1] + 1) % 5


def never_twice(prefix: list[int]) -> int:
    return 1000 + len(prefix)


class Run:
    def __init__(
        self, token=repeating_token, depth=1, lookup=LOOKUP, num_merged=60, budget=64, cost=COST, shape=SHAPE,
        draft_token=None, policy=FixedTokenBudget,
    ) -> None:  # fmt: skip
        self.engine = Engine(
            num_merged, 8, ordering_policy("fcfs"), policy(budget), steps_in_flight=depth, lookup=lookup
        )
        self.engine.apply(AddModel(shape), 0.0)
        if cost is not None:
            self.engine.apply(SetCostModel("a", cost), 0.0)
        self.token = token
        self.executor = FakeExecutor([shape], token, draft_token)
        self.plans: list[StepPlan] = []
        self.in_flight: list[StepPlan] = []
        self.entries: dict[str, list[tuple[int, list[int], tuple[TokenLogprob, ...]]]] = {}
        self.said: list[TokenEntry] = []
        self.ended: dict[str, Ended] = {}
        self.now = 0.0

    def submit(self, *requests: GenerationRequest) -> None:
        for sent in requests:
            assert self.engine.apply(Submit(sent), self.now) is None

    def plan(self) -> StepPlan | None:
        plan = self.engine.plan(self.now)
        self.engine.check()
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append(plan)
        return plan

    def step_returns(self) -> None:
        self.now += 0.01
        plan = self.in_flight.pop(0)
        result = self.executor.execute(plan)
        logprobs: list[TokenLogprob | None] = [TokenLogprob(-float(token)) for token in result.tokens]
        self.apply(msgspec.structs.replace(result, logprobs=logprobs))

    def apply(self, result: StepResult) -> None:
        self.engine.apply(OnStep(result), self.now)
        self.engine.check()
        for effect in self.engine.effects():
            if isinstance(effect, Ended):
                self.ended[effect.request.request_id] = effect
            elif isinstance(effect, Output):
                for entry in effect.entries:
                    made = (entry.offset, unpack_tokens(entry.tokens), entry.logprobs)
                    self.entries.setdefault(entry.request_id, []).append(made)
                    self.said.append(entry)

    def to_the_end(self) -> None:
        for _ in range(2000):
            while len(self.in_flight) < self.engine.steps.max_in_flight and self.plan():
                pass
            if not self.in_flight:
                break
            self.step_returns()
        assert not self.engine.all_held() and self.engine.pool.used_merged() == 0

    def output(self, name: str) -> list[int]:
        output: list[int] = []
        for offset, tokens, logprobs in self.entries[name]:
            assert offset == len(output) and [-one.logprob for one in logprobs] == tokens
            output += tokens
        return output

    @property
    def num_guessed(self) -> int:
        return self.engine.counters.drafted_tokens["a"]

    @property
    def num_kept(self) -> int:
        return self.engine.counters.accepted_tokens["a"]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cost", [COST, None])
def test_repetitions_take_fewer_steps_and_the_tokens_are_the_same(depth: int, cost: CostModel | None) -> None:
    sent = [request(f"r{i}", [i, 1, 2, 3, i], 60, stop_token_ids=(4,), min_tokens=50) for i in range(4)]
    run, plain = Run(depth=depth, cost=cost), Run(depth=depth, cost=cost, lookup=LookupSettings())
    for one in (run, plain):
        one.submit(*sent)
        one.to_the_end()
        for each in sent:
            assert one.output(each.request_id) == expected_output(each, 200, repeating_token)
            assert one.ended[each.request_id].num_output_tokens == len(one.output(each.request_id))
    assert run.num_kept > 20 and len(run.plans) < 0.9 * len(plain.plans)
    assert run.num_kept <= run.num_guessed and plain.num_guessed == 0
    counters = run.engine.counters
    assert depth == 2 or counters.online_tokens == plain.engine.counters.online_tokens
    assert 0 < counters.drafts["a"] <= run.num_guessed


def test_a_sequence_that_goes_round_takes_a_step_for_each_seven_tokens() -> None:
    run = Run(going_round)
    run.submit(request("r", [0], 150))
    run.to_the_end()
    assert run.output("r") == [i % 5 for i in range(1, 151)]
    assert len(run.plans) < 150 / 7 + 15


def test_where_nothing_repeats_plans_are_those_without_guesses() -> None:
    run, plain = Run(never_twice, depth=2), Run(never_twice, depth=2, lookup=LookupSettings())
    for one in (run, plain):
        one.submit(*(request(f"r{i}", [i, *range(10 * i, 10 * i + 9)], 40) for i in range(3)))
        one.to_the_end()
    assert run.plans == plain.plans and run.num_guessed == 0


def test_the_last_token_is_the_last_and_room_is_not_exceeded() -> None:
    for max_tokens in range(1, 20):
        run = Run(going_round)
        run.submit(request("r", [0, 1, 2, 3, 4, 0, 1], max_tokens))
        run.to_the_end()
        assert len(run.output("r")) == max_tokens and run.ended["r"].reason is FinishReason.LENGTH
    run = Run(going_round)
    run.submit(request("r", [i % 5 for i in range(150)], 1000))
    run.to_the_end()
    assert len(run.output("r")) == 50, "up to the length of the model"


def test_a_stop_token_among_those_kept_ends_the_request() -> None:
    run = Run(going_round)
    run.submit(request("r", [0, 1, 2, 3, 4, 0], 100, stop_token_ids=(2,), min_tokens=5))
    run.to_the_end()
    assert run.output("r") == [1, 2, 3, 4, 0, 1, 2] and run.ended["r"].reason is FinishReason.STOP
    assert run.num_kept > 0


def test_no_step_is_planned_behind_one_with_guesses_and_one_without_is_followed() -> None:
    run = Run(going_round, depth=2)
    run.submit(request("r", [0, 1, 2, 3, 4, 0, 1], 60))
    run.plan()
    while len(run.ended) < 1:
        while len(run.in_flight) < 2 and run.plan() is not None:
            assert not any(plan.drafts for plan in run.in_flight[:-1])
        run.step_returns()
    assert any(plan.drafts for plan in run.plans)
    new = Run(never_twice, depth=2)
    new.submit(request("r", [1, 2], 20))
    new.plan()
    new.step_returns()
    assert new.plan() is not None and new.plan() is not None


def test_a_large_batch_has_no_guesses() -> None:
    dear = costs(0.001, 0.001, decode_s=0.001)  # fmt: skip
    run = Run(going_round, cost=dear)
    run.submit(*(request(f"r{i}", [0, 1, 2, 3, 4, 0, 1], 40) for i in range(8)))
    run.to_the_end()
    assert run.num_guessed == 0


def test_guesses_take_no_more_than_the_step_has_left() -> None:
    run = Run(going_round, budget=9, cost=None)
    run.submit(*(request(f"r{i}", [0, 1, 2, 3, 4, 0, 1], 40) for i in range(4)))
    run.to_the_end()
    assert run.num_kept > 0
    assert max(plan.num_tokens + sum(len(tokens) for _, tokens in plan.drafts) for plan in run.plans) <= 9


def test_a_request_may_have_fewer_guesses_or_none() -> None:
    run = Run(going_round, cost=None)
    sent = [request(f"r{most}", [0, 1, 2, 3, 4, 0, most % 5], 40, prompt_lookup=most) for most in (-1, 0, 2, 100)]
    run.submit(*sent)
    rows = {}
    while run.plan() is not None:
        rows |= {run.engine.held(each.request_id).row: each for each in sent if run.engine.held(each.request_id)}
        run.step_returns()
    longest = dict.fromkeys((-1, 0, 2, 100), 0)
    for plan in run.plans:
        for index, tokens in plan.drafts:
            most = rows[plan.rows[index]].prompt_lookup
            longest[most] = max(longest[most], len(tokens))
    assert longest == {-1: 6, 0: 0, 2: 2, 100: 6}


def test_only_kept_tokens_are_found_in_the_prefix_cache() -> None:
    """The fake executor fails where a cached block holds other tokens than those that it was found by."""
    run = Run()
    first = request("r0", [0, 1, 2, 3], 80)
    run.submit(first)
    run.to_the_end()
    assert run.num_guessed > run.num_kept > 0
    tokens = [0, 1, 2, 3, *run.output("r0")]
    again = request("r1", tokens, 30)
    run.submit(again)
    run.to_the_end()
    assert run.ended["r1"].num_cached_tokens >= len(tokens) - 8
    assert run.output("r1") == expected_output(again, 200, repeating_token)


def test_one_that_leaves_takes_what_its_last_step_kept_along() -> None:
    run = Run(going_round)
    run.submit(request("r", [0, 1, 2, 3, 4, 0, 1], 60))
    while not (plan := run.plan()).drafts:
        run.step_returns()
    run.engine.apply(Detach("r"), run.now)
    num_known = run.engine.held("r").num_tokens
    result = run.executor.execute(run.in_flight.pop())
    run.engine.apply(OnStep(result), run.now)
    (detached,) = [effect for effect in run.engine.effects() if isinstance(effect, Detached)]
    num_tokens = 7 + len(detached.request.prior) // 4
    assert num_tokens == num_known + 1 + len(plan.drafts[0][1])
    assert detached.progress.num_computed == num_tokens - 1


def test_a_step_with_guesses_that_fails_leaves_no_trace() -> None:
    run = Run(going_round)
    sent = request("r", [0, 1, 2, 3, 4, 0, 1], 60)
    run.submit(sent)
    while not run.plan().drafts:
        run.step_returns()
    run.apply(StepResult(run.in_flight.pop().step_id, [], error="out of memory"))
    run.to_the_end()
    assert run.output("r") == expected_output(sent, 200, going_round)
    assert run.num_kept > 0 and math.isfinite(run.ended["r"].device_s)
