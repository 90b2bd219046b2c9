"""Objects written and read piece by piece, and purging, on both implementations of the bus."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from shared.bus.interface import Bus, BusError
from shared.bus.nats_bus import NatsBus
from shared.messages.channels import Bucket, ObjectBucket
from shared.messages.requests import ErrorCode
from shared.runtime.settings import BusSettings
from tests.memory_bus import MemoryHub

BLOBS = ObjectBucket("test_blobs")


class Note(msgspec.Struct, frozen=True):
    text: str


NOTES = Bucket("test_notes", Note, durable=True)


@pytest.fixture(params=["nats", "memory"])
async def bus(request: pytest.FixtureRequest, nats_settings: BusSettings) -> AsyncIterator[Bus]:
    if request.param == "nats":
        bus: Bus = await NatsBus.connect(nats_settings, service="test", service_id="test")
    else:
        bus = MemoryHub().connect("test")
    yield bus
    await bus.close()


async def test_an_object_is_seen_when_it_is_whole(bus: Bus) -> None:
    store = await bus.object_store(BLOBS)
    pieces = [bytes([i]) * 50_000 for i in range(20)]
    writer = await store.writer("a")
    for piece in pieces:
        await writer.write(piece)
    assert await store.read("a") is None
    await writer.commit()
    await writer.abort()
    chunks = await store.read("a")
    assert chunks is not None
    read = [chunk async for chunk in chunks]
    assert b"".join(read) == b"".join(pieces)
    assert len(read) > 4 and max(map(len, read)) <= 128 * 1024


async def test_an_aborted_object_replaces_nothing(bus: Bus) -> None:
    store = await bus.object_store(BLOBS)
    await store.put("a", b"old")
    writer = await store.writer("a")
    await writer.write(b"x" * 300_000)
    await writer.abort()
    assert await store.get("a") == b"old"
    assert await store.names() == ["a"]


async def test_a_reader_learns_that_its_object_was_deleted(bus: Bus) -> None:
    store = await bus.object_store(BLOBS)
    await store.put("a", b"x" * 1_000_000)
    chunks = await store.read("a")
    assert chunks is not None
    with pytest.raises(BusError) as raised:
        async for _ in chunks:
            await store.delete("a")
    assert raised.value.code is ErrorCode.GONE


async def test_purging_takes_what_lies_below_a_key(bus: Bus) -> None:
    notes = await bus.key_value(NOTES, max_bytes=32 << 20)
    for key in ("a", "a.1", "a.2", "ab", "ab.1", "b.1"):
        await notes.create(key, Note(key))
    await notes.purge("a")
    assert sorted(await notes.entries()) == ["ab", "ab.1", "b.1"]
    await notes.create("a.1", Note("again"))
    await notes.purge("nothing")


async def test_what_a_dead_writer_left_is_purged(nats_settings: BusSettings) -> None:
    bus = await NatsBus.connect(nats_settings, service="test", service_id="test")
    store = await bus.object_store(BLOBS)
    await store.put("a", b"x" * 200_000)
    writer = await store.writer("b")
    await writer.write(b"y" * 300_000)
    seen = await store.purge_unfinished(set())
    assert len(seen) == 1
    other = await store.writer("c")
    await other.write(b"z" * 300_000)
    later = await store.purge_unfinished(seen)
    assert len(later) == 1 and not later & seen
    await other.commit()
    assert await store.purge_unfinished(later) == set()
    assert await store.get("a") == b"x" * 200_000 and await store.get("c") == b"z" * 300_000
    await bus.close()
