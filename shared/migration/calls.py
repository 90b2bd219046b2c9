"""All that is told to an instance's migrations, as plain data: `MigrationCore.apply(call, now)`.

A host that records or replays does so once, for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from shared.engine.driver import StepStats
from shared.engine.engine import Effect
from shared.engine.handover import Detached, PromptChunk
from shared.engine.requests import Ended
from shared.messages.cluster import InstanceInfo
from shared.messages.migration import (
    AbortMigration,
    AbortReason,
    BackUp,
    BackupRooms,
    Commit,
    Committed,
    FetchPrefix,
    KeepBackups,
    OwnsQuery,
    OwnsReply,
    PreAllocate,
    PrefixSent,
    Rebalance,
    Reserved,
)
from shared.messages.requests import ErrorInfo, GenerationRequest
from shared.migration.commands import Ask
from shared.migration.source import Event
from shared.recording import Call as AnyCall

if TYPE_CHECKING:
    from shared.migration.core import MigrationCore

R_co = TypeVar("R_co", covariant=True)

Reply = Reserved | Committed | OwnsReply | ErrorInfo | None
"""A peer's reply; None: whether it has heard the message is not known."""


class Call(AnyCall, Generic[R_co], frozen=True):
    """`R_co`: what it returns."""

    def on(self, core: MigrationCore, now: float) -> R_co:
        """Carries it out."""
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------------------- orders


class OnRebalance(Call[None], frozen=True):
    """The scheduler's order, in place of its last one."""

    rebalance: Rebalance

    def on(self, core: MigrationCore, now: float) -> None:
        core.on_rebalance(self.rebalance, now)


class EndDrain(Call[None], frozen=True):
    """See `MigrationCore.end_drain`."""

    def on(self, core: MigrationCore, now: float) -> None:
        core.end_drain()


class GiveAway(Call[None], frozen=True):
    """See `MigrationCore.give_away`."""

    model: str

    def on(self, core: MigrationCore, now: float) -> None:
        core.give_away(self.model, now)


class StopGiving(Call[None], frozen=True):
    """See `MigrationCore.stop_giving`."""

    model: str

    def on(self, core: MigrationCore, now: float) -> None:
        core.stop_giving(self.model)


class ForwardCancel(Call[None], frozen=True):
    """See `MigrationCore.forward_cancel`."""

    request_id: str

    def on(self, core: MigrationCore, now: float) -> None:
        core.forward_cancel(self.request_id, now)


# ------------------------------------------------------------------------------------- what came of commands, out


class OnRoom(Call[None], frozen=True):
    """The answer to PreAllocate; neither: none came."""

    migration_id: str
    stage: int
    reserved: Reserved | None
    error: ErrorInfo | None

    def on(self, core: MigrationCore, now: float) -> None:
        core.on_room(self.migration_id, self.stage, self.reserved or self.error, now)


class OnCommitted(Call[None], frozen=True):
    """The answer to Commit, likewise."""

    migration_id: str
    committed: Committed | None
    error: ErrorInfo | None

    def on(self, core: MigrationCore, now: float) -> None:
        core.on_committed(self.migration_id, self.committed or self.error, now)


class OnOwned(Call[None], frozen=True):
    """The answer to Owns; None: it does not say."""

    migration_id: str
    owns: bool | None

    def on(self, core: MigrationCore, now: float) -> None:
        core.on_owned(self.migration_id, self.owns, now)


def answered(ask: Ask, reply: Reply) -> Call[None]:
    """What came of an `Ask`."""
    error = reply if isinstance(reply, ErrorInfo) else None
    if isinstance(ask.message, PreAllocate):
        return OnRoom(ask.migration_id, ask.message.stage, reply if isinstance(reply, Reserved) else None, error)
    if isinstance(ask.message, Commit):
        return OnCommitted(ask.migration_id, reply if isinstance(reply, Committed) else None, error)
    return OnOwned(ask.migration_id, reply.owns if isinstance(reply, OwnsReply) else None)


class OnConnected(Call[None], frozen=True):
    migration_id: str
    stage: int
    is_connected: bool

    def on(self, core: MigrationCore, now: float) -> None:
        core.on_connected(self.migration_id, self.stage, self.is_connected, now)


class OnSent(Call[None], frozen=True):
    """The blocks of a stage are at the destination, or will not be."""

    migration_id: str
    is_sent: bool

    def on(self, core: MigrationCore, now: float) -> None:
        core.on_sent(self.migration_id, self.is_sent, now)


class OnRest(Call[None], frozen=True):
    """See `MigrationCore.on_rest`."""

    migration_id: str

    def on(self, core: MigrationCore, now: float) -> None:
        core.on_rest(self.migration_id, now)


class Feed(Call[None], frozen=True):
    """Something else happened to a migration out of here."""

    migration_id: str
    event: Event
    reason: AbortReason | None = None

    def on(self, core: MigrationCore, now: float) -> None:
        core.feed(self.migration_id, self.event, self.reason, now)


# --------------------------------------------------------------------------- from the engine and the registry, time


class OnDetached(Call[None], frozen=True):
    taken: Detached

    def on(self, core: MigrationCore, now: float) -> None:
        core.on_detached(self.taken, now)


class OnEnded(Call[None], frozen=True):
    request_id: str

    def on(self, core: MigrationCore, now: float) -> None:
        core.on_ended(self.request_id, now)


class OnPromptChunk(Call[None], frozen=True):
    """Effect of the engine."""

    chunk: PromptChunk

    def on(self, core: MigrationCore, now: float) -> None:
        core.on_prompt_chunk(self.chunk, now)


def calls_of(effects: Iterable[Effect]) -> Iterator[Call[None]]:
    """Calls for effects of the engine, in order; outputs do not matter here."""
    for effect in effects:
        if isinstance(effect, Detached):
            yield OnDetached(effect)
        elif isinstance(effect, PromptChunk):
            yield OnPromptChunk(effect)
        elif isinstance(effect, Ended):
            yield OnEnded(effect.request.request_id)


class OnStep(Call[None], frozen=True):
    """A step has ended."""

    stats: StepStats

    def on(self, core: MigrationCore, now: float) -> None:
        core.on_step(self.stats, now)


class OnInstance(Call[None], frozen=True):
    """The registry entry of an instance changed, or is gone."""

    instance_id: str
    info: InstanceInfo | None

    def on(self, core: MigrationCore, now: float) -> None:
        core.on_instance(self.instance_id, self.info, now)


class OnTime(Call[None], frozen=True):
    def on(self, core: MigrationCore, now: float) -> None:
        core.on_time(now)


class Stop(Call[None], frozen=True):
    """See `MigrationCore.stop`."""

    def on(self, core: MigrationCore, now: float) -> None:
        core.stop(now)


class GiveUp(Call[list[str]], frozen=True):
    """See `MigrationCore.give_up`."""

    def on(self, core: MigrationCore, now: float) -> list[str]:
        return core.give_up(now)


# ------------------------------------------------------------------------------------------------------- into here


class OnPreAllocate(Call[None], frozen=True):
    """See `IncomingMigrations.on_pre_allocate`."""

    query: PreAllocate

    def on(self, core: MigrationCore, now: float) -> None:
        core.incoming.on_pre_allocate(self.query, now)


class OnCommit(Call[None], frozen=True):
    """See `IncomingMigrations.on_commit`."""

    commit: Commit

    def on(self, core: MigrationCore, now: float) -> None:
        core.incoming.on_commit(self.commit, now)


class OnAbort(Call[None], frozen=True):
    abort: AbortMigration

    def on(self, core: MigrationCore, now: float) -> None:
        core.incoming.on_abort(self.abort, now)


class OnOwns(Call[OwnsReply | ErrorInfo], frozen=True):
    query: OwnsQuery

    def on(self, core: MigrationCore, now: float) -> OwnsReply | ErrorInfo:
        return core.incoming.on_owns(self.query, now)


class OnClaimed(Call[None], frozen=True):
    """What came of `ClaimBlocks`."""

    migration_id: str
    stage: int
    failure: str

    def on(self, core: MigrationCore, now: float) -> None:
        core.incoming.on_claimed(self.migration_id, self.stage, self.failure, now)


class OnExpected(Call[None], frozen=True):
    """What came of `ExpectBlocks`. `failure`: why they are not expected; empty where they are."""

    migration_id: str
    stage: int
    address: str
    ticket: bytes
    failure: str

    def on(self, core: MigrationCore, now: float) -> None:
        core.incoming.on_expected(self.migration_id, self.stage, self.address, self.ticket, self.failure, now)


class OnStage(Call[None], frozen=True):
    """The stage's blocks are all here, or, for that reason, will not come."""

    migration_id: str
    stage: int
    failure: str

    def on(self, core: MigrationCore, now: float) -> None:
        core.incoming.on_stage(self.migration_id, self.stage, self.failure, now)


class OnQuiet(Call[None], frozen=True):
    """Nobody writes to the migration's blocks any more."""

    migration_id: str

    def on(self, core: MigrationCore, now: float) -> None:
        core.incoming.on_quiet(self.migration_id, now)


class StopIncoming(Call[None], frozen=True):
    """See `IncomingMigrations.stop`."""

    def on(self, core: MigrationCore, now: float) -> None:
        core.incoming.stop(now)


# -------------------------------------------------------------------- copies of KV at others, and of others' KV here


class OnBackupRooms(Call[None], frozen=True):
    """The answer to BackUp; neither: none came."""

    backup_id: str
    rooms: BackupRooms | None
    error: ErrorInfo | None

    def on(self, core: MigrationCore, now: float) -> None:
        source = core.fetches if core.fetches.serves(self.backup_id) else core.backups
        source.on_rooms(self.backup_id, self.rooms or self.error, now)


class OnBackupSent(Call[None], frozen=True):
    """See `BackupSource.on_sent`."""

    backup_id: str
    is_sent: bool

    def on(self, core: MigrationCore, now: float) -> None:
        source = core.fetches if core.fetches.serves(self.backup_id) else core.backups
        source.on_sent(self.backup_id, self.is_sent, now)


class OnBackUp(Call[None], frozen=True):
    """See `BackupHolder.on_back_up`."""

    query: BackUp

    def on(self, core: MigrationCore, now: float) -> None:
        core.holder.on_back_up(self.query, now)


class OnBackupExpected(Call[None], frozen=True):
    """What came of `ExpectBackup`, as of `OnExpected`."""

    backup_id: str
    address: str
    ticket: bytes
    failure: str

    def on(self, core: MigrationCore, now: float) -> None:
        core.holder.on_expected(self.backup_id, self.address, self.ticket, self.failure, now)


class OnBackupIn(Call[None], frozen=True):
    """See `BackupHolder.on_in`."""

    backup_id: str
    failure: str

    def on(self, core: MigrationCore, now: float) -> None:
        core.holder.on_in(self.backup_id, self.failure, now)


class OnKeepBackups(Call[None], frozen=True):
    """See `BackupHolder.on_keep`."""

    query: KeepBackups

    def on(self, core: MigrationCore, now: float) -> None:
        core.holder.on_keep(self.query, now)


# ------------------------------------------------------------------------------------------------ prefixes that travel


class Fetch(Call[None], frozen=True):
    """See `PrefixFetches.fetch`."""

    request: GenerationRequest
    block_size: int

    def on(self, core: MigrationCore, now: float) -> None:
        core.fetches.fetch(self.request, self.block_size, now)


class OnFetchAnswer(Call[None], frozen=True):
    """See `PrefixFetches.on_answer`."""

    fetch_id: str
    sent: PrefixSent | None
    error: ErrorInfo | None

    def on(self, core: MigrationCore, now: float) -> None:
        core.fetches.on_answer(self.fetch_id, self.sent, self.error, now)


class OnFetchPrefix(Call[None], frozen=True):
    """See `PrefixFetches.on_fetch`."""

    query: FetchPrefix

    def on(self, core: MigrationCore, now: float) -> None:
        core.fetches.on_fetch(self.query, now)
