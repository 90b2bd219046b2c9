"""Many moves of many requests while anything may fail, and a NATS server that dies in the middle of a Commit."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

import shared.migration.core as core
import shared.migration.outgoing as outgoing_rules
from services.worker.migration.faults import FaultError, FaultPoint, FaultPoints
from shared.messages.catalogue import INSTANCE_CANCEL
from shared.messages.requests import Cancel, FinishReason, RequestClass
from tests.shared.engine.fake_executor import expected_output, request
from tests.worker.kv_transport.local import LocalHub, LocalNetwork
from tests.worker.migration.conftest import Group
from tests.worker.migration.parties import Gateway, make_party


class RandomFaults:
    """In place of `FaultPoints`, for all parties of a process."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.num_failed = 0

    def has(self, point: FaultPoint) -> bool:
        return True

    async def at(self, point: FaultPoint) -> None:
        luck = self._random.random()
        if luck < 0.06:
            self.num_failed += 1
            raise FaultError(f"at {point}")
        if luck < 0.2:
            await asyncio.sleep(self._random.random() * 0.03)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_streams_are_whole_whatever_fails(make, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    random = Random(seed)
    faults = RandomFaults(random)
    monkeypatch.setattr(FaultPoints, "at", lambda self, point: faults.at(point))
    monkeypatch.setattr(FaultPoints, "has", lambda self, point: True)
    monkeypatch.setattr(outgoing_rules, "COMMIT_S", 0.1)
    monkeypatch.setattr(outgoing_rules, "RESERVE_S", 0.3)
    monkeypatch.setattr(core, "RETRY_S", 0.02)
    monkeypatch.setattr(outgoing_rules, "copy_deadline_s", lambda expected_s: 0.3)
    group = await make(
        names="abc",
        num_merged=100,
        migration_cooldown_s=0.01,
        max_migrations=3,
        host_memory_bytes=1,
        checkpoint_start=0.2,
        token_budget=48,
    )
    sent = [
        request(
            f"r{number}",
            [random.randrange(5) for _ in range(random.randrange(1, 90))],
            random.randrange(1, 300),
            request_class=RequestClass.OFFLINE if random.random() < 0.3 else RequestClass.ONLINE,
        )
        for number in range(36)
    ]
    for one in sent:
        random.choice(group.parties).submit(one)
    cancelled = {one.request_id for one in random.sample(sent, 5)}

    async def stir() -> None:
        while True:
            party = random.choice(group.parties)
            others = [other.name for other in group.parties if other is not party]
            random.shuffle(others)
            party.intake.is_draining = random.random() < 0.2
            party.rebalance(*others, lease_s=0.1)
            if cancelled and random.random() < 0.1:
                # To whom the client's gateway takes for the owner.
                request_id = cancelled.pop()
                owner = group.gateway.owners.get(request_id, (0, "a"))[1]
                group.source.bus.publish(INSTANCE_CANCEL.at(instance_id=owner), Cancel(request_id))
            await asyncio.sleep(0.02)
            party.intake.is_draining = False

    stirring = asyncio.create_task(stir())
    await group.until(lambda: all(one.request_id in group.gateway.ends for one in sent), 30.0)
    stirring.cancel()
    await asyncio.gather(stirring, return_exceptions=True)
    await group.settled()
    for one in sent:
        known = group.gateway.tokens[one.request_id]
        whole = expected_output(one, 600)
        end = group.gateway.ends[one.request_id]
        is_cancelled = end.finish_reason == FinishReason.CANCELLED
        assert known == (whole[: len(known)] if is_cancelled else whole), end
    assert sum(len(party.ended) for party in group.parties) == len(sent)
    assert faults.num_failed > 3
    assert any(outcome.is_migrated for party in group.parties for outcome in party.outcomes)


@pytest.mark.parametrize("point", ["source.commit", "source.answer", "destination.committed"])
async def test_nats_dies_in_the_middle_of_a_commit(fresh_nats, point: str) -> None:
    gateway, registry, hub = Gateway(), {}, LocalHub()
    parties = []
    for name, side in (("a", "source"), ("b", "destination")):
        fault = f"{point}:delay:0.4" if point.startswith(side) else ""
        network = LocalNetwork(hub)
        parties.append(
            await make_party(name, fresh_nats.url, gateway, registry, network, step_s=0.005, fault_points=fault)
        )
    group = Group(gateway, parties)
    try:
        sent = request("r1", list(range(50)), 200)
        group.source.submit(sent)
        await group.until(lambda: group.progress(sent) > 5)
        group.source.rebalance("b", lease_s=0.1)
        await group.until(lambda: group.source.service.has_work)
        await asyncio.sleep(0.1)
        await asyncio.to_thread(fresh_nats.kill)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(fresh_nats.restart)
        await group.until(lambda: group.source.outcomes, 20.0)
        outcome = group.source.outcomes[0]
        await group.until(lambda: "r1" in gateway.ends, 20.0)
        await group.ended(sent, owner="b" if outcome.is_migrated else "a")
    finally:
        for party in parties:
            await party.stop()
