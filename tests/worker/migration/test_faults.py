"""Migrations that do not go as they should: cancels, lost answers, and ends that die or stop at every named point."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

import shared.migration.destination as destination_rules
import shared.migration.outgoing as outgoing_rules
from services.worker.migration.faults import FaultError, FaultPoint, FaultPoints
from shared.messages.catalogue import INSTANCE_CANCEL
from shared.messages.requests import Cancel, FinishReason
from shared.runtime.settings import SettingsError
from tests.shared.engine.fake_executor import expected_output, request
from tests.worker.migration.conftest import Group

PROMPT = list(range(50))
POINTS = [str(point) for point in FaultPoint if point is not FaultPoint.SOURCE_OWNS]
SOURCE_POINTS = [point for point in POINTS if point.startswith("source")]


@pytest.fixture(autouse=True)
def reached(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The points at which a fault has begun."""
    points: set[str] = set()
    at = FaultPoints.at

    async def noting(self: FaultPoints, point: FaultPoint) -> None:
        if self.has(point):
            points.add(point)
        await at(self, point)

    monkeypatch.setattr(FaultPoints, "at", noting)
    return points


@pytest.fixture(autouse=True)
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing_rules, "COMMIT_S", 0.2)
    monkeypatch.setattr(outgoing_rules, "RESERVE_S", 0.5)
    monkeypatch.setattr(outgoing_rules, "IDLE_S", 0.8)
    monkeypatch.setattr(outgoing_rules, "copy_deadline_s", lambda expected_s: 0.6)
    monkeypatch.setattr(destination_rules, "IDLE_S", 0.8)


async def begin(group: Group, num_tokens: int = 160, lease_s: float = 0.1, **fields):
    sent = request("r1", PROMPT, num_tokens, **fields)
    group.source.submit(sent)
    await group.until(lambda: group.progress(sent) > 5)
    group.source.rebalance("b", lease_s=lease_s)
    return sent


def faults(point: str, action: str) -> dict:
    side = "source" if point.startswith("source") else "destination"
    return {side: {"fault_points": f"{point}:{action}"}}


@pytest.mark.parametrize("point", POINTS)
async def test_the_stream_goes_on_whatever_fails(make, point: str) -> None:
    group = await make(**faults(point, "fail"), step_s=0.005)
    sent = await begin(group)
    await group.until(lambda: group.source.outcomes)
    outcome = group.source.outcomes[0]
    lost_answers = ("source.answer", "destination.committed")
    assert outcome.is_migrated is (point in lost_answers)
    assert outcome.epoch == {"source.commit": 2, **dict.fromkeys(lost_answers, 1)}.get(point, 0)
    await group.ended(sent, owner="b" if outcome.is_migrated else "a")


@pytest.mark.parametrize("point", POINTS)
async def test_a_slow_point_only_costs_time(make, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COMMIT_S", "RESERVE_S", "IDLE_S"):
        monkeypatch.setattr(outgoing_rules, name, 5.0)
    monkeypatch.setattr(outgoing_rules, "copy_deadline_s", lambda expected_s: 5.0)
    monkeypatch.setattr(destination_rules, "IDLE_S", 5.0)
    group = await make(**faults(point, "delay:0.1"), step_s=0.005)
    sent = await begin(group, 250)
    await group.until(lambda: group.source.outcomes)
    assert group.source.outcomes[0].is_migrated
    await group.ended(sent, owner="b")


@pytest.mark.parametrize("point", POINTS)
async def test_a_cancel_at_any_point_ends_the_request_once(make, reached: set[str], point: str) -> None:
    group = await make(**faults(point, "delay:0.2"), step_s=0.005)
    sent = await begin(group, 600, lease_s=10.0)  # a busy machine may need more than one try
    await group.until(lambda: point in reached)
    group.source.bus.publish(INSTANCE_CANCEL.at(instance_id="a"), Cancel("r1"))
    await group.until(lambda: "r1" in group.gateway.ends)
    assert group.gateway.ends["r1"].finish_reason == FinishReason.CANCELLED
    known = group.gateway.tokens["r1"]
    assert known == expected_output(sent, 600)[: len(known)] and len(known) < 600
    await group.settled()
    assert len(group.source.ended) + len(group.destination.ended) == 1


@pytest.mark.parametrize("point", POINTS)
async def test_a_request_that_ends_by_itself_meanwhile_ends_once(make, point: str) -> None:
    group = await make(**faults(point, "delay:0.2"), step_s=0.005)
    sent = await begin(group, 16)
    await group.ended(sent)
    assert len(group.source.ended) + len(group.destination.ended) == 1


@pytest.mark.parametrize("point", POINTS)
async def test_a_destination_that_is_gone_gives_the_request_back(make, reached: set[str], point: str) -> None:
    group = await make(**faults(point, "delay:2"), step_s=0.005)
    sent = await begin(group)
    await group.until(lambda: point in reached)
    destination = group.destination
    destination.is_dead = True
    del destination.registry["b"]
    await destination.bus.close()
    await destination.transport.close()
    group.source.service.on_instance("b", None)
    await group.until(lambda: group.source.outcomes)
    outcome = group.source.outcomes[0]
    committing = ("source.commit", "source.answer", "destination.commit", "destination.committed")
    epochs = {0, 2} if point == "destination.copied" else {2} if point in committing else {0}
    assert not outcome.is_migrated and outcome.epoch in epochs
    await group.ended(sent, owner="a")
    await asyncio.to_thread(destination.loop.stop, 5.0)


@pytest.mark.parametrize("point", POINTS)
async def test_a_source_that_stops_leaves_nothing_behind(make, reached: set[str], point: str) -> None:
    group = await make(**faults(point, "delay:0.3"), step_s=0.005)
    sent = await begin(group)
    await group.until(lambda: point in reached)
    source = group.source
    await source.service.stop()
    assert not source.service.has_work
    moved = source.outcomes[-1].is_migrated
    held = [party.name for party in group.parties if party.loop.held_epoch("r1") is not None]
    assert held == ["b" if moved else "a"]
    await group.ended(sent, owner=held[0])


@pytest.mark.parametrize("point", ["source.copy", "source.detached", "source.commit", "destination.copied"])
async def test_a_source_that_dies_leaves_its_reservation_to_time(
    make, reached: set[str], point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing_rules, "LEAVE_S", 0.2)
    group = await make(**faults(point, "delay:2"), step_s=0.005)
    await begin(group)
    await group.until(lambda: point in reached)
    source = group.source
    source.is_dead = True
    await source.bus.close()
    await source.transport.close()
    await group.until(lambda: not group.destination.service.has_work)
    if group.destination.adopted:  # Commit had left before
        await group.until(group.destination.is_idle)
    group.destination.check_idle()
    await asyncio.to_thread(source.loop.stop, 5.0)


async def test_a_destination_wrongly_taken_for_dead_gives_up_its_copy(make) -> None:
    group = await make(destination={"fault_points": "destination.committed:fail"}, step_s=0.01)
    sent = await begin(group, 100)
    await group.until(lambda: group.destination.adopted)
    info = group.destination.info()
    group.source.service.on_instance("b", None)
    await group.until(lambda: group.source.outcomes)
    assert (group.source.outcomes[0].epoch, group.source.outcomes[0].reason) == (2, "destination_lost")
    group.source.service.on_instance("b", info)
    await group.until(lambda: group.destination.loop.held_epoch("r1") is None)
    given_up = group.destination.outcomes[0]
    assert (given_up.is_migrated, given_up.destination_id, given_up.epoch) == (True, "a", 2)
    await group.ended(sent, owner="a")
    assert not group.destination.ended


def test_fault_points_are_read_from_settings() -> None:
    points = FaultPoints("source.copy:fail, destination.commit:delay:0.5")
    assert points.has(FaultPoint.SOURCE_COPY) and not points.has(FaultPoint.SOURCE_COMMIT)
    for text in ("nowhere:fail", "source.copy:burn", "source.copy", "source.copy:delay:soon"):
        with pytest.raises(SettingsError):
            FaultPoints(text)


def test_a_worker_refuses_fault_points_that_are_none() -> None:
    environment = {**os.environ, "TIDEWAY_FAULT_POINTS": "source.cpy:fail", "TIDEWAY_NATS_URL": "nats://127.0.0.1:1"}
    command = [sys.executable, "-m", "services.worker"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(
        "tideway: TIDEWAY_FAULT_POINTS: 'source.cpy:fail' is not name:action"
    )


async def test_a_fault_point_fails_where_it_is_asked_to() -> None:
    points = FaultPoints("source.copy:fail")
    await points.at(FaultPoint.SOURCE_COMMIT)
    with pytest.raises(FaultError):
        await points.at(FaultPoint.SOURCE_COPY)


async def test_a_fault_of_who_is_told_leaves_no_migration_under_way(make, monkeypatch: pytest.MonkeyPatch) -> None:
    group = await make(step_s=0.005)

    def fail(*_: object) -> None:
        raise RuntimeError("told in vain")

    monkeypatch.setattr(group.source, "on_migration_ended", fail)
    await group.ended(await begin(group), owner="b")
    await group.until(lambda: not group.source.service.has_work)
