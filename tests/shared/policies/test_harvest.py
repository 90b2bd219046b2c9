from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages.batches import OfflineDemand, OfflineGrant
from shared.policies.harvest import allocate, is_under_pressure, max_min

DAY_S = 86400.0


def demand(
    batch: str,
    tenant: str = "t",
    wanted: int = 1000,
    *,
    model: str = "m",
    unfinished: int = 1000,
    slack_s: float = DAY_S,
    weight: float = 1.0,
) -> OfflineDemand:
    return OfflineDemand(batch, tenant, model, wanted, unfinished, slack_s, weight)


def granted(demands: list[OfflineDemand], room: int, rate: float = 0.0) -> dict[str, int]:
    return {grant.batch_id: grant.tokens for grant in allocate(demands, {"m": room}, {"m": rate})}


def test_tenants_share_and_then_their_batches() -> None:
    demands = [demand("a1", "a"), demand("a2", "a"), demand("a3", "a"), demand("b1", "b")]
    assert granted(demands, 600) == {"a1": 100, "a2": 100, "a3": 100, "b1": 300}


def test_what_one_does_not_want_goes_to_the_others() -> None:
    assert granted([demand("a", "a", 50), demand("b", "b"), demand("c", "c")], 650) == {"a": 50, "b": 300, "c": 300}
    assert granted([demand("a", "a", 50), demand("b", "b", 60)], 650) == {"a": 50, "b": 60}


def test_weights_set_the_tenants_shares() -> None:
    assert granted([demand("a", "a", weight=3.0), demand("b", "b")], 400) == {"a": 300, "b": 100}
    assert sum(granted([demand("a", "a", weight=0.0), demand("b", "b", weight=-1.0)], 400).values()) == 400


def test_batches_that_would_miss_their_deadline_go_first_earliest_first() -> None:
    demands = [
        demand("calm", "a"),
        demand("near", "b", 300, unfinished=90_000, slack_s=1000.0),
        demand("nearest", "b", 200, unfinished=50_000, slack_s=500.0),
    ]
    assert granted(demands, 300, rate=100.0) == {"calm": 75, "near": 38, "nearest": 187}, "half of it goes by need"
    assert granted(demands, 900, rate=100.0) == {"calm": 400, "near": 300, "nearest": 200}
    assert granted(demands, 400, rate=1e6) == {"calm": 200, "near": 100, "nearest": 100}
    assert granted(demands, 400) == {"calm": 200, "near": 100, "nearest": 100}, "no throughput is known"


def test_batches_that_cannot_make_it_anyway_do_not_go_first() -> None:
    late = demand("late", "b", unfinished=90_000, slack_s=100.0)
    over = demand("over", "c", unfinished=90_000, slack_s=-1.0)
    assert granted([demand("calm", "a"), late, over], 300, rate=100.0) == {"calm": 100, "late": 100, "over": 100}


def test_models_have_room_of_their_own() -> None:
    demands = [demand("a", model="x"), demand("b", model="y"), demand("a", model="y"), demand("c", model="z")]
    grants = allocate(demands, {"x": 10, "y": 20, "z": -5}, {})
    assert grants == [
        OfflineGrant("a", 10, "x"),
        OfflineGrant("b", 10, "y"),
        OfflineGrant("a", 10, "y"),
        OfflineGrant("c", 0, "z"),
    ]
    assert allocate([demand("a")], {}, {}) == [OfflineGrant("a", 0, "m")]
    assert allocate([], {"m": 5}, {}) == []


demand_lists = st.lists(
    st.builds(
        OfflineDemand,
        batch_id=st.uuids().map(str),
        tenant=st.sampled_from("abc"),
        model=st.sampled_from("xy"),
        wanted_tokens=st.integers(0, 5000),
        unfinished_tokens=st.integers(0, 10**7),
        slack_s=st.floats(-100, DAY_S),
        weight=st.floats(0.1, 10),
    ),
    max_size=12,
)
rooms = st.fixed_dictionaries({"x": st.integers(0, 20_000), "y": st.integers(0, 20_000)})
rates = st.fixed_dictionaries({"x": st.floats(0, 1000), "y": st.floats(0, 1000)})


@settings(deadline=None)
@given(demand_lists, rooms, rates)
def test_all_room_is_used_and_no_more(
    demands: list[OfflineDemand], room: dict[str, int], rate: dict[str, float]
) -> None:
    grants = allocate(demands, room, rate)
    given: dict[str, int] = defaultdict(int)
    wanted: dict[str, int] = defaultdict(int)
    for grant, asked in zip(grants, demands, strict=True):
        assert (grant.batch_id, grant.model) == (asked.batch_id, asked.model)
        assert 0 <= grant.tokens <= asked.wanted_tokens
        given[asked.model] += grant.tokens
        wanted[asked.model] += asked.wanted_tokens
    for model in wanted:
        assert given[model] == min(room[model], wanted[model])


@settings(deadline=None)
@given(demand_lists, rooms, rates)
def test_pressure_only_raises_a_batchs_share(
    demands: list[OfflineDemand], room: dict[str, int], rate: dict[str, float]
) -> None:
    """Against the same batch with time to spare, all others as they were and calm."""
    calm = [OfflineDemand(d.batch_id, d.tenant, d.model, d.wanted_tokens, 0, DAY_S, d.weight) for d in demands]
    before = allocate(calm, room, rate)
    for index, pressed in enumerate(demands):
        after = allocate([*calm[:index], pressed, *calm[index + 1 :]], room, rate)[index]
        assert after.tokens >= before[index].tokens - len(demands), "but for rounding"
        if is_under_pressure(pressed, rate[pressed.model]):
            assert after.tokens >= min(room[pressed.model] // 2, pressed.wanted_tokens)


@settings(deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(st.tuples(st.integers(0, 3000), st.floats(0.01, 100)), max_size=15),
)
def test_max_min_is_fair_to_within_rounding(room: int, entries: list[tuple[int, float]]) -> None:
    wanted = [num for num, _ in entries]
    weights = [weight for _, weight in entries]
    shares = max_min(room, wanted, weights)
    assert sum(shares) == min(room, sum(wanted))
    for index, share in enumerate(shares):
        assert 0 <= share <= wanted[index]
        if share < wanted[index]:
            for other, weight in enumerate(weights):
                # Who wants more has no less for its weight than anybody, but for tokens lost to rounding.
                assert (share + 1) / weights[index] >= (shares[other] - len(entries)) / weight


@pytest.mark.parametrize("num_rounds", [50])
def test_tenants_are_equal_over_time_whatever_their_number_of_batches(num_rounds: int) -> None:
    total: dict[str, int] = defaultdict(int)
    demands = [demand(f"a{index}", "a") for index in range(9)] + [demand("b", "b")]
    for round_number in range(num_rounds):
        for grant, asked in zip(allocate(demands, {"m": 100 + round_number}, {}), demands, strict=True):
            total[asked.tenant] += grant.tokens
    assert abs(total["a"] - total["b"]) <= num_rounds
