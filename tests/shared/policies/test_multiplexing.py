from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.policies.multiplexing import UNITS, JobId, Multiplexing, Phase, Units, adapted_quotas, first_quotas

MODELS = ["a", "b", "c"]
A, B, C = (JobId(name, Phase.PREFILL) for name in MODELS)
DECODES = [JobId(name, Phase.DECODE) for name in MODELS]


def policy(prefill: int = 8, decode: int = 4) -> Multiplexing:
    return Multiplexing(dict.fromkeys(MODELS, Units(prefill, decode)))


def test_prefills_take_turns_one_at_a_time_and_decodes_beside_them() -> None:
    plex = policy()
    assert plex.begin(MODELS, [], []) == [A]
    assert plex.begin(MODELS, [], [A]) == []
    assert plex.begin(MODELS, ["a"], []) == [B, DECODES[0]]  # 2 free units and 2 that are shared
    assert plex.begin(["a", "b"], [], []) == [A]  # c has none, so it is a's turn


def test_decodes_begin_in_turn_while_units_suffice() -> None:
    plex = policy()
    assert plex.begin([], MODELS, []) == DECODES  # 4 and 4 units, then 2 free ones and 2 that are shared
    plex = policy(decode=6)
    assert plex.begin([], MODELS, []) == DECODES[:2]
    assert plex.begin([], MODELS, []) == [DECODES[2], DECODES[0]]


def test_no_decode_begins_while_a_prefill_lacks_units() -> None:
    plex = policy(prefill=10, decode=5)
    assert plex.begin(["a"], ["b", "c"], [DECODES[0]]) == []
    assert plex.begin(["a"], ["b"], []) == [A]


@given(
    units=st.lists(st.tuples(st.integers(1, UNITS), st.integers(1, UNITS)), min_size=1, max_size=4),
    rounds=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15), st.integers(0, 15)), max_size=30),
)
def test_never_a_job_twice_nor_more_units_than_may_be_shared(
    units: list[tuple[int, int]], rounds: list[tuple[int, int, int]]
) -> None:
    names = [str(number) for number in range(len(units))]
    plex = Multiplexing({name: Units(*own) for name, own in zip(names, units, strict=True)})
    under_way: list[JobId] = []
    for prefills, decodes, ended in rounds:
        begun = plex.begin(
            [name for number, name in enumerate(names) if prefills >> number & 1],
            [name for number, name in enumerate(names) if decodes >> number & 1],
            under_way,
        )
        under_way += begun
        assert len(set(under_way)) == len(under_way)
        assert sum(job.phase is Phase.PREFILL for job in under_way) <= 1
        assert sum(map(plex.units_of, under_way)) <= 2 * UNITS
        under_way = [job for number, job in enumerate(under_way) if not ended >> number & 1]
    if not under_way:
        assert plex.begin(names, [], []), "on idle devices whoever is next begins"


def test_quotas_follow_demand_but_hold_what_is_least() -> None:
    assert first_quotas(100, {"a": 3.0, "b": 1.0}, {"a": 10, "b": 10}) == {"a": 70, "b": 30}
    with pytest.raises(ValueError, match="does not hold"):
        first_quotas(19, {"a": 1.0, "b": 1.0}, {"a": 10, "b": 10})


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 10**9), st.integers(0, 10**9), st.floats(0, 1.2), st.integers(0, 50)),
        min_size=1,
        max_size=5,
    )
)
def test_adapted_quotas_keep_the_sum_and_the_least(rows: list[tuple[int, int, float, int]]) -> None:
    names = [str(number) for number in range(len(rows))]
    least = {name: row[0] for name, row in zip(names, rows, strict=True)}
    quotas = {name: row[0] + row[1] for name, row in zip(names, rows, strict=True)}
    use = {name: row[2] for name, row in zip(names, rows, strict=True)}
    backlog = {name: row[3] for name, row in zip(names, rows, strict=True)}
    changed = adapted_quotas(quotas, use, backlog, least)
    assert sum(changed.values()) == sum(quotas.values())
    for name in names:
        assert changed[name] >= least[name]
        if changed[name] > quotas[name]:
            assert use[name] >= 0.9
            assert backlog[name]


def test_who_is_full_and_has_a_backlog_takes_from_who_is_not() -> None:
    changed = adapted_quotas({"a": 1000, "b": 1000}, {"a": 0.95, "b": 0.2}, {"a": 9, "b": 0}, {"a": 1, "b": 1})
    assert changed == {"a": 1100, "b": 900}
