"""Devices of the two processes of a bench: `--device cpu`, `cuda` (both on one GPU), or `cuda:0 cuda:1` (one each);
and how large a model's KV blocks are there."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        nargs="+",
        default=["cpu"],
        metavar="DEVICE",
        help="cpu (the default), cuda (both ends on one GPU), or one for each end: cuda:0 cuda:1",
    )


def environments(devices: Sequence[str], visible: str | None) -> list[dict[str, str]]:
    """What each of the two processes finds in its environment beside ours, so that it sees its GPU alone, as instances do;
    nothing on CPU. `visible`: our own CUDA_VISIBLE_DEVICES, None where not set. Raises `ValueError`."""
    if list(devices) == ["cpu"]:
        return [{}, {}]
    ends = []
    for device in (devices[0], devices[-1]):
        kind, _, number = device.partition(":")
        if kind != "cuda" or not (number or "0").isdecimal() or len(devices) > 2:
            raise ValueError(f"--device {' '.join(devices)}: expected cpu, cuda, or two like cuda:0 cuda:1")
        index = int(number or 0)
        name = str(index)
        if visible is not None:
            names = [name.strip() for name in visible.split(",") if name.strip()]
            if index >= len(names):
                raise ValueError(f"--device {device}: CUDA_VISIBLE_DEVICES names {len(names)} devices")
            name = names[index]
        ends.append({"CUDA_VISIBLE_DEVICES": name})
    return ends


def gpu_names(devices: Sequence[str]) -> str:
    """Names of GPUs for a report; empty on CPU. Makes CUDA contexts here."""
    if list(devices) == ["cpu"]:
        return ""
    import torch

    return ", ".join(dict.fromkeys(torch.cuda.get_device_name(device) for device in devices))


def kv_block(checkpoint: Path, device: torch.device, *, deterministic: bool = False) -> tuple[int, int]:
    """(bytes, tokens) of a KV block of the checkpoint's model there, without reading its weights."""
    from services.worker.attention.choice import choose_backends
    from shared.models.checkpoint import describe, run_dtype

    shape = describe(checkpoint)
    dtype = run_dtype("auto", shape.dtype, device.type)
    backends = choose_backends(device, deterministic=deterministic)
    facts = next(backend.facts for backend in backends if backend.facts.runs(shape.head_dim, dtype))
    block_size = facts.block_sizes[0]
    return shape.kv_geometry(dtype).block_bytes(block_size), block_size
