"""What requests that ended say about how far ahead of the pace the next ones should be."""

from __future__ import annotations

import pytest

from shared.policies.slo_budget import BUSY, CALM, HEAD_START_TOKENS, NEAR_MISS, NEAR_TTFT
from tests.shared.engine.test_suspended_steps import Clocked


def end_online(run: Clocked, name: str, *, waits_s: float = 0.0, waits_between_s: float = 0.0) -> None:
    """After a second in which there is nothing to do."""
    run.now += 1.0
    run.submit(name, [1, 2, 3], 4)
    run.now += waits_s
    while run.engine.all_held():
        run.step()
        run.now += waits_between_s


def num_steps_alone(run: Clocked) -> int:
    """Of an online request, before the suspended step that it interrupted goes on beside it."""
    suspended = run.interrupted()
    for count in range(40):
        if run.step().step_id == suspended.step_id:
            return count
    raise AssertionError("the suspended step never went on")


def test_users_who_are_never_delayed_leave_the_head_start_to_offline_work() -> None:
    new, calm = Clocked(), Clocked()
    for number in range(round(1 / CALM)):
        end_online(calm, f"before-{number}")
    assert num_steps_alone(new) >= HEAD_START_TOKENS
    assert num_steps_alone(calm) <= 2


@pytest.mark.parametrize("waits", [{"waits_s": NEAR_TTFT + 0.05}, {"waits_between_s": 0.095}])
def test_one_who_nearly_missed_an_objective_brings_it_back(waits: dict[str, float]) -> None:
    run = Clocked()
    for number in range(round(1 / CALM)):
        end_online(run, f"before-{number}")
    head_start = run.engine.planner.queues["a"].head_start
    assert head_start.tokens == pytest.approx(0.0)
    end_online(run, "late", **waits)
    assert head_start.tokens == pytest.approx(HEAD_START_TOKENS * NEAR_MISS)


def test_while_online_work_takes_all_of_the_device_the_head_start_is_whole() -> None:
    run = Clocked()
    for number in range(round(1 / CALM)):
        end_online(run, f"before-{number}")
    head_start = run.engine.planner.queues["a"].head_start
    calm_share = head_start.online_share
    run.submit("busy", [1, 2, 3], 1500)
    while run.engine.all_held():
        run.step()
    assert calm_share < 0.1 < BUSY < head_start.online_share <= 1.001
    assert head_start.tokens == HEAD_START_TOKENS


def test_offline_work_is_not_what_makes_the_device_busy() -> None:
    run = Clocked()
    for number in range(20):
        run.submit(f"offline-{number}", [number] * 400, 20, offline=True)
        while run.engine.all_held():
            run.step()
    assert run.now > 5.0
    assert run.engine.planner.queues["a"].head_start.online_share == 0.0


def test_offline_requests_and_cancelled_ones_say_nothing() -> None:
    run = Clocked()
    tokens = run.engine.planner.queues["a"].head_start.tokens
    for number in range(round(2 / CALM)):
        run.submit(f"offline-{number}", [1, 2, 3], 1, offline=True)
        run.step()
        run.submit(f"cancelled-{number}", [1, 2, 3], 9)
        run.step()
        run.engine.cancel(f"cancelled-{number}", run.now)
    end_online(run, "calm")
    assert run.engine.planner.queues["a"].head_start.tokens == pytest.approx(tokens * (1 - CALM))
