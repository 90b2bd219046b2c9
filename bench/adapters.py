"""What LoRA adapters cost a decode step: none, one on one row, one on all, and as many as there are rows.

    python -m bench.adapters [--shape 135m] [--rows 8 32] [--rank 16] [--context 256] [--steps 60] [--threads 0]

The executor alone, with random weights and adapters of all linear layers. The cases take turns at each step, so that what
else the machine does meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.peers.checkpoints import SHAPES, make_checkpoint
from services.worker.executor.executor import Executor
from shared.engine.memory.slab import choose_merged_bytes
from shared.engine.plan import ModelShape, NewSequence, StepPlan
from shared.messages.cluster import ModelSpec
from shared.messages.requests import Adapter, SamplingParams, pack_tokens

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WARM_UP_STEPS = 10


def write_adapter(path: Path, base: Path, rank: int, seed: int) -> Adapter:
    """Writes an adapter of all linear layers of the checkpoint at `base`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for file in base.glob("*.safetensors"):
        with safe_open(file, framework="pt") as held:
            for name in list(held.keys()):
                if name.split(".")[-2] in MODULES:
                    outputs, inputs = held.get_slice(name).get_shape()
                    prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
                    tensors[f"{prefix}A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.01
                    tensors[f"{prefix}B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.01
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(MODULES), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return Adapter(path.name, path.name, str(path))


class Batch:
    """Rows that decode together. `adapters`: of each row a version, or nothing."""

    def __init__(
        self, executor: Executor, shape: ModelShape, first_row: int, adapters: list[str], context: int
    ) -> None:
        self._executor, self._name = executor, shape.name
        self._rows = list(range(first_row, first_row + len(adapters)))
        per_row = -(-(context + 256) // shape.block_size)
        prompt, sampling = [5 + i % 99 for i in range(context)], SamplingParams(max_tokens=1 << 20, temperature=0.0)
        new = [
            NewSequence(
                row, pack_tokens(prompt), context, sampling, list(range(row * per_row, (row + 1) * per_row)), adapter
            )
            for row, adapter in zip(self._rows, adapters, strict=True)
        ]
        self._length = context
        for one in new:  # a prompt a step: what is measured are decodes
            self._run([one.row], [0], context, [one])

    def _run(self, rows: list[int], starts: list[int], count: int, new: list[NewSequence]) -> None:
        plan = StepPlan(
            step_id=1, model=self._name, rows=rows, starts=starts, counts=[count] * len(rows), samples=[True] * len(rows),
            new_sequences=new, new_blocks=[],
        )  # fmt: skip
        result = self._executor.execute(plan)
        assert not result.error, result.error

    def decode_s(self) -> float:
        """Seconds of one step."""
        began_s = time.perf_counter()
        self._run(self._rows, [self._length] * len(self._rows), 1, [])
        self._length += 1
        return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="135m", choices=sorted(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        base = make_checkpoint(Path(folder) / "base", options.shape)
        most = max(options.rows)
        adapters = [write_adapter(Path(folder) / f"lora-{i}", base, options.rank, i) for i in range(most)]
        for rows in options.rows:
            measure(base, adapters[:rows], rows, options)


def measure(base: Path, adapters: list[Adapter], rows: int, options: argparse.Namespace) -> None:
    spec = ModelSpec("m", str(base))
    num_blocks = -(-(options.context + 256) // 16) * rows * 4
    probe = Executor(options.device, 1, 1 << 26, 1)
    block_bytes = probe.prepare_model(spec).model.kv_shape(16).block_bytes
    merged_bytes = choose_merged_bytes([block_bytes], at_least=1 << 20)
    executor = Executor(options.device, -(-num_blocks * block_bytes // merged_bytes) * 2, merged_bytes, 4 * rows)
    shape = executor.add_model(executor.prepare_model(spec))
    for adapter in adapters:
        executor.load_adapter("m", adapter)
    num_bytes = executor.adapter_bytes("m", adapters[0])
    versions = [adapter.version for adapter in adapters]
    cases = {
        "none": [""] * rows,
        "one row of one": [versions[0], *[""] * (rows - 1)],
        "all rows of one": [versions[0]] * rows,
        "each row its own": versions,
    }
    batches = {
        name: Batch(executor, shape, index * rows, of_rows, options.context)
        for index, (name, of_rows) in enumerate(cases.items())
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for step in range(WARM_UP_STEPS + options.steps):
        for name, batch in batches.items():
            seconds = batch.decode_s()
            if step >= WARM_UP_STEPS:
                times[name].append(seconds)
    plain = statistics.median(times["none"])
    print(f"{options.shape}, {rows} rows, rank {options.rank}, {num_bytes / 2**20:.1f} MiB an adapter")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"  {name:18} {median * 1e3:8.2f} ms a step  {median / plain:5.2f}")
    executor.close()


if __name__ == "__main__":
    main()
