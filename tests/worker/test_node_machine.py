"""What the node agent reads of the machine, from files as Linux has them."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from services.worker.attention.facts import TORCH_CPU, TORCH_CUDA, flash
from services.worker.attention.torch_backend import TorchBackend
from services.worker.node import machine
from services.worker.node.machine import Gpu, Machine, free_memory_bytes, num_cores, parse_gpus, survey
from shared.messages.cluster import AttentionFacts, DeviceGroup
from shared.runtime.settings import SettingsError, WorkerSettings

GIB = 1 << 30
FLASH_2 = msgspec.json.encode([flash(2, 256, 256), TORCH_CUDA]).decode()
SMI = "0, GPU-aa11, 143000, NVIDIA H200\n1, GPU-bb22, 1000, NVIDIA H200\n2, GPU-bb33, [N/A], NVIDIA L4\n"
CPUS = (DeviceGroup(("cpu",)),) * 3


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write(tmp_path, {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:   {16 * GIB // 1024} kB\n"})


def test_memory_without_control_groups(root: Path) -> None:
    assert free_memory_bytes(root) == 16 * GIB


def test_memory_in_a_container_with_control_groups_version_2(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        },
    )
    assert free_memory_bytes(root) == 2 * GIB


def test_memory_is_bounded_by_every_ancestor(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "0::/user/service\n",
            "sys/fs/cgroup/user/service/memory.max": "max\n",
            "sys/fs/cgroup/user/service/memory.current": "5\n",
            "sys/fs/cgroup/user/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/user/memory.current": "0\n",
        },
    )
    assert free_memory_bytes(root) == GIB


def test_memory_with_control_groups_version_1(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "5:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB // 2}\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert free_memory_bytes(root) == 3 * GIB // 2
    assert num_cores(root) == 1


def test_cores_follow_the_quota(root: Path) -> None:
    available = len(os.sched_getaffinity(0))
    assert num_cores(root) == available
    write(root, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert num_cores(root) == 1
    write(root, {"sys/fs/cgroup/cpu.max": "max 100000\n"})
    assert num_cores(root) == available


def test_gpus_and_their_free_memory() -> None:
    first, second = Gpu(143000 << 20, "NVIDIA H200"), Gpu(1000 << 20, "NVIDIA H200")
    assert parse_gpus(SMI, None) == {"GPU-aa11": first, "GPU-bb22": second}
    assert parse_gpus(SMI, "1,0") == {"1": second, "0": first}
    assert parse_gpus(SMI, "GPU-bb2,7,0") == {"GPU-bb2": second}, "an unknown one ends the list"
    assert parse_gpus(SMI, "") == {}


def test_half_of_the_free_memory_and_all_cores_are_for_the_instances(root: Path) -> None:
    found = survey(WorkerSettings(num_instances=2, device="cpu"), {}, root)
    assert found == Machine("cpu", 2, 8 * GIB, max(1, num_cores(root) // 2), CPUS[:2], attention=(TORCH_CPU,))
    assert survey(WorkerSettings(memory_bytes=5, num_threads=3), {}, root).num_threads == 3
    assert TorchBackend(torch.device("cpu")).facts == TORCH_CPU


def test_room_for_more_instances_is_set_aside_from_the_start(root: Path) -> None:
    found = survey(WorkerSettings(num_instances=1, max_node_instances=3, device="cpu"), {}, root)
    assert found == Machine(
        "cpu", 1, 8 * GIB, max(1, num_cores(root) // 3), CPUS, max_instances=3, attention=(TORCH_CPU,)
    )
    assert found.most_instances == 3
    assert survey(WorkerSettings(num_instances=2, max_node_instances=1, device="cpu"), {}, root).most_instances == 2
    with pytest.raises(SettingsError, match="TIDEWAY_MAX_NODE_INSTANCES=-1"):
        survey(WorkerSettings(max_node_instances=-1), {}, root)


@pytest.fixture
def with_gpus(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with `nvidia-smi` and a torch for CUDA."""
    write(root, {"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": ""})
    program = write(root, {"bin/nvidia-smi": f"#!/bin/sh\ncat <<END\n{SMI}END\n"}) / "bin/nvidia-smi"
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{root / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr(machine, "PROBE_COMMAND", ("/bin/sh", "-c", f"echo a warning; echo '{FLASH_2}'"))
    return root


def test_what_attention_takes_is_what_its_back_ends_say(with_gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert survey(WorkerSettings(), {}, with_gpus).attention == (flash(2, 256, 256), TORCH_CUDA)
    for script in ("exit 1", "echo", "echo no", "echo 256"):
        monkeypatch.setattr(machine, "PROBE_COMMAND", ("/bin/sh", "-c", script))
        assert survey(WorkerSettings(), {}, with_gpus).attention == (AttentionFacts(),)


def test_the_probe_says_what_back_ends_say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    monkeypatch.setattr(sys, "argv", ["choice", "cuda"])
    runpy.run_module("services.worker.attention.choice", run_name="__main__")
    assert msgspec.json.decode(capsys.readouterr().out, type=tuple[AttentionFacts, ...]) == (TORCH_CUDA,)


def test_one_instance_a_gpu(with_gpus: Path) -> None:
    found = survey(WorkerSettings(num_instances=5), {}, with_gpus)
    assert (found.device, found.num_instances, found.groups) == (
        "cuda",
        2,
        (DeviceGroup(("GPU-aa11",)), DeviceGroup(("GPU-bb22",))),
    )
    assert found.memory_bytes == 2 * int(1000 * (1 << 20) * machine.GPU_MEMORY_SHARE)
    assert found.device_name == "NVIDIA H200"
    assert survey(WorkerSettings(device="cpu"), {}, with_gpus).device == "cpu"
    assert survey(WorkerSettings(), {"CUDA_VISIBLE_DEVICES": ""}, with_gpus).device == "cpu"
    write(with_gpus, {"bin/nvidia-smi": f"#!/bin/sh\ncat <<END\n{SMI.replace('H200', 'L4', 1)}END\n"})
    assert survey(WorkerSettings(), {}, with_gpus).device_name == "", "they are of two kinds"


def test_devices_are_grouped(with_gpus: Path) -> None:
    found = survey(WorkerSettings(tensor_parallel=2), {}, with_gpus)
    assert (found.num_instances, found.groups) == (1, (DeviceGroup(("GPU-aa11", "GPU-bb22")),))
    assert (found.group_size, found.devices) == (2, ("GPU-aa11", "GPU-bb22"))
    on_cpu = survey(WorkerSettings(tensor_parallel=2, num_instances=2, device="cpu"), {}, with_gpus)
    assert (on_cpu.num_instances, on_cpu.groups, len(on_cpu.devices)) == (2, (DeviceGroup(("cpu", "cpu")),) * 2, 4)
    assert on_cpu.num_threads == max(1, num_cores(with_gpus) // 4)
    staged = survey(WorkerSettings(pipeline_parallel=2), {}, with_gpus)
    assert staged.groups == (DeviceGroup(("GPU-aa11", "GPU-bb22"), 2),) and staged.groups[0].stage_size == 1
    with pytest.raises(SettingsError, match="2 GPUs cannot be divided"):
        survey(WorkerSettings(tensor_parallel=4), {}, with_gpus)
    with pytest.raises(SettingsError, match="TIDEWAY_TENSOR_PARALLEL=3: expected a power of two"):
        survey(WorkerSettings(tensor_parallel=3), {}, with_gpus)


def test_a_gpu_that_cannot_be_used_is_a_clear_error(with_gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_torch_has_cuda", lambda: False)
    assert survey(WorkerSettings(), {}, with_gpus).device == "cpu"
    with pytest.raises(SettingsError, match="built without CUDA"):
        survey(WorkerSettings(device="cuda"), {}, with_gpus)
    with pytest.raises(SettingsError, match="finds no GPU"):
        survey(WorkerSettings(device="cuda"), {"CUDA_VISIBLE_DEVICES": ""}, with_gpus)
    with pytest.raises(SettingsError, match="TIDEWAY_DEVICE='tpu'"):
        survey(WorkerSettings(device="tpu"), {}, with_gpus)
    with pytest.raises(SettingsError, match="TIDEWAY_NUM_INSTANCES=0"):
        survey(WorkerSettings(num_instances=0), {}, with_gpus)


def test_whether_torch_has_cuda_is_read_from_its_files() -> None:
    assert machine._torch_has_cuda() == (torch.version.cuda is not None)
