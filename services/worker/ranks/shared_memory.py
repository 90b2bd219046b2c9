"""Memory that all ranks of an instance map: words by which they agree, and the KV blocks of every rank (on GPUs a
window for them, and checkpoints), so that whoever moves blocks to other instances reaches all parts of them.

It is anonymous (memfd_create): it ends with the last process that maps it, whatever became of the others, and /dev/shm,
which containers keep small, has no part in it. Pages are committed only when first written.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch

HEADER_BYTES = 4096
"""Bytes of the header's words; a page, so that regions are aligned."""


class RankMemory:
    """`num_ranks` regions of `region_bytes` behind a header of words."""

    def __init__(self, path: str, num_ranks: int, region_bytes: int) -> None:
        """Opens what a rank has made (`path` of its `create`). The sizes are those it was made with. Raises `OSError`."""
        self.path = path
        self.num_ranks = num_ranks
        self.region_bytes = region_bytes
        fd = os.open(path, os.O_RDWR)
        try:
            # The mapping is never closed: tensors and arrays that see it hold it.
            self._mapped = mmap.mmap(fd, total_bytes(num_ranks, region_bytes))
        finally:
            os.close(fd)
        self.words = np.frombuffer(self._mapped, np.uint64, HEADER_BYTES // 8)
        """8 bytes each, zero at first; writing one is atomic."""

    @staticmethod
    def create(num_ranks: int, region_bytes: int) -> RankMemory:
        """Others may open its `path` for as long as this process lives."""
        fd = os.memfd_create("tideway-ranks")
        os.truncate(fd, total_bytes(num_ranks, region_bytes))
        # The descriptor stays open: the path leads through it.
        return RankMemory(f"/proc/{os.getpid()}/fd/{fd}", num_ranks, region_bytes)

    def region(self, rank: int) -> torch.Tensor:
        """`[region_bytes]` uint8, a storage of its own."""
        if not 0 <= rank < self.num_ranks:
            raise IndexError(f"rank {rank} of {self.num_ranks}")
        begin = HEADER_BYTES + rank * self.region_bytes
        return torch.frombuffer(self._mapped, dtype=torch.uint8, count=self.region_bytes, offset=begin)


def total_bytes(num_ranks: int, region_bytes: int) -> int:
    return HEADER_BYTES + num_ranks * region_bytes
