"""What becomes of an offline step that an online request interrupts."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from shared.costs.model import shape_of
from shared.engine.calls import AddModel, Cancel, OnCopy, OnStep, SetCostModel, Submit
from shared.engine.engine import Engine
from shared.engine.plan import ModelShape, StepResult
from shared.engine.requests import Output
from shared.messages.requests import RequestClass, unpack_tokens
from shared.policies.catalogue import ordering_policy
from shared.policies.checkpointing import AdaptiveCheckpoint
from shared.policies.interruption import WAIT_TTFTS
from shared.policies.slo_budget import PACE, SloTokenBudget
from tests.shared.costs import costs
from tests.shared.engine.fake_executor import FakeExecutor, expected_output, request

SHAPE = ModelShape("a", 8, 4, 2000)
COST_MODEL = costs(0.01, 0.001, decode_s=0.001, num_layers=20)
TTFT_S, TPOT_S = 1.0, 0.1


class Clocked:
    """An engine whose steps take as long as predicted; parts take their share of it."""

    def __init__(self, num_merged=60, cost_model=COST_MODEL, **options) -> None:
        budget = SloTokenBudget(512)
        self.engine = Engine(num_merged, 8, ordering_policy("fcfs"), budget, ttft_s=TTFT_S, tpot_s=TPOT_S, **options)
        self.engine.apply(AddModel(SHAPE), 0.0)
        if cost_model:
            self.engine.apply(SetCostModel("a", cost_model), 0.0)
        self.executor = FakeExecutor([SHAPE])
        self.now = 0.0
        self.done_share = {}
        self.outputs = {}

    def submit(self, name: str, prompt: list[int], max_tokens: int, *, offline: bool = False):
        sent = request(name, prompt, max_tokens, request_class=RequestClass.OFFLINE if offline else RequestClass.ONLINE)
        assert self.engine.apply(Submit(sent), self.now) is None
        return sent

    def step(self, stop_share: float | None = None):
        """Plans and runs a step; with `stop_share` it is interrupted there."""
        plan = self.engine.plan(self.now)
        assert plan is not None
        assert stop_share is not None or self.engine.take_interrupt(self.now) is None
        total = COST_MODEL.predict(shape_of(plan.starts, plan.counts))
        began = self.done_share.get(plan.step_id, 0.0)
        end = plan.stop_share if stop_share is None else stop_share
        self.now += total * (end - began)
        self.done_share[plan.step_id] = end
        result = self.executor.suspend(plan, stop_share) if stop_share is not None else self.executor.execute(plan)
        self.engine.apply(OnStep(result), self.now)
        self.engine.check()
        for effect in self.engine.effects():
            if isinstance(effect, Output):
                for entry in effect.entries:
                    self.outputs.setdefault(entry.request_id, []).extend(unpack_tokens(entry.tokens))
        return plan

    def interrupted(self, num_online_tokens: int = 20):
        """With an offline step of 500 tokens suspended half-way by an online request that wants so many tokens."""
        self.sent = [self.submit("offline", list(range(500)), 3, offline=True)]
        plan = self.engine.plan(self.now)
        assert plan.is_interruptible and self.engine.take_interrupt(self.now) is None
        self.now += 0.255
        self.sent.append(self.submit("online", [1, 2, 3], num_online_tokens))
        assert self.engine.take_interrupt(self.now) == plan.step_id
        assert self.engine.take_interrupt(self.now) is None
        self.done_share[plan.step_id] = 0.5
        self.engine.apply(OnStep(self.executor.suspend(plan, 0.5)), self.now)
        self.engine.check()
        return plan

    def finish(self) -> None:
        for _ in range(400):
            if not self.engine.all_held():
                break
            self.step()
        for sent in self.sent:
            assert self.outputs[sent.request_id] == expected_output(sent, 2000)


# 5: layers between two safepoints, which take 0.13 s
@pytest.mark.parametrize(("layers_per_safepoint", "most_gap_s"), [(1, TPOT_S), (5, 0.51 / 4 + 0.02)])
def test_it_goes_on_in_parts_beside_online_steps_under_their_objective(layers_per_safepoint, most_gap_s):
    run = Clocked(cost_model=msgspec.structs.replace(COST_MODEL, layers_per_safepoint=layers_per_safepoint))
    suspended = run.interrupted(250)
    first = run.step()
    assert first.step_id != suspended.step_id and first.num_tokens == 3
    kinds, ends = [], [run.now]
    while run.engine.memory.suspended or len(kinds) < 2:
        plan = run.step()
        kinds.append(plan.step_id == suspended.step_id)
        if not kinds[-1]:
            ends.append(run.now)
    num_first = kinds.index(True)
    assert ends[num_first] - ends[0] == pytest.approx(WAIT_TTFTS * TTFT_S, abs=0.03), "online work might have ended"
    turns = kinds[num_first:]
    assert turns == [index % 2 == 0 for index in range(len(turns))], "parts and online steps take turns"
    assert sum(turns) > 1
    for num_later, end_s in enumerate(ends):
        assert end_s - ends[0] <= PACE * TPOT_S * num_later + 1e-9
    assert max(end_s - begin_s for begin_s, end_s in pairwise(ends)) <= most_gap_s
    run.finish()
    counters = run.engine.counters
    assert (counters.steps_suspended, counters.steps_resumed, counters.steps_discarded) == (1, 1, 0)
    assert counters.recomputed_tokens == 0


def test_while_it_waits_for_a_time_without_online_work_others_fill_online_steps():
    run = Clocked()
    suspended = run.interrupted(60)
    run.sent.append(run.submit("other", list(range(600, 620)), 10, offline=True))
    mixed = 0
    while run.engine.held("online") is not None:
        plan = run.step()
        assert plan.step_id != suspended.step_id, "users would be slower for it"
        mixed += plan.num_decodes == (1, 1)
    assert mixed == 9, "the other one's prompt, and a token with each of so many steps"
    assert run.step().step_id == suspended.step_id
    run.finish()
    assert run.engine.counters.steps_discarded == 0


def test_while_it_waits_steps_are_planned_ahead_and_none_before_it_is_resumed():
    run = Clocked(steps_in_flight=2)
    suspended = run.interrupted(10)
    run.step()
    planned = []
    while run.engine.held("online") is not None:
        if (plan := run.engine.plan(run.now)) is not None:
            planned.append(plan)
            if len(planned) == 1 and run.engine.held("online").total < 13:
                planned.append(run.engine.plan(run.now))
                assert planned[-1] is not None
        run.now += 0.011
        run.engine.apply(OnStep(run.executor.execute(planned.pop(0))), run.now)
        run.engine.check()
    assert not planned
    assert run.step().step_id == suspended.step_id


def test_it_is_resumed_whole_when_no_online_request_is_left():
    run = Clocked()
    suspended = run.interrupted()
    run.engine.apply(Cancel("online"), run.now)
    plan = run.step()
    assert plan.step_id == suspended.step_id and plan.resumes and plan.stop_share == 1.0 and plan.is_interruptible
    run.sent.pop()
    run.finish()


def test_it_is_discarded_where_its_blocks_are_needed():
    run = Clocked(num_merged=17)
    run.interrupted()
    run.sent.append(run.submit("large", list(range(400)), 3))
    run.step()
    assert run.engine.counters.steps_discarded == 1
    run.finish()


def test_it_is_discarded_when_its_last_sequence_is_cancelled():
    run = Clocked()
    run.interrupted()
    run.engine.apply(Cancel("offline"), run.now)
    run.engine.check()
    assert run.step().discards == (0,)
    run.sent = run.sent[1:]
    run.finish()
    assert run.engine.pool.used_merged() == 0


def test_discard_mode_computes_it_again():
    run = Clocked(interruption="discard")
    suspended = run.interrupted()
    assert run.engine.memory.suspended is None
    plan = run.step()
    assert plan.discards == (suspended.step_id,)
    run.finish()
    assert run.engine.counters.discarded_tokens == 250


def test_without_interruption_no_step_can_be_stopped():
    run = Clocked(interruption="off")
    run.submit("offline", list(range(500)), 3, offline=True)
    plan = run.engine.plan(0.0)
    run.submit("online", [1], 3)
    assert not plan.is_interruptible and run.engine.take_interrupt(0.1) is None


def test_without_a_cost_model_it_is_interrupted_at_once_and_waits_as_long_as_its_work_is_worth():
    run = Clocked(cost_model=None, fits_costs=False)
    run.interrupted(250)
    begun = run.now
    while run.engine.counters.steps_discarded == 0:
        waited_s = run.now - begun
        run.step()
        run.now += 0.02
    assert waited_s == pytest.approx(WAIT_TTFTS * TTFT_S + 0.255, abs=0.1), "at first it costs nothing"
    run.finish()


def test_a_step_that_ends_soon_is_left_alone():
    run = Clocked()
    run.submit("offline", list(range(500)), 3, offline=True)
    plan = run.engine.plan(0.0)
    run.submit("online", [1], 3)
    assert plan.is_interruptible and run.engine.take_interrupt(0.49) is None


def test_behind_a_step_in_flight_only_short_steps_are_planned():
    """A long one would keep the results of the step before it waiting, and could not be interrupted."""
    run = Clocked(steps_in_flight=2)
    run.submit("online", [1, 2, 3], 1)
    first = run.engine.plan(0.0)
    run.submit("offline", list(range(500)), 3, offline=True)
    second = run.engine.plan(0.0)
    assert not first.is_interruptible and not second.is_interruptible
    assert COST_MODEL.predict(shape_of(second.starts, second.counts)) <= 0.02 + 1e-9
    run = Clocked(steps_in_flight=2)
    run.submit("offline", list(range(500)), 3, offline=True)
    assert run.engine.plan(0.0).is_interruptible and run.engine.plan(0.0) is None


def test_a_sequence_whose_step_failed_comes_back_when_the_next_one_is_given_up():
    """Two steps in flight: the first fails, the second is suspended and discarded."""
    run = Clocked(steps_in_flight=2)
    run.sent = [run.submit("offline", list(range(8)), 40, offline=True)]
    first = run.step()
    first = run.engine.plan(run.now)
    second = run.engine.plan(run.now)
    assert len(first.rows) == len(second.rows) == 1
    run.engine.apply(OnStep(StepResult(first.step_id, [], error="out of memory")), run.now)
    step = run.engine.steps.in_flight[second.step_id]
    run.engine.apply(OnStep(StepResult(second.step_id, [], suspended_share=0.5)), run.now)
    assert run.engine.memory.suspended is step
    run.engine.memory.discard_suspended(run.now)
    run.engine.check()
    run.executor = FakeExecutor([SHAPE])
    run.engine.memory.take_discards()
    run.engine.pool.clear_cache()
    run.finish()


def test_beside_a_preempted_online_sequence_offline_tokens_keep_within_its_slack():
    run = Clocked(num_merged=40)
    run.submit("online", list(range(100)), 50)
    run.step()
    run.submit("offline", list(range(300, 800)), 3, offline=True)
    run.engine.memory.preempt(run.engine.held("online"), run.now, "memory")
    plan = run.engine.plan(run.now)
    assert run.engine.planner.leaders.last_limits.offline_limit_s == 0, "it has no head start yet"
    assert len(plan.rows) == 1 and run.engine.held("online").row in plan.rows


def test_nobody_is_preempted_for_blocks_that_a_copy_still_reads():
    run = Clocked(num_merged=16, num_host_merged=16, checkpoint=AdaptiveCheckpoint(0.0))
    for index in range(4):
        run.submit(f"offline{index}", [index] * 100, 30, offline=True)
    for _ in range(4):
        run.step()
    copies = run.engine.next_copies()
    assert sum(len(copy.device_blocks) for copy in copies) > 20
    run.submit("online", list(range(450)), 3)
    run.engine.plan(run.now)
    run.engine.check()
    assert run.engine.counters.num_preemptions == 0
    for copy in copies:
        run.executor.copy(copy)
        run.engine.apply(OnCopy(copy.copy_id, True), run.now)
    for copy in run.engine.next_copies():
        run.executor.copy(copy)
        run.engine.apply(OnCopy(copy.copy_id, True), run.now)
    for step in list(run.engine.steps.in_flight.values()):
        run.engine.apply(OnStep(run.executor.execute(step.plan)), run.now)
    run.engine.plan(run.now)
    assert run.engine.held("online").row >= 0
    assert run.engine.counters.num_preemptions == 4
