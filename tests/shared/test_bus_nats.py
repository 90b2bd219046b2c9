"""The contract on a real NATS server, and what only a server can do: be killed, stop, ask for a password. Its streams:
test_bus_nats_streams.py."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import time
from typing import Any

import msgspec
import nats
import pytest
from nats.aio.transport import TcpTransport
from opentelemetry import context as trace_context
from prometheus_client import CollectorRegistry

from shared.bus import nats_bus, serving
from shared.bus.codec import sealed
from shared.bus.interface import Bus, BusError, ServiceError
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_client import MAX_PENDING_BYTES
from shared.messages.catalogue import INSTANCE_SUBMIT, PREFIX
from shared.messages.channels import Topic
from shared.messages.requests import Accepted, ErrorCode, GenerationRequest, SamplingParams
from shared.runtime.settings import BusSettings, SettingsError
from shared.runtime.telemetry import context_of, installed_version
from tests.conftest import NatsServer, free_port
from tests.shared.bus_contract import (
    LEDGER,
    LIVE,
    NEWS,
    PING,
    TRACEPARENT,
    BusContract,
    Connect,
    Ping,
    Pong,
    eventually,
)
from tests.shared.conftest import ConnectTo, flushed

RESTART_TIMEOUT_S = 15.0


class TestNatsBus(BusContract):
    pass


async def echo(query: Ping) -> Pong:
    return Pong(query.text)


# ----------------------------------------------------------------------------------------------- loss of the server


@pytest.mark.parametrize("keep_store", [True, False])
async def test_everything_works_again_after_the_server_was_killed(
    fresh_nats: NatsServer, connect_to: ConnectTo, keep_store: bool
) -> None:
    one, two = await connect_to(fresh_nats, "one"), await connect_to(fresh_nats, "two")
    news: list[str] = []
    changes: list[tuple[str, str | None]] = []
    reconnects: list[tuple[bool, set[str]]] = []
    await one.subscribe(NEWS.at(place="here"), lambda message: news.append(message.text))
    await one.serve(PING, echo)
    live, ledger = await two.key_value(LIVE), await two.key_value(LEDGER)
    await ledger.put("lasting", Ping("x"))
    await live.put("heart", Ping("1"))
    watch = await (await one.key_value(LIVE)).watch(
        lambda key, value: changes.append((key, value.text if value else None))
    )
    books = await (await one.key_value(LEDGER)).watch()
    one.on_reconnect(lambda: reconnects.append((one.is_connected, set(books.entries))))

    fresh_nats.kill()
    await eventually(lambda: not one.is_connected and not two.is_connected)
    one.publish(NEWS.at(place="here"), Ping("sent while away"))
    for call in (two.request(PING, Ping("x"), timeout_s=5), live.put("heart", Ping("x")), two.round_trip_s()):
        with pytest.raises(BusError) as raised:
            await call
        assert raised.value.code == ErrorCode.UNAVAILABLE
    # Longer than the TTL: while disconnected nothing expires.
    await asyncio.sleep(1.5)
    assert watch.entries == {"heart": Ping("1")}
    fresh_nats.restart(keep_store=keep_store)
    await eventually(lambda: one.is_connected and two.is_connected, RESTART_TIMEOUT_S)

    assert reconnects == [(True, {"lasting"})]
    await eventually(lambda: news == ["sent while away"])
    two.publish(NEWS.at(place="here"), Ping("after"))
    await eventually(lambda: news == ["sent while away", "after"])
    assert (await two.request(PING, Ping("again"), timeout_s=5)).text == "again"
    # Within the grace period the entry may come back; it does, and a new one comes too.
    assert watch.entries == {"heart": Ping("1")}
    await live.put("heart", Ping("2"))
    await live.put("new", Ping("3"))
    await eventually(lambda: watch.entries == {"heart": Ping("2"), "new": Ping("3")})
    await eventually(lambda: watch.entries == {}, 3)
    assert changes[:3] == [("heart", "1"), ("heart", "2"), ("new", "3")]
    if keep_store:
        assert books.entries == {"lasting": Ping("x")}
    else:
        await eventually(lambda: books.entries == {}, 5)
    await ledger.put("lasting", Ping("y"))
    await eventually(lambda: books.entries == {"lasting": Ping("y")})


async def test_requests_in_flight_fail_when_the_connection_is_lost(
    fresh_nats: NatsServer, connect_to: ConnectTo
) -> None:
    client, server = await connect_to(fresh_nats, "one"), await connect_to(fresh_nats, "two")
    started, release = asyncio.Event(), asyncio.Event()

    async def handler(query: Ping) -> Pong:
        started.set()
        await release.wait()
        return Pong("to nobody")

    await server.serve(PING, handler)
    request = asyncio.create_task(client.request(PING, Ping("x"), timeout_s=60))
    await started.wait()
    fresh_nats.kill()
    with pytest.raises(BusError) as raised:
        async with asyncio.timeout(5):
            await request
    assert raised.value.code == ErrorCode.UNAVAILABLE
    release.set()


@pytest.mark.parametrize("how", ["stop", "close"])
async def test_requests_under_way_to_a_stopping_server_are_answered(
    fresh_nats: NatsServer, connect_to: ConnectTo, how: str
) -> None:
    client, server = await connect_to(fresh_nats, "one"), await connect_to(fresh_nats, "two")
    served = await server.serve(PING, echo)
    asking = [asyncio.create_task(client.request(PING, Ping("x"), timeout_s=30)) for _ in range(20)]
    for _ in range(2):
        await asyncio.sleep(0)  # they are made, then written
    time.sleep(0.1)  # noqa: ASYNC251 (the requests reach the server's socket, and its loop does not see them yet)
    async with asyncio.timeout(10):
        await (served.stop() if how == "stop" else server.close())
        assert [reply.text for reply in await asyncio.gather(*asking)] == ["x"] * 20


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:1", "nats://", "nats://host:port", "nats://u:s3cret@:x"])
async def test_a_url_that_cannot_be_used_is_the_operators_to_mend(url: str) -> None:
    with pytest.raises(SettingsError, match="TIDEWAY_NATS_URL") as raised:
        await NatsBus.connect(BusSettings(nats_url=url), "test", "one")
    assert "s3cret" not in str(raised.value)


async def test_any_of_several_urls_will_do(nats_settings: BusSettings) -> None:
    urls = f"nats://127.0.0.1:{free_port()}, {nats_settings.nats_url.removeprefix('nats://')}"
    bus = await NatsBus.connect(BusSettings(nats_url=urls), "test", "one")
    assert bus.is_connected
    await bus.close()


async def test_connecting_waits_for_the_server(
    fresh_nats: NatsServer, connect_to: ConnectTo, caplog: pytest.LogCaptureFixture
) -> None:
    fresh_nats.kill()
    with caplog.at_level(logging.WARNING):
        connecting = asyncio.create_task(connect_to(fresh_nats))
        await eventually(lambda: "waiting for NATS at 127.0.0.1" in caplog.text)
        await asyncio.sleep(1.2)
    assert caplog.text.count("waiting for NATS") == 1
    fresh_nats.start()
    bus = await connecting
    assert bus.is_connected


async def test_a_stopped_server_is_noticed_and_what_exceeds_the_buffer_is_dropped(
    fresh_nats: NatsServer, connect_to: ConnectTo
) -> None:
    registry = CollectorRegistry()
    bus = await connect_to(fresh_nats, registry=registry)
    received: list[int] = []
    await bus.subscribe(NEWS.at(place="here"), lambda message: received.append(message.number))
    os.kill(fresh_nats.pid, signal.SIGSTOP)
    try:
        body = "x" * 512 * 1024
        num_sent = 4 * MAX_PENDING_BYTES // len(body)
        for number in range(num_sent):
            bus.publish(NEWS.at(place="here"), Ping(body, number))
            await asyncio.sleep(0)
        labels = {"subject": "other", "reason": "no_room"}
        num_dropped = int(registry.get_sample_value("tideway_bus_dropped_total", labels) or 0)
        assert 0 < num_dropped < num_sent
        started = bus.now()
        with pytest.raises(BusError) as raised:
            await bus.request(PING, Ping("x"), timeout_s=0.2)
        assert raised.value.code in (ErrorCode.DEADLINE, ErrorCode.UNAVAILABLE)
        assert bus.now() - started < 2
    finally:
        os.kill(fresh_nats.pid, signal.SIGCONT)
    await eventually(lambda: len(received) == num_sent - num_dropped, RESTART_TIMEOUT_S)
    assert received == sorted(received)


async def test_damaged_messages_are_dropped_and_counted_and_damaged_requests_refused(
    fresh_nats: NatsServer, connect_to: ConnectTo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flipped(body: bytes) -> bytes:
        whole = bytearray(sealed(body))
        if b"harm" in whole:
            whole[whole.index(b"harm")] ^= 1
        return bytes(whole)

    registry = CollectorRegistry()
    bus = await connect_to(fresh_nats, registry=registry)
    received: list[str] = []
    handled: list[str] = []

    async def handle(message: Ping) -> Pong:
        handled.append(message.text)
        return Pong(message.text)

    await bus.subscribe(NEWS.at(place="here"), lambda message: received.append(message.text))
    await bus.serve(PING, handle)
    monkeypatch.setattr(nats_bus, "sealed", flipped)
    bus.publish(NEWS.at(place="here"), Ping("harm"))
    with pytest.raises(ServiceError, match="was damaged") as raised:
        await bus.request(PING, Ping("harm"), timeout_s=5)
    assert raised.value.code is ErrorCode.UNAVAILABLE and not handled
    monkeypatch.setattr(nats_bus, "sealed", sealed)
    monkeypatch.setattr(serving, "sealed", flipped)
    with pytest.raises(BusError, match=r"reply on .* was damaged") as raised:
        await bus.request(PING, Ping("harm"), timeout_s=5)
    assert raised.value.code is ErrorCode.UNAVAILABLE and handled == ["harm"]
    bus.publish(NEWS.at(place="here"), Ping("whole"))
    await eventually(lambda: received)
    assert received == ["whole"]
    labels = {"subject": "other", "reason": "damaged"}
    assert registry.get_sample_value("tideway_bus_dropped_total", labels) == 1


async def test_an_error_from_the_server_leads_to_a_reconnect(fresh_nats: NatsServer, connect_to: ConnectTo) -> None:
    bus = await connect_to(fresh_nats)
    await bus.serve(PING, echo)
    reconnected = asyncio.Event()
    bus.on_reconnect(reconnected.set)
    # Larger than the server's limit, past the check that spares us this.
    bus._client.send("somewhere", "", b"", b"x" * (bus.max_payload_bytes + 1))
    async with asyncio.timeout(RESTART_TIMEOUT_S):
        await reconnected.wait()
    assert (await bus.request(PING, Ping("x"), timeout_s=5)).text == "x"


# --------------------------------------------------------------------------------------------- authentication


CREDENTIALS = 'authorization { user: "tideway", password: "s3cret" }'


async def test_credentials_are_used_and_never_logged(
    connect_to: ConnectTo, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_bus, "COMPLAINT_INTERVAL_S", 0.0)
    server = NatsServer(CREDENTIALS)
    try:
        with caplog.at_level(logging.DEBUG):
            refused = asyncio.create_task(connect_to(server, nats_user="tideway", nats_password="wr0ng"))
            await eventually(lambda: "Authorization Violation" in caplog.text)
            refused.cancel()
            bus = await connect_to(server, nats_user="tideway", nats_password="s3cret")
            server.restart()
            await eventually(lambda: not bus.is_connected)
            await eventually(lambda: bus.is_connected, RESTART_TIMEOUT_S)
            inside = BusSettings(nats_url=f"nats://tideway:s3cret@127.0.0.1:{server.port}")
            other = await NatsBus.connect(inside, "test", "two")
            await other.close()
        assert "s3cret" not in caplog.text
        assert "wr0ng" not in caplog.text
    finally:
        server.close()


# ------------------------------------------------------------------------------------- discovery, metrics, socket


async def test_services_answer_the_micro_protocol(nats_settings: BusSettings) -> None:
    buses = [await NatsBus.connect(nats_settings, "scheduler", name) for name in ("one", "two")]
    bus = buses[0]
    client = await nats.connect(nats_settings.nats_url)
    try:
        served = await bus.serve(INSTANCE_SUBMIT.at(instance_id="node-0"), accept)
        with pytest.raises(ServiceError):
            await bus.request(INSTANCE_SUBMIT.at(instance_id="node-0"), request_named("bad"), timeout_s=5)
        await bus.request(INSTANCE_SUBMIT.at(instance_id="node-0"), request_named("good"), timeout_s=5)

        async def ask(verb: str) -> dict[str, Any]:
            answer: dict[str, Any] = json.loads((await client.request(f"$SRV.{verb}", timeout=2)).data)
            return answer

        identity = {"name": "tideway-scheduler", "id": "one", "version": installed_version(), "metadata": {}}
        assert await ask("PING.tideway-scheduler.one") == identity | {"type": "io.nats.micro.v1.ping_response"}
        assert (await ask("PING"))["name"] == (await ask("PING.tideway-scheduler"))["name"] == "tideway-scheduler"
        info = await ask("INFO.tideway-scheduler.one")
        place = {
            "name": "instance_instance_id_submit",
            "subject": f"{PREFIX}.instance.node-0.submit",
            "queue_group": "",
        }
        assert info["endpoints"] == [place | {"metadata": {}}]
        stats = await ask("STATS.tideway-scheduler.one")
        (endpoint,) = stats["endpoints"]
        assert stats["type"] == "io.nats.micro.v1.stats_response"
        assert (endpoint["num_requests"], endpoint["num_errors"]) == (2, 1)
        assert endpoint["last_error"] == "gone: bad"
        assert endpoint["processing_time"] >= endpoint["average_processing_time"] > 0
        raw = await client.request(f"{PREFIX}.instance.node-0.submit", b"\xc1", timeout=2)
        assert raw.headers is not None
        assert raw.headers["Nats-Service-Error-Code"] == "400"
        assert "cannot be read" in raw.headers["Nats-Service-Error"]
        await served.stop()
        assert (await ask("INFO.tideway-scheduler.one"))["endpoints"] == []
    finally:
        await client.close()
        for bus in buses:
            await bus.close()


async def accept(query: GenerationRequest) -> Accepted:
    if query.request_id == "bad":
        raise ServiceError.of(ErrorCode.GONE, "bad")
    return Accepted(query.request_id)


def request_named(name: str) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, gateway_id="gateway", model="model", prompt=b"", sampling=SamplingParams(max_tokens=1)
    )


async def test_foreign_clients_are_answered_or_ignored(nats_settings: BusSettings) -> None:
    bus = await NatsBus.connect(nats_settings, "test", "one")
    client = await nats.connect(nats_settings.nats_url)
    try:
        await bus.serve(PING, echo)
        body = msgspec.msgpack.encode(Ping("x"))
        for timeout in ("soon", "nan", "1e400", "5"):
            reply = await client.request(PING.subject, body, timeout=10, headers={"Tideway-Timeout": timeout})
            assert msgspec.msgpack.decode(reply.data, type=Pong) == Pong("x")
        late = await client.request(PING.subject, body, timeout=10, headers={"Tideway-Timeout": "-1"})
        assert late.headers is not None and late.headers["Nats-Service-Error-Code"] == "504"
        await client.publish(PING.subject, body)
        await flushed(client)
        assert (await bus.request(PING, Ping("y"), timeout_s=5)).text == "y"
        assert bus.is_connected

        heard = await client.subscribe(NEWS.at(place="here").subject)
        await flushed(client)
        token = trace_context.attach(context_of(TRACEPARENT))
        bus.publish(NEWS.at(place="here"), Ping("x"), traced=True)
        trace_context.detach(token)
        message = await heard.next_msg(timeout=10)
        assert message.headers == {"traceparent": TRACEPARENT}
    finally:
        await client.close()
        await bus.close()


async def test_metrics_name_patterns_and_outcomes(nats_settings: BusSettings) -> None:
    registry = CollectorRegistry()
    bus = await NatsBus.connect(nats_settings, "test", "one", registry)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"tideway_bus_{name}", labels)

    await bus.serve(INSTANCE_SUBMIT.at(instance_id="node-0"), accept)
    await bus.request(INSTANCE_SUBMIT.at(instance_id="node-0"), request_named("good"), timeout_s=5)
    for instance_id in ("node-0", "node-1"):
        with pytest.raises(BusError):
            await bus.request(INSTANCE_SUBMIT.at(instance_id=instance_id), request_named("bad"), timeout_s=5)
    bus.publish(Topic("somewhere.else", Ping), Ping("x"))
    subject = "instance.{instance_id}.submit"
    assert value("requests_total", subject=subject, outcome="ok") == 1
    assert value("requests_total", subject=subject, outcome="gone") == 1
    assert value("requests_total", subject=subject, outcome="unavailable") == 1
    assert value("request_seconds_count", subject=subject) == 3
    assert value("served_total", subject=subject, outcome="ok") == 1
    assert value("served_total", subject=subject, outcome="gone") == 1
    assert value("handlers", subject=subject) == 0
    assert value("published_total", subject="other") == 1
    assert value("connected") == 1
    await bus.close()
    assert value("connected") == 0


async def test_what_is_published_on_a_dying_connection_goes_over_the_next_one(
    fresh_nats: NatsServer, connect_to: ConnectTo
) -> None:
    """Before anybody has noticed that it dies."""
    bus, listener = await connect_to(fresh_nats), await connect_to(fresh_nats)
    received: list[int] = []
    await listener.subscribe(NEWS.at(place="here"), lambda message: received.append(message.number))
    transport = bus._client._transport
    assert isinstance(transport, TcpTransport) and transport._io_writer is not None
    transport._io_writer.transport.abort()
    assert bus.is_connected
    bus.publish(NEWS.at(place="here"), Ping("x", 7))
    await eventually(lambda: received == [7], RESTART_TIMEOUT_S)


async def test_small_messages_are_sent_without_delay(connect: Connect) -> None:
    bus = await connect("one")
    assert isinstance(bus, NatsBus)
    transport = bus._client._transport
    assert isinstance(transport, TcpTransport) and transport._io_writer is not None
    assert transport._io_writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_buses_of_one_process_may_share_a_registry(nats_settings: BusSettings) -> None:
    registry = CollectorRegistry()
    buses: list[Bus] = [await NatsBus.connect(nats_settings, "test", name, registry) for name in ("one", "two")]
    for bus in buses:
        await bus.close()
    assert registry.get_sample_value("tideway_bus_connected") == 0
