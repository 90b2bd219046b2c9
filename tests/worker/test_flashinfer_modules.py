"""FlashInfer's modules built ahead: that the list names what its own code asks for, and that they compile without a GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from services.worker.attention import flashinfer_modules as modules
from services.worker.attention.flashinfer_backend import FlashInferBackend
from services.worker.attention.flashinfer_modules import VARIANTS, Variant, explain
from services.worker.attention.torch_backend import TorchBackend
from services.worker.models import ops
from tests.worker import fake_flashinfer

REPOSITORY = Path(__file__).resolve().parents[2]
ARCHES = ("8.0", "9.0a", "10.0a")

FUSED = {"norm", "rope", "silu_and_mul", "page"}
_CALLS = """
import json, os, sys, types
import torch
from flashinfer.jit.core import JitSpecNvcc
import flashinfer
from flashinfer import activation, norm, page, prefill, rope
from services.worker.attention.flashinfer_modules import Variant, specs

asked = []

class Module:
    def __getattr__(self, name):
        return lambda *arguments: [0] * 15

def load(spec):
    asked.append(spec.name)
    return Module()

JitSpecNvcc.build_and_load = load
norm._use_cuda_norm = lambda device: True
for part in (norm, activation):
    part.device_support_pdl = lambda device: False
torch.Tensor.pin_memory = lambda tensor: tensor
empty = torch.empty
torch.empty = lambda *a, pin_memory=False, **k: empty(*a, **k)

def names():
    found = sorted(set(asked))
    asked.clear()
    return found

ints = lambda *values: torch.tensor(values, dtype=torch.int32)
x, weight = torch.zeros(2, 256, dtype=torch.bfloat16), torch.ones(256, dtype=torch.bfloat16)
norm.rmsnorm(x, weight, 1e-5)
norm.fused_add_rmsnorm(x, x.clone(), weight, 1e-5)
activation.silu_and_mul(x)
rope.apply_rope_with_cos_sin_cache_inplace(ints(0, 1), x, x.clone(), 64, torch.zeros(2, 64), is_neox=True)
cache = torch.zeros(2, 4, 2, 16, 64, dtype=torch.bfloat16).unbind(0)
keys = torch.zeros(1, 2, 64, dtype=torch.bfloat16)
page.append_paged_kv_cache(keys, keys, ints(0), ints(0), cache, ints(0), ints(0, 1), ints(1), kv_layout="HND")
found = {"fused": names()}
workspace = torch.zeros(1 << 20, dtype=torch.uint8)
for text in sys.argv[1:]:
    variant = Variant.parse(text)
    dtype = getattr(torch, variant.dtype)
    options = dict(window_left=7 if variant.has_window else -1, logits_soft_cap=30.0 if variant.has_softcap else 0.0,
                   q_data_type=dtype, kv_data_type=dtype)
    pages = ints(0, 1), ints(0), ints(1)
    for tensor_cores, backend in ((False, "auto"), (True, "fa2")):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=tensor_cores, backend=backend)
        wrapper.plan(*pages, 8, 2, variant.head_dim, 16, **options)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")
    wrapper.plan(ints(0, 1), *pages, 8, 2, variant.head_dim, 16, causal=True, **options)
    found[text] = names()
    found["listed " + text] = [spec.name for spec in specs([variant])]
print(json.dumps(found))
"""


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("text", ["bfloat16/128", "float16/64/window", "bfloat16/128/window/softcap"])
def test_the_list_is_what_flashinfers_own_code_asks_for(text: str, tmp_path: Path) -> None:
    pytest.importorskip("flashinfer", exc_type=ImportError)
    done = python("-c", _CALLS, text, FLASHINFER_CUDA_ARCH_LIST="9.0a", FLASHINFER_WORKSPACE_BASE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["fused"]) == FUSED
    assert set(found["listed " + text]) == FUSED | set(found[text]) and len(found[text]) == 2


def test_every_model_that_flashinfer_computes_has_its_modules() -> None:
    device = torch.device("cpu")
    facts = FlashInferBackend(device, TorchBackend(device), fake_flashinfer).facts
    heads = set(range(facts.head_dim_step, facts.max_head_dim + 1, facts.head_dim_step))
    for has_window in (False, True):
        there = {(v.dtype, v.head_dim) for v in VARIANTS if (v.has_window, v.has_softcap) == (has_window, False)}
        assert there == {(dtype, dim) for dtype in facts.dtypes for dim in heads}
    assert Variant.parse("bfloat16/128/softcap/window") in VARIANTS


@pytest.mark.parametrize("text", ["float32/128", "bfloat16", "bfloat16/big", "bfloat16/96", "bfloat16/128/mask"])
def test_what_is_no_variant_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        Variant.parse(text)


def test_a_module_that_is_missing_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    class MissingJITCacheError(RuntimeError):
        spec = SimpleNamespace(name="norm")

    def refuse(*arguments: object) -> None:
        raise MissingJITCacheError("JIT compilation is disabled")

    monkeypatch.setattr(ops, "compare", refuse)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(activation=None, norm=None, rope=None))
    ops._flashinfer_ops.cache_clear()
    try:
        assert type(ops.choose_ops(torch.device("cuda"), torch.bfloat16, 128)) is ops.TorchOps
    finally:
        ops._flashinfer_ops.cache_clear()
    assert "its module norm was not built ahead" in caplog.text and "flashinfer_modules" in caplog.text
    assert explain(ValueError("no such thing")) == "ValueError: no such thing"


def test_flashinfers_own_refusal_names_its_module(tmp_path: Path) -> None:
    """FlashInfer's error has what `explain` reads."""
    pytest.importorskip("flashinfer", exc_type=ImportError)
    script = (
        "from services.worker.attention.flashinfer_modules import Variant, explain, specs\n"
        "try: specs([Variant('bfloat16', 192)])[-1].build_and_load()\n"
        "except Exception as error: print(explain(error))"
    )
    done = python("-c", script, FLASHINFER_CUDA_ARCH_LIST="9.0a", FLASHINFER_WORKSPACE_BASE=str(tmp_path),
                  FLASHINFER_DISABLE_JIT="1")  # fmt: skip
    assert "its module batch_prefill_" in done.stdout and "head_dim_qk_192" in done.stdout, done.stderr


def test_without_a_toolkit_it_says_so(tmp_path: Path) -> None:
    pytest.importorskip("flashinfer", exc_type=ImportError)
    done = python("-m", modules.__name__, "--arch", "9.0a", "--output", str(tmp_path), CUDA_HOME=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("the modules were not built: there is no CUDA toolkit: CUDA_HOME")


def test_where_it_cannot_write_it_says_so_before_it_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "")
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "")
    monkeypatch.setattr(sys, "argv", ["modules", "--arch", "9.0a", "--output", str(tmp_path / "file")])
    assert modules.main() == 1
    assert capsys.readouterr().err.startswith("the modules were not built: [Errno 17] File exists")


def compiled_for(library: Path) -> set[int]:
    """Compute capabilities, as 90 for 9.0, for which a library has device code: what its fat binaries' headers say."""
    content, found = library.read_bytes(), set()
    for match in re.finditer(re.escape(struct.pack("<I", 0xBA55ED50)), content):
        header_size, total = struct.unpack_from("<HQ", content, match.start() + 6)
        place, end = match.start() + header_size, match.start() + header_size + total
        while place < end:
            entry_size, size = struct.unpack_from("<IQ", content, place + 4)
            found.add(struct.unpack_from("<I", content, place + 28)[0])
            place += entry_size + size
    return found


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_decodes_and_prompts_compile_for_each_generation(tmp_path: Path) -> None:
    pytest.importorskip("flashinfer", exc_type=ImportError, reason="needs FlashInfer")
    try:
        modules._toolkit()
    except RuntimeError as error:
        pytest.skip(str(error))
    if shutil.which("ninja") is None:
        pytest.skip("needs ninja")
    script = (
        "import sys; from pathlib import Path\n"
        "from services.worker.attention import flashinfer_modules as modules\n"
        "whole = modules.specs\n"
        "modules.specs = lambda variants: [spec for spec in whole(variants) if spec.name.startswith('batch_')]\n"
        "print(*modules.build([modules.Variant('bfloat16', 128)], Path(sys.argv[1])), sep='\\n')"
    )
    base = os.environ.get("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    done = python("-c", script, str(tmp_path / "built"), FLASHINFER_CUDA_ARCH_LIST=" ".join(ARCHES),
                  FLASHINFER_WORKSPACE_BASE=base, MAX_JOBS=os.environ.get("MAX_JOBS", "2"))  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    built = [Path(line) for line in done.stdout.split()]
    assert [path.name.split("_with_")[0] for path in built] == ["batch_decode", "batch_prefill"]
    for path in built:
        assert compiled_for(path) == {80, 90, 100}
