"""Deterministic mode: what it costs, and what it is for.

    python -m bench.determinism cost [--model 135m] [--threads 1] [--rounds 10]
    python -m bench.determinism streams [--streams 200] [--tokens 80]

`cost`: times of steps with the mode over those without, of one executor each in this process, in turns; with one
thread its own CPU time, so that other work on the machine hardly counts. `streams`: greedy and
seeded streams on two instances of a cluster, first undisturbed one by one, then all at once, through kill -9 of an instance,
through a drain and with so little memory that requests are preempted: how many of them have the same tokens and
log-probabilities as before. Both use random bfloat16 weights, whose next tokens are near ties.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
import torch

from bench.coserving.testbed import SHAPES, make_checkpoint
from bench.reporting import machine
from services.worker.executor.executor import Executor
from services.worker.executor.profiler import step_clock
from shared.engine.memory.slab import choose_merged_bytes
from shared.engine.plan import NewSequence, StepPlan
from shared.messages.cluster import ModelSpec
from shared.messages.requests import SamplingParams, pack_tokens
from tests.e2e.checkpoints import make_llama
from tests.e2e.stack import Stack
from tests.e2e.streams import Stream, stream_completion

CONTEXT = 290
"""Context of decodes."""
DECODES = (1, 8, 32)
PROMPTS = (256, 2048)
MEMORY_BYTES = 44 << 20
"""Memory of both instances: not enough for all streams at once."""


class Steps:
    """Steps of one executor, whose rows hold sequences of `CONTEXT` tokens, and one as long as the longest prompt."""

    def __init__(self, source: Path, *, deterministic: bool) -> None:
        spec = ModelSpec("model", str(source))
        probe = Executor("cpu", 1, 1 << 30, 1).prepare_model(spec)
        block_bytes = probe.model.kv_shape(probe.block_size).block_bytes
        merged_bytes, num_rows = choose_merged_bytes([block_bytes]), max(DECODES) + 1
        blocks = -(-(CONTEXT + 1) // probe.block_size)
        num_blocks = max(DECODES) * blocks + -(-max(PROMPTS) // probe.block_size)
        self._executor = Executor("cpu", num_blocks, merged_bytes, num_rows, deterministic=deterministic)
        self._clock = step_clock(self._executor)
        self._executor.add_model(self._executor.prepare_model(spec))
        vocab_size, chance = probe.model.vocab_size, random.Random(0)
        sampling, free = SamplingParams(max_tokens=1 << 20, temperature=0.0), iter(range(num_blocks))

        def sequence(row: int, length: int) -> NewSequence:
            taken = [next(free) for _ in range(-(-length // probe.block_size))]
            tokens = chance.choices(range(vocab_size), k=length)
            return NewSequence(row, pack_tokens(tokens), length, sampling, taken)

        self._run([0], [0], [max(PROMPTS)], [sequence(0, max(PROMPTS))])
        for row in range(1, num_rows):
            self._run([row], [0], [CONTEXT], [sequence(row, CONTEXT + 1)])

    def decode(self, num_rows: int) -> float:
        """Seconds."""
        return self._run(list(range(1, num_rows + 1)), [CONTEXT] * num_rows, [1] * num_rows, [])

    def prefill(self, num_tokens: int) -> float:
        return self._run([0], [0], [num_tokens], [])

    def _run(self, rows: list[int], starts: list[int], counts: list[int], new: list[NewSequence]) -> float:
        plan = StepPlan(
            step_id=1, model="model", rows=rows, starts=starts, counts=counts, samples=[True] * len(rows),
            new_sequences=new, new_blocks=[],
        )  # fmt: skip
        started_s = self._clock()
        result = self._executor.execute(plan)
        seconds = self._clock() - started_s
        assert not result.error, result.error
        return seconds


def cost(model: str, num_threads: int, num_rounds: int) -> None:
    torch.set_num_threads(num_threads)
    with tempfile.TemporaryDirectory() as folder:
        source = make_checkpoint(Path(folder), SHAPES[model], "bfloat16")
        off, on = (Steps(source, deterministic=deterministic) for deterministic in (False, True))
    print(f"{model}, bfloat16, {num_threads} threads, {machine()}")
    print("| step | off ms | on ms | ratio |\n|---|---|---|---|")
    works = [(f"decode of {n} at {CONTEXT} tokens", partial(Steps.decode, num_rows=n)) for n in DECODES]
    works += [(f"prompt of {n}", partial(Steps.prefill, num_tokens=n)) for n in PROMPTS]
    for name, run in works:
        times: dict[Steps, list[float]] = {off: [], on: []}
        for index in range(num_rounds):
            for steps in (off, on) if index % 2 else (on, off):
                times[steps].append(run(steps))
        ratio = statistics.median(b / a for a, b in zip(times[off], times[on], strict=True))
        least = [1000 * min(times[steps]) for steps in (off, on)]
        print(f"| {name} | {least[0]:.1f} | {least[1]:.1f} | {ratio:.2f} |", flush=True)


# ------------------------------------------------------------------------------------------------------ streams

KINDS: dict[str, dict[str, float]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 1.0, "seed": 7}}
SHARED_PREFIX = 70
"""Tokens with which every second prompt begins, so that there are hits in the prefix cache."""


class Trial:
    """Streams on a cluster of one worker with two instances."""

    def __init__(self, system: Stack, num_streams: int, max_tokens: int) -> None:
        """`num_streams`: half of them greedy, half seeded."""
        self._system, self._max_tokens = system, max_tokens
        self._num = num_streams
        chance = random.Random(1)
        shared = chance.choices(range(3, 250), k=SHARED_PREFIX)
        self._prompts = [
            shared * (index % 2) + chance.choices(range(3, 250), k=chance.randint(5, 120))
            for index in range(num_streams)
        ]

    async def run(self, at_once: int, disturb: Callable[[], None] | None = None) -> list[Stream]:
        """`disturb` is called in a thread when a third of all tokens have come."""
        limit, received = asyncio.Semaphore(at_once), 0
        disturbing: list[asyncio.Future[None]] = []
        loop = asyncio.get_running_loop()

        def on_tokens(num_new: int) -> None:
            nonlocal received
            received += num_new
            if disturb is not None and not disturbing and received > self._num * self._max_tokens / 3:
                disturbing.append(loop.run_in_executor(None, disturb))

        async def one(index: int) -> Stream:
            fields = list(KINDS.values())[index % 4 // 2]
            async with limit:
                return await stream_completion(
                    client,
                    self._system.url,
                    "llama",
                    self._prompts[index],
                    self._max_tokens,
                    on_tokens,
                    logprobs=1,
                    **fields,
                )

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            streams = await asyncio.gather(*map(one, range(self._num)))
        await asyncio.gather(*disturbing)
        assert all(stream.ended_well for stream in streams), [stream.error for stream in streams if stream.error]
        return streams

    def count(self, name: str) -> float:
        """Count of a metric, over the instances that are there now."""
        total = 0.0
        for instance in self._system.instances():
            text = httpx.get(f"http://127.0.0.1:{instance['metrics_port']}/metrics", timeout=5).text
            total += sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))
        return total


class Equal(NamedTuple):
    """Streams of each kind with the tokens and log-probabilities that they have alone."""

    greedy: int
    seeded: int
    note: str = ""


def trial(source: Path, num_streams: int, max_tokens: int, *, deterministic: bool) -> dict[str, Equal]:
    """By what happened to the streams."""
    environment = {
        "TIDEWAY_DETERMINISTIC": str(deterministic),
        "TIDEWAY_MEMORY_BYTES": str(MEMORY_BYTES),
        "TIDEWAY_PROFILE": "off",
    }
    results = {}
    with Stack({"llama": str(source)}, environment=environment) as system:
        system.wait_ready()
        trial = Trial(system, num_streams, max_tokens)
        alone = asyncio.run(trial.run(1))

        def compare(name: str, streams: list[Stream], note: str = "") -> None:
            same = [(a.text, a.logprobs) == (b.text, b.logprobs) for a, b in zip(streams, alone, strict=True)]
            greedy = [is_same for index, is_same in enumerate(same) if not index % 4 // 2]
            results[name] = Equal(sum(greedy), sum(same) - sum(greedy), note)

        def drain() -> None:
            httpx.post(f"{system.url}/admin/instances/worker-0-0/drain", timeout=15).raise_for_status()

        before = trial.count("vllm:num_preemptions_total")
        together = asyncio.run(trial.run(num_streams))
        preempted = trial.count("vllm:num_preemptions_total") - before
        compare("together, in little memory", together, f"{preempted:.0f} preemptions")
        compare("kill -9 of an instance", asyncio.run(trial.run(num_streams, lambda: system.kill_instance(0) and None)))
        system.wait_ready()
        compare("drain of an instance", asyncio.run(trial.run(num_streams, drain)))
    return results


def streams(num_streams: int, max_tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = make_llama(Path(folder) / "llama", hidden=256, layers=8, dtype=torch.bfloat16)
        off, on = (trial(source, num_streams, max_tokens, deterministic=mode) for mode in (False, True))
    print(f"{num_streams // 2} greedy and as many seeded streams of {max_tokens} tokens, bfloat16, {machine()}")
    print(
        "| equal to the stream alone | greedy, off | seeded, off | greedy, on | seeded, on | |\n|---|---|---|---|---|---|"
    )
    for name, result in on.items():
        other = off[name]
        print(f"| {name} | {other.greedy} | {other.seeded} | {result.greedy} | {result.seeded} | {result.note} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("cost", "streams"))
    parser.add_argument("--model", choices=SHAPES, default="135m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=80)
    arguments = parser.parse_args()
    if arguments.part == "cost":
        cost(arguments.model, arguments.threads, arguments.rounds)
    else:
        streams(arguments.streams, arguments.tokens)


if __name__ == "__main__":
    main()
