"""A real Tideway with two instances that host vLLM, and streams through the death of any of their processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.conftest import free_port
from tests.worker.engines.test_foreign import is_running

ARGUMENTS = "--dtype float32 --enforce-eager --max-num-seqs 8 --max-num-batched-tokens 256 --block-size 32"
NUM_STREAMS = 8
NUM_TOKENS = 400
VICTIMS = ("engine", "adapter", "instance")


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descendants(pid: int) -> list[int]:
    return [one for child in children(pid) for one in (child, *descendants(child))]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def said(log: Path) -> str:
    """At last."""
    return log.read_text()[-2000:]


@contextmanager
def hosted_stack(folder: Path) -> Iterator[str]:
    """Its URL. `folder`: for its data and its log. Raises `AssertionError` if a process outlives it."""
    port, log = free_port(), folder / "up.log"
    command = [
        sys.executable, "-m", "tideway", "up", "--model", "demo=models/tideway-demo-llama", "--engine", "vllm",
        "--engine-args", ARGUMENTS, "--instances", "2", "--port", str(port), "--data-dir", str(folder / "up"),
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    address, started = f"http://127.0.0.1:{port}", set[int]()
    try:
        asyncio.run(_until_serving(address, process, log))
        started = set(descendants(process.pid))
        yield address
        started |= set(descendants(process.pid))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    left = [pid for pid in started if is_running(pid)]
    assert not left, [command_of(pid) for pid in left]


async def _instances(http: httpx.AsyncClient, address: str) -> list[dict]:
    return (await http.get(f"{address}/admin/instances")).json()["instances"]


async def _until_serving(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    async with httpx.AsyncClient(timeout=10) as http:
        for _ in range(1200):
            assert process.poll() is None, said(log)
            try:
                ready = [one for one in await _instances(http, address) if one["state"] == "ready"]
            except (httpx.HTTPError, ValueError, KeyError):
                ready = []
            if len(ready) == 2:
                return
            await asyncio.sleep(0.5)
    raise AssertionError(said(log))


async def stream(http: httpx.AsyncClient, address: str, number: int, **fields: object) -> tuple[str, str | None]:
    """Its text, and its finish reason."""
    body = {
        "model": "demo", "prompt": f"Chapter {number}: An operating system is", "max_tokens": NUM_TOKENS, "temperature": 0,
        "ignore_eos": True, "stream": True, **fields,
    }  # fmt: skip
    text, reason = "", None
    async with http.stream("POST", f"{address}/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = httpx.Response(200, content=line[6:]).json()
                for choice in chunk.get("choices", []):
                    text += choice.get("text") or ""
                    reason = choice.get("finish_reason") or reason
    return text, reason


async def streams(http: httpx.AsyncClient, address: str, **fields: object) -> list[tuple[str, str | None]]:
    return await asyncio.gather(*(stream(http, address, number, **fields) for number in range(NUM_STREAMS)))


def processes_of(instance_pid: int) -> dict[str, int]:
    """Processes of a hosted instance: itself, the adapter, vLLM's engine."""
    (adapter,) = children(instance_pid)
    engine = next(pid for pid in descendants(adapter) if "resource_tracker" not in command_of(pid))
    return {"instance": instance_pid, "adapter": adapter, "engine": engine}


async def _busiest(http: httpx.AsyncClient, address: str) -> dict:
    """The instance that runs most requests, once one runs any: load is reported now and then."""
    for _ in range(200):
        busiest = max(await _instances(http, address), key=lambda one: one["load"]["num_running"])
        if busiest["load"]["num_running"] > 0:
            return busiest
        await asyncio.sleep(0.1)
    raise AssertionError("no instance runs anything")


async def _until_ended(pids: Iterable[int], victim: str) -> None:
    for _ in range(200):
        if not any(is_running(pid) for pid in pids):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"after the death of the {victim}: {[command_of(pid) for pid in pids if is_running(pid)]}")


async def until_ready(http: httpx.AsyncClient, address: str) -> None:
    """Both serve, and requests move between them."""
    for _ in range(600):
        ready = [one for one in await _instances(http, address) if one["state"] == "ready" and one["kv_address"]]
        if len(ready) == 2:
            return
        await asyncio.sleep(0.5)
    raise AssertionError("no second instance came back")


async def num_moved_in(http: httpx.AsyncClient, address: str) -> int:
    """Requests that came with KV to instances that are there now."""
    return sum(one["load"]["num_migrated_in"] for one in await _instances(http, address) if one["load"] is not None)


async def drain(http: httpx.AsyncClient, address: str, instance_id: str, *, is_undone: bool = False) -> None:
    action = "undrain" if is_undone else "drain"
    answer = await http.post(f"{address}/admin/instances/{instance_id}/{action}")
    assert answer.status_code == 200, answer.text


async def struck(http: httpx.AsyncClient, address: str, victim: str, **fields: object) -> list[tuple[str, str | None]]:
    """What came of streams through the death of one of VICTIMS in the busiest instance, or through its `drain`. Returns when
    both instances serve again. Raises `AssertionError` if a process of the dead one stays."""
    await until_ready(http, address)
    running = asyncio.create_task(streams(http, address, **fields))
    busiest = await _busiest(http, address)
    processes = processes_of(busiest["pid"])
    assert not running.done(), "the streams are too short for this machine"
    if victim == "drain":
        await drain(http, address, busiest["instance_id"])
    else:
        os.kill(processes[victim], signal.SIGKILL)
    found = await running
    await _until_ended(processes.values(), victim)
    if victim == "drain":
        await drain(http, address, busiest["instance_id"], is_undone=True)
    return found
