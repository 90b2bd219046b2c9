"""The bus on servers that hang, and on a cluster of three whose nodes die: what is stored, seen and said of it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from nats.js import JetStreamContext

from shared.bus.interface import Bus, BusError, KeyValue
from shared.bus.nats_bus import NatsBus
from shared.messages.channels import Bucket
from shared.messages.requests import ErrorCode
from shared.runtime.settings import BusSettings, SettingsError
from tests.conftest import NatsServer
from tests.nats_cluster import LEAST_ELECTION_S, NatsCluster
from tests.shared.bus_contract import BLOBS, LEDGER, LIVE, NEWS, Ping, eventually
from tests.shared.conftest import ConnectTo

NUM_READS = 60
LONG_TEXT = "y" * 2000
UNSENT_BYTES = 14 << 20
WRITE_INTERVAL_S = 0.3
"""Interval between writes of an entry that is to live; the TTL is 2 s."""


ConnectNode = Callable[[int], Awaitable[NatsBus]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[NatsCluster]:
    cluster = NatsCluster()
    yield cluster
    cluster.close()


@pytest.fixture
async def connect_node(cluster: NatsCluster) -> AsyncIterator[ConnectNode]:
    """A bus whose first server is that node, and that makes streams of three copies."""
    buses: list[NatsBus] = []

    async def make(index: int) -> NatsBus:
        urls = [node.url for node in cluster.nodes[index:] + cluster.nodes[:index]]
        settings = BusSettings(nats_url=",".join(urls), nats_replicas=3)
        buses.append(await NatsBus.connect(settings, "test", f"on-{index}"))
        return buses[-1]

    yield make
    for bus in buses:
        await bus.close()


@contextmanager
def paused(server: NatsServer) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def keep_alive(store: KeyValue[Ping], key: str) -> None:
    """Writes an entry as instances do: again and again, whatever becomes of it."""
    while True:
        with suppress(BusError):
            await store.put(key, Ping("here"))
        await asyncio.sleep(WRITE_INTERVAL_S)


async def refusal(call: Awaitable[object]) -> BusError | None:
    try:
        await call
    except BusError as error:
        return error
    return None


# ------------------------------------------------------------------------------------------------- a server that hangs


@pytest.mark.parametrize("pause_s", [2.5, pytest.param(6.0, marks=pytest.mark.long)])
async def test_no_entry_is_gone_because_the_server_hung(
    fresh_nats: NatsServer, connect_to: ConnectTo, pause_s: float
) -> None:
    """It hangs for less than a client takes to leave it, and for longer."""
    writer, reader = await connect_to(fresh_nats, "writer"), await connect_to(fresh_nats, "reader")
    told: list[tuple[str, Ping | None]] = []
    await (await writer.key_value(LEDGER)).put("model", Ping("x"))
    ledger = await (await reader.key_value(LEDGER)).watch(lambda *change: told.append(change))
    live = await (await reader.key_value(LIVE)).watch(lambda *change: told.append(change))
    writing = asyncio.create_task(keep_alive(await writer.key_value(LIVE), "instance"))
    await eventually(lambda: "instance" in live.entries)
    assert live.problem == ledger.problem == ""
    with paused(fresh_nats):
        await asyncio.sleep(pause_s)
        assert live.problem and reader.problems
    await asyncio.sleep(3.0)
    assert set(live.entries) == {"instance"} and set(ledger.entries) == {"model"}
    assert [key for key, value in told if value is None] == []
    await eventually(lambda: not reader.problems and not live.problem)
    writing.cancel()
    await eventually(lambda: not live.entries, 6.0)


async def test_a_write_to_a_server_that_hung_is_no_full_disk(fresh_nats: NatsServer, connect_to: ConnectTo) -> None:
    """It is stored when the server goes on, and the writer learns of it."""
    bus = await connect_to(fresh_nats)
    store = await bus.key_value(LEDGER)
    with paused(fresh_nats):
        writing = asyncio.create_task(store.put("a", Ping("x")))
        await asyncio.sleep(2.5)
    assert await writing > 0
    assert bus.storage_problem == ""


# -------------------------------------------------------------------------------------------------------- a cluster


async def test_own_writes_are_read_on_every_node(connect_node: ConnectNode) -> None:
    buses = [await connect_node(index) for index in range(3)]
    stores = [await bus.key_value(LEDGER) for bus in buses]
    objects = [await bus.object_store(BLOBS) for bus in buses]
    for number in range(NUM_READS):
        writer, reader = number % 3, (number // 3) % 3
        key = f"key-{number}"
        revision = await stores[writer].put(key, Ping(key))
        entry = await stores[reader].get(key)
        assert entry is not None and entry.revision == revision
        if number % 6 == 0:
            await objects[writer].put(key, key.encode())
            assert await objects[reader].get(key) == key.encode()
    assert await stores[0].get("never-there") is None


async def test_a_list_waits_for_a_copy_that_lags(connect_node: ConnectNode, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = await connect_node(0)
    store = await bus.key_value(Bucket("test_lagging", Ping, durable=True))
    await store.put("old", Ping("x"))
    after = 1 + await bus._streams.newest("KV_test_lagging", "$KV.test_lagging.>")

    async def newest(name: str, subjects: str) -> int:
        return after

    monkeypatch.setattr(bus._streams, "newest", newest)  # as if the copy that is read had not all
    listing = asyncio.create_task(store.entries())
    await asyncio.sleep(0.3)
    assert not listing.done()
    await store.put("new", Ping("y"))
    assert (await listing).keys() == {"old", "new"}


async def test_what_was_written_is_listed_by_copies_that_hung(cluster: NatsCluster, connect_node: ConnectNode) -> None:
    bucket = Bucket("test_listed", Ping, durable=True)
    buses = [await connect_node(index) for index in range(3)]
    stores = [await bus.key_value(bucket) for bus in buses]
    leader = await asyncio.to_thread(cluster.leader_of, "KV_test_listed")
    ports = [bus._client.connected_url.port for bus in buses]  # one may have gone to another server than its own
    hung = min((node for node in cluster.nodes if node is not leader), key=lambda node: ports.count(node.port))
    away = [store for port, store in zip(ports, stores, strict=True) if port != hung.port]
    keys = {f"key-{number}" for number in range(100)}
    with paused(hung):
        for key in keys:
            await away[0].put(key, Ping(LONG_TEXT))
    async with asyncio.timeout(30):
        for _ in range(4):
            for listed in await asyncio.gather(*(store.entries() for store in away), return_exceptions=True):
                assert isinstance(listed, BusError) or listed.keys() == keys


async def test_an_election_is_not_the_death_of_what_writes(cluster: NatsCluster, connect_node: ConnectNode) -> None:
    bucket = Bucket("test_elected", Ping, ttl_s=2.0)
    await (await connect_node(0)).key_value(bucket)
    leader = await asyncio.to_thread(cluster.leader_of, "KV_test_elected")
    assert leader is not None
    others = [index for index, node in enumerate(cluster.nodes) if node is not leader]
    told: list[str] = []
    writer, reader = await connect_node(others[0]), await connect_node(others[1])
    watch = await (await reader.key_value(bucket)).watch(lambda key, value: told.append(key) if value is None else None)
    store = await writer.key_value(bucket)
    writing = asyncio.create_task(keep_alive(store, "lives"))
    await store.put("dies", Ping("soon"))
    await eventually(lambda: len(watch.entries) == 2)
    try:
        leader.kill()
        refusals = [error for _ in range(4) if (error := await refusal(store.put("other", Ping("x")))) is not None]
        assert all(error.code is ErrorCode.UNAVAILABLE and error.info.retry_after_s > 0 for error in refusals), refusals
        assert writer.storage_problem == ""
        await eventually(lambda: "dies" in told, 30.0)
        assert "lives" not in told and "lives" in watch.entries
    finally:
        writing.cancel()
        await asyncio.to_thread(leader.start)
        await asyncio.to_thread(cluster.wait_whole)


async def test_what_a_copy_has_is_read_while_the_leader_is_gone(
    cluster: NatsCluster, connect_node: ConnectNode
) -> None:
    bucket = Bucket("test_from_copies", Ping, durable=True, is_read_from_copies=True)
    stores = [await bus.key_value(bucket) for bus in [await connect_node(index) for index in range(3)]]
    await stores[0].put("there", Ping("x"))
    leader = await asyncio.to_thread(cluster.leader_of, "KV_test_from_copies")
    assert leader is not None
    try:
        leader.kill()
        async with asyncio.timeout(LEAST_ELECTION_S):
            while True:
                entries = await asyncio.gather(
                    *(store.get_from_any_copy("there") for store in stores), return_exceptions=True
                )
                if not any(isinstance(entry, BusError) for entry in entries):  # who was connected there is elsewhere
                    break
            assert [entry.value for entry in entries] == [Ping("x")] * 3  # type: ignore[union-attr]
        # That there is nothing is not said.
        with pytest.raises((BusError, TimeoutError)):
            await asyncio.wait_for(stores[1].get_from_any_copy("never-there"), 1.0)
    finally:
        await asyncio.to_thread(leader.start)
        await asyncio.to_thread(cluster.wait_whole)
    async with asyncio.timeout(2 * LEAST_ELECTION_S):
        while await refusal(stores[0].get_from_any_copy("never-there")) is not None:
            pass  # JetStream has a leader again, and the stream may still be electing its own
    assert await stores[0].get_from_any_copy("never-there") is None


async def test_a_node_that_hangs_is_left_for_another(cluster: NatsCluster, connect_node: ConnectNode) -> None:
    bus, other = await connect_node(0), await connect_node(1)
    home = next(node for node in cluster.nodes if bus._client.connected_url.port == node.port)
    if other._client.connected_url.port == home.port:
        other = bus
    heard = asyncio.Event()
    bus.on_reconnect(heard.set)
    began_s = bus.now()
    with paused(home):
        await asyncio.wait_for(heard.wait(), 8.0)
        assert bus.now() - began_s < 5.0
        await bus.round_trip_s()
    await asyncio.to_thread(cluster.wait_whole)


async def test_a_node_that_hangs_is_left_with_what_it_has_not_taken(
    cluster: NatsCluster, connect_node: ConnectNode
) -> None:
    """With more than the kernel buffers, such as a file that is being stored."""
    bus = await connect_node(1)
    home = next(node for node in cluster.nodes if bus._client.connected_url.port == node.port)
    heard = asyncio.Event()
    bus.on_reconnect(heard.set)
    began_s = bus.now()
    with paused(home):
        for _ in range(UNSENT_BYTES // bus.max_payload_bytes):
            bus.publish(NEWS.at(place="here"), Ping("x" * (bus.max_payload_bytes - 1024)))
        while not heard.is_set():
            assert bus.now() - began_s < 8.0
            assert bus.away_s <= bus.now() - began_s, "it was connected before"
            await asyncio.sleep(0.01)
        await bus.round_trip_s()
    await asyncio.to_thread(cluster.wait_whole)


@pytest.mark.long
async def test_a_stream_that_has_too_few_copies_says_so(cluster: NatsCluster, connect_node: ConnectNode) -> None:
    store = await (await connect_node(0)).key_value(LEDGER)
    await store.put("a", Ping("x"))
    leader = await asyncio.to_thread(cluster.leader_of, f"KV_{LEDGER.name}")
    away = [node for node in cluster.nodes if node is not leader]
    try:
        for node in away:
            node.kill()
        await asyncio.sleep(4.0)
        with pytest.raises(BusError) as raised:
            await store.put("a", Ping("y"))
        assert raised.value.code is ErrorCode.UNAVAILABLE
        assert "1 of its 3 copies" in raised.value.info.message or "leader" in raised.value.info.message
    finally:
        for node in away:
            await asyncio.to_thread(node.start)
        await asyncio.to_thread(cluster.wait_whole)


async def test_who_starts_without_a_quorum_waits_and_says_for_what(
    cluster: NatsCluster, connect_node: ConnectNode, caplog: pytest.LogCaptureFixture
) -> None:
    away = cluster.nodes[1:]
    try:
        for node in away:
            node.kill()
        bus = await connect_node(0)
        with caplog.at_level(logging.WARNING):
            declaring = asyncio.create_task(bus.key_value(Bucket("test_awaited", Ping, durable=True)))
            await asyncio.sleep(5.0)
        assert not declaring.done()
        assert any("waiting for NATS (stream KV_test_awaited)" in line.getMessage() for line in caplog.records)
    finally:
        for node in away:
            await asyncio.to_thread(node.start)
    store = await asyncio.wait_for(declaring, 20.0)
    assert await store.put("a", Ping("x")) == 1


async def test_streams_are_made_in_so_many_copies(cluster: NatsCluster, connect_node: ConnectNode) -> None:
    await (await connect_node(0)).key_value(Bucket("test_copies", Ping))

    async def num_replicas(streams: JetStreamContext) -> int:
        return (await streams.stream_info("KV_test_copies")).config.num_replicas or 1

    assert await asyncio.to_thread(cluster.ask, num_replicas, 0) == 3


async def test_copies_that_are_away_are_told(cluster: NatsCluster, connect_node: ConnectNode) -> None:
    bus = await connect_node(0)
    await bus.key_value(LEDGER)
    name = f"KV_{LEDGER.name}"

    async def until(num_current: int) -> None:
        async with asyncio.timeout(60.0):
            while True:
                with suppress(BusError):
                    use = (await bus.stream_uses()).get(name)
                    if use is not None and (use.num_copies, use.num_current) == (3, num_current):
                        return
                await asyncio.sleep(0.5)

    await until(3)
    leader = await asyncio.to_thread(cluster.leader_of, name)
    away = next(node for node in cluster.nodes if node is not leader)
    away.kill()
    try:
        await until(2)
    finally:
        await asyncio.to_thread(away.start)
    await until(3)


async def test_copies_on_a_server_alone_are_a_wrong_setting(fresh_nats: NatsServer, connect_to: ConnectTo) -> None:
    bus: Bus = await connect_to(fresh_nats, nats_replicas=3)
    with pytest.raises(SettingsError, match="TIDEWAY_NATS_REPLICAS=3: the server at TIDEWAY_NATS_URL is in no cluster"):
        await bus.key_value(LEDGER)
