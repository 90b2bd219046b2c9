"""The index of prompts' prefixes: what reports say, what dispatches let one guess, and that it agrees with engines."""

from __future__ import annotations

import gc
import math
import time
from itertools import combinations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.calls import Submit
from shared.engine.memory.blocks import BlockPool, chain_hash, root_hash
from shared.engine.memory.cache_news import MAX_NOTED, MAX_TOLD, CacheChanges, CacheNews
from shared.messages.cluster import KEY_BYTES, LoadReport, NextMove, mark_positions
from shared.messages.requests import Adapter, GenerationRequest, Image, pack_tokens
from shared.scheduling.prefixes import GUESS_S, MIN_ENTRIES, PrefixIndex, prompt_keys
from tests.seeds import examples
from tests.shared.engine.fake_executor import request
from tests.shared.engine.moves_setup import make, run

PAGE = 4


def prompt(*tokens: int, model: str = "a", **fields: object) -> GenerationRequest:
    made = request("r", list(tokens), 5)
    return msgspec.structs.replace(made, model=model, **fields)


def report(instance_id: str, changes: CacheChanges) -> LoadReport:
    return LoadReport(
        instance_id=instance_id,
        incarnation="1",
        sequence=1,
        dispatch_freeness=1.0,
        free_merged=1.0,
        num_running=0,
        models=(),
        admitted=(),
        ended=(),
        finished=(),
        **msgspec.structs.asdict(changes),
    )


def tell(index: PrefixIndex, instance_id: str, held: bytes = b"", lost: bytes = b"", has_gap: bool = False) -> None:
    index.on_report(report(instance_id, CacheChanges(held, lost)), has_gap)


def keys(of: GenerationRequest) -> list[bytes]:
    return list(prompt_keys(of, PAGE))


def test_an_instance_has_what_it_says_without_a_gap_until_it_says_that_it_lost_it() -> None:
    index, asked = PrefixIndex(), prompt(*range(14))
    first, second, third = keys(asked)
    tell(index, "whole", first + second + third)
    tell(index, "part", first)
    tell(index, "tail", second + third)
    assert index.held_tokens(asked, PAGE, 0.0) == {"whole": 12, "part": 4}
    assert index.held_tokens(prompt(*range(8), 99, 98, 97, 96, 95), PAGE, 0.0) == {"whole": 8, "part": 4}
    assert index.held_tokens(prompt(99, *range(1, 14)), PAGE, 0.0) == {}
    tell(index, "whole", lost=second)
    assert index.held_tokens(asked, PAGE, 0.0) == {"whole": 4, "part": 4}
    tell(index, "tail", first)
    assert index.held_tokens(asked, PAGE, 0.0) == {"whole": 4, "part": 4, "tail": 12}


def test_models_adapters_and_block_sizes_have_nothing_in_common() -> None:
    index, asked = PrefixIndex(), prompt(*range(14))
    tell(index, "i", b"".join(keys(asked)))
    assert index.held_tokens(prompt(*range(14), model="b"), PAGE, 0.0) == {}
    assert index.held_tokens(prompt(*range(14), adapter=Adapter("poet", "1", "/poet")), PAGE, 0.0) == {}
    assert index.held_tokens(asked, 2 * PAGE, 0.0) == {} and index.held_tokens(asked, 0, 0.0) == {}


def test_what_was_sent_somewhere_is_guessed_for_a_while() -> None:
    index, asked = PrefixIndex(), prompt(*range(14))
    index.on_dispatch(asked, PAGE, "i", 100.0)
    assert index.held_tokens(asked, PAGE, 100.0) == {"i": 12}
    assert index.held_tokens(asked, PAGE, 100.0 + GUESS_S) == {}
    tell(index, "i", keys(asked)[0])
    index.on_dispatch(asked, PAGE, "i", 100.0)
    assert index.held_tokens(asked, PAGE, 1e6) == {"i": 4}, "a guess takes nothing from what was said"


@pytest.mark.parametrize("how", ["gap", "anew", "gone"])
def test_what_may_have_been_lost_unheard_counts_no_more(how: str) -> None:
    index, asked = PrefixIndex(), prompt(*range(14))
    for name in ("i", "other"):
        tell(index, name, b"".join(keys(asked)))
    if how == "gone":
        index.forget("i")
    else:
        index.on_report(report("i", CacheChanges(is_cache_anew=how == "anew")), has_gap=how == "gap")
    assert index.held_tokens(asked, PAGE, 0.0) == {"other": 12}
    tell(index, "i", keys(asked)[0])
    assert index.held_tokens(asked, PAGE, 0.0) == {"other": 12, "i": 4}


def test_memory_is_bounded_and_what_was_longest_not_named_goes_first() -> None:
    index = PrefixIndex(max_entries=3)
    prompts = [prompt(number, 1, 2, 3, 4) for number in range(4)]
    for number, one in enumerate(prompts):
        tell(index, f"i{number}", keys(one)[0])
    assert len(index) == 3
    assert index.held_tokens(prompts[0], PAGE, 0.0) == {} and index.held_tokens(prompts[3], PAGE, 0.0) == {"i3": 4}


def test_a_part_forgets_its_own_oldest_and_what_is_old_displaces_nothing() -> None:
    """With more than one part each keeps what was named last of its own, and all together as many as there may be."""
    index = PrefixIndex(MIN_ENTRIES)
    # The first byte chooses the part: of one, and of ten of these.
    asked = {keys(made)[0]: made for made in (prompt(number, 0, 0, 0, 0) for number in range(2 * MIN_ENTRIES))}
    named = [key for key in asked if key[0] == 0 or 45 <= key[0] < 55]
    assert len(named) > 15 * MIN_ENTRIES // 256
    for key in named:
        tell(index, "a", key)

    def known() -> set[bytes]:
        return {key for key in named if index.held_tokens(asked[key], PAGE, 0.0)}

    kept = {*[key for key in named if key[0] == 0][-MIN_ENTRIES // 256 :]}
    kept.update([key for key in named if key[0] != 0][-10 * MIN_ENTRIES // 256 :])
    assert len(index) == 11 * MIN_ENTRIES // 256 == len(kept) and known() == kept
    forgotten = b"".join(key for key in named if key not in kept)
    index.on_report(report("a", CacheChanges(cache_repeated=forgotten, cache_round=1)), False)
    assert known() == kept
    tell(index, "a", lost=b"".join(kept))
    assert known() == set()
    index.on_report(report("a", CacheChanges(cache_repeated=named[0], cache_round=1)), False)
    assert known() == {named[0]}


def test_no_block_is_noted_at_the_cost_of_a_long_stop() -> None:
    """One dictionary of all blocks stopped for 50 to 90 ms whenever it was built anew. By processor time."""
    index, longest_s = PrefixIndex(), 0.0
    gc.disable()
    try:
        for at in range(0, 400_000, 16):
            held = b"".join(
                (number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "big") for number in range(at, at + 16)
            )
            told = report(f"i{at % 1009}", CacheChanges(held, b""))
            began_s = time.thread_time()
            index.on_report(told, False)
            longest_s = max(longest_s, time.thread_time() - began_s)
    finally:
        gc.enable()
    assert longest_s < 0.02


def test_an_engine_tells_of_the_blocks_that_a_prompt_is_looked_for_by() -> None:
    node, index = make(), PrefixIndex()
    asked = request("r", list(range(14)), 5)
    node.engine.apply(Submit(asked), 0.0)
    run(node, 2)
    index.on_report(report("i", node.engine.memory.cache_news.take()), True)
    assert index.held_tokens(asked, PAGE, 0.0) == {"i": 12}
    node.engine.pool.clear_cache()
    assert index.held_tokens(asked, PAGE, 0.0) == {"i": 12}, "it runs still"


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.booleans()), max_size=80))
def test_after_any_history_the_index_is_what_the_pools_hold(history: list[tuple[int, bool, bool]]) -> None:
    """Blocks come and go on the device and in host memory, in small pools; what is in either is held."""
    news = CacheNews()
    pools = [BlockPool(6, news), BlockPool(4, news)]
    news.caches = pools
    index = PrefixIndex()
    for pool in pools:
        pool.add_model("a", PAGE, 2)
    asked = [prompt(number, 1, 2, 3, 4) for number in range(41)]
    for number, on_host, is_told in history:
        pool = pools[on_host]
        block = pool.allocate("a", 1)
        assert block is not None
        pool.register("a", block, [chain_hash(root_hash("a"), pack_tokens([number, 1, 2, 3]))])
        pool.release("a", block)
        if is_told:
            index.on_report(report("i", news.take()), False)
    index.on_report(report("i", news.take()), False)
    for one in asked:
        (whole,) = (chain_hash(root_hash("a"), one.prompt[: 4 * PAGE]),)
        assert bool(index.held_tokens(one, PAGE, 0.0)) == any(pool.has(whole) for pool in pools)


def test_who_heard_nothing_so_far_hears_all_in_turn_and_who_falls_behind_is_told_so() -> None:
    news = CacheNews()
    pool = BlockPool(40, news)
    news.caches = [pool]
    pool.add_model("a", PAGE, 1)
    hashes = [chain_hash(b"", bytes([number])) for number in range(40)]
    blocks = pool.allocate("a", 40)
    assert blocks is not None
    pool.register("a", blocks, hashes)
    news.take()
    heard = b"".join(news.take().cache_repeated for _ in range(10))
    assert {heard[at : at + KEY_BYTES] for at in range(0, len(heard), KEY_BYTES)} == {h[:KEY_BYTES] for h in hashes}
    for number in range(MAX_NOTED + 1):
        news.note(number.to_bytes(16, "little"))
    assert news.take().is_cache_anew and not news.take().is_cache_anew
    for number in range(MAX_TOLD + 1):
        news.note(number.to_bytes(16, "little"))
    assert [len(news.take().cache_lost) // KEY_BYTES for _ in range(2)] == [MAX_TOLD, 1], "the rest comes with the next"


def test_what_is_told_again_is_taken_in_by_who_may_lack_it_alone() -> None:
    """It is told for two rounds from the first report on; a gap makes it the first."""
    index, asked = PrefixIndex(), prompt(*range(14))
    told = b"".join(keys(asked))

    def repeat(number: int, has_gap: bool = False) -> None:
        changes = CacheChanges(cache_repeated=told, cache_round=number)
        index.on_report(report("i", changes), has_gap)

    repeat(7, has_gap=True)
    tell(index, "i", lost=told)
    repeat(8)
    assert index.held_tokens(asked, PAGE, 0.0) == {"i": 12}
    tell(index, "i", lost=told)
    repeat(9)
    assert index.held_tokens(asked, PAGE, 0.0) == {}, "it knows all that there is"
    repeat(9, has_gap=True)
    assert index.held_tokens(asked, PAGE, 0.0) == {"i": 12}


def test_those_that_have_most_of_a_prompt_come_first() -> None:
    index, asked = PrefixIndex(), prompt(*range(14))
    told = keys(asked)
    for number, name in enumerate(("one", "three", "two", "also three", "none")):
        tell(index, name, b"".join(told[: (1, 3, 2, 3, 0)[number]]))
    held = index.held_tokens(asked, PAGE, 0.0)
    assert list(held.longest()) == [("three", 12), ("also three", 12), ("two", 8), ("one", 4)]
    assert list(held) == ["three", "also three", "two", "one"] and len(held) == 4
    assert held["two"] == 8 and held.get("none") == 0 and "none" not in held and "nobody" not in held


NAMES, NUM_KEYS = ("a", "b", "c"), 6


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["held", "lost", "gap", "forget", "dispatch"]),
            st.sampled_from(NAMES),
            st.sets(st.integers(0, NUM_KEYS - 1)),
            st.integers(0, 20),
        ),
        max_size=60,
    )
)
def test_the_index_says_what_a_list_of_all_that_was_told_says(history: list[tuple[str, str, set[int], int]]) -> None:
    """Whatever was forgotten meanwhile, in whatever order bits were given to others."""
    index, asked, now = PrefixIndex(), prompt(*range(PAGE * NUM_KEYS + 1)), 0.0
    every = keys(asked)
    told: dict[str, dict[int, float]] = {name: {} for name in NAMES}
    for what, name, numbers, passed_s in history:
        now += passed_s
        packed = b"".join(every[number] for number in sorted(numbers))
        if what == "dispatch":
            index.on_dispatch(asked, PAGE, name, now)
            for number in range(NUM_KEYS):
                told[name][number] = max(told[name].get(number, 0.0), now + GUESS_S)
        elif what == "forget":
            index.forget(name)
            told[name] = {}
        elif what == "lost":
            tell(index, name, lost=packed)
            told[name] = {number: until_s for number, until_s in told[name].items() if number not in numbers}
        else:
            tell(index, name, held=packed, has_gap=what == "gap")
            told[name] = ({} if what == "gap" else told[name]) | dict.fromkeys(numbers, math.inf)
        expected = {}
        for each, believed in told.items():
            num = next((n for n in range(NUM_KEYS) if believed.get(n, 0.0) <= now), NUM_KEYS)
            if num:
                expected[each] = num * PAGE
        assert index.held_tokens(asked, PAGE, now) == expected


def test_a_prefix_that_all_have_is_looked_up_block_by_block_and_not_holder_by_holder() -> None:
    """In turns with one that a single instance has, by processor time, so that other work counts for little."""
    asked = prompt(*range(PAGE * 64 + 1))
    told = b"".join(keys(asked))
    few, many = PrefixIndex(), PrefixIndex()
    tell(few, "i0", told)
    for number in range(1024):
        tell(many, f"i{number}", told)
    took_s: dict[PrefixIndex, list[float]] = {few: [], many: []}
    for _ in range(50):
        for index, times in took_s.items():
            started_s = time.process_time()
            held = index.held_tokens(asked, PAGE, 0.0)
            assert held["i0"] == PAGE * 64
            times.append(time.process_time() - started_s)
    assert min(took_s[many]) < 20 * min(took_s[few]), "it was 1,024 times"


def test_a_salt_hides_what_was_computed_with_another_as_engines_do() -> None:
    node, index = make(), PrefixIndex()
    sent = prompt(*range(20), prefix_salt="x", tenant="x")
    assert node.engine.apply(Submit(sent), 0.0) is None
    run(node, 2)
    index.on_report(report("a", node.engine.memory.cache_news.take()), False)
    assert index.held_tokens(sent, PAGE, 0.0) == {"a": 16}
    for salt in ("", "y"):
        assert index.held_tokens(prompt(*range(20), prefix_salt=salt), PAGE, 0.0) == {}


def test_prompts_with_the_same_placeholders_for_other_images_have_nothing_in_common() -> None:
    shown = [(), (Image(b"a"),), (Image(b"b"),), (Image(url="a"),), (Image(b"a"), Image(b"b"))]
    told = [keys(prompt(*range(20), images=images)) for images in shown]
    assert not any(set(one) & set(other) for one, other in combinations(told, 2))
    assert keys(prompt(*range(20), images=shown[1])) == told[1]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.lists(st.integers(0, 300), min_size=1, max_size=6))
def test_marks_tell_most_of_what_instances_hold_of_a_request_and_never_more(
    num_blocks: int, held_blocks: list[int]
) -> None:
    index, asked = PrefixIndex(), prompt(*range(PAGE * num_blocks + 1))
    chain = keys(asked)
    for number, count in enumerate(held_blocks):
        tell(index, f"i{number}", b"".join(chain[:count]))
    marks = b"".join(chain[position - 1] for position in mark_positions(num_blocks))
    move = NextMove("a", PAGE * num_blocks + 1, "r", PAGE, num_blocks, marks)
    known, told = index.held_tokens(asked, PAGE, 0.0), index.held_of(move, 0.0)
    for number in range(len(held_blocks)):
        name = f"i{number}"
        assert 2 * known.get(name, 0) <= 3 * told.get(name, 0) <= 3 * known.get(name, 0)
    assert [tokens for _, tokens in told.longest()] == sorted(dict(told).values(), reverse=True)


def test_an_engine_names_its_next_move_by_what_its_index_knows() -> None:
    node, index = make(), PrefixIndex()
    tokens = list(range(37))
    assert node.engine.apply(Submit(request("r", tokens, 5)), 0.0) is None
    run(node, 2)
    (move,) = node.engine.load(0.0).next_moves
    page = node.engine.held("r").block_size
    assert (move.model, move.request_id, move.num_blocks) == ("a", "r", move.num_tokens // page)
    index.on_report(report("there", node.engine.memory.cache_news.take()), True)
    known = index.held_tokens(request("r", tokens, 5), page, 0.0).get("there")
    assert known > 0 and 2 * known <= 3 * index.held_of(move, 0.0).get("there", 0) <= 3 * known
