"""Which blocks are worth a copy down, and which the way back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.policies.kv_tiers import (
    MIN_BLOCKS,
    PRIOR_RATE,
    BlockKind,
    HitRates,
    is_worth_keeping,
    is_worth_reading,
)

ONLINE, BATCH = BlockKind(True, False), BlockKind(False, False)
seconds = st.floats(1e-6, 10.0)


def test_a_kind_that_is_found_again_is_told_from_one_that_is_not():
    rates = HitRates(100)
    assert rates.rate(ONLINE) == rates.rate(BATCH) == PRIOR_RATE
    for number in range(2000):
        name = number.to_bytes(4, "big")
        rates.leaves(b"o" + name, ONLINE)
        rates.leaves(b"b" + name, BATCH)
        if number % 4:
            rates.is_wanted(b"o" + name)
    assert 0.7 < rates.rate(ONLINE) < 0.8 and rates.rate(BATCH) < 0.05


def test_what_the_device_has_still_says_nothing():
    rates = HitRates(10)
    for number in range(1000):
        name = number.to_bytes(4, "big")
        rates.leaves(name, ONLINE)
        rates.stays(name)
        rates.is_wanted(name)
    assert rates.rate(ONLINE) == PRIOR_RATE


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["leaves", "stays", "wanted"])), max_size=300))
def test_rates_stay_within_bounds_and_no_more_than_the_horizon_is_remembered(events):
    rates = HitRates(5)
    for name, event in events:
        key = bytes([name])
        if event == "leaves":
            rates.leaves(key, ONLINE)
        elif event == "stays":
            rates.stays(key)
        else:
            rates.is_wanted(key)
        assert 0.0 < rates.rate(ONLINE) < 1.0 and len(rates._leaving) <= 5


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
