"""Migrations into an instance: what `destination.DestinationMigration` decides, for any number of them, in terms of the
engine here and of commands.

| blocks | whose |
|---|---|
| reserved, blocks to come | the transport's, from `ExpectBlocks` until `on_stage` |
| reserved, all blocks here | the reservation's |
| adopted | the sequence's |
| to be freed | the reservation's, until every claim and every transfer into them has ended |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from shared.engine.calls import Adopt, Detach, Freeze, Release, Reserve, Unreserve
from shared.engine.handover import Detached, rebased
from shared.messages.cluster import MigrationOutcome
from shared.messages.migration import (
    AbortMigration,
    AbortReason,
    Commit,
    Committed,
    MigrationReason,
    OwnsQuery,
    OwnsReply,
    PreAllocate,
    Reserved,
)
from shared.messages.requests import Adapter, ErrorCode, ErrorInfo, HeldRequest, RequestClass
from shared.migration import commands
from shared.migration.destination import Action, DestinationMigration, Event, State
from shared.migration.limits import max_at_once, pool_of
from shared.migration.outgoing import Site
from shared.migration.questions import BlockBytes, EngineHost, Refusal
from shared.migration.source import EPOCHS_OF_A_MIGRATION

SWEEP_S = 0.25
"""Deadlines are looked at so often while there are any."""
IDLE_SWEEP_S = 10.0
RETRY_S = 0.02
"""After which a migration that comes in may be over."""


def with_busy(reserved: Reserved, engine: EngineHost, now: float) -> Reserved:
    """Reservation as a source is told of it: with how long the steps in flight here go on."""
    return msgspec.structs.replace(reserved, busy_s=engine.ask(lambda here: here.busy_s(now)))


def held_after(commit: Commit) -> HeldRequest:
    """What the destination tells the scheduler that it holds once it has adopted the request."""
    request = commit.request
    return HeldRequest(
        request_id=request.request_id,
        gateway_id=request.gateway_id,
        epoch=request.epoch,
        model=request.model,
        num_tokens=(len(request.prompt) + len(request.prior)) // 4,
        running=commit.progress.num_computed > 0 and not commit.on_host,
        is_online=request.request_class == RequestClass.ONLINE,
    )


class Intake:
    """What an instance takes. One object, which all parts of the instance have that decide about it or ask."""

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.is_draining = False
        """It takes no requests, and gives all away."""
        self.models: set[str] = set()
        """Models that take requests here."""
        self.missing_adapter: Callable[[str, Adapter], ErrorInfo | None] = lambda _model, _adapter: None
        """Why requests of a model with an adapter cannot be computed here now. What is not loaded begins to be."""

    def refusal(self, model: str, adapter: Adapter | None = None) -> ErrorInfo | None:
        """Why a request of the model is refused."""
        if self.is_draining:
            return ErrorInfo(ErrorCode.DRAINING, f"instance {self.instance_id} is draining")
        if model not in self.models:
            return ErrorInfo(ErrorCode.GONE, f"model {model!r} takes no requests here", "model")
        return None if adapter is None else self.missing_adapter(model, adapter)


class _Migration:
    """One migration, as far as its decisions do not need to know."""

    def __init__(self, migration_id: str, request_id: str, now: float) -> None:
        self.migration_id = migration_id
        self.request_id = request_id
        self.machine = DestinationMigration(now)
        self.has_reserved = False
        self.asked: dict[int, PreAllocate] = {}
        """Room that is being made, by stage."""
        self.answers: dict[int, Reserved] = {}
        """Room that was made."""
        self.blocks: dict[int, list[int]] = {}
        self.commit: Commit | None = None
        self.committed_s = 0.0
        """Time at which Commit came."""
        self.refusal = ErrorInfo(ErrorCode.GONE, "the migration is over")
        self.owns: bool | None = None
        """What Owns is answered."""
        self.source_id = ""
        self.is_handoff = False
        self.is_counted = False


class _Disowned(NamedTuple):
    epoch: int
    """In which it was taken over here."""
    source_id: str


class _FirstStep(NamedTuple):
    """The first step here of a request, which has not ended."""

    adopted_s: float
    prompt_ended_s: float | None
    """Elsewhere, of one that was handed over."""


class IncomingMigrations:
    def __init__(self, site: Site, max_migrations: int) -> None:
        self._site = site
        self._max_migrations = max_migrations
        self._migrations: dict[str, _Migration] = {}
        self._disowned: dict[str, _Disowned] = {}
        """Requests that run here but are not this instance's any more: a source that lost sight of it after Commit goes on
        itself. Forgotten without a word: an end would be taken for the request's own by whoever has not heard of the higher
        epoch yet."""
        self._first_steps: dict[str, list[_FirstStep]] = {}
        """By model, of requests that were adopted."""
        self._sweep_s: float | None = None
        self.num_in_progress = 0
        self._num_handoffs = 0
        """Among these."""
        self.is_stopping = False

    @property
    def num_disowned(self) -> int:
        return len(self._disowned)

    # ---------------------------------------------------------------------------------------------- messages

    def on_pre_allocate(self, query: PreAllocate, now: float) -> None:
        """Answered by `AnswerRoom`; asked again, alike."""
        migration = self._migrations.get(query.migration_id)
        if migration is None:
            if (refused := self._refusal(query)) is not None:
                self._site.say(commands.RefusedIn(query.migration_id, AbortReason.REFUSED))
                self._site.say(commands.AnswerRoom(query.migration_id, query.stage, refused))
                return
            migration = self._new(query.migration_id, query.request_id, now)
            migration.is_handoff = query.reason is MigrationReason.HANDOFF
        actions = migration.machine.on_pre_allocate(query.stage, query.num_blocks, now)
        if Action.RESERVE in actions:
            self._count(migration, query)
            self._reserve(migration, query, now)
        elif Action.REFUSE_STAGE in actions:
            self._answer_room(migration, query.stage, None)
        elif query.stage in migration.answers:
            self._answer_room(migration, query.stage, migration.answers[query.stage])
        elif query.stage not in migration.asked:
            self._answer_room(migration, query.stage, None)

    def on_commit(self, commit: Commit, now: float) -> None:
        """Answered by `AnswerCommit`, when all that was announced is here."""
        migration = self._migrations.get(commit.migration_id)
        if migration is None:
            migration = self._new(commit.migration_id, commit.request.request_id, now)
        if migration.machine.state in (State.NEW, State.OPEN):
            migration.commit, migration.committed_s, migration.source_id = commit, now, commit.source_id
        self._do(migration, migration.machine.on_commit(commit.num_blocks, commit.request.epoch, now), now)

    def on_abort(self, abort: AbortMigration, now: float) -> None:
        event = Event.DISOWN if abort.reason == AbortReason.DESTINATION_LOST else Event.ABORT
        migration = self._migrations.get(abort.migration_id) or self._new(abort.migration_id, "", now)
        migration.refusal = ErrorInfo(ErrorCode.GONE, f"the source aborted the migration: {abort.reason}")
        self._on(migration, event, now)

    def on_owns(self, query: OwnsQuery, now: float) -> OwnsReply | ErrorInfo:
        migration = self._migrations.get(query.migration_id) or self._new(query.migration_id, query.request_id, now)
        migration.owns = None
        self._on(migration, Event.OWNS, now)
        if migration.owns is None:
            return ErrorInfo(ErrorCode.BUSY, "the request is being taken over")
        return OwnsReply(migration.owns)

    def _refusal(self, query: PreAllocate) -> ErrorInfo | None:
        if (refused := self._not_taken(query.model, query.adapter)) is not None:
            return refused
        is_handoff = query.reason is MigrationReason.HANDOFF
        num_in = self._num_handoffs if is_handoff else self.num_in_progress - self._num_handoffs
        if num_in >= max_at_once(query.reason, self._max_migrations):
            message = f"{num_in} migrations come in already"
            return ErrorInfo(ErrorCode.OVERLOADED, message, retry_after_s=RETRY_S)
        if self._site.address is None:
            return ErrorInfo(ErrorCode.UNAVAILABLE, "there is no KV transport here")
        block_bytes = self._site.around.ask(BlockBytes(pool_of(query.model, query.on_host)))
        if block_bytes is None:
            return ErrorInfo(ErrorCode.GONE, f"there is no such KV pool of {query.model!r} here", "model")
        # Whole blocks are the same on groups of any size.
        if block_bytes != query.block_bytes:
            message = f"KV blocks of {block_bytes} bytes, not of {query.block_bytes}"
            return ErrorInfo(ErrorCode.BAD_REQUEST, message, "block_bytes")
        return None

    def _not_taken(self, model: str, adapter: Adapter | None) -> ErrorInfo | None:
        if self.is_stopping:
            return ErrorInfo(ErrorCode.DRAINING, f"instance {self._site.instance_id} is draining")
        return self._site.around.ask(Refusal(model, adapter))

    # ------------------------------------------------------------------------------------- what came of commands

    def on_claimed(self, migration_id: str, stage: int, failure: str, now: float) -> None:
        migration = self._migrations[migration_id]
        query = migration.asked.get(stage)
        if query is None:
            return
        if migration.machine.state is not State.OPEN:
            self._answer_room(migration, stage, None)
        elif failure:
            self.on_expected(migration_id, stage, "", b"", failure, now)
        else:
            self._expect(migration, query)

    def _expect(self, migration: _Migration, query: PreAllocate) -> None:
        pool, blocks = pool_of(query.model, query.on_host), migration.blocks[query.stage]
        self._site.say(
            commands.ExpectBlocks(
                migration.migration_id, query.stage, pool, blocks, query.deadline_s, query.source_address
            )
        )

    def on_expected(self, migration_id: str, stage: int, address: str, ticket: bytes, failure: str, now: float) -> None:
        """`failure`: why they are not expected; empty where they are."""
        migration = self._migrations[migration_id]
        query = migration.asked.get(stage)
        if query is None:
            return
        if failure:
            migration.refusal = ErrorInfo(ErrorCode.GONE, f"the KV pool is not there any more: {failure}")
            self._answer_room(migration, stage, migration.refusal)
            self._on(migration, Event.STAGE_FAILED, now)
            return
        migration.machine.on_expected(stage, now + query.deadline_s, now)
        num_held = query.num_blocks - len(migration.blocks[stage])
        self._answer_room(migration, stage, Reserved(migration_id, num_held, address, ticket))

    def on_stage(self, migration_id: str, stage: int, failure: str, now: float) -> None:
        """The stage's blocks are all here, or, for that reason, will not come."""
        migration = self._migrations[migration_id]
        if failure:
            migration.refusal = ErrorInfo(ErrorCode.GONE, f"the blocks of stage {stage} did not come: {failure}")
        self._do(migration, migration.machine.on_stage(stage, not failure, now), now)

    def on_quiet(self, migration_id: str, now: float) -> None:
        """Nobody writes to the migration's blocks any more."""
        self._on(self._migrations[migration_id], Event.QUIET, now)

    # -------------------------------------------------------------------------------------------- from the engine

    def on_detached(self, taken: Detached) -> None:
        copy = self._disowned.get(taken.request_id)
        if copy is None or copy.epoch != taken.request.epoch:
            return
        del self._disowned[taken.request_id]
        engine = self._site.around
        if engine.apply(Freeze(taken.request_id)):
            engine.apply(Release(taken.request_id))
            epoch = copy.epoch - 1 + EPOCHS_OF_A_MIGRATION
            outcome = MigrationOutcome(taken.request_id, copy.source_id, epoch, True)
            self._site.say(commands.OutOver("", outcome, taken.request, taken))

    def on_step(self, model: str, planned_s: float, ended_s: float) -> None:
        """A step of the model has ended. One that was planned before a request was adopted does not have it."""
        if (adopted := self._first_steps.get(model)) is None:
            return
        for first in [one for one in adopted if one.adopted_s <= planned_s]:
            handoff_s = None if first.prompt_ended_s is None else ended_s - first.prompt_ended_s
            self._site.say(commands.Paused("", ended_s - first.adopted_s, handoff_s))
            adopted.remove(first)
        if not adopted:
            del self._first_steps[model]

    # --------------------------------------------------------------------------------------------------- time

    def next_wakeup(self) -> float | None:
        return self._sweep_s

    def on_time(self, now: float) -> None:
        if self._sweep_s is None or self._sweep_s > now:
            return
        self._give_up_disowned()
        for migration_id, migration in list(self._migrations.items()):
            deadline_s = migration.machine.deadline_s()
            if deadline_s is not None and deadline_s <= now:
                migration.refusal = ErrorInfo(ErrorCode.GONE, "the reservation was without traffic for too long")
                self._on(migration, Event.TIMEOUT, now)
            elif migration.machine.is_forgotten(now):
                del self._migrations[migration_id]
        self._sweep_s = None
        self._sweep_soon(now)

    def _sweep_soon(self, now: float) -> None:
        if self.num_in_progress or self._disowned:
            self._sweep_s = now + SWEEP_S if self._sweep_s is None else min(self._sweep_s, now + SWEEP_S)
        elif self._migrations and self._sweep_s is None:
            self._sweep_s = now + IDLE_SWEEP_S

    def stop(self, now: float) -> None:
        """Frees what is reserved, and takes nothing more."""
        self.is_stopping = True
        for migration in list(self._migrations.values()):
            self._on(migration, Event.STOP, now)

    # ------------------------------------------------------------------------------------------ one migration

    def _new(self, migration_id: str, request_id: str, now: float) -> _Migration:
        migration = self._migrations[migration_id] = _Migration(migration_id, request_id, now)
        self._sweep_soon(now)
        return migration

    def _on(self, migration: _Migration, event: Event, now: float) -> None:
        self._do(migration, migration.machine.on(event, now), now)

    def _do(self, migration: _Migration, actions: Sequence[Action], now: float) -> None:
        for action in actions:
            match action:
                case Action.ADOPT:
                    self._adopt(migration, now)
                case Action.CONFIRM:
                    self._site.say(
                        commands.AnswerCommit(
                            migration.migration_id, Committed(migration.request_id, migration.machine.epoch)
                        )
                    )
                case Action.REFUSE:
                    self._site.say(commands.AnswerCommit(migration.migration_id, migration.refusal))
                case Action.SAY_YES | Action.SAY_NO:
                    migration.owns = action is Action.SAY_YES
                case Action.STOP_WRITING:
                    self._site.say(commands.StopWriting(migration.migration_id))
                case Action.RELEASE:
                    if migration.has_reserved:
                        self._site.around.apply(Unreserve(migration.migration_id))
                case Action.GIVE_UP:
                    self._disowned[migration.request_id] = _Disowned(migration.machine.epoch, migration.source_id)
                    self._give_up_disowned()
                case Action.RESERVE | Action.REFUSE_STAGE:
                    pass  # answered by on_pre_allocate
        self._count(migration)
        self._sweep_soon(now)

    def _count(self, migration: _Migration, query: PreAllocate | None = None) -> None:
        if migration.machine.is_holding and not migration.is_counted:
            migration.is_counted = True
            self.num_in_progress += 1
            self._num_handoffs += migration.is_handoff
            self._site.say(commands.BeginIn(migration.migration_id, query))
        elif migration.is_counted and not migration.machine.is_holding:
            migration.is_counted = False
            self.num_in_progress -= 1
            self._num_handoffs -= migration.is_handoff
            for stage in list(migration.asked):
                self._answer_room(migration, stage, None)
            is_migrated = migration.machine.state is State.OWNED
            self._site.say(
                commands.EndIn(migration.migration_id, is_migrated, "" if is_migrated else migration.refusal.message)
            )
            # What is remembered for long is small.
            migration.commit, migration.answers, migration.blocks = None, {}, {}

    def _reserve(self, migration: _Migration, query: PreAllocate, now: float) -> None:
        """Room for one stage, until its blocks are expected."""
        stage = query.stage
        reservation = self._site.around.apply(Reserve(query))
        if isinstance(reservation, ErrorInfo):
            migration.refusal = reservation
            is_final = reservation.retry_after_s <= 0
            self._site.say(commands.AnswerRoom(migration.migration_id, stage, reservation))
            self._do(migration, migration.machine.on_not_reserved(stage, is_final, now), now)
            return
        migration.has_reserved = True
        migration.blocks[stage] = reservation.blocks
        if not reservation.blocks:
            self._answer_room(migration, stage, Reserved(migration.migration_id, reservation.num_held))
            return
        migration.asked[stage] = query
        if query.on_host:
            self._expect(migration, query)
        else:
            self._site.say(commands.ClaimBlocks(migration.migration_id, stage, query.model, reservation.blocks))

    def _answer_room(self, migration: _Migration, stage: int, answer: Reserved | ErrorInfo | None) -> None:
        """None: it is over."""
        migration.asked.pop(stage, None)
        if isinstance(answer, Reserved):
            migration.answers[stage] = answer
        elif answer is None:
            answer = ErrorInfo(ErrorCode.GONE, f"migration {migration.migration_id} is over")
        self._site.say(commands.AnswerRoom(migration.migration_id, stage, answer))

    def _adopt(self, migration: _Migration, now: float) -> None:
        commit = migration.commit
        assert commit is not None
        self._count(migration)
        # Its blocks may have come much later than it.
        request, progress = rebased(commit.request, commit.progress, now - migration.committed_s)
        commit = msgspec.structs.replace(commit, request=request, progress=progress)
        refused = self._not_taken(request.model, request.adapter)
        if refused is None:
            try:
                refused = self._site.around.apply(Adopt(commit))
            except Exception as error:
                self._site.say(commands.Fault(migration.migration_id, error))
                refused = ErrorInfo(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}")
        if refused is not None:
            migration.refusal = refused
            self._on(migration, Event.NOT_ADOPTED, now)
            return
        self._site.say(commands.Adopted(migration.migration_id, commit, len(request.prior) // 4))
        if progress.num_computed:
            age_s = progress.last_token_age_s
            ended_s = now - age_s if migration.is_handoff and age_s >= 0 else None
            self._first_steps.setdefault(request.model, []).append(_FirstStep(now, ended_s))
        self._on(migration, Event.ADOPTED, now)

    def _give_up_disowned(self) -> None:
        """Takes them out of their batches, those that cannot be now at the next call."""
        for request_id, copy in list(self._disowned.items()):
            if self._site.held_epoch(request_id) != copy.epoch:
                del self._disowned[request_id]  # it has ended, or was placed again
            else:
                self._site.around.apply(Detach(request_id))
