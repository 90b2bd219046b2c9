"""Many moves of many requests while anything may fail, and a NATS server that dies in the middle of a Commit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import msgspec
import pytest

import shared.migration.core as core
import shared.migration.outgoing as outgoing_rules
from services.worker.migration.faults import FaultError, FaultPoint, FaultPoints
from shared.messages.catalogue import INSTANCE_CANCEL
from shared.messages.requests import Cancel, FinishReason, GenerationRequest, RequestClass
from tests.shared.engine.fake_executor import expected_output, request
from tests.worker.kv_transport.local import LocalHub, LocalNetwork
from tests.worker.migration.conftest import Group
from tests.worker.migration.parties import SHAPE, Gateway, make_party


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


@pytest.mark.parametrize(
    ("seed", "keeps_kv"),
    [
        *((1, False), (2, False), (4, True), (5, True)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((3, False), (6, True))),
    ],
)
async def test_streams_are_whole_whatever_fails(
    make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, keeps_kv: bool
) -> None:
    """`keeps_kv`: other instances have copies of it, prefixes travel, and blocks of ended requests go to host memory and to
    a disk that all share and whose files vanish now and then."""
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
        **(keeping(tmp_path) if keeps_kv else {}),
    )
    begins = [[random.randrange(5) for _ in range(60)] for _ in range(3)]
    sent = [
        request(
            f"r{number}",
            (random.choice(begins) if keeps_kv else [])
            + [random.randrange(5) for _ in range(random.randrange(1, 30 if keeps_kv else 90))],
            random.randrange(1, 300),
            request_class=RequestClass.OFFLINE if random.random() < 0.3 else RequestClass.ONLINE,
        )
        for number in range(36)
    ]
    if keeps_kv:
        await leave_on_disk(group, begins)
    placing = asyncio.create_task(place(group, sent, random, keeps_kv))
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
    await placing
    await asyncio.gather(stirring, return_exceptions=True)
    await group.settled()
    for one in sent:
        known = group.gateway.tokens[one.request_id]
        whole = expected_output(one, 600)
        end = group.gateway.ends[one.request_id]
        is_cancelled = end.finish_reason == FinishReason.CANCELLED
        assert known == (whole[: len(known)] if is_cancelled else whole), end
    assert sum(len(party.ended) for party in group.parties) == len(sent) + (len(begins) if keeps_kv else 0)
    assert faults.num_failed > 3
    assert any(outcome.is_migrated for party in group.parties for outcome in party.outcomes)
    if keeps_kv:
        counted = [party.engine.counters for party in group.parties]
        assert sum(one.written_blocks["a"] for one in counted) > 0
        assert sum(one.cached_tokens["host"] + one.cached_tokens["disk"] for one in counted) > 0


async def leave_on_disk(group: Group, begins: list[list[int]]) -> None:
    """Requests that begin so have ended, and no device has their blocks any more."""
    for number, begin in enumerate(begins):
        group.source.submit(request(f"before {number}", [*begin, number], 4))
    await group.until(lambda: len(group.source.ended) == len(begins), 30.0)
    num_files = sum(len(begin) // SHAPE.block_size for begin in begins)
    await group.until(lambda: group.source.engine.counters.written_blocks["a"] >= num_files, 30.0)
    with group.source.loop.locked() as engine:
        engine.pool.clear_cache()


def keeping(folder: Path) -> dict[str, object]:
    """Settings with which KV is kept in all ways."""
    return {
        "kv_offload": "disk",
        "kv_offload_start": 0.0,
        "kv_disk_folder": str(folder),
        "kv_disk_bytes": 1 << 20,
        "kv_backup": "all",
        "kv_backup_tokens": 20,
        "prefix_fetch": "auto",
    }


async def place(group: Group, sent: list[GenerationRequest], random: Random, keeps_kv: bool) -> None:
    """At once; or, where KV is kept, one after the other, some after a fetch of their prefix, while caches are cleared."""
    for one in sent:
        party = random.choice(group.parties)
        if keeps_kv and random.random() < 0.4:
            holder = random.choice([other.name for other in group.parties if other is not party])
            asked = msgspec.structs.replace(one, prefix_holder=holder, prefix_tokens=60)
            await party.service.fetch(asked, SHAPE.block_size)
        party.submit(one)
        if keeps_kv:
            await asyncio.sleep(0.03)
            luck = random.random()
            if luck < 0.2:
                with party.loop.locked() as engine:
                    engine.pool.clear_cache()
            if luck < 0.1:
                with party.loop.locked() as engine:
                    engine.memory.host.pool.clear_cache()
            if luck > 0.8:
                remove_some(group, random)


def remove_some(group: Group, random: Random) -> None:
    for file in group.source.disk.store.folder.rglob("*.kv"):
        if random.random() < 0.3:
            file.unlink(missing_ok=True)


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
