"""Dispatch policies, the in-flight ledger, the candidate index and prefix affinity."""

from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.policies.dispatch import (
    DISPATCH_POLICIES,
    GRAIN_S,
    CandidateIndex,
    DispatchView,
    InFlight,
    InFlightLedger,
    PrefixAffinity,
    Rank,
    ReportedFreeness,
    freeness_with_ledger,
    soonest,
)


def chosen(policy: str, views: dict[str, DispatchView]) -> str:
    rank = DISPATCH_POLICIES[policy]
    return min(views, key=lambda name: (rank(views[name]), name))


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


class TestLedger:
    def test_entries_are_summed_per_instance(self) -> None:
        ledger = InFlightLedger()
        ledger.add("r1", "a", InFlight("m", True, 1.5))
        ledger.add("r2", "a", InFlight("n", True, 0.5))
        ledger.add("r3", "a", InFlight("m", False, 4.0))
        ledger.add("r4", "b", InFlight("m", True, 1.0))
        assert ledger.num_requests("a") == 3
        assert ledger.demand_merged("a") == 2.0, "offline work is not load"
        assert ledger.num_waiting("a", "m", online_only=False) == 2
        assert ledger.num_waiting("a", "m", online_only=True) == 1
        assert ledger.where("r4") == "b" and "r4" in ledger

    def test_removing_twice_does_nothing(self) -> None:
        ledger = InFlightLedger()
        ledger.add("r1", "a", InFlight("m", True, 1.5))
        assert ledger.remove("r1") == "a"
        assert ledger.remove("r1") is None
        assert len(ledger) == 0 and ledger.demand_merged("a") == 0

    def test_a_request_is_in_flight_to_one_instance(self) -> None:
        ledger = InFlightLedger()
        ledger.add("r1", "a", InFlight("m", True, 1.5))
        with pytest.raises(AssertionError):
            ledger.add("r1", "b", InFlight("m", True, 1.5))


names = st.sampled_from([f"i{n}" for n in range(8)])


class TestCandidateIndex:
    @given(st.lists(st.tuples(names, st.none() | st.integers(0, 3), st.booleans()), max_size=60))
    def test_best_equals_a_full_scan(self, changes: list[tuple[str, int | None, bool]]) -> None:
        ranks: dict[str, Rank] = {}
        index = CandidateIndex(ranks.get)
        for name, rank, is_even_fit in changes:
            if rank is None:
                ranks.pop(name, None)
            else:
                ranks[name] = (float(rank),)
            index.touch(name)

            def is_fit(name: str, is_even_fit: bool = is_even_fit) -> bool:
                return not is_even_fit or int(name[1:]) % 2 == 0

            expected = min(((rank, name) for name, rank in ranks.items() if is_fit(name)), default=(None, None))[1]
            assert index.best(is_fit) == expected
            in_order = [name for _, name in sorted((rank, name) for name, rank in ranks.items() if is_fit(name))]
            assert index.first(3, is_fit) == in_order[:3]
            assert index.is_empty() == (not ranks)
            assert (name in index) == (name in ranks)

    def test_only_touched_instances_are_ranked_again(self) -> None:
        asked: list[str] = []

        def rank_of(name: str) -> Rank:
            asked.append(name)
            return (1.0,)

        index = CandidateIndex(rank_of)
        for name in ("a", "b", "c"):
            index.touch(name)
        assert index.best(lambda _: True) == "a"
        asked.clear()
        index.touch("b")
        index.touch("b")
        assert index.best(lambda _: True) == "a"
        assert asked == ["b"]

    def test_the_heap_stays_small(self) -> None:
        turn = 0
        index = CandidateIndex(lambda name: (float(turn),))
        for turn in range(5000):  # noqa: B007
            index.touch("a")
            assert index.best(lambda _: True) == "a"
        assert len(index._heap) < 100


def tokens(*values: int) -> bytes:
    return array("i", values).tobytes()


class TestPrefixAffinity:
    def test_the_longest_known_prefix_wins(self) -> None:
        affinity = PrefixAffinity(chunk_tokens=2)
        affinity.record("m", tokens(1, 2, 3, 4), "a")
        affinity.record("m", tokens(1, 2, 9, 9), "b")
        assert affinity.likely_owner("m", tokens(1, 2, 3, 4, 5, 6)) == "a"
        assert affinity.likely_owner("m", tokens(1, 2, 9, 9)) == "b"
        assert affinity.likely_owner("m", tokens(1, 2, 7, 7)) == "b", "the last one to get the shared chunk"
        assert affinity.likely_owner("m", tokens(2, 2, 3, 4)) is None
        assert affinity.likely_owner("other", tokens(1, 2, 3, 4)) is None

    def test_a_chunk_counts_only_after_the_same_beginning(self) -> None:
        affinity = PrefixAffinity(chunk_tokens=2)
        affinity.record("m", tokens(1, 2, 3, 4), "a")
        assert affinity.likely_owner("m", tokens(3, 4)) is None

    def test_memory_is_bounded_and_the_least_recent_goes_first(self) -> None:
        affinity = PrefixAffinity(chunk_tokens=1, max_chunks=1, max_entries=3)
        for value in range(4):
            affinity.record("m", tokens(value), f"i{value}")
        assert affinity.likely_owner("m", tokens(0)) is None
        assert affinity.likely_owner("m", tokens(3)) == "i3"


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_the_first_that_begins_about_as_soon_as_any_takes_a_request(starts_s: list[float]) -> None:
    chosen = soonest(starts_s)
    assert starts_s[chosen] <= min(starts_s) + GRAIN_S
    assert all(start_s > min(starts_s) + GRAIN_S for start_s in starts_s[:chosen])
