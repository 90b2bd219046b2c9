"""The registry is watched only while something may move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.worker.instance import peers as peers_module
from services.worker.instance.peers import Peers
from shared.messages.catalogue import INSTANCES
from shared.messages.cluster import InstanceInfo
from shared.messages.migration import MigrationReason
from shared.runtime.settings import BusSettings
from tests.memory_bus import MemoryBus, MemoryHub
from tests.shared.engine.fake_executor import request
from tests.worker.instance_peer import LONG_PROMPT, OTHER_PROMPT, Peer, rebalance
from tests.worker.instance_stage import instance_on

INFO = InstanceInfo(instance_id="node-1", incarnation="first", node_id="node", state="ready", models=[])


@pytest.fixture(autouse=True)
def soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "IDLE_S", 0.1)


@pytest.fixture
def hub() -> MemoryHub:
    return MemoryHub()


@pytest.fixture
async def bus(hub: MemoryHub) -> AsyncIterator[MemoryBus]:
    bus = hub.connect("node-0")
    yield bus
    await bus.close()


async def until_closed(peers: Peers) -> None:
    async with asyncio.timeout(5):
        while peers.is_watching:
            await asyncio.sleep(0.01)


async def test_an_idle_instance_watches_nobody(nats_settings: BusSettings) -> None:
    async with instance_on(nats_settings) as stage:
        peers = stage.service._migrations._peers
        await stage.submit(request("r1", [1, 2, 3], 20))
        await stage.until(lambda: stage.end("r1"))
        assert not peers.is_watching
        rebalance(stage, lease_s=0.5)
        await stage.until(lambda: peers.is_watching)
        await asyncio.sleep(0.3)
        assert peers.is_watching, "as long as it may give something away"
        await until_closed(peers)
        service = stage.service._migrations._service
        assert service is not None
        service.core._disowned["m"] = (stage.bus.now() + 60, INFO)
        await peers.known(5)
        await asyncio.sleep(0.3)
        assert peers.is_watching, "it has to be told when it comes back"
        service.core._disowned.clear()
        await until_closed(peers)


async def test_it_finds_destinations_though_it_watched_nobody_before(nats_settings: BusSettings) -> None:
    async with instance_on(nats_settings) as stage:
        peer = Peer(stage.bus)
        await peer.start()
        await stage.submit_and_hold(request("r0", LONG_PROMPT, 50))
        await stage.submit(request("r1", OTHER_PROMPT, 50))
        assert not stage.service._migrations._peers.is_watching
        rebalance(stage, MigrationReason.DRAIN)
        stage.executor.gate.set()
        await stage.until(lambda: peer.commits)


async def test_a_watch_lasts_as_long_as_somebody_asks_or_it_is_needed(bus: MemoryBus) -> None:
    registry = await bus.key_value(INSTANCES)
    await registry.put("node-1", INFO)
    heard: list[InstanceInfo | None] = []
    needs = [False]
    peers = Peers(bus, lambda _, info: heard.append(info), lambda: needs[0])
    assert peers.entries() == {}, "it begins to watch"
    await peers.known(5)
    assert peers.entries() == {"node-1": INFO} and heard == [INFO]
    for _ in range(6):
        await asyncio.sleep(0.03)
        assert peers.entries()
    needs[0] = True
    await asyncio.sleep(0.3)
    assert peers.is_watching
    needs[0] = False
    await until_closed(peers)
    await registry.delete("node-1")
    await asyncio.sleep(0.02)
    assert heard == [INFO]
    await peers.known(5)
    assert peers.is_watching and peers.entries() == {}
    await peers.stop()
    assert not peers.is_watching


async def test_without_a_bus_nobody_is_known_and_it_is_tried_again(
    hub: MemoryHub, bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "RETRY_S", 0.05)
    registry = await bus.key_value(INSTANCES)
    hub.kill()
    peers = Peers(bus, lambda *_: None, lambda: False)
    await peers.known(10)
    assert peers.entries() == {}
    hub.start(keep_store=True)
    async with asyncio.timeout(10):
        while not peers.is_watching:
            peers.entries()
            await asyncio.sleep(0.01)
    await registry.put("node-1", INFO)
    async with asyncio.timeout(5):
        while not peers.entries():
            await asyncio.sleep(0.01)
    await peers.stop()
