"""The time for which a tenant is expected to come back, by the gaps between its requests."""

from __future__ import annotations

import random

import pytest

from shared.engine.favours import EXPECTED_GAPS, LEAST_EXPECTED_S, MOST_EXPECTED_S, Known


def seen(*times_s: float) -> Known:
    known = Known(times_s[0])
    for at_s in times_s:
        known.note(0.1, 1.0, at_s)
    return known


def expected_s(known: Known) -> float:
    """How long after its last request, within 0.05 s."""
    return next(0.05 * step for step in range(2000) if not known.is_expected(known.seen_s + 0.05 * step))


@pytest.mark.parametrize("times_s", [(0.0,), (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), (0.0, 5.0), (0.0, 20.0)])
def test_who_is_hardly_known_is_expected_for_as_long_as_anybody(times_s: tuple[float, ...]) -> None:
    assert expected_s(seen(*times_s)) == pytest.approx(MOST_EXPECTED_S, abs=0.1)


def test_who_came_evenly_is_expected_for_some_of_its_gaps() -> None:
    assert expected_s(seen(*(2.0 * number for number in range(20)))) == pytest.approx(2.0 * EXPECTED_GAPS, abs=0.1)
    assert expected_s(seen(*(0.01 * number for number in range(1000)))) == pytest.approx(LEAST_EXPECTED_S, abs=0.1)
    assert expected_s(seen(*(25.0 * number for number in range(20)))) == pytest.approx(MOST_EXPECTED_S, abs=0.1)


@pytest.mark.parametrize(("num", "pause_s"), [(16, 8.0), (32, 5.0), (6, 2.0)])
def test_requests_at_once_say_nothing_of_the_pauses_between_them(num: int, pause_s: float) -> None:
    known = seen(*(pause_s * turn + 0.01 * number for turn in range(20) for number in range(num)))
    assert expected_s(known) > pause_s


def test_few_of_the_requests_that_come_at_random_were_not_expected() -> None:
    rng = random.Random(7)
    known, now, num_late = Known(0.0), 0.0, 0
    for _ in range(5000):
        now += rng.expovariate(0.5)
        num_late += not known.is_expected(now)
        known.note(0.1, 1.0, now)
    assert num_late < 50


def test_a_long_pause_is_forgotten() -> None:
    known = seen(*(0.2 * number for number in range(100)))
    for number in range(1000):
        known.note(0.1, 1.0, 3600.0 + 0.2 * number)
    assert expected_s(known) == pytest.approx(LEAST_EXPECTED_S, abs=0.1)
