"""Buses on a real NATS server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from shared.bus.nats_bus import NatsBus
from shared.settings import BusSettings
from tests.conftest import NatsServer
from tests.shared.bus_contract import Connect

ConnectTo = Callable[..., Awaitable[NatsBus]]


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
