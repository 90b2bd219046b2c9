"""The servers: `vllm serve` and `tideway up`, with the environment that `tideway engine install vllm` made."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers.servers import CONTEXT_TOKENS, MAX_SEQUENCES, Server, Tideway
from services.worker.engines.vllm.starting import adapter_environment
from shared.engines.messages import OFFLINE_PRIORITY
from shared.runtime.engine_environments import python_of, search_path

STEP_TOKENS = 512
POOL_BYTES = 1 << 30
FLAGS = (
    "--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(MAX_SEQUENCES), "--kv-cache-memory-bytes", str(POOL_BYTES),
    "--max-num-batched-tokens", str(STEP_TOKENS), "--scheduling-policy", "priority",
)  # fmt: skip
"""Flags of vLLM, hosted or not. Requests of one priority are served as they come under either policy of vLLM."""
REPOSITORY = Path(__file__).resolve().parents[2]


def vllm_settings(folder: Path, num_threads: int) -> dict[str, str]:
    """Environment variables of vLLM, hosted or not, whose threads run on the last cores."""
    cores = sorted(os.sched_getaffinity(0))[-num_threads:]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }


class StockVllm(Server):
    """`vllm serve`. `flags`: beside FLAGS."""

    def __init__(self, name: str, folder: Path, dtype: str, flags: Sequence[str], num_threads: int) -> None:
        super().__init__(name, folder)
        self._flags = ["--dtype", dtype, *FLAGS, *flags]
        self._settings = vllm_settings(folder, num_threads)

    def set_up(self) -> None:
        """Raises `EngineEnvironmentError` where vLLM is not installed."""
        python_of("vllm")

    def version(self) -> str:
        return " ".join(["vllm serve", *self._flags])

    def _command(self, checkpoint: Path, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        python = python_of("vllm")
        command = [
            str(python.with_name("vllm")), "serve", str(checkpoint), "--served-model-name", checkpoint.name, *self._flags,
            "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip
        return command, adapter_environment(self._settings, python, search_path(), "cpu", frozenset())


def hosted(
    name: str, folder: Path, dtype: str, flags: Sequence[str], num_threads: int, settings: Mapping[str, str]
) -> Tideway:
    """`tideway up --engine vllm`. `settings`: environment variables."""
    engine_args = shlex.join(["--dtype", dtype, *FLAGS, *flags])
    options = ["--engine", "vllm", "--engine-args", engine_args]
    return Tideway(name, folder, REPOSITORY, {**vllm_settings(folder, num_threads), **settings}, options)


def native(name: str, folder: Path, num_threads: int, settings: Mapping[str, str]) -> Tideway:
    """`tideway up` with Tideway's own engine."""
    return Tideway(name, folder, REPOSITORY, {"OMP_NUM_THREADS": str(num_threads), **settings})


def batch_fields(server: Server, has_priority: bool) -> dict[str, Any]:
    """Fields of a request of a batch. `has_priority`: whether vLLM is told that it may wait."""
    if isinstance(server, Tideway):
        return {"service_tier": "flex"}
    return {"priority": OFFLINE_PRIORITY} if has_priority else {}
