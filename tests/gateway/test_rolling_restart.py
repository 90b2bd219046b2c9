"""Two gateways as processes, restarted one after the other under streams: whoever asks those that say they are ready loses
nothing."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import httpx

from shared.bus.nats_bus import NatsBus
from shared.messages.cluster import ModelSpec
from shared.messages.requests import FinishReason, GenerationRequest
from shared.runtime.settings import BusSettings
from tests.conftest import free_port
from tests.gateway.conftest import MODEL, Reader
from tests.gateway.peer import ScriptedPeer

NUM_STREAMS = 16
NUM_TOKENS = 30
TOKEN_INTERVAL_S = 0.05
DEADLINE_S = 60.0


class SlowPeer(ScriptedPeer):
    async def _run(self, instance_id: str, request: GenerationRequest) -> None:
        for offset in range(NUM_TOKENS):
            finish = FinishReason.LENGTH if offset == NUM_TOKENS - 1 else None
            self.emit(request, offset, [offset + 40], finish, sender=instance_id)
            await asyncio.sleep(TOKEN_INTERVAL_S)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


class Gateway:
    """Behind an address that stays, as a load balancer sees it. `host`: of this machine; `port`: 0 for any that is free."""

    def __init__(self, nats_url: str, name: str, host: str = "127.0.0.1", port: int = 0, **environment: str) -> None:
        self.port = port or free_port()
        self.client = httpx.AsyncClient(base_url=f"http://{host}:{self.port}", timeout=30)
        self.is_ready = False
        self._environment = {
            **os.environ,
            "TIDEWAY_NATS_URL": nats_url,
            "TIDEWAY_HOST": host,
            "TIDEWAY_PORT": str(self.port),
            "TIDEWAY_GATEWAY_ID": name,
            "TIDEWAY_LEAVE_S": "3",
            "TIDEWAY_STOP_GRACE_S": "20",
            **environment,
        }
        self._process: asyncio.subprocess.Process
        self._probing: asyncio.Task[None]

    async def start(self) -> None:
        command = (sys.executable, "-m", "services.gateway")
        self._process = await asyncio.create_subprocess_exec(*command, env=self._environment)
        self._probing = asyncio.create_task(self._probe())

    async def _probe(self) -> None:
        while True:
            try:
                self.is_ready = (await self.client.get("/ready")).status_code == 200
            except httpx.TransportError:
                self.is_ready = False
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        """SIGTERM; returns when it has ended by itself."""
        self._process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            assert await self._process.wait() == 0
        self._probing.cancel()
        self.is_ready = False

    def kill(self) -> None:
        self._process.kill()
        self._probing.cancel()
        self.is_ready = False

    async def close(self) -> None:
        self._probing.cancel()
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        await self.client.aclose()


async def test_a_rolling_restart_breaks_no_stream(nats_settings: BusSettings, checkpoint: Path) -> None:
    bus = await NatsBus.connect(nats_settings, service="peer", service_id="peer")
    peer = SlowPeer(bus)
    await peer.start(ModelSpec(MODEL, str(checkpoint)))
    await peer.add_instance("a", MODEL)
    gateways = [Gateway(nats_settings.nats_url, f"gateway-{number}") for number in range(2)]
    turns = itertools.cycle(gateways)
    readers: list[Reader] = []
    is_over = False

    async def one_after_the_other() -> None:
        while not is_over:
            gateway = next((one for one in itertools.islice(turns, 2) if one.is_ready), None)
            assert gateway is not None, "one of the two is ready at any time"
            reader = Reader(gateway.client, "/v1/completions", {"prompt": "x", "max_tokens": NUM_TOKENS}, None)
            readers.append(reader)
            await reader.end()

    try:
        for gateway in gateways:
            await gateway.start()
        await until(lambda: all(gateway.is_ready for gateway in gateways))
        streams = asyncio.gather(*(one_after_the_other() for _ in range(NUM_STREAMS)))
        for gateway in gateways:
            num_begun = len(readers)
            await until(lambda num_begun=num_begun: len(readers) >= num_begun + NUM_STREAMS)
            await gateway.stop()
            await gateway.start()
            await until(lambda gateway=gateway: gateway.is_ready or streams.done())
        is_over = True
        await streams
    finally:
        for gateway in gateways:
            await gateway.close()
        await peer.stop()
        await bus.close()
    assert len(readers) >= 3 * NUM_STREAMS
    assert all(reader.is_complete and reader.error is None for reader in readers)
    assert {reader.text for reader in readers} == {readers[0].text}
