"""What runs next: classes, priorities, budget, memory, models, prefix cache, steps in flight."""

from __future__ import annotations

import msgspec
import pytest

from shared.engine.calls import AddModel, Cancel, OnStep, RemoveModel, Submit
from shared.engine.engine import Engine
from shared.engine.plan import ModelShape, StepResult
from shared.engine.requests import Ended, Output
from shared.engine.steps import MAX_STEP_FAILURES
from shared.messages.requests import (
    ErrorCode,
    FinishReason,
    Priority,
    RequestClass,
    SamplingParams,
    pack_tokens,
    unpack_tokens,
)
from shared.policies.baselines import RoundRobin
from shared.policies.catalogue import ordering_policy
from shared.policies.roles import MOST_CHUNK
from shared.policies.token_budget import FixedTokenBudget
from tests.shared.engine.fake_executor import FakeExecutor, expected_output, request

SHAPES = [ModelShape("a", 4, 2, 200), ModelShape("b", 4, 1, 200)]
LONG = ModelShape("a", 4, 2, 9000)
OFFLINE = RequestClass.OFFLINE


def make(num_merged=32, rows=8, budget=64, depth=1, ordering="fcfs") -> Engine:
    engine = Engine(num_merged, rows, ordering_policy(ordering), FixedTokenBudget(budget), steps_in_flight=depth)
    for shape in SHAPES:
        engine.apply(AddModel(shape), 0.0)
    return engine


def ids(engine: Engine, plan) -> list[str]:
    """Request ids of a plan's sequences, in its order."""
    by_row = {s.row: s.request.request_id for s in engine.all_held() if s.row >= 0}
    return [by_row[row] for row in plan.rows]


def run(engine: Engine, executor: FakeExecutor, steps: int = 1000) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {}
    for step in range(steps):
        plan = engine.plan(float(step))
        if plan is None:
            break
        engine.apply(OnStep(executor.execute(plan)), float(step))
        engine.check()
        for effect in engine.effects():
            if isinstance(effect, Output):
                for entry in effect.entries:
                    outputs.setdefault(entry.request_id, []).extend(unpack_tokens(entry.tokens))
    return outputs


def test_a_long_prompt_is_cut_to_the_budget_and_decodes_go_first():
    engine, executor = make(budget=10), FakeExecutor(SHAPES)
    engine.apply(Submit(request("short", [1, 2], 50)), 0.0)
    engine.apply(OnStep(executor.execute(engine.plan(0.0))), 0.0)
    engine.apply(Submit(request("long", list(range(30)), 5)), 1.0)
    plan = engine.plan(1.0)
    assert ids(engine, plan) == ["short", "long"]
    assert plan.counts == [1, 9] and plan.samples == [True, False] and plan.num_tokens == 10
    engine.apply(OnStep(executor.execute(plan)), 1.0)
    assert engine.plan(2.0).counts == [1, 9]


def test_prompts_that_are_handed_over_are_computed_one_after_the_other():
    engine, executor = Engine(4000, 8, ordering_policy("fcfs"), FixedTokenBudget(8192)), FakeExecutor([LONG])
    engine.apply(AddModel(LONG), 0.0)
    for number, name in enumerate(("first", "second")):
        engine.apply(Submit(request(name, [number] * 3000, 5, decoder="other")), 0.0)
    planned = []
    for step in range(3):
        plan = engine.plan(float(step))
        planned.append(dict(zip(ids(engine, plan), plan.counts, strict=True)))
        engine.apply(OnStep(executor.execute(plan)), float(step))
        engine.check()
    assert planned[:2] == [{"first": 2000}, {"first": 666}]
    assert planned[2] == {"first": 334, "second": MOST_CHUNK - 334}, "the last chunk leaves room in its step"


def test_classes_run_in_strict_order():
    engine = make(budget=7)
    engine.apply(Submit(request("offline", [1, 2, 3], 5, request_class=OFFLINE)), 0.0)
    engine.apply(Submit(request("normal", [4, 5, 6], 5)), 1.0)
    engine.apply(Submit(request("high", [7, 8, 9], 5, priority=Priority.HIGH)), 2.0)
    plan = engine.plan(3.0)
    assert ids(engine, plan) == ["high", "normal", "offline"]
    assert plan.counts == [3, 3, 1]


def test_online_of_another_model_goes_before_offline():
    engine = make()
    engine.apply(Submit(request("offline", [1], 5, request_class=OFFLINE)), 0.0)
    engine.apply(Submit(request("online", [1], 5, model="b")), 1.0)
    assert engine.plan(1.0).model == "b"


def test_models_take_turns_in_round_robin():
    engine, executor = make(ordering="round_robin"), FakeExecutor(SHAPES)
    for model in "ab":
        engine.apply(Submit(request(model, [1, 2], 50, model=model)), 0.0)
    models = []
    for step in range(6):
        plan = engine.plan(float(step))
        models.append(plan.model)
        engine.apply(OnStep(executor.execute(plan)), float(step))
    assert models in (["a", "b"] * 3, ["b", "a"] * 3)


def test_offline_gives_its_blocks_to_online_never_the_reverse():
    engine, executor = make(num_merged=4, budget=100), FakeExecutor(SHAPES)
    offline = request("offline", list(range(20)), 10, request_class=OFFLINE)
    engine.apply(Submit(offline), 0.0)
    engine.apply(OnStep(executor.execute(engine.plan(0.0))), 0.0)
    online = request("online", list(range(50, 70)), 10)
    engine.apply(Submit(online), 1.0)
    plan = engine.plan(1.0)
    assert ids(engine, plan) == ["online"]
    assert engine.counters.num_preemptions == 1
    engine.apply(OnStep(executor.execute(plan)), 1.0)
    engine.effects()
    later = request("later", list(range(20)), 10, request_class=OFFLINE)
    engine.apply(Submit(later), 2.0)
    plan = engine.plan(2.0)
    assert ids(engine, plan) == ["online"] and engine.counters.num_preemptions == 1


def test_preempted_requests_make_the_same_tokens():
    engine, executor = make(num_merged=6, budget=16), FakeExecutor(SHAPES)
    sent = [request(f"r{i}", [i, i + 1, i + 2], 25) for i in range(4)]
    for index, one in enumerate(sent):
        engine.apply(Submit(one), float(index))
    outputs = run(engine, executor)
    assert engine.counters.num_preemptions > 0
    assert outputs == {one.request_id: expected_output(one, 48) for one in sent}


def test_a_full_prefix_hit_computes_at_least_one_token():
    engine, executor = make(), FakeExecutor(SHAPES)
    prompt = list(range(12))
    first = request("first", prompt, 4)
    engine.apply(Submit(first), 0.0)
    run(engine, executor)
    again = request("again", prompt, 4)
    engine.apply(Submit(again), 1.0)
    plan = engine.plan(1.0)
    assert plan.starts == [8] and plan.counts == [4]
    engine.apply(OnStep(executor.execute(plan)), 1.0)
    (output,) = [effect for effect in engine.effects() if isinstance(effect, Output)]
    assert output.entries[0].num_cached_tokens == 8
    assert unpack_tokens(output.entries[0].tokens) == expected_output(again, 200)[:1]


def test_prefixes_are_not_shared_between_models():
    engine, executor = make(), FakeExecutor(SHAPES)
    engine.apply(Submit(request("a", list(range(12)), 2)), 0.0)
    run(engine, executor)
    engine.apply(Submit(request("b", list(range(12)), 2, model="b")), 1.0)
    assert engine.plan(1.0).starts == [0]


def test_two_steps_in_flight_drop_the_step_after_a_stop():
    engine, executor = make(depth=2), FakeExecutor(SHAPES)
    sent = request("r", [5, 6, 7], 40)
    stop = expected_output(sent, 200)[3]
    sent = request("r", [5, 6, 7], 40, stop_token_ids=(stop,))
    engine.apply(Submit(sent), 0.0)
    in_flight, ended = [], []
    for _ in range(12):
        while (plan := engine.plan(0.0)) is not None:
            in_flight.append(plan)
        assert len(in_flight) <= 2
        if in_flight:
            engine.apply(OnStep(executor.execute(in_flight.pop(0))), 0.0)
        engine.check()
        ended += [effect for effect in engine.effects() if isinstance(effect, Ended)]
    assert [(e.reason, e.num_output_tokens) for e in ended] == [(FinishReason.STOP, 4)]
    assert engine.pool.used_merged() == 0


def test_a_failing_step_is_tried_again_and_then_ends_its_requests():
    engine, executor = make(), FakeExecutor(SHAPES)
    sent = request("r", [1, 2, 3], 6)
    engine.apply(Submit(sent), 0.0)
    plan = engine.plan(0.0)
    executor.execute(plan)
    engine.apply(OnStep(StepResult(plan.step_id, [], error="out of memory")), 0.0)
    assert run(engine, executor)["r"] == expected_output(sent, 200)
    engine.apply(Submit(request("bad", [9], 6)), 0.0)
    for _ in range(MAX_STEP_FAILURES):
        plan = engine.plan(0.0)
        engine.apply(OnStep(StepResult(plan.step_id, [], error="device lost")), 0.0)
    (output, _) = engine.effects()
    assert output.entries[0].error.code == ErrorCode.INTERNAL and "device lost" in output.entries[0].error.message
    assert engine.plan(0.0) is None


def test_results_of_unknown_steps_change_nothing():
    engine = make()
    engine.apply(Submit(request("r", [1], 5)), 0.0)
    plan = engine.plan(0.0)
    engine.apply(OnStep(StepResult(plan.step_id + 5, [1])), 0.0)
    assert engine.effects() == []
    engine.check()


def test_requests_beyond_the_pool_are_refused_up_front():
    engine = make(num_merged=4)
    refused = engine.apply(Submit(request("r", list(range(33)), 5)), 0.0)
    assert refused.code == ErrorCode.TOO_LONG and "31" in refused.message
    assert engine.apply(Submit(request("s", list(range(31)), 5)), 0.0) is None


def test_waiting_is_bounded():
    engine = Engine(8, 4, ordering_policy("fcfs"), FixedTokenBudget(8), max_waiting=2)
    engine.apply(AddModel(SHAPES[0]), 0.0)
    assert [engine.apply(Submit(request(f"r{i}", [1], 2)), 0.0) is None for i in range(3)] == [True, True, False]


def test_the_head_is_not_overtaken():
    engine, executor = make(num_merged=4, budget=100), FakeExecutor(SHAPES)
    engine.apply(Submit(request("running", list(range(16)), 10)), 0.0)
    engine.apply(OnStep(executor.execute(engine.plan(0.0))), 0.0)
    engine.apply(Submit(request("large", list(range(30)), 1)), 1.0)
    engine.apply(Submit(request("small", [1], 1)), 2.0)
    assert ids(engine, engine.plan(2.0)) == ["running"]


@pytest.mark.parametrize(
    ("prior_length", "max_tokens", "reason"), [(5, 5, FinishReason.LENGTH), (9, 5, FinishReason.LENGTH)]
)
def test_a_request_whose_prior_already_ends_it_ends_at_once(prior_length, max_tokens, reason):
    engine = make()
    sent = request("r", [1, 2], max_tokens, prior=pack_tokens(list(range(prior_length))), epoch=1)
    assert engine.apply(Submit(sent), 0.0) is None
    output, ended = engine.effects()
    assert output.entries[0].finish_reason == reason and output.entries[0].offset == prior_length
    assert ended.num_output_tokens == prior_length
    engine.check()


def test_load_counts_waiting_demand_and_leaves_offline_out():
    engine, executor = make(num_merged=20, rows=1), FakeExecutor(SHAPES)
    assert engine.load().dispatch_freeness == float("inf")
    engine.apply(Submit(request("running", list(range(8)), 50)), 0.0)
    engine.apply(OnStep(executor.execute(engine.plan(0.0))), 0.0)
    other_share = 20 // 8
    assert engine.load().dispatch_freeness == pytest.approx(20 - 1 - other_share)
    engine.apply(Submit(request("waiting", list(range(8)), 50)), 1.0)
    assert engine.load().dispatch_freeness == pytest.approx(20 - 2 - other_share)
    engine.apply(Submit(request("batch", list(range(100)), 50, request_class=OFFLINE)), 2.0)
    assert engine.load().dispatch_freeness == pytest.approx(20 - 2 - other_share)
    assert [m.num_offline for m in engine.load().models] == [1, 0]


def test_a_model_is_removed_with_its_requests_only():
    engine, executor = make(), FakeExecutor(SHAPES)
    engine.apply(Submit(request("a", [1, 2], 10)), 0.0)
    kept = request("b", [1, 2], 10, model="b")
    engine.apply(Submit(kept), 0.0)
    plan = engine.plan(0.0)
    assert plan.model == "a" and not engine.apply(RemoveModel("a"), 0.0)
    engine.apply(OnStep(executor.execute(plan)), 0.0)
    assert engine.apply(RemoveModel("a"), 0.0)
    (output, *_) = engine.effects()
    assert output.entries[0].error.code == ErrorCode.GONE
    assert run(engine, executor)["b"] == expected_output(kept, 200)


@pytest.mark.parametrize("token", [-1, 10, 2**31 - 1])
def test_token_ids_outside_the_vocabulary_are_refused(token):
    engine = Engine(8, 4, ordering_policy("fcfs"), FixedTokenBudget(8))
    engine.apply(AddModel(ModelShape("a", 4, 2, 200, vocab_size=10)), 0.0)
    assert engine.apply(Submit(request("good", [0, 9], 2)), 0.0) is None
    assert engine.apply(Submit(request("bad", [0, token], 2)), 0.0).code == ErrorCode.BAD_REQUEST


def test_other_tokens_that_would_fail_a_step_are_refused():
    engine = Engine(8, 4, ordering_policy("fcfs"), FixedTokenBudget(8))
    engine.add_model(ModelShape("a", 4, 2, 200, vocab_size=10))
    good = request("r", [0, 9], 2)
    for param, bad in {
        "prompt": msgspec.structs.replace(good, prior=b"\x00" * 3),
        "logit_bias": msgspec.structs.replace(good, sampling=SamplingParams(max_tokens=2, logit_bias=((10, 1.0),))),
        "stop_token_ids": msgspec.structs.replace(
            good, sampling=SamplingParams(max_tokens=2, min_tokens=1, stop_token_ids=(10,))
        ),
    }.items():
        refused = engine.apply(Submit(bad), 0.0)
        assert refused is not None and (refused.code, refused.param) == (ErrorCode.BAD_REQUEST, param)
    assert engine.apply(Submit(good), 0.0) is None


def test_a_head_that_lacks_room_is_not_overtaken_by_another_model():
    """Without this rule a steady stream of small requests of one model starves a large one of another."""
    engine, executor = make(num_merged=4, budget=100), FakeExecutor(SHAPES)
    engine.apply(Submit(request("b0", [1] * 6, 20, model="b")), 0.0)
    engine.apply(OnStep(executor.execute(engine.plan(0.0))), 0.0)
    engine.apply(Submit(request("large", list(range(30)), 1)), 1.0)
    for step in range(2, 200):
        if step % 7 == 0:
            engine.apply(Submit(request(f"b{step}", [1] * 6, 20, model="b")), float(step))
        plan = engine.plan(float(step))
        engine.apply(OnStep(executor.execute(plan)), float(step))
        if any(isinstance(e, Ended) and e.request.request_id == "large" for e in engine.effects()):
            break
    assert step < 60


def test_who_waits_for_a_row_is_not_short_of_memory():
    policy, executor = Watching(), FakeExecutor(SHAPES)
    engine = Engine(64, 2, policy, FixedTokenBudget(100))
    for shape in SHAPES:
        engine.apply(AddModel(shape), 0.0)
    for number, name in enumerate("abab"):
        engine.apply(Submit(request(f"{name}{number}", [1] * 10, 9, model=name)), 0.0)
    for step in range(4):
        engine.apply(OnStep(executor.execute(engine.plan(float(step)))), float(step))
    assert sum(model.num_waiting for model in engine.load(4.0).models) == 2
    assert all(num_short == 0 for _, num_short in policy.seen.values())


class Watching(RoundRobin):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple[float, int]] = {}

    def pick_model(self, candidates, now):
        self.seen = {model.name: (model.pool_share, model.num_short) for model in candidates}
        return super().pick_model(candidates, now)


def test_the_order_policy_sees_who_holds_memory_and_who_waits_for_it():
    """Merged blocks hold two blocks of model a, or one of b; blocks have 4 tokens."""
    policy, executor = Watching(), FakeExecutor(SHAPES)
    engine = Engine(12, 8, policy, FixedTokenBudget(100), least_share=0.0)
    for shape in SHAPES:
        engine.apply(AddModel(shape), 0.0)
    for name, num_prompt in (("a", 22), ("b", 14)):
        engine.apply(Submit(request(name, [1] * num_prompt, 9, model=name)), 0.0)
    for step in range(3):
        engine.apply(OnStep(executor.execute(engine.plan(float(step)))), float(step))
    assert policy.seen == {"a": (6 / 24, 0), "b": (4 / 12, 0)}
    engine.apply(Submit(request("b2", [1] * 30, 9, model="b")), 3.0)
    for step in range(3, 6):
        engine.apply(OnStep(executor.execute(engine.plan(float(step)))), float(step))
    assert policy.seen["a"] == (6 / 24, 0) and policy.seen["b"][1] == 1


def test_a_failed_step_sends_its_sequences_anew():
    engine = make(depth=2)
    engine.apply(Submit(request("r", [1, 2, 3, 4, 5], 9)), 0.0)
    first, second = engine.plan(0.0), engine.plan(0.0)
    engine.apply(OnStep(StepResult(first.step_id, [], error="row lost")), 0.0)
    assert engine.plan(0.0) is None, "nothing of it is planned while the step after still flies"
    engine.apply(OnStep(StepResult(second.step_id, [], error="row lost")), 0.0)
    assert len(engine.plan(0.0).new_sequences) == 1
    engine.check()


def test_a_refused_higher_epoch_leaves_what_is_held():
    engine = Engine(8, 4, ordering_policy("fcfs"), FixedTokenBudget(8), max_waiting=1)
    engine.apply(AddModel(SHAPES[0]), 0.0)
    assert engine.apply(Submit(request("r", [1], 2)), 0.0) is None
    assert engine.apply(Submit(request("r", [1], 2, epoch=1)), 0.0).code == ErrorCode.OVERLOADED
    assert engine.held("r").request.epoch == 0


def test_ended_requests_are_not_kept_alive_by_an_old_deadline():
    engine = make()
    for index in range(500):
        engine.apply(Submit(request(f"r{index}", [1], 2)), 0.0)
        if index:
            engine.apply(Cancel(f"r{index}"), 0.0)
    assert len(engine.requests._deadlines) < 100


@pytest.mark.parametrize("depth", [1, 2])
def test_offline_decodes_that_are_always_in_flight_give_way_to_an_online_request(depth):
    engine = Engine(10, 8, ordering_policy("fcfs"), FixedTokenBudget(64), steps_in_flight=depth)
    shape = ModelShape("a", 32, 1, 300)
    engine.apply(AddModel(shape), 0.0)
    executor = FakeExecutor([shape])
    for first in (0, 1):
        prompt = list(range(first, first + 100))
        engine.apply(Submit(request(f"offline{first}", prompt, 27, request_class=OFFLINE)), 0.0)
    in_flight, num_steps = [], 0
    while num_steps < 20:
        if num_steps == 8:
            engine.apply(Submit(request("online", list(range(500, 600)), 5)), 0.1)
        while len(in_flight) < depth and (plan := engine.plan(0.1)):
            in_flight.append(plan)
        engine.apply(OnStep(executor.execute(in_flight.pop(0))), 0.1)
        num_steps += 1
        engine.check()
    assert engine.held("online") is None, "it has ended long before the offline ones would have"
    assert engine.counters.num_preemptions == 1
