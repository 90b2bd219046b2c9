"""Ports at which the KV transport listens over UCX, and what strangers there can do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from bench.kv_noise import disturb, open_files, payloads, port_of
from services.worker.kv_transport import KvTransport, TransferError, TransportLimits, UcxNetwork
from services.worker.kv_transport.doors import HANDSHAKE_S, KV_PORTS, MAX_WAITING, PortRange, devices_at, overdue
from services.worker.kv_transport.telemetry import TransferMetrics
from services.worker.kv_transport.ucx import HELLO_BYTES, Hello
from tests.worker.test_kv_transport_processes import BLOCK_BYTES, Peer

ROOT = Path(__file__).parents[2]


async def transport_of(registry: CollectorRegistry) -> KvTransport:
    pytest.importorskip("ucxx")
    transport = KvTransport(
        UcxNetwork("127.0.0.1"), TransportLimits(rate_fraction=None), metrics=TransferMetrics(registry)
    )
    await transport.open()
    transport.register("m", torch.arange(64, dtype=torch.uint8).repeat_interleave(4096).view(64, 4096))
    return transport


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
async def transport(registry: CollectorRegistry) -> AsyncIterator[KvTransport]:
    opened = await transport_of(registry)
    yield opened
    await opened.close()


def refused(registry: CollectorRegistry, reason: str) -> float:
    return registry.get_sample_value("tideway_kv_transfer_refused_connections_total", {"reason": reason}) or 0.0


async def until_refused(registry: CollectorRegistry, reason: str, count: float) -> None:
    async with asyncio.timeout(20):
        while refused(registry, reason) < count:
            await asyncio.sleep(0.05)


def test_a_port_range_is_two_ports_in_order() -> None:
    ports = PortRange.parse("20100-20101")
    assert 20101 in ports and 20102 not in ports and ports.text == "20100-20101"
    for wrong in ("20101-20100", "0-5", "1-70000", "5"):
        with pytest.raises(ValueError):
            PortRange.parse(wrong)


def test_whoever_waits_too_long_goes_and_the_oldest_of_too_many() -> None:
    assert overdue({1: 10.0, 2: 12.0, 3: 10.0 - HANDSHAKE_S}, 12.5) == [3]
    crowd = {inode: 100.0 - inode / 1000 for inode in range(MAX_WAITING + 2)}
    assert overdue(crowd, 100.0) == [MAX_WAITING + 1, MAX_WAITING]


def test_an_address_that_is_not_here_has_no_devices() -> None:
    assert devices_at("127.0.0.1").split(",")[0] == "lo"
    with pytest.raises(OSError, match=r"no interface of this machine has the address 203\.0\.113\.7"):
        devices_at("203.0.113.7")


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    pytest.importorskip("ucxx")
    started = await Peer.start()
    yield started
    await started.end()


async def test_it_listens_on_its_address_and_a_port_of_the_range_only(peer: Peer) -> None:
    ((host, port),) = listening_of(peer.process.pid)
    assert host == "127.0.0.1" and port in KV_PORTS


def listening_of(pid: int) -> list[tuple[str, int]]:
    inodes = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    listening = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            address, port = fields[1].split(":")
            listening.append((socket.inet_ntoa(int(address, 16).to_bytes(4, sys.byteorder)), int(port, 16)))
    return listening


async def test_noise_silence_and_half_a_handshake_end_and_cost_nothing_after(
    peer: Peer, transport: KvTransport
) -> None:
    files = open_files(peer.process.pid)
    result = await disturb(*port_of(peer.address), 300, payloads(random.Random(0)))
    assert sum(result.num.values()) == 300 and min(result.num.values()) > 40
    assert not result.num_kept and not result.num_refused
    async with asyncio.timeout(30):
        while open_files(peer.process.pid) > files:
            await asyncio.sleep(0.05)
    used = (await peer.ask("cpu"))["seconds"]
    await asyncio.sleep(1.0)
    assert (await peer.ask("cpu"))["seconds"] - used < 0.3
    rows = torch.ones(1, BLOCK_BYTES, dtype=torch.uint8)
    transport.register("m", rows)
    await transport.send(peer.address, await peer.expect([1]), "m", [0], deadline_s=20)


async def test_who_takes_all_descriptors_makes_it_say_that_nobody_reaches_it(peer: Peer) -> None:
    _, most = resource.prlimit(peer.process.pid, resource.RLIMIT_NOFILE)
    limit = open_files(peer.process.pid) + 40
    resource.prlimit(peer.process.pid, resource.RLIMIT_NOFILE, (limit, most))
    strangers = []
    with contextlib.suppress(ConnectionError):  # it listens no more
        for _ in range(120):
            strangers.append(socket.create_connection(port_of(peer.address), timeout=5))
    async with asyncio.timeout(20):
        while not (await peer.ask("cpu"))["is_closed"]:
            await asyncio.sleep(0.1)
    used = (await peer.ask("cpu"))["seconds"]
    await asyncio.sleep(1.0)
    assert (await peer.ask("cpu"))["seconds"] - used < 0.5
    for stranger in strangers:
        stranger.close()


async def test_who_says_nothing_is_counted(transport: KvTransport, registry: CollectorRegistry) -> None:
    with socket.create_connection(port_of(transport.address)) as stranger:
        await until_refused(registry, "handshake", 1)
        assert stranger.recv(1) == b""


def connects(address: str, own_host: str) -> bool:
    with socket.socket() as stranger:
        stranger.bind((own_host, 0))
        stranger.settimeout(0.5)
        try:
            stranger.connect(port_of(address))
        except TimeoutError:
            return False
        return True


async def test_who_is_on_no_peers_host_does_not_get_in(transport: KvTransport, registry: CollectorRegistry) -> None:
    assert not await asyncio.to_thread(connects, transport.address, "127.0.0.2")
    await until_refused(registry, "host", 1)
    assert await asyncio.to_thread(connects, transport.address, "127.0.0.1")
    incoming = transport.expect("m", [1], deadline_s=5, peer="127.0.0.2:20100/")
    assert await asyncio.to_thread(connects, transport.address, "127.0.0.2")
    assert not await asyncio.to_thread(connects, transport.address, "127.0.0.3")
    incoming.cancel()


async def test_an_address_that_was_not_told_does_not_lead_in(
    transport: KvTransport, registry: CollectorRegistry
) -> None:
    """All but the tag of the door, which is random."""
    source = await transport_of(CollectorRegistry())
    name, _, content = transport.address.partition("/")
    with pytest.raises(TransferError):
        await source.connect(f"{name}/AAAAAAAAAAAA{content[12:]}", deadline_s=1)
    assert not transport.num_connections
    await source.connect(transport.address, deadline_s=3)
    await source.close()


async def test_what_dials_and_shows_no_ticket_is_counted(transport: KvTransport, registry: CollectorRegistry) -> None:
    source = await transport_of(CollectorRegistry())
    with pytest.raises(TransferError):
        await source.send(transport.address, b"guess", "m", [1], deadline_s=3)
    await until_refused(registry, "ticket", 1)
    await source.close()


async def test_a_first_message_that_is_too_long_shuts_nobody_out(
    transport: KvTransport, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await transport_of(CollectorRegistry())
    with monkeypatch.context() as patch, pytest.raises(TransferError):
        patch.setattr(Hello, "frame", lambda _: np.zeros(HELLO_BYTES + 1, dtype=np.uint8))
        await source.connect(transport.address, deadline_s=1)
    await until_refused(registry, "hello", 1)
    another = await transport_of(CollectorRegistry())
    await another.connect(transport.address, deadline_s=3)
    await another.close()
    await source.close()


async def test_an_endpoint_on_which_no_answer_can_be_sent_is_closed(
    transport: KvTransport, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ucxx.core import ApplicationContext

    source = await transport_of(CollectorRegistry())
    made: list[Any] = []
    create = ApplicationContext.create_endpoint_from_worker_address

    async def endpoint(self: Any, address: Any) -> Any:
        made.append(await create(self, address))
        if len(made) == 2:  # the answer's
            monkeypatch.setattr(made[1], "send", None)
        return made[-1]

    monkeypatch.setattr(ApplicationContext, "create_endpoint_from_worker_address", endpoint)
    with pytest.raises(TransferError):
        await source.connect(transport.address, deadline_s=1)
    await until_refused(registry, "hello", 1)
    assert made[1].closed
    await source.close()


def test_a_root_that_is_read_only_is_named_as_the_reason() -> None:
    pytest.importorskip("ucxx")
    enter = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a mount namespace")
    code = (
        "import asyncio\n"
        "from services.worker.kv_transport import *\n"
        "try: asyncio.run(KvTransport(UcxNetwork('127.0.0.1')).open())\n"
        "except TransferError as error: print(error, flush=True)\n"
        "import os; os._exit(0)\n"
    )
    script = 'mount --rbind /tmp /tmp && mount -o remount,bind,ro /tmp && exec "$0" -c "$1"'
    done = subprocess.run(
        [*enter, "sh", "-c", script, sys.executable, code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    expected = "unusable: UCX needs a temporary file, and none can be made in /tmp (Read-only file system)"
    assert expected in done.stdout, done.stderr
