from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.policies.checkpointing import (
    AdaptiveCheckpoint,
    PoolView,
    SmoothedRate,
    blocks_to_restore,
    restore_key,
    unsaved_blocks,
    victim_key,
)

VIEW = PoolView(
    used_share=0.75,
    free_blocks=250,
    growth_blocks_per_s=0.0,
    saved_blocks=0,
    unsaved_blocks=600,
    step_s=0.1,
)


def test_nothing_is_copied_below_the_start() -> None:
    policy = AdaptiveCheckpoint(0.5)
    assert policy.blocks_now(VIEW._replace(used_share=0.49, growth_blocks_per_s=1e6)) == 0


@given(
    start=st.floats(0, 1),
    online=st.floats(0, 1),
    used=st.floats(0, 1),
    has_offline=st.booleans(),
    growth=st.floats(0, 1e6),
)
def test_nothing_is_copied_below_what_the_policy_names(start, online, used, has_offline, growth) -> None:
    policy = AdaptiveCheckpoint(start, online_start_share=online)
    view = VIEW._replace(
        used_share=used, growth_blocks_per_s=growth, unsaved_blocks=600 if has_offline else 0, unsaved_online_blocks=600
    )
    assert used >= policy.starts_at(has_offline=has_offline) or policy.blocks_now(view) == 0


def test_the_saved_share_follows_the_pool() -> None:
    policy = AdaptiveCheckpoint(0.5)
    assert policy.blocks_now(VIEW._replace(used_share=0.5)) == 0
    assert policy.blocks_now(VIEW) == 300
    assert policy.blocks_now(VIEW._replace(saved_blocks=300, unsaved_blocks=300)) == 0
    assert policy.blocks_now(VIEW._replace(used_share=1.0, free_blocks=0)) == 600


def test_the_speed_follows_consumption() -> None:
    policy = AdaptiveCheckpoint(0.5)
    low = VIEW._replace(used_share=0.51, saved_blocks=100, unsaved_blocks=500)
    assert policy.blocks_now(low) == 0
    assert policy.blocks_now(low._replace(growth_blocks_per_s=50.0)) == 15  # 750 in 5 s
    assert policy.blocks_now(low._replace(growth_blocks_per_s=2500.0)) == 500
    assert policy.blocks_now(low._replace(growth_blocks_per_s=-50.0)) == 0


def test_online_blocks_are_saved_only_under_pressure() -> None:
    policy = AdaptiveCheckpoint(0.5, online_start_share=0.9)
    online = VIEW._replace(unsaved_blocks=0, unsaved_online_blocks=100)
    assert policy.blocks_now(online._replace(used_share=0.89)) == 0
    assert policy.blocks_now(online._replace(used_share=0.95)) == 50


views = st.builds(
    PoolView,
    st.floats(0, 1),
    st.integers(0, 1000),
    st.floats(-1e3, 1e5),
    st.integers(0, 500),
    st.integers(0, 500),
    st.floats(0, 1),
    st.integers(0, 500),
    st.integers(0, 500),
)


@settings(deadline=None)
@given(views, st.floats(0, 1))
def test_never_more_than_there_is(view: PoolView, start: float) -> None:
    num = AdaptiveCheckpoint(start).blocks_now(view)
    assert 0 <= num <= view.unsaved_blocks + view.unsaved_online_blocks


@settings(deadline=None)
@given(st.integers(10, 400), st.floats(0.01, 0.2))
def test_all_is_saved_when_the_pool_is_full(growth_blocks_per_s: int, step_s: float) -> None:
    """Offline sequences fill a pool of 1,000 blocks."""
    policy = AdaptiveCheckpoint(0.5)
    used, saved = 0.0, 0
    while used < 1000:
        num_used = int(used)
        saved += policy.blocks_now(
            PoolView(
                used_share=used / 1000,
                free_blocks=1000 - num_used,
                growth_blocks_per_s=growth_blocks_per_s,
                saved_blocks=saved,
                unsaved_blocks=num_used - saved,
                step_s=step_s,
            )
        )
        used += growth_blocks_per_s * step_s
    assert saved >= 1000 - 2 * growth_blocks_per_s * step_s - 2, "all but what the last step filled"


class Held(NamedTuple):
    number: int
    priority_class: int = 2
    num_computed: int = 0
    num_checkpointed_blocks: int = 0
    deadline_s: float = 100.0
    last_ran_s: float = 0.0


def test_victims_lose_the_least_work() -> None:
    online = Held(0, priority_class=1)
    saved_long = Held(1, num_computed=330, num_checkpointed_blocks=20)  # all but the partly filled last block
    saved_late = Held(2, num_computed=32, num_checkpointed_blocks=2, deadline_s=200.0)
    unsaved_short = Held(3, num_computed=40)
    unsaved_long = Held(4, num_computed=400)
    newest = Held(5, num_computed=400)
    sequences = [online, unsaved_long, saved_long, newest, unsaved_short, saved_late]
    order = sorted(sequences, key=lambda sequence: victim_key(sequence, 16))
    assert order == [saved_late, saved_long, unsaved_short, newest, unsaved_long, online]
    assert [unsaved_blocks(sequence, 16) for sequence in order] == [0, 0, 2, 25, 25, 0]


def test_one_victim_that_frees_enough_comes_before_many_small_ones() -> None:
    small, middle, large = Held(0, num_computed=40), Held(1, num_computed=400), Held(2, num_computed=800)

    def order(enough_blocks: float) -> list[Held]:
        return sorted([large, middle, small], key=lambda sequence: victim_key(sequence, 16, enough_blocks))

    assert order(0) == [small, middle, large]
    assert order(20) == [middle, large, small]
    assert order(100) == [large, middle, small], "none alone: as few as will do"


def test_restores_by_class_then_deadline_then_wait() -> None:
    online = Held(0, priority_class=0, deadline_s=1e9)
    near = Held(1, deadline_s=50.0, last_ran_s=9.0)
    waited = Held(2, last_ran_s=1.0)
    recent = Held(3, last_ran_s=8.0)
    assert sorted([recent, waited, near, online], key=restore_key) == [online, near, waited, recent]


def test_restores_are_spread_over_steps() -> None:
    assert blocks_to_restore(0.05, 0.001, 200) == 50
    assert blocks_to_restore(0.05, 0.001, 20) == 20
    assert blocks_to_restore(-0.1, 0.001, 200) == 1, "a long sequence comes back under any budget"
    assert blocks_to_restore(0.05, 0.001, 0) == 0
    assert blocks_to_restore(0.0, 0.0, 200) == 200


def test_the_smoothed_rate_follows_and_forgets() -> None:
    rate = SmoothedRate(window_s=1.0)
    for _ in range(100):
        rate.add(5, 0.1)
    assert rate.per_s == pytest.approx(50, rel=1e-3)
    rate.add(0, 10.0)
    assert rate.per_s == pytest.approx(0, abs=0.01)
    rate.add(7, 0.0)
    assert rate.per_s == pytest.approx(0, abs=0.01)
