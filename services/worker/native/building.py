"""Builds kernels.c with the machine's C compiler: `python -m services.worker.native.building`, run at installation.

A library is named by its source and what it was built for, so a changed source or another processor makes a new one. It lies
beside the source, or in the user's cache where that cannot be written. `--variant` builds one for other machines than this
(container images); which of them a machine can run is read from its processor's flags.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.c")
# Contraction is off: products and sums are fused where the source says so alone, else a row's bits would depend on how many
# rows are computed with it.
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-std=gnu11", "-shared", "-fPIC", "-pthread")
BUILD_TIMEOUT_S = 60.0
"""Together with the wait for another process's build well below what a node agent waits for an instance to register
(`START_TIMEOUT_S`): on a machine that is too busy to compile, torch's operators serve."""
INSTALL_TIMEOUT_S = 300.0
LOCK_POLL_S = 0.1
_AVX512_BF16 = ("avx512f", "avx512vl", "avx512bw", "avx512dq", "avx512_bf16")
VARIANTS = {
    "amx-bf16": ("-march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16", (*_AVX512_BF16, "amx_tile", "amx_bf16")),
    "avx512-bf16": ("-march=x86-64-v4 -mavx512bf16", _AVX512_BF16),
    "avx2": ("-march=x86-64-v3", ("avx2", "fma", "bmi2")),
}
"""Name -> (compiler's flags, flags of the processor in /proc/cpuinfo that it needs); best first."""


class BuildError(Exception):
    """The message says what is missing, or what the compiler said."""


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Flags of this processor, as the kernel names them; empty where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(
        next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), ())
    )


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _name(target: str) -> str:
    return f"kernels-{_hash(SOURCE.read_text(), *FLAGS)}-{target}.so"


def _native() -> str:
    return _hash(platform.machine(), *sorted(cpu_flags()))


def _folders() -> list[Path]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [SOURCE.with_name("built"), cache / "tideway"]


def find() -> Path | None:
    """The best library for this machine that has been built."""
    fitting = [name for name, (_, needs) in VARIANTS.items() if cpu_flags().issuperset(needs)]
    for target in (_native(), *fitting):
        for folder in _folders():
            if (path := folder / _name(target)).is_file():
                return path
    return None


def build(variant: str = "", timeout_s: float = BUILD_TIMEOUT_S) -> Path:
    """Compiles for this machine, or a variant. Blocking, some ten seconds. Raises `BuildError`."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise BuildError("there is no C compiler (apt install gcc libc6-dev)")
    march = VARIANTS[variant][0].split() if variant else ["-march=native"]
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch, "kernels.so")
                command = [compiler, *march, *FLAGS, str(SOURCE), "-o", str(made), "-lm"]
                done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
                if done.returncode:
                    raise BuildError(f"{' '.join(command)}: {done.stderr[-2000:]}")
                return made.replace(folder / _name(variant or _native()))
        except subprocess.TimeoutExpired:
            raise BuildError(f"{compiler} took longer than {timeout_s:.0f} s") from None
        except OSError as error:
            reason = error
    raise BuildError(f"no folder to write to: {reason}")


def find_or_build(timeout_s: float = BUILD_TIMEOUT_S) -> Path:
    """Processes that start together compile once. Raises `BuildError`, as one that waits for another within `timeout_s`."""
    if found := find():
        return found
    with ExitStack() as stack:
        for folder in _folders():
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                _take(stack.enter_context(folder.joinpath("lock").open("w")), timeout_s)
                break
        return find() or build(timeout_s=timeout_s)


def _take(lock: IO[str], timeout_s: float) -> None:
    """Waits for another process's build. The kernel takes the lock back from those that die. Raises `BuildError`."""
    give_up_s = time.monotonic() + timeout_s
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up_s:
                raise BuildError(f"another process compiles for longer than {timeout_s:.0f} s") from None
            time.sleep(LOCK_POLL_S)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.worker.native.building", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--variant", choices=tuple(VARIANTS), action="append", default=[])
    variants, failed = parser.parse_args().variant or [""], 0
    for variant in variants:
        try:
            print(build(variant, INSTALL_TIMEOUT_S) if variant else find_or_build(INSTALL_TIMEOUT_S))
        except BuildError as error:
            print(f"kernels are not compiled, torch's operators take their place: {error}", file=sys.stderr)
            failed += 1
    return int(failed == len(variants))


if __name__ == "__main__":
    sys.exit(main())
