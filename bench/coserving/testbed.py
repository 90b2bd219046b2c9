"""Runs in real time: the model, its cost model and the pools that all share, and a fresh engine for each of them."""

from __future__ import annotations

import dataclasses
import gc
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.coserving.runs import MODEL, Clients, Objectives, RunFailed, RunResult, Setup, Step, System, num_merged
from bench.reporting import machine
from services.worker.executor.executor import Executor
from services.worker.executor.preparing import PreparedModel
from services.worker.executor.profiled_steps import BRIEF, FULL
from services.worker.executor.profiler import profile
from services.worker.instance.cost_models import profiled_model
from services.worker.instance.engine_loop import EngineLoop
from shared.costs.model import CostModel
from shared.engine.driver import StepStats
from shared.engine.engine import Engine
from shared.engine.memory.slab import choose_merged_bytes
from shared.engine.plan import StepPlan, StepResult
from shared.engine.requests import Ended, Output
from shared.messages.cluster import ModelSpec
from shared.messages.requests import GenerationRequest
from shared.runtime.garbage import frozen_heap
from tideway.bench.records import RequestRecord
from tideway.bench.workload import PlannedRequest

SHAPES: dict[str, dict[str, Any]] = {
    "135m": {  # SmolLM-135M
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
    },
    "30m": {
        "vocab_size": 16384, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    },
    "llama-2-7b": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
    },
    "llama-3.1-8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 16384,
    },
}  # fmt: skip

SHARD_SIZE = "2GB"


class Testbed:
    """`close` removes the checkpoint."""

    __test__ = False

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        torch.set_num_threads(setup.num_threads)
        self._folder = tempfile.TemporaryDirectory(prefix="tideway-coserving-")
        self._spec = ModelSpec(MODEL, str(make_checkpoint(Path(self._folder.name), SHAPES[setup.model], setup.dtype)))
        self._prepared = Executor(setup.device, 1, 1 << 30, 1).prepare_model(self._spec)
        self.vocab_size = self._prepared.model.vocab_size
        block_bytes = self._prepared.model.kv_shape(self._prepared.block_size).block_bytes
        self._merged_bytes = choose_merged_bytes([block_bytes])
        self._blocks_per_merged = max(1, self._merged_bytes // block_bytes)
        self.cost_model = self._profile()

    def close(self) -> None:
        self._folder.cleanup()

    def executor(self, pool_tokens: int) -> tuple[Executor, PreparedModel]:
        """A new one, with room in host memory, that the weights are not yet added to."""
        num_blocks = num_merged(pool_tokens, self._prepared.block_size, self._blocks_per_merged)
        executor = Executor(
            self.setup.device,
            num_blocks,
            self._merged_bytes,
            self.setup.num_rows,
            num_host_merged=self.setup.num_host_merged(num_blocks),
        )
        return executor, self._prepared

    def build(self, system: System, pool_tokens: int, objectives: Objectives) -> tuple[Engine, Executor]:
        """A fresh engine and executor, and the model on both."""
        executor, prepared = self.executor(pool_tokens)
        shape = executor.add_model(prepared)
        num_blocks = num_merged(pool_tokens, shape.block_size, shape.blocks_per_merged)
        engine = self.setup.engine(system, shape, self.cost_model, num_blocks, objectives)
        executor.set_layers_per_safepoint(MODEL, self.cost_model.layers_per_safepoint)
        return engine, executor

    def machine(self) -> dict[str, Any]:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        return {**machine(), "gpu": gpu, "torch": str(torch.__version__)}

    def _profile(self) -> CostModel:
        setup = self.setup
        executor, prepared = self.executor(setup.pool_tokens)
        shape = executor.add_model(prepared)
        model = profiled_model(self._spec, shape, executor.device)
        num_blocks = num_merged(setup.pool_tokens, shape.block_size, shape.blocks_per_merged)
        blocks = list(range(num_blocks * shape.blocks_per_merged))
        extent = dataclasses.replace(FULL, max_step_s=1.0)
        if setup.device == "cpu":
            extent = dataclasses.replace(BRIEF, chunks=(16, 64, 256, 512), max_step_s=1.0)
        extent = dataclasses.replace(extent, time_s=setup.profile_s)
        try:
            return profile(executor, model, blocks, setup.max_step_tokens, extent).cost_model
        finally:
            executor.close()


def make_checkpoint(folder: Path, shape: dict[str, int], dtype: str = "bfloat16", device: str = "cpu") -> Path:
    """A Llama with random weights; no tokenizer, as prompts are token ids. The weights are made on the device, and pass
    through the host's memory by `SHARD_SIZE`."""
    config = LlamaConfig(**shape, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
        model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
        del model
    finally:
        torch.set_default_dtype(torch.float32)
    gc.collect()
    return folder


class ObservedExecutor:
    """An executor, and when each step was on it. `launch` and `collect` are called in the loop's thread alone."""

    def __init__(self, inner: Executor, now: Callable[[], float], steps: list[Step]) -> None:
        """`steps` is what those that were on it are added to."""
        self._inner = inner
        self._now = now
        self._running: deque[Step] = deque()
        self._steps = steps

    def launch(self, plan: StepPlan) -> None:
        now = self._now()
        self._running.append(Step.of(plan, now, now, False))
        self._inner.launch(plan)

    def collect(self) -> StepResult:
        result = self._inner.collect()
        step = self._running.popleft()
        step.start_s = max(step.start_s, self._steps[-1].end_s if self._steps else 0.0)
        step.end_s = self._now()
        step.is_suspended = result.suspended_share >= 0
        self._steps.append(step)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Run:
    """In real time. Threads: the engine loop's, which also notes outputs and steps, and the feeder (the caller), which
    submits each request at its planned time and keeps offline requests held."""

    def __init__(
        self,
        testbed: Testbed,
        system: System,
        objectives: Objectives,
        *,
        pool_tokens: int = 0,
        num_held: int = 0,
    ) -> None:
        """Arguments as of `VirtualRun`."""
        setup = testbed.setup
        engine, self._executor = testbed.build(system, pool_tokens or setup.pool_tokens, objectives)
        self._origin_s = time.perf_counter()
        self._clients = Clients(
            setup,
            system,
            objectives,
            engine,
            testbed.vocab_size,
            num_held,
            self.now,
            lambda call: self._loop.apply(call),
        )
        self._loop = EngineLoop(
            engine,
            ObservedExecutor(self._executor, self.now, self._clients.steps),
            time.perf_counter,
            self._on_effects,
            on_failure=lambda: self._ended.put(None),
            niceness=setup.niceness if setup.device == "cpu" else 0,
        )
        self._ended: SimpleQueue[RequestRecord | None] = SimpleQueue()

    def now(self) -> float:
        return time.perf_counter() - self._origin_s

    def _on_effects(self, effects: list[Output | Ended], stats: StepStats | None) -> None:
        if stats is not None:
            self._clients.count_step()
        for ended in self._clients.take_effects(effects, self.now()):
            self._ended.put(ended)

    def run(
        self,
        online: Sequence[PlannedRequest],
        offline: Sequence[PlannedRequest],
        duration_s: float,
        *,
        grace_s: float = 20.0,
    ) -> RunResult:
        """Runs like `VirtualRun`."""
        requests = deque(self._clients.expect(online, offline))
        with frozen_heap():
            self._origin_s = time.perf_counter()
            try:
                self._clients.begin()
                self._loop.start()
                while not self._clients.is_over(duration_s, grace_s):
                    self._feed(requests)
                end_s = self.now()
            finally:
                self._loop.stop(60.0)
                self._executor.close()
        if self._loop.failure:
            raise RunFailed(self._loop.failure)
        return self._clients.result(duration_s, end_s)

    def _feed(self, requests: deque[tuple[PlannedRequest, GenerationRequest]]) -> None:
        """What is due; then waits until something is, or a request has ended."""
        clients = self._clients
        while requests and requests[0][0].at_s <= self.now():
            clients.submit_online(*requests.popleft())
        if self.now() >= clients.next_sample_s:
            with self._loop.locked():
                clients.sample(self.now())
        due_s = min([clients.next_sample_s, *(planned.at_s for planned, _ in islice(requests, 1))])
        try:
            ended = self._ended.get(timeout=max(0.0, due_s - self.now()))
        except Empty:
            return
        if ended is None:
            raise RunFailed(self._loop.failure)
        clients.take_ended(ended)
