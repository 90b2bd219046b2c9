"""Which batches this gateway runs: it competes for the lease of each unfinished batch without an owner, nearest deadline
first, and releases it at the end. It also removes what old batches and files leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from services.gateway.batch.grants import Grants
from services.gateway.batch.output import outputs_of
from services.gateway.batch.reading import insist
from services.gateway.batch.runner import BatchRun
from services.gateway.batch.state import failed, is_terminal
from services.gateway.context import GatewayContext
from shared.bus.interface import BusError, Watch
from shared.messages.batches import BatchProblem, BatchRecord
from shared.messages.catalogue import BATCH_TERMS, LEASES
from shared.messages.cluster import LeaseHolder
from shared.runtime.lease import Lease
from shared.runtime.tasks import TaskSet, set_within

logger = logging.getLogger(__name__)

MAX_OWNED = 32
"""Batches that one gateway runs at once; the others wait for it or for another gateway."""
MAX_IDLE_S = 120.0
"""Without a finished line, after which a batch makes room for one that waits; doubles each time."""
MAX_RUNS = 5
"""Runs of one batch that may break off here before it is given up."""
RUN_AGAIN_S = 2.0
CHECK_INTERVAL_S = 1.0
HEAD_START_S = 0.02
"""Seconds that a gateway gives the others for each batch that it has already."""
STORAGE_CHECK_INTERVAL_S = 5.0
RECENT_S = 3600.0


class _Claim:
    """This gateway's part in one batch: it holds the lease, or tries to get it."""

    def __init__(self) -> None:
        self.lease: Lease
        self.run: BatchRun | None = None
        self.is_done = False
        """Whether the claim is to be given up."""


class BatchService:
    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._grants = Grants(context.bus, context.gateway_id)
        self._claims: dict[str, _Claim] = {}
        self._statuses: dict[str, str] = {}
        self._wake = asyncio.Event()
        self._tasks = TaskSet()
        self._records: Watch[BatchRecord] | None = None
        self._leases: Watch[LeaseHolder] | None = None
        self._times_passed: dict[str, int] = {}
        """How often each unfinished batch made room for others here."""
        self._has_swept = False
        self._ownerless: set[str] = set()
        """Keys of terms that belonged to no batch at the last sweep."""

    async def start(self) -> None:
        self._leases = await (await self._context.bus.key_value(LEASES)).watch(self._on_lease)
        self._records = await self._context.batches.watch(self._on_record)
        self._tasks.start(self._grants.run())
        self._tasks.start(self._contend_forever())
        self._tasks.start(self._sweep_forever())
        self._tasks.start(self._check_storage_forever())

    async def stop(self) -> None:
        """Ends the runs; other gateways may continue their batches at once."""
        await self._tasks.end_all()
        await self._context.batches.stop()
        await asyncio.gather(*(claim.lease.stop() for claim in self._claims.values()))
        for watch in (self._records, self._leases):
            if watch is not None:
                await watch.stop()

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
            await set_within(self._wake, CHECK_INTERVAL_S)

    def _on_lease(self, key: str, info: LeaseHolder | None) -> None:
        claim = self._claims.get(key.removeprefix(_LEASE_PREFIX))
        if claim is not None:
            claim.lease.on_change(key, info)
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
        unfinished = {r.batch_id: r for r in self._records.entries.values() if not is_terminal(r)}
        self._times_passed = {name: times for name, times in self._times_passed.items() if name in unfinished}
        waiting = [
            r for r in unfinished.values() if r.batch_id not in self._claims and self._holder(r.batch_id) is None
        ]
        # Those that made room for others are last.
        for record in sorted(waiting, key=lambda r: (self._times_passed.get(r.batch_id, 0), r.deadline_s)):
            if len(self._claims) >= MAX_OWNED:
                self._make_room()
                break
            await asyncio.sleep(HEAD_START_S * len(self._claims))
            if self._holder(record.batch_id) is None:
                await self._claim(record.batch_id)

    def _make_room(self) -> None:
        """Gives up the batch that is idle for longest, such as one of a model that nobody serves."""
        idle = {}
        for batch_id, claim in self._claims.items():
            if claim.run is not None and not claim.is_done:
                patience_s = MAX_IDLE_S * 2 ** min(10, self._times_passed.get(batch_id, 0))
                if claim.run.idle_s() > patience_s:
                    idle[batch_id] = claim.run.idle_s()
        if idle:
            batch_id = max(idle, key=lambda name: idle[name])
            logger.info("%s: makes room for a batch that waits", batch_id)
            self._times_passed[batch_id] = self._times_passed.get(batch_id, 0) + 1
            self._claims[batch_id].is_done = True
            self._wake.set()

    async def _claim(self, batch_id: str) -> None:
        claim = _Claim()

        async def on_gain(term: int) -> None:
            await self._run(batch_id, claim)
            claim.is_done = True
            self._wake.set()

        async def on_lose() -> None:
            logger.info("%s: not run here any more", batch_id)

        claim.lease = Lease(
            self._context.bus,
            _lease_key(batch_id),
            self._context.gateway_id,
            on_gain,
            on_lose,
            watches=False,
            terms=BATCH_TERMS,
        )
        await claim.lease.start()
        self._claims[batch_id] = claim

    async def _run(self, batch_id: str, claim: _Claim) -> None:
        """Returns when the batch is in a terminal state."""
        for number in range(1, MAX_RUNS + 1):
            try:
                record = await insist(lambda: self._context.batches.record(batch_id))
                if record is not None and not is_terminal(record):
                    claim.run = BatchRun(self._context, self._grants, record)
                    await claim.run.run()
                return
            except Exception:
                logger.exception("%s: run %d of %d broke off", batch_id, number, MAX_RUNS)
                await asyncio.sleep(RUN_AGAIN_S)
            finally:
                claim.run = None
        problem = BatchProblem("internal_error", "The batch broke off again and again.", None, None)
        await insist(lambda: self._context.batches.change(batch_id, lambda r: failed(r, [problem], time.time())))

    # ------------------------------------------------------------------------------------------------ sweeping

    async def _check_storage_forever(self) -> None:
        """Keeps known whether the disk is full, before somebody needs it."""
        while True:
            with contextlib.suppress(BusError):  # shown by the bus
                await self._context.files.check_storage()
            self._context.metrics.storage_writable.set(not self._context.bus.storage_problem)
            await asyncio.sleep(STORAGE_CHECK_INTERVAL_S)

    async def _sweep_forever(self) -> None:
        while True:
            await _attempt("sweeping batches and files", self._sweep)
            await asyncio.sleep(self._context.settings.sweep_interval_s)

    async def _sweep(self) -> None:
        assert self._records is not None
        now_s = time.time()
        for batch_id, record in list(self._records.entries.items()):
            if not is_terminal(record):
                continue
            if record.status_s[record.status] + self._context.settings.batch_retention_s < now_s:
                await self._context.batches.delete(batch_id)
            elif not self._has_swept or record.status_s[record.status] + RECENT_S > now_s:
                # Its owner may have died, or been late, between the end and this.
                await self._context.batches.results.purge(batch_id)
        await self._context.batches.sweep()
        await self._sweep_terms()
        ended = filter(is_terminal, self._records.entries.values())
        outputs = [file for record in ended for file in outputs_of(record) if (file.expires_s or 0) > now_s]
        num_removed = await self._context.files.sweep(self._names_in_use, now_s, outputs)
        self._context.metrics.files_lost.set(len(self._context.files.lost))
        self._has_swept = True
        if num_removed:
            logger.info("%d files and leftovers were removed", num_removed)

    async def _sweep_terms(self) -> None:
        """Removes the terms of batches that were gone at the last sweep already."""
        assert self._records is not None
        terms = await self._context.bus.key_value(BATCH_TERMS)
        ownerless = (await terms.entries()).keys() - set(map(_lease_key, self._records.entries))
        if self._records.problem:
            return
        for key in ownerless & self._ownerless:
            await terms.purge(key)
        self._ownerless = ownerless - self._ownerless

    def _names_in_use(self) -> set[str]:
        assert self._records is not None
        unfinished = (record for record in self._records.entries.values() if not is_terminal(record))
        return {name for record in unfinished for name in (record.batch_id, record.input_file_id)}


_LEASE_PREFIX = "batch-"


def _lease_key(batch_id: str) -> str:
    return _LEASE_PREFIX + batch_id


async def _attempt(what: str, work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except BusError as error:
        logger.info("%s: %s", what, error)
    except Exception:
        logger.exception("%s", what)
