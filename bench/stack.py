"""What the services cost over the bare engine: the same requests on the same model with the same torch threads, first on
the engine in this process, then over HTTP through gateway, scheduler and worker. Both are measured in turn, so that a
drift of the machine's speed cancels in the ratios.

    python -m bench.stack [--rounds 3] [--threads 2] [--output-len 64]

The model has the shape of SmolLM-135M with random bfloat16 weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

import httpx
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.coserving.testbed import SHAPES, make_checkpoint
from services.worker.executor.executor import Executor
from services.worker.instance.building import build_engine
from services.worker.instance.engine_loop import EngineLoop
from shared.engine.calls import AddModel, Submit
from shared.engine.driver import StepStats
from shared.engine.memory.slab import choose_merged_bytes
from shared.engine.requests import Ended, Output
from shared.messages.cluster import ModelSpec
from shared.messages.requests import GenerationRequest, SamplingParams, pack_tokens
from shared.runtime.settings import InstanceSettings
from tests.e2e.stack import Stack
from tideway.bench.arrivals import Closed
from tideway.bench.client import Target
from tideway.bench.lengths import Fixed
from tideway.bench.session import Session, run_session
from tideway.bench.workload import StreamSpec, Workload

VOCABULARY = SHAPES["135m"]["vocab_size"]
POOL_BYTES = 1 << 30


def add_tokenizer(folder: Path, num_tokens: int = VOCABULARY) -> None:
    """Adds a tokenizer of the vocabulary's size: the gateway wants one, though prompts are token ids. Without bytes
    that are no character: random answers have so many of them one after the other that streams would look silent to
    their clients."""
    alphabet = sorted(char for char in pre_tokenizers.ByteLevel.alphabet() if char.isascii() or char == "Ġ")
    words = [f"Ġw{index}" for index in range(num_tokens - len(alphabet) - 3)]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "bos_token": "<bos>"})
    )


class BareEngine:
    """The engine loop and the executor as an instance has them, without bus or HTTP."""

    def __init__(self, checkpoint: Path, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        settings = InstanceSettings(device="cpu")
        probe = Executor("cpu", 1, 1 << 30, 1)
        prepared = probe.prepare_model(ModelSpec("model", str(checkpoint)))
        merged_bytes = choose_merged_bytes([prepared.model.kv_shape(prepared.block_size).block_bytes])
        num_merged = POOL_BYTES // merged_bytes
        executor = Executor("cpu", num_merged, merged_bytes, settings.max_running)
        engine = build_engine(settings, num_merged, "cpu")
        engine.apply(AddModel(executor.add_model(prepared)), 0.0)
        self._changed = threading.Condition()
        self._ended: set[str] = set()
        self._first_token_s: dict[str, float] = {}
        self._num_tokens = 0
        self._loop = EngineLoop(engine, executor, time.perf_counter, self._on_effects)
        self._loop.start()
        self._num_sent = 0

    def _on_effects(self, effects: list[Output | Ended], _stats: StepStats | None) -> None:
        now = time.perf_counter()
        with self._changed:
            for effect in effects:
                if isinstance(effect, Ended):
                    self._ended.add(effect.request.request_id)
                    continue
                for entry in effect.entries:
                    self._first_token_s.setdefault(entry.request_id, now)
                    self._num_tokens += len(entry.tokens) // 4
            self._changed.notify_all()

    def _submit(self, prompt: list[int], output_len: int) -> str:
        self._num_sent += 1
        name = f"bare-{self._num_sent}"
        sampling = SamplingParams(max_tokens=output_len, temperature=0.0)
        refused = self._loop.apply(
            Submit(
                GenerationRequest(
                    request_id=name, gateway_id="gateway", model="model", prompt=pack_tokens(prompt), sampling=sampling
                )
            )
        )
        assert refused is None, refused
        return name

    def throughput(self, prompts: list[list[int]], concurrency: int, output_len: int) -> float:
        """Output tokens per second with `concurrency` requests at once."""
        waiting = list(prompts)
        self._num_tokens = 0
        started = time.perf_counter()
        with self._changed:
            running: set[str] = set()
            while waiting or running:
                while waiting and len(running) < concurrency:
                    running.add(self._submit(waiting.pop(), output_len))
                self._changed.wait(30)
                running -= self._ended
        return self._num_tokens / (time.perf_counter() - started)

    def ttft_s(self, prompt: list[int]) -> float:
        """Time to the first token of one request on the idle engine."""
        with self._changed:
            started = time.perf_counter()
            name = self._submit(prompt, 4)
            while name not in self._ended:
                self._changed.wait(30)
        return self._first_token_s[name] - started

    def close(self) -> None:
        self._loop.stop(10)


def http_ttft_s(client: httpx.Client, url: str, prompt: list[int]) -> float:
    """Time to the first byte of a streamed answer, on a connection that is open already."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    first_s = 0.0
    started = time.perf_counter()
    with client.stream("POST", url, json=body) as response:
        for _ in response.iter_raw():
            first_s = first_s or time.perf_counter() - started
        assert response.status_code == 200
    return first_s


def http_throughput(url: str, arguments: argparse.Namespace, seed: int) -> float:
    """Output tokens per second over HTTP, all requests at once but for the bound on streams."""
    load = StreamSpec(
        name="load",
        models={"model": 1.0},
        arrivals=Closed(concurrency=arguments.streams),
        num_requests=arguments.requests,
        prompt_tokens=Fixed(tokens=arguments.input_len),
        output_tokens=Fixed(tokens=arguments.output_len),
    )
    session = Session(target=Target(url=url, ignore_eos=True, vocabulary=VOCABULARY))
    total = asyncio.run(run_session(session, Workload(streams=[load], seed=seed))).summary.group()
    assert total.num_succeeded == arguments.requests
    return total.output_tokens_per_s


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    chooser = random.Random(seed)
    return [[chooser.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--ttft-requests", type=int, default=30)
    parser.add_argument("--result", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tideway-135m-") as folder:
        checkpoint = make_checkpoint(Path(folder), SHAPES["135m"])
        add_tokenizer(checkpoint)
        measure(checkpoint, arguments)


def measure(checkpoint: Path, arguments: argparse.Namespace) -> None:
    environment = {
        "TIDEWAY_NUM_THREADS": str(arguments.threads),
        "TIDEWAY_MEMORY_BYTES": str(4 << 30),
        "OMP_NUM_THREADS": str(arguments.threads),
    }
    ratios, ttft_differences_ms, rounds = [], [], []
    bare = BareEngine(checkpoint, arguments.threads)
    with (
        Stack({"model": str(checkpoint)}, num_instances=1, environment=environment) as stack,
        httpx.Client(timeout=60) as client,
    ):
        stack.wait_ready()
        for number in range(-1, arguments.rounds):
            # In the order A B B A, so that a steady drift of the machine's speed cancels.
            bare_rates, stack_rates = [], []
            for turn, is_bare in enumerate((True, False, False, True)):
                seed = 4 * number + turn
                if is_bare:
                    prompts = random_prompts(arguments.requests, arguments.input_len, seed)
                    bare_rates.append(bare.throughput(prompts, arguments.streams, arguments.output_len))
                    continue
                stack_rates.append(http_throughput(stack.url, arguments, seed))
            # The same number of tokens in each turn: rates add up as times do.
            bare_tokens_per_s, stack_tokens_per_s = map(statistics.harmonic_mean, (bare_rates, stack_rates))
            bare_ttfts, stack_ttfts = [], []
            for index in range(arguments.ttft_requests):
                (prompt,) = random_prompts(1, arguments.input_len, 10_000 + 1000 * number + 2 * index)
                bare_ttfts.append(bare.ttft_s(prompt))
                (prompt,) = random_prompts(1, arguments.input_len, 10_001 + 1000 * number + 2 * index)
                stack_ttfts.append(http_ttft_s(client, f"{stack.url}/v1/completions", prompt))
            if number < 0:
                continue  # the first round warms both up
            ratio = stack_tokens_per_s / bare_tokens_per_s
            difference_ms = 1e3 * (statistics.median(stack_ttfts) - statistics.median(bare_ttfts))
            ratios.append(ratio)
            ttft_differences_ms.append(difference_ms)
            rounds.append(
                {
                    "bare_output_tokens_per_s": bare_tokens_per_s,
                    "stack_output_tokens_per_s": stack_tokens_per_s,
                    "bare_ttft_s": statistics.median(bare_ttfts),
                    "stack_ttft_s": statistics.median(stack_ttfts),
                }
            )
            print(
                f"round {number}: bare {bare_tokens_per_s:.1f} tok/s, stack {stack_tokens_per_s:.1f} tok/s, "
                f"ratio {ratio:.3f}; idle TTFT bare {1e3 * statistics.median(bare_ttfts):.1f} ms, over HTTP "
                f"{difference_ms:+.1f} ms",
                flush=True,
            )
    bare.close()
    print(
        f"median ratio {statistics.median(ratios):.3f}, "
        f"median TTFT difference {statistics.median(ttft_differences_ms):.1f} ms"
    )
    if arguments.result:
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} torch threads",
            "command": "python -m bench.stack",
            "ratio_median": statistics.median(ratios),
            "ttft_difference_ms_median": statistics.median(ttft_differences_ms),
            "rounds": rounds,
        }
        arguments.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
