"""Virtual token counters: who is next, what is owed after an absence, and how far two backlogged tenants can be apart."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.policies.tenant_shares import CREDIT_S, MAX_AWAY, TenantShares

TENANTS = ["a", "b", "c"]
MAX_BEGUN = 3
"""Prompts that are begun and not computed."""
seconds = st.floats(0.001, 2.0)


def shares(*tenants: str, **weights: float) -> TenantShares:
    made = TenantShares()
    for tenant in tenants:
        made.enter(tenant, weights.get(tenant, 1.0))
    return made


def test_service_counts_by_weight() -> None:
    two = shares("a", "b", a=2.0)
    two.charge("a", 1.0)
    two.charge("b", 1.0)
    assert (two.key("a"), two.key("b")) == (0.5, 1.0)
    assert two.share("a") == pytest.approx(2 / 3)


def test_what_was_promised_counts_until_it_is_taken_back_or_its_tenant_is_away() -> None:
    two = shares("a", "b")
    two.promise("a", 3.0)
    assert two.key("a") == 3.0 > two.key("b") and two.served_s("a") == 0.0
    two.charge("a", 1.0)
    two.promise("a", -1.0)
    assert two.key("a") == 3.0
    two.leave("a")
    two.enter("a", 1.0)
    assert two.key("a") == 1.0


def test_whoever_was_away_has_no_more_credit_than_a_little_and_keeps_what_it_owes() -> None:
    two = shares("a", "b")
    two.leave("b")
    two.charge("a", 100.0)
    two.enter("b", 1.0)
    assert two.key("b") == 100.0 - CREDIT_S
    two.charge("b", 50.0)
    two.leave("b")
    two.enter("b", 1.0)
    assert two.key("b") == 150.0 - CREDIT_S, "going away does not pay"


def test_tenants_that_come_one_after_another_go_in_that_order() -> None:
    """One that lowered what the next is lifted to would go after it, and who came first would wait for ever."""
    some = shares("a")
    some.charge("a", 100.0)
    keys = []
    for number in range(5):
        some.enter(str(number), 1.0)
        keys.append(some.key(str(number)))
    assert keys == [100.0 - CREDIT_S] * 5


def test_tenants_that_come_for_one_request_each_do_not_keep_another_waiting_for_ever() -> None:
    some = shares("a")
    some.charge("a", 100.0)
    some.enter("waits", 1.0)
    some.charge("waits", 2 * CREDIT_S)
    for number in range(1000):
        some.enter(str(number), 1.0)
        if some.key("waits") < some.key(str(number)):
            break
        some.charge(str(number), 0.1)
        if number:
            some.leave(str(number - 1))
    assert number < 100


@pytest.mark.parametrize("weight", [0.001, 1.0, 1000.0])
def test_the_credit_is_the_same_service_whatever_the_unit_of_the_weights(weight: float) -> None:
    two = shares("a", a=weight)
    two.charge("a", 100.0)
    two.enter("b", weight)
    two.charge("b", 0.99 * CREDIT_S)
    assert two.key("b") < two.key("a")
    two.charge("b", 0.02 * CREDIT_S)
    assert two.key("b") > two.key("a")


def test_a_request_that_takes_little_hoards_no_credit_for_those_that_come_later() -> None:
    two = shares("a", "slow")
    for _ in range(600):
        two.promise("a", 0.9)
        two.charge("a", 0.9)
        two.promise("a", -0.9)
        two.charge("slow", 0.1)
    two.enter("slow", 1.0)
    two.enter("new", 1.0)
    assert two.key("a") - two.key("slow") <= CREDIT_S + 0.9
    assert two.key("a") - two.key("new") <= CREDIT_S + 0.9


def test_sums_over_tenants_are_kept_as_they_come_and_go() -> None:
    some = shares("a", "b", b=3.0)
    some.enter("b", 5.0)
    some.enter("c", 2.0)
    assert some.share("b") == pytest.approx(5 / 8)
    assert some.is_behind("b") is False and some.num_here("b") == 2
    some.leave("b")
    some.leave("b")
    assert some.share("c") == pytest.approx(2 / 3)


def test_service_while_nobody_else_is_there_is_not_held_against_a_tenant() -> None:
    one = shares("a")
    one.charge("a", 100.0)
    one.leave("a")
    one.enter("b", 1.0)
    one.enter("a", 1.0)
    assert one.key("a") - one.key("b") <= CREDIT_S


def test_tenants_that_are_away_are_forgotten_beyond_a_bound() -> None:
    many = TenantShares()
    many.enter("stays", 1.0)
    for number in range(3 * MAX_AWAY):
        many.enter(str(number), 1.0)
        many.charge(str(number), 1.0 + number)
        many.leave(str(number))
    assert len(many._away) <= MAX_AWAY
    many.enter(str(3 * MAX_AWAY - 1), 1.0)
    assert many.key(str(3 * MAX_AWAY - 1)) >= 3 * MAX_AWAY, "those that owe most are remembered"


@given(
    weights=st.lists(st.floats(0.1, 10.0), min_size=3, max_size=3),
    services=st.lists(st.tuples(st.booleans(), seconds), min_size=30, max_size=120),
)
def test_weighted_service_of_backlogged_tenants_differs_by_no_more_than_the_bound(
    weights: list[float], services: list[tuple[bool, float]]
) -> None:
    all_of_them = shares(*TENANTS, **dict(zip(TENANTS, weights, strict=True)))
    served = dict.fromkeys(TENANTS, 0.0)
    begun: list[tuple[str, float]] = []
    largest_s = 0.0
    for ends, work_s in services:
        tenant = min(TENANTS, key=all_of_them.key)
        all_of_them.promise(tenant, work_s)
        begun.append((tenant, work_s))
        largest_s = max(largest_s, work_s / weights[TENANTS.index(tenant)])
        while begun and (ends or len(begun) == MAX_BEGUN):
            tenant, work_s = begun.pop(0)
            all_of_them.charge(tenant, work_s)
            all_of_them.promise(tenant, -work_s)
            served[tenant] += work_s / weights[TENANTS.index(tenant)]
        for tenant in TENANTS:
            assert all_of_them.served_s(tenant) == pytest.approx(served[tenant], abs=1e-6)
        assert max(served.values()) - min(served.values()) <= (1 + MAX_BEGUN) * largest_s + 1e-6


@given(events=st.lists(st.tuples(st.sampled_from(["come", "go", "serve", "begin"]), st.sampled_from(TENANTS), seconds)))
def test_nobody_who_comes_is_ahead_of_all_by_more_than_the_credit(events: list[tuple[Any, ...]]) -> None:
    some = TenantShares()
    num_here = dict.fromkeys(TENANTS, 0)
    for kind, tenant, amount_s in events:
        here = [other for other in TENANTS if num_here[other]]
        if kind == "come":
            least_s = min((some.served_s(other) for other in here), default=None)
            some.enter(tenant, 1.0)
            num_here[tenant] += 1
            if least_s is not None:
                assert some.served_s(tenant) >= least_s - CREDIT_S - 1e-9
        elif num_here[tenant]:
            if kind == "go":
                some.leave(tenant)
                num_here[tenant] -= 1
            elif kind == "serve":
                some.charge(tenant, amount_s)
            else:
                some.promise(tenant, amount_s)
        assert set(some) == {other for other in TENANTS if num_here[other]}
        assert some.are_several == (sum(num > 0 for num in num_here.values()) > 1)
