"""Tokens of a draft model: fewer steps, the same tokens, and its KV never in anybody's way."""

from __future__ import annotations

import msgspec
import pytest

from shared.engine.calls import Detach, OnStep
from shared.engine.handover import Detached
from shared.engine.load_reports import draft_uses
from shared.engine.plan import NO_TOKEN, DraftShape, StepResult
from shared.messages.requests import RequestClass
from shared.policies.prompt_lookup import LookupSettings
from shared.policies.slo_budget import SloTokenBudget
from shared.policies.speculation import GateState, SpeculationGate
from tests.shared.engine.fake_executor import expected_output, mostly, next_token, repeating_token, request
from tests.shared.engine.test_drafting import COST, LOOKUP, SHAPE, Run

DRAFT = msgspec.structs.replace(SHAPE, draft=DraftShape(6, 150))


class Always(SpeculationGate):
    """Drafts from the first step on."""

    def __init__(self, state: GateState = GateState.TRIES) -> None:
        super().__init__()
        self.state = self._turn = state

    def take_turn(self) -> GateState:
        return self._turn


def drafting(token=next_token, always: bool = True, lookup=LookupSettings(), draft_token=None, **fields) -> Run:  # noqa: B008
    run = Run(token, shape=DRAFT, lookup=lookup, draft_token=draft_token or mostly(token), **fields)
    if always:
        run.engine.drafting.speculators["a"].gate = lambda num_sequences: Always()  # type: ignore[method-assign]
    return run


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cost", [COST, None])
@pytest.mark.parametrize("lookup", [LookupSettings(), LOOKUP])
def test_fewer_steps_make_the_same_tokens(depth: int, cost: object, lookup: LookupSettings) -> None:
    sent = [request(f"r{i}", [i, 1, 2, 3, i], 60, stop_token_ids=(4,), min_tokens=50) for i in range(4)]
    plain = Run(repeating_token, depth=depth, cost=cost, lookup=LookupSettings())
    run = drafting(repeating_token, depth=depth, cost=cost, lookup=lookup)
    for one in (run, plain):
        one.submit(*sent)
        one.to_the_end()
        for each in sent:
            assert one.output(each.request_id) == expected_output(each, 200, repeating_token)
    assert run.num_kept > 60 and len(run.plans) < 0.7 * len(plain.plans)
    assert any(plan.model_drafts for plan in run.plans)
    assert lookup.num_tokens == 0 or any(tokens[0] != NO_TOKEN for plan in run.plans for _, tokens in plan.drafts)


def test_what_all_drafts_kept_bring_is_one_more_token_than_drafts() -> None:
    run = drafting(draft_token=next_token, cost=None)
    run.submit(request("r", [1, 2, 3], 120))
    run.to_the_end()
    assert run.num_kept == run.num_guessed and len(run.plans) <= 120 / 6 + 3


def test_a_long_prompt_is_caught_up_with_in_parts() -> None:
    run = drafting(cost=None, num_merged=200)
    run.submit(request("r", [i % 7 for i in range(100)], 40))
    run.to_the_end()
    parts = [one.count for plan in run.plans for one in plan.model_drafts if not one.num_drafts]
    assert parts and max(parts) <= 64 and run.num_kept > 0
    assert run.output("r") == expected_output(request("r", [i % 7 for i in range(100)], 40), 200)


def test_no_tokens_are_drafted_beyond_what_the_draft_model_holds() -> None:
    run = drafting(cost=None, num_merged=200)
    run.submit(request("r", list(range(10)), 190))
    run.to_the_end()
    assert len(run.output("r")) == 190
    assert max(one.start + one.count + one.num_drafts for plan in run.plans for one in plan.model_drafts) <= 150


def test_load_reports_tell_what_draft_models_bring() -> None:
    run = drafting(draft_token=next_token, cost=None, always=False)
    assert draft_uses(run.engine) == (), "nothing is known yet"
    run.submit(request("r", [1, 2, 3], 120))
    run.to_the_end()
    (use,) = draft_uses(run.engine)
    assert (use.model, use.num_drafted, use.num_kept) == ("a", run.num_guessed, run.num_kept)
    states = [gate.state.value for gate in run.engine.drafting.speculators["a"].gates.values()]
    assert use.state == ("on" if "on" in states else "trial" if "trial" in states else "off")


def test_a_small_pool_serves_requests_and_no_drafts() -> None:
    """Two requests fill the pool: the draft model gets none of it, and neither is preempted for its sake."""
    plain, run = (
        Run(next_token, num_merged=12, lookup=LookupSettings()),
        drafting(num_merged=12),
    )
    for one in (plain, run):
        one.submit(*(request(f"r{i}", [i] * 30, 14) for i in range(2)))
        one.to_the_end()
        for i in range(2):
            assert one.output(f"r{i}") == expected_output(request(f"r{i}", [i] * 30, 14), 200)
    assert run.engine.counters.num_preemptions == plain.engine.counters.num_preemptions
    assert run.num_guessed == 0


def test_a_prompt_that_needs_room_takes_that_of_the_draft_model() -> None:
    run = drafting(num_merged=20, cost=None)
    run.submit(request("r0", [1] * 20, 60))
    while not any(plan.model_drafts for plan in run.plans):
        run.plan()
        run.step_returns()
    held = run.engine.held("r0")
    assert held.draft_blocks
    run.submit(request("r1", [2] * 100, 4))
    run.to_the_end()
    assert run.engine.counters.num_preemptions == 0
    assert run.output("r0") == expected_output(request("r0", [1] * 20, 60), 200)


def test_one_that_leaves_leaves_its_draft_behind() -> None:
    run = drafting(cost=None)
    run.submit(request("r", [1, 2, 3], 60))
    while not (plan := run.plan()).drafts:
        run.step_returns()
    run.engine.apply(Detach("r"), run.now)
    run.engine.apply(OnStep(run.executor.execute(run.in_flight.pop())), run.now)
    (detached,) = [effect for effect in run.engine.effects() if isinstance(effect, Detached)]
    assert detached.progress.num_computed == 3 + len(detached.request.prior) // 4 - 1
    assert plan.model_drafts[0].blocks


def test_a_step_that_fails_is_computed_again_with_drafts() -> None:
    run = drafting(cost=None)
    sent = request("r", [1, 2, 3], 60)
    run.submit(sent)
    while not run.plan().drafts:
        run.step_returns()
    run.apply(StepResult(run.in_flight.pop().step_id, [], error="out of memory"))
    run.to_the_end()
    assert run.output("r") == expected_output(sent, 200) and run.num_kept > 0


def test_offline_steps_draft_and_may_be_suspended() -> None:
    run = drafting(policy=SloTokenBudget)
    sent = request("r", [1, 2, 3], 60, request_class=RequestClass.OFFLINE)
    run.submit(sent)
    while not (run.plan().drafts and run.in_flight[-1].is_interruptible):
        run.step_returns()
    run.apply(run.executor.suspend(run.in_flight.pop()))
    online = request("online", [9], 2)
    run.submit(online)
    run.to_the_end()
    assert run.output("r") == expected_output(sent, 200) and run.output("online") == expected_output(online, 200)
    assert run.engine.counters.steps_suspended == 1 and run.num_kept > 0


def test_a_request_may_want_no_drafts() -> None:
    run = drafting(cost=None)
    run.submit(request("r0", [1, 2], 40, prompt_lookup=0), request("r1", [1, 2], 40, prompt_lookup=2))
    run.to_the_end()
    longest = max(len(tokens) for plan in run.plans for _, tokens in plan.drafts)
    assert longest == 2 and run.num_kept > 0
    assert run.ended["r0"].num_draft_tokens == 0 and run.ended["r1"].num_draft_tokens == run.num_guessed
    assert run.ended["r1"].num_draft_kept == run.num_kept


def test_drafts_begin_when_they_are_measured_to_pay() -> None:
    """Steps take 10 ms each with drafts or without: the trial after eight of them shows that drafts are free."""
    run = drafting(always=False)
    run.submit(*(request(f"r{i}", [i], 150) for i in range(2)))
    run.to_the_end()
    gate = run.engine.drafting.speculators["a"].gate(2)
    assert gate.state is GateState.DRAFTS and gate.gain > 2
    first = next(i for i, plan in enumerate(run.plans) if plan.drafts)
    assert first >= SpeculationGate.PLAIN_STEPS


def test_drafts_end_when_they_are_measured_to_cost() -> None:
    run = drafting(always=False, draft_token=lambda prefix: 7)
    run.submit(*(request(f"r{i}", [i], 190) for i in range(2)))
    run.to_the_end()
    gate = run.engine.drafting.speculators["a"].gate(2)
    assert gate.state is GateState.WAITS
    assert sum(bool(plan.drafts) for plan in run.plans) <= SpeculationGate.TRIAL_STEPS
