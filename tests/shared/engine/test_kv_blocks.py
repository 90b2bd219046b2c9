"""The block pool against a naive model, and the rules of sharing merged blocks between models."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.memory.blocks import BlockPool, chain_hash, root_hash


def block_hash(number: int) -> bytes:
    return chain_hash(root_hash("m"), bytes([number]))


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "release", "find", "register", "clear"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 9),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), OPERATIONS)
def test_no_block_is_owned_twice_and_none_is_lost(num_merged, operations):
    pool = BlockPool(num_merged)
    pool.add_model("a", 4, 3)
    pool.add_model("b", 2, 2)
    held: dict[str, list[int]] = {"a": [], "b": []}
    contents: dict[tuple[str, bytes], int] = {}
    for operation, model, number in operations:
        if operation == "allocate":
            available = pool.num_available(model)
            blocks = pool.allocate(model, number)
            assert (blocks is None) == (number > available)
            held[model].extend(blocks or [])
            for block in blocks or []:
                contents = {key: s for key, s in contents.items() if key[0] != model or s != block}
        elif operation == "release" and held[model]:
            pool.release(model, [held[model].pop(number % len(held[model]))])
        elif operation == "register" and held[model]:
            block = held[model][number % len(held[model])]
            if (model, block_hash(number)) not in contents and block not in pool._models[model].hash_of:
                contents[model, block_hash(number)] = block
            pool.register(model, [block], [block_hash(number)])
        elif operation == "find":
            found = pool.find(model, [block_hash(number)])
            for block in found:
                assert contents[model, block_hash(number)] == block, "a hit on other content"
            pool.retain(model, found)
            held[model].extend(found)
        elif operation == "clear":
            pool.clear_cache()
        pool.check()
        merged_of = {
            name: {block // pool._models[name].blocks_per_merged for block in blocks} for name, blocks in held.items()
        }
        assert not merged_of["a"] & merged_of["b"], "a merged block used by two models"
        assert pool.num_free_merged() == num_merged - len(merged_of["a"] | merged_of["b"])
    for model, blocks in held.items():
        pool.release(model, blocks)
    pool.check()
    assert pool.num_free_merged() == num_merged and pool.used_merged() == 0
    assert pool.num_available("a") == 3 * num_merged and pool.num_available("b") == 2 * num_merged


def test_a_merged_block_goes_back_to_all_models_when_its_last_block_is_freed():
    pool = BlockPool(2)
    pool.add_model("a", 4, 3)
    pool.add_model("b", 2, 2)
    blocks = pool.allocate("a", 6)
    assert blocks is not None and pool.allocate("b", 1) is None
    pool.release("a", blocks[:2])
    assert pool.allocate("b", 1) is None, "blocks of a merged block in use stay its model's"
    pool.release("a", blocks[2:])
    assert pool.allocate("b", 4) is not None


def test_cached_blocks_are_evicted_least_recently_used_first_and_tails_before_heads():
    pool = BlockPool(1)
    pool.add_model("a", 4, 4)
    blocks = pool.allocate("a", 4)
    for index, block in enumerate(blocks):
        pool.register("a", [block], [block_hash(index)])
    pool.release("a", blocks)
    assert pool.allocate("a", 1) == [blocks[3]]
    assert pool.find("a", [block_hash(i) for i in range(4)]) == blocks[:3]


def test_another_models_cache_gives_way_when_it_is_older():
    pool = BlockPool(2)
    pool.add_model("a", 4, 2)
    pool.add_model("b", 2, 2)
    old = pool.allocate("a", 2)
    for index, block in enumerate(old):
        pool.register("a", [block], [block_hash(index)])
    pool.release("a", old)
    recent = pool.allocate("b", 2)
    pool.register("b", [recent[0]], [block_hash(7)])
    pool.register("b", [recent[1]], [block_hash(8)])
    pool.release("b", recent)
    assert pool.allocate("b", 2) is not None
    assert pool.find("a", [block_hash(0)]) == []
    assert pool.find("b", [block_hash(7)]) == [recent[0]]


def test_removing_a_model_needs_its_blocks_free_and_leaves_the_others():
    pool = BlockPool(3)
    pool.add_model("a", 4, 2)
    pool.add_model("b", 2, 2)
    a, b = pool.allocate("a", 2), pool.allocate("b", 1)
    with pytest.raises(ValueError, match="used blocks"):
        pool.remove_model("a")
    pool.register("a", [a[0]], [block_hash(1)])
    pool.release("a", a)
    pool.remove_model("a")
    pool.check()
    assert pool.num_available("b") == 5
    pool.release("b", b)
    pool.add_model("a", 8, 1)
    assert pool.num_available("a") == 3
