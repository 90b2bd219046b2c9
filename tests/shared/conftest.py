"""Buses on a real NATS server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from nats.aio.client import Client

from shared.bus.nats_bus import NatsBus
from shared.runtime.settings import BusSettings
from tests.conftest import NatsServer
from tests.shared.bus_contract import Connect

ConnectTo = Callable[..., Awaitable[NatsBus]]


async def flushed(client: Client) -> None:
    """Until the server has all that nats-py's own client was told to send. Its ping overtakes what waits for its flusher,
    which has run by the time of the pong: so another ping goes behind that."""
    for _ in range(2):
        await client.flush(timeout=15)


@pytest.fixture
async def connect(nats_settings: BusSettings) -> AsyncIterator[Connect]:
    buses: list[NatsBus] = []

    async def make(name: str) -> NatsBus:
        buses.append(await NatsBus.connect(nats_settings, service="test", service_id=name))
        return buses[-1]

    yield make
    for bus in buses:
        await bus.close()


@pytest.fixture
async def connect_to() -> AsyncIterator[ConnectTo]:
    buses: list[NatsBus] = []

    async def make(server: NatsServer, name: str = "one", **more: Any) -> NatsBus:
        registry = more.pop("registry", None)
        settings = BusSettings(nats_url=server.url, **more)
        buses.append(await NatsBus.connect(settings, "test", name, registry))
        return buses[-1]

    yield make
    for bus in buses:
        await bus.close()
