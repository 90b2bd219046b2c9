"""Limits of keys over several gateways on a real NATS: exact while it answers, bounded waits while it does not."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from services.gateway.access.admission import Admission, Key, Ticket
from services.gateway.access.key_uses import ALIVE_INTERVAL_S, FLUSH_S, MAX_WAIT_S, RETRY_S, SharedKeyUses
from services.gateway.http.errors import ApiError
from services.gateway.metrics import GatewayMetrics
from shared.bus.interface import Bus
from shared.bus.nats_bus import NatsBus
from shared.messages.catalogue import GATEWAYS, KEY_USES
from shared.messages.cluster import ModelSpec
from shared.messages.requests import RequestClass
from shared.runtime.settings import BusSettings
from tests.conftest import NatsServer
from tests.gateway.conftest import MODEL, Stack, running_gateway, running_stack
from tests.gateway.peer import until

ONLINE = RequestClass.ONLINE
HEADERS = {"authorization": "Bearer secret"}


def hang(nats: NatsServer) -> None:
    os.kill(nats.pid, signal.SIGSTOP)
    os.waitpid(nats.pid, os.WUNTRACED)  # its threads stop one after another


class Counting:
    """What of a gateway counts the use of its keys."""

    def __init__(self, bus: Bus, gateway_id: str, key: Key) -> None:
        self.bus = bus
        self.registry = CollectorRegistry()
        self.uses = SharedKeyUses(bus, gateway_id, GatewayMetrics(self.registry))
        self.admission = Admission({"secret": key}, {}, 1000, uses=self.uses)
        self.key = key

    async def enter(self) -> Ticket:
        return await self.admission.enter(self.key, 1, ONLINE, now=self.bus.now())

    async def charge(self, num_tokens: int) -> None:
        await self.admission.charge_prompt(self.key, num_tokens, self.bus.now())

    def num_claims(self, by: str) -> float:
        return self.registry.get_sample_value("tideway_gateway_key_claims_total", {"by": by}) or 0.0


@asynccontextmanager
async def counting(url: str, gateway_id: str, *, stops: bool = True, **limits: int) -> AsyncIterator[Counting]:
    bus = await NatsBus.connect(BusSettings(nats_url=url), service="gateway", service_id=gateway_id)
    one = Counting(bus, gateway_id, Key(**limits))
    await one.uses.start()
    try:
        yield one
    finally:
        if stops:
            await one.uses.stop()
        else:
            await one.uses._tasks.end_all()
        await bus.close()


@asynccontextmanager
async def two_gateways(nats: BusSettings, checkpoint: Path, keys: str) -> AsyncIterator[tuple[Stack, list[str]]]:
    specs = [ModelSpec(MODEL, str(checkpoint))]
    async with (
        running_stack(nats, specs, api_keys=keys, gateway_id="first") as stack,
        running_gateway(nats, api_keys=keys, gateway_id="second") as other,
    ):
        yield stack, [stack.url, f"http://127.0.0.1:{other.port}"]


async def asked_at_once(urls: list[str], number: int, num_prompt: int) -> list[int]:
    """Statuses of as many requests at each gateway, all of them at the same time."""
    async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=None)) as client:
        body = {"model": MODEL, "prompt": [5] * num_prompt, "max_tokens": 2}
        answers = await asyncio.gather(
            *(client.post(f"{url}/v1/completions", json=body, headers=HEADERS) for _ in range(number) for url in urls)
        )
    return [answer.status_code for answer in answers]


async def test_two_gateways_have_no_more_in_flight_than_one_key_may(
    nats_settings: BusSettings, checkpoint: Path
) -> None:
    async with two_gateways(nats_settings, checkpoint, "secret:5") as (stack, urls):
        stack.say("Hi")
        stack.peer.may_answer.clear()
        asking = asyncio.create_task(asked_at_once(urls, 15, 3))
        await until(lambda: len(stack.peer.submitted) == 5, "as many as may be")
        await asyncio.sleep(0.3)
        assert len(stack.peer.submitted) == 5
        stack.peer.may_answer.set()
        statuses = await asking
        assert statuses.count(200) == 5 and statuses.count(429) == 25
        for url in urls * 3:
            assert await asked_at_once([url], 5, 3) == [200] * 5, "all were given back"


async def test_two_gateways_use_no_more_tokens_than_one_key_may(nats_settings: BusSettings, checkpoint: Path) -> None:
    async with two_gateways(nats_settings, checkpoint, "secret::100") as (stack, urls):
        stack.peer.may_answer.clear()
        stack.say("Hi")
        asking = asyncio.create_task(asked_at_once(urls, 10, 30))
        await until(lambda: len(stack.peer.submitted) == 3, "as many as may be")
        await asyncio.sleep(0.3)
        stack.peer.may_answer.set()
        assert (await asking).count(200) == 3
        await asyncio.sleep(2 * FLUSH_S)
        async with httpx.AsyncClient(timeout=30) as client:
            body = {"model": MODEL, "prompt": [5] * 30, "max_tokens": 2}
            remaining = set()
            for url in urls:
                answer = await client.post(f"{url}/v1/completions", json=body, headers=HEADERS)
                assert answer.status_code == 429 and 55 <= int(answer.headers["retry-after"]) <= 60
                remaining.add(answer.headers["x-ratelimit-remaining-tokens"])
        assert remaining == {"4"}, "100 - 3 * 30 - 3 * 2, at both"


async def test_what_a_lost_gateway_had_in_flight_is_freed_and_its_tokens_count_on(nats_settings: BusSettings) -> None:
    url = nats_settings.nats_url
    async with counting(url, "left", max_in_flight=2, tokens_per_minute=100) as left:
        async with counting(url, "lost", stops=False, max_in_flight=2, tokens_per_minute=100) as lost:
            await lost.charge(70)
            await lost.enter()
            await lost.enter()
            with pytest.raises(ApiError, match="2 requests in flight"):
                await left.enter()
        assert GATEWAYS.ttl_s is not None
        deadline = time.monotonic() + GATEWAYS.ttl_s + 2 * ALIVE_INTERVAL_S + 2.0
        tickets: list[Ticket] = []
        while len(tickets) < 2:
            try:
                tickets.append(await left.enter())
            except ApiError:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)
        with pytest.raises(ApiError, match="2 requests in flight"):
            await left.enter()
        with pytest.raises(ApiError, match="70 were used"):
            await left.charge(31)
        await left.charge(30)


async def test_a_gateway_that_starts_again_with_its_id_knows_what_it_used(nats_settings: BusSettings) -> None:
    url = nats_settings.nats_url
    async with counting(url, "same", tokens_per_minute=100) as before:
        await before.charge(70)
    async with counting(url, "same", tokens_per_minute=100) as after:
        with pytest.raises(ApiError, match="70 were used"):
            await after.charge(31)


async def test_while_nats_hangs_claims_are_decided_alone_within_a_bound(fresh_nats: NatsServer) -> None:
    async with (
        counting(fresh_nats.url, "one", max_in_flight=3) as one,
        counting(fresh_nats.url, "two", max_in_flight=3) as two,
    ):
        ticket = await two.enter()
        await one.enter()
        hang(fresh_nats)
        try:
            began_s = time.monotonic()
            await one.enter()
            assert time.monotonic() - began_s < 2 * MAX_WAIT_S + 0.5
            with pytest.raises(ApiError, match="3 requests in flight"):
                await one.enter()
            assert one.num_claims("alone") == 2, "the other's use as it was last known counts"
        finally:
            os.kill(fresh_nats.pid, signal.SIGCONT)
        deadline = time.monotonic() + RETRY_S + 10.0
        uses = await one.bus.key_value(KEY_USES)
        while True:
            entry = await uses.get(one.key.use_id)
            assert entry is not None
            if entry.value.gateways["one"].num_online == 2:
                break
            assert time.monotonic() < deadline, "what was decided alone is told"
            await asyncio.sleep(0.1)
        ticket.release()
        await asyncio.sleep(0.2)
        await two.enter()
        with pytest.raises(ApiError, match="3 requests in flight"):
            await two.enter()


async def test_whoever_goes_away_while_it_waits_leaves_nothing_in_flight(nats_settings: BusSettings) -> None:
    async with counting(nats_settings.nats_url, "one", max_in_flight=50) as one:
        for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.004):
            asking = [asyncio.create_task(one.enter()) for _ in range(20)]
            await asyncio.sleep(delay_s)
            for task in asking:
                task.cancel()
            for done in await asyncio.gather(*asking, return_exceptions=True):
                if isinstance(done, Ticket):
                    done.release()
        await until(lambda: not one.uses._accounts or not any(a.is_working for a in one.uses._accounts.values()), "end")
        assert one.key.num_in_flight[ONLINE] == 0 and one.admission.num_in_flight[ONLINE] == 0
        entry = await (await one.bus.key_value(KEY_USES)).get(one.key.use_id)
        assert entry is None or entry.value.gateways["one"].num_online == 0
