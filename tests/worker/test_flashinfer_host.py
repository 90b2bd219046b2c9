"""FlashInfer's real host code, over the heads of every supported family: each plan is accepted in the memory that the
attention back end gives it, and what is captured of it does not depend on the lengths. No kernel runs: no GPU is needed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.worker.attention.facts import TORCH_CUDA, flashinfer
from shared.models.families import FAMILIES

ROOT = Path(__file__).parents[2]
RANKS = (1, 2, 4, 8)

PUBLISHED: dict[str, list[tuple[int, int, int]]] = {
    # 7B, 13B, 30B; Llama 2 70B, 3 8B, 405B, 3.2 1B and 3B; SmolLM 135M
    "LlamaForCausalLM": [
        (32, 32, 128), (40, 40, 128), (52, 52, 128), (64, 8, 128), (32, 8, 128), (128, 8, 128), (32, 8, 64), (24, 8, 128),
        (9, 3, 64),
    ],
    "MistralForCausalLM": [(32, 8, 128), (96, 8, 128)],
    "MixtralForCausalLM": [(32, 8, 128), (48, 8, 128)],
    "Qwen2ForCausalLM": [(14, 2, 64), (12, 2, 128), (16, 2, 128), (28, 4, 128), (40, 8, 128), (64, 8, 128)],
    "Qwen3ForCausalLM": [(16, 8, 128), (32, 8, 128), (40, 8, 128), (64, 8, 128)],
    "Qwen3MoeForCausalLM": [(32, 4, 128), (64, 4, 128), (96, 8, 128)],
    "Phi3ForCausalLM": [(32, 32, 96), (40, 10, 128), (32, 8, 128)],
    "GemmaForCausalLM": [(8, 1, 256), (16, 16, 256)],
    "Gemma2ForCausalLM": [(8, 4, 256), (16, 8, 256), (32, 16, 128)],
    "Gemma3ForCausalLM": [(4, 1, 256), (8, 4, 256), (16, 8, 256), (32, 16, 128)],
    "OPTForCausalLM": [
        (12, 12, 64), (16, 16, 64), (32, 32, 64), (32, 32, 80), (32, 32, 128), (40, 40, 128), (56, 56, 128), (72, 72, 128),
    ],
}  # fmt: skip
"""Heads of queries and of keys, and their size, of the architectures' models on the hub."""
THROUGH_TRANSFORMERS = [(32, 2, 128), (48, 1, 128), (96, 1, 128), (20, 1, 128), (71, 1, 64), (128, 8, 64), (25, 25, 64)]
"""On one device: GLM-4-9B, StarCoder, two of many query heads for one KV head, Falcon 7B and 40B, GPT-2 XL."""
SOFTCAPS = {"Gemma2ForCausalLM": 50.0}


def shapes() -> list[str]:
    """On each number of ranks; those that FlashInfer has kernels for, each once."""
    facts = flashinfer(TORCH_CUDA, takes_prompts=True)
    found = {
        (queries // ranks, keys // ranks, dim, SOFTCAPS.get(architecture, 0.0))
        for architecture, models in PUBLISHED.items()
        for queries, keys, dim in models
        for ranks in RANKS
        if keys % ranks == 0
    } | {(*heads, 0.0) for heads in THROUGH_TRANSFORMERS}
    return [",".join(map(str, shape)) for shape in sorted(found) if facts.runs(shape[2], "bfloat16")]


def test_every_architecture_has_its_heads_here() -> None:
    assert PUBLISHED.keys() == {architecture for family in FAMILIES for architecture in family.architectures}


def toolkit() -> Path | None:
    """CUDA's, with headers; `nvcc` on the path may be a wrapper somewhere else."""
    on_path = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), *sorted(map(str, Path("/usr/local").glob("cuda*")), reverse=True)]
    places += [str(Path(on_path).resolve().parents[1])] if on_path else []
    found = (Path(place) for place in places if place)
    return next((p for p in found if (p / "bin/nvcc").exists() and (p / "include/cuda_runtime.h").exists()), None)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_plans_for_the_heads_of_all_families(tmp_path: Path) -> None:
    """Compiles FlashInfer's modules at the first time: minutes."""
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")
    cuda, compiler = toolkit(), shutil.which("cc")
    if cuda is None or compiler is None or shutil.which("ninja") is None:
        pytest.skip("its modules cannot be compiled: that takes nvcc with CUDA's headers, a C compiler and ninja")
    runtime = tmp_path / "libcuda.so"
    source = ROOT / "tests/worker/cuda_runtime.c"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", runtime, source], check=True)

    def searched(variable: str, *places: Path) -> str:
        return ":".join([*map(str, places), *filter(None, [os.environ.get(variable)])])

    environment = {
        "FLASHINFER_WORKSPACE_BASE": str(ROOT / ".tideway/flashinfer"),
        "MAX_JOBS": "2",
        **os.environ,
        "CUDA_HOME": str(cuda),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "LIBRARY_PATH": searched("LIBRARY_PATH", tmp_path),  # -lcuda
        "LD_LIBRARY_PATH": searched("LD_LIBRARY_PATH", cuda / "lib64"),
        "LD_PRELOAD": str(runtime),
    }
    command = [sys.executable, "-m", "tests.worker.flashinfer_host", *shapes()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert not result["problems"]
    assert result["counts"].keys() == {"captured", "eager", "prompts", "run", "refused"}
