"""The parts of `bench.gpu` that compute: each is called in a process of its own, and emits rows as it finds them.

    python -m bench.gpu.parts NAME --device cuda --scratch FOLDER --limit-s SECONDS [--quick]

Times of steps are of an executor that is handed plans as an engine hands them, two in flight on CUDA.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu.between import cuda_ipc
from bench.gpu.equality import equality
from bench.gpu.order import QUICK_SHAPE, SHAPE
from bench.gpu.runner import LEFT_OUT_STATUS, said_by
from bench.gpu.sanitizer import sanitizer
from bench.gpu.shapes import shapes
from bench.gpu.stepping import MODEL, LeftOut, Runner, Setup, chosen
from services.worker.attention.choice import choose_backends
from services.worker.attention.interface import Heads
from services.worker.executor.sampling import SamplingRows
from services.worker.models.fp8_linear import Fp8Linear, scaled_product_of
from services.worker.models.linear import Linear
from services.worker.models.ops import choose_ops
from shared.engine.plan import CopyKind, KvCopy, StepPlan
from shared.messages.requests import SamplingParams
from shared.models.checkpoint import describe

HEADS = (Heads(32, 8, 128), Heads(32, 32, 128), Heads(32, 2, 128), Heads(4, 2, 64))
"""Heads of the 8B shape, Llama 2's, GLM-4's, and a small model's."""


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
    memory = shutil.disk_usage("/dev/shm") if Path("/dev/shm").exists() else None
    values |= {
        "GiB in /dev/shm": None if memory is None else round(memory.free / 2**30, 1),
        **{tool: shutil.which(tool) or "no" for tool in ("nvcc", "ninja", "compute-sanitizer", "ncu")},
        "nvidia-smi": said_by(["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit",
                               "--format=csv,noheader"]) or "no",
        "FLASHINFER_DISABLE_JIT": os.environ.get("FLASHINFER_DISABLE_JIT", "not set"),
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
    """Loads what models will use, or compiles it, in the order of need; says what was chosen and how long each took."""
    device, dtype = setup.device, torch.bfloat16

    def timed(what: str, function: Callable[[], dict[str, str]]) -> None:
        started_s = time.perf_counter()
        found = function()
        setup.emit(what=what, **found, seconds=round(time.perf_counter() - started_s, 1), why=setup.why)

    timed("norms, rotations, gates", lambda: {"ops": type(choose_ops(device, dtype, 128)).__name__})
    for heads in HEADS:
        backend = next(b for b in choose_backends(device) if b.facts.runs(heads.dim, "bfloat16"))
        what = f"{heads.queries} heads over {heads.keys} of {heads.dim}"
        timed(what, functools.partial(chosen, backend, heads, dtype, device))

    def float8() -> dict[str, str]:
        product = scaled_product_of(device, dtype)
        return {"float8": "widened" if product is None else product.__name__.strip("_")}

    timed("products of float8", float8)


def checkpoint(setup: Setup) -> None:
    """Random weights of the shape, for the other parts."""
    started_s = time.perf_counter()
    path = setup.checkpoint("model", QUICK_SHAPE if setup.is_quick else SHAPE)
    num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    setup.emit(
        shape=QUICK_SHAPE if setup.is_quick else SHAPE, GB=num_bytes / 1e9,
        seconds=round(time.perf_counter() - started_s, 1),
    )  # fmt: skip


def decode(setup: Setup, quantization: str = "") -> None:
    """Step times at several batch sizes over those of reading weights and KV once at the measured rate of copies."""
    batches, context, steps = ([1, 4, 8], 64, 6) if setup.is_quick else ([1, 8, 64, 256], 1024, 60)
    pool_tokens = max(batches) * (context + 3 * steps + 256)
    runner = Runner.of(setup, pool_tokens, max(batches), quantization=quantization)
    shape = describe(setup.scratch / "model")
    kv_bytes = shape.kv_geometry(shape.dtype).block_bytes(1)
    rate = _rate(setup, "copy")
    loaded = {"weights_GB": runner.weight_bytes / 1e9, "loaded_s": round(runner.load_s, 1)}
    if not setup.is_measured(**runner.choices()):
        setup.emit(**loaded, **runner.choices())
    kinds: list[tuple[str, dict[str, Any]]] = [("greedy", {})]
    if not quantization:
        kinds.append(("top_p 0.95", {"temperature": 0.8, "top_p": 0.95}))
    for kind, sampling in kinds:
        for batch in batches:
            if (sampling and batch == batches[1]) or setup.is_measured(batch=batch, sampling=kind):
                continue
            rows = list(range(batch))
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
    """Profiles a step of one sequence: kernels by time."""
    runner.fill([0], context, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        runner.decode_s([0], context, 5)
    found = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)[:12]
    for event in found:
        setup.emit(kernel=event.key[:90], us_per_step=event.self_device_time_total / 5, calls_per_step=event.count / 5)


def decode_fp8(setup: Setup) -> None:
    decode(setup, "fp8")


def prefill(setup: Setup) -> None:
    """A prompt in one step, over the time of its products and attention at the measured rate of products; and what
    its first use costs, as kernels may be planned and memory be found for each new shape."""
    lengths = [128, 256] if setup.is_quick else [2048, 8192]
    rounds = 3 if setup.is_quick else 6
    runner = Runner.of(setup, 2 * len(lengths) * max(lengths), 8)
    shape = describe(setup.scratch / "model")
    config = json.loads((setup.scratch / "model/config.json").read_text())
    head = config["vocab_size"] * config["hidden_size"]
    num_weights = runner.weight_bytes / 2 - head  # the embedding is looked up; the head computes one token
    rate = _rate(setup, "product")
    for row, length in enumerate(lengths):
        if setup.is_measured(tokens=length):
            continue
        new = runner.sequence(row, length, 1)
        first_s = runner.run_s(runner.plan([row], [0], [length], [new]))
        runner.run(runner.plan([row], [0], [length], []))
        step_s = statistics.median(runner.run_s(runner.plan([row], [0], [length], [])) for _ in range(rounds))
        width = config["num_attention_heads"] * shape.head_dim
        operations = 2 * num_weights * length + 2 * head + 2 * shape.num_layers * width * length**2
        setup.emit(
            tokens=length, first_ms=1e3 * first_s, step_ms=1e3 * step_s, tokens_per_s=length / step_s,
            TFLOP_per_s=operations / step_s / 1e12, share_of_products=operations / rate / step_s,
        )  # fmt: skip
    if not setup.is_measured(**runner.choices()):
        setup.emit(**runner.choices())
    runner.close()


def safepoints(setup: Setup) -> None:
    """What safepoints cost a step (A B B A), and how long after an interrupt it has left the device."""
    length, pairs, reactions = (256, 4, 4) if setup.is_quick else (4096, 10, 12)
    runner = Runner.of(setup, 4 * length, 4)
    every = runner.executor._models[MODEL].layers_per_safepoint
    new = [runner.sequence(0, length, 1)]

    def step_s(is_interruptible: bool) -> float:
        nonlocal new
        plan = runner.plan([0], [0], [length], new, is_interruptible=is_interruptible)
        new = []
        return runner.run_s(plan)

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
    runner = Runner.of(setup, 2 * num_blocks * 128, 4, host=True)
    copying = Copying(runner, num_blocks)
    for kind in (CopyKind.CHECKPOINT, CopyKind.RESTORE):
        times = []
        for _ in range(4):
            started_s = time.perf_counter()
            copying.start(kind)
            copying.finish()
            times.append(time.perf_counter() - started_s)
        rate = copying.num_bytes / statistics.median(times[1:]) / 1e9
        block_bytes = copying.num_bytes / len(copying.blocks)
        setup.emit(what=str(kind), blocks=len(copying.blocks), block_MiB=block_bytes / 2**20, GB_per_s=rate)
    runner.close()


class Copying:
    """Copies of the same blocks, one after the other. Raises `RuntimeError` where one fails."""

    TIMEOUT_S = 60.0

    def __init__(self, runner: Runner, num_blocks: int) -> None:
        """Copies the pool's last blocks, which the first sequences do not have."""
        executor = self._executor = runner.executor
        block_rows, host_rows = (executor.block_rows(MODEL, on_host=on_host) for on_host in (False, True))
        num_blocks = min(num_blocks, len(host_rows))
        self.blocks = list(range(len(block_rows) - num_blocks, len(block_rows)))
        self._host_blocks = list(range(num_blocks))
        assert isinstance(block_rows, torch.Tensor)
        self.num_bytes = num_blocks * block_rows.shape[1]
        self.num_done = self._num_started = 0
        self._done = threading.Event()
        executor.claim_blocks(MODEL, self.blocks)
        executor.on_copy_finished(self._done.set)

    def start(self, kind: CopyKind = CopyKind.CHECKPOINT) -> None:
        self._done.clear()
        self._num_started += 1
        self._executor.start_copy(KvCopy(self._num_started, kind, MODEL, self.blocks, self._host_blocks))

    def go_on(self) -> None:
        """Starts the next one where the last has ended."""
        self._take()
        if self.num_done == self._num_started:
            self.start()

    def finish(self) -> None:
        while self.num_done < self._num_started:
            if not self._done.wait(self.TIMEOUT_S):
                raise RuntimeError(f"a copy did not end within {self.TIMEOUT_S:.0f} s")
            self._take()

    def _take(self) -> None:
        for number, is_ok, _ in self._executor.finished_copies():
            if not is_ok:
                raise RuntimeError(f"copy {number} failed")
            self.num_done += 1


def copies_beside(setup: Setup) -> None:
    """Decode steps while checkpoints of KV blocks go to the host without pause, over those beside nothing (A B B A): more
    than an engine does, which copies what is new."""
    batch, context, steps, rounds, num_blocks = (8, 64, 8, 3, 4) if setup.is_quick else (64, 1024, 40, 8, 32)
    runner = Runner.of(setup, batch * (context + steps + 128) + 2 * num_blocks * 128, batch, host=True)
    copying = Copying(runner, num_blocks)
    rows = list(range(batch))
    runner.fill(rows, context, steps)
    copied_s = 0.0

    def step_s(is_copying: bool) -> float:
        nonlocal copied_s
        found = runner.decode_s(rows, context, steps, copying.go_on if is_copying else lambda: None)
        copying.finish()
        copied_s += found * steps if is_copying else 0.0
        return found

    for kind in (False, True):
        step_s(kind)
    copying_before, copied_s = copying.num_done, 0.0
    ratios, plain = [], []
    for _ in range(rounds):
        a, b, c, d = (step_s(kind) for kind in (False, True, True, False))
        ratios.append((b + c) / (a + d))
        plain += [a, d]
    num_bytes = (copying.num_done - copying_before) * copying.num_bytes
    ratio = statistics.median(ratios)
    setup.emit(
        batch=batch, context=context, step_ms=1e3 * statistics.median(plain), overhead_percent=100 * (ratio - 1),
        copied_GB_per_s=num_bytes / copied_s / 1e9, **runner.choices(),
    )  # fmt: skip
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
    """Bytes or operations per second that `rates` has measured on this card."""
    factor = {"copy": 1e9, "product": 1e12}[what]
    return factor * max(float(row["value"]) for row in setup.rows_of("rates") if row["what"].startswith(what))


PARTS: dict[str, Callable[[Setup], None]] = {
    function.__name__: function
    for function in (
        machine, rates, kernels, checkpoint, equality, sanitizer, decode, decode_fp8, prefill, safepoints, copies,
        copies_beside, products, sampling, shapes, cuda_ipc,
    )
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.parts")
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--device", required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    rows = options.scratch / f"{options.name}.jsonl"
    ends_s = time.monotonic() + options.limit_s
    setup = Setup(torch.device(options.device), options.scratch, rows, options.quick, ends_s)
    try:
        PARTS[options.name](setup)
    except LeftOut as error:
        setup.emit(left_out=str(error))
        return LEFT_OUT_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main())
