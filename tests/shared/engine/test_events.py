"""What an engine tells of its requests: each thing once, no token but the first after a silence, and nothing to nobody."""

from __future__ import annotations

import itertools
from collections import Counter

from shared.engine import events
from shared.engine.calls import Cancel, OnTime, Submit
from shared.engine.engine import Engine
from shared.engine.plan import ModelShape
from shared.messages.requests import RequestClass
from shared.messages.timeline import EventKind
from shared.policies.catalogue import ordering_policy
from shared.policies.token_budget import FixedTokenBudget
from tests.shared.engine.cluster import Node
from tests.shared.engine.fake_executor import request
from tests.shared.engine.test_suspended_steps import Clocked

SHAPE = ModelShape("a", 4, 2, 400)


def make(num_merged: int = 64, *, is_on: bool = True) -> Node:
    engine = Engine(num_merged, 8, ordering_policy("fcfs"), FixedTokenBudget(512), steps_in_flight=1)
    engine.memory.events.is_on = is_on
    return Node(engine, [SHAPE])


def run(node: Node, *names: str) -> None:
    for now in range(1000):
        if not any(node.engine.held(name) for name in names):
            return
        if node.plan(float(now)):
            node.step_returns(now + 0.5)
    raise AssertionError("they did not end")


def kinds_of(node: Node | Clocked, name: str) -> list[EventKind]:
    taken = [event for _, event in node.engine.memory.events.take()]
    assert all(earlier.at_s <= later.at_s for earlier, later in itertools.pairwise(taken))
    return [event.kind for event in taken if event.request_id == name]


def test_a_request_is_unproven_in_steps_until_its_first_token_here() -> None:
    node = make()
    seen = []
    for now, name in enumerate(["first", "second"]):
        node.engine.apply(Submit(request(name, [1] * 9, 20)), float(now))
        seen.append(node.engine.unproven())
        node.plan(float(now))
        seen.append(node.engine.unproven())
        node.step_returns(now + 0.5)
    assert seen == [[], ["first"], [], ["second"]], "the first decodes beside it"
    node.plan(3.0)
    assert node.engine.unproven() == []


def test_a_request_that_nothing_happens_to() -> None:
    node = make()
    node.engine.apply(Submit(request("r", [1] * 9, 20, ttft_objective_s=2.0)), 0.0)
    run(node, "r")
    taken = node.engine.memory.events.take()
    assert [event.kind for _, event in taken] == [
        EventKind.ARRIVED,
        EventKind.ADMITTED,
        EventKind.FIRST_TOKEN,
        EventKind.ENDED,
    ]
    assert {gateway_id for gateway_id, _ in taken} == {"gateway"}
    arrived, admitted, _, ended = (event for _, event in taken)
    assert arrived.numbers == (2.0, 0.11, 0) and admitted.numbers == (0, 9)
    assert (ended.cause, ended.numbers[1]) == ("length", 20)
    assert node.engine.memory.events.take() == []


def test_preemptions_and_what_comes_after_them() -> None:
    node = make(num_merged=12)
    for name in ("first", "second", "third"):
        node.engine.apply(Submit(request(name, [1, 2, 3], 80)), 0.0)
    run(node, "first", "second", "third")
    told = Counter(event.kind for _, event in node.engine.memory.events.take())
    preempted = told[EventKind.PREEMPTED]
    assert preempted == node.engine.counters.num_preemptions > 0
    assert told[EventKind.ADMITTED] == 3 + preempted and told[EventKind.FIRST_TOKEN] == told[EventKind.ENDED] == 3
    assert told[EventKind.DECODE_RESUMED] == preempted


def test_an_end_that_is_an_error_is_told_with_its_reason() -> None:
    node = make()
    node.engine.apply(Submit(request("late", [1, 2, 3], 80, timeout_s=9.0)), 0.0)
    node.engine.apply(OnTime(), 9.5)
    ended = [event for _, event in node.engine.memory.events.take() if event.kind is EventKind.ENDED]
    assert [event.cause for event in ended] == ["deadline: the request's time of 9 s is over"]


def test_a_suspension_is_told_with_its_end() -> None:
    clocked = Clocked()
    clocked.engine.memory.events.is_on = True
    clocked.interrupted()
    for _ in range(200):
        if not clocked.engine.all_held():
            break
        clocked.step()
    kinds = kinds_of(clocked, "offline")
    assert kinds[:3] == [EventKind.ARRIVED, EventKind.ADMITTED, EventKind.SUSPENDED]
    assert kinds[3:] == [EventKind.RESUMED, EventKind.FIRST_TOKEN, EventKind.ENDED]


def test_offline_requests_have_no_objectives_but_their_own() -> None:
    node = make()
    offline = {"request_class": RequestClass.OFFLINE}
    node.engine.apply(Submit(request("r", [1], 2, **offline)), 0.0)
    node.engine.apply(Submit(request("own", [1], 2, tpot_objective_s=3.0, **offline)), 0.0)
    first, second = (event.numbers for _, event in node.engine.memory.events.take())
    assert (first, second) == ((0.0, 0.0, 0), (0.0, 3.0, 1))


def test_what_nobody_takes_is_not_kept(monkeypatch) -> None:
    node = make(is_on=False)
    node.engine.apply(Submit(request("r", [1], 2)), 0.0)
    run(node, "r")
    assert node.engine.memory.events.take() == []
    monkeypatch.setattr(events, "MAX_EVENTS", 10)
    node = make()
    for number in range(50):
        node.engine.apply(Submit(request(f"r{number}", [1], 2)), 0.0)
        node.engine.apply(Cancel(f"r{number}"), 0.0)
    assert len(node.engine.memory.events.take()) == 10
