"""Host arrays on their way to a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` as a tensor on `device`, without waiting for the device: on CUDA it goes through pinned memory, which
    torch keeps until the copy is done. On CPU the tensor shares the array's memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in page-locked memory, there when the stream has come so far; on CPU the tensor itself."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@contextmanager
def beside_steps(device: torch.device) -> Iterator[None]:
    """What is computed within runs beside the steps, and is there at the end: on CUDA on a stream of its own, which alone is
    waited for. (A wait for the whole device would end captures of other threads.)"""
    if device.type == "cpu":
        yield
        return
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
