from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from shared.messages.requests import GenerationRequest
from tests.shared.engine.fake_executor import expected_output
from tests.stalls import whatever_the_machine_does
from tests.worker.kv_transport.local import LocalHub, LocalNetwork
from tests.worker.migration.parties import Gateway, Party, make_party, until


class Group:
    """Parties that share a gateway and a registry."""

    def __init__(self, gateway: Gateway, parties: list[Party]) -> None:
        self.gateway = gateway
        self.parties = parties
        self.source, self.destination = parties[:2]

    async def until(self, condition: Callable[[], object], timeout_s: float = 10.0) -> None:
        await until(condition, self.gateway.news, timeout_s)

    def progress(self, one: GenerationRequest) -> int:
        return len(self.gateway.tokens.get(one.request_id, ()))

    async def ended(self, *sent: GenerationRequest, owner: str | None = None) -> None:
        """Every stream is what an undisturbed run gives, and nothing is left behind."""
        await self.until(lambda: all(one.request_id in self.gateway.ends for one in sent))
        for one in sent:
            with whatever_the_machine_does():
                assert self.gateway.tokens[one.request_id] == expected_output(one, 600)
            assert owner is None or self.gateway.owners[one.request_id][1] == owner
        await self.settled()

    async def settled(self) -> None:
        with whatever_the_machine_does():
            assert not self.gateway.wrongs
        living = [party for party in self.parties if not party.is_dead]
        with contextlib.suppress(TimeoutError):
            await self.until(lambda: all(party.is_idle() for party in living))
        with whatever_the_machine_does():
            for party in living:
                party.check_idle()


Make = Callable[..., Awaitable[Group]]


@pytest.fixture
async def make(nats_settings) -> AsyncIterator[Make]:
    made: list[Party] = []

    async def make_group(
        source: dict | None = None,
        destination: dict | None = None,
        *,
        names: str = "ab",
        with_transport: bool = True,
        **fields,
    ) -> Group:
        """`source`, `destination`: settings of the first two, over `fields` of all."""
        gateway, registry, hub = Gateway(), {}, LocalHub()
        for name in names:
            own = {"a": source, "b": destination}.get(name) or {}
            network = LocalNetwork(hub) if with_transport else None
            party = await make_party(name, nats_settings.nats_url, gateway, registry, network, **{**fields, **own})
            made.append(party)
        return Group(gateway, made[-len(names) :])

    yield make_group
    for party in made:
        if not party.is_dead:
            await party.stop()
