"""The transfers that this end has agreed to receive: from the grant of a ticket to the acknowledgement."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.worker.kv_transport.connections import Connection
from services.worker.kv_transport.errors import LinkError, TransferError, TransferReason
from services.worker.kv_transport.faults import FaultPoint
from services.worker.kv_transport.leases import Leases
from services.worker.kv_transport.links import Refusal, name_of
from services.worker.kv_transport.receiving import Incoming, Receipt, Receiver
from services.worker.kv_transport.staging import End, KvPool
from services.worker.kv_transport.wire import LINE_BYTES, VERSION, Accept, Cancel, Ended, Open
from shared.runtime.tasks import TaskSet

logger = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 256 << 20
"""What a peer may ask for."""


@dataclass(frozen=True)
class _Running:
    connection: Connection
    transfer: int
    task: asyncio.Task[None]


class Destination:
    """`drain_s`: how long a source may take to wind up a transfer that was stopped here."""

    def __init__(
        self,
        end: End,
        tasks: TaskSet,
        on_refused: Callable[[Refusal, int], None],
        *,
        drain_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = end
        self._tasks = tasks
        self._on_refused = on_refused
        self._drain_s = drain_s
        self._leases = Leases()
        self._waiting: dict[bytes, Incoming] = {}
        self._running: dict[bytes, _Running] = {}

    @property
    def num_active(self) -> int:
        return len(self._waiting) + len(self._running)

    def expect(self, pool: KvPool, blocks: Sequence[int], deadline_s: float, peer: str | None) -> Incoming:
        ticket = secrets.token_bytes(16)
        self._leases.grant(ticket, self._loop.time() + deadline_s)
        incoming = self._waiting[ticket] = Incoming(ticket, pool, blocks, self._stop, peer)
        timer = self._loop.call_later(deadline_s, self._expire, ticket)

        def forget(_: Incoming) -> None:
            timer.cancel()
            self._leases.release(ticket)
            self._waiting.pop(ticket, None)

        incoming.on_end(forget)
        return incoming

    def accept(self, connection: Connection, message: Open) -> None:
        """Starts a transfer, or refuses it."""
        incoming = None
        try:
            expected = self._waiting.get(message.ticket)
            if expected is not None and expected.peer not in (None, connection.link.peer):
                raise TransferError(TransferReason.TICKET_OF_ANOTHER)  # which is not used up by that
            self._leases.redeem(message.ticket, self._loop.time())
            incoming = self._waiting[message.ticket]
            if (message.version, message.block_bytes) != (VERSION, incoming.pool.block_bytes):
                raise TransferError(TransferReason.MISMATCH, f"blocks of {message.block_bytes} bytes")
            if message.num_blocks != len(incoming.blocks) or message.chunk_blocks < 1:
                raise TransferError(TransferReason.MISMATCH, f"{message.num_blocks} blocks, not {len(incoming.blocks)}")
            if message.chunk_blocks > max(1, MAX_CHUNK_BYTES // message.block_bytes):
                raise TransferError(TransferReason.MISMATCH, f"{message.chunk_blocks} blocks in a chunk are too many")
            if message.checked_bytes % 8 or not 0 < message.checked_bytes <= LINE_BYTES:
                raise TransferError(TransferReason.MISMATCH, f"{message.checked_bytes} checked bytes")
        except TransferError as error:
            if incoming is not None:
                incoming.fail(error)
            logger.warning("a transfer from %s is refused: %s", name_of(connection.link.peer), error)
            self._tasks.start(self._refuse(connection, message, error))
            return
        connection.incoming[message.transfer] = incoming
        task = self._tasks.start(self._receive(connection, message, incoming))
        self._running[message.ticket] = _Running(connection, message.transfer, task)

    def fail_all(self, error: TransferError) -> None:
        for incoming in list(self._waiting.values()):
            incoming.fail(error)

    def cancel_all(self, pool: KvPool) -> None:
        for incoming in [*self._waiting.values()]:
            if incoming.pool is pool:
                incoming.cancel()

    async def _refuse(self, connection: Connection, message: Open, error: TransferError) -> None:
        """Whoever shows no good ticket and has no transfer under way is cut off; the answer gets time to arrive."""
        try:
            await connection.say(Ended(message.transfer, error.reason, 0, 0, str(error)[:200]))
        except LinkError as broken:
            await connection.lose(str(broken))
        await asyncio.sleep(self._drain_s)
        if connection.is_idle:
            self._on_refused(Refusal.TICKET, 1)
            await connection.lose("it showed no good ticket")

    async def _receive(self, connection: Connection, message: Open, incoming: Incoming) -> None:
        started = self._loop.time()
        pair = None
        try:
            pair = await self._end.staging.take(message.chunk_blocks * message.block_bytes, incoming.pool)
            await connection.say(Accept(message.transfer))
            await self._end.faults.at(FaultPoint.OPENED)
            ended = await Receiver(connection.link, message, incoming, self._end, pair).run()
            if ended.reason is None:
                await self._end.faults.at(FaultPoint.BEFORE_END)
                incoming.succeed(Receipt(ended.num_bytes, ended.checksum, self._loop.time() - started))
                if incoming.failure is not None:  # stopped in between
                    ended.reason = incoming.failure.reason
            await connection.say(ended)
        except LinkError as error:
            incoming.fail(TransferError(TransferReason.PEER_LOST, str(error)))
            await connection.lose(str(error))
        except Exception as error:
            incoming.fail(TransferError(TransferReason.FAILED, f"{type(error).__name__}: {error}"))
            await connection.lose("a transfer failed here")
            raise
        finally:
            incoming.fail(TransferError(TransferReason.CLOSED))  # of no effect unless this task was cancelled
            connection.incoming.pop(message.transfer, None)
            self._running.pop(message.ticket, None)
            if pair is not None:
                self._end.staging.give_back(pair, reusable=not connection.is_lost)

    def _expire(self, ticket: bytes) -> None:
        self._leases.expire(self._loop.time())
        incoming = self._waiting[ticket]
        incoming.fail(TransferError(TransferReason.DEADLINE))
        self._stop(incoming)

    def _stop(self, incoming: Incoming) -> None:
        if (running := self._running.get(incoming.ticket)) is not None:
            self._tasks.start(self._wind_up(running))

    async def _wind_up(self, running: _Running) -> None:
        try:
            async with asyncio.timeout(self._drain_s):
                await running.connection.say(Cancel(running.transfer))
                await asyncio.wait([running.task])
        except (TimeoutError, LinkError):
            await running.connection.lose("the source does not wind up")
