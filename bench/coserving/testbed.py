"""The model, its cost model and the pools that all runs share, and a fresh engine for each of them."""

from __future__ import annotations

import dataclasses
import gc
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.coserving.setup import MODEL, Objectives, Setup, num_merged
from bench.coserving.systems import System
from bench.reporting import machine
from services.worker.cost_models import profiled_model
from services.worker.executor import Executor, PreparedModel
from services.worker.profiled_steps import BRIEF, FULL
from services.worker.profiler import profile
from shared.cost_model import CostModel
from shared.engine.engine import Engine
from shared.engine.memory.slab import choose_merged_bytes
from shared.messages.cluster import ModelSpec

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
