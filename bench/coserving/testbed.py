"""The model, its cost model and the pools that all runs share, and a fresh engine for each of them."""

from __future__ import annotations

import dataclasses
import gc
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.coserving.systems import System
from services.worker.cost_models import profiled_model
from services.worker.executor import Executor, PreparedModel
from services.worker.profiler import BRIEF, profile
from shared.cost_model import CostModel
from shared.engine.engine import Engine
from shared.engine.slab import choose_merged_bytes
from shared.messages import ModelSpec

MODEL = "model"
SHAPES: dict[str, dict[str, int]] = {
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
}  # fmt: skip
MIB = 1 << 20


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """All that a result depends on beside the experiments' own parameters."""

    model: str = "135m"
    device: str = "cpu"
    dtype: str = "bfloat16"
    num_threads: int = 2
    pool_tokens: int = 16384
    """KV pool; host memory for checkpoints is `host_share` of it."""
    host_share: float = 2.0
    num_rows: int = 64
    max_step_tokens: int = 512
    steps_in_flight: int = 1
    ordering: str = "fcfs"
    """Of one class, alike in all systems."""
    niceness: int = 5
    """Of the compute threads, as in an instance on CPU."""
    profile_s: float = 12.0
    seed: int = 1


class Testbed:
    """`close` removes the checkpoint."""

    __test__ = False

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        torch.set_num_threads(setup.num_threads)
        self._folder = tempfile.TemporaryDirectory(prefix="tideway-coserving-")
        self._spec = ModelSpec(MODEL, str(_make_checkpoint(Path(self._folder.name), setup)))
        self._prepared = Executor(setup.device, 1, 1 << 30, 1).prepare_model(self._spec)
        self.page_tokens = self._prepared.page_tokens
        self.vocab_size = self._prepared.model.vocab_size
        self._slot_bytes = self._prepared.model.kv_shape(self.page_tokens).slot_bytes
        self._merged_bytes = choose_merged_bytes([self._slot_bytes])
        self.cost_model = self._profile()

    def close(self) -> None:
        self._folder.cleanup()

    def num_merged(self, pool_tokens: int) -> int:
        num_slots = -(-pool_tokens // self.page_tokens)
        return max(1, num_slots // max(1, self._merged_bytes // self._slot_bytes))

    def executor(self, pool_tokens: int) -> tuple[Executor, PreparedModel]:
        """A new one, with room in host memory, that the weights are not yet added to."""
        num_merged = self.num_merged(pool_tokens)
        executor = Executor(
            self.setup.device,
            num_merged,
            self._merged_bytes,
            self.setup.num_rows,
            num_host_merged=int(num_merged * self.setup.host_share),
        )
        return executor, self._prepared

    def build(self, system: System, pool_tokens: int, ttft_s: float, tpot_s: float) -> tuple[Engine, Executor]:
        """A fresh engine and executor, and the model on both."""
        setup = self.setup
        num_merged = self.num_merged(pool_tokens)
        executor, prepared = self.executor(pool_tokens)
        engine = system.configuration(
            num_merged=num_merged,
            num_rows=setup.num_rows,
            num_host_merged=int(num_merged * setup.host_share),
            max_step_tokens=setup.max_step_tokens,
            steps_in_flight=setup.steps_in_flight,
            ordering=setup.ordering,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
        ).build()
        engine.add_model(executor.add_model(prepared))
        engine.set_cost_model(MODEL, self.cost_model)
        executor.set_layers_per_safepoint(MODEL, self.cost_model.layers_per_safepoint)
        return engine, executor

    def _profile(self) -> CostModel:
        setup = self.setup
        executor, prepared = self.executor(setup.pool_tokens)
        shape = executor.add_model(prepared)
        model = profiled_model(self._spec, shape, executor.device)
        slots = list(range(self.num_merged(setup.pool_tokens) * shape.slots_per_merged))
        extent = dataclasses.replace(BRIEF, time_s=setup.profile_s, max_step_s=1.0)
        try:
            return profile(executor, model, slots, setup.max_step_tokens, extent).cost_model
        finally:
            executor.close()


def _make_checkpoint(folder: Path, setup: Setup) -> Path:
    """A Llama with random weights; no tokenizer, as prompts are token ids."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPES[setup.model], tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    with torch.device("cpu"):
        model = LlamaForCausalLM(config)
    model.to(getattr(torch, setup.dtype)).save_pretrained(folder)
    del model
    gc.collect()
    return folder


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
