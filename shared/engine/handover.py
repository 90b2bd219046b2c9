"""A request on its way to another instance, as the engines at both ends see it.

Source: a candidate is chosen; its filled blocks are pinned stage by stage while it goes on decoding; then it is detached
of the batch (`detach`, effect `Detached`), frozen, and in the end dropped (`release`) or reattached.
Destination: blocks are reserved stage by stage, filled by the transport, and become a sequence's own (`adopt`) or are freed.
"""

from __future__ import annotations

import msgspec

from shared.messages.migration import BackupRoom, SequenceProgress
from shared.messages.requests import GenerationRequest, HeldRequest, Priority, RequestClass

HASH_BYTES = 16
"""Bytes of a block's chained hash."""


class MigrationCandidate(msgspec.Struct, frozen=True):
    """A request that could leave, in the order in which they should."""

    request: HeldRequest
    request_class: RequestClass
    priority: Priority
    is_running: bool
    """In decode (or between chunks of its prefill), with KV on the device; else it waits."""
    num_blocks: int
    """KV blocks that would move: on the device, or checkpointed in host memory for one that waits."""
    tokens_left: int
    """Until its longest output."""
    num_moves: int = 0
    """Moves that it has made."""
    starts_s: float = -1.0
    """Predicted time until its prompt is begun here, of one that leaves for that; else below 0."""
    first_token_s: float = -1.0
    """Predicted time of its first token here, likewise."""


class PinnedBlocks(msgspec.Struct, frozen=True):
    """Blocks `first_block ..` of a sequence whose contents are final. Each block has one more reference, so that it stays as
    it is whatever becomes of the sequence, until `unpin`."""

    model: str
    on_host: bool
    first_block: int
    blocks: list[int]
    hashes: bytes
    """Chained, 16 bytes each; one for each block that is full."""


class Detached(msgspec.Struct, frozen=True):
    """Effect: the sequence has left the batch (after all its output so far went out as effects). It keeps its blocks."""

    request_id: str
    request: GenerationRequest
    """The request as it is to travel, in its old epoch: all output as `prior`, times re-based to `taken_s`."""
    progress: SequenceProgress
    taken_s: float
    here_since_s: float
    """Time at which this instance was given it."""


class PromptChunk(msgspec.Struct, frozen=True):
    """Effect: a step has computed a part of a prompt whose request is to be handed over. With the last part the request
    waits, and makes no token, until it is detached or its migration ends (`EndMigration`)."""

    request_id: str
    decoder: str
    """`GenerationRequest.decoder`."""


class Reservation(msgspec.Struct, frozen=True):
    """Blocks for one stage of a sequence that comes; those of `held` need not be sent."""

    migration_id: str
    num_held: int
    """Leading blocks of the stage that were found in the prefix cache."""
    blocks: list[int]
    """Blocks for the other tokens, in order."""


class BackupCandidate(msgspec.Struct, frozen=True):
    """A running request of which another instance may keep copies."""

    request_id: str
    epoch: int
    model: str
    num_tokens: int
    """Tokens known: prompt and output."""
    num_filled: int
    """Full blocks whose contents are final."""
    is_online: bool


class BackupReservation(msgspec.Struct, frozen=True):
    """Host blocks for copies of another instance's blocks."""

    rooms: tuple[BackupRoom, ...]
    blocks: list[int]
    """Blocks for those that are sent, part by part."""


def rebased(
    request: GenerationRequest, progress: SequenceProgress, passed_s: float
) -> tuple[GenerationRequest, SequenceProgress]:
    """Request and progress with the durations that they have `passed_s` later."""

    def age(seconds: float) -> float:
        return seconds + passed_s if seconds >= 0 else seconds

    return (
        msgspec.structs.replace(request, timeout_s=request.timeout_s - passed_s, waited_s=request.waited_s + passed_s),
        msgspec.structs.replace(
            progress,
            first_token_age_s=age(progress.first_token_age_s),
            first_planned_age_s=age(progress.first_planned_age_s),
            submitted_age_s=progress.submitted_age_s + passed_s,
            last_ran_age_s=progress.last_ran_age_s + passed_s,
            last_token_age_s=age(progress.last_token_age_s),
        ),
    )
