"""The contract of `shared.bus.interface` for messages and requests, run over every implementation: a test module subclasses
`BusContract` and supplies the fixture `connect`, which makes buses that reach each other. What is stored:
tests/shared/storage_contract.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from opentelemetry import context as trace_context

from shared.bus.interface import Bus, BusError, ServiceError
from shared.messages.catalogue import PREFIX
from shared.messages.channels import (
    Bucket,
    Endpoint,
    ObjectBucket,
    Topic,
)
from shared.messages.requests import ErrorCode
from shared.runtime.telemetry import context_of, current_traceparent


class Ping(msgspec.Struct, frozen=True, array_like=True):
    text: str
    number: int = 0


class Pong(msgspec.Struct, frozen=True, array_like=True):
    text: str


PING = Endpoint(f"{PREFIX}.test.ping", Ping, Pong)
NEWS = Topic(f"{PREFIX}.test.news.{{place}}", Ping)
LEDGER = Bucket("test_ledger", Ping, durable=True)
LIVE = Bucket("test_live", Ping, ttl_s=2.0)
BLOBS = ObjectBucket("test_blobs")
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NO_TEXT = msgspec.Raw(b"\x91\xa1\xff")
"""Payload like those of `Ping` and `Pong`, with a byte that is no UTF-8."""

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
        sender.publish(Topic(NEWS.at(place="here").subject, msgspec.Raw), NO_TEXT)
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

    async def test_requests_can_be_sent_without_a_task_each(self, connect: Connect) -> None:
        client, server = await connect("client"), await connect("server")

        async def handler(query: Ping) -> Pong:
            await asyncio.sleep(5 if query.text == "slow" else 0)
            return Pong(query.text)

        with pytest.raises(BusError) as raised:
            await client.send_request(PING, Ping("early"), timeout_s=5)
        assert raised.value.code == ErrorCode.UNAVAILABLE
        await server.serve(PING, handler)
        calls = [client.send_request(PING, Ping(str(n)), timeout_s=5) for n in range(20)]
        late = client.send_request(PING, Ping("slow"), timeout_s=0.1)
        await asyncio.wait([*calls, late])
        assert [call.result().text for call in calls] == [str(n) for n in range(20)]
        error = late.exception()
        assert isinstance(error, BusError) and error.code == ErrorCode.DEADLINE

    async def test_a_plain_function_may_be_the_handler(self, connect: Connect) -> None:
        client, server = await connect("client"), await connect("server")
        parents = []

        def handler(query: Ping) -> Pong:
            parents.append(current_traceparent())
            if query.text == "refuse":
                raise ServiceError.of(ErrorCode.OVERLOADED, "queue is full", "prompt", 2.5)
            return Pong(query.text if query.number == 0 else object())  # type: ignore[arg-type]

        await server.serve(PING, handler, max_concurrency=1)
        replies = await asyncio.gather(*(client.request(PING, Ping(f"{n}"), timeout_s=5) for n in range(50)))
        assert [reply.text for reply in replies] == [f"{n}" for n in range(50)]
        for query, code in ((Ping("refuse"), ErrorCode.OVERLOADED), (Ping("cannot be encoded", 1), ErrorCode.INTERNAL)):
            with pytest.raises(ServiceError) as raised:
                await client.request(PING, query, timeout_s=5)
            assert raised.value.code == code
        assert set(parents) == {""}
        token = trace_context.attach(context_of(TRACEPARENT))
        try:
            await client.request(PING, Ping("traced"), timeout_s=5)
        finally:
            trace_context.detach(token)
        assert parents[-1] == TRACEPARENT
        assert current_traceparent() == ""

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
        for query in (7, NO_TEXT):
            with pytest.raises(ServiceError) as raised:
                await client.request(Endpoint(PING.subject, object, Pong), query, timeout_s=5)
            assert raised.value.code == ErrorCode.BAD_REQUEST

    async def test_unreadable_reply_is_an_error(self, connect: Connect) -> None:
        client, server = await connect("client"), await connect("server")

        await server.serve(Endpoint(PING.subject, Ping, msgspec.Raw), lambda query: NO_TEXT)
        for reply in (int, Pong):
            with pytest.raises(BusError) as raised:
                await client.request(Endpoint(PING.subject, Ping, reply), Ping("x"), timeout_s=5)
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
