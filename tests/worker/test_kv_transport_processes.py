"""The KV transport over UCX between two processes: death, standstill and return of the peer, and what idling costs.

Run as a program this file is the peer: it reads commands from standard input, one a line, and answers with JSON lines.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.kv_transport import KvTransport, TransferError, TransferReason, TransportLimits, UcxNetwork
from services.worker.kv_transport.faults import FaultPoint, Faults
from services.worker.kv_transport.receiving import Incoming, Receipt
from tests.stalls import Stopwatch

BLOCK_BYTES, NUM_BLOCKS = 256 << 10, 64
LIMITS = TransportLimits(chunk_bytes=1 << 20, drain_s=0.3, rate_fraction=None)
ROOT = Path(__file__).parents[2]


def pool(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8))


class Peer:
    """A process with a transport of its own; its pool is `pool(2)`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.address = ""

    @staticmethod
    async def start(**environment: str) -> Peer:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.worker.test_kv_transport_processes",
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        peer = Peer(process)
        peer.address = (await peer.answer())["address"]
        return peer

    async def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            while not (line := await self.process.stdout.readline()).startswith(b"{"):
                assert line, "the peer ended"
        return json.loads(line)

    async def expect(self, blocks: list[int], deadline_s: float = 30.0, stall_at: str = "") -> bytes:
        answer = await self.ask("expect", blocks=blocks, deadline_s=deadline_s, stall_at=stall_at)
        return bytes.fromhex(answer["ticket"])

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    pytest.importorskip("ucxx")
    started = await Peer.start()
    yield started
    await started.end()


@pytest.fixture
async def source() -> AsyncIterator[KvTransport]:
    pytest.importorskip("ucxx")
    transport = KvTransport(UcxNetwork("127.0.0.1"), LIMITS)
    await transport.open()
    transport.register("m", pool(1))
    yield transport
    await transport.close()


async def reason_of(
    transport: KvTransport, peer: Peer, ticket: bytes, deadline_s: float
) -> tuple[TransferReason, float]:
    with Stopwatch() as watch, pytest.raises(TransferError) as caught:
        await transport.send(peer.address, ticket, "m", range(32), deadline_s=deadline_s)
    return caught.value.reason, watch.seconds


@pytest.mark.parametrize("transports", ["all", "tcp"])
async def test_bytes_arrive_in_another_process(source: KvTransport, transports: str) -> None:
    peer = await Peer.start(UCX_TLS=transports)
    try:
        for blocks in ([5], list(range(40)), list(range(63, 20, -3))):
            ticket = await peer.expect(blocks)
            await source.send(peer.address, ticket, "m", list(reversed(blocks)), deadline_s=30)
            assert (await peer.ask("result"))["reason"] is None
            digest = (await peer.ask("digest", blocks=blocks))["digest"]
            assert digest == int(
                pool(1)[list(reversed(blocks))].to(torch.int64).mul(torch.arange(1, BLOCK_BYTES + 1)).sum()
            )
    finally:
        await peer.end()


async def test_a_killed_peer_is_noticed_at_once_and_its_successor_is_reached(source: KvTransport, peer: Peer) -> None:
    ticket = await peer.expect(list(range(32)), stall_at=FaultPoint.CHUNK_ARRIVED)
    asyncio.get_running_loop().call_later(0.3, peer.process.kill)
    reason, seconds = await reason_of(source, peer, ticket, 10)
    assert reason is TransferReason.PEER_LOST
    assert seconds < 2
    await peer.process.wait()
    assert (await reason_of(source, peer, ticket, 8))[0] is TransferReason.UNREACHABLE
    assert source.num_active == 0
    successor = await Peer.start()
    try:
        again = await successor.expect(list(range(32)))
        await source.send(successor.address, again, "m", range(32), deadline_s=30)
    finally:
        await successor.end()


async def test_a_peer_killed_while_idle_is_noticed_and_its_successor_dialled(source: KvTransport, peer: Peer) -> None:
    await source.send(peer.address, await peer.expect([1]), "m", [1], deadline_s=30)
    await peer.end()
    async with asyncio.timeout(20):
        while source.num_connections:
            await asyncio.sleep(0.01)
    successor = await Peer.start()
    try:
        await source.send(successor.address, await successor.expect([1]), "m", [1], deadline_s=30)
    finally:
        await successor.end()


async def test_a_stopped_peer_costs_no_more_than_the_deadline(source: KvTransport, peer: Peer) -> None:
    await source.send(peer.address, await peer.expect([1]), "m", [1], deadline_s=30)
    assert (await peer.ask("result"))["reason"] is None
    ticket = await peer.expect(list(range(32)), deadline_s=0.6)
    peer.process.send_signal(signal.SIGSTOP)
    reason, seconds = await reason_of(source, peer, ticket, 0.5)
    assert reason is TransferReason.DEADLINE
    assert seconds < 0.9
    async with asyncio.timeout(20):  # the connection is given up, and everything with it
        while source.num_active or source.num_connections:
            await asyncio.sleep(0.01)
    peer.process.send_signal(signal.SIGCONT)
    assert (await peer.ask("result"))["reason"] in ("deadline", "peer_lost")
    ticket = await peer.expect(list(range(32)))
    await source.send(peer.address, ticket, "m", range(32), deadline_s=30)


async def test_idle_connections_and_expectations_cost_next_to_no_cpu(source: KvTransport, peer: Peer) -> None:
    await source.send(peer.address, await peer.expect([1]), "m", [1], deadline_s=30)
    waiting = source.expect("m", [2], deadline_s=10)
    used_s = []
    for _ in range(5):  # what spins does so in each second; what else the processes do, in some
        before, theirs = time.process_time(), (await peer.ask("cpu"))["seconds"]
        await asyncio.sleep(1.0)
        used_s.append(max(time.process_time() - before, (await peer.ask("cpu"))["seconds"] - theirs))
        if used_s[-1] < 0.15:
            break
    assert min(used_s) < 0.15
    waiting.cancel()


async def test_a_stopped_source_gives_the_blocks_back_soon_after_the_deadline_and_writes_no_more(peer: Peer) -> None:
    """The blocks are one run of memory: chunks arrive in them, and receives are posted when the source stops."""
    opened = asyncio.Event()

    class Opened(Faults):
        async def at(self, point: FaultPoint, payload: np.ndarray | None = None) -> None:
            if point is FaultPoint.OPENED:
                opened.set()  # the receives are posted before anybody who waits for this goes on

    destination, rows = KvTransport(UcxNetwork("127.0.0.1"), LIMITS, faults=Opened()), pool(3)
    await destination.open()
    destination.register("m", rows)
    try:
        incoming = destination.expect("m", range(32), deadline_s=2.0)
        await peer.ask(
            "send", address=destination.address, ticket=incoming.ticket.hex(), stall_at=FaultPoint.CHUNK_READY
        )
        await opened.wait()
        peer.process.send_signal(signal.SIGSTOP)
        with Stopwatch() as watch, pytest.raises(TransferError) as caught:
            await incoming.wait()
        assert caught.value.reason is TransferReason.DEADLINE
        assert watch.seconds < 2.0 + LIMITS.drain_s + 2.5
        rows.zero_()
        peer.process.send_signal(signal.SIGCONT)
        assert (await peer.ask("result"))["reason"] in ("peer_lost", "cancelled", "deadline")
        assert not rows.any()
    finally:
        await destination.close()


@pytest.mark.parametrize("how", ["import", "init", "host"])
async def test_an_unusable_ucx_is_a_typed_error_at_once(how: str) -> None:
    prelude = "import sys; sys.modules['ucxx'] = None\n" if how == "import" else ""
    host = "no.such.host.invalid" if how == "host" else "127.0.0.1"
    environment = {"UCX_TLS": "none_such"} if how == "init" else {}
    code = prelude + (
        "import asyncio\n"
        "from tests.stalls import Stopwatch\n"
        "from services.worker.kv_transport import *\n"
        "async def main():\n"
        "    watch = Stopwatch().start()\n"
        f"    try: await KvTransport(UcxNetwork('{host}')).open()\n"
        "    except TransferError as error: print(error, '|', error.reason, '|', watch.seconds)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE
    )
    async with asyncio.timeout(20):
        output, _ = await process.communicate()
    text, reason, seconds = output.decode().splitlines()[-1].split(" | ")
    assert reason == "unusable"
    assert {"import": "not installed", "init": "UCX", "host": "no.such.host.invalid"}[how] in text
    assert float(seconds) < 3.0
    assert process.returncode == 0


class _StallOnce(Faults):
    at_point = ""

    async def at(self, point: FaultPoint, payload: np.ndarray | None = None) -> None:
        if point == self.at_point:
            self.at_point = ""
            await asyncio.Event().wait()


async def _peer() -> None:
    faults, rows = _StallOnce(), pool(2)
    is_closed = asyncio.Event()
    transport = KvTransport(UcxNetwork("127.0.0.1", on_door_closed=is_closed.set), LIMITS, faults=faults)
    await transport.open()
    transport.register("m", rows)
    print(json.dumps({"address": transport.address}), flush=True)
    incoming: Incoming | None = None
    sending: asyncio.Task[Receipt] | None = None
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        answer: dict[str, Any] = {}
        match request["command"]:
            case "expect":
                faults.at_point = request["stall_at"]
                incoming = transport.expect("m", request["blocks"], deadline_s=request["deadline_s"])
                answer["ticket"] = incoming.ticket.hex()
            case "send":
                faults.at_point = request["stall_at"]
                send = transport.send(
                    request["address"], bytes.fromhex(request["ticket"]), "m", range(32), deadline_s=2.0
                )
                sending = asyncio.create_task(send)
            case "result":
                answer["reason"] = None
                try:
                    if incoming is not None:
                        await incoming.wait()
                    elif sending is not None:
                        await sending
                except TransferError as error:
                    answer["reason"] = error.reason
            case "digest":
                weights = torch.arange(1, BLOCK_BYTES + 1)
                answer["digest"] = int(rows[request["blocks"]].to(torch.int64).mul(weights).sum())
            case "cpu":
                answer["seconds"] = time.process_time()
                answer["is_closed"] = is_closed.is_set()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(_peer())
