"""The order of the global queue under every policy, against sorting everything afresh."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages.cluster import ExecutionStatistics
from shared.messages.requests import Priority
from shared.policies.catalogue import ORDERING_POLICIES, ordering_policy
from shared.policies.doubling_budget import BATCH
from shared.scheduling.calls import OnReport
from shared.scheduling.queue import REFRESH_S, GlobalQueue, Lane
from shared.scheduling.requests import TrackedRequest
from tests.shared.scheduling.driver import Driver
from tests.shared.scheduling.samples import make_report, make_request

MODELS = ("m", "n")
LANES = [Lane(model, is_online) for model in MODELS for is_online in (True, False)]

push = st.tuples(
    st.just("push"),
    st.sampled_from(MODELS),
    st.booleans(),
    st.booleans(),
    st.integers(1, 2000),
    st.sampled_from([0.0, 0.3, 2.0, 20.0]),
)
event = st.one_of(
    push,
    push,
    st.tuples(st.just("statistics"), st.sampled_from(MODELS), st.floats(0.001, 10), st.floats(0, 5)),
    st.tuples(st.just("time"), st.sampled_from([0.0, 0.1, 0.5, 3.0, 40.0])),
    st.tuples(st.just("take"), st.sampled_from(LANES), st.booleans()),
)


def in_order(queue: GlobalQueue, waiting: list[TrackedRequest], lane: Lane, now: float) -> list[TrackedRequest]:
    """The oracle: all keys taken now."""
    of_lane = [t for t in waiting if (t.model, t.is_online) == lane]

    def place(t: TrackedRequest) -> tuple[float, ...]:
        assert t.request is not None
        return (t.request.priority != Priority.HIGH, *queue.order.key(t, now), t.arrived_s, t.number)

    return sorted(of_lane, key=place)


@pytest.mark.parametrize("name", sorted(ORDERING_POLICIES))
@given(events=st.lists(event, max_size=60))
def test_the_queue_is_as_if_sorted_at_most_a_moment_ago(name: str, events: list[tuple[Any, ...]]) -> None:
    queue = GlobalQueue(ordering_policy(name), 10**6)
    waiting: list[TrackedRequest] = []
    now = 100.0
    for number, (kind, *values) in enumerate(events):
        if kind == "push":
            model, online, high, num_prompt, waited_s = values
            request = make_request(
                str(number), model=model, online=online, high=high, num_prompt=num_prompt, waited_s=waited_s
            )
            waiting.append(TrackedRequest.submitted(request, number, len(queue), now))
            queue.push(waiting[-1], now)
        elif kind == "statistics":
            model, mean_s, std_s = values
            queue.set_statistics(ExecutionStatistics(model, mean_s, std_s, 10))
        elif kind == "time":
            now += values[0]
        elif first := queue.first(values[0], now):
            queue.remove(first[0])
            if values[1]:
                queue.push(first[0], now)
            else:
                waiting.remove(first[0])
    assert len(queue) == len(waiting) and sum(queue.lengths().values()) == len(waiting)
    for lane in LANES:
        of_lane = [t for t in waiting if (t.model, t.is_online) == lane]
        assert (lane in queue) == bool(of_lane)
        assert queue.num_tokens(lane) == sum(t.num_tokens_at_most for t in of_lane)
        stale = queue.first(lane, now, 1000)
        assert [t.key for t in stale] == sorted(t.key for t in of_lane)
    now += REFRESH_S
    for lane in LANES:
        assert queue.first(lane, now, 1000) == in_order(queue, waiting, lane, now)
    for tracked in waiting:
        queue.remove(tracked)
    assert len(queue) == 0 and not any(lane in queue for lane in LANES)


@pytest.mark.parametrize("name", ["seallm", "fcfs"])
@given(
    requests=st.lists(
        st.tuples(st.sampled_from(MODELS), st.booleans(), st.sampled_from([0.0, 1.0, 3.0])), min_size=1, max_size=25
    ),
    means=st.tuples(st.floats(0.01, 2), st.floats(0.01, 2)),
)
def test_models_are_dispatched_in_the_policys_order_over_both(
    name: str, requests: list[tuple[str, bool, float]], means: tuple[float, float]
) -> None:
    driver = Driver(order_policy=name, max_waiting_per_model=100)
    for model, mean_s in zip(MODELS, means, strict=True):
        driver.core.queue.set_statistics(ExecutionStatistics(model, mean_s, 0.0, 10))
    for number, (model, high, waited_s) in enumerate(requests):
        driver.submit(make_request(str(number), model=model, high=high, waited_s=waited_s))
    order = driver.core.queue.order

    def place(tracked: TrackedRequest) -> tuple[object, ...]:
        assert tracked.request is not None
        return (tracked.request.priority != Priority.HIGH, order.key(tracked, driver.now))

    places = {tracked.request_id: place(tracked) for tracked in driver.core.requests}
    driver.up("a", "m", "n")
    taken = [places[request_id] for request_id in driver.dispatches()]
    assert len(taken) == len(requests) and taken == sorted(taken)


def test_under_round_robin_models_take_turns() -> None:
    driver = Driver(order_policy="round_robin", max_waiting_per_model=100)
    for number in range(4):
        driver.submit(make_request(f"m{number}"))
    for number in range(2):
        driver.submit(make_request(f"n{number}", model="n"))
    driver.up("a", "m", "n")
    assert list(driver.dispatches()) == ["m0", "n0", "m1", "n1", "m2", "m3"]


def test_the_model_with_shorter_requests_goes_first_until_another_starves() -> None:
    driver = Driver(order_policy="seallm", max_waiting_per_model=1)
    for model, mean_s in (("m", 2.0), ("n", 0.1)):
        driver.core.queue.set_statistics(ExecutionStatistics(model, mean_s, 0.0, 10))
    driver.submit(make_request("m0"))
    driver.submit(make_request("n0", model="n"))
    driver.up("a", "m", "n")
    assert list(driver.dispatches()) == ["n0", "m0"]
    driver.report("a", waiting={"m": 1, "n": 1}, admitted=["n0", "m0"])
    driver.submit(make_request("m1"))
    driver.pass_time(10.5)
    driver.submit(make_request("n1", model="n"))
    driver.report("a")
    assert list(driver.dispatches()) == ["m1", "n1"]


def test_models_are_dispatched_in_proportion_to_their_gain() -> None:
    driver = Driver(order_policy="doubling_budget", max_waiting_per_model=100)
    for model, mean_s in (("m", 2.0), ("n", 1.0)):
        driver.core.queue.set_statistics(ExecutionStatistics(model, mean_s, 0.0, 10))
        for number in range(20):
            driver.submit(make_request(f"{model}{number}", model=model))
    driver.up("a", "m", "n")
    taken = [request_id[0] for request_id in driver.dispatches()]
    own, batch_s = 1.0 + 1 / (BATCH * 1.5), 1 / 4 + 1 / (2 * BATCH * 1.5)
    share = own / (own + batch_s)
    assert taken[:20].count("n") == pytest.approx(20 * share, abs=1), (
        "a request of n gains four times what one of m does"
    )


def test_statistics_that_change_count_for_requests_that_wait() -> None:
    """What has not run has its whole budget, as those that come after it."""
    driver = Driver(max_waiting_per_model=100)
    driver.submit(make_request("old"))
    driver.core.queue.set_statistics(ExecutionStatistics("m", 0.1, 0.0, 10))
    driver.submit(make_request("new"))
    driver.up("a")
    assert list(driver.dispatches()) == ["old", "new"]


def test_a_report_of_no_room_does_no_sorting() -> None:
    driver = Driver(max_waiting_per_model=1)
    driver.up("a")
    driver.submit(make_request("r"))
    driver.dispatches()
    driver.report("a", waiting={"m": 1}, admitted=["r"])
    driver.submit(make_request("queued"))
    (queued,) = driver.core.queue.first(Lane("m", True), driver.now)
    before = queued.key
    driver.now += 100.0
    driver.core.apply(OnReport(make_report("a", 1000, waiting={"m": 1})), driver.now)
    assert not driver.dispatches() and queued.key is before
