"""Fused kernels give what torch gives; a model computes the same with either."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from services.worker.executor.executor import Executor
from services.worker.models import deterministic
from services.worker.models.ops import FlashInferOps, TorchOps, choose_ops, compare
from tests.worker import fake_flashinfer
from tests.worker.checkpoints import prompt_of, write_checkpoint
from tests.worker.step_driver import Driver
from tests.worker.test_executor import load

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
CPU = torch.device("cpu")


def fused() -> FlashInferOps:
    return FlashInferOps(fake_flashinfer.norm, fake_flashinfer.activation, fake_flashinfer.rope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_are_called_rightly(dtype: torch.dtype, head_dim: int) -> None:
    compare(fused(), CPU, dtype, head_dim)


def test_a_kernel_that_computes_otherwise_is_found() -> None:
    class Wrong(TorchOps):
        def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
            return super().silu_and_mul(gate_up.roll(1, -1))

    with pytest.raises(AssertionError):
        compare(Wrong(), CPU, torch.bfloat16, 64)


def test_torch_is_what_a_cpu_has() -> None:
    assert type(choose_ops(CPU, torch.bfloat16, 128)) is TorchOps


@pytest.mark.parametrize("variant", ["llama", "qwen3-yarn", "llama-dynamic"])
def test_a_model_makes_the_same_tokens(tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in what the kernels overwrite."""
    path = write_checkpoint(tmp_path, variant)
    outputs = []
    for ops in (TorchOps(), fused()):
        monkeypatch.setattr(deterministic, "choose_ops", lambda *_, ops=ops: ops)
        executor = Executor("cpu", 8, 1 << 18, 4)
        driver = Driver(executor, load(executor, path), range(8))
        rows = [driver.add(i, prompt_of(n)) for i, n in enumerate((5, 30))]
        driver.step([(row, len(row.tokens)) for row in rows])
        driver.decode(rows, 8)
        outputs.append([row.output for row in rows])
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_on_cuda(dtype: torch.dtype) -> None:
    flashinfer = pytest.importorskip("flashinfer")
    ops = FlashInferOps(flashinfer.norm, flashinfer.activation, flashinfer.rope)
    compare(ops, torch.device("cuda"), dtype, 128)


def test_the_signatures_are_flashinfers() -> None:
    """Checked where FlashInfer is installed."""
    real = pytest.importorskip("flashinfer")
    for module in ("norm", "activation", "rope"):
        for name, fake in vars(getattr(fake_flashinfer, module)).items():
            wanted = inspect.signature(fake).parameters
            got = inspect.signature(getattr(getattr(real, module), name)).parameters
            assert list(wanted) == list(got)[: len(wanted)], name
    wrappers = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    for name in ("append_paged_kv_cache", *wrappers):
        wanted = inspect.signature(getattr(fake_flashinfer, name)).parameters
        assert list(wanted) == list(inspect.signature(getattr(real, name)).parameters)
    wanted = inspect.signature(fake_flashinfer.fast_decode_plan).parameters
    assert wanted.keys() <= inspect.signature(real.fast_decode_plan).parameters.keys()
    for kind, fake_kind in ((getattr(real, name), getattr(fake_flashinfer, name)) for name in wrappers):
        for name in ("plan", "workspace_size", "run", "reset_workspace_buffer"):
            wanted = inspect.signature(getattr(fake_kind, name)).parameters
            got = inspect.signature(getattr(kind, name)).parameters
            positional = [parameter.name for parameter in wanted.values() if parameter.kind == 1]
            assert positional == list(got)[: len(positional)], name
            assert "kwargs" in got or wanted.keys() <= got.keys(), name
