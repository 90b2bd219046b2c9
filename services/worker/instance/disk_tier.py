"""The disk tier of one instance's KV pool: hosts its copies, tells the engine what lies on disk, and measures."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.worker.instance.engine_loop import EngineLoop
from services.worker.instance.models import KvUsers
from services.worker.kv.kv_store import KvBlocks
from services.worker.kv_disk.copies import DiskCopies
from services.worker.kv_disk.store import Changes, DiskStore
from services.worker.kv_transport.staging import KvPool
from shared.engine.calls import FlushTiers, FoundOnDisk, GiveUpReads, LostOnDisk
from shared.models.checkpoint import CheckpointError

log = logging.getLogger(__name__)

END_S = 10.0
"""Time for what is worth it to go to disk and for copies under way to end, when an instance ends."""
LEAST_CLOSE_S = 0.5
"""Time of it that copies under way have at least."""
POLL_S = 0.05
METRICS_S = 2.0
READ_TIMEOUT_S = 5.0
"""A block that was not read by then is computed, as all others that wait for the disk."""


class KeyedPools(Protocol):
    """An executor whose blocks can be told from those of other weights."""

    def block_rows(self, model: str, on_host: bool) -> KvBlocks: ...

    def kv_key(self, model: str) -> str:
        """Names all that the contents of a model's blocks depend on, but for the tokens; empty: not known."""


class DiskTier(KvUsers):
    def __init__(
        self, store: DiskStore, executor: KeyedPools, registry: CollectorRegistry, instance_id: str, *, is_polite: bool
    ) -> None:
        """`is_polite`: the CPU computes the steps, and writes take what they leave of it."""
        self.copies = DiskCopies(store, self._on_change, is_polite=is_polite)
        self.loop: EngineLoop | None = None
        """The engine's, set by whoever makes it of these copies."""
        self._executor = executor
        self._num_refused = 0
        self._end_until_s: float | None = None
        """Set once the instance ends."""

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ("engine",), registry=registry).labels(instance_id)

        self._used = gauge("tideway_kv_disk_used_bytes", "Bytes of the files in the folder of KV blocks")
        gauge("tideway_kv_disk_limit_bytes", "Bytes that the folder of KV blocks may have").set(store.max_bytes)
        self._known = gauge("tideway_kv_disk_known_blocks", "KV blocks on disk that the instance could read")
        self._refused = Counter(
            "tideway_kv_disk_refused_blocks", "KV blocks that the disk did not take", ("engine",), registry=registry
        ).labels(instance_id)

    def add_model(self, model: str) -> None:
        try:
            key, rows = self._executor.kv_key(model), self._executor.block_rows(model, True)
        except (CheckpointError, OSError) as error:
            log.error("KV blocks of %s are not kept on disk: %s", model, error)
            return
        if not key or not len(rows):
            log.warning("KV blocks of %s are not kept on disk: %s", model, "no host memory" if key else "no files")
            return
        self.copies.add_model(model, key, KvPool(rows))

    def remove_model(self, model: str) -> None:
        self.copies.remove_model(model)

    def clear(self) -> None:
        """Removes all files."""
        self.copies.clear()

    def _on_change(self, model: str, changes: Changes) -> None:
        """In the thread that looks for files."""
        assert self.loop is not None
        if changes.lost:
            self.loop.apply(LostOnDisk(model, changes.lost))
        if changes.found:
            self.loop.apply(FoundOnDisk(model, changes.found))

    async def flush(self) -> None:
        """Lets what is worth it go to disk. Until `close` has ended, `END_S` pass at most."""
        assert self.loop is not None
        self._end_until_s = time.monotonic() + END_S
        while not self.loop.failure and not self.loop.apply(FlushTiers()):
            if time.monotonic() > self._end_until_s - LEAST_CLOSE_S:
                log.warning("not all KV blocks that were worth it are on disk after %.0f s", END_S)
                return
            await asyncio.sleep(POLL_S)

    async def keep_measured(self) -> None:
        """Keeps the metrics up to date."""
        while True:
            try:
                self._used.set(await asyncio.to_thread(lambda: self.copies.store.used_bytes))
            except OSError as error:
                log.error("the folder of KV blocks does not say how much it holds: %s", error)
            self._known.set(self.copies.num_known)
            num_refused = self.copies.num_refused
            self._refused.inc(num_refused - self._num_refused)
            self._num_refused = num_refused
            await asyncio.sleep(METRICS_S)

    async def keep_watch(self) -> None:
        """Has what waits for a disk that hangs computed instead, and finds the blocks again when it goes on."""
        assert self.loop is not None
        while True:
            await asyncio.sleep(POLL_S)
            since_s = self.copies.reading_since_s
            if since_s is None or time.monotonic() < since_s + READ_TIMEOUT_S:
                continue
            log.error(
                "the disk of KV blocks has not answered for %.0f s: what waits for it is computed", READ_TIMEOUT_S
            )
            while self.copies.reading_since_s == since_s:
                self.loop.apply(GiveUpReads())
                await asyncio.sleep(METRICS_S)
            log.warning("the disk of KV blocks answers again")
            self.copies.find_again()

    async def close(self) -> None:
        """After the engine's loop has ended."""
        left_s = END_S if self._end_until_s is None else self._end_until_s - time.monotonic()
        await asyncio.to_thread(self.copies.close, max(LEAST_CLOSE_S, left_s))
