"""Copies of KV blocks between host memory and disk, beside the steps: one thread reads, another writes and looks for what
other instances wrote, so that no read waits for a write.

| memory | owner |
|---|---|
| a host block | the engine's copy, from `start_copy` until `finished_copies` names it |

`start_copy` belongs to the thread of the steps. A copy that fails is reported as any other.
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

import numpy as np
import torch

from services.worker.kv.kv_copies import NICENESS
from services.worker.kv_disk.store import Changes, DiskStore, ModelFiles
from services.worker.kv_transport.staging import KvPool
from services.worker.kv_transport.wire import LINE_BYTES
from shared.engine.plan import CopyKind, EndedCopy, KvCopy

logger = logging.getLogger(__name__)

LOOK_S = 10.0
"""Between two looks for files of other instances."""
PAUSE_S = 30.0
"""Nothing is written for so long after the disk refused a block."""
MAX_TOLD = 4096
"""Blocks that one call to `on_change` names."""


class _Model:
    """The blocks of one model, in host memory and on disk."""

    def __init__(self, pool: KvPool, files: ModelFiles) -> None:
        self.pool, self.files = pool, files

    def write(self, block: int, block_hash: bytes, depth: int, gives_way_s: float) -> bool:
        run = self.pool.run_of([block])
        if run is None:
            staging = self._staging()
            self.pool.gather([block], staging, LINE_BYTES)
            run = staging.numpy()
        assert isinstance(run, np.ndarray)
        return self.files.write(block_hash, run, depth, gives_way_s)

    def read(self, block: int, block_hash: bytes, depth: int) -> bool:
        run = self.pool.run_of([block])
        if run is not None:
            assert isinstance(run, np.ndarray)
            return self.files.read(block_hash, run, depth)
        staging = self._staging()
        is_read = self.files.read(block_hash, staging.numpy(), depth)
        if is_read:
            self.pool.scatter([block], staging, LINE_BYTES)
        return is_read

    def _staging(self) -> torch.Tensor:
        return torch.empty(self.pool.block_bytes, dtype=torch.uint8)


class DiskCopies:
    def __init__(
        self,
        store: DiskStore,
        on_change: Callable[[str, Changes], None],
        *,
        is_polite: bool = False,
        look_s: float = LOOK_S,
    ) -> None:
        """`on_change(model, changes)` is called in a thread of this one. `is_polite`: the CPU computes the steps, and writes
        take what they leave of it."""
        self.store = store
        self.on_finished: Callable[[], None] = lambda: None
        self.num_refused = 0
        """Blocks that the disk did not take."""
        self._on_change = on_change
        self._look_s = look_s
        self._models: dict[str, _Model] = {}
        self._pools: dict[str, KvPool] = {}
        """Blocks in host memory of the models here, also of those whose folders are still to be made."""
        self.reading_since_s: float | None = None
        """Time at which the read under way began; None: there is none."""
        self._finished: deque[EndedCopy] = deque()
        self._paused_until_s = 0.0
        self._is_closing = False
        self._reads: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._read_all, name="kv-disk-reads", daemon=True),
            threading.Thread(target=self._write_all, args=(NICENESS if is_polite else 0,), name="kv-disk", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_known(self) -> int:
        """Blocks on disk of the models here, as of the last look."""
        return sum(model.files.num_known for model in list(self._models.values()))

    def add_model(self, model: str, model_key: str, pool: KvPool) -> None:
        """`pool`: the model's blocks in host memory. What lies on disk of it is told soon."""
        self._pools[model] = pool

        def add() -> None:
            if self._pools.get(model) is pool:
                self._models[model] = _Model(pool, ModelFiles(self.store, model_key, pool.block_bytes))
                self._look()

        self._writes.put(add)

    def remove_model(self, model: str) -> None:
        """No copy of it is under way any more; its files stay."""
        self._pools.pop(model, None)
        self._models.pop(model, None)

    def clear(self) -> None:
        """Removes all files, after what is to be written."""

        def clear() -> None:
            self._look()  # what was written since is told as lost, too
            self.store.clear()
            self._look()

        self._writes.put(clear)

    def find_again(self) -> None:
        """Tells of all files anew."""

        def find() -> None:
            for model in list(self._models.values()):
                model.files.forget()
            self._look()

        self._writes.put(find)

    def start_copy(self, copy: KvCopy) -> None:
        lane = self._reads if copy.kind == CopyKind.READ else self._writes
        lane.put(lambda: self._copy(copy))

    def finished_copies(self) -> list[EndedCopy]:
        """Those that ended since the last call."""
        finished = []
        with contextlib.suppress(IndexError):
            while True:
                finished.append(self._finished.popleft())
        return finished

    def close(self, timeout_s: float) -> None:
        """Ends the threads after the copies that they are at, or leaves them to a disk that hangs; those that wait fail."""
        until_s = time.monotonic() + timeout_s
        self._is_closing = True
        self._reads.put(None)
        self._writes.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
            if thread.is_alive():
                logger.error("the thread %s did not end within %.1f s", thread.name, timeout_s)

    # --------------------------------------------------------------------------------------------- the threads

    def _read_all(self) -> None:
        while (job := self._reads.get()) is not None:
            self.reading_since_s = time.monotonic()
            job()
            self.reading_since_s = None

    def _write_all(self, niceness: int) -> None:
        if niceness:
            thread_id = threading.get_native_id()
            niceness = max(niceness, os.getpriority(os.PRIO_PROCESS, thread_id))  # less of it is not ours to take
            os.setpriority(os.PRIO_PROCESS, thread_id, niceness)
        look_at_s = time.monotonic() + self._look_s
        while True:
            try:
                job = self._writes.get(timeout=max(0.0, look_at_s - time.monotonic()))
            except queue.Empty:
                job = self._look
            if job is None:
                return
            try:
                job()
            except Exception:
                logger.exception("the folder of KV blocks %s", self.store.folder)
            if time.monotonic() >= look_at_s:
                self._look()
                look_at_s = time.monotonic() + self._look_s

    def _copy(self, copy: KvCopy) -> None:
        ok, begun_s = False, time.perf_counter()
        model = self._models.get(copy.model)
        if model is not None and not self._is_closing:
            try:
                ok = self._carry_out(copy, model)
            except OSError as error:
                logger.error("%s of blocks of %s: %s", copy.kind, copy.model, error)
                if copy.kind == CopyKind.WRITE:
                    self.num_refused += 1
                    self._paused_until_s = time.monotonic() + PAUSE_S
            except Exception:
                logger.exception("%s %d of %s failed", copy.kind, copy.copy_id, copy.model)
        self._finished.append(EndedCopy(copy.copy_id, ok, time.perf_counter() - begun_s if ok else 0.0))
        self.on_finished()

    def _carry_out(self, copy: KvCopy, model: _Model) -> bool:
        blocks = enumerate(zip(copy.host_blocks, copy.hashes, strict=True), copy.depth)
        if copy.kind == CopyKind.READ:
            return all(model.read(block, block_hash, depth) for depth, (block, block_hash) in blocks)
        if time.monotonic() < self._paused_until_s:
            self.num_refused += len(copy.host_blocks)
            return False
        return all(model.write(block, block_hash, depth, copy.gives_way_s) for depth, (block, block_hash) in blocks)

    def _look(self) -> None:
        for name, model in list(self._models.items()):
            changes = model.files.look()
            for at in range(0, max(len(changes.found), len(changes.lost)), MAX_TOLD):
                part = slice(at, at + MAX_TOLD)
                self._on_change(name, Changes(changes.found[part], changes.lost[part]))
