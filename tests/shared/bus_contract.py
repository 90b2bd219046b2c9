"""The contract of `shared.bus.interface`, run over every implementation: a test module subclasses `BusContract` and supplies
the fixture `connect`, which makes buses that reach each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from opentelemetry import context as trace_context

from shared.bus.interface import Bus, BusError, RevisionConflict, ServiceError
from shared.messages.catalogue import PREFIX
from shared.messages.channels import (
    Bucket,
    Endpoint,
    ObjectBucket,
    Topic,
)
from shared.messages.requests import ErrorCode
from shared.telemetry import context_of, current_traceparent


class Ping(msgspec.Struct, frozen=True, array_like=True):
    text: str
    number: int = 0


class Pong(msgspec.Struct, frozen=True, array_like=True):
    text: str


PING = Endpoint(f"{PREFIX}.test.ping", Ping, Pong)
NEWS = Topic(f"{PREFIX}.test.news.{{place}}", Ping)
LEDGER = Bucket("test_ledger", Ping, durable=True)
LIVE = Bucket("test_live", Ping, ttl_s=1.0)
BLOBS = ObjectBucket("test_blobs")
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

Connect = Callable[[str], Awaitable[Bus]]


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


class BusContract:
    # ------------------------------------------------------------------------------------------- publish/subscribe

    async def test_messages_arrive_in_order(self, connect: Connect) -> None:
        sender, receiver = await connect("sender"), await connect("receiver")
        received: list[int] = []
        await receiver.subscribe(NEWS.at(place="here"), lambda message: received.append(message.number))
        for number in range(500):
            sender.publish(NEWS.at(place="here"), Ping("x", number))
            sender.publish(NEWS.at(place="there"), Ping("x", -1))
        await eventually(lambda: len(received) == 500)
        assert received == list(range(500))

    async def test_every_subscriber_gets_a_message(self, connect: Connect) -> None:
        sender, *receivers = [await connect(name) for name in ("sender", "one", "two")]
        received: list[str] = []
        for index, receiver in enumerate(receivers):
            await receiver.subscribe(
                NEWS.at(place="here"), lambda message, i=index: received.append(f"{i}{message.text}")
            )
        sender.publish(NEWS.at(place="here"), Ping("a"))
        await eventually(lambda: len(received) == 2)
        assert sorted(received) == ["0a", "1a"]

    async def test_a_failing_subscriber_gets_the_next_message(self, connect: Connect) -> None:
        sender, receiver = await connect("sender"), await connect("receiver")
        received: list[int] = []

        def handler(message: Ping) -> None:
            received.append(message.number)
            if message.number == 0:
                raise ValueError("scripted")

        await receiver.subscribe(NEWS.at(place="here"), handler)
        sender.publish(NEWS.at(place="here"), Ping("x", 0))
        sender.publish(NEWS.at(place="here"), Ping("x", 1))
        await eventually(lambda: received == [0, 1])

    async def test_an_unreadable_message_is_skipped(self, connect: Connect) -> None:
        sender, receiver = await connect("sender"), await connect("receiver")
        received: list[Ping] = []
        await receiver.subscribe(NEWS.at(place="here"), received.append)
        sender.publish(Topic(NEWS.at(place="here").subject, int), 7)
        sender.publish(NEWS.at(place="here"), Ping("fine"))
        await eventually(lambda: received == [Ping("fine")])

    async def test_stopped_subscription_gets_nothing(self, connect: Connect) -> None:
        sender, receiver = await connect("sender"), await connect("receiver")
        first: list[Ping] = []
        second: list[Ping] = []
        subscription = await receiver.subscribe(NEWS.at(place="here"), first.append)
        await receiver.subscribe(NEWS.at(place="here"), second.append)
        await subscription.stop()
        await subscription.stop()
        await receiver.round_trip_s()
        sender.publish(NEWS.at(place="here"), Ping("x"))
        await eventually(lambda: len(second) == 1)
        assert first == []

    async def test_publishing_too_much_at_once_is_dropped_not_raised(self, connect: Connect) -> None:
        bus = await connect("bus")
        received: list[Ping] = []
        await bus.subscribe(NEWS.at(place="here"), received.append)
        bus.publish(NEWS.at(place="here"), Ping("x" * (bus.max_payload_bytes + 1)))
        bus.publish(NEWS.at(place="here"), Ping("fits"))
        await eventually(lambda: received == [Ping("fits")])

    async def test_a_traced_message_arrives(self, connect: Connect) -> None:
        bus = await connect("bus")
        received: list[Ping] = []
        await bus.subscribe(NEWS.at(place="here"), received.append)
        token = trace_context.attach(context_of(TRACEPARENT))
        try:
            bus.publish(NEWS.at(place="here"), Ping("x"), traced=True)
        finally:
            trace_context.detach(token)
        await eventually(lambda: received == [Ping("x")])

    # ----------------------------------------------------------------------------------------------- request/reply

    async def test_request_gets_its_reply(self, connect: Connect) -> None:
        client, server = await connect("client"), await connect("server")

        async def handler(query: Ping) -> Pong:
            await asyncio.sleep(0.01 * (query.number % 3))
            return Pong(f"{query.text}{query.number}")

        await server.serve(PING, handler)
        replies = await asyncio.gather(*(client.request(PING, Ping("n", n), timeout_s=5) for n in range(50)))
        assert [reply.text for reply in replies] == [f"n{n}" for n in range(50)]

    async def test_one_of_several_servers_answers(self, connect: Connect) -> None:
        client, *servers = [await connect(name) for name in ("client", "one", "two")]
        asked: list[int] = []
        for index, server in enumerate(servers):

            async def handler(query: Ping, index: int = index) -> Pong:
                asked.append(index)
                return Pong(query.text)

            await server.serve(PING, handler)
        for _ in range(40):
            await client.request(PING, Ping("x"), timeout_s=5)
        assert len(asked) == 40
        assert set(asked) == {0, 1}

    async def test_nobody_serving_is_unavailable_at_once(self, connect: Connect) -> None:
        bus = await connect("client")
        started = bus.now()
        with pytest.raises(BusError) as raised:
            await bus.request(PING, Ping("x"), timeout_s=30)
        assert raised.value.code == ErrorCode.UNAVAILABLE
        assert bus.now() - started < 5

    async def test_typed_error_of_the_handler_reaches_the_requester(self, connect: Connect) -> None:
        client, server = await connect("client"), await connect("server")

        async def handler(query: Ping) -> Pong:
            raise ServiceError.of(ErrorCode.OVERLOADED, "queue is full:\r\n für heute", "prompt", 2.5)

        await server.serve(PING, handler)
        with pytest.raises(ServiceError) as raised:
            await client.request(PING, Ping("x"), timeout_s=5)
        info = raised.value.info
        assert (info.code, info.param, info.retry_after_s) == (ErrorCode.OVERLOADED, "prompt", 2.5)
        assert info.message == "queue is full:\r\n für heute"

    @pytest.mark.parametrize("error", [ValueError("secret"), TimeoutError("secret")])
    async def test_any_other_exception_is_internal(self, connect: Connect, error: Exception) -> None:
        client, server = await connect("client"), await connect("server")

        async def handler(query: Ping) -> Pong:
            raise error

        await server.serve(PING, handler)
        with pytest.raises(ServiceError) as raised:
            await client.request(PING, Ping("x"), timeout_s=5)
        assert raised.value.code == ErrorCode.INTERNAL
        assert "secret" not in raised.value.info.message

    async def test_a_reply_that_cannot_be_encoded_is_internal(self, connect: Connect) -> None:
        client, server = await connect("client"), await connect("server")

        async def handler(query: Ping) -> Pong:
            return Pong(object())  # type: ignore[arg-type]

        await server.serve(PING, handler)
        with pytest.raises(ServiceError) as raised:
            await client.request(PING, Ping("x"), timeout_s=5)
        assert raised.value.code == ErrorCode.INTERNAL

    async def test_unreadable_request_is_a_bad_request(self, connect: Connect) -> None:
        client, server = await connect("client"), await connect("server")

        async def handler(query: Ping) -> Pong:
            return Pong("never")

        await server.serve(PING, handler)
        with pytest.raises(ServiceError) as raised:
            await client.request(Endpoint(PING.subject, int, Pong), 7, timeout_s=5)
        assert raised.value.code == ErrorCode.BAD_REQUEST

    async def test_unreadable_reply_is_an_error(self, connect: Connect) -> None:
        client, server = await connect("client"), await connect("server")

        async def handler(query: Ping) -> Pong:
            return Pong("text")

        await server.serve(PING, handler)
        with pytest.raises(BusError) as raised:
            await client.request(Endpoint(PING.subject, Ping, int), Ping("x"), timeout_s=5)
        assert raised.value.code == ErrorCode.INTERNAL

    async def test_beyond_the_concurrency_bound_is_busy_at_once(self, connect: Connect) -> None:
        client, server = await connect("client"), await connect("server")
        release = asyncio.Event()
        running = 0

        async def handler(query: Ping) -> Pong:
            nonlocal running
            running += 1
            await release.wait()
            return Pong("done")

        await server.serve(PING, handler, max_concurrency=2)
        held = [asyncio.create_task(client.request(PING, Ping("x"), timeout_s=10)) for _ in range(2)]
        await eventually(lambda: running == 2)
        with pytest.raises(ServiceError) as raised:
            await client.request(PING, Ping("x"), timeout_s=10)
        assert raised.value.code == ErrorCode.BUSY
        release.set()
        assert [reply.text for reply in await asyncio.gather(*held)] == ["done", "done"]
        assert (await client.request(PING, Ping("x"), timeout_s=10)).text == "done"

    async def test_a_request_ends_by_its_deadline_and_its_handler_too(self, connect: Connect) -> None:
        client, server = await connect("client"), await connect("server")
        cancelled = asyncio.Event()

        async def handler(query: Ping) -> Pong:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return Pong("too late")

        await server.serve(PING, handler)
        started = client.now()
        with pytest.raises(BusError) as raised:
            await client.request(PING, Ping("x"), timeout_s=0.1)
        assert raised.value.code == ErrorCode.DEADLINE
        assert 0.09 <= client.now() - started < 2
        async with asyncio.timeout(2):
            await cancelled.wait()

    async def test_too_large_a_request_names_the_limit(self, connect: Connect) -> None:
        client, server = await connect("client"), await connect("server")

        async def handler(query: Ping) -> Pong:
            return Pong(str(len(query.text)))

        await server.serve(PING, handler)
        limit = client.max_payload_bytes
        assert (await client.request(PING, Ping("x" * (limit - 500)), timeout_s=5)).text == str(limit - 500)
        with pytest.raises(BusError) as raised:
            await client.request(PING, Ping("x" * (limit + 1)), timeout_s=5)
        assert raised.value.code == ErrorCode.BAD_REQUEST
        assert str(limit) in raised.value.info.message

    async def test_too_large_a_reply_is_an_error(self, connect: Connect) -> None:
        client, server = await connect("client"), await connect("server")

        async def handler(query: Ping) -> Pong:
            return Pong("x" * (server.max_payload_bytes + 1))

        await server.serve(PING, handler)
        with pytest.raises(ServiceError) as raised:
            await client.request(PING, Ping("x"), timeout_s=5)
        assert raised.value.code == ErrorCode.INTERNAL

    async def test_handler_runs_in_the_trace_context_of_the_request(self, connect: Connect) -> None:
        client, server = await connect("client"), await connect("server")

        async def handler(query: Ping) -> Pong:
            await asyncio.sleep(0)
            return Pong(current_traceparent())

        await server.serve(PING, handler)
        token = trace_context.attach(context_of(TRACEPARENT))
        try:
            assert (await client.request(PING, Ping("x"), timeout_s=5)).text == TRACEPARENT
        finally:
            trace_context.detach(token)
        assert (await client.request(PING, Ping("x"), timeout_s=5)).text == ""

    async def test_stopped_server_finishes_what_runs_and_takes_no_more(self, connect: Connect) -> None:
        client, server = await connect("client"), await connect("server")
        started, release = asyncio.Event(), asyncio.Event()

        async def handler(query: Ping) -> Pong:
            started.set()
            await release.wait()
            return Pong("done")

        served = await server.serve(PING, handler)
        held = asyncio.create_task(client.request(PING, Ping("x"), timeout_s=10))
        await started.wait()
        await served.stop()
        await served.stop()
        await server.round_trip_s()
        with pytest.raises(BusError) as raised:
            await client.request(PING, Ping("x"), timeout_s=10)
        assert raised.value.code == ErrorCode.UNAVAILABLE
        release.set()
        assert (await held).text == "done"

    async def test_closing_waits_for_running_handlers(self, connect: Connect) -> None:
        client, server = await connect("client"), await connect("server")
        started = asyncio.Event()

        async def handler(query: Ping) -> Pong:
            started.set()
            await asyncio.sleep(0.1)
            return Pong("done")

        await server.serve(PING, handler)
        held = asyncio.create_task(client.request(PING, Ping("x"), timeout_s=10))
        await started.wait()
        await server.close()
        await server.close()
        assert (await held).text == "done"
        assert not server.is_connected

    async def test_a_closed_bus_refuses(self, connect: Connect) -> None:
        bus = await connect("bus")
        assert bus.is_connected
        assert 0 <= await bus.round_trip_s() < 5
        await bus.close()
        bus.publish(NEWS.at(place="here"), Ping("x"))
        with pytest.raises(BusError) as raised:
            await bus.request(PING, Ping("x"), timeout_s=5)
        assert raised.value.code == ErrorCode.UNAVAILABLE
        with pytest.raises(BusError):
            await bus.round_trip_s()

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
        while bus.now() - started < 2.0:
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

    # -------------------------------------------------------------------------------------------------- work queue

    async def test_work_queue_gives_each_item_to_one(self, connect: Connect) -> None:
        one = await (await connect("one")).work_queue("jobs", max_bytes=1 << 24, ack_wait_s=30)
        two = await (await connect("two")).work_queue("jobs", max_bytes=1 << 24, ack_wait_s=30)
        for n in range(10):
            await one.push("model/a", b"%d" % n)
        await one.push("model-b", b"other")
        first = await one.pull("model/a", 4, 1.0)
        rest = await two.pull("model/a", 100, 1.0)
        assert [item.data for item in first] == [b"0", b"1", b"2", b"3"]
        assert [item.data for item in first + rest] == [b"%d" % n for n in range(10)]
        assert {item.num_deliveries for item in first + rest} == {1}
        for item in first + rest:
            await item.ack()
        assert [item.data for item in await two.pull("model-b", 1, 1.0)] == [b"other"]

    async def test_pulling_waits_for_an_item_or_the_deadline(self, connect: Connect) -> None:
        bus = await connect("one")
        queue = await bus.work_queue("jobs", max_bytes=1 << 24, ack_wait_s=30)
        started = bus.now()
        assert await queue.pull("a", 5, 0.2) == []
        assert 0.15 < bus.now() - started < 2
        waiting = asyncio.create_task(queue.pull("a", 5, 20.0))
        await asyncio.sleep(0.05)
        await queue.push("a", b"x")
        async with asyncio.timeout(5):
            items = await waiting
        assert [item.data for item in items] == [b"x"]
        await items[0].ack()

    async def test_items_come_again_unless_acknowledged(self, connect: Connect) -> None:
        bus = await connect("one")
        queue = await bus.work_queue("jobs", max_bytes=1 << 24, ack_wait_s=0.5)
        await queue.push("a", b"x")
        (first,) = await queue.pull("a", 1, 1.0)
        assert await queue.pull("a", 1, 0.0) == []
        (second,) = await queue.pull("a", 1, 3.0)
        assert (first.data, first.num_deliveries) == (second.data, 1) and second.num_deliveries == 2
        await second.nak()
        (third,) = await queue.pull("a", 1, 3.0)
        await third.nak(0.2)
        assert await queue.pull("a", 1, 0.0) == []
        (fourth,) = await queue.pull("a", 1, 3.0)
        assert fourth.num_deliveries == 4
        for _ in range(4):
            await asyncio.sleep(0.2)
            await fourth.in_progress()
        assert await queue.pull("a", 1, 0.0) == []
        await fourth.ack()
        assert await queue.pull("a", 1, 1.0) == []

    async def test_pushing_twice_with_one_name_is_pushing_once(self, connect: Connect) -> None:
        queue = await (await connect("one")).work_queue("jobs", max_bytes=1 << 24, ack_wait_s=30)
        await queue.push("a", b"x", deduplicate_as="line-1")
        await queue.push("a", b"x", deduplicate_as="line-1")
        await queue.push("a", b"y", deduplicate_as="line-2")
        items = await queue.pull("a", 10, 1.0)
        assert [item.data for item in items] == [b"x", b"y"]

    async def test_a_full_work_queue_refuses(self, connect: Connect) -> None:
        queue = await (await connect("one")).work_queue("small", max_bytes=64 * 1024, ack_wait_s=30)
        with pytest.raises(BusError) as raised:
            for _ in range(10):
                await queue.push("a", b"x" * 16 * 1024)
        assert raised.value.code == ErrorCode.OVERLOADED

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
