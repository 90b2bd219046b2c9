"""Requests that move between instances (docs/design/migration.md)."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from shared.messages.requests import (
    Adapter,
    Count,
    Epoch,
    GenerationRequest,
    Number,
    PeerId,
    Priority,
    RequestClass,
    Seconds,
)


class MigrationReason(StrEnum):
    BALANCE = "balance"
    """Frees memory that requests wait for or need soon."""
    PROMPTS = "prompts"
    """Takes a prompt that would be too late to where it is begun sooner."""
    DRAIN = "drain"
    HANDOFF = "handoff"
    """Its prompt is computed here, and it decodes elsewhere."""


class AbortReason(StrEnum):
    """Why a migration did not happen. The request goes on at the source, unless it ended there."""

    ENDED = "ended"
    """It finished, was cancelled or ran into its deadline."""
    PREEMPTED = "preempted"
    """It lost its KV at the source meanwhile."""
    REFUSED = "refused"
    """The destination has no room, is draining, does not serve the model, or takes enough already."""
    MISMATCH = "mismatch"
    """KV blocks of the two ends differ: block size, block bytes, tensor-parallel size."""
    TRANSFER_FAILED = "transfer_failed"
    DEADLINE = "deadline"
    UNREACHABLE = "unreachable"
    """The destination does not answer."""
    DESTINATION_LOST = "destination_lost"
    NOT_WORTH = "not_worth"
    """The transfer would cost more than it gains, or never catches up with the decode."""
    STOPPED = "stopped"
    """The source is shutting down, or its pairing was withdrawn."""


class Rebalance(msgspec.Struct, frozen=True, array_like=True):
    """Scheduler to source: give requests away, to the first of these that can take them. Repeated while it holds; it ends
    `lease_s` after the last one, or at once with no destinations."""

    destinations: list[PeerId]
    """Instance ids, freest first."""
    reason: MigrationReason
    lease_s: Seconds
    max_concurrent: Count = 1
    """Migrations out of the instance at once."""
    preferred: dict[str, PeerId] = {}
    """By request id: the instance that it is to try first, since that holds its prefix."""


class PreAllocate(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Source to destination: make room for the KV blocks of one stage, and expect them. Repeated with the same stage it is
    answered alike."""

    migration_id: str
    source_id: PeerId
    request_id: str
    model: str
    request_class: RequestClass
    priority: Priority
    stage: Count
    """Number of the stage, from 0; each stage's blocks follow those of the one before."""
    first_block: Count
    num_blocks: Count
    """Blocks `first_block .. first_block + num_blocks` of the sequence."""
    hashes: bytes
    """Chained hashes, 16 bytes each, of those of the blocks that are full."""
    block_size: Count
    block_bytes: Count
    """Bytes of a whole block, of which each rank of the source has a part. Blocks: services/worker/kv/kv_store.py."""
    on_host: bool = False
    """The blocks are a checkpoint in host memory and stay one."""
    max_tokens: Count = 0
    """Tokens of the sequence at its longest."""
    deadline_s: Seconds = 5.0
    """Time that the source gives the stage."""
    traceparent: str = ""
    reason: MigrationReason = MigrationReason.BALANCE
    arrives_s: Seconds = -1.0
    """Seconds after which the request may be handed over, at the earliest; below 0: unknown."""
    source_address: str = ""
    """Address of the source's KV transport: the ticket is good for that one only."""
    adapter: Adapter | None = None
    """The request's adapter: the destination has it before it takes the request."""


class Reserved(msgspec.Struct, frozen=True, array_like=True):
    """The destination's answer; a refusal is a typed error."""

    migration_id: str
    num_held: Count
    """Leading blocks of the stage that the destination has already: they are not sent."""
    address: str = ""
    """Address of its KV transport. Whoever knows it can dial there: it is told to sources only."""
    ticket: bytes = b""
    """Presented with the blocks by the source that asked; single use. Empty where nothing is to be sent."""
    busy_s: Seconds = 0.0
    """Seconds until the steps in flight there end, by the cost model, if one of them is long for a request that waits for
    it; else 0."""


class SequenceProgress(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What of a sequence's life travels with it. Durations are up to the moment at which it left its source's batch."""

    num_computed: Count = 0
    """Tokens whose KV moves with it; 0: it waits and brings none."""
    first_token_age_s: Seconds = -1.0
    """Since its first token; below 0: it has none yet."""
    first_total: Count = 0
    first_planned_age_s: Seconds = -1.0
    submitted_age_s: Seconds = 0.0
    """Since its arrival at the first instance of this placement."""
    device_s: Seconds = 0.0
    num_cached_tokens: Count = 0
    num_preemptions: Count = 0
    num_recomputed: Count = 0
    num_restored_blocks: Count = 0
    num_suspensions: Count = 0
    order_state: tuple[Number, ...] = ()
    """The ordering policy's, as it exports it."""
    num_migrations: Count = 0
    """This one included."""
    last_ran_age_s: Seconds = 0.0
    """Since the last step that computed it; its arrival before the first."""
    peak_computed: Count = 0
    """Tokens that had been computed when it was last preempted, if it has not run since."""
    last_token_age_s: Seconds = -1.0
    """Since its last token; below 0: it has none yet."""
    max_itl_s: Seconds = 0.0
    service_s: Seconds = 0.0
    """Service that counted for its tenant so far."""


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """Source to destination: the request is yours. The only hand-over of ownership."""

    migration_id: str
    source_id: PeerId
    request: GenerationRequest
    """In its new epoch, with all output so far as `prior`; times re-based to the sending."""
    progress: SequenceProgress
    num_blocks: Count = 0
    """All that were announced and sent; on the host where `on_host`."""
    on_host: bool = False
    starts_s: Seconds = -1.0
    """Predicted time until its prompt would be begun at the source: it is to be begun sooner here. Below 0: no matter."""
    first_token_s: Seconds = -1.0
    """Predicted time of its first token at the source: it is to have it sooner here. Below 0: `starts_s` counts."""


class Committed(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    epoch: Epoch


class AbortMigration(msgspec.Struct, frozen=True, array_like=True):
    """Source to destination: free what was reserved. If it is lost, the reservation ends by itself."""

    migration_id: str
    reason: AbortReason


class OwnsQuery(msgspec.Struct, frozen=True, array_like=True):
    """Source to destination after a Commit without an answer. A "no" is final: that migration's Commit will be refused if
    it still comes."""

    migration_id: str
    request_id: str
    epoch: Epoch


class OwnsReply(msgspec.Struct, frozen=True, array_like=True):
    owns: bool
    """It took the request over in that epoch (and may have ended it, or handed it on, since)."""


class BackupPart(msgspec.Struct, frozen=True, array_like=True):
    """Some full blocks of one request, of which another instance is to keep copies."""

    request_id: str
    first_block: Count
    """Those before it are kept there already, as far as the source knows."""
    hashes: bytes
    """Chained, 16 bytes of each block."""


class BackUp(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Source to holder: keep copies of these KV blocks in host memory, so that their requests go on there if the source
    dies. Answered with what of them is to be sent."""

    backup_id: str
    source_id: PeerId
    """Empty: for a prefix that the holder has asked for, and that is kept for nobody."""
    model: str
    parts: tuple[BackupPart, ...]
    block_size: Count
    block_bytes: Count
    """Bytes of a whole block."""
    deadline_s: Seconds
    """Time for the blocks to come after the answer."""
    source_address: str
    """Address of the source's KV transport."""


class BackupRoom(msgspec.Struct, frozen=True, array_like=True):
    """What the holder takes of a part: the first `num_taken` blocks, of which the first `num_held` need not be sent."""

    num_held: Count = 0
    num_taken: Count = 0
    is_unknown: bool = False
    """It does not have the blocks before these (any more): the source is to begin again with the first."""


class BackupRooms(msgspec.Struct, frozen=True, array_like=True):
    """The holder's answer: room for each part, in their order."""

    backup_id: str
    rooms: tuple[BackupRoom, ...]
    address: str = ""
    """Address of its KV transport; empty where nothing is to be sent, as is the ticket."""
    ticket: bytes = b""


class KeepBackups(msgspec.Struct, frozen=True, array_like=True):
    """Source to holder, every few seconds: of all that it keeps for the source, these requests are still wanted."""

    source_id: PeerId
    request_ids: tuple[str, ...]


class FetchPrefix(msgspec.Struct, frozen=True, array_like=True):
    """Requester to holder: send these cached blocks, as many of the first of them as are there. Answered when they have
    arrived; while that is under way the holder asks for room with `BackUp`."""

    fetch_id: str
    requester_id: PeerId
    model: str
    hashes: bytes
    """Chained, 16 bytes of each block; they follow each other."""
    block_size: Count


class PrefixSent(msgspec.Struct, frozen=True, array_like=True):
    fetch_id: str
    num_blocks: Count
