"""The contract of `shared.bus.interface` for what is stored: buckets and objects. Used as
tests/shared/bus_contract.py is."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus.interface import RevisionConflict
from shared.messages.channels import Bucket
from shared.messages.requests import ErrorCode
from tests.shared.bus_contract import BLOBS, LEDGER, LIVE, Connect, Ping, eventually


class StorageContract:
    # --------------------------------------------------------------------------------------------------- key-value

    async def test_key_value_put_get_delete(self, connect: Connect) -> None:
        one = await (await connect("one")).key_value(LEDGER)
        two = await (await connect("two")).key_value(LEDGER)
        assert await one.get("a") is None
        assert await one.entries() == {}
        first = await one.put("a", Ping("x"))
        second = await one.put("a", Ping("y"))
        await one.put("b/c=20", Ping("z"))
        assert second > first
        entry = await two.get("a")
        assert entry is not None and (entry.value, entry.revision) == (Ping("y"), second)
        assert {key: entry.value.text for key, entry in (await two.entries()).items()} == {"a": "y", "b/c=20": "z"}
        assert (await two.entries())["a"].revision == second
        await two.delete("a")
        await two.delete("never-there")
        assert await one.get("a") is None
        assert set(await one.entries()) == {"b/c=20"}
        assert [await two.is_deleted(key) for key in ("a", "b/c=20", "c")] == [True, False, False]
        await two.put("a", Ping("again"))
        assert not await one.is_deleted("a")
        await two.delete("a")
        await two.purge("a")
        assert not await one.is_deleted("a")

    async def test_an_entry_is_purged_as_it_was_seen_or_not_at_all(self, connect: Connect) -> None:
        one = await (await connect("one")).key_value(LEDGER)
        two = await (await connect("two")).key_value(LEDGER)
        first = await one.create("a", Ping("x"))
        below = await one.create("a.b", Ping("x"))
        second = await two.update("a", Ping("x"), first)  # the same, and written all the same
        assert not await one.purge_revision("a", first)
        entry = await two.get("a")
        assert entry is not None and entry.revision == second
        assert await one.purge_revision("a", second)
        assert await two.get("a") is None and not await two.is_deleted("a")
        assert not await one.purge_revision("a", second)
        with pytest.raises(RevisionConflict):
            await two.update("a", Ping("y"), second)
        assert await two.create("a", Ping("y")) > below
        entry = await two.get("a.b")
        assert entry is not None and entry.revision == below

    async def test_markers_of_deletions_go_when_they_were_there_before(self, connect: Connect) -> None:
        one = await (await connect("one")).key_value(LEDGER)
        two = await (await connect("two")).key_value(LEDGER)
        for key in ("a", "b.c", "kept"):
            await one.put(key, Ping("x"))
        await one.delete("a")
        await one.delete("b.c")
        seen = await two.purge_markers(set())
        assert seen == {"a", "b.c"} and await one.is_deleted("a")
        await one.put("b.c", Ping("anew"))
        await one.delete("kept")
        assert await two.purge_markers(seen) == {"kept"}
        assert [await one.is_deleted(key) for key in ("a", "b.c", "kept")] == [False, False, True]
        assert set(await one.entries()) == {"b.c"}
        assert await one.create("a", Ping("anew")) > 0

    async def test_create_and_update_conflict(self, connect: Connect) -> None:
        one = await (await connect("one")).key_value(LEDGER)
        two = await (await connect("two")).key_value(LEDGER)
        first = await one.create("a", Ping("x"))
        with pytest.raises(RevisionConflict) as raised:
            await two.create("a", Ping("y"))
        assert raised.value.code == ErrorCode.CONFLICT
        second = await two.update("a", Ping("y"), first)
        with pytest.raises(RevisionConflict):
            await one.update("a", Ping("z"), first)
        await one.delete("a")
        with pytest.raises(RevisionConflict):
            await two.update("a", Ping("z"), second)
        assert await two.create("a", Ping("again")) > second

    async def test_one_of_many_creators_wins(self, connect: Connect) -> None:
        stores = [await (await connect(f"n{n}")).key_value(LIVE) for n in range(5)]
        results = await asyncio.gather(
            *(store.create("leader", Ping(str(n))) for n, store in enumerate(stores)), return_exceptions=True
        )
        assert sum(isinstance(result, int) for result in results) == 1
        assert sum(isinstance(result, RevisionConflict) for result in results) == 4

    async def test_many_declare_a_bucket_at_once(self, connect: Connect) -> None:
        buses = [await connect(f"n{n}") for n in range(5)]
        stores = await asyncio.gather(*(bus.key_value(LEDGER) for bus in buses))
        await stores[0].put("a", Ping("x"))
        for store in stores:
            assert await store.get("a") is not None

    async def test_a_bucket_of_another_configuration_is_kept(self, connect: Connect) -> None:
        one = await (await connect("one")).key_value(LEDGER)
        await one.put("a", Ping("x"))
        other = await (await connect("two")).key_value(Bucket(LEDGER.name, Ping, ttl_s=60.0))
        entry = await other.get("a")
        assert entry is not None and entry.value == Ping("x")

    async def test_watch_sees_present_entries_then_changes(self, connect: Connect) -> None:
        one = await (await connect("one")).key_value(LEDGER)
        two = await (await connect("two")).key_value(LEDGER)
        await one.put("a", Ping("old"))
        await one.put("gone", Ping("x"))
        await one.delete("gone")
        changes: list[tuple[str, str | None]] = []
        watch = await two.watch(lambda key, value: changes.append((key, value.text if value else None)))
        assert watch.entries == {"a": Ping("old")}
        assert changes == [("a", "old")]
        await one.put("a", Ping("new"))
        await one.put("b", Ping("x"))
        await eventually(lambda: "b" in watch.entries)  # a bucket keeps the last value of a key alone
        await one.delete("a")
        await eventually(lambda: watch.entries == {"b": Ping("x")})
        assert changes == [("a", "old"), ("a", "new"), ("b", "x"), ("a", None)]
        await watch.stop()
        await watch.stop()
        await one.put("c", Ping("x"))
        assert "c" not in watch.entries

    async def test_watch_of_an_empty_bucket_and_failing_watchers(self, connect: Connect) -> None:
        store = await (await connect("one")).key_value(LEDGER)
        seen: list[str] = []

        def on_change(key: str, value: Ping | None) -> None:
            seen.append(key)
            raise ValueError("scripted")

        watch = await store.watch(on_change)
        assert watch.entries == {}
        await store.put("a", Ping("x"))
        await store.put("b", Ping("x"))
        await eventually(lambda: seen == ["a", "b"])

    async def test_entries_with_a_ttl_leave_when_not_written(self, connect: Connect) -> None:
        bus, other = await connect("one"), await connect("two")
        writer, reader = await bus.key_value(LIVE), await other.key_value(LIVE)
        changes: list[tuple[str, str | None]] = []
        watch = await reader.watch(lambda key, value: changes.append((key, value.text if value else None)))
        await writer.put("brief", Ping("x"))
        started = bus.now()
        while bus.now() - started < 3.5:
            await writer.put("kept", Ping("y"))
            await asyncio.sleep(0.3)
        assert set(watch.entries) == {"kept"}
        assert ("brief", None) in changes
        assert ("kept", None) not in changes
        assert await reader.get("brief") is None
        await eventually(lambda: watch.entries == {})
        assert changes[-1] == ("kept", None)
        await asyncio.sleep(0.5)
        await writer.create("kept", Ping("again"))
        await eventually(lambda: watch.entries == {"kept": Ping("again")})

    # ------------------------------------------------------------------------------------------------ object store

    async def test_objects_are_put_got_and_deleted(self, connect: Connect) -> None:
        one = await (await connect("one")).object_store(BLOBS)
        two = await (await connect("two")).object_store(BLOBS)
        large = bytes(range(256)) * 4 * 1024 * 3 + b"tail"
        assert await one.names() == []
        assert await one.get("batch/1.jsonl") is None
        await one.put("batch/1.jsonl", large)
        await one.put("empty", b"")
        assert await two.get("batch/1.jsonl") == large
        assert await two.get("empty") == b""
        assert await two.names() == ["batch/1.jsonl", "empty"]
        await two.put("batch/1.jsonl", b"short")
        assert await one.get("batch/1.jsonl") == b"short"
        await one.delete("batch/1.jsonl")
        await one.delete("batch/1.jsonl")
        assert await two.get("batch/1.jsonl") is None
        assert await two.names() == ["empty"]
