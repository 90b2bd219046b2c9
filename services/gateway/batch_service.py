"""Which batches this gateway runs: it contends for the lease of every unfinished batch that nobody holds, the nearest
deadline first, and gives each up when it is done. Also sweeps away what is left of old batches and files."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from services.gateway.batch_runner import BatchRun
from services.gateway.batch_state import is_terminal
from services.gateway.context import GatewayContext
from services.gateway.grants import Grants
from shared.bus.interface import BusError, Watch
from shared.lease import Lease
from shared.messages import LEASES, TERMS, BatchRecord, SchedulerInfo

logger = logging.getLogger(__name__)

MAX_OWNED = 16
"""Batches that one gateway runs at once; the others wait for it or for another gateway."""
CHECK_INTERVAL_S = 1.0
HEAD_START_S = 0.02
"""That a gateway gives the others for each batch that it has already."""
SWEEP_INTERVAL_S = 600.0
RECENT_S = 3600.0
RETENTION_S = 30 * 86400
"""Of the records of batches, from their deadline on."""


class _Claim:
    """This gateway's part in one batch: it holds the lease, or tries to get it."""

    def __init__(self) -> None:
        self.lease: Lease
        self.run: BatchRun | None = None
        self.is_done = False


class BatchService:
    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._grants = Grants(context.bus, context.gateway_id)
        self._claims: dict[str, _Claim] = {}
        self._statuses: dict[str, str] = {}
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._records: Watch[BatchRecord] | None = None
        self._leases: Watch[SchedulerInfo] | None = None
        self._has_swept = False

    async def start(self) -> None:
        self._leases = await (await self._context.bus.key_value(LEASES)).watch(self._on_lease)
        self._records = await self._context.batches.watch(self._on_record)
        self._spawn(self._grants.run())
        self._spawn(self._contend_forever())
        self._spawn(self._sweep_forever())

    async def stop(self) -> None:
        """Runs end, and other gateways may go on with their batches at once."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(claim.lease.stop() for claim in self._claims.values()))
        for watch in (self._records, self._leases):
            if watch is not None:
                await watch.stop()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the batch service failed", exc_info=error)

    # -------------------------------------------------------------------------------------------------- owning

    def _on_record(self, batch_id: str, record: BatchRecord | None) -> None:
        gauge = self._context.metrics.batches
        if (old := self._statuses.pop(batch_id, None)) is not None:
            gauge.labels(old).dec()
        if record is not None:
            self._statuses[batch_id] = record.status
            gauge.labels(record.status).inc()
            claim = self._claims.get(batch_id)
            if claim is not None and claim.run is not None:
                claim.run.on_record(record)
        if record is None or record.status != old:
            self._wake.set()

    async def _contend_forever(self) -> None:
        while True:
            self._wake.clear()
            await _attempt("contending for batches", self._contend)
            try:
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _on_lease(self, key: str, info: SchedulerInfo | None) -> None:
        if info is None:
            self._wake.set()

    def _holder(self, batch_id: str) -> str | None:
        assert self._leases is not None
        entry = self._leases.entries.get(_lease_key(batch_id))
        return None if entry is None else entry.scheduler_id

    async def _contend(self) -> None:
        assert self._records is not None
        for batch_id, claim in list(self._claims.items()):
            is_lost = not claim.lease.is_held and self._holder(batch_id) not in (None, self._context.gateway_id)
            if claim.is_done or is_lost:
                await claim.lease.stop()
                del self._claims[batch_id]
        records = [record for record in self._records.entries.values() if not is_terminal(record)]
        for record in sorted(records, key=lambda r: r.deadline_s):
            if record.batch_id in self._claims or self._holder(record.batch_id) is not None:
                continue
            if len(self._claims) >= MAX_OWNED:
                break
            await asyncio.sleep(HEAD_START_S * len(self._claims))
            if self._holder(record.batch_id) is None:
                await self._claim(record.batch_id)

    async def _claim(self, batch_id: str) -> None:
        claim = _Claim()

        async def on_gain(term: int) -> None:
            record = await self._context.batches.record(batch_id)
            if record is not None and not is_terminal(record):
                claim.run = BatchRun(self._context, self._grants, record)
                try:
                    await claim.run.run()
                finally:
                    claim.run = None
            claim.is_done = True
            self._wake.set()

        async def on_lose() -> None:
            logger.info("%s: not run here any more", batch_id)

        claim.lease = Lease(self._context.bus, _lease_key(batch_id), self._context.gateway_id, on_gain, on_lose)
        await claim.lease.start()
        self._claims[batch_id] = claim

    # ------------------------------------------------------------------------------------------------ sweeping

    async def _sweep_forever(self) -> None:
        while True:
            await _attempt("sweeping batches and files", self._sweep)
            await asyncio.sleep(SWEEP_INTERVAL_S)

    async def _sweep(self) -> None:
        assert self._records is not None
        now_s = time.time()
        in_use: set[str] = set()
        terms = await self._context.bus.key_value(TERMS)
        for batch_id, record in list(self._records.entries.items()):
            if not is_terminal(record):
                in_use |= {batch_id, record.input_file_id}
            elif record.deadline_s + RETENTION_S < now_s:
                await self._context.batches.forget(batch_id)
                await terms.purge(_lease_key(batch_id))
            elif not self._has_swept or record.status_s[record.status] + RECENT_S > now_s:
                # Its owner may have died, or been late, between the end and this.
                await self._context.batches.results.purge(batch_id)
        num_removed = await self._context.files.sweep(in_use, now_s)
        self._has_swept = True
        if num_removed:
            logger.info("%d files and leftovers were removed", num_removed)


def _lease_key(batch_id: str) -> str:
    return f"batch-{batch_id}"


async def _attempt(what: str, work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except BusError as error:
        logger.info("%s: %s", what, error)
    except Exception:
        logger.exception("%s", what)
