"""Sums over the ranks of a CPU through memory that all map, by the compiled kernels: without gloo's sockets, and within a
call that computes many layers."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch.distributed.distributed_c10d import Store

from services.worker.native.library import DTYPES, RanksStruct, kernels

SLOT_BYTES = 1 << 20
LINE_BYTES = 64
STORE_KEY = "exchange"


class Exchange:
    """A rank's place in the memory. Calls are collective, as those of `RankGroup` are."""

    def __init__(self, path: str, rank: int, size: int, timeout_s: float, slot_bytes: int = SLOT_BYTES) -> None:
        """`path`: of a file of zeros, `total_bytes` long, that no other group uses. Raises `OSError`."""
        fd = os.open(path, os.O_RDWR)
        try:
            self._mapped = mmap.mmap(fd, total_bytes(size, slot_bytes))
        finally:
            os.close(fd)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
        slots = start + (size + 1) * LINE_BYTES
        self._struct = RanksStruct(start, slots, slot_bytes, int(timeout_s * 1e9), rank, size)
        self.pointer = ctypes.pointer(self._struct)
        """Pointer for calls that sum in between."""

    @property
    def is_lost(self) -> bool:
        """A rank did not come in time: nothing was or will be summed."""
        return bool(self._struct.is_lost)

    def takes(self, tensor: torch.Tensor, *, whole_rows: bool = False) -> bool:
        fits = not whole_rows or tensor.shape[-1] * tensor.itemsize <= self._struct.slot_bytes
        return fits and tensor.dtype in DTYPES and tensor.numel() > 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """In float32, in the order of the ranks; into `tensor`, which it returns."""
        compiled = kernels()
        assert compiled is not None
        whole = tensor.contiguous()
        compiled.sum_over_ranks(self._struct, whole)
        return tensor if whole is tensor else tensor.copy_(whole)

    def join(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """`[..., n]` of each rank -> `[..., size * n]`, in their order. None: a rank is lost."""
        compiled = kernels()
        assert compiled is not None
        return compiled.join_over_ranks(self._struct, tensor.contiguous())


def meet(store: Store, rank: int, size: int, timeout_s: float) -> Exchange | None:
    """The memory is rank 0's, who tells the others where it is. None: not all ranks have compiled kernels. Raises
    `RuntimeError` where a rank does not come to the store."""
    store.set(f"{STORE_KEY} of {rank}", "" if kernels() is None else "compiled")
    if not all(store.get(f"{STORE_KEY} of {other}") for other in range(size)):
        return None
    if rank == 0:
        # Open until all have it; then it ends with the last process that maps it.
        fd = os.memfd_create("tideway-exchange")
        os.truncate(fd, total_bytes(size, SLOT_BYTES))
        path = f"/proc/{os.getpid()}/fd/{fd}"
        store.set(STORE_KEY, path)
    else:
        path = store.get(STORE_KEY).decode()
    made = Exchange(path, rank, size, timeout_s)
    store.set(f"{STORE_KEY} mapped by {rank}", "")
    if rank == 0:
        store.wait([f"{STORE_KEY} mapped by {other}" for other in range(size)])
        os.close(fd)
    return made


def total_bytes(size: int, slot_bytes: int) -> int:
    return (size + 1) * LINE_BYTES + 2 * size * slot_bytes
