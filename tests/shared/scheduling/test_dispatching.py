"""The parts of the core one by one, against plain oracles: timers, the queue's order, and the choice of instances."""

from __future__ import annotations

import gc
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.messages.requests import Priority
from shared.policies.dispatch import ReportedFreeness, freeness_with_ledger
from shared.policies.ordering import FirstComeFirstServed
from shared.runtime.settings import SchedulerSettings
from shared.scheduling.actions import Dispatch, Waits
from shared.scheduling.calls import OnDispatched, OnRegistry, OnReport, Submit
from shared.scheduling.candidates import CandidatesFor, Seen
from shared.scheduling.core import SchedulerCore
from shared.scheduling.dispatching import OVERDUE_S
from shared.scheduling.prefixes import prompt_keys
from shared.scheduling.queue import GlobalQueue, Lane, Outflow
from shared.scheduling.requests import TrackedRequest
from shared.scheduling.timers import Timers
from tests.shared.scheduling.samples import BLOCK_SIZE, make_info, make_report, make_request


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 20)), max_size=80), st.integers(0, 20))
def test_timers_fire_in_order_and_once(changes: list[tuple[int, int | None]], now: int) -> None:
    timers: Timers[int] = Timers()
    expected: dict[int, int] = {}
    for key, at in changes:
        if at is None:
            timers.discard(key)
            expected.pop(key, None)
        else:
            timers.set(key, at)
            expected[key] = at
        assert timers.next() == min(expected.values(), default=None)
    fired = list(timers.due(now))
    assert sorted(fired) == sorted(key for key, at in expected.items() if at <= now)
    assert [expected[key] for key in fired] == sorted(expected[key] for key in fired)
    assert timers.next() == min((at for at in expected.values() if at > now), default=None)


def test_timers_that_are_moved_for_ever_take_no_memory() -> None:
    timers: Timers[str] = Timers()
    for at in range(10_000):
        timers.set("a", at)
    assert len(timers._heap) < 100 and timers.next() == 9999


def test_a_timer_set_while_firing_is_seen() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    fired = []
    for key in timers.due(5.0):
        fired.append(key)
        if len(fired) < 3:
            timers.set("b", 2.0)
    assert fired == ["a", "b", "b"]


arrivals = st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0, 100)), min_size=1, max_size=40)


@given(arrivals, st.data())
def test_the_queue_is_sorted_by_class_priority_and_arrival(
    entries: list[tuple[bool, bool, float]], data: st.DataObject
) -> None:
    queue = GlobalQueue(FirstComeFirstServed(), max_queued=10)
    all_tracked = []
    for number, (online, high, waited_s) in enumerate(entries):
        request = make_request(f"r{number}", online=online, high=high, waited_s=waited_s)
        tracked = TrackedRequest.submitted(request, number, len(queue), now=200.0)
        queue.push(tracked, 200.0)
        all_tracked.append(tracked)
    for tracked in data.draw(st.lists(st.sampled_from(all_tracked), unique=True)):
        queue.remove(tracked)
        if data.draw(st.booleans()):
            queue.push(tracked, 300.0)
        else:
            all_tracked.remove(tracked)
    for lane in (Lane("m", True), Lane("m", False)):
        of_lane = [tracked for tracked in all_tracked if tracked.is_online == lane.is_online]
        of_lane.sort(
            key=lambda t: (
                t.request is not None and t.request.priority == Priority.NORMAL,
                t.arrived_s,
                t.number,
            )
        )
        assert queue.first(lane, 300.0, 100) == of_lane
    assert len(queue) == len(all_tracked)


def test_the_outflow_estimate_follows_the_rate() -> None:
    outflow = Outflow(window_s=10.0)
    for tick in range(1000):
        outflow.count(tick * 0.1)
    assert 9.0 < outflow.per_second(100.0) < 11.0
    assert outflow.per_second(200.0) < 0.01


DEMAND = 0.25
"""Merged blocks of 16 tokens."""
GROWTH_STEPS = 8.0


def make_core(
    freeness: list[float],
    num_running: list[int],
    max_waiting: int,
    share: float = 1.0,
    picks_at_once: int | None = None,
) -> SchedulerCore:
    settings = SchedulerSettings(
        max_waiting_per_model=max_waiting, dispatch_growth_steps=GROWTH_STEPS, max_defragmenting_share=share
    )
    core = SchedulerCore(settings, term=1, picks_at_once=picks_at_once)
    for number, (free, running) in enumerate(zip(freeness, num_running, strict=True)):
        core.apply(OnRegistry(f"i{number}", make_info(f"i{number}")), 0.0)
        core.apply(OnReport(make_report(f"i{number}", 1, freeness=free, num_running=running)), 0.0)
    return core


loads = st.lists(st.tuples(st.floats(-50, 100), st.integers(0, 20)), min_size=1, max_size=6)


@given(loads, st.integers(1, 30), st.integers(1, 5))
def test_each_dispatch_goes_to_the_freest_with_memory_after_all_before_it(
    load: list[tuple[float, int]], num_requests: int, max_waiting: int
) -> None:
    core = make_core([free for free, _ in load], [running for _, running in load], max_waiting)
    sent = [0] * len(load)

    def reported(index: int) -> ReportedFreeness:
        return ReportedFreeness(*load[index], 100.0)

    def freeness(index: int) -> float:
        return freeness_with_ledger(reported(index), DEMAND * sent[index], sent[index])

    def left(index: int) -> float:
        """Beside what all that run there may grow."""
        num_others = load[index][1] + sent[index]
        growth = GROWTH_STEPS * (num_others + 1) / 64 if num_others else 0.0
        return reported(index).left_merged - DEMAND * sent[index] - growth

    for number in range(num_requests):
        core.apply(Submit(make_request(f"r{number}", num_prompt=16)), 0.0)
    dispatches = [action for action in core.actions(0.0) if isinstance(action, Dispatch)]
    assert len(dispatches) == min(num_requests, max_waiting * len(load))
    for dispatch in dispatches:
        index = int(dispatch.instance_id[1:])
        room = [i for i in range(len(load)) if sent[i] < max_waiting]
        assert index in room
        if has_memory := [i for i in room if left(i) >= DEMAND]:
            assert index in has_memory and freeness(index) == max(freeness(i) for i in has_memory)
        else:
            assert left(index) == pytest.approx(max(left(i) for i in room)), "where it will fit soonest"
        sent[index] += 1


requests = st.tuples(
    st.just("request"),
    st.sampled_from(["normal", "high", "offline", "rescued", "rescued offline"]),
    st.sampled_from("xxxy"),
)
reports = st.tuples(
    st.sampled_from([0, 1, 2]),
    st.booleans(),
    st.sampled_from([-5.0, 0.0, 10.0, 20.0, math.inf]) | st.floats(-40, 40),
    st.integers(0, 3),
    st.sampled_from([0, 0, 30, 1000]),
    st.booleans(),
)
"""Instance, whether it tells what it admitted, freeness, running requests, offline room, and whether it has copies of what
rescued requests had elsewhere."""


@given(st.lists(requests | reports, min_size=10, max_size=40))
def test_whoever_is_ranked_late_is_in_the_place_of_its_true_rank(events: list[tuple[Any, ...]]) -> None:
    """Reports, with or without word of what was sent there, and dispatches; against ranking everybody each time. Instances
    are often as free as before with fewer requests. Nobody waits in the queue whom an instance would take."""
    core = make_core([10.0, 20.0, -5.0], [2, 3, 1], max_waiting=3)
    for online in (True, False):
        core.apply(Submit(make_request(f"first-{online}", online=online)), 0.0)
    core.actions(0.0)
    names, sequence = ["i0", "i1", "i2"], 1
    ranking, queue = core.dispatcher.ranking, core.dispatcher.queue
    in_flight: dict[str, list[str]] = {name: [] for name in names}
    copies = b"".join(prompt_keys(make_request("lost", num_prompt=64, num_prior=64), BLOCK_SIZE))
    for number, (kind, *event) in enumerate(events):
        sequence += 1
        if kind == "request":
            what, tenant = event
            lost = {"num_prompt": 64, "num_prior": 64, "max_tokens": 80, "epoch": 64} if "rescued" in what else {}
            fields = {"num_prompt": 16, "online": "offline" not in what, "high": what == "high"} | lost
            request = make_request(f"r{number}", **fields)
            core.apply(Submit(msgspec.structs.replace(request, tenant=tenant)), 0.0)
        else:
            name, (tells, freeness, num_running, room, has_copies) = names[kind], event
            admitted, in_flight[name] = in_flight[name][:tells], in_flight[name][tells:]
            report = make_report(
                name, sequence, num_running=num_running, admitted=admitted, freeness=freeness, freeness_high=freeness - 5,
                room=room, cache_held=copies if has_copies else b"",
            )  # fmt: skip
            core.apply(OnReport(report), 0.0)
        for action in core.actions(0.0):
            if isinstance(action, Dispatch):
                in_flight[action.instance_id].append(action.request.request_id)
        ranking.woken()
        for lane in (Lane("m", True), Lane("m", False)):
            for is_high, is_behind in ((False, False), (True, False), (False, True)):
                index = ranking.index(lane, is_high, is_behind)
                ranks = {name: ranking.rank(lane, is_high, name, is_behind=is_behind) for name in names}
                able = [(rank, name) for name, rank in ranks.items() if rank is not None]
                assert index.best(lambda _: True) == min(able, default=(None, None))[1]
            for first in queue.first(lane, 0.0):
                is_behind = queue.tenants.is_behind(first)
                assert not any(ranking.rank(lane, first.is_high, name, is_behind=is_behind) for name in names)


def test_what_a_request_has_seen_is_freed_without_the_garbage_collector() -> None:
    """Which would stop the scheduler for milliseconds each time."""
    core = make_core([10.0] * 20, [1] * 20, max_waiting=5)
    gc.disable()
    try:
        for number in range(20):
            core.apply(Submit(make_request(f"r{number}", num_prompt=16)), 0.0)
        assert len(core.actions(0.0)) >= 20
        assert not [one for one in gc.get_objects() if isinstance(one, Seen | CandidatesFor)]
    finally:
        gc.enable()


@given(loads, st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 4))
def test_dispatches_a_few_at_a_time_are_those_of_all_at_once(
    load: list[tuple[float, int]], is_high: list[bool], max_waiting: int, picks_at_once: int
) -> None:
    def run(at_once: int | None) -> list[tuple[str, str]]:
        freeness, num_running = [free for free, _ in load], [running for _, running in load]
        core = make_core(freeness, num_running, max_waiting, picks_at_once=at_once)
        for number, high in enumerate(is_high):
            core.apply(Submit(make_request(f"r{number}", num_prompt=16, high=high)), 0.0)
        made, waits = [], []
        while True:
            actions = core.actions(0.0)
            dispatches = [action for action in actions if isinstance(action, Dispatch)]
            made += [(dispatch.request.request_id, dispatch.instance_id) for dispatch in dispatches]
            waits += [action.request_id for action in actions if isinstance(action, Waits)]
            assert at_once is None or len(dispatches) <= at_once
            if not core.has_more:
                break
        assert {request_id for request_id, _ in made}.isdisjoint(waits) and len(made) + len(waits) == len(is_high)
        return made

    assert run(picks_at_once) == run(None)


@given(st.integers(1, 8), st.integers(1, 40))
def test_a_burst_is_shared_equally_among_equals(num_instances: int, num_requests: int) -> None:
    core = make_core([float("inf")] * num_instances, [0] * num_instances, max_waiting=100)
    for number in range(num_requests):
        core.apply(Submit(make_request(f"r{number}")), 0.0)
    counts = dict.fromkeys((f"i{number}" for number in range(num_instances)), 0)
    for action in core.actions(0.0):
        if isinstance(action, Dispatch):
            counts[action.instance_id] += 1
    assert sum(counts.values()) == num_requests
    assert max(counts.values()) - min(counts.values()) <= 1


def test_a_request_goes_where_others_of_its_model_are() -> None:
    """All instances are as soon free and have memory; without known step times it goes to the freest."""
    for decode_s, expected in ((0.02, {"m": "i0", "n": "i1"}), (0.0, {"m": "i1", "n": "i1"})):
        core = make_core([], [], max_waiting=4)
        for name, model in (("i0", "m"), ("i1", "n")):
            core.apply(OnRegistry(name, make_info(name, "m", "n")), 0.0)
            freeness = 10.0 if name == "i0" else 20.0
            report = make_report(name, 1, freeness=freeness, running={model: 5}, decode_s=decode_s)
            core.apply(OnReport(report), 0.0)
        for model in ("m", "n"):
            core.apply(Submit(make_request(model, model=model)), 0.0)
            (dispatch,) = [action for action in core.actions(0.0) if isinstance(action, Dispatch)]
            assert dispatch.instance_id == expected[model]


def test_what_is_on_its_way_counts_and_offline_requests_do_not() -> None:
    core = make_core([], [], max_waiting=8)
    for name in ("i0", "i1"):
        core.apply(OnRegistry(name, make_info(name, "m", "n")), 0.0)
        offline = {"n" if name == "i0" else "m": 3}
        report = make_report(name, 1, freeness=10.0, waiting=offline, offline=offline, decode_s=0.02)
        core.apply(OnReport(report), 0.0)
    sent = []
    for number, model in enumerate("mnmnm"):
        core.apply(Submit(make_request(f"r{number}", model=model)), 0.0)
        sent += [action.instance_id for action in core.actions(0.0) if isinstance(action, Dispatch)]
    assert sent == ["i0", "i1", "i0", "i1", "i0"]


@given(st.lists(st.sampled_from(["online", "offline", "room"]), max_size=80))
def test_each_room_goes_to_the_oldest_of_the_first_class(events: list[str]) -> None:
    """So the wait is bounded by what stood ahead: nobody is passed within a class, however work arrives."""
    core = make_core([10.0], [1], max_waiting=1)
    core.apply(OnReport(make_report("i0", 2, freeness=10.0, num_running=1, room=1)), 0.0)
    waiting: dict[str, list[str]] = {"online": [], "offline": []}
    in_flight: list[str] = []
    sequence = 2
    for number, event in enumerate(events):
        if event == "room":
            sequence += 1
            report = make_report("i0", sequence, freeness=10.0, num_running=1, admitted=in_flight, room=1)
            core.apply(OnReport(report), 0.0)
            in_flight = []
        else:
            name = f"{event}-{number}"
            waiting[event].append(name)
            core.apply(Submit(make_request(name, online=event == "online")), 0.0)
        expected = []
        if waiting["online"] and not any(name.startswith("online") for name in in_flight):
            expected.append(waiting["online"].pop(0))
        if waiting["offline"] and not any(name.startswith("offline") for name in in_flight):
            expected.append(waiting["offline"].pop(0))
        in_flight += expected
        dispatches = [action for action in core.actions(0.0) if isinstance(action, Dispatch)]
        assert [dispatch.request.request_id for dispatch in dispatches] == expected
        for dispatch in dispatches:
            core.apply(OnDispatched.to(dispatch, None), 0.0)


LONG, SHORT = 960, 16
"""Tokens of 15 merged blocks, and of a quarter of one."""


def report_left(
    core: SchedulerCore, name: str, sequence: int, now: float, *, left: float, num_waiting: int = 0
) -> None:
    """Ten requests run there."""
    core.apply(
        OnReport(make_report(name, sequence, freeness=left / 10, num_running=10, waiting={"m": num_waiting})), now
    )


def placed(core: SchedulerCore, now: float) -> list[tuple[str, str]]:
    return [(a.request.request_id, a.instance_id) for a in core.actions(now) if isinstance(a, Dispatch)]


def test_few_instances_gather_memory_and_what_fits_passes_what_does_not() -> None:
    core = make_core([1.0, 0.9, 0.8, 0.7, 0.6], [10] * 5, max_waiting=2, share=0.25)
    for name, tokens in (("long 1", LONG), ("long 2", LONG), ("longer", LONG + 10), ("short", SHORT)):
        core.apply(Submit(make_request(name, num_prompt=tokens)), 0.0)
    assert placed(core, 0.0) == [("long 1", "i0"), ("short", "i1")]
    report_left(core, "i0", 2, 1.0, left=-5.0, num_waiting=1)
    core.apply(Submit(make_request("also short", num_prompt=SHORT)), 1.0)
    assert placed(core, 1.0) == [("also short", "i2")]
    report_left(core, "i1", 2, 2.0, left=40.0)
    assert placed(core, 2.0) == [("long 2", "i1")], "it fits now, whoever gathers"


def test_the_next_one_gathers_when_the_first_has_its_memory() -> None:
    core = make_core([1.0, 0.9], [10] * 2, max_waiting=2, share=0.25)
    core.apply(Submit(make_request("long 1", num_prompt=LONG)), 0.0)
    core.apply(Submit(make_request("long 2", num_prompt=LONG)), 0.0)
    ((first, where),) = placed(core, 0.0)
    assert (first, where) == ("long 1", "i0")
    core.apply(OnReport(make_report("i0", 2, freeness=0.8, num_running=11, admitted=["long 1"])), 1.0)
    assert placed(core, 1.0) == [("long 2", "i1")]


def test_nobody_gathers_what_the_cluster_does_not_have() -> None:
    core = make_core([0.7, 0.6], [10] * 2, max_waiting=2, share=0.25)
    core.apply(Submit(make_request("long", num_prompt=LONG)), 0.0)
    core.apply(Submit(make_request("short", num_prompt=SHORT)), 0.0)
    assert placed(core, 0.0) == [("short", "i0")]
    report_left(core, "i1", 2, 1.0, left=8.0)
    assert placed(core, 1.0) == []
    report_left(core, "i1", 3, 2.0, left=10.0)
    assert placed(core, 2.0) == [("long", "i1")], "in pieces"


def test_one_that_has_been_passed_for_long_goes_where_least_is_missing() -> None:
    core = make_core([1.0, 0.9, 0.8], [10] * 3, max_waiting=2, share=0.25)
    core.apply(Submit(make_request("long 1", num_prompt=LONG)), 0.0)
    core.apply(Submit(make_request("long 2", num_prompt=LONG)), 0.0)
    assert placed(core, 0.0) == [("long 1", "i0")]
    for second in range(1, int(OVERDUE_S)):
        report_left(core, "i1", 1 + second, float(second), left=9.0)
        assert placed(core, float(second)) == []
    for number in (1, 2):
        report_left(core, f"i{number}", 100, OVERDUE_S + 0.1, left=9.0 + number)
    assert placed(core, OVERDUE_S + 0.1) == [("long 2", "i2")]
