"""What a server meets that a bench of one shape does not: models that come and go, prompts of any length, many rows of few
KV heads, and a model that is loaded while another serves."""

from __future__ import annotations

import gc
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench.gpu.order import QUICK_SHAPE, SHAPE
from bench.gpu.stepping import Runner, Setup, in_thread, make_executor, percentiles_ms
from shared.messages.cluster import ModelSpec

LAYERS = 4
"""Layers of the 8B shape and of its relatives here: what depends on a layer's sizes shows, and weights are there in
seconds."""


def shapes(setup: Setup) -> None:
    """In the order of what is most likely to be wrong."""
    for measure in (_experts, _wide, _chunks, _beside_loading):
        if not setup.is_measured(measure=measure.__name__.strip("_"), is_last=True):
            measure(setup)


def _checkpoint(setup: Setup, name: str, **changes: Any) -> Path:
    """A checkpoint of the 8B shape with few layers."""
    if setup.is_quick:
        return setup.checkpoint(name, QUICK_SHAPE, **{k: v for k, v in changes.items() if k == "num_key_value_heads"})
    return setup.checkpoint(name, SHAPE, num_hidden_layers=LAYERS, **changes)


def _narrow(setup: Setup) -> Path:
    return _checkpoint(setup, "narrow")


def _few_heads(setup: Setup) -> Path:
    """32 query heads over 2 KV heads, as GLM-4-9B has them."""
    return _checkpoint(setup, "few-heads", num_key_value_heads=2)


# ---------------------------------------------------------------------------------------- models come and go


def make_experts(setup: Setup) -> Path:
    """A mixture of experts with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    path = setup.scratch / "experts"
    if path.exists():
        return path
    sizes: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "max_position_embeddings": 1024,
    }  # fmt: skip
    if not setup.is_quick:
        sizes |= {
            "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 8,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 64,
            "num_experts_per_tok": 8, "moe_intermediate_size": 768, "max_position_embeddings": 8192,
        }  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(setup.device):
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0))
        model.save_pretrained(path)
    finally:
        torch.set_default_dtype(torch.float32)
    return path


def _experts(setup: Setup) -> None:
    """A quantised mixture of experts is loaded, steps, and is unloaded; then another model. Has the second one its graphs,
    and is the first one's memory back?"""
    experts, other = make_experts(setup), _narrow(setup)
    executor = make_executor(setup.device, [experts, other], 16384, 64)
    gc.collect()
    setup.free()
    before = _taken_bytes(setup)
    for quantization in ("int8", ""):
        if setup.is_measured(measure="experts", model=quantization or "bfloat16"):
            continue
        runner = Runner(setup, executor, experts, name="experts", quantization=quantization)
        loaded = _taken_bytes(setup)
        runner.fill([0, 1, 2, 3], 64, 16)
        step_s = runner.decode_s([0, 1, 2, 3], 64, 8)
        # Named otherwise than where it would count as a fallback: some models may not be captured.
        row: dict[str, Any] = {
            "measure": "experts", "model": quantization or "bfloat16", "captured": runner.num_graphs,
            "step_ms": 1e3 * step_s, "loaded_MiB": (loaded - before) / 2**20,
        }  # fmt: skip
        runner.remove()
        gc.collect()
        setup.free()
        setup.emit(**row, left_MiB=(_taken_bytes(setup) - before) / 2**20, why=setup.why)
        del runner
        gc.collect()
    runner = Runner(setup, executor, other)
    runner.fill([0, 1, 2, 3], 64, 16)
    step_s = runner.decode_s([0, 1, 2, 3], 64, 8)
    setup.emit(measure="experts", model="the next one", step_ms=1e3 * step_s, **runner.choices(), is_last=True)
    runner.close()


def _taken_bytes(setup: Setup) -> int:
    """Bytes taken of the device's memory, graphs and pools included; 0 on a CPU, whose memory is the process's."""
    if not setup.on_cuda:
        return 0
    free, total = torch.cuda.mem_get_info(setup.device)
    return total - free


# --------------------------------------------------------------------------------------------------- shapes


def _wide(setup: Setup) -> None:
    """Many rows of few KV heads: the plans and workspaces of decodes grow with both."""
    batch, context, steps = (16, 32, 6) if setup.is_quick else (256, 256, 30)
    checkpoint = _few_heads(setup)
    runner = Runner(setup, make_executor(setup.device, [checkpoint], batch * (context + 256), batch), checkpoint)
    rows = list(range(batch))
    runner.fill(rows, context, 2 * steps)
    runner.decode_s(rows, context, steps // 2)
    step_s = runner.decode_s(rows, context + steps // 2, steps)
    setup.emit(measure="wide", batch=batch, heads="32/2", step_ms=1e3 * step_s, **runner.choices(), is_last=True)
    runner.close()


def _chunks(setup: Setup) -> None:
    """24 shapes of chunks, one after the other: what the first use of each takes over the second, and of memory at most."""
    counts, starts = ((5, 16, 33), (0, 40, 100)) if setup.is_quick else \
        ((16, 100, 512, 1000, 2048, 8192), (0, 777, 2048, 6000))  # fmt: skip
    checkpoint = _narrow(setup)
    longest = max(counts) + max(starts)
    executor = make_executor(setup.device, [checkpoint], 2 * longest, 4)
    runner = Runner(setup, executor, checkpoint)
    runner.run(runner.plan([0], [0], [1], [runner.sequence(0, longest, 1)]))
    for count, start in product(counts, starts):
        if setup.is_measured(measure="chunks", start=start, tokens=count):
            continue
        if setup.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        taken = torch.cuda.memory_allocated() if setup.on_cuda else 0
        first_s, second_s = (runner.run_s(runner.plan([0], [start], [count], [])) for _ in range(2))
        peak = torch.cuda.max_memory_allocated() - taken if setup.on_cuda else 0
        setup.emit(
            measure="chunks", start=start, tokens=count, first_ms=1e3 * first_s, second_ms=1e3 * second_s,
            peak_MiB=peak / 2**20,
        )  # fmt: skip
    found = [row for row in setup.rows_of("shapes") if row["measure"] == "chunks"]
    ratios = [row["first_ms"] / row["second_ms"] for row in found]
    setup.emit(measure="chunks", median_ratio=statistics.median(ratios), largest_ratio=max(ratios),
               **runner.choices(), is_last=True)  # fmt: skip
    runner.close()


def _beside_loading(setup: Setup) -> None:
    """Steps of a model that serves, while another is loaded and its graphs are captured in another thread."""
    batch, context, steps = (4, 64, 12) if setup.is_quick else (32, 512, 60)
    serving, other = _narrow(setup), _few_heads(setup)
    executor = make_executor(setup.device, [serving, other], batch * (context + steps + 256) + 4096, batch)
    runner = Runner(setup, executor, serving)
    rows = list(range(batch))
    runner.fill(rows, context, steps)
    _step_times(runner, rows, context, steps)
    quiet_s = _step_times(runner, rows, context, steps) + _step_times(runner, rows, context, steps)
    started_s = time.perf_counter()
    thread, raised = in_thread(lambda: executor.prepare_model(ModelSpec("other", str(other))))
    beside_s: list[float] = []
    while thread.is_alive():
        beside_s += _step_times(runner, rows, context, steps)
    load_s = time.perf_counter() - started_s
    thread.join()
    if raised:
        raise raised[0]
    for what, seconds in (("alone", quiet_s), ("beside loading", beside_s)):
        setup.emit(measure="beside_loading", what=what, steps=len(seconds), **percentiles_ms(seconds))
    setup.emit(measure="beside_loading", loaded_s=load_s, **runner.choices(), is_last=True)
    runner.close()


def _step_times(runner: Runner, rows: list[int], context: int, steps: int) -> list[float]:
    """From one collected step to the next."""
    times: list[float] = []
    last_s = time.perf_counter()
    for _ in runner.decodes(rows, context, steps):
        now_s = time.perf_counter()
        times.append(now_s - last_s)
        last_s = now_s
    return times
