"""A recorded run replays to the same plans, and a changed one is noticed."""

from __future__ import annotations

import random

import msgspec
import pytest

from shared import recording as records
from shared.costs.model import CostSource
from shared.engine import calls, recording
from shared.engine.calls import AddModel, Cancel, OnCopy, OnStep, OnTime, Submit
from shared.engine.config import EngineConfig
from shared.engine.engine import Engine
from shared.engine.plan import ModelShape
from shared.messages.requests import Priority, RequestClass
from shared.policies.catalogue import ordering_policy
from shared.policies.prompt_lookup import LookupSettings
from shared.policies.slo_budget import SloTokenBudget
from tests.shared.engine.cluster import Node
from tests.shared.engine.fake_executor import FakeExecutor, next_token, repeating_token, request
from tests.shared.engine.test_moves_properties import CHANCES, Events

SHAPES = [ModelShape("a", 4, 3, 60), ModelShape("b", 2, 2, 24)]


def test_options_of_an_engine_are_fields_of_its_configuration() -> None:
    policies = ordering_policy("fcfs"), SloTokenBudget(8)
    engine = Engine(8, 4, *policies, EngineConfig(steps_in_flight=3, num_host_merged=5), steps_in_flight=1)
    assert engine.steps.max_in_flight == 1 and engine.memory.host.pool is not None
    with pytest.raises(TypeError, match="max_wating"):
        Engine(8, 4, *policies, max_wating=1)


def record_random_run(seed: int, lookup: LookupSettings = LookupSettings()) -> bytes:  # noqa: B008 - immutable
    chooser = random.Random(seed)
    written: list[bytes] = []
    engine = recording.recorded(
        recording.Configuration(
            num_merged=6, num_rows=4, ordering="fcfs", token_budget=8, steps_in_flight=2, lookup=lookup
        ),
        written.append,
    )
    for shape in SHAPES:
        engine.apply(AddModel(shape), 0.0)
    executor = FakeExecutor(SHAPES, repeating_token if lookup.num_tokens else next_token)
    in_flight = []
    for tick in range(400):
        now = tick * 0.01
        if chooser.random() < 0.2:
            prompt = [chooser.randrange(4) for _ in range(chooser.randrange(1, 16))]
            engine.apply(
                Submit(
                    request(
                        f"r{tick}",
                        prompt,
                        chooser.randrange(1, 10),
                        model=chooser.choice("ab"),
                        priority=chooser.choice(list(Priority)),
                        request_class=chooser.choice(list(RequestClass)),
                        timeout_s=chooser.choice([0.5, 100.0]),
                    )
                ),
                now,
            )
        if chooser.random() < 0.05:
            engine.apply(Cancel(f"r{chooser.randrange(tick + 1)}"), now)
        engine.apply(OnTime(), now)
        plan = engine.plan(now)
        for copy in executor.start(engine.next_copies()):
            engine.apply(OnCopy(copy.copy_id, True), now)
        if plan is not None:
            in_flight.append(plan)
            executor.launch(plan)
        if in_flight and chooser.random() < 0.8:
            engine.apply(OnStep(executor.execute(in_flight.pop(0))), now)
    assert len(written) > 500
    return b"".join(written)


@pytest.mark.parametrize("seed", range(5))
def test_replay_makes_the_same_plans(seed):
    run = record_random_run(seed)
    engine, num_plans = recording.replay(run)
    engine.check()
    assert num_plans == 400
    assert engine.cost_models()["a"].source == CostSource.LIVE


def test_replay_guesses_the_same_tokens():
    run = record_random_run(0, LookupSettings(4, 1, 3))
    engine, _ = recording.replay(run)
    engine.check()
    assert engine.counters.accepted_tokens.total() > 10


def test_recordings_from_before_drafts_replay():
    """A plan had one field less, which is empty where nothing is guessed."""
    frames = []
    for frame in records.frames(record_random_run(1)):
        record = msgspec.msgpack.decode(frame)
        if record["type"] == "Decided" and record["decision"]:
            plan = msgspec.msgpack.decode(record["decision"])
            assert plan.pop() == []
            frame = msgspec.msgpack.encode(record | {"decision": msgspec.msgpack.encode(plan)})
        frames.append(len(frame).to_bytes(records.LENGTH_BYTES, "little") + frame)
    assert recording.replay(b"".join(frames))[1] == 400


class RecordedEvents(Events):
    """Random moves between engines that are recorded."""

    def __init__(self, chooser: random.Random) -> None:
        self.written: list[list[bytes]] = []
        super().__init__(chooser)

    def _node(self) -> Node:
        self.written.append([])
        configuration = recording.Configuration(
            num_merged=8,
            num_rows=4,
            ordering="doubling_budget",
            token_budget=12,
            steps_in_flight=2,
            num_host_merged=4,
            checkpoint_start=0.0,
            migration_cooldown_s=0.1,
        )
        return Node(recording.recorded(configuration, self.written[-1].append), SHAPES)


def calls_of(run: bytes) -> list[calls.Call[object]]:
    return [
        recording.CALLS.decode(record.call) for record in records.records(run) if isinstance(record, records.Applied)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_moves_are_replayed_at_both_ends(seed):
    events = RecordedEvents(random.Random(seed))
    names, weights = list(CHANCES), list(CHANCES.values())
    for _ in range(700):
        getattr(events, events.chooser.choices(names, weights)[0])()
    events.cluster.finish()
    seen = set()
    for written in events.written:
        run = b"".join(written)
        seen |= {type(call) for call in calls_of(run)}
        engine, num_plans = recording.replay(run)
        engine.check()
        assert num_plans > 50 and not engine.all_held()
    assert seen >= {calls.Pin, calls.Unpin, calls.Detach, calls.PinRest, calls.Freeze, calls.Reattach, calls.Release}
    assert seen >= {calls.EndMigration, calls.Reserve, calls.Adopt, calls.Unreserve}


def test_a_torn_end_is_ignored():
    run = record_random_run(1)
    recording.replay(run[:-3])


def test_a_different_input_is_noticed_and_the_difference_named():
    run = record_random_run(2)
    header, *rest = records.frames(run)
    first = next(i for i, frame in enumerate(rest) if b"submit" in frame)
    changed = [header, *rest[:first], *rest[first + 1 :]]
    with pytest.raises(records.ReplayMismatch, match=r"decision \d+ at .* was .*, and is "):
        recording.replay(b"".join(len(frame).to_bytes(records.LENGTH_BYTES, "little") + frame for frame in changed))


@pytest.mark.parametrize("noise", [b"", b"not a recording at all", b"\x03\x00\x00\x00abc"])
def test_other_bytes_are_refused_with_a_sentence(noise):
    with pytest.raises(records.ReplayMismatch, match="not a recording"):
        recording.replay(noise)
