"""The contract on the memory bus, and its faults in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.bus.interface import BusError
from shared.messages.requests import ErrorCode
from tests.memory_bus import Faults, MemoryBus, MemoryHub
from tests.shared.bus_contract import LEDGER, LIVE, NEWS, PING, BusContract, Connect, Ping, Pong
from tests.shared.storage_contract import StorageContract
from tests.virtual_time import run_virtual


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    hub = MemoryHub()
    buses: list[MemoryBus] = []

    async def make(name: str) -> MemoryBus:
        buses.append(hub.connect(name))
        return buses[-1]

    yield make
    for bus in buses:
        await bus.close()


class TestMemoryBus(BusContract):
    pass


class TestMemoryStorage(StorageContract):
    pass


# ------------------------------------------------------------------------------------------- faults, in virtual time


async def echo(query: Ping) -> Pong:
    return Pong(query.text)


def test_the_same_seed_gives_the_same_run() -> None:
    def run(seed: int) -> tuple[list[int], float]:
        async def main() -> tuple[list[int], float]:
            hub = MemoryHub(seed, Faults(drop_rate=0.3, duplicate_rate=0.3))
            sender, receiver = hub.connect("sender"), hub.connect("receiver")
            received: list[int] = []
            await receiver.subscribe(NEWS.at(place="here"), lambda message: received.append(message.number))
            for number in range(100):
                sender.publish(NEWS.at(place="here"), Ping("x", number))
            await asyncio.sleep(1)
            return received, receiver.last_arrival_s

        return run_virtual(main())

    first, again, other = run(1), run(1), run(2)
    assert first == again
    assert first != other
    received = first[0]
    assert received == sorted(received)
    assert 50 < len(set(received)) < 90
    assert len(received) > len(set(received))


def test_delays_are_as_asked() -> None:
    async def main() -> None:
        hub = MemoryHub(faults=Faults(delay_s=(0.1, 0.2)))
        client, server = hub.connect("client"), hub.connect("server")
        await server.serve(PING, echo)
        started = client.now()
        await client.request(PING, Ping("x"), timeout_s=5)
        assert 0.2 <= client.now() - started <= 0.4

    run_virtual(main())


def test_lost_requests_run_into_their_deadline() -> None:
    async def main() -> None:
        hub = MemoryHub(faults=Faults(drop_rate=1.0))
        client, server = hub.connect("client"), hub.connect("server")
        await server.serve(PING, echo)
        with pytest.raises(BusError) as raised:
            await client.request(PING, Ping("x"), timeout_s=7.0)
        assert raised.value.code == ErrorCode.DEADLINE
        assert client.now() == pytest.approx(7.0)

    run_virtual(main())


def test_a_partitioned_client_reaches_nobody_until_healed() -> None:
    async def main() -> None:
        hub = MemoryHub()
        client, server, third = hub.connect("client"), hub.connect("server"), hub.connect("third")
        await server.serve(PING, echo)
        store = await server.key_value(LIVE)
        received: list[Ping] = []
        await server.subscribe(NEWS.at(place="here"), received.append)
        hub.partition("server")
        assert server.is_connected
        client.publish(NEWS.at(place="here"), Ping("lost"))
        for call in (client.request(PING, Ping("x"), timeout_s=1), store.put("a", Ping("x")), server.round_trip_s()):
            with pytest.raises(BusError) as raised:
                await call
            assert raised.value.code == ErrorCode.DEADLINE
        assert await third.round_trip_s() < 0.01
        hub.heal()
        assert (await client.request(PING, Ping("x"), timeout_s=1)).text == "x"
        assert received == []

    run_virtual(main())


def test_a_disconnected_client_knows_it_and_catches_up() -> None:
    async def main() -> None:
        hub = MemoryHub()
        client, server = hub.connect("client"), hub.connect("server")
        await server.serve(PING, echo)
        store = await client.key_value(LIVE)
        durable = await client.key_value(LEDGER)
        await store.put("heart", Ping("1"))
        await durable.put("gone", Ping("x"))
        changes: list[tuple[str, str | None]] = []
        watch = await (await server.key_value(LIVE)).watch(lambda k, v: changes.append((k, v.text if v else None)))
        ledger = await (await server.key_value(LEDGER)).watch()
        received: list[str] = []
        await client.subscribe(NEWS.at(place="here"), lambda message: received.append(message.text))
        reconnected: list[bool] = []
        server.on_reconnect(lambda: reconnected.append(server.is_connected))

        in_flight = asyncio.create_task(server.request(PING, Ping("x"), timeout_s=60))
        await asyncio.sleep(0)
        hub.disconnect("server")
        with pytest.raises(BusError) as raised:
            await in_flight
        assert raised.value.code == ErrorCode.UNAVAILABLE
        with pytest.raises(BusError) as raised:
            await client.request(PING, Ping("x"), timeout_s=60)
        assert raised.value.code == ErrorCode.UNAVAILABLE
        server.publish(NEWS.at(place="here"), Ping("while away"))
        await durable.delete("gone")
        await asyncio.sleep(5)
        assert not server.is_connected and reconnected == []
        assert watch.entries == {"heart": Ping("1")}, "nothing expires while disconnected"

        await store.put("heart", Ping("2"))
        hub.reconnect("server")
        assert reconnected == [True]
        await asyncio.sleep(0.1)
        assert received == ["while away"]
        assert watch.entries == {"heart": Ping("2")}
        assert ledger.entries == {"gone": Ping("x")}, "held for the grace period"
        assert (await client.request(PING, Ping("x"), timeout_s=1)).text == "x"
        await asyncio.sleep(4)
        assert watch.entries == ledger.entries == {}
        assert changes == [("heart", "1"), ("heart", "2"), ("heart", None)]

    run_virtual(main())


@pytest.mark.parametrize("keep_store", [True, False])
def test_a_server_restart_loses_what_is_in_memory(keep_store: bool) -> None:
    async def main() -> None:
        hub = MemoryHub()
        bus = hub.connect("one")
        live, ledger = await bus.key_value(LIVE), await bus.key_value(LEDGER)
        await live.put("a", Ping("x"))
        await ledger.put("a", Ping("x"))
        watch = await ledger.watch()
        hub.kill()
        with pytest.raises(BusError):
            await ledger.get("a")
        hub.start(keep_store=keep_store)
        await asyncio.sleep(1)
        assert await live.get("a") is None
        assert (await ledger.get("a") is not None) == keep_store
        await asyncio.sleep(5)
        assert bool(watch.entries) == keep_store
        await ledger.put("b", Ping("y"))
        await asyncio.sleep(0.1)
        assert watch.entries["b"] == Ping("y")

    run_virtual(main())
