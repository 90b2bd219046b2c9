"""Why a transfer of KV blocks failed."""

from __future__ import annotations

from enum import StrEnum


class TransferReason(StrEnum):
    UNUSABLE = "unusable"
    """The transport cannot run in this process at all."""
    UNREACHABLE = "unreachable"
    """No connection to the peer's address."""
    TICKET_UNKNOWN = "ticket_unknown"
    TICKET_USED = "ticket_used"
    TICKET_EXPIRED = "ticket_expired"
    TICKET_OF_ANOTHER = "ticket_of_another"
    """It was made for another peer than the one that showed it."""
    MISMATCH = "mismatch"
    """The two ends disagree on the number of blocks or their size, or a block does not exist."""
    DEADLINE = "deadline"
    PEER_LOST = "peer_lost"
    """The connection broke during the transfer."""
    CORRUPTED = "corrupted"
    """A chunk's checksum or place is wrong, or the acknowledgement differs from what was sent."""
    CANCELLED = "cancelled"
    FAILED = "failed"
    """A copy between pool and staging failed at one of the ends."""
    CLOSED = "closed"
    """This transport is closed or not open yet."""


class TransferError(Exception):
    def __init__(self, reason: TransferReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason


class LinkError(ConnectionError):
    """A connection broke or could not be made."""
