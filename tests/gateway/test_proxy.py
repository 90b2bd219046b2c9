"""The proxy that compose puts before the gateways, with its own configuration: gateways that stop, or die, one after another
are no outage, and whoever resumes a stream gets the rest. Needs HAProxy on the path, or its path in HAPROXY."""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from pathlib import Path

import httpx
import openai
import pytest

from services.gateway.requests.kept_calls import KEY_HEADER
from shared.runtime.settings import BusSettings
from tests.conftest import free_port
from tests.gateway.conftest import MODEL
from tests.gateway.haproxy import Proxy, binary
from tests.gateway.peer import until
from tests.gateway.test_resuming import NUM_STREAMS, TEXT, two_gateways

HOSTS = ("127.0.0.2", "127.0.0.3")
"""One port of two addresses, as of two containers."""
CHECKED_S = 3.0
"""In which the proxy has seen a gateway that is there again."""
ASK_INTERVAL_S = 0.3
GIVE_UP_S = 60.0
KEEP_ALIVE_TIMER = "02:"
"""The timer's name in /proc/net/tcp."""


class Reader:
    """Reads a chat over as many connections as it takes, as examples/resume.py does."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client
        self.text, self.num_connections, self.codes = "", 0, set[str | None]()

    async def read(self) -> None:
        key, event_id, begun_s, is_over = str(uuid.uuid4()), "", time.monotonic(), False
        while not is_over:
            try:
                stream = await self._client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": "Hi"}],
                    stream=True,
                    extra_headers={KEY_HEADER: key, "Last-Event-ID": event_id},
                )
                self.num_connections += 1
                async for chunk in stream:
                    self.text += chunk.choices[0].delta.content or ""
                    event_id = chunk.event_id
                    is_over = is_over or chunk.choices[0].finish_reason is not None
            except (openai.APIError, httpx.TransportError) as error:
                self.codes.add(getattr(error, "code", None))
                if getattr(error, "status_code", 503) < 500 or time.monotonic() - begun_s > GIVE_UP_S:
                    raise
                await asyncio.sleep(0.2)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_killed", [False, True])
async def test_no_restart_of_a_gateway_is_an_outage(
    nats_settings: BusSettings, checkpoint: Path, tmp_path: Path, is_killed: bool
) -> None:
    binary()
    port, is_over = free_port(), False
    readers: list[Reader] = []

    async def one_after_the_other(client: openai.AsyncOpenAI) -> None:
        while not is_over:
            readers.append(reader := Reader(client))
            await reader.read()

    async def answer(client: openai.AsyncOpenAI) -> str | None:
        """To a request without a stream, by the client's own retries."""
        key = {KEY_HEADER: str(uuid.uuid4())}
        messages = [{"role": "user", "content": "Hi"}]
        found = await client.chat.completions.create(model=MODEL, messages=messages, extra_headers=key)
        return str(found.choices[0].message.content)

    # Streams that are open when a gateway stops are handed over: one that takes longer than TIDEWAY_LEAVE_S.
    async with two_gateways(nats_settings, checkpoint, HOSTS, port, TIDEWAY_STOP_GRACE_S="0") as (peer, gateways):
        with Proxy(tmp_path, HOSTS, port) as proxy:
            await asyncio.to_thread(proxy.wait_ready)
            async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="none", timeout=60) as client:
                asking: list[asyncio.Task[str | None]] = []
                streams = asyncio.gather(*(one_after_the_other(client) for _ in range(NUM_STREAMS)))
                await until(lambda: asked_after(port) >= set(HOSTS), "the proxy asks whether both are there")
                for gateway in gateways:
                    await asyncio.sleep(1.0)
                    if is_killed:
                        gateway.kill()
                    else:
                        stopping = asyncio.create_task(gateway.stop())
                        while not stopping.done():
                            asking.append(asyncio.create_task(answer(client)))
                            await asyncio.sleep(ASK_INTERVAL_S)
                        await stopping
                    await gateway.start()
                    while not gateway.is_ready:
                        asking.append(asyncio.create_task(answer(client)))
                        await asyncio.sleep(ASK_INTERVAL_S)
                    await asyncio.sleep(CHECKED_S)
                is_over = True
                assert set(await asyncio.gather(*asking)) == {3 * TEXT}
                await streams
    assert {reader.text for reader in readers} == {3 * TEXT}
    assert any(reader.num_connections > 1 for reader in readers), "some were resumed"
    if not is_killed:
        assert set().union(*(reader.codes for reader in readers)) == {"handed_over"}
    assert peer.cancelled == []


def asked_after(port: int) -> set[str]:
    """Addresses with that port to which this machine has connections that the kernel probes in silence."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, _, _, timer, *_ = line.split()
        address, remote_port = remote.split(":")
        if int(remote_port, 16) == port and timer.startswith(KEEP_ALIVE_TIMER):
            found.add(socket.inet_ntoa(int(address, 16).to_bytes(4, "little")))
    return found


async def test_without_any_gateway_the_proxy_says_to_come_again(tmp_path: Path) -> None:
    with Proxy(tmp_path, HOSTS, free_port()) as proxy:
        async with httpx.AsyncClient(base_url=proxy.url, timeout=60) as client:
            found: list[httpx.Response] = []

            async def is_there() -> None:
                while not found:
                    try:
                        found.append(await client.post("/v1/completions", json={"model": MODEL, "prompt": "a"}))
                    except httpx.ConnectError:
                        await asyncio.sleep(0.05)

            await asyncio.wait_for(is_there(), 20)
    (answer,) = found
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["code"] == "unavailable"
