"""How Tideway's process starts vLLM's adapter."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from services.worker.engines.hosted import HostedEngine
from services.worker.engines.vllm.spec import HostedSpec
from shared.runtime.engine_environments import python_of, search_path

ADAPTER = "services.worker.engines.vllm.adapter"
TCMALLOC = Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
"""vLLM advises it; Debian's package libtcmalloc-minimal4."""
NOT_PASSED_ON = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "PYTHONPATH", "GLIBC_TUNABLES", "VIRTUAL_ENV")
"""Variables of this process's environment that vLLM does not get: they are for its own kernels."""


def hosted_vllm(
    spec: HostedSpec, device: str, cores: frozenset[int] = frozenset(), folder: Path | None = None
) -> HostedEngine:
    """`cores`: on CPU, where vLLM's threads run; empty: as vLLM decides. `folder`: of the environments. Raises
    `EngineEnvironmentError`."""
    python = python_of("vllm", folder)
    environment = adapter_environment(os.environ, python, search_path(folder), device, cores)
    return HostedEngine([str(python), "-m", ADAPTER, msgspec.json.encode(spec).decode()], environment)


def adapter_environment(
    inherited: Mapping[str, str], python: Path, packages: Path, device: str, cores: frozenset[int]
) -> dict[str, str]:
    """What the operator set for vLLM goes before what is set here. No word about its use is sent anywhere."""
    base = {name: value for name, value in inherited.items() if name not in NOT_PASSED_ON}
    ours = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if device == "cpu":
        libraries = [TCMALLOC, *sorted(python.parent.parent.glob("lib/libiomp5.so"))]
        ours["LD_PRELOAD"] = ":".join(str(path) for path in libraries if path.exists())
        if cores:
            ours["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(cores)))
    return {**ours, **base, "PYTHONPATH": str(packages), "PYTHONUNBUFFERED": "1"}
