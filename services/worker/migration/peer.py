"""What a source says to the destination of one migration, and what comes of it as events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from services.worker.engine_loop import EngineLoop
from services.worker.kv_transport import KvTransport, Outgoing, TransferError, TransferReason
from services.worker.migration.faults import FaultError, FaultPoint, FaultPoints
from services.worker.migration.host import pool_of
from services.worker.migration.telemetry import MigrationSpan, MigrationTelemetry
from shared.bus.interface import Bus, BusError, ServiceError
from shared.engine.moving import TakenOut, rebased
from shared.messages.catalogue import (
    INSTANCE_ABORT,
    INSTANCE_CANCEL,
    INSTANCE_COMMIT,
    INSTANCE_OWNS,
    INSTANCE_PRE_ALLOCATE,
)
from shared.messages.cluster import InstanceInfo
from shared.messages.migration import (
    AbortMigration,
    AbortReason,
    Commit,
    MoveReason,
    OwnsQuery,
    PreAllocate,
    Reserved,
)
from shared.messages.requests import Cancel, ErrorCode, GenerationRequest
from shared.migration.destination import IDLE_S
from shared.migration.estimates import copy_deadline_s, copy_s
from shared.migration.source import ASK_PAUSE_S, ASK_S, COMMIT_S, CONNECT_S, RESERVE_S, Event

log = logging.getLogger(__name__)

MAX_TRIES = 5
"""To get room at a destination that says that it will have some soon."""
MAX_RETRY_S = 0.1
"""What counts as soon."""

_UNDECIDED = (ErrorCode.DEADLINE, ErrorCode.UNAVAILABLE, ErrorCode.INTERNAL)
"""Errors that do not say whether a Commit took effect."""
_REASONS = {
    ErrorCode.BAD_REQUEST: AbortReason.MISMATCH,
    ErrorCode.DEADLINE: AbortReason.DEADLINE,
    ErrorCode.UNAVAILABLE: AbortReason.UNREACHABLE,
    ErrorCode.INTERNAL: AbortReason.UNREACHABLE,
}
"""What an error of the destination means; REFUSED where it is none of these."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """What migrations out of an instance have in common."""

    instance_id: str
    bus: Bus
    loop: EngineLoop
    transport: KvTransport | None
    telemetry: MigrationTelemetry
    faults: FaultPoints
    rate_share: float
    max_stages: int
    step_s: Callable[[str], float]
    """Of a model's decode steps lately."""
    is_there: Callable[[InstanceInfo], bool]
    """Whether the registry still has that process."""


@dataclass(kw_only=True)
class Stage:
    """Blocks `first_block ..` of the request, for which room is asked."""

    number: int
    first_block: int
    num_blocks: int
    hashes: bytes
    on_host: bool = False
    begins_s: float = 0.0
    """So long after the answer its blocks may begin to come."""
    is_urgent: bool = False
    """It is waited for: its copy goes as fast as it can."""
    arrives_s: float = -1.0
    """As in `PreAllocate`."""
    reserved: Reserved | None = None
    begun: Outgoing | None = None
    """Its transfer, where that was begun before the blocks were known."""

    def attributes(self) -> dict[str, int]:
        return {
            "tideway.migration.stage": self.number,
            "tideway.migration.first_block": self.first_block,
            "tideway.migration.blocks": self.num_blocks,
            "tideway.migration.held": self.reserved.num_held if self.reserved else 0,
        }


class Answer(NamedTuple):
    event: Event
    reason: AbortReason | None = None


class Peer:
    """The destination of one migration. Nothing here raises for a failure of the other side."""

    def __init__(
        self,
        site: Site,
        migration_id: str,
        request: GenerationRequest,
        page_tokens: int,
        max_tokens: int,
        info: InstanceInfo,
        span: MigrationSpan,
        reason: MoveReason,
    ) -> None:
        """`max_tokens`: of the request's sequence at its longest."""
        self._site = site
        self._migration_id = migration_id
        self._request = request
        self._page_tokens = page_tokens
        self._max_tokens = max_tokens
        self._ids = {"instance_id": info.instance_id}
        self._address = info.kv_address
        self._span = span
        self._reason = reason
        self.num_bytes = 0
        """That it has acknowledged."""

    @property
    def takes_kv(self) -> bool:
        return self._site.transport is not None and bool(self._address)

    def slot_bytes(self, on_host: bool) -> int | None:
        transport = self._site.transport
        return None if transport is None else transport.slot_bytes(pool_of(self._request.model, on_host))

    def copy_s(self, num_bytes: int, is_urgent: bool = False) -> float:
        transport = self._site.transport
        bandwidth = None if transport is None else transport.bandwidth_bytes_s(self._address)
        return copy_s(num_bytes, bandwidth, 1.0 if is_urgent else self._site.rate_share)

    def copy_deadline_s(self, stage: Stage | None) -> float:
        if stage is None:
            return copy_deadline_s(0.0)
        return copy_deadline_s(self.copy_s(stage.num_blocks * (self.slot_bytes(stage.on_host) or 0)))

    def _room_s(self, stage: Stage) -> float:
        """For which its room is kept."""
        return stage.begins_s + max(IDLE_S, self.copy_deadline_s(stage))

    async def reserve(self, stage: Stage) -> Answer:
        """Asks for room, and makes the connection that the blocks will need."""
        request = self._request
        query = PreAllocate(
            migration_id=self._migration_id,
            source_id=self._site.instance_id,
            request_id=request.request_id,
            model=request.model,
            request_class=request.request_class,
            priority=request.priority,
            stage=stage.number,
            first_block=stage.first_block,
            num_blocks=stage.num_blocks,
            hashes=stage.hashes,
            page_tokens=self._page_tokens,
            slot_bytes=self.slot_bytes(stage.on_host) or 0,
            on_host=stage.on_host,
            max_tokens=self._max_tokens,
            deadline_s=self._room_s(stage),
            traceparent=self._span.traceparent,
            reason=self._reason,
            arrives_s=stage.arrives_s,
            source_address="" if self._site.transport is None else self._site.transport.address,
        )
        try:
            with self._span.stage("migration.reserve", stage.attributes()):
                await self._site.faults.at(FaultPoint.SOURCE_RESERVE)
                stage.reserved = await self._ask_for_room(query)
                if stage.reserved.ticket and self._site.transport is not None:
                    await self._site.transport.connect(stage.reserved.address, deadline_s=CONNECT_S)
        except BusError as error:
            log.debug("migration %s: stage %d: %s", self._migration_id, stage.number, error)
            return Answer(Event.FAILED, _REASONS.get(error.code, AbortReason.REFUSED))
        except TimeoutError:
            return Answer(Event.FAILED, AbortReason.DEADLINE)
        except (TransferError, FaultError) as error:
            log.info("migration %s: no way to %s: %s", self._migration_id, self._address, error)
            return Answer(Event.FAILED, AbortReason.UNREACHABLE)
        return Answer(Event.RESERVED)

    async def _ask_for_room(self, query: PreAllocate) -> Reserved:
        endpoint = INSTANCE_PRE_ALLOCATE.at(**self._ids)
        async with asyncio.timeout(RESERVE_S):
            for _ in range(MAX_TRIES - 1):
                try:
                    return await self._site.bus.request(endpoint, query, timeout_s=RESERVE_S)
                except ServiceError as error:
                    if error.code is not ErrorCode.OVERLOADED or not 0 < error.info.retry_after_s <= MAX_RETRY_S:
                        raise
                    await asyncio.sleep(error.info.retry_after_s)
            return await self._site.bus.request(endpoint, query, timeout_s=RESERVE_S)

    def begin(self, stage: Stage) -> None:
        """Makes the destination ready for the stage's blocks before it is known which they are."""
        with contextlib.suppress(TransferError):  # `send` will say so
            stage.begun = self._begin(stage)

    def has_failed(self, stage: Stage) -> bool:
        """What was begun, before it could be sent."""
        if stage.begun is None or not stage.begun.task.done():
            return False
        self._did_not_go(stage, stage.begun.failure or TransferError(TransferReason.CLOSED))
        return True

    def end(self, stage: Stage) -> None:
        """What was begun and not sent is not going to be."""
        if stage.begun is not None and self._site.transport is not None:
            self._site.transport.cancel(stage.begun)

    async def send(self, stage: Stage, slots: list[int]) -> Answer:
        """`slots`: one for each block of the stage; those that the destination holds are left out."""
        reserved, transport = stage.reserved, self._site.transport
        assert reserved is not None and len(slots) == stage.num_blocks
        missing = slots[reserved.num_held :]
        if not missing:
            return Answer(Event.COPIED)
        assert transport is not None
        attributes = {**stage.attributes(), "tideway.migration.sent": len(missing)}
        try:
            with self._span.stage("migration.copy", attributes):
                await self._site.faults.at(FaultPoint.SOURCE_COPY)
                begun = stage.begun or self._begin(stage)
                receipt = await transport.complete(begun, missing, deadline_s=self.copy_deadline_s(stage))
        except (TransferError, FaultError) as error:
            self._did_not_go(stage, error)
            return Answer(Event.COPY_FAILED, AbortReason.TRANSFER_FAILED)
        self.num_bytes += receipt.num_bytes
        return Answer(Event.COPIED)

    def _did_not_go(self, stage: Stage, why: Exception) -> None:
        log.info("migration %s: blocks of stage %d did not go: %s", self._migration_id, stage.number, why)

    def _begin(self, stage: Stage) -> Outgoing:
        reserved, transport = stage.reserved, self._site.transport
        if transport is None or reserved is None or not reserved.ticket:
            raise TransferError(TransferReason.MISMATCH, "the destination named no place for the blocks")
        return transport.begin(
            reserved.address,
            reserved.ticket,
            pool_of(self._request.model, stage.on_host),
            stage.num_blocks - reserved.num_held,
            deadline_s=self._room_s(stage),
            is_limited=not stage.is_urgent,
        )

    async def commit(self, taken: TakenOut, epoch: int, stages: list[Stage]) -> Answer:
        site = self._site
        request, progress = rebased(taken, site.loop.now())
        request = msgspec.structs.replace(request, epoch=epoch)
        num_blocks = sum(stage.num_blocks for stage in stages)
        on_host = any(stage.on_host for stage in stages)
        commit = Commit(self._migration_id, site.instance_id, request, progress, num_blocks, on_host)
        timeout_s = COMMIT_S + self.copy_deadline_s(stages[-1] if stages else None)
        try:
            with self._span.stage("migration.commit", {"tideway.migration.blocks": num_blocks}):
                await site.faults.at(FaultPoint.SOURCE_COMMIT)
                await site.bus.request(INSTANCE_COMMIT.at(**self._ids), commit, timeout_s=timeout_s)
                await site.faults.at(FaultPoint.SOURCE_ANSWER)
        except ServiceError as error:
            if error.code in _UNDECIDED:
                return Answer(Event.NO_ANSWER)
            return Answer(Event.COMMIT_REFUSED, _REASONS.get(error.code, AbortReason.REFUSED))
        except (BusError, FaultError):
            return Answer(Event.NO_ANSWER)
        return Answer(Event.COMMITTED)

    async def ask(self, epoch: int) -> Answer:
        """Whether it took the request over."""
        query = OwnsQuery(self._migration_id, self._request.request_id, epoch)
        try:
            await self._site.faults.at(FaultPoint.SOURCE_OWNS)
            reply = await self._site.bus.request(INSTANCE_OWNS.at(**self._ids), query, timeout_s=ASK_S)
        except (BusError, FaultError):
            await asyncio.sleep(ASK_PAUSE_S)
            return Answer(Event.NO_ANSWER)
        return Answer(Event.OWNS_YES if reply.owns else Event.OWNS_NO)

    def abort(self, reason: AbortReason) -> None:
        self._site.bus.publish(INSTANCE_ABORT.at(**self._ids), AbortMigration(self._migration_id, reason))

    def cancel(self, epoch: int) -> None:
        """The client does not want the request any more; `epoch`: in which it was handed over. One that was placed anew
        is not meant."""
        self._site.bus.publish(INSTANCE_CANCEL.at(**self._ids), Cancel(self._request.request_id, epoch))
