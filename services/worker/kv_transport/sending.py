"""The source's half of a transfer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.worker.kv_transport.errors import TransferError, TransferReason
from services.worker.kv_transport.faults import FaultPoint
from services.worker.kv_transport.links import Buffer, Link
from services.worker.kv_transport.rates import TokenBucket
from services.worker.kv_transport.staging import End, KvPool, StagingPair, buffer_of, to_end
from services.worker.kv_transport.wire import CONTROL_TAG, WINDOW, Accept, Ended, Sent, combined, encode_control
from shared.runtime.tasks import set_within

_FILLER = np.zeros(1, dtype=np.uint8)


@dataclass(kw_only=True)
class Outgoing:
    """A transfer under way at its source."""

    address: str
    ticket: bytes
    pool: KvPool
    num_blocks: int
    chunk_blocks: int
    checked_bytes: int
    is_limited: bool
    transfer: int = 0
    """Its number on its connection."""
    blocks: asyncio.Future[Sequence[int]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Empty, if it was stopped before they were named."""
    accepted: asyncio.Future[Accept] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ended: asyncio.Future[Ended] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """By `stop`."""
    task: asyncio.Task[tuple[int, int]] = field(init=False)
    """Sends it."""
    expiry: asyncio.TimerHandle = field(init=False)
    """Cancels it if nobody does either."""
    is_decided: bool = False
    """Whether it is to be completed or was cancelled."""

    def __post_init__(self) -> None:
        for future in (self.accepted, self.ended):
            future.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def failure(self) -> TransferError | None:
        """Why it ended, where it has before it was completed."""
        error = self.task.exception() if self.task.done() and not self.task.cancelled() else None
        return error if isinstance(error, TransferError) else None

    def name(self, blocks: Sequence[int]) -> None:
        if not self.blocks.done():
            self.blocks.set_result(blocks)

    def stop(self) -> None:
        """No more is sent than the chunks under way, and fillers for the rest."""
        self.stopped.set()
        self.name(())

    def fail(self, error: TransferError) -> None:
        self.stop()
        for future in (self.accepted, self.ended):
            if not future.done():
                future.set_exception(error)

    def end(self, message: Ended) -> None:
        self.stop()
        if message.reason is not None and not self.accepted.done():
            self.accepted.set_exception(TransferError(message.reason, message.detail or "said the destination"))
        if not self.ended.done():
            self.ended.set_result(message)


async def send_chunks(
    link: Link,
    outgoing: Outgoing,
    end: End,
    pair: StagingPair,
    bucket: TokenBucket,
    on_sent: Callable[[int, float], None],
    clock: Callable[[], float],
) -> tuple[int, int]:
    """Sends the blocks when they are named, or fillers once it was stopped. A chunk is gathered, or the one that needs no
    gathering is summed, while those before are under way. Returns (bytes, checksum) of what was sent; `on_sent` hears the
    bytes and seconds of each chunk. Raises `LinkError`, and `TransferError` (FAILED) when blocks could not be read."""
    executor, pool, chunk_blocks, all_blocks = end.executor, outgoing.pool, outgoing.chunk_blocks, await outgoing.blocks
    num_bytes, index, checked = 0, 0, outgoing.checked_bytes
    digests: list[asyncio.Future[int]] = []
    sending: deque[asyncio.Task[None]] = deque()  # at most `WINDOW`, so the pair's buffer that is next is free
    failure: TransferError | None = None
    last_done = clock()
    loop = asyncio.get_running_loop()

    async def deliver(payload: Buffer) -> None:
        nonlocal last_done
        started = clock()
        await link.send(outgoing.transfer, payload)
        done = clock()
        on_sent(len(payload), done - max(started, last_done))
        last_done = done

    try:
        for start in range(0, len(all_blocks), chunk_blocks):
            if len(sending) == WINDOW:
                await sending.popleft()
            if outgoing.stopped.is_set():
                break
            blocks = all_blocks[start : start + chunk_blocks]
            size = len(blocks) * pool.block_bytes
            run = end.staging.run_of(pool, blocks)
            try:
                if run is None:
                    staged = (await pair.buffer(index, executor))[:size]
                    digests.append(loop.run_in_executor(executor, pool.gather, blocks, staged, checked))
                    await to_end(digests[-1])
            except Exception as error:
                failure = TransferError(TransferReason.FAILED, f"gather: {error}")
                break
            payload = buffer_of(staged) if run is None else run
            if outgoing.is_limited and (pause_s := bucket.take(size, clock())) > 0:
                await set_within(outgoing.stopped, pause_s)
            await end.faults.at(FaultPoint.CHUNK_READY, payload)
            if outgoing.stopped.is_set():
                break
            sending.append(asyncio.create_task(deliver(payload)))
            if run is not None:
                digests.append(loop.run_in_executor(executor, pool.checksum, run, checked))
            num_bytes, index = num_bytes + size, index + 1
        num_fillers = -(-outgoing.num_blocks // chunk_blocks) - index
        total = 0
        if not num_fillers:
            try:
                total = combined(await asyncio.gather(*digests))
            except Exception as error:
                failure = TransferError(TransferReason.FAILED, f"checksum: {error}")
        sent = Sent(outgoing.transfer, index, total, aborted=num_fillers > 0 or failure is not None)
        await link.send(CONTROL_TAG, encode_control(sent))
        for _ in range(num_fillers):
            if len(sending) == WINDOW:
                await sending.popleft()
            sending.append(asyncio.create_task(link.send(outgoing.transfer, _FILLER)))
        while sending:
            await sending.popleft()
        if failure is not None:
            raise failure
        return num_bytes, total
    finally:
        for task in sending:
            task.cancel()
        for digest in digests:
            digest.cancel()
        await asyncio.gather(*sending, *digests, return_exceptions=True)


def verdict(message: Ended, num_bytes: int, total: int) -> TransferError | None:
    """Whether the destination acknowledged what was sent."""
    if message.reason is not None:
        return TransferError(message.reason, message.detail or "said the destination")
    if (message.num_bytes, message.checksum) != (num_bytes, total):
        return TransferError(TransferReason.CORRUPTED, f"{message.num_bytes} of {num_bytes} bytes acknowledged")
    return None
