"""The FlashInfer modules that a worker's kernels are in, and their building ahead, so that it runs without a compiler.

    python -m services.worker.attention.flashinfer_modules --arch 9.0a [--arch 8.0 ...] --output FOLDER [--only bfloat16/128]

Leaves FOLDER/NAME/NAME.so for each. FlashInfer takes what lies so in its own `flashinfer/data/aot`, and compiles the rest
when it is first called, unless FLASHINFER_DISABLE_JIT is set. Needs FlashInfer, any torch, nvcc (of CUDA_HOME, the PATH or
/usr/local/cuda), a C++ compiler and ninja; no GPU. MAX_JOBS compilers run at a time, and what they have made is kept in
FLASHINFER_WORKSPACE_BASE for the next time.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (128, 64)
_NO_POSITIONS = 0
"""Rotary embeddings are applied before attention."""
_UNUSED_HEADERS = ("cublasLt.h", "cublas_v2.h", "curand_kernel.h")
"""FlashInfer's norms include them and use nothing of theirs."""


@dataclass(frozen=True)
class Variant:
    """What decides which attention kernels a layer needs: written `bfloat16/128`, `bfloat16/128/window/softcap`."""

    dtype: str
    head_dim: int
    has_window: bool = False
    """A sliding window over the keys."""
    has_softcap: bool = False
    """A cap of the logits."""

    @staticmethod
    def parse(text: str) -> Variant:
        """Raises `ValueError`, also for a size of heads that FlashInfer does not get here."""
        dtype, _, rest = text.partition("/")
        head_dim, *others = rest.split("/")
        if dtype not in DTYPES or head_dim not in map(str, HEAD_DIMS) or set(others) - {"window", "softcap"}:
            raise ValueError(
                f"{text!r} is not DTYPE/HEAD_DIM[/window][/softcap], with a dtype of {', '.join(DTYPES)} and heads of "
                f"{' or '.join(map(str, HEAD_DIMS))}"
            )
        return Variant(dtype, int(head_dim), "window" in others, "softcap" in others)


VARIANTS = tuple(
    Variant(dtype, head_dim, has_window, has_softcap)
    for has_softcap in (False, True)
    for has_window in (False, True)
    for dtype in DTYPES
    for head_dim in (HEAD_DIMS if not has_softcap else (128,))
)
"""Variants of every model whose attention FlashInfer computes. Gemma 2 alone caps logits, and has no heads of 64."""


def specs(variants: Iterable[Variant]) -> list[Any]:
    """FlashInfer's descriptions (`JitSpec`: `name`, `sources`, `build()`) of the modules that models with such layers
    need: norms, rotary embeddings, gates and the writing of pages, which are the same for all; for each variant one with
    decodes on ordinary cores, one with decodes on tensor cores and prompts. Its import fixes for which GPUs it compiles."""
    from flashinfer.jit import gen_act_and_mul_module, gen_batch_decode_module, gen_batch_prefill_module
    from flashinfer.jit.norm import gen_norm_module
    from flashinfer.jit.page import gen_page_module
    from flashinfer.jit.rope import gen_rope_module

    found = [gen_norm_module(), gen_rope_module(), gen_act_and_mul_module("silu"), gen_page_module()]
    for variant in variants:
        dtype, dim = getattr(torch, variant.dtype), variant.head_dim
        of_layer = (dtype, dtype, dtype, torch.int32, dim, dim, _NO_POSITIONS, variant.has_window, variant.has_softcap)
        found += [gen_batch_decode_module(*of_layer), gen_batch_prefill_module("fa2", *of_layer, False)]
    return found


def build(variants: Iterable[Variant], output: Path) -> list[Path]:
    """Compiles what `specs` names; the files that are then in `output`. Raises `RuntimeError` with the compiler's words,
    and `OSError` before where nothing can be written to `output`."""
    output.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=output).close()
    from flashinfer.jit import build_jit_specs, env

    _complete_toolkit(env.FLASHINFER_WORKSPACE_DIR / "toolkit")
    wanted = specs(variants)
    build_jit_specs(wanted, skip_prebuilt=False)
    paths = []
    for spec in wanted:
        path = output / spec.name / f"{spec.name}.so"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(spec.jit_library_path, path)
        paths.append(path)
    return paths


def _complete_toolkit(folder: Path) -> None:
    """Puts into `folder` what NVIDIA's wheels and small toolkits lack, and has compilers look there last."""
    cuda = _toolkit()
    os.environ["CUDA_HOME"] = str(cuda)
    (folder / "include").mkdir(parents=True, exist_ok=True)
    for name in _UNUSED_HEADERS:
        header = folder / "include" / name
        if not header.exists():  # else what includes it would be compiled again
            header.touch()
    # Linked against by name alone: the driver brings the real one.
    _run([os.environ.get("CXX", "c++"), "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so"),
          "-x", "c", os.devnull])  # fmt: skip
    runtimes = sorted(path for lib in ("lib64", "lib") for path in (cuda / lib).glob("libcudart.so*"))
    if not runtimes:
        raise RuntimeError(f"there is no libcudart.so in {cuda}: CUDA_HOME must name a CUDA toolkit")
    link = folder / "libcudart.so"
    link.unlink(missing_ok=True)
    link.symlink_to(runtimes[0])
    # Paths from the environment are looked at last, and do not make ninja take finished objects for old.
    for variable, path in (("CPLUS_INCLUDE_PATH", folder / "include"), ("LIBRARY_PATH", folder)):
        os.environ[variable] = os.pathsep.join(filter(None, [os.environ.get(variable), str(path)]))


def _toolkit() -> Path:
    """CUDA_HOME, or where nvcc is: what the PATH has may be a link to it, or a script. Raises `RuntimeError`."""
    named, nvcc = os.environ.get("CUDA_HOME"), shutil.which("nvcc")
    found = [Path(nvcc).resolve().parents[1]] if nvcc else []
    for folder in [Path(named)] if named else [*found, Path("/usr/local/cuda")]:
        if (folder / "bin/nvcc").exists() and (folder / "include/cuda_runtime.h").exists():
            return folder
    raise RuntimeError(
        "there is no CUDA toolkit: CUDA_HOME must name the folder of bin/nvcc and include/cuda_runtime.h"
    )


def _run(command: list[str]) -> None:
    """Raises `RuntimeError` with what it said."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise RuntimeError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}")


def explain(error: BaseException) -> str:
    """What is wrong with FlashInfer, for a log: the module that is missing where none may be compiled, else the error."""
    spec = getattr(error, "spec", None)  # of FlashInfer's MissingJITCacheError
    if spec is None:
        return f"{type(error).__name__}: {error}"
    return (
        f"its module {spec.name} was not built ahead, and FLASHINFER_DISABLE_JIT forbids compiling it: build it "
        f"(python -m services.worker.attention.flashinfer_modules) or unset that variable"
    )


def _arch(text: str) -> str:
    if not re.fullmatch(r"\d+\.\d[af]?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a compute capability such as 8.0 or 9.0a")
    return text


def _variant(text: str) -> Variant:
    try:
        return Variant.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.worker.attention.flashinfer_modules", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "--arch", type=_arch, action="append", required=True, help="compute capability of GPUs: 8.0, 9.0a"
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", type=_variant, nargs="+", metavar="DTYPE/HEAD_DIM[/window][/softcap]",
                        help="attention kernels for these models alone (default: for all that can use them)")  # fmt: skip
    options = parser.parse_args()
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(dict.fromkeys(options.arch))
    os.environ.pop("FLASHINFER_DISABLE_JIT", None)
    started_s = time.monotonic()
    try:
        paths = build(options.only or VARIANTS, options.output)
    except (ImportError, RuntimeError, OSError) as error:
        print(f"the modules were not built: {error}", file=sys.stderr)
        return 1
    for path in paths:
        print(f"{path.stat().st_size / 2**20:8.2f} MiB  {path.stem}")
    print(f"{len(paths)} modules for {os.environ['FLASHINFER_CUDA_ARCH_LIST']} in {time.monotonic() - started_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
