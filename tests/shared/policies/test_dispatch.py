"""Dispatch policies, on candidates that are plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.policies.catalogue import DISPATCH_POLICIES, dispatch_policy
from shared.policies.dispatch import (
    GRAIN_S,
    NUM_TIMED,
    Candidate,
    DispatchParameters,
    DispatchPolicy,
    DispatchView,
    ReportedFreeness,
    freeness_with_ledger,
)
from shared.policies.token_cost import MARGIN


@dataclass
class Plain:
    """A candidate."""

    instance_id: str
    view: DispatchView
    missing_merged: float = -1.0
    demand_merged: float = 4.0
    in_flight_merged: float = 0.0
    left_merged: float = 10.0
    start_s: float = 0.0
    prompt_s: float = 0.0
    token_s: float = 0.0


@dataclass
class Request:
    model: str = "m"
    num_prompt: int = 10
    num_tokens: int = 10
    num_tokens_at_most: int = 20
    is_high: bool = False
    arrived_s: float = 0.0


@dataclass
class Offered:
    """Candidates, of which all that is asked is remembered."""

    ranked: Sequence[Plain]
    owner: str = ""
    may_wait: bool = True
    num_defragmenting: int = 0
    num_serving: int = 4
    asked: list[str] = field(default_factory=list)

    def first(self, limit: int, until: Callable[[Candidate], bool] | None = None) -> list[Plain]:
        found: list[Plain] = []
        for plain in self.ranked[:limit]:
            self.asked.append(plain.instance_id)
            found.append(plain)
            if until is not None and until(plain):
                break
        return found

    def cached(self, limit: int) -> list[Plain]:
        return [plain for plain in self.ranked if plain.instance_id in self.owner][:limit]


def choose(
    policy: str | DispatchPolicy,
    *plain: Plain,
    share: float = 1.0,
    is_high: bool = False,
    **offer: object,
) -> str:
    """The chosen instance's id, or empty."""
    if isinstance(policy, str):
        policy = dispatch_policy(policy, DispatchParameters(share))
    ranked = sorted(plain, key=lambda one: (policy.rank(one.view), one.instance_id))
    chosen = policy.choose(Request(is_high=is_high), Offered(ranked, **offer))  # type: ignore[arg-type]
    return chosen.instance_id if chosen is not None else ""


def chosen(policy: str, views: dict[str, DispatchView]) -> str:
    return choose(policy, *(Plain(name, view) for name, view in views.items()))


def free(name: str, freeness: float, missing_merged: float = -1.0, **changes: float) -> Plain:
    return Plain(name, DispatchView(freeness, 3, 0), missing_merged, **changes)


VIEWS = {
    "a": DispatchView(freeness=5.0, num_requests=9, last_turn=3),
    "b": DispatchView(freeness=7.0, num_requests=4, last_turn=2),
    "c": DispatchView(freeness=7.0, num_requests=2, last_turn=4),
    "d": DispatchView(freeness=-math.inf, num_requests=1, last_turn=1),
}


class TestPolicies:
    def test_freeness_takes_the_freest_and_breaks_ties_by_fewer_requests(self) -> None:
        assert chosen("freeness", VIEWS) == "c"

    def test_fewest_requests(self) -> None:
        assert chosen("fewest_requests", VIEWS) == "d"

    def test_round_robin_takes_the_least_recently_chosen(self) -> None:
        assert chosen("round_robin", VIEWS) == "d"

    def test_idle_instances_come_before_all_others(self) -> None:
        views = {**VIEWS, "e": DispatchView(math.inf, 0, 0)}
        assert {chosen(policy, views) for policy in DISPATCH_POLICIES} == {"e"}


class TestFreest:
    @pytest.mark.parametrize("policy", ["freeness", "first_token"])
    def test_memory_comes_first_and_then_where_least_is_missing(self, policy: str) -> None:
        assert choose(policy, free("a", 9, 2.0), free("b", 5), free("c", 7, 1.0)) == "b"
        assert choose(policy, free("a", 9, 2.0), free("b", 5, 3.0), free("c", 7, 1.0)) == "c"

    def test_few_gather_memory_unless_the_request_has_waited_for_long(self) -> None:
        full = [free(name, 1, 2.0) for name in "abcd"]
        assert choose("freeness", *full, share=0.5, num_defragmenting=1) == "a"
        assert choose("freeness", *full, share=0.5, num_defragmenting=2) == ""
        assert choose("freeness", *full, share=0.5, num_defragmenting=2, may_wait=False) == "a"
        in_pieces = [free(name, 1, 2.0, left_merged=1.0, demand_merged=4.0) for name in "abcd"]
        assert choose("freeness", *in_pieces, share=0.5) == "a"
        assert choose("freeness", *in_pieces[1:], share=0.5) == "", "not even together"

    def test_the_cache_decides_among_equals(self) -> None:
        assert choose("freeness", free("a", 5), free("b", 5), owner="b") == "b"
        assert choose("freeness", free("a", 5), free("b", 4), owner="b") == "a"
        assert choose("freeness", free("a", 5), free("b", 5, 1.0), owner="b") == "a", "no memory there"

    def test_the_time_to_the_first_token_decides_where_there_is_memory(self) -> None:
        late, soon = free("a", 9, start_s=2.0), free("b", 5, start_s=0.5)
        assert choose("first_token", late, soon) == "b" and choose("freeness", late, soon) == "a"
        assert choose("first_token", late, free("b", 9, start_s=0.5, prompt_s=1.0), owner="a") == "b"
        assert choose("first_token", late, free("b", 9, start_s=0.5, prompt_s=1.7), owner="a") == "a"

    def test_its_own_prompt_counts_so_a_slow_one_that_is_free_is_no_better_than_a_fast_one_soon(self) -> None:
        slow, fast = free("slow", math.inf, prompt_s=2.0), free("fast", 5, start_s=0.2, prompt_s=0.4)
        assert choose("first_token", slow, fast) == "fast"
        assert choose("first_token", slow, fast, is_high=True) == "fast"

    def test_of_those_that_are_as_soon_one_that_has_the_prompt_cached_takes_it_even_beside_an_idle_one(self) -> None:
        idle, owner = (
            free("idle", math.inf, prompt_s=0.06, token_s=0.01),
            free("owner", 5, prompt_s=0.01, token_s=0.012),
        )
        assert choose("first_token", idle, owner, owner="owner") == "owner"
        assert choose("freeness", idle, owner, owner="owner") == "idle"
        crowded = free("owner", 5, prompt_s=0.01, token_s=0.02)
        assert choose("first_token", idle, crowded, owner="owner") == "idle", (
            "others with the prefix would gather there"
        )
        hardly = free("owner", 5, prompt_s=0.056, token_s=0.01)
        assert choose("first_token", idle, hardly, owner="owner") == "idle", "it spares too little"
        learnt = free("learnt", 5, prompt_s=0.95, token_s=0.01)
        assert choose("first_token", free("idle", math.inf, prompt_s=1.0, token_s=0.01), learnt) == "idle", (
            "about the same"
        )
        full = free("owner", 5, 1.0, prompt_s=0.01, token_s=0.01)
        assert choose("first_token", idle, full, owner="owner") == "idle", "no memory there"

    def test_owners_are_found_behind_many_that_are_freer(self) -> None:
        many = [free(f"i{number:03}", 99, prompt_s=0.5) for number in range(NUM_TIMED)]
        assert choose("first_token", *many, free("owner", 5, prompt_s=0.1), owner="owner") == "owner"

    def test_what_its_tokens_cost_decides_among_those_that_begin_as_soon(self) -> None:
        dear, cheap = free("a", 9, token_s=0.05), free("b", 5, token_s=0.02)
        assert choose("first_token", dear, cheap) == "b" and choose("freeness", dear, cheap) == "a"
        assert choose("first_token", free("a", 9, token_s=0.02 * (1 + MARGIN)), cheap) == "a", "hardly more"
        late = free("b", 5, token_s=0.02, start_s=2 * GRAIN_S)
        assert choose("first_token", dear, late) == "a"
        assert choose("first_token", dear, free("b", 5, 1.0, token_s=0.02)) == "a", "no memory there"
        assert choose("first_token", dear, cheap, free("c", 4)) == "b", "that it is not known makes none the first"
        assert choose("first_token", free("a", 9), cheap) == "a", "nor the last"
        assert choose("first_token", dear, cheap, is_high=True) == "a"
        assert choose("first_token", dear, cheap, owner="a") == "b", (
            "nor does a cache of which the prompt's time knows nothing"
        )
        assert (
            choose("first_token", free("c", 9, token_s=0.02), free("d", 9, token_s=0.05), owner="d", is_high=True)
            == "d"
        )
        assert choose("first_token", free("a", 9, token_s=0.021), cheap, free("c", 10, token_s=0.05), owner="a") == "a"

    def test_not_all_instances_are_looked_at(self) -> None:
        policy = dispatch_policy("first_token", DispatchParameters())
        offered = Offered([free(f"{number:03}", -5, 1.0) for number in range(300)])
        assert policy.choose(Request(), offered) is not None and len(set(offered.asked)) == 64


class TestFreenessWithLedger:
    def test_nothing_in_flight_changes_nothing(self) -> None:
        assert freeness_with_ledger(ReportedFreeness(3.5, 4, 20), 0, 0) == 3.5
        assert freeness_with_ledger(ReportedFreeness(math.inf, 0, 20), 0, 0) == math.inf

    def test_what_is_in_flight_counts_as_running(self) -> None:
        # 4 running with 5 blocks each to spare; one more of 2 blocks: (20 - 2) / 5.
        assert freeness_with_ledger(ReportedFreeness(5.0, 4, 99), 2.0, 1) == pytest.approx(3.6)

    def test_an_idle_instance_has_its_free_blocks(self) -> None:
        assert freeness_with_ledger(ReportedFreeness(math.inf, 0, 20), 2.0, 1) == 18

    def test_draining_stays_last_and_nonsense_counts_as_draining(self) -> None:
        assert freeness_with_ledger(ReportedFreeness(-math.inf, 3, 20), 2.0, 1) == -math.inf
        assert freeness_with_ledger(ReportedFreeness(math.nan, 3, 20), 0, 0) == -math.inf
        assert ReportedFreeness(math.nan, 3, 20).left_merged == -math.inf

    @given(st.floats(0, 1e4), st.integers(0, 100), st.floats(0, 1e4), st.floats(0, 10), st.integers(1, 10))
    def test_work_in_flight_never_makes_an_instance_freer(
        self, freeness: float, num_running: int, free: float, demand: float, count: int
    ) -> None:
        reported = ReportedFreeness(freeness, num_running, free)
        assert freeness_with_ledger(reported, demand, count) <= freeness_with_ledger(reported, 0, 0) + 1e-9


@given(st.lists(st.floats(0, 100), min_size=1, max_size=NUM_TIMED))
def test_the_freest_that_begins_about_as_soon_as_any_takes_a_request(starts_s: list[float]) -> None:
    names = [f"{number:02}" for number in range(len(starts_s))]
    first = choose(
        "first_token", *(free(name, 5, start_s=start_s) for name, start_s in zip(names, starts_s, strict=True))
    )
    soon = [name for name, start_s in zip(names, starts_s, strict=True) if start_s <= min(starts_s) + GRAIN_S]
    assert first == soon[0]
