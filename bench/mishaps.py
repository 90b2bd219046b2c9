"""What clients notice of an operator's day: a disk that fills up under a batch and is freed, and restarts of every worker
and of NATS under streams. On the real system; nothing may be lost, or come twice.

    python -m bench.mishaps disk-full [--lines 8000] [--full-s 60]
    python -m bench.mishaps rolling-restart [--streams 16] [--tokens 400]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from bench.batches import ENDED, answers_of, begin, file_of, num_answered_once
from tests.conftest import free_port
from tests.e2e.checkpoints import make_llama, make_opt
from tests.e2e.stack import REPOSITORY, Stack
from tests.e2e.streams import Stream, stream_completion
from tests.small_disk import SmallDisk, SmallDiskError

DISK_BYTES = 160 << 20
TIMEOUT_S = 1800.0
MODEL = "tideway-demo-opt"

# ------------------------------------------------------------------------------------------------------ disk full


@contextmanager
def tideway_up(disk: SmallDisk) -> Iterator[str]:
    """All of its data on `disk`: JetStream's store, logs, state. Yields the API's address."""
    port = free_port()
    command = [
        *disk.prefix, sys.executable, "-m", "tideway", "up", "--data-dir", str(disk.path / "data"), "--port", str(port),
        "--model", f"{MODEL}={REPOSITORY / 'models' / MODEL}", "--instances", "1",
    ]  # fmt: skip
    # Not the working directory: whoever enters another namespace is in its root folder.
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, env=environment)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def until(what: str, condition, timeout_s: float = TIMEOUT_S):  # type: ignore[no-untyped-def]
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            if result := condition():
                return result
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise TimeoutError(what)


def disk_full(num_lines: int, full_s: float) -> bool:
    disk = SmallDisk(DISK_BYTES)
    try:
        with tideway_up(disk) as url, httpx.Client(base_url=url, timeout=60.0) as client:
            until("ready", lambda: client.get("/ready").status_code == 200, 300.0)
            body = {"model": MODEL, "max_tokens": 4, "ignore_eos": True}
            bodies = {f"line-{index}": body | {"prompt": f"Chapter {index}"} for index in range(num_lines)}
            batch_id = begin(client, bodies)

            def batch() -> dict:  # type: ignore[type-arg]
                return client.get(f"/v1/batches/{batch_id}").raise_for_status().json()

            until("a fifth", lambda: batch()["request_counts"]["completed"] >= num_lines / 5)
            disk.fill()
            began_s = time.monotonic()
            problems = until("a problem in /ready", lambda: ready(client)["problems"], 60.0)
            print(
                f"full at {batch()['request_counts']}; /ready says after {time.monotonic() - began_s:.1f} s: {problems}"
            )
            answer = client.post("/v1/files", **file_of(bodies))
            print(f"an upload meanwhile: {answer.status_code} {answer.text[:200]}")
            completion = {"model": MODEL, "prompt": "x", "max_tokens": 4}
            statuses = Counter[int]()
            while time.monotonic() - began_s < full_s:
                statuses[client.post("/v1/completions", json=completion).status_code] += 1
                time.sleep(0.5)
            print(f"completions while it was full: {dict(statuses)}; batch: {batch()['request_counts']}")
            disk.free()
            freed_s = time.monotonic()
            until("no problem in /ready", lambda: ready(client)["problems"] == [], 120.0)
            print(f"written again {time.monotonic() - freed_s:.1f} s after there was space")
            final = until("the end", lambda: batch() if batch()["status"] in ENDED else None)
            output = client.get(f"/v1/files/{final['output_file_id']}/content").raise_for_status().text
            answers, num_once = answers_of(output), num_answered_once(answers_of(output))
            print(f"{final['status']}: {num_once} of {num_lines} lines once with 200, {len(answers)} answers")
            print(f"an upload afterwards: {client.post('/v1/files', **file_of(bodies)).status_code}")
            return num_once == len(answers) == num_lines and answer.status_code == 507
    finally:
        disk.close()


def ready(client: httpx.Client) -> dict:  # type: ignore[type-arg]
    answer = client.get("/ready")
    assert "problems" in answer.json(), answer.text
    return answer.json()  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------- rolling restart


class Load:
    """`num_streams` clients, each of which reads one stream after another, by `read`."""

    def __init__(
        self,
        url: str,
        models: list[str],
        num_streams: int,
        num_tokens: int,
        read: Callable[..., Awaitable[Stream]] = stream_completion,
    ) -> None:
        self._url, self._models, self._num_streams, self._num_tokens = url, models, num_streams, num_tokens
        self._read_one = read
        self.streams: list[Stream] = []
        self.silences_s: list[float] = []
        """The longest of each stream, the wait for its first token among them."""
        self.pauses_s: list[float] = []
        """The longest between two tokens of each."""
        self._is_over = False

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300.0, limits=limits) as client:
            await asyncio.gather(*(self._read(client, number) for number in range(self._num_streams)))

    def end(self) -> None:
        """No stream begins any more."""
        self._is_over = True

    async def _read(self, client: httpx.AsyncClient, number: int) -> None:
        while not self._is_over:
            heard_at = time.monotonic()
            gaps_s: list[float] = []

            def on_tokens(_: int) -> None:
                nonlocal heard_at
                now = time.monotonic()
                gaps_s.append(now - heard_at)  # noqa: B023
                heard_at = now

            prompt = [1, 5 + number, 7, 9]
            model = self._models[number % len(self._models)]
            try:
                stream = await self._read_one(client, self._url, model, prompt, self._num_tokens, on_tokens)
            except httpx.HTTPError as error:
                stream = Stream(prompt, error={"message": repr(error)})
            self.streams.append(stream)
            self.silences_s.append(max(gaps_s, default=0.0))
            self.pauses_s.append(max(gaps_s[1:], default=0.0))


async def rolling_restart(num_streams: int, num_tokens: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        models = {"llama": str(make_llama(Path(folder) / "llama")), "opt": str(make_opt(Path(folder) / "opt"))}
        with Stack(models, num_workers=2, num_instances=1) as stack:
            await asyncio.to_thread(stack.wait_ready)
            load = Load(stack.url, list(models), num_streams, num_tokens)
            running = asyncio.create_task(load.run())
            await asyncio.sleep(5.0)
            for name in ("worker-0", "worker-1", "nats", "worker-0", "worker-1", "nats"):
                began_s = time.monotonic()
                if name == "nats":
                    await asyncio.to_thread(stack.nats.restart)
                else:
                    await asyncio.to_thread(stack.kill, name, signal.SIGTERM)
                    stack.start(name)
                await asyncio.to_thread(stack.wait_ready)
                print(
                    f"{name} restarted in {time.monotonic() - began_s:.1f} s, {len(load.streams)} streams ended so far"
                )
                await asyncio.sleep(5.0)
            load.end()
            await running
    broken = [s for s in load.streams if not s.ended_well or s.num_tokens != num_tokens]
    print(f"{len(load.streams)} streams of {num_tokens} tokens, {num_streams} at once: {len(broken)} broken")
    for stream in broken[:5]:
        print(f"  {stream.num_tokens} tokens, {stream.finish_reasons}, {stream.error}")
    silences_s = sorted(load.silences_s)
    print(f"longest silence of a stream: median {statistics.median(silences_s):.2f} s, worst {silences_s[-1]:.2f} s")
    return not broken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["disk-full", "rolling-restart"])
    parser.add_argument("--lines", type=int, default=8000)
    parser.add_argument("--full-s", type=float, default=60.0, help="how long the disk stays full")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    options = parser.parse_args()
    if options.what == "disk-full":
        try:
            is_well = disk_full(options.lines, options.full_s)
        except SmallDiskError as error:
            sys.exit(str(error))
    else:
        is_well = asyncio.run(rolling_restart(options.streams, options.tokens))
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
