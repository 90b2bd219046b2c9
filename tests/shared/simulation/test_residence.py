"""Models on demand in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.placement.on_demand import LEAST_RESIDENCY_S
from shared.simulation.fleet import Fleet
from shared.simulation.gateway import Job, Record
from shared.simulation.residence import FleetResidence, OnDemand
from tests.seeds import examples
from tests.shared.simulation.test_fleet import check_empty, fleet_of, model

DISK_S, HOST_S, IDLE_S = 3.0, 0.4, 5.0


def residence_of(fleet: Fleet, names: str, num_at_once: int, idle_s: float = IDLE_S) -> FleetResidence:
    models = {name: OnDemand(model(name, load_s=DISK_S), idle_s, HOST_S) for name in names}
    return FleetResidence(fleet, models, lambda awake: len(awake) <= num_at_once)


def ran(fleet: Fleet, asked: Sequence[tuple[float, str]]) -> list[Record]:
    records = fleet.run([Job(at_s, 40, 10, model=name) for at_s, name in asked]).records
    assert not any(record.error for record in records)
    check_empty(fleet)
    return records


def test_a_model_is_loaded_for_its_first_request_and_from_host_memory_then() -> None:
    fleet = fleet_of(2)
    residence = residence_of(fleet, "b", 1)
    first, warm, again, other = ran(fleet, [(2.2, "b"), (8.0, "b"), (30.0, "b"), (30.5, "a")])
    assert DISK_S < first.first_s - 2.2 < DISK_S + 0.3
    assert warm.first_s - 8.0 < 0.2
    assert HOST_S < again.first_s - 30.0 < HOST_S + 0.3
    assert other.first_s - 30.5 < 0.2
    assert [wake.tier for wake in residence.wakes] == ["disk", "host"]
    assert residence.num_put_away == 2, "it is idle again by the end"
    assert residence.wakes[0].seconds == pytest.approx(DISK_S, abs=0.2)


def test_models_that_do_not_fit_together_change_places() -> None:
    fleet = fleet_of(1)
    residence = residence_of(fleet, "bc", 1, idle_s=60.0)
    records = ran(fleet, [(1.0, "b"), (6.0, "c"), (20.0, "b")])
    assert residence.num_put_away == 2 and [wake.model for wake in residence.wakes] == ["b", "c", "b"]
    # One that was used within its idle time goes once others have waited as long as loading it again takes.
    assert records[1].first_s - 6.0 > 2 * DISK_S
    assert all(model_state != "unloading" for model_state in fleet.instances["i-0"].model_states.values())


@settings(max_examples=examples(15))
@given(
    asked=st.lists(st.tuples(st.floats(0.0, 60.0), st.sampled_from("abcd")), min_size=1, max_size=25),
    num_at_once=st.integers(1, 3),
)
def test_every_request_is_answered_and_no_more_is_loaded_than_fits(
    asked: list[tuple[float, str]], num_at_once: int
) -> None:
    fleet = fleet_of(1)
    residence_of(fleet, "bcd", num_at_once, idle_s=LEAST_RESIDENCY_S)
    most = [0]

    def look() -> None:
        most[0] = max(most[0], len(fleet.instances["i-0"].model_states) - 1)
        fleet.events.after(0.1, look)

    fleet.events.after(0.0, look)
    ran(fleet, sorted(asked))
    assert most[0] <= num_at_once
