"""Records of calls in the memories of gateways: one call an idempotency key, whoever asks when. In virtual time."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from services.gateway.requests.copies import KEPT_S, MAX_BYTES, RETURN_S, RecordCopies
from shared.bus.interface import Bus, BusError
from shared.messages.kept import KeptCall
from shared.messages.requests import ErrorCode, GenerationRequest, SamplingParams
from tests.memory_bus import Faults, MemoryHub
from tests.virtual_time import run_virtual

NAMES = ("one", "two", "three")


def record_of(call_id: str, gateway_id: str, *, claim: str = "key", plan: bytes = b"") -> KeptCall:
    template = GenerationRequest(
        request_id=call_id, gateway_id=gateway_id, model="m", prompt=b"", sampling=SamplingParams(max_tokens=1)
    )
    return KeptCall(
        call_id=call_id, tenant="", operation="chat", shown_model="m", model="m", created_s=0, arrived_s=0.0,
        window_s=1.0, expires_s=1e12, template=template, plan=plan, claim=claim,
        digest=b"digest",
    )  # fmt: skip


class Gateways:
    """Gateways that know of each other, and the calls that run at each."""

    def __init__(self, hub: MemoryHub) -> None:
        self.hub = hub
        self.alive = set(NAMES)
        self.running: dict[str, KeptCall] = {}
        self.buses: dict[str, Bus] = {}
        self.copies: dict[str, RecordCopies] = {}

    async def start(self) -> None:
        for name in NAMES:
            await self.start_one(name)

    async def start_one(self, name: str) -> None:
        bus = self.buses[name] = self.hub.connect(name)
        copies = self.copies[name] = RecordCopies(bus, name, lambda: self.alive, lambda claim: self.running.get(name))
        await copies.start()

    async def begin(self, name: str, record: KeptCall) -> str:
        """Id of the call that the key stands for."""
        first = await self.copies[name].spread(record)
        if first is None:
            self.running[name] = record
        return (first or record).call_id

    async def lose(self, name: str) -> None:
        self.alive.discard(name)
        self.running.pop(name, None)
        await self.buses[name].close()


@pytest.mark.parametrize("seed", range(30))
def test_one_call_runs_under_a_key_however_many_ask_at_once(seed: int) -> None:
    async def main() -> None:
        random = Random(seed)
        gateways = Gateways(MemoryHub(seed, Faults(delay_s=(0.0001, 0.01))))
        await gateways.start()

        async def ask(number: int) -> str:
            await asyncio.sleep(random.uniform(0, 0.02))
            name = random.choice(NAMES)
            return await gateways.begin(name, record_of(f"call-{random.random()}-{number}", name))

        asked = await asyncio.gather(*map(ask, range(6)))
        assert len(set(asked)) == 1
        assert [record.call_id for record in gateways.running.values()] == [asked[0]]
        for name in set(NAMES) - set(gateways.running):
            assert gateways.copies[name].find(asked[0]) is not None

    run_virtual(main())


def test_a_call_is_known_after_its_gateway() -> None:
    async def main() -> None:
        gateways = Gateways(MemoryHub())
        await gateways.start()
        assert await gateways.begin("one", record_of("a", "one")) == "a"
        await gateways.lose("one")
        assert await gateways.begin("two", record_of("b", "two")) == "a"
        await gateways.lose("two")
        await gateways.start_one("two")  # knows nothing
        gateways.alive.add("two")
        assert await gateways.begin("two", record_of("b", "two")) == "a"
        gateways.copies["three"].drop("a")
        await asyncio.sleep(0.1)
        assert await gateways.begin("two", record_of("b", "two")) == "b"

    run_virtual(main())


def test_a_gateway_that_lives_and_is_silent_keeps_calls_from_beginning() -> None:
    async def main() -> None:
        hub = MemoryHub()
        gateways = Gateways(hub)
        await gateways.start()
        hub.partition("two")
        with pytest.raises(BusError, match="gateway two does not answer") as refused:
            await gateways.begin("one", record_of("a", "one"))
        assert refused.value.code is ErrorCode.UNAVAILABLE and refused.value.info.retry_after_s > 0
        await asyncio.sleep(0.1)
        assert gateways.copies["three"].find("a") is None
        hub.heal()
        assert await gateways.begin("one", record_of("a", "one")) == "a"

    run_virtual(main())


def test_a_gateway_that_is_not_back_yet_keeps_calls_from_beginning() -> None:
    """NATS was away for all: who has the connection again first does not take the others for dead."""

    async def main() -> None:
        gateways = Gateways(MemoryHub())
        await gateways.start()
        await gateways.buses["two"].close()
        gateways.copies["one"]._on_reconnect()
        with pytest.raises(BusError, match="gateway two does not answer"):
            await gateways.begin("one", record_of("a", "one"))
        await asyncio.sleep(RETURN_S)
        assert await gateways.begin("one", record_of("a", "one")) == "a"

    run_virtual(main())


def test_copies_go_with_time_and_for_want_of_room() -> None:
    async def main() -> None:
        gateways = Gateways(MemoryHub())
        await gateways.start()
        large = bytes(MAX_BYTES // 64)
        for number in range(70):
            await gateways.begin("one", record_of(f"call-{number}", "one", claim="", plan=large))
        assert gateways.copies["two"].find("call-5") is None
        assert gateways.copies["two"].find("call-6") is not None
        await asyncio.sleep(KEPT_S)
        assert gateways.copies["two"].find("call-69") is None

    run_virtual(main())
