"""Host arrays on their way to a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

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


_ALIGNMENT_BYTES = 16


def pack_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Does `to_device` of each, in one copy."""
    if device.type == "cpu":
        return [to_device(array, device) for array in arrays]
    packed, places = pack(arrays, pinned=True)
    return unpack(packed.to(device, non_blocking=True), arrays, places)


def pack(arrays: Sequence[np.ndarray], *, pinned: bool) -> tuple[torch.Tensor, list[int]]:
    """[bytes] uint8 that holds the arrays, and the place of each in it."""
    places, num_bytes = [], 0
    for array in arrays:
        places.append(num_bytes)
        num_bytes += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    packed = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    cells = packed.numpy()
    for array, begin in zip(arrays, places, strict=True):
        cells[begin : begin + array.nbytes].view(array.dtype)[:] = array.ravel()
    return packed, places


def unpack(packed: torch.Tensor, arrays: Sequence[np.ndarray], places: Sequence[int]) -> list[torch.Tensor]:
    """Views of `packed` in the shapes and types of the arrays that were put there."""
    return [
        packed[begin : begin + array.nbytes].view(_DTYPES[array.dtype.name]).view(array.shape)
        for array, begin in zip(arrays, places, strict=True)
    ]


_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32, "bool": torch.bool}


class Field(NamedTuple):
    """A field of `StaticInputs`."""

    dtype: type[np.generic]
    size: int
    """Elements at most."""


class StaticInputs:
    """Fields of one dimension, each at its place of a buffer on a device, which one copy fills: what a captured graph
    reads."""

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        empty = [np.zeros(field.size, field.dtype) for field in fields.values()]
        packed, self._places = pack(empty, pinned=False)
        self._buffer = packed.to(device)
        self._dtypes = [array.dtype for array in empty]
        self._names = list(fields)
        self.tensors = dict(zip(fields, unpack(self._buffer, empty, self._places), strict=True))

    def fill(self, values: Mapping[str, np.ndarray]) -> None:
        """All fields in their order; only the last may have less than its size, and what it does not fill is left as it
        was. Does not wait for the device."""
        last = values[self._names[-1]]
        num_bytes = self._places[-1] + last.nbytes
        on_host = self._buffer.device.type == "cpu"
        packed = self._buffer if on_host else torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        cells = packed.numpy()
        for name, begin, dtype in zip(self._names, self._places, self._dtypes, strict=True):
            array = values[name]
            cells[begin : begin + array.size * dtype.itemsize].view(dtype)[:] = array.ravel()
        if not on_host:
            self._buffer[:num_bytes].copy_(packed, non_blocking=True)


@contextmanager
def beside_steps(device: torch.device, stream: Any = None) -> Iterator[None]:
    """What is computed within runs beside the steps, and is there at the end: on CUDA on a stream of its own, which alone is
    waited for. (A wait for the whole device would end captures of other threads.) `stream`: of who does so often, as there
    are few and new ones are shared with others."""
    if device.type == "cpu":
        yield
        return
    stream = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
