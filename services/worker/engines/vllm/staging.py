"""KV of vLLM's sequences on its way in and out, in vLLM's processes; no file of vLLM is changed.

    adapter --utility call--> engine core: `tideway_*`, between two steps --collective_rpc--> worker: copies
                              |  which blocks: the scheduler                                  |  KV cache <-> staging memory

The staging memory is an anonymous file of the worker's process, which Tideway's instance maps too. One worker, whose KV
caches all are `[num_blocks, ...]`: other layouts do not move.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch


class StagingWorker:
    """Mixed into vLLM's worker (`worker_extension_cls`), which has `model_runner`."""

    model_runner: Any
    tideway_slots: torch.Tensor

    def tideway_open(self, num_slots: int, num_blocks: int) -> tuple[str, int, str]:
        """Makes the staging memory; returns its path, the bytes of a block, and the layout. Raises `ValueError`."""
        caches = self.model_runner.kv_caches
        if not caches or any(one.shape[0] != num_blocks or not one[0].is_contiguous() for one in caches):
            shapes = sorted({str(tuple(one.shape)) for one in caches})
            raise ValueError(f"KV caches of the shape {', '.join(shapes)} are not made of {num_blocks} blocks")
        block_bytes = sum(one[0].nbytes for one in caches)
        file = os.memfd_create("tideway-staging")
        os.ftruncate(file, num_slots * block_bytes)
        mapped = mmap.mmap(file, num_slots * block_bytes)
        self.tideway_slots = torch.frombuffer(mapped, dtype=torch.uint8).view(num_slots, block_bytes)
        layout = ";".join(f"{one.dtype} {tuple(one.shape[1:])}" for one in caches)
        return f"/proc/{os.getpid()}/fd/{file}", block_bytes, layout

    def tideway_copy(self, blocks: list[int], slots: list[int], is_out: bool) -> None:
        """From blocks into slots, or back."""
        at = 0
        for cache in self.model_runner.kv_caches:
            size = cache[0].nbytes
            for block, slot in zip(blocks, slots, strict=True):
                there = self.tideway_slots[slot, at : at + size]
                here = cache[block].view(-1).view(torch.uint8)
                if is_out:
                    there.copy_(here)
                else:
                    here.copy_(there)
            at += size


class Staging:
    """In the engine core's process, between steps. `core`: vLLM's `EngineCore`."""

    def __init__(self, core: Any) -> None:
        self._core = core

    @property
    def _manager(self) -> Any:
        return self._core.scheduler.kv_cache_manager

    def open(self, num_slots: int) -> list[Any]:
        """`StagingWorker.tideway_open`. Raises `ValueError`."""
        config = self._core.vllm_config
        if not config.cache_config.enable_prefix_caching:
            raise ValueError("prefix caching is off")
        if config.parallel_config.world_size != 1:
            raise ValueError("the model is on several devices")
        if len(self._manager.kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("the model has several kinds of KV caches")
        num_blocks = config.cache_config.num_gpu_blocks
        (found,) = self._core.model_executor.collective_rpc("tideway_open", args=(num_slots, num_blocks))
        self._core.scheduler.tideway_staging = self
        return list(found)

    def export(self, key: str, first_block: int, slots: list[int]) -> bool:
        """Whether the sequence had these full blocks, which are in the slots now."""
        return self._copy_out(key, first_block, slots) == len(slots)

    def take_out(self, key: str, first_block: int, slots: list[int]) -> int:
        """Ends the sequence; how many of the slots were filled; below 0: it has not the blocks before."""
        from vllm.v1.request import RequestStatus

        num_filled = self._copy_out(key, first_block, slots)
        self._core.scheduler.finish_requests(key, RequestStatus.FINISHED_ABORTED)
        return num_filled

    def _copy_out(self, key: str, first_block: int, slots: list[int]) -> int:
        request = self._core.scheduler.requests.get(key)
        if request is None or request not in self._core.scheduler.running:
            return -1
        num_full = int(request.num_computed_tokens - request.num_in_flight_tokens) // self._block_size
        if num_full < first_block:
            return -1
        count = min(num_full - first_block, len(slots))
        blocks = self._manager.get_block_ids(key)[0][first_block : first_block + count]
        self._copy(blocks, slots[:count], is_out=True)
        return count

    def bring_in(self, request: Any, slots: list[int]) -> None:
        """Copies slots into free blocks that the request, which is not scheduled yet, then finds by their hashes. Where
        there are not so many, it computes them itself."""
        pool = self._manager.block_pool
        count = min(len(slots), (request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        if not count or pool.get_num_free_blocks() <= count:
            return
        blocks = pool.get_new_blocks(count)
        self._copy([one.block_id for one in blocks], slots[:count], is_out=False)
        pool.cache_full_blocks(request, blocks, 0, count, self._block_size, 0)
        pool.free_blocks(reversed(blocks))

    @property
    def _block_size(self) -> int:
        size: int = self._core.scheduler.block_size
        return size

    def _copy(self, blocks: list[int], slots: list[int], *, is_out: bool) -> None:
        if slots:
            self._core.model_executor.collective_rpc("tideway_copy", args=(list(blocks), list(slots), is_out))


def install() -> None:
    """Lets the engine core answer the adapter's utility calls."""
    from vllm.v1.engine.core import EngineCore

    def of(core: Any) -> Staging:
        staging: Staging = core.tideway_staging
        return staging

    def tideway_open(core: Any, num_slots: int) -> list[Any]:
        core.tideway_staging = Staging(core)
        return of(core).open(num_slots)

    def tideway_export(core: Any, key: str, first_block: int, slots: list[int]) -> bool:
        return of(core).export(key, first_block, slots)

    def tideway_take_out(core: Any, key: str, first_block: int, slots: list[int]) -> int:
        return of(core).take_out(key, first_block, slots)

    def tideway_wait(core: Any) -> bool:
        """Answered after all that was sent before."""
        return True

    for function in (tideway_open, tideway_export, tideway_take_out, tideway_wait):
        setattr(EngineCore, function.__name__, function)
