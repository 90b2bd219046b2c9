"""What floods do to a gateway and to those who use it meanwhile: for each flood the worst /health, the longest silence of a
stream that runs beside it, and the gateway's memory and descriptors before it, at worst, and after it.

    python -m bench.floods                                             a system of its own, with one demonstration model
    python -m bench.floods --url http://127.0.0.1:8000 --pid PID       a gateway that runs; PID for memory and descriptors
    python -m bench.floods --only half_open streams --streams 500

Floods run in a process of their own, so that their work does not show in what is measured. Memory is that of the gateway and
its children. Those of a chat template need a system of this script's own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.e2e.stack import REPOSITORY, Stack

MODEL = "tideway-demo-llama"
HEALTH_INTERVAL_S = 0.05
SAMPLE_INTERVAL_S = 0.1
SETTLE_S = 3.0
CLIENT_TIMEOUT_S = 120.0


@dataclass
class Plan:
    """What a flood is to do. `seconds`: for so long floods that have no end of their own go on."""

    url: str
    seconds: float
    connections: int
    prompts: int
    prompt_bytes: int
    streams: int

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80


# ------------------------------------------------------------------------------------------------------------ floods


async def _pour(plan: Plan, first: bytes, piece: bytes, pause_s: float = 0.0) -> str:
    """Sends `piece` again and again; tells how the server took it."""
    num_bytes, status = 0, ""
    try:
        reader, writer = await asyncio.open_connection(*plan.address)
    except OSError as error:
        return type(error).__name__
    try:
        async with asyncio.timeout(plan.seconds):
            writer.write(first)
            answer = asyncio.ensure_future(reader.readline())
            while not answer.done():
                writer.write(piece)
                num_bytes += len(piece)
                await writer.drain()
                await asyncio.wait({answer}, timeout=pause_s)
            status = answer.result().decode().strip() or "closed"
    except TimeoutError:
        status = "open to the end"
    except OSError:
        status = "reset"
    finally:
        answer.cancel()
        writer.transport.abort()
    return status if pause_s else f"{status} ({'over' if num_bytes > 1 << 20 else 'under'} 1 MiB taken)"


async def _many(count: int, one: Callable[[], Awaitable[str]]) -> dict[str, int]:
    return dict(Counter(await asyncio.gather(*(one() for _ in range(count)))))


def _endless(first: bytes, piece: bytes) -> Callable[[Plan], Awaitable[dict[str, int]]]:
    return lambda plan: _many(4, lambda: _pour(plan, first, piece))


async def half_open(plan: Plan) -> dict[str, int]:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    return await _many(plan.connections, lambda: _pour(plan, head, b"", pause_s=1.0))


async def slow_body(plan: Plan) -> dict[str, int]:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9999\r\n\r\n"
    return await _many(plan.connections, lambda: _pour(plan, head, b" ", pause_s=1.0))


async def long_prompts(plan: Plan) -> dict[str, int]:
    """Four at a time."""
    words = "the tide comes in and the tide goes out again, "
    body = {"model": MODEL, "prompt": (words * (plan.prompt_bytes // len(words) + 1))[: plan.prompt_bytes]}
    content = json.dumps(body).encode()
    turn = asyncio.Semaphore(4)
    async with httpx.AsyncClient(timeout=CLIENT_TIMEOUT_S) as client:

        async def one() -> str:
            async with turn:
                return await _outcome(client, plan.url + "/v1/completions", content)

        return await _many(plan.prompts, one)


async def streams(plan: Plan) -> dict[str, int]:
    content = json.dumps({"model": MODEL, "prompt": "The tide", "max_tokens": 4, "stream": True}).encode()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=CLIENT_TIMEOUT_S, limits=limits) as client:
        return await _many(plan.streams, lambda: _outcome(client, plan.url + "/v1/completions", content))


async def _chats(plan: Plan, model: str) -> dict[str, int]:
    content = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}).encode()
    async with httpx.AsyncClient(timeout=plan.seconds) as client:
        return await _many(4, lambda: _outcome(client, plan.url + "/v1/chat/completions", content))


async def _outcome(client: httpx.AsyncClient, url: str, content: bytes) -> str:
    try:
        answer = await client.post(url, content=content, headers={"content-type": "application/json"})
    except httpx.HTTPError as error:
        return type(error).__name__
    if answer.status_code == 200:
        return "200" if b'"error"' not in answer.content[-2000:] else "200, then an error"
    error = answer.json().get("error", {})
    retry = f", retry-after {answer.headers['retry-after']}" if "retry-after" in answer.headers else ""
    return f"{answer.status_code} {error.get('code')}{retry}: {str(error.get('message'))[:90]}"


HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
FLOODS: dict[str, Callable[[Plan], Awaitable[dict[str, int]]]] = {
    "endless_header": _endless(HEAD + b"x-long: ", b"a" * 65536),
    "endless_headers": _endless(HEAD, b"x-more: a\r\n" * 6000),
    "endless_uri": _endless(b"GET /", b"a" * 65536),
    "endless_trailer": _endless(CHUNKED + b"x-long: ", b"a" * 65536),
    "half_open": half_open,
    "slow_body": slow_body,
    "long_prompts": long_prompts,
    "streams": streams,
    "template_bomb": lambda plan: _chats(plan, "bomb"),
    "template_loop": lambda plan: _chats(plan, "loop"),
}


def _run_flood(name: str, plan: Plan) -> dict[str, int]:
    async def run() -> dict[str, int]:
        return await FLOODS[name](plan)

    return asyncio.run(run())


# --------------------------------------------------------------------------------------------------------- measuring


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(one for child in children for one in _family(int(child)))]


def _memory_bytes(pid: int) -> int:
    total = 0
    for one in _family(pid):
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * 4096
    return total


def _num_descriptors(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0


@dataclass(kw_only=True)
class Figures:
    flood: str
    outcomes: dict[str, int]
    seconds: float
    worst_health_s: float
    longest_silence_s: float
    median_silence_s: float
    """Between two chunks of the stream, for comparison."""
    memory_bytes: dict[str, int]
    descriptors: dict[str, int]


@dataclass
class Watch:
    """What is seen from beside a flood."""

    url: str
    pid: int
    health_s: list[float] = field(default_factory=list)
    silence_s: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    async def health(self) -> None:
        async with httpx.AsyncClient(timeout=CLIENT_TIMEOUT_S) as client:
            while True:
                started = time.perf_counter()
                try:
                    with contextlib.suppress(httpx.HTTPError):
                        await client.get(self.url + "/health")
                finally:
                    self.health_s.append(time.perf_counter() - started)
                await asyncio.sleep(HEALTH_INTERVAL_S)

    async def stream(self) -> None:
        """One stream after the other; the time to a first token does not count, a break does."""
        body = {"model": MODEL, "prompt": "The tide", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        async with httpx.AsyncClient(timeout=CLIENT_TIMEOUT_S) as client:
            while True:
                previous = None
                try:
                    async with client.stream("POST", self.url + "/v1/completions", json=body) as answer:
                        async for _ in answer.aiter_bytes():
                            now = time.perf_counter()
                            if previous is not None:
                                self.silence_s.append(now - previous)
                            previous = now
                except httpx.HTTPError:
                    await asyncio.sleep(0.1)
                finally:
                    if previous is not None:
                        self.silence_s.append(time.perf_counter() - previous)

    async def sizes(self) -> None:
        while True:
            self.memory_bytes.append(_memory_bytes(self.pid))
            self.descriptors.append(_num_descriptors(self.pid))
            await asyncio.sleep(SAMPLE_INTERVAL_S)


async def measure(name: str, plan: Plan, pid: int) -> Figures:
    watch = Watch(plan.url, pid)
    tasks = [asyncio.create_task(work()) for work in (watch.health, watch.stream, watch.sizes)]
    await asyncio.sleep(SETTLE_S)
    started = time.perf_counter()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        outcomes = await asyncio.get_running_loop().run_in_executor(pool, _run_flood, name, plan)
    seconds = time.perf_counter() - started
    await asyncio.sleep(SETTLE_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    def three(values: list[int]) -> dict[str, int]:
        return {"before": values[0], "worst": max(values), "after": values[-1]}

    return Figures(
        flood=name,
        outcomes=outcomes,
        seconds=seconds,
        worst_health_s=max(watch.health_s),
        longest_silence_s=max(watch.silence_s, default=0.0),
        median_silence_s=statistics.median(watch.silence_s or [0.0]),
        memory_bytes=three(watch.memory_bytes),
        descriptors=three(watch.descriptors),
    )


def show(figures: Figures) -> None:
    memory = " / ".join(f"{value / 2**20:.0f}" for value in figures.memory_bytes.values())
    descriptors = " / ".join(map(str, figures.descriptors.values()))
    print(
        f"{figures.flood:16} {figures.seconds:6.1f} s   /health {figures.worst_health_s:7.3f} s   "
        f"silence {figures.longest_silence_s:7.3f} s (median {figures.median_silence_s:.3f})   "
        f"MiB {memory}   descriptors {descriptors}"
    )
    for outcome, count in sorted(figures.outcomes.items(), key=lambda item: -item[1]):
        print(f"{'':16} {count:6} x {outcome}")


# ----------------------------------------------------------------------------------------------------------- running


def _with_template(folder: Path, template: str) -> str:
    shutil.copytree(REPOSITORY / "models" / MODEL, folder)
    for name in ("chat_template.jinja", "chat_template.json"):
        (folder / name).unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a gateway that runs; without it one is started, with all that it needs")
    parser.add_argument("--pid", type=int, default=0, help="of that gateway")
    parser.add_argument("--only", nargs="+", choices=list(FLOODS), default=[])
    parser.add_argument("--seconds", type=float, default=45.0, help="of a flood that has no end of its own")
    parser.add_argument("--connections", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--prompt-bytes", type=int, default=7_900_000)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--bomb-characters", type=int, default=300_000_000)
    parser.add_argument("--result", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args()
    names = arguments.only or [name for name in FLOODS if not (arguments.url and name.startswith("template"))]

    results = []
    with contextlib.ExitStack() as resources:
        url, pid = arguments.url, arguments.pid
        if not url:
            folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="tideway-floods-")))
            models = {MODEL: str(REPOSITORY / "models" / MODEL)}
            if "template_bomb" in names:
                models["bomb"] = _with_template(folder / "bomb", f"{{{{ 'a' * {arguments.bomb_characters} }}}}")
            if "template_loop" in names:
                inner = "{% for j in range(99999) %}{% endfor %}"
                models["loop"] = _with_template(folder / "loop", f"{{% for i in range(99999) %}}{inner}{{% endfor %}}")
            environment = {"TIDEWAY_COST_MODELS_DIR": str(folder / "cost_models")}
            system = resources.enter_context(Stack(models, num_instances=1, environment=environment))
            system.wait_ready()
            url, pid = system.url, system.processes["gateway"].pid
        plan = Plan(url, *(getattr(arguments, name) for name in list(Plan.__dataclass_fields__)[1:]))
        for name in names:
            figures = asyncio.run(measure(name, plan, pid))
            show(figures)
            results.append(asdict(figures))
    if arguments.result:
        arguments.result.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
