"""The in-flight ledger and the candidate index."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.policies.dispatch import DispatchKey
from shared.scheduling.candidates import CandidateIndex
from shared.scheduling.in_flight import InFlight, InFlightLedger
from tests.seeds import examples


class TestLedger:
    def test_entries_are_summed_per_instance(self) -> None:
        ledger = InFlightLedger()
        ledger.add("r1", "a", InFlight("m", True, 1.5))
        ledger.add("r2", "a", InFlight("n", True, 0.5))
        ledger.add("r3", "a", InFlight("m", False, 4.0, num_tokens=70))
        ledger.add("r4", "b", InFlight("m", True, 1.0))
        assert ledger.num_requests("a") == 3
        assert ledger.demand_merged("a") == 2.0, "offline work is not load"
        assert ledger.num_online("a") == 2 and ledger.num_waiting("a", "m") == 1
        assert ledger.offline_tokens("a", "m") == 70 and ledger.offline_tokens("b", "m") == 0
        ledger.remove("r3")
        assert ledger.offline_tokens("a", "m") == 0 and ledger.num_requests("a") == 2
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


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("mn"), st.integers(1, 50), st.booleans()), max_size=40)
)
def test_offline_entries_are_summed_by_instance_and_model(entries: list[tuple[str, str, int, bool]]) -> None:
    ledger = InFlightLedger()
    there: list[tuple[str, str, int]] = []
    for number, (instance_id, model, tokens, stays) in enumerate(entries):
        ledger.add(str(number), instance_id, InFlight(model, False, 1.0, num_tokens=tokens))
        if stays:
            there.append((instance_id, model, tokens))
        else:
            ledger.remove(str(number))
            ledger.remove(str(number))
    for instance_id in "ab":
        assert ledger.num_requests(instance_id) == sum(1 for entry in there if entry[0] == instance_id)
        for model in "mn":
            expected = sum(tokens for i, m, tokens in there if (i, m) == (instance_id, model))
            assert ledger.offline_tokens(instance_id, model) == expected


names = st.sampled_from([f"i{n}" for n in range(4)])


class TestCandidateIndex:
    @settings(max_examples=examples(50))
    @given(
        st.sampled_from([(0,), (-1, 0, 1)]),
        st.lists(
            st.tuples(
                names,
                st.sampled_from([None, *product(range(3), range(3))]),
                st.sampled_from(["hint", "hint", "touch", "worsen"]),
                st.booleans(),
                st.sampled_from(["later", "all", "even"]),
            ),
            min_size=20,
            max_size=40,
        ),
    )
    def test_best_equals_a_full_scan(
        self, firsts: tuple[int, ...], changes: list[tuple[str, tuple[int, int] | None, str, bool, str]]
    ) -> None:
        """However changes are told, a hint also by a bound that is too good, and whether somebody looks after each change or
        after several. Ranks often differ in their second number alone."""
        ranks: dict[str, DispatchKey] = {}
        versions: dict[str, object] = {f"i{number}": object() for number in range(4)}
        index = CandidateIndex(ranks.get, versions.get)
        for name, drawn, how, is_too_good, look in changes:
            rank: DispatchKey | None = None if drawn is None else (firsts[drawn[0] % len(firsts)], drawn[1])
            known = ranks.get(name)
            # Less room makes nobody a candidate, and leaves none with room who has too little; above 0 it may seem better.
            if how == "worsen" and (known is None or (rank is not None and rank[0] <= 0 < known[0])):
                rank = known
            elif how == "worsen" and known is not None and rank is not None and known[0] <= 0:
                rank = max(known, rank)
            if rank is None:
                ranks.pop(name, None)
            else:
                ranks[name] = rank
            if how == "worsen":
                index.worsen(name)
            else:
                versions[name] = object()
            if how == "touch":
                index.touch(name)
            elif how == "hint":
                index.hint({name: (0 if rank is None else rank[0]) - is_too_good})
            if look == "later":
                continue

            def is_fit(name: str, is_even_fit: bool = look == "even") -> bool:
                return not is_even_fit or int(name[1:]) % 2 == 0

            ordered = [name for _, name in sorted((rank, name) for name, rank in ranks.items())]
            assert index.best(is_fit) == next(filter(is_fit, ordered), None)
            if look == "all":
                seen: list[str] = []
                index.best(lambda name, seen=seen: bool(seen.append(name)))  # type: ignore[misc]
                assert seen == ordered
                assert index.ranked(f"i{number}" for number in range(1, 4)) == [name for name in seen if name > "i0"]
            assert index.is_empty() == (not ranks)
            assert (name in index) == (name in ranks)

    def test_only_touched_instances_are_ranked_again(self) -> None:
        asked: list[str] = []

        def rank_of(name: str) -> DispatchKey:
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

    def test_an_instance_stands_in_it_once(self) -> None:
        turn = 0
        index = CandidateIndex(lambda name: (float(turn),))
        for turn in range(5000):  # noqa: B007
            index.touch("a")
            assert index.best(lambda _: True) == "a"
        assert len(index._ordered) == 1

    def test_of_equal_first_numbers_the_rest_of_a_new_rank_counts(self) -> None:
        ranks: dict[str, DispatchKey] = {"a": (0.0, 1.0), "b": (0.0, 2.0)}
        index = CandidateIndex(ranks.get, version_of=ranks.get)
        index.touch_all(ranks)
        assert index.best(lambda _: True) == "a"
        ranks["b"] = (0.0, 0.0)
        index.hint({"b": 0.0})
        assert index.best(lambda _: True) == "b"
