"""What parts that compute have in common: where their rows go, and an executor that is handed plans as an engine hands
them, two in flight on CUDA."""

from __future__ import annotations

import json
import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.coserving.testbed import SHAPES, make_checkpoint
from bench.devices import kv_block
from services.worker.attention.interface import AttentionBackend, BatchLayout, Heads
from services.worker.executor.executor import Executor
from services.worker.models.ops import choose_ops
from shared.engine.memory.slab import choose_merged_bytes
from shared.engine.plan import ModelShape, NewSequence, StepPlan, StepResult
from shared.messages.cluster import ModelSpec
from shared.messages.requests import SamplingParams, pack_tokens

MODEL = "m"
MAX_WHY = 300
"""Characters."""


class LeftOut(Exception):
    """This machine cannot show it."""


class Warnings(logging.Handler):
    """What the services warn of: why something was not chosen."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        logging.getLogger("services").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if text not in self.said:
            self.said.append(text)


@dataclass(frozen=True)
class Setup:
    device: torch.device
    scratch: Path
    rows: Path
    is_quick: bool
    ends_s: float
    """Time at which its limit will end this part, of `time.monotonic`."""
    warnings: Warnings = field(default_factory=Warnings)

    def emit(self, **row: Any) -> None:
        """A row of this part's table, at once on disk."""
        print(json.dumps(row), flush=True)
        with self.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if "why" in row:
            self.warnings.said.clear()

    def is_measured(self, **fields: Any) -> bool:
        """Whether a try that was cut has emitted a row with these."""
        return any(fields.items() <= row.items() for row in self.rows_of(self.rows.stem))

    def rows_of(self, part: str) -> list[dict[str, Any]]:
        file = self.rows.with_stem(part)
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def why(self) -> str:
        """What has been warned of since the last row that told why."""
        return "; ".join(self.warnings.said)[:MAX_WHY]

    @property
    def left_s(self) -> float:
        return self.ends_s - time.monotonic()

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def checkpoint(self, name: str, shape: str, dtype: str = "bfloat16", **changes: Any) -> Path:
        """Random weights of a shape of bench/coserving/testbed.py, with some of its sizes changed."""
        path = self.scratch / name
        if not path.exists():
            make_checkpoint(path, SHAPES[shape] | changes, dtype, device=self.device.type)
        return path

    def free(self) -> None:
        """Memory of the device that tensors which are gone had."""
        if self.on_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def seconds(self, function: Callable[[], object], rounds: int, warm_up: int = 3) -> float:
        """Median of one call; on CUDA of so many launched together."""
        for _ in range(warm_up):
            function()
        if not self.on_cuda:
            return statistics.median(self._timed(function) for _ in range(rounds))
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(rounds):
            function()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / rounds

    def _timed(self, function: Callable[[], object]) -> float:
        started_s = time.perf_counter()
        function()
        return time.perf_counter() - started_s


def make_executor(
    device: torch.device,
    checkpoints: Sequence[Path],
    pool_tokens: int,
    num_rows: int,
    *,
    host: bool = False,
    deterministic: bool = False,
) -> Executor:
    """With room for so many tokens of any of the models. `host`: and for as many in the host's memory."""
    sizes = [kv_block(checkpoint, device, deterministic=deterministic) for checkpoint in checkpoints]
    merged_bytes = choose_merged_bytes([num_bytes for num_bytes, _ in sizes])
    num_merged = max(
        -(-pool_tokens // num_tokens) // max(1, merged_bytes // num_bytes) + 1 for num_bytes, num_tokens in sizes
    )
    return Executor(
        device,
        num_merged,
        merged_bytes,
        num_rows,
        num_host_merged=num_merged if host else 0,
        deterministic=deterministic,
    )


class Runner:
    """A model on an executor, and sequences of it by hand."""

    def __init__(
        self, setup: Setup, executor: Executor, checkpoint: Path, *, name: str = MODEL, quantization: str = ""
    ) -> None:
        if setup.is_quick:
            torch.set_num_threads(1)
        started_s = time.perf_counter()
        self.setup, self.executor, self.name = setup, executor, name
        self._prepared = executor.prepare_model(ModelSpec(name, str(checkpoint), quantization=quantization))
        self.weight_bytes = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
        """Bytes of weights that a step reads: a tied embedding once, as the head."""
        self.shape: ModelShape = executor.add_model(self._prepared)
        self.load_s = time.perf_counter() - started_s
        self._num_blocks = len(executor.block_rows(name, on_host=False))
        self._free = iter(range(self._num_blocks))
        self._step_id = 0

    @classmethod
    def of(cls, setup: Setup, pool_tokens: int, num_rows: int, *, host: bool = False, quantization: str = "") -> Runner:
        """Runner of the model that the part `checkpoint` has made, on an executor of its own."""
        model = setup.scratch / "model"
        executor = make_executor(setup.device, [model], pool_tokens, num_rows, host=host)
        return cls(setup, executor, model, quantization=quantization)

    def choices(self) -> dict[str, Any]:
        """What was chosen for it, as fallbacks.py reads it."""
        model, graphs, on_cuda = self._prepared.model, self._prepared.graphs, self.setup.on_cuda
        return {
            "attention": self._prepared.backend.facts.name,
            **chosen(self._prepared.backend, model.heads, model.dtype, self.setup.device),
            "ops": type(choose_ops(self.setup.device, model.dtype, model.heads.dim)).__name__,
            **(
                {"graphs": self.num_graphs, "graph_sizes": 1 if graphs is None else len(graphs._sizes)}
                if on_cuda
                else {}
            ),
            "why": self.setup.why,
        }

    @property
    def num_graphs(self) -> int:
        return 0 if self._prepared.graphs is None else self._prepared.graphs.num_captured

    def remove(self) -> None:
        """The model's weights and graphs, of which this was the last user."""
        del self._prepared
        self.executor.remove_model(self.name)

    def close(self) -> None:
        self.executor.close()

    def sequence(self, row: int, num_prompt: int, num_more: int, **sampling: Any) -> NewSequence:
        """With blocks for what it will have."""
        tokens = [3 + (7 * row + i) % 250 for i in range(num_prompt)]
        num_blocks = -(-(num_prompt + num_more) // self.shape.block_size)
        params = SamplingParams(**{"max_tokens": 1 << 30, "temperature": 0.0} | sampling)
        return NewSequence(row, pack_tokens(tokens), num_prompt, params, [next(self._free) for _ in range(num_blocks)])

    def plan(
        self, rows: list[int], starts: list[int], counts: list[int], new: list[NewSequence], **fields: Any
    ) -> StepPlan:
        self._step_id += 1
        return StepPlan(
            step_id=self._step_id, model=self.name, rows=rows, starts=starts, counts=counts, samples=[True] * len(rows),
            new_sequences=new, new_blocks=[], **fields,
        )  # fmt: skip

    def run(self, plan: StepPlan) -> StepResult:
        result = self.executor.execute(plan)
        if result.error:
            raise RuntimeError(result.error)
        return result

    def run_s(self, plan: StepPlan) -> float:
        started_s = time.perf_counter()
        self.run(plan)
        return time.perf_counter() - started_s

    def begin_anew(self) -> None:
        """Sequences from before are over."""
        self._free = iter(range(self._num_blocks))

    def fill(self, rows: list[int], context: int, num_more: int, **sampling: Any) -> None:
        """Sequences with `context` tokens in the cache; those from before are over."""
        self.begin_anew()
        most = 512 if self.setup.is_quick else 8192
        new = [self.sequence(row, context, num_more, **sampling) for row in rows]
        for begin in range(0, len(rows), max(1, most // context)):
            part = rows[begin : begin + max(1, most // context)]
            own = new[begin : begin + len(part)]
            self.run(self.plan(part, [0] * len(part), [context] * len(part), own))

    def decode_s(
        self, rows: list[int], context: int, num_steps: int, before_launch: Callable[[], None] = lambda: None
    ) -> float:
        """Seconds of one of so many steps, launched and collected as an engine does."""
        started_s = time.perf_counter()
        for _ in self.decodes(rows, context, num_steps, before_launch):
            pass
        return (time.perf_counter() - started_s) / num_steps

    def decodes(
        self, rows: list[int], context: int, num_steps: int, before_launch: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Yields whenever a step has been collected."""
        in_flight = 2 if self.setup.on_cuda else 1
        for step in range(num_steps):
            if self.executor.num_in_flight == in_flight:
                self._collect()
                yield
            before_launch()
            self.executor.launch(self.plan(rows, [context + step] * len(rows), [1] * len(rows), []))
        while self.executor.num_in_flight:
            self._collect()
            yield

    def _collect(self) -> None:
        result = self.executor.collect()
        if result.error:
            raise RuntimeError(result.error)


def chosen(backend: AttentionBackend, heads: Heads, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """The module of services/worker/attention that computes decodes, and the one that computes prompts: whose metadata the
    back end gives such a step. Compiles what is missing."""

    def module(num_tokens: int) -> str:
        layout = BatchLayout(
            np.zeros(1, np.int64), np.full(1, num_tokens, np.int64), np.zeros((1, 1), np.int32),
            backend.facts.block_sizes[0], dtype, device, (), heads,
        )  # fmt: skip
        return type(backend.prepare(layout)).__module__.rpartition(".")[2].removesuffix("_backend")

    return {"decodes": module(1), "prompts": module(16)}


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median_ms": 1e3 * statistics.median(ordered),
        "p99_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "longest_ms": 1e3 * ordered[-1],
    }


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """Started; what it raised, once it has ended."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised
