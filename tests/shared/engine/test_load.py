"""What an engine reports of its load, in merged blocks and in decode steps."""

from __future__ import annotations

import math

import msgspec
import pytest

from shared.costs.model import StepShape
from shared.engine.calls import Detach, Release, Reserve, SetCostModel, Submit, Unreserve
from shared.engine.engine import Engine
from shared.engine.memory.allocator import GROWTH_STEPS
from shared.engine.plan import ModelShape
from shared.engine.sequence import PriorityClass, State
from shared.messages.cluster import mark_positions
from shared.messages.migration import PreAllocate
from shared.messages.requests import Priority, RequestClass
from shared.policies.baselines import RoundRobin
from shared.policies.token_budget import FixedTokenBudget
from shared.policies.virtual_usage import HIGH_WEIGHT
from tests.shared.costs import costs
from tests.shared.engine.cluster import Node
from tests.shared.engine.fake_executor import request

WIDE, NARROW = ModelShape("a", 8, 2, 400), ModelShape("b", 4, 1, 200)
"""16 and 4 tokens in a merged block."""
HIGH = Priority.HIGH


def make(num_merged=40, rows=8, least_share=0.0, **fields) -> Node:
    fields["least_share"] = least_share
    engine = Engine(num_merged, rows, RoundRobin(), FixedTokenBudget(512), steps_in_flight=1, **fields)
    return Node(engine, [WIDE, NARROW])


def run(node: Node, *requests) -> None:
    for sent in requests:
        assert node.engine.apply(Submit(sent), 0.0) is None
    for _ in range(2 * len(requests) or 1):
        if node.plan(0.0):
            node.step_returns(0.0)


def reserve(node: Node, num_blocks: int, **fields) -> None:
    fields = {"request_class": RequestClass.ONLINE, "priority": Priority.NORMAL, **fields}
    query = PreAllocate(
        migration_id="m",
        source_id="s",
        request_id="r",
        model="a",
        stage=0,
        first_block=0,
        num_blocks=num_blocks,
        hashes=b"",
        block_size=8,
        block_bytes=1,
        **fields,
    )
    assert node.engine.apply(Reserve(query), 0.0).blocks


def test_idle_is_infinitely_free():
    load = make().engine.load()
    assert load.dispatch_freeness == load.migration_freeness == load.scaling_freeness == math.inf
    assert load.dispatch_freeness_high == math.inf
    assert load.num_high == 0


def test_freeness_in_steps_is_until_the_pool_is_full():
    node = make()
    run(node, request("r", list(range(30)), 50))
    load = node.engine.load()
    assert load.dispatch_freeness == pytest.approx(38)
    assert load.migration_freeness == load.scaling_freeness == pytest.approx(38 * 16)


def test_models_of_different_blocks_are_weighted_by_what_a_step_takes():
    node = make()
    run(node, request("wide", list(range(30)), 50), request("narrow", list(range(30)), 50, model="b"))
    load = node.engine.load()
    num_blocks = sum(len(s.blocks) for s in node.engine.all_held() if s.model == "b")
    assert load.migration_freeness == pytest.approx((40 - 2 - num_blocks) / (1 / 16 + 1 / 4))


@pytest.mark.parametrize("shapes", [[WIDE, NARROW], [NARROW, WIDE]])
def test_of_several_models_that_wait_the_one_whose_step_takes_most_counts(shapes: list[ModelShape]):
    engine = Engine(40, 8, RoundRobin(), FixedTokenBudget(512), steps_in_flight=1, least_share=0.0)
    Node(engine, shapes)
    for model in "ab":
        engine.apply(Submit(request(model, [1, 2, 3], 50, model=model)), 0.0)
    load = engine.load()
    assert load.scaling_freeness == pytest.approx((40 - 1 - 1) * 4), "others can use whole merged blocks only"


def test_of_those_that_wait_the_head_counts_for_moving_and_all_for_scaling():
    node = make(rows=1)
    run(node, request("runs", list(range(30)), 50))
    for index in range(3):
        node.engine.apply(Submit(request(f"w{index}", list(range(16 + index)), 50)), 0.1)
    load = node.engine.load()
    assert load.migration_freeness == pytest.approx((40 - 2 - 1) * 16)
    assert load.scaling_freeness == pytest.approx((40 - 2 - 1 - 1.5 - 1.5) * 16)
    assert load.dispatch_freeness == pytest.approx(34)


def test_a_long_head_that_fits_nowhere_makes_its_instance_give_away():
    node = make(num_merged=40)
    run(node, request("runs", list(range(300)), 50))
    before = node.engine.load().migration_freeness
    run(node, request("head", list(range(500, 880)), 5))
    assert node.engine.held("head").state == State.WAITING
    assert node.engine.load().migration_freeness < 0 < before


def test_only_waiting_ones_are_load_too():
    node = make()
    node.engine.apply(Submit(request("w", list(range(16)), 50)), 0.0)
    load = node.engine.load()
    assert load.migration_freeness == pytest.approx(39 * 16) and load.dispatch_freeness == pytest.approx(39)


def test_offline_work_is_no_load():
    node = make()
    run(node, request("r", list(range(30)), 50, request_class=RequestClass.OFFLINE, priority=HIGH))
    reserve(node, 4, request_class=RequestClass.OFFLINE)
    load = node.engine.load()
    assert load.dispatch_freeness == load.migration_freeness == math.inf and load.num_high == 0
    assert load.free_merged == pytest.approx(40 - 2 - 2)


def test_what_comes_and_what_leaves_is_load():
    node = make()
    run(node, request("r", list(range(30)), 50, priority=HIGH))
    alone = node.engine.load()
    assert node.engine.apply(Detach("r"), 0.0)
    assert [(move.model, move.num_tokens) for move in alone.next_moves] == [("a", 32)]
    nobody = msgspec.structs.replace(alone, next_moves=())
    assert node.engine.load() == nobody, "nobody else could move"
    reserve(node, 6)
    both = node.engine.load()
    assert both.dispatch_freeness_high == pytest.approx(both.migration_freeness / 16)
    assert both.dispatch_freeness == pytest.approx(alone.dispatch_freeness - 3), "still divided by the one that runs"
    assert both.num_high == 1
    node.engine.apply(Release("r"), 0.0)
    coming = node.engine.load()
    assert coming.migration_freeness == pytest.approx((40 - 3) * 16) and coming.num_high == 0
    node.engine.apply(Unreserve("m"), 0.0)
    assert node.engine.load().migration_freeness == math.inf


def test_headroom_grows_with_what_high_requests_hold_and_only_normal_ones_see_it():
    node = make(num_merged=400)
    run(node, request("normal", list(range(16)), 50))
    normal = node.engine.load()
    assert normal.dispatch_freeness == normal.dispatch_freeness_high == pytest.approx(400 - 2)
    run(node, *(request(name, list(range(16)), 50, priority=HIGH) for name in ("high", "higher")))
    high = node.engine.load()
    assert high.num_high == 2
    held = node.engine.all_held()
    used = math.ceil(sum(len(s.blocks) for s in held) / 2)
    kept = HIGH_WEIGHT * sum(len(s.blocks) for s in held if s.priority_class == PriorityClass.ONLINE_HIGH) / 2
    assert high.dispatch_freeness == pytest.approx((400 - used - kept) / 3)
    assert high.dispatch_freeness_high == pytest.approx((400 - used) / 3)
    assert high.migration_freeness == pytest.approx((400 - used - kept) * 16 / 3)


def test_where_no_normal_request_runs_headroom_makes_no_source():
    node = make()
    run(node, request("high", list(range(16)), 50, priority=HIGH))
    load = node.engine.load()
    assert load.dispatch_freeness < 40 - 2 and load.migration_freeness == pytest.approx((40 - 2) * 16)


def test_a_waiting_request_of_high_priority_counts():
    node = make(num_merged=400)
    node.engine.apply(Submit(request("w", list(range(16)), 50, priority=HIGH)), 0.0)
    assert node.engine.load().num_high == 1
    assert node.engine.load().dispatch_freeness == pytest.approx(400 - 1 - HIGH_WEIGHT)


@pytest.mark.parametrize(
    ("cost_model", "ideal"),
    [
        # 1.5 times 20 ms: 100 sequences of 256 tokens more, 1,616 merged blocks in all.
        (
            costs(0.02, decode_s=0.0001),
            (1 + 100.5) * 16,
        ),
        # The context counts as the number of sequences does.
        (
            costs(0.02, decode_context_s=0.0001 / 256),
            (1 + 100.5) * 16,
        ),
        # Beyond the knee each of them takes twice as long.
        (
            costs(0.02, decode_s=0.0001, over_knee_s=0.0001, knee_tokens=51),
            (1 + 50 + 25.25) * 16,
        ),
        # Even two are too many; an eighth of the pool is allowed all the same.
        (
            costs(0.001, decode_s=1.0),
            4000 / 8,
        ),
    ],
)
def test_the_ideal_load_is_where_decode_takes_half_as_long_again(cost_model, ideal):
    node = make(num_merged=4000)
    node.engine.apply(SetCostModel("a", cost_model), 0.0)
    for number in range(12):
        node.engine.apply(Submit(request(str(number), list(range(384)), 16, priority=HIGH)), 0.0)
    usage = 12 * 24
    assert usage * HIGH_WEIGHT > 4000 - ideal
    assert node.engine.load().dispatch_freeness == pytest.approx(ideal - usage)


def test_where_no_load_slows_decode_there_is_no_headroom():
    node = make(num_merged=40)
    node.engine.apply(Submit(request("w", list(range(16)), 50, priority=HIGH)), 0.0)
    node.engine.apply(SetCostModel("a", costs(0.02, 0.001)), 0.0)
    assert node.engine.load().dispatch_freeness == 39


@pytest.mark.parametrize("more", [0, 1])
def test_who_runs_has_room_to_grow_when_one_more_is_admitted(more: int):
    node = make(num_merged=30)
    run(node, *(request(f"r{number}", [number] * 35, 50) for number in range(4)))
    num_left = node.engine.pool.num_available("a") - 4 * GROWTH_STEPS // WIDE.block_size
    assert num_left > 0 and node.engine.load().num_running == 4
    assert node.engine.apply(Submit(request("new", [99] * (WIDE.block_size * (num_left + more)), 50)), 0.0) is None
    node.plan(0.0)
    assert (node.engine.load().num_running == 5) == (not more)


def test_prompts_and_steps_in_flight_are_time_that_one_more_prompt_waits():
    node = make()
    cost = costs(0.02, 0.001, prefill_attention_s=1e-5, decode_s=0.002, over_knee_s=0.003)
    run(node, request("decodes", list(range(10)), 50))
    assert node.engine.load(0.0).prompts_s == 0.0, "nothing is known of time"
    node.engine.apply(SetCostModel("a", cost), 0.0)
    assert node.engine.load(0.0).prompts_s == 0.0
    assert node.engine.load(0.0).models[0].prompt_cost == pytest.approx((0.004, 1e-5))
    assert node.engine.load(0.0).models[0].decode_cost == pytest.approx((0.025, 0.005)), "of one that decodes"
    assert node.engine.load(0.0).models[1].decode_cost == (0.0, 0.0), "only guessed"
    node.engine.apply(Submit(request("waits", list(range(40)), 5)), 0.0)
    node.engine.apply(Submit(request("yields", list(range(40)), 5, request_class=RequestClass.OFFLINE)), 0.0)
    assert node.engine.load(0.0).prompts_s == pytest.approx(40 * 0.004 + 1e-5 * 40 * 20)
    assert node.plan(1.0)
    step_s = node.engine.load(1.0).prompts_s
    assert step_s >= cost.predict(StepShape(40, 800.0, 1, 10)) - 1e-9, "the prompt is in flight"
    assert node.engine.load(1.0 + step_s / 2).prompts_s == pytest.approx(step_s / 2)
    assert node.engine.load().prompts_s == 0.0


def test_what_a_decode_more_adds_has_the_contexts_of_those_that_are_there():
    node = make()
    cost = costs(0.02, decode_s=0.001, decode_context_s=1e-5)
    node.engine.apply(SetCostModel("a", cost), 0.0)
    assert node.engine.load().models[0].decode_cost == pytest.approx((0.021, 0.0))
    run(node, request("short", list(range(7)), 50), request("long", list(range(39)), 50))
    blocks = sum(
        len(sequence.blocks)
        for sequence in node.engine.memory.queues["a"].running[PriorityClass.ONLINE_NORMAL].values()
    )
    one_s, more_s = node.engine.load().models[0].decode_cost
    assert one_s == pytest.approx(0.021) and more_s == pytest.approx(0.001 + 1e-5 * blocks * WIDE.block_size / 2)
    run(node, request("yields", list(range(20)), 50, request_class=RequestClass.OFFLINE))
    assert node.engine.load().models[0].decode_cost == pytest.approx((one_s, more_s), rel=0.1)


def test_the_next_request_of_each_model_is_told_of_and_all_of_those_that_leave():
    node = make(num_merged=200)
    run(
        node,
        request("long", list(range(60)), 50),
        request("short", list(range(20)), 50),
        request("other", list(range(500, 590)), 50, model="b"),
        request("high", list(range(8)), 50, priority=HIGH),
    )
    told = [(move.model, move.request_id) for move in node.engine.load().next_moves]
    assert told == [("a", "short"), ("b", "other")], "high priority stays while others run"
    assert [m.request_id for m in node.engine.load(given_away={"a"}).next_moves] == ["high", "short", "long", "other"]
    (first, *_) = node.engine.load().next_moves
    root = node.engine.memory.queues["a"].root
    held = node.engine.held("short")
    hashes = held.extend_hashes(first.num_blocks, first.block_size, root)
    assert first.marks == b"".join(hashes[position - 1][:8] for position in mark_positions(first.num_blocks))
