"""The parts of `bench.gpu` that compute: each is called in a process of its own, and emits rows as it finds them.

    python -m bench.gpu.parts NAME --device cuda --scratch FOLDER --rows FILE [--quick]

Times of steps are of an executor that is handed plans as an engine hands them, two in flight on CUDA.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.worker.attention.choice import choose_backends
from services.worker.attention.interface import BatchLayout, Heads
from services.worker.executor import Executor
from services.worker.fp8_linear import Fp8Linear
from services.worker.linear import Linear
from services.worker.ops import choose_ops
from services.worker.sampling import SamplingRows
from shared.checkpoint import describe
from shared.engine.memory.slab import choose_merged_bytes
from shared.engine.plan import CopyKind, KvCopy, ModelShape, NewSequence, StepPlan, StepResult
from shared.messages.cluster import ModelSpec
from shared.messages.requests import SamplingParams, pack_tokens

SHAPE = "llama-3.1-8b"
QUICK_SHAPE = "tiny"
MODEL = "m"


@dataclass(frozen=True)
class Setup:
    device: torch.device
    scratch: Path
    rows: Path
    is_quick: bool

    def emit(self, **row: Any) -> None:
        """A row of this part's table, at once on disk."""
        print(json.dumps(row), flush=True)
        with self.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def shape(self) -> str:
        return QUICK_SHAPE if self.is_quick else SHAPE

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
        return begin.elapsed_time(end) / 1e3 / rounds

    def _timed(self, function: Callable[[], object]) -> float:
        started_s = time.perf_counter()
        function()
        return time.perf_counter() - started_s


def rates(setup: Setup) -> None:
    """What the machine can do at most: copies and matrix products, against which steps are held."""
    device, size = setup.device, (1 << 24 if setup.is_quick else 4 << 30)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy_s = setup.seconds(functools.partial(torch.empty_like(source).copy_, source), 10)
    setup.emit(what="copy on the device, bytes read and written", value=2 * size / copy_s / 1e9, unit="GB/s")
    read_s = setup.seconds(lambda: source.view(torch.int64).sum(), 10)
    setup.emit(what="sum of all words, bytes read", value=size / read_s / 1e9, unit="GB/s")
    for n in (256,) if setup.is_quick else (4096, 8192):
        a, b = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
        product_s = setup.seconds(functools.partial(torch.matmul, a, b), 10)
        setup.emit(what=f"product of {n} x {n} in bfloat16", value=2 * n**3 / product_s / 1e12, unit="TFLOP/s")
    if setup.on_cuda:
        host = torch.empty(size // 4, dtype=torch.uint8, pin_memory=True)
        for way, function in (
            ("to the device", lambda: source[: len(host)].copy_(host, non_blocking=True)),
            ("to the host", lambda: host.copy_(source[: len(host)], non_blocking=True)),
        ):
            setup.emit(what=f"pinned copy {way}", value=len(host) / setup.seconds(function, 5) / 1e9, unit="GB/s")


def machine(setup: Setup) -> None:
    values: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    if setup.on_cuda:
        properties = torch.cuda.get_device_properties(setup.device)
        values |= {
            "device": properties.name, "processors": properties.multi_processor_count, "cuda": torch.version.cuda,
            "capability": f"{properties.major}.{properties.minor}", "GiB": round(properties.total_memory / 2**30, 1),
        }  # fmt: skip
    for name in ("flashinfer", "flash_attn", "flash_attn.cute", "triton", "ucxx", "transformers"):
        try:
            module = __import__(name)
            values[name] = getattr(module, "__version__", "there")
        except Exception as error:
            values[name] = f"no ({type(error).__name__})"
    for name, value in values.items():
        setup.emit(what=name, value=value)


def kernels(setup: Setup) -> None:
    """Compiles what models will use, in the order of need, and says how long each took."""
    device, dtype = setup.device, torch.bfloat16

    def timed(what: str, function: Callable[[], str]) -> None:
        started_s = time.perf_counter()
        found = function()
        setup.emit(what=what, chosen=found, seconds=round(time.perf_counter() - started_s, 1))

    timed("norms, rotations, gates", lambda: type(choose_ops(device, dtype, 128)).__name__)
    for heads in (Heads(32, 8, 128), Heads(32, 32, 128), Heads(4, 2, 64)):
        layout = BatchLayout(*_one_row(), 128, dtype, device, (), heads)  # type: ignore[arg-type]

        def prepared(layout: BatchLayout = layout) -> str:
            backend = choose_backends(device)[0]
            metadata = backend.prepare(layout)
            return f"{backend.facts.name}: {type(metadata).__name__.strip('_')}"

        timed(f"decode of {heads.queries} heads over {heads.keys} of {heads.dim}", prepared)


def _one_row() -> tuple[Any, Any, Any]:
    import numpy as np

    return np.zeros(1, np.int64), np.ones(1, np.int64), np.zeros((1, 1), np.int32)


def checkpoint(setup: Setup) -> None:
    """Random weights of the shape, for the other parts."""
    from bench.coserving.testbed import SHAPES, make_checkpoint

    started_s = time.perf_counter()
    path = make_checkpoint(setup.scratch / "model", SHAPES[setup.shape], device=setup.device.type)
    num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    setup.emit(shape=setup.shape, GB=num_bytes / 1e9, seconds=round(time.perf_counter() - started_s, 1))


class Runner:
    """An executor with one model, and sequences of it by hand."""

    def __init__(
        self, setup: Setup, pool_tokens: int, num_rows: int, *, quantization: str = "", host: bool = False
    ) -> None:
        started_s = time.perf_counter()
        spec = ModelSpec(MODEL, str(setup.scratch / "model"), quantization=quantization)
        if setup.is_quick:
            torch.set_num_threads(1)
        self.setup = setup
        block_bytes, block_size = self._block(spec)
        merged_bytes = choose_merged_bytes([block_bytes])
        num_merged = -(-pool_tokens // block_size) // (merged_bytes // block_bytes) + 1
        self.executor = Executor(setup.device, num_merged, merged_bytes, num_rows,
                                 num_host_merged=num_merged if host else 0)  # fmt: skip
        prepared = self.executor.prepare_model(spec)
        self.model = prepared.model
        self.weight_bytes = _weight_bytes(setup.scratch / "model")
        self.num_graphs = 0 if prepared.graphs is None else prepared.graphs.num_captured
        self.attention = prepared.backend.facts.name
        self.shape: ModelShape = self.executor.add_model(prepared)
        self.load_s = time.perf_counter() - started_s
        self._num_blocks = num_merged * self.shape.blocks_per_merged
        self._free = iter(range(self._num_blocks))
        self._step_id = 0

    def _block(self, spec: ModelSpec) -> tuple[int, int]:
        """Bytes and tokens of a KV block."""
        shape = describe(Path(spec.source))
        facts = next(b.facts for b in choose_backends(self.setup.device) if b.facts.runs(shape.head_dim, shape.dtype))
        block_size = facts.block_sizes[0]
        return shape.kv_geometry(shape.dtype).block_bytes(block_size), block_size

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
            step_id=self._step_id, model=MODEL, rows=rows, starts=starts, counts=counts, samples=[True] * len(rows),
            new_sequences=new, new_blocks=[], **fields,
        )  # fmt: skip

    def run(self, plan: StepPlan) -> StepResult:
        result = self.executor.execute(plan)
        if result.error:
            raise RuntimeError(result.error)
        return result

    def fill(self, rows: list[int], context: int, num_more: int, **sampling: Any) -> None:
        """Sequences with `context` tokens in the cache; those from before are over."""
        self._free = iter(range(self._num_blocks))
        most = 512 if self.setup.is_quick else 8192
        new = [self.sequence(row, context, num_more, **sampling) for row in rows]
        for begin in range(0, len(rows), max(1, most // context)):
            part = rows[begin : begin + max(1, most // context)]
            chosen = new[begin : begin + len(part)]
            self.run(self.plan(part, [0] * len(part), [context] * len(part), chosen))

    def decode_s(self, rows: list[int], context: int, num_steps: int) -> float:
        """Of one of so many steps, launched and collected as an engine does."""
        in_flight = 2 if self.setup.on_cuda else 1

        def plans() -> Iterator[StepPlan]:
            for step in range(num_steps):
                yield self.plan(rows, [context + step] * len(rows), [1] * len(rows), [])

        def collect() -> None:
            result = self.executor.collect()
            if result.error:
                raise RuntimeError(result.error)

        started_s = time.perf_counter()
        for plan in plans():
            if self.executor.num_in_flight == in_flight:
                collect()
            self.executor.launch(plan)
        while self.executor.num_in_flight:
            collect()
        return (time.perf_counter() - started_s) / num_steps


def _weight_bytes(path: Path) -> int:
    """That a step reads: a tied embedding once, as the head."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def decode(setup: Setup, quantization: str = "") -> None:
    """Step times at several batch sizes over those of reading weights and KV once at the measured rate of copies."""
    batches, context, steps = ([1, 4, 8], 64, 6) if setup.is_quick else ([1, 8, 64, 256], 1024, 60)
    runner = Runner(setup, max(batches) * (context + 3 * steps + 256), max(batches), quantization=quantization)
    shape = describe(setup.scratch / "model")
    kv_bytes = shape.kv_geometry(shape.dtype).block_bytes(1)
    rate = _rate(setup, "copy")
    setup.emit(
        weights_GB=runner.weight_bytes / 1e9, loaded_s=round(runner.load_s, 1), graphs=runner.num_graphs,
        attention=runner.attention, ops=type(choose_ops(setup.device, torch.bfloat16, shape.head_dim)).__name__,
    )  # fmt: skip
    kinds: list[tuple[str, dict[str, Any]]] = [("greedy", {})]
    if not quantization:
        kinds.append(("top_p 0.95", {"temperature": 0.8, "top_p": 0.95}))
    for batch in batches:
        rows = list(range(batch))
        for kind, sampling in kinds:
            if sampling and batch == batches[1]:
                continue
            runner.fill(rows, context, 3 * steps, **sampling)
            runner.decode_s(rows, context, steps // 2)
            step_s = runner.decode_s(rows, context + steps // 2, steps)
            weight_bytes = runner.weight_bytes * (0.5 if quantization == "fp8" else 1)
            num_bytes = weight_bytes + batch * (context + steps) * kv_bytes
            setup.emit(
                batch=batch, context=context, sampling=kind, step_ms=1e3 * step_s, tokens_per_s=batch / step_s,
                least_ms=1e3 * num_bytes / rate, share_of_roofline=num_bytes / rate / step_s,
            )  # fmt: skip
    if setup.on_cuda and not quantization:
        _profile(setup, runner, context + 2 * steps)
    runner.close()


def _profile(setup: Setup, runner: Runner, context: int) -> None:
    """Where the time of a step of one sequence goes: kernels by time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        runner.decode_s([0], context, 5)
    found = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)[:12]
    for event in found:
        setup.emit(kernel=event.key[:90], us_per_step=event.self_device_time_total / 5, calls_per_step=event.count / 5)


def decode_fp8(setup: Setup) -> None:
    decode(setup, "fp8")


def prefill(setup: Setup) -> None:
    """A prompt in one step, over the time of its matrix products and attention at the measured rate of products."""
    lengths = [128, 256] if setup.is_quick else [2048, 8192]
    rounds = 3 if setup.is_quick else 6
    runner = Runner(setup, 2 * len(lengths) * max(lengths), 8)
    shape = describe(setup.scratch / "model")
    config = json.loads((setup.scratch / "model/config.json").read_text())
    head = config["vocab_size"] * config["hidden_size"]
    num_weights = runner.weight_bytes / 2 - head  # the embedding is looked up; the head computes one token
    rate = _rate(setup, "product")
    for row, length in enumerate(lengths):
        new = runner.sequence(row, length, 1)
        plans = [runner.plan([row], [0], [length], [new] if i == 0 else []) for i in range(rounds + 2)]
        for plan in plans[:2]:
            runner.run(plan)
        started_s = time.perf_counter()
        for plan in plans[2:]:
            runner.run(plan)
        step_s = (time.perf_counter() - started_s) / rounds
        width = config["num_attention_heads"] * shape.head_dim
        operations = 2 * num_weights * length + 2 * head + 2 * shape.num_layers * width * length**2
        setup.emit(
            tokens=length, step_ms=1e3 * step_s, tokens_per_s=length / step_s, TFLOP_per_s=operations / step_s / 1e12,
            share_of_products=operations / rate / step_s, attention=runner.attention,
        )  # fmt: skip
    runner.close()


def safepoints(setup: Setup) -> None:
    """What safepoints cost a step (A B B A), and how long after an interrupt it has left the device."""
    length, pairs, reactions = (256, 4, 4) if setup.is_quick else (4096, 10, 12)
    runner = Runner(setup, 4 * length, 4)
    every = runner.executor._models[MODEL].layers_per_safepoint
    new = [runner.sequence(0, length, 1)]

    def step_s(is_interruptible: bool) -> float:
        nonlocal new
        plan = runner.plan([0], [0], [length], new, is_interruptible=is_interruptible)
        new = []
        started_s = time.perf_counter()
        runner.run(plan)
        return time.perf_counter() - started_s

    for kind in (False, True, True, False):
        step_s(kind)
    overheads, plain = [], []
    for _ in range(pairs):
        a, b, c, d = (step_s(kind) for kind in (False, True, True, False))
        overheads.append((b + c) / (a + d) - 1)
        plain += [a, d]
    whole_s = statistics.median(plain)
    interval_s = whole_s * every / runner.shape.num_layers
    setup.emit(
        what="overhead", tokens=length, step_ms=1e3 * whole_s, layers_per_safepoint=every,
        overhead_percent=100 * statistics.median(overheads),
    )  # fmt: skip
    found = []
    for number in range(reactions):
        plan = runner.plan([0], [0], [length], [], is_interruptible=True)
        times: list[float] = []

        def interrupt(
            plan: StepPlan = plan, times: list[float] = times, share: float = (number + 0.5) / reactions
        ) -> None:
            time.sleep(0.8 * whole_s * share)
            times.append(time.perf_counter())
            runner.executor.interrupt(plan.step_id)

        thread = threading.Thread(target=interrupt)
        thread.start()
        result = runner.run(plan)
        ended_s = time.perf_counter()
        thread.join()
        if result.suspended_share >= 0:
            found.append(ended_s - times[0])
            runner.run(runner.plan([0], [0], [1], [], discards=(plan.step_id,)))
    if found:
        setup.emit(
            what="reaction", suspended=len(found), of=reactions, median_ms=1e3 * statistics.median(found),
            longest_ms=1e3 * max(found), median_intervals=statistics.median(found) / interval_s,
        )  # fmt: skip
    runner.close()


def copies(setup: Setup) -> None:
    """Checkpoints of KV blocks to the host's memory and back, beside nothing else."""
    num_blocks = 8 if setup.is_quick else 128
    runner = Runner(setup, 2 * num_blocks * 128, 4, host=True)
    block_bytes = runner.executor.block_rows(MODEL, on_host=False).shape[1]
    num_blocks = min(num_blocks, len(runner.executor.block_rows(MODEL, on_host=True)))
    blocks = list(range(num_blocks))
    runner.executor.claim_blocks(MODEL, blocks)
    done = threading.Event()
    runner.executor.on_copy_finished(done.set)
    for kind in (CopyKind.CHECKPOINT, CopyKind.RESTORE):
        times = []
        for number in range(4):
            done.clear()
            started_s = time.perf_counter()
            runner.executor.start_copy(KvCopy(number, kind, MODEL, blocks, blocks))
            if not done.wait(60):
                raise RuntimeError("a copy did not end within 60 s")
            times.append(time.perf_counter() - started_s)
            ((_, is_ok),) = runner.executor.finished_copies()
            if not is_ok:
                raise RuntimeError(f"a {kind} failed")
        rate = num_blocks * block_bytes / statistics.median(times[1:]) / 1e9
        setup.emit(what=str(kind), blocks=num_blocks, block_MiB=block_bytes / 2**20, GB_per_s=rate)
    runner.close()


def products(setup: Setup) -> None:
    """Linear layers of the shape with 16-bit and with float8 weights."""
    shapes = [("gate and up", 28672, 4096), ("down", 4096, 14336)] if not setup.is_quick else [("small", 256, 128)]
    for name, outputs, inputs in shapes:
        weight = torch.randn(outputs, inputs, device=setup.device).to(torch.bfloat16)
        for kind, linear in (("bfloat16", Linear(weight.clone())), ("float8", Fp8Linear(weight))):
            for rows in (1, 64, 256, 4096) if not setup.is_quick else (1, 8):
                x = torch.randn(rows, inputs, device=setup.device).to(torch.bfloat16)
                with torch.inference_mode():
                    seconds = setup.seconds(functools.partial(linear, x), 20)
                setup.emit(layer=name, weights=kind, rows=rows, us=1e6 * seconds,
                           TFLOP_per_s=2 * rows * outputs * inputs / seconds / 1e12)  # fmt: skip


def sampling(setup: Setup) -> None:
    """Choosing tokens, by what is asked for."""
    import numpy as np

    vocab = 2000 if setup.is_quick else 128256
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0}, "drawn": {}, "top_k 50": {"top_k": 50}, "top_p 0.95": {"top_p": 0.95},
    }  # fmt: skip
    for count in (1, 8) if setup.is_quick else (1, 64, 256):
        logits = torch.randn(count, vocab, device=setup.device).to(torch.bfloat16)
        table = torch.zeros(count, 8, dtype=torch.int32, device=setup.device)
        numbers = np.arange(count)
        for kind, wish in kinds.items():
            rows = SamplingRows(count)
            for row in range(count):
                rows.set(row, SamplingParams(max_tokens=9, seed=row, **wish), 1)
            with torch.inference_mode():
                choose = functools.partial(rows.sample, logits, numbers, np.full(count, 3), table)
                seconds = setup.seconds(choose, 10)
            setup.emit(rows=count, kind=kind, us=1e6 * seconds)


def _rate(setup: Setup, what: str) -> float:
    """Bytes or operations per second that `rates` has measured in this run."""
    factor = {"copy": 1e9, "product": 1e12}[what]
    values = [
        row["value"] for row in map(json.loads, (setup.rows.parent / "rates.jsonl").read_text().splitlines())
        if row["what"].startswith(what)
    ]  # fmt: skip
    return factor * max(values)


PARTS: dict[str, Callable[[Setup], None]] = {
    function.__name__: function
    for function in (
        machine, rates, kernels, checkpoint, decode, decode_fp8, prefill, safepoints, copies, products, sampling,
    )
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.parts")
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--device", required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    PARTS[options.name](Setup(torch.device(options.device), options.scratch, options.rows, options.quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
