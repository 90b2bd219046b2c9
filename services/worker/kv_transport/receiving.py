"""The destination's half of a transfer."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.kv_transport.errors import TransferError, TransferReason
from services.worker.kv_transport.faults import FaultPoint
from services.worker.kv_transport.links import Buffer, Link, name_of
from services.worker.kv_transport.staging import End, KvPool, StagingPair, buffer_of, to_end
from services.worker.kv_transport.wire import WINDOW, Ended, Open, Sent, combined

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Receipt:
    """What the destination acknowledged, as either end sees it."""

    num_bytes: int
    checksum: int
    seconds: float
    """Time from the call of `send` or `complete`, or from the accepted ticket, to the end."""


WITHDRAW_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class _Posted:
    task: asyncio.Task[None]
    blocks: Sequence[int]
    buffer: Buffer
    staged: torch.Tensor | None
    """None: it arrives in its blocks, or is dropped."""


class Incoming:
    """Blocks that wait for their bytes. Ends once: with everything in the pool, or with a reason; after that the transport
    never writes to the blocks again. Made by `KvTransport.expect`."""

    def __init__(
        self,
        ticket: bytes,
        pool: KvPool,
        blocks: Sequence[int],
        on_cancel: Callable[[Incoming], None],
        peer: str | None = None,
    ) -> None:
        """`peer`: the address of the one that the ticket is for; None: it is for whoever has it."""
        self.ticket = ticket
        self.peer = peer
        self.pool = pool
        self.blocks = tuple(blocks)
        self.sent: asyncio.Future[Sent] = asyncio.get_running_loop().create_future()
        """What the source says it sent."""
        self._on_cancel = on_cancel
        self._result: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        for future in (self._result, self.sent):
            future.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody has to ask
        self._num_writers = 0
        self._failure: TransferError | None = None

    @property
    def is_live(self) -> bool:
        return self._failure is None and not self._result.done()

    @property
    def is_aborted(self) -> bool:
        """The source has said that it will not send all."""
        said = self.sent.done() and not self.sent.cancelled() and self.sent.exception() is None
        return said and self.sent.result().aborted

    @property
    def receipt(self) -> Receipt | None:
        """After the end, if it succeeded."""
        done = self._result.done() and not self._result.cancelled() and self._result.exception() is None
        return self._result.result() if done else None

    def on_end(self, callback: Callable[[Incoming], None]) -> None:
        self._result.add_done_callback(lambda _: callback(self))

    async def wait(self) -> Receipt:
        """Raises `TransferError`: at its deadline, or as soon afterwards as nothing writes to the blocks any more, which
        takes `drain_s` and the time to close a connection at most."""
        return await asyncio.shield(self._result)

    def cancel(self, why: TransferError | None = None) -> None:
        """The blocks are the caller's again when `wait` has raised; no effect after the end."""
        if self.is_live:
            self.fail(why or TransferError(TransferReason.CANCELLED))
            self._on_cancel(self)

    def fail(self, error: TransferError) -> None:
        if self.is_live:
            self._failure = error
            self._end_if_unwritten()

    def succeed(self, receipt: Receipt) -> None:
        if self.is_live:
            self._result.set_result(receipt)

    @property
    def failure(self) -> TransferError | None:
        return self._failure

    def begin_write(self) -> None:
        """Somebody may write to the blocks until `end_write`; only while `is_live`."""
        self._num_writers += 1

    def end_write(self) -> None:
        self._num_writers -= 1
        self._end_if_unwritten()

    def _end_if_unwritten(self) -> None:
        if self._failure is not None and not self._num_writers and not self._result.done():
            self._result.set_exception(self._failure)


class Receiver:
    """Takes the chunks of one transfer; `WINDOW` receives are posted at a time, so that one arrives while another is
    scattered or summed."""

    def __init__(self, link: Link, message: Open, incoming: Incoming, end: End, pair: StagingPair) -> None:
        self._link = link
        self._message = message
        self._incoming = incoming
        self._end = end
        self._pair = pair
        self._num_chunks = num_chunks(message)
        self._posted: deque[_Posted] = deque()
        self._num_posted = 0
        self._num_bytes = 0
        self._digests: list[asyncio.Future[int]] = []
        self._loop = asyncio.get_running_loop()
        self._drain: np.ndarray | None = None

    async def run(self) -> Ended:
        """Takes all messages of the transfer, even when it failed before (then they are dropped), so that none stays behind
        on the link. Raises `LinkError`."""
        incoming = self._incoming
        try:
            for index in range(self._num_chunks):
                await self._post_up_to(index + WINDOW)
                chunk = self._posted[0]
                await asyncio.wait([chunk.task])  # a cancelled wait must not cancel the receive
                chunk.task.result()
                self._posted.popleft()
                if chunk.staged is None:
                    await self._post_up_to(index + 1 + WINDOW)  # before the sum: nothing else needs this chunk's memory
                # Once it is aborted they are fillers, or of no use: one that was taken before that is known is zeroed.
                if incoming.is_live and not incoming.is_aborted:
                    await self._take(chunk)
            total = await self._judge(await incoming.sent)
        finally:
            for digest in self._digests:
                digest.cancel()
            if self._posted:
                await self._withdraw()
        failure = incoming.failure
        reason, detail = (failure.reason, str(failure)[:200]) if failure else (None, "")
        return Ended(self._message.transfer, reason, self._num_bytes, total, detail)

    async def _post_up_to(self, count: int) -> None:
        while self._num_posted < min(count, self._num_chunks):
            start = self._num_posted * self._message.chunk_blocks
            blocks = self._incoming.blocks[start : start + self._message.chunk_blocks]
            self._posted.append(await self._post(blocks))
            self._num_posted += 1

    async def _post(self, blocks: Sequence[int]) -> _Posted:
        incoming, size = self._incoming, len(blocks) * self._message.block_bytes
        staged = None
        run = self._end.staging.run_of(incoming.pool, blocks) if incoming.is_live else None
        if run is not None:
            buffer = run
        elif incoming.is_live:
            staged = (await self._pair.buffer(self._num_posted, self._end.executor))[:size]
            buffer = buffer_of(staged)
        else:
            if self._drain is None:
                self._drain = np.empty(self._message.chunk_blocks * self._message.block_bytes, dtype=np.uint8)
            buffer = self._drain
        task = asyncio.ensure_future(self._link.receive(self._message.transfer, buffer))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # one error of several is raised
        if run is not None:
            incoming.begin_write()
            task.add_done_callback(lambda _: incoming.end_write())
        return _Posted(task, blocks, buffer, staged)

    async def _take(self, chunk: _Posted) -> None:
        incoming = self._incoming
        await self._end.faults.at(FaultPoint.CHUNK_ARRIVED, chunk.buffer)
        if not incoming.is_live:
            return
        self._num_bytes += len(chunk.blocks) * self._message.block_bytes
        checked = self._message.checked_bytes
        if chunk.staged is None:
            sums = self._loop.run_in_executor(self._end.executor, incoming.pool.checksum, chunk.buffer, checked)
            self._digests.append(sums)
            return
        scatter = self._loop.run_in_executor(
            self._end.executor, incoming.pool.scatter, chunk.blocks, chunk.staged, checked
        )
        self._digests.append(scatter)
        incoming.begin_write()
        try:
            await to_end(scatter)
        except Exception as error:
            incoming.cancel(TransferError(TransferReason.FAILED, f"scatter: {error}"))
        finally:
            incoming.end_write()

    async def _judge(self, sent: Sent) -> int:
        """The checksum, if everything arrived; else the transfer fails."""
        incoming = self._incoming
        if not incoming.is_live:
            return 0
        total = combined(await asyncio.gather(*self._digests))
        failure = None
        if sent.aborted:
            failure = TransferError(TransferReason.CANCELLED, "by the source")
        elif (sent.num_chunks, sent.checksum) != (self._num_chunks, total):
            failure = TransferError(TransferReason.CORRUPTED, "checksum")
        if incoming.is_live and failure is not None:
            incoming.begin_write()
            try:  # attention may read what it masks, and must not find NaN there
                await to_end(self._loop.run_in_executor(self._end.executor, incoming.pool.zero, incoming.blocks))
            finally:
                incoming.fail(failure)
                incoming.end_write()
        return total

    async def _withdraw(self) -> None:
        """Ends the posted receives by ending the link: there is no other way that is sure to."""
        await self._link.abort()
        _, pending = await asyncio.wait([chunk.task for chunk in self._posted], timeout=WITHDRAW_TIMEOUT_S)
        for task in pending:
            logger.error("a receive from %s outlived its link", name_of(self._link.peer))
            task.cancel()


def num_chunks(message: Open) -> int:
    return -(-message.num_blocks // message.chunk_blocks)
