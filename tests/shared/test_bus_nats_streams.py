"""Storage on a real NATS server: the contract, and streams that are deleted, damaged, or short of room."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import nats
import pytest
from nats.js.api import StreamInfo

from shared.bus import nats_streams, nats_watch
from shared.bus.interface import BusError, RevisionConflict
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_key_value import NatsKeyValue
from shared.bus.nats_streams import delivery
from shared.messages.channels import Bucket
from shared.messages.requests import ErrorCode
from shared.runtime.settings import BusSettings
from tests.conftest import NatsServer
from tests.shared.bus_contract import BLOBS, LEDGER, LIVE, Connect, Ping, eventually
from tests.shared.conftest import ConnectTo
from tests.shared.storage_contract import StorageContract


class TestNatsStorage(StorageContract):
    pass


# ---------------------------------------------------------------------------------------------------- what they hold


async def test_what_streams_hold_is_told(fresh_nats: NatsServer, connect_to: ConnectTo) -> None:
    bus = await connect_to(fresh_nats)
    assert await bus.stream_uses() == {}
    store = await bus.key_value(LEDGER, max_bytes=1 << 24)
    await store.put("a", Ping("x" * 1000))
    use = (await bus.stream_uses())[f"KV_{LEDGER.name}"]
    assert (use.num_messages, use.max_bytes, use.num_consumers) == (1, 1 << 24, 0)
    assert (use.num_copies, use.num_current) == (1, 1)
    assert 1000 < use.used_bytes < 2000


async def test_they_are_looked_at_to_an_end_while_one_is_added(
    fresh_nats: NatsServer, connect_to: ConnectTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server tells them by name, so one that comes before them puts each at the place of the next."""
    bus = await connect_to(fresh_nats)
    await bus.key_value(LEDGER, max_bytes=1 << 20)
    context = bus._streams.context
    streams_info, names = context.streams_info, iter(["A"])

    async def told(offset: int = 0) -> list[StreamInfo]:
        page = await streams_info(offset=offset)
        for name in names:
            await context.add_stream(name=name, subjects=[name], max_bytes=1 << 20)
        return page

    monkeypatch.setattr(context, "streams_info", told)
    async with asyncio.timeout(5):
        assert f"KV_{LEDGER.name}" in await bus.stream_uses()


async def test_a_bucket_that_is_full_refuses_or_drops_the_oldest(fresh_nats: NatsServer, connect_to: ConnectTo) -> None:
    bus = await connect_to(fresh_nats)
    refuses = await bus.key_value(Bucket("tideway_test_refuses", Ping), max_bytes=4096)
    drops = await bus.key_value(Bucket("tideway_test_drops", Ping, drops_oldest=True), max_bytes=4096)
    for number in range(8):
        await drops.put(str(number), Ping("x" * 1000))
    with pytest.raises(BusError):
        for number in range(8):
            await refuses.put(str(number), Ping("x" * 1000))
    assert set(await drops.entries()) == {"5", "6", "7"}
    assert set(await refuses.entries()) == {"0", "1", "2"}


# --------------------------------------------------------------------------------------------------- loss of streams


async def test_a_watch_begins_anew_when_its_consumer_vanishes(
    fresh_nats: NatsServer, connect_to: ConnectTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_watch, "HEARTBEAT_S", 0.2)
    bus = await connect_to(fresh_nats)
    store = await bus.key_value(LIVE)
    watch = await store.watch()
    fresh_nats.delete_streams()
    await store.put("a", Ping("x"))

    async def write() -> None:
        while True:
            await store.put("a", Ping("x"))
            await asyncio.sleep(0.1)

    writing = asyncio.create_task(write())
    await eventually(lambda: watch.entries == {"a": Ping("x")})
    writing.cancel()


async def test_a_bucket_that_was_deleted_is_made_anew(fresh_nats: NatsServer, connect_to: ConnectTo) -> None:
    bus = await connect_to(fresh_nats)
    store = await bus.key_value(LEDGER)
    await store.put("a", Ping("x"))
    fresh_nats.delete_streams()
    assert (await store.watch()).entries == {}
    fresh_nats.delete_streams()
    assert await store.create("a", Ping("x")) == 1


async def test_an_object_is_read_whole_or_not_at_all(connect: Connect, nats_settings: BusSettings) -> None:
    writer = await (await connect("writer")).object_store(BLOBS)
    reader = await (await connect("reader")).object_store(BLOBS)
    bodies = [bytes([n]) * 700_000 for n in range(4)]
    await writer.put("file", bodies[0])

    async def replace() -> None:
        for body in bodies * 3:
            await writer.put("file", body)

    replacing = asyncio.create_task(replace())
    while not replacing.done():
        try:
            assert await reader.get("file") in bodies
        except BusError as error:
            assert "damaged" in error.info.message  # replaced again at each attempt
    await replacing
    assert await reader.get("file") == bodies[-1]

    client = await nats.connect(nats_settings.nats_url)
    await client.jetstream().purge_stream(f"OBJ_{BLOBS.name}", subject=f"$O.{BLOBS.name}.C.>")
    await client.close()
    with pytest.raises(BusError, match="damaged"):
        await reader.get("file")


async def test_what_a_damaged_stream_lost_is_named_and_the_rest_is_there(
    fresh_nats: NatsServer, connect_to: ConnectTo
) -> None:
    bus = await connect_to(fresh_nats)
    store = await bus.key_value(LEDGER)
    texts = {f"key-{number}": f"text number {number} of them" for number in range(20)}
    for key, text in texts.items():
        await store.put(key, Ping(text))
    watch = await store.watch()
    fresh_nats.damage(f"KV_{LEDGER.name}", texts["key-3"].encode(), texts["key-19"].encode())
    rest = {key: Ping(text) for key, text in texts.items() if key not in ("key-3", "key-19")}
    await eventually(lambda: bus.damages, 10)
    assert bus.damages == [
        f"stream KV_{LEDGER.name} is damaged on the disk of NATS, what lay under these keys is lost: key-19, key-3"
    ]
    assert {key: entry.value for key, entry in (await store.entries()).items()} == rest
    await eventually(lambda: watch.entries == rest, 10)
    assert not bus.problems
    assert await store.get("key-3") is None
    assert not await store.is_deleted("key-3")

    # What lay there can be written anew, though the server answers no such write.
    await store.create("key-3", Ping("anew"))
    await store.put("key-19", Ping("anew, too"))
    assert not bus.storage_problem
    await eventually(lambda: len(watch.entries) == 20, 5)
    assert await store.entries()
    assert not bus.damages


def test_positions_are_read_from_both_forms_of_reply_subjects() -> None:
    assert delivery(b"$JS.ACK.stream.consumer.2.30.4.1700000000000000000.5") == (30, 4, 5)
    assert delivery(b"$JS.ACK.domain.hash.stream.consumer.2.30.4.1700000000000000000.5.token") == (30, 4, 5)


async def test_a_stream_that_is_not_written_again_does_not_stay_a_problem(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_streams, "CALL_TIMEOUT_S", 0.3)
    bus = await connect("writer")
    assert isinstance(bus, NatsBus)
    store = await bus.object_store(BLOBS)
    await store.check_storage()
    seldom = f"OBJ_{BLOBS.name}"
    with pytest.raises(BusError) as raised:
        await bus._streams.write(seldom, "put seldom/a", lambda: asyncio.sleep(60))
    assert raised.value.code is ErrorCode.STORAGE_FULL and seldom in bus.storage_problem
    await store.check_storage()
    assert bus.storage_problem == ""


async def test_in_a_cluster_no_disk_is_full_because_one_write_was_lost(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_streams, "CALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(nats_streams, "LATE_ANSWER_S", 0.2)
    bus = await connect("writer")
    assert isinstance(bus, NatsBus)
    store = await bus.key_value(LEDGER)
    name, streams = f"KV_{LEDGER.name}", bus._streams
    await store.put("a", Ping("x"))
    monkeypatch.setattr(streams, "num_replicas", 3)
    num_lost = 0

    def lost(until: int) -> Callable[[], Awaitable[int]]:
        async def publish() -> int:
            nonlocal num_lost
            if num_lost < until:
                num_lost += 1
                await asyncio.sleep(60)
            return 7

        return publish

    async def stored() -> int | None:
        return None

    assert await streams.write(name, "put a", lost(1), stored, is_repeatable=True) == 7
    with pytest.raises(BusError) as raised:  # what cannot be repeated is unknown
        await streams.write(name, "chunk", lost(2))
    assert raised.value.code is ErrorCode.UNAVAILABLE and bus.storage_problem == ""
    with pytest.raises(BusError) as raised:
        await streams.write(name, "put a", lost(9), stored, is_repeatable=True)
    assert raised.value.code is ErrorCode.STORAGE_FULL and name in bus.storage_problem and num_lost == 4
    with pytest.raises(BusError) as raised:  # now it is known
        await streams.write(name, "chunk", lost(9))
    assert raised.value.code is ErrorCode.STORAGE_FULL and num_lost == 5


async def test_in_a_cluster_what_was_stored_late_is_no_conflict(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_streams, "CALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(nats_streams, "LATE_ANSWER_S", 0.2)
    bus = await connect("writer")
    assert isinstance(bus, NatsBus)
    store = await bus.key_value(LEDGER)
    assert isinstance(store, NatsKeyValue)
    await store.put("a", Ping("x"))
    monkeypatch.setattr(bus._streams, "num_replicas", 3)
    create, num_tries = store._writing.create, 0

    async def late(key: str, body: bytes) -> int:
        nonlocal num_tries
        num_tries += 1
        if num_tries == 1:
            await asyncio.sleep(60)
        await create(key, body)  # only now is what was sent first stored
        return int(await create(key, body))

    monkeypatch.setattr(store._writing, "create", late)
    assert await store.create("b", Ping("y")) == 2


# -------------------------------------------------------------------------------------------- size, and many writers


async def test_a_stream_for_which_there_is_no_room_is_made_smaller(connect_to: ConnectTo) -> None:
    server = NatsServer(max_storage_bytes=100 * 1024 * 1024)
    try:
        bus = await connect_to(server)
        store = await bus.key_value(LEDGER)
        await store.put("a", Ping("x"))
        assert await store.get("a") is not None
        with pytest.raises(BusError):
            for n in range(8):
                await bus.key_value(Bucket(f"tideway_test_{n}", Ping, durable=True), max_bytes=1 << 40)
    finally:
        server.close()


async def test_a_bucket_that_took_rollups_takes_none(connect: Connect, nats_settings: BusSettings) -> None:
    bus = await connect("n")
    await (await bus.key_value(LEDGER)).put("a", Ping("x"))
    client = await nats.connect(nats_settings.nats_url)
    streams, name = client.jetstream(), f"KV_{LEDGER.name}"
    config = (await streams.stream_info(name)).config
    await streams.update_stream(config.evolve(allow_rollup_hdrs=True))
    store = await (await connect("later")).key_value(LEDGER)
    assert not (await streams.stream_info(name)).config.allow_rollup_hdrs
    assert await store.get("a") is not None
    await client.close()


async def test_a_stream_gets_the_size_that_is_declared_whatever_it_had(connect: Connect) -> None:
    for size in (64 << 20, 16 << 20, 32 << 20):
        store = await (await connect(f"n{size}")).key_value(LEDGER, max_bytes=size)
        assert (await store.room()).max_bytes == size
        await store.put(f"k{size}", Ping("x"))
    assert len(await store.entries()) == 3
    assert 0 < (await store.room()).used_bytes < 10_000


async def test_a_stream_is_never_made_smaller_than_what_it_holds(connect: Connect) -> None:
    store = await (await connect("large")).key_value(LEDGER, max_bytes=64 << 20)
    for n in range(6):
        await store.put(f"k{n}", Ping("x" * 500_000))
    used = (await store.room()).used_bytes
    again = await (await connect("small")).key_value(LEDGER, max_bytes=1 << 20)
    assert (await again.room()).max_bytes == used + used // 3
    assert len(await again.entries()) == 6
    third = await (await connect("third")).key_value(LEDGER, max_bytes=32 << 20)
    assert (await third.room()).max_bytes == 32 << 20


async def test_a_stream_gets_room_from_one_that_does_not_use_it(connect_to: ConnectTo) -> None:
    server = NatsServer(max_storage_bytes=128 << 20)
    own = Bucket("tideway_test_small", Ping, durable=True)
    try:
        bus = await connect_to(server)
        large = await bus.key_value(Bucket("tideway_test_large", Ping, durable=True), max_bytes=128 << 20)
        await large.put("a", Ping("x"))
        small = await bus.key_value(own, max_bytes=32 << 20)
        await small.put("a", Ping("y"))
        assert await large.get("a") is not None
        sizes = [(await store.room()).max_bytes for store in (large, small)]
        assert sum(sizes) <= 128 << 20
        for store, size in ((large, sizes[0]), (small, sizes[1])):
            again = Bucket(store._bucket.name, Ping, durable=True)
            other = await (await connect_to(server)).key_value(again, max_bytes=size)
            assert (await other.room()).max_bytes == size, "a start over changes nothing, however little room is left"
    finally:
        server.close()


async def test_a_watch_and_its_writers_agree_under_load(connect: Connect) -> None:
    stores = [await (await connect(f"n{n}")).key_value(LEDGER) for n in range(3)]
    watch = await stores[0].watch()

    async def write(writer: int) -> None:
        for n in range(40):
            await stores[writer].put(f"k{n % 7}", Ping(f"{writer}", n))

    await asyncio.gather(*(write(n) for n in range(3)))
    truth = {key: entry.value for key, entry in (await stores[1].entries()).items()}
    await eventually(lambda: watch.entries == truth)
    with pytest.raises(RevisionConflict):
        await stores[1].create("k1", Ping("x"))
