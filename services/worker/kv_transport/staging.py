"""Blocks of a pool to and from the messages of a link, by a thread beside the event loop.

A chunk whose blocks are one run of memory is sent from the pool and received into it. Otherwise its blocks are fused in a
staging buffer. A link that cannot read device memory always gets staging, page-locked.

| memory | owner |
|---|---|
| a staging pair | the transfer that took it, until it gives it back; never given back after its link broke within a call |
| a block of the source | the caller of `send` or `complete`; only read |
| a block of the destination | the transfer, from `expect` until it is ended; never written afterwards |
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from services.worker.kv.kv_store import BlockParts, KvBlocks, WindowedBlocks
from services.worker.kv.transfer import to_device
from services.worker.kv_transport.faults import Faults
from services.worker.kv_transport.links import Buffer
from services.worker.kv_transport.wire import LINE_BYTES, PIECE_BYTES, checksum, device_checksum

T = TypeVar("T")


class _Part(NamedTuple):
    """What a rank has of each block."""

    stage: slice
    """The rank's stage's part of a whole block's bytes."""
    rank: int
    num_ranks: int
    """Ranks of the stage."""
    cells: np.ndarray
    """`[num_blocks, runs, run_bytes]`: the rank's."""

    def of(self, block: np.ndarray) -> np.ndarray:
        """`[runs, run_bytes]` of a whole one."""
        part: np.ndarray = block[self.stage].reshape(-1, self.num_ranks, self.cells.shape[2])[:, self.rank]
        return part


def _parts(blocks: BlockParts) -> Iterator[_Part]:
    begin = 0
    for ranks in blocks.stages:
        end = begin + len(ranks) * ranks[0].shape[1]
        for rank, rows in enumerate(ranks):
            cells = rows.numpy().reshape(len(rows), -1, blocks.run_bytes)
            yield _Part(slice(begin, end), rank, len(ranks), cells)
        begin = end


class KvPool:
    """The blocks of one model: `rows` is `[num_blocks, block_bytes]` uint8, of any row stride, on the CPU or a CUDA
    device; or, on the CPU, their parts, which are joined on the way out and cut on the way in, perhaps behind a window."""

    def __init__(self, rows: KvBlocks) -> None:
        num_blocks, self._window = len(rows), None
        if isinstance(rows, WindowedBlocks):
            self._window, rows = rows, rows.window
        parts = rows if isinstance(rows, BlockParts) else BlockParts([[rows]], rows.shape[-1])
        rows = parts.stages[0][0]
        if rows.dim() != 2 or rows.dtype != torch.uint8 or rows.stride(1) != 1:
            raise ValueError(f"a pool is [blocks, bytes] uint8 with contiguous blocks, not {rows.shape} {rows.dtype}")
        self.num_blocks, self.block_bytes = num_blocks, sum(rank.shape[1] for ranks in parts.stages for rank in ranks)
        self.on_device = rows.is_cuda
        self.device = rows.device
        self._rows = rows
        if rows.is_cuda and self.block_bytes > rows.shape[1]:
            raise ValueError("parts of blocks on a device are not joined")
        self._parts: list[_Part] = [] if rows.is_cuda else list(_parts(parts))
        """On the CPU."""
        self._stream: Any = torch.cuda.Stream(rows.device) if rows.is_cuda else None  # type: ignore[no-untyped-call]
        self._step = max(1, PIECE_BYTES // max(1, self.block_bytes))

    def has(self, blocks: Sequence[int]) -> bool:
        return all(0 <= block < self.num_blocks for block in blocks)

    def run_of(self, blocks: Sequence[int]) -> Buffer | None:
        """`[len(blocks) * block_bytes]` uint8: the memory of the blocks, if they are one run of it in this order."""
        if len(self._parts) > 1 or self._window is not None:
            return None
        first = blocks[0]
        if len(blocks) > 1 and (
            self._rows.stride(0) != self.block_bytes or any(block != first + i for i, block in enumerate(blocks))
        ):
            return None
        run = self._rows[first] if len(blocks) == 1 else self._rows[first : first + len(blocks)].view(-1)
        return run if self.on_device else run.numpy()

    def checksum(self, payload: Buffer, checked_bytes: int) -> int:
        """Checksum of a chunk that needs no copy; as `gather` and `scatter` sum it, whose other end may be of another
        kind of memory. Blocks."""
        if isinstance(payload, torch.Tensor) and self._stream is not None:
            with torch.cuda.stream(self._stream):
                return self._sum(payload, checked_bytes)
        return self._sum(payload, checked_bytes)

    def _sum(self, payload: Buffer, checked_bytes: int) -> int:
        step, seed = self._step * self.block_bytes, 0
        if step % LINE_BYTES == 0:  # in one call, which needs the interpreter's lock only once; the sums are the same
            step = len(payload)
        for start in range(0, len(payload), step):
            piece = payload[start : start + step]
            if isinstance(piece, torch.Tensor):
                seed = device_checksum(piece, checked_bytes, seed)
            else:
                seed = checksum(piece, checked_bytes, seed)
        return seed

    def gather(self, blocks: Sequence[int], staging: torch.Tensor, checked_bytes: int) -> int:
        """Copies blocks one after the other into `staging`; returns their checksum."""
        return self._copy(blocks, staging, checked_bytes, True)

    def scatter(self, blocks: Sequence[int], staging: torch.Tensor, checked_bytes: int) -> int:
        return self._copy(blocks, staging, checked_bytes, False)

    def zero(self, blocks: Sequence[int]) -> None:
        if self._stream is None:
            self._copy_parts(blocks, np.zeros((len(blocks), self.block_bytes), np.uint8), False)
            return
        with torch.cuda.stream(self._stream):
            for block in blocks:
                self._rows[block].zero_()
        self._stream.synchronize()

    def _copy(self, blocks: Sequence[int], staging: torch.Tensor, checked_bytes: int, outward: bool) -> int:
        staged = staging[: len(blocks) * self.block_bytes].view(len(blocks), self.block_bytes)
        if self._stream is not None:
            return self._copy_on_device(blocks, staged, checked_bytes, outward)
        # numpy copies in this thread alone, where torch would start a team of threads beside the model's
        host, seed = staged.numpy(), 0
        for start in range(0, len(blocks), self._step):
            piece = host[start : start + self._step]
            if not outward:
                seed = checksum(piece.reshape(-1), checked_bytes, seed)
            self._copy_parts(blocks[start : start + self._step], piece, outward)
            if outward:
                seed = checksum(piece.reshape(-1), checked_bytes, seed)
        return seed

    def _copy_parts(self, blocks: Sequence[int], whole: np.ndarray, outward: bool) -> None:
        """`whole`: `[len(blocks), block_bytes]`."""
        if self._window is None:
            self._copy_cells(blocks, whole, outward)
            return
        most = len(self._window.window)
        for start in range(0, len(blocks), most):
            some = blocks[start : start + most]
            with self._window.lock:
                if outward:
                    self._window.move(some, True)
                self._copy_cells(range(len(some)), whole[start : start + most], outward)
                if not outward:
                    self._window.move(some, False)

    def _copy_cells(self, blocks: Sequence[int], whole: np.ndarray, outward: bool) -> None:
        for place, block in zip(whole, blocks, strict=True):
            for part in self._parts:
                staged_part, cells = part.of(place), part.cells[block]
                np.copyto(*((staged_part, cells) if outward else (cells, staged_part)))

    def _copy_on_device(self, blocks: Sequence[int], staged: torch.Tensor, checked_bytes: int, outward: bool) -> int:
        with torch.cuda.stream(self._stream):
            if staged.is_cuda:
                index = to_device(np.array(blocks, np.int64), self.device)
                rows, words = as_words(self._rows, staged)
                if outward:
                    torch.index_select(rows, 0, index, out=words)
                else:
                    rows.index_copy_(0, index, words)
            else:
                for row, begin, end in runs_of(blocks):
                    rows, piece = self._rows[row : row + end - begin], staged[begin:end]
                    target, source = (piece, rows) if outward else (rows, piece)
                    target.copy_(source, non_blocking=True)
        if outward:
            self._stream.synchronize()
        digest = self.checksum(buffer_of(staged.view(-1)), checked_bytes)
        self._stream.synchronize()
        return digest


def as_words(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`[n, num_bytes]` uint8 tensors as words as large as all of them take: a gather moves one element a thread."""
    for dtype in (torch.complex128, torch.int64, torch.int32):
        size = dtype.itemsize
        if all(n % size == 0 for t in tensors for n in (t.shape[1], t.stride(0), t.storage_offset(), t.data_ptr())):
            return tuple(t.view(dtype) for t in tensors)
    return tensors


def runs_of(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first block, begin, end) of each stretch of consecutive blocks: one copy each."""
    begin = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] + 1:
            yield blocks[begin], begin, end
            begin = end


class StagingPair:
    """Two buffers `[num_bytes]` uint8, made when first asked for: in a thread, since memory of a device, or that is
    page-locked for one, takes long to get."""

    def __init__(self, num_bytes: int, device: torch.device, pinned: bool) -> None:
        self.kind = (num_bytes, device, pinned)
        self._buffers: list[torch.Tensor | None] = [None, None]

    async def buffer(self, index: int, executor: Executor) -> torch.Tensor:
        if (known := self._buffers[index % 2]) is not None:
            return known
        made = await to_end(asyncio.get_running_loop().run_in_executor(executor, self._make))
        self._buffers[index % 2] = made
        return made

    def _make(self) -> torch.Tensor:
        num_bytes, device, pinned = self.kind
        made = torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        if made.is_cuda:
            # It may be memory that steps have given back and still use: torch orders that on their stream only.
            torch.cuda.current_stream(device).synchronize()
        return made


class StagingPairs:
    """One for each transfer under way, at most `max_pairs`. `reads_device`: of the links they are for."""

    def __init__(self, max_pairs: int, reads_device: bool) -> None:
        self._permits = asyncio.Semaphore(max_pairs)
        self._reads_device = reads_device
        self._free: list[StagingPair] = []
        self.num_taken = 0

    async def take(self, num_bytes: int, pool: KvPool) -> StagingPair:
        """Waits for one to be given back."""
        await self._permits.acquire()
        self.num_taken += 1
        on_device = pool.on_device and self._reads_device
        kind = (num_bytes, pool.device if on_device else torch.device("cpu"), pool.on_device and not on_device)
        for index, pair in enumerate(self._free):
            if pair.kind == kind:
                return self._free.pop(index)
        self._free = self._free[-1:]  # of other pools: one is kept
        return StagingPair(*kind)

    def run_of(self, pool: KvPool, blocks: Sequence[int]) -> Buffer | None:
        """The memory of these blocks, if a link can read and write it as one message."""
        return None if pool.on_device and not self._reads_device else pool.run_of(blocks)

    def give_back(self, pair: StagingPair, *, reusable: bool) -> None:
        """Not `reusable`: a broken link may still refer to them, so they are left to it."""
        if reusable:
            self._free.append(pair)
        self.num_taken -= 1
        self._permits.release()


def buffer_of(staging: torch.Tensor) -> Buffer:
    return staging if staging.is_cuda else staging.numpy()


async def to_end(work: asyncio.Future[T]) -> T:
    """Awaits the work of a thread; a cancelled caller waits until the thread is done with the memory."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


@dataclass(frozen=True)
class End:
    """What the transfers out of a transport have in common, or those into it."""

    staging: StagingPairs
    executor: Executor
    faults: Faults
