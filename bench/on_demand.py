"""Models loaded on demand, on a running system: what a request waits for whose model was put away, and for how long streams
of another model stand still meanwhile.

    python -m bench.on_demand [--rounds 5] [--shape 135m] [--output FOLDER]

One instance: `always` (30m) has a stream all the time; `a`, `b` and `c` have the shape that is asked for, and only one of
them fits beside it. `a` is put away after a second without requests, `b` and `c` after a minute.

1. quiet    the stream alone, for what this machine makes of it
2. disk     the first request for `a`
3. host     `a` again, after it was put away for being idle
4. turns    requests for `b` and `c` in turn: each waits until the other has served for a while, and for as long as loading
            the other again takes
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx

from bench.coserving.testbed import SHAPES, make_checkpoint
from bench.reporting import command, machine, table
from bench.stack import add_tokenizer
from tests.e2e.stack import Stack

IDLE_S = {"a": 1.0, "b": 60.0, "c": 60.0}
QUIET_S = 10.0
MIB = 1 << 20
MAX_TTFT_S, MAX_GAP_S = 1.5, 0.5
"""Aimed at, for a model in host memory and for streams of others."""


class Chunk(NamedTuple):
    at_s: float
    gap_s: float


class Stream:
    """Streams of the model that is always loaded: one after another, with the time of each chunk."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self.chunks: list[Chunk] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        body = {"model": "always", "prompt": [5, 6, 7], "max_tokens": 1500, "ignore_eos": True, "stream": True}
        while not self._is_over.is_set():
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=60) as response:
                last_s = 0.0
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        now = time.monotonic()
                        if last_s:
                            self.chunks.append(Chunk(now, now - last_s))
                        last_s = now
                    if self._is_over.is_set():
                        return

    def longest_gap_s(self, since_s: float, until_s: float) -> float:
        return max((gap_s for at_s, gap_s in self.chunks if since_s <= at_s <= until_s + 1.0), default=0.0)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()


class Request(NamedTuple):
    """One for a model that was put away."""

    model: str
    state: str
    """State of the model when the request was sent."""
    at_s: float
    """Since the run began."""
    ttft_s: float
    gap_s: float
    """The longest of the other model's stream meanwhile, and a second longer."""


def state(url: str, model: str) -> str:
    return str(httpx.get(f"{url}/v1/models/{model}", timeout=10).json()["state"])


def until(what: Callable[[], bool]) -> None:
    while not what():
        time.sleep(0.05)


def ask(stack: Stack, stream: Stream, model: str, begun_s: float) -> Request:
    body = {"model": model, "prompt": [5, 6, 7, 8], "max_tokens": 4, "ignore_eos": True, "stream": True}
    was, sent_s = state(stack.url, model), time.monotonic()
    first_s = None
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and first_s is None:
                first_s = time.monotonic()
    assert first_s is not None, stack.logs()
    time.sleep(1.0)
    return Request(model, was, sent_s - begun_s, first_s - sent_s, stream.longest_gap_s(sent_s, first_s))


def measure(stack: Stack, num_rounds: int) -> tuple[float, dict[str, list[Request]]]:
    stream = Stream(stack.url)
    try:
        until(lambda: len(stream.chunks) > 50)
        begun_s = time.monotonic()
        time.sleep(QUIET_S)
        quiet_s = stream.longest_gap_s(begun_s, begun_s + QUIET_S)
        requests: dict[str, list[Request]] = {"disk": [ask(stack, stream, "a", begun_s)], "host": [], "turns": []}
        for _ in range(num_rounds):
            until(lambda: state(stack.url, "a") == "host")
            requests["host"].append(ask(stack, stream, "a", begun_s))
        requests["disk"] += [ask(stack, stream, model, begun_s) for model in "bc"]
        for number in range(2 * num_rounds):
            requests["turns"].append(ask(stack, stream, "bc"[number % 2], begun_s))
        return quiet_s, requests
    finally:
        stream.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m")
    parser.add_argument("--memory-mib", type=int, default=720, help="for weights and KV pools of the instance")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = {}
        for model, shape in (("always", "30m"), *((name, options.shape) for name in IDLE_S)):
            models[model] = str(make_checkpoint(Path(folder) / model, SHAPES[shape]))
            add_tokenizer(Path(models[model]), SHAPES[shape]["vocab_size"])
        specs = [
            {"name": model, "source": source}
            | ({"on_demand": True, "idle_s": IDLE_S[model]} if model in IDLE_S else {})
            for model, source in models.items()
        ]
        environment = {
            "TIDEWAY_MODELS": json.dumps(specs),
            "TIDEWAY_MEMORY_BYTES": str(options.memory_mib * MIB),
            "OMP_NUM_THREADS": "2",
        }
        with Stack(models, num_instances=1, environment=environment) as stack:
            stack.wait_until(lambda: state(stack.url, "always") == "ready", "the model that is always loaded")
            quiet_s, requests = measure(stack, options.rounds)
    rows = [
        [kind, str(len(of)), f"{min(r.ttft_s for r in of):.2f} to {max(r.ttft_s for r in of):.2f}",
         f"{max(r.gap_s for r in of):.2f}"]
        for kind, of in requests.items()
    ]  # fmt: skip
    print(command())
    print(machine())
    print(f"longest gap of the other model's stream while nothing is loaded: {quiet_s:.2f} s")
    header = ["requests for a model", "number", "time to first token (s)", "longest gap of the other's stream (s)"]
    print(*table(header, rows), sep="\n")
    is_met = all(r.ttft_s <= MAX_TTFT_S for r in requests["host"]) and all(
        r.gap_s <= MAX_GAP_S for of in requests.values() for r in of
    )
    print(f"{'met' if is_met else 'MISSED'}: {MAX_TTFT_S} s from host memory, no gap over {MAX_GAP_S} s")
    for kind, of in requests.items():
        for request in of:
            print(f"{request.at_s:7.1f} s  {kind:6} {request.model}  was {request.state:6}  "
                  f"first token after {request.ttft_s:.2f} s, longest gap {request.gap_s:.2f} s")  # fmt: skip
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        told = {"machine": machine(), "quiet_gap_s": quiet_s,
                "requests": {kind: [r._asdict() for r in of] for kind, of in requests.items()}}  # fmt: skip
        (options.output / "on_demand.json").write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
