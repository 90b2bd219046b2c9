"""Rank 0 of a group, with another rank that says what a test wants it to say."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from services.worker.executor.executor import Executor
from services.worker.ranks import group_executor, messages
from services.worker.ranks.group import ALONE, Alone, GroupError
from services.worker.ranks.group_executor import GroupExecutor
from services.worker.ranks.messages import (
    Answer,
    Copy,
    CopyEnded,
    Forget,
    FromRank,
    Launch,
    Prepare,
    Ready,
    StepFailed,
    Stream,
    ToRank,
    framed,
)
from services.worker.ranks.shared_memory import RankMemory
from services.worker.ranks.starting import RankProcess
from shared.engine.plan import CopyKind, EndedCopy, KvCopy, NewSequence, StepPlan
from shared.messages.cluster import ModelSpec
from shared.messages.requests import SamplingParams, pack_tokens
from shared.models.checkpoint import CheckpointError, CheckpointMissing
from tests.worker.checkpoints import write_checkpoint

UNKNOWN = StepPlan(
    step_id=5, model="nobody", rows=[0], starts=[0], counts=[1], samples=[True], new_sequences=[], new_blocks=[]
)


class Scene:
    """`answers`: what the other rank says to a message, by the message's type."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = socket.socketpair()
        self.theirs = Stream[ToRank](theirs, ToRank)
        self.answers: dict[type, Callable[[ToRank], FromRank | None]] = {}
        self.lost: list[str] = []
        self.say(Ready())
        threading.Thread(target=self._play, daemon=True).start()
        self.process = subprocess.Popen(["sleep", "60"])
        other = RankProcess(1, self.process, Stream[FromRank](ours, FromRank))
        self.executor = GroupExecutor(
            [other],
            folder / "group",
            lambda: (Executor("cpu", 2, 1 << 18, 2, num_host_merged=2), ALONE),
            self.lost.append,
        )

    def say(self, message: FromRank) -> None:
        self.theirs.send(framed(message))

    def _play(self) -> None:
        while (message := self.theirs.receive()) is not None:
            answer = self.answers.get(type(message), lambda _: None)(message)
            if answer is not None:
                self.say(answer)

    def until_lost(self) -> str:
        deadline_s = time.monotonic() + 5.0
        while not self.lost:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        return self.lost[0]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(group_executor, "AGREE_TIMEOUT_S", 0.4)
    for timeout in ("ANSWER_TIMEOUT_S", "SAMPLE_TIMEOUT_S"):
        monkeypatch.setattr(group_executor, timeout, 0.6)
    made = Scene(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()


def test_a_plan_that_all_refuse_is_an_error_of_the_step(scene: Scene) -> None:
    scene.answers[Launch] = lambda message: StepFailed(message.plan.step_id, "KeyError")  # type: ignore[union-attr]
    assert "nobody" in scene.executor.execute(UNKNOWN).error
    time.sleep(0.6)
    assert not scene.lost


def test_a_step_that_fails_on_rank_0_alone_ends_the_group(scene: Scene) -> None:
    with pytest.raises(GroupError, match="step 5 failed on rank 0 and not on all others"):
        scene.executor.execute(UNKNOWN)
    assert scene.lost


def test_a_step_that_fails_on_another_rank_alone_ends_the_group(scene: Scene) -> None:
    scene.say(StepFailed(7, "out of memory"))
    assert scene.until_lost() == "step 7 failed on rank 1 alone: out of memory"


def test_a_last_stage_that_says_nothing_ends_the_group(scene: Scene) -> None:
    with pytest.raises(GroupError, match="the last stage has not ended step 5"):
        scene.executor._sampled(5)
    assert scene.lost


def test_a_model_that_one_rank_cannot_add_ends_the_group(scene: Scene, tmp_path: Path) -> None:
    spec = ModelSpec("model", str(write_checkpoint(tmp_path, "llama")))
    scene.answers[Prepare] = lambda message: Answer(message.call_id)  # type: ignore[union-attr]
    prepared = scene.executor.prepare_model(spec)
    with pytest.raises(GroupError, match="ranks differ in adding a model: rank 0: succeeded; the others: no word"):
        scene.executor.add_model(prepared)
    assert scene.lost


@pytest.mark.parametrize(
    ("told", "kind", "reason"),
    [
        ("OSError: gone", RuntimeError, "another rank failed in reading .*: OSError: gone"),
        ("CheckpointError: odd", CheckpointError, "^odd$"),
        ("CheckpointMissing: no file", CheckpointMissing, "^no file$"),
    ],
)
def test_what_one_rank_cannot_read_is_given_up_on_all_and_the_group_goes_on(
    scene: Scene, tmp_path: Path, told: str, kind: type[Exception], reason: str
) -> None:
    spec, forgotten = ModelSpec("model", str(write_checkpoint(tmp_path, "llama"))), threading.Event()
    scene.answers[Prepare] = lambda message: Answer(message.call_id, error=told)  # type: ignore[union-attr]
    scene.answers[Forget] = lambda _: forgotten.set()
    with pytest.raises(kind, match=reason):
        scene.executor.prepare_model(spec)
    scene.answers[Prepare] = lambda message: Answer(message.call_id)  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="does not exist"):
        scene.executor.prepare_model(ModelSpec("model", str(tmp_path / "nothing")))
    assert forgotten.wait(5.0) and scene.executor.prepare_model(spec) is not None and not scene.lost


def test_a_step_that_fails_while_ranks_compute_it_is_no_error_that_they_agree_on(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All fail, but in the middle of calls to each other, of which some have made more than others."""

    class Two(Alone):
        size = 2

    executor = Executor("cpu", 8, 1 << 18, 2, group=Two(), shared=RankMemory.create(2, 0))
    shape = executor.add_model(executor.prepare_model(ModelSpec("m", str(write_checkpoint(tmp_path, "llama")))))

    def fail(*_: object) -> None:
        raise MemoryError("a layer")

    monkeypatch.setattr(executor._models["m"].model, "forward", fail)
    plan = msgspec.structs.replace(
        UNKNOWN,
        model=shape.name,
        new_sequences=[NewSequence(0, pack_tokens([1]), 1, SamplingParams(max_tokens=5), [0])],
    )
    with pytest.raises(GroupError, match="failed in the middle of computing: MemoryError: a layer"):
        executor.launch(plan)
    executor.launch(UNKNOWN)
    assert "nobody" in executor.collect().error, "that is found before it computes"
    executor.close()


def test_a_copy_has_ended_when_it_has_on_all_ranks_and_failed_if_on_one(scene: Scene) -> None:
    finished, has_come = threading.Event(), threading.Event()
    scene.executor.on_copy_finished(finished.set)
    scene.answers[Copy] = lambda _: has_come.set()
    scene.executor.start_copy(KvCopy(1, CopyKind.CHECKPOINT, "nobody", [0], [0]))
    assert finished.wait(5.0) and scene.executor.finished_copies() == [], "one has told"
    assert has_come.wait(5.0)
    finished.clear()
    scene.say(CopyEnded(1, True))
    assert finished.wait(5.0) and [ended[:2] for ended in scene.executor.finished_copies()] == [(1, False)]
    scene.answers[Copy] = lambda message: CopyEnded(message.copy.copy_id, True)  # type: ignore[union-attr]
    scene.executor.start_copy(KvCopy(2, CopyKind.CHECKPOINT, "nobody", [0], [0]))
    ended: list[EndedCopy] = []
    deadline_s = time.monotonic() + 5.0
    while not ended and time.monotonic() < deadline_s:
        ended = scene.executor.finished_copies()
    assert [copy[:2] for copy in ended] == [(2, False)]


def test_sending_to_a_rank_that_takes_nothing_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "SEND_TIMEOUT_S", 0.1)
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(OSError, match="unavailable"):
        Stream[FromRank](ours, FromRank).send(bytes(16 << 20))
    ours.close()


def test_a_stream_that_ends_or_says_what_nobody_understands_ends_the_group(scene: Scene) -> None:
    scene.theirs.send(b"\x04\x00\x00\x00what")
    assert scene.until_lost().startswith("rank 1 is not understood")
