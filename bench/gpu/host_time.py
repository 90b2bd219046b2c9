"""What the host does for a decode step whose graphs do nothing: from the plan to the last call.

    python -m bench.gpu.host_time [--rows 1 8 64 256] [--context 1024] [--steps 400] [--shape tiny] [--output bench/results]

The executor, its rows, its graphs and FlashInfer's back end are those of CUDA, on the CPU with one thread, but for three
things: a captured graph is recorded once and its replay does nothing; FlashInfer is the tests' stand-in, and the plan of a
captured wrapper copies its arguments as FlashInfer's does, but computes no schedule; and nothing is copied to and from a
device, as both have the same memory. So it is the time of this code and of the few operators of torch between, not of
CUDA's calls, of which bench.gpu.roofline has the number. Each step computes one token of every row, greedily; rows come to
the end of a block one after the other, and are given another.

All times are medians. Those of a launch are by the clock and of the thread's processor time, which other work on the
machine does not lengthen; those of a part, of other steps, are without the parts that it calls. "decoded" is the plan from
its bytes, as ranks are told of it; a lone executor is handed the plan itself, so it is not in the sum. A target that is
missed is said, and is no failure: the exit status is 0.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch

from bench.coserving.testbed import SHAPES, make_checkpoint
from bench.reporting import Target, judged, machine, table, write
from bench.steps import Parts
from services.worker.attention.facts import TORCH_CUDA
from services.worker.attention.flashinfer_backend import FlashInferBackend
from services.worker.attention.torch_backend import TorchBackend
from services.worker.executor import executor, preparing
from shared.engine.memory.slab import choose_merged_bytes
from shared.engine.plan import NewSequence, StepPlan
from shared.messages.cluster import ModelSpec
from shared.messages.requests import SamplingParams, pack_tokens
from shared.models.checkpoint import describe
from tests.worker import fake_flashinfer

MODEL = "m"
ROWS = (1, 8, 64, 256)
MOST_MS = 1.0
"""Most milliseconds that a launch of `ROWS[-1]` rows is to take."""
HEAD_DIM = 64
"""Head size for which FlashInfer has kernels."""
WARM_UP_STEPS = 20
REST = "launch"
PARTS = ("rows", "layout", "padding", "values", "packing", "attention's plan", "sampling", REST)


class Recorded:
    def replay(self) -> None:
        pass


def record(function: Callable[[], Any], /) -> tuple[Any, Recorded]:
    return function(), Recorded()


class Wrapper(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper):
    """Wrapper of a captured size, whose first plan was that of the capture."""

    is_planned = False

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, *given: Any, **named: Any
    ) -> None:
        if not (self.is_fixed and self.is_planned):
            self.is_planned = True
            super().plan(indptr, indices, last_page_len, *given, **named)
            return
        starts, pages, last = self.buffers
        starts.copy_(indptr)
        last.copy_(last_page_len)
        pages[: len(indices)].copy_(indices)


class Kernels:
    """FlashInfer's kernels."""

    BatchDecodeWithPagedKVCacheWrapper = Wrapper

    def __getattr__(self, name: str) -> Any:
        return getattr(fake_flashinfer, name)


class Decodes:
    """Sequences of one model, a row each, that decode."""

    def __init__(self, path: Path, num_rows: int, context: int, num_steps: int) -> None:
        device, spec = torch.device("cpu"), ModelSpec(MODEL, str(path))
        shape, block_size = describe(path), TORCH_CUDA.block_sizes[0]
        block_bytes = shape.kv_geometry(shape.dtype).block_bytes(block_size)
        pages = -(-(context + num_steps) // block_size) + 1
        merged_bytes = choose_merged_bytes([block_bytes])
        num_merged = -(-num_rows * pages // (merged_bytes // block_bytes)) + 1
        self.attention = FlashInferBackend(device, TorchBackend(device), Kernels())
        self.attention.facts = msgspec.structs.replace(self.attention.facts, block_sizes=(block_size,))
        with mock.patch.object(preparing, "choose_backends", lambda *_, **__: [self.attention]):
            self.executor = executor.Executor(device, num_merged, merged_bytes, num_rows, capture=record)
            prepared = self.executor.prepare_model(spec)
        loaded = self.executor.add_model(prepared)
        assert prepared.graphs is not None
        # Zeroing is the device's work.
        self.executor.claim_blocks(MODEL, list(range(num_merged * loaded.blocks_per_merged)))
        self.graphs = prepared.graphs
        self._block_size = block_size
        self._free = itertools.count()
        # so that the rows' blocks end one after the other
        self._starts = [context - 1 - row * block_size // num_rows for row in range(num_rows)]
        self._num_blocks = [-(-(start + 1) // block_size) for start in self._starts]
        self._step_ids = itertools.count(1)
        self._new = [
            NewSequence(row, pack_tokens([3] * (start + 1)), start, SamplingParams(max_tokens=1 << 30, temperature=0.0),
                        [next(self._free) for _ in range(num_blocks)])
            for row, (start, num_blocks) in enumerate(zip(self._starts, self._num_blocks, strict=True))
        ]  # fmt: skip

    def plan(self) -> StepPlan:
        """The next step's; the first brings the sequences."""
        starts, rows = self._starts, list(range(len(self._starts)))
        new_blocks = []
        for row, start in enumerate(starts):
            if start == self._num_blocks[row] * self._block_size:
                self._num_blocks[row] += 1
                new_blocks.append((row, [next(self._free)]))
        new, self._new = self._new, []
        self._starts = [start + 1 for start in starts]
        return StepPlan(
            step_id=next(self._step_ids), model=MODEL, rows=rows, starts=starts, counts=[1] * len(rows),
            samples=[True] * len(rows), new_sequences=new, new_blocks=new_blocks, num_decodes=(len(rows), 0),
        )  # fmt: skip

    def step(self) -> tuple[float, float, float]:
        """Seconds of the launch, by the clock and of the processor; of decoding the plan."""
        packed = msgspec.msgpack.encode(self.plan())
        decoded_s = -time.perf_counter()
        plan = msgspec.msgpack.decode(packed, type=StepPlan)
        decoded_s += time.perf_counter()
        started_s, started_cpu_s = time.perf_counter(), time.thread_time()
        self.executor.launch(plan)
        elapsed_s, cpu_s = time.perf_counter() - started_s, time.thread_time() - started_cpu_s
        result = self.executor.collect()
        if result.error or len(result.tokens) != len(plan.rows):
            raise RuntimeError(result.error or "a row has no token")
        return elapsed_s, cpu_s, decoded_s

    def watched(self) -> Parts:
        """From now on."""
        parts, rows = Parts(), self.executor._rows
        parts.watch(self.executor, "_launch", REST)
        parts.watch(self.executor, "_update_rows", "rows")
        for name in ("layout", "token_places"):
            parts.watch(rows, name, "layout")
        parts.watch(self.graphs, "_padded", "padding")
        parts.watch(self.graphs, "_values", "values")
        for graph in self.graphs._graphs.values():
            parts.watch(graph.inputs, "fill", "packing")
        parts.watch(self.attention, "begin_replay", "attention's plan")
        parts.watch(self.executor, "_sample", "sampling")
        return parts


def measure(path: Path, num_rows: int, context: int, num_steps: int) -> dict[str, Any]:
    decodes = Decodes(path, num_rows, context, 2 * (num_steps + WARM_UP_STEPS))
    try:
        for _ in range(WARM_UP_STEPS):
            decodes.step()
        times = [decodes.step() for _ in range(num_steps)]
        parts = decodes.watched()
        for _ in range(WARM_UP_STEPS):
            decodes.step()
        parts.is_on = True
        by_step = []
        for _ in range(num_steps):
            parts.us.clear()
            decodes.step()
            by_step.append(dict(parts.us))
    finally:
        decodes.executor.close()
    launch_s, processor_s, decoded_s = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "rows": num_rows, "context": context, "launch_ms": 1e3 * launch_s, "processor_ms": 1e3 * processor_s,
        "decoded_us": 1e6 * decoded_s, "parts_us": {part: statistics.median(us[part] for us in by_step) for part in PARTS},
    }  # fmt: skip


def page(rows: list[dict[str, Any]]) -> list[str]:
    header = [
        "rows",
        "tokens in each cache",
        "launch ms",
        "processor ms",
        "decoded us",
        *(f"{part} us" for part in PARTS),
    ]
    return table(header, [
        [row["rows"], f"{row['context']:,}", f"{row['launch_ms']:.3f}", f"{row['processor_ms']:.3f}",
         f"{row['decoded_us']:.0f}", *(f"{row['parts_us'][part]:.0f}" for part in PARTS)]
        for row in rows
    ])  # fmt: skip


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.host_time")
    parser.add_argument("--rows", type=positive, nargs="+", default=ROWS)
    parser.add_argument("--context", type=positive, nargs="+", default=[1024], help="tokens in the cache of each row")
    parser.add_argument("--steps", type=positive, default=400)
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="with heads that FlashInfer takes")
    parser.add_argument("--output", type=Path, help="folder for JSON and Markdown")
    options = parser.parse_args()
    torch.set_num_threads(1)
    longest = max(options.context) + 2 * (options.steps + WARM_UP_STEPS) + 1
    shape = SHAPES[options.shape] | {"head_dim": HEAD_DIM, "max_position_embeddings": longest}
    with tempfile.TemporaryDirectory(prefix="tideway-host-time-") as folder:
        path = make_checkpoint(Path(folder), shape)
        rows = [measure(path, count, context, options.steps) for context in options.context for count in options.rows]
    targets = [
        Target(
            name=f"launch of {row['rows']} rows of {row['context']:,}",
            value=row["launch_ms"],
            limit=MOST_MS,
            unit=" ms",
        )
        for row in rows
    ]
    text = "\n".join(["# The host's part of a decode step", "", *page(rows), "", *map(str, targets), ""])
    print(text)
    if options.output is not None:
        document = {"machine": machine(), "measured": rows, "targets": judged(targets)}
        print(write(options.output, f"host-time-{time.strftime('%Y-%m-%d')}", document, text))


if __name__ == "__main__":
    main()
