"""A change before it is made: how it would go, and what it would have been good for."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.placement.estimator import Estimator
from shared.placement.problem import ChangeTimes, Group, Plan, Problem, Traffic
from shared.placement.rehearsal import DRAIN_EXECUTIONS, DRAIN_LEAST_S, Episode, rehearse
from shared.placement.replacement import Replacement, ReplacementSettings
from shared.placement.search import search
from shared.placement.stretches import evidence_s
from shared.placement.trial import try_change
from tests.seeds import examples
from tests.shared.placement.small import model, node, problem

TIMES = ChangeTimes(restart_s=10.0, drain_s=5.0)
LOAD_S = 13.5e9 / 2e9
A, B = model("a"), model("b")


def plan(*groups: tuple[tuple[int, ...], tuple[str, ...]]) -> Plan:
    return Plan(tuple(Group("n0", devices, models) for devices, models in groups))


def given_problem(rates: tuple[float, float], **fields: object) -> Problem:
    return problem([A, B], [node()], rates, times=TIMES, **fields)


def test_a_group_that_is_made_anew_serves_after_its_drain_restart_and_load() -> None:
    before = plan(((0,), ("a",)), ((1,), ("a",)), ((2,), ("b",)))
    after = plan(((0,), ("a",)), ((1,), ("b",)), ((2,), ("b",)))
    found = rehearse(given_problem((1, 1)), before, after)
    assert found.interrupted == []
    assert found.seconds == pytest.approx(TIMES.drain_s + TIMES.restart_s + LOAD_S)
    assert found.lost_device_s == pytest.approx(found.seconds)
    pair = plan(((0, 1), ("a",)), ((2,), ("b",)))
    found = rehearse(given_problem((1, 1)), plan(((0,), ("a",)), ((1,), ("a",)), ((2,), ("b",))), pair)
    # One after the other leaves, as long as it can.
    start_s = 2 * TIMES.drain_s + TIMES.restart_s + LOAD_S / 2
    assert found.seconds == pytest.approx(start_s)
    assert Episode(pair.groups[0], start_s) in found.episodes
    assert found.interrupted == ["a"] and found.lost_device_s == pytest.approx(2 * start_s - TIMES.drain_s)


def test_models_that_are_everywhere_come_apart_without_a_restart() -> None:
    before = plan(*(((device,), ("a", "b")) for device in range(3)))
    after = plan(((0,), ("a",)), ((1,), ("a",)), ((2,), ("b",)))
    execution_s = {"a": 0.5, "b": 0.2}
    found = rehearse(given_problem((0.1, 0.1), execution_s=execution_s), before, after)
    # What the longer requests take to end or to move; the rest of drain_s is for longer ones.
    assert found.seconds == pytest.approx(DRAIN_LEAST_S + DRAIN_EXECUTIONS * 0.5) and found.seconds < TIMES.drain_s
    assert found.lost_device_s == 0 and not found.interrupted
    busy = rehearse(given_problem((300, 0.1), execution_s=execution_s), before, after)
    assert busy.seconds > TIMES.restart_s, "its requests need the memory that the other model has"


@settings(deadline=None, max_examples=examples(25))
@given(st.data())
def test_every_rehearsal_ends_as_it_should(data: st.DataObject) -> None:
    sets = st.sampled_from([("a",), ("b",), ("a", "b")])
    cuts = st.sampled_from([((0,), (1,), (2,), (3,)), ((0, 1), (2,), (3,)), ((0, 1), (2, 3)), ((0, 1, 2, 3),)])

    def drawn() -> Plan:
        return plan(*((devices, data.draw(sets)) for devices in data.draw(cuts)))

    before, after = drawn(), drawn()
    names = [{name for group in one.groups for name in group.models} for one in (before, after)]
    found = rehearse(given_problem((1, 1)), before, after)
    if names[0] <= names[1]:
        assert {one.group for one in found.episodes if one.end_s == math.inf} == set(after.groups)
    assert {one.group for one in found.episodes if one.start_s == 0.0} <= {
        *before.groups, *(msgspec.structs.replace(group, models=(name,)) for group in before.groups for name in "ab")
    }  # fmt: skip
    # Whoever serves before the change, up to it at least.
    assert {one.group for one in found.episodes if one.start_s == 0.0} >= set(before.groups) - set(after.groups)
    assert (found.seconds == 0) is (before == after)
    assert 0 <= found.lost_device_s <= 4 * found.seconds + 1e-9
    # No device serves in two groups at once.
    for device in range(4):
        spans = sorted((one.start_s, one.end_s) for one in found.episodes if device in one.group.devices)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


def test_groups_that_serve_throughout_are_as_without_times() -> None:
    asked, groups = given_problem((4, 1)), plan(((0,), ("a",)), ((1,), ("a", "b"))).groups
    estimator = Estimator(asked)
    served = estimator.served([[Episode(group) for group in groups]])
    outcome = estimator.outcomes([groups])[0]
    assert 1 - served.is_late[0] @ served.weight / served.weight.sum() == pytest.approx(outcome.attainment, abs=0.01)
    assert served.normalised[0] @ served.weight / served.weight.sum() == pytest.approx(
        outcome.normalised_latency, rel=0.02
    )


def test_who_finds_no_group_waits_for_the_next() -> None:
    asked = given_problem((4, 0), interval_s=60.0)
    (group,) = plan(((0,), ("a",))).groups
    served = Estimator(asked).served([[Episode(group)], [Episode(group, 0, 20.0), Episode(group, 30.0)]])
    latency = served.normalised * served.execution_s[served.model]
    waited = (served.at_s > 20.0) & (served.at_s < 30.0)
    assert np.all(latency[1, waited] >= 30.0 - served.at_s[waited] - 1e-6)
    assert np.allclose(latency[0, served.at_s < 10.0], latency[1, served.at_s < 10.0], rtol=0.3)


def test_who_waits_at_a_group_that_ends_waits_at_the_next_one() -> None:
    """One group after the other serves no faster than one throughout, however long the queue is, and loses nobody."""
    asked = given_problem((30, 0), interval_s=60.0)
    groups = [plan(((device,), ("a",))).groups[0] for device in range(3)]
    served = Estimator(asked).served(
        [
            [Episode(groups[0])],
            [Episode(groups[0], 0, 30.0), Episode(groups[1], 30.0)],
            [Episode(groups[0], 0, 20.0), Episode(groups[1], 20.0, 25.0), Episode(groups[2], 25.0)],
        ]
    )
    throughout, *in_turn = served.normalised.mean(1)
    assert throughout > 5.0, "it is too slow for what comes"
    assert in_turn == pytest.approx([throughout] * 2, rel=0.25)
    # Who comes before the first one ends waits at all three.
    before = (served.at_s > 15.0) & (served.at_s < 20.0)
    assert np.median(served.normalised[2, before]) < 1.2 * np.median(served.normalised[0, before])


def test_groups_that_are_not_there_yet_or_no_more_change_nothing() -> None:
    asked, groups = given_problem((20, 12), interval_s=60.0), plan(((0,), ("a",)), ((1,), ("a", "b"))).groups
    (coming,) = plan(((2,), ("a",))).groups
    there = [Episode(group) for group in groups]
    courses = [there, [*there, Episode(coming, 50.0)], [*there, Episode(coming, -9.0, -1.0)]]
    served = Estimator(asked).served(courses)
    latency = served.normalised * served.execution_s[served.model]
    before = served.at_s + latency[0] < 50.0
    assert before.sum() > 100
    assert np.allclose(latency[0, before], latency[1, before])
    assert np.allclose(latency[0], latency[2])


def joined(*parts: Traffic) -> Traffic:
    starts = np.cumsum([0.0] + [part.interval_s for part in parts])
    arrivals = np.concatenate([part.arrival_s + start for part, start in zip(parts, starts, strict=False)])
    columns = [np.concatenate(each) for each in zip(*(part[1:6] for part in parts), strict=True)]
    return Traffic(parts[0].models, columns[0], arrivals, columns[2], columns[3], columns[4], float(starts[-1]))


RATE = 20.0
MOSTLY_A = plan(((0,), ("a",)), ((1,), ("a",)), ((2,), ("a",)), ((3,), ("b",)))


def asked_after(turned_s: float) -> Problem:
    """Much for a, until so long ago much for b."""
    before = given_problem((RATE, 1), interval_s=600.0).traffic
    since = given_problem((1, RATE), interval_s=turned_s, seed=1).traffic
    evidence = joined(before, since) if turned_s else before
    window_s = 120.0
    last = evidence.arrival_s >= evidence.interval_s - window_s
    columns = [column[last] for column in evidence[1:6]]
    columns[1] = columns[1] - (evidence.interval_s - window_s)
    window = Traffic(evidence.models, *columns, window_s)
    return msgspec.structs.replace(given_problem((0, 0)), traffic=window, evidence=evidence, incumbent=MOSTLY_A)


@pytest.mark.parametrize(("turned_s", "is_worth"), [(0.0, False), (10.0, False), (240.0, True)])
def test_a_shift_is_followed_once_it_has_lasted(turned_s: float, is_worth: bool) -> None:
    asked = asked_after(turned_s)
    found = search(asked)
    verdict = Replacement(ReplacementSettings(initial_s=120.0), 0.0).judge(found, asked)
    assert verdict.is_worth is is_worth, verdict
    if is_worth:
        assert found.trial is not None and found.trial.horizons[-1].seconds > found.trial.change_s > 0
        assert found.trial.moved_bytes > 0


def test_a_change_is_tried_where_nothing_came_of_late() -> None:
    asked = asked_after(60.0)
    assert asked.evidence is not None
    since_s = asked.evidence.interval_s - 200.0
    early = asked.evidence.arrival_s < since_s
    evidence = Traffic(asked.evidence.models, *(column[early] for column in asked.evidence[1:6]), since_s + 200.0)
    none = Traffic(asked.traffic.models, *(column[:0] for column in asked.traffic[1:6]), asked.traffic.interval_s)
    to_b = plan(((0,), ("a",)), ((1,), ("b",)), ((2,), ("b",)), ((3,), ("b",)))
    for known in (evidence, Traffic(none.models, *none[1:6], evidence.interval_s)):
        trial = try_change(msgspec.structs.replace(asked, traffic=none, evidence=known), to_b)
        assert trial.moved_bytes == 0 and trial.change_s > 0


def test_horizons_are_as_long_as_what_is_known() -> None:
    asked = asked_after(60.0)
    to_b = plan(((0,), ("a",)), ((1,), ("b",)), ((2,), ("b",)), ((3,), ("b",)))
    trial = try_change(asked, to_b)
    seconds = [one.seconds for one in trial.horizons]
    assert seconds[:3] == [120.0, 240.0, 480.0] and 600 < seconds[3] <= 660
    assert evidence_s(120.0) > seconds[-1]
    assert all(one.stay_attainment >= one.free_attainment - 1 for one in trial.horizons)
    same = try_change(asked, MOSTLY_A)
    assert same.change_s == 0 and same.moved_bytes == 0
    for one in same.horizons:
        assert one.change_attainment == pytest.approx(one.stay_attainment)
        assert one.free_latency == pytest.approx(one.stay_latency)
