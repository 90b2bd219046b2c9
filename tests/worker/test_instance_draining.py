"""How an instance empties itself before its process ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import msgspec
import pytest

from services.worker.instance.draining import Draining
from services.worker.instance.main import first_of, local_address
from shared.bus.interface import ServiceError
from shared.engine.engine import Engine
from shared.messages.cluster import LoadedModel
from shared.messages.migration import MigrationReason
from shared.messages.requests import ErrorCode, RequestClass
from shared.runtime.settings import BusSettings
from tests.conftest import NatsServer
from tests.shared.engine.fake_executor import request
from tests.worker.instance_peer import LONG_PROMPT, OTHER_PROMPT, Peer, held, local_transport, rebalance
from tests.worker.instance_stage import SlabExecutor, Stage, instance_on


@pytest.fixture
async def mobile(nats_settings: BusSettings) -> AsyncIterator[Stage]:
    """With a KV transport. A request runs there."""
    async with instance_on(nats_settings, executor=SlabExecutor(), open_transport=local_transport) as stage:
        await stage.until(lambda: stage.info.kv_address)
        await stage.submit_and_hold(request("r0", LONG_PROMPT, 100))
        yield stage


async def drained_after(stage: Stage) -> float:
    started = time.monotonic()
    async with asyncio.timeout(10):
        await stage.service.drain_before_exit()
    return time.monotonic() - started


async def name_a_destination(stage: Stage) -> None:
    """Names a destination as a scheduler does for as long as there is one."""
    while True:
        rebalance(stage, MigrationReason.DRAIN)
        await asyncio.sleep(0.4)


async def test_before_its_end_an_instance_waits_briefly_for_somebody_who_can_take_over(mobile: Stage) -> None:
    assert 1.4 < await drained_after(mobile) < 5.0
    await mobile.until(lambda: mobile.info.state == "draining")


@pytest.mark.parametrize("unfit", ["draining", "no transport", "another model", "loading"])
async def test_no_longer_for_an_instance_that_cannot(mobile: Stage, nats_settings: BusSettings, unfit: str) -> None:
    changes = {
        "draining": {"state": "draining"},
        "no transport": {"kv_address": ""},
        "another model": {"models": [LoadedModel(name="b", state="ready")]},
        "loading": {"models": [LoadedModel(name="a", state="loading")]},
    }
    info = msgspec.structs.replace(Peer(mobile.bus).info, **changes[unfit])
    await Peer(mobile.bus).register(info)
    await mobile.until(lambda: "node-1" in mobile.service._migrations.peers())
    assert await drained_after(mobile) < 5.0


async def test_without_a_word_from_the_scheduler_it_waits_briefly(mobile: Stage) -> None:
    await Peer(mobile.bus).start()
    await mobile.until(lambda: "node-1" in mobile.service._migrations.peers())
    assert 1.4 < await drained_after(mobile) < 5.0
    assert await held(mobile) == {"r0"}


async def test_it_ends_at_once_when_nothing_is_held_and_soon_when_everybody_else_drains_too(mobile: Stage) -> None:
    peer = Peer(mobile.bus)
    await peer.start()
    await mobile.until(lambda: "node-1" in mobile.service._migrations.peers())
    drain = asyncio.create_task(drained_after(mobile))
    await mobile.until(lambda: mobile.info.state == "draining")
    await peer.register(msgspec.structs.replace(peer.info, state="draining"))
    assert await drain < 5.0
    mobile.executor.gate.set()
    await mobile.until(lambda: not mobile.service._loop.ask(Engine.num_held), 20)
    await peer.register(peer.info)
    assert await drained_after(mobile) < 1.0


async def test_as_long_as_there_are_destinations_it_waits_until_its_requests_have_left(mobile: Stage) -> None:
    peer = Peer(mobile.bus)
    await peer.start()
    await mobile.submit(request("r1", OTHER_PROMPT, 100))
    await mobile.submit(request("r2", [1, 2], 100, request_class=RequestClass.OFFLINE))
    await mobile.until(lambda: "node-1" in mobile.service._migrations.peers())
    drain = asyncio.create_task(drained_after(mobile))
    await mobile.until(lambda: mobile.info.state == "draining")
    naming = asyncio.create_task(name_a_destination(mobile))
    await asyncio.sleep(2.0)
    assert not drain.done(), "the scheduler still names a destination"
    with pytest.raises(ServiceError) as refused:
        await mobile.submit(request("r3", [1], 5))
    assert refused.value.code == ErrorCode.DRAINING
    mobile.executor.gate.set()
    await drain
    naming.cancel()
    assert await held(mobile) == set()
    moved = {commit.request.request_id for commit in peer.commits}
    assert "r1" in moved and mobile.end("r0")


@pytest.mark.parametrize("what", ["connection", "destination"])
async def test_a_moment_without_anybody_or_anything_does_not_end_it(what: str) -> None:
    bus, can_move = SimpleNamespace(is_connected=True, clock_s=100.0, now=lambda: bus.clock_s), [True]
    draining = Draining(bus, "node-0", lambda: 1, lambda: can_move[0], lambda: asyncio.sleep(0))  # type: ignore[arg-type]
    draining._hopeful_s = bus.now()

    def after(seconds: float, is_well: bool) -> str | None:
        bus.clock_s += seconds
        bus.is_connected, can_move[0] = is_well or what != "connection", is_well or what != "destination"
        return draining._why_stop(1000.0)

    for _ in range(3):
        assert after(1.0, False) is None and after(1.4, False) is None
        assert after(0.01, True) is None, "the scheduler gets its time after that"
    assert after(0.1, False) is None
    assert after(1.5, False) in ("not connected to NATS", "no other instance can take them")
    assert after(0.1, True) is None and after(1.5, True) == "the scheduler names no destination"


async def test_requests_without_kv_can_go_where_there_is_no_transport(mobile: Stage) -> None:
    await Peer(mobile.bus).register(msgspec.structs.replace(Peer(mobile.bus).info, kv_address=""))
    await mobile.until(lambda: "node-1" in mobile.service._migrations.peers())
    assert not mobile.service._any_destination()
    await mobile.submit(request("r1", OTHER_PROMPT, 100))
    assert mobile.service._any_destination()


async def test_without_nats_it_does_not_wait_for_long(fresh_nats: NatsServer) -> None:
    settings = BusSettings(nats_url=fresh_nats.url)
    async with instance_on(settings, executor=SlabExecutor(), open_transport=local_transport) as stage:
        await Peer(stage.bus).start()
        await stage.submit_and_hold(request("r0", LONG_PROMPT, 100))
        await stage.until(lambda: "node-1" in stage.service._migrations.peers())
        fresh_nats.kill()
        assert await drained_after(stage) < 4.0


async def test_waiting_for_the_first_of_several_cancels_the_others_and_passes_on_its_error() -> None:
    cancelled = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await first_of(forever(), fail())
    await asyncio.wait_for(cancelled.wait(), 5)


def test_peers_reach_a_machine_where_it_reaches_nats() -> None:
    for url in ("nats://127.0.0.1:4222", "127.0.0.1:4222", "nats://user:secret@127.0.0.1:4222,nats://10.0.0.9:4222"):
        assert local_address(url) == "127.0.0.1"
