"""A recorded run replays to the same plans, and a changed one is noticed."""

from __future__ import annotations

import random

import pytest

from shared.engine import recording
from shared.engine.plan import ModelShape
from shared.messages import Priority, RequestClass
from tests.shared.engine.fake_executor import FakeExecutor, request

SHAPES = [ModelShape("a", 4, 3, 60), ModelShape("b", 2, 2, 24)]


def record_random_run(seed: int) -> bytes:
    chooser = random.Random(seed)
    written: list[bytes] = []
    engine = recording.RecordingEngine(recording.Configuration(6, 4, "fcfs", 8, 2), written.append)
    for shape in SHAPES:
        engine.add_model(shape)
    executor = FakeExecutor(SHAPES)
    in_flight = []
    for tick in range(400):
        now = tick * 0.01
        if chooser.random() < 0.2:
            prompt = [chooser.randrange(4) for _ in range(chooser.randrange(1, 16))]
            engine.submit(
                request(
                    f"r{tick}",
                    prompt,
                    chooser.randrange(1, 10),
                    model=chooser.choice("ab"),
                    priority=chooser.choice(list(Priority)),
                    request_class=chooser.choice(list(RequestClass)),
                    timeout_s=chooser.choice([0.5, 100.0]),
                ),
                now,
            )
        if chooser.random() < 0.05:
            engine.cancel(f"r{chooser.randrange(tick + 1)}", now)
        engine.on_time(now)
        if plan := engine.plan(now):
            in_flight.append(plan)
        if in_flight and chooser.random() < 0.8:
            engine.on_step(executor.execute(in_flight.pop(0)), now)
    assert len(written) > 500
    return b"".join(written)


@pytest.mark.parametrize("seed", range(5))
def test_replay_makes_the_same_plans(seed):
    run = record_random_run(seed)
    engine, num_plans = recording.replay(run)
    engine.check()
    assert num_plans == 400


def test_a_torn_end_is_ignored():
    run = record_random_run(1)
    recording.replay(run[:-3])


def test_a_different_input_is_noticed():
    changed, done = [], False
    for record in recording.records(record_random_run(2)):
        if isinstance(record, recording.Submit) and not done:
            done = True
            continue
        encoded = recording._encoder.encode(record)
        changed.append(len(encoded).to_bytes(recording.LENGTH_BYTES, "little") + encoded)
    with pytest.raises(recording.ReplayMismatch):
        recording.replay(b"".join(changed))


@pytest.mark.parametrize("noise", [b"", b"not a recording at all", b"\x03\x00\x00\x00abc"])
def test_other_bytes_are_refused_with_a_sentence(noise):
    with pytest.raises(recording.ReplayMismatch, match="not a recording"):
        recording.replay(noise)
