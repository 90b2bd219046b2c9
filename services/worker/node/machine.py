"""What this machine has for instances: devices, memory, cores. Read from the kernel and from `nvidia-smi`; torch is not
imported (it takes seconds and hundreds of megabytes), only its files are looked at."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from services.worker.attention.facts import TORCH_CPU
from shared.messages.cluster import AttentionFacts, DeviceGroup
from shared.plugins import installed
from shared.runtime.settings import SettingsError, WorkerSettings

logger = logging.getLogger(__name__)

CPU_MEMORY_SHARE = 0.5
"""Share of the memory that is free at the start: the rest is for the processes themselves, page cache and others."""
GPU_MEMORY_SHARE = 0.9
"""Share of the free memory of a GPU: the rest is for the CUDA context and what libraries allocate."""
NVIDIA_SMI_TIMEOUT_S = 20.0
PROBE_COMMAND = (sys.executable, "-m", "services.worker.attention.choice")
PROBE_TIMEOUT_S = 120.0
ROOT = Path("/")


@dataclass(frozen=True)
class Machine:
    """What the node agent offers."""

    device: str
    """cpu | cuda"""
    num_instances: int
    memory_bytes: int
    """Memory for weights and KV pools of all instances."""
    num_threads: int
    """Threads of one device on CPU."""
    groups: tuple[DeviceGroup, ...] = ()
    """Device groups of the instances, in order; runs of equal length that cover the devices."""
    max_instances: int = 0
    """How many there may ever be: memory and cores are divided over so many. 0: `num_instances`."""
    attention: tuple[AttentionFacts, ...] = (AttentionFacts(),)
    """Facts of the attention back ends, fastest first."""
    device_name: str = ""
    """Name of the GPUs; empty: there are none, or of several kinds."""

    @property
    def most_instances(self) -> int:
        return max(self.num_instances, self.max_instances)

    @property
    def group_size(self) -> int:
        """Devices of each instance."""
        return self.groups[0].num_ranks if self.groups else 1

    @property
    def devices(self) -> tuple[str, ...]:
        """All, in their order."""
        return tuple(device for group in self.groups for device in group.devices)


def survey(settings: WorkerSettings, environment: Mapping[str, str] | None = None, root: Path = ROOT) -> Machine:
    """Blocking: may run `nvidia-smi`. `SettingsError` if a GPU is asked for and there is none. `root`: where /proc, /sys
    and /dev are."""
    environment = os.environ if environment is None else environment
    if settings.device not in ("auto", "cpu", "cuda"):
        raise SettingsError(f"TIDEWAY_DEVICE={settings.device!r}: expected auto, cpu or cuda")
    if settings.num_instances < 1:
        raise SettingsError(f"TIDEWAY_NUM_INSTANCES={settings.num_instances}: expected 1 or more")
    num_stages, size = settings.pipeline_parallel, settings.tensor_parallel * settings.pipeline_parallel
    if settings.tensor_parallel & (settings.tensor_parallel - 1):
        raise SettingsError(f"TIDEWAY_TENSOR_PARALLEL={settings.tensor_parallel}: expected a power of two")
    if settings.max_node_instances < 0:
        raise SettingsError(f"TIDEWAY_MAX_NODE_INSTANCES={settings.max_node_instances}: expected 0 or more")
    gpus = {} if settings.device == "cpu" else _gpus(environment, root)
    if gpus and not _torch_has_cuda():
        if settings.device == "cuda":
            raise SettingsError("TIDEWAY_DEVICE=cuda, but the installed torch is built without CUDA")
        logger.warning("there are GPUs, but the installed torch is built without CUDA: running on the CPU")
        gpus = {}
    if settings.device == "cuda" and not gpus:
        raise SettingsError("TIDEWAY_DEVICE=cuda, but nvidia-smi finds no GPU that may be used")
    if gpus:
        if len(gpus) % size:
            raise SettingsError(
                f"TIDEWAY_TENSOR_PARALLEL={settings.tensor_parallel}, TIDEWAY_PIPELINE_PARALLEL={num_stages}, but "
                f"{len(gpus)} GPUs cannot be divided so"
            )
        # The smallest share of all, as the plan divides memory evenly.
        free = int(min(gpu.free_bytes for gpu in gpus.values()) * GPU_MEMORY_SHARE) * len(gpus)
        names, kinds = list(gpus), {gpu.name for gpu in gpus.values()}
        return Machine(
            "cuda", len(gpus) // size, settings.memory_bytes or free, settings.num_threads or 1,
            tuple(DeviceGroup(tuple(names[k : k + size]), num_stages) for k in range(0, len(names), size)),
            attention=_probed_attention("cuda", environment), device_name=kinds.pop() if len(kinds) == 1 else "",
        )  # fmt: skip
    most = max(settings.num_instances, settings.max_node_instances)
    return Machine(
        "cpu",
        settings.num_instances,
        settings.memory_bytes or int(free_memory_bytes(root) * CPU_MEMORY_SHARE),
        settings.num_threads or max(1, num_cores(root) // (most * size)),
        max_instances=settings.max_node_instances,
        attention=_probed_attention("cpu", environment) if installed("tideway.attention_backends") else (TORCH_CPU,),
        groups=(DeviceGroup(("cpu",) * size, num_stages),) * most,
    )


def free_memory_bytes(root: Path = ROOT) -> int:
    """What processes here could still allocate: of the machine, and of each control group that this process is in."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    if match is None:
        raise SettingsError("/proc/meminfo has no MemAvailable; set TIDEWAY_MEMORY_BYTES")
    free = [int(match[1]) * 1024]
    for folder in _control_groups(root, "memory"):
        for limit_file, usage_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _read(folder / limit_file), _read(folder / usage_file)
            if limit.isdigit() and usage.isdigit():
                # Cached file pages count as used, but go when memory is needed.
                cached = re.search(r"^(?:total_)?inactive_file (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
                free.append(max(0, int(limit) - int(usage) + (int(cached[1]) if cached else 0)))
    return min(free)


def num_cores(root: Path = ROOT) -> int:
    """Cores that this process may use: affinity and CPU quota of its control groups; at least 1."""
    cores = [float(len(os.sched_getaffinity(0)))]
    for folder in _control_groups(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            cores.append(int(quota) / int(period))
    return max(1, int(min(cores)))


def _control_groups(root: Path, controller: str) -> list[Path]:
    """Folders of this process's control group and its ancestors, versions 2 and 1. In a container the namespace hides the
    outer ones, and the mount point itself is the container's group."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += [mount.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]
    return found


class Gpu(NamedTuple):
    free_bytes: int
    name: str
    """Name, which CUDA has too."""


def _gpus(environment: Mapping[str, str], root: Path) -> dict[str, Gpu]:
    """GPUs as CUDA_VISIBLE_DEVICES names them, in order; only those that it allows."""
    if not list((root / "dev").glob("nvidia[0-9]*")):
        return {}
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.free,name", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("there is a GPU device, but nvidia-smi failed: %s", error)
        return {}
    return parse_gpus(output, environment.get("CUDA_VISIBLE_DEVICES"))


def parse_gpus(output: str, visible: str | None) -> dict[str, Gpu]:
    """`output`: lines of "index, uuid, free MiB, name" (nvidia-smi). `visible`: CUDA_VISIBLE_DEVICES, None where not set: a
    list of indices or of beginnings of UUIDs, of which the first unknown one ends the list, as CUDA has it."""
    gpus = []
    for line in output.strip().splitlines():
        index, uuid, mebibytes, kind = (field.strip() for field in line.split(","))
        if mebibytes.isdigit():
            gpus.append((index, uuid, Gpu(int(mebibytes) << 20, kind)))
    if visible is None:
        # By UUID, because CUDA may count in another order.
        return {uuid: gpu for _, uuid, gpu in gpus}
    chosen: dict[str, Gpu] = {}
    for name in (part.strip() for part in visible.split(",")):
        matches = [gpu for index, uuid, gpu in gpus if name and (index == name or uuid.startswith(name))]
        if len(matches) != 1:
            break
        chosen[name] = matches[0]
    return chosen


def _probed_attention(device: str, environment: Mapping[str, str]) -> tuple[AttentionFacts, ...]:
    """Asked of a process that imports torch; what is assumed of any where it does not say."""
    try:
        done = subprocess.run(
            (*PROBE_COMMAND, device),
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=True,
        )
        last_line = done.stdout.strip().rpartition("\n")[2]
        return msgspec.json.decode(last_line, type=tuple[AttentionFacts, ...])
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        logger.warning("how many tokens a KV block has on %s is not known: %s", device, error)
        return (AttentionFacts(),)


def _torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return (
        re.search(r"^cuda\b[^=]*= *['\"]", _read(Path(spec.origin).with_name("version.py")), re.MULTILINE) is not None
    )


def _read(file: Path) -> str:
    """Contents, stripped; empty if the file cannot be read (there are two versions of control groups)."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
