"""What strangers at an instance's KV port cost it: thousands of connections that send noise, nothing, or half of what begins
a conversation of UCX, while two processes hold a connection; then transfers between the two again. They come from the host
of a peer (this one); a last lot, which speaks UCX's language and would end the process, comes from a host that is none.

    python -m bench.kv_noise [--connections 10000] [--repeats 15] [--mib 64]

Shown: for how long the process that is disturbed keeps a connection of a stranger at most, its processor time during the
flood and in two idle seconds after it, its open files and resident memory before and after, and throughput and processor
time per byte of transfers before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.kv_transport import ask, heard
from bench.reporting import machine, processor_s
from services.worker.kv_transport import KvTransport, TransportLimits, UcxNetwork

MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
"""With which UCX begins on tcp."""
CONNECT_ID = 32
"""Id of UCX's own messages about a connection; below it are those of its layers, which believe what they are told."""
OTHER_HOST = "127.0.0.2"
OTHER_SHARE = 0.05
MAX_OPEN = 500
"""Connections that the stranger holds at once."""
CONNECT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 30.0
BLOCK_BYTES = 512 << 10


def payloads(random_: random.Random) -> Iterator[tuple[str, bytes]]:
    """Endlessly: kinds of nonsense, and what to send."""
    while True:
        yield "noise", random_.randbytes(4096)
        yield "silence", b""
        yield "half", MAGIC[: random_.randrange(1, 8)]
        yield "magic", MAGIC
        yield "magic and noise", MAGIC + random_.randbytes(random_.randrange(1, 4096))
        body = random_.randbytes(random_.randrange(0, 200))
        length = random_.choice([0, 1, len(body), len(body) + 1, 1 << 16, (1 << 32) - 1])
        yield "false connect", MAGIC + struct.pack("<BI", CONNECT_ID, length) + body


def messages(random_: random.Random) -> Iterator[tuple[str, bytes]]:
    """Endlessly: what looks like a message of a peer."""
    while True:
        body = random_.randbytes(random_.randrange(0, 200))
        yield "message", MAGIC + struct.pack("<BI", random_.randrange(CONNECT_ID), len(body)) + body


@dataclass
class Disturbance:
    num: dict[str, int] = field(default_factory=dict)
    num_refused: int = 0
    """Connections that could not be made."""
    longest_s: float = 0.0
    """From the connection until the other side had closed it."""
    num_kept: int = 0
    """Still open after `CLOSE_TIMEOUT_S`."""


async def disturb(
    host: str, port: int, count: int, kinds: Iterator[tuple[str, bytes]], own_host: str = ""
) -> Disturbance:
    """Makes `count` connections, says one of `kinds` on each, and waits until each is closed."""
    result, places = Disturbance(), asyncio.Semaphore(MAX_OPEN)

    async def one(kind: str, payload: bytes) -> None:
        async with places:
            result.num[kind] = result.num.get(kind, 0) + 1
            started = time.monotonic()
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    local = (own_host, 0) if own_host else None
                    reader, writer = await asyncio.open_connection(host, port, local_addr=local)
            except OSError:  # TimeoutError is one
                result.num_refused += 1
                return
            try:
                writer.write(payload)
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    while await reader.read(4096):
                        pass
            except TimeoutError:
                result.num_kept += 1
            except OSError:  # closed with what was sent unread
                pass
            finally:
                writer.close()
            result.longest_s = max(result.longest_s, time.monotonic() - started)

    await asyncio.gather(*(one(*next(kinds)) for _ in range(count)))
    return result


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def port_of(address: str) -> tuple[str, int]:
    host, _, port = address.partition("/")[0].rpartition(":")
    return host, int(port)


async def opened(arguments: argparse.Namespace) -> KvTransport:
    transport = KvTransport(UcxNetwork("127.0.0.1"), TransportLimits(rate_fraction=None))
    await transport.open()
    transport.register("m", torch.ones(int(arguments.mib * (1 << 20)) // BLOCK_BYTES, BLOCK_BYTES, dtype=torch.uint8))
    return transport


async def destination(arguments: argparse.Namespace) -> None:
    transport = await opened(arguments)
    num_blocks = int(arguments.mib * (1 << 20)) // BLOCK_BYTES
    print(json.dumps({"address": transport.address}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        incoming = transport.expect("m", range(num_blocks), deadline_s=60)
        print(json.dumps({"ticket": incoming.ticket.hex(), "cpu_s": time.process_time()}), flush=True)
        await asyncio.wait([asyncio.ensure_future(incoming.wait())])
    await transport.close()


async def throughput(
    arguments: argparse.Namespace, peer: subprocess.Popen[str], transport: KvTransport, address: str
) -> dict[str, float]:
    """To the process that is disturbed: medians of GB/s and of nanoseconds of processor time of both processes per byte."""
    speeds, costs, far = [], [], 0.0
    num_blocks = int(arguments.mib * (1 << 20)) // BLOCK_BYTES
    num_bytes = num_blocks * BLOCK_BYTES
    used = time.process_time()
    for _ in range(arguments.repeats + 1):
        asked = await ask(peer, "")
        if far:
            costs.append((time.process_time() - used + asked["cpu_s"] - far) / num_bytes * 1e9)
        used, far = time.process_time(), asked["cpu_s"]
        started = time.perf_counter()
        await transport.send(address, bytes.fromhex(asked["ticket"]), "m", range(num_blocks), deadline_s=60)
        speeds.append(num_bytes / (time.perf_counter() - started) / 1e9)
    return {"gb_s": statistics.median(speeds[1:]), "cpu_ns_byte": statistics.median(costs)}


async def measure(arguments: argparse.Namespace, peer: subprocess.Popen[str]) -> dict[str, Any]:
    address = (await heard(peer))["address"]
    transport = await opened(arguments)
    host, port = port_of(address)
    before = await throughput(arguments, peer, transport, address)
    files, memory, used = open_files(peer.pid), resident_mib(peer.pid), processor_s(peer.pid)
    started = time.monotonic()
    disturbed = await disturb(host, port, arguments.connections, payloads(random.Random(0)))
    flood = {"seconds": time.monotonic() - started, "cpu_s": processor_s(peer.pid) - used}
    num_others = int(arguments.connections * OTHER_SHARE)
    others = await disturb(host, port, num_others, messages(random.Random(1)), OTHER_HOST)
    used = processor_s(peer.pid)
    await asyncio.sleep(2)
    idle = (processor_s(peer.pid) - used) / 2
    result = {
        "connections": disturbed.num,
        "could_not_connect": disturbed.num_refused,
        "of_another_host": {"tried": num_others, "could_not_connect": others.num_refused},
        "longest_s": disturbed.longest_s,
        "still_open": disturbed.num_kept,
        "flood": flood,
        "idle_cpu_after": idle,
        "open_files": [files, open_files(peer.pid)],
        "resident_mib": [memory, resident_mib(peer.pid)],
        "before": before,
        "after": await throughput(arguments, peer, transport, address),
    }
    await transport.close()
    assert peer.stdin
    peer.stdin.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--mib", type=float, default=64)
    parser.add_argument("--destination", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.destination:
        asyncio.run(destination(arguments))
        return
    command = [sys.executable, "-m", "bench.kv_noise", "--destination", *sys.argv[1:]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        try:
            result = asyncio.run(measure(arguments, peer))
        finally:
            peer.kill()
    for name, value in {"machine": machine(), **result}.items():
        print(f"{name}: {json.dumps(value)}")


if __name__ == "__main__":
    main()
