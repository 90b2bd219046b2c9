"""Migrations into this instance: carries out what `shared.migration.destination` decides, for any number of them.

| slots | whose |
|---|---|
| reserved, blocks to come | the transport's, from `expect` until `Incoming.wait` has ended |
| reserved, all blocks here | the reservation's |
| adopted | the sequence's |
| to be freed | the reservation's, until every claim and every transfer into them has ended |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from services.worker.engine_loop import EngineLoop
from services.worker.kv_transport import Incoming, KvTransport, TransferError
from services.worker.migration.disowned import DisownedRequests
from services.worker.migration.faults import FaultError, FaultPoint, FaultPoints
from services.worker.migration.host import MigrationHost, pool_of
from services.worker.migration.telemetry import MOVED, MigrationSpan, MigrationTelemetry
from shared.bus.interface import ServiceError
from shared.engine.calls import Adopt, Release, Reserve
from shared.messages.migration import (
    AbortMigration,
    AbortReason,
    Commit,
    Committed,
    OwnsQuery,
    OwnsReply,
    PreAllocate,
    Reserved,
)
from shared.messages.requests import ErrorCode, ErrorInfo
from shared.migration.destination import Action, DestinationMove, Event, State
from shared.migration.limits import max_at_once
from shared.tasks import TaskSet

log = logging.getLogger(__name__)

SWEEP_S = 0.25
"""Deadlines are looked at so often while there are any."""
IDLE_SWEEP_S = 10.0
RETRY_S = 0.02
"""After which a migration that comes in may be over."""
STOP_S = 1.0
"""For the transport to stop writing, when the instance stops."""


class _Move:
    """One migration, as far as its decisions do not need to know."""

    def __init__(self, migration_id: str, request_id: str, now: float) -> None:
        self.migration_id = migration_id
        self.request_id = request_id
        self.machine = DestinationMove(now)
        self.has_reserved = False
        self.answers: dict[int, asyncio.Task[Reserved]] = {}
        """To PreAllocate, by stage."""
        self.claims: list[asyncio.Future[Any]] = []
        self.transfers: list[Incoming] = []
        self.commit: Commit | None = None
        self.verdict: asyncio.Future[ErrorInfo | None] = asyncio.get_running_loop().create_future()
        """What Commit is answered: None for yes."""
        self.refusal = ErrorInfo(ErrorCode.GONE, "the migration is over")
        self.answer: bool | None = None
        """To Owns."""
        self.source_id = ""
        self.num_bytes = 0
        self.is_counted = False
        self.span: MigrationSpan | None = None


class IncomingMigrations:
    def __init__(
        self,
        host: MigrationHost,
        loop: EngineLoop,
        transport: KvTransport | None,
        telemetry: MigrationTelemetry,
        faults: FaultPoints,
        max_migrations: int,
    ) -> None:
        self._host = host
        self._loop = loop
        self._transport = transport
        self._telemetry = telemetry
        self._faults = faults
        self._max_migrations = max_migrations
        self._moves: dict[str, _Move] = {}
        self._tasks = TaskSet(told=ServiceError)
        self._wake = asyncio.Event()
        self._stopped = asyncio.Event()
        self._first_steps: dict[str, list[float]] = {}
        """By model, when requests were adopted whose first step here has not ended."""
        self.disowned = DisownedRequests(loop, host)
        self._is_stopping = False

    def start(self) -> None:
        self._sweeper = self._tasks.start(self._sweep())

    async def stop(self) -> None:
        """Frees what is reserved. Bounded by the transport's time to wind up."""
        self._is_stopping = True
        self._stopped.set()
        for move in self._moves.values():
            self._on(move, Event.STOP)
        self._sweeper.cancel()
        await self._tasks.wait_all(STOP_S)
        await self._tasks.end_all()

    @property
    def num_in_progress(self) -> int:
        return sum(1 for move in self._moves.values() if move.machine.is_holding)

    # -------------------------------------------------------------------------------------------------- bus

    async def on_pre_allocate(self, query: PreAllocate) -> Reserved:
        await self._reached(FaultPoint.DESTINATION_RESERVE)
        move = self._moves.get(query.migration_id)
        if move is None:
            if (refused := self._refusal(query)) is not None:
                self._telemetry.refused("in", "", AbortReason.REFUSED)
                raise ServiceError(refused)
            move = self._new(query.migration_id, query.request_id)
            attributes = {
                "tideway.migration_id": query.migration_id,
                "tideway.request_id": query.request_id,
                "tideway.source_id": query.source_id,
                "tideway.instance_id": self._host.instance_id,
            }
            move.span = self._telemetry.span("migration.receive", query.traceparent, attributes)
        actions = move.machine.on_pre_allocate(query.stage, query.num_blocks, self._loop.now())
        if Action.RESERVE in actions:
            move.answers[query.stage] = self._tasks.start(self._reserve(move, query))
        elif Action.REFUSE_STAGE in actions or query.stage not in move.answers:
            raise ServiceError.of(ErrorCode.GONE, f"migration {query.migration_id} is over")
        # The work goes on when the source gives up waiting: asked again, it gets the same answer.
        reserved: Reserved = await asyncio.shield(move.answers[query.stage])
        await self._reached(FaultPoint.DESTINATION_RESERVED)
        return msgspec.structs.replace(reserved, busy_s=self._loop.ask(lambda engine: engine.busy_s(self._loop.now())))

    async def on_commit(self, commit: Commit) -> Committed:
        move = self._moves.get(commit.migration_id)
        try:
            await self._faults.at(FaultPoint.DESTINATION_COMMIT)
        except FaultError as error:
            if move is not None:
                self._on(move, Event.ABORT)
            raise ServiceError.of(ErrorCode.OVERLOADED, str(error)) from None
        move = self._moves.get(commit.migration_id)
        if move is None:
            move = self._new(commit.migration_id, commit.request.request_id)
        if move.machine.state in (State.NEW, State.OPEN):
            move.commit, move.source_id = commit, commit.source_id
        self._do(move, move.machine.on_commit(commit.num_blocks, commit.request.epoch, self._loop.now()))
        refused = await asyncio.shield(move.verdict)
        await self._reached(FaultPoint.DESTINATION_COMMITTED)
        if refused is not None:
            raise ServiceError(refused)
        return Committed(commit.request.request_id, commit.request.epoch)

    def on_abort(self, abort: AbortMigration) -> None:
        event = Event.DISOWN if abort.reason == AbortReason.DESTINATION_LOST else Event.ABORT
        move = self._moves.get(abort.migration_id) or self._new(abort.migration_id)
        move.refusal = ErrorInfo(ErrorCode.GONE, f"the source aborted the migration: {abort.reason}")
        self._on(move, event)

    def on_owns(self, query: OwnsQuery) -> OwnsReply:
        move = self._moves.get(query.migration_id) or self._new(query.migration_id, query.request_id)
        move.answer = None
        self._on(move, Event.OWNS)
        if move.answer is None:
            raise ServiceError.of(ErrorCode.BUSY, "the request is being taken over")
        return OwnsReply(move.answer)

    async def _reached(self, point: FaultPoint) -> None:
        """`fail` here is an answer that is never sent."""
        try:
            await self._faults.at(point)
        except FaultError as error:
            await self._stopped.wait()
            raise ServiceError.of(ErrorCode.UNAVAILABLE, str(error)) from None

    def _refusal(self, query: PreAllocate) -> ErrorInfo | None:
        if self._host.is_draining or self._is_stopping:
            return ErrorInfo(ErrorCode.DRAINING, f"instance {self._host.instance_id} is draining")
        if not self._host.serves(query.model):
            return ErrorInfo(ErrorCode.GONE, f"model {query.model!r} takes no requests here", "model")
        if (num_in := self.num_in_progress) >= max_at_once(query.reason, self._max_migrations):
            message = f"{num_in} migrations come in already"
            return ErrorInfo(ErrorCode.OVERLOADED, message, retry_after_s=RETRY_S)
        if self._transport is None:
            return ErrorInfo(ErrorCode.UNAVAILABLE, "there is no KV transport here")
        slot_bytes = self._transport.slot_bytes(pool_of(query.model, query.on_host))
        if slot_bytes is None:
            return ErrorInfo(ErrorCode.GONE, f"there is no such KV pool of {query.model!r} here", "model")
        if (slot_bytes, 1) != (query.slot_bytes, query.tensor_parallel):
            message = (
                f"KV blocks of {slot_bytes} bytes on 1 device, not of {query.slot_bytes} on {query.tensor_parallel}"
            )
            return ErrorInfo(ErrorCode.BAD_REQUEST, message, "slot_bytes")
        return None

    def on_step(self, model: str, began_s: float) -> None:
        """A step of the model that began then has ended."""
        if (adopted := self._first_steps.get(model)) is None:
            return
        now = self._loop.now()
        for adopted_s in [at for at in adopted if at <= began_s]:
            self._telemetry.on_pause("destination", now - adopted_s)
            adopted.remove(adopted_s)
        if not adopted:
            del self._first_steps[model]

    # ------------------------------------------------------------------------------------------ one migration

    def _new(self, migration_id: str, request_id: str = "") -> _Move:
        move = self._moves[migration_id] = _Move(migration_id, request_id, self._loop.now())
        self._wake.set()
        return move

    def _on(self, move: _Move, event: Event) -> None:
        self._do(move, move.machine.on(event, self._loop.now()))

    def _do(self, move: _Move, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Action.ADOPT:
                    self._adopt(move)
                case Action.CONFIRM:
                    self._answer_commit(move, None)
                case Action.REFUSE:
                    self._answer_commit(move, move.refusal)
                case Action.SAY_YES | Action.SAY_NO:
                    move.answer = action is Action.SAY_YES
                case Action.STOP_WRITING:
                    for transfer in move.transfers:
                        transfer.cancel()
                    self._tasks.start(self._wait_quiet(move))
                case Action.RELEASE:
                    if move.has_reserved:
                        self._loop.apply(Release(move.migration_id))
                case Action.GIVE_UP:
                    self.disowned.add(move.request_id, move.machine.epoch, move.source_id)
                case Action.RESERVE | Action.REFUSE_STAGE:
                    pass  # answered by on_pre_allocate
        self._count(move)

    def _count(self, move: _Move) -> None:
        """Begin and end of it, for metrics."""
        if move.machine.is_holding:
            if not move.is_counted:
                move.is_counted = True
                self._telemetry.begin("in")
        elif move.is_counted:
            move.is_counted = False
            outcome = MOVED if move.machine.state is State.OWNED else "freed"
            self._telemetry.end("in", "", outcome)
            self._telemetry.on_bytes("in", move.num_bytes)
            if move.span is not None:
                move.span.end({"tideway.migration.outcome": outcome, "tideway.migration.bytes": move.num_bytes})
            # What is remembered for long is small.
            move.commit = move.span = None
            move.answers, move.claims, move.transfers = {}, [], []

    async def _reserve(self, move: _Move, query: PreAllocate) -> Reserved:
        """Room for one stage, until its blocks are expected. Raises `ServiceError`."""
        assert self._transport is not None
        if move.machine.state is not State.OPEN:  # it was aborted before this began
            raise ServiceError.of(ErrorCode.GONE, f"migration {query.migration_id} is over")
        reservation = self._loop.apply(Reserve(query))
        if isinstance(reservation, ErrorInfo):
            move.refusal = reservation
            del move.answers[query.stage]
            is_final = reservation.retry_after_s <= 0
            self._do(move, move.machine.on_not_reserved(query.stage, is_final, self._loop.now()))
            raise ServiceError(reservation)
        move.has_reserved = True
        self._count(move)
        if not reservation.slots:
            return Reserved(query.migration_id, reservation.num_held)
        try:
            if not query.on_host:
                await self._claim(move, query.model, reservation.slots)
            if move.machine.state is not State.OPEN:
                raise ServiceError.of(ErrorCode.GONE, f"migration {query.migration_id} is over")
            pool = pool_of(query.model, query.on_host)
            incoming = self._transport.expect(
                pool, reservation.slots, deadline_s=query.deadline_s, peer=query.source_address
            )
        except (TransferError, KeyError) as error:
            move.refusal = ErrorInfo(ErrorCode.GONE, f"the KV pool is not there any more: {error}")
            self._on(move, Event.STAGE_FAILED)
            raise ServiceError(move.refusal) from None
        now = self._loop.now()
        move.transfers.append(incoming)
        move.machine.on_expected(query.stage, now + query.deadline_s, now)
        self._tasks.start(self._receive(move, query.stage, incoming))
        return Reserved(query.migration_id, reservation.num_held, self._transport.address, incoming.ticket)

    async def _claim(self, move: _Move, model: str, slots: list[int]) -> None:
        """The slots' memory becomes the model's before anything is written there: claimed later, it would be zeroed."""
        claimed: Future[Any] = self._loop.claim_slots(model, slots)
        # Not cancelled with whoever waits for it: the slots go back only after it.
        claim = asyncio.ensure_future(asyncio.wrap_future(claimed))
        move.claims.append(claim)
        event = await asyncio.shield(claim)
        if event is not None:
            await asyncio.to_thread(event.synchronize)

    async def _receive(self, move: _Move, stage: int, incoming: Incoming) -> None:
        name = "migration.receive.stage"
        span = move.span
        assert span is not None
        with span.stage(name, {"tideway.migration.stage": stage, "tideway.migration.blocks": len(incoming.slots)}):
            is_in = False
            try:
                receipt = await incoming.wait()
                await self._faults.at(FaultPoint.DESTINATION_COPIED)
                move.num_bytes += receipt.num_bytes
                is_in = True
            except (TransferError, FaultError) as error:
                move.refusal = ErrorInfo(ErrorCode.GONE, f"the blocks of stage {stage} did not come: {error}")
        self._do(move, move.machine.on_stage(stage, is_in, self._loop.now()))

    async def _wait_quiet(self, move: _Move) -> None:
        await asyncio.gather(*move.claims, return_exceptions=True)
        for transfer in move.transfers:
            try:
                await transfer.wait()
            except TransferError:
                continue
        self._on(move, Event.QUIET)

    def _adopt(self, move: _Move) -> None:
        assert move.commit is not None
        self._count(move)
        request = move.commit.request
        refused: ErrorInfo | None
        if self._host.is_draining or self._is_stopping:
            refused = ErrorInfo(ErrorCode.DRAINING, f"instance {self._host.instance_id} is draining")
        elif not self._host.serves(request.model):
            refused = ErrorInfo(ErrorCode.GONE, f"model {request.model!r} takes no requests here", "model")
        else:
            try:
                refused = self._loop.apply(Adopt(move.commit))
            except Exception as error:
                log.exception("request %s could not be taken over", request.request_id)
                refused = ErrorInfo(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        if refused is not None:
            move.refusal = refused
            self._on(move, Event.NOT_ADOPTED)
            return
        # Effects of its first step come through the event loop, so after this.
        self._host.on_adopted(move.commit, len(request.prior) // 4)
        if move.commit.progress.num_computed:
            self._first_steps.setdefault(request.model, []).append(self._loop.now())
        self._on(move, Event.ADOPTED)

    @staticmethod
    def _answer_commit(move: _Move, refused: ErrorInfo | None) -> None:
        if not move.verdict.done():
            move.verdict.set_result(refused)

    # ------------------------------------------------------------------------------------------------ helpers

    async def _sweep(self) -> None:
        while True:
            self._wake.clear()
            try:
                is_busy = self.num_in_progress or self.disowned
                async with asyncio.timeout(SWEEP_S if is_busy else IDLE_SWEEP_S):
                    await self._wake.wait()
                    await asyncio.sleep(SWEEP_S)
            except TimeoutError:
                pass
            self.disowned.give_up()
            now = self._loop.now()
            for migration_id, move in list(self._moves.items()):
                deadline_s = move.machine.deadline_s()
                if deadline_s is not None and deadline_s <= now:
                    log.warning("migration %s went silent: its reservation is freed", migration_id)
                    move.refusal = ErrorInfo(ErrorCode.GONE, "the reservation was without traffic for too long")
                    self._on(move, Event.TIMEOUT)
                elif move.machine.is_forgotten(now):
                    del self._moves[migration_id]
