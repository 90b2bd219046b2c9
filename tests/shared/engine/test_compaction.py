"""Merged blocks go from model to model: packing, what is reported free, moving blocks together, least shares."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.calls import Cancel, ClearPrefixCache, Detach, Pin, Reserve, Submit
from shared.engine.engine import Engine
from shared.engine.memory.allocator import Allocator
from shared.engine.memory.blocks import BlockPool
from shared.engine.plan import CopyKind, ModelShape
from shared.messages.migration import PreAllocate
from shared.messages.requests import FinishReason, Priority, RequestClass
from shared.policies.catalogue import ordering_policy
from shared.policies.token_budget import FixedTokenBudget
from tests.shared.engine.cluster import Node
from tests.shared.engine.fake_executor import expected_output, request

NARROW, WIDE, ODD = ModelShape("a", 4, 8, 400), ModelShape("b", 8, 1, 400), ModelShape("c", 4, 3, 400)
OFFLINE = RequestClass.OFFLINE


def make(num_merged=64, rows=600, shapes=(NARROW, WIDE), depth=1, **fields) -> Node:
    fields = {"least_share": 0.0, **fields}
    engine = Engine(
        num_merged, rows, ordering_policy("round_robin"), FixedTokenBudget(1 << 20), steps_in_flight=depth, **fields
    )
    return Node(engine, list(shapes))


def turn(node: Node, now: float = 0.0) -> bool:
    """One step; whether there was one."""
    planned = node.plan(now)
    while node.copies:
        node.copy_ends(now)
    if node.in_flight:
        node.step_returns(now)
    node.engine.check()
    return planned


def interleave(node: Node, num_merged: int, max_tokens: int = 300, **fields) -> list[str]:
    """Sequences of model a with one block each that fill so many merged blocks, in the order of their blocks."""
    names = [f"a{number}" for number in range(8 * num_merged)]
    for number, name in enumerate(names):
        assert node.engine.apply(Submit(request(name, [number, 1], max_tokens, model="a", **fields)), 0.0) is None
    assert turn(node)
    return sorted(names, key=lambda name: node.engine.held(name).blocks[0])


@pytest.fixture
def _no_reserve(monkeypatch):
    """Nothing is kept free at admissions for who runs to grow."""
    monkeypatch.setattr(Allocator, "reserve_blocks", lambda *_: 0)


@pytest.mark.usefixtures("_no_reserve")
def test_a_fragmented_pool_gives_what_it_reports():
    """Every eighth block of all merged blocks is used, twice: an average of a quarter."""
    node = make()
    names = interleave(node, 64)
    assert node.engine.load().free_merged == 0
    for index, name in enumerate(names):
        if index % 8 > 1:
            node.engine.apply(Cancel(name), 0.0)
    node.engine.apply(ClearPrefixCache(), 0.0)
    assert node.engine.pool.num_available("b") == 0
    assert node.engine.load().free_merged == 48
    node.engine.apply(Submit(request("b", list(range(47 * 8)), 8, model="b")), 0.0)
    for _ in range(64):
        turn(node)
        if node.engine.held("b").row >= 0:
            break
    assert len(node.engine.held("b").blocks) >= 47
    assert node.engine.counters.num_preemptions == 0 and node.engine.counters.freed_merged >= 47


def test_blocks_are_taken_from_the_fullest_merged_block_with_room():
    pool = BlockPool(4)
    pool.add_model("a", 4, 4)
    pool.add_model("b", 4, 1)
    blocks = pool.allocate("a", 12)
    assert pool.num_free_merged() == 1
    kept = {merged: [block for block in blocks if block // 4 == merged] for merged in {block // 4 for block in blocks}}
    one, two, three = kept.values()
    pool.release("a", [*one[:3], *two[:2], *three[:1]])
    assert [block // 4 for block in pool.allocate("a", 3)] == [three[0] // 4, two[0] // 4, two[0] // 4]
    pool.check()
    pool.release("a", [one[3]])
    assert pool.num_free_merged() == 2 and pool.num_available("b") == 2


def test_what_is_cached_between_used_blocks_goes_before_a_merged_block_that_all_could_have():
    pool = BlockPool(4)
    pool.add_model("a", 4, 4)
    pool.add_model("b", 4, 1)
    blocks = pool.allocate("a", 8)
    for block in blocks:
        pool.register("a", [block], [bytes([block])])
    pool.release("a", [block for block in blocks if block % 4])
    pool.allocate("b", 2)
    b = pool.allocate("a", 6)
    assert {block // 4 for block in b} == {block // 4 for block in blocks}
    assert pool.num_free_merged() == 0
    pool.release("a", b)
    assert pool.num_available("b") == 0 and pool.num_own_room("a") == 6
    pool.check()


def test_a_model_alone_keeps_what_is_cached_while_blocks_are_free():
    pool = BlockPool(4)
    pool.add_model("a", 4, 4)
    blocks = pool.allocate("a", 13)
    for block in blocks[:12]:
        pool.register("a", [block], [bytes([block])])
    pool.release("a", blocks[:12])
    assert pool.used_merged() == 0.25
    assert pool.allocate("a", 3) is not None
    assert pool.find("a", [bytes([block]) for block in blocks[:12]]) == blocks[:12]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.usefixtures("_no_reserve")
def test_moved_sequences_go_on_as_if_nothing_had_happened(depth: int):
    node = make(num_merged=8, depth=depth)
    names = interleave(node, 8, max_tokens=24)
    sent = {name: node.engine.held(name).request for name in names}
    for index, name in enumerate(names):
        if index % 8 > 2:
            node.engine.apply(Cancel(name), 0.0)
    node.engine.effects()
    output = {name: [] for name in [*names, "b"]}
    sent["b"] = request("b", list(range(30)), 20, model="b")
    node.engine.apply(Submit(sent["b"]), 0.0)
    ended = {}
    for _ in range(3000):
        while len(node.in_flight) < depth and node.plan(0.0):
            node.engine.check()
        if node.in_flight:
            node.step_returns(0.0)
        if node.copies:
            node.copy_ends(0.0)
        node.engine.check()
        for effect in node.engine.effects():
            for entry in getattr(effect, "entries", ()):
                output[entry.request_id] += memoryview(entry.tokens).cast("i").tolist()
            if hasattr(effect, "reason"):
                ended[effect.request.request_id] = effect.reason
    assert node.engine.counters.moved_blocks["a"] > 0
    going = [name for index, name in enumerate(names) if index % 8 <= 2]
    for name in ["b", *going]:
        assert ended[name] == FinishReason.LENGTH
        # The first token of each came before.
        expected = expected_output(sent[name], node.limits[sent[name].model])
        assert output[name] == expected[len(expected) - len(output[name]) :] and len(output[name]) >= len(expected) - 1


@pytest.mark.usefixtures("_no_reserve")
def test_blocks_that_others_hold_are_not_moved_nor_counted():
    node = make(num_merged=4)
    names = interleave(node, 4)
    for index, name in enumerate(names):
        if index % 8:
            node.engine.apply(Cancel(name), 0.0)
    node.engine.apply(ClearPrefixCache(), 0.0)
    pool = node.engine.pool
    held = [node.engine.held(name).blocks[0] for name in names if node.engine.held(name)]
    assert len(held) == 4 and node.engine.load().free_merged == 3
    pool.retain("a", held[:2])
    assert node.engine.load().free_merged == 2
    for number in range(3):
        node.engine.apply(Submit(request(f"b{number}", [number] * 4, 4, model="b")), 0.0)
    for _ in range(2):
        node.plan(0.0)
        node.step_returns(0.0)
    moved = [block for copy in node.copies for block in copy.device_blocks]
    assert set(moved) == set(held[2:])
    assert [node.engine.held(f"b{number}").row >= 0 for number in range(3)] == [True, True, False]
    pool.release("a", held[:2])


@pytest.mark.usefixtures("_no_reserve")
def test_a_prefix_that_several_hold_is_moved_for_all():
    node = make(num_merged=4, shapes=(NARROW, WIDE))
    shared = [9, 8, 7, 6]
    node.engine.apply(Submit(request("first", [*shared, 1], 200, model="a")), 0.0)
    turn(node)
    fillers = [f"f{number}" for number in range(30)]
    for number, name in enumerate(fillers):
        node.engine.apply(Submit(request(name, [number, 3], 200, model="a")), 0.0)
    turn(node)
    for name in fillers:
        if node.engine.held(name).blocks[0] // 8 != node.engine.held("first").blocks[0] // 8:
            continue
        node.engine.apply(Cancel(name), 0.0)
    node.engine.apply(Submit(request("second", [*shared, 2], 200, model="a")), 0.0)
    turn(node)
    first, second = node.engine.held("first"), node.engine.held("second")
    assert first.blocks[0] == second.blocks[0]
    for name in fillers[:20]:
        node.engine.apply(Cancel(name), 0.0)
    before = first.blocks[0]
    for number in range(2):
        node.engine.apply(Submit(request(f"b{number}", [number] * 4, 2, model="b")), 0.0)
    for _ in range(4):
        turn(node)
    assert first.blocks[0] == second.blocks[0] and node.engine.counters.freed_merged
    assert before in (first.blocks[0], before)
    root_hash = first.extend_hashes(1, 4, node.engine.memory.queues["a"].root)
    assert node.engine.pool.find("a", root_hash) == first.blocks[:1], "the prefix cache follows"


@pytest.mark.usefixtures("_no_reserve")
def test_what_is_being_moved_is_neither_pinned_nor_handed_over_before_it_is_there():
    node = make(num_merged=4)
    names = interleave(node, 4)
    for _ in range(6):
        turn(node)
    for index, name in enumerate(names):
        if index % 8:
            node.engine.apply(Cancel(name), 0.0)
    node.engine.apply(ClearPrefixCache(), 0.0)
    node.engine.apply(Submit(request("b", [1] * 4, 2, model="b")), 0.0)
    turn(node)
    assert node.plan(0.0)
    (move,) = node.copies
    assert move.kind == CopyKind.MOVE
    (name,) = {
        name for name in names if (held := node.engine.held(name)) and set(held.blocks[:1]) & set(move.target_blocks)
    } or {None}
    assert node.engine.apply(Pin(name, 0), 0.0).blocks == []
    node.engine.apply(Detach(name), 0.0)
    node.step_returns(0.0)
    assert not [effect for effect in node.engine.effects() if hasattr(effect, "progress")]
    node.copy_ends(0.0)
    assert [effect for effect in node.engine.effects() if hasattr(effect, "progress")]
    node.engine.check()


@pytest.mark.usefixtures("_no_reserve")
def test_nobody_is_preempted_for_what_would_not_help():
    """Offline sequences hold seven blocks of eight in each merged block, a copy the other: in sum more than a merged block,
    but none that would come free."""
    node = make(num_merged=2)
    names = interleave(node, 2, request_class=OFFLINE)
    pool = node.engine.pool
    blocks = [node.engine.held(name).blocks[0] for name in names[::8]]
    pool.retain("a", blocks)
    node.engine.apply(Submit(request("online", [2] * 3, 4, model="b")), 0.0)
    for _ in range(2):
        node.plan(0.0)
        node.step_returns(0.0)
    assert node.engine.counters.num_preemptions == 0 and node.engine.held("online").row < 0
    pool.release("a", blocks)
    for _ in range(2):
        turn(node)
    assert node.engine.held("online").row >= 0 and node.engine.counters.num_preemptions == 8


@pytest.mark.usefixtures("_no_reserve")
def test_few_are_preempted_for_a_merged_block():
    """A merged block of model a is full of one-slot sequences, which would go first, and another of two of four blocks: with
    the free blocks beside them, one of these does."""
    node = make(num_merged=3)
    interleave(node, 1, request_class=OFFLINE)
    for number in range(2):
        node.engine.apply(
            Submit(request(f"long{number}", [number] * (15 - 4 * number), 300, request_class=OFFLINE)), 0.0
        )
    node.engine.apply(Submit(request("b", [5] * 7, 400, model="b", request_class=OFFLINE)), 0.0)
    for _ in range(2):
        turn(node)
    assert node.engine.pool.num_free_merged() == 0 and node.engine.pool.num_own_room("a") == 1
    node.engine.apply(Submit(request("online", [6] * 7, 4, model="b")), 0.0)
    for _ in range(2):
        turn(node)
    assert node.engine.held("online").row >= 0 and node.engine.counters.num_preemptions == 1


@pytest.mark.usefixtures("_no_reserve")
def test_who_preempts_is_admitted():
    node = make(num_merged=16)
    names = interleave(node, 16, request_class=OFFLINE)
    for index, name in enumerate(names):
        if index % 2:
            node.engine.apply(Cancel(name), 0.0)
    node.engine.apply(ClearPrefixCache(), 0.0)
    node.engine.apply(Submit(request("b", list(range(12 * 8)), 8, model="b")), 0.0)
    for _ in range(30):
        before = node.engine.counters.num_preemptions
        turn(node)
        if node.engine.held("b").row >= 0:
            break
        assert node.engine.counters.num_preemptions == before, "in vain"
    assert node.engine.held("b").row >= 0


# ------------------------------------------------------------------------------------------------ least shares


def fill(node: Node, num_tokens: int, model: str, num: int, **fields) -> None:
    for number in range(num):
        name = f"{model}{number}"
        node.engine.apply(Submit(request(name, [number] * num_tokens, 300, model=model, **fields)), 0.0)


def running(node: Node, model: str) -> int:
    return sum(sequence.row >= 0 for sequence in node.engine.all_held() if sequence.model == model)


def test_a_large_request_that_was_preempted_comes_back_to_what_is_cached_of_it():
    """What is cached of it is nobody's, so the model is still one without any blocks."""
    node = make(num_merged=4, least_share=0.9)
    memory, shape = node.engine.memory, node.engine.memory.queues["b"].shape
    assert memory.least_merged() == 1
    num_tokens = 4 * shape.blocks_per_merged * shape.block_size - 8
    node.engine.apply(Submit(request("b0", [1] * num_tokens, 8, model="b")), 0.0)
    for _ in range(40):
        turn(node)
        if len(node.engine.held("b0").tokens) > num_tokens:
            break
    memory.preempt(node.engine.held("b0"), 0.0, "memory")
    for _ in range(40):
        turn(node)
    assert node.engine.held("b0") is None or running(node, "b") == 1


def test_online_requests_of_one_model_are_not_admitted_into_the_share_of_another():
    node = make(num_merged=32, least_share=0.25)
    assert node.engine.memory.least_merged() == 4
    fill(node, 8, "b", 40)
    for _ in range(3):
        turn(node)
    pool = node.engine.pool
    assert pool.num_free_merged() >= 4
    fill(node, 100, "a", 1)
    for _ in range(2):
        turn(node)
    assert running(node, "a") == 1
    assert node.engine.counters.num_preemptions == 0


@pytest.mark.usefixtures("_no_reserve")
def test_offline_requests_may_have_it_and_give_way():
    node = make(num_merged=32, least_share=0.25)
    fill(node, 8, "b", 40, request_class=OFFLINE)
    for _ in range(3):
        turn(node)
    assert node.engine.pool.num_free_merged() < 4
    fill(node, 100, "a", 1)
    for _ in range(2):
        turn(node)
    assert running(node, "a") == 1 and node.engine.counters.num_preemptions > 0


@pytest.mark.parametrize("num_tokens", [100, 250])
@pytest.mark.parametrize("depth", [1, 2])
def test_who_has_grown_into_a_share_gives_way_to_its_model(depth: int, num_tokens: int):
    """Also where all that run are always in flight, and to the first request of the model where that needs more."""
    node = make(num_merged=32, least_share=0.25, depth=depth)
    fill(node, 8, "b", 12)
    while node.engine.pool.num_free_merged():
        while len(node.in_flight) < depth and node.plan(0.0):
            pass
        node.step_returns(0.0)
    fill(node, num_tokens, "a", 2)
    for _ in range(4):
        while len(node.in_flight) < depth and node.plan(0.0):
            node.engine.check()
        node.step_returns(0.0)
    assert running(node, "a") == 1 and running(node, "b") >= 1


def test_a_single_request_may_be_larger_than_the_rest():
    node = make(num_merged=32, least_share=0.25)
    node.engine.apply(Submit(request("b", list(range(31 * 8)), 2, model="b")), 0.0)
    turn(node)
    assert running(node, "b") == 1
    fill(node, 60, "a", 1)
    for _ in range(3):
        turn(node)
    assert node.engine.counters.num_preemptions == 0, "the first of each model is not preempted for it"


def test_a_model_alone_has_all():
    node = make(num_merged=32, shapes=(WIDE,), least_share=0.25)
    node.engine.apply(Submit(request("b", list(range(31 * 8 + 1)), 5, model="b")), 0.0)
    assert turn(node) and node.engine.load().free_merged == 0


@pytest.mark.parametrize("shapes", [(WIDE,), (WIDE, NARROW)])
def test_a_share_does_not_keep_a_high_priority_from_what_normal_ones_hold(shapes):
    node = make(num_merged=32, shapes=shapes, least_share=0.25)
    fill(node, 24, "b", 12)
    for _ in range(10):
        turn(node)
    assert node.engine.pool.num_used("b") >= 20
    node.engine.apply(Submit(request("high", [7] * 130, 4, model="b", priority=Priority.HIGH)), 0.0)
    turn(node)
    assert node.engine.held("high").row >= 0


def test_a_request_from_another_instance_is_not_let_into_a_share():
    node = make(num_merged=32, least_share=0.25)
    fill(node, 8, "b", 1)
    turn(node)
    query = PreAllocate(
        migration_id="m",
        source_id="s",
        request_id="r",
        model="b",
        request_class=RequestClass.ONLINE,
        priority=Priority.NORMAL,
        stage=0,
        first_block=0,
        num_blocks=29,
        hashes=b"",
        block_size=8,
        block_bytes=1,
    )
    assert node.engine.apply(Reserve(query), 0.0).code == "overloaded"


# -------------------------------------------------------------------------------------------------- properties


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "cancel", "cancel", "cancel", "preempt", "step", "step", "copy", "hold"]),
        st.sampled_from("abc"),
        st.integers(0, 99),
    ),
    min_size=20,
    max_size=100,
)


@settings(max_examples=150, deadline=None)
@given(st.integers(6, 24), st.sampled_from([1, 2]), CALLS)
def test_what_is_reported_free_can_be_had_by_every_model(num_merged, depth, calls):
    """After random arrivals, ends and preemptions; moves of blocks are carried out by the way."""
    with patch.object(Allocator, "reserve_blocks", lambda *_: 0):
        check_what_is_reported(num_merged, depth, calls)


def check_what_is_reported(num_merged, depth, calls):
    shapes = (NARROW, ModelShape("b", 8, 2, 400), ODD)
    node = make(num_merged, 60, shapes, depth)
    engine, held = node.engine, []
    for number, (call, model, size) in enumerate(calls):
        if call == "submit":
            kind = OFFLINE if size % 2 else RequestClass.ONLINE
            for index in range(1 + size % 3):
                prompt = [number, *[index] * (size // 4)]
                engine.apply(Submit(request(f"r{number}-{index}", prompt, 40, model=model, request_class=kind)), 0.0)
        elif call == "cancel" and engine.all_held():
            engine.apply(Cancel(engine.all_held()[size % len(engine.all_held())].request.request_id), 0.0)
        elif call == "preempt":
            victims = [s for s in engine.memory.queues[model].running[2].values() if not s.in_flight]
            if victims:
                engine.memory.preempt(victims[size % len(victims)], 0.0, "memory")
        elif call == "step":
            node.plan(0.0)
            if node.in_flight and size % 3:
                node.step_returns(0.0)
        elif call == "copy" and node.copies:
            node.copy_ends(0.0)
        elif call == "hold":
            used = [s.blocks[0] for s in engine.all_held() if s.blocks and s.model == model]
            if used:
                held.append((model, [used[size % len(used)]]))
                engine.pool.retain(*held[-1])
    free = engine.load().free_merged
    assert free == int(free)
    was_moving = any(engine.memory.compaction.has_moves(shape.name) for shape in shapes)
    for shape in shapes:
        # What one model has room for beside what it uses is its own.
        wanted = int(free) * shape.blocks_per_merged
        promised = engine.memory.compaction.reach(shape.name).num_blocks
        assert promised >= wanted
        for _ in range(200):
            if engine.memory.compaction.make_room(shape.name, promised):
                break
            engine.memory.compaction.begin_step()
            node.take_copies()
            while node.copies:
                node.copy_ends(0.0)
            reported, reachable = engine.load().free_merged, engine.memory.compaction.reach(shape.name).num_blocks
            if was_moving:
                # What was on its way when it was reported can be moved again now, so that more may be free; never less.
                assert reported >= free and reachable >= promised
                was_moving, free, promised = False, reported, reachable
            assert (reported, reachable) == (free, promised)
        blocks = engine.pool.allocate(shape.name, promised)
        assert blocks is not None, "reported free, but not to be had"
        assert engine.pool.allocate(shape.name, 1) is None, "more than was reported"
        engine.pool.release(shape.name, blocks)
        engine.pool.check()
        assert engine.load().free_merged == free
    for model, blocks in held:
        engine.pool.release(model, blocks)
    engine.check()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["allocate", "release", "register", "move"]), st.integers(0, 50)), max_size=80)
)
def test_packing_and_moves_keep_the_pools_invariants(calls):
    pool = BlockPool(6)
    pool.add_model("a", 4, 5)
    pool.add_model("b", 4, 2)
    held: list[int] = []
    for number, (call, size) in enumerate(calls):
        if call == "allocate":
            held += pool.allocate("a", size % 7) or []
        elif call == "release" and held:
            pool.release("a", [held.pop(size % len(held))])
        elif call == "register" and held:
            pool.register("a", [held[size % len(held)]], [number.to_bytes(2)])
        elif call == "move" and held:
            block = held[size % len(held)]
            targets = [merged for used, merged in pool.busy_merged("a") if used < 5 and merged != block // 5]
            if targets:
                held[size % len(held)] = pool.move("a", block, targets[-1])
        pool.check()
        assert pool.num_available("b") == 2 * pool.num_free_merged()
        assert pool.num_free_merged() == 6 - len({block // 5 for block in held})
        assert sorted(block for m in range(6) for block in pool.used_blocks("a", m)) == sorted(held)
    assert pool.least_merged("a") == math.ceil(len(held) / 5)
