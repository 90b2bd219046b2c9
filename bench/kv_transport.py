"""How fast KV blocks move between two processes: the KV transport, against `ucx_perftest`, raw ucxx messages and memcpy.

The second process is this file again. All three send messages of the transport's size, in UCX's error handling mode (the
one in which a peer's death is reported; `ucx_perftest -e`) and with the transport's settings of UCX. Raw keeps as many
messages posted at both ends as the transport, in as much memory, allocated before, and waits for one answer; the transport
adds tickets, gather, checksums and scatter. `ucx_perftest` polls without pause and sends one buffer again and again, which
stays in the processor's caches; it is shown with UCX's defaults too. Repetitions of all alternate, medians are reported;
`cpu` is processor time of both processes per byte, which does not depend on what else the machine does.

With `--device cuda` the pools lie on a GPU, and all is done twice: `device`, where UCX reads and writes them, by cuda_ipc
where it can, and `host`, through page-locked memory, where raw and `ucx_perftest` send from memory of the host.

    python -m bench.kv_transport [--mib 1 8 64] [--block-kib 512] [--repeats 9] [--pin] [--no-perftest] [--device cuda]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from bench.devices import add_device_option, environments
from bench.reporting import machine
from services.worker.kv_transport import KvTransport, TransportLimits, UcxNetwork
from services.worker.kv_transport.links import Buffer, Link
from services.worker.kv_transport.ucx import ENVIRONMENT
from services.worker.kv_transport.wire import WINDOW

T = TypeVar("T")

MIB = 1 << 20
DEADLINE_S = 60.0
PERFTEST_TIMEOUT_S = 10.0


def message_bytes(arguments: argparse.Namespace) -> int:
    """Message size as the transport chooses it."""
    block_bytes: int = arguments.block_kib << 10
    if block_bytes >= TransportLimits().lone_block_bytes:
        return block_bytes
    chunk_bytes: int = arguments.chunk_mib * MIB
    return max(1, chunk_bytes // block_bytes) * block_bytes


def sizes(arguments: argparse.Namespace) -> list[tuple[int, int]]:
    """(bytes, blocks) of each transfer."""
    block_bytes = arguments.block_kib << 10
    counts = [max(1, int(mib * MIB) // block_bytes) for mib in arguments.mib]
    return [(count * block_bytes, count) for count in counts]


async def transport_with_pool(network: UcxNetwork, arguments: argparse.Namespace) -> KvTransport:
    limits = TransportLimits(chunk_bytes=arguments.chunk_mib * MIB, rate_fraction=None)
    transport = KvTransport(network, limits)
    await transport.open()
    block_bytes, num_blocks = arguments.block_kib << 10, max(count for _, count in sizes(arguments))
    gap = 64 if arguments.scattered else 0
    device = "cuda" if arguments.way else "cpu"
    rows = torch.ones(num_blocks, block_bytes + gap, dtype=torch.uint8, device=device)
    if rows.is_cuda:
        torch.cuda.synchronize()  # the transport reads them on a stream of its own
    transport.register("m", rows[:, :block_bytes])
    return transport


def network_of(arguments: argparse.Namespace) -> UcxNetwork:
    return UcxNetwork("127.0.0.1", uses_device=arguments.way != "host")


def raw_memory(arguments: argparse.Namespace) -> Buffer:
    num_bytes = max(size for size, _ in sizes(arguments))
    if arguments.way != "device":
        return np.ones(num_bytes, dtype=np.uint8)
    memory = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return memory


def copy(target: Buffer, source: Buffer) -> None:
    if isinstance(target, np.ndarray):
        np.copyto(target, source)
    else:
        target.copy_(source)
        torch.cuda.synchronize()


async def receive_raw(link: Link, memory: Buffer) -> None:
    answer = np.zeros(8, dtype=np.uint8)
    try:
        while True:
            announced = np.zeros(2, dtype=np.int64)
            await link.receive(3, announced.view(np.uint8))
            await pipelined(link.receive, messages_of(memory, *announced.tolist()))
            await link.send(2, answer)
    except ConnectionError:
        await link.abort()


def messages_of(memory: Buffer, num_bytes: int, message_bytes: int) -> list[Buffer]:
    return [memory[start : min(num_bytes, start + message_bytes)] for start in range(0, num_bytes, message_bytes)]


async def pipelined(call: Callable[[int, Buffer], Awaitable[None]], buffers: Sequence[Buffer]) -> None:
    posted: deque[asyncio.Future[None]] = deque()
    for buffer in buffers:
        if len(posted) == WINDOW:
            await posted.popleft()
        posted.append(asyncio.ensure_future(call(1, buffer)))
    while posted:
        await posted.popleft()


def perftest(
    message_bytes: int, num_bytes: int, arguments: argparse.Namespace, environment: dict[str, str]
) -> float | None:
    """Bytes per second of `ucx_perftest -t tag_bw -e`; None where there is none, or it does not end."""
    try:
        import libucx
    except ImportError:
        return None
    folder = Path(libucx.__file__).parent
    cores = sorted(os.sched_getaffinity(0)) if arguments.pin else []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    count = max(4, num_bytes // message_bytes)
    options = f"-p {port} -t tag_bw -e -s {message_bytes} -n {count} -w 2 -f -v".split()
    options += ["-m", "cuda"] if arguments.way == "device" else []

    def start(peer: list[str], core: int, end: dict[str, str]) -> subprocess.Popen[str]:
        place = ["taskset", "-c", str(cores[core])] if arguments.pin else []
        return subprocess.Popen(
            [*place, str(folder / "bin" / "ucx_perftest"), *peer, *options],
            env={name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
            | {"LD_LIBRARY_PATH": str(folder / "lib"), "UCX_WARN_UNUSED_ENV_VARS": "n"}
            | environment
            | end,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    with start([], -1, arguments.ends[1]) as server:
        time.sleep(0.5)  # it says nothing when it listens
        with start(["127.0.0.1"], 0, arguments.ends[0]) as client:
            try:
                output, _ = client.communicate(timeout=PERFTEST_TIMEOUT_S)
            except subprocess.TimeoutExpired:  # its ends lose each other now and then
                output = ""
            finally:
                client.kill()
                server.kill()
    numbers = [line.split(",") for line in output.splitlines() if line.count(",") >= 6 and line.strip()[0].isdigit()]
    return float(numbers[-1][5]) * MIB if numbers else None


def gpu_name(arguments: argparse.Namespace) -> str:
    return torch.cuda.get_device_name() if arguments.way else ""


async def destination(arguments: argparse.Namespace) -> None:
    transport = await transport_with_pool(network_of(arguments), arguments)
    raw, serving = UcxNetwork("127.0.0.1"), set()

    def serve(link: Link) -> None:
        serving.add(asyncio.create_task(receive_raw(link, raw_memory(arguments))))

    address = await raw.open(serve)
    print(json.dumps({"transport": transport.address, "raw": address, "gpu": gpu_name(arguments)}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        incoming = transport.expect("m", range(int(line)), deadline_s=DEADLINE_S)
        print(json.dumps({"ticket": incoming.ticket.hex()}), flush=True)
        await incoming.wait()
        print(json.dumps({"cpu_s": time.process_time()}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print(json.dumps({"cpu_s": time.process_time()}), flush=True)
    await transport.close()
    await raw.close()


async def heard(peer: subprocess.Popen[str]) -> dict[str, Any]:
    """What the second process says next."""
    assert peer.stdout
    answer: dict[str, Any] = json.loads(await asyncio.to_thread(peer.stdout.readline))
    return answer


async def ask(peer: subprocess.Popen[str], line: str) -> dict[str, Any]:
    assert peer.stdin
    peer.stdin.write(line + "\n")
    peer.stdin.flush()
    return await heard(peer)


async def source(arguments: argparse.Namespace, peer: subprocess.Popen[str]) -> dict[str, object]:
    addresses = await heard(peer)
    network = network_of(arguments)
    transport = await transport_with_pool(network_of(arguments), arguments)
    await network.open(lambda link: None)
    link = await network.connect(addresses["raw"])
    size_of_message = message_bytes(arguments)
    answer = np.zeros(8, dtype=np.uint8)
    original, copied = raw_memory(arguments), raw_memory(arguments)
    rows = []

    if arguments.way == "device" and not network.reads_device:
        print("UCX does not read CUDA memory here, so there is no way `device`", flush=True)
        arguments.mib = []
    for mib, (size, num_blocks) in zip(arguments.mib, sizes(arguments), strict=True):
        times: dict[str, list[float]] = {name: [] for name in ("transport", "raw", "memcpy", "perftest", "default")}
        cpu: dict[str, list[float]] = {"transport": [], "raw": []}
        far = 0.0
        for repeat in range(arguments.repeats + 1):
            ticket = bytes.fromhex((await ask(peer, str(num_blocks)))["ticket"])
            started, used = time.perf_counter(), time.process_time()
            await transport.send(addresses["transport"], ticket, "m", range(num_blocks), deadline_s=DEADLINE_S)
            took = {"transport": time.perf_counter() - started}
            between = (await heard(peer))["cpu_s"]
            spent = {"transport": time.process_time() - used + between - far}
            started, used = time.perf_counter(), time.process_time()
            await link.send(3, np.array([size, size_of_message], dtype=np.int64).view(np.uint8))
            await pipelined(link.send, messages_of(original, size, size_of_message))
            await link.receive(2, answer)
            took["raw"] = time.perf_counter() - started
            used = time.process_time() - used
            far = (await ask(peer, ""))["cpu_s"]
            spent["raw"] = used + far - between
            started = time.perf_counter()
            copy(copied[:size], original[:size])
            took["memcpy"] = time.perf_counter() - started
            if arguments.perftest and repeat % 3 == 1:
                for name, environment in (("perftest", ENVIRONMENT), ("default", {})):
                    message = min(size, size_of_message)
                    speed = await asyncio.to_thread(perftest, message, 20 * size, arguments, environment)
                    if speed:
                        took[name] = size / speed
            if repeat:  # the first touches memory and makes connections
                for name, seconds in took.items():
                    times[name].append(seconds)
                for name, seconds in spent.items():
                    cpu[name].append(seconds)
        row: dict[str, Any] = {"way": arguments.way} if arguments.way else {}
        row |= {"mib": mib, "message_mib": min(size, size_of_message) / MIB}
        row |= {f"{name}_gb_s": size / statistics.median(values) / 1e9 for name, values in times.items() if values}
        row |= {f"{name}_cpu_ns_byte": statistics.median(values) / size * 1e9 for name, values in cpu.items()}
        row |= {
            f"of_{name}": row["transport_gb_s"] / row[f"{name}_gb_s"]
            for name in ("raw", "perftest", "default")
            if times[name]
        }
        rows.append(row)
        texts = [f"{name} {value if isinstance(value, str) else f'{value:.2f}'}" for name, value in row.items()]
        print("  ".join(texts), flush=True)
    await link.abort()
    await transport.close()
    await network.close()
    assert peer.stdin
    peer.stdin.close()
    gpus = ", ".join(dict.fromkeys([gpu_name(arguments), addresses["gpu"]]))
    return {"machine": {**machine(), "gpu": gpus}, "rows": rows}


def run(work: Coroutine[Any, Any, T], peer: subprocess.Popen[str] | None = None) -> T:
    """An error ends the process, which the threads of UCX would keep, and the peer."""
    try:
        return asyncio.run(work)
    except BaseException:
        traceback.print_exc()
        if peer is not None:
            peer.kill()
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 8, 64])
    parser.add_argument("--block-kib", type=int, default=512)
    parser.add_argument("--chunk-mib", type=int, default=TransportLimits().chunk_bytes // MIB)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--pin", action="store_true", help="one core for each of the two processes")
    parser.add_argument("--scattered", action="store_true", help="blocks with gaps, so that they have to be fused")
    parser.add_argument("--perftest", action=argparse.BooleanOptionalAction, default=True)
    add_device_option(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON at the end")
    parser.add_argument("--destination", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--way", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[-1 if arguments.destination else 0]})
    if arguments.destination:
        run(destination(arguments))
        return
    try:
        arguments.ends = environments(arguments.device, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except ValueError as error:
        parser.error(str(error))
    far = {**os.environ, **arguments.ends[1]}
    os.environ.update(arguments.ends[0])  # before CUDA is first used here
    if arguments.ends[0] and not torch.cuda.is_available():
        parser.error("torch finds no such GPU here")
    result: dict[str, Any] = {"rows": []}
    for way in ("device", "host") if arguments.ends[0] else ("",):
        of_way = argparse.Namespace(**{**vars(arguments), "way": way})
        command = [sys.executable, "-m", "bench.kv_transport", "--destination", *sys.argv[1:], "--way", way]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=far) as peer:
            found = run(source(of_way, peer), peer)
        result = {**found, "rows": result["rows"] + found["rows"]}
    if gpu := result["machine"]["gpu"]:
        print(f"on {gpu}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
