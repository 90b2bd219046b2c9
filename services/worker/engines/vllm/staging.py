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
    """Mixed into vLLM's worker, which has `model_runner`."""

    model_runner: Any
    tideway_slots: torch.Tensor
    tideway_caches: list[torch.Tensor]
    """`[num_blocks, bytes of a block]` uint8, of each layer."""

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
        self.tideway_caches = [one.view(num_blocks, -1).view(torch.uint8) for one in caches]
        return f"/proc/{os.getpid()}/fd/{file}", block_bytes, layout

    def tideway_copy(self, blocks: list[int], slots: list[int], is_out: bool) -> None:
        """Copies blocks into slots, or back."""
        at = 0
        for cache in self.tideway_caches:
            part = self.tideway_slots[:, at : at + cache.shape[1]]
            if cache.device.type == "cpu":
                # A block at a time, without the copy that indexing makes: several times as fast.
                here, there = (cache.numpy(), part.numpy()) if is_out else (part.numpy(), cache.numpy())
                for from_, to in zip(*((blocks, slots) if is_out else (slots, blocks)), strict=True):
                    there[to] = here[from_]
            elif is_out:
                part[slots] = cache[blocks].cpu()
            else:
                cache[blocks] = part[slots].to(cache.device)
            at += cache.shape[1]


class Staging:
    """Saves and restores sequences in the engine core's process, between steps. `core`: vLLM's `EngineCore`."""

    def __init__(self, core: Any) -> None:
        self._core = core

    @property
    def _manager(self) -> Any:
        return self._core.scheduler.kv_cache_manager

    def open(self, num_slots: int) -> list[Any]:
        """`StagingWorker.tideway_open`. Raises `ValueError`."""
        config = self._core.vllm_config
        if config.parallel_config.world_size != 1:
            raise ValueError("the model is on several devices")
        if len(self._manager.kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("the model has several kinds of KV caches")
        if self._core.scheduler.needs_kv_cache_zeroing:
            raise ValueError("vLLM clears new blocks of this model")
        num_blocks = config.cache_config.num_gpu_blocks
        (found,) = self._core.model_executor.collective_rpc("tideway_open", args=(num_slots, num_blocks))
        self._core.scheduler.tideway_staging = self
        return list(found)

    def export(self, key: str, first_block: int, slots: list[int]) -> bool:
        """Whether the sequence had these full blocks, which are in the slots now."""
        num_computed = self._num_computed(key)
        if num_computed < (first_block + len(slots)) * self._block_size:
            return False
        self._copy_out(key, first_block, slots)
        return True

    def take_out(self, key: str, first_block: int, slots: list[int]) -> list[int]:
        """Ends the sequence. Returns how many of the slots were filled, and the tokens whose KV is in these and in the
        blocks before; below 0: it has not the blocks before."""
        from vllm.v1.request import RequestStatus

        num_computed, size = self._num_computed(key), self._block_size
        num_computed = min(num_computed, (first_block + len(slots)) * size)
        num_filled = -(-num_computed // size) - first_block
        if num_computed < first_block * size:
            num_filled = num_computed = -1
        elif num_filled:
            self._copy_out(key, first_block, slots[:num_filled])
        self._core.scheduler.finish_requests(key, RequestStatus.FINISHED_ABORTED)
        return [num_filled, num_computed]

    def _num_computed(self, key: str) -> int:
        """Tokens whose KV is there; below 0: it does not run."""
        request = self._core.scheduler.requests.get(key)
        if request is None or request not in self._core.scheduler.running:
            return -1
        return int(request.num_computed_tokens - request.num_in_flight_tokens)

    def _copy_out(self, key: str, first_block: int, slots: list[int]) -> None:
        blocks = self._manager.get_block_ids(key)[0][first_block : first_block + len(slots)]
        self._copy(blocks, slots, is_out=True)

    def bring_in(self, request: Any, slots: list[int], num_computed: int) -> None:
        """Gives the request, which is not scheduled yet, blocks with the slots' contents, as vLLM does with one whose KV a
        connector has loaded. Where there are not so many, it is computed."""
        if not 0 < num_computed < request.num_tokens or num_computed > len(slots) * self._block_size:
            return
        if self._manager.allocate_slots(request, num_computed) is None:
            return
        self._copy(self._manager.get_block_ids(request.request_id)[0][: len(slots)], slots, is_out=False)
        request.num_computed_tokens = num_computed
        if request.prefill_stats is not None:
            request.prefill_stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=num_computed,
                num_external_cached_tokens=0,
            )

    @property
    def _block_size(self) -> int:
        size: int = self._core.scheduler.block_size
        return size

    def _copy(self, blocks: list[int], slots: list[int], *, is_out: bool) -> None:
        if slots:
            self._core.model_executor.collective_rpc("tideway_copy", args=(list(blocks), list(slots), is_out))
