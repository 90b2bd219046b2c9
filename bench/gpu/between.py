"""KV blocks between two processes on one device over UCX, by `cuda_ipc`, with a checksum of all bytes at both ends.

The second process is this file again.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import torch

from bench.gpu.stepping import Setup
from services.worker.kv_transport import KvTransport, TransportLimits, UcxNetwork

DEADLINE_S = 30.0
ROUNDS = 6
IPC = "cuda_ipc/"
"""How UCX lists the transport between processes of one machine."""


def cuda_ipc(setup: Setup) -> None:
    """Raises `RuntimeError` where bytes arrive otherwise than they were sent."""
    sizes = [(64, 64 << 10)] if setup.is_quick else [(64, 512 << 10), (256, 512 << 10), (256, 4 << 20)]
    for num_blocks, block_bytes in sizes:
        command = [sys.executable, "-m", "bench.gpu.between", setup.device.type, str(num_blocks), str(block_bytes)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as far:
            row = in_loop(_send(setup.device, num_blocks, block_bytes, far), far.kill)
        setup.emit(**row, why=setup.why)
        if not row["equal"]:
            raise RuntimeError("bytes arrived otherwise than they were sent")


def _pool(device: torch.device, num_blocks: int, block_bytes: int, seed: int) -> torch.Tensor:
    """[blocks, bytes] uint8, with gaps between blocks as in a slab; of the seed 0 zeros."""
    generator = np.random.default_rng(seed)
    shape = num_blocks, block_bytes + 256
    data = generator.integers(0, 256, shape, dtype=np.uint8) if seed else np.zeros(shape, np.uint8)
    rows = torch.from_numpy(data).to(device)
    if device.type == "cuda":
        torch.cuda.synchronize()  # the transport reads on a stream of its own
    return rows[:, :block_bytes]


def checksum(rows: torch.Tensor) -> str:
    return hashlib.sha256(rows.cpu().contiguous().numpy().tobytes()).hexdigest()


async def _open(rows: torch.Tensor) -> tuple[UcxNetwork, KvTransport]:
    network = UcxNetwork("127.0.0.1", uses_device=rows.is_cuda)
    transport = KvTransport(network, TransportLimits(rate_fraction=None))
    await transport.open()
    transport.register("m", rows)
    return network, transport


async def _send(device: torch.device, num_blocks: int, block_bytes: int, far: subprocess.Popen[str]) -> dict[str, Any]:
    """Blocks in reverse order, several times; each time the far end says what it has then."""
    rows = _pool(device, num_blocks, block_bytes, seed=1)
    network, transport = await _open(rows)
    address = (await _said(far))["address"]
    blocks = list(reversed(range(num_blocks)))
    expected, seconds, equal = checksum(rows.flip(0)), [], 0
    for _ in range(ROUNDS):
        assert far.stdin is not None
        far.stdin.write("\n")
        far.stdin.flush()
        ticket = bytes.fromhex((await _said(far))["ticket"])
        started_s = time.perf_counter()
        await transport.send(address, ticket, "m", blocks, deadline_s=DEADLINE_S)
        seconds.append(time.perf_counter() - started_s)
        equal += (await _said(far))["checksum"] == expected
    assert network._runtime is not None
    lists_ipc = IPC in network._runtime.context.context.info
    await transport.close()
    assert far.stdin is not None
    far.stdin.close()
    num_bytes = num_blocks * block_bytes
    row = {
        "MiB": num_bytes / 2**20, "block_KiB": block_bytes >> 10, "equal": equal == ROUNDS, "rounds": ROUNDS,
        "first_ms": 1e3 * seconds[0], "later_ms": 1e3 * statistics.median(seconds[1:]),
        "GB_per_s": num_bytes / statistics.median(seconds[1:]) / 1e9,
    }  # fmt: skip
    return row | ({"cuda_ipc": network.reads_device and lists_ipc} if device.type == "cuda" else {})


async def _receive(device: torch.device, num_blocks: int, block_bytes: int) -> None:
    rows = _pool(device, num_blocks, block_bytes, seed=0)
    _, transport = await _open(rows)
    _say(address=transport.address)
    while await asyncio.to_thread(sys.stdin.readline):
        rows.zero_()
        if rows.is_cuda:
            torch.cuda.synchronize()
        incoming = transport.expect("m", range(num_blocks), deadline_s=DEADLINE_S)
        _say(ticket=incoming.ticket.hex())
        await incoming.wait()
        _say(checksum=checksum(rows))
    await transport.close()


def _say(**fields: str) -> None:
    print(json.dumps(fields), flush=True)


async def _said(far: subprocess.Popen[str]) -> dict[str, Any]:
    """Raises `RuntimeError` where the far end has gone."""
    assert far.stdout is not None
    line = await asyncio.to_thread(far.stdout.readline)
    if not line:
        raise RuntimeError("the other process has ended")
    answer: dict[str, Any] = json.loads(line)
    return answer


def in_loop(work: Coroutine[Any, Any, Any], on_error: Callable[[], None] = lambda: None) -> Any:
    """An error ends the process at once, which threads of UCX would keep."""
    try:
        return asyncio.run(work)
    except BaseException:
        traceback.print_exc()
        on_error()
        os._exit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.between")
    parser.add_argument("device")
    parser.add_argument("num_blocks", type=int)
    parser.add_argument("block_bytes", type=int)
    options = parser.parse_args()
    in_loop(_receive(torch.device(options.device), options.num_blocks, options.block_bytes))
