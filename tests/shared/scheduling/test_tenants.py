"""What the scheduler knows of tenants."""

from __future__ import annotations

import msgspec
import pytest

from shared.scheduling.requests import TrackedRequest
from shared.scheduling.tenants import MAX_TOLD, WINDOW_S, QueueTenants
from tests.shared.scheduling.driver import Driver, running
from tests.shared.scheduling.samples import make_request


def tracked(tenant: str, number: int, *, online: bool = True, weight: float = 1.0) -> TrackedRequest:
    request = make_request(f"{tenant}-{number}", online=online)
    named = msgspec.structs.replace(request, tenant=tenant, tenant_weight=weight)
    return TrackedRequest.submitted(named, number, 0, 0.0)


def test_statistics_say_who_waits_who_runs_and_what_each_had_in_the_last_minute() -> None:
    tenants = QueueTenants()
    some = [tracked("a", 0, weight=2.0), tracked("a", 1, weight=2.0), tracked("b", 2), tracked("b", 3, online=False)]
    for one in some:
        tenants.enter(one)
    tenants.place(some[0], 0.1)
    tenants.place(some[3], 0.1)
    tenants.charge(some[0], 4.0, 10.0)
    tenants.charge(some[2], 3.0, 30.0)
    told = {one.tenant: one for one in tenants.statistics(31.0)}
    assert {name: (one.num_queued, one.num_placed, one.service_s) for name, one in told.items()} == {
        "a": (1, 1, 4.0),
        "b": (1, 1, 3.0),
    }
    assert (told["a"].lag_s, told["b"].lag_s) == (0.0, 1.0), "by weight"
    for one in some:
        tenants.leave(one)
    assert {one.tenant: one.service_s for one in tenants.statistics(10.5 + WINDOW_S)} == {"b": 3.0}
    assert tenants.statistics(31.0 + WINDOW_S) == []


def test_the_tenants_with_fewest_requests_are_told_together() -> None:
    tenants = QueueTenants()
    for number in range(3 * MAX_TOLD):
        tenants.enter(tracked(f"t{number}", number))
    tenants.enter(tracked("t500", 10_000))
    told = tenants.statistics(1.0)
    assert len(told) == MAX_TOLD and told[0].tenant == "t500" and told[-1].tenant == "other"
    assert sum(one.num_queued for one in told) == 3 * MAX_TOLD + 1
    assert told[-1].num_queued == pytest.approx(2 * MAX_TOLD + 1)


def test_tenants_with_a_request_each_fill_no_instance_beyond_its_bound() -> None:
    """None of so many is behind: else all would go at once to an instance that has no room for any."""
    driver = Driver()
    driver.up("a")
    running(driver, "a", "r0", "r1", "r2")
    driver.report("a", freeness=-5.0, num_running=3, waiting={"m": 100}, free_merged=0.0)
    for number in range(100):
        request = make_request(f"s{number}")
        driver.submit(msgspec.structs.replace(request, tenant=f"t{number}"))
    assert driver.dispatches() == {} and len(driver.core.queue) == 100


def test_the_request_of_a_tenant_beside_a_flood_goes_to_an_instance_whatever_waits_there() -> None:
    driver = Driver()
    driver.up("a")
    names = [f"r{number}" for number in range(3)]
    running(driver, "a", *names)
    driver.report("a", freeness=-5.0, num_running=3, waiting={"m": 100}, free_merged=0.0)
    for number in range(2):
        request = make_request(f"s{number}")
        driver.submit(msgspec.structs.replace(request, tenant="other"))
    assert driver.dispatches() == {"s0": "a"}, "with the second one it would have half of what it may have"
