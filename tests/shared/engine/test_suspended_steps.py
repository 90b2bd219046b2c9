"""What becomes of an offline step that an online request interrupts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shared.cost_model import CostModel, shape_of
from shared.engine.engine import Engine
from shared.engine.plan import ModelShape
from shared.engine.requests import Output
from shared.messages import RequestClass, unpack_tokens
from shared.policies.catalogue import ordering_policy
from shared.policies.slo_budget import SloTokenBudget
from tests.shared.engine.fake_executor import FakeExecutor, expected_output, request

SHAPE = ModelShape("a", 8, 4, 2000)
COST_MODEL = CostModel(0.01, 0.001, 0.0, 0.001, 0.0, num_layers=20)
TPOT_S = 0.1


class Clocked:
    """An engine whose steps take as long as predicted; parts take their share of it."""

    def __init__(self, num_merged=60, cost_model=COST_MODEL, **options) -> None:
        budget = SloTokenBudget(512, 16)
        self.engine = Engine(num_merged, 8, ordering_policy("fcfs"), budget, ttft_s=1.0, tpot_s=TPOT_S, **options)
        self.engine.add_model(SHAPE)
        if cost_model:
            self.engine.set_cost_model("a", cost_model)
        self.executor = FakeExecutor([SHAPE])
        self.now = 0.0
        self.done_share = {}
        self.outputs = {}

    def submit(self, name: str, prompt: list[int], max_tokens: int, *, offline: bool = False):
        sent = request(name, prompt, max_tokens, request_class=RequestClass.OFFLINE if offline else RequestClass.ONLINE)
        assert self.engine.submit(sent, self.now) is None
        return sent

    def step(self, stop_share: float | None = None):
        """Plans and runs a step; with `stop_share` it is interrupted there."""
        plan = self.engine.plan(self.now)
        assert plan is not None
        total = COST_MODEL.predict(shape_of(plan.starts, plan.counts))
        began = self.done_share.get(plan.step_id, 0.0)
        end = plan.stop_share if stop_share is None else stop_share
        self.now += total * (end - began)
        self.done_share[plan.step_id] = end
        result = self.executor.suspend(plan, stop_share) if stop_share is not None else self.executor.execute(plan)
        self.engine.on_step(result, self.now)
        self.engine.check()
        for effect in self.engine.effects():
            if isinstance(effect, Output):
                for entry in effect.entries:
                    self.outputs.setdefault(entry.request_id, []).extend(unpack_tokens(entry.tokens))
        return plan

    def interrupted(self, **options):
        """With an offline step of 500 tokens suspended half-way by an online request that wants 20 tokens."""
        self.sent = [self.submit("offline", list(range(500)), 3, offline=True)]
        plan = self.engine.plan(self.now)
        assert plan.is_interruptible and self.engine.take_interrupt(self.now) is None
        self.now += 0.255
        self.sent.append(self.submit("online", [1, 2, 3], 20))
        assert self.engine.take_interrupt(self.now) == plan.step_id
        assert self.engine.take_interrupt(self.now) is None
        self.done_share[plan.step_id] = 0.5
        self.engine.on_step(self.executor.suspend(plan, 0.5), self.now)
        self.engine.check()
        return plan

    def finish(self) -> None:
        for _ in range(100):
            if not self.engine.all_held():
                break
            self.step()
        for sent in self.sent:
            assert self.outputs[sent.request_id] == expected_output(sent, 2000)


def test_it_goes_on_in_parts_beside_online_steps_under_their_objective():
    run = Clocked()
    suspended = run.interrupted()
    first = run.step()
    assert first.step_id != suspended.step_id and first.num_tokens == 3
    kinds, ends = [], [run.now]
    while not kinds or run.engine.planner.suspended:
        plan = run.step()
        kinds.append(plan.step_id == suspended.step_id)
        if not kinds[-1]:
            ends.append(run.now)
    assert kinds[:4] == [True, False, True, False], "parts and online steps take turns"
    assert max(later - earlier for earlier, later in pairwise(ends)) <= TPOT_S + 1e-9
    run.finish()
    counters = run.engine.counters
    assert (counters.steps_suspended, counters.steps_resumed, counters.steps_discarded) == (1, 1, 0)
    assert counters.recomputed_tokens == 0


def test_it_is_resumed_whole_when_no_online_request_is_left():
    run = Clocked()
    suspended = run.interrupted()
    run.engine.cancel("online", run.now)
    plan = run.step()
    assert plan.step_id == suspended.step_id and plan.resumes and plan.stop_share == 1.0 and plan.is_interruptible
    run.sent.pop()
    run.finish()


def test_it_is_discarded_where_its_slots_are_needed():
    run = Clocked(num_merged=17)
    run.interrupted()
    run.sent.append(run.submit("large", list(range(400)), 3))
    run.step()
    assert run.engine.counters.steps_discarded == 1
    run.finish()


def test_it_is_discarded_when_its_last_sequence_is_cancelled():
    run = Clocked()
    run.interrupted()
    run.engine.cancel("offline", run.now)
    run.engine.check()
    assert run.step().discards == (0,)
    run.sent = run.sent[1:]
    run.finish()
    assert run.engine.pool.used_merged() == 0


def test_discard_mode_computes_it_again():
    run = Clocked(interruption="discard")
    suspended = run.interrupted()
    assert run.engine.planner.suspended is None
    plan = run.step()
    assert plan.discards == (suspended.step_id,)
    run.finish()
    assert run.engine.counters.recomputed_tokens == 250


def test_without_interruption_no_step_can_be_stopped():
    run = Clocked(interruption="off")
    run.submit("offline", list(range(500)), 3, offline=True)
    plan = run.engine.plan(0.0)
    run.submit("online", [1], 3)
    assert not plan.is_interruptible and run.engine.take_interrupt(0.1) is None


def test_without_a_cost_model_it_is_interrupted_at_once_and_waits_as_long_as_its_work_is_worth():
    run = Clocked(cost_model=None)
    run.interrupted()
    begun = run.now
    while run.engine.counters.steps_discarded == 0:
        waited_s = run.now - begun
        run.step()
        run.now += 0.02
    assert waited_s == pytest.approx(0.255, abs=0.1)
    run.finish()


def test_a_step_that_ends_soon_is_left_alone():
    run = Clocked()
    run.submit("offline", list(range(500)), 3, offline=True)
    plan = run.engine.plan(0.0)
    run.submit("online", [1], 3)
    assert plan.is_interruptible and run.engine.take_interrupt(0.49) is None
