"""The loop passes everything on between an engine and an executor; both are scripted."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from services.worker import black_box
from services.worker.black_box import BlackBox
from services.worker.instance.engine_loop import EngineLoop
from shared.engine.calls import Adopt, Call, OnCopy, OnStep, OnTime, Reattach, Submit, Unreserve
from shared.engine.driver import StepStats
from shared.engine.plan import CopyKind, EndedCopy, KvCopy, StepPlan, StepResult
from tests.shared.engine.fake_executor import request

INTERRUPTIBLE = StepPlan(
    step_id=7,
    model="m",
    rows=[0],
    starts=[0],
    counts=[5],
    samples=[True],
    new_sequences=[],
    new_blocks=[],
    is_interruptible=True,
)
COPY = KvCopy(3, CopyKind.CHECKPOINT, "m", [1], [2])


class ScriptedEngine:
    """Plans what is in `plans`, gives out what is in `copies`; remembers what it was told."""

    planner = SimpleNamespace(last_limit_s=0.25)

    def __init__(self) -> None:
        self.steps = SimpleNamespace(max_in_flight=1)
        self.plans: deque[StepPlan] = deque()
        self.copies: deque[KvCopy] = deque()
        self.copies_after_step: deque[KvCopy] = deque()
        self.interrupts: deque[int] = deque()
        self.silent: list[str] = []
        self.told: list[Any] = []

    def plan(self, _now: float) -> StepPlan | None:
        return self.plans.popleft() if self.plans else None

    def next_copies(self) -> list[KvCopy]:
        copies = list(self.copies)
        self.copies.clear()
        return copies

    def take_interrupt(self, _now: float) -> int | None:
        return self.interrupts.popleft() if self.interrupts else None

    def apply(self, call: Call[Any], _now: float) -> None:
        if isinstance(call, OnTime):
            return
        self.told.append(call)
        if isinstance(call, OnStep):
            self.copies.extend(self.copies_after_step)
            self.copies_after_step.clear()

    def effects(self) -> list[Any]:
        return []

    def next_wakeup(self) -> None: ...

    def unproven(self) -> list[str]:
        return self.silent


class ScriptedExecutor:
    """A step runs until `go` is set, or until it is interrupted; copies end when the test says so."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.launched: list[StepPlan] = []
        self.started: list[KvCopy] = []
        self.ended: deque[EndedCopy] = deque()
        self.claimed: list[tuple[str, list[int], str]] = []
        self._interrupted: set[int] = set()
        self._callback: Callable[[], None] = lambda: None

    def launch(self, plan: StepPlan) -> None:
        self.launched.append(plan)

    def collect(self) -> StepResult:
        plan = self.launched[-1]
        self.go.wait(10)
        if plan.step_id in self._interrupted:
            self._interrupted.discard(plan.step_id)
            return StepResult(plan.step_id, [], suspended_share=0.5)
        return StepResult(plan.step_id, [1])

    def interrupt(self, step_id: int) -> None:
        self._interrupted.add(step_id)
        self.go.set()

    def start_copy(self, copy: KvCopy) -> None:
        self.started.append(copy)

    def claim_blocks(self, model: str, blocks: list[int]) -> str:
        if model == "unknown":
            raise KeyError(model)
        self.claimed.append((model, blocks, threading.current_thread().name))
        return "event"

    def end_copy(self, copy_id: int, ok: bool) -> None:
        self.ended.append(EndedCopy(copy_id, ok))
        self._callback()

    def finished_copies(self) -> list[EndedCopy]:
        return [self.ended.popleft() for _ in range(len(self.ended))]

    def on_copy_finished(self, callback: Callable[[], None]) -> None:
        self._callback = callback


@pytest.fixture
def scene() -> Iterator[SimpleNamespace]:
    engine, executor, stats = ScriptedEngine(), ScriptedExecutor(), []
    loop = EngineLoop(engine, executor, time.monotonic, lambda _effects, one: stats.append(one))  # type: ignore[arg-type]
    loop.start()
    yield SimpleNamespace(engine=engine, executor=executor, stats=stats, loop=loop)
    executor.go.set()
    loop.stop(5)
    assert not loop.failure


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def nudge(scene: SimpleNamespace) -> None:
    """Lets an idle loop look again."""
    scene.loop.apply(Submit(request("r", [1], 1)))


def test_a_request_that_arrives_while_a_step_runs_interrupts_it(scene: SimpleNamespace) -> None:
    scene.engine.plans.append(INTERRUPTIBLE)
    nudge(scene)
    until(lambda: scene.executor.launched)
    nudge(scene)
    assert all(isinstance(call, Submit) for call in scene.engine.told), "the engine had no wish to interrupt it"
    scene.engine.interrupts.append(7)
    nudge(scene)
    until(lambda: OnStep(StepResult(7, [], suspended_share=0.5)) in scene.engine.told)
    until(lambda: len(scene.stats) == 1)
    (stats,) = scene.stats
    assert stats == StepStats(
        "m", 5, (0, 0), stats.duration_s, 0.25, is_suspended=True, planned_s=stats.planned_s, ended_s=stats.ended_s
    )


def test_what_has_made_no_token_yet_is_noted_before_each_step(scene: SimpleNamespace) -> None:
    box, found = black_box.make(), []
    scene.loop._black_box = BlackBox(box)
    launch = scene.executor.launch

    def launched(plan: StepPlan) -> None:
        found.append(black_box.read(box))
        scene.engine.silent = afterwards[plan.step_id]
        launch(plan)

    scene.executor.launch = launched
    scene.executor.go.set()
    decode = msgspec.structs.replace(INTERRUPTIBLE, counts=[1], num_decodes=(1, 0))
    steps = [
        (INTERRUPTIBLE, ["r", "s"], ["s"]),
        (INTERRUPTIBLE, ["s"], []),
        (decode, [], []),
        (INTERRUPTIBLE, ["t"], ["t"]),
    ]
    afterwards = [left for _, _, left in steps]
    for number, (plan, silent, _) in enumerate(steps):
        scene.engine.silent = silent
        scene.engine.plans.append(msgspec.structs.replace(plan, step_id=number))
        nudge(scene)
        until(lambda: len(scene.stats) > number)  # noqa: B023  # awaited here
    assert found == [("r", "s"), ("s",), (), ("t",)], "a later part of a prompt counts as its beginning does"
    assert black_box.read(box) == ("t",)
    os.close(box)


def test_an_interrupt_decided_with_the_plan_reaches_the_executor(scene: SimpleNamespace) -> None:
    """The engine may find at planning that the step it planned before should stop."""
    with scene.loop.locked() as engine:
        engine.plans.append(INTERRUPTIBLE)
        scene.loop._wake.set()
        engine.interrupts.append(7)
    until(lambda: OnStep(StepResult(7, [], suspended_share=0.5)) in scene.engine.told)


def test_copies_start_after_plans_and_after_steps_and_their_end_wakes_an_idle_loop(scene: SimpleNamespace) -> None:
    after = KvCopy(4, CopyKind.RESTORE, "m", [1], [2])
    with scene.loop.locked() as engine:
        engine.copies.append(COPY)
        engine.copies_after_step.append(after)
        engine.plans.append(INTERRUPTIBLE)
    nudge(scene)
    until(lambda: scene.executor.launched)
    assert scene.executor.started == [COPY], "before the step has run"
    scene.executor.go.set()
    until(lambda: scene.executor.started == [COPY, after])
    scene.executor.end_copy(4, True)
    until(lambda: OnCopy(4, True) in scene.engine.told)
    scene.executor.end_copy(3, False)
    until(lambda: OnCopy(3, False) in scene.engine.told)


def test_calls_between_steps_wait_for_copies_too_and_nothing_is_planned_meanwhile(scene: SimpleNamespace) -> None:
    scene.engine.copies.append(COPY)
    nudge(scene)
    until(lambda: scene.executor.started)
    future = scene.loop.between_steps(lambda: list(scene.engine.told))
    scene.engine.plans.append(INTERRUPTIBLE)
    nudge(scene)
    assert not future.done() and not scene.executor.launched
    scene.executor.end_copy(3, True)
    assert future.result(10)[-1] == OnCopy(3, True)
    until(lambda: scene.executor.launched)


def test_blocks_are_claimed_in_the_loops_thread_while_a_step_is_in_flight(scene: SimpleNamespace) -> None:
    scene.engine.steps.max_in_flight = 2
    scene.engine.plans.append(INTERRUPTIBLE)
    nudge(scene)
    until(lambda: scene.executor.launched)
    future = scene.loop.claim_blocks("m", [1, 2])
    scene.executor.go.set()
    assert future.result(10) == "event"
    assert scene.executor.claimed == [("m", [1, 2], "engine")]


def test_a_claim_wakes_an_idle_loop_and_does_not_wait_for_calls_between_steps(scene: SimpleNamespace) -> None:
    assert scene.loop.claim_blocks("m", [1]).result(10) == "event"
    scene.engine.copies.append(COPY)
    nudge(scene)
    until(lambda: scene.executor.started)
    between = scene.loop.between_steps(lambda: len(scene.executor.claimed))
    assert scene.loop.claim_blocks("m", [2]).result(10) == "event"
    assert not between.done()
    scene.executor.end_copy(3, True)
    assert between.result(10) == 2


def test_a_claim_that_fails_or_is_given_up_does_not_stop_the_loop(scene: SimpleNamespace) -> None:
    with pytest.raises(KeyError):
        scene.loop.claim_blocks("unknown", [1]).result(10)
    with scene.loop.locked():
        futures = [scene.loop.claim_blocks("m", [n]) for n in range(8)]
        given_up = [future.cancel() for future in futures]
    assert scene.loop.claim_blocks("m", [9]).result(10) == "event"
    assert [blocks[0] for _, blocks, _ in scene.executor.claimed] == [
        *(n for n, is_given_up in enumerate(given_up) if not is_given_up),
        9,
    ]


def test_calls_to_a_loop_that_has_ended_fail_at_once(scene: SimpleNamespace) -> None:
    scene.loop.stop(5)
    for future in (scene.loop.claim_blocks("m", [1]), scene.loop.between_steps(int)):
        with pytest.raises(RuntimeError, match="has ended"):
            future.result(1)


def test_a_request_that_moves_in_or_is_put_back_interrupts_a_step_like_a_new_one(scene: SimpleNamespace) -> None:
    for number, come in enumerate(
        (lambda: scene.loop.apply(Adopt(None)), lambda: scene.loop.apply(Reattach("r", 2))), 1
    ):
        scene.executor.go.clear()
        scene.engine.plans.append(INTERRUPTIBLE)
        nudge(scene)
        until(lambda: len(scene.executor.launched) == number)  # noqa: B023
        scene.engine.interrupts.append(7)
        come()
        until(lambda: len(scene.stats) == number)  # noqa: B023
        assert scene.stats[-1].is_suspended
    assert Adopt(None) in scene.engine.told and Reattach("r", 2) in scene.engine.told


def test_room_that_becomes_free_wakes_the_loop(scene: SimpleNamespace) -> None:
    scene.engine.plans.append(INTERRUPTIBLE)
    scene.executor.go.set()
    scene.loop.apply(Unreserve("m1"))
    until(lambda: scene.executor.launched)
    assert Unreserve("m1") in scene.engine.told


def test_blocks_are_moved_before_what_they_left_is_claimed(scene: SimpleNamespace) -> None:
    """A reservation moved blocks away; it was made in another thread, and is to be written to before the next plan."""
    order: list[str] = []
    started, claimed = scene.executor.start_copy, scene.executor.claim_blocks
    scene.executor.start_copy = lambda copy: (order.append("move"), started(copy))
    scene.executor.claim_blocks = lambda *blocks: (order.append("claim"), claimed(*blocks))[1]
    scene.engine.copies.append(KvCopy(5, CopyKind.MOVE, "m", [1], [], [2]))
    assert scene.loop.claim_blocks("m", [1]).result(5) == "event"
    assert order == ["move", "claim"]


def test_a_move_that_cannot_be_carried_out_ends_the_loop(scene: SimpleNamespace) -> None:
    """Nobody knows what the blocks hold; the instance is of no more use."""

    def start_copy(_copy: KvCopy) -> None:
        raise IndexError("no such block")

    scene.executor.start_copy = start_copy
    scene.engine.copies.append(KvCopy(5, CopyKind.MOVE, "m", [1], [], [2]))
    with pytest.raises(IndexError):
        scene.loop.claim_blocks("m", [1]).result(5)
    scene.loop._thread.join(5)
    assert "no such block" in scene.loop.failure
    scene.loop.failure = ""


def test_the_loop_s_niceness_is_relative_to_the_process() -> None:
    """Less than that would need a privilege, without which the thread would not live."""

    def run() -> None:
        thread_id = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + 3)
        mine = os.getpriority(os.PRIO_PROCESS, thread_id)
        loop = EngineLoop(ScriptedEngine(), ScriptedExecutor(), time.monotonic, lambda *_: None, niceness=2)  # type: ignore[arg-type]
        loop.start()
        of_loop = loop.between_steps(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        found.append((of_loop.result(10), min(mine + 2, 19)))
        loop.stop(5)

    found: list[tuple[int, int]] = []
    nicer = threading.Thread(target=run)
    nicer.start()
    nicer.join(30)
    assert len(found) == 1 and found[0][0] == found[0][1]
