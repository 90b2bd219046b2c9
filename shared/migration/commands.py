"""What the decisions of migration want of their host, as plain data.

A host (the instance's service, virtual time) carries them out in order, and says what came of each to the `MigrationCore`
that wants it: the method that each names.
"""

from __future__ import annotations

import msgspec

from shared.engine.handover import Detached
from shared.messages.cluster import MigrationOutcome
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
    PreAllocate,
    PrefixSent,
    Reserved,
)
from shared.messages.requests import Cancel, ErrorInfo, GenerationRequest


class Stage(msgspec.Struct, kw_only=True):
    """Blocks `first_block ..` of a request, for which room is asked."""

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
    """Expected arrival, as in `PreAllocate`."""
    reserved: Reserved | None = None

    @property
    def num_held(self) -> int:
        """Leading blocks that the destination has."""
        return 0 if self.reserved is None else self.reserved.num_held


class Command(msgspec.Struct, frozen=True, tag=True):
    migration_id: str


# -------------------------------------------------------------------------------------------------- out of here


class BeginOut(Command, frozen=True):
    """A migration out of here has begun. It goes on until `WindUp`."""

    request: GenerationRequest
    destination_id: str
    reason: MigrationReason


class Ask(Command, frozen=True):
    """A message with a reply, or none within `timeout_s`: `on_reply`."""

    destination_id: str
    message: PreAllocate | Commit | OwnsQuery
    timeout_s: float


class Tell(Command, frozen=True):
    """A message without one."""

    destination_id: str
    message: AbortMigration | Cancel | KeepBackups


class Connect(Command, frozen=True):
    """Makes the connection that the stage's blocks need, if there is none: `on_connected`."""

    stage: Stage
    timeout_s: float


class BeginTransfer(Command, frozen=True):
    """Has the destination make ready for the stage's blocks before it is known which they are, until `SendBlocks` names
    them, for `keeps_s` at most: `on_sent` where it fails before."""

    stage: Stage
    pool: str
    keeps_s: float


class SendBlocks(Command, frozen=True):
    """Sends blocks that stand for the blocks of the stage that the destination lacks: `on_sent`."""

    stage: Stage
    pool: str
    blocks: list[int]
    timeout_s: float
    keeps_s: float
    """`keeps_s` of `BeginTransfer`, where that did not come before."""


class CancelTransfers(Command, frozen=True):
    """Those under way, without a word of how they ended."""


class OutOver(Command, frozen=True):
    """It is known whose the request is; nothing else has happened to it here since."""

    outcome: MigrationOutcome
    request: GenerationRequest
    """The request as it was held."""
    taken: Detached | None
    """The request as it left its batch, if it did."""
    pause_s: float | None = None


class NotHandedOver(Command, frozen=True):
    """A request decodes here that was to be handed over: there was nothing to begin with."""

    outcome: MigrationOutcome
    request: GenerationRequest
    """The request as it is held."""


class WindUp(Command, frozen=True):
    """The migration out of here wants nothing more. What is under way may still end within `grace_s`, and is then ended:
    `on_rest` when nobody reads its blocks any more."""

    grace_s: float
    outcome: str
    num_stages: int
    epoch: int
    num_held: int = 0
    """Blocks that the destination had already."""


# ----------------------------------------------------------------------------------------------------- into here


class BeginIn(Command, frozen=True):
    """Something may be reserved for a migration into here, until `EndIn`."""

    query: PreAllocate | None
    """Question with which it came; None: a Commit alone."""


class EndIn(Command, frozen=True):
    is_migrated: bool
    why: str
    """It was freed."""


class RefusedIn(Command, frozen=True):
    """One that was over before it began."""

    reason: AbortReason


class ClaimBlocks(Command, frozen=True):
    """The blocks' memory becomes the model's before anything is written there (claimed later, it would be zeroed):
    `on_claimed`."""

    stage: int
    model: str
    blocks: list[int]


class ExpectBlocks(Command, frozen=True):
    """They may come, from the transport that has this address: `on_expected`, then `on_stage`."""

    stage: int
    pool: str
    blocks: list[int]
    deadline_s: float
    source_address: str


class AnswerRoom(Command, frozen=True):
    """Answer to all who asked for room for this stage."""

    stage: int
    answer: Reserved | ErrorInfo


class AnswerCommit(Command, frozen=True):
    """Answer to all who sent a Commit."""

    answer: Committed | ErrorInfo


class StopWriting(Command, frozen=True):
    """Ends transfers into the migration's blocks: `on_quiet` when nobody writes there any more, nor claims them."""


class Adopted(Command, frozen=True):
    """The request is this instance's from now on: its earlier output can be replayed, its gateway hears of the new owner,
    the next load report names it. Effects of its first step come after."""

    commit: Commit
    num_output: int


class Paused(Command, frozen=True):
    """A request that came has made its first step here."""

    pause_s: float
    handoff_s: float | None = None
    """Since the end of its prompt elsewhere, of one that was handed over."""


# -------------------------------------------------------------------- copies of KV at others, and of others' KV here
# Their `migration_id` is the backup's.


class AskBackup(Command, frozen=True):
    """A message with a reply, or none within `timeout_s`: `on_backup_rooms`."""

    destination_id: str
    message: BackUp
    timeout_s: float


class SendBackup(Command, frozen=True):
    """Sends blocks for which the holder's ticket stands: `on_backup_sent`, within `timeout_s` or a little more."""

    address: str
    ticket: bytes
    pool: str
    blocks: list[int]
    timeout_s: float
    is_urgent: bool = False
    """A request waits for them: they go as fast as they can."""


class AskPrefix(Command, frozen=True):
    """A message with a reply, or none within `timeout_s`: `on_answer`."""

    destination_id: str
    message: FetchPrefix
    timeout_s: float


class AnswerPrefix(Command, frozen=True):
    """To all who asked for this prefix."""

    answer: PrefixSent | ErrorInfo


class Fetched(Command, frozen=True):
    """A request need not wait for its prefix any more."""

    request_id: str
    outcome: str
    """fetched | held: all of it is here | refused | late | failed"""
    num_blocks: int
    """Blocks that have come."""


class BackedUp(Command, frozen=True):
    """A request has its first copies at another instance."""

    request: GenerationRequest
    """The request as it is held."""
    holder_id: str


class BackupOver(Command, frozen=True):
    """A transfer of copies out of here is over."""

    outcome: str
    """copied | refused | unreachable | failed"""
    num_blocks: int
    """Blocks that have a copy by it."""
    num_sent: int
    """Blocks of these that the holder did not have, and were sent."""
    num_bytes: int
    """Bytes of those."""


class AnswerBackup(Command, frozen=True):
    """To all who asked for room for this backup."""

    answer: BackupRooms | ErrorInfo


class ExpectBackup(Command, frozen=True):
    """Expects blocks of a copy, like `ExpectBlocks`: `on_backup_expected`, then `on_backup_in`."""

    pool: str
    blocks: list[int]
    deadline_s: float
    source_address: str


class Fault(Command, frozen=True):
    """A fault of the program, of which the migration was told as of any other failure."""

    error: Exception
