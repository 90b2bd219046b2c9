"""What clients notice while nodes of a NATS cluster die, hang and come back: streams, short requests and a batch on the real
system, with each stream in three copies (or one, on a single server).

    python -m bench.cluster_faults [ROW ...] [--streams 6] [--tokens 300] [--lines 200]

Rows: kill, pause, rolling, two-of-three, single-pause, single-kill; without any, all of them. Each prints a line: streams
and how many broke, texts that differ from those of a quiet run, answers to short requests by status and code, lines of the
batch that were answered once, and the longest silence of a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from bench.mishaps import ENDED, Load, upload
from tests.conftest import NatsServer
from tests.e2e.checkpoints import make_llama, make_opt
from tests.e2e.stack import Stack
from tests.e2e.streams import stream_completion
from tests.nats_cluster import NatsCluster

PROBE_INTERVAL_S = 0.5
PROBE_TOKENS = 5
STEP_S = 0.02
"""What a step of an instance takes at least."""
SETTLE_S = 5.0
BATCH_TIMEOUT_S = 300.0
NUM_COPIES = 3

Fault = Callable[[Stack], None]


class Outcome(NamedTuple):
    num_streams: int
    num_broken: int
    num_other_texts: int
    answers: Counter[tuple[int, str]]
    """Answers of short requests, by status and code; status 0: no answer."""
    batch: str
    num_lines_once: int
    num_lines: int
    longest_silence_s: float

    @property
    def is_well(self) -> bool:
        """Nothing broke and no answer was wrong: 503 tells the truth, and is tried again."""
        refused = {status for status, _ in self.answers} - {200, 503}
        is_whole = self.num_lines_once == self.num_lines
        return not self.num_broken and not self.num_other_texts and not refused and is_whole

    def line(self, name: str) -> str:
        answers = ", ".join(f"{n} x {status} {code}".strip() for (status, code), n in sorted(self.answers.items()))
        return (
            f"{name}: {self.num_broken} of {self.num_streams} streams broken, {self.num_other_texts} other texts; "
            f"{answers}; batch {self.batch}, {self.num_lines_once} of {self.num_lines} lines once; "
            f"longest silence {self.longest_silence_s:.1f} s"
        )


# ---------------------------------------------------------------------------------------------------------- faults


def kill_each(stack: Stack) -> None:
    """kill -9 of one node after the other, each away for 15 s."""
    for node in _cluster(stack).nodes:
        node.kill()
        time.sleep(15.0)
        node.start()
        time.sleep(SETTLE_S)


def pause_each(stack: Stack) -> None:
    """One node after the other hangs for 20 s."""
    for node in _cluster(stack).nodes:
        _cluster(stack).pause(node)
        time.sleep(20.0)
        _cluster(stack).resume(node)
        time.sleep(SETTLE_S)


def rolling(stack: Stack) -> None:
    """Each node is told to stop and started again."""
    for node in _cluster(stack).nodes:
        node.terminate()
        node.start()
        time.sleep(SETTLE_S)


def two_of_three(stack: Stack) -> None:
    """kill -9 of two nodes, away for 30 s: what is left has no quorum."""
    nodes = _cluster(stack).nodes[:2]
    for node in nodes:
        node.kill()
    time.sleep(30.0)
    for node in nodes:
        node.start()
    time.sleep(SETTLE_S)


def single_pause(stack: Stack) -> None:
    """The only server hangs for 14 s."""
    import os

    assert isinstance(stack.nats, NatsServer)
    os.kill(stack.nats.pid, signal.SIGSTOP)
    time.sleep(14.0)
    os.kill(stack.nats.pid, signal.SIGCONT)


def single_kill(stack: Stack) -> None:
    """kill -9 of the only server, back after 10 s."""
    assert isinstance(stack.nats, NatsServer)
    stack.nats.kill()
    time.sleep(10.0)
    stack.nats.start()


ROWS: dict[str, Fault] = {
    "kill": kill_each,
    "pause": pause_each,
    "rolling": rolling,
    "two-of-three": two_of_three,
    "single-pause": single_pause,
    "single-kill": single_kill,
}


def _cluster(stack: Stack) -> NatsCluster:
    assert isinstance(stack.nats, NatsCluster)
    return stack.nats


# ------------------------------------------------------------------------------------------------------------ load


class Batch:
    """A batch of short completions; its answers are counted at its end."""

    def __init__(self, url: str, models: list[str], num_lines: int) -> None:
        self._url, self.num_lines = url, num_lines
        self._lines = [
            {
                "custom_id": f"line-{index}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": models[index % len(models)], "prompt": f"Chapter {index}", "max_tokens": 40}
                | {"ignore_eos": True, "temperature": 0},
            }
            for index in range(num_lines)
        ]
        self._id = ""

    def begin(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60.0) as client:
            file = upload(client, "\n".join(map(json.dumps, self._lines))).raise_for_status().json()
            body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            self._id = client.post("/v1/batches", json=body).raise_for_status().json()["id"]

    def end(self) -> tuple[str, int]:
        """Its status, and how many lines were answered with 200 exactly once."""
        deadline = time.monotonic() + BATCH_TIMEOUT_S
        with httpx.Client(base_url=self._url, timeout=60.0) as client:
            batch = {"status": "unknown"}
            while batch["status"] not in ENDED and time.monotonic() < deadline:
                time.sleep(0.5)
                answer = client.get(f"/v1/batches/{self._id}")
                batch = answer.json() if answer.status_code == 200 else batch
            if not batch.get("output_file_id"):
                return f"{batch['status']} {batch.get('errors')}", 0
            output = client.get(f"/v1/files/{batch['output_file_id']}/content").raise_for_status().text
        answers = [json.loads(line) for line in output.splitlines()]
        times = Counter(each["custom_id"] for each in answers if each["response"]["status_code"] == 200)
        return batch["status"], sum(number == 1 for number in times.values())


async def probe(url: str, models: list[str], over: asyncio.Event) -> Counter[tuple[int, str]]:
    """Short requests, one after another begins each half second until `over`, and waits for its answer."""
    answers: Counter[tuple[int, str]] = Counter()

    async def ask(client: httpx.AsyncClient, model: str) -> None:
        body = {"model": model, "prompt": "Hi", "max_tokens": PROBE_TOKENS, "ignore_eos": True}
        try:
            answer = await client.post(f"{url}/v1/completions", json=body)
            code = "" if answer.status_code == 200 else str(answer.json()["error"]["code"])
            answers[answer.status_code, code] += 1
        except httpx.HTTPError as error:
            answers[0, type(error).__name__] += 1

    async with httpx.AsyncClient(timeout=90.0) as client, asyncio.TaskGroup() as group:
        number = 0
        while not over.is_set():
            group.create_task(ask(client, models[number % len(models)]))
            number += 1
            await asyncio.sleep(PROBE_INTERVAL_S)
    return answers


async def expected_texts(url: str, models: list[str], num_streams: int, num_tokens: int) -> set[str]:
    """Texts of the streams of `Load` in quiet."""
    async with httpx.AsyncClient(timeout=120.0) as client:
        streams = await asyncio.gather(
            *(
                stream_completion(client, url, models[n % len(models)], [1, 5 + n, 7, 9], num_tokens, lambda _: None)
                for n in range(num_streams)
            )
        )
    return {stream.text for stream in streams}


async def run_row(stack: Stack, fault: Fault, num_streams: int, num_tokens: int, num_lines: int) -> Outcome:
    models, over = list(stack.models), asyncio.Event()
    texts = await expected_texts(stack.url, models, num_streams, num_tokens)
    load, batch = Load(stack.url, models, num_streams, num_tokens), Batch(stack.url, models, num_lines)
    await asyncio.to_thread(batch.begin)
    running = asyncio.create_task(load.run())
    probing = asyncio.create_task(probe(stack.url, models, over))
    await asyncio.sleep(2.0)
    await asyncio.to_thread(fault, stack)
    await asyncio.sleep(2 * SETTLE_S)
    load.end()
    over.set()
    await running
    answers = await probing
    status, num_once = await asyncio.to_thread(batch.end)
    broken = [stream for stream in load.streams if not stream.ended_well or stream.num_tokens != num_tokens]
    for stream in broken[:3]:
        print(f"  broken after {stream.num_tokens} tokens: {stream.finish_reasons} {stream.error}")
    others = [stream for stream in load.streams if stream not in broken and stream.text not in texts]
    return Outcome(
        num_streams=len(load.streams),
        num_broken=len(broken),
        num_other_texts=len(others),
        answers=answers,
        batch=status,
        num_lines_once=num_once,
        num_lines=num_lines,
        longest_silence_s=max(load.silences_s),
    )


@contextmanager
def running_stack(is_cluster: bool) -> Iterator[Stack]:
    with tempfile.TemporaryDirectory() as folder:
        models = {"llama": str(make_llama(Path(folder) / "llama")), "opt": str(make_opt(Path(folder) / "opt"))}
        environment = {"TIDEWAY_NATS_REPLICAS": str(NUM_COPIES if is_cluster else 1)}
        nats = NatsCluster if is_cluster else NatsServer
        with Stack(models, environment=environment, step_s=STEP_S, nats=nats) as stack:
            stack.wait_ready()
            yield stack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], help="all without any")
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    parser.add_argument("--lines", type=int, default=200, help="of the batch of each row")
    options = parser.parse_args()
    rows, are_well = options.rows or list(ROWS), []
    for is_cluster in (True, False):
        if not (names := [name for name in rows if name.startswith("single") is not is_cluster]):
            continue
        with running_stack(is_cluster) as stack:
            for name in names:
                outcome = asyncio.run(run_row(stack, ROWS[name], options.streams, options.tokens, options.lines))
                print(outcome.line(name), flush=True)
                are_well.append(outcome.is_well)
    sys.exit(0 if all(are_well) else 1)


if __name__ == "__main__":
    main()
