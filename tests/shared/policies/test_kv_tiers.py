"""Which blocks are worth a copy down, and which the way back."""

from __future__ import annotations

import random
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from shared.policies.kv_tiers import (
    FILL_SHARE,
    MIN_BLOCKS,
    NEVER_S,
    PRIOR_RATE,
    BlockKind,
    ReuseTimes,
    giving_way,
    is_worth_keeping,
    is_worth_reading,
    used_at_s,
)

ONLINE, BATCH = BlockKind(True, False), BlockKind(False, False)
seconds = st.floats(1e-6, 10.0)


def test_a_kind_that_is_found_again_is_told_from_one_that_is_not():
    rates = ReuseTimes(100)
    assert rates.rate(ONLINE) == rates.rate(BATCH) == PRIOR_RATE
    for number in range(2000):
        name = number.to_bytes(4, "big")
        rates.leaves(b"o" + name, ONLINE, number, number)
        rates.leaves(b"b" + name, BATCH, number, number)
        if number % 4:
            rates.is_wanted(b"o" + name, number + 1.0)
    assert 0.7 < rates.rate(ONLINE) < 0.8 and rates.rate(BATCH) < 0.05


def test_what_the_device_has_still_says_nothing():
    rates = ReuseTimes(10)
    for number in range(1000):
        name = number.to_bytes(4, "big")
        rates.leaves(name, ONLINE, number, number)
        rates.stays(name)
        rates.is_wanted(name, number)
    assert rates.rate(ONLINE) == PRIOR_RATE


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["leaves", "stays", "wanted"])), max_size=300))
def test_rates_stay_within_bounds_and_no_more_than_the_horizon_is_remembered(events):
    rates = ReuseTimes(5)
    for name, event in events:
        key = bytes([name])
        if event == "leaves":
            rates.leaves(key, ONLINE, 1.0, 2.0)
        elif event == "stays":
            rates.stays(key)
        else:
            rates.is_wanted(key, 3.0)
        assert 0.0 < rates.rate(ONLINE) < 1.0 and len(rates._leaving) <= 5
        assert sum(rates._open.values()) == len(rates._leaving) and all(rates._open.values())


@given(st.floats(0, 1), st.floats(0, 1), seconds, seconds, seconds)
def test_a_likelier_or_dearer_block_is_never_worth_less(low, high, compute_s, back_s, out_s):
    low, high = sorted((low, high))
    if is_worth_keeping(low, compute_s, back_s, out_s) and compute_s > back_s:
        assert is_worth_keeping(high, compute_s, back_s, out_s)
        assert is_worth_keeping(low, 2 * compute_s, back_s, out_s)
        assert is_worth_keeping(low, compute_s, back_s / 2, out_s / 2)


@given(st.integers(MIN_BLOCKS, 1000), seconds, seconds, st.floats(0, 10), st.booleans())
def test_whoever_reads_does_not_wait_much_longer_than_for_computing(num_blocks, compute_s, back_s, wait_s, is_busy):
    if is_worth_reading(num_blocks, compute_s, back_s, wait_s, is_busy=is_busy):
        assert wait_s + back_s < 2 * compute_s
        assert is_worth_reading(num_blocks, compute_s, back_s, wait_s, is_busy=True)
    else:
        assert wait_s + back_s >= compute_s


def test_without_a_cost_model_copies_are_worth_their_time():
    assert is_worth_keeping(0.1, 0.0, 1.0, 1.0) and is_worth_reading(2, 0.0, 1.0, 1.0, is_busy=False)
    assert not is_worth_reading(1, 0.0, 0.0, 0.0, is_busy=False), "a block alone is computed"


def reuse_of(delays_s: list[float | None], every_s: float = 1.0) -> ReuseTimes:
    """What is known once blocks, one of which leaves each time, were asked for after so long, or never were."""
    reuse = ReuseTimes(10_000)
    events = []
    for number, delay_s in enumerate(delays_s):
        events.append((number * every_s, number, False))
        if delay_s is not None:
            events.append((number * every_s + delay_s, number, True))
    for at_s, number, is_back in sorted(events):
        if is_back:
            reuse.is_wanted(number.to_bytes(4, "big"), at_s)
        else:
            reuse.leaves(number.to_bytes(4, "big"), ONLINE, at_s, at_s)
    return reuse


def test_where_blocks_come_back_in_turn_only_those_give_way_that_did_not():
    draw = random.Random(1)
    reuse = reuse_of([draw.uniform(30.0, 90.0) if draw.random() < 0.9 else None for _ in range(2000)])
    assert 90.0 <= reuse.gives_way_s(ONLINE) < 90.0 * 1.2


def test_where_blocks_come_back_soon_or_not_the_least_recently_used_give_way():
    draw = random.Random(1)
    reuse = reuse_of([draw.expovariate(1 / 20.0) if draw.random() < 0.5 else None for _ in range(2000)])
    assert reuse.gives_way_s(ONLINE) < 1.0
    assert ReuseTimes(10).gives_way_s(ONLINE) == 0.0, "nothing is known"


def test_nothing_gives_way_to_a_kind_that_hardly_comes_back():
    reuse = reuse_of([60.0] * 500)
    for number in range(500):
        reuse.leaves(b"once" + number.to_bytes(4, "big"), BATCH, 400.0, 500.0)
    reuse._gives_way_s.clear()
    assert reuse.gives_way_s(BATCH) == NEVER_S > reuse.gives_way_s(ONLINE) > 60.0


class File(NamedTuple):
    at_s: float
    num_bytes: int


files = st.lists(st.tuples(st.floats(0, 100), st.integers(1, 10)).map(lambda one: File(*one)), max_size=20)


@given(files, st.integers(1, 20), st.integers(20, 100), st.floats(0, 120))
def test_a_disk_stays_within_its_bound_and_loses_the_oldest_alone(stored, num_bytes, max_bytes, before_s):
    going = giving_way(stored, num_bytes, max_bytes, before_s)
    total = sum(one.num_bytes for one in stored) + num_bytes
    if going is None:
        assert total - sum(one.num_bytes for one in stored if one.at_s <= before_s) > max_bytes
        return
    assert all(one.at_s <= before_s for one in going)
    assert going == sorted(stored, key=lambda one: one.at_s)[: len(going)]
    assert total - sum(one.num_bytes for one in going) <= max_bytes
    assert not going or total - sum(one.num_bytes for one in going[:-1]) > FILL_SHARE * max_bytes


def test_the_deeper_a_block_lies_in_its_chain_the_sooner_it_goes():
    assert used_at_s(100.0, 0) == 100.0 > used_at_s(100.0, 1) > used_at_s(100.0, 500)
