"""KV blocks from instance to instance: the transport, in terms of blocks.

    destination                                           source
    incoming = transport.expect(pool, blocks, ...)
    (incoming.ticket and transport.address travel in a control message)
                                                          receipt = await transport.send(address, ticket, pool, blocks, ...)
                                                          (or `begin` as soon as the ticket is there, and `complete` when
                                                          the blocks have their content)
    receipt = await incoming.wait()

One connection per direction of a pair, made on first use, kept, and made again after an error. It carries any number of
transfers at once. A transfer that is cancelled or past its deadline is wound up in order (wire.py), so that the others on
the connection go on; only a peer that does not play along within `drain_s` costs the connection.
All methods belong to the thread of one event loop; gather, scatter and checksums run in threads of the transport's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from services.worker.kv.kv_store import KvBlocks
from services.worker.kv_transport.connections import Connection
from services.worker.kv_transport.destination import Destination
from services.worker.kv_transport.errors import LinkError, TransferError, TransferReason
from services.worker.kv_transport.faults import NO_FAULTS, Faults
from services.worker.kv_transport.links import Link, Network, Refusal, name_of
from services.worker.kv_transport.rates import Bandwidth, TokenBucket
from services.worker.kv_transport.receiving import Incoming, Receipt
from services.worker.kv_transport.sending import Outgoing, send_chunks, verdict
from services.worker.kv_transport.staging import End, KvPool, StagingPairs
from services.worker.kv_transport.telemetry import TransferMetrics
from services.worker.kv_transport.wire import Open
from shared.runtime.tasks import TaskSet

_REFUSALS = (
    TransferReason.TICKET_UNKNOWN,
    TransferReason.TICKET_USED,
    TransferReason.TICKET_EXPIRED,
    TransferReason.TICKET_OF_ANOTHER,
)


@dataclass(frozen=True, kw_only=True)
class TransportLimits:
    chunk_bytes: int = 8 << 20
    """Bytes of a message, at least one block; a transfer holds two such buffers at each end where blocks must be fused."""
    lone_block_bytes: int = 2 << 20
    """Blocks at least this large are messages of their own: a message's fixed cost is less than that of copying twice."""
    checked_bytes: int = 64
    """How many bytes of each 4 KiB of a message the checksum covers; a multiple of 8."""
    max_transfers: int = 4
    """In each direction; more wait for staging, within their deadline."""
    rate_fraction: float | None = 0.5
    """Share of the measured bandwidth that all transfers out of here may use together; None: all of it."""
    drain_s: float = 0.5
    """How long a peer may take to wind up a transfer that was stopped."""
    first_ticket_s: float = 5.0
    """A connection without a transfer in this time from its begin is closed."""


class KvTransport:
    def __init__(
        self,
        network: Network,
        limits: TransportLimits = TransportLimits(),
        *,
        faults: Faults = NO_FAULTS,
        metrics: TransferMetrics | None = None,
    ) -> None:
        """`metrics`: None where nobody looks at them."""
        self.address = ""
        """Address at which peers reach this transport; empty before `open`. Only they may know it: `name` is for
        everybody."""
        self._network = network
        self._limits = limits
        self._faults = faults
        self._metrics = metrics or TransferMetrics(CollectorRegistry())
        network.on_refused = self._metrics.on_refused
        self._pools: dict[str, KvPool] = {}
        self._connections: set[Connection] = set()
        self._dialled: dict[str, asyncio.Task[Connection]] = {}
        self._bandwidth: dict[str, Bandwidth] = {}
        self._bucket = TokenBucket(None, limits.chunk_bytes)
        self._tasks = TaskSet(told=TransferError)
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="kv-transport")
        self._open = False

    @property
    def name(self) -> str:
        return name_of(self.address)

    async def open(self) -> None:
        """Raises `TransferError` with reason UNUSABLE: the caller says so and runs without migration."""
        self._loop = asyncio.get_running_loop()
        self.address = await self._network.open(self._on_link)
        reads_device = self._network.reads_device
        self._out = End(StagingPairs(self._limits.max_transfers, reads_device), self._executor, self._faults)
        self._in = End(StagingPairs(self._limits.max_transfers, reads_device), self._executor, self._faults)
        self._destination = Destination(self._in, self._tasks, self._metrics.on_refused, drain_s=self._limits.drain_s)
        self._open = True

    def register(self, pool: str, rows: KvBlocks) -> None:
        """`rows`: `[num_blocks, block_bytes]` uint8 (`Executor.block_rows`), valid until `unregister` or `close`.
        A name that is registered again means the new rows from then on."""
        self.unregister(pool)
        self._pools[pool] = KvPool(rows)

    def unregister(self, pool: str) -> None:
        """No new transfer finds the pool, and those under way on it are cancelled; who must know when the last byte was
        written awaits `Incoming.wait`. Of no effect for a name that is not registered."""
        if (known := self._pools.pop(pool, None)) is None or not self._open:
            return
        self._destination.cancel_all(known)
        for connection in self._connections:
            for outgoing in connection.outgoing.values():
                if outgoing.pool is known:
                    outgoing.stop()

    def block_bytes(self, pool: str) -> int | None:
        """Bytes of a block of a registered pool."""
        known = self._pools.get(pool)
        return None if known is None else known.block_bytes

    def expect(self, pool: str, blocks: Sequence[int], *, deadline_s: float, peer: str | None = None) -> Incoming:
        """Blocks that a peer may fill until the deadline; they are the transport's until `Incoming.wait` ends. `peer`: only
        the one whose transport has this address; None: whoever has the ticket. Raises `TransferError` (MISMATCH, CLOSED)."""
        known = self._checked(pool, blocks)
        if peer is not None:
            self._network.admit(peer)
        incoming = self._destination.expect(known, blocks, deadline_s, peer)
        incoming.on_end(self._on_received)
        return incoming

    async def connect(self, address: str, *, deadline_s: float) -> None:
        """Makes the connection to a peer, if there is none, so that the next `send` need not. Raises `TransferError`."""
        if not self._open:
            raise TransferError(TransferReason.CLOSED)
        try:
            async with asyncio.timeout(deadline_s):
                await self._connected(address)
        except TimeoutError:
            raise TransferError(TransferReason.DEADLINE, f"{deadline_s:g} s") from None

    async def send(
        self,
        address: str,
        ticket: bytes,
        pool: str,
        blocks: Sequence[int],
        *,
        deadline_s: float,
        is_limited: bool = True,
    ) -> Receipt:
        """Fills the blocks that `ticket` stands for. Returns when the destination has acknowledged that all of it lies in
        its pool. `is_limited`: by the rate limit. Cancelling the call ends the transfer. Raises `TransferError`."""
        self._checked(pool, blocks)
        begun = self.begin(address, ticket, pool, len(blocks), deadline_s=deadline_s, is_limited=is_limited)
        return await self.complete(begun, blocks, deadline_s=deadline_s)

    def begin(
        self, address: str, ticket: bytes, pool: str, num_blocks: int, *, deadline_s: float, is_limited: bool = True
    ) -> Outgoing:
        """Has the destination make ready for blocks that `complete` will name, so that their bytes need not wait for it
        then. What is not completed by the deadline is cancelled. Raises `TransferError` (MISMATCH, CLOSED)."""
        source = self._checked(pool)
        if num_blocks < 1:
            raise TransferError(TransferReason.MISMATCH, f"{num_blocks} blocks")
        chunk_blocks, checked_bytes = self._chunk_blocks(source), self._limits.checked_bytes
        outgoing = Outgoing(
            address=address,
            ticket=ticket,
            pool=source,
            num_blocks=num_blocks,
            chunk_blocks=chunk_blocks,
            checked_bytes=checked_bytes,
            is_limited=is_limited,
        )
        outgoing.task = self._tasks.start(self._send(outgoing))
        outgoing.expiry = self._loop.call_later(deadline_s, self.cancel, outgoing, TransferReason.DEADLINE)
        return outgoing

    async def complete(self, outgoing: Outgoing, blocks: Sequence[int], *, deadline_s: float) -> Receipt:
        """Sends the blocks of a transfer that was begun; else as `send`."""
        if outgoing.is_decided:
            raise TransferError(TransferReason.CANCELLED)
        outgoing.is_decided = True
        outgoing.expiry.cancel()
        try:
            receipt = await self._completed(outgoing, tuple(blocks), deadline_s)
        except TransferError as error:
            self._metrics.on_failed("out", error.reason)
            raise
        except asyncio.CancelledError:
            self._metrics.on_failed("out", TransferReason.CANCELLED)
            raise
        self._metrics.on_done("out", receipt.num_bytes, receipt.seconds)
        self._metrics.on_bandwidth(name_of(outgoing.address), self.bandwidth_bytes_s(outgoing.address))
        return receipt

    async def _completed(self, outgoing: Outgoing, blocks: Sequence[int], deadline_s: float) -> Receipt:
        started, task = self._loop.time(), outgoing.task
        if len(blocks) != outgoing.num_blocks or not outgoing.pool.has(blocks):
            self._tasks.start(self._wind_up(outgoing))
            raise TransferError(TransferReason.MISMATCH, f"not the {outgoing.num_blocks} blocks that were announced")
        outgoing.name(blocks)
        try:
            async with asyncio.timeout(deadline_s):
                num_bytes, checksum = await asyncio.shield(task)
        except TimeoutError:
            self._tasks.start(self._wind_up(outgoing))
            raise TransferError(TransferReason.DEADLINE, f"{deadline_s:g} s") from None
        except asyncio.CancelledError:
            if not task.done():
                self._tasks.start(self._wind_up(outgoing))
                raise
            raise TransferError(TransferReason.CLOSED) from None
        return Receipt(num_bytes, checksum, self._loop.time() - started)

    def cancel(self, outgoing: Outgoing, reason: TransferReason = TransferReason.CANCELLED) -> None:
        """Cancels a transfer that will not be completed; without effect where it was, or is being."""
        if outgoing.is_decided:
            return
        outgoing.is_decided = True
        outgoing.expiry.cancel()
        self._metrics.on_failed("out", outgoing.failure.reason if outgoing.failure else reason)
        outgoing.stop()
        self._tasks.start(self._wind_up(outgoing))

    def _on_received(self, incoming: Incoming) -> None:
        if (receipt := incoming.receipt) is not None:
            self._metrics.on_done("in", receipt.num_bytes, receipt.seconds)
        elif incoming.failure is not None:
            self._metrics.on_failed("in", incoming.failure.reason)

    def bandwidth_bytes_s(self, address: str) -> float | None:
        """Measured on transfers over the connection to this peer, without the rate limit's waits; None: none yet. Its name
        does as well as its address."""
        measured = self._bandwidth.get(name_of(address))
        return measured.bytes_s if measured else None

    @property
    def usual_bandwidth_bytes_s(self) -> float | None:
        """To peers, the median of what was measured; None: nothing was."""
        known = sorted(bytes_s for measured in self._bandwidth.values() if (bytes_s := measured.bytes_s))
        return known[len(known) // 2] if known else None

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def num_active(self) -> int:
        """Transfers that hold staging memory or wait for their source."""
        return self._out.staging.num_taken + self._in.staging.num_taken + self._destination.num_active

    async def close(self) -> None:
        """Fails what is under way with CLOSED. May be called again."""
        if not self._open:
            return
        self._open = False
        error = TransferError(TransferReason.CLOSED)
        self._destination.fail_all(error)
        losing = [connection.lose("closed here", TransferReason.CLOSED) for connection in self._connections]
        await asyncio.gather(*losing)
        await self._tasks.end_all()
        await self._network.close()
        self._executor.shutdown()

    # ------------------------------------------------------------------------------------------------- source

    async def _send(self, outgoing: Outgoing) -> tuple[int, int]:
        pair = await self._out.staging.take(outgoing.chunk_blocks * outgoing.pool.block_bytes, outgoing.pool)
        connection: Connection | None = None
        try:
            connection = await self._connected(outgoing.address)
            if outgoing.stopped.is_set() or outgoing.pool not in self._pools.values():
                raise TransferError(TransferReason.CANCELLED)
            connection.new_transfer(outgoing)
            pool = outgoing.pool
            await connection.say(
                Open(
                    outgoing.transfer,
                    outgoing.ticket,
                    outgoing.num_blocks,
                    pool.block_bytes,
                    outgoing.chunk_blocks,
                    outgoing.checked_bytes,
                )
            )
            await outgoing.accepted
            on_sent = self._measure(outgoing.address)
            sent = await send_chunks(connection.link, outgoing, self._out, pair, self._bucket, on_sent, self._loop.time)
            if error := verdict(await outgoing.ended, *sent):
                raise error
            return sent
        except LinkError as error:
            reason = TransferReason.PEER_LOST if connection else TransferReason.UNREACHABLE
            if connection is not None:
                await connection.lose(str(error))
            raise TransferError(reason if self._open else TransferReason.CLOSED, str(error)) from error
        except TransferError as error:
            if connection is not None and error.reason in _REFUSALS and len(connection.outgoing) == 1:
                await connection.lose("the destination refused a ticket")
            raise
        finally:
            if connection is not None:
                connection.outgoing.pop(outgoing.transfer, None)
            self._out.staging.give_back(pair, reusable=connection is None or not connection.is_lost)

    async def _connected(self, address: str) -> Connection:
        task = self._dialled.get(address)
        if task is None:
            task = self._dialled[address] = self._tasks.start(self._dial(address))
        return await asyncio.shield(task)

    async def _dial(self, address: str) -> Connection:
        try:
            connection = self._add(await self._network.connect(address))
        except LinkError as error:
            del self._dialled[address]
            raise TransferError(TransferReason.UNREACHABLE, str(error)) from error
        return connection

    async def _wind_up(self, outgoing: Outgoing) -> None:
        task = outgoing.task
        outgoing.stop()
        await asyncio.wait([task], timeout=self._limits.drain_s)
        if task.done():
            return
        for connection in list(self._connections):
            if connection.outgoing.get(outgoing.transfer) is outgoing:
                await connection.lose("the peer does not answer")
        task.cancel()
        await asyncio.wait([task])

    def _measure(self, address: str) -> Callable[[int, float], None]:
        bandwidth = self._bandwidth.setdefault(name_of(address), Bandwidth())

        def add(num_bytes: int, seconds: float) -> None:
            bandwidth.add(num_bytes, seconds)
            if self._limits.rate_fraction is not None:
                fastest = max((peer.bytes_s or 0.0 for peer in self._bandwidth.values()), default=0.0)
                if fastest:
                    self._bucket.set_rate(self._limits.rate_fraction * fastest, self._loop.time())

        return add

    # -------------------------------------------------------------------------------------------- connections

    def _on_link(self, link: Link) -> None:
        connection = self._add(link)
        self._tasks.start(self._cut_off_if_silent(connection))

    async def _cut_off_if_silent(self, connection: Connection) -> None:
        await asyncio.sleep(self._limits.first_ticket_s)
        if not connection.has_opened:
            self._metrics.on_refused(Refusal.TICKET, 1)
            await connection.lose("it showed no ticket")

    def _add(self, link: Link) -> Connection:
        connection = Connection(link, self._tasks, self._destination.accept, self._on_lost)
        self._connections.add(connection)
        self._metrics.on_connections(len(self._connections))
        return connection

    def _on_lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._metrics.on_connections(len(self._connections))
        for address, task in list(self._dialled.items()):
            if task.done() and task.result() is connection:
                del self._dialled[address]
                self._bandwidth.pop(name_of(address), None)
                self._metrics.forget_peer(name_of(address))

    # ------------------------------------------------------------------------------------------------ helpers

    def _checked(self, pool: str, blocks: Sequence[int] | None = None) -> KvPool:
        if not self._open:
            raise TransferError(TransferReason.CLOSED)
        known = self._pools.get(pool)
        if known is None or (blocks is not None and not (blocks and known.has(blocks))):
            raise TransferError(TransferReason.MISMATCH, f"no such blocks of {pool}")
        return known

    def _chunk_blocks(self, pool: KvPool) -> int:
        if pool.block_bytes >= self._limits.lone_block_bytes:
            return 1
        return max(1, self._limits.chunk_bytes // pool.block_bytes)
