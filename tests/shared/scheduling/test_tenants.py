"""What the scheduler knows of tenants, and how its queue goes by it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages.requests import GenerationRequest, Priority
from shared.policies.catalogue import ORDERING_POLICIES, ordering_policy
from shared.policies.tenant_shares import TenantShares
from shared.scheduling.actions import AskHeld
from shared.scheduling.calls import OnHeld, OnRegistry
from shared.scheduling.queue import GlobalQueue, Lane
from shared.scheduling.requests import TrackedRequest
from shared.scheduling.tenants import MAX_TOLD, WINDOW_S, QueueTenants
from tests.shared.scheduling.driver import Driver, held, running
from tests.shared.scheduling.samples import make_info, make_request


def tracked(tenant: str, number: int, *, online: bool = True, weight: float = 1.0) -> TrackedRequest:
    request = make_request(f"{tenant}-{number}", online=online)
    return TrackedRequest.submitted(named(request, tenant, weight), number, 0, 0.0)


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


changes = st.one_of(
    st.tuples(st.just("push"), st.sampled_from("abcd"), st.booleans(), st.sampled_from([1.0, 2.0])),
    st.tuples(st.just("take"), st.booleans(), st.floats(0.0, 2.0)),
    st.tuples(st.just("end"), st.floats(0.0, 3.0)),
    st.tuples(st.just("unfit"), st.integers(0, 20), st.booleans()),
    st.tuples(st.just("time"), st.sampled_from([0.1, 0.4])),
)


@given(st.sampled_from(sorted(ORDERING_POLICIES)), st.lists(changes, max_size=60))
def test_the_first_of_several_tenants_are_as_if_all_were_sorted_now(
    policy: str, events: list[tuple[object, ...]]
) -> None:
    queue, lane, now = GlobalQueue(ordering_policy(policy), 10**6), Lane("m", True), 1.0
    waiting: list[TrackedRequest] = []
    placed: list[TrackedRequest] = []
    for number, (kind, *values) in enumerate(events):
        if kind == "push":
            tenant, high, weight = values
            request = named(make_request(str(number), high=bool(high)), str(tenant), float(weight))  # type: ignore[arg-type]
            waiting.append(TrackedRequest.submitted(request, number, len(queue), now))
            queue.push(waiting[-1], now)
        elif kind == "take" and (first := queue.first(lane, now)):
            queue.remove(first[0])
            waiting.remove(first[0])
            if values[0]:
                queue.tenants.place(first[0], float(values[1]))  # type: ignore[arg-type]
                placed.append(first[0])
            else:
                queue.tenants.leave(first[0])
        elif kind == "end" and placed:
            queue.tenants.charge(placed[0], float(values[0]), now)  # type: ignore[arg-type]
            queue.tenants.leave(placed.pop(0))
        elif kind == "unfit" and waiting:
            queue.set_unfit(waiting[int(values[0]) % len(waiting)], bool(values[1]))  # type: ignore[call-overload]
        elif kind == "time":
            now += float(values[0])  # type: ignore[arg-type]
        shares = queue.tenants.of_class(True)
        for limit in (1, 3, 100):
            found = queue.first(lane, now, limit)
            able = [one for one in waiting if not one.is_unfit]
            expected = sorted(able, key=lambda one: (one.key[0], shares.key(one.tenant), *one.key[1:]))
            assert found == expected[:limit]


@pytest.mark.parametrize("num_tenants", [10, 1000])
def test_a_dispatch_looks_at_few_tenants_however_many_wait(num_tenants: int, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, lane = GlobalQueue(ordering_policy("fcfs"), 10**6), Lane("m", True)
    for number in range(2 * num_tenants):
        queue.push(tracked(f"t{number % num_tenants}", number), 0.0)
    queue.first(lane, 0.0)
    asked: list[str] = []
    key = TenantShares.key

    def counted(shares: TenantShares, tenant: str) -> float:
        asked.append(tenant)
        return key(shares, tenant)

    monkeypatch.setattr(TenantShares, "key", counted)
    for _ in range(num_tenants):
        (first,) = queue.first(lane, 0.0)
        queue.remove(first)
        queue.tenants.place(first, 0.1)
    assert len(asked) <= 4 * num_tenants
    assert {one.tenant for one in queue.first(lane, 0.0, num_tenants)} == {f"t{n}" for n in range(num_tenants)}


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


def test_the_first_request_of_a_model_goes_to_an_instance_whatever_another_model_holds_there() -> None:
    driver = Driver()
    driver.up("a", "m", "rare")
    running(driver, "a", "r0", "r1", "r2")
    driver.report("a", freeness=-5.0, num_running=3, waiting={"m": 100}, free_merged=0.0)
    for number in range(2):
        driver.submit(make_request(f"m{number}"))
        driver.submit(make_request(f"rare{number}", model="rare"))
    assert driver.dispatches() == {"rare0": "a"}


def named(request: GenerationRequest, tenant: str, weight: float = 1.0) -> GenerationRequest:
    return msgspec.structs.replace(request, tenant=tenant, tenant_weight=weight)


def waiting_flood(driver: Driver, num: int) -> None:
    for number in range(num):
        driver.submit(named(make_request(f"flood-{number}"), "flood"))


def test_one_request_at_a_time_goes_before_a_flood_that_came_first() -> None:
    driver = Driver()
    waiting_flood(driver, 40)
    driver.pass_time(5.0)
    driver.submit(named(make_request("other-0"), "other"))
    driver.up("a")
    order = list(driver.dispatches())
    assert "other-0" in order and order.index("other-0") <= 1, order
    for number in range(1, 6):
        driver.report("a", freeness=0.0, num_running=5, waiting={"m": 50}, ended=[f"other-{number - 1}"])
        assert driver.dispatches() == {}
        driver.submit(named(make_request(f"other-{number}"), "other"))
        assert driver.dispatches() == {f"other-{number}": "a"}, "it waits for nothing that the flood holds"


@pytest.mark.parametrize("answers_first", [True, False])
def test_a_new_scheduler_goes_on_with_what_instances_hold_for_each_tenant(answers_first: bool) -> None:
    driver = Driver()
    driver.core.apply(OnRegistry("a", make_info("a")), driver.now)
    driver.report("a", freeness=0.0, num_running=20)
    (ask,) = driver.take(AskHeld)
    has = [msgspec.structs.replace(held(f"flood-{number}"), tenant="flood", tenant_weight=2.0) for number in range(20)]
    has.append(msgspec.structs.replace(held("other-0"), tenant="other"))
    if not answers_first:
        waiting_flood(driver, 5)
    driver.core.apply(OnHeld(ask, has), driver.now)
    if answers_first:
        waiting_flood(driver, 5)
    for number in range(5, 30):
        driver.submit(named(make_request(f"flood-{number}"), "flood", 2.0))
    shares = driver.core.queue.tenants.of_class(True)
    assert shares.key("flood") > shares.key("other") > 0.0, "what they hold is promised"
    assert shares.share("flood") == pytest.approx(2 / 3)
    told = {one.tenant: (one.num_placed, one.num_queued) for one in driver.core.queue.tenants.statistics(driver.now)}
    assert told == {"flood": (20, 10), "other": (1, 0)}
    driver.submit(named(make_request("other-1"), "other"))
    driver.report("a", freeness=1000.0, num_running=21)
    assert next(iter(driver.dispatches())) == "other-1"


@pytest.mark.parametrize("policy", sorted(ORDERING_POLICIES))
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 500)), min_size=1, max_size=60
    ),
    weights=st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * 3),
)
def test_the_queue_goes_by_least_service_and_then_by_the_policy(
    policy: str, arrivals: list[tuple[str, int, int]], weights: tuple[float, ...]
) -> None:
    """Against an oracle that looks at all that wait."""
    queue = GlobalQueue(ordering_policy(policy), 10**6)
    lane, waiting, placed = Lane("m", True), [], []
    served: dict[str, float] = dict.fromkeys("abc", 0.0)
    for number, (tenant, num_taken, num_prompt) in enumerate(arrivals):
        made = make_request(str(number), num_prompt=num_prompt, high=num_prompt % 7 == 0)
        tracked = TrackedRequest.submitted(named(made, tenant, weights["abc".index(tenant)]), number, 0, 100.0)
        queue.push(tracked, 100.0)
        waiting.append(tracked)
        for _ in range(num_taken):
            if not waiting:
                break
            shares = queue.tenants.of_class(True)
            (first,) = queue.first(lane, 100.0)
            best_rank = min(t.request.priority != Priority.HIGH for t in waiting)
            of_rank = [t for t in waiting if (t.request.priority != Priority.HIGH) == best_rank]
            least = min(shares.key(t.tenant) for t in of_rank)
            assert first in of_rank and shares.key(first.tenant) == least
            assert first.key == min(t.key for t in of_rank if t.tenant == first.tenant)
            queue.remove(first)
            waiting.remove(first)
            queue.tenants.place(first, 0.001 * first.num_prompt)
            placed.append(first)
            if len(placed) > 2:
                ended = placed.pop(0)
                seconds = 0.002 * ended.num_prompt
                served[ended.tenant] += seconds
                queue.tenants.charge(ended, seconds, 100.0)
                queue.tenants.leave(ended)
    told = {one.tenant: one.service_s for one in queue.tenants.statistics(100.0)}
    assert {name: told.get(name, 0.0) for name in "abc"} == pytest.approx(served)
