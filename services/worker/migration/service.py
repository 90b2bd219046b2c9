"""Hosts one instance's migrations: serves and sends their messages, moves their KV, and keeps their time. What is done is
decided by `shared.migration.core`; here are tasks, spans, metrics and named points for faults."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import msgspec

from services.worker.kv_transport import Incoming, KvTransport, Outgoing, TransferError, TransferReason
from services.worker.migration.faults import FaultError, FaultPoint, FaultPoints
from services.worker.migration.telemetry import MigrationSpan, MigrationTelemetry
from shared.bus.interface import Bus, BusError, ServiceError, Subscription
from shared.engine.driver import StepStats
from shared.engine.engine import Effect
from shared.engine.handover import Detached
from shared.engine.requests import Output
from shared.messages.catalogue import (
    INSTANCE_ABORT,
    INSTANCE_BACK_UP,
    INSTANCE_CANCEL,
    INSTANCE_COMMIT,
    INSTANCE_FETCH_PREFIX,
    INSTANCE_KEEP_BACKUPS,
    INSTANCE_OWNS,
    INSTANCE_PRE_ALLOCATE,
    INSTANCE_REBALANCE,
)
from shared.messages.cluster import InstanceInfo, KvCopies, MigrationOutcome
from shared.messages.migration import (
    AbortMigration,
    AbortReason,
    BackUp,
    BackupRooms,
    Commit,
    Committed,
    FetchPrefix,
    KeepBackups,
    MigrationReason,
    OwnsQuery,
    OwnsReply,
    PreAllocate,
    PrefixSent,
    Rebalance,
    Reserved,
)
from shared.messages.requests import Cancel, ErrorCode, ErrorInfo, GenerationRequest
from shared.migration import calls, commands
from shared.migration.calls import Call, Reply
from shared.migration.commands import Command, Stage
from shared.migration.core import MigrationCore
from shared.migration.incoming import Intake, with_busy
from shared.migration.outgoing import MOVED
from shared.migration.questions import EngineHost, Surroundings
from shared.migration.recording import Configuration, recorded
from shared.migration.source import Event
from shared.policies.kv_backup import NO_BACKUP, BackupSettings
from shared.policies.prefix_fetch import WAIT_S
from shared.recording import file_writer
from shared.runtime.settings import InstanceSettings
from shared.runtime.tasks import TaskSet, set_within
from shared.runtime.telemetry import Telemetry

T = TypeVar("T")

log = logging.getLogger(__name__)

STOP_S = 5.0
"""Time for Commits under way, when the instance stops."""
STOP_WRITING_S = 1.0
"""Time for the transport to stop writing then."""


class Loop(EngineHost, Protocol):
    """Whoever runs the engine: `EngineLoop`, or who stands in its place."""

    def now(self) -> float: ...

    def claim_blocks(self, model: str, blocks: list[int]) -> Future[Any]: ...

    async def filled(self, blocks: Sequence[int]) -> bool:
        """Whether pinned blocks hold what they stand for, as soon as that is known."""
        ...


class Handovers(Protocol):
    """Who has to know of requests that come and go; called in the event loop."""

    def on_adopted(self, commit: Commit, num_output: int) -> None:
        """A request is this instance's from now on; so much of its output is another's."""

    def on_migration_begun(self, request: GenerationRequest, destination_id: str, reason: MigrationReason) -> None:
        """One out of here."""

    def on_migration_ended(self, outcome: MigrationOutcome, request: GenerationRequest, taken: Detached | None) -> None:
        """A migration out of here is over. `request`: as it was held; `taken`: as it left the batch, if it did."""

    def on_backed_up(self, request: GenerationRequest, holder_id: str) -> None:
        """Another instance keeps copies of its KV from now on."""

    def on_blocks_found(self) -> None:
        """Blocks of others can be found here, of which the scheduler should hear."""


class _Out:
    """What is under way of one migration out of here."""

    def __init__(self, command: commands.BeginOut, span: MigrationSpan) -> None:
        self.reason = command.reason
        self.span = span
        self.tasks = TaskSet()
        self.copies = TaskSet()
        self.begun: dict[int, Outgoing] = {}
        """By stage, transfers whose blocks are not named yet."""
        self.num_bytes = 0
        """Bytes that the destination has acknowledged."""


class _In:
    """Spans and transfers of a migration into here."""

    def __init__(self, span: MigrationSpan | None) -> None:
        self.span = span
        self.claims: list[asyncio.Future[Any]] = []
        self.transfers: list[Incoming] = []
        self.num_bytes = 0


def _core(settings: InstanceSettings, around: Surroundings, backup: BackupSettings, fetches: bool) -> MigrationCore:
    """Recorded, if settings name a file. One that cannot be written keeps nothing from moving."""
    configuration = Configuration(
        instance_id=settings.instance_id, address=None if around.transport is None else around.transport.address,
        max_migrations=settings.max_migrations, max_stages=settings.migration_max_stages,
        rate_share=settings.copy_rate_share, backup_classes=backup.classes, backup_min_tokens=backup.min_tokens,
        fetches=fetches,
    )  # fmt: skip
    if settings.record_file:
        path = f"{settings.record_file}.{settings.instance_id}.migrations"
        try:
            return recorded(configuration, around, file_writer(path, settings.record_max_bytes))
        except OSError as error:
            log.error("TIDEWAY_RECORD_FILE: %r cannot be written, so migrations are not recorded: %s", path, error)
    return configuration.build(around)


class MigrationService:
    def __init__(
        self,
        bus: Bus,
        settings: InstanceSettings,
        loop: Loop,
        transport: KvTransport | None,
        intake: Intake,
        peers: Callable[[], Mapping[str, InstanceInfo]],
        handovers: Handovers,
        telemetry: Telemetry,
        backup: BackupSettings = NO_BACKUP,
        fetches: bool = False,
    ) -> None:
        """`transport`: open, with the models' pools registered as they come and go; None: only requests without KV move.
        `backup`: of which requests other instances keep copies. `fetches`: prefixes are given to others.
        `peers`: as of `MigrationCore`; changes are told (`on_instance`) while the core `needs_peers`."""
        self._bus = bus
        self._instance_id = settings.instance_id
        self._loop = loop
        self._transport = transport
        self._handovers = handovers
        self._telemetry = MigrationTelemetry(telemetry)
        self._faults = FaultPoints(settings.fault_points)
        around = Surroundings(engine=loop, transport=transport, intake=intake, peers=peers, new_id=self._new_id)
        self.core = _core(settings, around, backup, fetches)
        self._out: dict[str, _Out] = {}
        self._in: dict[str, _In] = {}
        """By migration id."""
        self._rooms: dict[tuple[str, int], asyncio.Future[Reserved | ErrorInfo]] = {}
        """Answers to PreAllocate, by migration and stage."""
        self._verdicts: dict[str, asyncio.Future[Committed | ErrorInfo]] = {}
        """Answers to Commit, by migration."""
        self._answers: dict[str, asyncio.Future[BackupRooms | ErrorInfo]] = {}
        """Answers to BackUp, by its id."""
        self._prefixes: dict[str, asyncio.Future[PrefixSent | ErrorInfo]] = {}
        """Answers to FetchPrefix, by its id."""
        self._fetching: dict[str, asyncio.Future[None]] = {}
        """By request that waits for its prefix."""
        self._backed_up_bytes = self._num_fetches = self._num_fetched_blocks = 0
        self._tasks = TaskSet()
        self._winding_up = TaskSet()
        self._rested = asyncio.Event()
        """A migration out of here has come to rest."""
        self._stopped = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._subscriptions: list[Subscription] = []

    def _new_id(self) -> str:
        return uuid.uuid4().hex

    def _faults_of(self, _migration_id: str) -> FaultPoints:
        return self._faults

    # ----------------------------------------------------------------------------------------- start and stop

    async def start(self) -> None:
        """Serves its subjects."""
        bus, ids = self._bus, {"instance_id": self._instance_id}
        self._subscriptions = [
            await bus.serve(INSTANCE_PRE_ALLOCATE.at(**ids), self.on_pre_allocate),
            await bus.serve(INSTANCE_COMMIT.at(**ids), self.on_commit),
            await bus.serve(INSTANCE_OWNS.at(**ids), self._on_owns),
            await bus.subscribe(INSTANCE_ABORT.at(**ids), self._on_abort),
            await bus.subscribe(INSTANCE_REBALANCE.at(**ids), self._on_rebalance),
            await bus.serve(INSTANCE_BACK_UP.at(**ids), self._on_back_up),
            await bus.serve(INSTANCE_FETCH_PREFIX.at(**ids), self._on_fetch_prefix),
            await bus.subscribe(INSTANCE_KEEP_BACKUPS.at(**ids), self._on_keep_backups),
        ]

    async def stop(self) -> None:
        """Aborts what can be aborted, waits a bounded time for Commits under way, and frees what is reserved here."""
        self._apply(calls.Stop())
        self._act()
        await self._rest(STOP_S)
        for request_id in self._apply(calls.GiveUp()):
            log.error("what became of request %s is unknown as the instance stops", request_id)
        self._act()
        await self._rest(STOP_S)
        self._apply(calls.StopIncoming())
        self._stopped.set()
        self._act()
        await self._tasks.wait_all(STOP_WRITING_S)
        await self._tasks.end_all()
        if self._timer is not None:
            self._timer.cancel()
        for subscription in self._subscriptions:
            await subscription.stop()

    async def _rest(self, timeout_s: float) -> None:
        """Until no migration out of here is under way, if that is soon."""
        deadline_s = self._loop.now() + timeout_s
        while self.core.num_migrating_out and (left_s := deadline_s - self._loop.now()) > 0:
            self._rested.clear()
            await set_within(self._rested, left_s)

    @property
    def num_migrating(self) -> tuple[int, int]:
        """Migrations out of here and into here that are under way."""
        return self.core.num_migrating_out, self.core.num_migrating_in

    @property
    def has_work(self) -> bool:
        """Whether a migration is under way, in or out."""
        return any(self.num_migrating)

    # ------------------------------------------------------------------------------------- from the instance

    def on_effects(self, effects: Sequence[Effect]) -> None:
        """Takes effects of the engine, in order."""
        if all(isinstance(effect, Output) for effect in effects):
            return
        now = self._loop.now()
        for effect in effects:
            if isinstance(effect, Detached) and (migration := self.core.outgoing_of(effect.request_id)) is not None:
                migration_id = migration.migration_id
                if self._faults_of(migration_id).has(FaultPoint.SOURCE_DETACHED):
                    self._out[migration_id].tasks.start(self._detached_late(migration_id, effect))
                    continue
            for call in calls.calls_of([effect]):
                self.core.apply(call, now)
        self._act()

    async def _detached_late(self, migration_id: str, taken: Detached) -> None:
        try:
            await self._faults_of(migration_id).at(FaultPoint.SOURCE_DETACHED)
        except FaultError:
            self._apply(calls.Feed(migration_id, Event.FAILED, AbortReason.UNREACHABLE))
        else:
            self._apply(calls.OnDetached(taken))
        self._act()

    def on_step(self, stats: StepStats) -> None:
        """A step has ended."""
        self._apply(calls.OnStep(stats))
        self._act()

    def on_instance(self, instance_id: str, info: InstanceInfo | None) -> None:
        """The registry entry of an instance changed, or is gone."""
        self._apply(calls.OnInstance(instance_id, info))
        self._act()

    def forward_cancel(self, request_id: str) -> None:
        """Passes a cancel on to the new owner, if the request has moved lately."""
        self._apply(calls.ForwardCancel(request_id))
        self._act()

    def give_away(self, model: str) -> None:
        """See `MigrationCore.give_away`."""
        self._apply(calls.GiveAway(model))
        self._act()

    def stop_giving(self, model: str) -> None:
        """See `MigrationCore.stop_giving`."""
        self._apply(calls.StopGiving(model))

    def end_drain(self) -> None:
        """See `MigrationCore.end_drain`."""
        self._apply(calls.EndDrain())

    # ------------------------------------------------------------------------------------------------- messages

    def _on_rebalance(self, rebalance: Rebalance) -> None:
        self._apply(calls.OnRebalance(rebalance))
        self._act()

    async def on_pre_allocate(self, query: PreAllocate) -> Reserved:
        faults = self._faults_of(query.migration_id)
        await self._reached(faults, FaultPoint.DESTINATION_RESERVE)
        key = query.migration_id, query.stage
        answered = self._rooms.setdefault(key, asyncio.get_running_loop().create_future())
        self._apply(calls.OnPreAllocate(query))
        self._act()
        # The work goes on when the source gives up waiting: asked again, it gets the same answer.
        answer = await asyncio.shield(answered)
        if isinstance(answer, ErrorInfo):
            raise ServiceError(answer)
        await self._reached(faults, FaultPoint.DESTINATION_RESERVED)
        return with_busy(answer, self._loop, self._loop.now())

    async def on_commit(self, commit: Commit) -> Committed:
        faults = self._faults_of(commit.migration_id)
        try:
            await faults.at(FaultPoint.DESTINATION_COMMIT)
        except FaultError as error:
            self._on_abort(AbortMigration(commit.migration_id, AbortReason.STOPPED))
            raise ServiceError.of(ErrorCode.OVERLOADED, str(error)) from None
        answered = self._verdicts.setdefault(commit.migration_id, asyncio.get_running_loop().create_future())
        self._apply(calls.OnCommit(commit))
        self._act()
        answer = await asyncio.shield(answered)
        await self._reached(faults, FaultPoint.DESTINATION_COMMITTED)
        if isinstance(answer, ErrorInfo):
            raise ServiceError(answer)
        return answer

    def _on_abort(self, abort: AbortMigration) -> None:
        self._apply(calls.OnAbort(abort))
        self._act()

    def _on_owns(self, query: OwnsQuery) -> OwnsReply:
        reply = self._apply(calls.OnOwns(query))
        self._act()
        if isinstance(reply, ErrorInfo):
            raise ServiceError(reply)
        return reply

    async def _on_back_up(self, query: BackUp) -> BackupRooms:
        answered = self._answers.setdefault(query.backup_id, asyncio.get_running_loop().create_future())
        self._apply(calls.OnBackUp(query))
        self._act()
        answer = await asyncio.shield(answered)
        if isinstance(answer, ErrorInfo):
            raise ServiceError(answer)
        return answer

    async def _on_fetch_prefix(self, query: FetchPrefix) -> PrefixSent:
        answered = self._prefixes.setdefault(query.fetch_id, asyncio.get_running_loop().create_future())
        self._apply(calls.OnFetchPrefix(query))
        self._act()
        answer = await asyncio.shield(answered)
        if isinstance(answer, ErrorInfo):
            raise ServiceError(answer)
        return answer

    def _on_keep_backups(self, query: KeepBackups) -> None:
        self._apply(calls.OnKeepBackups(query))
        self._act()

    async def _reached(self, faults: FaultPoints, point: FaultPoint) -> None:
        """`fail` here is an answer that is never sent."""
        try:
            await faults.at(point)
        except FaultError as error:
            await self._stopped.wait()
            raise ServiceError.of(ErrorCode.UNAVAILABLE, str(error)) from None

    # ------------------------------------------------------------------------------------------- time, commands

    def _apply(self, call: Call[T]) -> T:
        return self.core.apply(call, self._loop.now())

    def _act(self) -> None:
        """After whatever was told to the core."""
        self._carry_out_all()
        wakeup_s = self.core.next_wakeup()
        if self._timer is not None:
            if wakeup_s == self._timer_s:
                return
            self._timer.cancel()
            self._timer = None
        if wakeup_s is not None and not self._stopped.is_set():
            self._timer_s = wakeup_s
            left_s = max(0.0, wakeup_s - self._loop.now())
            self._timer = asyncio.get_running_loop().call_later(left_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        try:
            self._apply(calls.OnTime())
        finally:
            self._act()

    def _carry_out_all(self) -> None:
        while due := self.core.take_commands(self._loop.now()):
            for command in due:
                try:
                    self._carry_out(command)
                except Exception:
                    # The others are still to be carried out: a migration that is not wound up would never be over.
                    log.exception("migration %s: %s failed", command.migration_id, type(command).__name__)

    def _carry_out(self, command: Command) -> None:
        migration_id = command.migration_id
        match command:
            case commands.BeginOut():
                self._begin_out(command)
            case commands.Ask():
                out = self._out[migration_id]
                out.tasks.start(self._ask(out, command))
            case commands.Tell(_, destination_id, AbortMigration() as abort):
                self._bus.publish(INSTANCE_ABORT.at(instance_id=destination_id), abort)
            case commands.Tell(_, destination_id, Cancel() as cancel):
                self._bus.publish(INSTANCE_CANCEL.at(instance_id=destination_id), cancel)
            case commands.Connect():
                self._out[migration_id].tasks.start(self._connect(command))
            case commands.BeginTransfer(_, stage, pool, keeps_s):
                with suppress(TransferError):  # to send its blocks will say so
                    begun = self._out[migration_id].begun[stage.number] = self._begun(stage, pool, keeps_s)
                    begun.task.add_done_callback(lambda _: self._on_begun_ended(migration_id, stage, begun))
            case commands.SendBlocks():
                out = self._out[migration_id]
                out.copies.start(self._send(out, command))
            case commands.CancelTransfers():
                self._out[migration_id].copies.cancel_all()
            case commands.OutOver(_, outcome, request, taken, pause_s):
                if pause_s is not None:
                    self._telemetry.on_pause("source", pause_s)
                if not outcome.is_migrated:
                    log.info(
                        "request %s did not move to %s: %s", outcome.request_id, outcome.destination_id, outcome.reason
                    )
                self._handovers.on_migration_ended(outcome, request, taken)
            case commands.WindUp():
                self._winding_up.start(self._wind_up(self._out.pop(migration_id), command))
            case commands.BeginIn(_, query):
                self._begin_in(migration_id, query)
            case commands.EndIn(_, is_migrated, why):
                self._end_in(self._in.pop(migration_id), MOVED if is_migrated else "freed")
                if why:
                    log.info("migration %s into here is over: %s", migration_id, why)
            case commands.RefusedIn(_, reason):
                self._telemetry.refused("in", "", reason)
            case commands.ClaimBlocks():
                self._tasks.start(self._claim(self._in[migration_id], command))
            case commands.ExpectBlocks():
                self._expect(self._in[migration_id], command)
            case commands.AnswerRoom(_, number, room):
                if (asked := self._rooms.pop((migration_id, number), None)) is not None:
                    asked.set_result(room)
            case commands.AnswerCommit(_, verdict):
                if (sent := self._verdicts.pop(migration_id, None)) is not None:
                    sent.set_result(verdict)
            case commands.StopWriting():
                self._tasks.start(self._stop_writing(migration_id, self._in[migration_id]))
            case commands.Adopted(_, commit, num_output):
                self._handovers.on_adopted(commit, num_output)
            case commands.Paused(_, seconds, handoff_s):
                self._telemetry.on_pause("destination", seconds)
                if handoff_s is not None:
                    self._telemetry.on_handoff(handoff_s)
            case commands.NotHandedOver(_, outcome, request):
                self._telemetry.refused("out", MigrationReason.HANDOFF, outcome.reason)
                log.info("request %s was not handed over: %s", outcome.request_id, outcome.reason)
                self._handovers.on_migration_ended(outcome, request, None)
            case commands.Tell(_, destination_id, KeepBackups() as kept):
                self._bus.publish(INSTANCE_KEEP_BACKUPS.at(instance_id=destination_id), kept)
            case commands.AskBackup():
                self._tasks.start(self._ask_backup(command))
            case commands.SendBackup():
                self._tasks.start(self._send_backup(command))
            case commands.ExpectBackup():
                self._expect_backup(command)
            case commands.AnswerBackup(_, rooms):
                if (told := self._answers.pop(migration_id, None)) is not None:
                    told.set_result(rooms)
            case commands.AskPrefix():
                self._tasks.start(self._ask_prefix(command))
            case commands.AnswerPrefix(_, answer):
                if (waiting := self._prefixes.pop(migration_id, None)) is not None:
                    waiting.set_result(answer)
            case commands.Fetched(_, request_id, how, num_blocks):
                self._telemetry.on_fetch(how, num_blocks)
                self._num_fetches += how == "fetched"
                self._num_fetched_blocks += num_blocks
                if (waits := self._fetching.pop(request_id, None)) is not None and not waits.done():
                    waits.set_result(None)
            case commands.BackedUp(_, request, holder_id):
                self._handovers.on_backed_up(request, holder_id)
            case commands.BackupOver(_, how, num_blocks, num_sent, num_bytes):
                self._telemetry.on_backup(how, num_blocks, num_sent)
                self._backed_up_bytes += num_bytes if how == "copied" else 0
            case commands.Fault(_, error):
                log.error("migration %s failed here", migration_id, exc_info=error)
            case _:
                raise AssertionError(command)

    # ---------------------------------------------------------------------------------------------- out of here

    def _begin_out(self, command: commands.BeginOut) -> None:
        attributes = {
            "tideway.migration_id": command.migration_id,
            "tideway.request_id": command.request.request_id,
            "tideway.instance_id": self._instance_id,
            "tideway.destination_id": command.destination_id,
            "tideway.migration.reason": str(command.reason),
        }
        span = self._telemetry.span("migration", command.request.traceparent, attributes)
        self._out[command.migration_id] = _Out(command, span)
        self._telemetry.begin("out")
        self._handovers.on_migration_begun(command.request, command.destination_id, command.reason)

    async def _ask(self, out: _Out, command: commands.Ask) -> None:
        reply: Reply = None
        try:
            reply = await self._reply(out, command)
        except FaultError as error:
            log.info("migration %s: %s", command.migration_id, error)
        except BusError as error:
            log.debug("migration %s: %s", command.migration_id, error)
            # That it was not heard is as good as a refusal where nothing was handed over.
            if isinstance(error, ServiceError) or isinstance(command.message, PreAllocate):
                reply = error.info
        self._apply(calls.answered(command, reply))
        self._act()

    async def _reply(self, out: _Out, command: commands.Ask) -> Reserved | Committed | OwnsReply:
        bus, timeout_s = self._bus, command.timeout_s
        faults, ids = self._faults_of(command.migration_id), {"instance_id": command.destination_id}
        match command.message:
            case PreAllocate() as query:
                attributes = {
                    "tideway.migration.stage": query.stage,
                    "tideway.migration.first_block": query.first_block,
                    "tideway.migration.blocks": query.num_blocks,
                }
                with out.span.stage("migration.reserve", attributes):
                    await faults.at(FaultPoint.SOURCE_RESERVE)
                    query = msgspec.structs.replace(query, traceparent=out.span.traceparent)
                    return await bus.request(INSTANCE_PRE_ALLOCATE.at(**ids), query, timeout_s=timeout_s)
            case Commit() as commit:
                with out.span.stage("migration.commit", {"tideway.migration.blocks": commit.num_blocks}):
                    await faults.at(FaultPoint.SOURCE_COMMIT)
                    committed = await bus.request(INSTANCE_COMMIT.at(**ids), commit, timeout_s=timeout_s)
                    await faults.at(FaultPoint.SOURCE_ANSWER)
                    return committed
            case OwnsQuery() as owns:
                await faults.at(FaultPoint.SOURCE_OWNS)
                return await bus.request(INSTANCE_OWNS.at(**ids), owns, timeout_s=timeout_s)

    async def _connect(self, command: commands.Connect) -> None:
        reserved, transport, is_connected = command.stage.reserved, self._transport, True
        assert reserved is not None and transport is not None
        try:
            await transport.connect(reserved.address, deadline_s=command.timeout_s)
        except TransferError as error:
            log.info("migration %s: no way to %s: %s", command.migration_id, reserved.address, error)
            is_connected = False
        self._apply(calls.OnConnected(command.migration_id, command.stage.number, is_connected))
        self._act()

    def _begun(self, stage: Stage, pool: str, keeps_s: float) -> Outgoing:
        """Raises `TransferError`."""
        reserved, transport = stage.reserved, self._transport
        assert reserved is not None and transport is not None
        return transport.begin(
            reserved.address,
            reserved.ticket,
            pool,
            stage.num_blocks - reserved.num_held,
            deadline_s=keeps_s,
            is_limited=not stage.is_urgent,
        )

    def _on_begun_ended(self, migration_id: str, stage: Stage, begun: Outgoing) -> None:
        """Ends a transfer whose blocks have not been named."""
        if not begun.is_decided:
            self._did_not_go(migration_id, stage, begun.failure)
            self._apply(calls.OnSent(migration_id, False))
            self._act()

    async def _send(self, out: _Out, command: commands.SendBlocks) -> None:
        stage, migration_id, transport = command.stage, command.migration_id, self._transport
        assert transport is not None
        attributes = {
            "tideway.migration.stage": stage.number,
            "tideway.migration.first_block": stage.first_block,
            "tideway.migration.blocks": stage.num_blocks,
            "tideway.migration.held": stage.num_held,
            "tideway.migration.sent": len(command.blocks),
        }
        is_sent = False
        try:
            with out.span.stage("migration.copy", attributes):
                await self._faults_of(migration_id).at(FaultPoint.SOURCE_COPY)
                if not await self._loop.filled(command.blocks):
                    raise TransferError(TransferReason.FAILED, "the engine does not have these blocks any more")
                begun = out.begun.get(stage.number) or self._begun(stage, command.pool, command.keeps_s)
                receipt = await transport.complete(begun, command.blocks, deadline_s=command.timeout_s)
                out.num_bytes += receipt.num_bytes
                is_sent = True
        except (TransferError, FaultError) as error:
            self._did_not_go(migration_id, stage, error)
        self._apply(calls.OnSent(migration_id, is_sent))
        self._act()

    def _did_not_go(self, migration_id: str, stage: Stage, why: Exception | None) -> None:
        log.info("migration %s: blocks of stage %d did not go: %s", migration_id, stage.number, why)

    async def _wind_up(self, out: _Out, command: commands.WindUp) -> None:
        if command.grace_s:
            await out.copies.wait_all(command.grace_s)
        await out.tasks.end_all()
        await out.copies.end_all()
        if self._transport is not None:
            for begun in out.begun.values():
                self._transport.cancel(begun)
        self._telemetry.end("out", str(out.reason), command.outcome)
        self._telemetry.on_bytes("out", out.num_bytes)
        if command.outcome == MOVED:
            self._telemetry.on_moved(command.num_stages, command.num_held)
        out.span.end(
            {
                "tideway.migration.outcome": command.outcome,
                "tideway.migration.stages": command.num_stages,
                "tideway.migration.held": command.num_held,
                "tideway.migration.bytes": out.num_bytes,
                "tideway.epoch": command.epoch,
            }
        )
        self._apply(calls.OnRest(command.migration_id))
        self._rested.set()
        self._act()

    # ------------------------------------------------------------------------------------------------ into here

    def _begin_in(self, migration_id: str, query: PreAllocate | None) -> None:
        span = None
        if query is not None:
            attributes = {
                "tideway.migration_id": migration_id,
                "tideway.request_id": query.request_id,
                "tideway.source_id": query.source_id,
                "tideway.instance_id": self._instance_id,
            }
            span = self._telemetry.span("migration.receive", query.traceparent, attributes)
        self._in[migration_id] = _In(span)
        self._telemetry.begin("in")

    def _end_in(self, incoming: _In, outcome: str) -> None:
        self._telemetry.end("in", "", outcome)
        self._telemetry.on_bytes("in", incoming.num_bytes)
        if incoming.span is not None:
            incoming.span.end({"tideway.migration.outcome": outcome, "tideway.migration.bytes": incoming.num_bytes})

    async def _claim(self, incoming: _In, command: commands.ClaimBlocks) -> None:
        claim = asyncio.ensure_future(asyncio.wrap_future(self._loop.claim_blocks(command.model, command.blocks)))
        # Not cancelled with whoever waits for it: the blocks go back only after it.
        incoming.claims.append(claim)
        failure = ""
        try:
            written = await asyncio.shield(claim)
            if written is not None:
                await asyncio.to_thread(written.synchronize)
        except (KeyError, RuntimeError) as error:
            failure = f"{type(error).__name__}: {error}"
        self._apply(calls.OnClaimed(command.migration_id, command.stage, failure))
        self._act()

    def _expect(self, incoming: _In, command: commands.ExpectBlocks) -> None:
        transport = self._transport
        assert transport is not None
        address, ticket, failure = transport.address, b"", ""
        try:
            transfer = transport.expect(
                command.pool, command.blocks, deadline_s=command.deadline_s, peer=command.source_address
            )
        except TransferError as error:
            failure = str(error)
        else:
            ticket = transfer.ticket
            incoming.transfers.append(transfer)
            self._tasks.start(self._receive(incoming, command, transfer))
        self._apply(calls.OnExpected(command.migration_id, command.stage, address, ticket, failure))

    async def _receive(self, incoming: _In, command: commands.ExpectBlocks, transfer: Incoming) -> None:
        assert incoming.span is not None
        attributes = {"tideway.migration.stage": command.stage, "tideway.migration.blocks": len(command.blocks)}
        failure = ""
        with incoming.span.stage("migration.receive.stage", attributes):
            try:
                receipt = await transfer.wait()
                await self._faults_of(command.migration_id).at(FaultPoint.DESTINATION_COPIED)
                incoming.num_bytes += receipt.num_bytes
            except (TransferError, FaultError) as error:
                failure = str(error)
        self._apply(calls.OnStage(command.migration_id, command.stage, failure))
        self._act()

    async def _stop_writing(self, migration_id: str, incoming: _In) -> None:
        for transfer in incoming.transfers:
            transfer.cancel()
        await asyncio.gather(*incoming.claims, return_exceptions=True)
        for transfer in incoming.transfers:
            with suppress(TransferError):
                await transfer.wait()
        self._apply(calls.OnQuiet(migration_id))
        self._act()

    # ------------------------------------------------------------------- copies at others, and of others' blocks here

    def measure(self, num_kept: int, kept_share: float) -> None:
        """`num_kept`: requests of others of which copies are kept here; `kept_share`: of host memory that these take."""
        source = self.core.backups
        self._telemetry.on_backups(source.num_requests, source.num_missing, num_kept, kept_share)

    def kv_copies(self) -> KvCopies:
        """Copies between this instance and others, as far as they are made or fetched by it."""
        source = self.core.backups
        return KvCopies(
            num_backed_up=source.num_requests,
            num_missing_blocks=source.num_missing,
            backed_up_bytes=self._backed_up_bytes,
            num_fetches=self._num_fetches,
            num_fetched_blocks=self._num_fetched_blocks,
        )

    async def _ask_backup(self, command: commands.AskBackup) -> None:
        rooms, error = None, None
        endpoint = INSTANCE_BACK_UP.at(instance_id=command.destination_id)
        try:
            rooms = await self._bus.request(endpoint, command.message, timeout_s=command.timeout_s)
        except BusError as failure:
            error = failure.info
        self._apply(calls.OnBackupRooms(command.migration_id, rooms, error))
        self._act()

    async def _send_backup(self, command: commands.SendBackup) -> None:
        transport, is_sent = self._transport, False
        assert transport is not None
        try:
            if await self._loop.filled(command.blocks):
                await transport.send(
                    command.address,
                    command.ticket,
                    command.pool,
                    command.blocks,
                    deadline_s=command.timeout_s,
                    is_limited=not command.is_urgent,
                )
                is_sent = True
        except TransferError as error:
            log.info("backup %s did not go: %s", command.migration_id, error)
        self._apply(calls.OnBackupSent(command.migration_id, is_sent))
        self._act()

    async def fetch(self, request: GenerationRequest, block_size: int) -> None:
        """Fetches what the request names of its prompt, or as much of it as comes in `WAIT_S`."""
        done = self._fetching[request.request_id] = asyncio.get_running_loop().create_future()
        self._apply(calls.Fetch(request, block_size))
        self._act()
        await asyncio.wait([done], timeout=WAIT_S)
        if self._fetching.get(request.request_id) is done:
            del self._fetching[request.request_id]

    async def _ask_prefix(self, command: commands.AskPrefix) -> None:
        sent, error = None, None
        endpoint = INSTANCE_FETCH_PREFIX.at(instance_id=command.destination_id)
        try:
            sent = await self._bus.request(endpoint, command.message, timeout_s=command.timeout_s)
        except BusError as failure:
            error = failure.info
        self._apply(calls.OnFetchAnswer(command.migration_id, sent, error))
        self._act()

    def _expect_backup(self, command: commands.ExpectBackup) -> None:
        transport = self._transport
        assert transport is not None
        backup_id, ticket, failure = command.migration_id, b"", ""
        try:
            incoming = transport.expect(
                command.pool, command.blocks, deadline_s=command.deadline_s, peer=command.source_address
            )
        except TransferError as error:
            failure = str(error)
        else:
            ticket = incoming.ticket
            self._tasks.start(self._receive_backup(backup_id, incoming))
        self._apply(calls.OnBackupExpected(backup_id, transport.address, ticket, failure))

    async def _receive_backup(self, backup_id: str, incoming: Incoming) -> None:
        failure = ""
        try:
            await incoming.wait()
        except TransferError as error:
            failure = str(error)
        self._apply(calls.OnBackupIn(backup_id, failure))
        self._act()
        if not failure:
            self._handovers.on_blocks_found()
