"""Checkpoints of KV blocks in host memory: copies out and back, beside the steps (ConServe section 4.4).

The host pool is cut into merged blocks as the slab is, so a model's flat block indices address it in the same way. One
thread copies whole blocks, each one run of bytes:

- On CPU by memcpy without the interpreter's lock, and with less priority than the model's threads.
- On CUDA by the copy engines on a stream of their own, from and to page-locked memory; unlike gather kernels they leave
  the multiprocessors to the steps, and a block is long enough for full bandwidth.

A move within the device is not copied here: its end is waited for, and reported.

A copy is reported when it is complete in memory. `start` and `close` belong to the thread of the steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.worker.executor.suspension import cuda_event
from services.worker.kv.kv_store import KvStore, KvViews
from shared.engine.plan import CopyKind, EndedCopy, KvCopy

logger = logging.getLogger(__name__)

MAX_PENDING = 4096
"""Copies that wait; more fail at once."""
NICENESS = 15
"""Niceness of the copying thread on CPU: cycles that steps leave, and a share of theirs that is lost in noise."""
CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class _Job:
    copy: KvCopy
    views: KvViews
    after: torch.cuda.Event | None


class KvCopies:
    def __init__(
        self,
        store: KvStore,
        num_host_merged: int,
        *,
        max_pending: int = MAX_PENDING,
        memory: torch.Tensor | None = None,
    ) -> None:
        """`num_host_merged`: merged blocks in the host pool; 0: there is none and every copy fails. `memory`: to use for it,
        uint8; None: it is allocated. Raises `RuntimeError` if so much memory cannot be had (page-locked, on CUDA)."""
        self._store = store
        num_bytes = num_host_merged * store.merged_bytes
        # on CPU the pages are committed only when first written
        self.pool = torch.empty(num_bytes, dtype=torch.uint8) if memory is None else memory[:num_bytes]
        self._stream: Any = None
        if store.slab.is_cuda and num_host_merged:
            # torch's own pinned allocator rounds up to a power of two
            _check(_runtime().cudaHostRegister(self.pool.data_ptr(), self.pool.numel(), 0))
            self._stream = torch.cuda.Stream(store.slab.device)  # type: ignore[no-untyped-call]
        self.on_finished: Callable[[], None] = lambda: None
        self._jobs: queue.Queue[_Job | None] = queue.Queue(max_pending)
        self._finished: deque[EndedCopy] = deque()
        self._closing = False
        self._thread: threading.Thread | None = None

    def is_valid(self, copy: KvCopy, views: KvViews) -> bool:
        """Whether the blocks it names exist."""
        num_host_blocks = self.pool.numel() // views.stride_bytes
        return (
            len(copy.device_blocks) == len(copy.host_blocks)
            and all(0 <= block < views.num_blocks for block in copy.device_blocks)
            and all(0 <= block < num_host_blocks for block in copy.host_blocks)
        )

    def start(self, copy: KvCopy, views: KvViews | None, *, after: torch.cuda.Event | None = None) -> None:
        """`views`: of the copy's model; None: it is not here, and the copy fails. `after`: on the device the copy waits
        for it."""
        if views is None or not self.is_valid(copy, views) or self._closing:
            logger.error("%s %d of %s cannot be: no such blocks", copy.kind, copy.copy_id, copy.model)
            self._report(copy, False)
            return
        if not self._put(_Job(copy, views, after)):
            logger.error("%s %d fails: %d copies wait already", copy.kind, copy.copy_id, self._jobs.maxsize)
            self._report(copy, False)

    def await_move(self, copy: KvCopy, views: KvViews, end: torch.cuda.Event | None) -> None:
        """Reports a move within the device when the event is reached; None: it is done."""
        if end is None:
            self._report(copy, True)
        elif not self._put(_Job(copy, views, end)):
            end.synchronize()
            self._report(copy, True)

    def _put(self, job: _Job) -> bool:
        """Whether there is place for it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-copies", daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def finished(self) -> list[EndedCopy]:
        """Those that ended since the last call."""
        finished = []
        with contextlib.suppress(IndexError):  # several threads may ask
            while True:
                finished.append(self._finished.popleft())
        return finished

    def close(self) -> None:
        """Ends the thread after the copy that it is at; those that wait fail. The pool must not be used any more."""
        self._closing = True
        if self._thread is not None:
            # a full queue needs no wake-up
            if not self._jobs.full():
                self._jobs.put_nowait(None)
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("the copying thread did not end within %.0f s", CLOSE_TIMEOUT_S)
                return
        if self._stream is not None:
            _check(_runtime().cudaHostUnregister(self.pool.data_ptr()))
            self._stream = None

    def _report(self, copy: KvCopy, ok: bool, seconds: float = 0.0) -> None:
        self._finished.append(EndedCopy(copy.copy_id, ok, seconds))
        self.on_finished()

    # ------------------------------------------------------------------------------------ the copying thread

    def _run(self) -> None:
        if self._stream is None:
            thread_id = threading.get_native_id()
            niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread_id))  # less of it is not ours to take
            os.setpriority(os.PRIO_PROCESS, thread_id, niceness)
        while (job := self._jobs.get()) is not None:
            copy, ok, begun_s = job.copy, False, 0.0
            if not self._closing:
                try:
                    if job.after is not None:
                        job.after.synchronize()
                    begun_s = time.perf_counter()
                    self._carry_out(job)
                    ok = True
                except Exception:
                    logger.exception("%s %d of %s failed", copy.kind, copy.copy_id, copy.model)
            self._report(copy, ok, time.perf_counter() - begun_s if ok else 0.0)
            if self._closing and self._jobs.empty():
                return

    def _carry_out(self, job: _Job) -> None:
        copy = job.copy
        if copy.kind == CopyKind.MOVE:
            assert job.after is not None
            job.after.synchronize()
            return
        device, host = self._store.block_rows(job.views), self._store.block_rows(job.views, self.pool)
        if copy.kind == CopyKind.CHECKPOINT:
            source, target, pairs = device, host, zip(copy.device_blocks, copy.host_blocks, strict=True)
        else:
            source, target, pairs = host, device, zip(copy.host_blocks, copy.device_blocks, strict=True)
        if self._stream is None:
            # numpy copies in this thread alone, where torch would start a team of threads beside the model's
            source_bytes, target_bytes = source.numpy(), target.numpy()
            for from_block, to_block in pairs:
                np.copyto(target_bytes[to_block], source_bytes[from_block])
            return
        with torch.cuda.stream(self._stream):
            if job.after is not None:
                self._stream.wait_event(job.after)
            for from_block, to_block in pairs:
                target[to_block].copy_(source[from_block], non_blocking=True)
            done = cuda_event()
            done.record()
        done.synchronize()


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(code: Any) -> None:
    """Raises `RuntimeError` for an error of the CUDA runtime."""
    if int(code):
        raise RuntimeError(f"{_runtime().cudaGetErrorString(code)} (CUDA error {int(code)})")
